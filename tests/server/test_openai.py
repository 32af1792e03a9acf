"""The real OpenAI SDK against a running server (about 10 s)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

QUESTION: list[Any] = [{"role": "user", "content": "Where does the fox live?"}]
Running = Any  # the one in conftest.py


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_an_answer_in_one_piece(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="nonsense", messages=QUESTION, max_tokens=20, temperature=0)
    (choice,) = answer.choices
    assert choice.finish_reason == "length" and choice.message.role == "assistant" and choice.message.content
    assert choice.message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model == "nonsense" and answer.id.startswith("chatcmpl-")


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="nonsense", messages=QUESTION, max_tokens=20, temperature=0)
    stream = client.chat.completions.create(
        model="nonsense", messages=QUESTION, max_tokens=20, temperature=0, stream=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    # usage rides on the last chunk, so a client that takes choices[0] of each does not break
    assert chunks[-1].usage is not None and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    # field report C05: no phantom calls
    assert all(chunk.choices[0].delta.tool_calls is None for chunk in chunks)


def test_usage_in_a_chunk_of_its_own(client: openai.OpenAI) -> None:
    # field report C24
    stream = client.chat.completions.create(
        model="nonsense", messages=QUESTION, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    usage: Any = chunks[-1].usage.model_dump()
    assert usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_cache_hit_tokens"]
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(model="nonsense", messages=QUESTION, max_tokens=16, seed=seed)
        return answer.choices[0].message.content

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_the_models_own_length_is_the_default(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="nonsense", messages=QUESTION, temperature=0)
    assert answer.usage is not None and answer.usage.completion_tokens == 64


def test_stop_strings_end_the_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="nonsense", messages=QUESTION, max_tokens=30, temperature=0)
    text = whole.choices[0].message.content or ""
    stop = text[8:11]
    cut = client.chat.completions.create(model="nonsense", messages=QUESTION, max_tokens=30, temperature=0, stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage is not None and whole.usage is not None
    assert cut.usage.completion_tokens < whole.usage.completion_tokens


def test_thinking_goes_to_its_own_field(client: openai.OpenAI) -> None:
    # field reports C08, C09: the parser follows the request, and thoughts are counted
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({}, False),
    ]
    for extra, thinks in cases:
        answer: Any = client.chat.completions.create(
            model="nonsense", messages=QUESTION, max_tokens=8, temperature=0, extra_body=extra
        )
        message = answer.choices[0].message
        assert bool(getattr(message, "reasoning_content", "")) == thinks
        assert bool(message.content) != thinks and message.content is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == (8 if thinks else 0)


def test_models(client: openai.OpenAI) -> None:
    # field report G06
    (model,) = client.models.list().data
    assert model.id == "nonsense"
    shown: Any = client.models.retrieve("nonsense")
    assert shown.max_model_len == 1024 and shown.input_modalities == ["text"] and shown.max_output_tokens == 64
    with pytest.raises(openai.NotFoundError, match="nonsense"):
        client.models.retrieve("gpt-4")


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is 'nonsense'"):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="1024 tokens; the prompt has") as caught:
        client.chat.completions.create(model="nonsense", messages=QUESTION, max_tokens=5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")


def test_a_conversation_of_several_turns(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    for turn in ("Hello", "And then?", "Why?"):
        messages.append({"role": "user", "content": turn})
        answer = client.chat.completions.create(model="nonsense", messages=messages, max_tokens=8)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    assert len(messages) == 7


def test_many_at_once_wait_for_each_other(client: openai.OpenAI, server: Running) -> None:
    def ask(number: int) -> str:
        stream = client.chat.completions.create(
            model="nonsense",
            messages=[{"role": "user", "content": f"Question {number % 3}"}],
            max_tokens=6,
            temperature=0,
            stream=True,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(24)))
    assert all(answers[i] == answers[i % 3] for i in range(24)) and all(answers)
    assert (server.engine.metrics.running, server.engine.metrics.waiting) == (0, 0)
