"""Selection bias of the experts: up for those that got too little, down for those that got too much.

L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cedar.config.train import BalanceConfig


def update(biases: Sequence[Tensor], load_LE: Tensor, speed: float) -> None:
    """Move each layer's bias [E] by `speed` against its load; one call a modality, after the optimiser's step.

    A modality that had no row in the step keeps its bias.

    Args:
        load_LE: Rows per expert, summed over every micro-batch and rank, padding left out.

    Source: training.md 1.9.
    """
    change_LE = speed * torch.sign(load_LE.mean(-1, keepdim=True) - load_LE)
    torch._foreach_add_(list(biases), list(change_LE.unbind(0)))


def speed_at(step: int, config: BalanceConfig) -> float:
    """Faster at the start, when routing is random."""
    return config.first_speed if step < config.first_steps else config.speed


def spread(load_LE: Tensor) -> Tensor:
    """Largest over mean load, of the worst layer."""
    return (load_LE.amax(-1) / load_LE.mean(-1).clamp(min=1e-9)).amax()
