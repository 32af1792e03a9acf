"""Row-wise products, norms and rotations, written plainly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.formats.fp8 import dequantize_tiles
from cedar.formats.spec import FormatSpec
from cedar.kernels import dense as ops
from cedar.kernels.quantize import round_rows


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return F.linear(x_TI, weight_OI if weight_OI.dtype == x_TI.dtype else weight_OI.to(x_TI.dtype))


def linear_float32(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return ops.linear(x_TI.float(), weight_OI.float())


def rms_norm(x_TI: Tensor, gain_I: Tensor, eps: float) -> Tensor:
    x32_TI = x_TI.float()
    scale_T1 = torch.rsqrt(x32_TI.square().mean(-1, keepdim=True) + eps)
    return (x32_TI * scale_T1 * gain_I.float()).to(x_TI.dtype)


def rotate(x_THI: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    num_rotated = 2 * cos_TR.shape[-1]
    still_THS, turning_THR = x_THI.split([x_THI.shape[-1] - num_rotated, num_rotated], dim=-1)
    even_THR, odd_THR = turning_THR.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    turned_THR2 = torch.stack([even_THR * cos_T1R - odd_THR * sin_T1R, even_THR * sin_T1R + odd_THR * cos_T1R], dim=-1)
    return torch.cat([still_THS, turned_THR2.flatten(-2).to(x_THI.dtype)], dim=-1)


def swiglu(gate_TI: Tensor, up_TI: Tensor, limit: float) -> Tensor:
    return F.silu(gate_TI.float().clamp(max=limit)) * up_TI.float().clamp(-limit, limit)


def swiglu_round(x_TX: Tensor, limit: float, spec: FormatSpec | None) -> Tensor:
    gate_TI, up_TI = x_TX.chunk(2, dim=-1)
    inner_TI = ops.swiglu(gate_TI, up_TI, limit).to(x_TX.dtype)
    return inner_TI if spec is None else round_rows(inner_TI, spec)


def add_round(first_TD: Tensor, second_TD: Tensor) -> Tensor:
    return (first_TD.float() + second_TD.float()).to(second_TD.dtype)


def norm_round(x_TI: Tensor, gain_I: Tensor, eps: float, spec: FormatSpec | None) -> Tensor:
    normed_TI = ops.rms_norm(x_TI, gain_I, eps)
    return normed_TI if spec is None else round_rows(normed_TI, spec)


def grouped_linear(x_TGI: Tensor, weight_GOI: Tensor, spec: FormatSpec | None) -> Tensor:
    groups = []
    for x_TI, weight_OI in zip(x_TGI.unbind(1), weight_GOI, strict=True):
        y_TO = ops.linear(x_TI, weight_OI)
        groups.append(y_TO if spec is None else round_rows(y_TO, spec))
    # one group needs no copy
    return torch.stack(groups, dim=1) if len(groups) > 1 else groups[0].unsqueeze(1)


def packed_linear(x_TI: Tensor, codes_OI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    return ops.linear(x_TI if spec is None else round_rows(x_TI, spec), dequantize_tiles(codes_OI, scales, x_TI.dtype))


def packed_grouped_linear(x_TGI: Tensor, codes_GOI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    weights = [dequantize_tiles(*group, x_TGI.dtype) for group in zip(codes_GOI, scales, strict=True)]
    return ops.grouped_linear(x_TGI, torch.stack(weights), spec)
