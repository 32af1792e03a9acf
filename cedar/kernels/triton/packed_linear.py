"""Products with a weight in E4M3 under 32 x 32 scales, as the checkpoint stores it.

Few rows: the weight is the long side of the product and the rows the short one, each byte is read once a block of
rows and widened on its way from shared memory to the product, in planes (even channels, odd channels): two codes a
word become two operands without a shuffle. Long inputs are cut into shares that run side by side and are added by
a second kernel, in a fixed order. Many rows: the weight is widened once into a passing copy for a library's product.

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
from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import INTERPRETED, is_half_or_float, unavailable
from cedar.kernels.triton.few_rows import operand, round_channels
from cedar.kernels.triton.quantize import ceil_power_of_two, round_groups, round_rows
from cedar.kernels.triton.stored import e4m3_value, e8m0_value

__all__ = ["FORWARD_ONLY", "fits", "packed_grouped_linear", "packed_linear", "unavailable"]

FORWARD_ONLY = ("packed_linear", "packed_grouped_linear")
# above, a passing copy in bfloat16 costs less than reading the weight once more for each block of rows
_MAX_ROWS = 256
# programs that keep a Hopper chip's memory busy
_PROGRAMS = 528


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
    registers: int | None = None


def _coded_blocks(num_rows: int) -> Blocks:
    if num_rows <= 16:
        return Blocks(16, 64, 128, 4, 4)
    if num_rows <= 32:
        return Blocks(32, 64, 128, 4, 4)
    return Blocks(64, 64, 128, 4, 3)


def _blocks(num_rows: int, dtype: torch.dtype) -> Blocks:
    if num_rows <= 16:
        return Blocks(16, 64, 128, 4, 4)
    # float32 is multiplied without tensor cores, and larger blocks of it do not fit the registers
    if num_rows <= 32 or dtype == torch.float32:
        return Blocks(32, 64, 128, 4, 3)
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
def _coded_linear(
    x_ptr, powers_ptr, codes_ptr, scales_ptr, y_ptr, num_rows, channels, outputs, steps_a_share,
    SHARED: tl.constexpr, OPERAND: tl.constexpr, P: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    follow()
    # one program: B outputs for P rows, over a share of the input, 128 channels and so one word of scales a step
    row = tl.program_id(1) * P + tl.arange(0, P)
    output = tl.program_id(0) * B + tl.arange(0, B)
    share = tl.program_id(2)
    first = share * steps_a_share * 128
    last = tl.minimum(first + steps_a_share * 128, channels)
    channel = tl.arange(0, 32)
    eights: tl.constexpr = tl.pointer_type(tl.float8e4nv)
    x_row = x_ptr.to(eights) + (row * channels)[:, None] + channel[None, :]
    w_row = codes_ptr.to(eights) + (output * channels.to(tl.int64))[:, None] + channel[None, :]
    words: tl.constexpr = tl.pointer_type(tl.int32)
    power_row = powers_ptr.to(words) + row * (channels // 128)
    scale_row = scales_ptr.to(words) + output // 32 * (channels // 128)
    known_row, known_output = row < num_rows, output < outputs
    total = tl.zeros([B, P], tl.float32)
    power = tl.load(power_row + first // 128, mask=known_row, other=0)
    scale = tl.load(scale_row + first // 128, mask=known_output, other=0)
    for start in tl.range(first, last, 128, num_stages=STAGES):
        # the scales of the next step, asked for a step early
        following = tl.minimum(start // 128 + 1, channels // 128 - 1)
        next_power = tl.load(power_row + following, mask=known_row, other=0)
        next_scale = tl.load(scale_row + following, mask=known_output, other=0)
        for part in tl.static_range(4):
            w = tl.load(w_row + start + part * 32, mask=known_output[:, None], other=0.0)
            x = tl.load(x_row + start + part * 32, mask=known_row[:, None], other=0.0)
            # E4M3 by E4M3, summed by the tensor core over the 32 channels that share a scale
            product = tl.dot(w.to(OPERAND), tl.trans(x.to(OPERAND)), input_precision="ieee")
            scaled = e8m0_value(scale >> (8 * part) & 0xFF)[:, None] * e8m0_value(power >> (8 * part) & 0xFF)[None, :]
            total += product * scaled
        power, scale = next_power, next_scale
    target = (share * num_rows + row[:, None]).to(tl.int64) * outputs + output[None, :]
    y = tl.trans(total).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + target, y, mask=known_row[:, None] & known_output[None, :])


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
def _round(x_ptr, y_ptr, powers_ptr, row_stride, channels, CODED: tl.constexpr, B: tl.constexpr):
    follow()
    channel = tl.program_id(1) * B + tl.arange(0, B)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * row_stride + channel, mask=channel < channels, other=0.0).to(tl.float32)
    x = tl.reshape(x, (B // 32, 32))
    y = round_groups(x, 0)
    if CODED:
        # `round_groups`' own scale: what it rounds to is a code times this
        power = ceil_power_of_two(tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4) * (1.0 / 448.0))
        y = tl.div_rn(y, power[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        group = tl.program_id(1) * (B // 32) + tl.arange(0, B // 32)
        byte = (power.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(powers_ptr + row * (channels // 32) + group, byte, mask=group * 32 < channels)
    y = tl.reshape(y, (B,)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * channels + channel, y, mask=channel < channels)


def _rounded(x_TI: Tensor, coded: bool) -> tuple[Tensor, Tensor]:
    """Rows rounded to FP8 once, and not by every program that reads them: values, or codes and scales."""
    num_rows, channels = x_TI.shape
    y_TI = torch.empty(x_TI.shape, device=x_TI.device, dtype=torch.uint8 if coded else x_TI.dtype)
    powers = torch.empty(num_rows, channels // 32, device=x_TI.device, dtype=torch.uint8)
    _round[(num_rows, triton.cdiv(channels, 1024))](
        x_TI, y_TI, powers, x_TI.stride(0), channels, CODED=coded, B=1024, num_warps=4, launch_pdl=AHEAD
    )
    return y_TI, powers


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
    if spec is None:
        return _product(x_TI.unsqueeze(1), codes_OI.unsqueeze(0), scales.unsqueeze(0), None).squeeze(1)
    (num_rows, channels), dtype = x_TI.shape, x_TI.dtype
    # the tensor core keeps fewer bits of a sum of eights than float32 has
    whole_words = channels % 128 == 0 and scales.data_ptr() % 4 == 0
    coded = dtype == torch.bfloat16 and whole_words and num_rows <= _MAX_ROWS
    x_TI, powers = _rounded(x_TI, coded)
    if not coded:
        return packed_linear(x_TI, codes_OI, scales, None)
    blocks = _coded_blocks(num_rows)
    programs = triton.cdiv(codes_OI.shape[0], blocks.B) * triton.cdiv(num_rows, blocks.P)
    return coded_rows(x_TI, powers, codes_OI, scales, dtype, blocks, max(1, _PROGRAMS // programs))


def packed_grouped_linear(x_TGI: Tensor, codes_GOI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    assert spec is None or spec == FP8
    return _product(x_TGI, codes_GOI, scales, spec)


def _product(x_TGI: Tensor, codes_GOI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    """[T, G, O], rounded to `spec`."""
    num_rows, num_groups, channels = x_TGI.shape
    outputs = codes_GOI.shape[1]
    if num_rows > _MAX_ROWS:
        return many_rows(x_TGI, codes_GOI, scales, spec)
    blocks = _blocks(num_rows, x_TGI.dtype)
    programs = num_groups * triton.cdiv(outputs, blocks.B) * triton.cdiv(num_rows, blocks.P)
    return few_rows(x_TGI, codes_GOI, scales, spec, blocks, max(1, _PROGRAMS // programs))


def many_rows(x_TGI: Tensor, codes_GOI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    (num_groups, outputs, channels), dtype = codes_GOI.shape, x_TGI.dtype
    weight_GOI = torch.empty(codes_GOI.shape, device=x_TGI.device, dtype=dtype)
    grid = triton.cdiv(channels, 128), triton.cdiv(outputs, 32), num_groups
    _widen[grid](codes_GOI, scales, weight_GOI, channels, outputs, B=32, K=128, num_warps=4, launch_pdl=AHEAD)
    y_TGO = torch.matmul(x_TGI.transpose(0, 1), weight_GOI.transpose(1, 2)).transpose(0, 1)
    return y_TGO if spec is None else round_rows(y_TGO, spec)


def few_rows(
    x_TGI: Tensor, codes_GOI: Tensor, scales: Tensor, spec: FormatSpec | None, blocks: Blocks, shares: int
) -> Tensor:
    (num_rows, num_groups, channels), outputs = x_TGI.shape, codes_GOI.shape[1]
    if (x_TGI.data_ptr() | (x_TGI.stride(0) | x_TGI.stride(1)) * x_TGI.element_size()) % 16:
        # pairs of channels are read as one word
        x_TGI = x_TGI.contiguous()
    shares, steps_a_share = _shared(channels, blocks.K, shares)
    y_TGO = torch.empty(num_rows, num_groups, outputs, device=x_TGI.device, dtype=x_TGI.dtype)
    target = _target(y_TGO, shares)
    grid = num_groups * triton.cdiv(outputs, blocks.B), triton.cdiv(num_rows, blocks.P), shares
    _packed_linear[grid](
        x_TGI, codes_GOI, scales, target, num_rows, x_TGI.stride(0), x_TGI.stride(1), channels, outputs,
        steps_a_share, SHARED=shares > 1, ROUNDED=spec is not None, OPERAND=operand(x_TGI), P=blocks.P,
        B=blocks.B, K=blocks.K, num_warps=blocks.warps, num_stages=blocks.stages, maxnreg=blocks.registers,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return _summed(target, y_TGO, spec)


def coded_rows(
    x_TI: Tensor, powers: Tensor, codes_OI: Tensor, scales: Tensor, dtype: torch.dtype, blocks: Blocks, shares: int
) -> Tensor:
    """The product of codes and codes; `powers` are the rows' scale bytes."""
    (num_rows, channels), outputs = x_TI.shape, codes_OI.shape[0]
    shares, steps_a_share = _shared(channels, 128, shares)
    y_TO = torch.empty(num_rows, outputs, device=x_TI.device, dtype=dtype)
    target = _target(y_TO, shares)
    grid = triton.cdiv(outputs, blocks.B), triton.cdiv(num_rows, blocks.P), shares
    _coded_linear[grid](
        x_TI, powers, codes_OI, scales, target, num_rows, channels, outputs, steps_a_share, SHARED=shares > 1,
        OPERAND=tl.float32 if INTERPRETED else tl.float8e4nv, P=blocks.P, B=blocks.B, STAGES=blocks.stages,
        num_warps=blocks.warps, num_stages=blocks.stages, maxnreg=blocks.registers, launch_pdl=AHEAD,
    )  # fmt: skip
    return _summed(target, y_TO, None)


def _shared(channels: int, step: int, shares: int) -> tuple[int, int]:
    """(shares, steps of each), none of them empty."""
    steps = triton.cdiv(channels, step)
    steps_a_share = triton.cdiv(steps, min(shares, steps))
    return triton.cdiv(steps, steps_a_share), steps_a_share


def _target(y: Tensor, shares: int) -> Tensor:
    """Where programs write: the result, or a float32 part of it for each share."""
    return torch.empty(shares, *y.shape, device=y.device, dtype=torch.float32) if shares > 1 else y


def _summed(target: Tensor, y: Tensor, spec: FormatSpec | None) -> Tensor:
    if target is not y:
        size = y.numel()
        _add_shares[(triton.cdiv(size, 512),)](
            target, y, size, SHARES=target.shape[0], ROUNDED=spec is not None, B=512, launch_pdl=AHEAD
        )
    return y
