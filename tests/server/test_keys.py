"""Keys, limits, drain, deadlines, cancel, strict mode (about 10 s)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cedar.config.serve import ServeConfig
from cedar.engine.request import Finished, Token
from cedar.errors import ConfigError
from cedar.server.auth import Key, _Entry, find_key, load_keys, new_key
from cedar.server.run import listen

Running = Any
Scripted = Callable[..., tuple[Running, Any]]
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
GOOD: dict[str, Any] = {"model": "nonsense", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
END = Finished(reason="stop", prompt_tokens=5, completion_tokens=2)
SAYS_A: list[tuple[float, Any]] = [(0, Token(5)), (0, END)]


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A file of keys, and the secrets by name."""
    extras = {
        "plain": "",
        "admin": "admin = true\n",
        "slow": "requests_per_minute = 2\n",
        "single": "concurrency = 1\n",
        "frugal": "tokens_per_minute = 7\n",
        "narrow": 'routes = ["/v1/models"]\n',
    }
    secrets, text = {}, ""
    for name, extra in extras.items():
        secrets[name], table = new_key(name)
        text += table + extra
    file = tmp_path / "keys.toml"
    file.write_text(text)
    return file, secrets


def ask(
    running: Running, secret: str = "", *, path: str = CHAT, body: Any = GOOD, header: str = "bearer"
) -> httpx.Response:
    headers = {}
    if secret:
        headers = {"x-api-key": secret} if header == "x-api-key" else {"authorization": f"Bearer {secret}"}
    return httpx.post(running.url + path, json=body, headers=headers, timeout=20)


def assert_errors(response: httpx.Response, status: int, code: str, kind: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    body = response.json()
    if "request_id" in body:
        assert body["type"] == "error" and body["error"]["type"] == kind
    else:
        assert (body["error"]["code"], body["error"]["type"]) == (code, kind)


def test_a_request_needs_a_key_that_exists(scripted: Scripted, keys: tuple[Path, dict[str, str]]) -> None:
    file, secrets = keys
    running, engine = scripted(SAYS_A, api_key_file=file)
    assert ask(running, secrets["plain"]).status_code == 200
    assert ask(running, secrets["plain"], header="x-api-key").status_code == 200
    for wrong in ("", "ck-nonsense", secrets["plain"][:-1], secrets["plain"] + "x"):
        assert_errors(ask(running, wrong), 401, "invalid_api_key", "authentication_error")
        assert_errors(ask(running, wrong, path=MESSAGES), 401, "", "authentication_error")
    assert len(engine.requests) == 2
    # a probe has no key, and a wrong path tells nothing without one
    assert httpx.get(f"{running.url}/health").status_code == 200
    assert httpx.get(f"{running.url}/nowhere").status_code == 401
    # nothing in the file gives a key away
    assert not any(secret in file.read_text() for secret in secrets.values())


def test_what_a_key_may_not_use(scripted: Scripted, keys: tuple[Path, dict[str, str]]) -> None:
    file, secrets = keys
    running, _ = scripted(SAYS_A, api_key_file=file)
    assert_errors(ask(running, secrets["narrow"]), 403, "forbidden", "permission_error")
    assert_errors(ask(running, secrets["narrow"], path=MESSAGES), 403, "", "permission_error")
    bearer = {"authorization": f"Bearer {secrets['narrow']}"}
    assert httpx.get(f"{running.url}/v1/models", headers=bearer).status_code == 200
    for name, status in (("plain", 403), ("admin", 200)):
        headers = {"authorization": f"Bearer {secrets[name]}"}
        assert httpx.get(f"{running.url}/metrics", headers=headers).status_code == status


def test_a_rate_is_kept_and_told(scripted: Scripted, keys: tuple[Path, dict[str, str]]) -> None:
    file, secrets = keys
    running, _ = scripted(SAYS_A, api_key_file=file)
    assert [ask(running, secrets["slow"]).status_code for _ in range(2)] == [200, 200]
    third = ask(running, secrets["slow"])
    assert_errors(third, 429, "rate_limit_exceeded", "rate_limit_error")
    assert 1 <= int(third.headers["retry-after"]) <= 60
    assert_errors(ask(running, secrets["slow"], path=MESSAGES), 429, "", "rate_limit_error")
    # another key is not concerned
    assert ask(running, secrets["plain"]).status_code == 200
    # an answer costs 5 + 2 tokens
    assert ask(running, secrets["frugal"]).status_code == 200
    assert_errors(ask(running, secrets["frugal"]), 429, "rate_limit_exceeded", "rate_limit_error")


def test_one_at_a_time_means_one(scripted: Scripted, keys: tuple[Path, dict[str, str]]) -> None:
    file, secrets = keys
    running, engine = scripted([(0.6, Token(5)), (0, END)], api_key_file=file)
    first = threading.Thread(target=lambda: ask(running, secrets["single"]))
    first.start()
    while not engine.requests:
        time.sleep(0.005)
    assert_errors(ask(running, secrets["single"]), 429, "rate_limit_exceeded", "rate_limit_error")
    first.join()
    assert ask(running, secrets["single"]).status_code == 200


def test_old_requests_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("cedar.server.auth.time.monotonic", lambda: now)
    key = Key(_Entry(name="k", sha256="", requests_per_minute=1, tokens_per_minute=10))
    key.enter("/")
    key.spend(50)
    key.leave()
    for later, allowed in ((59.0, False), (60.0, True)):
        now = 1000.0 + later
        if allowed:
            key.enter("/")
        else:
            with pytest.raises(Exception, match="again later") as caught:
                key.enter("/")
            assert getattr(caught.value, "retry_after_s", 0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "text",
    ["", "[[key]]\nname = 'a'\n", "[[key]]\nname = 'a'\nsha256 = 'short'\n", "nonsense", "key = []",
     "[[key]]\nname = 'a'\nsha256 = ':" + "0" * 64 + "'\nlimit = 4\n"],
)  # fmt: skip
def test_a_file_of_keys_that_is_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        load_keys(file)
    with pytest.raises(ConfigError, match="cedar key NAME"):
        load_keys(tmp_path / "none.toml")


def test_two_keys_of_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(new_key("a")[1] + new_key("a")[1])
    with pytest.raises(ConfigError, match="a name of its own"):
        load_keys(file)


def test_keys_are_found_by_either_header(keys: tuple[Path, dict[str, str]]) -> None:
    file, secrets = keys
    loaded = load_keys(file)
    for headers in (
        {b"authorization": f"bearer {secrets['admin']}".encode()},
        {b"x-api-key": secrets["admin"].encode()},
    ):
        assert find_key(loaded, headers).name == "admin"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "some-name.invalid"])
