"""The replay map: turns that come back spelled otherwise, edited, from another tenant, after a restart (about 4 s)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.cache.store import PageStore
from cedar.cache.turns import ReplayMap, visible_digest
from cedar.chat.encode import Conversation, Message, Tool, ToolCall, encode
from cedar.chat.parse import Answer, AnswerReader, ChatParser
from cedar.chat.tokenizer import DSML, END_THINK, EOS, IMAGE, Tokenizer, train_tokenizer

CORPUS = ["Once upon a time there was a small red fox. It lived near a river; room 1234 holds {'key': 17}. "] * 4
TOOLS = (Tool(name="look", parameters={"type": "object"}),)
ASKED = Message(role="user", content="Where is the fox?")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(CORPUS, 300)


@pytest.fixture
def turns(tokenizer: Tokenizer) -> ReplayMap:
    return ReplayMap(tokenizer, b"one model")


def oddly(tokenizer: Tokenizer, text: str, seed: int = 0) -> list[int]:
    """Ids of a text that no encoder would give: it is cut at random places first, as sampling may."""
    draw, ids, specials = random.Random(seed), [], (END_THINK, DSML)
    while text:
        mark = next((name for name in specials if text.startswith(name)), None)
        if mark is not None:
            ids.append(tokenizer.special[mark])
            text = text[len(mark) :]
            continue
        stop = min([draw.randrange(1, 4), *(text.find(name) for name in specials if name in text)])
        ids += tokenizer.encode(text[:stop])
        text = text[stop:]
    return ids


def call_text(*values: tuple[str, str, bool]) -> str:
    said = f'\n\n<{DSML} calls>\n<{DSML} invoke name="look">\n'
    for name, value, is_text in values:
        said += f'<{DSML} parameter name="{name}" string="{str(is_text).lower()}">{value}</{DSML} parameter>\n'
    return said + f"</{DSML} invoke>\n</{DSML} calls>"


def read(tokenizer: Tokenizer, ids: list[int], *, thinking: bool) -> Answer:
    reader, answer = AnswerReader(tokenizer, ChatParser(thinking=thinking)), Answer()
    for token_id in ids:
        answer.add(reader.push(token_id))
    answer.add(reader.finish())
    return answer


def asked(*messages: Message, thinking: bool = True, tools: tuple[Tool, ...] = TOOLS) -> Conversation:
    return Conversation(messages=messages, thinking=thinking, tools=tools)


def answered(
    turns: ReplayMap, tokenizer: Tokenizer, before: Conversation, text: str, salt: bytes = b""
) -> tuple[list[int], Message]:
    """(prompt and answer as the cache has them, the message a faithful client would send back)."""
    prompt = encode(before, tokenizer)
    said = oddly(tokenizer, text)
    answer = read(tokenizer, said, thinking=before.thinking)
    assert turns.record(prompt, said, answer, salt)
    calls = tuple(ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in answer.calls)
    message = Message(role="assistant", content=answer.content, reasoning=answer.reasoning, tool_calls=calls)
    return [*prompt, *said], message


def result(message: Message) -> Message:
    return Message(role="tool", content="by the river", tool_call_id=message.tool_calls[0].id)


REASONED = f"The user wants the fox.\nI look.{END_THINK}\n\nLet me look." + call_text(
    ("place", "river  bank", True), ("depth", "2.0", False), ("all", "[1, {}]", False)
)
SPELLINGS: dict[str, Callable[[Message], Message]] = {
    "as it was": lambda m: m,
    "no reasoning": lambda m: replace(m, reasoning=""),
    "blank reasoning": lambda m: replace(m, reasoning=" \n"),
    "white space": lambda m: replace(m, content=f"\n{m.content} \r\n", reasoning=m.reasoning + "\n"),
    "parts": lambda m: replace(m, content=(str(m.content),)),
    "other arguments' order": lambda m: replace(
        m,
        tool_calls=tuple(
            replace(
                c,
                arguments=json.dumps(dict(reversed(json.loads(c.arguments).items())), indent=2).replace("2.0", "2"),
            )
            for c in m.tool_calls
        ),
    ),
    "other ids": lambda m: replace(m, tool_calls=tuple(replace(c, id="toolu_" + c.id) for c in m.tool_calls)),
}
EDITS: dict[str, Callable[[Message], Message]] = {
    "text": lambda m: replace(m, content="Let me see."),
    "reasoning": lambda m: replace(m, reasoning="I guess."),
    "argument": lambda m: replace(
        m, tool_calls=tuple(replace(c, arguments=c.arguments.replace("river", "forest")) for c in m.tool_calls)
    ),
    "function": lambda m: replace(m, tool_calls=tuple(replace(c, name="see") for c in m.tool_calls)),
    "no call": lambda m: replace(m, tool_calls=()),
}


@pytest.mark.parametrize("how", SPELLINGS)
def test_a_turn_spelled_otherwise_has_its_own_ids(turns: ReplayMap, tokenizer: Tokenizer, how: str) -> None:
    held, message = answered(turns, tokenizer, asked(ASKED), REASONED)
    sent = SPELLINGS[how](message)
    recall = turns.reader(b"")
    ids = encode(asked(ASKED, sent, result(sent)), tokenizer, recall)
    assert ids[: len(held)] == held and ids[len(held)] == tokenizer.special[EOS]
    assert (recall.counts.hits, recall.counts.misses) == (1, 0) and recall.warnings == []
    assert recall.counts.restored == int("reasoning" in how)
    # and without the map it would not have matched
    assert encode(asked(ASKED, sent, result(sent)), tokenizer)[: len(held)] != held


@pytest.mark.parametrize("how", EDITS)
def test_an_edited_turn_is_encoded_as_it_came(turns: ReplayMap, tokenizer: Tokenizer, how: str) -> None:
    _, message = answered(turns, tokenizer, asked(ASKED), REASONED)
    sent = EDITS[how](message)
    recall = turns.reader(b"")
    conversation = asked(ASKED, sent, Message(role="user", content="And?"))
    assert encode(conversation, tokenizer, recall) == encode(conversation, tokenizer)
    assert (recall.counts.hits, recall.counts.misses) == (0, 1)


def test_several_turns_follow_each_other(turns: ReplayMap, tokenizer: Tokenizer) -> None:
    """The second turn's place is told by the first one's own ids, whatever the client made of them."""
    _, first = answered(turns, tokenizer, asked(ASKED), REASONED)
    before = asked(ASKED, first, result(first))
    prompt = encode(before, tokenizer, turns.reader(b""))
    said = oddly(tokenizer, f"So.{END_THINK}It is by the river.", 5)
    assert turns.record(prompt, said, read(tokenizer, said, thinking=True), b"")
    bare = replace(first, reasoning="", content="Let me look. ")
    second = Message(role="assistant", content=" It is by the river.")
    recall = turns.reader(b"")
    more = Message(role="user", content="Thanks.")
    ids = encode(asked(ASKED, bare, result(first), second, more), tokenizer, recall)
    assert ids[: len(prompt) + len(said)] == [*prompt, *said] and recall.counts.restored == 2


def test_the_ids_of_calls_find_a_turn_behind_an_edit(turns: ReplayMap, tokenizer: Tokenizer) -> None:
    """Another system prompt shares no page, but the reasoning of a tool turn is still known (serving.md 6.2)."""
    held, message = answered(turns, tokenizer, asked(ASKED), REASONED)
    recall = turns.reader(b"")
    sent = replace(message, reasoning="")
    system = Message(role="system", content="It is Monday.")
    ids = encode(asked(system, ASKED, sent, result(sent)), tokenizer, recall)
    assert recall.counts.restored == 1 and tokenizer.decode(ids).count("The user wants the fox.") == 1
    strange = replace(sent, tool_calls=tuple(replace(call, id="other") for call in sent.tool_calls))
    recall = turns.reader(b"")
    encode(asked(system, ASKED, strange, result(strange)), tokenizer, recall)
    assert recall.counts.unreasoned == 1 and "without reasoning_content" in recall.warnings[0]


def test_without_tools_only_the_answer_is_put_in(turns: ReplayMap, tokenizer: Tokenizer) -> None:
    """The template drops earlier reasoning there; what it shows are still the generated ids."""
    said = oddly(tokenizer, f"Hm, a fox.{END_THINK}By the river.")
    prompt = encode(asked(ASKED, tools=()), tokenizer)
    assert turns.record(prompt, said, read(tokenizer, said, thinking=True), b"")
    back = Message(role="assistant", content="By the river.")
    recall = turns.reader(b"")
    ids = encode(asked(ASKED, back, Message(role="user", content="And?"), tools=()), tokenizer, recall)
    answer = said[said.index(tokenizer.special[END_THINK]) :]
    start = len(prompt) - 1
    assert ids[start : start + len(answer)] == answer and recall.counts.restored == 0


def test_a_turn_that_did_not_think_in_a_history_that_shows_thoughts(turns: ReplayMap, tokenizer: Tokenizer) -> None:
    said = oddly(tokenizer, "By the river.")
    prompt = encode(asked(ASKED, thinking=False), tokenizer)
    assert turns.record(prompt, said, read(tokenizer, said, thinking=False), b"")
    back, more = Message(role="assistant", content="By the river."), Message(role="user", content="And?")
    ids = encode(asked(ASKED, back, more, thinking=False), tokenizer, turns.reader(b""))
    assert ids[: len(prompt) + len(said)] == [*prompt, *said]


def test_tenants_share_no_turn_and_forgetting_is_theirs_alone(turns: ReplayMap, tokenizer: Tokenizer) -> None:
    _, message = answered(turns, tokenizer, asked(ASKED), REASONED, b"one")
    back = asked(ASKED, message, result(message))

    def hits(salt: bytes) -> int:
        recall = turns.reader(salt)
        encode(back, tokenizer, recall)
        return recall.counts.hits

    assert (hits(b"one"), hits(b"two"), hits(b"")) == (1, 0, 0)
    turns.forget(b"two")
    assert hits(b"one") == 1
    turns.forget(b"one")
    assert hits(b"one") == 0 and len(turns) == 0 and turns.num_bytes == 0


@pytest.mark.parametrize(
    ("text", "thinking"),
    [
        (call_text(("depth", "{", False)), False),
        ("I look." + call_text(("place", "bank", True)), True),
        ("", False),
    ],
    ids=["arguments that are no JSON", "calls inside the reasoning", "nothing"],
)
def test_what_cannot_be_told_from_its_text_is_not_kept(
    turns: ReplayMap, tokenizer: Tokenizer, text: str, thinking: bool
) -> None:
    prompt, said = encode(asked(ASKED, thinking=thinking), tokenizer), oddly(tokenizer, text)
    assert not turns.record(prompt, said, read(tokenizer, said, thinking=thinking), b"")
    assert len(turns) == 0


def test_what_the_client_did_not_get_is_not_kept(turns: ReplayMap, tokenizer: Tokenizer) -> None:
    prompt = encode(asked(ASKED, thinking=False), tokenizer)
    said = oddly(tokenizer, "By the river. STOP and more")
    assert not turns.record(prompt, said, Answer(content="By the river."), b"")
    said = [*oddly(tokenizer, "By the river."), tokenizer.special[IMAGE]]
    assert not turns.record(prompt, said, read(tokenizer, said, thinking=False), b"")
    assert not turns.record(prompt[:-1], said[:-1], Answer(content="By the river."), b"")


def test_a_restart_remembers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def open_tier() -> PageStore:
        return PageStore(tmp_path, fingerprint=b"f", payload_bytes=5000, budget_bytes=2**26)

    store = open_tier()
    held, message = answered(ReplayMap(tokenizer, b"m", store=store), tokenizer, asked(ASKED), REASONED, b"salt")
    assert store.flush() and store.describe()["turns"] == 2
    store.close()
    store = open_tier()
    turns = ReplayMap(tokenizer, b"m", store=store)
    sent = replace(message, reasoning="")
    recall = turns.reader(b"salt")
    assert encode(asked(ASKED, sent, result(sent)), tokenizer, recall)[: len(held)] == held
    system = Message(role="system", content="It is Monday.")
    recall = turns.reader(b"salt")
    encode(asked(system, ASKED, sent, result(sent)), tokenizer, recall)
    assert recall.counts.restored == 1
    with store._lock:
        store._index.execute("UPDATE turns SET bytes = X'00'")
        store._index.commit()
    recall = ReplayMap(tokenizer, b"m", store=store).reader(b"salt")
    encode(asked(ASKED, sent, result(sent)), tokenizer, recall)
    assert recall.counts.hits == 0 and store.stats.failed == {"checksum": 2}
    turns.forget()
    assert store.describe()["turns"] == 0
    store.close()


def test_it_is_bounded(tokenizer: Tokenizer) -> None:
    turns = ReplayMap(tokenizer, b"m", max_turns=10, max_bytes=2000)
    for number in range(40):
        answered(turns, tokenizer, asked(replace(ASKED, content=str(number)), thinking=False), "By the river.")
        assert len(turns) <= 10 and turns.num_bytes <= 2000
    assert len(turns) >= 5


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text(max_size=4), json_values, max_size=4), data=st.data())
@settings(max_examples=40)
def test_no_spelling_of_equal_arguments_differs(arguments: dict[str, object], data: st.DataObject) -> None:
    shuffled = dict(data.draw(st.permutations(list(arguments.items()))))
    other = json.dumps(shuffled, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1])))
    assert visible_digest("x", [("f", json.dumps(arguments))]) == visible_digest("x ", [("f", other)])
    changed = {**arguments, "new": 1}
    assert (
        visible_digest("x", [("f", json.dumps(changed))]) != visible_digest("x", [("f", other)]) or "new" in arguments
    )
