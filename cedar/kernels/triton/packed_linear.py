"""Products with a weight in E4M3 under 32 x 32 scales, as the checkpoint stores it.

Few rows: the weight is the long side of the product and the rows the short one, each byte is read once a block of
rows and widened on its way from shared memory to the product, in planes (even channels, odd channels): two codes a
word become two operands without a shuffle. Long inputs are cut into shares that run side by side and are added by
a second kernel, in a fixed order. One row has a kernel of its own (`one_row`). Many rows: the weight is widened once
into a passing copy for a library's product.

T rows, G groups, I channels in, O channels out of a group, P rows of a block, B outputs of a block, K channels of a
step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.formats.spec import FP8, FormatSpec
from cedar.kernels.triton import one_row
from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import is_half_or_float, unavailable
from cedar.kernels.triton.few_rows import operand, round_channels
from cedar.kernels.triton.quantize import round_groups, round_rows
from cedar.kernels.triton.stored import e4m3_value, e8m0_value

__all__ = ["FORWARD_ONLY", "fits", "packed_grouped_linear", "packed_linear", "unavailable"]

FORWARD_ONLY = ("packed_linear", "packed_grouped_linear")
# above, a passing copy in bfloat16 costs less than reading the weight once more for each block of rows
_MAX_ROWS = 128
# what keeps a Hopper chip's memory busy
_WARPS = 2112


def fits(op: str, x: Tensor, codes: Tensor) -> bool:
    """Whole groups of 32 channels."""
    return x.numel() > 0 and x.shape[-1] % 32 == 0 and is_half_or_float(x) and x.stride(-1) == 1


class Blocks(NamedTuple):
    """How few rows are shared out: sizes as above, warps, steps under way."""

    P: int
    B: int
    K: int
    warps: int
    stages: int


def _blocks(num_rows: int, dtype: torch.dtype) -> Blocks:
    if num_rows <= 16:
        return Blocks(16, 64, 128, 4, 4)
    if dtype == torch.float32:
        # multiplied without tensor cores; larger blocks of it do not fit the registers
        return Blocks(32, 64, 128, 4, 3)
    if num_rows <= 32:
        return Blocks(32, 128, 128, 8, 4)
    return Blocks(64, 128, 128, 8, 3)


@triton.jit
def _planes(word, OPERAND: tl.constexpr):
    """uint16 of two E4M3 codes -> (even, odd) channel, 2**-120 of their values."""
    if OPERAND == tl.bfloat16:
        # two words of a register at once: sign to the top, the rest to the lower end of bfloat16's exponent
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 rest, word;
            mov.b32 word, $2;
            shl.b32 rest, word, 4;
            and.b32 rest, rest, 0x07F007F0;
            shl.b32 $0, word, 8;
            lop3.b32 $0, $0, 0x80008000, rest, 0xEA;
            shr.u32 rest, word, 4;
            and.b32 rest, rest, 0x07F007F0;
            lop3.b32 $1, word, 0x80008000, rest, 0xEA;
            }""",
            "=&r,=&r,r",
            [word],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        wide = word.to(tl.int32)
        even = (((wide & 0x7F) << 20) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)
        odd = (((wide & 0x7F00) << 12) | ((wide & 0x8000) << 16)).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def _factors(exponent, OPERAND: tl.constexpr, B: tl.constexpr, K: tl.constexpr):
    """[B, K / 32] scale bytes -> [B, K / 2], 2**60 of the scales; those above 2**67 become infinite."""
    bits = tl.minimum(exponent.to(tl.int32) + 60, 255) << 23
    factor = bits.to(tl.float32, bitcast=True).to(OPERAND)
    return tl.reshape(tl.broadcast_to(factor[:, :, None], (B, K // 32, 16)), (B, K // 2))


@triton.jit(do_not_specialize=["num_rows", "steps_a_share"])
def _packed_linear(
    x_ptr, codes_ptr, scales_ptr, y_ptr, num_rows, row_stride, group_stride, channels, outputs, steps_a_share,
    SHARED: tl.constexpr, ROUNDED: tl.constexpr, OPERAND: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    follow()
    # one program: B outputs of one group for P rows, over a share of the input
    tiles = tl.cdiv(outputs, B)
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    num_groups = tl.num_programs(0) // tiles
    row = tl.program_id(1) * P + tl.arange(0, P)
    share = tl.program_id(2)
    output = tile * B + tl.arange(0, B)
    first = share * steps_a_share * K
    last = tl.minimum(first + steps_a_share * K, channels)
    codes_ptr += (group * outputs + tile * B).to(tl.int64) * channels
    inner = tl.arange(0, B)
    x_ptr += group * group_stride
    pair, part = tl.arange(0, K // 2), tl.arange(0, K // 32)
    scale_row = scales_ptr + ((group * tl.cdiv(outputs, 32) + output // 32) * (channels // 32))[:, None]
    word_row = codes_ptr.to(tl.pointer_type(tl.uint16)) + (inner * (channels // 2))[:, None]
    x_row = x_ptr + (row * row_stride)[:, None]
    known_row, known_output = (row < num_rows)[:, None], (output < outputs)[:, None]
    total = tl.zeros([B, P], tl.float32)
    place = first // 32 + part
    exponent = tl.load(scale_row + place[None, :], mask=known_output & (place * 32 < channels)[None, :], other=0)
    for start in range(first, last, K):
        # the scales of the next step, asked for a step early
        place = (start + K) // 32 + part
        next_one = tl.load(scale_row + place[None, :], mask=known_output & (place * 32 < channels)[None, :], other=0)
        inside = (start // 2 + pair < channels // 2)[None, :]
        word = tl.load(word_row + (start // 2 + pair)[None, :], mask=known_output & inside, other=0)
        if OPERAND == tl.bfloat16:
            pairs = x_ptr.to(tl.pointer_type(tl.int32)) + (row * (row_stride // 2))[:, None]
            both = tl.load(pairs + (start // 2 + pair)[None, :], mask=known_row & inside, other=0)
            x_even = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
            x_odd = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            at = x_row + (start + 2 * pair)[None, :]
            x_even = tl.load(at, mask=known_row & inside, other=0.0).to(OPERAND)
            x_odd = tl.load(at + 1, mask=known_row & inside, other=0.0).to(OPERAND)
        even, odd = _planes(word, OPERAND)
        factor = _factors(exponent, OPERAND, B, K)
        total = tl.dot(even * factor, tl.trans(x_even), total, input_precision="ieee")
        total = tl.dot(odd * factor, tl.trans(x_odd), total, input_precision="ieee")
        exponent = next_one
    # back from 2**-120 and 2**60
    y = tl.trans(total * 1152921504606846976.0)
    if not SHARED:
        y = y.to(y_ptr.dtype.element_ty)
        if ROUNDED:
            y = round_channels(y.to(tl.float32), P, B, 0, 32).to(y_ptr.dtype.element_ty)
    target = ((share * num_rows + row[:, None]).to(tl.int64) * num_groups + group) * outputs + output[None, :]
    tl.store(y_ptr + target, y, mask=(row < num_rows)[:, None] & (output < outputs)[None, :])


@triton.jit
def _add_shares(partial_ptr, y_ptr, size, SHARES: tl.constexpr, ROUNDED: tl.constexpr, B: tl.constexpr):
    follow()
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    total = tl.zeros([B], tl.float32)
    for share in tl.static_range(SHARES):
        total += tl.load(partial_ptr + share * size + place, mask=place < size, other=0.0)
    y = total.to(y_ptr.dtype.element_ty)
    if ROUNDED:
        y = tl.reshape(round_groups(tl.reshape(y.to(tl.float32), (B // 32, 32)), 0), (B,)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + place, y, mask=place < size)


@triton.jit
def _round(x_ptr, y_ptr, row_stride, channels, B: tl.constexpr):
    follow()
    channel = tl.program_id(1) * B + tl.arange(0, B)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * row_stride + channel, mask=channel < channels, other=0.0).to(tl.float32)
    y = tl.reshape(round_groups(tl.reshape(x, (B // 32, 32)), 0), (B,))
    tl.store(y_ptr + row * channels + channel, y.to(y_ptr.dtype.element_ty), mask=channel < channels)


def _rounded(x_TI: Tensor) -> Tensor:
    """Rows rounded to FP8 once, and not by every program that reads them."""
    num_rows, channels = x_TI.shape
    y_TI = torch.empty(x_TI.shape, device=x_TI.device, dtype=x_TI.dtype)
    _round[(num_rows, triton.cdiv(channels, 1024))](
        x_TI, y_TI, x_TI.stride(0), channels, B=1024, num_warps=4, launch_pdl=AHEAD
    )
    return y_TI


@triton.jit
def _widen(codes_ptr, scales_ptr, y_ptr, channels, outputs, B: tl.constexpr, K: tl.constexpr):
    follow()
    group = tl.program_id(2).to(tl.int64)
    output = tl.program_id(1) * B + tl.arange(0, B)
    channel = tl.program_id(0) * K + tl.arange(0, K)
    inside = (output < outputs)[:, None] & (channel < channels)[None, :]
    place = (group * outputs + output[:, None]) * channels + channel[None, :]
    value = e4m3_value(tl.load(codes_ptr + place, mask=inside, other=0))
    part = tl.program_id(0) * (K // 32) + tl.arange(0, K // 32)
    exponent = tl.load(
        scales_ptr + ((group * tl.cdiv(outputs, 32) + output // 32) * (channels // 32))[:, None] + part[None, :],
        mask=(output < outputs)[:, None] & (part * 32 < channels)[None, :],
        other=0,
    )
    spread = tl.reshape(tl.broadcast_to(e8m0_value(exponent)[:, :, None], (B, K // 32, 32)), (B, K))
    tl.store(y_ptr + place, (value * spread).to(y_ptr.dtype.element_ty), mask=inside)


def packed_linear(x_TI: Tensor, codes_OI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    assert spec is None or spec == FP8
    if spec is not None:
        x_TI = _rounded(x_TI)
    return _product(x_TI.unsqueeze(1), codes_OI.unsqueeze(0), scales.unsqueeze(0), None).squeeze(1)


def packed_grouped_linear(x_TGI: Tensor, codes_GOI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    assert spec is None or spec == FP8
    return _product(x_TGI, codes_GOI, scales, spec)


def _product(x_TGI: Tensor, codes_GOI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    """[T, G, O], rounded to `spec`."""
    if x_TGI.shape[0] > _MAX_ROWS:
        return _many_rows(x_TGI, codes_GOI, scales, spec)
    return _few_rows(x_TGI, codes_GOI, scales, spec)


def _many_rows(x_TGI: Tensor, codes_GOI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    (num_groups, outputs, channels), dtype = codes_GOI.shape, x_TGI.dtype
    weight_GOI = torch.empty(codes_GOI.shape, device=x_TGI.device, dtype=dtype)
    grid = triton.cdiv(channels, 128), triton.cdiv(outputs, 32), num_groups
    _widen[grid](codes_GOI, scales, weight_GOI, channels, outputs, B=32, K=128, num_warps=4, launch_pdl=AHEAD)
    y_TGO = torch.matmul(x_TGI.transpose(0, 1), weight_GOI.transpose(1, 2)).transpose(0, 1)
    return y_TGO if spec is None else round_rows(y_TGO, spec)


def _few_rows(x_TGI: Tensor, codes_GOI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    (num_rows, num_groups, channels), outputs = x_TGI.shape, codes_GOI.shape[1]
    if (x_TGI.data_ptr() | (x_TGI.stride(0) | x_TGI.stride(1)) * x_TGI.element_size()) % 16:
        # pairs of channels are read as one word
        x_TGI = x_TGI.contiguous()
    if num_rows == 1 and one_row.fits(x_TGI[0], codes_GOI):
        return one_row.one_row(x_TGI[0], codes_GOI, scales, spec is not None).unsqueeze(0)
    blocks = _blocks(num_rows, x_TGI.dtype)
    tiles, row_blocks = num_groups * triton.cdiv(outputs, blocks.B), triton.cdiv(num_rows, blocks.P)
    steps = triton.cdiv(channels, blocks.K)
    shares = max(1, min(steps, _WARPS // (blocks.warps * tiles * row_blocks)))
    steps_a_share = triton.cdiv(steps, shares)
    shares = triton.cdiv(steps, steps_a_share)
    y_TGO = torch.empty(num_rows, num_groups, outputs, device=x_TGI.device, dtype=x_TGI.dtype)
    target = y_TGO
    if shares > 1:
        target = torch.empty(shares, *y_TGO.shape, device=x_TGI.device, dtype=torch.float32)
    _packed_linear[(tiles, row_blocks, shares)](
        x_TGI, codes_GOI, scales, target, num_rows, x_TGI.stride(0), x_TGI.stride(1), channels, outputs,
        steps_a_share, SHARED=shares > 1, ROUNDED=spec is not None, OPERAND=operand(x_TGI), P=blocks.P, B=blocks.B,
        K=blocks.K, num_warps=blocks.warps, num_stages=blocks.stages, launch_pdl=AHEAD,
    )  # fmt: skip
    if shares > 1:
        size = y_TGO.numel()
        _add_shares[(triton.cdiv(size, 512),)](
            target, y_TGO, size, SHARES=shares, ROUNDED=spec is not None, B=512, launch_pdl=AHEAD
        )
    return y_TGO
