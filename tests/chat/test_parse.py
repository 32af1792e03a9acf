"""The lenient reader: every row of its table, any cut, no markup in what people read (about 5 s)."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cedar.chat.encode import Conversation, Message, ToolCall, render, to_ids
from cedar.chat.parse import Answer, AnswerReader, ChatParser
from cedar.chat.tokenizer import DSML, END_THINK, Tokenizer

BLOCK, INVOKE = f"<{DSML} calls>\n", f'<{DSML} invoke name="f">\n'
TEXT, OTHER = f'<{DSML} parameter name="k" string="true">', f'<{DSML} parameter name="n" string="false">'
END_PARAMETER, END_INVOKE, END_BLOCK = f"</{DSML} parameter>\n", f"</{DSML} invoke>\n", f"</{DSML} calls>"


def read(*pieces: str, thinking: bool = False, stop: tuple[str, ...] = ()) -> Answer:
    parser, answer = ChatParser(thinking=thinking, stop=stop, new_call_id=lambda: "id"), Answer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish())
    return answer


def calls(answer: Answer) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("R</think>Hi", "R", "Hi"),
        ("\n\nR\n\n</think>\n\nHi\n", "R", "Hi\n"),
        ("only thoughts\n", "only thoughts\n", ""),
        ("R</think>a</think>b", "R", "ab"),
        ("R<think>S</think>a<think>b", "R<think>S", "a<think>b"),
        ("R</thi", "R</thi", ""),
        ("", "", ""),
    ],
)
def test_reasoning(text: str, reasoning: str, content: str) -> None:
    answer = read(text, thinking=True)
    assert (answer.reasoning, answer.content, answer.calls) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (f"hi\n\n{BLOCK}{INVOKE}{TEXT}Paris{END_PARAMETER}{END_INVOKE}{END_BLOCK}x", "hi", [("f", '{"k": "Paris"}')]),
        (f"{BLOCK}{INVOKE}{END_INVOKE}{INVOKE}{END_INVOKE}{END_BLOCK}", "", [("f", "{}"), ("f", "{}")]),
        (f'{BLOCK}{INVOKE}{TEXT}a "q"\n<b>{END_PARAMETER}{OTHER}[1, 2]{END_PARAMETER}{END_INVOKE}{END_BLOCK}', "",
         [("f", '{"k": "a \\"q\\"\\n<b>", "n": [1, 2]}')]),
        (f'<{DSML}tool_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="k" string="true">v</{DSML}parameter>\n'
         f"</{DSML}invoke>\n</{DSML}tool_calls>", "", [("f", '{"k": "v"}')]),
        (f"{INVOKE}{TEXT}v{END_PARAMETER}{END_INVOKE}", "", [("f", '{"k": "v"}')]),
        (f"{BLOCK}{INVOKE}{TEXT}v{END_INVOKE}{END_BLOCK}", "", [("f", '{"k": "v"}')]),
        (f"{BLOCK}{INVOKE}{TEXT}v{END_PARAMETER}{INVOKE}{TEXT}w{END_PARAMETER}{END_INVOKE}", "",
         [("f", '{"k": "v"}'), ("f", '{"k": "w"}')]),
        (f'{BLOCK}{INVOKE}<{DSML} parameter name="k">v{END_PARAMETER}{END_INVOKE}', "", [("f", '{"k": "v"}')]),
        (f"a{BLOCK}nothing else", "a", []),
        (f"a<{DSML} foo>b", "a", []),
        ("a\n\n<｜DS", "a\n\n<｜DS", []),
        (f"{BLOCK}{INVOKE}{TEXT}Par", "", [("f", '{"k": "Par')]),
        (f"{BLOCK}{INVOKE}{OTHER}{{bad{END_PARAMETER}{END_INVOKE}", "", [("f", '{"n": {bad}')]),
    ],
)  # fmt: skip
def test_calls(text: str, content: str, expected: list[tuple[str, str]]) -> None:
    answer = read(text)
    assert (answer.content, calls(answer)) == (content, expected)


@pytest.mark.parametrize("space", [" ", ""], ids=["V4.1", "V4"])
def test_tags_of_both_versions_at_every_cut(space: str) -> None:
    # field report C02; like deepseek-recipe, any tag of the marker ends the reasoning, not only the whole block's
    text = (
        f'I look < and </ up.\n\n<{DSML}{space}{"calls" if space else "tool_calls"}>\n<{DSML}{space}invoke name="f">\n'
        f'<{DSML}{space}parameter name="k" string="true">v</{DSML}{space}parameter>\n</{DSML}{space}invoke>\n'
    )
    for cut in range(len(text) + 1):
        answer = read(text[:cut], text[cut:], thinking=True)
        assert (answer.reasoning, answer.content) == ("I look < and </ up.", "")
        assert calls(answer) == [("f", '{"k": "v"}')]


def test_values_keep_their_kind_whatever_the_schema_says() -> None:
    # field report C35: the flag decides
    text = (
        f'{BLOCK}{INVOKE}<{DSML} parameter name="count" string="false">5{END_PARAMETER}'
        f'<{DSML} parameter name="config" string="false">{{"a":1}}{END_PARAMETER}'
        f'<{DSML} parameter name="zip" string="true">01234{END_PARAMETER}{END_INVOKE}{END_BLOCK}'
    )
    for pieces in ((text,), tuple(text)):
        (call,) = read(*pieces).calls
        assert json.loads(call.arguments) == {"count": 5, "config": {"a": 1}, "zip": "01234"}


def test_a_block_ends_the_reasoning() -> None:
    # field report C06
    answer = read(f"thinking\n\n{BLOCK}{INVOKE}{END_INVOKE}{END_BLOCK}", thinking=True)
    assert (answer.reasoning, answer.content, calls(answer)) == ("thinking", "", [("f", "{}")])


@pytest.mark.parametrize("cut", range(len(END_PARAMETER)))
def test_half_a_closing_tag_is_no_value(cut: int) -> None:
    # field report C04: the wide bar included
    (call,) = read(f"{BLOCK}{INVOKE}{TEXT}Paris{END_PARAMETER[:cut]}").calls
    assert call.arguments in ('{"k": "Paris', '{"k": "Paris"')


def test_arguments_flow() -> None:
    # field report C03
    parser = ChatParser(thinking=False)
    parser.push(f"{BLOCK}{INVOKE}{TEXT}")
    sizes = [sum(len(d.call.arguments) for d in parser.push("word ") if d.call) for _ in range(1000)]
    assert set(sizes) == {5}


def test_validity_is_told() -> None:
    answer = read(f"{BLOCK}{INVOKE}{OTHER}{{bad{END_PARAMETER}{END_INVOKE}{INVOKE}{END_INVOKE}")
    assert [call.valid for call in answer.calls] == [False, True]
    assert not read(f"{BLOCK}{INVOKE}").calls[0].valid


@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ("one END two", ("END",), "one "),
        ("one EN two", ("END",), "one EN two"),
        ("xEENDy", ("END",), "xE"),
        ("abcd", ("abc", "b"), "a"),
        ("a\n\nb", ("\n\n",), "a"),
        ("smile \U0001f600!", ("\U0001f600",), "smile "),
    ],
)
def test_stop_strings(text: str, stop: tuple[str, ...], content: str) -> None:
    # field report C23: every cut
    for cut in range(len(text) + 1):
        assert read(text[:cut], text[cut:], stop=stop).content == content
    assert read(*text, stop=stop).content == content


def test_stop_strings_spare_reasoning_and_markup() -> None:
    answer = read(
        f"END of it</think>a{BLOCK}{INVOKE}{TEXT}END{END_PARAMETER}{END_INVOKE}", thinking=True, stop=("END",)
    )
    assert (answer.reasoning, answer.content, calls(answer)) == ("END of it", "a", [("f", '{"k": "END"}')])


def test_text_is_passed_on_at_once() -> None:
    parser = ChatParser(thinking=False, stop=("END",))
    assert [[d.content for d in parser.push(piece)] for piece in ("a", "b\n", "c", "E", "x")] == [
        ["a"], ["b"], ["\nc"], [], ["Ex"],
    ]  # fmt: skip


FRAGMENTS = [
    "\n", "\n\n", "a", END_THINK, "<think>", f"<{DSML}", BLOCK, INVOKE, TEXT, OTHER, END_PARAMETER, END_INVOKE,
    END_BLOCK, "END", "E", '"', "5", '{"a": 1}', "<", "</", DSML, "é", "\\", "x<y>", f'<{DSML} parameter name="q">',
    f"<{DSML}tool_calls>", f'<{DSML}invoke name="g">', "<｜DS", f'<{DSML} invoke name="', "",
]  # fmt: skip


@settings(max_examples=400)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=10),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    thinking=st.booleans(),
    stop=st.sampled_from([(), ("END",), ("E", "ND"), ("<",)]),
)
@example(fragments=["a", BLOCK, INVOKE, TEXT, "v", END_PARAMETER, END_INVOKE], cuts=[], thinking=False, stop=())
def test_any_cut_gives_the_same(fragments: list[str], cuts: list[int], thinking: bool, stop: tuple[str, ...]) -> None:
    text = "".join(fragments)
    whole = read(text, thinking=thinking, stop=stop)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert read(*pieces, thinking=thinking, stop=stop) == whole
    assert read(*text, thinking=thinking, stop=stop) == whole
    # the whole opening mark never reaches a reader (field report C01)
    assert f"<{DSML}" not in whole.content + whole.reasoning


@given(
    arguments=st.dictionaries(
        st.text(st.characters(exclude_characters='"<>\n｜', exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8),
        st.one_of(
            st.text(st.characters(exclude_characters="<｜", exclude_categories=["Cs"]), max_size=20),
            st.integers(-(2**60), 2**60), st.booleans(), st.none(), st.lists(st.integers(0, 9), max_size=3),
        ),
        max_size=4,
    ),
    content=st.text(st.characters(exclude_characters="<｜\n", exclude_categories=["Cs"]), min_size=1, max_size=20),
)  # fmt: skip
def test_what_is_written_is_read_back(toy: Tokenizer, arguments: dict[str, object], content: str) -> None:
    """An assistant turn rendered, encoded, and read token by token is the turn it was."""
    call = ToolCall(id="c", name="lookup", arguments=json.dumps(arguments))
    turn = Message(role="assistant", content=content, reasoning="thought", tool_calls=(call,))
    pieces = render(Conversation(messages=(turn,), thinking=False), generation_header=False)
    ids = to_ids(pieces, toy)
    start = ids.index(toy.special[END_THINK]) + 1
    reader, answer = AnswerReader(toy, ChatParser(thinking=False)), Answer()
    for token_id in ids[start:]:
        answer.add(reader.push(token_id))
    answer.add(reader.finish())
    assert answer.content == content.lstrip("\n")
    (read_call,) = answer.calls
    assert (read_call.name, json.loads(read_call.arguments), read_call.valid) == ("lookup", arguments, True)


def test_half_a_character_waits_for_a_token_that_begins_with_a_space(toy: Tokenizer) -> None:
    # field report C22: held, and replaced only once it cannot become a character any more
    by_bytes = {toy.token_bytes(i): i for i in range(3, 259)}
    reader = AnswerReader(toy, ChatParser(thinking=False))
    half = by_bytes[b"\xc3"]
    assert reader.push(half) == []
    assert [delta.content for delta in reader.push(by_bytes[b"\xa9"])] == ["é"]
    assert reader.push(half) == []
    assert "".join(delta.content for delta in reader.push(by_bytes[b" "])) == "\ufffd "


def test_reader_never_splits_a_character(toy: Tokenizer) -> None:
    # field report C21
    by_bytes = {toy.token_bytes(i): i for i in range(3, 259)}
    reader = AnswerReader(toy, ChatParser(thinking=False))
    ids = [by_bytes[bytes([byte])] for byte in "ok \U0001f600".encode()]
    texts = [delta.content for token_id in ids for delta in reader.push(token_id)]
    assert "".join(texts) == "ok \U0001f600" and "\ufffd" not in "".join(texts)
    assert reader.finish() == []
