"""`paged_attention` of heads of 512 channels, for Hopper's tensor cores; in Gluon, which says where each value lies.

Triton's own schedule of this shape computes the scores twice, spills, and overlaps nothing. Here half of the warps
gather: they widen stored bytes into one of two buffers of keys while the other half multiplies the other buffer, and
barriers in shared memory hand the buffers over. Of many rows a program takes several, one after another, and gathers
the next one's keys while this one's output goes out. Channels lie in planes, even ones in one, odd ones in the other:
a thread then writes 16 bytes of each plane without a shuffle, and a warp fills whole banks. Shared memory holds 128
bytes of every row, then of the next 128: a plane's parts of 64 channels can be taken in a loop, and code is short,
because fetching it is a good part of the time of a row.

T rows, H heads, C channels, J keys of a tile. A word is 4 bytes: 8 nibbles, 4 bytes of E4M3, or two float16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.constexpr_function
def _groups(last):
    """Keys by a part's groups of 16 channels by what a thread holds of one."""
    return gl.BlockedLayout([1, 1, last], [4, 8, 1], [8, 1, 1], [2, 1, 0])


@gluon.jit
def _spread_nibbles(word):
    """Words of nibbles -> words of E4M3 codes of the even and of the odd channels, 2**-6 of their value."""
    even = ((word << 4) & 0x80808080) | ((word << 2) & 0x1C1C1C1C)
    odd = (word & 0x80808080) | ((word >> 2) & 0x1C1C1C1C)
    return even, odd


