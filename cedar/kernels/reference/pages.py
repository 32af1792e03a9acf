"""Indexing in both directions around the codecs."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.formats.spec import FormatSpec
from cedar.kernels import pages as ops
from cedar.kernels.dense import grouped_linear, norm_round, packed_linear, rms_norm, rotate
from cedar.kernels.mhc import Entered, Sublayer, advance
from cedar.kernels.pages import Stored
from cedar.kernels.quantize import dequantize_rows, quantize_rows


def store_rows(rows_TC: Tensor, stored: Stored, page_T: Tensor, row_T: Tensor, present_T: Tensor) -> None:
    planes = (stored.codes_PNX, stored.scales_PNG)
    for plane, fresh in zip(planes, quantize_rows(rows_TC, stored.spec), strict=True):
        plane[page_T, row_T] = torch.where(present_T.unsqueeze(-1), fresh, plane[page_T, row_T])


def load_rows(stored: Stored, page: Tensor, row: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize_rows(stored.codes_PNX[page, row], stored.scales_PNG[page, row], stored.spec, dtype)


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
    normed_TC = rms_norm(x_TC, gain_C, eps)
    turned_TC = rotate(normed_TC.unsqueeze(1), cos_TR, sin_TR).squeeze(1)
    ops.store_rows(turned_TC, stored, page_T, row_T, present_T)
    return normed_TC


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
    num_latent = query_gain_Q.shape[0]
    ops.store_normed(latent_TX[:, num_latent:], gain_C, eps, cos_TR, sin_TR, stored, page_T, row_T, present_T)
    return norm_round(latent_TX[:, :num_latent], query_gain_Q, query_eps, query_spec)


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
    query = latent_TX, query_gain_Q, query_eps, query_spec
    query_TQ = ops.split_latent(*query, gain_C, eps, cos_TR, sin_TR, stored, page_T, row_T, present_T)
    return grouped_linear(query_TQ.unsqueeze(1), weight_OQ.unsqueeze(0), None).squeeze(1)


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
    split: ops.Split,
) -> tuple[Entered, Tensor]:
    entered = advance(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, more_TD)
    return entered, ops.split_latent(packed_linear(entered.rounded_TD, codes_XD, scales, None), *split)


def locate(
    slot_T: Tensor,
    position_T: Tensor,
    floor_LS: Tensor,
    page_SP: Tensor,
    window_frequency_R: Tensor,
    frequency_R: Tensor,
    num_ring: int,
    page_tokens: int,
) -> ops.Located:
    busy_T = slot_T < page_SP.shape[0] - 1
    places = []
    for ratio in (1, 2):
        entry_T, per_page = position_T // ratio, page_tokens // ratio
        places += [page_SP[slot_T, entry_T // per_page], entry_T % per_page]
    turns = []
    for where_T, frequency in (
        (position_T, window_frequency_R),
        (position_T, frequency_R),
        ((position_T - 1).clamp(min=0), frequency_R),
    ):
        angle_TR = where_T.float().unsqueeze(-1) * frequency
        turns += [angle_TR.cos(), angle_TR.sin()]
    return ops.Located(
        busy_T,
        busy_T & (position_T % 2 == 1),
        position_T % num_ring,
        floor_LS[:, slot_T],
        position_T + 1,
        (position_T + 1) // 2,
        *places,
        *turns,
    )
