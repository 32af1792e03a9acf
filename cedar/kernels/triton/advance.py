"""From one sublayer's output to the next one's input with the streams read once.

Few rows of narrow streams: three programs a row, one makes the input, two the mixes. All others: a program takes a
tile of rows and a share of the channels, and what is summed over channels meets the coefficients' weights, in two
bfloat16 parts, as a product of tiles. With several shares a second kernel adds their sums in a fixed order.

T rows, N streams, D channels of a stream, P rows of a tile, B channels of a step, S shares.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.formats.spec import FP8, FormatSpec
from cedar.kernels.experts import Router, Weights
from cedar.kernels.mhc import Entered, Sublayer
from cedar.kernels.triton.chain import AHEAD, announce, follow, wait
from cedar.kernels.triton.device import INTERPRETED, is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.feed import activated, down
from cedar.kernels.triton.few_rows import operand
from cedar.kernels.triton.mixes import balance, logit_terms, store_gates, store_logits
from cedar.kernels.triton.quantize import round_groups
from cedar.kernels.triton.route import (
    MAX_EXPERTS,
    choose_experts,
    router_biases,
    router_products,
    router_weights,
    weigh_experts,
)

__all__ = ["FORWARD_ONLY", "advance", "advance_fed", "advance_projected", "advance_routed", "fits", "unavailable"]

FORWARD_ONLY = ("advance", "advance_projected", "advance_routed", "advance_fed")
# a thread holds the coefficients' weights of its channels
_NARROW, _FEW_ROWS = 256, 64
# rows that take what reads them along, and experts whose weights are all read ahead, in blocks of outputs
_MOST_FED, _FEW_EXPERTS, _INNER = 4, 16, 32
# columns of a row's partial sums: 24 products, then the squares of the streams and of the input
_SQUARE, _INPUT_SQUARE = tl.constexpr(24), tl.constexpr(25)
_OPAQUE = tl.constexpr(not INTERPRETED)
# rows whose mixes are made one by one
_FEW_MIXES = 256
# channels that a program norms
_SLICE = 1024


def fits(op: str, streams: Tensor, *others: Tensor) -> bool:
    """Four streams of whole groups of 32. Routed at once: 64 rows of up to 256 channels; with a linear or the experts
    behind it: 4 rows, for which every expert's weights are read.
    """
    num_rows, num_streams, channels = streams.shape
    fitting = num_rows > 0 and num_streams == 4 and channels % 32 == 0 and is_half_or_float(streams, *others)
    if op == "advance":
        return fitting
    if op == "advance_projected":
        return fitting and channels <= _NARROW and num_rows <= _MOST_FED and streams.dtype == others[0].dtype
    num_experts = others[0].shape[0]
    if op == "advance_fed":
        fitting = fitting and num_rows <= _MOST_FED and num_experts <= _FEW_EXPERTS and others[1].shape[1] % 32 == 0
    return fitting and channels <= _NARROW and num_rows <= _FEW_ROWS and num_experts <= MAX_EXPERTS


@triton.jit
def _four(place, known):
    return (
        tl.load(place, mask=known, other=0.0),
        tl.load(place + 1, mask=known, other=0.0),
        tl.load(place + 2, mask=known, other=0.0),
        tl.load(place + 3, mask=known, other=0.0),
    )


@triton.jit
def _old_mixes(post_ptr, mixing_ptr, row, known, FRESH: tl.constexpr):
    """Post and mixing by source, four each, where there is a sublayer's output to mix in."""
    if FRESH:
        mixing = mixing_ptr + row * 16
        return (
            _four(post_ptr + row * 4, known), _four(mixing, known), _four(mixing + 4, known),
            _four(mixing + 8, known), _four(mixing + 12, known),
        )  # fmt: skip
    else:
        return None


