"""Fake quantization of few rows in C."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8, FormatSpec
from cedar.kernels.cpu import native
from cedar.kernels.cpu.native import fits, unavailable

__all__ = ["fits", "round_rows", "unavailable"]

FORWARD_ONLY = ("round_rows",)
_KIND = {FP8: 0, FP4_MAIN: 1, FP4_INDEX: 2}


def round_rows(x: Tensor, spec: FormatSpec) -> Tensor:
    x = native.rows(x)
    y = torch.empty_like(x)
    native.function("round_rows", "ppli")(x.data_ptr(), y.data_ptr(), x.numel(), _KIND[spec])
    return y
