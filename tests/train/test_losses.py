"""Losses: values by hand, gradients by finite differences in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cedar.config.train import BalanceConfig
from cedar.model.state import IndexGroup, RouterStats
from cedar.train import balance, losses

INF = math.inf


def group(scores: Tensor, mass: Tensor) -> IndexGroup:
    return IndexGroup(3, scores, mass)


def test_next_token_counts_only_learnt_rows() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, math.log(3)], [5.0, 0.0]])
    total, count = losses.next_token(logits, torch.tensor([0, 1, -1]))
    assert int(count) == 2
    assert math.isclose(float(total), math.log(2) + math.log(4 / 3), rel_tol=1e-6)


def test_index_divergence_by_hand() -> None:
    # mass 1:3 over two supported entries, a uniform student: KL = sum p ln(p / 0.5)
    scores = torch.tensor([[0.7, 0.7, -INF]])
    mass = torch.tensor([[0.1, 0.3, 0.9]])
    total, rows = losses.index_divergence([group(scores, mass)])
    want = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert int(rows) == 1
    assert math.isclose(float(total), want, rel_tol=1e-5)


def test_index_divergence_is_zero_where_the_student_is_right_and_ignores_rows_without_mass() -> None:
    scores = torch.tensor([[math.log(0.25), math.log(0.75)], [3.0, 1.0], [-INF, -INF]], requires_grad=True)
    mass = torch.tensor([[0.02, 0.06], [4e-5, 4e-5], [0.0, 0.0]])
    total, rows = losses.index_divergence([group(scores, mass), group(scores, mass)])
    assert int(rows) == 2
    assert abs(float(total.detach())) < 1e-6
    total.backward()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()
    assert not scores.grad[1:].any()


def test_index_divergence_gradient_and_detached_teacher() -> None:
    support = torch.rand(5, 7) < 0.7
    support[:, 0] = True
    mass = torch.rand(5, 7, dtype=torch.float64, requires_grad=True)

    def loss(values: Tensor) -> Tensor:
        return losses.index_divergence([group(values.masked_fill(~support, -INF), mass.detach())])[0]

    assert torch.autograd.gradcheck(loss, torch.randn(5, 7, dtype=torch.float64, requires_grad=True))


def test_index_recall() -> None:
    # the student's best two are entries 0 and 1, the teacher's best two 1 and 2
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0], [1.0, 0.0, -INF, -INF]])
    mass = torch.tensor([[0.0, 0.2, 0.3, 0.1], [0.5, 0.5, 0.0, 0.0]])
    assert float(losses.index_recall([group(scores, mass)], best=2, topk=2)) == 0.5


def routers(scores: Tensor, ids: Tensor) -> list[RouterStats]:
    return [RouterStats(0, scores, ids)]


def test_sequence_balance_is_one_for_even_routing_and_grows_with_skew() -> None:
    scores = torch.ones(8, 4)
    even = torch.tensor([[0, 1], [2, 3]] * 4)
    sample = torch.tensor([0] * 4 + [1] * 4)
    total, count = losses.sequence_balance(routers(scores, even), sample, 2)
    assert int(count) == 2
    assert math.isclose(float(total), 2.0, rel_tol=1e-6)
    skewed = scores.clone()
    skewed[:, 0] = 5.0
    worse, _ = losses.sequence_balance(routers(skewed, torch.tensor([[0, 1]] * 8)), sample, 2)
    assert float(worse) > 2.5


def test_sequence_balance_leaves_padding_out_and_has_the_right_gradient() -> None:
    ids = torch.tensor([[0, 1], [1, 2], [0, 3], [2, 3]])
    sample = torch.tensor([0, 0, 1, -1])
    scores = torch.rand(4, 4, dtype=torch.float64) + 0.1

    def loss(values: Tensor) -> Tensor:
        return losses.sequence_balance(routers(values, ids), sample, 2)[0]

    other = scores.clone()
    other[3] = 9.0
    assert torch.equal(loss(scores), loss(other))
    assert torch.autograd.gradcheck(loss, scores.requires_grad_())


def test_expert_loads_leave_padding_out() -> None:
    ids = torch.tensor([[0, 1], [0, 2], [0, 3]])
    loads = losses.expert_loads(routers(torch.zeros(3, 4), ids), torch.tensor([0, 0, -1]))
    assert loads.tolist() == [[2, 1, 1, 0]]


def test_bias_moves_against_load_and_evens_it_out() -> None:
    bias, skew = torch.zeros(4), torch.tensor([0.3, 0.0, 0.0, -0.3])
    balance.update([bias], torch.tensor([[9.0, 1.0, 1.0, 1.0]]), 0.01)
    assert bias[0] < 0 < bias[1]
    before = after = math.nan
    for step in range(200):
        scores = torch.rand(512, 4) + skew
        ids = (scores + bias).topk(2).indices
        load = losses.expert_loads(routers(scores, ids), torch.zeros(512, dtype=torch.long))
        after = float(balance.spread(load))
        before = after if step == 0 else before
        balance.update([bias], load, balance.speed_at(step, BalanceConfig()))
    assert before > 1.5
    assert after < 1.25
