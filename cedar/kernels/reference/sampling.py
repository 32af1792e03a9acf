"""Inverse transform sampling in float64, row by row of one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.kernels.sampling import RowParams


def draw_rows(logits_TV: Tensor, temperature_T: Tensor, uniform_T: Tensor) -> Tensor:
    weight_TV = _scaled(logits_TV, temperature_T).exp()
    return _finished(logits_TV, temperature_T, _draw(weight_TV, uniform_T))


def choose_rows(logits_TV: Tensor, params: RowParams) -> Tensor:
    return _chosen(logits_TV, params, *_kept(logits_TV, params))


def draw_drafts(logits_TV: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    kept = _kept(logits_TV, params)
    return _chosen(logits_TV, params, *kept), _probs(*kept).float()


def verify_rows(
    logits_TV: Tensor, params: RowParams, draft_T: Tensor, draft_prob_TV: Tensor, other_T: Tensor
) -> Tensor:
    kept = _kept(logits_TV, params)
    chosen_T = _chosen(logits_TV, params, *kept)
    p_TV, q_TV, draft_T1 = _probs(*kept), draft_prob_TV.double(), draft_T.clamp(min=0).unsqueeze(-1)
    stands_T = params.uniform_T * q_TV.gather(1, draft_T1).squeeze(-1) < p_TV.gather(1, draft_T1).squeeze(-1)
    rest_TV = (p_TV - q_TV).clamp(min=0)
    # p and q equal but for rounding: nothing is left over
    rest_TV = torch.where(rest_TV.sum(-1, keepdim=True) > 1e-8, rest_TV, p_TV)
    verified_T = torch.where(stands_T, draft_T, _draw(rest_TV, other_T))
    return torch.where((draft_T < 0) | (chosen_T < 0), chosen_T, verified_T)


def _kept(logits_TV: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """(the tokens in the order of a row's choice, their weights), 0 for what a filter leaves out."""
    scaled_TV = _scaled(logits_TV, params.temperature_T)
    vocab_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    has_filter_T = (params.top_k_T > 0) | (params.top_p_T < 1) | (params.min_p_T > 0)
    # a row without filters keeps the vocabulary's order
    order_TV = scaled_TV.masked_fill(~has_filter_T.unsqueeze(-1), 0).sort(descending=True, stable=True).indices
    weight_TV = scaled_TV.gather(1, order_TV).exp()
    k_T = torch.where(params.top_k_T > 0, params.top_k_T, logits_TV.shape[1])
    weight_TV = weight_TV * (vocab_V < k_T.unsqueeze(-1))
    before_TV = weight_TV.cumsum(-1) - weight_TV
    within_TV = before_TV < params.top_p_T.unsqueeze(-1) * weight_TV.sum(-1, keepdim=True)
    weight_TV = weight_TV * (within_TV | (params.top_p_T >= 1).unsqueeze(-1))
    floor_T1 = params.min_p_T.unsqueeze(-1) * weight_TV[:, :1]
    weight_TV = weight_TV * ((weight_TV >= floor_T1) | (params.min_p_T == 0).unsqueeze(-1))
    return order_TV, weight_TV


def _chosen(logits_TV: Tensor, params: RowParams, order_TV: Tensor, weight_TV: Tensor) -> Tensor:
    drawn_T = order_TV.gather(1, _draw(weight_TV, params.uniform_T).unsqueeze(-1)).squeeze(-1)
    return _finished(logits_TV, params.temperature_T, drawn_T)


def _probs(order_TV: Tensor, weight_TV: Tensor) -> Tensor:
    """Probabilities in the vocabulary's order, float64."""
    share_TV = weight_TV / weight_TV.sum(-1, keepdim=True)
    return torch.zeros_like(share_TV).scatter(1, order_TV, share_TV)


def _scaled(logits_TV: Tensor, temperature_T: Tensor) -> Tensor:
    """Relative to the highest, so that no temperature overflows."""
    divisor_T = temperature_T.masked_fill(temperature_T == 0, 1)
    return (logits_TV.double() - logits_TV.amax(-1, keepdim=True)) / divisor_T.unsqueeze(-1)


def _draw(weight_TV: Tensor, uniform_T: Tensor) -> Tensor:
    running_TV = weight_TV.cumsum(-1)
    index_T = (running_TV <= uniform_T.unsqueeze(-1) * running_TV[:, -1:]).sum(-1)
    # rounding may carry the last edge to the end; never land on a token of no weight
    vocab_V = torch.arange(weight_TV.shape[1], device=weight_TV.device)
    return torch.minimum(index_T, torch.where(weight_TV > 0, vocab_V, 0).amax(-1))


def _finished(logits_TV: Tensor, temperature_T: Tensor, drawn_T: Tensor) -> Tensor:
    vocab_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    highest_T1 = logits_TV.amax(-1, keepdim=True)
    first_T = torch.where(logits_TV == highest_T1, vocab_V, logits_TV.shape[1]).amin(-1)
    chosen_T = torch.where(temperature_T == 0, first_T, drawn_T)
    return torch.where(highest_T1.squeeze(-1).isfinite(), chosen_T, -1)
