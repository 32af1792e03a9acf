"""`paged_attention` of heads of 512 channels, for Hopper's tensor cores; in Gluon, which says where each value lies.

Triton's own schedule of this shape computes the scores twice, spills, and overlaps nothing. Here half of the warps
gather: they widen stored bytes into one of two buffers of keys while the other half multiplies the other buffer, and
barriers in shared memory hand the buffers over. Channels lie in planes, even ones in one, odd ones in the other: a
thread then writes 16 bytes of each plane without a shuffle, and a warp fills whole banks.

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
    """Keys by groups of 16 channels by what a thread holds of one: a warp reads a whole key."""
    return gl.BlockedLayout([1, 1, last], [1, 32, 1], [8, 1, 1], [2, 1, 0])


@gluon.jit
def _widen_nibbles(word, scale):
    """Words of nibbles times a pair of equal float16 scales -> words of even channels 0 to 1, 2 to 3, odd ones alike.

    A nibble's bits in E4M3's places are 2**-6 of its value.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        .reg .b16 low, high;
        shl.b32 a, $4, 4;
        shl.b32 b, $4, 2;
        and.b32 b, b, 0x1C1C1C1C;
        lop3.b32 a, a, 0x80808080, b, 0xEA;
        mov.b32 {low, high}, a;
        cvt.rn.f16x2.e4m3x2 a, low;
        cvt.rn.f16x2.e4m3x2 b, high;
        mul.rn.f16x2 $0, a, $5;
        mul.rn.f16x2 $1, b, $5;
        shr.u32 b, $4, 2;
        and.b32 b, b, 0x1C1C1C1C;
        lop3.b32 a, $4, 0x80808080, b, 0xEA;
        mov.b32 {low, high}, a;
        cvt.rn.f16x2.e4m3x2 a, low;
        cvt.rn.f16x2.e4m3x2 b, high;
        mul.rn.f16x2 $2, a, $5;
        mul.rn.f16x2 $3, b, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [word, scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
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
def _read_entries(table, tile, entries, PER_PAGE: gl.constexpr, C: gl.constexpr):
    """Words and scales of a tile of entries; a missing one reads the first of its page table, nobody weighs it."""
    codes_ptr, scales_ptr, code_page, code_row, scale_page, scale_row = entries
    GROUPS: gl.constexpr = gl.SliceLayout(2, _groups(2))
    group = gl.expand_dims(gl.arange(0, C // 16, layout=gl.SliceLayout(0, GROUPS)), 0)
    each = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, _groups(2))))
    place = gl.maximum(table.index(tile).load(gl.SliceLayout(1, GROUPS)), 0)
    page, row = (place // PER_PAGE).to(gl.int64), place % PER_PAGE
    code = gl.expand_dims(page * (code_page // 4) + row * (code_row // 4), 1) + 2 * group
    code = codes_ptr.to(gl.pointer_type(gl.uint32)) + gl.expand_dims(code, 2)
    word = gl.load(code + gl.expand_dims(gl.expand_dims(each, 0), 0))
    factor = gl.load(scales_ptr + gl.expand_dims(page * scale_page + row * scale_row, 1) + group)
    return word, factor


@gluon.jit
def _fill_entries(even_words, odd_words, word, factor, J: gl.constexpr, C: gl.constexpr):
    """Keys of 2**-7 of their value: exact in float16."""
    wide = factor.to(gl.uint16)
    # E4M3 in float16's fields is 2**-8 of its value; a NaN code becomes 480
    scale = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(gl.float16, bitcast=True) * 128.0
    bits = scale.to(gl.float16).to(gl.uint16, bitcast=True).to(gl.uint32)
    even0, even1, odd0, odd1 = _widen_nibbles(word, gl.expand_dims(bits | (bits << 16), 2))
    even_words.store(gl.reshape(gl.join(even0, even1), [J, C // 4]))
    odd_words.store(gl.reshape(gl.join(odd0, odd1), [J, C // 4]))


@gluon.jit
def _read_window(window, tile, low, base, num_window, RING: gl.constexpr, J: gl.constexpr, C: gl.constexpr):
    """Words and scales of a tile of window rows; what lies outside the window reads as zeros."""
    codes_ptr, scales_ptr, code_row, scale_row = window
    GROUPS: gl.constexpr = gl.SliceLayout(2, _groups(4))
    group = gl.expand_dims(gl.arange(0, C // 16, layout=gl.SliceLayout(0, GROUPS)), 0)
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
def _fill_window(even_words, odd_words, word, exponent, J: gl.constexpr, C: gl.constexpr):
    """Keys of 2**4 of their value: their scales go down to 2**-18."""
    scale = gl.minimum(gl.maximum(exponent.to(gl.int32) - 108, 1), 30) << 10
    even, odd = _widen_bytes(word, gl.expand_dims(scale | (scale << 16), 2))
    even_words.store(gl.reshape(even, [J, C // 4]))
    odd_words.store(gl.reshape(odd, [J, C // 4]))


@gluon.jit
def _visible(table, tile, window_tiles, low, num_window, scale, SCORES: gl.constexpr, J: gl.constexpr):
    """(keys that count, log2 of what their weights are multiplied by, factor of their scores).

    Weights of entries are 2**11 of their value because their keys are 2**-11 of a window key's.
    """
    key = gl.arange(0, J, layout=gl.SliceLayout(0, SCORES))
    if tile < window_tiles:
        column = tile * J + key
        there = ((column >= low) & (column < num_window)).to(gl.int32)
        lift = 0.0
        factor = scale * 0.0625
    else:
        there = (table.index(tile - window_tiles).load(gl.SliceLayout(0, SCORES)) >= 0).to(gl.int32)
        lift = 11.0
        factor = scale * 128.0
    return gl.expand_dims(there != 0, 0), lift, factor


@gluon.jit
def _softmax(score, there, lift, factor, best, total, H: gl.constexpr, J: gl.constexpr):
    """One tile of scores into the running softmax: (weights, what older ones shrink by, maxima, sums)."""
    # far below the least maximum, so that its weight is zero
    score = gl.where(there, score, -1e36)
    higher = gl.maximum(best, gl.max(score, axis=1) * factor)
    shrink = gl.exp2(best - higher)
    weight = gl.exp2(score * factor - gl.expand_dims(higher - lift, 1))
    # each warp group adds up its own keys
    own = gl.sum(gl.reshape(weight, [H, 2, J // 2]), axis=2) * gl.exp2(-lift)
    total = total * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout)), 1) + own
    return weight, shrink, higher, total


@gluon.jit
def _gather(
    full, empty, places, table, even_words, odd_words, codes, entries,
    slot_ptr, position_ptr, floor_ptr, page_ptr, entry_slot_ptr, page_stride, selection_ptr,
    t, num_window, num_selected, first, last,
    RING: gl.constexpr, PER_PAGE: gl.constexpr, TILES: gl.constexpr, C: gl.constexpr, J: gl.constexpr,
):  # fmt: skip
    """Tile after tile into whichever buffer is empty: the window's, then the entries'."""
    codes_ptr, scales_ptr, code_page, code_row, scale_page, scale_row = codes
    slot, position, floor = gl.load(slot_ptr + t), gl.load(position_ptr + t), gl.load(floor_ptr + t)
    page_ptr += gl.load(entry_slot_ptr + t) * page_stride
    # where the whole selection lies, -1 for none
    column = gl.arange(0, TILES * J, layout=gl.BlockedLayout([1], [32], [8], [0]))
    entry = gl.load(selection_ptr + t * num_selected + column, mask=column < num_selected, other=-1).to(gl.int32)
    page = gl.load(page_ptr + entry // PER_PAGE, mask=entry >= 0, other=0).to(gl.int32)
    places.store(gl.where(entry >= 0, page * PER_PAGE + entry % PER_PAGE, -1))
    gl.thread_barrier()
    window = (codes_ptr + slot * code_page, scales_ptr + slot * scale_page, code_row, scale_row)
    window_tiles = gl.cdiv(num_window, J)
    low = _first_visible(position, floor, num_window)
    # position may be below the window's length
    base = ((position + RING - num_window + 1) % RING).to(gl.int32)
    for tile in range(first, gl.minimum(window_tiles, last)):
        step = tile - first
        buffer = step & 1
        word, exponent = _read_window(window, tile, low, base, num_window, RING, J, C)
        mbarrier.wait(empty.index(buffer), 1 - (step >> 1 & 1))
        _fill_window(even_words.index(buffer), odd_words.index(buffer), word, exponent, J, C)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(buffer), count=1)
    begin = gl.maximum(first, window_tiles)
    word, factor = _read_entries(table, gl.minimum(begin - window_tiles, TILES - 1), entries, PER_PAGE, C)
    for tile in range(begin, last):
        step = tile - first
        buffer = step & 1
        mbarrier.wait(empty.index(buffer), 1 - (step >> 1 & 1))
        _fill_entries(even_words.index(buffer), odd_words.index(buffer), word, factor, J, C)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(buffer), count=1)
        # after the fence, which would wait for it
        word, factor = _read_entries(table, gl.minimum(tile + 1 - window_tiles, TILES - 1), entries, PER_PAGE, C)


@gluon.jit
def _multiply(
    full, empty, table, queries, even_keys, odd_keys, weights,
    query_ptr, cos_ptr, sin_ptr, position_ptr, floor_ptr, sink_ptr, out_ptr, partial_ptr, peak_ptr,
    t, share, query_stride, num_heads, num_angles, num_window, first, last, scale,
    H: gl.constexpr, C: gl.constexpr, J: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    """Scores, weights and values of every tile, under one running softmax."""
    HALF: gl.constexpr = C // 2
    # each of two warp groups has half of a tile's keys, then half of a plane's channels
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, J // 2, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HALF // 2, 16])
    window_tiles = gl.cdiv(num_window, J)
    position, floor = gl.load(position_ptr + t), gl.load(floor_ptr + t)
    low = _first_visible(position, floor, num_window)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [8, 1], [1, 0])
    PLANES: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    head = gl.expand_dims(gl.arange(0, H, layout=gl.SliceLayout(1, ROWS)), 1)
    channel = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, ROWS)), 0)
    query = gl.load(query_ptr + t * query_stride + head * C + channel, mask=head < num_heads, other=0.0)
    turned = gl.arange(0, HALF, layout=gl.SliceLayout(0, PLANES)) - (HALF - num_angles)
    cos = gl.expand_dims(gl.load(cos_ptr + t * num_angles + turned, mask=turned >= 0, other=1.0), 0)
    sin = gl.expand_dims(gl.load(sin_ptr + t * num_angles + turned, mask=turned >= 0, other=0.0), 0)
    even, odd = gl.split(gl.reshape(query, [H, HALF, 2]))
    even = gl.convert_layout(even, PLANES, assert_trivial=True).to(gl.float32)
    odd = gl.convert_layout(odd, PLANES, assert_trivial=True).to(gl.float32)
    even, odd = _unpack(_pack(even * cos - odd * sin, even * sin + odd * cos))
    queries.index(0).store(even.to(gl.float16))
    queries.index(1).store(odd.to(gl.float16))

    fence_async_shared()
    gl.thread_barrier()
    best = gl.full([H], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.sum(gl.reshape(gl.zeros([H, J], gl.float32, SCORES), [H, 2, J // 2]), axis=2)
    mbarrier.wait(full.index(0), 0)
    score = gl.zeros([H, J], gl.float32, SCORES)
    score = warpgroup_mma(queries.index(0), even_keys.index(0).permute([1, 0]), score, use_acc=False, is_async=True)
    score = warpgroup_mma(queries.index(1), odd_keys.index(0).permute([1, 0]), score, is_async=True)
    there, lift, size = _visible(table, first, window_tiles, low, num_window, scale, SCORES, J)
    score = warpgroup_mma_wait(0, deps=[score])
    weight, shrink, best, total = _softmax(score, there, lift, size, best, total, H, J)
    weights.index(0).store(weight.to(gl.float16))
    even = gl.zeros([H, HALF], gl.float32, VALUES)
    odd = gl.zeros([H, HALF], gl.float32, VALUES)
    buffer = 0
    # a zero that the compiler does not know: addresses of what never moves would fill the registers
    still = 0
    for tile in range(first, last - 1):
        other = 1 - buffer
        fence_async_shared()
        gl.thread_barrier()
        # values of this tile, scores of the next
        even = warpgroup_mma(weights.index(buffer), even_keys.index(buffer), even, is_async=True)
        odd = warpgroup_mma(weights.index(buffer), odd_keys.index(buffer), odd, is_async=True)
        mbarrier.wait(full.index(other), ((tile + 1 - first) >> 1) & 1)
        score = gl.zeros([H, J], gl.float32, SCORES)
        score = warpgroup_mma(
            queries.index(still), even_keys.index(other).permute([1, 0]), score, use_acc=False, is_async=True
        )
        score = warpgroup_mma(queries.index(still + 1), odd_keys.index(other).permute([1, 0]), score, is_async=True)
        there, lift, size = _visible(table, tile + 1, window_tiles, low, num_window, scale, SCORES, J)
        even, odd = warpgroup_mma_wait(2, deps=[even, odd])
        # both warp groups are done with this buffer
        gl.thread_barrier()
        mbarrier.arrive(empty.index(buffer), count=1)
        score = warpgroup_mma_wait(0, deps=[score])
        weight, shrink, best, total = _softmax(score, there, lift, size, best, total, H, J)
        weights.index(other).store(weight.to(gl.float16))
        kept = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, VALUES)), 1)
        even *= kept
        odd *= kept
        still += tile >> 20
        buffer = other
    fence_async_shared()
    gl.thread_barrier()
    even = warpgroup_mma(weights.index(buffer), even_keys.index(buffer), even, is_async=True)
    odd = warpgroup_mma(weights.index(buffer), odd_keys.index(buffer), odd, is_async=True)
    even, odd = warpgroup_mma_wait(0, deps=[even, odd])

    head = gl.arange(0, H, layout=gl.SliceLayout(1, VALUES))
    pair = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, VALUES)), 0)
    best = gl.convert_layout(best, gl.SliceLayout(1, VALUES))
    total = gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, VALUES))
    if ALONE:
        sink = gl.load(sink_ptr + head, mask=head < num_heads, other=0.0) * 1.4426950408889634
        peak = gl.maximum(best, sink)
        shrink = gl.exp2(best - peak)
        whole = gl.expand_dims(shrink * 0.0625 / (total * shrink + gl.exp2(sink - peak)), 1)
        # by way of the queries' memory: a thread stores what lies side by side
        words = queries._reinterpret(gl.int32, [H, HALF], gl.NVMMASharedLayout(128, 32, 2))
        words.store(_pack(even * whole, odd * whole))
        gl.thread_barrier()
        LINES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
        even, odd = _unpack(words.load(LINES))
        head = gl.expand_dims(gl.arange(0, H, layout=gl.SliceLayout(1, LINES)), 1)
        pair = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, LINES)), 0)
        turned = pair - (HALF - num_angles)
        cos = gl.load(cos_ptr + t * num_angles + turned, mask=turned >= 0, other=1.0)
        sin = gl.load(sin_ptr + t * num_angles + turned, mask=turned >= 0, other=0.0)
        place = out_ptr.to(gl.pointer_type(gl.int32)) + (t * num_heads + head) * HALF + pair
        gl.store(place, _pack(even * cos + odd * sin, odd * cos - even * sin), mask=head < num_heads)
    else:
        known = head < num_heads
        base = (t * gl.num_programs(1) + share) * num_heads + head
        gl.store(peak_ptr + 2 * base, best, mask=known)
        gl.store(peak_ptr + 2 * base + 1, total, mask=known)
        partial = partial_ptr + gl.expand_dims(base * C, 1) + pair
        gl.store(partial, even * 0.0625, mask=gl.expand_dims(known, 1))
        gl.store(partial + HALF, odd * 0.0625, mask=gl.expand_dims(known, 1))


@gluon.jit
def _attend_wide(
    query_ptr, cos_ptr, sin_ptr, slot_ptr, position_ptr, floor_ptr,
    codes_ptr, scales_ptr, code_page, code_row, scale_page, scale_row,
    entry_codes_ptr, entry_scales_ptr, entry_code_page, entry_code_row, entry_scale_page, entry_scale_row,
    page_ptr, entry_slot_ptr, page_stride, selection_ptr, sink_ptr, out_ptr, partial_ptr, peak_ptr,
    query_stride, num_heads, num_angles, num_window, num_selected, tiles_a_share, scale,
    RING: gl.constexpr, PER_PAGE: gl.constexpr, TILES: gl.constexpr,
    H: gl.constexpr, C: gl.constexpr, J: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    gdc_wait()
    HALF: gl.constexpr = C // 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * J), 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.float16, [2, H, HALF], SHARED)
    even_keys = gl.allocate_shared_memory(gl.float16, [2, J, HALF], SHARED)
    odd_keys = gl.allocate_shared_memory(gl.float16, [2, J, HALF], SHARED)
    weights = gl.allocate_shared_memory(gl.float16, [2, H, J], WEIGHTS)
    places = gl.allocate_shared_memory(gl.int32, [TILES * J], PLAIN)
    even_words = even_keys._reinterpret(gl.int32, [2, J, HALF // 2], WORDS)
    odd_words = odd_keys._reinterpret(gl.int32, [2, J, HALF // 2], WORDS)
    table = places._reinterpret(gl.int32, [TILES, J], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    t, share = gl.program_id(0).to(gl.int64), gl.program_id(1)
    first = share * tiles_a_share
    last = gl.minimum(first + tiles_a_share, gl.cdiv(num_window, J) + gl.cdiv(num_selected, J))
    codes = (codes_ptr, scales_ptr, code_page, code_row, scale_page, scale_row)
    entries = (
        entry_codes_ptr, entry_scales_ptr, entry_code_page, entry_code_row, entry_scale_page, entry_scale_row,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (
                full, empty, table, queries, even_keys, odd_keys, weights,
                query_ptr, cos_ptr, sin_ptr, position_ptr, floor_ptr, sink_ptr, out_ptr, partial_ptr, peak_ptr,
                t, share, query_stride, num_heads, num_angles, num_window, first, last, scale, H, C, J, ALONE,
            )),
            (_gather, (
                full, empty, places, table, even_words, odd_words, codes, entries,
                slot_ptr, position_ptr, floor_ptr, page_ptr, entry_slot_ptr, page_stride, selection_ptr,
                t, num_window, num_selected, first, last, RING, PER_PAGE, TILES, C, J,
            )),
        ],
        # 256 threads of 72 registers leave 184 to those that multiply
        [8], [72],
    )  # fmt: skip
