"""From one sublayer's output to the next one's input with the streams read once.

Few rows of narrow streams: some programs a row, each of which reads its part of the weights before the kernel before
has ended. Few rows of wide ones: `advance_wide`. Many rows: a program makes a row's streams and input, which nothing
has to be read twice for; what the mixes need is a product of tiles behind it, which reads the streams once more.

T rows, N streams, D channels of a stream, P and R rows of a tile, B channels of a step, S shares.
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
from cedar.kernels.pages import Split
from cedar.kernels.triton.advance_wide import MOST_BEHIND, Entering, run_routed, run_split, run_wide
from cedar.kernels.triton.chain import AHEAD, announce, follow, wait
from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.feed import activated, down_all
from cedar.kernels.triton.few_rows import operand
from cedar.kernels.triton.gates import add_round
from cedar.kernels.triton.many_experts import MOST_EXPERTS
from cedar.kernels.triton.mixes import balance, logit_terms, store_gates, store_logits
from cedar.kernels.triton.route import (
    MAX_EXPERTS,
    choose_experts,
    router_biases,
    router_products,
    router_weights,
    weigh_experts,
)
from cedar.kernels.triton.streams import (
    SQUARE,
    collapse,
    four,
    mixed,
    new_streams,
    old_mixes,
    read_streams,
    rounded_input,
    store_streams,
)

__all__ = [
    "FORWARD_ONLY",
    "advance",
    "advance_fed",
    "advance_projected",
    "advance_routed",
    "advance_split",
    "fits",
    "unavailable",
]

FORWARD_ONLY = ("advance", "advance_projected", "advance_routed", "advance_fed", "advance_split")
# a thread holds the coefficients' weights of its channels
_NARROW, _FEW_ROWS = 256, 64
# rows that take what reads them along, and experts whose weights are all read ahead, in blocks of outputs
_MOST_FED, _FEW_EXPERTS, _INNER = 4, 8, 32
# wide streams whose rows are taken by tiles and shares of the channels
_FEW_WIDE_ROWS = 128
# sums of 24 products from which a program makes mixes
_MIXED = 64


def fits(op: str, streams: Tensor, *others: Tensor) -> bool:
    """Four streams of whole groups of 32. Routed at once: 64 rows of up to 256 channels; with a linear or the experts
    behind it: 4 rows, for which every expert's weights are read. Wider ones with routing or a stored linear: 2 rows.
    """
    num_rows, num_streams, channels = streams.shape
    fitting = num_rows > 0 and num_streams == 4 and channels % 32 == 0
    fitting = fitting and is_half_or_float(streams) and (op == "advance_split" or is_half_or_float(*others))
    if op == "advance":
        return fitting
    if op == "advance_projected":
        return fitting and channels <= _NARROW and num_rows <= _MOST_FED and streams.dtype == others[0].dtype
    num_experts = others[0].shape[0]
    if op == "advance_split":
        return fitting and channels > _NARROW and num_rows <= MOST_BEHIND
    if op == "advance_routed" and channels > _NARROW and num_experts > MAX_EXPERTS:
        return fitting and num_rows <= MOST_BEHIND and num_experts <= MOST_EXPERTS
    if op == "advance_fed":
        fitting = fitting and num_rows <= _MOST_FED and num_experts <= _FEW_EXPERTS
        fitting = fitting and others[1].shape[1] % 32 == 0 and others[1].shape[1] <= _NARROW
    return fitting and channels <= _NARROW and num_rows <= _FEW_ROWS and num_experts <= MAX_EXPERTS


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
    mixes = old_mixes(post_ptr, mixing_ptr, row, row >= 0, FRESH)
    s0, s1, s2, s3 = new_streams(y_ptr, x_ptr, mixes, row, channel, channel < channels, channels, dtype, FRESH)
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
    mixes = old_mixes(post_ptr, mixing_ptr, row, row >= 0, FRESH)
    streams = new_streams(y_ptr, x_ptr, mixes, row, channel, inside, channels, dtype, FRESH)
    u = collapse(streams, four(premix_ptr + row * 4, row >= 0)).to(tl.float32)
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
                store_streams(out_ptr, streams, row, channel, inside, channels)
            tl.store(normed_ptr + row * channels + channel, normed, mask=inside)
            if ROUNDED:
                tl.store(rounded_ptr + row * channels + channel, rounded_input(normed, B), mask=inside)
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
            u = rounded_input(normed, B).to(tl.float32)[None, :] if ROUNDED else normed.to(tl.float32)[None, :]
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


# many rows: one pass a row, then products of tiles of rows


@triton.jit
def _stream_rows(
    y_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, gain_ptr, out_ptr, normed_ptr, rounded_ptr, square_ptr,
    part_ptr, num_rows, channels, norm_eps,
    FRESH: tl.constexpr, ROUNDED: tl.constexpr, CHUNKS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A row's streams and input, B channels at a time; one more program a row of the weights cuts it in two parts."""
    announce()
    program = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    wait()
    if program < num_rows:
        mixes = old_mixes(post_ptr, mixing_ptr, program, program >= 0, FRESH)
        premix = four(premix_ptr + program * 4, program >= 0)
        inputs = ()
        square, input_square = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
        channel = tl.arange(0, B)
        old = read_streams(y_ptr, x_ptr, program, channel, channel < channels, channels, FRESH)
        for number in tl.static_range(CHUNKS):
            channel = number * B + tl.arange(0, B)
            inside = channel < channels
            ahead = old
            if number + 1 < CHUNKS:
                # before this chunk's streams are written: the compiler cannot know that they lie elsewhere
                ahead = read_streams(y_ptr, x_ptr, program, channel + B, channel + B < channels, channels, FRESH)
            streams = mixed(old, mixes, dtype, FRESH)
            old = ahead
            if FRESH:
                store_streams(out_ptr, streams, program, channel, inside, channels)
            u = collapse(streams, premix)
            inputs = inputs + (u,)  # type: ignore[assignment]
            for j in tl.static_range(4):
                square += streams[j].to(tl.float32) * streams[j].to(tl.float32)
            input_square += u.to(tl.float32) * u.to(tl.float32)
        tl.store(square_ptr + program, tl.sum(square, axis=0))
        inverse = 1.0 / tl.sqrt_rn(tl.sum(input_square, axis=0) / channels + norm_eps)
        for number in tl.static_range(CHUNKS):
            channel = number * B + tl.arange(0, B)
            inside = channel < channels
            gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
            normed = (inputs[number].to(tl.float32) * inverse * gain).to(dtype)
            tl.store(normed_ptr + program * channels + channel, normed, mask=inside)
            if ROUNDED:
                tl.store(rounded_ptr + program * channels + channel, rounded_input(normed, B), mask=inside)
    else:
        # rows 24..31 of the parts are zero
        output, width = program - num_rows, 4 * channels
        for start in range(0, width, B):
            column = start + tl.arange(0, B)
            f = tl.load(fn_ptr + output * width + column, mask=(column < width) & (output < 24), other=0.0)
            high = f.to(part_ptr.dtype.element_ty)
            place = part_ptr + output * width + column
            tl.store(place, high, mask=column < width)
            low = (f - high.to(tl.float32)).to(part_ptr.dtype.element_ty)
            tl.store(place + 32 * width, low, mask=column < width)


