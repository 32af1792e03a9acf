"""Drafts: what proposes tokens ahead, and how many of them a step verifies.

A drafter proposes; the model runs the newest token and the proposed ones as rows of one step (`verify rows`); the
sampler then takes its tokens row by row, as it would have without drafts, until one differs from what was
proposed (`cedar.engine.sampling.Sampler`). Rows after that are rolled back by position. So drafts change how many
tokens a step gives, never which: greedy and seeded answers are the same tokens with any drafter that involves no
chance, and one that samples leaves the distribution as it is.

A sequences, G tokens of a block, V vocabulary, R Markov rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cedar.engine.request import SamplingParams
from cedar.engine.sampling import draw
from cedar.errors import ShapeError
from cedar.model.draft import Draft


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


class StepCost:
    """Seconds of a step by its rows, as far as steps of generated tokens have shown: a line through what was seen.

    What was seen long ago counts less. Until widths have varied, a row is taken to cost a few hundredths of a step.
    """

    # a row's part of a one-row step, as prior, and how many squared rows of variation outweigh it
    _PRIOR, _WEIGHT = 0.06, 4.0
    _KEEP = 0.98

    def __init__(self) -> None:
        self._sums = [0.0] * 5

    def note(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        values = (1.0, float(rows), seconds, float(rows * rows), rows * seconds)
        self._sums = [self._KEEP * old + new for old, new in zip(self._sums, values, strict=True)]

    def seconds(self, rows: float) -> float:
        """What a step of so many rows would take; in units of nothing before the first note."""
        count, sum_x, sum_y, sum_xx, sum_xy = self._sums
        if not count:
            return 1.0 + self._PRIOR * (rows - 1)
        mean_x, mean_y = sum_x / count, sum_y / count
        spread, covariance = sum_xx / count - mean_x**2, sum_xy / count - mean_x * mean_y
        prior = self._PRIOR * mean_y / (1 + self._PRIOR * (mean_x - 1))
        slope = max((covariance * count + self._WEIGHT * prior) / (spread * count + self._WEIGHT), 0.0)
        return max(mean_y + slope * (rows - mean_x), 0.1 * mean_y)


class Pace:
    """Whether drafting has been the faster way lately, by how many sequences decode at once.

    A pass of the draft costs the same whether its tokens are taken or not, so the choice of widths cannot tell.
    """

    # a step in so many goes the other way, to see whether that still holds
    _PROBE = 24
    _KEEP = 0.9

    def __init__(self) -> None:
        # (bucket, drafted) -> tokens and seconds, the newest weighing most
        self._seen: dict[tuple[int, bool], tuple[float, float]] = {}
        self._turn = 0

    def drafts(self, num_sequences: int) -> bool:
        """Whether the next step should draft."""
        bucket = num_sequences.bit_length()
        rates = [self._rate(bucket, drafted) for drafted in (False, True)]
        self._turn += 1
        probes = self._turn % self._PROBE == 0
        if rates[1] is None or rates[0] is None:
            # drafting first: it is what the draft is for
            return rates[1] is None or not probes
        return (rates[1] >= rates[0]) != probes

    def note(self, num_sequences: int, drafted: bool, tokens: int, seconds: float) -> None:
        """A step of so many sequences gave so many tokens."""
        key = num_sequences.bit_length(), drafted
        old_tokens, old_seconds = self._seen.get(key, (0.0, 0.0))
        self._seen[key] = (self._KEEP * old_tokens + tokens, self._KEEP * old_seconds + seconds)

    def _rate(self, bucket: int, drafted: bool) -> float | None:
        tokens, seconds = self._seen.get((bucket, drafted), (0.0, 0.0))
        return tokens / seconds if seconds else None


def choose_widths(
    proposals: Sequence[Proposal],
    num_rows: int,
    *,
    base_rows: int | None = None,
    cost: Callable[[float], float] | None = None,
) -> list[int]:
    """How many tokens of each proposal are verified when `num_rows` more rows fit into the step.

    The likeliest to be accepted come first: by the product of confidences up to the token (1 where unknown), then
    the earlier token, then the earlier sequence. One more is taken while that raises the tokens to be expected a
    second, and none after the first that does not: whether a token is verified never depends on a later one of its
    sequence, which keeps the choice lossless.

    Args:
        base_rows: Rows that run anyway, each of which gives a token; one a proposal by default.
        cost: Seconds of a step of so many rows; None takes all steps for equal, and so every row that fits.

    Source: engram-dspark-vision-chat.md 2.5.

    >>> choose_widths([Proposal(ids=(1, 2, 3)), Proposal(ids=(4,))], 3)
    [2, 1]
    >>> one = Proposal(ids=(1, 2, 3, 4, 5), confidence=(0.9, 0.8, 0.5, 0.4, 0.3))
    >>> choose_widths([one], 5, cost=lambda rows: 1 / (100, 98, 95, 90, 85, 80)[int(rows) - 1])
    [3]
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
    rows = len(proposals) if base_rows is None else base_rows
    expected = float(rows)
    best = 0.0 if cost is None else expected / cost(rows)
    for negative, _, number in sorted(ranked)[: max(num_rows, 0)]:
        rows, expected = rows + 1, expected - negative
        if cost is not None:
            speed = expected / cost(rows)
            if speed <= best:
                break
            best = speed
        widths[number] += 1
    return widths


