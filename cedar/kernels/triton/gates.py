"""What stands between an expert's products and behind them, with the rounding that its reader wants.

T rows, I inner channels, D channels, B of them a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.formats.spec import FP8, FormatSpec
from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import is_half_or_float, unavailable
from cedar.kernels.triton.quantize import round_groups

__all__ = ["FORWARD_ONLY", "add_round", "fits", "swiglu_round", "unavailable"]

FORWARD_ONLY = ("swiglu_round", "add_round")
_BLOCK = 512


def fits(op: str, x: Tensor, *others: Tensor) -> bool:
    """Whole groups of 32 channels, rows of any stride; sums of contiguous rows."""
    if op == "add_round":
        return x.numel() > 0 and x.is_contiguous() and others[0].is_contiguous() and is_half_or_float(x, *others)
    return x.shape[0] > 0 and x.shape[1] % 64 == 0 and is_half_or_float(x) and x.stride(1) == 1


@triton.jit
def _swiglu_round(x_ptr, y_ptr, row_stride, num_inner, limit, ROUNDED: tl.constexpr, B: tl.constexpr):
    follow()
    row = tl.program_id(0).to(tl.int64)
    inner = tl.program_id(1) * B + tl.arange(0, B)
    inside = inner < num_inner
    gate = tl.load(x_ptr + row * row_stride + inner, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * row_stride + num_inner + inner, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    y = (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty)
    if ROUNDED:
        y = tl.reshape(round_groups(tl.reshape(y.to(tl.float32), (B // 32, 32)), 0), (B,))
    tl.store(y_ptr + row * num_inner + inner, y.to(y_ptr.dtype.element_ty), mask=inside)


def swiglu_round(x_TX: Tensor, limit: float, spec: FormatSpec | None) -> Tensor:
    assert spec is None or spec == FP8
    num_rows, num_inner = x_TX.shape[0], x_TX.shape[1] // 2
    y_TI = torch.empty(num_rows, num_inner, device=x_TX.device, dtype=x_TX.dtype)
    _swiglu_round[(num_rows, triton.cdiv(num_inner, _BLOCK))](
        x_TX, y_TI, x_TX.stride(0), num_inner, limit, ROUNDED=spec is not None, B=_BLOCK, num_warps=4, launch_pdl=AHEAD
    )
    return y_TI


@triton.jit
def _add_round(first_ptr, second_ptr, y_ptr, size, B: tl.constexpr):
    follow()
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = place < size
    first = tl.load(first_ptr + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(second_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, (first + second).to(y_ptr.dtype.element_ty), mask=inside)


def add_round(first_TD: Tensor, second_TD: Tensor) -> Tensor:
    y_TD = torch.empty_like(second_TD)
    size = y_TD.numel()
    _add_round[(triton.cdiv(size, _BLOCK),)](first_TD, second_TD, y_TD, size, B=_BLOCK, num_warps=4, launch_pdl=AHEAD)
    return y_TD