@triton.jit
def _tile_products(
    x_ptr, part_ptr, square_ptr, partial_ptr, num_rows, width, span,
    OPERAND: tl.constexpr, P: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """P rows' products over a share of their channels with both parts of the weights."""
    follow()
    share, shares = tl.program_id(1), tl.num_programs(1)
    # the last rows first: they are still in the cache
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * P + tl.arange(0, P)
    known, output = row < num_rows, tl.arange(0, 64)
    total = tl.zeros([P, 64], tl.float32)
    first = share * span
    for start in tl.range(first, tl.minimum(first + span, width), B, num_stages=STAGES):
        channel = start + tl.arange(0, B)
        inside = (channel < width)[None, :]
        x = tl.load(x_ptr + row[:, None] * width + channel[None, :], mask=known[:, None] & inside, other=0.0)
        w = tl.load(part_ptr + output[:, None] * width + channel[None, :], mask=inside, other=0.0)
        total = tl.dot(x.to(OPERAND), tl.trans(w.to(OPERAND)), total, input_precision="ieee")
    high, low = tl.split(tl.permute(tl.reshape(total, (P, 2, 32)), (0, 2, 1)))
    column = tl.arange(0, 32)[None, :]
    square = tl.load(square_ptr + row, mask=known & (share == 0), other=0.0)
    total = tl.where(column == SQUARE, square[:, None], high + low)
    tl.store(partial_ptr + (row * shares + share)[:, None] * 32 + column, total, mask=known[:, None])


@triton.jit
def _mix_rows(
    partial_ptr, scale_ptr, base_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr, num_rows, channels, shares,
    eps, rms_eps, ITERATIONS: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    announce()
    row, output = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, 32)[None, :]
    known, share = row < num_rows, tl.arange(0, S)
    terms = logit_terms(output, scale_ptr, base_ptr)
    wait()
    place = (row[:, None] * shares + share[None, :])[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    there = (known[:, None] & (share < shares)[None, :])[:, :, None]
    total = tl.sum(tl.load(partial_ptr + place, mask=there, other=0.0), axis=1)
    square = tl.sum(tl.where(output == SQUARE, total, 0.0), axis=1)
    inverse = 1.0 / tl.sqrt_rn(square / (4 * channels) + rms_eps)
    logit = total * inverse[:, None] * terms[0] + terms[1]
    store_logits(logit, output, row[:, None], known[:, None], next_mixing_ptr)
    store_gates(logit, output, row[:, None], known[:, None], next_premix_ptr, next_post_ptr, eps)
    balance(next_mixing_ptr, row, known, eps, ITERATIONS)


def advance(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    more_TD: Tensor | None = None,
) -> Entered:
    return _run(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, more_TD=more_TD)


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
    if streams_TND.shape[-1] > _NARROW:
        entering = _entering(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, None)
        return entering.entered, *run_routed(entering, router, image_T)
    entered, ids_TK, weights_TK, _ = _run_routed(
        y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, router, image_T, None, 0.0
    )
    return entered, ids_TK, weights_TK


def advance_split(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    more_TD: Tensor | None,
    codes_XD: Tensor,
    scales: Tensor,
    split: Split,
) -> tuple[Entered, Tensor]:
    assert split.query_spec == spec and split.stored.spec == FP8
    entering = _entering(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, more_TD)
    return entering.entered, run_split(entering, codes_XD, scales, split)


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
    return entered, down_all(inner_TPI, ids_TK, weights.w2_EDI, weights.shared2_DI)


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


def _entering(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    more_TD: Tensor | None,
) -> Entering:
    assert spec is None or spec == FP8
    num_rows, num_streams, channels = streams_TND.shape
    streams_TND, premix_TN = streams_TND.contiguous(), premix_TN.contiguous()
    new: dict[str, Any] = {"device": streams_TND.device, "dtype": torch.float32}
    normed_TD = streams_TND.new_empty(num_rows, channels)
    entered = Entered(
        streams_TND if y_TD is None else torch.empty_like(streams_TND),
        normed_TD,
        normed_TD if spec is None else torch.empty_like(normed_TD),
        torch.empty(num_rows, num_streams, **new),
        torch.empty(num_rows, num_streams, **new),
        torch.empty(num_rows, num_streams, num_streams, **new),
    )
    old_post = premix_TN if post_TN is None else post_TN.contiguous()
    old_mixing = premix_TN if mixing_TNN is None else mixing_TNN.contiguous()
    y = streams_TND if y_TD is None else y_TD.contiguous()
    more = None if y_TD is None or more_TD is None else more_TD.contiguous()
    mixes = old_post, old_mixing, premix_TN
    return Entering(y, more, streams_TND, *mixes, sublayer, entered, y_TD is not None, spec is not None)


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
    more_TD: Tensor | None = None,
) -> Entered:
    num_rows, _, channels = streams_TND.shape
    by_shares = channels > _NARROW and num_rows <= _FEW_WIDE_ROWS
    if y_TD is not None and more_TD is not None and not by_shares:
        y_TD, more_TD = add_round(y_TD.contiguous(), more_TD.contiguous()), None
    entering = _entering(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, more_TD)
    if num_rows > _FEW_ROWS or channels > _NARROW:
        assert others is None
        (run_wide if by_shares else _run_rows)(entering)
        return entering.entered
    y, _, *old, _, entered, fresh, rounded = entering
    # three programs a row, and one for each block of outputs, or of each expert's inner channels
    programs = 3 + (num_experts + 1) * triton.cdiv(num_inner, _INNER) if num_inner else 3
    _advance[(num_rows, programs)](
        y, *old, sublayer.fn, sublayer.scale_3, sublayer.base, sublayer.gain_D, *entered, *(others or [y] * 12),
        channels, sublayer.eps, sublayer.rms_eps, sublayer.norm_eps, num_experts, k, scaling, num_inner, limit,
        FRESH=fresh, ROUNDED=rounded, ITERATIONS=sublayer.iterations, B=next_power_of_2(channels),
        E=max(2, next_power_of_2(num_experts)) if num_experts else 0, INNER=_INNER if num_inner else 0, num_warps=4,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return entered


class Tiling(NamedTuple):
    """How the products of many rows are shared out: rows of a tile, channels of a step, programs that fill the chip."""

    rows: int = 64
    step: int = 128
    programs: int = 264
    num_warps: int = 4
    stages: int = 3
    chunk: int = 1024
    chunk_warps: int = 4


TILING = Tiling()


def _run_rows(entering: Entering) -> None:
    y, _, streams_TND, old_post, old_mixing, premix_TN, sublayer, entered, fresh, rounded = entering
    (num_rows, _, channels), kind = streams_TND.shape, operand(streams_TND)
    width, chunk, device = 4 * channels, min(TILING.chunk, next_power_of_2(channels)), streams_TND.device
    out_TND, normed_TD, rounded_TD, *new_mixes = entered
    square_T = torch.empty(num_rows, device=device, dtype=torch.float32)
    parts = torch.empty(64, width, device=device, dtype=torch.bfloat16 if kind == tl.bfloat16 else torch.float32)
    _stream_rows[(num_rows + 32,)](
        y, streams_TND, old_post, old_mixing, premix_TN, sublayer.fn, sublayer.gain_D, out_TND, normed_TD, rounded_TD,
        square_T, parts, num_rows, channels, sublayer.norm_eps,
        FRESH=fresh, ROUNDED=rounded, CHUNKS=triton.cdiv(channels, chunk), B=chunk, num_warps=TILING.chunk_warps,
        launch_pdl=AHEAD,
    )  # fmt: skip
    tiles, steps = triton.cdiv(num_rows, TILING.rows), triton.cdiv(width, TILING.step)
    span = triton.cdiv(steps, max(1, min(steps, TILING.programs // tiles))) * TILING.step
    shares = triton.cdiv(width, span)
    partial = torch.empty(num_rows, shares, 32, device=device, dtype=torch.float32)
    _tile_products[(tiles, shares)](
        out_TND, parts, square_T, partial, num_rows, width, span,
        OPERAND=kind, P=TILING.rows, B=TILING.step, STAGES=TILING.stages, num_warps=TILING.num_warps,
        launch_pdl=AHEAD,
    )  # fmt: skip
    padded = next_power_of_2(shares)
    rows = max(1, _MIXED // padded)
    _mix_rows[(triton.cdiv(num_rows, rows),)](
        partial, sublayer.scale_3, sublayer.base, *new_mixes, num_rows, channels, shares, sublayer.eps,
        sublayer.rms_eps, ITERATIONS=sublayer.iterations, R=rows, S=padded, num_warps=4,
        launch_pdl=AHEAD,
    )  # fmt: skip
