"""Row-wise products, norms and rotations in C."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.kernels.cpu import native
from cedar.kernels.cpu.native import unavailable

__all__ = ["fits", "linear", "rms_norm", "rotate", "swiglu", "unavailable"]

FORWARD_ONLY = ("linear", "rms_norm", "rotate", "swiglu")
# a product of more rows, or with a larger weight, belongs to the BLAS; deterministic mode's blocks too
_LINEAR_ROWS = 2
_LINEAR_WEIGHTS = 1 << 18


def fits(op: str, *tensors: Tensor) -> bool:
    if op == "linear":
        x, weight = tensors
        if x.numel() > _LINEAR_ROWS * x.shape[-1] or weight.numel() > _LINEAR_WEIGHTS:
            return False
        return x.dtype is torch.float32 and weight.dtype is torch.float32
    return native.fits(op, *tensors)


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    x_TI, weight_OI = native.rows(x_TI), native.rows(weight_OI)
    y_TO = x_TI.new_empty(*x_TI.shape[:-1], weight_OI.shape[0])
    num_rows = x_TI.numel() // x_TI.shape[-1]
    native.function("linear", "ppplll")(
        x_TI.data_ptr(), weight_OI.data_ptr(), y_TO.data_ptr(), num_rows, x_TI.shape[-1], weight_OI.shape[0]
    )
    return y_TO


def rms_norm(x_TI: Tensor, gain_I: Tensor, eps: float) -> Tensor:
    x_TI, gain_I = native.rows(x_TI), native.rows(gain_I)
    y_TI = torch.empty_like(x_TI)
    channels = x_TI.shape[-1]
    native.function("rms_norm", "pppllf")(
        x_TI.data_ptr(), gain_I.data_ptr(), y_TI.data_ptr(), x_TI.numel() // channels, channels, eps
    )
    return y_TI


def rotate(x_THI: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    x_THI, cos_TR, sin_TR = native.rows(x_THI), native.rows(cos_TR), native.rows(sin_TR)
    y_THI = torch.empty_like(x_THI)
    native.function("rotate", "ppppllll")(
        x_THI.data_ptr(), cos_TR.data_ptr(), sin_TR.data_ptr(), y_THI.data_ptr(), *x_THI.shape, cos_TR.shape[-1]
    )
    return y_THI


def swiglu(gate_TI: Tensor, up_TI: Tensor, limit: float) -> Tensor:
    gate_TI, up_TI = native.rows(gate_TI), native.rows(up_TI)
    y_TI = torch.empty_like(gate_TI)
    native.function("swiglu", "ppplf")(gate_TI.data_ptr(), up_TI.data_ptr(), y_TI.data_ptr(), y_TI.numel(), limit)
    return y_TI
