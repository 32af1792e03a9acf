"""Score everything, mask, top-k; ties go to the lower index."""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(query_THI: Tensor, weight_TH: Tensor, key_EI: Tensor) -> Tensor:
    num_heads = query_THI.shape[1]
    dot_THE = (query_THI.float().flatten(0, 1) @ key_EI.float().T).unflatten(0, (-1, num_heads))
    return (torch.relu(dot_THE) * weight_TH.float().unsqueeze(-1)).sum(1)


def gathered_index_scores(query_THI: Tensor, weight_TH: Tensor, key_TEI: Tensor) -> Tensor:
    dot_THE = query_THI.float() @ key_TEI.float().transpose(1, 2)
    return (torch.relu(dot_THE) * weight_TH.float().unsqueeze(-1)).sum(1)


def topk_mask(score_TE: Tensor, k: int) -> Tensor:
    # the cut is a value, not a position: everything above it is in, ties fill up from the lowest index
    cut_T1 = score_TE.topk(k, dim=-1).values[:, -1:]
    above_TE = score_TE > cut_T1
    tied_TE = score_TE == cut_T1
    room_T1 = k - above_TE.sum(-1, keepdim=True)
    chosen_TE = above_TE | (tied_TE & (tied_TE.cumsum(-1) <= room_T1))
    return chosen_TE & (score_TE > -torch.inf)


def masked_index_scores(query_BSHI: Tensor, weight_BSH: Tensor, key_BEI: Tensor) -> Tensor:
    num_rows, num_heads = query_BSHI.shape[1:3]
    dot_BRE = query_BSHI.float().flatten(1, 2) @ key_BEI.float().transpose(1, 2)
    return (torch.relu(dot_BRE).unflatten(1, (num_rows, num_heads)) * weight_BSH.float().unsqueeze(-1)).sum(2)
