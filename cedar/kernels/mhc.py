"""Single-pass manifold-constrained hyper-connections: public ops.

T rows, N streams, D channels a stream.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cedar.formats.spec import FormatSpec
from cedar.kernels import check
from cedar.kernels.dispatch import row_op, select


@row_op(1)
def mix_coefficients(
    streams_TND: Tensor, fn: Tensor, scale_3: Tensor, base: Tensor, *, iterations: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What one sublayer does to the streams: (pre-mix A [T, N], post P [T, N], mixing C [T, source, destination]).

    All float32. A is used by the *next* sublayer's collapse, P and C by this one's expand. The statistic runs over all
    streams together; C goes through `iterations` row and column passes, the first row pass being a softmax,
    and ends on columns.

    Args:
        fn: float32 [N * (2 + N), N * D].
        scale_3: Factors of A, P and C.
        base: float32 [N * (2 + N)].

    Source: architecture.md 2.1.
    """
    num_streams, channels = streams_TND.shape[-2:]
    check.shape("mix_coefficients", "fn", fn, num_streams * (2 + num_streams), num_streams * channels)
    run = select("mix_coefficients", streams_TND, fn, scale_3, base)
    return run(streams_TND, fn, scale_3, base, iterations, eps, rms_eps)


@row_op(2)
def collapse(streams_TND: Tensor, premix_TN: Tensor) -> Tensor:
    """`sum_i premix_i * stream_i` in float32, in the streams' dtype: [T, D]."""
    check.shape("collapse", "premix", premix_TN, *streams_TND.shape[:2])
    run = select("collapse", streams_TND, premix_TN)
    return run(streams_TND, premix_TN)


@row_op(4)
def expand(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, mixing_TNN: Tensor) -> Tensor:
    """`new_j = post_j * y + sum_i mixing[i, j] * stream_i`: the sum runs over the source axis."""
    check.shape("expand", "y", y_TD, streams_TND.shape[0], streams_TND.shape[2])
    run = select("expand", streams_TND, y_TD, post_TN, mixing_TNN)
    return run(y_TD, streams_TND, post_TN, mixing_TNN)


class Sublayer(NamedTuple):
    """What a sublayer's entry needs: its hyper-connection and the gain of its norm."""

    fn: Tensor
    scale_3: Tensor
    base: Tensor
    gain_D: Tensor
    iterations: int
    eps: float
    rms_eps: float
    norm_eps: float


class Entered(NamedTuple):
    """The streams as a sublayer finds them, its input, the input rounded, and the sublayer's mixes."""

    streams_TND: Tensor
    normed_TD: Tensor
    rounded_TD: Tensor
    premix_TN: Tensor
    post_TN: Tensor
    mixing_TNN: Tensor


def advance(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    more_TD: Tensor | None = None,
) -> Entered:
    """From one sublayer's output to the next one's input, the streams read once: `expand`, `mix_coefficients`,
    `collapse`, norm and rounding. No gradient.

    Args:
        y_TD: The last sublayer's output; None if the streams are up to date.
        post_TN: The last sublayer's, as `mixing_TNN`; None without `y_TD`.
        premix_TN: The last sublayer's: it collapses the new streams.
        spec: What the input is rounded to; None rounds nothing.
        more_TD: The output's other half: it is `dense.add_round(y_TD, more_TD)`. None if y is all of it.
    """
    check.shape("advance", "premix", premix_TN, *streams_TND.shape[:2])
    run = select("advance", streams_TND, premix_TN)
    return run(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, more_TD)


def advance_projected(
    y_TD: Tensor | None,
    streams_TND: Tensor,
    post_TN: Tensor | None,
    mixing_TNN: Tensor | None,
    premix_TN: Tensor,
    sublayer: Sublayer,
    spec: FormatSpec | None,
    weight_OD: Tensor,
) -> tuple[Entered, Tensor]:
    """`advance`, and a linear of the rounded input: (entered, [T, O]). No gradient."""
    check.shape("advance_projected", "weight", weight_OD, None, streams_TND.shape[-1])
    run = select("advance_projected", streams_TND, weight_OD)
    return run(y_TD, streams_TND, post_TN, mixing_TNN, premix_TN, sublayer, spec, weight_OD)
