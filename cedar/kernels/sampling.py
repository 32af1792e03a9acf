"""The next token of many rows at once, on their device: public ops.

T rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cedar.kernels import check
from cedar.kernels.dispatch import select


class RowParams(NamedTuple):
    """Sampling parameters of rows, on the rows' device; float64 but for `top_k_T`, int64."""

    temperature_T: Tensor
    top_k_T: Tensor
    top_p_T: Tensor
    min_p_T: Tensor
    uniform_T: Tensor


def draw_rows(logits_TV: Tensor, temperature_T: Tensor, uniform_T: Tensor) -> Tensor:
    """The token that each row's uniform number falls on: int64 [T], -1 for a row whose logits are not finite.

    A temperature of 0 takes the highest, the first among equals. No shape depends on data and nothing asks the host.

    Args:
        logits_TV: float32.
        temperature_T: float64.
        uniform_T: float64 in [0, 1).
    """
    check.shape("draw_rows", "uniform", uniform_T, logits_TV.shape[0])
    return select("draw_rows", logits_TV)(logits_TV, temperature_T, uniform_T)


def choose_rows(logits_TV: Tensor, params: RowParams) -> Tensor:
    """`draw_rows` behind top-k, top-p and min-p in this order, all after the temperature; a sort makes it slower.

    A row without a filter keeps the vocabulary's order, so it draws what `draw_rows` draws.
    """
    check.shape("choose_rows", "uniform", params.uniform_T, logits_TV.shape[0])
    return select("choose_rows", logits_TV)(logits_TV, params)


def draw_drafts(logits_TV: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """(what `choose_rows` chooses, float32 [T, V] the distributions that it was drawn from)."""
    check.shape("draw_drafts", "uniform", params.uniform_T, logits_TV.shape[0])
    return select("draw_drafts", logits_TV)(logits_TV, params)


def verify_rows(
    logits_TV: Tensor, params: RowParams, draft_T: Tensor, draft_prob_TV: Tensor, other_T: Tensor
) -> Tensor:
    """`choose_rows`, but equal to a row's draft as often as its distribution allows.

    With p the row's distribution and q its draft's: the draft with probability min(1, p / q), by the row's uniform
    number, else a token of max(p - q, 0), by another one.

    Args:
        draft_T: int64, -1 for a row without a draft.
        draft_prob_TV: float32, what the draft was drawn from.
        other_T: float64 in [0, 1).

    Source: engram-dspark-vision-chat.md 2.4.
    """
    check.shape("verify_rows", "draft_prob", draft_prob_TV, *logits_TV.shape)
    return select("verify_rows", logits_TV)(logits_TV, params, draft_T, draft_prob_TV, other_T)
