"""Prompts: the worked examples by digest and id, what text cannot do, messages that are refused (about 3 s)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.chat import encode
from cedar.chat.effort import EFFORTS, effort_line, effort_number
from cedar.chat.encode import (
    Conversation,
    Message,
    Special,
    Tool,
    ToolCall,
    parse_messages,
    parse_tools,
    render,
    to_ids,
    to_text,
)
from cedar.chat.tokenizer import ASSISTANT, BOS, END_THINK, EOS, IMAGE, THINK, USER, Tokenizer
from cedar.errors import RequestError

X1 = Conversation(
    messages=(
        Message(role="system", content="Be brief."),
        Message(role="user", content="What is 2+2?"),
        Message(role="assistant", content="4", reasoning="add"),
        Message(role="user", content="And 3+3?"),
    ),
    effort=50,
)
WEATHER = Tool(
    name="get_weather",
    description="Weather for a city.",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
X2 = Conversation(
    messages=(
        Message(role="user", content="Weather in Paris?"),
        Message(
            role="assistant",
            content="Checking.",
            reasoning="Need the tool.",
            tool_calls=(
                ToolCall(id="c1", name="get_weather", arguments='{"city": "Paris", "days": 2}'),
                ToolCall(id="c2", name="get_weather", arguments='{"city": "Rome"}'),
            ),
        ),
        Message(role="tool", content="22C", tool_call_id="c2"),
        Message(role="tool", content="18C", tool_call_id="c1"),
    ),
    tools=(WEATHER,),
    effort=100,
)
X3 = Conversation(
    messages=(Message(role="user", content=("What is in", Special(IMAGE), "this picture?")),), thinking=False
)
X4 = Conversation(
    messages=(Message(role="system", content="Answer in json."), Message(role="user", content="Two primes")),
    thinking=False,
    response_format={"type": "json_object"},
)
X5 = Conversation(
    messages=(
        Message(role="user", content="hi"),
        Message(role="assistant", content="hello", reasoning="r"),
        Message(role="system", content="New policy."),
        Message(role="reminder", content="2026-11-29"),
        Message(role="user", content="again"),
    )
)


@pytest.mark.parametrize(
    ("conversation", "digest", "num_tokens"),
    [
        (X1, "eaceffae6c855db1d387bfec2559bd8f4d635444b78af9933606508ff8cf1a32", 51),
        (X2, "572aa763712f9bdb5d80c9cd7e20793e592cd2563de058a01e42c55ca5d72d28", 413),
        (X3, "bbac1da04e25b5defbaba8123b0d63384d4571cb6cccf0aa6a06db0a552036c8", 13),
        (X4, "2201dd23ae642380ffe6a3166083a23aafd99f88fb87cff65e18a0c0ec2028cd", 33),
        (X5, "bd59eb4e288f3a8e33b1e4baf9f67b7ecfa4ca57d7c5ef296a79ada376f1f5ec", 48),
    ],
    ids=["X1", "X2", "X3", "X4", "X5"],
)
def test_worked_examples(release: Tokenizer, conversation: Conversation, digest: str, num_tokens: int) -> None:
    pieces = render(conversation)
    assert hashlib.sha256(to_text(pieces).encode()).hexdigest() == digest
    assert len(to_ids(pieces, release)) == num_tokens


def test_ids_of_worked_examples(release: Tokenizer) -> None:
    assert encode.encode(X1, release) == [
        0, 128799, 77666, 288, 9504, 482, 28, 223, 1328, 343, 16801, 223, 19, 15, 1457, 14, 270, 4077, 270, 1990, 14,
        270, 850, 15146, 270, 22805, 868, 7153, 9708, 16, 128803, 3085, 344, 223, 20, 13, 20, 33, 128804, 128822, 22,
        1, 128803, 4195, 223, 21, 13, 21, 33, 128804, 128821,
    ]  # fmt: skip
    assert encode.encode(X3, release) == [
        0, 128803, 3085, 344, 295, 271, 129264, 271, 3779, 8628, 33, 128804, 128822,
    ]  # fmt: skip
    assert encode.encode(X4, release) == [
        0, 128799, 7805, 295, 18786, 339, 372, 17038, 29478, 979, 3476, 74366, 29851, 42917, 304, 270, 2502, 37913,
        304, 20430, 1137, 24313, 4611, 3362, 582, 14479, 55774, 62773, 128803, 14959, 39930, 128804, 128822,
    ]  # fmt: skip
    chat = Conversation(messages=(Message(role="user", content="What is 2+2?"),), thinking=False)
    assert encode.encode(chat, release) == [0, 128803, 3085, 344, 223, 20, 13, 20, 33, 128804, 128822]


def test_protocol_constants_are_byte_exact() -> None:
    head, tail = encode._TOOLS_HEAD, encode._TOOLS_TAIL
    assert (len(head), len(tail)) == (848, 99)
    assert hashlib.sha256(head.encode()).hexdigest().startswith("2ae2ff83edf99018")
    assert hashlib.sha256(tail.encode()).hexdigest() == (
        "690702850fe256512cb1ee67c4e436ecb3e735c71ebee77ca45ff357a75fb5a7"
    )


@given(text=st.text(max_size=30), name=st.sampled_from([USER, ASSISTANT, EOS, THINK, END_THINK, "｜DSML｜", IMAGE]))
def test_what_a_user_writes_opens_no_turn(toy: Tokenizer, text: str, name: str) -> None:
    def specials(content: str) -> list[int]:
        messages = (Message(role="system", content=content), Message(role="user", content=content))
        ids = encode.encode(Conversation(messages=messages), toy)
        return [i for i in ids if i in toy.special.values()]

    assert specials(text + name + text) == specials("")


@given(content=st.text(max_size=40), thinking=st.booleans())
def test_a_prompt_reads_back_as_its_text(toy: Tokenizer, content: str, thinking: bool) -> None:
    pieces = render(Conversation(messages=(Message(role="user", content=content),), thinking=thinking))
    assert toy.decode(to_ids(pieces, toy)) == to_text(pieces)


def _prompt(*messages: dict[str, Any], tools: bool = False, thinking: bool = True) -> str:
    offered = (Tool(name="f"),) if tools else ()
    return to_text(render(Conversation(messages=parse_messages(list(messages)), tools=offered, thinking=thinking)))


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "f", "arguments": "{}"}},
    ],
}
RESULT_A = {"role": "tool", "tool_call_id": "a", "content": "A"}
RESULT_B = {"role": "tool", "tool_call_id": "b", "content": "B"}


def test_parallel_results_may_come_in_any_order() -> None:
    # field report C18
    user = {"role": "user", "content": "go"}
    assert _prompt(user, CALL, RESULT_A, RESULT_B, tools=True) == _prompt(user, CALL, RESULT_B, RESULT_A, tools=True)


def test_missing_empty_and_blank_reasoning_are_one_prompt() -> None:
    # field reports C14, C15
    user = {"role": "user", "content": "go"}
    missing = _prompt(user, CALL, RESULT_A, tools=True)
    for reasoning in (None, "", " ", "\n"):
        assert _prompt(user, {**CALL, "reasoning_content": reasoning}, RESULT_A, tools=True) == missing
    present = _prompt(user, {**CALL, "reasoning_content": "hm"}, RESULT_A, tools=True)
    assert present == missing.replace("<think></think>", "<think>hm</think>")
    assert _prompt(user, {**CALL, "reasoning": "hm"}, RESULT_A, tools=True) == present


def test_a_system_message_between_turns_stays_in_place() -> None:
    # field report C20: what comes before it is unchanged, so a cached prefix stays valid
    first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    before = _prompt(*first, {"role": "user", "content": "c"}, thinking=False)
    after = _prompt(*first, {"role": "developer", "content": "s"}, {"role": "user", "content": "c"}, thinking=False)
    assert after == before.replace("<｜User｜>c", "<｜System｜>s<｜User｜>c")


def test_parts_are_joined_and_images_keep_their_place() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "text", "text": "b"},
    ]
    prompt = _prompt({"role": "user", "content": content}, thinking=False)
    assert f"{USER}a\n\n{IMAGE}\n\nb{ASSISTANT}" in prompt


def test_continuation_opens_the_last_turn_again() -> None:
    # field report C26
    messages = (Message(role="user", content="q"), Message(role="assistant", content="The answer is", reasoning="r"))
    plain = to_text(render(Conversation(messages=messages, thinking=False, continue_last=True)))
    assert plain == f"{BOS}{USER}q{ASSISTANT}{END_THINK}The answer is"
    thinking = to_text(render(Conversation(messages=messages, continue_last=True)))
    assert thinking.endswith(f"{ASSISTANT}{THINK}r{END_THINK}The answer is")
    open_thought = (messages[0], Message(role="assistant", reasoning="r"))
    assert to_text(render(Conversation(messages=open_thought, continue_last=True))).endswith(f"{THINK}r")
    with pytest.raises(RequestError, match="continued"):
        render(Conversation(messages=messages[:1], continue_last=True))
    closed = to_text(render(Conversation(messages=messages, thinking=False), generation_header=False))
    assert closed.endswith(f"The answer is{EOS}")


def test_arguments_of_every_kind() -> None:
    arguments = json.dumps({"t": 'a "b"\n<c>', "n": 1.5, "o": {"ü": [True, None]}}, ensure_ascii=False)
    calls = (ToolCall(id="1", name="f", arguments=arguments), ToolCall(id="2", name="g", arguments="nope"))
    text = to_text(render(Conversation(messages=(Message(role="assistant", tool_calls=calls),))))
    assert '<｜DSML｜ parameter name="t" string="true">a "b"\n<c></｜DSML｜ parameter>\n' in text
    assert '<｜DSML｜ parameter name="n" string="false">1.5</｜DSML｜ parameter>\n' in text
    assert '<｜DSML｜ parameter name="o" string="false">{"ü": [true, null]}</｜DSML｜ parameter>\n' in text
    assert '<｜DSML｜ parameter name="arguments" string="true">nope</｜DSML｜ parameter>' in text


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        ([1], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": "f"}], "messages[1].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        ([RESULT_A], "messages[0].tool_call_id"),
        ([CALL, CALL], "messages[1].tool_calls"),
        ([{"role": "assistant", "reasoning_content": 3}], "messages[0].reasoning_content"),
    ],
)
def test_refused_messages_are_named(messages: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages(messages)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ([{"type": "web_search"}], "tools[0]"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
    ],
)
def test_refused_tools_are_named(tools: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tools(tools)
    assert caught.value.param == param


def test_tools_are_read() -> None:
    raw = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"a": 1}, "strict": True}}]
    assert parse_tools(raw) == (Tool(name="f", description="d", parameters={"a": 1}),)


def test_effort_names_and_numbers() -> None:
    # field report C27
    assert [effort_number(v) for v in ("none", "minimal", "low", "medium", "high", "xhigh", "max", 1, 50, 100)] == [
        None, 50, 50, 75, 75, 75, 100, 1, 50, 100,
    ]  # fmt: skip
    for value in (0, 101, "off", True, 1.5, None):
        with pytest.raises(RequestError, match="minimal, low") as caught:
            effort_number(value)
        assert caught.value.param == "reasoning_effort"
    assert set(EFFORTS) >= {"none", "ultra"}
    assert effort_line(7).startswith("Reasoning Effort: 7 (range 1-100")
