"""A folder of JSON lines -> a data folder: tokenizer and packed corpora. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from cedar.chat.encode import Conversation, Message, Tool, ToolCall, render, to_ids
from cedar.chat.tokenizer import Tokenizer
from cedar.errors import ConfigError, FormatError
from cedar.train.corpus import make_tokenizer, read_documents, take_texts, write_chats, write_texts
from cedar.train.tasks import sample_text

# what the tokenizer sees of each kind, characters
_TOKENIZER_TEXT = 8_000_000
_TOKENIZER_CHATS = 2_000_000
_VALIDATION_TEXT = 1_000_000


def prepare(
    out: str | Path,
    *,
    texts: Mapping[str, str | Path] | None = None,
    chats: str | Path | None = None,
    vocab_size: int = 1024,
    order: Mapping[str, str | Path] | None = None,
    max_characters: Mapping[str, int] | None = None,
    chat_sources: Mapping[str, Sequence[str]] | None = None,
    max_chat_tokens: int = 2048,
    tokenizer: Tokenizer | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Make a data folder: tokenizer.json, and for each corpus `NAME/train` and `NAME/validation`.

    Args:
        texts: Corpus name -> folder of JSON lines with `text`; files whose name begins with `validation` are
            held out. The lookup tasks take their filler from the corpus named `stories`.
        chats: The same with `messages` (and `tools`).
        order: Corpus name -> file of ids in the order in which its training texts are taken (a table will do).
        max_characters: Corpus name -> training characters at most.
        chat_sources: Corpus name -> the sources of its chats; by default one corpus `instruct` of all of them.
        max_chat_tokens: Longer chats are left out.
        tokenizer: Use this one instead of training one on the texts.

    Raises:
        FormatError: Text that cannot be read; the message names file and line.
        ConfigError: A limit or an order names a corpus that is not there, or two corpora have one name.
    """
    out = Path(out)
    folders = {name: Path(folder) for name, folder in (texts or {}).items()}
    chosen = dict(chat_sources or {"instruct": ()}) if chats is not None else {}
    limits, orders = dict(max_characters or {}), dict(order or {})
    if unknown := sorted((set(limits) | set(orders)) - set(folders)):
        raise ConfigError(f"there is no corpus of texts called {unknown[0]!r} to limit or order; {sorted(folders)} are")
    if twice := sorted(set(folders) & set(chosen)):
        raise ConfigError(f"texts and chats both make a corpus called {twice[0]!r}; name one of them otherwise")
    out.mkdir(parents=True, exist_ok=True)
    taken = {
        name: list(
            take_texts(
                _documents(folder, "train"),
                order=Path(orders[name]) if name in orders else None,
                max_characters=limits.get(name),
            )
        )
        for name, folder in folders.items()
    }
    if tokenizer is None:
        # the start of each text, so that no single author shapes the vocabulary, and the tasks' own words
        pieces = [sample_text(1, 4000), *_chat_texts(chats, [s for sources in chosen.values() for s in sources])]
        for documents in taken.values():
            share = max(1, _TOKENIZER_TEXT // len(taken) // max(1, len(documents)))
            pieces += [text[:share] for text in documents]
        size = sum(map(len, pieces))
        tokenizer = make_tokenizer(pieces, vocab_size, sample_characters=size)
    tokenizer.save(out)
    infos: dict[str, Any] = {}
    for name, documents in taken.items():
        source = folders[name].name
        infos[f"{name}/train"] = write_texts(documents, out / name / "train", tokenizer, source=source)
        held_out = take_texts(_documents(folders[name], "validation"), max_characters=_VALIDATION_TEXT)
        infos[f"{name}/validation"] = write_texts(
            held_out, out / name / "validation", tokenizer, source=f"{source} (validation)"
        )
    if chats is not None:
        render_chat = chat_renderer(tokenizer)
        for (name, sources), split in product(chosen.items(), ("train", "validation")):
            infos[f"{name}/{split}"] = write_chats(
                _chosen_chats(Path(chats), split, sources),
                out / name / split,
                tokenizer,
                render=render_chat,
                max_tokens=max_chat_tokens,
                source=", ".join(sources) or Path(chats).name,
            )
    for name, info in infos.items():
        report(f"{name}: {info['tokens']:,} tokens in {info['documents']:,} documents")
    return infos


def _documents(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    """Objects of the files of one split; a folder without split names is all training data."""
    files = sorted(folder.glob("*.jsonl*")) if folder.is_dir() else [folder]
    named = [file for file in files if file.name.startswith("validation")]
    chosen = named if split == "validation" else [file for file in files if file not in named]
    if not chosen:
        raise FormatError(
            f"no {split} files in {folder}: expected {split}-*.jsonl or {split}-*.jsonl.zst beside the others"
        )
    return (document for file in chosen for document in read_documents(file))


def _chosen_chats(folder: Path, split: str, sources: Sequence[str]) -> Iterator[dict[str, Any]]:
    return (d for d in _documents(folder, split) if not sources or d.get("source") in sources)


def _chat_texts(chats: str | Path | None, sources: Sequence[str]) -> Iterator[str]:
    """What chats say, for the tokenizer."""
    size = 0
    for document in _chosen_chats(Path(chats), "train", sources) if chats is not None else ():
        text = "\n".join(str(message.get("content", "")) for message in document.get("messages", ()))
        yield text
        size += len(text)
        if size > _TOKENIZER_CHATS:
            return


def chat_renderer(tokenizer: Tokenizer) -> Callable[[dict[str, Any]], tuple[list[int], list[bool]]]:
    """Chats as the server renders them, thinking off; what an assistant turn says, calls included, is learnt.

    Each answer is cut from its prompt by rendering both, so what is learnt is what follows the very ids that
    the server would send.
    """

    def run(document: dict[str, Any]) -> tuple[list[int], list[bool]]:
        conversation = _conversation(document)
        if conversation is None:
            return [], []
        messages = conversation.messages
        ids: list[int] = []
        learn: list[bool] = []
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prompt = to_ids(render(_first(conversation, number)), tokenizer)
            answered = to_ids(render(_first(conversation, number + 1), generation_header=False), tokenizer)
            if prompt[: len(ids)] != ids or answered[: len(prompt)] != prompt:
                # a turn that changes how earlier ones are rendered cannot be cut into prompt and answer
                return [], []
            learn += [False] * (len(prompt) - len(learn)) + [True] * (len(answered) - len(prompt))
            ids = answered
        return ids, learn

    return run


def _first(conversation: Conversation, count: int) -> Conversation:
    return Conversation(messages=conversation.messages[:count], tools=conversation.tools, thinking=False)


def _conversation(document: dict[str, Any]) -> Conversation | None:
    """A data set's chat; None for one that is not of this kind. Calls have no ids there: they are numbered."""
    raw = document.get("messages")
    if not isinstance(raw, list):
        return None
    messages: list[Message] = []
    calls, answered = 0, 0
    for item in raw:
        role, content = item.get("role"), str(item.get("content") or "")
        if role == "tool":
            messages.append(Message(role="tool", content=content, tool_call_id=f"call_{answered}"))
            answered += 1
        elif role == "assistant":
            made = tuple(
                ToolCall(id=f"call_{calls + i}", name=str(call["name"]), arguments=str(call["arguments"]))
                for i, call in enumerate(item.get("tool_calls") or ())
            )
            calls += len(made)
            messages.append(Message(role="assistant", content=content, tool_calls=made))
        elif role in ("system", "user"):
            messages.append(Message(role=role, content=content))
        else:
            return None
    functions = [tool["function"] for tool in document.get("tools") or ()]
    tools = tuple(
        Tool(name=f["name"], description=f.get("description", ""), parameters=f.get("parameters")) for f in functions
    )
    return Conversation(messages=tuple(messages), tools=tools, thinking=False)
