"""Sums and counts of the three losses; the loop divides once, by counts of the whole step.

T rows of all packs, V vocabulary, K entries of the support, E experts, L layers, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.kernels import indexer as indexer_ops
from cedar.model.state import IndexGroup, RouterStats


def _full(values: Tensor) -> Tensor:
    """At least float32; float64 stays, for tests by finite differences."""
    return values if values.dtype == torch.float64 else values.float()


def next_token(logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """(summed negative log-likelihood in nats, number of learnt rows), float32.

    Args:
        target_T: Token ids, -1 where nothing is learnt.
    """
    total = F.cross_entropy(logits_TV.float(), target_T, ignore_index=-1, reduction="sum")
    return total, (target_T >= 0).sum()


def index_divergence(groups: Sequence[IndexGroup]) -> tuple[Tensor, Tensor]:
    """(summed KL from the indexers' scores to the attention they serve, rows that were counted), float32.

    The teacher is the joint softmax's mass (window and sink in its denominator) summed over heads and served
    layers, then normalised over the support; the arithmetic is `kernels.indexer.index_divergence`.

    Raises:
        ValueError: No group; a model without index sources has no such loss.

    Source: training.md 1.3.
    """
    if not groups:
        raise ValueError("no index group was collected: call the model with collect=True")
    sums, counts = [], []
    for group in groups:
        divergence_T, counted_T = indexer_ops.index_divergence(_full(group.scores_TK), _full(group.mass_TK))
        sums.append(divergence_T.sum())
        counts.append(counted_T.sum())
    return torch.stack(sums).sum(), torch.stack(counts).sum()


def index_recall(groups: Sequence[IndexGroup], best: int, topk: int) -> Tensor:
    """Part of the teacher's `best` entries that the student ranks among its `topk`; float32, counted rows only.

    It says something only where the support is wider than top-k (dense batches).
    """
    found, wanted = [], []
    for group in groups:
        supported_TK = group.scores_TK > -torch.inf
        mass_TK = group.mass_TK.masked_fill(~supported_TK, -1)
        counted_T = mass_TK.clamp(min=0).sum(-1) >= indexer_ops.LEAST_MASS
        counted_T &= supported_TK.sum(-1) > topk
        width = mass_TK.shape[-1]
        want_TK = torch.zeros_like(supported_TK).scatter_(-1, mass_TK.topk(min(best, width), dim=-1).indices, True)
        have_TK = torch.zeros_like(supported_TK).scatter_(
            -1, group.scores_TK.topk(min(topk, width), dim=-1).indices, True
        )
        found.append(((want_TK & have_TK) & counted_T.unsqueeze(-1)).sum())
        wanted.append((want_TK & counted_T.unsqueeze(-1)).sum())
    return torch.stack(found).sum() / torch.stack(wanted).sum().clamp(min=1)


def sequence_balance(routers: Sequence[RouterStats], sample_T: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
    """(the sequence-wise balance loss summed over samples and layers, number of samples), float32.

    Per sample: `sum_e f_e p_e` with f_e the part of its choices that went to e over an even share, and p_e the
    mean of its normalised, unbiased scores.

    Args:
        sample_T: Number of each row's sample, -1 for padding.

    Source: training.md 1.9.
    """
    scores_LTE = _full(torch.stack([router.scores_TE for router in routers]))
    ids_LTK = torch.stack([router.ids_TK for router in routers])
    num_layers, _, num_experts = scores_LTE.shape
    real_T1 = (sample_T >= 0).unsqueeze(-1).to(scores_LTE.dtype)
    chosen_LTE = torch.zeros_like(scores_LTE).scatter_(-1, ids_LTK, 1.0) * real_T1
    share_LTE = scores_LTE / scores_LTE.sum(-1, keepdim=True) * real_T1
    # the last place takes the padding
    place_T = torch.where(sample_T >= 0, sample_T, num_samples).long()
    empty_LNE = scores_LTE.new_zeros(num_layers, num_samples + 1, num_experts)
    chosen_LNE = empty_LNE.index_add(1, place_T, chosen_LTE)[:, :num_samples]
    share_LNE = empty_LNE.index_add(1, place_T, share_LTE)[:, :num_samples]
    length_N1 = scores_LTE.new_zeros(num_samples + 1).index_add(0, place_T, real_T1.squeeze(-1))[:num_samples, None]
    length_N1 = length_N1.clamp(min=1)
    even = num_experts / ids_LTK.shape[-1]
    total = (even * chosen_LNE / length_N1 * (share_LNE / length_N1)).sum()
    return total, total.new_full((), num_samples)


def expert_loads(routers: Sequence[RouterStats], sample_T: Tensor) -> Tensor:
    """Rows that each expert of each layer got, float32 [L, E]; padding is not counted."""
    ids_LTK = torch.stack([router.ids_TK for router in routers])
    num_experts = routers[0].scores_TE.shape[-1]
    real_T1 = (sample_T >= 0).float().unsqueeze(-1).expand_as(ids_LTK[0])
    loads = torch.zeros(len(routers), num_experts, device=ids_LTK.device)
    return loads.scatter_add_(1, ids_LTK.flatten(1), real_T1.expand_as(ids_LTK).flatten(1))
