"""`advance` of few rows of wide streams, and for a row or two what stands behind it in the same launch.

A program takes a tile of rows and a share of the channels; others wait for these and add the shares' sums in a fixed
order: one makes a row's mixes, some norm its channels. What reads the input waits for the norms alone, beside the
mixes: the routing among hundreds of experts, or the latents of a query and a window key. Its weights are read before.

T rows, D channels of a stream, E experts, K chosen; P rows of a tile, B channels of a share, S shares.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.experts import Router
from cedar.kernels.mhc import Entered, Sublayer
from cedar.kernels.pages import Split
from cedar.kernels.triton.arrivals import arrive, counters, leave, wait_for
from cedar.kernels.triton.chain import AHEAD, announce, wait
from cedar.kernels.triton.device import INTERPRETED, next_power_of_2
from cedar.kernels.triton.few_rows import operand
from cedar.kernels.triton.many_experts import ROW_EXPERTS, ROW_STEP, choose, row_products
from cedar.kernels.triton.mixes import balance, logit_terms, store_gates, store_logits
from cedar.kernels.triton.packed_rows import STORED_STEP, packed_products
from cedar.kernels.triton.pages import split_products
from cedar.kernels.triton.streams import (
    INPUT_SQUARE,
    SQUARE,
    collapse,
    four,
    mixed,
    old_mixes,
    read_streams,
    rounded_input,
    store_streams,
)

MOST_BEHIND = 2
_COMPILED = tl.constexpr(not INTERPRETED)
# rows of a tile, channels that a program norms
_ROWS, _SLICE = 16, 1024
# tiles whose rows' sums are joined in the same launch: more programs would wait, and poll, than there is room for
_TOGETHER = 2
# where the counters of rows lie, behind those of tiles
_NORMED, _MULTIPLIED = tl.constexpr(16), tl.constexpr(24)
_MOST_BEHIND = 8


@triton.jit
def _opaque(x):
    """x, by a step that the compiler neither repeats nor moves across a wait."""
    if _COMPILED and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.bfloat16, is_pure=False, pack=2)
    elif _COMPILED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, is_pure=False, pack=1)
    else:
        return x


@triton.jit
def _product(stream, weight, total, low, OPERAND: tl.constexpr):
    """Products of a tile with float32 weights; bfloat16 rows meet two parts of them, which hold 16 bits."""
    stream, high = stream.to(OPERAND), weight.to(OPERAND)
    total = tl.dot(stream, tl.trans(high), total, input_precision="ieee")
    if OPERAND != tl.float32:
        low = tl.dot(stream, tl.trans((weight - high.to(tl.float32)).to(OPERAND)), low)
    return total, low


@triton.jit
def _across(numbers):
    return numbers[0][:, None], numbers[1][:, None], numbers[2][:, None], numbers[3][:, None]


@triton.jit
def _share_streams(
    y_ptr, more_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, out_ptr, normed_ptr, partial_ptr, tile, share,
    shares, num_rows, channels,
    FRESH: tl.constexpr, MORE: tl.constexpr, OPERAND: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """P rows times B channels; `normed` holds the input before its norm for now."""
    row_P = tile.to(tl.int64) * P + tl.arange(0, P)
    known_P, channel = row_P < num_rows, share * B + tl.arange(0, B)
    row, known, output = row_P[:, None], known_P[:, None], tl.arange(0, 32)
    place, inside = channel[None, :], known & (channel < channels)[None, :]
    # the weights are read while the kernel before still runs
    fn_ptr += output[:, None] * (4 * channels) + channel[None, :]
    wanted = (output < 24)[:, None] & (channel < channels)[None, :]
    w0 = tl.load(fn_ptr, mask=wanted, other=0.0)
    w1 = tl.load(fn_ptr + channels, mask=wanted, other=0.0)
    w2 = tl.load(fn_ptr + 2 * channels, mask=wanted, other=0.0)
    w3 = tl.load(fn_ptr + 3 * channels, mask=wanted, other=0.0)
    wait()
    # nothing may wait for the weights before the streams are on their way
    w0, w1, w2, w3 = _opaque(w0), _opaque(w1), _opaque(w2), _opaque(w3)
    premix = _across(four(premix_ptr + row_P * 4, known_P))
    if FRESH:
        post, m0, m1, m2, m3 = old_mixes(post_ptr, mixing_ptr, row_P, known_P, FRESH)
        mixes = _across(post), _across(m0), _across(m1), _across(m2), _across(m3)
    else:
        mixes = known
    old = read_streams(y_ptr, x_ptr, row, place, inside, channels, FRESH)
    if MORE:
        more = tl.load(more_ptr + row * channels + place, mask=inside, other=0.0)
        y = (old[4].to(tl.float32) + more.to(tl.float32)).to(more_ptr.dtype.element_ty)
        old = old[0], old[1], old[2], old[3], y
    s0, s1, s2, s3 = mixed(old, mixes, out_ptr.dtype.element_ty, FRESH)
    # not computed once more in the layout of a product
    s0, s1, s2, s3 = _opaque(s0), _opaque(s1), _opaque(s2), _opaque(s3)
    if FRESH:
        store_streams(out_ptr, (s0, s1, s2, s3), row, place, inside, channels)
    u = collapse((s0, s1, s2, s3), premix)
    tl.store(normed_ptr + row * channels + place, u, mask=inside)
    total, low = tl.zeros([P, 32], tl.float32), tl.zeros([P, 32], tl.float32)
    total, low = _product(s0, w0, total, low, OPERAND)
    total, low = _product(s1, w1, total, low, OPERAND)
    total, low = _product(s2, w2, total, low, OPERAND)
    total, low = _product(s3, w3, total, low, OPERAND)
    s0, s1, s2, s3 = s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)
    square, u = tl.sum(s0 * s0 + s1 * s1 + (s2 * s2 + s3 * s3), axis=1), u.to(tl.float32)
    total = tl.where(output[None, :] == SQUARE, square[:, None], total + low)
    total = tl.where(output[None, :] == INPUT_SQUARE, tl.sum(u * u, axis=1)[:, None], total)
    tl.store(partial_ptr + (row * shares + share) * 32 + output[None, :], total, mask=known)


@triton.jit
def _arrived(counter_ptr, shares, TOGETHER: tl.constexpr):
    """The shares of a row are there: of this launch, or of the one before."""
    wait()
    if TOGETHER:
        wait_for(counter_ptr, shares)


@triton.jit
def _join_shares(
    partial_ptr, scale_ptr, base_ptr, gain_ptr, normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr,
    next_mixing_ptr, counter_ptr, waiting, row, part, channels, shares, eps, rms_eps, norm_eps,
    TOGETHER: tl.constexpr, BEHIND: tl.constexpr, ROUNDED: tl.constexpr, ITERATIONS: tl.constexpr, B: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """A row's sums over its shares: one program makes its mixes, the others norm B channels each."""
    share = tl.arange(0, S)
    place, there = partial_ptr + (row * shares + share) * 32, share < shares
    if part == 0:
        output = tl.arange(0, 32)
        terms = logit_terms(output, scale_ptr, base_ptr)
        _arrived(counter_ptr + row // P, shares, TOGETHER)
        partial = tl.load(place[:, None] + output[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
        total = tl.sum(partial, axis=0)
        square = tl.sum(tl.where(output == SQUARE, total, 0.0), axis=0)
        logit = total * (1.0 / tl.sqrt_rn(square / (4 * channels) + rms_eps)) * terms[0] + terms[1]
        store_logits(logit, output, row, row >= 0, next_mixing_ptr)
        store_gates(logit, output, row, row >= 0, next_premix_ptr, next_post_ptr, eps)
        balance(next_mixing_ptr, row, row >= 0, eps, ITERATIONS)
    else:
        channel = (part - 1) * B + tl.arange(0, B)
        inside = channel < channels
        gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        _arrived(counter_ptr + row // P, shares, TOGETHER)
        u = tl.load(normed_ptr + row * channels + channel, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        square = tl.sum(tl.load(place + INPUT_SQUARE, mask=there, other=0.0, cache_modifier=".cg"), axis=0)
        normed = (u * (1.0 / tl.sqrt_rn(square / channels + norm_eps)) * gain).to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + row * channels + channel, normed, mask=inside)
        if ROUNDED:
            tl.store(rounded_ptr + row * channels + channel, rounded_input(normed, B), mask=inside)
        if BEHIND:
            arrive(counter_ptr + _NORMED + row)
    if TOGETHER:
        leave(counter_ptr + row // P, shares, waiting)


@triton.jit
def _enter(
    program, tensors, num_rows, channels, tiles, shares, parts, eps, rms_eps, norm_eps,
    TOGETHER: tl.constexpr, BEHIND: tl.constexpr, FRESH: tl.constexpr, MORE: tl.constexpr, ROUNDED: tl.constexpr,
    ITERATIONS: tl.constexpr, OPERAND: tl.constexpr, P: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Tiles of rows by shares of channels; then rows by what is made of their sums."""
    (
        y_ptr, more_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, scale_ptr, base_ptr, gain_ptr, out_ptr,
        normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr, partial_ptr, counter_ptr,
    ) = tensors  # fmt: skip
    if program < tiles * shares:
        tile = program % tiles
        _share_streams(
            y_ptr, more_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, out_ptr, normed_ptr, partial_ptr, tile,
            program // tiles, shares, num_rows, channels, FRESH, MORE, OPERAND, P, B,
        )  # fmt: skip
        if TOGETHER:
            arrive(counter_ptr + tile)
    else:
        row = (program - tiles * shares) // parts
        waiting = tl.minimum(num_rows - row // P * P, P) * parts
        _join_shares(
            partial_ptr, scale_ptr, base_ptr, gain_ptr, normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr,
            next_mixing_ptr, counter_ptr, waiting, row.to(tl.int64), (program - tiles * shares) % parts, channels,
            shares, eps, rms_eps, norm_eps, TOGETHER, BEHIND, ROUNDED, ITERATIONS, WIDTH, P, S,
        )  # fmt: skip


@triton.jit
def _advance_wide(
    y_ptr, more_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, scale_ptr, base_ptr, gain_ptr, out_ptr,
    normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr, partial_ptr, counter_ptr, num_rows,
    channels, tiles, shares, parts, eps, rms_eps, norm_eps, first,
    TOGETHER: tl.constexpr, FRESH: tl.constexpr, MORE: tl.constexpr, ROUNDED: tl.constexpr, ITERATIONS: tl.constexpr,
    OPERAND: tl.constexpr, P: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Programs from `first` on; what is made of the sums TOGETHER with them or in a launch of its own."""
    announce()
    tensors = (
        y_ptr, more_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, scale_ptr, base_ptr, gain_ptr, out_ptr,
        normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr, partial_ptr, counter_ptr,
    )  # fmt: skip
    _enter(
        tl.program_id(0) + first, tensors, num_rows, channels, tiles, shares, parts, eps, rms_eps, norm_eps,
        TOGETHER, False, FRESH, MORE, ROUNDED, ITERATIONS, OPERAND, P, B, WIDTH, S,
    )  # fmt: skip


@triton.jit
def _advance_route(
    y_ptr, more_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, scale_ptr, base_ptr, gain_ptr, out_ptr,
    normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr, partial_ptr, counter_ptr, num_rows,
    channels, tiles, shares, parts, eps, rms_eps, norm_eps,
    image_ptr, router_ptr, bias_ptr, image_bias_ptr, ids_ptr, weights_ptr, score_ptr, products_ptr, num_experts, k,
    scaling, router_shares,
    FRESH: tl.constexpr, MORE: tl.constexpr, ROUNDED: tl.constexpr, ITERATIONS: tl.constexpr, OPERAND: tl.constexpr,
    P: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr,
    EXPERTS: tl.constexpr, STEP: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Behind the entry each row's products with some experts' weights over a share of the channels, then its choice."""
    announce()
    tensors = (
        y_ptr, more_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, scale_ptr, base_ptr, gain_ptr, out_ptr,
        normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr, partial_ptr, counter_ptr,
    )  # fmt: skip
    program, entering = tl.program_id(0), tiles * shares + num_rows * parts
    each = tl.cdiv(num_experts, EXPERTS) * router_shares
    if program < entering:
        _enter(
            program, tensors, num_rows, channels, tiles, shares, parts, eps, rms_eps, norm_eps,
            True, True, FRESH, MORE, ROUNDED, ITERATIONS, OPERAND, P, B, WIDTH, S,
        )  # fmt: skip
    elif program < entering + num_rows * each:
        t, job = (program - entering) % num_rows, (program - entering) // num_rows
        expert = job // router_shares * EXPERTS + tl.arange(0, EXPERTS)
        channel = job % router_shares * STEP + tl.arange(0, STEP)
        arrived_ptr = counter_ptr + _NORMED + t
        product = row_products(
            normed_ptr, router_ptr, t, expert, channel, channels, num_experts, arrived_ptr, parts - 1, True
        )  # fmt: skip
        place = products_ptr + (job % router_shares * num_rows + t) * num_experts + expert
        tl.store(place, product, mask=expert < num_experts)
        arrive(counter_ptr + _MULTIPLIED + t)
        leave(arrived_ptr, parts - 1, each)
    else:
        row = (program - entering - num_rows * each).to(tl.int64)
        choose(
            products_ptr, image_ptr, bias_ptr, image_bias_ptr, ids_ptr, weights_ptr, score_ptr,
            counter_ptr + _MULTIPLIED + row, each, 1, row, num_rows, num_experts, k, scaling, router_shares, True, E, R,
        )  # fmt: skip


@triton.jit
def _advance_split(
    y_ptr, more_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, scale_ptr, base_ptr, gain_ptr, out_ptr,
    normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr, partial_ptr, counter_ptr, num_rows,
    channels, tiles, shares, parts, eps, rms_eps, norm_eps,
    weight_ptr, factors_ptr, products_ptr, latent_ptr, query_gain_ptr, query_ptr, key_gain_ptr, cos_ptr, sin_ptr,
    page_ptr, row_ptr, present_ptr, codes_ptr, scales_ptr, outputs, num_latent, key_channels, num_angles, query_eps,
    key_eps, code_page, code_row, scale_page, scale_row,
    FRESH: tl.constexpr, MORE: tl.constexpr, ROUNDED: tl.constexpr, ITERATIONS: tl.constexpr, OPERAND: tl.constexpr,
    P: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr,
    SHARES: tl.constexpr, STEP: tl.constexpr, Q: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Behind the entry each row's products with a tile of a stored weight's outputs over a share of the channels,
    then its query latent and its window key.
    """
    announce()
    tensors = (
        y_ptr, more_ptr, x_ptr, post_ptr, mixing_ptr, premix_ptr, fn_ptr, scale_ptr, base_ptr, gain_ptr, out_ptr,
        normed_ptr, rounded_ptr, next_premix_ptr, next_post_ptr, next_mixing_ptr, partial_ptr, counter_ptr,
    )  # fmt: skip
    program, entering = tl.program_id(0), tiles * shares + num_rows * parts
    each = tl.cdiv(outputs, 32) * SHARES
    if program < entering:
        _enter(
            program, tensors, num_rows, channels, tiles, shares, parts, eps, rms_eps, norm_eps,
            True, True, FRESH, MORE, ROUNDED, ITERATIONS, OPERAND, P, B, WIDTH, S,
        )  # fmt: skip
    elif program < entering + num_rows * each:
        t, job = (program - entering) % num_rows, (program - entering) // num_rows
        arrived_ptr = counter_ptr + _NORMED + t
        input_ptr = (rounded_ptr if ROUNDED else normed_ptr) + t * channels
        output = job // SHARES * 32 + tl.arange(0, 32)
        product = packed_products(
            input_ptr, weight_ptr, factors_ptr, job // SHARES, job % SHARES * STEP + tl.arange(0, STEP), channels,
            outputs, arrived_ptr, parts - 1, True,
        )  # fmt: skip
        tl.store(products_ptr + (t * SHARES + job % SHARES) * outputs + output, product, mask=output < outputs)
        arrive(counter_ptr + _MULTIPLIED + t)
        leave(arrived_ptr, parts - 1, each)
    else:
        row, part = (program - entering - num_rows * each) // 2, (program - entering - num_rows * each) % 2
        split_products(
            row.to(tl.int64), part, products_ptr, latent_ptr, counter_ptr + _MULTIPLIED + row, each, query_gain_ptr,
            query_ptr, key_gain_ptr, cos_ptr, sin_ptr, page_ptr, row_ptr, present_ptr, codes_ptr, scales_ptr, outputs,
            num_latent, key_channels, num_angles, query_eps, key_eps, code_page, code_row, scale_page, scale_row,
            ROUNDED, SHARES, Q, G,
        )  # fmt: skip


class Entering(NamedTuple):
    """What a launch begins with; unused pointers must still be tensors.

    Attributes:
        more_TD: The other half of `y_TD`, or None.
        entered: Where the results go.
        fresh: There is an output to mix in.
        rounded: The input is wanted in FP8.
    """

    y_TD: Tensor
    more_TD: Tensor | None
    streams_TND: Tensor
    post_TN: Tensor
    mixing_TNN: Tensor
    premix_TN: Tensor
    sublayer: Sublayer
    entered: Entered
    fresh: bool
    rounded: bool


class _Launch(NamedTuple):
    """What every kernel of this file takes; programs that share the streams out, and that join."""

    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    working: int
    joining: int
    together: bool


def _launch(entering: Entering) -> _Launch:
    y_TD, more_TD, streams_TND, *old_mixes, sublayer, entered, fresh, rounded = entering
    num_rows, _, channels = streams_TND.shape
    # as many programs as fill the chip; with more rows fewer of them, which read less twice
    share = 32 if num_rows <= 2 * _ROWS else 64
    width = min(_SLICE, next_power_of_2(channels))
    tiles, shares, parts = triton.cdiv(num_rows, _ROWS), triton.cdiv(channels, share), 1 + triton.cdiv(channels, width)
    partial = torch.empty(num_rows, shares, 32, device=streams_TND.device, dtype=torch.float32)
    arguments = (
        y_TD, y_TD if more_TD is None else more_TD, streams_TND, *old_mixes, sublayer.fn, sublayer.scale_3,
        sublayer.base, sublayer.gain_D, *entered, partial, counters(y_TD.device, _MULTIPLIED.value + _MOST_BEHIND),
        num_rows, channels, tiles, shares, parts, sublayer.eps, sublayer.rms_eps, sublayer.norm_eps,
    )  # fmt: skip
    constants = {
        "FRESH": fresh, "MORE": more_TD is not None, "ROUNDED": rounded, "ITERATIONS": sublayer.iterations,
        "OPERAND": operand(streams_TND), "P": _ROWS, "B": share, "WIDTH": width, "S": next_power_of_2(shares),
    }  # fmt: skip
    return _Launch(arguments, constants, tiles * shares, num_rows * parts, tiles <= _TOGETHER)


def run_wide(entering: Entering) -> None:
    """Few rows of wide streams into `entered`."""
    arguments, constants, working, joining, together = _launch(entering)
    launches = [(0, working + joining)] if together else [(0, working), (working, joining)]
    for first, programs in launches:
        _advance_wide[(programs,)](*arguments, first, TOGETHER=together, **constants, num_warps=4, launch_pdl=AHEAD)


def run_routed(entering: Entering, router: Router, image_T: Tensor) -> tuple[Tensor, Tensor]:
    """The same for `MOST_BEHIND` rows, and `route`: (ids [T, K], weights [T, K])."""
    arguments, constants, working, joining, _ = _launch(entering)
    num_rows, num_experts, channels = image_T.shape[0], *router.weight_ED.shape
    new: dict[str, Any] = {"device": image_T.device, "dtype": torch.float32}
    shares = triton.cdiv(channels, ROW_STEP)
    ids_TK = torch.empty(num_rows, router.k, device=image_T.device, dtype=torch.int64)
    weights_TK, score_TE = torch.empty(num_rows, router.k, **new), torch.empty(num_rows, num_experts, **new)
    products = torch.empty(shares, num_rows, num_experts, **new)
    programs = working + joining + num_rows * (triton.cdiv(num_experts, ROW_EXPERTS) * shares + 1)
    _advance_route[(programs,)](
        *arguments, image_T, router.weight_ED, router.bias_E, router.image_bias_E, ids_TK, weights_TK, score_TE,
        products, num_experts, router.k, router.scaling, shares, **constants, EXPERTS=ROW_EXPERTS, STEP=ROW_STEP,
        E=next_power_of_2(num_experts), R=next_power_of_2(shares), num_warps=4, launch_pdl=AHEAD,
    )  # fmt: skip
    return ids_TK, weights_TK


def run_split(entering: Entering, codes_XD: Tensor, scales: Tensor, split: Split) -> Tensor:
    """The same for `MOST_BEHIND` rows, and `split_latent` of a stored linear of the input: query latents [T, Q]."""
    arguments, constants, working, joining, _ = _launch(entering)
    num_rows, _, channels = entering.streams_TND.shape
    outputs, device, dtype = codes_XD.shape[0], codes_XD.device, entering.streams_TND.dtype
    num_latent, key_channels, stored = split.query_gain_Q.shape[0], split.stored.channels, split.stored
    shares = triton.cdiv(channels, STORED_STEP)
    products = torch.empty(num_rows, shares, outputs, device=device, dtype=torch.float32)
    query_TQ, latent_TC = (
        torch.empty(num_rows, size, device=device, dtype=dtype) for size in (num_latent, key_channels)
    )
    kept = stored.codes_PNX, stored.scales_PNG
    _advance_split[(working + joining + num_rows * (triton.cdiv(outputs, 32) * shares + 2),)](
        *arguments, codes_XD, scales, products, latent_TC, split.query_gain_Q, query_TQ, split.gain_C, split.cos_TR,
        split.sin_TR, split.page_T, split.row_T, split.present_T, *kept, outputs, num_latent, key_channels,
        split.cos_TR.shape[-1], split.query_eps, split.eps, *kept[0].stride()[:2], *kept[1].stride()[:2],
        **constants, SHARES=shares, STEP=min(STORED_STEP, next_power_of_2(channels)),
        Q=max(32, next_power_of_2(num_latent)), G=next_power_of_2(key_channels // 32), num_warps=4, launch_pdl=AHEAD,
    )  # fmt: skip
    return query_TQ
