"""Score everything, mask, top-k; ties go to the lower index."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.formats.spec import FP4_INDEX
from cedar.kernels import indexer as ops
from cedar.kernels.dense import rotate
from cedar.kernels.indexer import LEAST_MASS
from cedar.kernels.pages import Paged, load_rows
from cedar.kernels.quantize import round_rows


def index_scores(query_THI: Tensor, weight_TH: Tensor, key_EI: Tensor) -> Tensor:
    num_heads = query_THI.shape[1]
    dot_THE = (query_THI.float().flatten(0, 1) @ key_EI.float().T).unflatten(0, (-1, num_heads))
    return (torch.relu(dot_THE) * weight_TH.float().unsqueeze(-1)).sum(1)


def gathered_index_scores(query_THI: Tensor, weight_TH: Tensor, key_TEI: Tensor) -> Tensor:
    dot_THE = query_THI.float() @ key_TEI.float().transpose(1, 2)
    return (torch.relu(dot_THE) * weight_TH.float().unsqueeze(-1)).sum(1)


def paged_index_scores(
    query_THI: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    weight_TH: Tensor,
    keys: Paged,
    visible_T: Tensor,
    num_entries: int,
) -> Tensor:
    query_THI = round_rows(rotate(query_THI, cos_TR, sin_TR), FP4_INDEX)
    entry_TE = torch.arange(num_entries, device=visible_T.device).expand(visible_T.shape[0], -1)
    return _scores_at(query_THI, weight_TH, keys, entry_TE, entry_TE < visible_T.unsqueeze(-1))


def paged_pool_scores(
    query_THI: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    weight_TH: Tensor,
    keys: Paged,
    visible_T: Tensor,
    block_TN: Tensor,
    block_size: int,
) -> Tensor:
    query_THI = round_rows(rotate(query_THI, cos_TR, sin_TR), FP4_INDEX)
    member_TNM = block_TN.unsqueeze(-1) * block_size + torch.arange(block_size, device=block_TN.device)
    member_TP = member_TNM.flatten(1)
    return _scores_at(query_THI, weight_TH, keys, member_TP, (member_TP >= 0) & (member_TP < visible_T.unsqueeze(-1)))


def _scores_at(query_THI: Tensor, weight_TH: Tensor, keys: Paged, entry_TE: Tensor, present_TE: Tensor) -> Tensor:
    entry_TE = entry_TE.masked_fill(~present_TE, 0)
    per_page = keys.stored.codes_PNX.shape[1]
    page_TE = keys.page_SP[keys.slot_T].gather(1, entry_TE // per_page)
    key_TEI = load_rows(keys.stored, page_TE, entry_TE % per_page, torch.float32)
    score_TE = gathered_index_scores(query_THI, weight_TH, key_TEI)
    return score_TE.masked_fill(~present_TE, -torch.inf)


def top_entries(score_TE: Tensor, k: int) -> Tensor:
    return ops.mask_to_index(ops.topk_mask(score_TE, k), k)


def block_scores(score_TE: Tensor, visible_T: Tensor, block_size: int) -> Tensor:
    padded = torch.nn.functional.pad(score_TE, (0, -score_TE.shape[-1] % block_size), value=-torch.inf)
    block_TN = padded.unflatten(-1, (-1, block_size)).amax(-1)
    newest_T1 = (visible_T.unsqueeze(-1) - 1).clamp(min=0) // block_size
    has_any_T1 = (visible_T > 0).unsqueeze(-1)
    forced_TN = (torch.arange(block_TN.shape[-1], device=score_TE.device) == newest_T1) & has_any_T1
    return block_TN.masked_fill(forced_TN, torch.inf)


def top_members(score_TP: Tensor, k: int, block_TN: Tensor, block_size: int) -> Tensor:
    place_TK = top_entries(score_TP, k)
    safe_TK = place_TK.clamp(min=0)
    entry_TK = block_TN.gather(1, safe_TK // block_size) * block_size + safe_TK % block_size
    return entry_TK.masked_fill(place_TK < 0, -1)


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


def index_divergence(score_TK: Tensor, mass_TK: Tensor) -> tuple[Tensor, Tensor]:
    supported_TK = score_TK > -torch.inf
    mass_TK = mass_TK.detach().masked_fill(~supported_TK, 0)
    total_T1 = mass_TK.sum(-1, keepdim=True)
    counted_T = total_T1.squeeze(-1) >= LEAST_MASS
    teacher_TK = mass_TK / total_T1.clamp(min=LEAST_MASS)
    # rows without support would give -inf - -inf; their scores are never read
    readable_TK = score_TK.masked_fill(~counted_T.unsqueeze(-1), 0)
    student_TK = readable_TK.log_softmax(-1).masked_fill(~supported_TK, 0)
    divergence_T = torch.xlogy(teacher_TK, teacher_TK).sum(-1) - (teacher_TK * student_TK).sum(-1)
    return divergence_T.masked_fill(~counted_T, 0), counted_T
