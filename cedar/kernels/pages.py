"""Rows as stored bytes, by page and row inside it: scatter and gather, public ops without a gradient.

A page of a window is the ring of one sequence; a page of a cache is `PagePool`'s. Both are read and written through
views, so nothing here knows who owns the bytes.

T rows, C channels, P pages, N rows a page, X bytes of a row's codes, G scales of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cedar.formats.spec import FormatSpec
from cedar.kernels import check
from cedar.kernels.dispatch import select
from cedar.kernels.mhc import Entered, Sublayer


class Stored(NamedTuple):
    """Vectors of one format by (page, row): uint8 codes, uint8 scales, each possibly a strided view."""

    codes_PNX: Tensor
    scales_PNG: Tensor
    spec: FormatSpec

    @property
    def channels(self) -> int:
        return self.codes_PNX.shape[-1] * 8 // self.spec.element_bits


class Paged(NamedTuple):
    """Entries of several sequences behind their page tables: entry e of row t lies on page
    `page_SP[slot_T[t], e // N]`, row `e % N`.

    `page_SP` is int64 [sequences, pages]; what lies behind a sequence's last page must still name a page.
    """

    stored: Stored
    page_SP: Tensor
    slot_T: Tensor


class Located(NamedTuple):
    """Where the rows of a decode step stand.

    Attributes:
        busy_T: bool, False for idle rows.
        pair_T: bool, True where a row completes a pair.
        ring_T: Its row in the ring of window keys.
        floor_LT: Oldest position whose window key is there, by layer.
        visible_T: Entries of one token each that the row sees.
        visible_pairs_T: Entries of two.
        page_T, row_T: Where an entry of its token goes.
        pair_page_T, pair_row_T: Where an entry of its pair goes.
        window_cos_TR, window_sin_TR: Rotation of window-only layers.
        cos_TR, sin_TR: Rotation of the others.
        pair_cos_TR, pair_sin_TR: Rotation at the token before it, where its pair stands.
    """

    busy_T: Tensor
    pair_T: Tensor
    ring_T: Tensor
    floor_LT: Tensor
    visible_T: Tensor
    visible_pairs_T: Tensor
    page_T: Tensor
    row_T: Tensor
    pair_page_T: Tensor
    pair_row_T: Tensor
    window_cos_TR: Tensor
    window_sin_TR: Tensor
    cos_TR: Tensor
    sin_TR: Tensor
    pair_cos_TR: Tensor
    pair_sin_TR: Tensor


def locate(
    slot_T: Tensor,
    position_T: Tensor,
    floor_LS: Tensor,
    page_SP: Tensor,
    window_frequency_R: Tensor,
    frequency_R: Tensor,
    *,
    num_ring: int,
    page_tokens: int,
) -> Located:
    """All that a step's rows need to know of their places, once for all layers.

    Args:
        slot_T: int64; the last slot is nobody's.
        floor_LS: int64 by layer and slot.
        page_SP: int64 page tables by slot.
    """
    check.shape("locate", "position", position_T, slot_T.shape[0])
    run = select("locate", slot_T)
    return run(slot_T, position_T, floor_LS, page_SP, window_frequency_R, frequency_R, num_ring, page_tokens)


def store_rows(rows_TC: Tensor, stored: Stored, page_T: Tensor, row_T: Tensor, present_T: Tensor) -> None:
    """Quantise rows and write each to its place; a row that is not present changes nothing.

    No synchronisation and no shape that depends on data, so a graph may hold it. Two present rows must not share
    a place.

    Args:
        page_T: int64; also of absent rows it must lie inside the storage.
        row_T: int64, inside the page.
        present_T: bool.
    """
    check.shape("store_rows", "rows", rows_TC, page_T.shape[0], stored.channels)
    select("store_rows", rows_TC)(rows_TC, stored, page_T, row_T, present_T)


def store_normed(
    x_TC: Tensor,
    gain_C: Tensor,
    eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
    stored: Stored,
    page_T: Tensor,
    row_T: Tensor,
    present_T: Tensor,
) -> Tensor:
    """`rms_norm`, `rotate` and `store_rows` in one pass; returns the normed rows before their rotation [T, C]."""
    check.shape("store_normed", "x", x_TC, page_T.shape[0], stored.channels)
    run = select("store_normed", x_TC)
    return run(x_TC, gain_C, eps, cos_TR, sin_TR, stored, page_T, row_T, present_T)


def split_latent(
    latent_TX: Tensor,
    query_gain_Q: Tensor,
    query_eps: float,
    query_spec: FormatSpec | None,
    gain_C: Tensor,
    eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
    stored: Stored,
    page_T: Tensor,
    row_T: Tensor,
    present_T: Tensor,
) -> Tensor:
    """What follows the joined product of a layer's query latent and window key: `norm_round` of the first part,
    `store_normed` of the rest. Returns the first [T, Q].
    """
    check.shape("split_latent", "latent", latent_TX, page_T.shape[0], query_gain_Q.shape[0] + stored.channels)
    run = select("split_latent", latent_TX)
    return run(
        latent_TX, query_gain_Q, query_eps, query_spec, gain_C, eps, cos_TR, sin_TR, stored, page_T, row_T, present_T
    )


def split_projected(
    latent_TX: Tensor,
    query_gain_Q: Tensor,
    query_eps: float,
    query_spec: FormatSpec | None,
    gain_C: Tensor,
    eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
    stored: Stored,
    page_T: Tensor,
    row_T: Tensor,
    present_T: Tensor,
    weight_OQ: Tensor,
) -> Tensor:
    """`split_latent`, and a linear of what it returns: [T, O]. No gradient."""
    check.shape("split_projected", "latent", latent_TX, page_T.shape[0], query_gain_Q.shape[0] + stored.channels)
    check.shape("split_projected", "weight", weight_OQ, None, query_gain_Q.shape[0])
    run = select("split_projected", latent_TX, weight_OQ)
    query = latent_TX, query_gain_Q, query_eps, query_spec
    return run(*query, gain_C, eps, cos_TR, sin_TR, stored, page_T, row_T, present_T, weight_OQ)


class Split(NamedTuple):
    """What `split_latent` needs beside its rows."""

    query_gain_Q: Tensor
    query_eps: float
    query_spec: FormatSpec | None
    gain_C: Tensor
    eps: float
    cos_TR: Tensor
    sin_TR: Tensor
    stored: Stored
    page_T: Tensor
    row_T: Tensor
    present_T: Tensor


def advance_split(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    more_TD: Tensor | None,
    codes_XD: Tensor,
    scales: Tensor,
    split: Split,
) -> tuple[Entered, Tensor]:
    """`mhc.advance`, `dense.packed_linear` of its rounded input, and `split_latent`: (entered, [T, Q]). No gradient."""
    outputs = split.query_gain_Q.shape[0] + split.stored.channels
    check.shape("advance_split", "codes", codes_XD, outputs, streams_TND.shape[-1])
    check.shape("advance_split", "scales", scales, -(-outputs // 32), -(-streams_TND.shape[-1] // 32))
    run = select("advance_split", streams_TND, codes_XD)
    streams = y_TD, streams_TND, post_TN, mixing_TNN, premix_TN
    return run(*streams, sublayer, spec, more_TD, codes_XD, scales, split)


def load_rows(stored: Stored, page: Tensor, row: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows by place, decoded exactly: the shape of `page` and a channel axis."""
    check.shape("load_rows", "row", row, *page.shape)
    return select("load_rows", stored.codes_PNX)(stored, page, row, dtype)