class ModelDrafter:
    """Proposes with a checkpoint's own draft: one pass for all sequences, tokens of the block left to right.

    A sampled answer's drafts are drawn with its own temperature and filters, since that is what they are held
    against; penalties, biases and constraints are left to the verification. Greedy and seeded answers get the likeliest
    tokens, without chance, so that they are the same with drafts and without.

    Args:
        draft: Attached to the model that the engine runs.
        temperatures: `GenerationDefaults.draft_confidence_temperatures`.
    """

    def __init__(self, draft: Draft, temperatures: Mapping[str, Sequence[float]] | None = None) -> None:
        self._draft = draft
        block_size = draft.config.draft.block_size
        found = temperatures or {}
        self._temperatures = {
            kind: torch.tensor(list(found.get(kind, ()))[:block_size] or [1.0] * block_size, device=draft.target.device)
            for kind in ("sampled", "greedy")
        }

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        draft, target = self._draft, self._draft.target
        rounding, device = target.rounding, target.device
        rows, visible = zip(*(request.state.context() for request in requests), strict=True)
        anchor_A = torch.tensor([request.tokens[-1] for request in requests], device=device)
        position_A = torch.tensor([request.state.num_tokens for request in requests], device=device)
        blocks = draft(anchor_A, position_A, torch.stack(rows).to(target.dtype), torch.stack(visible), rounding)
        sampled = [
            number
            for number, request in enumerate(requests)
            if request.sampling.temperature > 0 and request.sampling.seed is None
        ]
        previous_A = anchor_A
        tokens, embeddings = [], []
        probs: list[list[Tensor]] = [[] for _ in requests]
        for place in range(max(request.limit for request in requests)):
            embedding_AR, bias_AV = draft.markov(previous_A, rounding)
            logits_AV = blocks.base_AGV[:, place] + bias_AV
            previous_A = logits_AV.argmax(-1)
            for number in sampled:
                request = requests[number]
                previous_A[number], prob_V = draw(logits_AV[number], request.sampling, request.generator)
                probs[number].append(prob_V)
            tokens.append(previous_A)
            embeddings.append(embedding_AR)
        num_places = len(tokens)
        confidence_AG = draft.confidence(blocks.hidden_AGD[:, :num_places], torch.stack(embeddings, 1), rounding)
        ids = torch.stack(tokens, 1).tolist()
        said = {kind: torch.sigmoid(confidence_AG / t[:num_places]).tolist() for kind, t in self._temperatures.items()}
        return [
            Proposal(
                ids=tuple(ids[number]),
                probs=tuple(probs[number]) if probs[number] else None,
                confidence=tuple(said["greedy" if request.sampling.temperature == 0 else "sampled"][number]),
            ).cut(request.limit)
            for number, request in enumerate(requests)
        ]
