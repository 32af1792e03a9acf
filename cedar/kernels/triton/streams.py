"""The streams of some rows in registers: read, mixed with a sublayer's output, collapsed to the next one's input."""

from __future__ import annotations

import triton
import triton.language as tl

from cedar.kernels.triton.quantize import round_groups

# columns of a row's partial sums: 24 products, then the squares of the streams and of the input
SQUARE, INPUT_SQUARE = tl.constexpr(24), tl.constexpr(25)


@triton.jit
def four(place, known):
    return (
        tl.load(place, mask=known, other=0.0),
        tl.load(place + 1, mask=known, other=0.0),
        tl.load(place + 2, mask=known, other=0.0),
        tl.load(place + 3, mask=known, other=0.0),
    )


@triton.jit
def old_mixes(post_ptr, mixing_ptr, row, known, FRESH: tl.constexpr):
    """Post and mixing by source, four each, where there is a sublayer's output to mix in."""
    if FRESH:
        mixing = mixing_ptr + row * 16
        return (
            four(post_ptr + row * 4, known), four(mixing, known), four(mixing + 4, known),
            four(mixing + 8, known), four(mixing + 12, known),
        )  # fmt: skip
    else:
        # nobody reads it
        return known


@triton.jit
def read_streams(y_ptr, x_ptr, row, channel, inside, channels, FRESH: tl.constexpr):
    """Some channels of some rows: the four old streams, then the sublayer's output if there is one to mix in."""
    place = x_ptr + row * 4 * channels + channel
    x0 = tl.load(place, mask=inside, other=0.0)
    x1 = tl.load(place + channels, mask=inside, other=0.0)
    x2 = tl.load(place + 2 * channels, mask=inside, other=0.0)
    x3 = tl.load(place + 3 * channels, mask=inside, other=0.0)
    return x0, x1, x2, x3, tl.load(y_ptr + row * channels + channel, mask=inside, other=0.0) if FRESH else x0


@triton.jit
def mixed(old, mixes, dtype: tl.constexpr, FRESH: tl.constexpr):
    """The four new streams, as `dtype` holds them."""
    if FRESH:
        post, m0, m1, m2, m3 = mixes
        x0, x1, x2, x3 = old[0].to(tl.float32), old[1].to(tl.float32), old[2].to(tl.float32), old[3].to(tl.float32)
        y = old[4].to(tl.float32)
        return (
            (post[0] * y + m0[0] * x0 + m1[0] * x1 + m2[0] * x2 + m3[0] * x3).to(dtype),
            (post[1] * y + m0[1] * x0 + m1[1] * x1 + m2[1] * x2 + m3[1] * x3).to(dtype),
            (post[2] * y + m0[2] * x0 + m1[2] * x1 + m2[2] * x2 + m3[2] * x3).to(dtype),
            (post[3] * y + m0[3] * x0 + m1[3] * x1 + m2[3] * x2 + m3[3] * x3).to(dtype),
        )
    else:
        return old[0], old[1], old[2], old[3]


@triton.jit
def new_streams(y_ptr, x_ptr, mixes, row, channel, inside, channels, dtype: tl.constexpr, FRESH: tl.constexpr):
    return mixed(read_streams(y_ptr, x_ptr, row, channel, inside, channels, FRESH), mixes, dtype, FRESH)


@triton.jit
def store_streams(out_ptr, streams, row, channel, inside, channels):
    place = out_ptr + row * 4 * channels + channel
    for j in tl.static_range(4):
        tl.store(place + j * channels, streams[j], mask=inside)


@triton.jit
def collapse(streams, premix):
    """The new streams' sum by the last sublayer's pre-mix, as the model's dtype holds it."""
    collapsed = premix[0] * streams[0].to(tl.float32) + premix[1] * streams[1].to(tl.float32)
    collapsed += premix[2] * streams[2].to(tl.float32) + premix[3] * streams[3].to(tl.float32)
    return collapsed.to(streams[0].dtype)


@triton.jit
def rounded_input(normed, B: tl.constexpr):
    """In FP8 and back, 32 channels a group."""
    grouped = tl.reshape(normed.to(tl.float32), (B // 32, 32))
    return tl.reshape(round_groups(grouped, 0), (B,)).to(normed.dtype)
