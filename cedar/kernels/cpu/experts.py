"""Routing and experts of few rows in C."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.kernels.cpu import native
from cedar.kernels.cpu.native import unavailable

__all__ = ["experts", "fits", "route", "unavailable"]

FORWARD_ONLY = ("experts", "route")
# more rows share an expert often enough for one product per expert to win
_EXPERT_ROWS = 24


def fits(op: str, *tensors: Tensor) -> bool:
    return native.fits(op, *tensors) and (op != "experts" or tensors[0].shape[0] <= _EXPERT_ROWS)


def route(
    u_TD: Tensor,
    image_T: Tensor | None,
    weight_ED: Tensor,
    bias_E: Tensor,
    image_bias_E: Tensor,
    k: int,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    u_TD, weight_ED = native.rows(u_TD), native.rows(weight_ED)
    bias_E, image_bias_E = native.rows(bias_E), native.rows(image_bias_E)
    image_T = None if image_T is None else native.rows(image_T)
    num_rows, channels = u_TD.shape
    num_experts = weight_ED.shape[0]
    ids_TK = torch.empty(num_rows, k, dtype=torch.int64)
    weights_TK, scores_TE = u_TD.new_empty(num_rows, k), u_TD.new_empty(num_rows, num_experts)
    native.function("route", "ppppppppllllf")(
        u_TD.data_ptr(),
        None if image_T is None else image_T.data_ptr(),
        weight_ED.data_ptr(),
        bias_E.data_ptr(),
        image_bias_E.data_ptr(),
        ids_TK.data_ptr(),
        weights_TK.data_ptr(),
        scores_TE.data_ptr(),
        num_rows,
        channels,
        num_experts,
        k,
        scaling,
    )
    return ids_TK, weights_TK, scores_TE


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
    u_TD, ids_TK, weights_TK = native.rows(u_TD), native.rows(ids_TK), native.rows(weights_TK)
    w1_EID, w3_EID, w2_EDI = native.rows(w1_EID), native.rows(w3_EID), native.rows(w2_EDI)
    output_TD = torch.empty_like(u_TD)
    num_experts, inner, channels = w1_EID.shape
    # a padding row may name one expert twice
    scratch, taken = u_TD.new_empty(2 * ids_TK.numel() * inner), torch.empty_like(ids_TK)
    native.function("experts", "ppppppppplllllfi")(
        u_TD.data_ptr(),
        ids_TK.data_ptr(),
        weights_TK.data_ptr(),
        w1_EID.data_ptr(),
        w3_EID.data_ptr(),
        w2_EDI.data_ptr(),
        output_TD.data_ptr(),
        scratch.data_ptr(),
        taken.data_ptr(),
        *ids_TK.shape,
        channels,
        inner,
        num_experts,
        limit,
        round_inner,
    )
    return output_TD
