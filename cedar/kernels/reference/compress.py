"""The pooling formula, line for line."""

from __future__ import annotations

import torch
from torch import Tensor


def pool_groups(content_ERC: Tensor, gate_ERC: Tensor) -> Tensor:
    return (content_ERC * torch.softmax(gate_ERC, dim=1)).sum(1)


def pool_pairs(
    fresh_TX: Tensor,
    content_SRC: Tensor,
    gate_SRC: Tensor,
    slot_T: Tensor,
    position_T: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    num_rows = content_SRC.shape[1]
    pairs = []
    for ring_SRC, own_TC in zip((content_SRC, gate_SRC), fresh_TX.chunk(2, dim=-1), strict=True):
        ring_SRC[slot_T, position_T % num_rows] = own_TC
        before_TC = ring_SRC[slot_T, (position_T - 1) % num_rows]
        pairs.append(torch.stack([before_TC, own_TC], dim=1))
    return pool_groups(*pairs).to(dtype)
