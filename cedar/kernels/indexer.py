"""Which entries a row attends to: scores, exact top-k, candidate blocks. Public ops.

T rows, H index heads, I index channels, E entries, K selected entries, N candidate blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.kernels import check
from cedar.kernels.dispatch import is_deterministic, row_op, select

# entries per product in deterministic mode, so that an entry's score does not depend on how many there are
_ENTRY_BLOCK = 128


@row_op(2)
def index_scores(query_THI: Tensor, weight_TH: Tensor, key_EI: Tensor) -> Tensor:
    """`sum_h weight_h * relu(query_h . key_e)` in float32: [T, E], nothing masked yet.

    Source: architecture.md 4.3; float32 throughout, the released kernels' bf16 tie pattern is not copied.
    """
    check.shape("index_scores", "key", key_EI, None, query_THI.shape[-1])
    run = select("index_scores", query_THI, weight_TH, key_EI)
    if not is_deterministic():
        return run(query_THI, weight_TH, key_EI)
    num_entries = key_EI.shape[0]
    padded = torch.cat([key_EI, key_EI.new_zeros(-num_entries % _ENTRY_BLOCK, key_EI.shape[1])])
    blocks = [run(query_THI, weight_TH, block) for block in padded.split(_ENTRY_BLOCK)]
    return torch.cat(blocks, dim=-1)[:, :num_entries]


@row_op(3)
def gathered_index_scores(query_THI: Tensor, weight_TH: Tensor, key_TEI: Tensor) -> Tensor:
    """`index_scores` where each row has keys of its own (the members of its candidate pool): [T, E]."""
    check.shape("gathered_index_scores", "key", key_TEI, query_THI.shape[0], None, query_THI.shape[-1])
    return select("gathered_index_scores", query_THI, weight_TH, key_TEI)(query_THI, weight_TH, key_TEI)


def topk_mask(score_TE: Tensor, k: int) -> Tensor:
    """True at the k largest scores of each row above -inf: higher first, then the lower index.

    A row with fewer than k scores above -inf has fewer marks. -0 and +0 are equal.
    """
    if score_TE.shape[-1] <= k:
        return score_TE > -torch.inf
    return select("topk_mask", score_TE)(score_TE, k)


def mask_to_index(mask_TE: Tensor, k: int) -> Tensor:
    """The positions of the marks in ascending order, int64 [T, k]; -1 where a row has fewer.

    Args:
        mask_TE: At most k marks a row.
    """
    num_entries = mask_TE.shape[-1]
    if num_entries == 0:
        return mask_TE.new_full((mask_TE.shape[0], k), -1, dtype=torch.int64)
    position_TE = torch.where(mask_TE, torch.arange(num_entries, device=mask_TE.device), num_entries)
    width = min(k, num_entries)
    index_TK = position_TE.topk(width, dim=-1, largest=False, sorted=True).values
    index_TK = torch.where(index_TK == num_entries, -1, index_TK)
    if width == k:
        return index_TK
    return torch.nn.functional.pad(index_TK, (0, k - width), value=-1)


def candidate_blocks(score_TE: Tensor, visible_T: Tensor, *, block_size: int, topk_blocks: int) -> Tensor:
    """The pool: True at the blocks each row's later index sources may choose from, [T, N].

    A block scores as its best member; the block of the newest visible entry always takes one place; a
    block without a visible member never does.

    Args:
        score_TE: -inf where an entry is not visible; entry 0 is the sequence's first.
        visible_T: Visible entries of each row, which are its first ones.

    Source: architecture.md 4.3.
    """
    num_rows, num_entries = score_TE.shape
    if num_entries == 0:
        return torch.zeros(num_rows, 0, dtype=torch.bool, device=score_TE.device)
    padded = torch.nn.functional.pad(score_TE, (0, -num_entries % block_size), value=-torch.inf)
    block_TN = padded.unflatten(-1, (-1, block_size)).amax(-1)
    newest_T1 = (visible_T.unsqueeze(-1) - 1).clamp(min=0) // block_size
    has_any_T1 = (visible_T > 0).unsqueeze(-1)
    forced_TN = (torch.arange(block_TN.shape[-1], device=score_TE.device) == newest_T1) & has_any_T1
    return topk_mask(block_TN.masked_fill(forced_TN, torch.inf), topk_blocks)


def masked_index_scores(query_BSHI: Tensor, weight_BSH: Tensor, key_BEI: Tensor) -> Tensor:
    """`index_scores` over whole packs, for training: [B, S, E]."""
    check.shape("masked_index_scores", "key", key_BEI, query_BSHI.shape[0], None, query_BSHI.shape[-1])
    run = select("masked_index_scores", query_BSHI, weight_BSH, key_BEI)
    return run(query_BSHI, weight_BSH, key_BEI)


def index_divergence(score_TK: Tensor, mass_TK: Tensor) -> tuple[Tensor, Tensor]:
    """(KL from each row's scores to the attention it serves, in nats; which rows count), both [T].

    The teacher is the mass over the support, normalised. A row whose attention gave its entries less than 1e-4 has
    nothing to teach: it does not count and its divergence is 0. Only the scores get a gradient.

    Args:
        score_TK: -inf outside the support.
        mass_TK: Probability mass of each entry, summed over heads and served layers.

    Source: training.md 1.3.
    """
    check.shape("index_divergence", "mass", mass_TK, *score_TK.shape)
    return select("index_divergence", score_TK, mass_TK)(score_TK, mass_TK)