@gluon.jit
def _widen_codes(word, scale):
    """Words of four E4M3 codes times a pair of equal float16 scales -> words of the first and of the last two."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a;
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 a, low;
        mul.rn.f16x2 $0, a, $3;
        cvt.rn.f16x2.e4m3x2 a, high;
        mul.rn.f16x2 $1, a, $3;
        }""",
        "=&r,=&r,r,r",
        [word, scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _widen_bytes(word, scale):
    """Words of E4M3 times a pair of equal float16 scales -> words of the even and of the odd channels."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a;
        .reg .b16 pair;
        prmt.b32 a, $2, 0, 0x4420;
        cvt.u16.u32 pair, a;
        cvt.rn.f16x2.e4m3x2 a, pair;
        mul.rn.f16x2 $0, a, $3;
        prmt.b32 a, $2, 0, 0x4431;
        cvt.u16.u32 pair, a;
        cvt.rn.f16x2.e4m3x2 a, pair;
        mul.rn.f16x2 $1, a, $3;
        }""",
        "=&r,=&r,r,r",
        [word, scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _pack(even, odd):
    """Two float32 as a word of bfloat16, as a row keeps its pairs."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpack(word):
    even = (word << 16).to(gl.float32, bitcast=True)
    return even, (word & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _read_entries(table, tile, part, entries, PER_PAGE: gl.constexpr, FLAT: gl.constexpr):
    """Words and scales of a part of a tile of entries; a missing one reads some entry, nobody weighs it."""
    codes_ptr, scales_ptr, code_page, code_row, scale_page, scale_row = entries
    GROUPS: gl.constexpr = gl.SliceLayout(2, _groups(2))
    group = 8 * part + gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, GROUPS)), 0)
    each = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, _groups(2))))
    place = gl.maximum(table.index(tile).load(gl.SliceLayout(1, GROUPS)), 0)
    if FLAT:
        code, scale = place.to(gl.int64) * (code_row // 4), place.to(gl.int64) * scale_row
    else:
        page, row = (place // PER_PAGE).to(gl.int64), place % PER_PAGE
        code, scale = page * (code_page // 4) + row * (code_row // 4), page * scale_page + row * scale_row
    code = gl.expand_dims(gl.expand_dims(code, 1) + 2 * group, 2)
    code = codes_ptr.to(gl.pointer_type(gl.uint32)) + code
    word = gl.load(code + gl.expand_dims(gl.expand_dims(each, 0), 0))
    factor = gl.load(scales_ptr + gl.expand_dims(scale, 1) + group)
    return word, factor


@gluon.jit
def _prepare(word, factor):
    """What of widening needs no keys' room: codes of even and odd channels, pairs of half of each scale."""
    wide = factor.to(gl.uint16)
    # E4M3 in float16's fields is 2**-8 of its value; a NaN code becomes 480
    scale = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(gl.float16, bitcast=True) * 128.0
    bits = scale.to(gl.float16).to(gl.uint16, bitcast=True).to(gl.uint32)
    even, odd = _spread_nibbles(word)
    return even, odd, bits | (bits << 16)


@gluon.jit
def _fill_entries(even_words, odd_words, even, odd, scale, J: gl.constexpr):
    """Keys of 2**-7 of their value: exact in float16."""
    scale = gl.expand_dims(scale, 2)
    first, last = _widen_codes(even, scale)
    even_words.store(gl.reshape(gl.join(first, last), [J, 32]))
    first, last = _widen_codes(odd, scale)
    odd_words.store(gl.reshape(gl.join(first, last), [J, 32]))


@gluon.jit
def _read_window(window, tile, part, low, base, num_window, RING: gl.constexpr, J: gl.constexpr):
    """Words and scales of a part of a tile of window rows; what lies outside the window reads as zeros."""
    codes_ptr, scales_ptr, code_row, scale_row = window
    GROUPS: gl.constexpr = gl.SliceLayout(2, _groups(4))
    group = 8 * part + gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, GROUPS)), 0)
    each = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, _groups(4))))
    column = tile * J + gl.arange(0, J, layout=gl.SliceLayout(1, GROUPS))
    there = (column >= low) & (column < num_window)
    row = base + column
    row = gl.where(there, gl.where(row >= RING, row - RING, row), 0)
    there = gl.expand_dims(there, 1)
    code = gl.expand_dims(gl.expand_dims(row * (code_row // 4), 1) + 4 * group, 2)
    code = codes_ptr.to(gl.pointer_type(gl.uint32)) + code + gl.expand_dims(gl.expand_dims(each, 0), 0)
    # a row that nobody wrote may hold NaN codes
    word = gl.load(code, mask=gl.expand_dims(there, 2), other=0)
    exponent = gl.load(scales_ptr + gl.expand_dims(row * scale_row, 1) + group // 2, mask=there, other=127)
    return word, exponent


@gluon.jit
def _first_visible(position, floor, num_window):
    """The first of a window's columns that counts."""
    start = position - num_window + 1
    return gl.maximum(gl.maximum(floor, 0) - start, 0).to(gl.int32)


@gluon.jit
def _fill_window(even_words, odd_words, word, exponent, J: gl.constexpr):
    """Keys of 2**4 of their value: their scales go down to 2**-18."""
    scale = gl.minimum(gl.maximum(exponent.to(gl.int32) - 108, 1), 30) << 10
    even, odd = _widen_bytes(word, gl.expand_dims(scale | (scale << 16), 2))
    even_words.store(gl.reshape(even, [J, 32]))
    odd_words.store(gl.reshape(odd, [J, 32]))


@gluon.jit
def _visible(
    table, tile, own, window_tiles, low, num_window, scale, TILES: gl.constexpr, SCORES: gl.constexpr, J: gl.constexpr
):
    """(what is added to scores, log2 of what weights are multiplied by, factor of scores).

    A key that does not count is far below the least maximum, so that its weight is zero. Weights of entries are 2**11
    of their value because their keys are 2**-11 of a window key's.
    """
    column = tile * J + gl.arange(0, J, layout=gl.SliceLayout(0, SCORES))
    hidden = gl.where((column >= low) & (column < num_window), 0.0, -1e36)
    lift = 0.0
    factor = scale * 0.0625
    if TILES > 0 and tile >= window_tiles:
        place = table.index(own + tile - window_tiles).load(gl.SliceLayout(0, SCORES))
        hidden = gl.where(place >= 0, 0.0, -1e36)
        lift = 11.0
        factor = scale * 128.0
    return gl.expand_dims(hidden, 0), lift, factor


@gluon.jit
def _softmax(score, hidden, lift, factor, best, total, H: gl.constexpr, J: gl.constexpr):
    """One tile of scores into the running softmax: (weights, what older ones shrink by, maxima, sums)."""
    score += hidden
    higher = gl.maximum(best, gl.max(score, axis=1) * factor)
    shrink = gl.exp2(best - higher)
    weight = gl.exp2(score * factor - gl.expand_dims(higher - lift, 1))
    # each warp group adds up its own keys
    own = gl.sum(gl.reshape(weight, [H, 2, J // 2]), axis=2) * gl.exp2(-lift)
    total = total * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout)), 1) + own
    return weight, shrink, higher, total


@gluon.jit
def _turn_queries(
    queries, query_ptr, cos_ptr, sin_ptr, t, none, query_stride, num_heads, num_angles,
    H: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """The row's queries, turned, in planes, 128 channels at a time.

    Args:
        none: A zero that the compiler does not know: it would write the loop out.
    """
    HALF: gl.constexpr = C // 2
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0])
    PLANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    planes = queries._reinterpret(gl.float16, [C // 64, H, 64], gl.NVMMASharedLayout(128, 16, 2))
    head = gl.expand_dims(gl.arange(0, H, layout=gl.SliceLayout(1, ROWS)), 1)
    channel = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, ROWS)), 0)
    place = query_ptr + t * query_stride + head * C + channel
    query = gl.load(place, mask=head < num_heads, other=0.0)
    for part in range(C // 128 + none):
        after = gl.minimum(part + 1, C // 128 - 1)
        even, odd = gl.split(gl.reshape(query, [H, 64, 2]))
        query = gl.load(place + after * 128, mask=head < num_heads, other=0.0)
        turned = part * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, PLANES)) - (HALF - num_angles)
        cos = gl.expand_dims(gl.load(cos_ptr + t * num_angles + turned, mask=turned >= 0, other=1.0), 0)
        sin = gl.expand_dims(gl.load(sin_ptr + t * num_angles + turned, mask=turned >= 0, other=0.0), 0)
        even = gl.convert_layout(even, PLANES, assert_trivial=True).to(gl.float32)
        odd = gl.convert_layout(odd, PLANES, assert_trivial=True).to(gl.float32)
        even, odd = _unpack(_pack(even * cos - odd * sin, even * sin + odd * cos))
        planes.index(part).store(even.to(gl.float16))
        planes.index(C // 128 + part).store(odd.to(gl.float16))


@gluon.jit
def _turn_back(queries, cos_ptr, sin_ptr, out_ptr, t, none, num_heads, num_angles, H: gl.constexpr, C: gl.constexpr):
    """Words of channel pairs, turned back, to where they go; `none` as above."""
    HALF: gl.constexpr = C // 2
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0])
    lines = queries._reinterpret(gl.int32, [HALF // 64, H, 64], gl.NVMMASharedLayout(128, 32, 2))
    head = gl.expand_dims(gl.arange(0, H, layout=gl.SliceLayout(1, LINES)), 1)
    pair = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, LINES)), 0)
    place = out_ptr.to(gl.pointer_type(gl.int32)) + (t * num_heads + head) * HALF + pair
    for part in range(HALF // 64 + none):
        even, odd = _unpack(lines.index(part).load(LINES))
        turned = part * 64 + pair - (HALF - num_angles)
        cos = gl.load(cos_ptr + t * num_angles + turned, mask=turned >= 0, other=1.0)
        sin = gl.load(sin_ptr + t * num_angles + turned, mask=turned >= 0, other=0.0)
        gl.store(place + part * 64, _pack(even * cos + odd * sin, odd * cos - even * sin), mask=head < num_heads)


@gluon.jit
def _touch(pointer):
    """Lines on their way to L2."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _gather(
    full, empty, places, table, words, codes, entries, query_ptr, query_stride, num_heads,
    slot_ptr, position_ptr, floor_ptr, page_ptr, entry_slot_ptr, page_stride, selection_ptr,
    num_rows, num_window, num_selected, first, last,
    RING: gl.constexpr, PER_PAGE: gl.constexpr, TILES: gl.constexpr, TABLES: gl.constexpr, FLAT: gl.constexpr,
    H: gl.constexpr, C: gl.constexpr, J: gl.constexpr,
):  # fmt: skip
    """A part of a tile's channels after another into whichever buffer is empty: the window's, then the entries'."""
    PARTS: gl.constexpr = C // 128
    codes_ptr, scales_ptr, code_page, code_row, scale_page, scale_row = codes
    window_tiles = gl.cdiv(num_window, J)
    program, programs = gl.program_id(0), gl.num_programs(0)
    for turn in range((num_rows - program + programs - 1) // programs):
        t = program.to(gl.int64) + turn * programs
        done = turn * (last - first) - first
        slot, position, floor = gl.load(slot_ptr + t), gl.load(position_ptr + t), gl.load(floor_ptr + t)
        window = (codes_ptr + slot * code_page, scales_ptr + slot * scale_page, code_row, scale_row)
        low = _first_visible(position, floor, num_window)
        # position may be below the window's length
        base = ((position + RING - num_window + 1) % RING).to(gl.int32)
        if TILES > 0:
            own_page = page_ptr + gl.load(entry_slot_ptr + t) * page_stride
            # where the whole selection lies, -1 for none
            column = gl.arange(0, TILES * J, layout=gl.BlockedLayout([1], [32], [8], [0]))
            entry = gl.load(selection_ptr + t * num_selected + column, mask=column < num_selected, other=-1)
            entry = entry.to(gl.int32)
            page = gl.load(own_page + entry // PER_PAGE, mask=entry >= 0, other=0).to(gl.int32)
            places.index(turn % TABLES).store(gl.where(entry >= 0, page * PER_PAGE + entry % PER_PAGE, -1))
            gl.thread_barrier()
        after = gl.minimum(t + programs, num_rows - 1)
        line = 64 * gl.arange(0, H * C // 64, layout=gl.BlockedLayout([1], [32], [8], [0]))
        _touch(query_ptr + after * query_stride + gl.minimum(line, num_heads * C - 1))
        for part in range(PARTS * first, PARTS * gl.minimum(window_tiles, last)):
            step = done + part // PARTS
            half = part // 2 % 2
            word, exponent = _read_window(window, part // PARTS, part % PARTS, low, base, num_window, RING, J)
            mbarrier.wait(empty.index(half), 1 - (step & 1))
            where = 4 * half + part % 2
            _fill_window(words.index(where), words.index(where + 2), word, exponent, J)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(full.index(half), count=1)
        if TILES > 0:
            begin = gl.maximum(first, window_tiles)
            own = turn % TABLES * TILES
            place = own + gl.minimum(begin - window_tiles, TILES - 1)
            # two parts on their way
            word, factor = _read_entries(table, place, 0, entries, PER_PAGE, FLAT)
            next_word, next_factor = _read_entries(table, place, 1, entries, PER_PAGE, FLAT)
            for part in range(PARTS * begin, PARTS * last):
                step = done + part // PARTS
                half = part // 2 % 2
                even, odd, scale = _prepare(word, factor)
                mbarrier.wait(empty.index(half), 1 - (step & 1))
                where = 4 * half + part % 2
                _fill_entries(words.index(where), words.index(where + 2), even, odd, scale, J)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(full.index(half), count=1)
                # after the fence, which would wait for it
                word, factor = next_word, next_factor
                place = own + gl.minimum((part + 2) // PARTS - window_tiles, TILES - 1)
                next_word, next_factor = _read_entries(table, place, (part + 2) % PARTS, entries, PER_PAGE, FLAT)


@gluon.jit
def _ask(full, step, queries, keys, still, score, SIDE: gl.constexpr):
    """Half of the channels' part of a tile's scores, on its way when their keys are there."""
    mbarrier.wait(full.index(SIDE), step & 1)
    query, key = queries.index(still + SIDE), keys.index(still + 2 * SIDE).permute([1, 0])
    score = warpgroup_mma(query, key, score, use_acc=SIDE == 1, is_async=True)
    query, key = queries.index(still + SIDE + 2), keys.index(still + 2 * SIDE + 1).permute([1, 0])
    return warpgroup_mma(query, key, score, is_async=True)


@gluon.jit
def _add(weights, keys, still, even0, odd0, even1, odd1):
    """A tile's values, on their way."""
    fence_async_shared()
    gl.thread_barrier()
    even0 = warpgroup_mma(weights, keys.index(still), even0, is_async=True)
    odd0 = warpgroup_mma(weights, keys.index(still + 1), odd0, is_async=True)
    even1 = warpgroup_mma(weights, keys.index(still + 2), even1, is_async=True)
    odd1 = warpgroup_mma(weights, keys.index(still + 3), odd1, is_async=True)
    return even0, odd0, even1, odd1


@gluon.jit
def _leave(empty, SIDE: gl.constexpr):
    """Both warp groups are done with half of the channels."""
    gl.thread_barrier()
    mbarrier.arrive(empty.index(SIDE), count=1)


@gluon.jit
def _multiply(
    full, empty, table, queries, keys, weights,
    query_ptr, cos_ptr, sin_ptr, position_ptr, floor_ptr, sink_ptr, out_ptr, partial_ptr, peak_ptr,
    num_rows, query_stride, num_heads, num_angles, num_window, first, last, scale,
    TILES: gl.constexpr, TABLES: gl.constexpr, H: gl.constexpr, C: gl.constexpr, J: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    """Scores, weights and values of every tile, under one running softmax."""
    HALF: gl.constexpr = C // 2
    # each of two warp groups has half of a tile's keys, then half of the channels of a half of a plane
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, J // 2, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HALF // 4, 16])
    window_tiles = gl.cdiv(num_window, J)
    program, programs = gl.program_id(0), gl.num_programs(0)
    # a zero that the compiler does not know: addresses of what never moves would fill the registers
    still = 0
    for turn in range((num_rows - program + programs - 1) // programs):
        t = program.to(gl.int64) + turn * programs
        none = turn >> 30
        own = turn % TABLES * TILES
        step = turn * (last - first)
        position, floor = gl.load(position_ptr + t), gl.load(floor_ptr + t)
        low = _first_visible(position, floor, num_window)
        _turn_queries(queries, query_ptr, cos_ptr, sin_ptr, t, none, query_stride, num_heads, num_angles, H, C)
        fence_async_shared()
        gl.thread_barrier()
        best = gl.full([H], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.sum(gl.reshape(gl.zeros([H, J], gl.float32, SCORES), [H, 2, J // 2]), axis=2)
        score = _ask(full, step, queries, keys, still, gl.zeros([H, J], gl.float32, SCORES), 0)
        score = _ask(full, step, queries, keys, still, score, 1)
        hidden, lift, size = _visible(table, first, own, window_tiles, low, num_window, scale, TILES, SCORES, J)
        score = warpgroup_mma_wait(0, deps=[score])
        weight, shrink, best, total = _softmax(score, hidden, lift, size, best, total, H, J)
        weights.store(weight.to(gl.float16))
        even0 = gl.zeros([H, HALF // 2], gl.float32, VALUES)
        odd0 = gl.zeros([H, HALF // 2], gl.float32, VALUES)
        even1 = gl.zeros([H, HALF // 2], gl.float32, VALUES)
        odd1 = gl.zeros([H, HALF // 2], gl.float32, VALUES)
        for tile in range(first, last - 1):
            # values of this tile, scores of the next
            even0, odd0, even1, odd1 = _add(weights, keys, still, even0, odd0, even1, odd1)
            even0, odd0 = warpgroup_mma_wait(2, deps=[even0, odd0])
            _leave(empty, 0)
            step += 1
            score = _ask(full, step, queries, keys, still, gl.zeros([H, J], gl.float32, SCORES), 0)
            even1, odd1 = warpgroup_mma_wait(2, deps=[even1, odd1])
            _leave(empty, 1)
            score = _ask(full, step, queries, keys, still, score, 1)
            hidden, lift, size = _visible(table, tile + 1, own, window_tiles, low, num_window, scale, TILES, SCORES, J)
            score = warpgroup_mma_wait(0, deps=[score])
            weight, shrink, best, total = _softmax(score, hidden, lift, size, best, total, H, J)
            weights.store(weight.to(gl.float16))
            kept = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, VALUES)), 1)
            even0 *= kept
            odd0 *= kept
            even1 *= kept
            odd1 *= kept
            still += tile >> 20
        even0, odd0, even1, odd1 = _add(weights, keys, still, even0, odd0, even1, odd1)
        even0, odd0 = warpgroup_mma_wait(2, deps=[even0, odd0])
        _leave(empty, 0)
        even1, odd1 = warpgroup_mma_wait(0, deps=[even1, odd1])
        _leave(empty, 1)

        head = gl.arange(0, H, layout=gl.SliceLayout(1, VALUES)) + none
        best = gl.convert_layout(best, gl.SliceLayout(1, VALUES))
        total = gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, VALUES))
        if ALONE:
            sink = gl.load(sink_ptr + head, mask=head < num_heads, other=0.0) * 1.4426950408889634
            peak = gl.maximum(best, sink)
            shrink = gl.exp2(best - peak)
            whole = gl.expand_dims(shrink * 0.0625 / (total * shrink + gl.exp2(sink - peak)), 1)
            # by way of the queries' memory: a thread stores what lies side by side
            words = queries._reinterpret(gl.int32, [2, H, HALF // 2], gl.NVMMASharedLayout(128, 32, 2))
            words.index(0).store(_pack(even0 * whole, odd0 * whole))
            words.index(1).store(_pack(even1 * whole, odd1 * whole))
            gl.thread_barrier()
            _turn_back(queries, cos_ptr, sin_ptr, out_ptr, t, none, num_heads, num_angles, H, C)
            gl.thread_barrier()
        else:
            known = head < num_heads
            pair = gl.expand_dims(gl.arange(0, HALF // 2, layout=gl.SliceLayout(0, VALUES)), 0)
            base = (t * gl.num_programs(1) + gl.program_id(1)) * num_heads + head
            gl.store(peak_ptr + 2 * base, best, mask=known)
            gl.store(peak_ptr + 2 * base + 1, total, mask=known)
            known = gl.expand_dims(known, 1)
            partial = partial_ptr + gl.expand_dims(base * C, 1) + pair
            gl.store(partial, even0 * 0.0625, mask=known)
            gl.store(partial + HALF // 2, even1 * 0.0625, mask=known)
            gl.store(partial + HALF, odd0 * 0.0625, mask=known)
            gl.store(partial + HALF + HALF // 2, odd1 * 0.0625, mask=known)


@gluon.jit(do_not_specialize=["num_rows"])
def _attend_wide(
    query_ptr, cos_ptr, sin_ptr, slot_ptr, position_ptr, floor_ptr,
    codes_ptr, scales_ptr, code_page, code_row, scale_page, scale_row,
    entry_codes_ptr, entry_scales_ptr, entry_code_page, entry_code_row, entry_scale_page, entry_scale_row,
    page_ptr, entry_slot_ptr, page_stride, selection_ptr, sink_ptr, out_ptr, partial_ptr, peak_ptr,
    query_stride, num_heads, num_angles, num_window, num_selected, tiles_a_share, scale, num_rows,
    RING: gl.constexpr, PER_PAGE: gl.constexpr, TILES: gl.constexpr, TABLES: gl.constexpr, FLAT: gl.constexpr,
    H: gl.constexpr, C: gl.constexpr, J: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    """A share of a row's tiles, of rows a number of programs apart.

    Args:
        TILES: Tiles of entries that have a place; 0 for a window alone.
        TABLES: 2 if a program takes several rows.
        FLAT: Whether one page's entries follow another's.
    """
    gdc_launch_dependents()
    gdc_wait()
    HALF: gl.constexpr = C // 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * J), 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.float16, [4, H, HALF // 2], SHARED)
    keys = gl.allocate_shared_memory(gl.float16, [4, J, HALF // 2], SHARED)
    weights = gl.allocate_shared_memory(gl.float16, [H, J], WEIGHTS)
    # of this row and of the next
    PLACES: gl.constexpr = max(1, TILES)
    places = gl.allocate_shared_memory(gl.int32, [TABLES, PLACES * J], PLAIN)
    # of each half of the channels two parts of even ones, then of odd ones
    words = keys._reinterpret(gl.int32, [C // 64, J, 32], WORDS)
    table = places._reinterpret(gl.int32, [TABLES * PLACES, J], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=1)
    first = gl.program_id(1) * tiles_a_share
    last = gl.minimum(first + tiles_a_share, gl.cdiv(num_window, J) + gl.cdiv(num_selected, J))
    codes = (codes_ptr, scales_ptr, code_page, code_row, scale_page, scale_row)
    entries = (
        entry_codes_ptr, entry_scales_ptr, entry_code_page, entry_code_row, entry_scale_page, entry_scale_row,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (
                full, empty, table, queries, keys, weights,
                query_ptr, cos_ptr, sin_ptr, position_ptr, floor_ptr, sink_ptr, out_ptr, partial_ptr, peak_ptr,
                num_rows, query_stride, num_heads, num_angles, num_window, first, last, scale,
                TILES, TABLES, H, C, J, ALONE,
            )),
            (_gather, (
                full, empty, places, table, words, codes, entries, query_ptr, query_stride, num_heads,
                slot_ptr, position_ptr, floor_ptr, page_ptr, entry_slot_ptr, page_stride, selection_ptr,
                num_rows, num_window, num_selected, first, last, RING, PER_PAGE, TILES, TABLES, FLAT, H, C, J,
            )),
        ],
        # 256 threads of 56 registers leave 200 to those that multiply, of 72 leave 184
        [8], [56 if J == 128 else 72],
    )  # fmt: skip
