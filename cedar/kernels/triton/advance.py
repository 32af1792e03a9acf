"""From one sublayer's output to the next one's input with the streams read once.

Narrow streams: a program holds all of a row, and a second one makes the mixes. Wide ones: programs share a row's
channels and leave their part of the sums; a second kernel adds the parts in a fixed order, makes the mixes and norms
the row.

T rows, N streams, D channels of a stream, B of them padded or of one share, S shares.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.formats.spec import FP8, FormatSpec
from cedar.kernels.experts import Router
from cedar.kernels.mhc import Entered, Sublayer
from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.quantize import round_groups
from cedar.kernels.triton.route import MAX_EXPERTS, choose_experts, router_products

__all__ = ["FORWARD_ONLY", "advance", "advance_routed", "fits", "unavailable"]

FORWARD_ONLY = ("advance", "advance_routed")
_NARROW, _WIDE = 1024, 8192
_MAX_ROWS, _MAX_WIDE_ROWS = 1024, 256
_SHARE = 64


def fits(op: str, streams: Tensor, *others: Tensor) -> bool:
    """Four streams of whole groups of 32: up to 1024 channels in 1024 rows, up to 8192 in 256.

    More rows of wide streams would read the coefficients' weight anew for each.
    """
    num_rows, num_streams, channels = streams.shape
    if op == "advance_routed" and (channels > _NARROW or others[0].shape[0] > MAX_EXPERTS):
        return False
    whole = num_streams == 4 and channels % 32 == 0 and channels <= _WIDE
    most = _MAX_ROWS if channels <= _NARROW else _MAX_WIDE_ROWS
    return whole and 0 < num_rows <= most and is_half_or_float(streams)


@triton.jit
def _stream(
    y_ptr, x_ptr, post_ptr, mixing_ptr, row, channel, channels, dtype: tl.constexpr,
    J: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Some channels of a row's new stream J, float32 of what `dtype` holds."""
    inside = channel < channels
    if FRESH:
        y = tl.load(y_ptr + row * channels + channel, mask=inside, other=0.0).to(tl.float32)
        stream = tl.load(post_ptr + row * 4 + J) * y
        for i in tl.static_range(4):
            x = tl.load(x_ptr + (row * 4 + i) * channels + channel, mask=inside, other=0.0).to(tl.float32)
            stream += tl.load(mixing_ptr + (row * 4 + i) * 4 + J) * x
        return stream.to(dtype).to(tl.float32)
    return tl.load(x_ptr + (row * 4 + J) * channels + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _collapse(
    y_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, out_ptr, row, channel, channels,
    FRESH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The new streams are written; returns their sum by the last sublayer's pre-mix."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    collapsed = tl.zeros([B], tl.float32)
    for j in tl.static_range(4):
        stream = _stream(y_ptr, x_ptr, post_ptr, mixing_ptr, row, channel, channels, dtype, j, FRESH)
        if FRESH:
            tl.store(out_ptr + (row * 4 + j) * channels + channel, stream.to(dtype), mask=channel < channels)
        collapsed += tl.load(premix_ptr + row * 4 + j) * stream
    return collapsed


@triton.jit
def _products(
    y_ptr, x_ptr, post_ptr, mixing_ptr, fn_ptr, row, channel, channels, dtype: tl.constexpr,
    FRESH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The new streams' part of the 24 products that make the mixes, and of their squares."""
    N: tl.constexpr = 4
    four, sixteen = tl.arange(0, N), tl.arange(0, N * N)
    inside = channel < channels
    # summed over streams channel by channel, and over channels once at the end
    pre = tl.zeros([N, B], tl.float32)
    post = tl.zeros([N, B], tl.float32)
    comb = tl.zeros([N * N, B], tl.float32)
    square = tl.zeros([B], tl.float32)
    width = N * channels
    for j in tl.static_range(N):
        stream = _stream(y_ptr, x_ptr, post_ptr, mixing_ptr, row, channel, channels, dtype, j, FRESH)
        square += stream * stream
        column = j * channels + channel
        f = tl.load(fn_ptr + four[:, None] * width + column[None, :], mask=inside[None, :], other=0.0)
        pre += f * stream[None, :]
        f = tl.load(fn_ptr + (N + four)[:, None] * width + column[None, :], mask=inside[None, :], other=0.0)
        post += f * stream[None, :]
        f = tl.load(fn_ptr + (2 * N + sixteen)[:, None] * width + column[None, :], mask=inside[None, :], other=0.0)
        comb += f * stream[None, :]
    return tl.sum(pre, axis=1), tl.sum(post, axis=1), tl.sum(comb, axis=1), tl.sum(square, axis=0)


@triton.jit
def _unit(a, b, c, d, eps):
    """Four scalars over their sum."""
    inverse = 1.0 / (a + b + c + d + eps)
    return a * inverse, b * inverse, c * inverse, d * inverse


@triton.jit
def _softmax(a, b, c, d, eps):
    peak = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = _unit(tl.exp(a - peak), tl.exp(b - peak), tl.exp(c - peak), tl.exp(d - peak), 0.0)
    return a + eps, b + eps, c + eps, d + eps


@triton.jit
def _store_four(place, a, b, c, d):
    tl.store(place, a)
    tl.store(place + 1, b)
    tl.store(place + 2, c)
    tl.store(place + 3, d)


@triton.jit
def _mixes(
    pre, post, comb, mean_square, row, scale_ptr, base_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr,
    eps, rms_eps, ITERATIONS: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = 4
    four, sixteen = tl.arange(0, N), tl.arange(0, N * N)
    inverse = 1.0 / tl.sqrt_rn(mean_square + rms_eps)
    pre = tl.sigmoid(pre * inverse * tl.load(scale_ptr) + tl.load(base_ptr + four)) + eps
    tl.store(next_premix_ptr + row * N + four, pre)
    post = 2.0 * tl.sigmoid(post * inverse * tl.load(scale_ptr + 1) + tl.load(base_ptr + N + four))
    tl.store(next_post_ptr + row * N + four, post)
    comb = comb * inverse * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * N + sixteen)
    # sixteen scalars in registers: no sum of the forty that follow has to cross lanes
    cell = next_mixing_ptr + row * N * N
    tl.store(cell + sixteen, comb)
    tl.debug_barrier()
    a0, a1, a2, a3 = _softmax(tl.load(cell), tl.load(cell + 1), tl.load(cell + 2), tl.load(cell + 3), eps)
    b0, b1, b2, b3 = _softmax(tl.load(cell + 4), tl.load(cell + 5), tl.load(cell + 6), tl.load(cell + 7), eps)
    c0, c1, c2, c3 = _softmax(tl.load(cell + 8), tl.load(cell + 9), tl.load(cell + 10), tl.load(cell + 11), eps)
    d0, d1, d2, d3 = _softmax(tl.load(cell + 12), tl.load(cell + 13), tl.load(cell + 14), tl.load(cell + 15), eps)
    a0, b0, c0, d0 = _unit(a0, b0, c0, d0, eps)
    a1, b1, c1, d1 = _unit(a1, b1, c1, d1, eps)
    a2, b2, c2, d2 = _unit(a2, b2, c2, d2, eps)
    a3, b3, c3, d3 = _unit(a3, b3, c3, d3, eps)
    for _ in range(ITERATIONS - 1):
        a0, a1, a2, a3 = _unit(a0, a1, a2, a3, eps)
        b0, b1, b2, b3 = _unit(b0, b1, b2, b3, eps)
        c0, c1, c2, c3 = _unit(c0, c1, c2, c3, eps)
        d0, d1, d2, d3 = _unit(d0, d1, d2, d3, eps)
        a0, b0, c0, d0 = _unit(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _unit(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _unit(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _unit(a3, b3, c3, d3, eps)
    # nobody may still read what is now overwritten
    tl.debug_barrier()
    _store_four(cell, a0, a1, a2, a3)
    _store_four(cell + 4, b0, b1, b2, b3)
    _store_four(cell + 8, c0, c1, c2, c3)
    _store_four(cell + 12, d0, d1, d2, d3)


@triton.jit
def _enter(
    collapsed, row, gain_ptr, normed_ptr, rounded_ptr, channels, norm_eps, ROUNDED: tl.constexpr, B: tl.constexpr
):
    """The sublayer's input: normed, and rounded to FP8 beside it."""
    channel = tl.arange(0, B)
    inside = channel < channels
    dtype = normed_ptr.dtype.element_ty
    u = collapsed.to(tl.float32)
    gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    u = u * (1.0 / tl.sqrt_rn(tl.sum(u * u, axis=0) / channels + norm_eps)) * gain
    normed = u.to(dtype)
    tl.store(normed_ptr + row * channels + channel, normed, mask=inside)
    if ROUNDED:
        grouped = tl.reshape(normed.to(tl.float32), (B // 32, 32))
        quantized = tl.reshape(round_groups(grouped, 0), (B,))
        tl.store(rounded_ptr + row * channels + channel, quantized.to(dtype), mask=inside)
    return normed


@triton.jit
def _advance(
    y_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, scale_ptr, base_ptr, gain_ptr,
    out_ptr, normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr,
    image_ptr, router_ptr, bias_ptr, image_bias_ptr, ids_ptr, weights_ptr, score_ptr,
    channels, eps, rms_eps, norm_eps, num_experts, k, scaling,
    FRESH: tl.constexpr, ROUNDED: tl.constexpr, ITERATIONS: tl.constexpr, B: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    follow()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, B)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    # the input is wanted at once, the mixes only after the sublayer: two programs, as long as each other
    if tl.program_id(1) == 0:
        collapsed = _collapse(y_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, out_ptr, row, channel, channels, FRESH, B)
        normed = _enter(collapsed.to(dtype), row, gain_ptr, normed_ptr, rounded_ptr, channels, norm_eps, ROUNDED, B)
        if E:
            total = router_products(normed.to(tl.float32), router_ptr, channel, channels, num_experts, E)
            choose_experts(
                total, row, image_ptr, bias_ptr, image_bias_ptr, ids_ptr, weights_ptr, score_ptr, num_experts, k,
                scaling, True, E,
            )  # fmt: skip
    else:
        pre, post, comb, square = _products(
            y_ptr, x_ptr, post_ptr, mixing_ptr, fn_ptr, row, channel, channels, dtype, FRESH, B
        )
        _mixes(
            pre, post, comb, square / (4 * channels), row, scale_ptr, base_ptr, next_premix_ptr, next_post_ptr,
            next_mixing_ptr, eps, rms_eps, ITERATIONS,
        )  # fmt: skip


@triton.jit
def _share_streams(
    y_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, out_ptr, collapsed_ptr, partial_ptr, channels, shares,
    FRESH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    follow()
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = share * B + tl.arange(0, B)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    collapsed = _collapse(y_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, out_ptr, row, channel, channels, FRESH, B)
    pre, post, comb, square = _products(
        y_ptr, x_ptr, post_ptr, mixing_ptr, fn_ptr, row, channel, channels, dtype, FRESH, B
    )
    place = partial_ptr + (row * shares + share) * 32
    four, sixteen = tl.arange(0, 4), tl.arange(0, 16)
    tl.store(place + four, pre)
    tl.store(place + 4 + four, post)
    tl.store(place + 8 + sixteen, comb)
    tl.store(place + 24, square)
    tl.store(collapsed_ptr + row * channels + channel, collapsed.to(dtype), mask=channel < channels)


@triton.jit
def _join_shares(
    partial_ptr, collapsed_ptr, scale_ptr, base_ptr, gain_ptr, normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr,
    next_mixing_ptr, channels, shares, eps, rms_eps, norm_eps,
    ROUNDED: tl.constexpr, ITERATIONS: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    follow()
    row = tl.program_id(0).to(tl.int64)
    share, four, sixteen = tl.arange(0, S), tl.arange(0, 4), tl.arange(0, 16)
    place = partial_ptr + (row * shares + share) * 32
    there = share < shares
    pre = tl.sum(tl.load(place[None, :] + four[:, None], mask=there[None, :], other=0.0), axis=1)
    post = tl.sum(tl.load(place[None, :] + 4 + four[:, None], mask=there[None, :], other=0.0), axis=1)
    comb = tl.sum(tl.load(place[None, :] + 8 + sixteen[:, None], mask=there[None, :], other=0.0), axis=1)
    square = tl.sum(tl.load(place + 24, mask=there, other=0.0), axis=0) / (4 * channels)
    _mixes(
        pre, post, comb, square, row, scale_ptr, base_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr, eps,
        rms_eps, ITERATIONS,
    )  # fmt: skip
    channel = tl.arange(0, B)
    collapsed = tl.load(collapsed_ptr + row * channels + channel, mask=channel < channels, other=0.0)
    _enter(collapsed, row, gain_ptr, normed_ptr, rounded_ptr, channels, norm_eps, ROUNDED, B)


def advance(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
) -> Entered:
    return _run(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, None, None)[0]


def advance_routed(
    y_TD: Tensor,
    streams_TND: Tensor,
    post_TN: Tensor,
    mixing_TNN: Tensor,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    router: Router,
    image_T: Tensor,
) -> tuple[Entered, Tensor, Tensor]:
    entered, ids_TK, weights_TK = _run(
        y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, router, image_T
    )
    assert ids_TK is not None and weights_TK is not None
    return entered, ids_TK, weights_TK


def _run(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    router: Router | None,
    image_T: Tensor | None,
) -> tuple[Entered, Tensor | None, Tensor | None]:
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
    if channels > _NARROW:
        shares = triton.cdiv(channels, _SHARE)
        partial, collapsed_TD = torch.empty(num_rows, shares, 32, **new), torch.empty_like(normed_TD)
        _share_streams[(num_rows, shares)](
            y, streams_TND, old_post, old_mixing, premix_TN, sublayer.fn, out_TND, collapsed_TD, partial,
            channels, shares, FRESH=fresh, B=_SHARE, num_warps=2,
        launch_pdl=AHEAD,
    )  # fmt: skip
        _join_shares[(num_rows,)](
            partial, collapsed_TD, sublayer.scale_3, sublayer.base, sublayer.gain_D, normed_TD, rounded_TD,
            premix, post, mixing, channels, shares, sublayer.eps, sublayer.rms_eps, sublayer.norm_eps,
            ROUNDED=spec is not None, ITERATIONS=sublayer.iterations, B=next_power_of_2(channels),
            S=next_power_of_2(shares), num_warps=8,
        launch_pdl=AHEAD,
    )  # fmt: skip
        return Entered(out_TND, normed_TD, rounded_TD, premix, post, mixing), None, None
    ids_TK = weights_TK = None
    routing: list[Any] = [premix_TN] * 7
    num_experts = k = 0
    scaling = 0.0
    if router is not None:
        num_experts, k, scaling = router.weight_ED.shape[0], router.k, router.scaling
        ids_TK = torch.empty(num_rows, k, device=streams_TND.device, dtype=torch.int64)
        weights_TK, score_TE = torch.empty(num_rows, k, **new), torch.empty(num_rows, num_experts, **new)
        routing = [image_T, router.weight_ED, router.bias_E, router.image_bias_E, ids_TK, weights_TK, score_TE]
    _advance[(num_rows, 2)](
        y, streams_TND, old_post, old_mixing, premix_TN, sublayer.fn, sublayer.scale_3, sublayer.base,
        sublayer.gain_D, out_TND, normed_TD, rounded_TD, premix, post, mixing, *routing,
        channels, sublayer.eps, sublayer.rms_eps, sublayer.norm_eps, num_experts, k, scaling,
        FRESH=fresh, ROUNDED=spec is not None, ITERATIONS=sublayer.iterations, B=next_power_of_2(channels),
        E=0 if router is None else max(2, next_power_of_2(num_experts)), num_warps=4 if channels <= 256 else 8,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return Entered(out_TND, normed_TD, rounded_TD, premix, post, mixing), ids_TK, weights_TK
