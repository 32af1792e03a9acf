"""Choosing experts and running them: public ops.

T rows, D channels, E experts, K experts a row, I inner channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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


class Tiled(NamedTuple):
    """`Packed` in the order in which a tensor core's threads want it, by `retile`.

    Attributes:
        codes: int32 [E, blocks of 64 outputs, steps of 256 channels, 2048]: words of eight codes.
        scales: int32 [E, blocks, steps, 128]: four scales, each the upper byte of a float16.
        outputs: Of one expert, without the zeros that fill the last block.
    """

    codes: Tensor
    scales: Tensor
    outputs: int


def _recode(word: Tensor) -> Tensor:
    """Int32 words of eight E2M1 codes so that a shift and a mask yield two codes as float16.

    Codes n and n + 4 of a word are a pair: in the low and the high half, sign in bit 15, the rest in bits 11 to 9. With
    this mask M, pair 0 is w & M, pair 1 is w << 3 & M, pair 2 is (w << 6 ^ w << 1) & M and pair 3 is
    (w << 9 ^ w << 2) & M. (Four shifts of M alone do not fill a word.)
    """
    sign, rest = 0x80008000 - 2**32, 0x0E000E00
    first, second, third, fourth = (
        ((word >> 4 * n & 0x00080008) << 12) | ((word >> 4 * n & 0x00070007) << 9) for n in range(4)
    )
    known = first | (second >> 3 & 0x11C011C0)
    third = third ^ (((known << 6) ^ (known << 1)) & (sign | rest))
    fourth = fourth ^ (((known << 9) ^ (known << 2)) & (sign | rest))
    known = known | (third >> 1 & 0x40004000) | (third >> 6 & 0x00380038)
    return known | (fourth >> 2 & 0x20002000) | (fourth >> 9 & 0x00070007)


def retile(stack: Packed) -> Tiled:
    """The same weights in as many bytes, up to the zeros that fill the last block and step; done once, at load.

    Output `16 w + 8 a + g` of a block and channel `128 b + 32 q + c` of a step lie at `[b, a, w, g, q]`, 16 bytes of c
    each, and their scale at `[w, g, q, b, a]`. Scales below 2**-22 become 0, above 2**8 they are cut to it.
    """
    num_experts, outputs, width = stack.codes.shape
    blocks, steps = -(-outputs // 64), -(-width // 128)
    new: dict[str, Any] = {"device": stack.codes.device, "dtype": torch.int32}
    codes = torch.empty(num_experts, blocks, steps, 2048, **new)
    scales = torch.empty(num_experts, blocks, steps, 128, **new)
    for expert in range(num_experts):
        byte, scale = stack.codes[expert], stack.scales[expert]
        missing = blocks * 64 - outputs
        byte = F.pad(byte, (0, steps * 128 - width, 0, missing)).view(torch.int32)
        word = byte.view(blocks, 4, 2, 8, steps, 2, 4, 4).permute(0, 4, 5, 2, 1, 3, 6, 7)
        codes[expert] = _recode(word.reshape(blocks, steps, 2048))
        upper = (scale.int() - 105).clamp_(0, 30).mul_(4).byte()
        upper = F.pad(upper, (0, steps * 8 - scale.shape[1], 0, missing))
        upper = upper.view(blocks, 4, 2, 8, steps, 2, 4).permute(0, 4, 1, 3, 6, 5, 2)
        scales[expert] = upper.reshape(blocks, steps, 512).view(torch.int32)
    return Tiled(codes, scales, outputs)


def packed_experts(
    u_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1: Packed | Tiled,
    w3: Packed | Tiled,
    w2: Packed | Tiled,
    *,
    limit: float,
    round_inner: bool,
) -> Tensor:
    """`experts` with weights as the checkpoint stores them: float32 [T, D]. No gradient.

    Args:
        w1: Like `w3` and `w2` as stored, or all three from `retile`, which is faster.

    Cost: each chosen expert's bytes once for every tile of rows that chose it.
    """
    if isinstance(w1, Packed):
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
