"""The k largest of a row: the k-th value by bisection on the bits of the scores, then one pass writes who lies above
it in ascending order, ties to the lowest.

A program holds its columns in registers, so a step of the bisection is a comparison and a sum; it stops as soon as a
value splits off exactly k. A long row is cut into tiles whose own k best, still in ascending order, go to the next
round: the order of places is the order of columns, so ties stay with the lowest.

T rows, E columns, K chosen, B columns of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.reference import indexer as reference
from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import next_power_of_2, unavailable

__all__ = ["FORWARD_ONLY", "fits", "top_entries", "top_members", "unavailable"]

FORWARD_ONLY = ("top_entries", "top_members")
# columns that one program holds at most; of a long row the half, so that more programs share it
_TILE = 16384
# fills the multiprocessors with whole tiles
_MANY_ROWS = 16
# more to choose than this is for a sort
_MOST_CHOSEN = 8192


def fits(op: str, score: Tensor) -> bool:
    """float32 scores, a row's side by side."""
    return score.dtype == torch.float32 and score.numel() > 0


# the key of -inf
_LOWEST = tl.constexpr(-0x7F800001)


@triton.jit
def _ordered(score):
    """Integers in the order of float32 scores; -0 equals +0, what is not a number equals -inf."""
    bits = tl.where(score > float("-inf"), score + 0.0, float("-inf")).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _narrow(key, k, enough, low, high, reaching, beyond):
    """Moves `low` and `high` together until at most `enough` keys reach `low`, or nothing lies between them.

    `reaching` keys, k or more, are `low` or above; `beyond`, fewer than k, are `high` or above.
    """
    while (reaching > enough) & ((high - low).to(tl.uint32) > 1):
        third = (((high - low).to(tl.uint32) + 2) // 3).to(tl.int32)
        first, second = low + third, low + 2 * third
        # both counts in one sum, 16 bits each
        both = tl.sum((key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << 16))
        many, few = both & 0xFFFF, (both >> 16) & 0xFFFF
        if few >= k:
            low, reaching = second, few
        elif many >= k:
            low, reaching, high, beyond = first, many, second, few
        else:
            high, beyond = first, many
    return low, high, reaching, beyond


@triton.jit
def _before(marked):
    """How many marks lie before each place, by rows of [members, groups]."""
    count = marked.to(tl.int32)
    group = tl.sum(count, axis=0)
    return tl.cumsum(count, axis=0) - count + (tl.cumsum(group, axis=0) - group)[None, :]


@triton.jit
def _last_and_sum(word, count, upto, next_word, next_count, next_upto):
    return next_word, next_count, upto + next_upto


@triton.jit
def _list(marked, first, out_ptr, G: tl.constexpr, M: tl.constexpr):
    """Writes the places of the marks in ascending order, counted from `first`, by rows of [members, groups]."""
    # a group's marks are the bits of a word
    word = tl.sum(marked.to(tl.uint32) << tl.arange(0, M)[:, None].to(tl.uint32), axis=0)
    count = word - ((word >> 1) & 0x55555555)
    count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
    count = ((((count + (count >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)
    # words and counts go through the sum unchanged, so that all three lie one a thread
    word, count, upto = tl.associative_scan((word, count, count), 0, _last_and_sum)
    slot = upto - count
    place = first + tl.arange(0, G) * M
    while tl.max(word, axis=0) > 0:
        rest = word & (word - 1)
        # a power of two as float32 is its own exponent
        index = ((word ^ rest).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        tl.store(out_ptr + slot, place + index, mask=word > 0)
        word, slot = rest, slot + 1


@triton.jit
def _select(
    score_ptr, column_ptr, block_ptr, out_score_ptr, out_column_ptr, row_stride, num_columns, num_blocks, k,
    BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, G: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    follow()
    t, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    score_ptr += t * row_stride
    place = tile * G * M + tl.arange(0, G)[None, :] * M + tl.arange(0, M)[:, None]
    key = _ordered(tl.load(score_ptr + place, mask=place < num_columns, other=float("-inf")))
    # each of at least k groups has a key that reaches the least of their maxima
    best = tl.max(key, axis=0)
    low, high = tl.maximum(tl.min(best, axis=0), _LOWEST + 1), tl.max(best, axis=0) + 1
    reaching, beyond = tl.sum((key >= low).to(tl.int32)), tl.full([], 0, tl.int32)
    low, high, reaching, beyond = _narrow(key, k, 2 * k, low, high, reaching, beyond)
    taken = key >= low
    if reaching > 2 * k:
        # what is at the cut fills up from the lowest column
        taken = (key > low) | ((key == low) & (_before(key == low) < k - beyond))
        reaching = k
    # at most 2 k places go where the columns will lie, and come back to be chosen from
    out = (t * tl.num_programs(1) + tile) * k
    scratch_ptr = (out_column_ptr + out).to(tl.pointer_type(tl.int32))
    _list(taken, tile * G * M, scratch_ptr, G, M)
    tl.debug_barrier()
    slot = tl.arange(0, 2 * K)
    listed = slot < reaching
    place = tl.load(scratch_ptr + slot, mask=listed, other=0)
    score = tl.load(score_ptr + place, mask=listed, other=float("-inf"))
    if not FIRST:
        column = tl.load(column_ptr + t * row_stride + place, mask=listed, other=-1)
    elif BLOCK:
        block = tl.load(block_ptr + t * num_blocks + place // BLOCK, mask=listed, other=0)
        column = block * BLOCK + place % BLOCK
    else:
        column = place.to(tl.int64)
    key = _ordered(score)
    low, high, reaching, beyond = _narrow(key, k, k, low, high, reaching, beyond)
    taken = listed & (key >= low)
    if reaching > k:
        tied = key == low
        taken = (key > low) | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= k - beyond))
    tl.debug_barrier()
    chosen = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    empty = (slot >= reaching) & (slot < k)
    tl.store(out_column_ptr + out + chosen, column, mask=taken)
    tl.store(out_column_ptr + out + slot, tl.full([2 * K], -1, tl.int64), mask=empty)
    if not LAST:
        tl.store(out_score_ptr + out + chosen, score, mask=taken)
        tl.store(out_score_ptr + out + slot, tl.full([2 * K], float("-inf"), tl.float32), mask=empty)


def top_entries(score_TE: Tensor, k: int) -> Tensor:
    if k > _MOST_CHOSEN:
        return reference.top_entries(score_TE, k)
    return _top(score_TE, k, None, 0)


def top_members(score_TP: Tensor, k: int, block_TN: Tensor, block_size: int) -> Tensor:
    if k > _MOST_CHOSEN:
        return reference.top_members(score_TP, k, block_TN, block_size)
    return _top(score_TP, k, block_TN.contiguous(), block_size)


def _top(score_TE: Tensor, k: int, block_TN: Tensor | None, block_size: int) -> Tensor:
    num_rows = score_TE.shape[0]
    score_TE = score_TE.contiguous()
    column_TE = score_TE
    first = True
    least = next_power_of_2(2 * k)
    while True:
        num_columns = score_TE.shape[1]
        whole = num_columns <= _TILE or num_rows >= _MANY_ROWS or 8 * least > _TILE
        most = _TILE if whole else _TILE // 2
        # a round must leave fewer than it found
        tile = max(256, least, min(most, next_power_of_2(num_columns)))
        tiles = triton.cdiv(num_columns, tile)
        last = tiles == 1
        groups = max(next_power_of_2(k), tile // 32)
        out_column = torch.empty(num_rows, tiles * k, device=score_TE.device, dtype=torch.int64)
        out_score = torch.empty(num_rows, 1 if last else tiles * k, device=score_TE.device, dtype=torch.float32)
        _select[(num_rows, tiles)](
            score_TE, column_TE, column_TE if block_TN is None else block_TN, out_score, out_column,
            num_columns, num_columns, 0 if block_TN is None else block_TN.shape[1], k,
            BLOCK=block_size, FIRST=first, LAST=last, G=groups, M=tile // groups, K=next_power_of_2(k),
            num_warps=16 if tile > 8192 else 8 if tile >= 4096 else 4, launch_pdl=AHEAD,
        )  # fmt: skip
        if last:
            return out_column
        score_TE, column_TE, first = out_score, out_column, False