@triton.jit
def _streams(y_ptr, x_ptr, mixes, row, channel, inside, channels, dtype: tl.constexpr, FRESH: tl.constexpr):
    """Some channels of some rows' four new streams, as `dtype` holds them."""
    place = x_ptr + row * 4 * channels + channel
    x0 = tl.load(place, mask=inside, other=0.0)
    x1 = tl.load(place + channels, mask=inside, other=0.0)
    x2 = tl.load(place + 2 * channels, mask=inside, other=0.0)
    x3 = tl.load(place + 3 * channels, mask=inside, other=0.0)
    if FRESH:
        y = tl.load(y_ptr + row * channels + channel, mask=inside, other=0.0).to(tl.float32)
        post, m0, m1, m2, m3 = mixes
        x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
        return (
            (post[0] * y + m0[0] * x0 + m1[0] * x1 + m2[0] * x2 + m3[0] * x3).to(dtype),
            (post[1] * y + m0[1] * x0 + m1[1] * x1 + m2[1] * x2 + m3[1] * x3).to(dtype),
            (post[2] * y + m0[2] * x0 + m1[2] * x1 + m2[2] * x2 + m3[2] * x3).to(dtype),
            (post[3] * y + m0[3] * x0 + m1[3] * x1 + m2[3] * x2 + m3[3] * x3).to(dtype),
        )
    else:
        return x0, x1, x2, x3


@triton.jit
def _store_streams(out_ptr, streams, row, channel, inside, channels):
    place = out_ptr + row * 4 * channels + channel
    for j in tl.static_range(4):
        tl.store(place + j * channels, streams[j], mask=inside)


@triton.jit
def _collapse(streams, premix):
    """The new streams' sum by the last sublayer's pre-mix, as the model's dtype holds it."""
    collapsed = premix[0] * streams[0].to(tl.float32) + premix[1] * streams[1].to(tl.float32)
    collapsed += premix[2] * streams[2].to(tl.float32) + premix[3] * streams[3].to(tl.float32)
    return collapsed.to(streams[0].dtype)


@triton.jit
def _rounded(normed, B: tl.constexpr):
    """In FP8 and back, 32 channels a group."""
    grouped = tl.reshape(normed.to(tl.float32), (B // 32, 32))
    return tl.reshape(round_groups(grouped, 0), (B,)).to(normed.dtype)


# few rows of narrow streams


@triton.jit
def _weights(fn_ptr, output, channel, channels):
    """Coefficient weights of some outputs, a tensor a stream."""
    # two channels a thread, as it holds the streams: nothing is moved between threads
    place = tl.max_contiguous(fn_ptr + output[:, None] * (4 * channels) + channel[None, :], [1, 2])
    inside = (channel < channels)[None, :]
    return (
        tl.load(place, mask=inside, other=0.0),
        tl.load(place + channels, mask=inside, other=0.0),
        tl.load(place + 2 * channels, mask=inside, other=0.0),
        tl.load(place + 3 * channels, mask=inside, other=0.0),
    )


@triton.jit
def _row_logits(
    y_ptr, x_ptr, post_ptr, mixing_ptr, weights, terms, row, channel, channels, rms_eps, dtype: tl.constexpr,
    FRESH: tl.constexpr,
):  # fmt: skip
    """A row's products with `weights`, made logits."""
    mixes = _old_mixes(post_ptr, mixing_ptr, row, row >= 0, FRESH)
    s0, s1, s2, s3 = _streams(y_ptr, x_ptr, mixes, row, channel, channel < channels, channels, dtype, FRESH)
    s0, s1, s2, s3 = s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)
    product = weights[0] * s0[None, :] + weights[1] * s1[None, :]
    product += weights[2] * s2[None, :] + weights[3] * s3[None, :]
    square = tl.sum(s0 * s0 + s1 * s1 + (s2 * s2 + s3 * s3), axis=0)
    inverse = 1.0 / tl.sqrt_rn(square / (4 * channels) + rms_eps)
    return tl.sum(product, axis=1) * inverse * terms[0] + terms[1]


@triton.jit
def _row_input(
    y_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, gain, row, channel, channels, norm_eps, dtype: tl.constexpr,
    FRESH: tl.constexpr,
):  # fmt: skip
    """(A row's new streams, its input)."""
    inside = channel < channels
    mixes = _old_mixes(post_ptr, mixing_ptr, row, row >= 0, FRESH)
    streams = _streams(y_ptr, x_ptr, mixes, row, channel, inside, channels, dtype, FRESH)
    u = _collapse(streams, _four(premix_ptr + row * 4, row >= 0)).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(u * u, axis=0) / channels + norm_eps)
    return streams, (u * inverse * gain).to(dtype)


