"""Names of pages: a hash of every token from the first one on. No torch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def root_key(fingerprint: bytes, salt: bytes) -> bytes:
    """The key that all pages of one tenant under one model descend from (serving.md 4.2)."""
    return hashlib.sha256(fingerprint + salt).digest()


def child_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """A page's key: a hash of all tokens from the first one to its last."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that both have."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
