"""Products of few rows with a weight in E4M3 under 32 x 32 scales, each byte read once for a block of rows.

Long inputs are cut into shares that run side by side and are added by a second kernel, in a fixed order.

T rows, I channels in, O channels out, P rows of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.formats.spec import FP8, FormatSpec
from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import is_half_or_float, unavailable
from cedar.kernels.triton.few_rows import operand
from cedar.kernels.triton.quantize import round_rows
from cedar.kernels.triton.stored import e8m0_value

__all__ = ["FORWARD_ONLY", "fits", "packed_linear", "unavailable"]

FORWARD_ONLY = ("packed_linear",)
_MAX_ROWS = 128
_STEP = 128
# programs that keep a Hopper chip's memory busy
_PROGRAMS = 528


def fits(op: str, x: Tensor, codes: Tensor) -> bool:
    """At most 128 rows, whole groups of 32 channels."""
    return 0 < x.shape[0] <= _MAX_ROWS and x.shape[1] % 32 == 0 and is_half_or_float(x) and x.stride(1) == 1


@triton.jit
def _packed_linear(
    x_ptr, codes_ptr, scales_ptr, y_ptr, num_rows, row_stride, channels, outputs, steps_a_share,
    OPERAND: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    follow()
    # one program: P rows times one row of tiles, 32 outputs, over a share of the input
    row = tl.program_id(1) * P + tl.arange(0, P)
    tile = tl.program_id(0)
    column = tile * 32 + tl.arange(0, 32)
    share = tl.program_id(2)
    total = tl.zeros([P, 32], tl.float32)
    group = tl.arange(0, K // 32)
    first = share * steps_a_share * K
    for start in range(first, tl.minimum(first + steps_a_share * K, channels), K):
        channel = start + tl.arange(0, K)
        code = tl.load(
            codes_ptr + column[:, None].to(tl.int64) * channels + channel[None, :],
            mask=(column[:, None] < outputs) & (channel[None, :] < channels),
            other=0,
        )
        exponent = tl.load(
            scales_ptr + tile * (channels // 32) + start // 32 + group,
            mask=(start // 32 + group) * 32 < channels,
            other=127,
        )
        # E4M3 in float32's fields is 2**-120 of its value; the product of both has eight bits at most
        wide = code.to(tl.int32)
        value = (((wide & 0x7F) << 20) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)
        scale = e8m0_value(exponent) * 1.329227995784916e36
        spread = tl.reshape(tl.broadcast_to(scale[:, None], (K // 32, 32)), (1, K))
        x = tl.load(
            x_ptr + row[:, None] * row_stride + channel[None, :],
            mask=(row[:, None] < num_rows) & (channel[None, :] < channels),
            other=0.0,
        )
        w = (value * spread).to(OPERAND)
        total = tl.dot(x.to(OPERAND), tl.trans(w), total, input_precision="ieee")
    place = (share * num_rows + row[:, None]) * outputs + column[None, :]
    inside = (row[:, None] < num_rows) & (column[None, :] < outputs)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_shares(partial_ptr, y_ptr, size, SHARES: tl.constexpr, B: tl.constexpr):
    follow()
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    total = tl.zeros([B], tl.float32)
    for share in tl.static_range(SHARES):
        total += tl.load(partial_ptr + share * size + place, mask=place < size, other=0.0)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=place < size)


def packed_linear(x_TI: Tensor, codes_OI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    assert spec is None or spec == FP8
    if spec is not None:
        # once, and not by every program that reads a row
        x_TI = round_rows(x_TI, spec)
    (num_rows, channels), outputs = x_TI.shape, codes_OI.shape[0]
    rows = 16 if num_rows <= 16 else 32
    tiles, blocks, steps = triton.cdiv(outputs, 32), triton.cdiv(num_rows, rows), triton.cdiv(channels, _STEP)
    shares = max(1, min(steps // 4, _PROGRAMS // (tiles * blocks)))
    steps_a_share = triton.cdiv(steps, shares)
    shares = triton.cdiv(steps, steps_a_share)
    y_TO = torch.empty(num_rows, outputs, device=x_TI.device, dtype=x_TI.dtype)
    target = y_TO
    if shares > 1:
        target = torch.empty(shares, num_rows, outputs, device=x_TI.device, dtype=torch.float32)
    _packed_linear[(tiles, blocks, shares)](
        x_TI, codes_OI, scales, target, num_rows, x_TI.stride(0), channels, outputs, steps_a_share,
        OPERAND=operand(x_TI), P=rows, K=_STEP, num_warps=4, num_stages=4,
        launch_pdl=AHEAD,
    )  # fmt: skip
    if shares > 1:
        size = y_TO.numel()
        _add_shares[(triton.cdiv(size, 512),)](target, y_TO, size, SHARES=shares, B=512, launch_pdl=AHEAD)
    return y_TO
