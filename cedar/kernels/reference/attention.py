"""Gather the chosen entries, one float32 softmax; plain torch, differentiable."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.kernels import attention as ops
from cedar.kernels.dense import rotate
from cedar.kernels.pages import Paged, Stored, load_rows


def attention(
    query_THC: Tensor,
    window_TWC: Tensor,
    window_visible_TW: Tensor,
    entry_TKC: Tensor | None,
    entry_visible_TK: Tensor | None,
    sink_H: Tensor,
) -> Tensor:
    key_TJC, visible_TJ = window_TWC, window_visible_TW
    if entry_TKC is not None and entry_visible_TK is not None:
        key_TJC = torch.cat([window_TWC, entry_TKC], dim=1)
        visible_TJ = torch.cat([window_visible_TW, entry_visible_TK], dim=1)
    key_TJC = key_TJC.float()
    score_THJ = (query_THC.float() * query_THC.shape[-1] ** -0.5) @ key_TJC.transpose(1, 2)
    score_THJ = score_THJ.masked_fill(~visible_TJ.unsqueeze(1), -torch.inf)
    # the maximum is over keys alone and starts at -1e30, so a row without keys gives zeros, not NaN
    peak_TH1 = score_THJ.amax(-1, keepdim=True).clamp(min=-1e30)
    weight_THJ = torch.exp(score_THJ - peak_TH1)
    total_TH1 = weight_THJ.sum(-1, keepdim=True) + torch.exp(sink_H.view(1, -1, 1) - peak_TH1)
    # the released kernel rounds the weights to the model's dtype for the value product only
    value_THC = weight_THJ.to(query_THC.dtype).float() @ key_TJC
    return (value_THC / total_TH1).to(query_THC.dtype)


def paged_attention(
    query_THC: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    window: Stored,
    slot_T: Tensor,
    position_T: Tensor,
    floor_T: Tensor,
    entries: Paged | None,
    selection_TK: Tensor | None,
    sink_H: Tensor,
    num_window: int,
) -> Tensor:
    query_THC = rotate(query_THC, cos_TR, sin_TR)
    place_TW = position_T.unsqueeze(-1) + torch.arange(1 - num_window, 1, device=position_T.device)
    visible_TW = place_TW >= floor_T.unsqueeze(-1)
    ring_TW = place_TW % window.codes_PNX.shape[1]
    window_TWC = load_rows(window, slot_T.unsqueeze(-1).expand_as(ring_TW), ring_TW, query_THC.dtype)
    # a row that nobody wrote may decode to NaN, which a weight of zero would not silence
    window_TWC = window_TWC.masked_fill(~visible_TW.unsqueeze(-1), 0)
    if entries is None or selection_TK is None:
        output_THC = ops.attention(query_THC, window_TWC, visible_TW, None, None, sink_H)
        return rotate(output_THC, cos_TR, -sin_TR)
    present_TK = selection_TK >= 0
    index_TK = selection_TK.clamp(min=0)
    per_page = entries.stored.codes_PNX.shape[1]
    page_TK = entries.page_SP[entries.slot_T].gather(1, index_TK // per_page)
    entry_TKC = load_rows(entries.stored, page_TK, index_TK % per_page, query_THC.dtype)
    entry_TKC = entry_TKC.masked_fill(~present_TK.unsqueeze(-1), 0)
    output_THC = ops.attention(query_THC, window_TWC, visible_TW, entry_TKC, present_TK, sink_H)
    return rotate(output_THC, cos_TR, -sin_TR)


def masked_attention(
    query_BSHC: Tensor,
    window_BSC: Tensor,
    window_start_BS: Tensor,
    entry_BEC: Tensor | None,
    entry_visible_BSE: Tensor | None,
    sink_H: Tensor,
    num_window: int,
) -> tuple[Tensor, Tensor | None]:
    num_rows, num_heads, channels = query_BSHC.shape[1:]
    query_BSHC = query_BSHC * channels**-0.5
    near_BSHJ = _window_scores(query_BSHC, window_BSC, window_start_BS, num_window)
    scores = [near_BSHJ]
    if entry_BEC is not None and entry_visible_BSE is not None:
        far_BSHE = torch.einsum("bshc,bec->bshe", query_BSHC, entry_BEC).float()
        scores.append(far_BSHE.masked_fill(~entry_visible_BSE.unsqueeze(2), -torch.inf))
    # the sink is one more column whose value is nothing
    scores.append(sink_H.view(1, 1, -1, 1).expand(*near_BSHJ.shape[:3], 1))
    weight = torch.softmax(torch.cat(scores, dim=-1), dim=-1)
    num_near = near_BSHJ.shape[-1]
    near_weight_BSHJ = weight[..., :num_near].to(query_BSHC.dtype)
    output_BSHC = _window_values(near_weight_BSHJ, window_BSC, num_window)
    if entry_BEC is None:
        return output_BSHC[:, :num_rows], None
    far_weight_BSHE = weight[..., num_near:-1]
    output_BSHC = output_BSHC[:, :num_rows] + torch.einsum(
        "bshe,bec->bshc", far_weight_BSHE.to(query_BSHC.dtype), entry_BEC
    )
    return output_BSHC, far_weight_BSHE.detach().sum(2)


def _window_blocks(window_BSC: Tensor, num_window: int) -> Tensor:
    """Each block of rows with the block before it: [B, blocks, 2 * num_window, C]."""
    num_rows = window_BSC.shape[1]
    padded = F.pad(window_BSC, (0, 0, num_window, -num_rows % num_window))
    return padded.unfold(1, 2 * num_window, num_window).transpose(2, 3)


def _window_scores(query_BSHC: Tensor, window_BSC: Tensor, window_start_BS: Tensor, num_window: int) -> Tensor:
    """Scores against the own and the previous block of keys, -inf outside the window: [B, S, H, 2 * num_window]."""
    num_rows, num_heads = query_BSHC.shape[1:3]
    padding = -num_rows % num_window
    block_BKJC = _window_blocks(window_BSC, num_window)
    query_BKRC = F.pad(query_BSHC, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, num_window)).flatten(2, 3)
    score_BKRJ = (query_BKRC @ block_BKJC.transpose(2, 3)).float()
    score_BSHJ = score_BKRJ.unflatten(2, (num_window, num_heads)).flatten(1, 2)[:, :num_rows]
    row_S1 = torch.arange(num_rows, device=query_BSHC.device).unsqueeze(-1)
    # column j of a row's block pair is row (block - 1) * num_window + j
    key_SJ = (row_S1 // num_window - 1) * num_window + torch.arange(2 * num_window, device=query_BSHC.device)
    visible_BSJ = (key_SJ <= row_S1) & (key_SJ > row_S1 - num_window) & (key_SJ >= window_start_BS.unsqueeze(-1))
    return score_BSHJ.masked_fill(~visible_BSJ.unsqueeze(2), -torch.inf)


def _window_values(weight_BSHJ: Tensor, window_BSC: Tensor, num_window: int) -> Tensor:
    num_rows, num_heads = weight_BSHJ.shape[1:3]
    block_BKJC = _window_blocks(window_BSC, num_window)
    padded = F.pad(weight_BSHJ, (0, 0, 0, 0, 0, -num_rows % num_window))
    weight_BKRJ = padded.unflatten(1, (-1, num_window)).flatten(2, 3)
    value_BKRC = weight_BKRJ @ block_BKJC
    return value_BKRC.unflatten(2, (num_window, num_heads)).flatten(1, 2)
