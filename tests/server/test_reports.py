"""Field reports about answers that are none, thinking switched off, and reports without an answer (about 5 s)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cedar.engine.request import Finished

Acted = Callable[..., tuple[Any, Any]]
CHAT = "/v1/chat/completions"
ROOT = Path(__file__).parents[2]
CALL = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="look">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def test_an_empty_answer_is_counted_and_logged(
    scripted: Callable[..., tuple[Any, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    # field report C13: the reason is stated, the token that ended it is counted
    running, _ = scripted([(0, Finished(reason="stop", prompt_tokens=3, completion_tokens=1))])
    body = {"model": "nonsense", "messages": [{"role": "user", "content": "Hi"}]}
    with caplog.at_level(logging.WARNING, "cedar.server"):
        response = httpx.post(running.url + CHAT, json=body)
    answer = response.json()
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 1
    assert response.headers["x-request-id"] in caplog.text and "first token" in caplog.text


def test_rounds_of_tools_always_get_an_answer(acted: Acted) -> None:
    # field report C13
    running, actor = acted(*[CALL] * 5, "Done.")
    for _ in range(4):
        actor.requests.clear()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Look five times."}]
        for number in range(6):
            body = {"model": "nonsense", "messages": messages, "tools": TOOLS, "max_tokens": 500}
            answer = httpx.post(running.url + CHAT, json=body, timeout=30).json()
            assert answer["usage"]["completion_tokens"] > 0
            message = answer["choices"][0]["message"]
            assert answer["choices"][0]["finish_reason"] == ("tool_calls" if number < 5 else "stop")
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": ""} for call in message.get("tool_calls", ())
            ]
        assert messages[-1]["content"] == "Done." and len(actor.requests) == 6


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": 1}, True),
    ],
)
def test_thinking_can_be_switched_off(acted: Acted, fields: dict[str, Any], reasons: bool) -> None:
    # field report C25: off means no reasoning token; effort 1 is the least there is
    running, actor = acted("Hm.</think>Yes." if reasons else "Yes.")
    body = {"model": "nonsense", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50, **fields}
    answer = httpx.post(running.url + CHAT, json=body).json()
    assert answer["choices"][0]["message"]["content"] == "Yes."
    assert (answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0) is reasons
    assert ("Reasoning Effort: 1 " in actor.prompt()) is reasons


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_by_its_other_name(acted: Acted, stream: bool) -> None:
    running, _ = acted("Hm.</think>Yes.", reasoning_alias=True)
    body = {"model": "nonsense", "messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "low"}
    text = httpx.post(running.url + CHAT, json=body | {"stream": stream, "max_tokens": 50}).text
    said = {name: "".join(re.findall(rf'"{name}":"([^"]*)"', text)) for name in ("reasoning_content", "reasoning")}
    assert said == {"reasoning_content": "Hm.", "reasoning": "Hm."}
    plain, _ = acted("Hm.</think>Yes.")
    assert '"reasoning":' not in httpx.post(plain.url + CHAT, json=body | {"stream": stream, "max_tokens": 50}).text


def test_every_report_has_a_test_or_a_reason() -> None:
    """Groups c and g of the collected reports, by number."""
    reports = [f"C{number:02}" for number in range(1, 40)] + [f"G{number:02}" for number in range(1, 10)]
    tested = "".join(
        file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)
    )
    tested += Path(__file__).read_text(encoding="utf-8").partition("def test_every_report")[0]
    told = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    named = {name for text in (tested, told) for name in re.findall(r"\b[CG]\d\d\b", text)}
    assert [name for name in reports if name not in named] == []
