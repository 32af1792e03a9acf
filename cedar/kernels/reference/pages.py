"""Indexing in both directions around the codecs."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.formats.spec import FormatSpec
from cedar.kernels import pages as ops
from cedar.kernels.dense import norm_round, rms_norm, rotate
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