@triton.jit
def _advance(
    y_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, scale_ptr, base_ptr, gain_ptr,
    out_ptr, normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr,
    image_ptr, router_ptr, bias_ptr, image_bias_ptr, ids_ptr, weights_ptr, score_ptr,
    w1_ptr, w3_ptr, shared1_ptr, shared3_ptr, inner_ptr,
    channels, eps, rms_eps, norm_eps, num_experts, k, scaling, num_inner, limit,
    FRESH: tl.constexpr, ROUNDED: tl.constexpr, ITERATIONS: tl.constexpr, B: tl.constexpr, E: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    announce()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, B)
    inside = channel < channels
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    # the input is wanted at once, the mixes only after the sublayer: side by side, about as long as each other.
    # Each reads its weights while the kernel before still runs
    if part == 0:
        output = 8 + tl.arange(0, 16)
        weights = _weights(fn_ptr, output, channel, channels)
        terms = logit_terms(output, scale_ptr, base_ptr)
        wait()
        logit = _row_logits(
            y_ptr, x_ptr, post_ptr, mixing_ptr, weights, terms, row, channel, channels, rms_eps, dtype, FRESH
        )
        store_logits(logit, output, row, row >= 0, next_mixing_ptr)
        balance(next_mixing_ptr, row, row >= 0, eps, ITERATIONS)
    elif part == 1:
        output = tl.arange(0, 8)
        weights = _weights(fn_ptr, output, channel, channels)
        terms = logit_terms(output, scale_ptr, base_ptr)
        wait()
        logit = _row_logits(
            y_ptr, x_ptr, post_ptr, mixing_ptr, weights, terms, row, channel, channels, rms_eps, dtype, FRESH
        )
        store_gates(logit, output, row, row >= 0, next_premix_ptr, next_post_ptr, eps)
    else:
        gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        if E:
            experts = router_weights(router_ptr, channel, channels, num_experts, E)
            biases = router_biases(bias_ptr, num_experts, E), router_biases(image_bias_ptr, num_experts, E)
        if part == 2:
            wait()
            if E:
                bias = tl.where(tl.load(image_ptr + row) != 0, biases[1], biases[0])
            streams, normed = _row_input(
                y_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, gain, row, channel, channels, norm_eps, dtype, FRESH
            )
            if FRESH:
                _store_streams(out_ptr, streams, row, channel, inside, channels)
            tl.store(normed_ptr + row * channels + channel, normed, mask=inside)
            if ROUNDED:
                tl.store(rounded_ptr + row * channels + channel, _rounded(normed, B), mask=inside)
            if E:
                choose_experts(
                    router_products(normed.to(tl.float32), experts), bias, row, ids_ptr, weights_ptr, score_ptr,
                    num_experts, k, scaling, E,
                )  # fmt: skip
        elif INNER:
            # some outputs of a linear of the input, or inner channels of one expert, whose weights are read before
            # anybody knows whether it is chosen
            blocks = tl.cdiv(num_inner, INNER)
            mine = (part - 3) // blocks
            inner = (part - 3) % blocks * INNER + tl.arange(0, INNER)
            place = inner[:, None] * channels + channel[None, :]
            there = (inner < num_inner)[:, None] & inside[None, :]
            if E:
                gate_ptr, up_ptr = shared1_ptr, shared3_ptr
                if mine < num_experts:
                    gate_ptr = w1_ptr + mine * num_inner * channels
                    up_ptr = w3_ptr + mine * num_inner * channels
                gates = tl.load(gate_ptr + place, mask=there, other=0.0)
                ups = tl.load(up_ptr + place, mask=there, other=0.0)
                wait()
                bias_ = tl.where(tl.load(image_ptr + row) != 0, biases[1], biases[0])
            else:
                gates = tl.load(w1_ptr + place, mask=there, other=0.0)
                wait()
            _, normed = _row_input(
                y_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, gain, row, channel, channels, norm_eps, dtype, FRESH
            )
            u = _rounded(normed, B).to(tl.float32)[None, :] if ROUNDED else normed.to(tl.float32)[None, :]
            y = tl.sum(gates.to(tl.float32) * u, axis=1)
            if E:
                up = tl.sum(ups.to(tl.float32) * u, axis=1)
                _, chosen, share = weigh_experts(
                    router_products(normed.to(tl.float32), experts), bias_, num_experts, k, scaling, E
                )
                share = tl.sum(tl.where(chosen & (tl.arange(0, E) == mine), share, 0.0), axis=0)
                y = activated(y, up, tl.where(mine < num_experts, share, 1.0), limit, dtype, ROUNDED, INNER)
            # what an expert that is not chosen leaves there, nobody reads
            place_ = (row * (num_experts + 1) + mine) * num_inner + inner
            tl.store(inner_ptr + place_, y.to(dtype), mask=inner < num_inner)


