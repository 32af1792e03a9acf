"""Products that a library does with a wider result than its operands."""

from __future__ import annotations

import torch
from torch import Tensor

FORWARD_ONLY = ("linear_float32",)


def unavailable(device: str) -> str:
    """Why this backend cannot run on `device`, or an empty string."""
    return "" if device == "cuda" else "products of bfloat16 give float32 on CUDA"


def fits(op: str, x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype == torch.bfloat16


def linear_float32(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    y_TO = torch.mm(x_TI.flatten(0, -2), weight_OI.T, out_dtype=torch.float32)
    return y_TO.unflatten(0, x_TI.shape[:-1])
