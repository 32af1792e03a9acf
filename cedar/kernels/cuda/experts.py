"""Rows sorted by expert, one grouped product per weight, no host synchronisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.formats.spec import FP8
from cedar.kernels.dense import swiglu
from cedar.kernels.quantize import round_rows


def unavailable(device: str) -> str:
    """Why this backend cannot run on `device`, or an empty string."""
    if device != "cuda":
        return "grouped products run on CUDA"
    return "" if hasattr(F, "grouped_mm") else "this torch has no grouped_mm"


def fits(op: str, u_TD: Tensor, *weights: Tensor) -> bool:
    """Grouped products take bfloat16 alone; a float32 model keeps its exact loop."""
    return u_TD.dtype == torch.bfloat16


def experts(
    u_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1_EID: Tensor,
    w3_EID: Tensor,
    w2_EDI: Tensor,
    limit: float,
    round_inner: bool,
) -> Tensor:
    num_rows, num_chosen = ids_TK.shape
    flat = ids_TK.flatten()
    order = flat.argsort(stable=True)
    # counted by comparison: bincount would ask the host
    expert_E1 = torch.arange(w1_EID.shape[0], device=flat.device).unsqueeze(-1)
    end_E = (flat == expert_E1).sum(-1).cumsum(0).to(torch.int32)
    x = u_TD[order // num_chosen]
    gate = _grouped(x, w1_EID, end_E)
    up = _grouped(x, w3_EID, end_E)
    inner = (swiglu(gate, up, limit) * weights_TK.flatten()[order].unsqueeze(-1)).to(u_TD.dtype)
    if round_inner:
        inner = round_rows(inner, FP8)
    output = _grouped(inner, w2_EDI, end_E).float()
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return output[back].view(num_rows, num_chosen, -1).sum(1)


def _grouped(x: Tensor, weight_EOI: Tensor, end_E: Tensor) -> Tensor:
    return F.grouped_mm(x, weight_EOI.to(x.dtype).transpose(1, 2), offs=end_E)
