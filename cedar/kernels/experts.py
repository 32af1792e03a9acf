"""Choosing experts and running them: public ops.

T rows, D channels, E experts, K experts a row, I inner channels.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cedar.formats.spec import FormatSpec
from cedar.kernels import check
from cedar.kernels.dispatch import row_op, select
from cedar.kernels.mhc import Entered, Sublayer


@row_op(2)
def route(
    u_TD: Tensor,
    image_T: Tensor | None,
    weight_ED: Tensor,
    bias_E: Tensor,
    image_bias_E: Tensor,
    k: int,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's experts: (ids [T, K] ascending, weights [T, K], all scores [T, E]), float32.

    The bias decides who is chosen and never what they weigh; equal values go to the lower id.

    Args:
        image_T: bool, True where the image bias is used; None if there is no image row.
        scaling: Routed scaling factor, after the weights were divided by their sum.

    Source: architecture.md 5.
    """
    check.shape("route", "weight", weight_ED, bias_E.shape[0], u_TD.shape[-1])
    run = select("route", u_TD, weight_ED)
    return run(u_TD, image_T, weight_ED, bias_E, image_bias_E, k, scaling)


@row_op(3)
def experts(
    u_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1_EID: Tensor,
    w3_EID: Tensor,
    w2_EDI: Tensor,
    *,
    limit: float,
    round_inner: bool,
) -> Tensor:
    """Sum of the chosen experts' outputs, float32 [T, D], added in ascending id.

    An expert is `w2(weight * silu(min(gate, limit)) * clamp(up, +-limit))`, the routing weight before w2.

    Args:
        u_TD: Already rounded to FP8 where that is on.
        round_inner: Round the input of w2 to FP8 per 32 channels.
    """
    check.shape("experts", "w1", w1_EID, None, None, u_TD.shape[-1])
    check.shape("experts", "ids", ids_TK, u_TD.shape[0], None)
    run = select("experts", u_TD, w1_EID, w3_EID, w2_EDI)
    return run(u_TD, ids_TK, weights_TK, w1_EID, w3_EID, w2_EDI, limit, round_inner)


class Weights(NamedTuple):
    """Gate, up and down of the routed experts, and of the shared one."""

    w1_EID: Tensor
    w3_EID: Tensor
    w2_EDI: Tensor
    shared1_ID: Tensor
    shared3_ID: Tensor
    shared2_DI: Tensor


def feed(
    u_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights: Weights, *, limit: float, round_inner: bool
) -> Tensor:
    """`experts` and the shared expert, summed in float32, in u's dtype: [T, D]. No gradient."""
    check.shape("feed", "shared1", weights.shared1_ID, None, u_TD.shape[-1])
    run = select("feed", u_TD, weights.w1_EID)
    return run(u_TD, ids_TK, weights_TK, weights, limit, round_inner)


class Packed(NamedTuple):
    """A stack of experts' weights in MXFP4: uint8 codes [E, out, in / 2] and E8M0 scales [E, out, in / 32]."""

    codes: Tensor
    scales: Tensor


def packed_experts(
    u_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1: Packed,
    w3: Packed,
    w2: Packed,
    *,
    limit: float,
    round_inner: bool,
) -> Tensor:
    """`experts` with weights as the checkpoint stores them: float32 [T, D]. No gradient.

    Cost: each chosen expert's bytes once for every sixteen rows that chose it.
    """
    check.shape("packed_experts", "w1", w1.codes, None, None, u_TD.shape[-1] // 2)
    run = select("packed_experts", u_TD, w1.codes, ids_TK)
    return run(u_TD, ids_TK, weights_TK, w1, w3, w2, limit, round_inner)


class Router(NamedTuple):
    """What `route` needs beside its rows."""

    weight_ED: Tensor
    bias_E: Tensor
    image_bias_E: Tensor
    k: int
    scaling: float


def advance_routed(
    y_TD: Tensor,
    streams_TND: Tensor,
    post_TN: Tensor,
    mixing_TNN: Tensor,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    router: Router,
    image_T: Tensor,
) -> tuple[Entered, Tensor, Tensor]:
    """`mhc.advance` into the experts, and `route` of what they get: (entered, ids [T, K], weights [T, K])."""
    check.shape("advance_routed", "router", router.weight_ED, router.bias_E.shape[0], streams_TND.shape[-1])
    run = select("advance_routed", streams_TND, router.weight_ED)
    return run(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, router, image_T)


def advance_fed(
    y_TD: Tensor,
    streams_TND: Tensor,
    post_TN: Tensor,
    mixing_TNN: Tensor,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    router: Router,
    image_T: Tensor,
    weights: Weights,
    *,
    limit: float,
) -> tuple[Entered, Tensor]:
    """From attention's output to the experts': `advance_routed`, then `feed`; both round to `spec`. No gradient."""
    check.shape("advance_fed", "router", router.weight_ED, weights.w1_EID.shape[0], streams_TND.shape[-1])
    run = select("advance_fed", streams_TND, router.weight_ED, weights.w1_EID)
    return run(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, router, image_T, weights, limit)
