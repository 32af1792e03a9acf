"""Experts in MXFP4 for up to a thousand choices: rows are sorted into tiles of sixteen by expert, and each tile reads
its expert's nibbles once.

The plan (who is in which tile) is made on the device. Weights are the long side of the product and rows the short
one, so no row is padded to more than sixteen. Even and odd channels are separate planes, as nibbles lie.

A choices (rows times experts a row), E experts, D channels, I inner channels, B outputs of a program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.experts import Packed
from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.few_rows import round_channels
from cedar.kernels.triton.stored import e2m1_planes

__all__ = ["FORWARD_ONLY", "fits", "packed_experts", "unavailable"]

FORWARD_ONLY = ("packed_experts",)
_MAX_CHOICES, _MAX_EXPERTS = 1024, 512
_ROWS, _OUTPUTS = 16, 64


def fits(op: str, u: Tensor, codes: Tensor, ids: Tensor) -> bool:
    """At most 1024 choices of 512 experts, whole groups of 32 channels in and out."""
    whole = u.shape[1] % 32 == 0 and codes.shape[1] % 32 == 0
    return whole and 0 < ids.numel() <= _MAX_CHOICES and codes.shape[0] <= _MAX_EXPERTS and is_half_or_float(u)


@triton.jit
def _plan(
    ids_ptr, tile_expert_ptr, member_ptr, first_ptr, num_choices, num_experts, num_tiles,
    A: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    follow()
    choice, expert = tl.arange(0, A), tl.arange(0, E)
    known = choice < num_choices
    ids = tl.load(ids_ptr + choice, mask=known, other=0).to(tl.int32)
    count = tl.histogram(ids, E, mask=known)
    tiles = (count + ROWS - 1) // ROWS
    first = tl.cumsum(tiles, axis=0) - tiles
    tl.store(first_ptr + expert, first)
    # how many earlier choices fell on the same expert
    rank = tl.zeros([A], tl.int32)
    for start in range(0, num_choices, CHUNK):
        earlier = start + tl.arange(0, CHUNK)
        theirs = tl.load(ids_ptr + earlier, mask=earlier < num_choices, other=-1).to(tl.int32)
        same = (theirs[None, :] == ids[:, None]) & (earlier[None, :] < choice[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    for tile in range(tl.max(tiles, axis=0)):
        tl.store(tile_expert_ptr + first + tile, expert, mask=tile < tiles)
    tl.debug_barrier()
    place = tl.load(first_ptr + ids, mask=known, other=0) * ROWS + rank
    tl.store(member_ptr + place, choice, mask=known)


@triton.jit
def _tile(codes_ptr, scales_ptr, output, group_start, outputs, channels, B: tl.constexpr, K: tl.constexpr):
    """[B, K / 2] float16 planes of the weights of `output` from channel 32 * group_start on, 2**-7 of their value."""
    byte, group = tl.arange(0, K // 2), tl.arange(0, K // 32)
    known = output < outputs
    code = tl.load(
        codes_ptr + output[:, None] * (channels // 2) + group_start * 16 + byte[None, :],
        mask=known[:, None] & (group_start * 32 + 2 * byte < channels)[None, :],
        other=0,
    )
    exponent = tl.load(
        scales_ptr + output[:, None] * (channels // 32) + group_start + group[None, :],
        mask=known[:, None] & ((group_start + group) * 32 < channels)[None, :],
        other=106,
    ).to(tl.int32)
    # float16 2 ** (exponent - 120), for scales of 2**-21 to 2**8
    factor = (tl.minimum(tl.maximum(exponent - 105, 0), 30) << 10).to(tl.uint16).to(tl.float16, bitcast=True)
    spread = tl.reshape(tl.broadcast_to(factor[:, :, None], (B, K // 32, 16)), (B, K // 2))
    low, high = e2m1_planes(code)
    return low * spread, high * spread


@triton.jit
def _up(
    u_ptr, weights_ptr, tile_expert_ptr, member_ptr, codes1_ptr, scales1_ptr, codes3_ptr, scales3_ptr, inner_ptr,
    channels, num_inner, k, limit, ROUNDED: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    follow()
    expert = tl.load(tile_expert_ptr + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        member = tl.load(member_ptr + tl.program_id(1) * ROWS + tl.arange(0, ROWS))
        there = member >= 0
        row = tl.where(there, member, 0) // k
        inner = tl.program_id(0) * B + tl.arange(0, B)
        codes, scales = expert * num_inner * (channels // 2), expert * num_inner * (channels // 32)
        gate = tl.zeros([B, ROWS], tl.float32)
        up = tl.zeros([B, ROWS], tl.float32)
        pair = tl.arange(0, K // 2)
        for start in range(0, channels, K):
            inside = there[None, :] & (start + 2 * pair < channels)[:, None]
            place = u_ptr + row[None, :] * channels + start + 2 * pair[:, None]
            even = tl.load(place, mask=inside, other=0.0).to(tl.float16)
            odd = tl.load(place + 1, mask=inside, other=0.0).to(tl.float16)
            low, high = _tile(codes1_ptr + codes, scales1_ptr + scales, inner, start // 32, num_inner, channels, B, K)
            gate = tl.dot(high, odd, tl.dot(low, even, gate))
            low, high = _tile(codes3_ptr + codes, scales3_ptr + scales, inner, start // 32, num_inner, channels, B, K)
            up = tl.dot(high, odd, tl.dot(low, even, up))
        dtype: tl.constexpr = inner_ptr.dtype.element_ty
        gate = tl.minimum((gate * 128.0).to(dtype).to(tl.float32), limit)
        up = tl.minimum(tl.maximum((up * 128.0).to(dtype).to(tl.float32), -limit), limit)
        weight = tl.load(weights_ptr + tl.where(there, member, 0), mask=there, other=0.0)
        y = tl.trans((gate * tl.sigmoid(gate) * up * weight[None, :]).to(dtype).to(tl.float32))
        if ROUNDED:
            y = round_channels(y, ROWS, B, 0, 32)
        out = inner_ptr + member[:, None].to(tl.int64) * num_inner + inner[None, :]
        tl.store(out, y.to(dtype), mask=there[:, None] & (inner < num_inner)[None, :])


@triton.jit
def _down(
    inner_ptr, tile_expert_ptr, member_ptr, codes_ptr, scales_ptr, out_ptr, channels, num_inner,
    B: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    follow()
    expert = tl.load(tile_expert_ptr + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        member = tl.load(member_ptr + tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        there = member >= 0
        channel = tl.program_id(0) * B + tl.arange(0, B)
        total = tl.zeros([B, ROWS], tl.float32)
        pair = tl.arange(0, K // 2)
        codes_ptr += expert * channels * (num_inner // 2)
        scales_ptr += expert * channels * (num_inner // 32)
        for start in range(0, num_inner, K):
            inside = there[None, :] & (start + 2 * pair < num_inner)[:, None]
            place = inner_ptr + tl.where(there, member, 0)[None, :] * num_inner + start + 2 * pair[:, None]
            even = tl.load(place, mask=inside, other=0.0).to(tl.float16)
            odd = tl.load(place + 1, mask=inside, other=0.0).to(tl.float16)
            low, high = _tile(codes_ptr, scales_ptr, channel, start // 32, channels, num_inner, B, K)
            total = tl.dot(high, odd, tl.dot(low, even, total))
        out = out_ptr + member[:, None] * channels + channel[None, :]
        tl.store(out, tl.trans(total * 128.0), mask=there[:, None] & (channel < channels)[None, :])


@triton.jit
def _add_choices(choice_ptr, y_ptr, channels, k, B: tl.constexpr):
    follow()
    t = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros([B], tl.float32)
    for slot in range(k):
        total += tl.load(choice_ptr + (t * k + slot) * channels + channel, mask=channel < channels, other=0.0)
    tl.store(y_ptr + t * channels + channel, total, mask=channel < channels)


def packed_experts(
    u_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1: Packed,
    w3: Packed,
    w2: Packed,
    limit: float,
    round_inner: bool,
) -> Tensor:
    (num_rows, channels), k = u_TD.shape, ids_TK.shape[1]
    num_experts, num_inner = w1.codes.shape[:2]
    num_choices = num_rows * k
    u_TD, ids_TK, weights_TK = u_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous()
    # no more tiles than these, however the rows choose
    num_tiles = min(num_choices, num_experts) + num_choices // _ROWS
    new: dict[str, Any] = {"device": u_TD.device, "dtype": torch.int32}
    plan = torch.full((num_tiles * (1 + _ROWS),), -1, **new)
    tile_expert, member = plan[:num_tiles], plan[num_tiles:]
    experts = next_power_of_2(num_experts)
    _plan[(1,)](
        ids_TK, tile_expert, member, torch.empty(experts, **new), num_choices, num_experts, num_tiles,
        A=next_power_of_2(num_choices), E=experts, ROWS=_ROWS, CHUNK=16, num_warps=8,
        launch_pdl=AHEAD,
    )  # fmt: skip
    inner = torch.empty(num_choices, num_inner, device=u_TD.device, dtype=u_TD.dtype)
    _up[(triton.cdiv(num_inner, _OUTPUTS), num_tiles)](
        u_TD, weights_TK, tile_expert, member, *w1, *w3, inner, channels, num_inner, k, limit,
        ROUNDED=round_inner, B=_OUTPUTS, ROWS=_ROWS, K=128, num_warps=4, num_stages=3,
        launch_pdl=AHEAD,
    )  # fmt: skip
    choice = torch.empty(num_choices, channels, device=u_TD.device, dtype=torch.float32)
    _down[(triton.cdiv(channels, _OUTPUTS), num_tiles)](
        inner, tile_expert, member, *w2, choice, channels, num_inner, B=_OUTPUTS, ROWS=_ROWS, K=128, num_warps=4,
        num_stages=3,
        launch_pdl=AHEAD,
    )  # fmt: skip
    y_TD = torch.empty(num_rows, channels, device=u_TD.device, dtype=torch.float32)
    _add_choices[(num_rows, triton.cdiv(channels, 1024))](choice, y_TD, channels, k, B=1024, launch_pdl=AHEAD)
    return y_TD
