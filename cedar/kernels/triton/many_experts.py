"""`route` among hundreds of experts: products of row tiles and shares of the channels, then a program a row chooses.

One launch: those that choose wait for the shares of their row.

T rows, D channels, E experts, K chosen, P rows of a tile, B experts and C channels of a program or step, S shares.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.triton.arrivals import arrive, counters, leave, wait_for
from cedar.kernels.triton.chain import AHEAD, announce, wait
from cedar.kernels.triton.device import next_power_of_2
from cedar.kernels.triton.few_rows import operand

MOST_EXPERTS = 1024
# experts and channels of a step, and shares that fill the chip; up to so many rows are taken one by one
_EXPERTS, _STEP, _SHARES = 32, 128, 8
_ALONE, ROW_EXPERTS, ROW_STEP = 4, 8, 1024


@triton.jit
def router_score(total):
    """sqrt(softplus(total)), without loss where the exponential is small."""
    small = tl.exp(-tl.abs(total))
    log1p = tl.where(small < 1e-3, small * (1.0 - small * (0.5 - small / 3.0)), tl.log(1.0 + small))
    return tl.sqrt_rn(tl.maximum(total, 0.0) + log1p)


@triton.jit
def row_products(
    u_ptr, weight_ptr, row, expert, channel, channels, num_experts, counter_ptr, num_arrivals, BEHIND: tl.constexpr
):
    """One row's products over some channels, whose weights are read while the kernel before still runs.

    Args:
        num_arrivals: How many programs of the same launch make the row, if it is BEHIND them.
    """
    inside = channel < channels
    place = weight_ptr + expert[:, None] * channels + channel[None, :]
    w = tl.load(place, mask=(expert < num_experts)[:, None] & inside[None, :], other=0.0)
    wait()
    if BEHIND:
        wait_for(counter_ptr, num_arrivals)
    u = tl.load(u_ptr + row * channels + channel, mask=inside, other=0.0, cache_modifier=".cg")
    return tl.sum(w.to(tl.float32) * u.to(tl.float32)[None, :], axis=1)


@triton.jit
def _tile_products(
    u_ptr, weight_ptr, row, expert, first, last, num_rows, channels, num_experts,
    OPERAND: tl.constexpr, P: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    wait()
    total = tl.zeros([P, B], tl.float32)
    for start in range(first, last, C):
        channel = start + tl.arange(0, C)
        u = tl.load(
            u_ptr + row[:, None] * channels + channel[None, :],
            mask=(row < num_rows)[:, None] & (channel < channels)[None, :],
            other=0.0,
        )
        w = tl.load(
            weight_ptr + expert[:, None] * channels + channel[None, :],
            mask=(expert < num_experts)[:, None] & (channel < channels)[None, :],
            other=0.0,
        )
        total = tl.dot(u.to(OPERAND), tl.trans(w.to(OPERAND)), total, input_precision="ieee")
    return total


@triton.jit
def choose(
    partial_ptr, image_ptr, bias_ptr, image_bias_ptr, ids_ptr, weights_ptr, score_ptr, counter_ptr, num_arrivals,
    waiting, row, num_rows, num_experts, k, scaling, shares, IMAGES: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    expert, share = tl.arange(0, E), tl.arange(0, S)
    known = expert < num_experts
    bias = tl.load(bias_ptr + expert, mask=known, other=0.0)
    if IMAGES:
        image_bias = tl.load(image_bias_ptr + expert, mask=known, other=0.0)
    wait()
    if IMAGES:
        bias = tl.where(tl.load(image_ptr + row) != 0, image_bias, bias)
    wait_for(counter_ptr, num_arrivals)
    part = tl.load(
        partial_ptr + (share[:, None] * num_rows + row) * num_experts + expert[None, :],
        mask=(share < shares)[:, None] & known[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    score = router_score(tl.sum(part, axis=0))
    tl.store(score_ptr + row * num_experts + expert, score, mask=known)
    biased = score + bias
    # a row that is not finite still names k experts
    biased = tl.where(biased > -3e38, biased, -3e38)
    # integers in the order of the values, and below them the lowest of equals first: one maximum finds it
    bits = biased.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    left = tl.where(known, (bits.to(tl.int64) << 32) | (E - expert).to(tl.int64), -(2**63))
    chosen = expert < 0
    for _ in range(k):
        one = left == tl.max(left, axis=0)
        chosen |= one
        left = tl.where(one, -(2**63), left)
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    weight = tl.where(chosen, score, 0.0)
    weight = weight / (tl.sum(weight, axis=0) + 1e-20) * scaling
    tl.store(ids_ptr + row * k + place, expert.to(tl.int64), mask=chosen)
    tl.store(weights_ptr + row * k + place, weight, mask=chosen)
    leave(counter_ptr, num_arrivals, waiting)


@triton.jit
def _route_many(
    u_ptr, image_ptr, weight_ptr, bias_ptr, image_bias_ptr, ids_ptr, weights_ptr, score_ptr, partial_ptr, counter_ptr,
    num_rows, channels, num_experts, k, scaling, tiles, shares, span,
    ALONE: tl.constexpr, IMAGES: tl.constexpr, OPERAND: tl.constexpr, P: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    E: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """P rows times B experts over a share of the channels; behind them a program a row."""
    announce()
    blocks = tl.cdiv(num_experts, B)
    program, working = tl.program_id(0), tiles * blocks * shares
    if program < working:
        tile, share = program % tiles, program // tiles % shares
        expert = program // (tiles * shares) * B + tl.arange(0, B)
        place = partial_ptr + share.to(tl.int64) * num_rows * num_experts
        if ALONE:
            channel = share * C + tl.arange(0, C)
            total = row_products(
                u_ptr, weight_ptr, tile, expert, channel, channels, num_experts, counter_ptr, 0, False
            )  # fmt: skip
            tl.store(place + tile * num_experts + expert, total, mask=expert < num_experts)
        else:
            row_P, first = tile * P + tl.arange(0, P), share * span
            total = _tile_products(
                u_ptr, weight_ptr, row_P, expert, first, tl.minimum(first + span, channels), num_rows, channels,
                num_experts, OPERAND, P, B, C,
            )  # fmt: skip
            there = (row_P < num_rows)[:, None] & (expert < num_experts)[None, :]
            tl.store(place + row_P[:, None] * num_experts + expert[None, :], total, mask=there)
        arrive(counter_ptr + tile)
    else:
        row = program - working
        choose(
            partial_ptr, image_ptr, bias_ptr, image_bias_ptr, ids_ptr, weights_ptr, score_ptr, counter_ptr + row // P,
            blocks * shares, tl.minimum(num_rows - row // P * P, P), row.to(tl.int64), num_rows, num_experts, k,
            scaling, shares, IMAGES, E, S,
        )  # fmt: skip


def route_many(
    u_TD: Tensor,
    image_T: Tensor | None,
    weight_ED: Tensor,
    bias_E: Tensor,
    image_bias_E: Tensor,
    k: int,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    (num_rows, channels), num_experts = u_TD.shape, weight_ED.shape[0]
    u_TD = u_TD.contiguous()
    alone = num_rows <= _ALONE
    if alone:
        rows, experts, step, steps_a_share = 1, ROW_EXPERTS, ROW_STEP, 1
        tiles, shares = num_rows, triton.cdiv(channels, step)
    else:
        rows, experts, step = 16 if num_rows <= 16 else 32, _EXPERTS, _STEP
        tiles, steps = triton.cdiv(num_rows, rows), triton.cdiv(channels, step)
        steps_a_share = triton.cdiv(steps, max(1, min(_SHARES // tiles, steps)))
        shares = triton.cdiv(steps, steps_a_share)
    new: dict[str, Any] = {"device": u_TD.device, "dtype": torch.float32}
    partial = torch.empty(shares, num_rows, num_experts, **new)
    ids_TK = torch.empty(num_rows, k, device=u_TD.device, dtype=torch.int64)
    weights_TK, score_TE = torch.empty(num_rows, k, **new), torch.empty(num_rows, num_experts, **new)
    _route_many[(tiles * triton.cdiv(num_experts, experts) * shares + num_rows,)](
        u_TD, bias_E if image_T is None else image_T, weight_ED, bias_E, image_bias_E, ids_TK, weights_TK, score_TE,
        partial, counters(u_TD.device, tiles), num_rows, channels, num_experts, k, scaling, tiles, shares,
        steps_a_share * step, ALONE=alone, IMAGES=image_T is not None,
        OPERAND=operand(u_TD if weight_ED.dtype == torch.bfloat16 else weight_ED), P=rows, B=experts, C=step,
        E=next_power_of_2(num_experts), S=next_power_of_2(shares), num_warps=4, num_stages=4, launch_pdl=AHEAD,
    )  # fmt: skip
    return ids_TK, weights_TK, score_TE
