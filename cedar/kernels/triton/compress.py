"""Pooling of a row with the one before it, and the ring that remembers it, a row a program.

T rows, C channels, S slots, R rows of a ring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import next_power_of_2, unavailable

__all__ = ["FORWARD_ONLY", "fits", "pool_pairs", "unavailable"]

FORWARD_ONLY = ("pool_pairs",)


def fits(op: str, fresh: Tensor) -> bool:
    """float32."""
    return fresh.numel() > 0 and fresh.dtype == torch.float32


@triton.jit
def _pool_pairs(
    fresh_ptr, content_ptr, gate_ptr, slot_ptr, position_ptr, out_ptr, fresh_stride, channels,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    follow()
    t = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, C)
    inside = channel < channels
    slot, position = tl.load(slot_ptr + t), tl.load(position_ptr + t)
    before = (slot * R + (position + R - 1) % R) * channels + channel
    own = (slot * R + position % R) * channels + channel
    content = tl.load(fresh_ptr + t * fresh_stride + channel, mask=inside, other=0.0)
    gate = tl.load(fresh_ptr + t * fresh_stride + channels + channel, mask=inside, other=0.0)
    # the row before may be one of this step, and not in the ring yet
    near = (tl.load(slot_ptr + t - 1, mask=t > 0, other=-1) == slot) & (
        tl.load(position_ptr + t - 1, mask=t > 0, other=-1) == position - 1
    )
    last = fresh_ptr + (t - 1) * fresh_stride + channel
    old_content = tl.where(
        near,
        tl.load(last, mask=inside & near, other=0.0),
        tl.load(content_ptr + before, mask=inside & (near == 0), other=0.0),
    )
    old_gate = tl.where(
        near,
        tl.load(last + channels, mask=inside & near, other=0.0),
        tl.load(gate_ptr + before, mask=inside & (near == 0), other=0.0),
    )
    tl.store(content_ptr + own, content, mask=inside)
    tl.store(gate_ptr + own, gate, mask=inside)
    peak = tl.maximum(gate, old_gate)
    weight, old_weight = tl.exp(gate - peak), tl.exp(old_gate - peak)
    pooled = (old_content * old_weight + content * weight) / (weight + old_weight)
    tl.store(out_ptr + t * channels + channel, pooled.to(out_ptr.dtype.element_ty), mask=inside)


def pool_pairs(
    fresh_TX: Tensor,
    content_SRC: Tensor,
    gate_SRC: Tensor,
    slot_T: Tensor,
    position_T: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    num_rows, channels = fresh_TX.shape[0], content_SRC.shape[-1]
    fresh_TX = fresh_TX if fresh_TX.stride(1) == 1 else fresh_TX.contiguous()
    out_TC = torch.empty(num_rows, channels, device=fresh_TX.device, dtype=dtype)
    _pool_pairs[(num_rows,)](
        fresh_TX, content_SRC, gate_SRC, slot_T, position_T, out_TC, fresh_TX.stride(0), channels,
        R=content_SRC.shape[1], C=next_power_of_2(channels), num_warps=2,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return out_TC
