"""Router scores, the choice of experts and their weights, a row a program.

T rows, D channels, E experts, K chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.many_experts import MOST_EXPERTS, route_many, router_score

__all__ = ["FORWARD_ONLY", "fits", "route", "unavailable"]

FORWARD_ONLY = ("route",)
MAX_EXPERTS = 64
_MAX_ROWS = 512


def fits(op: str, u: Tensor, weight: Tensor) -> bool:
    """At most 512 rows and 1024 experts; up to 64 are each ranked against all others."""
    few = weight.shape[0] <= MOST_EXPERTS and 0 < u.shape[0] <= _MAX_ROWS
    return few and is_half_or_float(u, weight)


@triton.jit
def router_weights(weight_ptr, channel, channels, num_experts, E: tl.constexpr):
    """Every expert's weight at some channels, float32 [E, channels]."""
    expert = tl.arange(0, E)
    return tl.load(
        weight_ptr + expert[:, None] * channels + channel[None, :],
        mask=(expert < num_experts)[:, None] & (channel < channels)[None, :],
        other=0.0,
    )


@triton.jit
def router_products(u, weights):
    """Products of some channels of one row, float32, with every expert's weight: [E]."""
    return tl.sum(weights * u[None, :], axis=1)


@triton.jit
def router_biases(bias_ptr, num_experts, E: tl.constexpr):
    expert = tl.arange(0, E)
    return tl.load(bias_ptr + expert, mask=expert < num_experts, other=0.0)


@triton.jit
def weigh_experts(total, bias, num_experts, k, scaling, E: tl.constexpr):
    """From products to (all scores, who is chosen, what they weigh)."""
    expert = tl.arange(0, E)
    known = expert < num_experts
    score = router_score(total)
    biased = score + bias
    # a row that is not finite still names k experts
    biased = tl.where(known, tl.where(biased > -3e38, biased, -3e38), float("-inf"))
    # an expert's rank: who is better, or equal and before it
    across, down = tl.reshape(biased, (1, E)), tl.reshape(biased, (E, 1))
    before = (across > down) | ((across == down) & (expert[None, :] < expert[:, None]))
    chosen = known & (tl.sum(before.to(tl.int32), axis=1) < k)
    weight = tl.where(chosen, score, 0.0)
    return score, chosen, weight / (tl.sum(weight, axis=0) + 1e-20) * scaling


@triton.jit
def choose_experts(total, bias, row, ids_ptr, weights_ptr, score_ptr, num_experts, k, scaling, E: tl.constexpr):
    """From products to the row's experts, their weights and all scores, written."""
    expert = tl.arange(0, E)
    score, chosen, weight = weigh_experts(total, bias, num_experts, k, scaling, E)
    tl.store(score_ptr + row * num_experts + expert, score, mask=expert < num_experts)
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(ids_ptr + row * k + place, expert.to(tl.int64), mask=chosen)
    tl.store(weights_ptr + row * k + place, weight, mask=chosen)


@triton.jit
def _route(
    u_ptr, image_ptr, weight_ptr, bias_ptr, image_bias_ptr, ids_ptr, weights_ptr, score_ptr, channels, num_experts,
    k, scaling, IMAGES: tl.constexpr, E: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    follow()
    t = tl.program_id(0).to(tl.int64)
    total = tl.zeros([E], tl.float32)
    for start in range(0, channels, B):
        channel = start + tl.arange(0, B)
        u = tl.load(u_ptr + t * channels + channel, mask=channel < channels, other=0.0).to(tl.float32)
        total += router_products(u, router_weights(weight_ptr, channel, channels, num_experts, E))
    bias = router_biases(bias_ptr, num_experts, E)
    if IMAGES:
        bias = tl.where(tl.load(image_ptr + t) != 0, router_biases(image_bias_ptr, num_experts, E), bias)
    choose_experts(total, bias, t, ids_ptr, weights_ptr, score_ptr, num_experts, k, scaling, E)


def route(
    u_TD: Tensor,
    image_T: Tensor | None,
    weight_ED: Tensor,
    bias_E: Tensor,
    image_bias_E: Tensor,
    k: int,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, channels = u_TD.shape
    num_experts = weight_ED.shape[0]
    if num_experts > MAX_EXPERTS:
        return route_many(u_TD, image_T, weight_ED, bias_E, image_bias_E, k, scaling)
    u_TD = u_TD.contiguous()
    ids_TK = torch.empty(num_rows, k, device=u_TD.device, dtype=torch.int64)
    weights_TK = torch.empty(num_rows, k, device=u_TD.device, dtype=torch.float32)
    score_TE = torch.empty(num_rows, num_experts, device=u_TD.device, dtype=torch.float32)
    experts = max(2, next_power_of_2(num_experts))
    _route[(num_rows,)](
        u_TD, bias_E if image_T is None else image_T, weight_ED, bias_E, image_bias_E, ids_TK, weights_TK, score_TE,
        channels, num_experts, k, scaling,
        IMAGES=image_T is not None, E=experts, B=min(next_power_of_2(channels), 8192 // experts), num_warps=4,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return ids_TK, weights_TK, score_TE
