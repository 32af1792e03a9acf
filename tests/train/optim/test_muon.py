"""Muon: singular values, RMS, blocks stepped apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cedar.train.optim.muon import Muon, Piece, orthogonalise


@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (256, 64), (24, 640)])
def test_singular_values_become_one(rows: int, columns: int) -> None:
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, rows, columns)))
    assert (values - 1).abs().max() < 2e-3


def test_known_singular_values_keep_their_vectors() -> None:
    left, _ = torch.linalg.qr(torch.randn(32, 32))
    right, _ = torch.linalg.qr(torch.randn(96, 32))
    matrix = left @ torch.diag(torch.logspace(-1, 1, 32)) @ right.T
    got = orthogonalise(matrix.unsqueeze(0))[0]
    assert (got - left @ right.T).abs().max() < 5e-3


def test_zero_stays_zero_and_scale_does_not_matter() -> None:
    matrix = torch.randn(1, 16, 48)
    assert not orthogonalise(torch.zeros(2, 16, 48)).any()
    for scale in (1e-20, 1e10):
        assert torch.allclose(orthogonalise(matrix * scale), orthogonalise(matrix), atol=1e-4)


def step(parameter: nn.Parameter, blocks: int, *, rate: float = 1e-2, decay: float = 0.0) -> torch.Tensor:
    before = parameter.detach().clone()
    Muon([Piece("w", parameter, blocks)], momentum=0.95, update_rms=0.18, weight_decay=decay).step(torch.tensor(rate))
    return parameter.detach() - before


# field report E05: an update 5.5 times too large by a default factor
@pytest.mark.parametrize("shape", [(96, 96), (32, 160), (160, 32)])
def test_update_rms_is_what_was_asked_for_whatever_the_shape(shape: tuple[int, int]) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.randn(shape) * 1e-6
    rms = step(parameter, 1).square().mean().sqrt()
    # a square random matrix keeps a few small singular values
    assert abs(float(rms) / (0.18 * 1e-2) - 1) < (0.05 if shape[0] == shape[1] else 5e-3)


# field report E06
def test_each_head_is_orthogonalised_alone() -> None:
    parameter = nn.Parameter(torch.zeros(4 * 16, 48))
    parameter.grad = torch.randn(64, 48)
    parameter.grad[:16] *= 100
    change = step(parameter, 4).view(4, 16, 48) / (1e-2 * 0.18 * math.sqrt(48))
    assert (torch.linalg.svdvals(change) - 1).abs().max() < 5e-3


def test_stacked_experts_step_as_each_alone() -> None:
    grad = torch.randn(3, 32, 64)
    stacked = nn.Parameter(torch.ones(3, 32, 64))
    stacked.grad = grad.clone()
    change = step(stacked, 3, decay=0.1)
    for expert in range(3):
        alone = nn.Parameter(torch.ones(32, 64))
        alone.grad = grad[expert].clone()
        assert torch.allclose(step(alone, 1, decay=0.1), change[expert], atol=1e-6)


def test_parameter_without_gradient_is_left_alone() -> None:
    first, second = nn.Parameter(torch.ones(8, 16)), nn.Parameter(torch.ones(8, 16))
    muon = Muon([Piece("a", first, 1), Piece("b", second, 1)], momentum=0.95, update_rms=0.18, weight_decay=0.1)
    first.grad = second.grad = torch.randn(8, 16)
    muon.step(torch.tensor(1e-2))
    kept, momentum = second.detach().clone(), muon.state()["momentum/b"].clone()
    second.grad = None
    muon.step(torch.tensor(1e-2))
    assert torch.equal(second, kept)
    assert torch.equal(muon.state()["momentum/b"], momentum)
    assert not torch.equal(first, kept)
