"""The pooling formula, line for line."""

from __future__ import annotations

import torch
from torch import Tensor


def pool_groups(content_ERC: Tensor, gate_ERC: Tensor) -> Tensor:
    return (content_ERC * torch.softmax(gate_ERC, dim=1)).sum(1)
