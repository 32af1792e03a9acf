"""From one sublayer's output to the next one's input in one pass: a program holds all streams of a row.

T rows, N streams, D channels of a stream, B of them padded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.formats.spec import FP8, FormatSpec
from cedar.kernels.mhc import Entered, Sublayer
from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.quantize import round_groups

__all__ = ["FORWARD_ONLY", "advance", "fits", "unavailable"]

FORWARD_ONLY = ("advance",)
_MAX_CHANNELS = 1024
_MAX_ROWS = 1024


def fits(op: str, streams: Tensor, *others: Tensor) -> bool:
    """Four streams of at most 1024 channels each, whole groups of 32, at most 1024 rows."""
    num_rows, num_streams, channels = streams.shape
    whole = num_streams == 4 and channels % 32 == 0 and channels <= _MAX_CHANNELS
    return whole and 0 < num_rows <= _MAX_ROWS and is_half_or_float(streams)


@triton.jit
def _advance(
    y_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, scale_ptr, base_ptr, gain_ptr,
    out_ptr, normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr,
    channels, eps, rms_eps, norm_eps,
    FRESH: tl.constexpr, ROUNDED: tl.constexpr, ITERATIONS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = 4
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, B)
    inside = channel < channels
    # which of the four rows and sixteen cells a sum belongs to
    four, sixteen = tl.arange(0, N), tl.arange(0, N * N)
    dtype = out_ptr.dtype.element_ty
    pre = tl.zeros([N], tl.float32)
    post = tl.zeros([N], tl.float32)
    comb = tl.zeros([N * N], tl.float32)
    collapsed = tl.zeros([B], tl.float32)
    square = tl.zeros([B], tl.float32)
    width = N * channels
    for j in tl.static_range(N):
        if FRESH:
            y = tl.load(y_ptr + row * channels + channel, mask=inside, other=0.0).to(tl.float32)
            stream = tl.load(post_ptr + row * N + j) * y
            for i in tl.static_range(N):
                x = tl.load(x_ptr + (row * N + i) * channels + channel, mask=inside, other=0.0).to(tl.float32)
                stream += tl.load(mixing_ptr + (row * N + i) * N + j) * x
            rounded = stream.to(dtype)
            tl.store(out_ptr + (row * N + j) * channels + channel, rounded, mask=inside)
            stream = rounded.to(tl.float32)
        else:
            stream = tl.load(x_ptr + (row * N + j) * channels + channel, mask=inside, other=0.0).to(tl.float32)
        collapsed += tl.load(premix_ptr + row * N + j) * stream
        square += stream * stream
        column = j * channels + channel
        f = tl.load(fn_ptr + four[:, None] * width + column[None, :], mask=inside[None, :], other=0.0)
        pre += tl.sum(f * stream[None, :], axis=1)
        f = tl.load(fn_ptr + (N + four)[:, None] * width + column[None, :], mask=inside[None, :], other=0.0)
        post += tl.sum(f * stream[None, :], axis=1)
        f = tl.load(fn_ptr + (2 * N + sixteen)[:, None] * width + column[None, :], mask=inside[None, :], other=0.0)
        comb += tl.sum(f * stream[None, :], axis=1)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(square, axis=0) / width + rms_eps)
    pre = tl.sigmoid(pre * inverse * tl.load(scale_ptr) + tl.load(base_ptr + four)) + eps
    tl.store(next_premix_ptr + row * N + four, pre)
    post = 2.0 * tl.sigmoid(post * inverse * tl.load(scale_ptr + 1) + tl.load(base_ptr + N + four))
    tl.store(next_post_ptr + row * N + four, post)
    comb = comb * inverse * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * N + sixteen)
    mixing = tl.reshape(comb, (N, N))
    mixing = tl.exp(mixing - tl.max(mixing, axis=1)[:, None])
    mixing = mixing / tl.sum(mixing, axis=1)[:, None] + eps
    mixing = mixing / (tl.sum(mixing, axis=0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        mixing = mixing / (tl.sum(mixing, axis=1)[:, None] + eps)
        mixing = mixing / (tl.sum(mixing, axis=0)[None, :] + eps)
    tl.store(next_mixing_ptr + row * N * N + four[:, None] * N + four[None, :], mixing)
    u = collapsed.to(dtype).to(tl.float32)
    gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    u = u * (1.0 / tl.sqrt_rn(tl.sum(u * u, axis=0) / channels + norm_eps)) * gain
    normed = u.to(dtype)
    tl.store(normed_ptr + row * channels + channel, normed, mask=inside)
    if ROUNDED:
        grouped = tl.reshape(normed.to(tl.float32), (B // 32, 32))
        quantized = tl.reshape(round_groups(grouped, 0), (B,))
        tl.store(rounded_ptr + row * channels + channel, quantized.to(dtype), mask=inside)


def advance(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
) -> Entered:
    assert spec is None or spec == FP8
    num_rows, num_streams, channels = streams_TND.shape
    streams_TND, premix_TN = streams_TND.contiguous(), premix_TN.contiguous()
    fresh = y_TD is not None
    new: dict[str, Any] = {"device": streams_TND.device, "dtype": torch.float32}
    out_TND = torch.empty_like(streams_TND) if fresh else streams_TND
    normed_TD = streams_TND.new_empty(num_rows, channels)
    rounded_TD = normed_TD if spec is None else torch.empty_like(normed_TD)
    premix, post = torch.empty(num_rows, num_streams, **new), torch.empty(num_rows, num_streams, **new)
    mixing = torch.empty(num_rows, num_streams, num_streams, **new)
    # unused pointers must still be tensors
    y = streams_TND if y_TD is None else y_TD.contiguous()
    old_post = premix_TN if post_TN is None else post_TN.contiguous()
    old_mixing = premix_TN if mixing_TNN is None else mixing_TNN.contiguous()
    _advance[(num_rows,)](
        y, streams_TND, old_post, old_mixing, premix_TN, sublayer.fn, sublayer.scale_3, sublayer.base,
        sublayer.gain_D, out_TND, normed_TD, rounded_TD, premix, post, mixing,
        channels, sublayer.eps, sublayer.rms_eps, sublayer.norm_eps,
        FRESH=fresh, ROUNDED=spec is not None, ITERATIONS=sublayer.iterations, B=next_power_of_2(channels),
        num_warps=8,
    )  # fmt: skip
    return Entered(out_TND, normed_TD, rounded_TD, premix, post, mixing)
