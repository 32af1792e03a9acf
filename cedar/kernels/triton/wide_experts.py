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
    return gl.DistributedLinearLayout(
        [[1], [2], [512]], [[4], [8], [16], [32], [64]], [[128], [256]], [], [1024]
    )


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
def _decode(word, scale, HALF: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr, N: gl.constexpr):
    """[64, 128 / PARTS] float16, 2**-7 of the weights of a block in a part of half a step's channels, permuted."""
    LAYOUT: gl.constexpr = _word_layout(4 // PARTS)
    first = ((scale >> (16 * HALF)) & 0xFF) * 0x01000100
    second = ((scale >> (16 * HALF + 8)) & 0xFF) * 0x01000100
    factor = gl.reshape(gl.permute(gl.join(first, second), [1, 0]), [2, 4, 8, 4, 1])
    factor = gl.convert_layout(factor, LAYOUT)
    if PARTS == 2:
        low, high = gl.split(gl.permute(gl.reshape(word, [2, 4, 8, 4, 2, 2]), [0, 1, 2, 3, 5, 4]))
        word = low if PART == 0 else high
    word = gl.convert_layout(gl.reshape(word, [2, 4, 8, 4, 4 // PARTS]), LAYOUT)
    a, b, c, d = _widen(word, factor)
    w = gl.join(gl.join(_pair(a), _pair(b)), gl.join(_pair(c), _pair(d)))
    w = gl.reshape(gl.permute(w, [1, 0, 2, 4, 7, 6, 3, 5]), [64, 128 // PARTS])
    return gl.convert_layout(w, gl.DotOperandLayout(0, _sums(N), 2))


@gluon.jit
def _words(codes_ptr, place):
    return gl.load(codes_ptr + place + gl.arange(0, 1024, layout=_line_layout()))


@gluon.jit
def _scales(scales_ptr, place):
    return gl.load(scales_ptr + place + gl.arange(0, 128, layout=_scale_layout()))


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
    full, empty, buffers, first_codes, first_scales, second_codes, second_scales, at, then, ahead, steps,
    counter, N: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Products of two blocks with a tile, and the first words of the next; places are (block one, block two) in steps.

    While one block's product runs, the other's next weights are decoded.
    """
    at1, at2 = at
    then1, then2 = then
    word1, word2, scale1, scale2 = ahead
    first = gl.zeros([64, N], gl.float32, _sums(N))
    second = gl.zeros([64, N], gl.float32, _sums(N))
    more_first = gl.zeros([64, MORE if MORE else 16], gl.float32, _sums(MORE if MORE else 16))
    more_second = gl.zeros([64, MORE if MORE else 16], gl.float32, _sums(MORE if MORE else 16))
    GROUPS: gl.constexpr = 2 if MORE else 1
    for step in range(steps):
        next1 = gl.where(step + 1 < steps, at1 + 1, then1)
        next2 = gl.where(step + 1 < steps, at2 + 1, then2)
        for half in gl.static_range(2):
            turn = counter + 2 * step + half
            stage = turn % STAGES
            for part in gl.static_range(PARTS):
                place = stage * PARTS + part
                w = _decode(word1, scale1, half, part, PARTS, N)
                if part == PARTS - 1:
                    if half == 0:
                        word1 = _words(first_codes, at1 * 2048 + 1024)
                    else:
                        word1 = _words(first_codes, next1 * 2048)
                        scale1 = _scales(first_scales, next1 * 128)
                if part == 0:
                    mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
                first = warpgroup_mma(w, _rows(buffers, place, 0, N).permute([1, 0]), first, is_async=True)
                if MORE:
                    more_first = warpgroup_mma(w, _rows(buffers, place, N, MORE).permute([1, 0]), more_first, is_async=True)
                if half + part > 0:
                    second, more_second, w2 = warpgroup_mma_wait(GROUPS, deps=[second, more_second, w2])
                    if part == 0:
                        _release(empty, (turn - 1) % STAGES)
                w2 = _decode(word2, scale2, half, part, PARTS, N)
                if part == PARTS - 1:
                    if half == 0:
                        word2 = _words(second_codes, at2 * 2048 + 1024)
                    else:
                        word2 = _words(second_codes, next2 * 2048)
                        scale2 = _scales(second_scales, next2 * 128)
                second = warpgroup_mma(w2, _rows(buffers, place, 0, N).permute([1, 0]), second, is_async=True)
                if MORE:
                    more_second = warpgroup_mma(w2, _rows(buffers, place, N, MORE).permute([1, 0]), more_second, is_async=True)
                if half + part < PARTS:
                    first, more_first, w = warpgroup_mma_wait(GROUPS, deps=[first, more_first, w])
        first, more_first, w, second, more_second, w2 = warpgroup_mma_wait(
            0, deps=[first, more_first, w, second, more_second, w2]
        )
        _release(empty, (counter + 2 * step + 1) % STAGES)
        at1 = next1
        at2 = next2
    return first, second, more_first, more_second, (word1, word2, scale1, scale2)


@gluon.jit
def _ceil_power_of_two(x):
    return (x.to(gl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000


@gluon.jit
def _activate(
    gate, up, weights_ptr, member_ptr, inner_ptr, block, inner_width, limit,
    N: gl.constexpr, HALF_OUT: gl.constexpr, ROUNDED: gl.constexpr,
):  # fmt: skip
    """SwiGLU times the routing weight, rounded, into permuted rows."""
    DTYPE: gl.constexpr = gl.bfloat16 if HALF_OUT else gl.float32
    member = gl.load(member_ptr + gl.arange(0, N, layout=gl.SliceLayout(0, _sums(N))))
    weight = gl.load(weights_ptr + gl.maximum(member, 0), mask=member >= 0, other=0.0)
    gate = gl.minimum((gate * 128.0).to(DTYPE).to(gl.float32), limit)
    up = gl.minimum(gl.maximum((up * 128.0).to(DTYPE).to(gl.float32), -limit), limit)
    y = (gate * (1.0 / (1.0 + gl.exp(0.0 - gate))) * up * gl.expand_dims(weight, 0)).to(DTYPE)
    # channels by (group, eight of it, first or last four, pair, one of it), in the order in which rows keep them
    y = gl.permute(gl.reshape(y, [2, 4, 2, 2, 2, N]), [5, 1, 3, 4, 0, 2])
    GROUPS: gl.constexpr = gl.BlockedLayout([1, 4, 2, 2], [8, 4, 1, 1], [4, 1, 1, 1], [3, 2, 1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 4, 4], [8, 4, 1], [4, 1, 1], [2, 1, 0])
    y = gl.convert_layout(gl.reshape(y, [N, 16, 2, 2]), GROUPS).to(gl.float32)
    if ROUNDED:
        high = gl.max(gl.max(gl.abs(y), axis=3), axis=1)
        broken = gl.max(gl.max((y != y).to(gl.int32), axis=3), axis=1)
        broken = gl.expand_dims(gl.expand_dims(broken, 1), 3)
        bits = _ceil_power_of_two(gl.maximum(high, 1e-4) * (1.0 / 448.0))
        bits = gl.expand_dims(gl.expand_dims(bits, 1), 3)
        # by a power of two: exact
        scale = bits.to(gl.float32, bitcast=True)
        z = y * ((254 << 23) - bits).to(gl.float32, bitcast=True)
        shift = gl.maximum(z.to(gl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
        shift = shift.to(gl.float32, bitcast=True) * (1.5 * 2**20)
        z = ((z + shift) - shift) * scale
        # NaN spreads over its group
        y = gl.where(broken > 0, float("nan"), z)
    y = gl.convert_layout(gl.reshape(y, [N, 16, 4]), LINES)
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LINES))
    member = gl.load(member_ptr + gl.arange(0, N, layout=ROW))
    place = gl.maximum(member, 0).to(gl.int64) * inner_width + block // 2 * 128 + block % 2 * 4
    eight = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LINES))) * 8
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LINES)))
    out = gl.expand_dims(gl.expand_dims(place, 1), 2) + gl.expand_dims(gl.expand_dims(eight, 0), 2)
    out = inner_ptr + out + gl.expand_dims(gl.expand_dims(four, 0), 1)
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
    full, empty, buffers, weights, at, then, ahead, member_ptr, share_ptr, out_ptr, block1, block2, steps,
    counter, width, limit, UP: gl.constexpr, HALF_OUT: gl.constexpr, ROUNDED: gl.constexpr,
    N: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    first_codes, first_scales, second_codes, second_scales = weights
    first, second, more_first, more_second, ahead = _multiply(
        full, empty, buffers, first_codes, first_scales, second_codes, second_scales, at, then, ahead, steps,
        counter, N, MORE, STAGES, PARTS,
    )  # fmt: skip
    if UP:
        _activate(first, second, share_ptr, member_ptr, out_ptr, block1, width, limit, N, HALF_OUT, ROUNDED)
        if MORE:
            _activate(
                more_first, more_second, share_ptr, member_ptr + N, out_ptr, block1, width, limit, MORE, HALF_OUT, ROUNDED
            )
    else:
        _keep(first, member_ptr, out_ptr, block1, width, N, HALF_OUT)
        _keep(second, member_ptr, out_ptr, block2, width, N, HALF_OUT)
        if MORE:
            _keep(more_first, member_ptr + N, out_ptr, block1, width, MORE, HALF_OUT)
            _keep(more_second, member_ptr + N, out_ptr, block2, width, MORE, HALF_OUT)
    return ahead


@gluon.jit
def _blocks(item, group, blocks, C: gl.constexpr, UP: gl.constexpr):
    """The two blocks of 64 that a warp group has; the last program's may be another's too, with the same values."""
    if UP:
        block = gl.minimum(item % blocks * C + group, blocks * C - 1)
        return block, block
    block = (item % blocks * C + group) * 2
    return block, block + 1


@gluon.jit
def _consume(
    full, empty, buffers, group, tile_ptr, member_ptr, share_ptr,
    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, all_blocks, steps, width,
    limit, C: gl.constexpr, UP: gl.constexpr, HALF_OUT: gl.constexpr, ROUNDED: gl.constexpr,
    CAPACITY: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    items = num_tiles * blocks
    weights = (first_codes, first_scales, second_codes, second_scales)
    item = gl.program_id(0)
    counter = 0
    if item < items:
        expert = gl.load(tile_ptr + item // blocks).to(gl.int64)
        block1, block2 = _blocks(item, group, blocks, C, UP)
        at1 = (expert * all_blocks + gl.minimum(block1, all_blocks - 1)) * steps
        at2 = (expert * all_blocks + gl.minimum(block2, all_blocks - 1)) * steps
        word1, word2 = _words(first_codes, at1 * 2048), _words(second_codes, at2 * 2048)
        scale1, scale2 = _scales(first_scales, at1 * 128), _scales(second_scales, at2 * 128)
        for item in range(gl.program_id(0), items, gl.num_programs(0)):
            tile = item // blocks
            block1, block2 = _blocks(item, group, blocks, C, UP)
            block1, block2 = gl.minimum(block1, all_blocks - 1), gl.minimum(block2, all_blocks - 1)
            # the last item's next is itself
            coming = gl.minimum(item + gl.num_programs(0), items - 1)
            expert = gl.load(tile_ptr + coming // blocks).to(gl.int64)
            next1, next2 = _blocks(coming, group, blocks, C, UP)
            then1 = (expert * all_blocks + gl.minimum(next1, all_blocks - 1)) * steps
            then2 = (expert * all_blocks + gl.minimum(next2, all_blocks - 1)) * steps
            members = member_ptr + tile * CAPACITY
            at, then, ahead = (at1, at2), (then1, then2), (word1, word2, scale1, scale2)
            if gl.load(members + 32) >= 0:
                if gl.load(members + 64) >= 0:
                    if CAPACITY == 80:
                        ahead = _tile(
                            full, empty, buffers, weights, at, then, ahead, members, share_ptr, out_ptr, block1,
                            block2, steps, counter, width, limit, UP, HALF_OUT, ROUNDED, 64, 16, STAGES, PARTS,
                        )  # fmt: skip
                    elif gl.load(members + 80) >= 0:
                        ahead = _tile(
                            full, empty, buffers, weights, at, then, ahead, members, share_ptr, out_ptr, block1,
                            block2, steps, counter, width, limit, UP, HALF_OUT, ROUNDED, 128, 0, STAGES, PARTS,
                        )  # fmt: skip
                    else:
                        ahead = _tile(
                            full, empty, buffers, weights, at, then, ahead, members, share_ptr, out_ptr, block1,
                            block2, steps, counter, width, limit, UP, HALF_OUT, ROUNDED, 64, 16, STAGES, PARTS,
                        )  # fmt: skip
                else:
                    ahead = _tile(
                        full, empty, buffers, weights, at, then, ahead, members, share_ptr, out_ptr, block1,
                        block2, steps, counter, width, limit, UP, HALF_OUT, ROUNDED, 64, 0, STAGES, PARTS,
                    )  # fmt: skip
            else:
                if gl.load(members + 16) >= 0:
                    ahead = _tile(
                        full, empty, buffers, weights, at, then, ahead, members, share_ptr, out_ptr,
                        block1, block2, steps, counter, width, limit, UP, HALF_OUT, ROUNDED, 32, 0, STAGES, PARTS,
                    )  # fmt: skip
                else:
                    ahead = _tile(
                        full, empty, buffers, weights, at, then, ahead, members, share_ptr, out_ptr,
                        block1, block2, steps, counter, width, limit, UP, HALF_OUT, ROUNDED, 16, 0, STAGES, PARTS,
                    )  # fmt: skip
            word1, word2, scale1, scale2 = ahead
            at1 = then1
            at2 = then2
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
                        _ask_ahead(first_codes, first_scales, place + step, block, all_blocks, steps, C)
                    else:
                        _ask_ahead(second_codes, second_scales, place + step, block, all_blocks, steps, C)
                elif half == 0:
                    _ask_ahead(first_codes, first_scales, place + step, block, all_blocks, steps, 2 * C)


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
        block = item % blocks * (C if UP else 2 * C)
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
    blocks = gl.cdiv(all_blocks, C if UP else 2 * C)
    row_k = k if UP else 1
    if C == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    full, empty, buffers, 0, tile_ptr, member_ptr, share_ptr,
                    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, all_blocks,
                    steps, width, limit, C, UP, HALF_OUT, ROUNDED, CAPACITY, STAGES, PARTS,
                )),
                (_consume, (
                    full, empty, buffers, 1, tile_ptr, member_ptr, share_ptr,
                    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, all_blocks,
                    steps, width, limit, C, UP, HALF_OUT, ROUNDED, CAPACITY, STAGES, PARTS,
                )),
                (_produce, (
                    full, empty, buffers, x_ptr, tile_ptr, member_ptr,
                    first_codes, first_scales, second_codes, second_scales, num_tiles, blocks, all_blocks, steps, row_k,
                    C, UP, CAPACITY, STAGES, PARTS, AHEAD,
                )),
            ],
            [4, 4], [REGISTERS, LEFT],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    full, empty, buffers, 0, tile_ptr, member_ptr, share_ptr,
                    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, all_blocks,
                    steps, width, limit, C, UP, HALF_OUT, ROUNDED, CAPACITY, STAGES, PARTS,
                )),
                (_consume, (
                    full, empty, buffers, 1, tile_ptr, member_ptr, share_ptr,
                    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, all_blocks,
                    steps, width, limit, C, UP, HALF_OUT, ROUNDED, CAPACITY, STAGES, PARTS,
                )),
                (_consume, (
                    full, empty, buffers, 2, tile_ptr, member_ptr, share_ptr,
                    first_codes, first_scales, second_codes, second_scales, out_ptr, num_tiles, blocks, all_blocks,
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
    ids_ptr, u_ptr, x_ptr, count_ptr, rank_ptr, num_choices, chunks, channels, A: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The first programs number an expert's choices, in any order; each other one permutes C channels of a row."""
    follow()
    if tl.program_id(0) < chunks:
        choice = tl.program_id(0) * A + tl.arange(0, A)
        known = choice < num_choices
        ids = tl.load(ids_ptr + choice, mask=known, other=0).to(tl.int32)
        tl.store(rank_ptr + choice, tl.atomic_add(count_ptr + ids, 1, mask=known, sem="relaxed"), mask=known)
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


def many_experts(
    u_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, w1: Tiled, w3: Tiled, w2: Tiled, limit: float,
    round_inner: bool, capacity: int = 80, groups: int = 2, stages: int = 4, parts: int = 1, ahead: bool = False,
    registers: int = 232, left: int = 40, programs: int = 132,
) -> Tensor:  # fmt: skip
    (num_rows, channels), k = u_TD.shape, ids_TK.shape[1]
    num_experts, num_choices, num_inner = w1.codes.shape[0], num_rows * k, w1.outputs
    assert channels % 256 == 0 and num_inner % 256 == 0
    num_tiles = min(num_choices, num_experts) + num_choices // capacity
    experts = next_power_of_2(num_experts)
    new: dict[str, Any] = {"device": u_TD.device}
    chunk = 512
    chunks = triton.cdiv(num_choices, chunk)
    placing = max(chunks, experts // 16)
    # each part aligned, so that one compiled kernel serves all sizes
    sizes = num_choices, placing * experts, num_tiles, num_tiles * capacity
    parts_of = [-(-size // 16) * 16 for size in sizes]
    count = torch.zeros(experts, dtype=torch.int32, **new)
    rank, first, tile, member = torch.empty(sum(parts_of), dtype=torch.int32, **new).split(parts_of)
    x = torch.empty(num_rows, channels, dtype=torch.float16, **new)
    piece = 4096
    _rank[(chunks + num_rows * triton.cdiv(channels, piece),)](
        ids_TK, u_TD, x, count, rank, num_choices, chunks, channels, A=chunk, C=piece, num_warps=4, launch_pdl=AHEAD
    )
    _place[(placing,)](
        ids_TK, count, rank, first, tile, member, num_choices, A=chunk, E=experts, N=capacity,
        S=next_power_of_2(capacity), num_warps=4, launch_pdl=AHEAD,
    )  # fmt: skip
    inner = torch.empty(num_choices, num_inner, dtype=torch.float16, **new)
    plan = count, first, tile, member
    half = u_TD.dtype == torch.bfloat16
    rest = capacity, groups, stages, parts, ahead, registers, left, programs
    multiply_many(x, weights_TK, plan, w1, w3, inner, k, limit, True, round_inner, half, *rest)
    choice = torch.empty(num_choices, channels, dtype=u_TD.dtype, **new)
    multiply_many(inner, weights_TK, plan, w2, w2, choice, k, limit, False, False, half, *rest)
    y_TD = torch.empty(num_rows, channels, dtype=torch.float32, **new)
    _add_choices[(num_rows, triton.cdiv(channels, 1024))](choice, y_TD, channels, K=k, B=1024, launch_pdl=AHEAD)
    return y_TD
