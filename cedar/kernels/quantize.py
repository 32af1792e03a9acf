"""Vectors to their stored bytes and back: public ops.

The codes and scales are those of `cedar.formats`; a cache stores them as they come.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.errors import ShapeError
from cedar.formats import fp4, fp8
from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8, FormatSpec
from cedar.kernels.dispatch import row_op, select

_QUANTIZE = {FP8: fp8.quantize_fp8, FP4_MAIN: fp4.quantize_fp4_main, FP4_INDEX: fp4.quantize_fp4_index}
_DEQUANTIZE = {FP8: fp8.dequantize_fp8, FP4_MAIN: fp4.dequantize_fp4_main, FP4_INDEX: fp4.dequantize_fp4_index}


def quantize_rows(x: Tensor, spec: FormatSpec) -> tuple[Tensor, Tensor]:
    """(codes uint8, scale bytes uint8) of vectors along the last axis.

    Raises:
        ShapeError: The channels do not divide into the format's groups.
    """
    if x.shape[-1] % spec.group:
        raise ShapeError(f"quantize_rows: {x.shape[-1]} channels do not divide into groups of {spec.group}")
    return _QUANTIZE[spec](x)


def dequantize_rows(codes: Tensor, scale_bytes: Tensor, spec: FormatSpec, dtype: torch.dtype) -> Tensor:
    """The exact values of stored vectors in `dtype` (float32 or bfloat16, both hold them exactly)."""
    return _DEQUANTIZE[spec](codes, scale_bytes, dtype)


@row_op(1)
def round_rows(x: Tensor, spec: FormatSpec) -> Tensor:
    """`x` as it reads back from `spec`, in x's dtype; the gradient passes unchanged."""
    if x.shape[-1] % spec.group:
        raise ShapeError(f"round_rows: {x.shape[-1]} channels do not divide into groups of {spec.group}")
    return select("round_rows", x)(x, spec)
