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
_UP, _DOWN, _DOWN_ALL, _STEP = 32, 16, 8, 256


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
def _down_all(
    inner_ptr, ids_ptr, w2_ptr, shared2_ptr, y_ptr, channels, num_inner,
    E: tl.constexpr, K: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """`_down` with every expert's weights read before it is known who is chosen; inner channels lie by expert."""
    announce()
    t, inner = tl.program_id(0).to(tl.int64), tl.arange(0, S)
    channel = tl.program_id(1) * B + tl.arange(0, B)
    # two inner channels a thread, as it holds the rows: nothing is moved between threads
    place = tl.max_contiguous(channel[:, None] * num_inner + inner[None, :], [1, 2])
    there, inside = (channel < channels)[:, None] & (inner < num_inner)[None, :], inner < num_inner
    weights = ()
    for expert in tl.static_range(E):
        w = tl.load(w2_ptr + expert * channels * num_inner + place, mask=there, other=0.0)
        weights = weights + (w,)  # type: ignore[assignment]
    shared = tl.load(shared2_ptr + place, mask=there, other=0.0)
    wait()
    inner_ptr += t * (E + 1) * num_inner + inner
    x = tl.load(inner_ptr + E * num_inner, mask=inside, other=0.0).to(tl.float32)
    product = shared.to(tl.float32) * x[None, :]
    for expert in tl.static_range(E):
        chosen = tl.load(ids_ptr + t * K) == expert
        for slot in tl.static_range(1, K):
            chosen = chosen | (tl.load(ids_ptr + t * K + slot) == expert)
        # an expert that is not chosen may have left anything
        x = tl.load(inner_ptr + expert * num_inner, mask=inside, other=0.0).to(tl.float32)
        product += tl.where(chosen, weights[expert].to(tl.float32) * x[None, :], 0.0)
    total = tl.sum(product, axis=1)
    tl.store(y_ptr + t * channels + channel, total.to(y_ptr.dtype.element_ty), mask=channel < channels)


@triton.jit
def _down(
    inner_ptr, ids_ptr, w2_ptr, shared2_ptr, y_ptr, channels, num_inner,
    K: tl.constexpr, ONE: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    announce()
    t = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * B + tl.arange(0, B)
    inner_ptr += t * (K + 1) * num_inner
    product = tl.zeros([B, S], tl.float32)
    if ONE:
        # whatever is chosen, the shared expert runs: its weight is read while the kernel before still does
        inner = tl.arange(0, S)
        shared = _down_weights(shared2_ptr, channel, inner, channels, num_inner)
        wait()
        # unrolled, so that no expert waits for another's weights
        for slot in tl.static_range(K):
            w2 = w2_ptr + tl.load(ids_ptr + t * K + slot) * channels * num_inner
            x = tl.load(inner_ptr + slot * num_inner + inner, mask=inner < num_inner, other=0.0).to(tl.float32)
            product += _down_weights(w2, channel, inner, channels, num_inner) * x[None, :]
        x = tl.load(inner_ptr + K * num_inner + inner, mask=inner < num_inner, other=0.0)
        product += shared * x.to(tl.float32)[None, :]
    else:
        wait()
        for slot in range(K + 1):
            down_ptr = shared2_ptr
            if slot < K:
                down_ptr = w2_ptr + tl.load(ids_ptr + t * K + slot) * channels * num_inner
            for start in range(0, num_inner, S):
                inner = start + tl.arange(0, S)
                x = tl.load(inner_ptr + slot * num_inner + inner, mask=inner < num_inner, other=0.0).to(tl.float32)
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
    y_TD, step = torch.empty_like(u_TD), min(_STEP, max(32, next_power_of_2(num_inner)))
    _down[(num_rows, triton.cdiv(channels, _DOWN))](
        inner, ids_TK, w2, s2, y_TD, channels, num_inner,
        K=k, ONE=num_inner <= step, B=_DOWN, S=step, num_warps=4,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return y_TD


def down_all(inner_TPI: Tensor, ids_TK: Tensor, w2_EDI: Tensor, shared2_DI: Tensor) -> Tensor:
    """Sum of the chosen experts' and the shared expert's outputs; P places are all experts, the shared one behind."""
    (num_rows, num_places, num_inner), channels = inner_TPI.shape, w2_EDI.shape[1]
    y_TD = torch.empty(num_rows, channels, device=inner_TPI.device, dtype=inner_TPI.dtype)
    _down_all[(num_rows, triton.cdiv(channels, _DOWN_ALL))](
        inner_TPI, ids_TK, w2_EDI.contiguous(), shared2_DI.contiguous(), y_TD, channels, num_inner,
        E=num_places - 1, K=ids_TK.shape[1], B=_DOWN_ALL, S=max(32, next_power_of_2(num_inner)), num_warps=4,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return y_TD
