"""Window and selected entries in one softmax with a sink: public ops.

T rows, H heads, C latent channels (key and value at once), W window rows, K selected entries.
"""

from __future__ import annotations

from torch import Tensor

from cedar.kernels import check
from cedar.kernels.dispatch import row_op, select
from cedar.kernels.pages import Paged, Stored


@row_op(5)
def attention(
    query_THC: Tensor,
    window_TWC: Tensor,
    window_visible_TW: Tensor,
    entry_TKC: Tensor | None,
    entry_visible_TK: Tensor | None,
    sink_H: Tensor,
) -> Tensor:
    """Each head's mean of its row's keys under one softmax over window, entries and sink: [T, H, C].

    The sink enters the denominator unscaled and has no value. A row that sees nothing gives zeros. A token that is in
    the window and inside a selected entry counts twice, as in the release.

    Args:
        query_THC: Rotated queries; the scale is C ** -0.5.
        window_TWC: Keys in position order.
        window_visible_TW: bool.
        entry_TKC: Keys of the selection in ascending order, or None for a window-only layer.

    Source: architecture.md 3.4.
    """
    check.shape("attention", "window", window_TWC, query_THC.shape[0], None, query_THC.shape[2])
    check.shape("attention", "sink", sink_H, query_THC.shape[1])
    run = select("attention", query_THC, window_TWC, *(() if entry_TKC is None else (entry_TKC,)))
    return run(query_THC, window_TWC, window_visible_TW, entry_TKC, entry_visible_TK, sink_H)


def masked_attention(
    query_BSHC: Tensor,
    window_BSC: Tensor,
    window_start_BS: Tensor,
    entry_BEC: Tensor | None,
    entry_visible_BSE: Tensor | None,
    sink_H: Tensor,
    num_window: int,
) -> tuple[Tensor, Tensor | None]:
    """`attention` over whole packs, for training: the selection is a mask, nothing is gathered.

    Args:
        query_BSHC: B packs of S rows.
        window_BSC: One key a row; row s sees rows max(window_start, s - num_window + 1) .. s.
        window_start_BS: First row that each row's window may reach.
        entry_visible_BSE: bool, True at the selected entries.

    Returns:
        The output [B, S, H, C] and the probability mass of each entry summed over heads [B, S, E]
        (None without entries), detached: the teacher of the indexer.
    """
    check.shape("masked_attention", "window", window_BSC, *query_BSHC.shape[:2], query_BSHC.shape[3])
    run = select("masked_attention", query_BSHC, window_BSC, sink_H)
    return run(query_BSHC, window_BSC, window_start_BS, entry_BEC, entry_visible_BSE, sink_H, num_window)


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
    """`attention` of decoding rows over stored bytes: each row reads its own ring and its own pages.

    The queries are rotated on the way in, and the output back on the way out: the key is the value. No
    synchronisation and no shape that depends on data. No gradient.

    Args:
        query_THC: Not rotated yet.
        window: A ring of FP8 rows a sequence; position p lies in row `p % ring`.
        slot_T: Whose ring, int64.
        position_T: The row's own position, whose key is written already, int64.
        floor_T: Oldest position whose key is there, int64.
        entries: FP4 entries; None for a window-only layer.
        selection_TK: int64, -1 for none.

    Source: architecture.md 3.4 and 4.5.
    """
    check.shape("paged_attention", "query", query_THC, slot_T.shape[0], None, window.channels)
    check.shape("paged_attention", "sink", sink_H, query_THC.shape[1])
    run = select("paged_attention", query_THC)
    return run(
        query_THC, cos_TR, sin_TR, window, slot_T, position_T, floor_T, entries, selection_TK, sink_H, num_window
    )
