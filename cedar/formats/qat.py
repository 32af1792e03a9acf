"""Fake quantization: what a value is after it was stored and read back, with a straight-through gradient.

Same scales, grids and roundings as the codecs, without making the bytes. The gradient passes as it came:
autograd through a float8 cast would round the gradient itself and lose everything below 2 ** -9.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cedar.errors import ShapeError
from cedar.formats import fp4, fp8
from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8, FormatSpec


def _round_fp8(x_NG: Tensor) -> Tensor:
    scale_N1 = fp8.fp8_scale(x_NG.abs().amax(-1, keepdim=True))
    return fp8.round_to_e4m3_(x_NG.div(scale_N1)).mul_(scale_N1)


def _round_fp4_index(x_NG: Tensor) -> Tensor:
    scale_N1 = fp4.index_scale(x_NG.abs().amax(-1, keepdim=True))
    return fp4.round_to_e2m1_(x_NG.div(scale_N1)).mul_(scale_N1)


def _round_fp4_main(x_NG: Tensor) -> Tensor:
    scale_N1 = fp4.main_scale(x_NG.abs().amax(-1, keepdim=True))
    quotient_NG = x_NG.div(scale_N1).clamp_(-fp4.E2M1_MAX, fp4.E2M1_MAX)
    return fp4.round_to_e2m1_(quotient_NG).mul_(scale_N1)


_ROUND = {FP8: _round_fp8, FP4_INDEX: _round_fp4_index, FP4_MAIN: _round_fp4_main}


def _round(x: Tensor, spec: FormatSpec) -> Tensor:
    if x.shape[-1] % spec.group:
        raise ShapeError(f"{x.shape[-1]} channels do not divide into groups of {spec.group}: expected a multiple")
    y = _ROUND[spec](x.float().reshape(-1, spec.group)).view(x.shape)
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def _round_tiles(weight_OI: Tensor) -> Tensor:
    return fp8.dequantize_tiles(*fp8.quantize_tiles(weight_OI), weight_OI.dtype)


class _StraightThrough(torch.autograd.Function):
    """Value of `rounding(x)`, gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Any, *arguments: Any) -> Tensor:
        return rounding(x, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


def fake_quantize(x: Tensor, spec: FormatSpec) -> Tensor:
    """`x` as it reads back from `spec`, in x's dtype; the gradient passes unchanged.

    Args:
        x: `[..., C]` float32 or bfloat16, C a multiple of the group.
        spec: FP8, FP4_MAIN or FP4_INDEX.

    Returns:
        A new tensor. Equal to dequantize(quantize(x)) but for the sign of zeros; a group that holds a NaN,
        and outside FP4_MAIN an infinity, comes out as NaN.

    Raises:
        ShapeError: C is not a multiple of the group.

    Cost: 13 to 15 tensor operations whatever the size.

    Source: architecture.md 4.4; straight-through training.md 1.6.
    """
    if x.requires_grad and torch.is_grad_enabled():
        result: Tensor = _StraightThrough.apply(x, _round, spec)
        return result
    return _round(x, spec)


def fake_quantize_tiles(weight_OI: Tensor) -> Tensor:
    """A weight matrix as it reads back from FP8 with 32 x 32 tiles; the gradient passes unchanged."""
    if weight_OI.requires_grad and torch.is_grad_enabled():
        result: Tensor = _StraightThrough.apply(weight_OI, _round_tiles)
        return result
    return _round_tiles(weight_OI)
