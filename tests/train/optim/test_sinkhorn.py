"""The Sinkhorn update: row and column norms, masked rows, rows that a batch did not touch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cedar.train.optim.sinkhorn import Sinkhorn, balance


def by_the_book(direction: Tensor, rounds: int) -> Tensor:
    """training.md 2.3, line by line."""
    norms = direction.norm(dim=1)
    update = direction.clone()
    update[norms <= 1e-3 * norms.mean()] = 0
    for k in range(1, rounds + 1):
        if k % 2:
            update = update / (update.norm(dim=1, keepdim=True) + 1e-20)
        else:
            update = update / (update.norm(dim=0, keepdim=True) + 1e-20)
    return update


def test_equals_the_formula() -> None:
    direction = torch.randn(200, 32) * torch.logspace(-2, 1, 200).unsqueeze(1)
    direction[7] = 0
    direction[8] *= 1e-9
    assert torch.allclose(balance(direction, 11), by_the_book(direction.double(), 11).float(), atol=1e-5)


def test_active_rows_have_norm_one_columns_even_and_masked_rows_are_exactly_zero() -> None:
    direction = torch.randn(300, 64)
    direction[::10] = 0
    direction[1] *= 1e-5
    update = balance(direction, 11)
    active = direction.norm(dim=1) > 1e-3 * direction.norm(dim=1).mean()
    assert (update[active].norm(dim=1) - 1).abs().max() < 1e-5
    assert not update[~active].any()
    column_rms = update[active].square().mean(0).sqrt() * math.sqrt(64)
    assert (column_rms - 1).abs().max() < 1e-3


def test_tiny_and_zero_gradients() -> None:
    direction = torch.randn(50, 32)
    assert torch.allclose(balance(direction * 1e-25, 11), balance(direction, 11), atol=1e-4)
    assert not balance(torch.zeros(50, 32), 11).any()


def table(mode: str) -> tuple[nn.Parameter, Sinkhorn]:
    parameter = nn.Parameter(torch.zeros(40, 32))
    return parameter, Sinkhorn([("t", parameter, 2.0)], momentum=0.95, update_rms=0.18, rounds=11, mode=mode)  # type: ignore[arg-type]


def test_update_rms() -> None:
    parameter, sinkhorn = table("paper")
    parameter.grad = torch.randn(40, 32) * 1e-4
    sinkhorn.step(torch.tensor(1e-2), torch.tensor(1, dtype=torch.int32))
    rms = parameter.detach().square().mean(1).sqrt()
    assert torch.allclose(rms, torch.full((40,), 0.18 * 1e-2 * 2.0), rtol=1e-4)


def test_touched_mode_leaves_rows_alone_that_were_not_read() -> None:
    for mode, moves in (("paper", True), ("touched", False)):
        parameter, sinkhorn = table(mode)
        parameter.grad = torch.randn(40, 32)
        sinkhorn.step(torch.tensor(1e-2), torch.tensor(1, dtype=torch.int32))
        before = parameter.detach().clone()
        parameter.grad = torch.randn(40, 32)
        parameter.grad[5] = 0
        sinkhorn.step(torch.tensor(1e-2), torch.tensor(2, dtype=torch.int32))
        assert bool((parameter[5] != before[5]).any()) is moves


def test_momentum_of_a_row_that_returns_has_decayed_by_the_steps_it_missed() -> None:
    parameter, sinkhorn = table("touched")
    grads = torch.randn(6, 40, 32)
    grads[1:5, 5] = 0
    for number, grad in enumerate(grads, start=1):
        parameter.grad = grad
        sinkhorn.step(torch.tensor(1e-2), torch.tensor(number, dtype=torch.int32))
    want = 0.05 * grads[0, 5] * 0.95**5 + 0.05 * grads[5, 5]
    assert torch.allclose(sinkhorn.state()["momentum/t"][5], want, atol=1e-6)
