"""Stored bytes to operands of a product, in planes: even channels in one tile, odd ones in the other.

A nibble pair is two neighbouring channels, so planes cost no shuffle; a product over all channels is the sum of the
products of both planes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e2m1_planes(byte):
    """uint8 of two E2M1 codes -> float16 (even, odd), each 2**-14 of its value, exactly."""
    wide = byte.to(tl.uint16)
    low = ((wide & 7) << 9) | ((wide & 8) << 12)
    high = ((wide & 0x70) << 5) | ((wide & 0x80) << 8)
    return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


@triton.jit
def e4m3_value(byte):
    """uint8 E4M3 codes -> float32; a NaN code becomes 480."""
    wide = byte.to(tl.int32)
    # E4M3 shifted into float32's fields is 2**-120 of its value, subnormals included
    bits = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def e8m0_value(byte):
    """uint8 exponents 1..254 -> float32 powers of two; 0 becomes 0, 255 infinity."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_half(byte):
    """uint8 E4M3 codes -> float16, exactly."""
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def e8m0_half(byte, SHIFT: tl.constexpr):
    """uint8 exponents -> float16, 2**SHIFT of the power of two; what float16 has no room for is cut to its range."""
    field = tl.minimum(tl.maximum(byte.to(tl.int32) - 112 + SHIFT, 1), 30)
    return (field << 10).to(tl.uint16).to(tl.float16, bitcast=True)
