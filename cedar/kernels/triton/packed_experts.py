"""Experts in MXFP4: rows are sorted into tiles by expert, and each tile reads its expert's nibbles once.

Weights are the long side of the product and rows the short one, so a tile is as wide as its rows need. The tensor
core takes weights from registers: a thread's 16 bytes are one group of one output, they are decoded two at a time
and multiplied by their scale in place, and never pass shared memory as numbers. Which channel stands where in a
product is free, so the channels of `x` are permuted once instead (`_position`), and nothing is shuffled.

A choices (rows times experts a row), E experts, D channels, I inner channels, B outputs of a program, N rows of a
tile, to which EXTRA more come where an expert has them. A step is 256 channels, a block 64 outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.experts import Packed, Tiled
from cedar.kernels.triton import one_row_experts
from cedar.kernels.triton.chain import AHEAD, HOPPER, follow
from cedar.kernels.triton.device import INTERPRETED, is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.few_rows import round_channels
from cedar.kernels.triton.wide_experts import CAPACITY, _multiply_tiles

__all__ = ["FORWARD_ONLY", "fits", "packed_experts", "unavailable"]

FORWARD_ONLY = ("packed_experts",)
# of one launch, and the rows whose choices `_down` adds itself
_MAX_CHOICES, _FEW_ROWS = 65536, 128
_MAX_EXPERTS = 512
_STEP = 256
# warp groups multiply on Hopper alone; without a GPU kernels are compiled for it
_WIDE = HOPPER and (not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9)
# rows an expert above which `wide_experts` runs; choices and channels of one of its plan's programs
_MANY, _CHUNK, _PIECE = 24, 512, 4096
# programs that fill a Hopper chip
_PROGRAMS = 132
_INTERPRETED = tl.constexpr(INTERPRETED)


def fits(op: str, u: Tensor, codes: Tensor, ids: Tensor) -> bool:
    """At most 512 experts, whole groups of 32 channels."""
    return u.shape[1] % 32 == 0 and ids.numel() > 0 and codes.shape[0] <= _MAX_EXPERTS and is_half_or_float(u)


@triton.jit
def _channel(position, N: tl.constexpr):
    """The channel that stands at a position of permuted rows."""
    lane, half = (position // 2 % 4, position // 8 % 2) if N >= 16 else (position // 4 % 4, position // 2 % 2)
    inside = position // 32 % 4 * 8 + position % 2 * 4 + position // 16 % 2 * 2 + half
    return position // 128 * 128 + lane * 32 + inside


@triton.jit
def _position(channel, N: tl.constexpr):
    """Where a channel stands in permuted rows; the inverse of `_channel`."""
    lane, half = channel // 32 % 4, channel % 2
    inside = lane * 2 + half * 8 if N >= 16 else lane * 4 + half * 2
    return channel // 128 * 128 + channel // 8 % 4 * 32 + channel // 2 % 2 * 16 + channel // 4 % 2 + inside


@triton.jit
def _plan(
    ids_ptr, u_ptr, x_ptr, count_ptr, first_ptr, rank_ptr, tile_ptr, member_ptr, arrived_ptr, num_choices, num_tiles,
    num_arrived, num_rows, channels, width,
    A: tl.constexpr, E: tl.constexpr, N: tl.constexpr, FORM: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The first program sorts the choices; each other one permutes C channels of a row, and zeroes C counters."""
    follow()
    if tl.program_id(0) == 0:
        expert = tl.arange(0, E)
        tl.store(count_ptr + expert, tl.zeros([E], tl.int32))
        for start in range(0, num_tiles * N, A):
            place = start + tl.arange(0, A)
            tl.store(member_ptr + place, -1, mask=place < num_tiles * N)
            tl.store(tile_ptr + place, -1, mask=place < num_tiles)
        tl.debug_barrier()
        count = tl.zeros([E], tl.int32)
        for start in range(0, num_choices, A):
            choice = start + tl.arange(0, A)
            known = choice < num_choices
            ids = tl.load(ids_ptr + choice, mask=known, other=0).to(tl.int32)
            count += tl.histogram(ids, E, mask=known)
            # any order will do: a row's sum does not depend on its place in a tile
            tl.store(rank_ptr + choice, tl.atomic_add(count_ptr + ids, 1, mask=known, sem="relaxed"), mask=known)
        tiles = (count + N - 1) // N
        first = tl.cumsum(tiles, axis=0) - tiles
        tl.store(first_ptr + expert, first)
        for tile in range(tl.max(tiles, axis=0)):
            tl.store(tile_ptr + first + tile, expert, mask=tile < tiles)
        tl.debug_barrier()
        for start in range(0, num_choices, A):
            choice = start + tl.arange(0, A)
            known = choice < num_choices
            ids = tl.load(ids_ptr + choice, mask=known, other=0).to(tl.int32)
            rank = tl.load(rank_ptr + choice, mask=known, other=0)
            place = tl.load(first_ptr + ids, mask=known, other=0) * N + rank
            tl.store(member_ptr + place, choice, mask=known)
    else:
        piece = tl.program_id(0) - 1
        pieces = tl.cdiv(width, C)
        row = (piece // pieces).to(tl.int64)
        position = piece % pieces * C + tl.arange(0, C)
        channel = _channel(position, FORM)
        x = tl.load(u_ptr + row * channels + channel, mask=(channel < channels) & (row < num_rows), other=0.0)
        tl.store(x_ptr + row * width + position, x.to(tl.float16), mask=(position < width) & (row < num_rows))
        place = piece * C + tl.arange(0, C)
        tl.store(arrived_ptr + place, tl.zeros([C], tl.int32), mask=place < num_arrived)


@triton.jit
def _rank(
    ids_ptr, u_ptr, x_ptr, count_ptr, rank_ptr, num_choices, chunks, channels,
    A: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The first programs count A choices by expert and number each expert's; the others permute C channels of a row."""
    follow()
    if tl.program_id(0) < chunks:
        start = tl.program_id(0) * A
        choice = start + tl.arange(0, A)
        known = choice < num_choices
        ids = tl.load(ids_ptr + choice, mask=known, other=0).to(tl.int32)
        tl.store(count_ptr + tl.program_id(0) * E + tl.arange(0, E), tl.histogram(ids, E, mask=known))
        rank = tl.zeros([A], tl.int32)
        for first in range(0, A, 16):
            other = start + first + tl.arange(0, 16)
            other_ids = tl.load(ids_ptr + other, mask=other < num_choices, other=-1).to(tl.int32)
            before = (other_ids[None, :] == ids[:, None]) & (other[None, :] < choice[:, None])
            rank += tl.sum(before.to(tl.int32), axis=1)
        tl.store(rank_ptr + choice, rank, mask=known)
    else:
        piece = tl.program_id(0) - chunks
        pieces = tl.cdiv(channels, C)
        row = (piece // pieces).to(tl.int64)
        position = piece % pieces * C + tl.arange(0, C)
        channel = _channel(position, 16)
        x = tl.load(u_ptr + row * channels + channel, mask=channel < channels, other=0.0)
        tl.store(x_ptr + row * channels + position, x.to(tl.float16), mask=position < channels)


@triton.jit
def _place(
    ids_ptr, count_ptr, rank_ptr, num_tiles_ptr, tile_ptr, member_ptr, num_choices, chunks,
    A: tl.constexpr, E: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Each program places A choices and clears what is left of 16 experts' last tiles.

    Full tiles stand first and the others by the width that they are multiplied in, the widest first: programs that take
    tiles in turns get as many of each, whoever is popular.
    """
    follow()
    expert = tl.arange(0, E)
    count = tl.zeros([E], tl.int32)
    before = tl.zeros([E], tl.int32)
    for start in range(0, chunks, 16):
        chunk = start + tl.arange(0, 16)[:, None]
        each = tl.load(count_ptr + chunk * E + expert[None, :], mask=chunk < chunks, other=0)
        count += tl.sum(each, axis=0)
        before += tl.sum(tl.where(chunk < tl.program_id(0), each, 0), axis=0)
    full, rest = count // N, count % N
    first = tl.cumsum(full, axis=0) - full
    tiles = tl.sum(full, axis=0)
    narrow = (
        (rest <= 80).to(tl.int32) + (rest <= 64).to(tl.int32) + (rest <= 32).to(tl.int32) + (rest <= 16).to(tl.int32)
    )
    last = tl.zeros([E], tl.int32)
    for width in tl.static_range(5):
        there = ((rest > 0) & (narrow == width)).to(tl.int32)
        last = tl.where(there > 0, tiles + tl.cumsum(there, axis=0) - 1, last)
        tiles += tl.sum(there, axis=0)
    if tl.program_id(0) == 0:
        tl.store(num_tiles_ptr, tiles)
        for tile in range(tl.max(full, axis=0)):
            tl.store(tile_ptr + first + tile, expert, mask=tile < full)
        tl.store(tile_ptr + last, expert, mask=rest > 0)
    choice = tl.program_id(0) * A + tl.arange(0, A)
    known = choice < num_choices
    ids = tl.load(ids_ptr + choice, mask=known, other=0).to(tl.int32)
    rank = tl.load(rank_ptr + choice, mask=known, other=0) + tl.gather(before, ids, 0)
    tile = rank // N
    tile = tl.where(tile < tl.gather(full, ids, 0), tl.gather(first, ids, 0) + tile, tl.gather(last, ids, 0))
    tl.store(member_ptr + tile * N + rank % N, choice, mask=known)
    mine = tl.program_id(0) * 16 + tl.arange(0, 16)
    rest = tl.where(mine < E, tl.gather(rest, mine % E, 0), 0)[:, None]
    place = tl.gather(last, mine % E, 0)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(member_ptr + place, -1, mask=(rest > 0) & (tl.arange(0, N)[None, :] >= rest))


@triton.jit
def _pair(word, factor):
    """Words of two float16 times words of two float16: [..., 2] float16."""
    if not _INTERPRETED:
        word = tl.inline_asm_elementwise(
            "mul.f16x2 $0, $1, $2;", "=r,r,r", [word, factor], dtype=tl.uint32, is_pure=True, pack=1
        )
    low = word.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    if _INTERPRETED:
        scale = factor.to(tl.uint16).to(tl.float16, bitcast=True)
        low, high = low * scale, high * scale
    return tl.join(low, high)


@triton.jit
def _decode(word, factor, TILED: tl.constexpr):
    """[..., 2, 2, 2] float16 of words of eight E2M1 codes: (halves of a word, odd or even pair, first or last two)."""
    # sign and the three bits of a code where float16 has its sign and its lowest exponent bits: 2**-14 of the value
    M: tl.constexpr = 0x8E008E00
    if TILED:
        a, b, c, d = word, word << 3, (word << 6) ^ (word << 1), (word << 9) ^ (word << 2)
        a, b, c, d = a & M, b & M, c & M, d & M
    else:
        a, b, c, d = word << 12, word << 8, word << 4, word
        S: tl.constexpr = 0x80008000
        V: tl.constexpr = 0x0E000E00
        a, b, c, d = a & S | a >> 3 & V, b & S | b >> 3 & V, c & S | c >> 3 & V, d & S | d >> 3 & V
    first = tl.join(_pair(a, factor), _pair(b, factor))
    return tl.join(first, tl.join(_pair(c, factor), _pair(d, factor)))


@triton.jit
def _scale_byte(scales_ptr, row, group, outputs, groups):
    exponent = tl.load(scales_ptr + row * groups + group, mask=(row < outputs) & (group < groups), other=0)
    return tl.minimum(tl.maximum(exponent.to(tl.int32) - 105, 0), 30).to(tl.uint32) << 2


@triton.jit
def _weights(
    codes_ptr, scales_ptr, block, step, steps, outputs, channels, B: tl.constexpr, N: tl.constexpr, TILED: tl.constexpr
):
    """[B, 256] float16, 2**-7 of the weights of a block's outputs in a step's channels, permuted."""
    # (half of the step, half of sixteen outputs, lane, word); a lane is (sixteen of B, output of eight, group of four)
    place = tl.arange(0, B * 32)
    lane = tl.arange(0, B * 2)
    if TILED:
        start = (block * (B // 64) + place // 512 % (B // 64)) * steps + step
        word = tl.load(codes_ptr + start * 2048 + place // (B * 8) * 512 + place % 512).to(tl.uint32, bitcast=True)
        scale = tl.load(scales_ptr + ((block * (B // 64) + lane // 128) * steps + step) * 128 + lane % 128)
        scale = scale.to(tl.uint32, bitcast=True)
        f00, f01, f10, f11 = scale & 0xFF, (scale >> 8) & 0xFF, (scale >> 16) & 0xFF, scale >> 24
    else:
        row = block * B + place // 128 % (B // 16) * 16 + place // (B * 8) % 2 * 8 + place // 16 % 8
        group = step * 8 + place // (B * 16) * 4 + place // 4 % 4
        inside = (row < outputs) & (group * 32 < channels)
        words = codes_ptr.to(tl.pointer_type(tl.uint32))
        word = tl.load(words + row * (channels // 8) + group * 4 + place % 4, mask=inside, other=0)
        row, group = block * B + lane // 32 * 16 + lane // 4 % 8, step * 8 + lane % 4
        f00 = _scale_byte(scales_ptr, row, group, outputs, channels // 32)
        f01 = _scale_byte(scales_ptr, row + 8, group, outputs, channels // 32)
        f10 = _scale_byte(scales_ptr, row, group + 4, outputs, channels // 32)
        f11 = _scale_byte(scales_ptr, row + 8, group + 4, outputs, channels // 32)
    # the upper byte of float16 2 ** (exponent - 120), in both halves
    factor = tl.join(tl.join(f00, f10), tl.join(f01, f11)) * 0x01000100
    factor = tl.broadcast_to(tl.reshape(tl.permute(factor, (1, 2, 0)), (2, 2, B * 2, 1)), (2, 2, B * 2, 4))
    w = _decode(tl.reshape(word, (2, 2, B * 2, 4)), factor, TILED)
    w = tl.reshape(w, (2, 2, B // 16, 8, 4, 4, 2, 2, 2))
    # the tensor core of wide tiles takes two channels in a row from a thread, that of narrow ones four
    w = tl.permute(w, (2, 1, 3, 0, 5, 8, 7, 4, 6) if N >= 16 else (2, 1, 3, 0, 5, 8, 4, 7, 6))
    return tl.reshape(w, (B, 256))


@triton.jit
def _rows(x_ptr, row, there, width):
    """Pointers to the first step of rows, and which of them are there: [N, 256]."""
    return x_ptr + row.to(tl.int64)[:, None] * width + tl.arange(0, 256)[None, :], there[:, None]


@triton.jit
def _activate(
    gate, up, weights_ptr, inner_ptr, member, there, block, inner_width, limit,
    DTYPE: tl.constexpr, ROUNDED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """SwiGLU times the routing weight, rounded, into permuted rows."""
    B: tl.constexpr = gate.shape[0]
    N: tl.constexpr = gate.shape[1]
    gate = tl.minimum((gate * 128.0).to(DTYPE).to(tl.float32), limit)
    up = tl.minimum(tl.maximum((up * 128.0).to(DTYPE).to(tl.float32), -limit), limit)
    weight = tl.load(weights_ptr + tl.where(there, member, 0), mask=there, other=0.0)
    y = tl.trans((gate * tl.sigmoid(gate) * up * weight[None, :]).to(DTYPE).to(tl.float32))
    if ROUNDED:
        y = round_channels(y, N, B, 0, 32)
    position = _position(block * B + tl.arange(0, B), FORM)
    out = inner_ptr + member[:, None].to(tl.int64) * inner_width + position[None, :]
    tl.store(out, y.to(tl.float16), mask=there[:, None] & (position < inner_width)[None, :])


@triton.jit
def _up_tile(
    x_ptr, weights_ptr, member_ptr, codes1_ptr, scales1_ptr, codes3_ptr, scales3_ptr, inner_ptr, channels, steps,
    num_inner, inner_width, k, limit, DTYPE: tl.constexpr, ROUNDED: tl.constexpr, TILED: tl.constexpr,
    B: tl.constexpr, N: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    member = tl.load(member_ptr + tl.arange(0, N))
    there = member >= 0
    x_place, x_mask = _rows(x_ptr, tl.where(there, member, 0) // k, there, steps * 256)
    gate = tl.zeros([B, N], tl.float32)
    up = tl.zeros([B, N], tl.float32)
    if EXTRA:
        more = tl.load(member_ptr + N + tl.arange(0, EXTRA))
        more_there = more >= 0
        more_place, more_mask = _rows(x_ptr, tl.where(more_there, more, 0) // k, more_there, steps * 256)
        more_gate = tl.zeros([B, EXTRA], tl.float32)
        more_up = tl.zeros([B, EXTRA], tl.float32)
    for step in range(steps):
        x = tl.trans(tl.load(x_place + step * 256, mask=x_mask, other=0.0))
        w1 = _weights(codes1_ptr, scales1_ptr, block, step, steps, num_inner, channels, B, N, TILED)
        gate = tl.dot(w1, x, gate)
        if EXTRA:
            more_x = tl.trans(tl.load(more_place + step * 256, mask=more_mask, other=0.0))
            more_gate = tl.dot(w1, more_x, more_gate)
        w3 = _weights(codes3_ptr, scales3_ptr, block, step, steps, num_inner, channels, B, N, TILED)
        up = tl.dot(w3, x, up)
        if EXTRA:
            more_up = tl.dot(w3, more_x, more_up)
    _activate(gate, up, weights_ptr, inner_ptr, member, there, block, inner_width, limit, DTYPE, ROUNDED, N)
    if EXTRA:
        _activate(
            more_gate, more_up, weights_ptr, inner_ptr, more, more_there, block, inner_width, limit, DTYPE, ROUNDED, N
        )


@triton.jit
def _up(
    x_ptr, weights_ptr, tile_ptr, member_ptr, codes1_ptr, scales1_ptr, codes3_ptr, scales3_ptr, inner_ptr,
    channels, steps, num_inner, inner_width, words, bytes_, k, limit,
    DTYPE: tl.constexpr, ROUNDED: tl.constexpr, TILED: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
    EXTRA: tl.constexpr,
):  # fmt: skip
    follow()
    expert = tl.load(tile_ptr + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        member_ptr += tl.program_id(1) * (N + EXTRA)
        codes1_ptr += expert * words
        codes3_ptr += expert * words
        scales1_ptr += expert * bytes_
        scales3_ptr += expert * bytes_
        # a tile without more rows than N is a narrower product
        full = tl.load(member_ptr + N) >= 0 if EXTRA else False
        if full:
            _up_tile(
                x_ptr, weights_ptr, member_ptr, codes1_ptr, scales1_ptr, codes3_ptr, scales3_ptr, inner_ptr, channels,
                steps, num_inner, inner_width, k, limit, DTYPE, ROUNDED, TILED, B, N, EXTRA,
            )  # fmt: skip
        else:
            _up_tile(
                x_ptr, weights_ptr, member_ptr, codes1_ptr, scales1_ptr, codes3_ptr, scales3_ptr, inner_ptr, channels,
                steps, num_inner, inner_width, k, limit, DTYPE, ROUNDED, TILED, B, N, 0,
            )  # fmt: skip


@triton.jit
def _keep(total, out_ptr, arrived_ptr, y_ptr, member, there, block, channels, K: tl.constexpr, ADD: tl.constexpr):
    """Stores the outputs of choices and, with ADD, the sums of rows that are complete."""
    B: tl.constexpr = total.shape[0]
    channel = block * B + tl.arange(0, B)
    known = (channel < channels)[None, :]
    y = tl.trans(total * 128.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + member[:, None] * channels + channel[None, :], y, mask=there[:, None] & known)
    if ADD:
        # who brings a row's last choice adds them all, always in the same order
        tl.debug_barrier()
        row = tl.where(there, member, 0) // K
        counter = arrived_ptr + row * tl.num_programs(0) + block
        there = there & (tl.atomic_add(counter, 1, mask=there, sem="acq_rel") == K - 1)
        inside = there[:, None] & known
        total = tl.zeros(y.shape, tl.float32)
        for slot in tl.static_range(K):
            one = out_ptr + (row * K + slot)[:, None] * channels + channel[None, :]
            total += tl.load(one, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(y_ptr + row[:, None] * channels + channel[None, :], total, mask=inside)


@triton.jit
def _down_tile(
    inner_ptr, member_ptr, codes_ptr, scales_ptr, out_ptr, arrived_ptr, y_ptr, channels, num_inner, steps,
    K: tl.constexpr, ADD: tl.constexpr, TILED: tl.constexpr, B: tl.constexpr, N: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    member = tl.load(member_ptr + tl.arange(0, N)).to(tl.int64)
    there = member >= 0
    x_place, x_mask = _rows(inner_ptr, tl.where(there, member, 0), there, steps * 256)
    total = tl.zeros([B, N], tl.float32)
    if EXTRA:
        more = tl.load(member_ptr + N + tl.arange(0, EXTRA)).to(tl.int64)
        more_there = more >= 0
        more_place, more_mask = _rows(inner_ptr, tl.where(more_there, more, 0), more_there, steps * 256)
        more_total = tl.zeros([B, EXTRA], tl.float32)
    for step in range(steps):
        x = tl.trans(tl.load(x_place + step * 256, mask=x_mask, other=0.0))
        w = _weights(codes_ptr, scales_ptr, block, step, steps, channels, num_inner, B, N, TILED)
        total = tl.dot(w, x, total)
        if EXTRA:
            more_x = tl.trans(tl.load(more_place + step * 256, mask=more_mask, other=0.0))
            more_total = tl.dot(w, more_x, more_total)
    _keep(total, out_ptr, arrived_ptr, y_ptr, member, there, block, channels, K, ADD)
    if EXTRA:
        _keep(more_total, out_ptr, arrived_ptr, y_ptr, more, more_there, block, channels, K, ADD)


@triton.jit
def _down(
    inner_ptr, tile_ptr, member_ptr, codes_ptr, scales_ptr, out_ptr, arrived_ptr, y_ptr, channels, num_inner, steps,
    words, bytes_, K: tl.constexpr, ADD: tl.constexpr, TILED: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
    EXTRA: tl.constexpr,
):  # fmt: skip
    follow()
    expert = tl.load(tile_ptr + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        member_ptr += tl.program_id(1) * (N + EXTRA)
        codes_ptr += expert * words
        scales_ptr += expert * bytes_
        full = tl.load(member_ptr + N) >= 0 if EXTRA else False
        if full:
            _down_tile(
                inner_ptr, member_ptr, codes_ptr, scales_ptr, out_ptr, arrived_ptr, y_ptr, channels, num_inner, steps,
                K, ADD, TILED, B, N, EXTRA,
            )  # fmt: skip
        else:
            _down_tile(
                inner_ptr, member_ptr, codes_ptr, scales_ptr, out_ptr, arrived_ptr, y_ptr, channels, num_inner, steps,
                K, ADD, TILED, B, N, 0,
            )  # fmt: skip


@triton.jit
def _add_choices(choice_ptr, y_ptr, channels, K: tl.constexpr, B: tl.constexpr):
    follow()
    t = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros([B], tl.float32)
    for slot in tl.static_range(K):
        one = tl.load(choice_ptr + (t * K + slot) * channels + channel, mask=channel < channels, other=0.0)
        total += one.to(tl.float32)
    tl.store(y_ptr + t * channels + channel, total, mask=channel < channels)


class _Shape(NamedTuple):
    """How many rows a tile has, how many more where it needs them, and the outputs of a program."""

    rows: int
    more: int
    up: int
    down: int


def _shape(num_choices: int, num_experts: int, tiled: bool, paired: bool) -> _Shape:
    """By the rows of an expert if all are chosen alike: the fastest of those tried on an H200 with 384 experts.

    Args:
        paired: All weights have an even number of blocks, so that a program can take two.
    """
    mean = num_choices / num_experts
    if not tiled or 5 < mean <= 12:
        return _Shape(16, 0, 64, 64)
    if mean <= 5:
        return _Shape(8, 0, 64, 64)
    if mean <= 24 or not paired:
        return _Shape(32, 0, 64, 128 if paired else 64)
    return _Shape(64, 16, 128, 128)


def _sorted_tiles(u_TD: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, list[Tensor]]:
    """Permuted rows in float16, and [the number of tiles, their experts, their choices or -1], each padded."""
    (num_rows, channels), num_choices = u_TD.shape, ids_TK.numel()
    num_tiles = min(num_choices, num_experts) + num_choices // CAPACITY
    experts, chunks = next_power_of_2(num_experts), triton.cdiv(num_choices, _CHUNK)
    # each part aligned, so that one compiled kernel serves all sizes
    sizes = chunks * experts, num_choices, 1, num_tiles, num_tiles * CAPACITY
    parts = [-(-size // 16) * 16 for size in sizes]
    count, rank, *tiles = torch.empty(sum(parts), device=u_TD.device, dtype=torch.int32).split(parts)
    x = torch.empty(num_rows, channels, device=u_TD.device, dtype=torch.float16)
    _rank[(chunks + num_rows * triton.cdiv(channels, _PIECE),)](
        ids_TK, u_TD, x, count, rank, num_choices, chunks, channels, A=_CHUNK, E=experts, C=_PIECE, num_warps=8,
        launch_pdl=AHEAD,
    )  # fmt: skip
    _place[(max(chunks, triton.cdiv(experts, 16)),)](
        ids_TK, count, rank, *tiles, num_choices, chunks, A=_CHUNK, E=experts, N=CAPACITY, num_warps=8, launch_pdl=AHEAD
    )
    return x, tiles


def _many_experts(
    u_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1: Tiled,
    w3: Tiled,
    w2: Tiled,
    limit: float,
    round_inner: bool,
) -> Tensor:
    """By `wide_experts`, which takes tiles of up to 128 rows and chooses their width itself."""
    (num_rows, channels), k = u_TD.shape, ids_TK.shape[1]
    num_choices, half = num_rows * k, u_TD.dtype == torch.bfloat16
    x, tiles = _sorted_tiles(u_TD, ids_TK, w1.codes.shape[0])
    new: dict[str, Any] = {"device": u_TD.device}
    inner = torch.empty(num_choices, w1.outputs, dtype=torch.float16, **new)
    choice = torch.empty(num_choices, channels, dtype=u_TD.dtype, **new)
    for up, rows, one, two, out in ((True, x, w1, w3, inner), (False, inner, w2, w2, choice)):
        _multiply_tiles[(_PROGRAMS,)](
            rows, weights_TK, *tiles, *one[:2], *two[:2], out, *one.codes.shape[1:3], out.shape[1], k, limit,
            UP=up, HALF_OUT=half, ROUNDED=up and round_inner, num_warps=4, launch_pdl=AHEAD,
        )  # fmt: skip
    y_TD = torch.empty(num_rows, channels, dtype=torch.float32, **new)
    _add_choices[(num_rows, triton.cdiv(channels, 1024))](choice, y_TD, channels, K=k, B=1024, launch_pdl=AHEAD)
    return y_TD


def packed_experts(
    u_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1: Packed | Tiled,
    w3: Packed | Tiled,
    w2: Packed | Tiled,
    limit: float,
    round_inner: bool,
    wide: bool | None = None,
) -> Tensor:
    """As the op.

    Args:
        wide: Whether `wide_experts` runs; where it was measured if None.
    """
    (num_rows, channels), k = u_TD.shape, ids_TK.shape[1]
    part = _MAX_CHOICES // k
    if num_rows > part:
        rows = zip(u_TD.split(part), ids_TK.split(part), weights_TK.split(part), strict=True)
        return torch.cat([packed_experts(*row, w1, w3, w2, limit, round_inner, wide) for row in rows])
    tiled, num_experts, num_choices = isinstance(w1, Tiled), w1.codes.shape[0], num_rows * k
    num_inner = w1.outputs if isinstance(w1, Tiled) else w1.codes.shape[1]
    u_TD, ids_TK, weights_TK = u_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous()
    if wide is None:
        wide = _WIDE and num_choices > _MANY * num_experts and channels % _STEP == 0 and num_inner % _STEP == 0
    if isinstance(w1, Tiled) and isinstance(w3, Tiled) and isinstance(w2, Tiled):
        if wide:
            return _many_experts(u_TD, ids_TK, weights_TK, w1, w3, w2, limit, round_inner)
        if one_row_experts.fits(u_TD, ids_TK, w1):
            return one_row_experts.one_row_experts(u_TD, ids_TK, weights_TK, w1, w3, w2, limit, round_inner)
    paired = w1.codes.shape[1] % 2 == 0 and w2.codes.shape[1] % 2 == 0
    shape = _shape(num_choices, num_experts, tiled, paired)
    capacity = shape.rows + shape.more
    # no more tiles than these, however the rows choose
    num_tiles = min(num_choices, num_experts) + num_choices // capacity
    experts = next_power_of_2(num_experts)
    steps, inner_steps = triton.cdiv(channels, _STEP), triton.cdiv(num_inner, _STEP)
    down_grid = triton.cdiv(channels, shape.down), num_tiles
    # wide tiles are for so many rows that they fill the chip with sums of their own
    add = num_rows <= _FEW_ROWS and shape.rows == 8
    new: dict[str, Any] = {"device": u_TD.device}
    # each part aligned, so that one compiled kernel serves all sizes
    sizes = num_choices, num_tiles, num_tiles * capacity, down_grid[0] * num_rows if add else 0
    parts = [experts, experts, *(-(-size // 16) * 16 for size in sizes)]
    count, first, rank, tile, member, arrived = torch.empty(sum(parts), dtype=torch.int32, **new).split(parts)
    x = torch.empty(num_rows, steps * _STEP, dtype=torch.float16, **new)
    chunk = max(16, min(4096, next_power_of_2(num_choices)))
    piece = 1024 if num_rows <= 64 else 8192
    pieces = max(num_rows * triton.cdiv(steps * _STEP, piece), triton.cdiv(parts[-1], piece))
    _plan[(1 + pieces,)](
        ids_TK, u_TD, x, count, first, rank, tile, member, arrived, num_choices, num_tiles, parts[-1], num_rows,
        channels, steps * _STEP, A=chunk, E=experts, N=capacity, FORM=shape.rows, C=piece,
        num_warps=4 if chunk <= 256 else 16, launch_pdl=AHEAD,
    )  # fmt: skip
    # what no block writes must not be NaN: its weights are zeros
    padded = num_inner % _STEP
    inner = (torch.zeros if padded else torch.empty)(num_choices, inner_steps * _STEP, dtype=torch.float16, **new)
    dtype = tl.bfloat16 if u_TD.dtype == torch.bfloat16 else tl.float32
    _up[(triton.cdiv(num_inner, shape.up), num_tiles)](
        x, weights_TK, tile, member, *w1[:2], *w3[:2], inner, channels, steps, num_inner, inner.shape[1],
        w1.codes[0].numel(), w1.scales[0].numel(), k, limit, DTYPE=dtype, ROUNDED=round_inner, TILED=tiled, B=shape.up,
        N=shape.rows, EXTRA=shape.more, num_warps=shape.up // 16, num_stages=3, launch_pdl=AHEAD,
    )  # fmt: skip
    choice = torch.empty(num_choices, channels, dtype=u_TD.dtype, **new)
    y_TD = torch.empty(num_rows, channels, dtype=torch.float32, **new)
    _down[down_grid](
        inner, tile, member, *w2[:2], choice, arrived, y_TD, channels, num_inner, inner_steps,
        w2.codes[0].numel(), w2.scales[0].numel(), K=k, ADD=add, TILED=tiled, B=shape.down, N=shape.rows,
        EXTRA=shape.more, num_warps=shape.down // 16, num_stages=3, launch_pdl=AHEAD,
    )  # fmt: skip
    if not add:
        _add_choices[(num_rows, triton.cdiv(channels, 1024))](choice, y_TD, channels, K=k, B=1024, launch_pdl=AHEAD)
    return y_TD
