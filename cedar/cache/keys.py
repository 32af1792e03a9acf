"""Names of pages: a hash of every token and image from the first one on. No torch."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from cedar.errors import FormatError

# before what is no plain id: an image position, or a packed row of tokens that is compressed
_WIDE, _SQUEEZED = b"\xff\xff\xff\xff", b"\xfe\xff\xff\xff"
_IMAGE_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpan:
    """The positions [start, stop) of a prompt that one image fills.

    Attributes:
        digest: 32 bytes: of the image's encoded bytes and of the version of what prepares its pixels.
        grid: Rows and columns of its patches.
    """

    start: int
    stop: int
    digest: bytes
    grid: tuple[int, int]


def cache_tokens(ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> tuple[int, ...]:
    """A prompt as the cache knows it: what the engine hands to every call of `CacheManager`.

    All positions of all images have one id. Here a position of an image is a number above 2^32 that tells the
    image too, its id in the low 32 bits; so equal ids of different images never share a page or a snapshot.

    >>> span = ImageSpan(start=1, stop=3, digest=bytes(32), grid=(1, 1))
    >>> one, two, three, four = cache_tokens([5, 9, 9, 6], [span])
    >>> (one, two == three, two % 2**32, two > 2**32, four)
    (5, True, 9, True, 6)
    """
    if not images:
        return tuple(ids)
    tokens = list(ids)
    for span in images:
        about = span.digest + struct.pack("<III", span.stop - span.start, *span.grid)
        mark = int.from_bytes(hashlib.sha256(about).digest()[:_IMAGE_BYTES], "little") << 32
        for place in range(span.start, span.stop):
            tokens[place] = mark | ids[place]
    return tuple(tokens)


def packed(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes, each by itself: what hashes are made of."""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        return b"".join(
            struct.pack("<I", token)
            if token < 2**32
            else _WIDE + (token >> 32).to_bytes(_IMAGE_BYTES, "little") + struct.pack("<I", token % 2**32)
            for token in tokens
        )


def squeezed(tokens: Sequence[int]) -> bytes:
    """Tokens for an index: four bytes each, and images no more than once or twice."""
    row = packed(tokens)
    return row if len(row) == 4 * len(tokens) else _SQUEEZED + zlib.compress(row)


def unsqueezed(row: bytes) -> tuple[int, ...]:
    """What `squeezed` was given.

    Raises:
        FormatError: It did not make this.
    """
    try:
        if row[:4] != _SQUEEZED:
            return struct.unpack(f"<{len(row) // 4}I", row)
        plain, place, tokens = zlib.decompress(row[4:]), 0, []
        while place < len(plain):
            if plain[place : place + 4] == _WIDE:
                image = int.from_bytes(plain[place + 4 : place + 4 + _IMAGE_BYTES], "little")
                place += 4 + _IMAGE_BYTES
                tokens.append(image << 32 | struct.unpack_from("<I", plain, place)[0])
            else:
                tokens.append(struct.unpack_from("<I", plain, place)[0])
            place += 4
    except (struct.error, zlib.error) as error:
        raise FormatError(f"{len(row)} bytes are no row of tokens: {error}") from None
    return tuple(tokens)


def root_key(fingerprint: bytes, salt: bytes) -> bytes:
    """The key that all pages of one tenant under one model descend from (serving.md 4.2)."""
    return hashlib.sha256(fingerprint + salt).digest()


def child_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """A page's key: a hash of all tokens and images from the first one to its last."""
    return hashlib.sha256(parent + packed(tokens)).digest()


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that both have."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
