"""Indexing in both directions around the codecs."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.kernels.pages import Stored
from cedar.kernels.quantize import dequantize_rows, quantize_rows


def store_rows(rows_TC: Tensor, stored: Stored, page_T: Tensor, row_T: Tensor, present_T: Tensor) -> None:
    planes = (stored.codes_PNX, stored.scales_PNG)
    for plane, fresh in zip(planes, quantize_rows(rows_TC, stored.spec), strict=True):
        plane[page_T, row_T] = torch.where(present_T.unsqueeze(-1), fresh, plane[page_T, row_T])


def load_rows(stored: Stored, page: Tensor, row: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize_rows(stored.codes_PNX[page, row], stored.scales_PNG[page, row], stored.spec, dtype)
