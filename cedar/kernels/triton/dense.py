"""Norm, rotation and SwiGLU with their gradients: each reads its input once.

T rows, I channels, P rows of a block, B channels of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable

__all__ = ["fits", "rms_norm", "rotate", "swiglu", "unavailable"]

# elements of a block that one program holds
_BLOCK = 4096


def fits(op: str, x: Tensor, *others: Tensor) -> bool:
    """bfloat16 or float32, any row of at most 16,384 channels."""
    return is_half_or_float(x) and x.numel() > 0 and x.shape[-1] <= 16384


@triton.jit
def _rms_norm(x_ptr, gain_ptr, y_ptr, inverse_ptr, num_rows, channels, eps, P: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    channel = tl.arange(0, B)
    place = row[:, None] * channels + channel[None, :]
    inside = (row[:, None] < num_rows) & (channel[None, :] < channels)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    # a row past the end has a mean of 0, and eps may vanish in float32
    mean = tl.where(row < num_rows, tl.sum(x * x, axis=1) / channels, 1.0) + eps
    inverse = 1.0 / tl.sqrt_rn(mean)
    tl.store(inverse_ptr + row, inverse, mask=row < num_rows)
    tl.store(y_ptr + place, (x * inverse[:, None] * gain[None, :]).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(
    x_ptr, gain_ptr, inverse_ptr, grad_ptr, grad_x_ptr, grad_gain_ptr, num_rows, channels,
    BLOCKS: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, B)
    gain = tl.load(gain_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    grad_gain = tl.zeros([B], tl.float32)
    for block in range(BLOCKS):
        row = (tl.program_id(0).to(tl.int64) * BLOCKS + block) * P + tl.arange(0, P)
        place = row[:, None] * channels + channel[None, :]
        inside = (row[:, None] < num_rows) & (channel[None, :] < channels)
        inverse = tl.load(inverse_ptr + row, mask=row < num_rows, other=0.0)[:, None]
        normed = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) * inverse
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad_gain += tl.sum(grad * normed, axis=0)
        grad = grad * gain[None, :]
        grad_x = (grad - normed * (tl.sum(grad * normed, axis=1) / channels)[:, None]) * inverse
        tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_gain_ptr + tl.program_id(0) * channels + channel, grad_gain, mask=channel < channels)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, gain_I: Tensor, eps: float) -> Tensor:
        x_TI = x_TI.contiguous()
        channels = x_TI.shape[-1]
        num_rows = x_TI.numel() // channels
        y_TI = torch.empty_like(x_TI)
        inverse_T = torch.empty(num_rows, device=x_TI.device, dtype=torch.float32)
        width = next_power_of_2(channels)
        rows = max(1, _BLOCK // width)
        _rms_norm[(triton.cdiv(num_rows, rows),)](
            x_TI, gain_I, y_TI, inverse_T, num_rows, channels, eps, P=rows, B=width
        )
        ctx.save_for_backward(x_TI, gain_I, inverse_T)
        return y_TI

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_TI, gain_I, inverse_T = ctx.saved_tensors
        num_rows, channels = inverse_T.shape[0], x_TI.shape[-1]
        width = next_power_of_2(channels)
        rows = max(1, _BLOCK // width)
        # some programs a core, each with many blocks: few shares of the gain's gradient to add up
        blocks = max(1, min(16, num_rows // (rows * 512)))
        programs = triton.cdiv(num_rows, rows * blocks)
        grad_x = torch.empty_like(x_TI)
        grad_gain = torch.empty(programs, channels, device=x_TI.device, dtype=torch.float32)
        _rms_norm_backward[(programs,)](
            x_TI, gain_I, inverse_T, grads[0].contiguous(), grad_x, grad_gain, num_rows, channels,
            BLOCKS=blocks, P=rows, B=width,
        )  # fmt: skip
        return grad_x, grad_gain.sum(0).to(gain_I.dtype), None


def rms_norm(x_TI: Tensor, gain_I: Tensor, eps: float) -> Tensor:
    result: Tensor = _RMSNorm.apply(x_TI, gain_I, eps)
    return result


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, y_ptr, num_rows, num_heads, channels, num_angles, SIGN: tl.constexpr,
    P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    # one row here is one head of one position
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    channel = tl.arange(0, B)
    place = row[:, None] * channels + channel[None, :]
    inside = (row[:, None] < num_rows) & (channel[None, :] < channels)
    turned = channel - (channels - 2 * num_angles)
    turns = inside & (turned >= 0)[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    odd = (turned & 1) == 1
    partner = tl.load(x_ptr + place + tl.where(odd, -1, 1)[None, :], mask=turns, other=0.0).to(tl.float32)
    angle = (row // num_heads)[:, None] * num_angles + (turned >> 1)[None, :]
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0) * SIGN
    y = x * cos + partner * sin * tl.where(odd, 1.0, -1.0)[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


def _turn(x_THI: Tensor, cos_TR: Tensor, sin_TR: Tensor, sign: float) -> Tensor:
    x_THI = x_THI.contiguous()
    num_heads, channels = x_THI.shape[-2:]
    num_rows = x_THI.numel() // channels
    y_THI = torch.empty_like(x_THI)
    width = next_power_of_2(channels)
    rows = max(1, _BLOCK // width)
    _rotate[(triton.cdiv(num_rows, rows),)](
        x_THI, cos_TR, sin_TR, y_THI, num_rows, num_heads, channels, cos_TR.shape[-1],
        SIGN=sign, P=rows, B=width,
    )  # fmt: skip
    return y_THI


class _Rotate(torch.autograd.Function):
    """The gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x_THI: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
        ctx.save_for_backward(cos_TR, sin_TR)
        return _turn(x_THI, cos_TR, sin_TR, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos_TR, sin_TR = ctx.saved_tensors
        return _turn(grads[0], cos_TR, sin_TR, -1.0), None, None


def rotate(x_THI: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    result: Tensor = _Rotate.apply(x_THI, cos_TR, sin_TR)
    return result


@triton.jit
def _swiglu(gate_ptr, up_ptr, y_ptr, size, limit, B: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = place < size
    gate = tl.minimum(tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32), limit)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(y_ptr + place, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _swiglu_backward(gate_ptr, up_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr, size, limit, B: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = place < size
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(tl.minimum(gate, limit))
    cut = tl.minimum(tl.maximum(up, -limit), limit)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    grad_gate = tl.where(gate <= limit, grad * cut * slope, 0.0)
    grad_up = tl.where(tl.abs(up) <= limit, grad * tl.minimum(gate, limit) * sigmoid, 0.0)
    tl.store(grad_gate_ptr + place, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_up_ptr + place, grad_up.to(grad_up_ptr.dtype.element_ty), mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TI: Tensor, up_TI: Tensor, limit: float) -> Tensor:
        gate_TI, up_TI = gate_TI.contiguous(), up_TI.contiguous()
        y_TI = torch.empty(gate_TI.shape, device=gate_TI.device, dtype=torch.float32)
        _swiglu[(triton.cdiv(gate_TI.numel(), 1024),)](gate_TI, up_TI, y_TI, gate_TI.numel(), limit, B=1024)
        ctx.save_for_backward(gate_TI, up_TI)
        ctx.limit = limit
        return y_TI

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate_TI, up_TI = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate_TI), torch.empty_like(up_TI)
        _swiglu_backward[(triton.cdiv(gate_TI.numel(), 1024),)](
            gate_TI, up_TI, grads[0].contiguous(), grad_gate, grad_up, gate_TI.numel(), ctx.limit, B=1024
        )
        return grad_gate, grad_up, None


def swiglu(gate_TI: Tensor, up_TI: Tensor, limit: float) -> Tensor:
    result: Tensor = _SwiGLU.apply(gate_TI, up_TI, limit)
    return result
