"""Muon: momentum, then orthogonalisation, for every linear map.

Matrices of one shape are stepped together, whatever layer they come from: one batched product instead of
hundreds. G matrices of a bucket, N rows, M columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

# eight fast steps, then two that settle the singular values at 1 (training.md 2.2)
_STEPS = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2


def orthogonalise(update_GNM: Tensor) -> Tensor:
    """Each matrix with all its singular values set to 1, float32; a zero matrix stays zero.

    Newton-Schulz: bfloat16 products on a GPU (singular values 0.994..1.006), float32 on a CPU (1 +- 0.001).
    A square matrix with a decaying spectrum keeps a few small values.

    Source: training.md 2.2.
    """
    tall = update_GNM.shape[-2] > update_GNM.shape[-1]
    x = update_GNM.mT if tall else update_GNM
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-30)
    if x.is_cuda:
        x = x.bfloat16()
    for a, b, c in _STEPS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter and the number of row blocks that are orthogonalised apart (heads, groups, experts)."""

    name: str
    parameter: nn.Parameter
    blocks: int


@dataclass(slots=True)
class _Bucket:
    pieces: list[Piece] = field(default_factory=list)
    momentum_GNM: Tensor | None = None


class Muon:
    """Nesterov momentum, orthogonalised per block; the update's RMS is `update_rms`, whatever the shape.

    Args:
        pieces: Each parameter is [rows, M] or [blocks, rows, M]; its rows divide into its blocks.
    """

    def __init__(self, pieces: Sequence[Piece], *, momentum: float, update_rms: float, weight_decay: float) -> None:
        self.momentum, self.update_rms, self.weight_decay = momentum, update_rms, weight_decay
        self._buckets: dict[tuple[int, ...], _Bucket] = {}
        for piece in pieces:
            self._buckets.setdefault(_blocks(piece, piece.parameter).shape[1:], _Bucket()).pieces.append(piece)
        for bucket in self._buckets.values():
            bucket.momentum_GNM = torch.zeros_like(torch.cat([_blocks(p, p.parameter.data) for p in bucket.pieces]))

    @torch.no_grad()
    def step(self, rate: Tensor) -> None:
        """One update; a parameter without a gradient is left as it is, momentum included.

        Args:
            rate: float32 scalar on the parameters' device, so that a captured step can be given another.
        """
        for (rows, columns), bucket in self._buckets.items():
            momentum_GNM = bucket.momentum_GNM
            assert momentum_GNM is not None
            present = [piece.parameter.grad is not None for piece in bucket.pieces]
            if not any(present):
                continue
            grad_GNM = torch.cat([_blocks(p, _grad(p.parameter)) for p in bucket.pieces])
            if all(present):
                momentum_GNM.mul_(self.momentum).add_(grad_GNM)
            else:
                here = torch.tensor(
                    [has for piece, has in zip(bucket.pieces, present, strict=True) for _ in range(piece.blocks)],
                    device=grad_GNM.device,
                )
                momentum_GNM.copy_(
                    torch.where(here[:, None, None], momentum_GNM * self.momentum + grad_GNM, momentum_GNM)
                )
            update_GNM = orthogonalise(torch.add(grad_GNM, momentum_GNM, alpha=self.momentum))
            changed = [p for p, has in zip(bucket.pieces, present, strict=True) if has]
            updates = update_GNM.split([piece.blocks for piece in bucket.pieces])
            parameters = [p.parameter.data for p in changed]
            torch._foreach_mul_(parameters, 1 - rate * self.weight_decay)
            update_GNM.mul_(-rate * self.update_rms * math.sqrt(max(rows, columns)))
            torch._foreach_add_(
                parameters,
                [
                    u.reshape(p.parameter.shape)
                    for p, u, has in zip(bucket.pieces, updates, present, strict=True)
                    if has
                ],
            )

    def state(self) -> dict[str, Tensor]:
        """Views of the state by `momentum/<parameter>`, in the parameters' own shapes."""
        tensors = {}
        for bucket in self._buckets.values():
            assert bucket.momentum_GNM is not None
            parts = bucket.momentum_GNM.split([piece.blocks for piece in bucket.pieces])
            for piece, part in zip(bucket.pieces, parts, strict=True):
                tensors[f"momentum/{piece.name}"] = part.view(piece.parameter.shape)
        return tensors


def _blocks(piece: Piece, tensor: Tensor) -> Tensor:
    assert tensor.shape[:-1].numel() % piece.blocks == 0, piece.name
    return tensor.reshape(piece.blocks, -1, tensor.shape[-1])


def _grad(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
