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

from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import next_power_of_2, unavailable

__all__ = ["FORWARD_ONLY", "fits", "top_entries", "top_members", "unavailable"]

FORWARD_ONLY = ("top_entries", "top_members")
# columns that one program holds, 16 a thread
_TILE = 16384


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
def _cut(key, k):
    """(the least key that is chosen, how many of its equals): all of them if just k keys reach it.

    Args:
        key: Keys of at least k groups, [members, groups].
    """
    low = tl.full([], 1, tl.uint32)
    high = tl.max(key) + 1
    # keys from `low` on, and from `high` on
    reaching = tl.sum((key > 0).to(tl.int32))
    beyond = tl.full([], 0, tl.int32)
    if reaching > k:
        # each group has a key that reaches the least of their maxima
        bound = tl.min(tl.max(key, axis=0), axis=0)
        if bound > 1:
            low = bound
            reaching = tl.sum((key >= low).to(tl.int32))
    while (reaching > k) & (high - low > 1):
        third = (high - low + 2) // 3
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
    return low, tl.where(reaching > k, k - beyond, reaching)


@triton.jit
def _rank(marked):
    """(how many marks lie before each place, how many there are), by rows of [members, groups]."""
    count = marked.to(tl.int32)
    group = tl.sum(count, axis=0)
    return tl.cumsum(count, axis=0) - count + (tl.cumsum(group, axis=0) - group)[None, :], tl.sum(group, axis=0)


@triton.jit
def _select(
    score_ptr, column_ptr, block_ptr, out_score_ptr, out_column_ptr, row_stride, num_columns, num_blocks, k,
    BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, G: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    follow()
    t, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tile * G * M + tl.arange(0, G)[None, :] * M + tl.arange(0, M)[:, None]
    score = tl.load(score_ptr + t * row_stride + place, mask=place < num_columns, other=float("-inf"))
    key = _ordered(score)
    cut, room = _cut(key, k)
    taken = key >= cut
    if tl.sum(taken.to(tl.int32)) > k:
        # what is at the cut fills up from the lowest column
        before, _ = _rank(key == cut)
        taken = (key > cut) | ((key == cut) & (before < room))
    slot, num_taken = _rank(taken)
    # the few places go where the columns will lie, and come back in order for what lies behind them
    out = (t * tl.num_programs(1) + tile) * k
    scratch_ptr = (out_column_ptr + out).to(tl.pointer_type(tl.int32))
    tl.store(scratch_ptr + slot, place, mask=taken)
    tl.debug_barrier()
    chosen = tl.arange(0, K)
    filled = chosen < num_taken
    place = tl.load(scratch_ptr + chosen, mask=filled, other=0)
    tl.debug_barrier()
    if not FIRST:
        column = tl.load(column_ptr + t * row_stride + place, mask=filled, other=-1)
    elif BLOCK:
        block = tl.load(block_ptr + t * num_blocks + place // BLOCK, mask=filled, other=0)
        column = block * BLOCK + place % BLOCK
    else:
        column = place.to(tl.int64)
    tl.store(out_column_ptr + out + chosen, tl.where(filled, column, -1), mask=chosen < k)
    if not LAST:
        score = tl.load(score_ptr + t * row_stride + place, mask=filled, other=float("-inf"))
        tl.store(out_score_ptr + out + chosen, score, mask=chosen < k)


def top_entries(score_TE: Tensor, k: int) -> Tensor:
    return _top(score_TE, k, None, 0)


def top_members(score_TP: Tensor, k: int, block_TN: Tensor, block_size: int) -> Tensor:
    return _top(score_TP, k, block_TN.contiguous(), block_size)


def _top(score_TE: Tensor, k: int, block_TN: Tensor | None, block_size: int) -> Tensor:
    num_rows = score_TE.shape[0]
    score_TE = score_TE.contiguous()
    column_TE = score_TE
    first = True
    # a round must leave fewer than it found
    most = max(_TILE, next_power_of_2(2 * k))
    while True:
        num_columns = score_TE.shape[1]
        tile = max(256, min(most, next_power_of_2(max(num_columns, 2 * k))))
        tiles = triton.cdiv(num_columns, tile)
        last = tiles == 1
        groups = max(next_power_of_2(k), tile // 32)
        out_column = torch.empty(num_rows, tiles * k, device=score_TE.device, dtype=torch.int64)
        out_score = torch.empty(num_rows, 1 if last else tiles * k, device=score_TE.device, dtype=torch.float32)
        _select[(num_rows, tiles)](
            score_TE, column_TE, column_TE if block_TN is None else block_TN, out_score, out_column,
            num_columns, num_columns, 0 if block_TN is None else block_TN.shape[1], k,
            BLOCK=block_size, FIRST=first, LAST=last, G=groups, M=tile // groups, K=next_power_of_2(k),
            num_warps=max(4, min(16, tile // 512)), launch_pdl=AHEAD,
        )  # fmt: skip
        if last:
            return out_column
        score_TE, column_TE, first = out_score, out_column, False
