"""The k largest of a row by radix selection: four passes over eight bits each find the k-th value, then one pass
writes who lies above it in ascending order, ties to the lowest.

A long row is cut into tiles whose own k best, still in ascending order, go to the next round: the order of places
is the order of columns, so ties stay with the lowest.

T rows, E columns, K chosen, B columns of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import next_power_of_2, unavailable

__all__ = ["FORWARD_ONLY", "fits", "top_entries", "top_members", "unavailable"]

FORWARD_ONLY = ("top_entries", "top_members")
_TILE = 4096


def fits(op: str, score: Tensor) -> bool:
    """float32 scores, a row's side by side."""
    return score.dtype == torch.float32 and score.numel() > 0


@triton.jit
def _ordered(score):
    """Unsigned integers in the order of float32 scores; -0 equals +0, 0 is below every score above -inf."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(score == 0.0, 0, bits)
    flipped = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    key = flipped.to(tl.uint32, bitcast=True)
    return tl.where(score > float("-inf"), key, 0).to(tl.uint32)


@triton.jit
def _select(
    score_ptr, column_ptr, block_ptr, out_score_ptr, out_column_ptr, row_stride, num_columns, num_blocks, k,
    BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    follow()
    t, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tile * B + tl.arange(0, B)
    inside = place < num_columns
    score = tl.load(score_ptr + t * row_stride + place, mask=inside, other=float("-inf"))
    key = _ordered(score)
    bin_ = tl.arange(0, 256)
    # the k-th largest key, eight bits at a time from the top; `room` of those equal so far are still wanted
    prefix = tl.full([], 0, tl.uint32)
    room = k
    for round_ in tl.static_range(4):
        if round_ == 0:
            candidate = inside
        else:
            candidate = inside & ((key >> (32 - 8 * round_)) == prefix)
        digit = ((key >> (24 - 8 * round_)) & 255).to(tl.int32)
        count = tl.histogram(digit, 256, mask=candidate)
        # columns of a higher digit than each bin's
        above = tl.sum(count, axis=0) - tl.cumsum(count, axis=0)
        # the bin in which the k-th lies; a row with too few has none above bin 0
        chosen = tl.max(tl.where((above + count >= room), bin_, 0), axis=0)
        room = room - tl.sum(tl.where(bin_ == chosen, above, 0), axis=0)
        prefix = (prefix << 8) | chosen.to(tl.uint32)
    # what is at the cut fills up from the lowest column; key 0 is -inf and never chosen
    tied = inside & (key == prefix) & (key > 0)
    taken = (inside & (key > prefix)) | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= room))
    slot = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    num_taken = tl.sum(taken.to(tl.int32), axis=0)
    out = (t * tl.num_programs(1) + tile) * k
    if FIRST and BLOCK:
        # the member of a pool behind this place
        block = tl.load(block_ptr + t * num_blocks + place // BLOCK, mask=taken, other=0)
        column = block * BLOCK + place % BLOCK
    elif FIRST:
        column = place.to(tl.int64)
    else:
        column = tl.load(column_ptr + t * row_stride + place, mask=inside, other=-1)
    tl.store(out_column_ptr + out + slot, column, mask=taken)
    if not LAST:
        tl.store(out_score_ptr + out + slot, score, mask=taken)
    # the places that stay empty
    for start in range(0, k, 256):
        rest = start + bin_
        empty = (rest >= num_taken) & (rest < k)
        tl.store(out_column_ptr + out + rest, tl.full([256], -1, tl.int64), mask=empty)
        if not LAST:
            tl.store(out_score_ptr + out + rest, tl.full([256], float("-inf"), tl.float32), mask=empty)


def top_entries(score_TE: Tensor, k: int) -> Tensor:
    return _top(score_TE, k, None, 0)


def top_members(score_TP: Tensor, k: int, block_TN: Tensor, block_size: int) -> Tensor:
    return _top(score_TP, k, block_TN.contiguous(), block_size)


def _top(score_TE: Tensor, k: int, block_TN: Tensor | None, block_size: int) -> Tensor:
    num_rows = score_TE.shape[0]
    score_TE = score_TE.contiguous()
    column_TE = score_TE
    first = True
    while True:
        num_columns = score_TE.shape[1]
        tile = min(_TILE, next_power_of_2(max(num_columns, 256)))
        # a round must leave fewer than it found
        tile = max(tile, next_power_of_2(2 * k))
        tiles = triton.cdiv(num_columns, tile)
        last = tiles == 1
        out_column = torch.empty(num_rows, tiles * k, device=score_TE.device, dtype=torch.int64)
        out_score = torch.empty(num_rows, 1 if last else tiles * k, device=score_TE.device, dtype=torch.float32)
        _select[(num_rows, tiles)](
            score_TE, column_TE, column_TE if block_TN is None else block_TN, out_score, out_column,
            num_columns, num_columns, 0 if block_TN is None else block_TN.shape[1], k,
            BLOCK=block_size, FIRST=first, LAST=last, B=tile, num_warps=max(4, min(16, tile // 256)),
            launch_pdl=AHEAD,
        )  # fmt: skip
        if last:
            return out_column
        score_TE, column_TE, first = out_score, out_column, False
