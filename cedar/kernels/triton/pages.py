"""Norm, rotation, quantisation and the write to its place, a row a program.

T rows, C channels, G groups of a row, S channels of a group.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8, FormatSpec
from cedar.kernels.pages import Stored
from cedar.kernels.triton.arrivals import leave, sum_shares, wait_for
from cedar.kernels.triton.chain import AHEAD, announce, follow, wait
from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.few_rows import norm_round_row
from cedar.kernels.triton.quantize import ceil_power_of_two, round_to_grid

__all__ = ["FORWARD_ONLY", "fits", "split_latent", "split_projected", "store_normed", "store_rows", "unavailable"]

FORWARD_ONLY = ("store_rows", "store_normed", "split_latent", "split_projected")
# outputs of a program that reads its weights ahead, for each row anew
_OUTPUTS, _MOST_PROJECTED, _MOST_LATENT = 32, 4, 256
_KIND = {FP8: 0, FP4_MAIN: 1, FP4_INDEX: 2}


def fits(op: str, rows: Tensor, *others: Tensor) -> bool:
    """bfloat16 or float32 rows, their channels side by side; with a linear behind it, few and narrow ones."""
    if op == "split_projected" and (
        rows.shape[0] > _MOST_PROJECTED or others[0].shape[1] > _MOST_LATENT or others[0].dtype != rows.dtype
    ):
        return False
    return is_half_or_float(rows) and rows.numel() > 0 and rows.stride(-1) == 1 and rows.shape[-1] <= 4096


@triton.jit
def _e4m3_byte(magnitude):
    """The code of float32 values that lie on E4M3's grid, sign left out."""
    bits = magnitude.to(tl.int32, bitcast=True)
    return tl.where(magnitude < 0.015625, (magnitude * 512.0).to(tl.int32), (bits >> 20) - (120 << 3))


