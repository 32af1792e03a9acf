"""Fake quantization in one pass: the scale, the rounding and the way back, for a group at a time."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8, FormatSpec
from cedar.kernels.triton.device import is_half_or_float, unavailable

__all__ = ["fits", "round_rows", "unavailable"]

_KIND = {FP8: 0, FP4_MAIN: 1, FP4_INDEX: 2}
_GROUPS = 64


def fits(op: str, x: Tensor) -> bool:
    """bfloat16 or float32."""
    return is_half_or_float(x) and x.numel() > 0


@triton.jit
def round_to_grid(x, MIN_EXPONENT_BITS: tl.constexpr, SHIFTER: tl.constexpr):
    """`formats.fp8.round_to_grid_`: the adder's own rounding, ties to the even code."""
    bits = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, MIN_EXPONENT_BITS)
    shift = bits.to(tl.float32, bitcast=True) * SHIFTER
    return (x + shift) - shift


@triton.jit
def ceil_power_of_two(x):
    return ((x.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power_of_two(x):
    """1 / x, exactly, without the division's cost; of infinity something infinite."""
    return ((254 << 23) - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def round_groups(x, KIND: tl.constexpr):
    """Groups along the last axis, float32 [groups, channels], as they read back; NaN spreads over its group."""
    # by their bits NaN are larger than all else: one maximum finds both
    peak = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    amax, broken = peak.to(tl.float32, bitcast=True), peak > 0x7F800000
    if KIND == 0:
        scale = ceil_power_of_two(tl.maximum(amax, 1e-4) * (1.0 / 448.0))[:, None]
        y = round_to_grid(x * inverse_power_of_two(scale), (127 - 6) << 23, 1.5 * 2**20) * scale
    elif KIND == 1:
        amax = tl.minimum(tl.maximum(amax, 6.0 * 2.0**-9), 6.0 * 448.0)
        scale = round_to_grid(tl.div_rn(amax, 6.0), (127 - 6) << 23, 1.5 * 2**20)[:, None]
        quotient = tl.minimum(tl.maximum(tl.div_rn(x, scale), -6.0), 6.0)
        y = round_to_grid(quotient, 127 << 23, 1.5 * 2**22) * scale
    else:
        scale = ceil_power_of_two(tl.maximum(amax, 6.0 * 2.0**-126) * (1.0 / 6.0))[:, None]
        y = round_to_grid(x * inverse_power_of_two(scale), 127 << 23, 1.5 * 2**22) * scale
    return tl.where(broken[:, None], float("nan"), y)


@triton.jit
def _round_rows(x_ptr, y_ptr, num_groups, KIND: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (group < num_groups)[:, None]
    y = round_groups(tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


class _RoundRows(torch.autograd.Function):
    """The rounded value, the gradient as it came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: FormatSpec) -> Tensor:
        x = x.contiguous()
        y, num_groups = torch.empty_like(x), x.numel() // spec.group
        _round_rows[(triton.cdiv(num_groups, _GROUPS),)](
            x, y, num_groups, KIND=_KIND[spec], GROUP=spec.group, P=_GROUPS
        )
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def round_rows(x: Tensor, spec: FormatSpec) -> Tensor:
    result: Tensor = _RoundRows.apply(x, spec)
    return result