# any other rows


@triton.jit
def _split_weights(fn_ptr, part_ptr, width, B: tl.constexpr):
    """Rows 0..23 of the weights in two bfloat16 parts, [2, 32, width]; the other rows are zero."""
    follow()
    output = tl.program_id(0)
    column = tl.program_id(1) * B + tl.arange(0, B)
    inside = column < width
    f = tl.load(fn_ptr + output * width + column, mask=inside & (output < 24), other=0.0)
    high = f.to(tl.bfloat16)
    place = part_ptr + output.to(tl.int64) * width + column
    tl.store(place, high, mask=inside)
    tl.store(place + 32 * width, (f - high.to(tl.float32)).to(tl.bfloat16), mask=inside)


@triton.jit
def _parts(fn_ptr, j, channel, channels, OPERAND: tl.constexpr, SPLIT: tl.constexpr):
    """Weights of stream j as two operands of a product, [32, B] each; in float32 the second one is zero."""
    output = tl.arange(0, 32)[:, None]
    width = 4 * channels
    place = fn_ptr + output * width + j * channels + channel[None, :]
    inside = (channel < channels)[None, :]
    if SPLIT:
        return tl.load(place, mask=inside, other=0.0), tl.load(place + 32 * width, mask=inside, other=0.0)
    else:
        f = tl.load(place, mask=inside & (output < 24), other=0.0)
        high = f.to(OPERAND)
        return high, (f - high.to(tl.float32)).to(OPERAND)


@triton.jit
def _settled(x):
    """x: an opaque step, without which the compiler computes the streams once more in the layout of a product."""
    if _OPAQUE and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.bfloat16, is_pure=False, pack=2)
    else:
        return x


@triton.jit
def _product(stream, parts, total, low, OPERAND: tl.constexpr):
    stream = stream.to(OPERAND)
    total = tl.dot(stream, tl.trans(parts[0]), total, input_precision="ieee")
    if OPERAND != tl.float32:
        low = tl.dot(stream, tl.trans(parts[1]), low)
    return total, low


