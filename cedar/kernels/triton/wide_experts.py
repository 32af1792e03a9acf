"""`packed_experts` of many rows on Hopper, in Gluon: warp groups that do not wait for each other.

In what Triton makes of such a product, each instruction whose weights are in registers is waited for by itself. Here a
warp group decodes one block's weights while another block's product runs, two of them take turns at the tensor
cores, and four more warps copy rows into shared memory and ask for weights, some steps ahead. Barriers in shared
memory are all that they share. Programs stay and take tile after tile: the next tile's rows and first weights are on
their way before a tile ends.

A warp group has two blocks of 64: gates and the ups beside them, or 128 outputs. N rows of a tile, MORE where it has
more. Half a step is 128 channels, and is multiplied in two parts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# rows of a tile at most
CAPACITY = 128
_CAPACITY, _GROUPS, _STAGES = gl.constexpr(CAPACITY), gl.constexpr(2), gl.constexpr(4)


@gluon.constexpr_function
def _line_layout():
    """Half a step's words of a block: 16 bytes twice a thread."""
    return gl.DistributedLinearLayout([[1], [2], [512]], [[4], [8], [16], [32], [64]], [[128], [256]], [], [1024])


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
def _decode(word, scale, HALF: gl.constexpr, PART: gl.constexpr, N: gl.constexpr):
    """[64, 64] float16, 2**-7 of the weights of a block in a part of half a step's channels, permuted."""
    WORDS: gl.constexpr = gl.BlockedLayout([2, 1, 1, 1, 2], [1, 1, 8, 4, 1], [1, 4, 1, 1, 1], [4, 3, 2, 1, 0])
    first = ((scale >> (16 * HALF)) & 0xFF) * 0x01000100
    second = ((scale >> (16 * HALF + 8)) & 0xFF) * 0x01000100
    factor = gl.reshape(gl.permute(gl.join(first, second), [1, 0]), [2, 4, 8, 4, 1])
    factor = gl.convert_layout(factor, WORDS)
    # words by (first or second eight of sixteen outputs, sixteen, output of eight, group of four, part, word)
    low, high = gl.split(gl.permute(gl.reshape(word, [2, 4, 8, 4, 2, 2]), [0, 1, 2, 3, 5, 4]))
    word = gl.convert_layout(low if PART == 0 else high, WORDS)
    a, b, c, d = _widen(word, factor)
    w = gl.join(gl.join(_pair(a), _pair(b)), gl.join(_pair(c), _pair(d)))
    w = gl.reshape(gl.permute(w, [1, 0, 2, 4, 7, 6, 3, 5]), [64, 64])
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
    full, empty, buffers, weights, at, then, ahead, steps, counter, N: gl.constexpr, MORE: gl.constexpr
):  # fmt: skip
    """Products of two blocks with a tile, and the first words of the next; places are (block one, block two) in steps.

    While one block's product runs, the other's next weights are decoded.
    """
    first_codes, first_scales, second_codes, second_scales = weights
    at1, at2 = at
    then1, then2 = then
    word1, word2, scale1, scale2 = ahead
    first = gl.zeros([64, N], gl.float32, _sums(N))
    second = gl.zeros([64, N], gl.float32, _sums(N))
    REST: gl.constexpr = MORE if MORE else 16
    more_first = gl.zeros([64, REST], gl.float32, _sums(REST))
    more_second = gl.zeros([64, REST], gl.float32, _sums(REST))
    GROUPS: gl.constexpr = 2 if MORE else 1
    for step in range(steps):
        next1 = gl.where(step + 1 < steps, at1 + 1, then1)
        next2 = gl.where(step + 1 < steps, at2 + 1, then2)
        for half in gl.static_range(2):
            turn = counter + 2 * step + half
            stage = turn % _STAGES
            for part in gl.static_range(2):
                place = stage * 2 + part
                w = _decode(word1, scale1, half, part, N)
                if part == 1:
                    if half == 0:
                        word1 = _words(first_codes, at1 * 2048 + 1024)
                    else:
                        word1 = _words(first_codes, next1 * 2048)
                        scale1 = _scales(first_scales, next1 * 128)
                if part == 0:
                    mbarrier.wait(full.index(stage), (turn // _STAGES) & 1)
                first = warpgroup_mma(w, _rows(buffers, place, 0, N).permute([1, 0]), first, is_async=True)
                if MORE:
                    rest = _rows(buffers, place, N, MORE).permute([1, 0])
                    more_first = warpgroup_mma(w, rest, more_first, is_async=True)
                if half + part == 0:
                    # nothing runs yet
                    w2 = w
                else:
                    second, more_second, w2 = warpgroup_mma_wait(GROUPS, deps=[second, more_second, w2])
                    if part == 0:
                        _release(empty, (turn - 1) % _STAGES)
                w2 = _decode(word2, scale2, half, part, N)
                if part == 1:
                    if half == 0:
                        word2 = _words(second_codes, at2 * 2048 + 1024)
                    else:
                        word2 = _words(second_codes, next2 * 2048)
                        scale2 = _scales(second_scales, next2 * 128)
                second = warpgroup_mma(w2, _rows(buffers, place, 0, N).permute([1, 0]), second, is_async=True)
                if MORE:
                    rest = _rows(buffers, place, N, MORE).permute([1, 0])
                    more_second = warpgroup_mma(w2, rest, more_second, is_async=True)
                if half + part < 2:
                    first, more_first, w = warpgroup_mma_wait(GROUPS, deps=[first, more_first, w])
        first, more_first, w, second, more_second, w2 = warpgroup_mma_wait(
            0, deps=[first, more_first, w, second, more_second, w2]
        )
        _release(empty, (counter + 2 * step + 1) % _STAGES)
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
    full, empty, buffers, weights, at, then, ahead, member_ptr, share_ptr, out_ptr, blocks, steps, counter, width,
    limit, UP: gl.constexpr, HALF_OUT: gl.constexpr, ROUNDED: gl.constexpr, N: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    block1, block2 = blocks
    first, second, more_first, more_second, ahead = _multiply(
        full, empty, buffers, weights, at, then, ahead, steps, counter, N, MORE
    )
    if UP:
        _activate(first, second, share_ptr, member_ptr, out_ptr, block1, width, limit, N, HALF_OUT, ROUNDED)
        if MORE:
            member_ptr += N
            _activate(
                more_first, more_second, share_ptr, member_ptr, out_ptr, block1, width, limit, MORE, HALF_OUT, ROUNDED
            )
    else:
        _keep(first, member_ptr, out_ptr, block1, width, N, HALF_OUT)
        _keep(second, member_ptr, out_ptr, block2, width, N, HALF_OUT)
        if MORE:
            _keep(more_first, member_ptr + N, out_ptr, block1, width, MORE, HALF_OUT)
            _keep(more_second, member_ptr + N, out_ptr, block2, width, MORE, HALF_OUT)
    return ahead


@gluon.jit
def _two_blocks(item, group, programs, all_blocks, UP: gl.constexpr):
    """A warp group's blocks; past the end the last ones, whose values another writes as well."""
    if UP:
        first = gl.minimum(item % programs * _GROUPS + group, all_blocks - 1)
        second = first
    else:
        first = (item % programs * _GROUPS + group) * 2
        second = gl.minimum(first + 1, all_blocks - 1)
        first = gl.minimum(first, all_blocks - 1)
    return first, second


@gluon.jit
def _consume(
    full, empty, buffers, group, tile_ptr, member_ptr, share_ptr, first_codes, first_scales, second_codes,
    second_scales, out_ptr, num_tiles, programs, all_blocks, steps, width, limit,
    UP: gl.constexpr, HALF_OUT: gl.constexpr, ROUNDED: gl.constexpr,
):  # fmt: skip
    """The blocks of one warp group, tile after tile, each as wide as its rows need."""
    items = num_tiles * programs
    weights = (first_codes, first_scales, second_codes, second_scales)
    item = gl.program_id(0)
    counter = 0
    if item < items:
        expert = gl.load(tile_ptr + item // programs).to(gl.int64)
        block1, block2 = _two_blocks(item, group, programs, all_blocks, UP)
        at1 = (expert * all_blocks + block1) * steps
        at2 = (expert * all_blocks + block2) * steps
        word1, word2 = _words(first_codes, at1 * 2048), _words(second_codes, at2 * 2048)
        scale1, scale2 = _scales(first_scales, at1 * 128), _scales(second_scales, at2 * 128)
        for item in range(gl.program_id(0), items, gl.num_programs(0)):
            blocks = _two_blocks(item, group, programs, all_blocks, UP)
            # the last item's next is itself
            coming = gl.minimum(item + gl.num_programs(0), items - 1)
            expert = gl.load(tile_ptr + coming // programs).to(gl.int64)
            next1, next2 = _two_blocks(coming, group, programs, all_blocks, UP)
            then1 = (expert * all_blocks + next1) * steps
            then2 = (expert * all_blocks + next2) * steps
            members = member_ptr + item // programs * _CAPACITY
            at, then, ahead = (at1, at2), (then1, then2), (word1, word2, scale1, scale2)
            if gl.load(members + 32) >= 0:
                if gl.load(members + 64) >= 0:
                    if gl.load(members + 80) >= 0:
                        ahead = _tile(
                            full, empty, buffers, weights, at, then, ahead, members, share_ptr, out_ptr, blocks,
                            steps, counter, width, limit, UP, HALF_OUT, ROUNDED, 128, 0,
                        )  # fmt: skip
                    else:
                        ahead = _tile(
                            full, empty, buffers, weights, at, then, ahead, members, share_ptr, out_ptr, blocks,
                            steps, counter, width, limit, UP, HALF_OUT, ROUNDED, 64, 16,
                        )  # fmt: skip
                else:
                    ahead = _tile(
                        full, empty, buffers, weights, at, then, ahead, members, share_ptr, out_ptr, blocks,
                        steps, counter, width, limit, UP, HALF_OUT, ROUNDED, 64, 0,
                    )  # fmt: skip
            else:
                if gl.load(members + 16) >= 0:
                    ahead = _tile(
                        full, empty, buffers, weights, at, then, ahead, members, share_ptr, out_ptr, blocks,
                        steps, counter, width, limit, UP, HALF_OUT, ROUNDED, 32, 0,
                    )  # fmt: skip
                else:
                    ahead = _tile(
                        full, empty, buffers, weights, at, then, ahead, members, share_ptr, out_ptr, blocks,
                        steps, counter, width, limit, UP, HALF_OUT, ROUNDED, 16, 0,
                    )  # fmt: skip
            word1, word2, scale1, scale2 = ahead
            at1 = then1
            at2 = then2
            counter += 2 * steps


@gluon.jit
def _ask(ptr):
    """For the lines of the second cache; no value comes back."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _ask_ahead(codes_ptr, scales_ptr, place, block, blocks, steps, COUNT: gl.constexpr):
    """For a step of COUNT blocks in a row; places and steps as in `_multiply`."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    line = gl.arange(0, 64 * COUNT, layout=LINE)
    each = gl.minimum(block + line // 64, blocks - 1)
    _ask(codes_ptr + (place + each * steps) * 2048 + line % 64 * 32)
    line = gl.arange(0, 4 * COUNT, layout=LINE)
    each = gl.minimum(block + line // 4, blocks - 1)
    _ask(scales_ptr + (place + each * steps) * 128 + line % 4 * 32)


@gluon.jit
def _copy_rows(
    full, empty, buffers, x_ptr, member_ptr, weights, place, block, all_blocks, steps, counter, k,
    UP: gl.constexpr, N: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    first_codes, first_scales, second_codes, second_scales = weights
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    channel = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, LINES)), 0)
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
            stage = turn % _STAGES
            mbarrier.wait(empty.index(stage), 1 - ((turn // _STAGES) & 1))
            for part in gl.static_range(2):
                start = step * 256 + half * 128 + part * 64
                to = stage * 2 + part
                async_copy.async_copy_global_to_shared(_rows(buffers, to, 0, N), row + start, mask=there)
                if MORE:
                    rest = _rows(buffers, to, N, MORE)
                    async_copy.async_copy_global_to_shared(rest, more_row + start, mask=more_there)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            if UP:
                if half == 0:
                    _ask_ahead(first_codes, first_scales, place + step, block, all_blocks, steps, _GROUPS)
                else:
                    _ask_ahead(second_codes, second_scales, place + step, block, all_blocks, steps, _GROUPS)
            elif half == 0:
                _ask_ahead(first_codes, first_scales, place + step, block, all_blocks, steps, 2 * _GROUPS)


@gluon.jit
def _produce(
    full, empty, buffers, x_ptr, tile_ptr, member_ptr, first_codes, first_scales, second_codes, second_scales,
    num_tiles, programs, all_blocks, steps, k, UP: gl.constexpr,
):  # fmt: skip
    """Rows of tile after tile into whichever buffer is empty."""
    weights = (first_codes, first_scales, second_codes, second_scales)
    counter = 0
    for item in range(gl.program_id(0), num_tiles * programs, gl.num_programs(0)):
        members = member_ptr + item // programs * _CAPACITY
        block = item % programs * (_GROUPS if UP else 2 * _GROUPS)
        place = gl.load(tile_ptr + item // programs).to(gl.int64) * all_blocks * steps
        if gl.load(members + 32) >= 0:
            if gl.load(members + 64) >= 0:
                if gl.load(members + 80) >= 0:
                    _copy_rows(
                        full, empty, buffers, x_ptr, members, weights, place, block, all_blocks, steps, counter, k,
                        UP, 128, 0,
                    )  # fmt: skip
                else:
                    _copy_rows(
                        full, empty, buffers, x_ptr, members, weights, place, block, all_blocks, steps, counter, k,
                        UP, 64, 16,
                    )  # fmt: skip
            else:
                _copy_rows(
                    full, empty, buffers, x_ptr, members, weights, place, block, all_blocks, steps, counter, k,
                    UP, 64, 0,
                )  # fmt: skip
        else:
            if gl.load(members + 16) >= 0:
                _copy_rows(
                    full, empty, buffers, x_ptr, members, weights, place, block, all_blocks, steps, counter, k,
                    UP, 32, 0,
                )  # fmt: skip
            else:
                _copy_rows(
                    full, empty, buffers, x_ptr, members, weights, place, block, all_blocks, steps, counter, k,
                    UP, 16, 0,
                )  # fmt: skip
        counter += 2 * steps


@gluon.jit
def _multiply_tiles(
    x_ptr, share_ptr, num_tiles_ptr, tile_ptr, member_ptr,
    first_codes, first_scales, second_codes, second_scales, out_ptr, all_blocks, steps, width, k, limit,
    UP: gl.constexpr, HALF_OUT: gl.constexpr, ROUNDED: gl.constexpr,
):  # fmt: skip
    """Gates and ups into permuted rows, or the outputs of choices."""
    gdc_launch_dependents()
    gdc_wait()
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    whole = gl.allocate_shared_memory(gl.float16, [2 * _STAGES, 128, 64], SHARED)
    buffers = (
        whole,
        whole._reinterpret(gl.float16, [4 * _STAGES, 64, 64], SHARED),
        whole._reinterpret(gl.float16, [8 * _STAGES, 32, 64], SHARED),
        whole._reinterpret(gl.float16, [16 * _STAGES, 16, 64], SHARED),
    )
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=_GROUPS)
    num_tiles = gl.load(num_tiles_ptr)
    programs = gl.cdiv(all_blocks, _GROUPS if UP else 2 * _GROUPS)
    row_k = k if UP else 1
    gl.warp_specialize(
        [
            (_consume, (
                full, empty, buffers, 0, tile_ptr, member_ptr, share_ptr, first_codes, first_scales, second_codes,
                second_scales, out_ptr, num_tiles, programs, all_blocks, steps, width, limit, UP, HALF_OUT, ROUNDED,
            )),
            (_consume, (
                full, empty, buffers, 1, tile_ptr, member_ptr, share_ptr, first_codes, first_scales, second_codes,
                second_scales, out_ptr, num_tiles, programs, all_blocks, steps, width, limit, UP, HALF_OUT, ROUNDED,
            )),
            (_produce, (
                full, empty, buffers, x_ptr, tile_ptr, member_ptr, first_codes, first_scales, second_codes,
                second_scales, num_tiles, programs, all_blocks, steps, row_k, UP,
            )),
        ],
        # the first of the two that multiply keeps as many as the second
        [4, 4], [232, 40],
    )  # fmt: skip
