"""The indexer over whole packs: scores, the selection, and the loss that teaches it.

Heads are added up in registers, the dots never reach memory: P rows against J entries, one head after the
other. Selection and loss hold a row's scores, K of them, in one program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.indexer import LEAST_MASS
from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable

__all__ = ["fits", "index_divergence", "index_scores", "masked_index_scores", "topk_mask", "unavailable"]

_ROWS, _KEYS = 64, 64


# scores of a row that one program holds
_MOST_SCORES = 8192


def fits(op: str, x: Tensor, *others: Tensor) -> bool:
    """Scores: 16 to 128 index channels, a power of two. Selection and loss: float32, at most 8,192 scores a row."""
    width = x.shape[-1]
    if op in ("index_scores", "masked_index_scores"):
        return 16 <= width <= 128 and width & (width - 1) == 0 and is_half_or_float(x) and x.numel() > 0
    return x.dtype == torch.float32 and 0 < width <= _MOST_SCORES and x.shape[0] > 0


@triton.jit
def _rows(x_ptr, row, num_rows, stride, C: tl.constexpr):
    place = row[:, None].to(tl.int64) * stride + tl.arange(0, C)[None, :]
    return tl.load(x_ptr + place, mask=(row < num_rows)[:, None], other=0.0)


@triton.jit
def _score(
    query_ptr, weight_ptr, key_ptr, score_ptr, num_rows, num_entries,
    H: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, P: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    pack = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * P + tl.arange(0, P)
    entry = tl.program_id(1) * J + tl.arange(0, J)
    keys = _rows(key_ptr + pack * num_entries * C, entry, num_entries, C, C)
    total = tl.zeros([P, J], tl.float32)
    for head in range(H):
        query = _rows(query_ptr + (pack * num_rows * H + head) * C, row, num_rows, H * C, C)
        weight = tl.load(weight_ptr + (pack * num_rows + row) * H + head, mask=row < num_rows, other=0.0)
        dot = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        total += tl.maximum(dot, 0.0) * weight.to(tl.float32)[:, None]
    inside = (row[:, None] < num_rows) & (entry[None, :] < num_entries)
    tl.store(score_ptr + (pack * num_rows + row)[:, None] * num_entries + entry[None, :], total, mask=inside)


@triton.jit
def _grad_query(
    query_ptr, weight_ptr, key_ptr, grad_ptr, grad_query_ptr, grad_weight_ptr, num_rows, num_entries,
    H: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, P: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    pack = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    row = tl.program_id(0) * P + tl.arange(0, P)
    query = _rows(query_ptr + (pack * num_rows * H + head) * C, row, num_rows, H * C, C)
    heads = (pack * num_rows + row) * H + head
    weight = tl.load(weight_ptr + heads, mask=row < num_rows, other=0.0).to(tl.float32)
    total = tl.zeros([P, C], tl.float32)
    total_weight = tl.zeros([P], tl.float32)
    for block in range(tl.cdiv(num_entries, J)):
        entry = block * J + tl.arange(0, J)
        inside = (row[:, None] < num_rows) & (entry[None, :] < num_entries)
        cells = (pack * num_rows + row)[:, None] * num_entries + entry[None, :]
        grad = tl.load(grad_ptr + cells, mask=inside, other=0.0)
        if tl.max(tl.max((grad != 0.0).to(tl.int32), axis=1), axis=0) > 0:
            keys = _rows(key_ptr + pack * num_entries * C, entry, num_entries, C, C)
            dot = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
            total_weight += tl.sum(grad * tl.maximum(dot, 0.0), axis=1)
            slope = tl.where(dot > 0.0, grad * weight[:, None], 0.0)
            total += tl.dot(slope.to(keys.dtype), keys, input_precision=PRECISION)
    tl.store(
        grad_query_ptr + heads[:, None] * C + tl.arange(0, C)[None, :],
        total.to(grad_query_ptr.dtype.element_ty),
        mask=(row < num_rows)[:, None],
    )
    tl.store(grad_weight_ptr + heads, total_weight.to(grad_weight_ptr.dtype.element_ty), mask=row < num_rows)


@triton.jit
def _grad_keys(
    query_ptr, weight_ptr, key_ptr, grad_ptr, grad_key_ptr, num_rows, num_entries,
    H: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, P: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    pack = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * J + tl.arange(0, J)
    keys = _rows(key_ptr + pack * num_entries * C, entry, num_entries, C, C)
    total = tl.zeros([J, C], tl.float32)
    for block in range(tl.cdiv(num_rows, P)):
        row = block * P + tl.arange(0, P)
        inside = (row[:, None] < num_rows) & (entry[None, :] < num_entries)
        cells = (pack * num_rows + row)[:, None] * num_entries + entry[None, :]
        grad = tl.load(grad_ptr + cells, mask=inside, other=0.0)
        if tl.max(tl.max((grad != 0.0).to(tl.int32), axis=1), axis=0) > 0:
            for head in range(H):
                query = _rows(query_ptr + (pack * num_rows * H + head) * C, row, num_rows, H * C, C)
                weight = tl.load(weight_ptr + (pack * num_rows + row) * H + head, mask=row < num_rows, other=0.0)
                dot = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
                slope = tl.where(dot > 0.0, grad * weight.to(tl.float32)[:, None], 0.0)
                total += tl.dot(tl.trans(slope.to(query.dtype)), query, input_precision=PRECISION)
    cells = (pack * num_entries + entry)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(grad_key_ptr + cells, total.to(grad_key_ptr.dtype.element_ty), mask=(entry < num_entries)[:, None])


class _MaskedIndexScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_BSHI: Tensor, weight_BSH: Tensor, key_BEI: Tensor) -> Tensor:
        num_packs, num_rows, num_heads, channels = query_BSHI.shape
        num_entries = key_BEI.shape[1]
        query_BSHI, weight_BSH, key_BEI = query_BSHI.contiguous(), weight_BSH.contiguous(), key_BEI.contiguous()
        ctx.constants = {
            "H": num_heads,
            "C": channels,
            "PRECISION": "ieee" if query_BSHI.dtype == torch.float32 else "tf32",
            "P": _ROWS,
            "J": _KEYS,
        }
        score_BSE = query_BSHI.new_empty(num_packs, num_rows, num_entries, dtype=torch.float32)
        if num_entries:
            _score[(triton.cdiv(num_rows, _ROWS), triton.cdiv(num_entries, _KEYS), num_packs)](
                query_BSHI, weight_BSH, key_BEI, score_BSE, num_rows, num_entries, **ctx.constants
            )
        ctx.save_for_backward(query_BSHI, weight_BSH, key_BEI)
        return score_BSE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query_BSHI, weight_BSH, key_BEI = ctx.saved_tensors
        num_packs, num_rows, num_heads, _ = query_BSHI.shape
        num_entries = key_BEI.shape[1]
        grad_BSE = grads[0].contiguous()
        grad_query, grad_weight, grad_key = (torch.empty_like(x) for x in (query_BSHI, weight_BSH, key_BEI))
        _grad_query[(triton.cdiv(num_rows, _ROWS), num_heads, num_packs)](
            query_BSHI, weight_BSH, key_BEI, grad_BSE, grad_query, grad_weight, num_rows, num_entries, **ctx.constants
        )
        if num_entries:
            _grad_keys[(triton.cdiv(num_entries, _KEYS), num_packs)](
                query_BSHI, weight_BSH, key_BEI, grad_BSE, grad_key, num_rows, num_entries, **ctx.constants
            )
        return grad_query, grad_weight, grad_key


def masked_index_scores(query_BSHI: Tensor, weight_BSH: Tensor, key_BEI: Tensor) -> Tensor:
    result: Tensor = _MaskedIndexScores.apply(query_BSHI, weight_BSH, key_BEI)
    return result


def index_scores(query_THI: Tensor, weight_TH: Tensor, key_EI: Tensor) -> Tensor:
    return masked_index_scores(*(x.unsqueeze(0) for x in (query_THI, weight_TH, key_EI))).squeeze(0)


# the selection


@triton.jit
def _topk_mask(score_ptr, mask_ptr, num_rows, num_scores, k, P: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    column = tl.arange(0, K)
    place = row[:, None] * num_scores + column[None, :]
    inside = (row[:, None] < num_rows) & (column[None, :] < num_scores)
    # adding 0 makes -0 and +0 one
    score = tl.load(score_ptr + place, mask=inside, other=float("-inf")) + 0.0
    bits = score.to(tl.uint32, bitcast=True)
    # order-preserving: the larger score has the larger key
    key = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    cut = tl.zeros([P], tl.uint32)
    for step in range(32):
        # bit by bit, the largest key that at least k keys reach
        trial = cut | (tl.full([P], 1, tl.uint32) << (31 - step))
        reached = tl.sum((inside & (key >= trial[:, None])).to(tl.int32), axis=1)
        cut = tl.where(reached >= k, trial, cut)
    above = inside & (key > cut[:, None])
    tied = inside & (key == cut[:, None])
    room = k - tl.sum(above.to(tl.int32), axis=1)
    chosen = above | (tied & (tl.cumsum(tied.to(tl.int32), axis=1) <= room[:, None]))
    tl.store(mask_ptr + place, (chosen & (score > float("-inf"))).to(tl.int8), mask=inside)


def topk_mask(score_TE: Tensor, k: int) -> Tensor:
    score_TE = score_TE.contiguous()
    num_rows, num_scores = score_TE.shape
    mask_TE = torch.empty(score_TE.shape, dtype=torch.bool, device=score_TE.device)
    width = next_power_of_2(num_scores)
    rows = max(1, 4096 // width)
    _topk_mask[(triton.cdiv(num_rows, rows),)](
        score_TE, mask_TE.view(torch.int8), num_rows, num_scores, k, P=rows, K=width
    )
    return mask_TE


# the loss


@triton.jit
def _load_row(score_ptr, mass_ptr, row, num_rows, num_scores, P: tl.constexpr, K: tl.constexpr):
    """(where, scores, supported, mass) of P rows."""
    column = tl.arange(0, K)
    place = row[:, None] * num_scores + column[None, :]
    inside = (row[:, None] < num_rows) & (column[None, :] < num_scores)
    score = tl.load(score_ptr + place, mask=inside, other=float("-inf"))
    supported = score > float("-inf")
    mass = tl.where(supported, tl.load(mass_ptr + place, mask=inside, other=0.0), 0.0)
    return place, inside, score, supported, mass


@triton.jit
def _divergence(
    score_ptr, mass_ptr, divergence_ptr, lse_ptr, total_ptr, num_rows, num_scores, LEAST: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    place, inside, score, supported, mass = _load_row(score_ptr, mass_ptr, row, num_rows, num_scores, P, K)
    total = tl.sum(mass, axis=1)
    peak = tl.maximum(tl.max(score, axis=1), -1e30)
    lse = peak + tl.log(tl.maximum(tl.sum(tl.exp(score - peak[:, None]), axis=1), 1e-30))
    teacher = mass / tl.maximum(total, LEAST)[:, None]
    entropy = tl.where(teacher > 0.0, teacher * tl.log(tl.maximum(teacher, 1e-38)), 0.0)
    student = tl.where(supported, score - lse[:, None], 0.0)
    divergence = tl.where(total >= LEAST, tl.sum(entropy - teacher * student, axis=1), 0.0)
    tl.store(divergence_ptr + row, divergence, mask=row < num_rows)
    tl.store(lse_ptr + row, lse, mask=row < num_rows)
    tl.store(total_ptr + row, total, mask=row < num_rows)


@triton.jit
def _divergence_backward(
    score_ptr, mass_ptr, lse_ptr, total_ptr, grad_ptr, grad_score_ptr, num_rows, num_scores, LEAST: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    place, inside, score, supported, mass = _load_row(score_ptr, mass_ptr, row, num_rows, num_scores, P, K)
    total = tl.load(total_ptr + row, mask=row < num_rows, other=0.0)
    lse = tl.load(lse_ptr + row, mask=row < num_rows, other=0.0)
    grad = tl.load(grad_ptr + row, mask=row < num_rows, other=0.0)
    slope = tl.exp(score - lse[:, None]) - mass / tl.maximum(total, LEAST)[:, None]
    taught = supported & (total >= LEAST)[:, None]
    tl.store(grad_score_ptr + place, tl.where(taught, grad[:, None] * slope, 0.0), mask=inside)


class _IndexDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score_TK: Tensor, mass_TK: Tensor) -> tuple[Tensor, Tensor]:
        score_TK, mass_TK = score_TK.contiguous(), mass_TK.contiguous()
        num_rows, num_scores = score_TK.shape
        divergence_T, lse_T, total_T = (score_TK.new_empty(num_rows) for _ in range(3))
        width = next_power_of_2(num_scores)
        rows = max(1, 4096 // width)
        _divergence[(triton.cdiv(num_rows, rows),)](
            score_TK, mass_TK, divergence_T, lse_T, total_T, num_rows, num_scores, LEAST=LEAST_MASS, P=rows, K=width
        )
        ctx.save_for_backward(score_TK, mass_TK, lse_T, total_T)
        counted_T = total_T >= LEAST_MASS
        ctx.mark_non_differentiable(counted_T)
        return divergence_T, counted_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        score_TK, mass_TK, lse_T, total_T = ctx.saved_tensors
        num_rows, num_scores = score_TK.shape
        grad_score = torch.empty_like(score_TK)
        width = next_power_of_2(num_scores)
        rows = max(1, 4096 // width)
        _divergence_backward[(triton.cdiv(num_rows, rows),)](
            score_TK, mass_TK, lse_T, total_T, grads[0].contiguous(), grad_score, num_rows, num_scores,
            LEAST=LEAST_MASS, P=rows, K=width,
        )  # fmt: skip
        return grad_score, None


def index_divergence(score_TK: Tensor, mass_TK: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _IndexDivergence.apply(score_TK, mass_TK)
    return result