@triton.jit
def _step(
    y_ptr, x_ptr, out_ptr, normed_ptr, mixes, premix, p0, p1, p2, p3, row, known, channel, channels,
    total, low, square, input_square, FRESH: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Some channels of a tile of rows: the streams and the input are written, the sums go on."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    place, inside = channel[None, :], known & (channel < channels)[None, :]
    streams = _streams(y_ptr, x_ptr, mixes, row, place, inside, channels, dtype, FRESH)
    streams = _settled(streams[0]), _settled(streams[1]), _settled(streams[2]), _settled(streams[3])
    if FRESH:
        _store_streams(out_ptr, streams, row, place, inside, channels)
    u = _collapse(streams, premix)
    tl.store(normed_ptr + row * channels + place, u, mask=inside)
    total, low = _product(streams[0], p0, total, low, OPERAND)
    total, low = _product(streams[1], p1, total, low, OPERAND)
    total, low = _product(streams[2], p2, total, low, OPERAND)
    total, low = _product(streams[3], p3, total, low, OPERAND)
    s0, s1, s2, s3 = (
        streams[0].to(tl.float32), streams[1].to(tl.float32), streams[2].to(tl.float32), streams[3].to(tl.float32)
    )  # fmt: skip
    u = u.to(tl.float32)
    square += tl.sum(s0 * s0 + s1 * s1 + (s2 * s2 + s3 * s3), axis=1)
    return total, low, square, input_square + tl.sum(u * u, axis=1)


@triton.jit
def _across(four):
    return four[0][:, None], four[1][:, None], four[2][:, None], four[3][:, None]


@triton.jit
def _tile_mixes(post_ptr, mixing_ptr, premix_ptr, row_P, known_P, FRESH: tl.constexpr):
    """`_old_mixes` and the pre-mix of a tile's rows, [P, 1] each."""
    premix = _across(_four(premix_ptr + row_P * 4, known_P))
    if FRESH:
        post, m0, m1, m2, m3 = _old_mixes(post_ptr, mixing_ptr, row_P, known_P, FRESH)
        return (_across(post), _across(m0), _across(m1), _across(m2), _across(m3)), premix
    else:
        return None, premix


@triton.jit
def _share_streams(
    y_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, out_ptr, normed_ptr, partial_ptr,
    scale_ptr, base_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr,
    num_rows, channels, shares, span, eps, rms_eps,
    FRESH: tl.constexpr, OPERAND: tl.constexpr, SPLIT: tl.constexpr, ITERATIONS: tl.constexpr, ALONE: tl.constexpr,
    ONE: tl.constexpr, P: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """P rows times one share of the channels; `normed` holds the input before its norm for now."""
    announce()
    share = tl.program_id(1)
    row_P = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    row, known = row_P[:, None], (row_P < num_rows)[:, None]
    first = share * span
    total, low = tl.zeros([P, 32], tl.float32), tl.zeros([P, 32], tl.float32)
    square, input_square = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
    if ONE:
        # the weights are read while the kernel before still runs
        channel = first + tl.arange(0, B)
        p0 = _parts(fn_ptr, 0, channel, channels, OPERAND, SPLIT)
        p1 = _parts(fn_ptr, 1, channel, channels, OPERAND, SPLIT)
        p2 = _parts(fn_ptr, 2, channel, channels, OPERAND, SPLIT)
        p3 = _parts(fn_ptr, 3, channel, channels, OPERAND, SPLIT)
        wait()
        mixes, premix = _tile_mixes(post_ptr, mixing_ptr, premix_ptr, row_P, row_P < num_rows, FRESH)
        total, low, square, input_square = _step(
            y_ptr, x_ptr, out_ptr, normed_ptr, mixes, premix, p0, p1, p2, p3, row, known, channel, channels,
            total, low, square, input_square, FRESH, OPERAND,
        )  # fmt: skip
    else:
        wait()
        mixes, premix = _tile_mixes(post_ptr, mixing_ptr, premix_ptr, row_P, row_P < num_rows, FRESH)
        for start in tl.range(first, tl.minimum(first + span, channels), B, num_stages=STAGES):
            channel = start + tl.arange(0, B)
            p0 = _parts(fn_ptr, 0, channel, channels, OPERAND, SPLIT)
            p1 = _parts(fn_ptr, 1, channel, channels, OPERAND, SPLIT)
            p2 = _parts(fn_ptr, 2, channel, channels, OPERAND, SPLIT)
            p3 = _parts(fn_ptr, 3, channel, channels, OPERAND, SPLIT)
            total, low, square, input_square = _step(
                y_ptr, x_ptr, out_ptr, normed_ptr, mixes, premix, p0, p1, p2, p3, row, known, channel, channels,
                total, low, square, input_square, FRESH, OPERAND,
            )  # fmt: skip
    output = tl.arange(0, 32)[None, :]
    total += low
    if ALONE:
        tl.store(partial_ptr + row_P * 32 + _INPUT_SQUARE, input_square, mask=row_P < num_rows)
        inverse = 1.0 / tl.sqrt_rn(square / (4 * channels) + rms_eps)
        terms = logit_terms(output, scale_ptr, base_ptr)
        logit = total * inverse[:, None] * terms[0] + terms[1]
        store_gates(logit, output, row, known, next_premix_ptr, next_post_ptr, eps)
        store_logits(logit, output, row, known, next_mixing_ptr)
        balance(next_mixing_ptr, row_P, row_P < num_rows, eps, ITERATIONS)
    else:
        total = tl.where(output == _SQUARE, square[:, None], total)
        total = tl.where(output == _INPUT_SQUARE, input_square[:, None], total)
        tl.store(partial_ptr + (row * shares + share) * 32 + output, total, mask=known)


@triton.jit
def _join_shares(
    partial_ptr, scale_ptr, base_ptr, gain_ptr, normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr,
    next_mixing_ptr, num_rows, channels, shares, mixers, slices, eps, rms_eps, norm_eps,
    ROUNDED: tl.constexpr, ITERATIONS: tl.constexpr, R: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Sums over the shares: the first programs make the mixes of R rows each, the others norm B channels of a row."""
    announce()
    program, output = tl.program_id(0), tl.arange(0, 32)
    if program < mixers:
        if R == 1:
            share, row = tl.arange(0, S), program.to(tl.int64)
            place = partial_ptr + (row * shares + share) * 32
            terms = logit_terms(output, scale_ptr, base_ptr)
            wait()
            there = (share < shares)[:, None]
            total = tl.sum(tl.load(place[:, None] + output[None, :], mask=there, other=0.0), axis=0)
            square = tl.sum(tl.where(output == _SQUARE, total, 0.0), axis=0)
            inverse = 1.0 / tl.sqrt_rn(square / (4 * channels) + rms_eps)
            logit = total * inverse * terms[0] + terms[1]
            store_logits(logit, output, row, row >= 0, next_mixing_ptr)
            store_gates(logit, output, row, row >= 0, next_premix_ptr, next_post_ptr, eps)
            balance(next_mixing_ptr, row, row >= 0, eps, ITERATIONS)
        else:
            rows = program.to(tl.int64) * R + tl.arange(0, R)
            known = rows < num_rows
            sums = tl.zeros([R, 32], tl.float32)
            terms_ = logit_terms(output[None, :], scale_ptr, base_ptr)
            wait()
            for number in range(shares):
                place = partial_ptr + (rows * shares + number)[:, None] * 32 + output[None, :]
                sums += tl.load(place, mask=known[:, None], other=0.0)
            squares = tl.sum(tl.where(output[None, :] == _SQUARE, sums, 0.0), axis=1)
            inverses = 1.0 / tl.sqrt_rn(squares / (4 * channels) + rms_eps)
            logits = sums * inverses[:, None] * terms_[0] + terms_[1]
            store_logits(logits, output[None, :], rows[:, None], known[:, None], next_mixing_ptr)
            store_gates(logits, output[None, :], rows[:, None], known[:, None], next_premix_ptr, next_post_ptr, eps)
            balance(next_mixing_ptr, rows, known, eps, ITERATIONS)
    else:
        normer = (program - mixers).to(tl.int64)
        row_ = normer // slices
        channel = (normer % slices) * B + tl.arange(0, B)
        inside = channel < channels
        share_ = tl.arange(0, S)
        gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        wait()
        place_ = row_ * channels + channel
        u = tl.load(normed_ptr + place_, mask=inside, other=0.0)
        part_ = partial_ptr + (row_ * shares + share_) * 32 + _INPUT_SQUARE
        input_square = tl.sum(tl.load(part_, mask=share_ < shares, other=0.0), axis=0)
        inverse_ = 1.0 / tl.sqrt_rn(input_square / channels + norm_eps)
        normed = (u.to(tl.float32) * inverse_ * gain).to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + place_, normed, mask=inside)
        if ROUNDED:
            tl.store(rounded_ptr + place_, _rounded(normed, B), mask=inside)


class Tiling(NamedTuple):
    """How the rows are shared out."""

    rows: int
    step: int
    shares: int
    num_warps: int
    stages: int
    split: bool


def tiling(num_rows: int, channels: int) -> Tiling:
    """What was fastest on an H200 at 5120 channels."""
    if num_rows <= 16:
        return Tiling(16, 64, triton.cdiv(channels, 64), 4, 1, False)
    if num_rows <= 256:
        return Tiling(16, 64, triton.cdiv(channels, 64), 4, 1, False)
    return Tiling(64, 32, 4 if num_rows < 4096 else 2, 8, 2, True)


def advance(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
) -> Entered:
    return _run(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec)


def advance_projected(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    weight_OD: Tensor,
) -> tuple[Entered, Tensor]:
    outputs = weight_OD.shape[0]
    product_TO = streams_TND.new_empty(streams_TND.shape[0], outputs)
    # in the places of routing and experts
    tensors = [*[premix_TN] * 7, weight_OD.contiguous(), *[streams_TND] * 3, product_TO]
    entered = _run(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, tensors, num_inner=outputs)
    return entered, product_TO


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
    entered, ids_TK, weights_TK, _ = _run_routed(
        y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, router, image_T, None, 0.0
    )
    return entered, ids_TK, weights_TK


def advance_fed(
    y_TD: Tensor,
    streams_TND: Tensor,
    post_TN: Tensor,
    mixing_TNN: Tensor,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    router: Router,
    image_T: Tensor,
    weights: Weights,
    limit: float,
) -> tuple[Entered, Tensor]:
    entered, ids_TK, _, inner_TPI = _run_routed(
        y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, router, image_T, weights, limit
    )
    return entered, down(inner_TPI, ids_TK, weights.w2_EDI.contiguous(), weights.shared2_DI.contiguous())


def _run_routed(
    y_TD: Tensor,
    streams_TND: Tensor,
    post_TN: Tensor,
    mixing_TNN: Tensor,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    router: Router,
    image_T: Tensor,
    weights: Weights | None,
    limit: float,
) -> tuple[Entered, Tensor, Tensor, Tensor]:
    (num_rows, _, _), num_experts = streams_TND.shape, router.weight_ED.shape[0]
    new: dict[str, Any] = {"device": streams_TND.device, "dtype": torch.float32}
    ids_TK = torch.empty(num_rows, router.k, device=streams_TND.device, dtype=torch.int64)
    weights_TK, score_TE = torch.empty(num_rows, router.k, **new), torch.empty(num_rows, num_experts, **new)
    routing = [image_T, router.weight_ED, router.bias_E, router.image_bias_E, ids_TK, weights_TK, score_TE]
    up, num_inner, inner_TPI = [streams_TND] * 4, 0, streams_TND
    if weights is not None:
        num_inner = weights.w1_EID.shape[1]
        up = [weight.contiguous() for weight in (weights.w1_EID, weights.w3_EID, *weights[3:5])]
        inner_TPI = torch.empty(
            num_rows, num_experts + 1, num_inner, device=streams_TND.device, dtype=streams_TND.dtype
        )
    entered = _run(
        y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, [*routing, *up, inner_TPI],
        num_experts=num_experts, k=router.k, scaling=router.scaling, num_inner=num_inner, limit=limit,
    )  # fmt: skip
    return entered, ids_TK, weights_TK, inner_TPI


def _run(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    others: list[Tensor] | None = None,
    *,
    num_experts: int = 0,
    k: int = 0,
    scaling: float = 0.0,
    num_inner: int = 0,
    limit: float = 0.0,
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
    new_mixes = premix, post, mixing
    if channels > _NARROW or num_rows > _FEW_ROWS:
        assert others is None
        _run_tiles(
            y, streams_TND, old_post, old_mixing, premix_TN, sublayer, out_TND, normed_TD, rounded_TD, *new_mixes,
            fresh=fresh, rounded=spec is not None,
        )  # fmt: skip
        return Entered(out_TND, normed_TD, rounded_TD, *new_mixes)
    # three programs a row, and one for each block of outputs, or of each expert's inner channels
    programs = 3 + (num_experts + 1) * triton.cdiv(num_inner, _INNER) if num_inner else 3
    _advance[(num_rows, programs)](
        y, streams_TND, old_post, old_mixing, premix_TN, sublayer.fn, sublayer.scale_3, sublayer.base,
        sublayer.gain_D, out_TND, normed_TD, rounded_TD, *new_mixes, *(others or [premix_TN] * 12),
        channels, sublayer.eps, sublayer.rms_eps, sublayer.norm_eps, num_experts, k, scaling, num_inner, limit,
        FRESH=fresh, ROUNDED=spec is not None, ITERATIONS=sublayer.iterations, B=next_power_of_2(channels),
        E=max(2, next_power_of_2(num_experts)) if num_experts else 0, INNER=_INNER if num_inner else 0, num_warps=4,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return Entered(out_TND, normed_TD, rounded_TD, *new_mixes)


def _run_tiles(
    y: Tensor,
    streams_TND: Tensor,
    old_post: Tensor,
    old_mixing: Tensor,
    premix_TN: Tensor,
    sublayer: Sublayer,
    out_TND: Tensor,
    normed_TD: Tensor,
    rounded_TD: Tensor,
    premix: Tensor,
    post: Tensor,
    mixing: Tensor,
    *,
    fresh: bool,
    rounded: bool,
) -> None:
    num_rows, _, channels = streams_TND.shape
    plan, kind = tiling(num_rows, channels), operand(streams_TND)
    span = triton.cdiv(triton.cdiv(channels, plan.step), plan.shares) * plan.step
    shares = triton.cdiv(channels, span)
    alone, split = shares == 1, plan.split and kind == tl.bfloat16
    partial = torch.empty(num_rows, shares, 32, device=streams_TND.device, dtype=torch.float32)
    fn = sublayer.fn.contiguous()
    if split:
        width = 4 * channels
        fn = torch.empty(2, 32, width, device=streams_TND.device, dtype=torch.bfloat16)
        _split_weights[(32, triton.cdiv(width, 1024))](sublayer.fn, fn, width, B=1024, launch_pdl=AHEAD)
    _share_streams[(triton.cdiv(num_rows, plan.rows), shares)](
        y, streams_TND, old_post, old_mixing, premix_TN, fn, out_TND, normed_TD, partial,
        sublayer.scale_3, sublayer.base, premix, post, mixing,
        num_rows, channels, shares, span, sublayer.eps, sublayer.rms_eps,
        FRESH=fresh, OPERAND=kind, SPLIT=split, ITERATIONS=sublayer.iterations, ALONE=alone,
        ONE=span == plan.step and not split, P=plan.rows, B=plan.step, STAGES=plan.stages, num_warps=plan.num_warps,
        launch_pdl=AHEAD,
    )  # fmt: skip
    width = min(_SLICE, next_power_of_2(channels))
    slices = triton.cdiv(channels, width)
    # a thread balances a row: where all rows fill the chip anyway, many rows a program
    rows = 1 if num_rows <= _FEW_MIXES else 32
    mixers = 0 if alone else triton.cdiv(num_rows, rows)
    _join_shares[(mixers + num_rows * slices,)](
        partial, sublayer.scale_3, sublayer.base, sublayer.gain_D, normed_TD, rounded_TD, premix, post, mixing,
        num_rows, channels, shares, mixers, slices, sublayer.eps, sublayer.rms_eps, sublayer.norm_eps,
        ROUNDED=rounded, ITERATIONS=sublayer.iterations, R=rows, B=width, S=next_power_of_2(shares), num_warps=4,
        launch_pdl=AHEAD,
    )  # fmt: skip
