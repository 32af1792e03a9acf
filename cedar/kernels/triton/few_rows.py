"""Products of a few rows, each weight read once a block of rows, with the rounding of the output on the way out.

T rows, I channels in, G groups, O channels out of a group, P rows of a block, B channels of a block, K of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.formats.spec import FP8, FormatSpec
from cedar.kernels.triton.chain import AHEAD, announce, wait
from cedar.kernels.triton.device import INTERPRETED, is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.quantize import round_groups

__all__ = ["FORWARD_ONLY", "fits", "grouped_linear", "norm_round", "unavailable"]

FORWARD_ONLY = ("norm_round", "grouped_linear")
_ROWS = 16
_STEP = 256
_MAX_ROWS = 512
_MAX_CHANNELS = 4096


def fits(op: str, x: Tensor, weight: Tensor) -> bool:
    """At most 512 rows of at most 4096 channels, a multiple of 32 of them; above, a library's product is faster."""
    channels = x.shape[-1]
    whole = channels % 32 == 0 and channels <= _MAX_CHANNELS and x.stride(-1) == 1
    if op == "norm_round":
        return whole and is_half_or_float(x, weight)
    return whole and 0 < x.shape[0] <= _MAX_ROWS and is_half_or_float(x, weight) and x.dtype == weight.dtype


@triton.jit
def round_channels(x, P: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr):
    """[P, K] float32 rounded in groups of channels."""
    return tl.reshape(round_groups(tl.reshape(x, (P * K // GROUP, GROUP)), KIND), (P, K))


@triton.jit
def _grouped_linear(
    x_ptr, w_ptr, y_ptr, num_rows, row_stride, group_stride, channels, outputs,
    ROUNDED: tl.constexpr, OPERAND: tl.constexpr, ONE: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    announce()
    # one program: P rows times B outputs of one group
    group = tl.program_id(2)
    row = tl.program_id(0) * P + tl.arange(0, P)
    column = tl.program_id(1) * B + tl.arange(0, B)
    num_groups = tl.num_programs(2)
    x_ptr += group * group_stride + row[:, None] * row_stride
    w_ptr += group.to(tl.int64) * outputs * channels + column[:, None] * channels
    known, wanted = (row < num_rows)[:, None], (column < outputs)[:, None]
    channel = tl.arange(0, K)[None, :]
    total = tl.zeros([P, B], tl.float32)
    if ONE:
        # all of the weight is read while the kernel before still runs
        w = tl.load(w_ptr + channel, mask=wanted & (channel < channels), other=0.0)
        wait()
        x = tl.load(x_ptr + channel, mask=known & (channel < channels), other=0.0)
        total = tl.dot(x.to(OPERAND), tl.trans(w.to(OPERAND)), total, input_precision="ieee")
    else:
        wait()
        for start in range(0, channels, K):
            inside = channel < channels - start
            x = tl.load(x_ptr + start + channel, mask=known & inside, other=0.0)
            w = tl.load(w_ptr + start + channel, mask=wanted & inside, other=0.0)
            total = tl.dot(x.to(OPERAND), tl.trans(w.to(OPERAND)), total, input_precision="ieee")
    place = (row[:, None] * num_groups + group) * outputs + column[None, :]
    inside = (row[:, None] < num_rows) & (column[None, :] < outputs)
    total = total.to(y_ptr.dtype.element_ty)
    if ROUNDED:
        # the outputs of a program are one group
        total = round_groups(total.to(tl.float32), 0)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=inside)


def grouped_linear(x_TGI: Tensor, weight_GOI: Tensor, spec: FormatSpec | None) -> Tensor:
    num_rows, num_groups, channels = x_TGI.shape
    outputs = weight_GOI.shape[1]
    weight_GOI = weight_GOI.contiguous()
    y_TGO = torch.empty(num_rows, num_groups, outputs, device=x_TGI.device, dtype=x_TGI.dtype)
    assert spec is None or spec == FP8
    # a group of the format, where the result is rounded
    width = 32 if spec is not None else min(32, max(16, next_power_of_2(outputs)))
    grid = triton.cdiv(num_rows, _ROWS), triton.cdiv(outputs, width), num_groups
    step = min(_STEP, max(32, next_power_of_2(channels)))
    _grouped_linear[grid](
        x_TGI, weight_GOI, y_TGO, num_rows, x_TGI.stride(0), x_TGI.stride(1), channels, outputs,
        ROUNDED=spec is not None, OPERAND=operand(x_TGI), ONE=channels <= step, P=_ROWS, B=width, K=step,
        num_warps=4, num_stages=2,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return y_TGO


def operand(x: Tensor) -> tl.dtype:
    """What a product multiplies: the interpreter has no bfloat16 product."""
    return tl.bfloat16 if x.dtype == torch.bfloat16 and not INTERPRETED else tl.float32


@triton.jit
def norm_round_row(x, gain, channels, eps, dtype: tl.constexpr, ROUNDED: tl.constexpr, B: tl.constexpr):
    """One row, float32, normed to `dtype` and rounded."""
    inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / channels + eps)
    y = (x * inverse * gain).to(dtype)
    if ROUNDED:
        grouped = tl.reshape(y.to(tl.float32), (B // 32, 32))
        y = tl.reshape(round_groups(grouped, 0), (B,)).to(dtype)
    return y


@triton.jit
def _norm_round(x_ptr, gain_ptr, y_ptr, row_stride, channels, eps, ROUNDED: tl.constexpr, B: tl.constexpr):
    announce()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, B)
    inside = channel < channels
    gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    wait()
    x = tl.load(x_ptr + row * row_stride + channel, mask=inside, other=0.0).to(tl.float32)
    y = norm_round_row(x, gain, channels, eps, y_ptr.dtype.element_ty, ROUNDED, B)
    tl.store(y_ptr + row * channels + channel, y, mask=inside)


def norm_round(x_TI: Tensor, gain_I: Tensor, eps: float, spec: FormatSpec | None) -> Tensor:
    assert spec is None or spec == FP8
    channels = x_TI.shape[-1]
    y_TI = torch.empty(x_TI.shape, device=x_TI.device, dtype=x_TI.dtype)
    if x_TI.shape[0]:
        width = max(32, next_power_of_2(channels))
        _norm_round[(x_TI.shape[0],)](
            x_TI,
            gain_I,
            y_TI,
            x_TI.stride(0),
            channels,
            eps,
            ROUNDED=spec is not None,
            B=width,
            num_warps=4,
            launch_pdl=AHEAD,
        )
    return y_TI