def test_beyond_this_machine_nobody_asks_without_a_key(host: str, keys: tuple[Path, dict[str, str]]) -> None:
    with pytest.raises(ConfigError, match=r"--api-key-file .* --open"):
        listen(ServeConfig(host=host, port=0))


def test_where_a_server_may_listen(keys: tuple[Path, dict[str, str]]) -> None:
    for config in (
        ServeConfig(port=0),
        ServeConfig(host="localhost", port=0),
        ServeConfig(host="127.0.0.2", port=0),
        ServeConfig(host="0.0.0.0", port=0, open_to_all=True),
        ServeConfig(host="0.0.0.0", port=0, api_key_file=keys[0]),
    ):
        listen(config).close()


def test_a_deadline_before_the_first_token(scripted: Scripted) -> None:
    running, engine = scripted([(5, Token(5)), (0, END)])
    began = time.monotonic()
    response = ask(running, body=GOOD | {"timeout_s": 0.2})
    assert time.monotonic() - began < 2
    assert_errors(response, 504, "timeout", "server_error")
    assert engine.cancelled.wait(1)
    streamed = ask(running, body=GOOD | {"timeout_s": 0.2, "stream": True}).text
    assert '"code":"timeout"' in streamed and "[DONE]" not in streamed


def test_a_deadline_is_met_by_the_first_token(scripted: Scripted) -> None:
    running, _ = scripted([(0, Token(5)), (0.5, Token(5)), (0, END)])
    assert ask(running, body=GOOD | {"timeout_s": 0.2}).status_code == 200


def test_cancel_by_id(scripted: Scripted) -> None:
    running, engine = scripted([(0.02, Token(5))] * 500)
    with httpx.stream("POST", running.url + CHAT, json=GOOD | {"stream": True}) as response:
        request_id = response.headers["x-request-id"]
        cancelled = httpx.post(f"{running.url}/v1/requests/chatcmpl-{request_id}/cancel")
        assert cancelled.json() == {"id": request_id, "cancelled": True}
        text = "".join(response.iter_text())
    assert '"code":"cancelled"' in text and engine.cancelled.is_set()
    assert_errors(
        httpx.post(f"{running.url}/v1/requests/{request_id}/cancel"), 404, "not_found", "invalid_request_error"
    )