@triton.jit
def _store(
    x, page, row_in_page, present, codes_ptr, scales_ptr, code_page, code_row, scale_page, scale_row, num_groups,
    KIND: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """One row, float32 [G, S]: `quantize_rows`, then its bytes to their place."""
    group, channel = tl.arange(0, G), tl.arange(0, S)
    wanted = (group < num_groups) & present
    amax = tl.max(tl.abs(x), axis=1)
    broken = tl.max((x != x).to(tl.int32), axis=1) > 0
    negative = (x.to(tl.int32, bitcast=True) >> 31) & 1
    if KIND == 1:
        amax = tl.minimum(tl.maximum(amax, 6.0 * 2.0**-9), 6.0 * 448.0)
        scale = round_to_grid(tl.div_rn(amax, 6.0), (127 - 6) << 23, 1.5 * 2**20)
        scale_byte = tl.where(broken, 0x7F, _e4m3_byte(scale))
    else:
        amax = tl.where(broken, float("inf"), amax)
        if KIND == 0:
            scale = ceil_power_of_two(tl.maximum(amax, 1e-4) * (1.0 / 448.0))
        else:
            scale = ceil_power_of_two(tl.maximum(amax, 6.0 * 2.0**-126) * (1.0 / 6.0))
        scale_byte = (scale.to(tl.int32, bitcast=True) >> 23) & 255
    quotient = tl.abs(tl.div_rn(x, scale[:, None]))
    scale_place = scales_ptr + page * scale_page + row_in_page * scale_row + group
    tl.store(scale_place, scale_byte.to(tl.uint8), mask=wanted)
    place = codes_ptr + page * code_page + row_in_page * code_row
    if KIND == 0:
        value = round_to_grid(tl.minimum(quotient, 448.0), (127 - 6) << 23, 1.5 * 2**20)
        code = _e4m3_byte(value) + negative * 128
        tl.store(place + group[:, None] * S + channel[None, :], code.to(tl.uint8), mask=wanted[:, None])
    else:
        value = round_to_grid(tl.minimum(quotient, 6.0), 127 << 23, 1.5 * 2**22)
        # 0 .5 1 1.5 2 | 3 4 | 6 are codes 0 1 2 3 4 | 5 6 | 7
        code = tl.where(value < 2.0, value * 2.0, tl.where(value < 4.0, value + 2.0, value * 0.5 + 4.0))
        low, high = tl.split(tl.reshape(code.to(tl.int32) + negative * 8, (G, S // 2, 2)))
        byte = tl.arange(0, S // 2)
        tl.store(
            place + group[:, None] * (S // 2) + byte[None, :], (low + high * 16).to(tl.uint8), mask=wanted[:, None]
        )


@triton.jit
def _store_rows(
    x_ptr, page_ptr, row_ptr, present_ptr, codes_ptr, scales_ptr, row_stride, channels,
    code_page, code_row, scale_page, scale_row, KIND: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    follow()
    t = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, G)[:, None] * S + tl.arange(0, S)[None, :]
    x = tl.load(x_ptr + t * row_stride + place, mask=place < channels, other=0.0).to(tl.float32)
    _store(
        x, tl.load(page_ptr + t), tl.load(row_ptr + t), tl.load(present_ptr + t) != 0, codes_ptr, scales_ptr,
        code_page, code_row, scale_page, scale_row, channels // S, KIND, G, S,
    )  # fmt: skip


@triton.jit
def _norm_turn_store(
    t, x_ptr, gain_ptr, cos_ptr, sin_ptr, normed_ptr, page_ptr, row_ptr, present_ptr, codes_ptr, scales_ptr,
    row_stride, channels, num_angles, eps, code_page, code_row, scale_page, scale_row,
    KIND: tl.constexpr, G: tl.constexpr, S: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, G)[:, None] * S + tl.arange(0, S)[None, :]
    inside = channel < channels
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + t * row_stride + channel, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(x * x, axis=1), axis=0) / channels + eps)
    normed = (x * inverse * gain).to(dtype)
    if KEEP:
        tl.store(normed_ptr + t * channels + channel, normed, mask=inside)
    # the partner of a rotated channel: the other one of its adjacent pair
    turned = channel - (channels - 2 * num_angles)
    turns = inside & (turned >= 0)
    odd = (channel & 1) == 1
    partner = channel + tl.where(odd, -1, 1)
    px = tl.load(x_ptr + t * row_stride + partner, mask=turns, other=0.0).to(tl.float32)
    pgain = tl.load(gain_ptr + partner, mask=turns, other=0.0).to(tl.float32)
    other = (px * inverse * pgain).to(dtype).to(tl.float32)
    angle = t * num_angles + (turned >> 1)
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
    y = normed.to(tl.float32) * cos + other * sin * tl.where(odd, 1.0, -1.0)
    _store(
        y.to(dtype).to(tl.float32), tl.load(page_ptr + t), tl.load(row_ptr + t), tl.load(present_ptr + t) != 0,
        codes_ptr, scales_ptr, code_page, code_row, scale_page, scale_row, channels // S, KIND, G, S,
    )  # fmt: skip


@triton.jit
def _store_normed(
    x_ptr, gain_ptr, cos_ptr, sin_ptr, normed_ptr, page_ptr, row_ptr, present_ptr, codes_ptr, scales_ptr,
    row_stride, channels, num_angles, eps, code_page, code_row, scale_page, scale_row,
    KIND: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    follow()
    _norm_turn_store(
        tl.program_id(0).to(tl.int64), x_ptr, gain_ptr, cos_ptr, sin_ptr, normed_ptr, page_ptr, row_ptr, present_ptr,
        codes_ptr, scales_ptr, row_stride, channels, num_angles, eps, code_page, code_row, scale_page, scale_row,
        KIND, G, S, True,
    )  # fmt: skip


@triton.jit
def _split_latent(
    x_ptr, query_gain_ptr, weight_ptr, query_ptr, gain_ptr, cos_ptr, sin_ptr, page_ptr, row_ptr, present_ptr,
    codes_ptr, scales_ptr, row_stride, num_latent, outputs, channels, num_angles, query_eps, eps,
    code_page, code_row, scale_page, scale_row,
    ROUNDED: tl.constexpr, LINEAR: tl.constexpr, P: tl.constexpr, B: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """A row's window key is one program's, its query latent another's; or P outputs of a linear of it each."""
    announce()
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part == 0:
        wait()
        _norm_turn_store(
            t, x_ptr + num_latent, gain_ptr, cos_ptr, sin_ptr, x_ptr, page_ptr, row_ptr, present_ptr, codes_ptr,
            scales_ptr, row_stride, channels, num_angles, eps, code_page, code_row, scale_page, scale_row,
            0, G, S, False,
        )  # fmt: skip
    else:
        channel, output = tl.arange(0, B), (part - 1) * P + tl.arange(0, P)
        inside = channel < num_latent
        dtype: tl.constexpr = query_ptr.dtype.element_ty
        gain = tl.load(query_gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        if LINEAR:
            place = weight_ptr + output[:, None] * num_latent + channel[None, :]
            weight = tl.load(place, mask=(output < outputs)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        wait()
        x = tl.load(x_ptr + t * row_stride + channel, mask=inside, other=0.0).to(tl.float32)
        query = norm_round_row(x, gain, num_latent, query_eps, dtype, ROUNDED, B)
        if LINEAR:
            product = tl.sum(weight * query.to(tl.float32)[None, :], axis=1)
            tl.store(query_ptr + t * outputs + output, product.to(dtype), mask=output < outputs)
        else:
            tl.store(query_ptr + t * num_latent + channel, query, mask=inside)


@triton.jit
def split_products(
    t, part, products_ptr, latent_ptr, counter_ptr, num_arrivals, query_gain_ptr, query_ptr, gain_ptr, cos_ptr, sin_ptr,
    page_ptr, row_ptr, present_ptr, codes_ptr, scales_ptr, outputs, num_latent, channels, num_angles, query_eps, eps,
    code_page, code_row, scale_page, scale_row,
    ROUNDED: tl.constexpr, SHARES: tl.constexpr, B: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """`split_latent` of a row whose latents are sums over shares that programs of the same launch make."""
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    products_ptr += t * SHARES * outputs
    if part == 0:
        key = tl.arange(0, G * 32)
        there = key < channels
        wait()
        wait_for(counter_ptr, num_arrivals)
        total = sum_shares(products_ptr, num_latent + key, there, outputs, SHARES)
        tl.store(latent_ptr + t * channels + key, total.to(dtype), mask=there)
        tl.debug_barrier()
        _norm_turn_store(
            t, latent_ptr, gain_ptr, cos_ptr, sin_ptr, latent_ptr, page_ptr, row_ptr, present_ptr, codes_ptr,
            scales_ptr, channels, channels, num_angles, eps, code_page, code_row, scale_page, scale_row,
            0, G, 32, False,
        )  # fmt: skip
    else:
        place = tl.arange(0, B)
        inside = place < num_latent
        gain = tl.load(query_gain_ptr + place, mask=inside, other=0.0).to(tl.float32)
        wait()
        wait_for(counter_ptr, num_arrivals)
        x = sum_shares(products_ptr, place, inside, outputs, SHARES).to(dtype).to(tl.float32)
        query = norm_round_row(x, gain, num_latent, query_eps, dtype, ROUNDED, B)
        tl.store(query_ptr + t * num_latent + place, query, mask=inside)
    leave(counter_ptr, num_arrivals, 2)


def _place(stored: Stored) -> tuple[int, int, int, int]:
    codes, scales = stored.codes_PNX, stored.scales_PNG
    return codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1)


def store_rows(rows_TC: Tensor, stored: Stored, page_T: Tensor, row_T: Tensor, present_T: Tensor) -> None:
    num_rows, channels = rows_TC.shape
    group = stored.spec.group
    _store_rows[(num_rows,)](
        rows_TC, page_T, row_T, present_T, stored.codes_PNX, stored.scales_PNG, rows_TC.stride(0), channels,
        *_place(stored), KIND=_KIND[stored.spec], G=next_power_of_2(channels // group), S=group, num_warps=2,
        launch_pdl=AHEAD,
    )  # fmt: skip


def store_normed(
    x_TC: Tensor,
    gain_C: Tensor,
    eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
    stored: Stored,
    page_T: Tensor,
    row_T: Tensor,
    present_T: Tensor,
) -> Tensor:
    num_rows, channels = x_TC.shape
    group = stored.spec.group
    normed_TC = torch.empty(num_rows, channels, device=x_TC.device, dtype=x_TC.dtype)
    _store_normed[(num_rows,)](
        x_TC, gain_C, cos_TR, sin_TR, normed_TC, page_T, row_T, present_T, stored.codes_PNX, stored.scales_PNG,
        x_TC.stride(0), channels, cos_TR.shape[-1], eps, *_place(stored),
        KIND=_KIND[stored.spec], G=next_power_of_2(channels // group), S=group, num_warps=2,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return normed_TC


def split_latent(
    latent_TX: Tensor,
    query_gain_Q: Tensor,
    query_eps: float,
    query_spec: FormatSpec | None,
    gain_C: Tensor,
    eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
    stored: Stored,
    page_T: Tensor,
    row_T: Tensor,
    present_T: Tensor,
    weight_OQ: Tensor | None = None,
) -> Tensor:
    assert stored.spec == FP8 and query_spec in (None, FP8)
    num_rows, num_latent, channels = latent_TX.shape[0], query_gain_Q.shape[0], stored.channels
    outputs = num_latent if weight_OQ is None else weight_OQ.shape[0]
    query_TO = torch.empty(num_rows, outputs, device=latent_TX.device, dtype=latent_TX.dtype)
    programs = 1 if weight_OQ is None else triton.cdiv(outputs, _OUTPUTS)
    weight = query_gain_Q if weight_OQ is None else weight_OQ.contiguous()
    _split_latent[(num_rows, 1 + programs)](
        latent_TX, query_gain_Q, weight, query_TO, gain_C, cos_TR, sin_TR, page_T, row_T, present_T,
        stored.codes_PNX, stored.scales_PNG, latent_TX.stride(0), num_latent, outputs, channels, cos_TR.shape[-1],
        query_eps, eps, *_place(stored), ROUNDED=query_spec is not None, LINEAR=weight_OQ is not None, P=_OUTPUTS,
        B=max(32, next_power_of_2(num_latent)), G=next_power_of_2(channels // 32), S=32, num_warps=4,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return query_TO


def split_projected(*arguments: Any) -> Tensor:
    return split_latent(*arguments)
