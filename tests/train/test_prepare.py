"""Preparing data: corpora by name, chats and tool calls as the server renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cedar.chat.encode import Conversation, Message, Tool, ToolCall, parse_messages, render, to_ids
from cedar.chat.tokenizer import EOS, Tokenizer
from cedar.errors import ConfigError
from cedar.train.corpus import open_corpus
from cedar.train.prepare import chat_renderer, prepare
from cedar.train.tasks import sample_text

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT: dict[str, Any] = {
    "source": "own/tools",
    "tools": [{"type": "function", "function": {"name": "get_time", "description": "Time.", "parameters": SCHEMA}}],
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What time is it in Rome and in Oslo?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"name": "get_time", "arguments": '{"city": "Rome"}'},
                {"name": "get_time", "arguments": '{"city": "Oslo"}'},
            ],
        },
        {"role": "tool", "name": "get_time", "content": '{"time": "10:00"}'},
        {"role": "tool", "name": "get_time", "content": '{"time": "11:00"}'},
        {"role": "assistant", "content": "Ten and eleven."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "You are welcome."},
    ],
}


def served(messages: list[dict[str, Any]], tokenizer: Tokenizer, *, header: bool = True) -> list[int]:
    """The ids that a server makes of the same chat in OpenAI's shape."""
    numbered, made, answered = [], 0, 0
    for message in messages:
        message = dict(message)
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                calls.append({"id": f"call_{made}", "type": "function", "function": call})
                made += 1
            message["tool_calls"] = calls
        if message["role"] == "tool":
            message["tool_call_id"] = f"call_{answered}"
            answered += 1
        numbered.append(message)
    tools = tuple(Tool(**tool["function"]) for tool in CHAT["tools"])
    conversation = Conversation(messages=parse_messages(numbered), tools=tools, thinking=False)
    return to_ids(render(conversation, generation_header=header), tokenizer)


# field report E13: training text in another format than serving's
def test_tool_chats_are_the_ids_that_the_server_sends(tokenizer: Tokenizer) -> None:
    ids, learn = chat_renderer(tokenizer)(CHAT)
    assert ids == served(CHAT["messages"], tokenizer, header=False)
    learnt = np.array(learn)
    starts = np.flatnonzero(learnt & ~np.concatenate([[False], learnt[:-1]]))
    # each answer begins where a prompt of the server's ends
    prompts = [served(CHAT["messages"][:n], tokenizer) for n in (2, 5, 7)]
    assert starts.tolist() == [len(prompt) for prompt in prompts]
    assert all(ids[: len(prompt)] == prompt for prompt in prompts)
    said = tokenizer.decode([i for i, own in zip(ids, learn, strict=True) if own])
    assert said.count(EOS) == 3
    assert 'name="city" string="true">Rome' in said
    assert "Ten and eleven." in said
    assert "10:00" not in said


def test_a_chat_that_is_none_is_left_out(tokenizer: Tokenizer) -> None:
    run = chat_renderer(tokenizer)
    assert run({"messages": "text"}) == ([], [])
    assert run({"messages": [{"role": "narrator", "content": "x"}]}) == ([], [])
    assert run({"messages": [{"role": "user", "content": "no answer"}]}) == ([], [])


def test_calls_without_answers_render_as_encoded_alone(tokenizer: Tokenizer) -> None:
    """The same pieces, joined as `encode` joins them: text beside text is one run."""
    call = ToolCall(id="a", name="get_time", arguments='{"city": "Rome"}')
    messages = (Message(role="user", content="Rome?"), Message(role="assistant", tool_calls=(call,)))
    conversation = Conversation(messages=messages, tools=(Tool(**CHAT["tools"][0]["function"]),), thinking=False)
    document = {
        "tools": CHAT["tools"],
        "messages": [
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "get_time", "arguments": call.arguments}]},
        ],
    }
    assert chat_renderer(tokenizer)(document)[0] == to_ids(render(conversation, generation_header=False), tokenizer)


def write(folder: Path, name: str, *documents: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def test_corpora_by_name_with_limits_and_sources(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name in ("tales", "manuals"):
        write(
            tmp_path / name, "train", {"id": f"{name}-1", "text": sample_text(3, 20)}, {"id": f"{name}-2", "text": "b."}
        )
        write(tmp_path / name, "validation", {"id": "v", "text": f"The {name}."})
    plain = {
        "source": "own/plain",
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    }
    write(tmp_path / "chats", "train", CHAT, plain)
    write(tmp_path / "chats", "validation", CHAT, plain)
    (tmp_path / "order").write_text("tales-2\ttable\ntales-1\n", encoding="utf-8")
    infos = prepare(
        tmp_path / "out",
        texts={"stories": tmp_path / "tales", "docs": tmp_path / "manuals"},
        chats=tmp_path / "chats",
        order={"stories": tmp_path / "order"},
        max_characters={"docs": 40},
        chat_sources={"instruct": ["own/plain"], "tools": ["own/tools"]},
        tokenizer=tokenizer,
        report=lambda line: None,
    )
    assert sorted(infos) == sorted(
        f"{n}/{s}" for n in ("docs", "instruct", "stories", "tools") for s in ("train", "validation")
    )
    stories = open_corpus(tmp_path / "out" / "stories" / "train", tokenizer)
    assert tokenizer.decode(stories.tokens[: stories.starts[1]].tolist()) == "b." + EOS
    docs = open_corpus(tmp_path / "out" / "docs" / "train", tokenizer)
    # a blank at the cut goes with it
    assert 38 <= len(tokenizer.decode(docs.tokens.tolist()).removesuffix(EOS)) <= 40
    tools = open_corpus(tmp_path / "out" / "tools" / "train", tokenizer)
    assert tools.num_documents == 1
    assert tools.learn is not None
    assert tools.learn.tolist() == chat_renderer(tokenizer)(CHAT)[1]
    for wrong in ({"max_characters": {"books": 1}}, {"order": {"books": tmp_path / "order"}}):
        with pytest.raises(ConfigError, match="no corpus of texts called 'books'"):
            prepare(tmp_path / "out", texts={"stories": tmp_path / "tales"}, tokenizer=tokenizer, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="both make a corpus called 'instruct'"):
        prepare(tmp_path / "out", texts={"instruct": tmp_path / "tales"}, chats=tmp_path / "chats", tokenizer=tokenizer)
