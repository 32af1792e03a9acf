"""Engram for few rows: hash, gather and decode in one kernel, the gate in another.

T rows, L look-backs, K table columns, C channels of a table row, N streams, D channels of a stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.formats.spec import FP8, FormatSpec
from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.quantize import round_groups
from cedar.kernels.triton.stored import e4m3_value, e8m0_value

__all__ = ["FORWARD_ONLY", "engram_gate", "engram_memory", "fits", "look_back", "unavailable"]

FORWARD_ONLY = ("engram_memory", "engram_gate", "look_back")


def fits(op: str, first: Tensor, *others: Tensor) -> bool:
    """The gate: streams of at most 8192 channels. The gather: a table that the ids' device reads."""
    if op == "look_back":
        return first.numel() > 0
    if op == "engram_memory":
        codes = others[0]
        return first.numel() > 0 and (codes.device == first.device or (first.is_cuda and codes.is_pinned()))
    return first.numel() > 0 and first.shape[-1] <= 8192 and is_half_or_float(first)


@triton.jit
def _memory(
    ids_ptr, multiplier_ptr, prime_ptr, offset_ptr, codes_ptr, scales_ptr, out_ptr, num_columns, channels, heads,
    ROUNDED: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    follow()
    t, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mixed = tl.load(ids_ptr + t * L) * tl.load(multiplier_ptr)
    # columns are ordered by n-gram size: the longer, the more look-backs join
    for lookback in tl.static_range(1, L):
        product = tl.load(ids_ptr + t * L + lookback) * tl.load(multiplier_ptr + lookback)
        mixed = tl.where(column // heads >= lookback - 1, mixed ^ product, mixed)
    row = mixed % tl.load(prime_ptr + column) + tl.load(offset_ptr + column)
    channel = tl.arange(0, C // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = channel < channels
    code = tl.load(codes_ptr + row * channels + channel, mask=inside, other=0)
    scale = tl.load(scales_ptr + row * (channels // 32) + channel // 32, mask=inside, other=127)
    value = e4m3_value(code) * e8m0_value(scale)
    if ROUNDED:
        value = round_groups(value.to(out_ptr.dtype.element_ty).to(tl.float32), 0)
    tl.store(out_ptr + (t * num_columns + column) * channels + channel, value.to(out_ptr.dtype.element_ty), mask=inside)


def engram_memory(
    compressed_TL: Tensor,
    multiplier_L: Tensor,
    prime_K: Tensor,
    offset_K: Tensor,
    codes: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    spec: FormatSpec | None,
) -> Tensor:
    assert spec is None or spec == FP8
    num_rows, num_lookbacks = compressed_TL.shape
    num_columns, channels = prime_K.shape[0], codes.shape[1]
    out = torch.empty(num_rows, num_columns * channels, device=compressed_TL.device, dtype=dtype)
    _memory[(num_rows, num_columns)](
        compressed_TL.contiguous(), multiplier_L, prime_K, offset_K, codes, scales, out, num_columns, channels,
        num_columns // (num_lookbacks - 1), ROUNDED=spec is not None, L=num_lookbacks,
        C=max(32, next_power_of_2(channels)),
        num_warps=1, launch_pdl=AHEAD,
    )  # fmt: skip
    return out


@triton.jit
def _gate(
    x_ptr, key_ptr, value_ptr, dead_ptr, query_weight_ptr, key_weight_ptr, out_ptr, key_stride, value_stride,
    channels, eps, root, N: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    follow()
    t, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, B)
    inside = channel < channels
    place = (t * N + stream) * channels + channel
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(key_ptr + t * key_stride + stream * channels + channel, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + t * value_stride + channel, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(query_weight_ptr + stream * channels + channel, mask=inside, other=0.0).to(tl.float32)
    weight *= tl.load(key_weight_ptr + stream * channels + channel, mask=inside, other=0.0).to(tl.float32)
    dot = tl.sum(x * weight * key, axis=0)
    dot = dot / tl.sqrt_rn(tl.sum(x * x, axis=0) / channels + eps)
    dot = dot / tl.sqrt_rn(tl.sum(key * key, axis=0) / channels + eps) * root
    size = tl.sqrt_rn(tl.maximum(tl.abs(dot), 1e-6))
    gate = tl.sigmoid(tl.where(dot < 0.0, -size, size))
    gate = tl.where(tl.load(dead_ptr + t) != 0, 0.0, gate)
    tl.store(out_ptr + place, (x + gate * value).to(out_ptr.dtype.element_ty), mask=inside)


def engram_gate(
    streams_TND: Tensor,
    key_TND: Tensor,
    value_TD: Tensor,
    dead_T: Tensor,
    query_weight_ND: Tensor,
    key_weight_ND: Tensor,
    eps: float,
) -> Tensor:
    num_rows, num_streams, channels = streams_TND.shape
    streams_TND = streams_TND.contiguous()
    # keys and values are parts of one product: a row's own channels lie side by side
    key_TND = key_TND if key_TND.stride()[1:] == (channels, 1) else key_TND.contiguous()
    value_TD = value_TD if value_TD.stride(1) == 1 else value_TD.contiguous()
    out_TND = torch.empty_like(streams_TND)
    _gate[(num_rows, num_streams)](
        streams_TND, key_TND, value_TD, dead_T, query_weight_ND, key_weight_ND, out_TND,
        key_TND.stride(0), value_TD.stride(0), channels, eps, channels**-0.5,
        N=num_streams, B=next_power_of_2(channels), num_warps=4,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return out_TND


@triton.jit
def _look_back(
    ids_ptr, history_ptr, slot_ptr, position_ptr, compressed_ptr, out_ptr, image_token_id, pad_token_id, num_history,
    L: tl.constexpr,
):  # fmt: skip
    follow()
    t = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slot_ptr + t), tl.load(position_ptr + t)
    row = history_ptr + slot * num_history
    tl.store(row + position % num_history, tl.load(ids_ptr + t))
    pad = tl.load(compressed_ptr + pad_token_id)
    dead = 0
    for back in tl.static_range(L):
        # a row of this step may not have reached the history yet
        near = (tl.load(slot_ptr + t - back, mask=t >= back, other=-1) == slot) & (
            tl.load(position_ptr + t - back, mask=t >= back, other=-1) == position - back
        )
        fresh = tl.load(ids_ptr + t - back, mask=near, other=-1)
        old = tl.load(row + (position - back) % num_history, mask=(position >= back) & (near == 0), other=-1)
        raw = tl.where(near, fresh, old)
        dead = dead | (raw == image_token_id).to(tl.int32) | (raw < 0).to(tl.int32)
        compressed = tl.load(compressed_ptr + tl.where(dead != 0, 0, raw))
        tl.store(out_ptr + t * L + back, tl.where(dead != 0, pad, compressed))


def look_back(
    ids_T: Tensor,
    history_SH: Tensor,
    slot_T: Tensor,
    position_T: Tensor,
    compressed_V: Tensor,
    num_lookbacks: int,
    image_token_id: int,
    pad_token_id: int,
) -> Tensor:
    num_rows, num_history = ids_T.shape[0], history_SH.shape[1]
    out_TL = torch.empty(num_rows, num_lookbacks, device=ids_T.device, dtype=torch.int64)
    _look_back[(num_rows,)](
        ids_T.contiguous(), history_SH, slot_T, position_T, compressed_V, out_TL, image_token_id, pad_token_id,
        num_history, L=num_lookbacks, num_warps=1,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return out_TL
