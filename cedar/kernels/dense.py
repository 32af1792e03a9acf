"""Row-wise products, norms and rotations: public ops.

T rows, I and O channels in and out, R rotated channels.
"""

from __future__ import annotations

from torch import Tensor

from cedar.formats.spec import FormatSpec
from cedar.kernels import check
from cedar.kernels.dispatch import row_op, select


@row_op(1)
def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """`x @ weight.T`, summed in float32, in x's dtype.

    Args:
        x_TI: float32 or bfloat16, any leading shape.
        weight_OI: Cast to x's dtype if it differs (float32 master weights of a bfloat16 run).
    """
    check.shape("linear", "weight", weight_OI, None, x_TI.shape[-1])
    return select("linear", x_TI, weight_OI)(x_TI, weight_OI)


@row_op(1)
def linear_float32(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """`x @ weight.T` in float32, of values as they are: neither operand is rounded to the other's dtype."""
    check.shape("linear_float32", "weight", weight_OI, None, x_TI.shape[-1])
    return select("linear_float32", x_TI, weight_OI)(x_TI, weight_OI)


@row_op(1)
def rms_norm(x_TI: Tensor, gain_I: Tensor, eps: float) -> Tensor:
    """`gain * x / sqrt(mean(x**2) + eps)` in float32, rounded once to x's dtype.

    `eps` 1e-20 of the text model matters: activations near 1e-11 occur (architecture.md 2).
    """
    check.shape("rms_norm", "gain", gain_I, x_TI.shape[-1])
    return select("rms_norm", x_TI, gain_I)(x_TI, gain_I, eps)


@row_op(3)
def rotate(x_THI: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the last channels of each head: adjacent pairs (2k, 2k+1) by the k-th angle.

    Args:
        x_THI: Rows of heads; the last `2 * cos.shape[-1]` channels turn, the others pass through.
        cos_TR: float32, half as many as rotated channels; negate `sin_TR` to turn back.

    Source: architecture.md 3.3.
    """
    check.shape("rotate", "cos", cos_TR, x_THI.shape[0], None)
    return select("rotate", x_THI)(x_THI, cos_TR, sin_TR)


@row_op(2)
def swiglu(gate_TI: Tensor, up_TI: Tensor, limit: float) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, +-limit)` in float32: the gate is cut from above only.

    Source: architecture.md 5.
    """
    check.shape("swiglu", "up", up_TI, *gate_TI.shape)
    return select("swiglu", gate_TI, up_TI)(gate_TI, up_TI, limit)


def swiglu_round(x_TX: Tensor, limit: float, spec: FormatSpec | None) -> Tensor:
    """`swiglu` of each row's two halves in x's dtype, rounded to `spec` in the same pass. No gradient."""
    check.shape("swiglu_round", "rows", x_TX, None, x_TX.shape[-1] // 2 * 2)
    return select("swiglu_round", x_TX)(x_TX, limit, spec)


def add_round(first_TD: Tensor, second_TD: Tensor) -> Tensor:
    """`first + second` in float32, in the second one's dtype. No gradient."""
    check.shape("add_round", "second", second_TD, *first_TD.shape)
    return select("add_round", first_TD, second_TD)(first_TD, second_TD)


def norm_round(x_TI: Tensor, gain_I: Tensor, eps: float, spec: FormatSpec | None) -> Tensor:
    """`rms_norm`, then rounded to `spec` in the same pass; None leaves the norm. No gradient."""
    check.shape("norm_round", "gain", gain_I, x_TI.shape[-1])
    return select("norm_round", x_TI, gain_I)(x_TI, gain_I, eps, spec)


def grouped_linear(x_TGI: Tensor, weight_GOI: Tensor, spec: FormatSpec | None) -> Tensor:
    """Each group of channels through its own weight, summed in float32, in x's dtype: [T, G, O]. No gradient.

    Args:
        spec: What the result is rounded to for the product that reads it; None leaves it.
    """
    check.shape("grouped_linear", "weight", weight_GOI, x_TGI.shape[1], None, x_TGI.shape[2])
    return select("grouped_linear", x_TGI, weight_GOI)(x_TGI, weight_GOI, spec)


def packed_linear(x_TI: Tensor, codes_OI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    """`linear` with a weight as the checkpoint stores it, summed in float32, in x's dtype: [T, O]. No gradient.

    Args:
        codes_OI: uint8 E4M3.
        scales: uint8 E8M0, one for each tile of 32 x 32.
        spec: The input is rounded to it on the way in; None takes it as it is.

    Source: architecture.md 7.2.
    """
    check.shape("packed_linear", "codes", codes_OI, None, x_TI.shape[-1])
    check.shape("packed_linear", "scales", scales, -(-codes_OI.shape[0] // 32), -(-codes_OI.shape[1] // 32))
    return select("packed_linear", x_TI, codes_OI)(x_TI, codes_OI, scales, spec)


def packed_grouped_linear(x_TGI: Tensor, codes_GOI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    """`grouped_linear` with weights as the checkpoint stores them: [T, G, O]. No gradient.

    Args:
        codes_GOI: uint8 E4M3.
        scales: uint8 E8M0, one for each tile of 32 x 32 of a group.
        spec: What the result is rounded to for the product that reads it; None leaves it. The input stays as it is.

    Source: architecture.md 3.6, 7.2.
    """
    num_groups, outputs, channels = codes_GOI.shape
    check.shape("packed_grouped_linear", "codes", codes_GOI, x_TGI.shape[1], None, x_TGI.shape[2])
    check.shape("packed_grouped_linear", "scales", scales, num_groups, -(-outputs // 32), -(-channels // 32))
    return select("packed_grouped_linear", x_TGI, codes_GOI)(x_TGI, codes_GOI, scales, spec)
