"""Index scores of whole packs: heads are added up in registers, the dots never reach memory.

P rows against J entries, one head after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.triton.device import is_half_or_float, unavailable

__all__ = ["fits", "masked_index_scores", "unavailable"]

_ROWS, _KEYS = 64, 64


def fits(op: str, query_BSHI: Tensor, *others: Tensor) -> bool:
    """bfloat16 or float32; 16 to 128 index channels, a power of two."""
    channels = query_BSHI.shape[-1]
    small = 16 <= channels <= 128 and channels & (channels - 1) == 0
    return small and is_half_or_float(query_BSHI) and query_BSHI.numel() > 0


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
