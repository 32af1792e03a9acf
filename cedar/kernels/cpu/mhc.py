"""Hyper-connections in C: the product, the Sinkhorn rounds and the mixes of a row in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.kernels.cpu import native
from cedar.kernels.cpu.native import fits, unavailable

__all__ = ["collapse", "expand", "fits", "mix_coefficients", "unavailable"]

FORWARD_ONLY = ("mix_coefficients", "collapse", "expand")


def mix_coefficients(
    streams_TND: Tensor, fn: Tensor, scale_3: Tensor, base: Tensor, iterations: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    streams_TND, fn, scale_3, base = (native.rows(tensor) for tensor in (streams_TND, fn, scale_3, base))
    num_rows, num_streams, channels = streams_TND.shape
    pre_TN = streams_TND.new_empty(num_rows, num_streams)
    post_TN = streams_TND.new_empty(num_rows, num_streams)
    mixing_TNN = streams_TND.new_empty(num_rows, num_streams, num_streams)
    native.function("mix_coefficients", "pppppppliliff")(
        streams_TND.data_ptr(),
        fn.data_ptr(),
        scale_3.data_ptr(),
        base.data_ptr(),
        pre_TN.data_ptr(),
        post_TN.data_ptr(),
        mixing_TNN.data_ptr(),
        num_rows,
        num_streams,
        channels,
        iterations,
        eps,
        rms_eps,
    )
    return pre_TN, post_TN, mixing_TNN


def collapse(streams_TND: Tensor, premix_TN: Tensor) -> Tensor:
    streams_TND, premix_TN = native.rows(streams_TND), native.rows(premix_TN)
    num_rows, num_streams, channels = streams_TND.shape
    y_TD = streams_TND.new_empty(num_rows, channels)
    native.function("collapse", "ppplil")(
        streams_TND.data_ptr(), premix_TN.data_ptr(), y_TD.data_ptr(), num_rows, num_streams, channels
    )
    return y_TD


def expand(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, mixing_TNN: Tensor) -> Tensor:
    y_TD, streams_TND = native.rows(y_TD), native.rows(streams_TND)
    post_TN, mixing_TNN = native.rows(post_TN), native.rows(mixing_TNN)
    num_rows, num_streams, channels = streams_TND.shape
    new_TND = torch.empty_like(streams_TND)
    native.function("expand", "ppppplil")(
        y_TD.data_ptr(),
        streams_TND.data_ptr(),
        post_TN.data_ptr(),
        mixing_TNN.data_ptr(),
        new_TND.data_ptr(),
        num_rows,
        num_streams,
        channels,
    )
    return new_TND
