"""Scripted conversations of real clients, with an actor as the model: OpenAI's and Anthropic's SDKs (about 15 s)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from cedar.engine.load import ModelFiles

Acted = Callable[..., tuple[Any, Any]]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
OPENAI_TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
ANTHROPIC_TOOLS: list[Any] = [{"name": "weather", "input_schema": WEATHER}]
RESPONSES_TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}]


def call(city: str, days: int | None = None) -> str:
    more = "" if days is None else f'<｜DSML｜ parameter name="days" string="false">{days}</｜DSML｜ parameter>\n'
    return (
        '<｜DSML｜ invoke name="weather">\n'
        f'<｜DSML｜ parameter name="city" string="true">{city}</｜DSML｜ parameter>\n{more}</｜DSML｜ invoke>\n'
    )


def block(*calls: str) -> str:
    return f"\n\n<｜DSML｜ calls>\n{''.join(calls)}</｜DSML｜ calls>"


TWO_CALLS = f"Two cities.</think>I look.{block(call('Paris', 2), call('São “Q”'))}"
CITIES = [{"city": "Paris", "days": 2}, {"city": "São “Q”"}]
LAST = "Both known.</think>It is sunny — 18°."


def openai_client(running: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def anthropic_client(running: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tools_over_two_turns(acted: Acted, stream: bool) -> None:
    running, actor = acted(TWO_CALLS, LAST)
    client = openai_client(running)
    messages: list[Any] = [{"role": "user", "content": "Weather in Paris and São?"}]
    options: Any = {"model": "nonsense", "tools": OPENAI_TOOLS, "reasoning_effort": "high", "max_tokens": 500}
    if stream:
        # the SDK's own accumulator puts the pieces together
        with client.chat.completions.stream(messages=messages, **options) as events:
            for _ in events:
                pass
            message: Any = events.get_final_completion().choices[0].message
        reason = events.get_final_completion().choices[0].finish_reason
    else:
        answer = client.chat.completions.create(messages=messages, **options)
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
    assert reason == "tool_calls" and message.content == "I look."
    assert message.reasoning_content == "Two cities."
    assert [json.loads(made.function.arguments) for made in message.tool_calls] == CITIES
    assert len({made.id for made in message.tool_calls}) == 2
    turn = message.model_dump(exclude_none=True, exclude={"parsed", "refusal"})
    messages.append(turn)
    # answered in the other order: matched by id
    for made in reversed(message.tool_calls):
        messages.append({"role": "tool", "tool_call_id": made.id, "content": f"sun in {made.function.arguments}"})
    answer = client.chat.completions.create(messages=messages, **options)
    assert answer.choices[0].message.content == "It is sunny — 18°."
    prompt = actor.prompt()
    assert "<think>Two cities.</think>I look.\n\n<｜DSML｜ calls>" in prompt
    assert (
        prompt.index("Paris</｜DSML｜")
        < prompt.index('sun in {"city": "Paris"')
        < prompt.index("sun in", prompt.index("sun in") + 5)
    )
    assert prompt.endswith("</tool_result><｜Assistant｜><think>")


def test_openai_history_without_its_reasoning(acted: Acted) -> None:
    # field reports C14, C15: dropped, blank or present, all are accepted
    running, actor = acted("x")
    prompts = []
    for extra in (
        {},
        {"reasoning_content": None},
        {"reasoning_content": " "},
        {"reasoning": "R"},
        {"reasoning_content": "R"},
    ):
        made = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        messages = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [made], **extra},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        ]
        body = {"model": "nonsense", "messages": messages, "tools": OPENAI_TOOLS, "thinking": {"type": "enabled"}}
        assert httpx.post(f"{running.url}/v1/chat/completions", json=body).status_code == 200
        prompts.append(actor.prompt())
    assert prompts[0] == prompts[1] == prompts[2] and prompts[3] == prompts[4]
    assert prompts[0] == prompts[3].replace("<think>R</think>", "<think></think>")


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_tools_over_two_turns(acted: Acted, stream: bool) -> None:
    running, actor = acted(TWO_CALLS, LAST)
    client = anthropic_client(running)
    messages: list[Any] = [{"role": "user", "content": "Weather in Paris and São?"}]
    options: Any = {
        "model": "nonsense", "max_tokens": 500, "tools": ANTHROPIC_TOOLS, "system": "Be brief.",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip
    if stream:
        with client.messages.stream(messages=messages, **options) as events:
            for _ in events:
                pass
            message = events.get_final_message()
    else:
        message = client.messages.create(messages=messages, **options)
    assert message.stop_reason == "tool_use"
    assert [piece.type for piece in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, *calls = message.content
    assert thinking.type == "thinking" and thinking.thinking == "Two cities."
    assert text.type == "text" and text.text == "I look."
    assert [made.input for made in calls if made.type == "tool_use"] == CITIES
    assert message.usage.cache_read_input_tokens == 0 and message.usage.cache_creation_input_tokens == 0
    assert message.usage.input_tokens == len(actor.requests[0].prompt_ids) and message.usage.output_tokens > 10
    messages.append({"role": "assistant", "content": [piece.model_dump() for piece in message.content]})
    results = [
        {"type": "tool_result", "tool_use_id": made.id, "content": f"sun {made.id}"}
        for made in calls
        if made.type == "tool_use"
    ]
    # field report C19: in one message or in two, the prompt is the same
    prompts = []
    for turns in ([results], [[results[0]], [results[1]]], [results[::-1]]):
        sent = messages + [{"role": "user", "content": turn} for turn in turns]
        final = client.messages.create(messages=sent, **options)
        assert final.stop_reason == "end_turn"
        assert [piece.type for piece in final.content] == ["thinking", "text"]
        prompts.append(actor.prompt())
    assert prompts[0] == prompts[1] == prompts[2]
    assert "<think>Two cities.</think>I look.\n\n<｜DSML｜ calls>" in prompts[0]
    shape = {name: options[name] for name in ("model", "tools", "system", "thinking")}
    count = client.messages.count_tokens(messages=[*messages, {"role": "user", "content": results}], **shape)
    assert count.input_tokens == len(actor.requests[-1].prompt_ids)


def events_of(text: str) -> list[tuple[str, Any]]:
    found = []
    for part in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in part.split("\n") if ": " in line and not line.startswith(":"))
        if "data" in lines:
            found.append((lines.get("event", ""), json.loads(lines["data"])))
    return found


def test_anthropic_events_in_their_order(acted: Acted) -> None:
    # field report C34: one block a span
    running, _ = acted(TWO_CALLS)
    body = {
        "model": "nonsense", "max_tokens": 500, "stream": True, "tools": ANTHROPIC_TOOLS,
        "messages": [{"role": "user", "content": "Weather?"}], "thinking": {"type": "adaptive"},
    }  # fmt: skip
    events = events_of(httpx.post(f"{running.url}/v1/messages", json=body).text)
    assert all(name == event["type"] for name, event in events)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "ping"] and names[-2:] == ["message_delta", "message_stop"]
    starts = [
        (event["index"], event["content_block"]["type"]) for name, event in events if name == "content_block_start"
    ]
    assert starts == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")]
    assert names.count("content_block_stop") == 4
    open_block = None
    for name, event in events:
        if name == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        elif name == "content_block_delta":
            assert event["index"] == open_block
        elif name == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    partition = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(events[-2][1]["usage"][name] for name in partition) == sum(
        events[0][1]["message"]["usage"][name] for name in partition
    )


def test_anthropic_stops_and_system_turns(acted: Acted) -> None:
    running, actor = acted("a fox END and more")
    client = anthropic_client(running)
    turns: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "system", "content": "Now be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Go."}]},
    ]
    system: Any = [{"type": "text", "text": "x-anthropic-billing-header: 123\nBe kind."}]
    message = client.messages.create(
        model="nonsense", max_tokens=50, messages=turns, system=system, stop_sequences=["END"]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert message.content[0].type == "text" and message.content[0].text == "a fox "
    # field report C20: rendered in place; and the client's number is not in the prompt
    assert "<｜end▁of▁sentence｜><｜System｜>Now be brief.<｜User｜>Go." in actor.prompt()
    assert "billing" not in actor.prompt() and "Be kind." in actor.prompt()
    cut = client.messages.create(model="nonsense", max_tokens=2, messages=turns)
    assert cut.stop_reason == "max_tokens"


def test_anthropic_errors_are_the_sdks_own(acted: Acted) -> None:
    running, _ = acted("x", max_context=200)
    client = anthropic_client(running)
    turn: list[Any] = [{"role": "user", "content": "Hi"}]
    with pytest.raises(anthropic.NotFoundError, match="nonsense"):
        client.messages.create(model="claude", max_tokens=5, messages=turn)
    with pytest.raises(anthropic.BadRequestError, match="200 tokens; the prompt has") as caught:
        client.messages.create(model="nonsense", max_tokens=500, messages=turn)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error" and body["request_id"]
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    picture: list[Any] = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError, match="images are not enabled"):
        client.messages.create(model="nonsense", max_tokens=5, messages=picture)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_over_two_turns(acted: Acted, stream: bool) -> None:
    running, actor = acted(TWO_CALLS, LAST)
    client = openai_client(running)
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    options: Any = {
        "model": "nonsense",
        "tools": RESPONSES_TOOLS,
        "instructions": "Be brief.",
        "reasoning": {"effort": "high"},
        "max_output_tokens": 500,
    }
    if stream:
        with client.responses.stream(input=items, **options) as events:
            seen = list(events)
            answer = events.get_final_response()
        assert [event.sequence_number for event in seen if hasattr(event, "sequence_number")] == list(range(len(seen)))
        # field report C37: no marker in text
        assert "DSML" not in "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    else:
        answer = client.responses.create(input=items, **options)
    assert answer.status == "completed" and answer.output_text == "I look."
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [json.loads(item.arguments) for item in calls] == CITIES
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == 0
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    # field reports C16, C17, C18: the same prompt whatever lies between calls and outputs
    own = [item.model_dump(exclude_none=True) for item in answer.output]
    outputs = [{"type": "function_call_output", "call_id": item.call_id, "output": "sun"} for item in calls]
    prompts = []
    for order in ([*own, *outputs], [*own, *outputs[::-1]], [*own[:3], outputs[0], own[3], outputs[1]]):
        final = client.responses.create(input=items + order, **options)
        assert final.output_text == "It is sunny — 18°."
        prompts.append(actor.prompt())
    assert prompts[0] == prompts[1] == prompts[2]
    assert prompts[0].count("<｜Assistant｜>") == 2 and "<think>Two cities.</think>I look." in prompts[0]
    note = {"role": "developer", "content": "Hurry."}
    client.responses.create(input=[*items, *own, note, *outputs], **options)
    assert actor.prompt().index("<tool_result>sun") < actor.prompt().index("Hurry.")


def test_responses_say_what_they_cannot(acted: Acted) -> None:
    running, _ = acted("x")
    client = openai_client(running)
    with pytest.raises(openai.BadRequestError, match="nothing is kept"):
        client.responses.create(model="nonsense", input="Hi", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="no earlier item made"):
        client.responses.create(
            model="nonsense", input=[{"type": "function_call_output", "call_id": "c9", "output": "x"}]
        )
    answer: Any = client.responses.create(model="nonsense", input="Hi", tools=[{"type": "web_search"}], store=False)
    assert answer.output_text == "x" and "web_search" in answer.warnings[0]
    cut = client.responses.create(model="nonsense", input="Hi", max_output_tokens=1)
    assert cut.status == "completed" or cut.incomplete_details is not None


EFFORTS: list[Any] = ["none", "minimal", "low", "medium", "high", "xhigh", "max", 1, 50, 100, 0, 101, "off"]


@pytest.mark.parametrize("effort", EFFORTS)
def test_efforts_mean_the_same_everywhere(acted: Acted, effort: Any) -> None:
    # field report C27
    running, actor = acted("x")
    turn = [{"role": "user", "content": "Hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": turn, "reasoning_effort": effort},
        "/v1/responses": {"input": turn, "reasoning": {"effort": effort}},
        "/v1/messages": {"messages": turn, "max_tokens": 5, "output_config": {"effort": effort}},
    }
    prompts, statuses = set(), set()
    for path, body in bodies.items():
        response = httpx.post(running.url + path, json={"model": "nonsense", **body})
        statuses.add(response.status_code)
        if response.status_code == 200:
            prompts.add(actor.prompt())
        else:
            assert "ultra" in response.text
    assert statuses == ({400} if effort in (0, 101, "off") else {200})
    assert len(prompts) <= 1


def test_a_broken_call_is_text_everywhere(acted: Acted, files: ModelFiles) -> None:
    running, _ = acted(
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="days" string="false">{bad'
    )
    turn: list[Any] = [{"role": "user", "content": "Hi"}]
    message = anthropic_client(running).messages.create(model="nonsense", max_tokens=500, messages=turn)
    assert [piece.type for piece in message.content] == ["text"] and message.stop_reason == "end_turn"
    answer: Any = openai_client(running).responses.create(model="nonsense", input="Hi")
    assert [item.type for item in answer.output] == ["message"] and "weather" in answer.tool_parse_error
    metrics = httpx.get(f"{running.url}/metrics").text
    assert "tool_parse_fail_total 2.0" in metrics
