"""Index scores of decoding rows against FP4 keys as they lie in the cache: the full scan, and a pool's members.

Queries turn and are rounded to FP4 on the way in; every product is exact in float16.

T rows, H index heads, I or C index channels, E entries, J entries of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.pages import Paged
from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import INTERPRETED, is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.quantize import ceil_power_of_two, round_to_grid
from cedar.kernels.triton.stored import e4m3_value, e8m0_value

__all__ = ["FORWARD_ONLY", "fits", "paged_index_scores", "paged_pool_scores", "unavailable"]

FORWARD_ONLY = ("paged_index_scores", "paged_pool_scores")
# inline instructions and E4M3 products need a GPU: the interpreter does the same in float32
_INTERPRETED = tl.constexpr(INTERPRETED)
# three for each multiprocessor of an H200, twice over for rows of different lengths
_PROGRAMS = 792
# four, as many as 128 registers a thread let in
_PROGRAMS_WIDE = 528
# of a tile each, in as many registers as they like: three
_PROGRAMS_ALONE = 396


def fits(op: str, query: Tensor) -> bool:
    """At most 64 heads of a power of two of at least 32 channels."""
    channels = query.shape[-1]
    power = channels & (channels - 1) == 0 and 32 <= channels <= 256
    return power and query.shape[1] <= 64 and is_half_or_float(query) and query.stride(-1) == 1


@triton.jit
def _e4m3_planes(byte):
    """uint8 of two E2M1 codes -> E4M3 codes (even, odd), each 2**-6 of its value, exactly; four bytes at a time."""
    if _INTERPRETED:
        return ((byte & 7) << 2) | ((byte & 8) << 4), ((byte >> 2) & 0x1C) | (byte & 0x80)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            shl.b32 a, $2, 2;
            and.b32 a, a, 0x1C1C1C1C;
            shl.b32 b, $2, 4;
            lop3.b32 $0, a, b, 0x80808080, 0xF8;
            shr.b32 a, $2, 2;
            and.b32 a, a, 0x1C1C1C1C;
            lop3.b32 $1, a, $2, 0x80808080, 0xF8;
            }""",
            "=r,=r,r", [byte], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def _e4m3(code):
    """uint8 codes as operands of a product."""
    if _INTERPRETED:
        return e4m3_value(code)
    else:
        return code.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _group(x, g: tl.constexpr, GROUPS: tl.constexpr):
    """x[:, :, g] of [rows, channels, groups]: all of it stays in its registers."""
    if GROUPS == 1:
        return tl.reshape(x, (x.shape[0], x.shape[1]))
    else:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], GROUPS // 2, 2)))
        return _group(odd if g % 2 else even, g // 2, GROUPS // 2)


@triton.jit
def _inverse(power):
    """Of powers of two from 2**-126 to 2**126, exactly."""
    return ((254 << 23) - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _load_query(
    query_ptr, cos_ptr, sin_ptr, weight_ptr, num_heads, num_angles, H: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """A row's query [H, C], cosines and sines of its pairs [C / 2], weights of its heads."""
    head = tl.arange(0, H)
    known = head < num_heads
    query = tl.load(query_ptr + head[:, None] * C + tl.arange(0, C)[None, :], mask=known[:, None], other=0.0)
    turned = tl.arange(0, C // 2) - (C // 2 - num_angles)
    cos = tl.load(cos_ptr + turned, mask=turned >= 0, other=1.0)
    sin = tl.load(sin_ptr + turned, mask=turned >= 0, other=0.0)
    return query, cos, sin, tl.load(weight_ptr + head, mask=known, other=0.0)


@triton.jit
def _turn_query(query, cos, sin, weight):
    """(the query as E4M3 [H, 32, groups], even channels of a group before its odd ones, the heads' weights).

    The head's largest step goes to its weight; E4M3 holds what is left of a group exactly if its step is at most
    2**14 smaller, and what it rounds beyond that is less than 2**-17 of the head's largest.
    """
    H: tl.constexpr = query.shape[0]
    GROUPS: tl.constexpr = query.shape[1] // 32
    dtype: tl.constexpr = query.dtype
    even, odd = tl.split(tl.reshape(query.to(tl.float32), (H, GROUPS * 16, 2)))
    cos, sin = cos[None, :], sin[None, :]
    query = tl.join((even * cos - odd * sin).to(dtype), (even * sin + odd * cos).to(dtype)).to(tl.float32)
    # [H, groups, 16, 2] -> [H, 2, 16, groups]
    query = tl.reshape(tl.permute(tl.reshape(query, (H, GROUPS, 16, 2)), (0, 3, 2, 1)), (H, 32, GROUPS))
    # round to E2M1 in groups of 32 channels
    step = ceil_power_of_two(tl.maximum(tl.max(tl.abs(query), axis=1), 6.0 * 2.0**-126) * (1.0 / 6.0))
    rounded = round_to_grid(query * _inverse(step)[:, None, :], 127 << 23, 1.5 * 2**22)
    largest = tl.max(step, axis=1)
    code = rounded * (step * _inverse(largest)[:, None] * 64.0)[:, None, :]
    if not _INTERPRETED:
        code = code.to(tl.float8e4nv)
    return code, weight.to(tl.float32) * largest


@triton.jit
def _read_keys(
    tile, t, visible, page_ptr, block_ptr, codes_ptr, scales_ptr, code_page, code_row, scale_page, scale_row,
    num_columns, num_blocks,
    PER_PAGE: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr, ALIGNED: tl.constexpr, C: tl.constexpr,
    J: tl.constexpr,
):  # fmt: skip
    """(which of a tile's columns the row sees, their codes [J, C / 2], their scales or where these lie)."""
    within, byte = tl.arange(0, J), tl.arange(0, C // 2)
    column = tile * J + within
    if POOLED:
        inside = column < num_columns
        block = tl.load(block_ptr + t * num_blocks + column // BLOCK, mask=inside, other=-1)
        entry = block * BLOCK + column % BLOCK
        there = inside & (block >= 0) & (entry < visible)
    else:
        entry = column
        there = column < visible
    if POOLED or PER_PAGE % J != 0:
        entry = tl.where(there, entry, 0).to(tl.int32)
        page = tl.load(page_ptr + entry // PER_PAGE)
        row = entry % PER_PAGE
    else:
        # the whole tile lies on one page
        page = tl.load(page_ptr + tile * J // PER_PAGE)
        row = tile * J % PER_PAGE + within
    scales = scales_ptr + page * scale_page + row * scale_row
    if ALIGNED:
        scales = tl.load(scales.to(tl.pointer_type(tl.int32)))
    codes = tl.load((codes_ptr + page * code_page + row * code_row)[:, None] + byte[None, :])
    return there, codes, scales


@triton.jit
def _score_keys(query, weight, keys, ALIGNED: tl.constexpr):
    """[J] float32, of a query as `_turn_query` returns it."""
    there, codes, scales = keys
    H: tl.constexpr = query.shape[0]
    GROUPS: tl.constexpr = query.shape[2]
    J: tl.constexpr = codes.shape[0]
    codes = tl.permute(tl.reshape(codes, (J, GROUPS, 16)), (0, 2, 1))
    total = tl.zeros([J, H], tl.float32)
    for g in tl.static_range(GROUPS):
        low, high = _e4m3_planes(_group(codes, g, GROUPS))
        key = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (J, 32))
        # a group's products are exact: 13 bits hold their sum
        dot = tl.dot(_e4m3(key), tl.trans(_group(query, g, GROUPS)))
        if ALIGNED:
            scale = (scales >> (8 * g)) & 255
        else:
            scale = tl.load(scales + g).to(tl.int32)
        total += dot * e8m0_value(scale)[:, None]
    score = tl.sum(tl.maximum(total, 0.0) * weight[None, :], axis=1)
    return tl.where(there, score, float("-inf"))


@triton.jit
def _scores(
    query_ptr, cos_ptr, sin_ptr, weight_ptr, codes_ptr, scales_ptr, page_ptr, slot_ptr, visible_ptr, block_ptr, out_ptr,
    code_page, code_row, scale_page, scale_row, page_stride, query_stride, weight_stride,
    num_heads, num_angles, num_columns, num_blocks,
    PER_PAGE: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr, ALIGNED: tl.constexpr, ALONE: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program's share of a row's tiles; of one ALONE the keys are on their way while the query is turned."""
    follow()
    t = tl.program_id(1).to(tl.int64)
    slot, visible = tl.load(slot_ptr + t), tl.load(visible_ptr + t)
    page_ptr += slot * page_stride
    out_ptr += t * num_columns
    query, cos, sin, weight = _load_query(
        query_ptr + t * query_stride, cos_ptr + t * num_angles, sin_ptr + t * num_angles,
        weight_ptr + t * weight_stride, num_heads, num_angles, H, C,
    )  # fmt: skip
    within = tl.arange(0, J)
    if ALONE:
        column = tl.program_id(0) * J + within
        score = tl.full([J], float("-inf"), tl.float32)
        # beyond what is visible there may be no page
        if tl.program_id(0) * J < visible:
            keys = _read_keys(
                tl.program_id(0), t, visible, page_ptr, block_ptr, codes_ptr, scales_ptr, code_page, code_row,
                scale_page, scale_row, num_columns, num_blocks, PER_PAGE, BLOCK, POOLED, ALIGNED, C, J,
            )  # fmt: skip
            code, size = _turn_query(query, cos, sin, weight)
            score = _score_keys(code, size, keys, ALIGNED)
        tl.store(out_ptr + column, score, mask=column < num_columns)
    else:
        code, size = _turn_query(query, cos, sin, weight)
        # this program's share of the tiles that have something to see, then of the others
        num_tiles = tl.cdiv(num_columns, J)
        num_seen = num_tiles
        if not POOLED:
            num_seen = tl.minimum(num_tiles, tl.cdiv(visible, J)).to(tl.int32)
        share = tl.cdiv(num_seen, tl.num_programs(0))
        start = tl.program_id(0) * share
        for tile in tl.range(start, tl.minimum(start + share, num_seen), num_stages=STAGES):
            keys = _read_keys(
                tile, t, visible, page_ptr, block_ptr, codes_ptr, scales_ptr, code_page, code_row, scale_page,
                scale_row, num_columns, num_blocks, PER_PAGE, BLOCK, POOLED, ALIGNED, C, J,
            )  # fmt: skip
            column = tile * J + within
            tl.store(out_ptr + column, _score_keys(code, size, keys, ALIGNED), mask=column < num_columns)
        share = tl.cdiv(num_tiles - num_seen, tl.num_programs(0))
        start = num_seen + tl.program_id(0) * share
        for tile in range(start, tl.minimum(start + share, num_tiles)):
            column = tile * J + within
            tl.store(out_ptr + column, tl.full([J], float("-inf"), tl.float32), mask=column < num_columns)


def _run(
    query_THI: Tensor, cos_TR: Tensor, sin_TR: Tensor, weight_TH: Tensor, keys: Paged, visible_T: Tensor,
    block_TN: Tensor | None, block_size: int, num_columns: int,
) -> Tensor:  # fmt: skip
    num_rows, num_heads, channels = query_THI.shape
    score_TE = torch.empty(num_rows, num_columns, device=query_THI.device, dtype=torch.float32)
    if score_TE.numel() == 0:
        return score_TE
    codes, scales = keys.stored.codes_PNX, keys.stored.scales_PNG
    heads = max(16, next_power_of_2(num_heads))
    on_pages = codes.shape[1] % 128 == 0
    # a row's four scales in one word
    aligned = channels == 128 and all(x % 4 == 0 for x in (scales.data_ptr(), scales.stride(0), scales.stride(1)))
    wide = aligned and heads <= 32
    tile = 128 if wide or on_pages else 64
    # pages' numbers take stages of their own: of five, one more tile is under way; pages by row have no registers left
    stages = 3 if not wide else 5 if on_pages and block_TN is None else 4
    num_tiles = triton.cdiv(num_columns, tile)
    programs = min(num_tiles, triton.cdiv(_PROGRAMS_WIDE if wide else _PROGRAMS, num_rows))
    alone = wide and block_TN is None and num_tiles * num_rows <= _PROGRAMS_ALONE
    _scores[(programs, num_rows)](
        query_THI, cos_TR, sin_TR, weight_TH, codes, scales, keys.page_SP, keys.slot_T, visible_T,
        visible_T if block_TN is None else block_TN.contiguous(), score_TE,
        codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1), keys.page_SP.stride(0),
        query_THI.stride(0), weight_TH.stride(0), num_heads, cos_TR.shape[-1], num_columns,
        0 if block_TN is None else block_TN.shape[1],
        PER_PAGE=codes.shape[1], BLOCK=block_size, POOLED=block_TN is not None, ALIGNED=aligned, ALONE=alone,
        H=heads, C=channels, J=tile, STAGES=stages, num_warps=4,
        maxnreg=128 if wide and not alone else None, launch_pdl=AHEAD,
    )  # fmt: skip
    return score_TE


def paged_index_scores(
    query_THI: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    weight_TH: Tensor,
    keys: Paged,
    visible_T: Tensor,
    num_entries: int,
) -> Tensor:
    return _run(query_THI, cos_TR, sin_TR, weight_TH, keys, visible_T, None, 1, num_entries)


def paged_pool_scores(
    query_THI: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    weight_TH: Tensor,
    keys: Paged,
    visible_T: Tensor,
    block_TN: Tensor,
    block_size: int,
) -> Tensor:
    columns = block_TN.shape[1] * block_size
    return _run(query_THI, cos_TR, sin_TR, weight_TH, keys, visible_T, block_TN, block_size, columns)
