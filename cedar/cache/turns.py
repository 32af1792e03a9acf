"""The replay map: the token ids that an assistant turn was generated as, found again when a client sends it back.

Clients keep text and JSON, not tokens. What they send back may have other white space, arguments in another
order, no reasoning: re-encoded, it parts from the tokens whose pages are in the cache, and all that follows is
computed again. The map knows a turn by what stands before it and by a spelling that such changes leave alone,
and gives back the ids. A turn that was really edited is not found. No torch.

Source: serving.md 6.5.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cedar.cache.keys import root_key
from cedar.chat.encode import Turn
from cedar.chat.parse import Answer, AnswerReader, ChatParser
from cedar.chat.tokenizer import ASSISTANT, DSML, END_THINK, THINK, Tokenizer

_DIGEST_BYTES = 16
# a value is: which turn follows, or the turn itself
_HEAD = struct.Struct("<?16s16sI")


class TurnStore(Protocol):
    """Where turns survive a restart; `cedar.cache.store.PageStore` is one."""

    def put_turn(self, key: bytes, root: bytes, value: bytes) -> bool: ...

    def get_turn(self, key: bytes) -> tuple[bytes, bytes] | None: ...

    def forget_turns(self, root: bytes | None) -> None: ...


@dataclass(frozen=True, slots=True)
class KnownTurn:
    """One turn as it was generated.

    Attributes:
        visible: Digest of the text and the calls, whatever their spelling.
        reasoning: Digest of the reasoning.
        thought: Ids of the reasoning; None if the turn began past it.
        answer: Ids after the mark that ends the reasoning.
    """

    visible: bytes
    reasoning: bytes
    thought: array[int] | None
    answer: array[int]

    def to_bytes(self) -> bytes:
        thought = array("I") if self.thought is None else self.thought
        head = _HEAD.pack(self.thought is not None, self.visible, self.reasoning, len(thought))
        return head + thought.tobytes() + self.answer.tobytes()

    @classmethod
    def from_bytes(cls, value: bytes) -> KnownTurn:
        thinks, visible, reasoning, num_thought = _HEAD.unpack_from(value)
        ids = array("I")
        ids.frombytes(value[_HEAD.size :])
        return cls(visible, reasoning, ids[:num_thought] if thinks else None, ids[num_thought:])


@dataclass(slots=True)
class TurnCounts:
    """What became of assistant turns that clients sent back.

    Attributes:
        hits: Their own ids were put in.
        restored: Those among the hits whose reasoning the client had left out.
        misses: They were encoded anew.
        unreasoned: Those among the misses that called a tool, while reasoning is shown, and came without theirs.
    """

    hits: int = 0
    restored: int = 0
    misses: int = 0
    unreasoned: int = 0

    def add(self, other: TurnCounts) -> None:
        self.hits += other.hits
        self.restored += other.restored
        self.misses += other.misses
        self.unreasoned += other.unreasoned


class ReplayMap:
    """Turns by their place and by the ids of their calls; any thread may ask.

    Args:
        fingerprint: Of the model, as for pages.
        max_turns: Turns in memory, and as many on disk; those used longest ago leave first.
        max_bytes: What their ids may take in memory.
        store: Keeps them across restarts; None keeps them in memory alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        fingerprint: bytes,
        *,
        max_turns: int = 65536,
        max_bytes: int = 64 * 2**20,
        store: TurnStore | None = None,
    ) -> None:
        self.max_turns, self.max_bytes = max_turns, max_bytes
        self.counts = TurnCounts()
        self.num_bytes = 0
        self._tokenizer, self._fingerprint, self._store = tokenizer, fingerprint, store
        self._special = {name: tokenizer.special[name] for name in (ASSISTANT, THINK, END_THINK, DSML)}
        others = set(tokenizer.special.values()) - {self._special[name] for name in (THINK, END_THINK, DSML)}
        self._foreign = frozenset(others)
        self._lock = threading.Lock()
        # by key: the tenant's root, and a turn or the key of one
        self._turns: OrderedDict[bytes, tuple[bytes, KnownTurn | bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def reader(self, salt: bytes) -> TurnReader:
        """What `cedar.chat.encode.encode` takes as `recall`; one for each request."""
        return TurnReader(self, self._root(salt))

    def record(self, prompt_ids: Sequence[int], generated: Sequence[int], answer: Answer, salt: bytes) -> bool:
        """Remember an answer; False if it cannot be told from its text, and is not kept.

        Not kept are answers that go on from a given beginning, those whose text is not what the client got
        (a stop string cut it), calls whose arguments are no JSON, and ids that no assistant turn may hold.

        Args:
            prompt_ids: The prompt, which opened the turn.
            generated: All ids that followed, without the stop token.
            answer: What the client was given.
        """
        special = self._special
        opened = tuple(prompt_ids[-2:])
        thinks = opened == (special[ASSISTANT], special[THINK])
        if not thinks and opened != (special[ASSISTANT], special[END_THINK]):
            return False
        if not generated or not self._foreign.isdisjoint(generated) or any(not call.valid for call in answer.calls):
            return False
        calls = [(call.name, call.arguments) for call in answer.calls]
        visible, reasoning = visible_digest(answer.content, calls), _text_digest(answer.reasoning)
        if (visible, reasoning) != self._read(generated, thinks=thinks):
            return False
        thought, rest = None, array("I", generated)
        if thinks:
            end = generated.index(special[END_THINK]) if special[END_THINK] in generated else len(generated)
            if end == len(generated) and calls:
                # calls out of the reasoning itself: the history would close it before them
                return False
            thought, rest = rest[:end], rest[end + 1 :]
        turn = KnownTurn(visible, reasoning, thought, rest)
        root = self._root(salt)
        key = _turn_key(root, _chain(prompt_ids[:-1]).digest(), visible)
        self._put(key, root, turn)
        if answer.calls:
            self._put(_call_key(root, [call.id for call in answer.calls]), root, key)
        return True

    def describe(self) -> dict[str, int]:
        """Sizes and counters."""
        counts = self.counts
        return {
            "turns": len(self._turns),
            "turn_bytes": self.num_bytes,
            "turn_hits": counts.hits,
            "turn_restored": counts.restored,
            "turn_misses": counts.misses,
            "turn_unreasoned": counts.unreasoned,
        }

    def forget(self, salt: bytes | None = None) -> None:
        """Forget one tenant's turns, or all, on disk too."""
        root = None if salt is None else self._root(salt)
        with self._lock:
            for key in [key for key, (owner, _) in self._turns.items() if root in (None, owner)]:
                self._drop(key)
        if self._store is not None:
            self._store.forget_turns(root)

    def find(self, root: bytes, chain: bytes, turn: Turn) -> KnownTurn | None:
        """The turn as it was generated, by its place or else by the ids of its calls."""
        message = turn.message
        text = _plain(message.content)
        if text is None:
            return None
        visible = visible_digest(text, [(call.name, call.arguments) for call in message.tool_calls])
        keys = [_turn_key(root, chain, visible)]
        if message.tool_calls:
            keys.append(_call_key(root, [call.id for call in message.tool_calls]))
        for key in keys:
            known = self._get(key)
            if known is None or known.visible != visible:
                continue
            if not message.reasoning.strip() or known.reasoning == _text_digest(message.reasoning):
                return known
        return None

    def splice(self, turn: Turn, known: KnownTurn) -> list[int]:
        """What stands between the token that opens the turn and the one that ends it."""
        think, end_think = self._special[THINK], self._special[END_THINK]
        thought = (think, *(known.thought or ())) if turn.thinks else ()
        return [*thought, end_think, *known.answer]

    def count(self, counts: TurnCounts) -> None:
        with self._lock:
            self.counts.add(counts)

    def _root(self, salt: bytes) -> bytes:
        return root_key(self._fingerprint, salt)[:_DIGEST_BYTES]

    def _read(self, generated: Sequence[int], *, thinks: bool) -> tuple[bytes, bytes]:
        """The digests of what the ids say."""
        reader, said = AnswerReader(self._tokenizer, ChatParser(thinking=thinks)), Answer()
        for token_id in generated:
            said.add(reader.push(token_id))
        said.add(reader.finish())
        calls = [(call.name, call.arguments) for call in said.calls]
        return visible_digest(said.content, calls), _text_digest(said.reasoning)

    def _put(self, key: bytes, root: bytes, value: KnownTurn | bytes) -> None:
        with self._lock:
            self._keep(key, root, value)
        if self._store is not None:
            stored = b"\1" + value if isinstance(value, bytes) else b"\0" + value.to_bytes()
            self._store.put_turn(key, root, stored)

    def _get(self, key: bytes) -> KnownTurn | None:
        with self._lock:
            found = self._turns.get(key)
            if found is not None:
                self._turns.move_to_end(key)
        value = found[1] if found is not None else None
        if value is None and self._store is not None:
            stored = self._store.get_turn(key)
            if stored is not None:
                root, (kind, rest) = stored[0], (stored[1][0], stored[1][1:])
                value = rest if kind else KnownTurn.from_bytes(rest)
                with self._lock:
                    self._keep(key, root, value)
        return self._get(value) if isinstance(value, bytes) else value

    def _keep(self, key: bytes, root: bytes, value: KnownTurn | bytes) -> None:
        self._drop(key)
        self._turns[key] = root, value
        self.num_bytes += _size(value)
        while len(self._turns) > self.max_turns or (self.num_bytes > self.max_bytes and len(self._turns) > 1):
            self._drop(next(iter(self._turns)))

    def _drop(self, key: bytes) -> None:
        found = self._turns.pop(key, None)
        if found is not None:
            self.num_bytes -= _size(found[1])


class TurnReader:
    """The turns of one request's history; call it in the order of the prompt.

    Attributes:
        counts: What became of them.
    """

    def __init__(self, turns: ReplayMap, root: bytes) -> None:
        self.counts = TurnCounts()
        self._turns, self._root = turns, root
        self._running, self._position = hashlib.sha256(), 0

    def __call__(self, ids: Sequence[int], turn: Turn) -> list[int] | None:
        self._running.update(_packed(ids[self._position :]))
        self._position = len(ids)
        known = self._turns.find(self._root, self._running.copy().digest(), turn)
        silent = turn.thinks and not turn.message.reasoning.strip()
        counts = TurnCounts()
        if known is None:
            counts.misses = 1
            counts.unreasoned = int(silent and bool(turn.message.tool_calls))
        else:
            counts.hits = 1
            counts.restored = int(silent and bool(known.thought))
        self.counts.add(counts)
        self._turns.count(counts)
        return None if known is None else self._turns.splice(turn, known)

    @property
    def warnings(self) -> list[str]:
        """What the client should know."""
        number = self.counts.unreasoned
        if not number:
            return []
        what = "1 assistant message with tool calls" if number == 1 else f"{number} assistant messages with tool calls"
        return [
            f"{what} came without reasoning_content, and the server does not remember it: it was left empty; "
            "send it back with the message"
        ]


def visible_digest(content: str, calls: Sequence[tuple[str, str]]) -> bytes:
    """What people and programs see of a turn, whatever its white space and the order of arguments.

    >>> visible_digest("Yes. ", [("f", '{"b":1.0, "a":[]}')]) == visible_digest("Yes.", [("f", '{"a": [], "b": 1}')])
    True
    """
    seen = [_level(content), [[name, _arguments(arguments)] for name, arguments in calls]]
    return _digest(json.dumps(seen, sort_keys=True, separators=(",", ":")).encode())


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return text
    return _level_numbers(value) if isinstance(value, dict) else text


def _level_numbers(value: Any) -> Any:
    # clients in JavaScript know one kind of number
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _level_numbers(item) for key, item in value.items()}
    return [_level_numbers(item) for item in value] if isinstance(value, list) else value


def _level(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").split("\n")).strip()


def _plain(content: Any) -> str | None:
    """The text of a content; None if there is more than text."""
    if isinstance(content, str):
        return content
    return "\n\n".join(content) if all(isinstance(piece, str) for piece in content) else None


def _text_digest(text: str) -> bytes:
    return _digest(_level(text).encode("utf-8", errors="surrogatepass"))


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()[:_DIGEST_BYTES]


def _packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def _chain(ids: Sequence[int]) -> Any:
    return hashlib.sha256(_packed(ids))


def _turn_key(root: bytes, chain: bytes, visible: bytes) -> bytes:
    return _digest(root + b"turn" + chain + visible)


def _call_key(root: bytes, call_ids: Sequence[str]) -> bytes:
    return _digest(root + b"call" + json.dumps(list(call_ids)).encode())


def _size(value: KnownTurn | bytes) -> int:
    if isinstance(value, bytes):
        return len(value)
    return _HEAD.size + 4 * (len(value.thought or ()) + len(value.answer))
