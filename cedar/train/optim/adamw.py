"""AdamW for what is no matrix: norms, gains, biases, sinks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class AdamW:
    """Decoupled weight decay, bias-corrected moments in float32.

    Args:
        parameters: (name, parameter, weight decay).
        eps: 1e-20 in the report, so the moments must stay float32.

    Source: training.md 0 and 2.1.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter, float]], *, beta1: float, beta2: float, eps: float
    ) -> None:
        self.parameters = list(parameters)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self._first = {name: torch.zeros_like(p.data, dtype=torch.float32) for name, p, _ in self.parameters}
        self._second = {name: torch.zeros_like(p.data, dtype=torch.float32) for name, p, _ in self.parameters}

    @torch.no_grad()
    def step(self, rate: Tensor, number: Tensor) -> None:
        """One update; a parameter without a gradient is left as it is.

        Args:
            rate: float32 scalar.
            number: int32 scalar, the update's number from 1. Both on the parameters' device.
        """
        first_correction = 1 - self.beta1 ** number.double()
        second_correction = 1 - self.beta2 ** number.double()
        for weight_decay in sorted({decay for _, _, decay in self.parameters}):
            chosen = [(n, p) for n, p, decay in self.parameters if decay == weight_decay and p.grad is not None]
            if not chosen:
                continue
            parameters = [p.data for _, p in chosen]
            grads = [p.grad.float() for _, p in chosen if p.grad is not None]
            first = [self._first[name] for name, _ in chosen]
            second = [self._second[name] for name, _ in chosen]
            torch._foreach_lerp_(first, grads, 1 - self.beta1)
            torch._foreach_mul_(second, self.beta2)
            torch._foreach_addcmul_(second, grads, grads, value=1 - self.beta2)
            denominators = torch._foreach_div(second, second_correction.float())
            torch._foreach_sqrt_(denominators)
            torch._foreach_add_(denominators, self.eps)
            torch._foreach_mul_(parameters, 1 - rate * weight_decay)
            updates = torch._foreach_div(first, denominators)
            torch._foreach_mul_(updates, -rate / first_correction.float())
            torch._foreach_add_(parameters, updates)

    def state(self) -> dict[str, Tensor]:
        """The state by `first/<parameter>` and `second/<parameter>`."""
        first = {f"first/{name}": tensor for name, tensor in self._first.items()}
        return first | {f"second/{name}": tensor for name, tensor in self._second.items()}
