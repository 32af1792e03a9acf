"""Attention of few rows in C: no score tensor, hidden keys are skipped."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.kernels.cpu import native
from cedar.kernels.cpu.native import unavailable

__all__ = ["attention", "fits", "unavailable"]

FORWARD_ONLY = ("attention",)
# the weights of one head lie on the C stack
_MAX_KEYS = 4096


def fits(op: str, *tensors: Tensor) -> bool:
    keys = sum(tensor.shape[1] for tensor in tensors[1:])
    return native.fits(op, *tensors) and keys <= _MAX_KEYS


def attention(
    query_THC: Tensor,
    window_TWC: Tensor,
    window_visible_TW: Tensor,
    entry_TKC: Tensor | None,
    entry_visible_TK: Tensor | None,
    sink_H: Tensor,
) -> Tensor:
    query_THC, window_TWC = native.rows(query_THC), native.rows(window_TWC)
    window_visible_TW, sink_H = native.rows(window_visible_TW), native.rows(sink_H)
    num_entries = 0
    # without entries the pointers are never read
    entry_TKC, entry_visible_TK = window_TWC if entry_TKC is None else native.rows(entry_TKC), entry_visible_TK
    if entry_visible_TK is None:
        entry_visible_TK = window_visible_TW
    else:
        entry_visible_TK = native.rows(entry_visible_TK)
        num_entries = entry_visible_TK.shape[1]
    output_THC = torch.empty_like(query_THC)
    failed = native.function("attention", "ppppppplllll")(
        query_THC.data_ptr(),
        window_TWC.data_ptr(),
        window_visible_TW.data_ptr(),
        entry_TKC.data_ptr(),
        entry_visible_TK.data_ptr(),
        sink_H.data_ptr(),
        output_THC.data_ptr(),
        *query_THC.shape,
        window_TWC.shape[1],
        num_entries,
    )
    assert not failed, "fits() keeps the keys within the stack buffer"
    return output_THC
