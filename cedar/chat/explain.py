"""Where two prompts part: what a prefix cache can share, and the first token from which it cannot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cedar.chat.encode import Conversation, encode, parse_messages, parse_tools
from cedar.chat.tokenizer import Tokenizer
from cedar.errors import RequestError

CONTEXT_TOKENS = 16


def read_prompt(path: Path, tokenizer: Tokenizer, *, thinking: bool) -> list[int]:
    """Token ids of a file: a chat request if it is a JSON object with messages, else its text.

    Raises:
        RequestError: The file cannot be read, or its messages break a rule.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot read {path}: {error}") from None
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict) or "messages" not in body:
        return tokenizer.encode(text)
    asked = body.get("thinking")
    if isinstance(asked, dict):
        thinking = asked.get("type") == "enabled"
    conversation = Conversation(
        messages=parse_messages(body["messages"]), tools=parse_tools(body.get("tools") or []), thinking=thinking
    )
    return encode(conversation, tokenizer)


def explain(one: Sequence[int], other: Sequence[int], tokenizer: Tokenizer, *, names: tuple[str, str]) -> str:
    """The first token that differs, with some context, as each side has it."""
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if shared == len(one) == len(other):
        return f"the prompts are equal: {shared} tokens"
    lines = [f"{shared} tokens are shared; token {shared} is the first that differs"]
    before = tokenizer.decode(list(one[max(shared - CONTEXT_TOKENS, 0) : shared]))
    lines.append(f"  before it: {before!r}")
    for name, ids in zip(names, (one, other), strict=True):
        if shared >= len(ids):
            lines.append(f"  {name} ends here, after {len(ids)} tokens")
            continue
        here = tokenizer.decode([ids[shared]])
        after = tokenizer.decode(list(ids[shared : shared + CONTEXT_TOKENS]))
        lines.append(f"  {name}: id {ids[shared]} {here!r}, and on: {after!r}")
    return "\n".join(lines)
