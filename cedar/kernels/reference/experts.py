"""A loop over experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.formats.spec import FP4_INDEX, FP8, FormatSpec
from cedar.kernels import experts as ops
from cedar.kernels.dense import linear, swiglu
from cedar.kernels.mhc import Entered, Sublayer, advance
from cedar.kernels.quantize import dequantize_rows, round_rows


def route(
    u_TD: Tensor,
    image_T: Tensor | None,
    weight_ED: Tensor,
    bias_E: Tensor,
    image_bias_E: Tensor,
    k: int,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    score_TE = F.softplus(F.linear(u_TD.float(), weight_ED.float())).sqrt()
    biased_TE = score_TE.detach() + bias_E
    if image_T is not None:
        biased_TE = torch.where(image_T.unsqueeze(-1), score_TE.detach() + image_bias_E, biased_TE)
    if k < biased_TE.shape[-1]:
        # a stable sort puts the lower id first among equals
        ids_TK = biased_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(dim=-1).values
    else:
        ids_TK = torch.arange(k, device=u_TD.device).expand(u_TD.shape[0], k)
    chosen_TK = score_TE.gather(1, ids_TK)
    return ids_TK, chosen_TK / (chosen_TK.sum(-1, keepdim=True) + 1e-20) * scaling, score_TE


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
    output_TD = torch.zeros_like(u_TD.float())
    for expert in range(w1_EID.shape[0]):
        row, slot = (ids_TK == expert).nonzero(as_tuple=True)
        if row.numel() == 0:
            continue
        x = u_TD[row]
        inner = swiglu(linear(x, w1_EID[expert]), linear(x, w3_EID[expert]), limit) * weights_TK[row, slot].unsqueeze(
            -1
        )
        inner = inner.to(u_TD.dtype)
        if round_inner:
            inner = round_rows(inner, FP8)
        output_TD = output_TD.index_add(0, row, linear(inner, w2_EDI[expert]).float())
    return output_TD


def feed(
    u_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights: ops.Weights, limit: float, round_inner: bool
) -> Tensor:
    routed_TD = ops.experts(u_TD, ids_TK, weights_TK, *weights[:3], limit=limit, round_inner=round_inner)
    inner_TI = swiglu(linear(u_TD, weights.shared1_ID), linear(u_TD, weights.shared3_ID), limit).to(u_TD.dtype)
    shared_TD = linear(round_rows(inner_TI, FP8) if round_inner else inner_TI, weights.shared2_DI)
    return (routed_TD + shared_TD.float()).to(u_TD.dtype)


def _matrices(stack: ops.Packed | ops.Tiled, channels: int, dtype: torch.dtype) -> Tensor:
    """The values of a stack, [E, out, channels]."""
    if isinstance(stack, ops.Packed):
        return dequantize_rows(stack.codes, stack.scales, FP4_INDEX, dtype)
    num_experts, blocks, steps, _ = stack.codes.shape
    word = stack.codes
    mask = 0x8E008E00 - 2**32
    pairs = (word & mask, word << 3 & mask, (word << 6 ^ word << 1) & mask, (word << 9 ^ word << 2) & mask)
    # codes n and n + 4 of a word of eight
    code = torch.stack(pairs, -1).view(torch.float16).unflatten(-1, (4, 2)).transpose(-1, -2).float()
    code = code.reshape(num_experts, blocks, steps, 2, 2, 4, 8, 4, 32).permute(0, 1, 5, 4, 6, 2, 3, 7, 8)
    scale = (stack.scales.view(torch.uint8).short() << 8).view(torch.float16).float() * 2.0**7
    scale = scale.view(num_experts, blocks, steps, 4, 8, 4, 2, 2).permute(0, 1, 3, 7, 4, 2, 6, 5)
    values = (code * scale.unsqueeze(-1)).reshape(num_experts, blocks * 64, steps * 256)
    return values[:, : stack.outputs, :channels].to(dtype)


def packed_experts(
    u_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1: ops.Packed | ops.Tiled,
    w3: ops.Packed | ops.Tiled,
    w2: ops.Packed | ops.Tiled,
    limit: float,
    round_inner: bool,
) -> Tensor:
    channels, dtype = u_TD.shape[1], u_TD.dtype
    w1_EID, w3_EID = _matrices(w1, channels, dtype), _matrices(w3, channels, dtype)
    weights = w1_EID, w3_EID, _matrices(w2, w1_EID.shape[1], dtype)
    return ops.experts(u_TD, ids_TK, weights_TK, *weights, limit=limit, round_inner=round_inner)


def advance_routed(
    y_TD: Tensor,
    streams_TND: Tensor,
    post_TN: Tensor,
    mixing_TNN: Tensor,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    router: ops.Router,
    image_T: Tensor,
) -> tuple[Entered, Tensor, Tensor]:
    entered = advance(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec)
    ids_TK, weights_TK, _ = ops.route(entered.normed_TD, image_T, *router)
    return entered, ids_TK, weights_TK


def advance_fed(
    y_TD: Tensor,
    streams_TND: Tensor,
    post_TN: Tensor,
    mixing_TNN: Tensor,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    router: ops.Router,
    image_T: Tensor,
    weights: ops.Weights,
    limit: float,
) -> tuple[Entered, Tensor]:
    streams = y_TD, streams_TND, post_TN, mixing_TNN, premix_TN
    entered, ids_TK, weights_TK = ops.advance_routed(*streams, sublayer, spec, router, image_T)
    round_inner = spec is not None
    return entered, ops.feed(entered.rounded_TD, ids_TK, weights_TK, weights, limit=limit, round_inner=round_inner)
