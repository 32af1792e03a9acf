"""How one vector is stored: bytes per vector, for every format the model keeps. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from cedar.errors import ShapeError


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatSpec:
    """Packed elements, then one scale per `group` consecutive channels.

    Attributes:
        element_bits: Bits of one element: 8 is E4M3, 4 is E2M1.
        scale_bits: Bits of one scale, E8M0 (a power of two) or E4M3.
        group: Channels that share a scale.
    """

    element_bits: int
    scale_bits: int
    group: int

    def element_bytes(self, channels: int) -> int:
        """Bytes of the packed elements of one vector. Raises ShapeError unless whole groups fill it."""
        return self.num_groups(channels) * self.group * self.element_bits // 8

    def num_groups(self, channels: int) -> int:
        """Scales of one vector. Raises ShapeError unless whole groups fill it."""
        if channels <= 0 or channels % self.group:
            raise ShapeError(
                f"{channels} channels do not divide into groups of {self.group}: expected a positive multiple"
            )
        return channels // self.group

    def vector_bytes(self, channels: int) -> int:
        """Bytes of one stored vector, scales included.

        Raises:
            ShapeError: `channels` is not a positive multiple of the group.

        Source: architecture.md 4.5.

        >>> FP8.vector_bytes(512), FP4_MAIN.vector_bytes(512), FP4_INDEX.vector_bytes(128)
        (528, 288, 68)
        """
        return self.element_bytes(channels) + self.num_groups(channels) * self.scale_bits // 8


# window KV and the inputs of every quantized linear: E4M3 elements, E8M0 scales (Q8)
FP8 = FormatSpec(element_bits=8, scale_bits=8, group=32)
# compressed main KV: E2M1 elements, E4M3 scales (Q4s)
FP4_MAIN = FormatSpec(element_bits=4, scale_bits=8, group=16)
# index queries and keys, and routed experts along K: E2M1 elements, E8M0 scales (Q4m, MXFP4)
FP4_INDEX = FormatSpec(element_bits=4, scale_bits=8, group=32)
