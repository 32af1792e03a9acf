"""Snapshots of sequences in host memory: kept some minutes, within a budget, found by the tokens before them."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cedar.cache.keys import packed


class SnapshotLike(Protocol):
    """The model's snapshot of a sequence, as far as a cache looks into it."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def decoder_replay(self) -> str: ...

    def num_bytes(self) -> int: ...

    def to_bytes(self) -> bytes: ...


def snapshot_keys(root: bytes, tokens: Sequence[int], lengths: Iterable[int]) -> dict[int, bytes]:
    """The key of each beginning of `tokens` that is asked for, by its length."""
    running, position, keys = hashlib.sha256(root + b"snapshot"), 0, {}
    for length in sorted(lengths):
        if length > len(tokens):
            break
        running.update(packed(tokens[position:length]))
        position = length
        keys[length] = running.copy().digest()
    return keys


@dataclass(slots=True, eq=False)
class Kept:
    """A snapshot and what its bytes depend on.

    Attributes:
        lineage: Bounded replays upstream.
    """

    key: bytes
    snapshot: SnapshotLike
    lineage: int
    used_s: float


class SnapshotPool:
    """Snapshots by key, the one used longest ago leaves first.

    Args:
        budget_bytes: 0 keeps none.
        ttl_s: A snapshot that no request used for so long leaves.
    """

    def __init__(self, budget_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget_bytes, self.ttl_s = budget_bytes, ttl_s
        self._clock = clock
        self._kept: dict[bytes, Kept] = {}
        self._lengths: Counter[int] = Counter()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, key: bytes, snapshot: SnapshotLike, lineage: int) -> None:
        size = snapshot.num_bytes()
        known = self._kept.get(key)
        if size > self.budget_bytes or (known is not None and known.lineage < lineage):
            return
        self._drop(key)
        self.expire()
        while self.num_bytes + size > self.budget_bytes:
            self._drop(next(iter(self._kept)))
        self._kept[key] = Kept(key, snapshot, lineage, self._clock())
        self._lengths[snapshot.num_tokens] += 1
        self.num_bytes += size

    def find(self, root: bytes, tokens: Sequence[int]) -> list[Kept]:
        """The snapshots of beginnings of `tokens`, longest first."""
        self.expire()
        keys = snapshot_keys(root, tokens, self._lengths)
        return [self._kept[key] for _, key in sorted(keys.items(), reverse=True) if key in self._kept]

    def touch(self, kept: Kept) -> None:
        """It served a request: it stays as long as a new one."""
        if self._kept.pop(kept.key, None) is not None:
            kept.used_s = self._clock()
            self._kept[kept.key] = kept

    def expire(self) -> None:
        now = self._clock()
        # in order of use, so the first that may stay ends the search
        while self._kept and now - next(iter(self._kept.values())).used_s > self.ttl_s:
            self._drop(next(iter(self._kept)))

    def all(self) -> list[Kept]:
        return list(self._kept.values())

    def clear(self) -> None:
        for key in list(self._kept):
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        self.num_bytes -= kept.snapshot.num_bytes()
        length = kept.snapshot.num_tokens
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
