"""`route` among hundreds of experts: products of row tiles and shares of the channels, then a program a row chooses.

T rows, D channels, E experts, K chosen, P rows of a tile, S shares.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import next_power_of_2
from cedar.kernels.triton.few_rows import operand

MOST_EXPERTS = 1024
_EXPERTS, _STEP = 32, 256
# programs that keep a Hopper chip's memory busy
_PROGRAMS = 264


@triton.jit
def router_score(total):
    """sqrt(softplus(total)), without loss where the exponential is small."""
    small = tl.exp(-tl.abs(total))
    log1p = tl.where(small < 1e-3, small * (1.0 - small * (0.5 - small / 3.0)), tl.log(1.0 + small))
    return tl.sqrt_rn(tl.maximum(total, 0.0) + log1p)


@triton.jit
def _router_shares(
    u_ptr, weight_ptr, partial_ptr, num_rows, channels, num_experts, steps_a_share,
    OPERAND: tl.constexpr, P: tl.constexpr, B: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    follow()
    row = tl.program_id(0) * P + tl.arange(0, P)
    expert = tl.program_id(1) * B + tl.arange(0, B)
    share = tl.program_id(2)
    total = tl.zeros([P, B], tl.float32)
    first = share * steps_a_share * K
    for start in range(first, tl.minimum(first + steps_a_share * K, channels), K):
        channel = start + tl.arange(0, K)
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
    place = (share * num_rows + row[:, None]).to(tl.int64) * num_experts + expert[None, :]
    tl.store(partial_ptr + place, total, mask=(row < num_rows)[:, None] & (expert < num_experts)[None, :])


@triton.jit
def _choose_many(
    partial_ptr, image_ptr, bias_ptr, image_bias_ptr, ids_ptr, weights_ptr, score_ptr, num_rows, num_experts, k,
    scaling, SHARES: tl.constexpr, IMAGES: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    follow()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E)
    known = expert < num_experts
    total = tl.zeros([E], tl.float32)
    for share in tl.static_range(SHARES):
        total += tl.load(partial_ptr + (share * num_rows + row) * num_experts + expert, mask=known, other=0.0)
    score = router_score(total)
    tl.store(score_ptr + row * num_experts + expert, score, mask=known)
    bias = tl.load(bias_ptr + expert, mask=known, other=0.0)
    if IMAGES:
        image_bias = tl.load(image_bias_ptr + expert, mask=known, other=0.0)
        bias = tl.where(tl.load(image_ptr + row) != 0, image_bias, bias)
    biased = score + bias
    # a row that is not finite still names k experts
    left = tl.where(known, tl.where(biased > -3e38, biased, -3e38), float("-inf"))
    chosen = expert < 0
    for _ in range(k):
        best = tl.max(left, axis=0)
        # the lowest of equals
        one = expert == tl.min(tl.where(left == best, expert, E), axis=0)
        chosen |= one
        left = tl.where(one, float("-inf"), left)
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    weight = tl.where(chosen, score, 0.0)
    weight = weight / (tl.sum(weight, axis=0) + 1e-20) * scaling
    tl.store(ids_ptr + row * k + place, expert.to(tl.int64), mask=chosen)
    tl.store(weights_ptr + row * k + place, weight, mask=chosen)


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
    rows = 16 if num_rows <= 16 else 32
    tiles, blocks, steps = triton.cdiv(num_rows, rows), triton.cdiv(num_experts, _EXPERTS), triton.cdiv(channels, _STEP)
    steps_a_share = triton.cdiv(steps, max(1, min(steps, _PROGRAMS // (tiles * blocks))))
    shares = triton.cdiv(steps, steps_a_share)
    new: dict[str, Any] = {"device": u_TD.device, "dtype": torch.float32}
    partial = torch.empty(shares, num_rows, num_experts, **new)
    _router_shares[(tiles, blocks, shares)](
        u_TD, weight_ED, partial, num_rows, channels, num_experts, steps_a_share,
        OPERAND=operand(u_TD if weight_ED.dtype == torch.bfloat16 else weight_ED), P=rows, B=_EXPERTS, K=_STEP,
        num_warps=4, num_stages=3, launch_pdl=AHEAD,
    )  # fmt: skip
    ids_TK = torch.empty(num_rows, k, device=u_TD.device, dtype=torch.int64)
    weights_TK, score_TE = torch.empty(num_rows, k, **new), torch.empty(num_rows, num_experts, **new)
    _choose_many[(num_rows,)](
        partial, bias_E if image_T is None else image_T, bias_E, image_bias_E, ids_TK, weights_TK, score_TE, num_rows,
        num_experts, k, scaling, SHARES=shares, IMAGES=image_T is not None, E=next_power_of_2(num_experts),
        # twelve maxima one after the other: a warp needs no barrier
        num_warps=1, launch_pdl=AHEAD,
    )  # fmt: skip
    return ids_TK, weights_TK, score_TE
