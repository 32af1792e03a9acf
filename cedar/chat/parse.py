"""The model's text -> reasoning, answer and tool calls, piece by piece.

The parser gets text in pieces of any size and gives the same result whatever the cuts: a tail that could
still become a mark is held back until it is decided. It accepts everything a model may produce, keeps
markup out of what people read, and never raises.

Source: engram-dspark-vision-chat.md 5.6 (the lenient machine).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cedar.chat.tokenizer import BOS, DSML, END_THINK, EOS, IMAGE, PAD, REMINDER, SYSTEM, StreamDecoder, Tokenizer

_OPEN = f"<{DSML}"
_CLOSE = f"</{DSML}"
# V4 wrote its tags without the space and called the block tool_calls
_INVOKES = (f'{_OPEN} invoke name="', f'{_OPEN}invoke name="')
_PARAMETERS = (f'{_OPEN} parameter name="', f'{_OPEN}parameter name="')
_BLOCK_ENDS = (f"{_CLOSE} calls>", f"{_CLOSE} tool_calls>", f"{_CLOSE}calls>", f"{_CLOSE}tool_calls>")
_PARAMETER_HEAD = re.compile(r'(.*?)"(?: string="([^"]*)")?\s*>', re.DOTALL)
# turn marks and fillers carry no text for people; grounding marks of an answer do, and stay
_SILENT = (BOS, EOS, PAD, SYSTEM, REMINDER, IMAGE)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of one tool call: first its id and name, then pieces of its arguments (JSON text)."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one piece of output added: exactly one of the three is not empty."""

    reasoning: str = ""
    content: str = ""
    call: CallDelta | None = None


@dataclass(slots=True)
class ParsedCall:
    """One finished tool call; `valid` tells whether `arguments` is a JSON object."""

    id: str
    name: str
    arguments: str = ""

    @property
    def valid(self) -> bool:
        try:
            return isinstance(json.loads(self.arguments), dict)
        except ValueError:
            return False


