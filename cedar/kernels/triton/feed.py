"""Routed and shared experts of few rows: one kernel up, one down, and only the chosen experts' weights are read.

The shared expert is one more slot of each row, with a weight of 1.

T rows, K slots of routed experts, D channels, I inner channels, B of them a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.experts import Weights
from cedar.kernels.triton.chain import AHEAD, announce, follow, wait
from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.quantize import round_groups

__all__ = ["FORWARD_ONLY", "feed", "fits", "unavailable"]

FORWARD_ONLY = ("feed",)
_MAX_ROWS = 512
_UP, _DOWN, _STEP = 32, 16, 256


def fits(op: str, u: Tensor, w1: Tensor) -> bool:
    """At most 512 rows; each reads its experts anew, so many rows of many experts are better sorted."""
    return 0 < u.shape[0] <= _MAX_ROWS and is_half_or_float(u, w1) and w1.shape[1] % 32 == 0


@triton.jit
def activated(gate, up, weight, limit, dtype: tl.constexpr, ROUNDED: tl.constexpr, B: tl.constexpr):
    """Gate and up of one group of inner channels to the input of the product down."""
    # a product's result is rounded to the model's dtype before the activation, as between the reference's ops
    gate = tl.minimum(gate.to(dtype).to(tl.float32), limit)
    up = tl.minimum(tl.maximum(up.to(dtype).to(tl.float32), -limit), limit)
    y = (gate * tl.sigmoid(gate) * up * weight).to(dtype)
    if ROUNDED:
        y = tl.reshape(round_groups(tl.reshape(y.to(tl.float32), (1, B)), 0), (B,)).to(dtype)
    return y


@triton.jit
def _up(
    u_ptr, ids_ptr, weights_ptr, w1_ptr, w3_ptr, shared1_ptr, shared3_ptr, inner_ptr, channels, num_inner, k, limit,
    ROUNDED: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    follow()
    t, slot = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inner = tl.program_id(2) * B + tl.arange(0, B)
    weight = 1.0
    gate_ptr, up_ptr = shared1_ptr, shared3_ptr
    if slot < k:
        expert = tl.load(ids_ptr + t * k + slot)
        weight = tl.load(weights_ptr + t * k + slot)
        gate_ptr = w1_ptr + expert * num_inner * channels
        up_ptr = w3_ptr + expert * num_inner * channels
    gate = tl.zeros([B], tl.float32)
    up = tl.zeros([B], tl.float32)
    for start in range(0, channels, S):
        channel = start + tl.arange(0, S)
        u = tl.load(u_ptr + t * channels + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
        place = inner[:, None] * channels + channel[None, :]
        there = (inner < num_inner)[:, None] & (channel < channels)[None, :]
        gate += tl.sum(tl.load(gate_ptr + place, mask=there, other=0.0).to(tl.float32) * u, axis=1)
        up += tl.sum(tl.load(up_ptr + place, mask=there, other=0.0).to(tl.float32) * u, axis=1)
    y = activated(gate, up, weight, limit, inner_ptr.dtype.element_ty, ROUNDED, B)
    tl.store(inner_ptr + (t * (k + 1) + slot) * num_inner + inner, y, mask=inner < num_inner)


@triton.jit
def _down_weights(w_ptr, channel, inner, channels, num_inner):
    there = (channel < channels)[:, None] & (inner < num_inner)[None, :]
    return tl.load(w_ptr + channel[:, None] * num_inner + inner[None, :], mask=there, other=0.0).to(tl.float32)


@triton.jit
def _down(
    inner_ptr, ids_ptr, w2_ptr, shared2_ptr, y_ptr, channels, num_inner, num_places,
    BY_EXPERT: tl.constexpr, K: tl.constexpr, ONE: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The inner channels lie by slot or by expert, the shared expert's behind them."""
    announce()
    t = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * B + tl.arange(0, B)
    inner_ptr += t * num_places * num_inner
    product = tl.zeros([B, S], tl.float32)
    if ONE:
        # whatever is chosen, the shared expert runs: its weight is read while the kernel before still does
        inner = tl.arange(0, S)
        shared = _down_weights(shared2_ptr, channel, inner, channels, num_inner)
        wait()
        # unrolled, so that no expert waits for another's weights
        for slot in tl.static_range(K):
            expert = tl.load(ids_ptr + t * K + slot)
            place = expert if BY_EXPERT else slot
            x = tl.load(inner_ptr + place * num_inner + inner, mask=inner < num_inner, other=0.0).to(tl.float32)
            w = _down_weights(w2_ptr + expert * channels * num_inner, channel, inner, channels, num_inner)
            product += w * x[None, :]
        x = tl.load(inner_ptr + (num_places - 1) * num_inner + inner, mask=inner < num_inner, other=0.0)
        product += shared * x.to(tl.float32)[None, :]
    else:
        wait()
        for slot in range(K + 1):
            down_ptr, x_ptr = shared2_ptr, inner_ptr + (num_places - 1) * num_inner
            if slot < K:
                expert = tl.load(ids_ptr + t * K + slot)
                down_ptr = w2_ptr + expert * channels * num_inner
                x_ptr = inner_ptr + (expert if BY_EXPERT else slot) * num_inner
            for start in range(0, num_inner, S):
                inner = start + tl.arange(0, S)
                x = tl.load(x_ptr + inner, mask=inner < num_inner, other=0.0).to(tl.float32)
                product += _down_weights(down_ptr, channel, inner, channels, num_inner) * x[None, :]
    total = tl.sum(product, axis=1)
    tl.store(y_ptr + t * channels + channel, total.to(y_ptr.dtype.element_ty), mask=channel < channels)


def feed(u_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights: Weights, limit: float, round_inner: bool) -> Tensor:
    num_rows, channels = u_TD.shape
    num_inner, k = weights.w1_EID.shape[1], ids_TK.shape[1]
    u_TD, ids_TK, weights_TK = u_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous()
    w1, w3, w2, s1, s3, s2 = (weight.contiguous() for weight in weights)
    inner = torch.empty(num_rows, k + 1, num_inner, device=u_TD.device, dtype=u_TD.dtype)
    _up[(num_rows, k + 1, triton.cdiv(num_inner, _UP))](
        u_TD,
        ids_TK,
        weights_TK,
        w1,
        w3,
        s1,
        s3,
        inner,
        channels,
        num_inner,
        k,
        limit,
        ROUNDED=round_inner,
        B=_UP,
        S=min(_STEP, max(32, next_power_of_2(channels))),
        num_warps=8,
        launch_pdl=AHEAD,
    )
    return down(inner, ids_TK, w2, s2)


def down(inner_TPI: Tensor, ids_TK: Tensor, w2_EDI: Tensor, shared2_DI: Tensor) -> Tensor:
    """Sum of the chosen experts' and the shared expert's outputs; P places are slots or experts, and the shared one."""
    (num_rows, num_places, num_inner), channels, k = inner_TPI.shape, w2_EDI.shape[1], ids_TK.shape[1]
    step = min(_STEP, max(32, next_power_of_2(num_inner)))
    y_TD = torch.empty(num_rows, channels, device=inner_TPI.device, dtype=inner_TPI.dtype)
    _down[(num_rows, triton.cdiv(channels, _DOWN))](
        inner_TPI,
        ids_TK,
        w2_EDI,
        shared2_DI,
        y_TD,
        channels,
        num_inner,
        num_places,
        BY_EXPERT=num_places != k + 1,
        K=k,
        ONE=num_inner <= step,
        B=_DOWN,
        S=step,
        num_warps=4,
        launch_pdl=AHEAD,
    )
    return y_TD