def test_nobody_cancels_for_another(scripted: Scripted, keys: tuple[Path, dict[str, str]]) -> None:
    file, secrets = keys
    running, _ = scripted([(0.02, Token(5))] * 500, api_key_file=file)

    def bearer(name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {secrets[name]}"}

    with httpx.stream("POST", running.url + CHAT, json=GOOD | {"stream": True}, headers=bearer("plain")) as response:
        route = f"{running.url}/v1/requests/{response.headers['x-request-id']}/cancel"
        assert httpx.post(route, headers=bearer("slow")).status_code == 404
        assert httpx.post(route, headers=bearer("admin")).status_code == 200


def test_strict_mode_refuses_what_it_does_not_know(scripted: Scripted) -> None:
    running, _ = scripted(SAYS_A, strict=True)
    response = ask(running, body=GOOD | {"reponse_format": 1})
    assert_errors(response, 400, "unknown_field", "invalid_request_error")
    assert response.json()["error"]["param"] == "reponse_format"
    assert_errors(ask(running, path=MESSAGES, body=GOOD | {"mystery": 1}), 400, "", "invalid_request_error")
    assert ask(running, body=GOOD | {"user": "me", "metadata": {}}).status_code == 200


def test_aliases(scripted: Scripted) -> None:
    running, _ = scripted(SAYS_A, aliases=("gpt-4o", "small"))
    assert ask(running, body=GOOD | {"model": "small"}).json()["model"] == "nonsense"
    response = ask(running, body=GOOD | {"model": "large"})
    assert_errors(response, 404, "model_not_found", "invalid_request_error")
    assert "gpt-4o" in response.text
    assert httpx.get(f"{running.url}/v1/models").json()["data"][0]["aliases"] == ["gpt-4o", "small"]
    anything, _ = scripted(SAYS_A, aliases=("*",))
    assert ask(anything, body=GOOD | {"model": "claude-4"}).status_code == 200


def test_a_full_queue_says_when_to_come_back(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    from cedar.errors import RequestError

    running, engine = scripted(SAYS_A)

    def full(*_: Any, **__: Any) -> None:
        raise RequestError("8 requests are waiting already; try again later", code="overloaded", status=503)

    monkeypatch.setattr(engine, "submit", full)
    response = ask(running)
    assert_errors(response, 503, "overloaded", "server_error")
    assert response.headers["retry-after"] == "1"
    assert_errors(ask(running, path=MESSAGES), 503, "", "overloaded_error")


def test_a_drain_lets_open_answers_end(scripted: Scripted) -> None:
    running, engine = scripted([(0.05, Token(5))] * 10 + [(0, END)])
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(ask(running, body=GOOD | {"stream": True}).text))
    reader.start()
    while not engine.requests:
        time.sleep(0.005)
    running.call(running.service.drain)
    time.sleep(0.05)
    refused = ask(running)
    assert_errors(refused, 503, "overloaded", "server_error")
    assert refused.headers["retry-after"] == "1"
    assert httpx.get(f"{running.url}/ready").status_code == 503
    reader.join(5)
    assert texts[0].rstrip().endswith("[DONE]")
    # the last bytes leave before the answer is taken off the list
    give_up = time.monotonic() + 5
    while running.service.open and time.monotonic() < give_up:
        time.sleep(0.005)
    assert not running.service.open


ANTHROPIC_ROWS: list[tuple[str, Any, int, str]] = [
    ("invalid JSON", b"{", 400, "invalid_request_error"),
    ("no object", b"[]", 400, "invalid_request_error"),
    ("missing field", {"model": "nonsense", "messages": []}, 400, "invalid_request_error"),
    ("wrong type", GOOD | {"max_tokens": "x"}, 400, "invalid_request_error"),
    ("no messages", GOOD | {"messages": []}, 400, "invalid_request_error"),
    ("context", GOOD | {"max_tokens": 10**6}, 400, "invalid_request_error"),
    ("schema", GOOD | {"tools": [{"name": "t", "input_schema": 5}]}, 400, "invalid_request_error"),
    ("server tool", GOOD | {"tools": [{"type": "web_search", "name": "t"}]}, 400, "invalid_request_error"),
    ("tool choice", GOOD | {"tool_choice": {"type": "never"}}, 400, "invalid_request_error"),
    ("thinking", GOOD | {"thinking": {"type": "maybe"}}, 400, "invalid_request_error"),
    ("model", GOOD | {"model": "claude"}, 404, "not_found_error"),
]


@pytest.mark.parametrize(
    ("body", "status", "kind"), [row[1:] for row in ANTHROPIC_ROWS], ids=[r[0] for r in ANTHROPIC_ROWS]
)
def test_anthropics_shape_of_every_refusal(server: Running, body: Any, status: int, kind: str) -> None:
    options: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = httpx.post(server.url + MESSAGES, headers={"content-type": "application/json"}, **options)
    assert_errors(response, status, "", kind)
    assert response.json()["request_id"] == response.headers["request-id"]


def test_anthropics_shape_before_any_route(server: Running) -> None:
    assert_errors(httpx.get(server.url + MESSAGES), 405, "", "invalid_request_error")
    assert_errors(httpx.get(f"{server.url}/anthropic/v2"), 404, "", "not_found_error")
    large = httpx.post(
        server.url + MESSAGES, content=b'{"a":"' + b"x" * 250_000 + b'"}', headers={"content-type": "application/json"}
    )
    assert_errors(large, 413, "", "request_too_large")
    kind = httpx.post(server.url + MESSAGES, content=b"a=b", headers={"content-type": "text/plain"})
    assert_errors(kind, 415, "", "invalid_request_error")


def test_anthropics_shape_of_a_bug_and_of_an_error_in_a_stream(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, engine = scripted([(0, Token(5)), (0, Finished(reason="error", prompt_tokens=3, error="secret"))])
    assert_errors(ask(running, path=MESSAGES), 500, "", "api_error")
    text = ask(running, path=MESSAGES, body=GOOD | {"stream": True}).text
    last = text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n") and "api_error" in last and "secret" not in text
    monkeypatch.setattr(engine, "submit", lambda *_, **__: 1 / 0)
    assert_errors(ask(running, path=MESSAGES), 500, "", "api_error")
