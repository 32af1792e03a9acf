"""Plain HTTP: every error row that applies, hang-ups, silence, failures on the way, shutting down (about 20 s)."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cedar.engine.load import ModelFiles
from cedar.engine.request import Finished, Progress, Token
from cedar.server.schema import error_body

Running = Any  # the one in conftest.py
Scripted = Callable[..., tuple[Running, Any]]
CHAT = "/v1/chat/completions"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
GOOD: dict[str, Any] = {"model": "nonsense", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
END = Finished(reason="length", prompt_tokens=3, completion_tokens=2, decode_s=0.5)


def post(url: str, body: object, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **options.pop("headers", {})}
    return httpx.post(url + CHAT, content=content, headers=headers, timeout=30, **options)


def assert_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return str(error["message"])


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nope", b"\xff\xfe", b'{"a": NaN}', b'"text"', b"[]", b"null", b"5", b"[" * 100_000],
    ids=["empty", "open", "word", "bytes", "NaN", "string", "list", "null", "number", "deep"],
)
def test_a_body_that_is_no_object(server: Running, body: bytes) -> None:
    assert_error(post(server.url, body), 400, "invalid_json")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop_token_ids": [1] * 17}, "stop_token_ids"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {}}, "thinking.type"),
        ({"reasoning_effort": "off"}, "reasoning_effort"),
        ({"reasoning_effort": 101}, "reasoning_effort"),
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL] * 2}, "tools[1].function.name"),
        ({"tools": [TOOL | {"function": {"name": f"t{i}"}} for i in range(129)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)
def test_a_field_that_is_wrong_is_named(server: Running, change: dict[str, Any], param: str) -> None:
    message = assert_error(post(server.url, GOOD | change), 400, "invalid_value", param)
    assert param.split("[")[0].split(".")[0] in message


def test_a_missing_field_is_named(server: Running) -> None:
    for name in ("model", "messages"):
        body = {key: value for key, value in GOOD.items() if key != name}
        assert_error(post(server.url, body), 400, "invalid_value", name)


def test_messages_that_do_not_fit_together(server: Running) -> None:
    # field report C36
    result = {"role": "tool", "tool_call_id": "x", "content": "r"}
    assert_error(post(server.url, GOOD | {"messages": []}), 400, "invalid_messages", "messages")
    assert_error(post(server.url, GOOD | {"messages": [result]}), 400, "invalid_messages", "messages[0].tool_call_id")


def test_calls_and_results_that_do_not_pair(server: Running) -> None:
    # field report C36: a result without its call and an id used twice are named, a call without a result is let pass
    function = {"name": "look", "arguments": "{}"}
    calls = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}] * 2}
    user, after = {"role": "user", "content": "Hi"}, {"role": "user", "content": "And?"}
    assert_error(
        post(server.url, GOOD | {"messages": [user, calls]}), 400, "invalid_messages", "messages[1].tool_calls"
    )
    calls["tool_calls"] = calls["tool_calls"][:1]
    assert post(server.url, GOOD | {"messages": [user, calls, after]}).status_code == 200
    result = {"role": "tool", "tool_call_id": "b", "content": "r"}
    message = assert_error(
        post(server.url, GOOD | {"messages": [user, calls, result]}),
        400,
        "invalid_messages",
        "messages[2].tool_call_id",
    )
    assert "messages[2]" in message and "'b'" in message


IMAGES: list[Any] = [
    {"url": "data:image/png;base64,AAAA"},
    {"url": "data:image/png;base64,%%%"},
    {"url": "data:image/png;base64,"},
    {"url": "https://example.org/a.png", "detail": "high"},
    {"url": "http://127.0.0.1:1/a.png"},
    {"url": "file:///etc/passwd"},
    "data:image/gif;base64,AAAA",
]


@pytest.mark.parametrize("image", IMAGES, ids=["png", "broken", "empty", "remote", "private", "file", "text"])
def test_an_image_is_refused_by_every_api_and_never_fetched(server: Running, image: Any) -> None:
    # field reports C30, C31: this model cannot see, whatever the image is
    url = image if isinstance(image, str) else image["url"]
    text = {"type": "text", "text": "What is this?"}
    bodies: list[tuple[str, dict[str, Any], str | None]] = [
        (CHAT, {"messages": [{"role": "user", "content": [text, {"type": "image_url", "image_url": image}]}]},
         "messages[0].content[1]"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
         "input[0].content[0]"),
        ("/v1/messages",
         {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}]}, None),
        ("/apply_template", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": image}]}]},
         "messages[0].content[0]"),
    ]  # fmt: skip
    for path, body, param in bodies:
        response = httpx.post(server.url + path, json={"model": "nonsense", "max_tokens": 4, **body})
        assert response.status_code == 400 and "images are not enabled" in response.text, (path, response.text)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        if param is not None:
            assert (error["code"], error["param"]) == ("invalid_image", param)


def test_an_image_is_refused_by_name(server: Running) -> None:
    # field reports C30, C31
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    message = assert_error(
        post(server.url, GOOD | {"messages": messages}), 400, "invalid_image", "messages[0].content[1]"
    )
    assert "images are not enabled" in message


def test_an_unknown_model_gets_the_list(server: Running) -> None:
    # field report G06
    assert "'nonsense'" in assert_error(post(server.url, GOOD | {"model": "gpt"}), 404, "model_not_found", "model")


def test_a_context_that_is_too_small(server: Running) -> None:
    # field report C32: three numbers, at once
    long = GOOD | {"messages": [{"role": "user", "content": "0 " * 1200}]}
    began = time.monotonic()
    message = assert_error(post(server.url, long), 400, "context_length_exceeded", "messages")
    assert "1024 tokens" in message and "the prompt has 24" in message and "4 more" in message
    message = assert_error(post(server.url, GOOD | {"max_tokens": 5000}), 400, "context_length_exceeded", "max_tokens")
    assert "5000 more" in message and "lower max_tokens to" in message
    assert time.monotonic() - began < 2


def test_a_prompt_that_fills_the_context_but_one(server: Running, files: ModelFiles) -> None:
    shell = 1024 - 4 - len(files.tokenizer.encode(""))
    body = {"model": "nonsense", "messages": [{"role": "user", "content": "0" * (shell - 1)}], "temperature": 0}
    usage = post(server.url, body).json()["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] <= 1024
    assert usage["prompt_tokens"] == 1023 and usage["completion_tokens"] == 1


def test_routes_and_methods(server: Running) -> None:
    message = assert_error(httpx.get(f"{server.url}/v2/chat"), 404, "not_found")
    assert "GET /v2/chat" in message and "POST /v1/chat/completions" in message
    response = httpx.get(server.url + CHAT)
    assert "POST" in assert_error(response, 405, "method_not_allowed") and "POST" in response.headers["allow"]
    assert_error(httpx.delete(f"{server.url}/v1/models"), 405, "method_not_allowed")
    assert_error(httpx.get(f"{server.url}/v1/models/other"), 404, "model_not_found", "model")


def test_content_types(server: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert_error(post(server.url, GOOD, headers={"content-type": kind}), 415, "unsupported_media_type")
    assert post(server.url, GOOD, headers={"content-type": "Application/JSON; charset=utf-8"}).status_code == 200


@pytest.mark.parametrize("size", [200_001, 350_000, 3_000_000])
def test_a_body_that_is_too_large(server: Running, size: int) -> None:
    body = b'{"model": "' + b"x" * size + b'"}'
    if size > 400_000:
        # the server hangs up on what is far too large; the answer may or may not get through
        try:
            response = post(server.url, body)
        except httpx.HTTPError:
            return
    else:
        response = post(server.url, body)
    assert "200000 bytes" in assert_error(response, 413, "request_too_large")


@pytest.mark.parametrize(
    "head",
    [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 70_000 + b"\r\n\r\n"],
    ids=["words", "headers"],
)
def test_what_is_no_request_gets_an_error_of_the_same_shape(server: Running, head: bytes) -> None:
    with socket.create_connection(server.listener.getsockname()) as connection:
        connection.sendall(head)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    status, _, rest = answer.partition(b"\r\n")
    headers, _, body = rest.partition(b"\r\n\r\n")
    assert status == b"HTTP/1.1 400 Bad Request" and b"content-type: application/json" in headers
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_unknown_fields_are_told(server: Running) -> None:
    body = post(server.url, GOOD | {"reponse_format": 1, "logit_bias": {"5": 1}, "user": "me", "metadata": {}}).json()
    assert body["warnings"] == ["unknown field 'reponse_format' was ignored"]
    assert "warnings" not in post(server.url, GOOD | {"presence_penalty": 0, "logprobs": False}).json()
    streamed = post(server.url, GOOD | {"top_a": 1, "stream": True}).text
    assert "unknown field 'top_a' was ignored" in streamed.split("\n\n")[0]


def test_health_ready_models_page(server: Running) -> None:
    health = httpx.get(f"{server.url}/health").json()
    assert (health["status"], health["model"]) == ("ok", "nonsense") and health["version"]
    assert httpx.get(f"{server.url}/ready").json() == {"ready": True}
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["global_kv_bytes_per_token"] == 52.5
    page = httpx.get(server.url)
    assert page.headers["content-type"].startswith("text/html")
    # self-contained: nothing is fetched from elsewhere
    for mark in ("<script>", "light-dark(", "/v1/chat/completions", "viewport"):
        assert mark in page.text
    for mark in ("http://", "https://", '<link rel="stylesheet"', "src="):
        assert mark not in page.text.replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'" in page.headers["content-security-policy"]


def data(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def ids(files: ModelFiles, text: str) -> list[int]:
    return files.tokenizer.encode(text)


def test_an_exact_stream(scripted: Scripted, files: ModelFiles) -> None:
    server, engine = scripted([(0, Token(i)) for i in ids(files, "fox")] + [(0, END)])
    events = data(post(server.url, GOOD | {"stream": True}).text)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in events[1:-2]) == "fox"
    assert events[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert events[-2]["usage"]["completion_tokens"] == 2 and events[-2]["timings"]["decode_s"] == 0.5
    assert events[-1] == "[DONE]"
    request = engine.requests[0]
    special = files.tokenizer.special
    assert request.prompt_ids[0] == special["<｜begin▁of▁sentence｜>"]
    assert set(request.sampling.stop_token_ids) >= {special["<｜end▁of▁sentence｜>"], special["<｜User｜>"]}


def test_a_tool_call_streamed_and_not(scripted: Scripted, files: ModelFiles) -> None:
    dsml = files.tokenizer.special["｜DSML｜"]

    def said(*parts: str | int) -> list[tuple[float, Any]]:
        flat = [i for part in parts for i in ([part] if isinstance(part, int) else ids(files, part))]
        return [(0.0, Token(i)) for i in flat] + [(0.0, Finished(reason="stop", prompt_tokens=3, completion_tokens=9))]

    call = ("<", dsml, " calls>\n<", dsml, ' invoke name="look">\n<', dsml, ' parameter name="k" string="true">a fox</',
            dsml, " parameter>\n</", dsml, " invoke>\n</", dsml, " calls>")  # fmt: skip
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    server, engine = scripted(said("Well.\n\n", *call))
    body = post(server.url, GOOD | {"tools": tools}).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Well."
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "look", "arguments": '{"k": "a fox"}'} and made["id"].startswith("call_")
    deltas = [
        e["choices"][0]["delta"] for e in data(post(server.url, GOOD | {"tools": tools, "stream": True}).text)[:-1]
    ]
    pieces = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert pieces[0]["function"] == {"name": "look", "arguments": ""} and pieces[0]["type"] == "function"
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"k": "a fox"}'
    assert "look" in files.tokenizer.decode(engine.requests[0].prompt_ids)
    # tool_choice none leaves the tools out of the prompt
    post(server.url, GOOD | {"tools": tools, "tool_choice": "none"})
    assert "look" not in files.tokenizer.decode(engine.requests[-1].prompt_ids)


def test_a_broken_call_is_shown_as_text(scripted: Scripted, files: ModelFiles) -> None:
    dsml = files.tokenizer.special["｜DSML｜"]
    parts: list[str | int] = ["<", dsml, ' invoke name="look">\n<', dsml, ' parameter name="k" string="false">{bad</']
    flat = [i for part in parts for i in ([part] if isinstance(part, int) else ids(files, part))]
    server, _ = scripted([(0.0, Token(i)) for i in flat] + [(0.0, Finished(reason="stop", prompt_tokens=3))])
    body = post(server.url, GOOD).json()
    message = body["choices"][0]["message"]
    assert (
        "tool_calls" not in message and "look(" in message["content"] and body["choices"][0]["finish_reason"] == "stop"
    )
    assert "look" in body["tool_parse_error"]


def test_silence_is_filled_with_comments(scripted: Scripted, files: ModelFiles) -> None:
    script = [(0.15, Progress(1, 4)), (0.15, Progress(2, 4)), (0.3, Token(ids(files, "a")[0])), (0.25, END)]
    server, _ = scripted(script, ping_s=0.1)
    text = post(server.url, GOOD | {"stream": True}).text
    parts = text.split("\n\n")
    assert parts[0].startswith("data: ") and ": prefill 50.0%" in parts and ": ping" in parts
    assert data(text)[-1] == "[DONE]"


def test_the_role_comes_before_the_first_token(scripted: Scripted, files: ModelFiles) -> None:
    server, _ = scripted([(1.0, Token(5)), (0, END)])
    began = time.monotonic()
    with httpx.stream("POST", server.url + CHAT, json=GOOD | {"stream": True}) as response:
        first = next(response.iter_text())
        assert time.monotonic() - began < 0.8
        assert '"role":"assistant"' in first


def test_a_failure_before_any_text(scripted: Scripted) -> None:
    # field report C29
    server, _ = scripted([(0, Finished(reason="error", prompt_tokens=3, error="secret path /x/y"))])
    message = assert_error(post(server.url, GOOD), 500, "internal_error")
    assert "secret" not in message
    events = data(post(server.url, GOOD | {"stream": True}).text)
    assert events[-1]["error"]["code"] == "internal_error" and "secret" not in events[-1]["error"]["message"]


def test_a_failure_in_the_middle_of_a_stream(scripted: Scripted, files: ModelFiles) -> None:
    script = [(0, Token(i)) for i in ids(files, "fox")] + [(0, Finished(reason="error", prompt_tokens=3, error="x"))]
    server, _ = scripted(script)
    events = data(post(server.url, GOOD | {"stream": True}).text)
    assert "error" in events[-1] and "[DONE]" not in events


def _open(server: Running, body: dict[str, Any]) -> socket.socket:
    content = json.dumps(body).encode()
    host, port = server.listener.getsockname()
    connection = socket.create_connection((host, port))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    connection.sendall(f"{head}\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "body"])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_a_hang_up_cancels_within_100_ms(scripted: Scripted, phase: str, stream: bool) -> None:
    # field report C28: streaming or not, a clean close counts, and so does a rude one
    event: Any = {"queue": Progress(0, 9), "prefill": Progress(1, 9), "decode": Token(5)}[phase]
    server, engine = scripted([(30 if phase == "queue" else 0.01, event)] * 2000)
    took_s = []
    for attempt in range(5):
        connection = _open(server, GOOD | {"stream": stream})
        while len(engine.requests) == attempt:
            time.sleep(0.005)
        time.sleep(0.05)
        assert not engine.cancelled.is_set()
        began = time.monotonic()
        if attempt % 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        assert engine.cancelled.wait(2)
        took_s.append(time.monotonic() - began)
    print(f"{phase}: {1000 * statistics.median(took_s):.1f} ms, at most {1000 * max(took_s):.1f}")
    # one of five may meet a busy machine
    assert sorted(took_s)[3] < 0.1


def test_a_hang_up_frees_the_real_engine(server: Running, files: ModelFiles) -> None:
    before = server.engine.metrics.finished.get("cancelled", 0)
    # it must not end by itself first
    silent = {str(token_id): -100 for token_id in files.tokenizer.special.values()}
    endless = {"max_tokens": 900, "stream": True, "temperature": 0.5, "logit_bias": silent}
    connection = _open(server, GOOD | endless)
    assert b"200 OK" in connection.recv(1000)
    connection.close()
    deadline = time.monotonic() + 3
    while server.engine.metrics.finished.get("cancelled", 0) == before or server.engine.metrics.running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert post(server.url, GOOD).status_code == 200


def test_a_stop_string_lets_the_engine_go(scripted: Scripted, files: ModelFiles) -> None:
    said = ids(files, "a fox END and more and more")
    server, engine = scripted([(0.01, Token(i)) for i in said * 20] + [(0, END)])
    body = post(server.url, GOOD | {"stop": "END"}).json()
    assert body["choices"][0]["message"]["content"] == "a fox "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(ids(files, "a fox END"))
    assert engine.cancelled.is_set()


def test_requests_wait_for_the_weights(files: ModelFiles, scripted: Scripted) -> None:
    server, engine = scripted([(0, Token(5)), (0, END)])
    server.call(lambda: (setattr(server.service, "engine", None), server.service._changed.clear()))
    time.sleep(0.05)
    assert httpx.get(f"{server.url}/health").json()["status"] == "loading"
    assert httpx.get(f"{server.url}/ready").status_code == 503
    # what is wrong is told at once all the same
    assert_error(post(server.url, GOOD | {"model": "x"}), 404, "model_not_found", "model")
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(post(server.url, GOOD)))
    waiting.start()
    time.sleep(0.2)
    assert not answers and not engine.requests
    server.call(lambda: server.service.ready(engine))
    waiting.join(5)
    assert answers[0].status_code == 200


def test_a_stop_ends_open_streams_and_refuses_new_ones(scripted: Scripted) -> None:
    server, engine = scripted([(0.05, Token(5))] * 200)
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(post(server.url, GOOD | {"stream": True}).text))
    reader.start()
    while not engine.requests:
        time.sleep(0.005)
    time.sleep(0.2)
    began = time.monotonic()
    server.call(server.service.stop)
    reader.join(5)
    assert time.monotonic() - began < 1
    assert data(texts[0])[-1]["error"]["code"] == "overloaded"
    response = post(server.url, GOOD)
    assert_error(response, 503, "overloaded")
    assert response.headers["retry-after"] == "1"


def test_a_bug_shows_no_trace(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    server, engine = scripted([])
    monkeypatch.setattr(engine, "submit", lambda *_, **__: 1 / 0)
    response = post(server.url, GOOD)
    message = assert_error(response, 500, "internal_error")
    assert response.headers["x-request-id"] in message and "Zero" not in response.text


def test_the_event_loop_stays_free_while_the_model_computes(
    server: Running, machine_lag: Callable[[float], float]
) -> None:
    lags: list[float] = []

    async def watch() -> None:
        while not done.is_set():
            began = time.monotonic()
            await asyncio.sleep(0.005)
            lags.append(time.monotonic() - began - 0.005)

    done = threading.Event()
    task = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    post(server.url, GOOD | {"max_tokens": 30, "messages": [{"role": "user", "content": "fox " * 200}]})
    done.set()
    task.result(5)
    lags.sort()
    # on a busy machine everybody comes late
    assert lags[int(len(lags) * 0.99)] < 0.05 + machine_lag(0.99)


def test_error_types_follow_the_status() -> None:
    kinds = {status: error_body("m", status=status, code="c")["error"]["type"] for status in (400, 401, 403, 429, 503)}
    assert kinds == {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        429: "rate_limit_error",
        503: "server_error",
    }
