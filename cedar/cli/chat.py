"""A conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from cedar.chat.parse import Answer
from cedar.errors import RequestError
from cedar.llm import LLM

# arrow keys and history in `input`, where there is a terminal library
with contextlib.suppress(ImportError):
    import readline  # noqa: F401

HELP = "/reset forgets the conversation, /exit leaves; Ctrl-C stops an answer, and leaves at an empty line"


def converse(llm: LLM, *, system: str | None, ask: Callable[[str], str] = input, **options: Any) -> None:
    """Read a line, stream the answer, until /exit, the end of input, or Ctrl-C twice in a row.

    Args:
        system: First message of every conversation.
        ask: Reads a line from the user.
        options: As for `LLM.stream_chat`.
    """
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    leaving = False
    print(HELP, file=sys.stderr)
    while True:
        try:
            line = ask("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if leaving:
                return
            leaving = True
            print("Ctrl-C again leaves", file=sys.stderr)
            continue
        leaving = False
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
            print("forgotten", file=sys.stderr)
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                answer, leaving = _speak(llm, messages, **options)
            except RequestError as error:
                messages.pop()
                print(f"cedar: {error}", file=sys.stderr)
            else:
                messages.append({"role": "assistant", "content": answer.content})


def _speak(llm: LLM, messages: list[dict[str, str]], **options: Any) -> tuple[Answer, bool]:
    """Stream one answer; the second value tells that Ctrl-C stopped it."""
    answer, interrupted = Answer(), False
    deltas = llm.stream_chat(messages, **options)
    try:
        for delta in deltas:
            answer.add([delta])
            # thoughts are set apart: dim, as far as the terminal can
            print(f"\033[2m{delta.reasoning}\033[0m" if delta.reasoning else delta.content, end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print(" (stopped)", end="")
    finally:
        deltas.close()
    print()
    if llm.last is not None and not interrupted:
        end = llm.last
        rate = end.completion_tokens / end.decode_s if end.decode_s else 0.0
        print(
            f"[{end.prompt_tokens} + {end.completion_tokens} tokens, {rate:.0f} tokens/s, {end.reason}]",
            file=sys.stderr,
        )
    return answer, interrupted
