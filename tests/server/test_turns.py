"""Assistant turns that clients send back: their own tokens, lost reasoning, and what the client is told (about 5 s)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cedar.engine.load import ModelFiles

Acted = Callable[..., tuple[Any, Any]]
CHAT = "/v1/chat/completions"
CALL = (
    'I need the tool.</think>I look.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="days" string="false">2</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
USER: dict[str, Any] = {"role": "user", "content": "Weather in Paris?"}
BODY: dict[str, Any] = {"model": "nonsense", "tools": TOOLS, "thinking": {"type": "enabled"}, "max_tokens": 2000}


def post(running: Any, path: str, body: Any) -> httpx.Response:
    response = httpx.post(running.url + path, json=body, timeout=30)
    assert response.status_code == 200, response.text
    return response


def first_turn(running: Any, *, stream: bool) -> dict[str, Any]:
    """The assistant's message of the first answer, as a client keeps it."""
    response = post(running, CHAT, BODY | {"messages": [USER], "stream": stream})
    if not stream:
        return dict(response.json()["choices"][0]["message"])
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append({**call, "function": dict(call["function"])})
                else:
                    message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return message


def result(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}


@pytest.mark.parametrize("stream", [False, True])
def test_lost_reasoning_is_found_again(acted: Acted, stream: bool) -> None:
    # field report C14: missing, empty, blank or present, the answer is 200 and the prompt is the same
    running, actor = acted(CALL, "Sunny.")
    message = first_turn(running, stream=stream)
    assert message["reasoning_content"] == "I need the tool."
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
    respelled = json.dumps(dict(reversed(arguments.items())), separators=(",", ":"))
    prompts = []
    for change in ({}, {"reasoning_content": ""}, {"reasoning_content": None}, {"reasoning_content": " "}):
        sent = {**message, **change}
        sent["tool_calls"] = [{**call, "function": {**call["function"], "arguments": respelled}}
                              for call in message["tool_calls"]]  # fmt: skip
        response = post(running, CHAT, BODY | {"messages": [USER, sent, result(message)]})
        assert "warnings" not in response.json() and "x-warning" not in response.headers
        prompts.append(actor.requests[-1].prompt_ids)
    assert len(set(prompts)) == 1
    # what was generated stands in the prompt token by token
    first = actor.requests[0].prompt_ids
    said = list(prompts[0][len(first) :])
    assert prompts[0][: len(first)] == first and "I need the tool." in actor.prompt()
    assert actor._files.tokenizer.decode(said).startswith("I need the tool.</think>I look.")


def test_what_nobody_remembers_is_told(acted: Acted) -> None:
    running, actor = acted("Sunny.")
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    call = {"id": "call_elsewhere", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        USER, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_elsewhere", "content": "sunny"},
    ]  # fmt: skip
    response = post(running, CHAT, BODY | {"messages": messages})
    (warning,) = response.json()["warnings"]
    assert "reasoning_content" in warning and warning == response.headers["x-warning"]
    assert "<think></think>" in actor.prompt()
    streamed = post(running, CHAT, BODY | {"messages": messages, "stream": True})
    assert warning in streamed.text.split("\n\n")[0] and streamed.headers["x-warning"] == warning
    # with the reasoning, or where none is shown, there is nothing to tell
    messages[1]["reasoning_content"] = "Hm."
    assert "warnings" not in post(running, CHAT, BODY | {"messages": messages}).json()
    del messages[1]["reasoning_content"]
    off = {"thinking": {"type": "disabled"}}
    assert "warnings" not in post(running, CHAT, BODY | {"messages": messages} | off).json()
    # without a map too
    actor.cache.turns = None
    assert "reasoning_content" in post(running, CHAT, BODY | {"messages": messages}).json()["warnings"][0]


