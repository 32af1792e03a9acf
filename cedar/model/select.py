"""Selection of one sequence's rows as indices: the arithmetic that whole sequences and decode share.

T rows, H index heads, I index channels, E entries, K selected entries, P pool members, N candidate blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cedar.config.model import IndexerConfig
from cedar.kernels import indexer as indexer_ops
from cedar.kernels.pages import Paged
from cedar.model.state import SelectionRule, SharedKV

# float32 products of queries and entries at once: rows beyond them are selected for in turns
_MOST_PRODUCTS, _MOST_PRODUCTS_GPU = 1 << 27, 1 << 31


@dataclass(slots=True)
class Keys:
    """Index keys that are at hand as a tensor; `RowStore` offers the same two calls over bytes."""

    rows_EI: Tensor

    def all(self) -> Tensor:
        return self.rows_EI

    def gather(self, index_TK: Tensor) -> Tensor:
        return gather_rows(self.rows_EI, index_TK)


class KeySource(Protocol):
    def all(self) -> Tensor: ...

    def gather(self, index_TK: Tensor) -> Tensor: ...


def gather_rows(rows_EC: Tensor, index_TK: Tensor) -> Tensor:
    """Rows by index; -1 gives zeros, so that a missing entry has the same bits everywhere."""
    if rows_EC.shape[0] == 0:
        return rows_EC.new_zeros(*index_TK.shape, rows_EC.shape[1])
    picked = rows_EC[index_TK.clamp(min=0)]
    return picked * (index_TK >= 0).unsqueeze(-1)


def sliding(rows_RC: Tensor, num_window: int) -> Tensor:
    """Every run of `num_window` neighbouring rows: [R - num_window + 1, num_window, C]."""
    return rows_RC.unfold(0, num_window, 1).transpose(1, 2)


def select_rows(
    config: IndexerConfig,
    query_THI: Tensor,
    weight_TH: Tensor,
    keys: KeySource,
    visible_T: Tensor,
    num_entries: int,
    *,
    topk: int | None,
    pool_TN: Tensor | None,
    make_pool: bool,
    rule: SelectionRule,
    num_common: int = 0,
    paged: Paged | None = None,
) -> SharedKV:
    """Selection of one sequence's rows, as indices: [T, K] ascending, -1 where there are fewer.

    Args:
        visible_T: Entries each row may see.
        num_entries: What the last row may see, known to the host: asking `visible_T` would hold up the device.
        num_common: What the first row may see, if the host knows it.
        pool_TN: A mark for each candidate block; with `paged` the numbers of the blocks, as `SharedKV.pool` then is.
        paged: The same keys as they lie in memory: pools are read in place.
    """
    k = topk if topk is not None else max(num_entries, 1)
    if pool_TN is not None and rule == "learned":
        if paged is not None:
            return _select_in_place(config, query_THI, weight_TH, paged, visible_T, pool_TN, k)
        candidate_TP = _pool_members(pool_TN, config.candidate_block_size, config.candidate_topk_blocks)
        candidate_TP = candidate_TP.masked_fill(candidate_TP >= visible_T.unsqueeze(-1), -1)
        score_TP = indexer_ops.gathered_index_scores(query_THI, weight_TH, keys.gather(candidate_TP))
        place_TK = indexer_ops.top_entries(score_TP.masked_fill(candidate_TP < 0, -torch.inf), k)
        selection_TK = candidate_TP.gather(-1, place_TK.clamp(min=0)).masked_fill(place_TK < 0, -1)
        return SharedKV(selection_TK, pool_TN)
    key_EI = keys.all()[:num_entries]
    choose = indexer_ops.candidate_blocks if paged is None else indexer_ops.top_blocks
    selections, pools = [], []
    products = _MOST_PRODUCTS_GPU if query_THI.is_cuda else _MOST_PRODUCTS
    most = max(1, products // (query_THI.shape[1] * max(num_entries, 1)))
    for query, weight, visible in zip(*(x.split(most) for x in (query_THI, weight_TH, visible_T)), strict=True):
        score_TE = indexer_ops.index_scores(query, weight, key_EI)
        if rule == "random":
            score_TE = torch.rand_like(score_TE)
        entry_E = torch.arange(num_common, num_entries, device=score_TE.device)
        score_TE[:, num_common:].masked_fill_(entry_E >= visible.unsqueeze(-1), -torch.inf)
        selections.append(indexer_ops.top_entries(score_TE, k))
        if make_pool:
            blocks = {"block_size": config.candidate_block_size, "topk_blocks": config.candidate_topk_blocks}
            pools.append(choose(score_TE, visible, **blocks))
    return SharedKV(torch.cat(selections), torch.cat(pools) if make_pool else pool_TN)


def _select_in_place(
    config: IndexerConfig,
    query_THI: Tensor,
    weight_TH: Tensor,
    keys: Paged,
    visible_T: Tensor,
    block_TN: Tensor,
    k: int,
) -> SharedKV:
    # the queries are turned and rounded already: a turn by nothing, and rounding once more, change nothing
    cos_TR = torch.ones(len(visible_T), query_THI.shape[-1] // 2, device=query_THI.device)
    size = config.candidate_block_size
    score_TP = indexer_ops.paged_pool_scores(
        query_THI, cos_TR, torch.zeros_like(cos_TR), weight_TH, keys, visible_T, block_TN, size
    )
    return SharedKV(indexer_ops.top_members(score_TP, k, block_TN, size), block_TN)


def _pool_members(pool_TN: Tensor, block_size: int, num_blocks: int) -> Tensor:
    """Entries of each row's pool in ascending order, int64 [T, num_blocks * block_size], -1 fillers at the end."""
    block_TB = indexer_ops.mask_to_index(pool_TN, num_blocks)
    member_TBM = block_TB.unsqueeze(-1) * block_size + torch.arange(block_size, device=pool_TN.device)
    return member_TBM.masked_fill(block_TB.unsqueeze(-1) < 0, -1).flatten(1)
