"""Drafts: what proposes tokens ahead, and how many of them a step verifies.

A drafter proposes; the model runs the newest token and the proposed ones as rows of one step (`verify rows`); the
sampler then takes its tokens row by row, as it would have without drafts, until one differs from what was
proposed (`cedar.engine.sampling.Sampler`). Rows after that are rolled back by position. So drafts change how many
tokens a step gives, never which: greedy and seeded answers are the same tokens with any drafter that involves no
chance, and one that samples leaves the distribution as it is.

V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cedar.engine.request import SamplingParams
from cedar.errors import ShapeError


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRequest:
    """One sequence that may be drafted for.

    Attributes:
        state: The model's state; every token but the newest has run. A drafter reads it and leaves it as it is.
        tokens: Prompt and answer so far; the newest is the one that runs next.
        sampling: How the sequence chooses; a drafter that samples should sample alike.
        limit: Most tokens that can be used, at least 1.
        generator: The random numbers of this sequence's drafts, so that a seeded answer stays reproducible.
    """

    state: Any
    tokens: Sequence[int]
    sampling: SamplingParams
    limit: int
    generator: torch.Generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Tokens that may come after the newest one, in order; none is a proposal too.

    Attributes:
        probs: For each token float [V], the distribution that it was really drawn from; None if no chance was
            involved.
        confidence: For each token the probability that it is accepted if those before it are; None if unknown.

    Raises:
        ShapeError: A list of another length than `ids`.
    """

    ids: tuple[int, ...] = ()
    probs: tuple[Tensor, ...] | None = None
    confidence: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("probs", "confidence"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.ids):
                raise ShapeError(f"a proposal of {len(self.ids)} tokens has {len(value)} {name}, expected one each")

    def cut(self, length: int) -> Proposal:
        """The first `length` tokens of it."""
        if length >= len(self.ids):
            return self
        return Proposal(
            ids=self.ids[:length],
            probs=None if self.probs is None else self.probs[:length],
            confidence=None if self.confidence is None else self.confidence[:length],
        )


class Drafter(Protocol):
    """Proposes tokens for several sequences at once; called in the engine's thread before each step."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One proposal for each request, of at most its `limit` tokens; longer ones are cut.

        A failure costs the step its drafts, nothing else.
        """


def choose_widths(proposals: Sequence[Proposal], num_rows: int) -> list[int]:
    """How many tokens of each proposal are verified when `num_rows` more rows fit into the step.

    The likeliest to be accepted come first: by the product of confidences up to the token (1 where unknown), then
    the earlier token, then the earlier sequence. Whether a token is verified never depends on a later one of its
    sequence, which keeps the choice lossless.

    Source: engram-dspark-vision-chat.md 2.5, with all steps of equal cost.

    >>> choose_widths([Proposal(ids=(1, 2, 3)), Proposal(ids=(4,))], 3)
    [2, 1]
    """
    ranked = []
    for number, proposal in enumerate(proposals):
        survival = 1.0
        for place in range(len(proposal.ids)):
            if proposal.confidence is not None:
                # never above an earlier one's, so that a prefix is taken whatever the drafter says
                survival *= min(max(proposal.confidence[place], 0.0), 1.0)
            ranked.append((-survival, place, number))
    widths = [0] * len(proposals)
    for _, _, number in sorted(ranked)[: max(num_rows, 0)]:
        widths[number] += 1
    return widths