@dataclass(slots=True)
class Answer:
    """All deltas of one answer put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.reasoning += delta.reasoning
            self.content += delta.content
            if delta.call is not None and delta.call.id:
                self.calls.append(ParsedCall(id=delta.call.id, name=delta.call.name))
            elif delta.call is not None:
                self.calls[delta.call.index].arguments += delta.call.arguments


class ChatParser:
    """Reads one answer.

    Attributes:
        stopped: A stop string was met; what comes after it is ignored.
        stop_met: Which one.
        num_calls: Tool calls opened so far.

    Args:
        thinking: The prompt ended with an open `<think>`, so the answer begins inside the reasoning.
        stop: Strings that end the answer where they appear in its content (not in reasoning or calls).
        new_call_id: Makes the id of a call.
    """

    def __init__(
        self, *, thinking: bool, stop: Sequence[str] = (), new_call_id: Callable[[], str] | None = None
    ) -> None:
        self.stopped, self.stop_met = False, ""
        self.num_calls = 0
        self._read = self._reasoning if thinking else self._content
        self._at_start = True
        self._rest = ""
        self._out: list[Delta] = []
        self._stop = tuple(stop)
        self._new_call_id = new_call_id or (lambda: f"call_{uuid.uuid4().hex[:24]}")
        self._num_parameters = 0
        self._is_text = True

    @property
    def in_reasoning(self) -> bool:
        """The text read so far leaves the answer inside its reasoning."""
        return self._read == self._reasoning

    def push(self, text: str) -> list[Delta]:
        """Deltas that `text` decides."""
        self._rest += text
        # each reader returns True once it has switched or consumed something and should be asked again
        while self._rest and self._read():
            pass
        return self._take()

    def finish(self) -> list[Delta]:
        """What was held back; the output is over."""
        if self._read in (self._reasoning, self._content):
            self._say(self._rest)
        self._rest = ""
        self._read = self._nothing
        return self._take()

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _say(self, text: str) -> None:
        if text:
            self._out.append(Delta(reasoning=text) if self.in_reasoning else Delta(content=text))

    def _skip_first_newlines(self) -> None:
        if self._at_start:
            self._rest = self._rest.lstrip("\n")
            self._at_start = not self._rest

    def _reasoning(self) -> bool:
        self._skip_first_newlines()
        found = _first(self._rest, (END_THINK, _OPEN))
        if found is None:
            self._say_all_but(_held(self._rest, (END_THINK, _OPEN)))
            return False
        start, mark = found
        self._say(self._rest[:start].rstrip("\n"))
        self._at_start = True
        if mark == END_THINK:
            self._rest, self._read = self._rest[start + len(mark) :], self._content
        else:
            self._rest, self._read = self._rest[start:], self._block
        return True

    def _content(self) -> bool:
        self._skip_first_newlines()
        marks = (END_THINK, _OPEN, *self._stop)
        found = _first(self._rest, marks)
        if found is None:
            self._say_all_but(_held(self._rest, marks))
            return False
        start, mark = found
        if mark in self._stop:
            self._say(self._rest[:start])
            self.stopped, self.stop_met, self._read = True, mark, self._nothing
        elif mark == END_THINK:
            self._say(self._rest[:start])
            self._rest = self._rest[start + len(mark) :]
        else:
            self._say(self._rest[:start].rstrip("\n"))
            self._rest, self._read = self._rest[start:], self._block
        return True

    def _say_all_but(self, num_held: int) -> None:
        split = len(self._rest) - num_held
        self._say(self._rest[:split])
        self._rest = self._rest[split:]

    def _seek(self, marks: Sequence[str], *, keep: bool = False) -> str | None:
        """Drop text up to the first mark (and the mark, unless kept); without one, up to a possible beginning."""
        found = _first(self._rest, marks)
        if found is None:
            self._rest = self._rest[len(self._rest) - _held(self._rest, marks, newlines=False) :]
            return None
        start, mark = found
        self._rest = self._rest[start if keep else start + len(mark) :]
        return mark

    def _block(self) -> bool:
        """Between calls: everything but the next call or the end of the block is dropped."""
        mark = self._seek((*_INVOKES, *_BLOCK_ENDS))
        if mark is not None:
            self._read = self._name if mark in _INVOKES else self._nothing
        return mark is not None

    def _name(self) -> bool:
        name, quote, rest = self._rest.partition('"')
        if quote:
            self._out.append(Delta(call=CallDelta(index=self.num_calls, id=self._new_call_id(), name=name)))
            self.num_calls += 1
            self._num_parameters = 0
            self._rest, self._read = rest, self._call
        return bool(quote)

    def _call(self) -> bool:
        """Inside a call: a parameter, or anything that ends it, a forgotten closing tag included."""
        mark = self._seek((*_PARAMETERS, _CLOSE, *_INVOKES), keep=True)
        if mark in _PARAMETERS:
            self._rest, self._read = self._rest[len(mark) :], self._parameter
        elif mark is not None:
            self._argue("}" if self._num_parameters else "{}")
            # a closing tag ends the call whatever its name, and what follows it may be the next call
            self._rest = self._rest.removeprefix(_CLOSE)
            self._read = self._block
        return mark is not None

    def _parameter(self) -> bool:
        head = _PARAMETER_HEAD.match(self._rest)
        if head is None:
            return False
        self._is_text = head[2] != "false"
        comma = ", " if self._num_parameters else "{"
        self._argue(f"{comma}{json.dumps(head[1], ensure_ascii=False)}: " + ('"' if self._is_text else ""))
        self._num_parameters += 1
        self._rest, self._read = self._rest[head.end() :], self._value
        return True

    def _value(self) -> bool:
        found = _first(self._rest, (_CLOSE,))
        split = found[0] if found else len(self._rest) - _held(self._rest, (_CLOSE,), newlines=False)
        value, self._rest = self._rest[:split], self._rest[split:]
        self._argue(json.dumps(value, ensure_ascii=False)[1:-1] if self._is_text else value)
        if found is None:
            return False
        self._argue('"' if self._is_text else "")
        # whatever closing tag this is, it closes the value; its name is dropped with the text between tags
        self._rest, self._read = self._rest[len(_CLOSE) :], self._call
        return True

    def _argue(self, text: str) -> None:
        if text:
            self._out.append(Delta(call=CallDelta(index=self.num_calls - 1, arguments=text)))

    def _nothing(self) -> bool:
        self._rest = ""
        return False


class AnswerReader:
    """Token ids of one answer -> deltas: the decoder and the parser in a row.

    Attributes:
        reasoning_tokens: Tokens read so far that belong to the reasoning, its closing mark included.
    """

    def __init__(self, tokenizer: Tokenizer, parser: ChatParser) -> None:
        self.parser = parser
        self.reasoning_tokens = 0
        self._decoder = StreamDecoder(tokenizer)
        self._silent = {tokenizer.special[name] for name in _SILENT if name in tokenizer.special}

    @property
    def stopped(self) -> bool:
        """A stop string was met."""
        return self.parser.stopped

    def push(self, token_id: int) -> list[Delta]:
        """Deltas that one more token decides."""
        self.reasoning_tokens += self.parser.in_reasoning
        return [] if token_id in self._silent else self.parser.push(self._decoder.push(token_id))

    def finish(self) -> list[Delta]:
        """What was held back; the answer is over."""
        return self.parser.push(self._decoder.finish()) + self.parser.finish()


class TextReader:
    """Token ids of a continuation that is no chat -> deltas of plain text; the shape of `AnswerReader`."""

    reasoning_tokens = 0

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        """A stop string was met."""
        return self._stops.met

    def push(self, token_id: int) -> list[Delta]:
        """The text that one more token decides."""
        return self._delta(self._stops.push(self._decoder.push(token_id)))

    def finish(self) -> list[Delta]:
        """What was held back; the text is over."""
        return self._delta(self._stops.push(self._decoder.finish()) + self._stops.finish())

    def _delta(self, text: str) -> list[Delta]:
        return [Delta(content=text)] if text else []


class StopStrings:
    """Text up to the first stop string, for a continuation that is not a chat.

    Attributes:
        met: A stop string was met; nothing more comes.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.met = False
        self._stop = tuple(stop)
        self._rest = ""

    def push(self, text: str) -> str:
        """What `text` decides."""
        if self.met:
            return ""
        self._rest += text
        found = _first(self._rest, self._stop)
        self.met = found is not None
        split = found[0] if found else len(self._rest) - _held(self._rest, self._stop, newlines=False)
        said, self._rest = self._rest[:split], self._rest[split:]
        return said

    def finish(self) -> str:
        """What was held back; the text is over."""
        return "" if self.met else self._rest


def _first(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Start and spelling of the mark that is complete first: what a reader of single characters would see."""
    best: tuple[int, int, str] | None = None
    for mark in marks:
        start = text.find(mark)
        if start >= 0 and (best is None or (start + len(mark), start) < best[:2]):
            best = (start + len(mark), start, mark)
    return None if best is None else (best[1], best[2])


def _held(text: str, marks: Sequence[str], *, newlines: bool = True) -> int:
    """Length of the tail that may still belong to a mark, with the line ends before it."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    kept = text[: len(text) - longest]
    return len(text) - len(kept.rstrip("\n")) if newlines else longest