def test_the_other_shapes_find_it_too(acted: Acted) -> None:
    running, actor = acted(CALL, "I know.</think>Sunny.", CALL, "I know.</think>Sunny.")
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    body: dict[str, Any] = {"model": "nonsense", "max_tokens": 2000, "tools": tools, "thinking": {"type": "enabled"}}
    content = post(running, "/v1/messages", body | {"messages": [USER]}).json()["content"]
    kept = [block for block in content if block["type"] != "thinking"]
    use = kept[-1]
    answered = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"}]}
    messages = [USER, {"role": "assistant", "content": kept}, answered]
    told = post(running, "/v1/messages", body | {"messages": messages}).json()
    assert "I need the tool.</think>" in actor.prompt() and "warnings" not in told
    tokens = post(running, "/v1/messages/count_tokens", body | {"messages": messages}).json()["input_tokens"]
    assert tokens == len(actor.requests[-1].prompt_ids)

    functions = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
    asked: dict[str, Any] = {"model": "nonsense", "tools": functions, "thinking": {"type": "enabled"}}
    asked["max_output_tokens"] = 2000
    items = post(running, "/v1/responses", asked | {"input": [USER]}).json()["output"]
    call = items[-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    post(running, "/v1/responses", asked | {"input": [USER, *items[1:], output]})
    assert items[0]["type"] == "reasoning" and "I need the tool.</think>" in actor.prompt()


def test_a_warning_of_messages_and_responses(acted: Acted) -> None:
    running, _ = acted("I know.</think>Sunny.")
    use = {"type": "tool_use", "id": "elsewhere", "name": "weather", "input": {}}
    answered = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "elsewhere", "content": "sunny"}]}
    body: dict[str, Any] = {
        "model": "nonsense", "max_tokens": 20, "tools": [{"name": "weather", "input_schema": PARAMETERS}],
        "thinking": {"type": "enabled"}, "messages": [USER, {"role": "assistant", "content": [use]}, answered],
        "mystery": 1,
    }  # fmt: skip
    unknown, dropped = post(running, "/v1/messages", body).json()["warnings"]
    assert "mystery" in unknown and "reasoning_content" in dropped
    start = post(running, "/v1/messages", body | {"stream": True}).text.split("\n\n")[0]
    assert json.loads(start.partition("data: ")[2])["message"]["warnings"] == [unknown, dropped]


def test_an_answer_that_shall_not_be_kept(acted: Acted) -> None:
    running, actor = acted(CALL, "Sunny.")
    response = post(running, CHAT, BODY | {"messages": [USER], "cache": False})
    assert actor.requests[-1].keep is False and len(actor.cache.turns) == 0
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    post(running, CHAT, BODY | {"messages": [USER]})
    assert actor.requests[-1].keep is True


def test_turns_are_of_one_salt(acted: Acted) -> None:
    running, actor = acted(CALL, "Sunny.")
    response = post(running, CHAT, BODY | {"messages": [USER], "cache_salt": "mine"})
    message = response.json()["choices"][0]["message"]
    del message["reasoning_content"]
    again = BODY | {"messages": [USER, message, result(message)]}
    assert "warnings" in post(running, CHAT, again | {"cache_salt": "yours"}).json()
    assert "I need the tool." not in actor.prompt()
    assert "warnings" not in post(running, CHAT, again | {"cache_salt": "mine"}).json()
    assert "I need the tool." in actor.prompt()


def test_a_next_turn_hits_what_was_generated(server: Any, files: ModelFiles) -> None:
    """Random text of a random model, which encodes otherwise than it was sampled: its pages are found anyway."""
    user = {"role": "user", "content": "The fox of the turn test lives near the river, it says. " * 6}
    # a random model would also say turn marks, which no turn may hold
    silent = {str(token_id): -100 for token_id in files.tokenizer.special.values()}
    body: dict[str, Any] = {
        "model": "nonsense", "max_tokens": 160, "seed": 5, "messages": [user], "logit_bias": silent
    }  # fmt: skip
    first = post(server, CHAT, body).json()
    said = first["choices"][0]["message"]["content"]
    total = first["usage"]["total_tokens"]
    follow = [user, {"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
    second = post(server, CHAT, body | {"messages": follow, "max_tokens": 2}).json()
    ids = post(server, "/apply_template", body | {"messages": follow}).json()["tokens"]
    assert len(ids) == second["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_cache_hit_tokens"] >= total - 130


def test_a_changed_effort_is_named(roomy: Any) -> None:
    text = "The fox of the effort test lives near the river, and so on. " * 8
    body: dict[str, Any] = {"model": "nonsense", "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    post(roomy, CHAT, body | {"reasoning_effort": "low"})
    assert post(roomy, "/v1/cache/explain", body | {"reasoning_effort": "max"}).json()["cache_note"] == "effort_changed"
    assert post(roomy, "/v1/cache/explain", body | {"reasoning_effort": "low"}).json()["cache_note"] is None
