"""JSON answers and forced calls of a real engine with random weights, through the SDKs (about 30 s)."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

Running = Any  # the one in conftest.py
QUESTION: list[Any] = [{"role": "user", "content": "Where does the fox live?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"enum": ["forest", "river"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "sure": {"type": "boolean"},
    },
    "required": ["place", "count", "sure"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "find", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "rest"}},
]


def assert_fits(value: Any) -> None:
    assert set(value) == {"place", "count", "sure"}
    assert value["place"] in ("forest", "river") and 0 <= value["count"] <= 99 and isinstance(value["sure"], bool)


@pytest.fixture
def client(roomy: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema(client: openai.OpenAI, stream: bool) -> None:
    # field reports C10, C11
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    for seed in range(2):
        options: Any = {
            "model": "nonsense",
            "messages": QUESTION,
            "max_tokens": 200,
            "response_format": form,
            "seed": seed,
        }
        if stream:
            chunks = list(client.chat.completions.create(**options, stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            answer = client.chat.completions.create(**options)
            text, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
        assert reason == "stop"
        assert_fits(json.loads(text))


def test_a_json_schema_while_thinking(client: openai.OpenAI, roomy: Running) -> None:
    end = httpx.post(f"{roomy.url}/apply_template", json={"model": "nonsense", "messages": QUESTION}).json()["tokens"][
        -1
    ]
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    for seed in range(2):
        # random weights close their thoughts once in a blue moon: a bias helps, and does not break the answer
        answer: Any = client.chat.completions.create(
            model="nonsense", messages=QUESTION, max_tokens=300, response_format=form, seed=seed,
            reasoning_effort="low", logit_bias={str(end): 4},
        )  # fmt: skip
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens_details.reasoning_tokens
        assert_fits(json.loads(message.content))


def test_a_json_object(client: openai.OpenAI, roomy: Running) -> None:
    # random weights never close a string by themselves
    brace = httpx.post(f"{roomy.url}/tokenize", json={"prompt": "}"}).json()["tokens"][0]
    answer = client.chat.completions.create(
        model="nonsense", messages=QUESTION, max_tokens=100, response_format={"type": "json_object"},
        logit_bias={str(brace): 100},
    )  # fmt: skip
    assert json.loads(answer.choices[0].message.content or "") == {}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_a_forced_call(client: openai.OpenAI, choice: Any) -> None:
    # field report C12
    names = set()
    for seed in range(2):
        answer = client.chat.completions.create(
            model="nonsense", messages=QUESTION, max_tokens=700, tools=TOOLS, tool_choice=choice, seed=seed,
            parallel_tool_calls=False,
        )  # fmt: skip
        (call,) = answer.choices[0].message.tool_calls or ()
        assert answer.choices[0].finish_reason == "tool_calls" and call.type == "function"
        names.add(call.function.name)
        if call.function.name == "find":
            assert_fits(json.loads(call.function.arguments))
    assert choice == "required" or names == {"find"}


def test_a_forced_call_while_thinking(roomy: Running) -> None:
    end = httpx.post(f"{roomy.url}/apply_template", json={"model": "nonsense", "messages": QUESTION}).json()["tokens"][
        -1
    ]
    body = {
        "model": "nonsense", "messages": QUESTION, "max_tokens": 400, "tools": TOOLS, "tool_choice": "required",
        "thinking": {"type": "enabled"}, "logit_bias": {str(end): 4}, "seed": 1, "parallel_tool_calls": False,
    }  # fmt: skip
    choice = httpx.post(f"{roomy.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"]


def test_forced_calls_on_the_other_two_apis(client: openai.OpenAI, roomy: Running) -> None:
    flat: Any = [{"type": "function", "name": "find", "parameters": SCHEMA, "strict": True}]
    answer = client.responses.create(
        model="nonsense", input="Where?", max_output_tokens=700, tools=flat, tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    (item,) = answer.output
    assert item.type == "function_call" and answer.status == "completed"
    assert_fits(json.loads(item.arguments))
    message = anthropic.Anthropic(base_url=roomy.url, api_key="none", max_retries=0).messages.create(
        model="nonsense", messages=QUESTION, max_tokens=700, tools=[{"name": "find", "input_schema": SCHEMA}],
        tool_choice={"type": "tool", "name": "find", "disable_parallel_tool_use": True},
    )  # fmt: skip
    (block,) = message.content
    assert block.type == "tool_use" and message.stop_reason == "tool_use"
    assert_fits(block.input)


def test_a_schema_on_the_responses_api(client: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    answer = client.responses.create(model="nonsense", input="Where?", max_output_tokens=200, text=text)
    assert_fits(json.loads(answer.output_text))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/no"}}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"tools": [{"type": "function", "function": {"name": "t", "parameters": {"properties": 5}}}]}, "tools"),
    ],
)
def test_a_schema_that_cannot_be_enforced(roomy: Running, change: dict[str, Any], param: str) -> None:
    body = {"model": "nonsense", "messages": QUESTION, "max_tokens": 5} | change
    response = httpx.post(f"{roomy.url}/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("invalid_schema", param)


def test_a_prefix_cannot_be_constrained(roomy: Running) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "The", "prefix": True}]
    body = {"model": "nonsense", "messages": messages, "max_tokens": 5, "response_format": {"type": "json_object"}}
    assert httpx.post(f"{roomy.url}/v1/chat/completions", json=body).status_code == 400
