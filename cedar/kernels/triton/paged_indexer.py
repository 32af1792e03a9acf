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
from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.quantize import ceil_power_of_two, round_to_grid
from cedar.kernels.triton.stored import e2m1_planes, e8m0_value

__all__ = ["FORWARD_ONLY", "fits", "paged_index_scores", "paged_pool_scores", "unavailable"]

FORWARD_ONLY = ("paged_index_scores", "paged_pool_scores")


def fits(op: str, query: Tensor) -> bool:
    """At most 64 heads of a power of two of at least 32 channels."""
    channels = query.shape[-1]
    power = channels & (channels - 1) == 0 and 32 <= channels <= 256
    return power and query.shape[1] <= 64 and is_half_or_float(query) and query.stride(-1) == 1


@triton.jit
def _scores(
    query_ptr, cos_ptr, sin_ptr, weight_ptr, codes_ptr, scales_ptr, page_ptr, slot_ptr, visible_ptr, block_ptr, out_ptr,
    code_page, code_row, scale_page, scale_row, page_stride, query_stride, weight_stride,
    num_heads, num_angles, num_columns, num_blocks,
    PER_PAGE: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, J: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    follow()
    HALF: tl.constexpr = C // 2
    GROUPS: tl.constexpr = C // 32
    t = tl.program_id(1).to(tl.int64)
    head, pair = tl.arange(0, H), tl.arange(0, HALF)
    known = (head < num_heads)[:, None]
    slot, visible = tl.load(slot_ptr + t), tl.load(visible_ptr + t)
    dtype: tl.constexpr = query_ptr.dtype.element_ty

    place = query_ptr + t * query_stride + head[:, None] * C + 2 * pair[None, :]
    even = tl.load(place, mask=known, other=0.0).to(tl.float32)
    odd = tl.load(place + 1, mask=known, other=0.0).to(tl.float32)
    turned = pair - (HALF - num_angles)
    cos = tl.load(cos_ptr + t * num_angles + turned, mask=turned >= 0, other=1.0)[None, :]
    sin = tl.load(sin_ptr + t * num_angles + turned, mask=turned >= 0, other=0.0)[None, :]
    query_even = (even * cos - odd * sin).to(dtype).to(tl.float32)
    query_odd = (even * sin + odd * cos).to(dtype).to(tl.float32)
    # round to E2M1 in groups of 32 channels, 16 pairs
    grouped_even, grouped_odd = tl.reshape(query_even, (H, GROUPS, 16)), tl.reshape(query_odd, (H, GROUPS, 16))
    amax = tl.maximum(tl.max(tl.abs(grouped_even), axis=2), tl.max(tl.abs(grouped_odd), axis=2))
    step = ceil_power_of_two(tl.maximum(amax, 6.0 * 2.0**-126) * (1.0 / 6.0))[:, :, None]
    rounded_even = round_to_grid(tl.div_rn(grouped_even, step), 127 << 23, 1.5 * 2**22)
    rounded_odd = round_to_grid(tl.div_rn(grouped_odd, step), 127 << 23, 1.5 * 2**22)
    # the head's largest step goes to its weight, so that float16 holds what is left whatever the query's size
    largest = tl.max(step, axis=1)
    relative = step / largest[:, :, None]
    query_even = tl.reshape(rounded_even * relative, (H, HALF)).to(tl.float16)
    query_odd = tl.reshape(rounded_odd * relative, (H, HALF)).to(tl.float16)
    weight = tl.load(weight_ptr + t * weight_stride + head, mask=head < num_heads, other=0.0).to(tl.float32)
    weight = weight * tl.reshape(largest, (H,))

    group = tl.arange(0, GROUPS)
    for tile in range(TILES):
        column = (tl.program_id(0) * TILES + tile) * J + tl.arange(0, J)
        inside = column < num_columns
        if POOLED:
            block = tl.load(block_ptr + t * num_blocks + column // BLOCK, mask=inside, other=-1)
            entry = block * BLOCK + column % BLOCK
            there = inside & (block >= 0) & (entry < visible)
        else:
            entry = column.to(tl.int64)
            there = inside & (entry < visible)
        entry = tl.where(there, entry, 0)
        page = tl.load(page_ptr + slot * page_stride + entry // PER_PAGE, mask=there, other=0)
        row = entry % PER_PAGE
        byte = tl.load(
            codes_ptr + page[:, None] * code_page + row[:, None] * code_row + pair[None, :],
            mask=there[:, None],
            other=0,
        )
        exponent = tl.load(
            scales_ptr + page[:, None] * scale_page + row[:, None] * scale_row + group[None, :],
            mask=there[:, None],
            other=127,
        ).to(tl.int32)
        highest = tl.max(exponent, axis=1)
        share = e8m0_value(tl.maximum(exponent - highest[:, None] + 127, 0)) * 16384.0
        half = tl.reshape(tl.broadcast_to(share.to(tl.float16)[:, :, None], (J, GROUPS, 16)), (J, HALF))
        low, high = e2m1_planes(byte)
        dot = tl.dot(low * half, tl.trans(query_even))
        dot = tl.dot(high * half, tl.trans(query_odd), dot)
        score = tl.sum(tl.maximum(dot, 0.0) * weight[None, :], axis=1) * e8m0_value(highest)
        tl.store(out_ptr + t * num_columns + column, tl.where(there, score, float("-inf")), mask=inside)


def _run(
    query_THI: Tensor, cos_TR: Tensor, sin_TR: Tensor, weight_TH: Tensor, keys: Paged, visible_T: Tensor,
    block_TN: Tensor | None, block_size: int, num_columns: int,
) -> Tensor:  # fmt: skip
    num_rows, num_heads, channels = query_THI.shape
    score_TE = torch.empty(num_rows, num_columns, device=query_THI.device, dtype=torch.float32)
    if score_TE.numel() == 0:
        return score_TE
    stored = keys.stored
    tile = min(128, max(16, next_power_of_2(num_columns)))
    # a program turns and rounds its query once for some tiles
    tiles = max(1, min(8, triton.cdiv(num_columns, tile) * num_rows // 1024))
    _scores[(triton.cdiv(num_columns, tile * tiles), num_rows)](
        query_THI, cos_TR, sin_TR, weight_TH, stored.codes_PNX, stored.scales_PNG, keys.page_SP, keys.slot_T, visible_T,
        visible_T if block_TN is None else block_TN.contiguous(), score_TE,
        stored.codes_PNX.stride(0), stored.codes_PNX.stride(1), stored.scales_PNG.stride(0),
        stored.scales_PNG.stride(1), keys.page_SP.stride(0), query_THI.stride(0),
        weight_TH.stride(0), num_heads, cos_TR.shape[-1], num_columns,
        0 if block_TN is None else block_TN.shape[1],
        PER_PAGE=stored.codes_PNX.shape[1], BLOCK=block_size, POOLED=block_TN is not None,
        H=max(16, next_power_of_2(num_heads)), C=channels, J=tile, TILES=tiles,
        num_warps=4, num_stages=2,
        launch_pdl=AHEAD,
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
