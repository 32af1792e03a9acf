"""n, log-probabilities, penalties, stop tokens and plain completions over HTTP (about 10 s)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

Running = Any  # the one in conftest.py
QUESTION: list[Any] = [{"role": "user", "content": "Where does the fox live?"}]


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_n_answers_differ_and_repeat(client: openai.OpenAI) -> None:
    def ask(n: int) -> list[str | None]:
        answer = client.chat.completions.create(model="nonsense", messages=QUESTION, max_tokens=8, seed=3, n=n)
        assert [choice.index for choice in answer.choices] == list(range(n))
        assert answer.usage is not None and answer.usage.completion_tokens == 8 * n
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8 * n
        return [choice.message.content for choice in answer.choices]

    three = ask(3)
    assert len(set(three)) == 3
    assert ask(3) == three
    # the first is what one answer alone would be
    assert ask(1) == three[:1]


def test_n_answers_in_one_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="nonsense", messages=QUESTION, max_tokens=6, seed=3, n=2)
    texts, reasons = ["", ""], {}
    chunks = list(
        client.chat.completions.create(model="nonsense", messages=QUESTION, max_tokens=6, seed=3, n=2, stream=True)
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == {0: "length", 1: "length"}
    assert [chunk.usage for chunk in chunks if chunk.usage] == [whole.usage]


def test_logprobs_belong_to_the_tokens(client: openai.OpenAI) -> None:
    options: Any = {"model": "nonsense", "messages": QUESTION, "max_tokens": 6, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**options, top_logprobs=3)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 6
    for entry in logprobs.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        # greedy: the chosen one is the likeliest
        assert entry.token == entry.top_logprobs[0].token
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
    raw = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert raw.decode("utf-8", errors="replace").strip("\n") == (whole.choices[0].message.content or "").strip("\n")
    streamed = [
        entry.token
        for chunk in client.chat.completions.create(**options, stream=True)
        for choice in chunk.choices
        if choice.logprobs and choice.logprobs.content
        for entry in choice.logprobs.content
    ]
    assert streamed == [entry.token for entry in logprobs.content]
    plain = client.chat.completions.create(**options | {"logprobs": False})
    assert plain.choices[0].logprobs is None


def test_biases_and_stop_tokens(client: openai.OpenAI, server: Running) -> None:
    token = httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}).json()["tokens"][0]
    options: Any = {"model": "nonsense", "messages": QUESTION, "max_tokens": 5, "temperature": 0}
    forced = client.chat.completions.create(**options, logit_bias={str(token): 100})
    assert forced.choices[0].message.content == "aaaaa"
    stopped = client.chat.completions.create(
        **options, logit_bias={str(token): 100}, extra_body={"stop_token_ids": [token]}
    )
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("", "stop")
    varied = client.chat.completions.create(**options, logit_bias={str(token): 2}, frequency_penalty=2)
    assert varied.choices[0].message.content != forced.choices[0].message.content
    repeated: Any = {"logit_bias": {str(token): 5}, "extra_body": {"repetition_penalty": 10}}
    assert client.chat.completions.create(**options, **repeated).choices[0].message.content != "aaaaa"


def test_a_plain_completion(client: openai.OpenAI, server: Running) -> None:
    options: Any = {"model": "nonsense", "prompt": "The fox", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**options)
    (choice,) = whole.choices
    assert choice.finish_reason == "length" and choice.text
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)) == choice.text
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "The fox", "add_special_tokens": True}).json()["tokens"]
    assert client.completions.create(**options | {"prompt": ids}).choices[0].text == choice.text
    assert client.completions.create(**options, echo=True).choices[0].text == "The fox" + choice.text
    stop = choice.text[2:4]
    cut = client.completions.create(**options, stop=stop).choices[0]
    assert cut.text == choice.text[: choice.text.index(stop)] and cut.finish_reason == "stop"


def test_several_prompts_and_logprobs_at_once(client: openai.OpenAI) -> None:
    options: Any = {"model": "nonsense", "max_tokens": 4, "temperature": 0}
    both = client.completions.create(**options, prompt=["The fox", "A river"], n=2, logprobs=2)
    alone = [client.completions.create(**options, prompt=prompt) for prompt in ("The fox", "A river")]
    assert [choice.text for choice in both.choices] == [a.choices[0].text for a in alone for _ in range(2)]
    assert both.usage is not None
    assert both.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone if a.usage)
    logprobs = both.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == both.choices[0].text
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.top_logprobs is not None and all(len(top) <= 2 for top in logprobs.top_logprobs)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"stop": ""}, "stop"),
    ],
)
def test_a_completion_field_that_is_wrong_is_named(server: Running, change: dict[str, Any], param: str) -> None:
    body = {"model": "nonsense", "prompt": "Hi", "max_tokens": 2} | change
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_tokens_there_and_back(server: Running) -> None:
    text = "A fox — naïve 東京 <think>"
    asked = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()
    assert asked["count"] == len(asked["tokens"]) == len(asked["token_strs"]) and asked["max_model_len"] == 1024
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": asked["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "Hi"}]
    chat = httpx.post(f"{server.url}/tokenize", json={"messages": messages}).json()
    shown = httpx.post(f"{server.url}/apply_template", json={"model": "nonsense", "messages": messages}).json()
    assert shown["tokens"] == chat["tokens"] and shown["count"] == chat["count"]
    assert shown["prompt"] == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
    for route, body in (("tokenize", {}), ("tokenize", {"prompt": "a", "messages": messages}),
                        ("detokenize", {"tokens": [99999]}), ("detokenize", {})):  # fmt: skip
        assert httpx.post(f"{server.url}/{route}", json=body).status_code == 400


def test_metrics_count_what_happened(server: Running) -> None:
    def read(name: str) -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    names = ("ttft_seconds_count", "completion_tokens_total", "prefill_tokens_total", "request_queue_seconds_count")
    before = [read(name) for name in names]
    body = {"model": "nonsense", "prompt": [5] * 10, "max_tokens": 3}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    # ten rows of the encoder, ten of the decoder's tail: the window is longer
    assert [read(name) - was for name, was in zip(names, before, strict=True)] == [1, 3, 20, 1]
    assert read("resume_total") >= 1


def test_the_description_lists_every_route_of_answers(server: Running) -> None:
    described = httpx.get(f"{server.url}/openapi.json").json()
    assert described["openapi"].startswith("3.")
    assert {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"} <= set(described["paths"])
    assert json.dumps(described).count("#/components/schemas/Error") > 20
    assert httpx.get(f"{server.url}/version").json()["version"]
