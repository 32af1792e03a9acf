"""The Sinkhorn-balanced update of embeddings, heads and Engram tables: rows and columns of equal norm.

One momentum buffer, half of Adam's state. V rows (tokens, n-grams), C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

_EPS = 1e-20
# rows whose norm is below this part of the mean are not updated
_NEAR_ZERO = 1e-3


def balance(direction_VC: Tensor, rounds: int) -> Tensor:
    """The direction scaled so that every active row and column has norm 1 in turn, ending on rows.

    Only two scaling vectors are iterated: each round is one product of the squared matrix with one of them.
    Near-zero rows come out as exactly 0.

    Args:
        rounds: Odd; 11 in the report.

    Source: training.md 2.3.
    """
    # squares of tiny gradients would vanish in float32
    scaled_VC = direction_VC / direction_VC.abs().amax().clamp(min=1e-37)
    norm_V1 = torch.linalg.vector_norm(scaled_VC, dim=1, keepdim=True)
    active_V1 = norm_V1 > _NEAR_ZERO * norm_V1.mean()
    scaled_VC = torch.where(active_V1, scaled_VC, 0)
    square_VC = scaled_VC.square()
    row_V = torch.ones_like(norm_V1[:, 0])
    column_C = torch.ones_like(direction_VC[0])
    for step in range(rounds):
        if step % 2 == 0:
            row_V = 1 / ((square_VC @ column_C.square()).sqrt() + _EPS)
            row_V = torch.where(active_V1[:, 0], row_V, 0)
        else:
            column_C = 1 / ((square_VC.mT @ row_V.square()).sqrt() + _EPS)
    return scaled_VC * row_V.unsqueeze(1) * column_C


class Sinkhorn:
    """Nesterov momentum, balanced; each active row's update has RMS `update_rms`. No weight decay.

    In mode `touched` a row without a gradient in this step is left alone and its momentum decays by the steps
    it missed once it returns: in small batches a row that was read once would else be moved at full size for
    a hundred steps.

    Args:
        tables: (name, parameter, rate over the common rate).
    """

    def __init__(
        self,
        tables: Sequence[tuple[str, nn.Parameter, float]],
        *,
        momentum: float,
        update_rms: float,
        rounds: int,
        mode: Literal["paper", "touched"],
    ) -> None:
        self.tables = list(tables)
        self.momentum, self.update_rms, self.rounds, self.mode = momentum, update_rms, rounds, mode
        self._momentum = {name: torch.zeros_like(parameter.data) for name, parameter, _ in self.tables}
        # the step at which each row's momentum was last brought up to date
        self._seen = {name: torch.zeros(p.shape[0], dtype=torch.int32, device=p.device) for name, p, _ in self.tables}

    @torch.no_grad()
    def step(self, rate: Tensor, number: Tensor) -> None:
        """One update; a table without a gradient is left as it is.

        Args:
            rate: float32 scalar.
            number: int32 scalar, the update's number from 1. Both on the parameters' device.
        """
        for name, parameter, scale in self.tables:
            grad_VC = parameter.grad
            if grad_VC is None:
                continue
            momentum_VC, seen_V = self._momentum[name], self._seen[name]
            if self.mode == "touched":
                touched_V1 = (grad_VC != 0).any(dim=1, keepdim=True)
                missed_V1 = (number - seen_V).unsqueeze(1)
                fresh_VC = momentum_VC * self.momentum**missed_V1 + (1 - self.momentum) * grad_VC
                momentum_VC.copy_(torch.where(touched_V1, fresh_VC, momentum_VC))
                seen_V.copy_(torch.where(touched_V1.squeeze(1), number, seen_V))
                direction_VC = self.momentum * momentum_VC + (1 - self.momentum) * grad_VC
                direction_VC = torch.where(touched_V1, direction_VC, 0)
            else:
                momentum_VC.lerp_(grad_VC, 1 - self.momentum)
                seen_V.copy_(number.expand_as(seen_V))
                direction_VC = torch.lerp(momentum_VC, grad_VC, 1 - self.momentum)
            step_size = self.update_rms * scale * math.sqrt(parameter.shape[1]) * rate
            parameter.sub_(balance(direction_VC, self.rounds) * step_size)

    def state(self) -> dict[str, Tensor]:
        """The state by `momentum/<parameter>` and `seen/<parameter>`."""
        momentum = {f"momentum/{name}": tensor for name, tensor in self._momentum.items()}
        return momentum | {f"seen/{name}": tensor for name, tensor in self._seen.items()}
