"""Which entries a row attends to: scores, exact top-k, candidate blocks. Public ops.

T rows, H index heads, I index channels, E entries, K selected entries, N candidate blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.kernels import check
from cedar.kernels.dispatch import is_deterministic, row_op, select
from cedar.kernels.pages import Paged

# entries per product in deterministic mode, so that an entry's score does not depend on how many there are
_ENTRY_BLOCK = 128
# rows whose attention gave the entries less than this have nothing to teach
LEAST_MASS = 1e-4


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


def paged_index_scores(
    query_THI: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    weight_TH: Tensor,
    keys: Paged,
    visible_T: Tensor,
    num_entries: int,
) -> Tensor:
    """`index_scores` of decoding rows against their own pages: float32 [T, num_entries], -inf where not visible.

    Args:
        query_THI: Neither rotated nor rounded to FP4 yet: both happen on the way in.
        visible_T: Entries each row may see, int64; they are its first ones.
        num_entries: Columns; no row sees more.
    """
    check.shape("paged_index_scores", "query", query_THI, visible_T.shape[0], None, keys.stored.channels)
    run = select("paged_index_scores", query_THI)
    return run(query_THI, cos_TR, sin_TR, weight_TH, keys, visible_T, num_entries)


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
    """`paged_index_scores` of the members of each row's blocks alone: float32 [T, N * block_size].

    Args:
        block_TN: Numbers of candidate blocks, int64, -1 for none; their members score -inf, as do invisible ones.
    """
    check.shape("paged_pool_scores", "query", query_THI, visible_T.shape[0], None, keys.stored.channels)
    run = select("paged_pool_scores", query_THI)
    return run(query_THI, cos_TR, sin_TR, weight_TH, keys, visible_T, block_TN, block_size)


def top_entries(score_TE: Tensor, k: int) -> Tensor:
    """The columns of the k largest scores above -inf in ascending order, int64 [T, k]; -1 where there are fewer.

    Among equals the lower column wins.
    """
    return select("top_entries", score_TE)(score_TE, k)


def top_blocks(score_TE: Tensor, visible_T: Tensor, *, block_size: int, topk_blocks: int) -> Tensor:
    """`candidate_blocks` as numbers: int64 [T, topk_blocks] ascending, -1 where there are fewer."""
    return top_entries(block_scores(score_TE, visible_T, block_size), topk_blocks)


def top_members(score_TP: Tensor, k: int, block_TN: Tensor, block_size: int) -> Tensor:
    """`top_entries` of the scores of a pool's members, as entries: int64 [T, k] ascending, -1 for none.

    Args:
        block_TN: The pool's blocks, ascending: column p is entry `block_TN[p // block_size] * block_size + ...`.
    """
    check.shape("top_members", "score", score_TP, block_TN.shape[0], block_TN.shape[1] * block_size)
    return select("top_members", score_TP)(score_TP, k, block_TN, block_size)


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
    return topk_mask(block_scores(score_TE, visible_T, block_size), topk_blocks)


def block_scores(score_TE: Tensor, visible_T: Tensor, block_size: int) -> Tensor:
    """The best member of each block [T, N]; infinity for the block of the newest visible entry."""
    return select("block_scores", score_TE)(score_TE, visible_T, block_size)


def masked_index_scores(query_BSHI: Tensor, weight_BSH: Tensor, key_BEI: Tensor) -> Tensor:
    """`index_scores` over whole packs, for training: [B, S, E]."""
    check.shape("masked_index_scores", "key", key_BEI, query_BSHI.shape[0], None, query_BSHI.shape[-1])
    run = select("masked_index_scores", query_BSHI, weight_BSH, key_BEI)
    return run(query_BSHI, weight_BSH, key_BEI)


def index_divergence(score_TK: Tensor, mass_TK: Tensor) -> tuple[Tensor, Tensor]:
    """(KL from each row's scores to the attention it serves, in nats; which rows count), both [T].

    The teacher is the mass over the support, normalised. A row whose attention gave its entries less than LEAST_MASS
    has nothing to teach: it does not count and its divergence is 0. Only the scores get a gradient.

    Args:
        score_TK: -inf outside the support.
        mass_TK: Probability mass of each entry, summed over heads and served layers.

    Source: training.md 1.3.
    """
    check.shape("index_divergence", "mass", mass_TK, *score_TK.shape)
    return select("index_divergence", score_TK, mass_TK)(score_TK, mass_TK)
