"""Hyper-connections as three separate steps, unfused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.formats.spec import FormatSpec
from cedar.kernels import mhc as ops
from cedar.kernels.dense import add_round, grouped_linear, rms_norm
from cedar.kernels.quantize import round_rows


def mix_coefficients(
    streams_TND: Tensor, fn: Tensor, scale_3: Tensor, base: Tensor, iterations: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    num_streams = streams_TND.shape[1]
    flat = streams_TND.flatten(1).float()
    inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    # the statistic scales the product, not the input
    mixed = F.linear(flat, fn) * inverse_rms
    pre, post, comb = mixed.split([num_streams, num_streams, num_streams * num_streams], dim=-1)
    pre_base, post_base, comb_base = base.split([num_streams, num_streams, num_streams * num_streams])
    pre_TN = torch.sigmoid(pre * scale_3[0] + pre_base) + eps
    post_TN = 2 * torch.sigmoid(post * scale_3[1] + post_base)
    comb_TNN = (comb * scale_3[2] + comb_base).unflatten(-1, (num_streams, num_streams))
    return pre_TN, post_TN, sinkhorn(comb_TNN, iterations, eps)


def sinkhorn(logits_TNN: Tensor, iterations: int, eps: float) -> Tensor:
    """Row softmax, then alternating column and row normalisation, ending on columns."""
    mixing_TNN = torch.softmax(logits_TNN, dim=-1) + eps
    mixing_TNN = mixing_TNN / (mixing_TNN.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mixing_TNN = mixing_TNN / (mixing_TNN.sum(-1, keepdim=True) + eps)
        mixing_TNN = mixing_TNN / (mixing_TNN.sum(-2, keepdim=True) + eps)
    return mixing_TNN


def collapse(streams_TND: Tensor, premix_TN: Tensor) -> Tensor:
    return (premix_TN.unsqueeze(-1) * streams_TND.float()).sum(1).to(streams_TND.dtype)


def expand(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, mixing_TNN: Tensor) -> Tensor:
    mixed_TND = torch.einsum("tij,tid->tjd", mixing_TNN, streams_TND.float())
    return (post_TN.unsqueeze(-1) * y_TD.float().unsqueeze(1) + mixed_TND).to(streams_TND.dtype)


def advance(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: ops.Sublayer,
    spec: FormatSpec | None,
    more_TD: Tensor | None = None,
) -> ops.Entered:
    if y_TD is not None and more_TD is not None:
        y_TD = add_round(y_TD, more_TD)
    if y_TD is not None and post_TN is not None and mixing_TNN is not None:
        streams_TND = ops.expand(y_TD, streams_TND, post_TN, mixing_TNN)
    mixes = ops.mix_coefficients(
        streams_TND,
        sublayer.fn,
        sublayer.scale_3,
        sublayer.base,
        iterations=sublayer.iterations,
        eps=sublayer.eps,
        rms_eps=sublayer.rms_eps,
    )
    normed_TD = rms_norm(ops.collapse(streams_TND, premix_TN), sublayer.gain_D, sublayer.norm_eps)
    return ops.Entered(streams_TND, normed_TD, normed_TD if spec is None else round_rows(normed_TD, spec), *mixes)


def advance_projected(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: ops.Sublayer,
    spec: FormatSpec | None,
    weight_OD: Tensor,
) -> tuple[ops.Entered, Tensor]:
    entered = ops.advance(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec)
    return entered, grouped_linear(entered.rounded_TD.unsqueeze(1), weight_OD.unsqueeze(0), None).squeeze(1)
