"""Constraints keep random tokens well formed: JSON, forced calls, calls that were opened (about 10 s)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from cedar.chat.encode import Tool
from cedar.chat.grammar import MAX_SCHEMA_BYTES, Grammars, TokenConstraint
from cedar.chat.parse import Answer, AnswerReader, ChatParser
from cedar.chat.tokenizer import DSML, END_THINK, EOS, USER, Tokenizer
from cedar.errors import RequestError

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 999}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
TOOLS = (
    Tool(
        name="look",
        description="",
        parameters={
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 0, "maximum": 9999},
                "s": {"type": "string", "maxLength": 12},
                "e": {"enum": ["red", 'a "b"', "<i>"]},
                "m": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 5}]},
                "p": {"$ref": "#/$defs/point"},
            },
            "required": ["n", "p"],
            "$defs": {"point": POINT},
        },
    ),
    Tool(name="nothing", description="", parameters=None),
    Tool(
        name="empty",
        description="",
        parameters={"type": "object", "properties": {"a": {"type": "boolean"}}},
    ),
)


@pytest.fixture(scope="module")
def grammars(toy: Tokenizer) -> Grammars:
    return Grammars(toy, len(toy))


def say(
    constraint: TokenConstraint, tokenizer: Tokenizer, seed: int, *, begin: str = "", most: int = 6000
) -> tuple[list[int], bool]:
    """A random answer within the constraint, and whether it came to its end."""
    rng = random.Random(seed)
    ids: list[int] = []
    for token_id in [*tokenizer.encode(begin), *([tokenizer.special[DSML]] if begin else [])]:
        constraint.accept(token_id)
        ids.append(token_id)
    while len(ids) < most:
        mask = constraint.allowed()
        choices = [i for i in range(len(tokenizer)) if mask is None or mask[i // 8] >> (i % 8) & 1]
        assert choices, tokenizer.decode(ids)
        # thoughts would go on for ever
        end = tokenizer.special[END_THINK]
        token_id = end if end in choices and len(ids) > 20 else rng.choice(choices)
        if token_id == tokenizer.special[EOS]:
            return ids, True
        constraint.accept(token_id)
        ids.append(token_id)
    return ids, False


def read(ids: list[int], tokenizer: Tokenizer, *, thinking: bool) -> Answer:
    reader, answer = AnswerReader(tokenizer, ChatParser(thinking=thinking)), Answer()
    for token_id in ids:
        answer.add(reader.push(token_id))
    answer.add(reader.finish())
    return answer


def assert_point(value: Any) -> None:
    assert set(value) == {"x", "on"} and isinstance(value["x"], int) and 0 <= value["x"] <= 999
    assert isinstance(value["on"], bool)


def assert_call(name: str, arguments: str) -> None:
    values = json.loads(arguments)
    if name == "look":
        assert {"n", "p"} <= set(values) <= {"n", "s", "e", "m", "p"}
        assert isinstance(values["n"], int)
        assert_point(values["p"])
        assert isinstance(values.get("s", ""), str) and len(values.get("s", "")) <= 12
        assert values.get("e", "red") in ("red", 'a "b"', "<i>")
        assert values.get("m") is None or isinstance(values["m"], str)
    elif name == "empty":
        assert set(values) <= {"a"}
    else:
        assert name == "nothing" and values == {}


@pytest.mark.parametrize("thinking", [False, True])
def test_a_schema_is_kept(grammars: Grammars, toy: Tokenizer, thinking: bool) -> None:
    # field report C10: thoughts are free, the answer is not
    for seed in range(12):
        ids, ended = say(grammars.of_schema(POINT, thinking=thinking, param="p"), toy, seed)
        assert ended
        answer = read(ids, toy, thinking=thinking)
        assert_point(json.loads(answer.content))
        assert bool(answer.reasoning) == thinking and not answer.calls


@pytest.mark.parametrize("thinking", [False, True])
def test_forced_calls_are_calls(grammars: Grammars, toy: Tokenizer, thinking: bool) -> None:
    # field report C12
    most = 0
    for seed in range(12):
        ids, ended = say(grammars.of_calls(TOOLS, thinking=thinking, parallel=True, param="tools"), toy, seed)
        answer = read(ids, toy, thinking=thinking)
        assert ended and answer.calls and not answer.content
        for call in answer.calls:
            assert_call(call.name, call.arguments)
        most = max(most, len(answer.calls))
    assert most > 1


def test_no_parallel_calls_means_one(grammars: Grammars, toy: Tokenizer) -> None:
    for seed in range(12):
        ids, ended = say(grammars.of_calls(TOOLS[:1], thinking=False, parallel=False, param="tools"), toy, seed)
        (call,) = read(ids, toy, thinking=False).calls
        assert ended and call.name == "look"


def test_thoughts_cannot_end_the_answer_or_open_a_block(grammars: Grammars, toy: Tokenizer) -> None:
    # field report C07
    constraint = grammars.of_calls(TOOLS, thinking=True, parallel=True, param="tools")
    for token_id in toy.encode("Hm. <"):
        constraint.accept(token_id)
        mask = constraint.allowed()
        assert mask is not None
        for name, may in ((EOS, False), (USER, False), (DSML, False), (END_THINK, True)):
            assert bool(mask[toy.special[name] // 8] >> (toy.special[name] % 8) & 1) == may, name


def test_the_closing_mark_cannot_be_spelled_in_letters(grammars: Grammars, toy: Tokenizer) -> None:
    constraint = grammars.of_schema(POINT, thinking=True, param="p")
    ids = toy.encode("</think>x")
    for token_id in ids:
        mask = constraint.allowed()
        assert mask is not None
        if not mask[token_id // 8] >> (token_id % 8) & 1:
            break
        constraint.accept(token_id)
    else:
        pytest.fail("the mark was spelled")


def test_json_or_calls(grammars: Grammars, toy: Tokenizer) -> None:
    kinds = set()
    for seed in range(12):
        constraint = grammars.of_schema_or_calls(POINT, TOOLS, thinking=False, parallel=True, param="p")
        ids, ended = say(constraint, toy, seed)
        answer = read(ids, toy, thinking=False)
        assert ended and bool(answer.content) != bool(answer.calls)
        kinds.add(bool(answer.calls))
        for call in answer.calls:
            assert_call(call.name, call.arguments)
        if answer.content:
            assert_point(json.loads(answer.content))
    assert kinds == {False, True}


def test_an_optional_block_is_well_formed_once_opened(grammars: Grammars, toy: Tokenizer) -> None:
    # field report C39
    for seed in range(12):
        constraint = grammars.of_optional_calls(TOOLS, parallel=True, param="tools")
        assert constraint is not None and constraint.allowed() is None
        ids, ended = say(constraint, toy, seed, begin="The river.\n\n<")
        answer = read(ids, toy, thinking=False)
        assert ended and answer.content == "The river." and answer.calls
        for call in answer.calls:
            assert_call(call.name, call.arguments)


def test_a_keyword_that_is_not_known_does_not_stop_an_agent(grammars: Grammars, toy: Tokenizer) -> None:
    # tools of one coding agent carry `propertyNames`; others bring patterns with look-behind
    known = {"type": "object", "propertyNames": {"pattern": "a"}, "additionalProperties": {"type": "boolean"}}
    tool = Tool(name="set", description="", parameters={"type": "object", "properties": {"v": known}})
    assert grammars.of_optional_calls([tool], parallel=True, param="tools") is not None
    assert grammars.of_calls([tool], thinking=False, parallel=True, param="tools") is not None
    part = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string", "pattern": "(?<=a)b"}}]}
    tool = Tool(name="set", description="", parameters={"type": "object", "properties": {"v": part}})
    assert grammars.of_optional_calls([tool], parallel=True, param="tools") is None
    with pytest.raises(RequestError, match="cannot be enforced"):
        grammars.of_calls([tool], thinking=False, parallel=True, param="tools")


def test_any_arguments_where_the_schema_names_none(grammars: Grammars, toy: Tokenizer) -> None:
    tool = Tool(name="free", description="", parameters={"type": "object", "additionalProperties": True})
    complete = 0
    for seed in range(12):
        ids, ended = say(grammars.of_calls([tool], thinking=False, parallel=False, param="tools"), toy, seed, most=300)
        complete += ended
        if ended:
            assert all(isinstance(json.loads(call.arguments), dict) for call in read(ids, toy, thinking=False).calls)
    assert complete > 3


def test_a_token_table_of_the_release(release: Tokenizer) -> None:
    grammars = Grammars(release, 129280)
    constraint = grammars.of_calls(TOOLS, thinking=True, parallel=True, param="tools")
    text = (
        'So.</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="empty">\n'
        '<｜DSML｜ parameter name="a" string="false">true</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    )
    for part in text.replace(END_THINK, f"|{END_THINK}|").replace(DSML, f"|{DSML}|").split("|"):
        for token_id in [release.special[part]] if part in release.special else release.encode(part):
            mask = constraint.allowed()
            assert mask is not None and len(mask) >= 129280 // 8
            assert mask[token_id // 8] >> (token_id % 8) & 1, (part, release.decode([token_id]))
            constraint.accept(token_id)
    mask = constraint.allowed()
    assert mask is not None and [i for i in range(129280) if mask[i // 8] >> (i % 8) & 1] == [release.special[EOS]]


BAD: list[tuple[str, Callable[[Grammars], object]]] = [
    ("reference", lambda g: g.of_schema({"$ref": "#/nowhere"}, thinking=False, param="p")),
    ("pattern", lambda g: g.of_schema({"type": "string", "pattern": "(?<=a)b"}, thinking=False, param="p")),
    ("size", lambda g: g.of_schema({"description": "x" * MAX_SCHEMA_BYTES}, thinking=False, param="p")),
    ("remote", lambda g: g.of_schema({"$ref": "https://example.org/schema"}, thinking=False, param="p")),
    ("list", lambda g: g.of_schema([], thinking=False, param="p")),  # type: ignore[arg-type]
    (
        "required",
        lambda g: g.of_calls(
            [Tool(name="t", description="", parameters={"properties": {"a": {}}, "required": "a"})],
            thinking=False, parallel=True, param="tools",
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("make", [row[1] for row in BAD], ids=[row[0] for row in BAD])
def test_what_cannot_be_enforced_is_refused(grammars: Grammars, make: Callable[[Grammars], object]) -> None:
    with pytest.raises(RequestError) as caught:
        make(grammars)
    assert caught.value.code == "invalid_schema"
