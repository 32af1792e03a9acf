"""`packed_experts` of many rows on Hopper, in Gluon: one program a processor, whose warp groups do not wait for each other.

Warp groups that multiply decode weights into registers, the tensor core's first operand, while their own product
before and those of the others run; four more warps copy rows into shared memory, ahead by a few half steps. Barriers in
shared memory are all that they share. Programs stay and take tile after tile, so the next tile's rows and weights are
under way before a tile ends.

C warp groups that multiply; each has 64 gates and as many ups, or 128 outputs. N rows of a tile, MORE where it has more.
A half step is 128 channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cedar.kernels.experts import Tiled
from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import next_power_of_2
from cedar.kernels.triton.packed_experts import _add_choices, _channel


@gluon.constexpr_function
def _word_layout(words):
    """Words of a block, (second eight of sixteen, warp, output, group, word): all words twice a thread."""
    return gl.BlockedLayout([2, 1, 1, 1, words], [1, 1, 8, 4, 1], [1, 4, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.constexpr_function
def _line_layout():
    return gl.DistributedLinearLayout([[1], [2]], [[4], [8], [16], [32], [64]], [[128], [256]], [], [512])


@gluon.constexpr_function
def _scale_layout():
    return gl.DistributedLinearLayout([], [[1], [2], [4], [8], [16]], [[32], [64]], [], [128])


@gluon.constexpr_function
def _sums(N):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.jit
def _widen(word, factor):
    """Words of eight codes, as `retile` wrote them, times pairs of a scale: four words of two float16."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        and.b32 a, $4, 0x8E008E00;
        mul.rn.f16x2 $0, a, $5;
        shl.b32 a, $4, 3;
        and.b32 a, a, 0x8E008E00;
        mul.rn.f16x2 $1, a, $5;
        shl.b32 a, $4, 6;
        shl.b32 b, $4, 1;
        lop3.b32 a, a, b, 0x8E008E00, 0x28;
        mul.rn.f16x2 $2, a, $5;
        shl.b32 a, $4, 9;
        shl.b32 b, $4, 2;
        lop3.b32 a, a, b, 0x8E008E00, 0x28;
        mul.rn.f16x2 $3, a, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [word, factor],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _pair(word):
    """The two float16 of a word: [..., 2]."""
    low = word.to(gl.int16).to(gl.float16, bitcast=True)
    high = (word >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _decode(
    word1, word2, scale1, scale2, HALF: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr, UP: gl.constexpr,
    N: gl.constexpr,
):  # fmt: skip
    """[64, 128 / PARTS] float16, 2**-7 of a warp group's weights in a part of half a step's channels, permuted.

    Sixteen rows are sixteen outputs, or eight gates and eight ups.
    """
    LAYOUT: gl.constexpr = _word_layout(4 // PARTS)
    if UP:
        # an even eight of outputs is the first of sixteen, an odd one the second
        shift = gl.arange(0, 128, layout=_scale_layout()) // 32 % 2 * 8 + 16 * HALF
        first = ((scale1 >> shift) & 0xFF) * 0x01000100
        second = ((scale2 >> shift) & 0xFF) * 0x01000100
    else:
        first = ((scale1 >> (16 * HALF)) & 0xFF) * 0x01000100
        second = ((scale1 >> (16 * HALF + 8)) & 0xFF) * 0x01000100
    factor = gl.reshape(gl.permute(gl.join(first, second), [1, 0]), [2, 4, 8, 4, 1])
    factor = gl.convert_layout(factor, LAYOUT)
    word = gl.permute(gl.join(word1, word2), [1, 0])
    if PARTS == 2:
        low, high = gl.split(gl.permute(gl.reshape(word, [2, 4, 8, 4, 2, 2]), [0, 1, 2, 3, 5, 4]))
        word = low if PART == 0 else high
    word = gl.convert_layout(gl.reshape(word, [2, 4, 8, 4, 4 // PARTS]), LAYOUT)
    a, b, c, d = _widen(word, factor)
    w = gl.join(gl.join(_pair(a), _pair(b)), gl.join(_pair(c), _pair(d)))
    w = gl.reshape(gl.permute(w, [1, 0, 2, 4, 7, 6, 3, 5]), [64, 128 // PARTS])
    return gl.convert_layout(w, gl.DotOperandLayout(0, _sums(N), 2))


@gluon.jit
def _words(codes_ptr, place, quarter, UP: gl.constexpr):
    """Half of a half step's words: of four eights of a block, the first or last four if UP, else every other."""
    index = gl.arange(0, 512, layout=_line_layout())
    if UP:
        eight = index // 128
        index = eight % 2 * 512 + eight // 2 * 128 + index % 128 + quarter * 256
    return gl.load(codes_ptr + place + index)


@gluon.jit
def _scales(scales_ptr, place, quarter, UP: gl.constexpr):
    index = gl.arange(0, 128, layout=_scale_layout())
    if UP:
        index = index // 64 * 32 + index % 32 + quarter * 64
    return gl.load(scales_ptr + place + index)


@gluon.jit
def _rows(buffers, place, START: gl.constexpr, N: gl.constexpr):
    """N rows of a buffer of 128; START is a multiple of N."""
    whole, half, quarter, eighth = buffers
    at = place * (128 // N) + START // N
    if N == 128:
        rows = whole.index(at)
    elif N == 64:
        rows = half.index(at)
    elif N == 32:
        rows = quarter.index(at)
    else:
        rows = eighth.index(at)
    return rows


@gluon.jit
def _release(empty, stage):
    """All warps of the group are done with the rows."""
    gl.thread_barrier()
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _multiply(
    full, empty, buffers, first_codes, first_scales, second_codes, second_scales, at, then, quarter, coming, ahead,
    steps, counter, UP: gl.constexpr, N: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """The product of a warp group's rows with a tile, and the first words of the next; places are in steps.

    The next weights are decoded while a product runs.
    """
    word1, word2, scale1, scale2 = ahead
    total = gl.zeros([64, N], gl.float32, _sums(N))
    more = gl.zeros([64, MORE if MORE else 16], gl.float32, _sums(MORE if MORE else 16))
    GROUPS: gl.constexpr = 2 if MORE else 1
    # the second eights lie behind the first ones
    OTHER: gl.constexpr = 0 if UP else 512
    for step in range(steps):
        after = gl.where(step + 1 < steps, at + 1, then)
        side = gl.where(step + 1 < steps, quarter, coming)
        for half in gl.static_range(2):
            turn = counter + 2 * step + half
            stage = turn % STAGES
            for part in gl.static_range(PARTS):
                place = stage * PARTS + part
                w = _decode(word1, word2, scale1, scale2, half, part, PARTS, UP, N)
                if part == PARTS - 1:
                    if half == 0:
                        word1 = _words(first_codes, at * 2048 + 1024, quarter, UP)
                        word2 = _words(second_codes, at * 2048 + 1024 + OTHER, quarter, UP)
                    else:
                        word1 = _words(first_codes, after * 2048, side, UP)
                        word2 = _words(second_codes, after * 2048 + OTHER, side, UP)
                        scale1 = _scales(first_scales, after * 128, side, UP)
                        if UP:
                            scale2 = _scales(second_scales, after * 128, side, UP)
                if part == 0:
                    mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
                total = warpgroup_mma(w, _rows(buffers, place, 0, N).permute([1, 0]), total, is_async=True)
                if MORE:
                    more = warpgroup_mma(w, _rows(buffers, place, N, MORE).permute([1, 0]), more, is_async=True)
                if half * PARTS + part < 2 * PARTS - 1:
                    total, more, w = warpgroup_mma_wait(GROUPS, deps=[total, more, w])
                    if half == 1 and part == 0:
                        _release(empty, (turn - 1) % STAGES)
        total, more, w = warpgroup_mma_wait(0, deps=[total, more, w])
        if PARTS == 1:
            _release(empty, (counter + 2 * step) % STAGES)
        _release(empty, (counter + 2 * step + 1) % STAGES)
        at = after
    return total, more, (word1, word2, scale1, scale2)


@gluon.jit
def _ceil_power_of_two(x):
    return (x.to(gl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000


@gluon.jit
def _activate(
    total, weights_ptr, member_ptr, inner_ptr, eighth, inner_width, limit,
    N: gl.constexpr, HALF_OUT: gl.constexpr, ROUNDED: gl.constexpr,
):  # fmt: skip
    """SwiGLU of eight gates and eight ups by turns, times the routing weight, rounded, into permuted rows."""
    DTYPE: gl.constexpr = gl.bfloat16 if HALF_OUT else gl.float32
    total = (total * 128.0).to(DTYPE).to(gl.float32)
    gate, up = gl.split(gl.permute(gl.reshape(total, [4, 2, 8, N]), [0, 2, 3, 1]))
    gate = gl.minimum(gl.reshape(gate, [32, N]), limit)
    up = gl.minimum(gl.maximum(gl.reshape(up, [32, N]), 0.0 - limit), limit)
    member = gl.load(member_ptr + gl.arange(0, N, layout=gl.SliceLayout(0, gate.type.layout)))
    weight = gl.load(weights_ptr + gl.maximum(member, 0), mask=member >= 0, other=0.0)
    y = (gate * (1.0 / (1.0 + gl.exp(0.0 - gate))) * up * gl.expand_dims(weight, 0)).to(DTYPE)
    # channels by (eight, first or last four, pair, one of it), in the order in which rows keep them
    y = gl.permute(gl.reshape(y, [4, 2, 2, 2, N]), [4, 0, 2, 3, 1])
    LINES: gl.constexpr = gl.BlockedLayout([1, 4, 2], [8, 4, 1], [4, 1, 1], [2, 1, 0])
    y = gl.convert_layout(gl.reshape(y, [N, 16, 2]), LINES).to(gl.float32)
    if ROUNDED:
        high = gl.max(gl.max(gl.abs(y), axis=2), axis=1)
        broken = gl.max(gl.max((y != y).to(gl.int32), axis=2), axis=1)
        broken = gl.expand_dims(gl.expand_dims(broken, 1), 2)
        bits = _ceil_power_of_two(gl.maximum(high, 1e-4) * (1.0 / 448.0))
        bits = gl.expand_dims(gl.expand_dims(bits, 1), 2)
        # by a power of two: exact
        scale = bits.to(gl.float32, bitcast=True)
        z = y * ((254 << 23) - bits).to(gl.float32, bitcast=True)
        shift = gl.maximum(z.to(gl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
        shift = shift.to(gl.float32, bitcast=True) * (1.5 * 2**20)
        z = ((z + shift) - shift) * scale
        # NaN spreads over its group
        y = gl.where(broken > 0, float("nan"), z)
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LINES))
    member = gl.load(member_ptr + gl.arange(0, N, layout=ROW))
    place = gl.maximum(member, 0).to(gl.int64) * inner_width + eighth // 4 * 128 + eighth % 4 * 2
    eight = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LINES))) * 8
    two = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LINES)))
    out = gl.expand_dims(gl.expand_dims(place, 1), 2) + gl.expand_dims(gl.expand_dims(eight, 0), 2)
    out = inner_ptr + out + gl.expand_dims(gl.expand_dims(two, 0), 1)
    gl.store(out, y.to(gl.float16), mask=gl.expand_dims(gl.expand_dims(member >= 0, 1), 2))


@gluon.jit
def _keep(total, member_ptr, out_ptr, block, channels, N: gl.constexpr, HALF_OUT: gl.constexpr):
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    y = gl.permute((total * 128.0).to(gl.bfloat16 if HALF_OUT else gl.float32), [1, 0])
    y = gl.convert_layout(y, LINES)
    member = gl.load(member_ptr + gl.arange(0, N, layout=gl.SliceLayout(1, LINES)))
    channel = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    place = gl.expand_dims(gl.maximum(member, 0).to(gl.int64) * channels, 1) + gl.expand_dims(channel, 0)
    gl.store(out_ptr + place, y, mask=gl.expand_dims(member >= 0, 1))


@gluon.jit
def _tile(
    full, empty, buffers, weights, at, then, unit, coming, ahead, member_ptr, share_ptr, out_ptr, steps,
    counter, width, limit, UP: gl.constexpr, HALF_OUT: gl.constexpr, ROUNDED: gl.constexpr,
    N: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    first_codes, first_scales, second_codes, second_scales = weights
    total, more, ahead = _multiply(
        full, empty, buffers, first_codes, first_scales, second_codes, second_scales, at, then, unit % 2, coming % 2,
        ahead, steps, counter, UP, N, MORE, STAGES, PARTS,
    )  # fmt: skip
    if UP:
        _activate(total, share_ptr, member_ptr, out_ptr, unit, width, limit, N, HALF_OUT, ROUNDED)
        if MORE:
            _activate(more, share_ptr, member_ptr + N, out_ptr, unit, width, limit, MORE, HALF_OUT, ROUNDED)
    else:
        _keep(total, member_ptr, out_ptr, unit, width, N, HALF_OUT)
        if MORE:
            _keep(more, member_ptr + N, out_ptr, unit, width, MORE, HALF_OUT)
    return ahead


@gluon.jit
def _consume(
    full, empty, buffers, group, tile_ptr, member_ptr, share_ptr,
    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, units, steps, width,
    limit, C: gl.constexpr, UP: gl.constexpr, HALF_OUT: gl.constexpr, ROUNDED: gl.constexpr,
    CAPACITY: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """A unit is what a warp group has: 32 gates and as many ups, or 64 outputs."""
    items = num_tiles * blocks
    weights = (first_codes, first_scales, second_codes, second_scales)
    OTHER: gl.constexpr = 0 if UP else 512
    HALVES: gl.constexpr = 2 if UP else 1
    item = gl.program_id(0)
    counter = 0
    if item < items:
        expert = gl.load(tile_ptr + item // blocks).to(gl.int64)
        # the last program's may be another's too, with the same values
        unit = gl.minimum(item % blocks * C + group, units - 1)
        at = (expert * (units // HALVES) + unit // HALVES) * steps
        word1 = _words(first_codes, at * 2048, unit % 2, UP)
        word2 = _words(second_codes, at * 2048 + OTHER, unit % 2, UP)
        scale1 = _scales(first_scales, at * 128, unit % 2, UP)
        scale2 = _scales(second_scales, at * 128, unit % 2, UP) if UP else scale1
        for item in range(gl.program_id(0), items, gl.num_programs(0)):
            tile = item // blocks
            unit = gl.minimum(item % blocks * C + group, units - 1)
            # the last item's next is itself
            later = gl.minimum(item + gl.num_programs(0), items - 1)
            coming = gl.minimum(later % blocks * C + group, units - 1)
            expert = gl.load(tile_ptr + later // blocks).to(gl.int64)
            then = (expert * (units // HALVES) + coming // HALVES) * steps
            members = member_ptr + tile * CAPACITY
            ahead = (word1, word2, scale1, scale2)
            if gl.load(members + 32) >= 0:
                if gl.load(members + 64) >= 0:
                    if CAPACITY == 80:
                        ahead = _tile(
                            full, empty, buffers, weights, at, then, unit, coming, ahead, members, share_ptr, out_ptr, steps,
                            counter, width, limit, UP, HALF_OUT, ROUNDED, 64, 16, STAGES, PARTS,
                        )  # fmt: skip
                    elif gl.load(members + 80) >= 0:
                        ahead = _tile(
                            full, empty, buffers, weights, at, then, unit, coming, ahead, members, share_ptr, out_ptr, steps,
                            counter, width, limit, UP, HALF_OUT, ROUNDED, 128, 0, STAGES, PARTS,
                        )  # fmt: skip
                    else:
                        ahead = _tile(
                            full, empty, buffers, weights, at, then, unit, coming, ahead, members, share_ptr, out_ptr, steps,
                            counter, width, limit, UP, HALF_OUT, ROUNDED, 64, 16, STAGES, PARTS,
                        )  # fmt: skip
                else:
                    ahead = _tile(
                        full, empty, buffers, weights, at, then, unit, coming, ahead, members, share_ptr, out_ptr, steps,
                        counter, width, limit, UP, HALF_OUT, ROUNDED, 64, 0, STAGES, PARTS,
                    )  # fmt: skip
            else:
                if gl.load(members + 16) >= 0:
                    ahead = _tile(
                        full, empty, buffers, weights, at, then, unit, coming, ahead, members, share_ptr, out_ptr, steps,
                        counter, width, limit, UP, HALF_OUT, ROUNDED, 32, 0, STAGES, PARTS,
                    )  # fmt: skip
                else:
                    ahead = _tile(
                        full, empty, buffers, weights, at, then, unit, coming, ahead, members, share_ptr, out_ptr, steps,
                        counter, width, limit, UP, HALF_OUT, ROUNDED, 16, 0, STAGES, PARTS,
                    )  # fmt: skip
            word1, word2, scale1, scale2 = ahead
            at = then
            counter += 2 * steps


@gluon.jit
def _ask(ptr):
    """For the line of the second cache; no value comes back."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _ask_ahead(codes_ptr, scales_ptr, place, block, blocks, steps, COUNT: gl.constexpr):
    """For a step of COUNT blocks in a row; places and steps as in `_multiply`."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SPAN: gl.constexpr = COUNT if COUNT % 3 else COUNT // 3 * 4
    line = gl.arange(0, 64 * SPAN, layout=LINE)
    each = gl.minimum(block + gl.minimum(line // 64, COUNT - 1), blocks - 1)
    _ask(codes_ptr + (place + each * steps) * 2048 + line % 64 * 32)
    line = gl.arange(0, 4 * SPAN, layout=LINE)
    each = gl.minimum(block + gl.minimum(line // 4, COUNT - 1), blocks - 1)
    _ask(scales_ptr + (place + each * steps) * 128 + line % 4 * 32)


@gluon.jit
def _copy_rows(
    full, empty, buffers, x_ptr, member_ptr, first_codes, first_scales, second_codes, second_scales, place,
    block, all_blocks, steps, counter, k, C: gl.constexpr, UP: gl.constexpr,
    N: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2 * PARTS, 16 // PARTS], [4, 1], [1, 0])
    channel = gl.expand_dims(gl.arange(0, 128 // PARTS, layout=gl.SliceLayout(0, LINES)), 0)
    member = gl.load(member_ptr + gl.arange(0, N, layout=gl.SliceLayout(1, LINES)))
    row = x_ptr + gl.expand_dims((gl.maximum(member, 0) // k).to(gl.int64) * (steps * 256), 1) + channel
    # what a missing row holds reaches no other row
    there = gl.expand_dims(member >= 0, 1)
    if MORE:
        more = gl.load(member_ptr + N + gl.arange(0, MORE, layout=gl.SliceLayout(1, LINES)))
        more_row = x_ptr + gl.expand_dims((gl.maximum(more, 0) // k).to(gl.int64) * (steps * 256), 1) + channel
        more_there = gl.expand_dims(more >= 0, 1)
    for step in range(steps):
        for half in gl.static_range(2):
            turn = counter + 2 * step + half
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), 1 - ((turn // STAGES) & 1))
            for part in gl.static_range(PARTS):
                start = step * 256 + half * 128 + part * (128 // PARTS)
                to = stage * PARTS + part
                async_copy.async_copy_global_to_shared(_rows(buffers, to, 0, N), row + start, mask=there)
                if MORE:
                    async_copy.async_copy_global_to_shared(_rows(buffers, to, N, MORE), more_row + start, mask=more_there)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            if AHEAD:
                if UP:
                    if half == 0:
                        _ask_ahead(first_codes, first_scales, place + step, block, all_blocks, steps, C // 2)
                    else:
                        _ask_ahead(second_codes, second_scales, place + step, block, all_blocks, steps, C // 2)
                elif half == 0:
                    _ask_ahead(first_codes, first_scales, place + step, block, all_blocks, steps, C)


@gluon.jit
def _produce(
    full, empty, buffers, x_ptr, tile_ptr, member_ptr,
    first_codes, first_scales, second_codes, second_scales, num_tiles, blocks, all_blocks, steps, k,
    C: gl.constexpr, UP: gl.constexpr, CAPACITY: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    counter = 0
    for item in range(gl.program_id(0), num_tiles * blocks, gl.num_programs(0)):
        members = member_ptr + item // blocks * CAPACITY
        block = item % blocks * (C // 2 if UP else C)
        place = gl.load(tile_ptr + item // blocks).to(gl.int64) * all_blocks * steps
        if gl.load(members + 32) >= 0:
            if gl.load(members + 64) >= 0:
                if CAPACITY == 80:
                    _copy_rows(
                        full, empty, buffers, x_ptr, members, first_codes, first_scales, second_codes,
                        second_scales, place, block, all_blocks, steps, counter, k, C, UP, 64, 16, STAGES, PARTS, AHEAD,
                    )  # fmt: skip
                elif gl.load(members + 80) >= 0:
                    _copy_rows(
                        full, empty, buffers, x_ptr, members, first_codes, first_scales, second_codes,
                        second_scales, place, block, all_blocks, steps, counter, k, C, UP, 128, 0, STAGES, PARTS, AHEAD,
                    )  # fmt: skip
                else:
                    _copy_rows(
                        full, empty, buffers, x_ptr, members, first_codes, first_scales, second_codes,
                        second_scales, place, block, all_blocks, steps, counter, k, C, UP, 64, 16, STAGES, PARTS, AHEAD,
                    )  # fmt: skip
            else:
                _copy_rows(
                    full, empty, buffers, x_ptr, members, first_codes, first_scales, second_codes,
                    second_scales, place, block, all_blocks, steps, counter, k, C, UP, 64, 0, STAGES, PARTS, AHEAD,
                )  # fmt: skip
        else:
            if gl.load(members + 16) >= 0:
                _copy_rows(
                    full, empty, buffers, x_ptr, members, first_codes, first_scales, second_codes,
                    second_scales, place, block, all_blocks, steps, counter, k, C, UP, 32, 0, STAGES, PARTS, AHEAD,
                )  # fmt: skip
            else:
                _copy_rows(
                    full, empty, buffers, x_ptr, members, first_codes, first_scales, second_codes,
                    second_scales, place, block, all_blocks, steps, counter, k, C, UP, 16, 0, STAGES, PARTS, AHEAD,
                )  # fmt: skip
        counter += 2 * steps


@gluon.jit
def _many_rows(
    x_ptr, share_ptr, count_ptr, first_ptr, tile_ptr, member_ptr,
    first_codes, first_scales, second_codes, second_scales, out_ptr, last, all_blocks, steps, width, k, limit,
    C: gl.constexpr, UP: gl.constexpr, HALF_OUT: gl.constexpr, ROUNDED: gl.constexpr,
    CAPACITY: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, AHEAD: gl.constexpr, REGISTERS: gl.constexpr,
    LEFT: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    gdc_wait()
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    whole = gl.allocate_shared_memory(gl.float16, [STAGES * PARTS, 128, 128 // PARTS], SHARED)
    buffers = (
        whole,
        whole._reinterpret(gl.float16, [2 * STAGES * PARTS, 64, 128 // PARTS], SHARED),
        whole._reinterpret(gl.float16, [4 * STAGES * PARTS, 32, 128 // PARTS], SHARED),
        whole._reinterpret(gl.float16, [8 * STAGES * PARTS, 16, 128 // PARTS], SHARED),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=C)
    # the last expert's tiles are the last
    num_tiles = gl.load(first_ptr + last) + gl.cdiv(gl.load(count_ptr + last), CAPACITY)
    units = all_blocks * 2 if UP else all_blocks
    blocks = gl.cdiv(units, C)
    row_k = k if UP else 1
    if C == 4:
        gl.warp_specialize(
            [
                (_consume, (
                    full, empty, buffers, 0, tile_ptr, member_ptr, share_ptr,
                    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, units,
                    steps, width, limit, C, UP, HALF_OUT, ROUNDED, CAPACITY, STAGES, PARTS,
                )),
                (_consume, (
                    full, empty, buffers, 1, tile_ptr, member_ptr, share_ptr,
                    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, units,
                    steps, width, limit, C, UP, HALF_OUT, ROUNDED, CAPACITY, STAGES, PARTS,
                )),
                (_consume, (
                    full, empty, buffers, 2, tile_ptr, member_ptr, share_ptr,
                    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, units,
                    steps, width, limit, C, UP, HALF_OUT, ROUNDED, CAPACITY, STAGES, PARTS,
                )),
                (_consume, (
                    full, empty, buffers, 3, tile_ptr, member_ptr, share_ptr,
                    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, units,
                    steps, width, limit, C, UP, HALF_OUT, ROUNDED, CAPACITY, STAGES, PARTS,
                )),
                (_produce, (
                    full, empty, buffers, x_ptr, tile_ptr, member_ptr,
                    first_codes, first_scales, second_codes, second_scales, num_tiles, blocks, all_blocks, steps, row_k,
                    C, UP, CAPACITY, STAGES, PARTS, AHEAD,
                )),
            ],
            [4, 4, 4, 4], [REGISTERS, REGISTERS, REGISTERS, LEFT],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    full, empty, buffers, 0, tile_ptr, member_ptr, share_ptr,
                    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, units,
                    steps, width, limit, C, UP, HALF_OUT, ROUNDED, CAPACITY, STAGES, PARTS,
                )),
                (_consume, (
                    full, empty, buffers, 1, tile_ptr, member_ptr, share_ptr,
                    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, units,
                    steps, width, limit, C, UP, HALF_OUT, ROUNDED, CAPACITY, STAGES, PARTS,
                )),
                (_consume, (
                    full, empty, buffers, 2, tile_ptr, member_ptr, share_ptr,
                    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, units,
                    steps, width, limit, C, UP, HALF_OUT, ROUNDED, CAPACITY, STAGES, PARTS,
                )),
                (_produce, (
                    full, empty, buffers, x_ptr, tile_ptr, member_ptr,
                    first_codes, first_scales, second_codes, second_scales, num_tiles, blocks, all_blocks, steps, row_k,
                    C, UP, CAPACITY, STAGES, PARTS, AHEAD,
                )),
            ],
            [4, 4, 4], [REGISTERS, REGISTERS, LEFT],
        )  # fmt: skip


@triton.jit
def _rank(
    ids_ptr, u_ptr, x_ptr, count_ptr, base_ptr, rank_ptr, num_choices, chunks, channels,
    A: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The first programs number an expert's choices, in any order; each other one permutes C channels of a row."""
    follow()
    if tl.program_id(0) < chunks:
        start = tl.program_id(0) * A
        choice = start + tl.arange(0, A)
        known = choice < num_choices
        ids = tl.load(ids_ptr + choice, mask=known, other=0).to(tl.int32)
        expert = tl.arange(0, E)
        count = tl.histogram(ids, E, mask=known)
        base_ptr += tl.program_id(0) * E
        # one addition for all of a program's choices of an expert: those of a popular one would wait for each other
        tl.store(base_ptr + expert, tl.atomic_add(count_ptr + expert, count, mask=count > 0, sem="relaxed"))
        tl.debug_barrier()
        rank = tl.load(base_ptr + ids, mask=known, other=0)
        for other in range(0, A, 16):
            place = other + tl.arange(0, 16)
            each = tl.load(ids_ptr + start + place, mask=start + place < num_choices, other=-1).to(tl.int32)
            before = (each[None, :] == ids[:, None]) & (place[None, :] < tl.arange(0, A)[:, None])
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
    ids_ptr, count_ptr, rank_ptr, first_ptr, tile_ptr, member_ptr, num_choices,
    A: tl.constexpr, E: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Each program places A choices and clears what is left of 16 experts' last tiles; S >= N."""
    follow()
    expert = tl.arange(0, E)
    tiles = (tl.load(count_ptr + expert) + N - 1) // N
    first = tl.cumsum(tiles, axis=0) - tiles
    # every program has its own, to look things up in
    first_ptr += tl.program_id(0) * E
    tl.store(first_ptr + expert, first)
    if tl.program_id(0) == 0:
        for tile in range(tl.max(tiles, axis=0)):
            tl.store(tile_ptr + first + tile, expert, mask=tile < tiles)
    tl.debug_barrier()
    choice = tl.program_id(0) * A + tl.arange(0, A)
    known = choice < num_choices
    ids = tl.load(ids_ptr + choice, mask=known, other=0).to(tl.int32)
    rank = tl.load(rank_ptr + choice, mask=known, other=0)
    tl.store(member_ptr + tl.load(first_ptr + ids, mask=known, other=0) * N + rank, choice, mask=known)
    mine = tl.program_id(0) * 16 + tl.arange(0, 16)
    there = mine < E
    count = tl.load(count_ptr + mine, mask=there, other=0)
    place = tl.load(first_ptr + mine, mask=there, other=0) * N + count
    slot = tl.arange(0, S)
    missing = (count + N - 1) // N * N - count
    tl.store(member_ptr + place[:, None] + slot[None, :], -1, mask=slot[None, :] < missing[:, None])


def multiply_many(
    x: Tensor, shares: Tensor, plan: tuple[Tensor, ...], first: Any, second: Any, out: Tensor, k: int, limit: float,
    up: bool, rounded: bool, half_out: bool, capacity: int, groups: int, stages: int, parts: int, ahead: bool,
    registers: int, left: int, programs: int,
) -> None:  # fmt: skip
    """Gates and ups into `out`'s permuted rows, or the outputs of choices."""
    all_blocks, steps = first.codes.shape[1:3]
    _many_rows[(programs,)](
        x, shares, *plan, *first[:2], *second[:2], out, plan[0].shape[0] - 1, all_blocks, steps, out.shape[1], k, limit,
        C=groups, UP=up, HALF_OUT=half_out, ROUNDED=rounded, CAPACITY=capacity, STAGES=stages,
        PARTS=parts, AHEAD=ahead, REGISTERS=registers, LEFT=left, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def plan_many(u_TD: Tensor, ids_TK: Tensor, num_experts: int, capacity: int) -> tuple[Tensor, ...]:
    (num_rows, channels), num_choices = u_TD.shape, ids_TK.numel()
    num_tiles = min(num_choices, num_experts) + num_choices // capacity
    experts = next_power_of_2(num_experts)
    new: dict[str, Any] = {"device": u_TD.device}
    chunk, piece = 256, 2048
    chunks = triton.cdiv(num_choices, chunk)
    placing = max(chunks, experts // 16)
    # each part aligned, so that one compiled kernel serves all sizes
    sizes = num_choices, placing * experts, placing * experts, num_tiles, num_tiles * capacity
    parts_of = [-(-size // 16) * 16 for size in sizes]
    count = torch.zeros(experts, dtype=torch.int32, **new)
    rank, base, first, tile, member = torch.empty(sum(parts_of), dtype=torch.int32, **new).split(parts_of)
    x = torch.empty(num_rows, channels, dtype=torch.float16, **new)
    _rank[(chunks + num_rows * triton.cdiv(channels, piece),)](
        ids_TK, u_TD, x, count, base, rank, num_choices, chunks, channels, A=chunk, E=experts, C=piece, num_warps=8,
        launch_pdl=AHEAD,
    )  # fmt: skip
    _place[(placing,)](
        ids_TK, count, rank, first, tile, member, num_choices, A=chunk, E=experts, N=capacity,
        S=next_power_of_2(capacity), num_warps=4, launch_pdl=AHEAD,
    )  # fmt: skip
    return x, count, first, tile, member


def many_experts(
    u_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, w1: Tiled, w3: Tiled, w2: Tiled, limit: float,
    round_inner: bool, capacity: int = 80, groups: int = 4, stages: int = 4, parts: int = 2, ahead: bool = False,
    registers: int = 112, left: int = 32, programs: int = 132,
) -> Tensor:  # fmt: skip
    (num_rows, channels), k = u_TD.shape, ids_TK.shape[1]
    num_experts, num_choices, num_inner = w1.codes.shape[0], num_rows * k, w1.outputs
    assert channels % 256 == 0 and num_inner % 256 == 0
    new: dict[str, Any] = {"device": u_TD.device}
    x, *plan = plan_many(u_TD, ids_TK, num_experts, capacity)
    inner = torch.empty(num_choices, num_inner, dtype=torch.float16, **new)
    half = u_TD.dtype == torch.bfloat16
    rest = capacity, groups, stages, parts, ahead, registers, left, programs
    multiply_many(x, weights_TK, plan, w1, w3, inner, k, limit, True, round_inner, half, *rest)
    choice = torch.empty(num_choices, channels, dtype=u_TD.dtype, **new)
    multiply_many(inner, weights_TK, plan, w2, w2, choice, k, limit, False, False, half, *rest)
    y_TD = torch.empty(num_rows, channels, dtype=torch.float32, **new)
    _add_choices[(num_rows, triton.cdiv(channels, 1024))](choice, y_TD, channels, K=k, B=1024, launch_pdl=AHEAD)
    return y_TD
