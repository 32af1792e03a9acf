"""Drafts: what proposes tokens ahead, and how many of them a step verifies.

A drafter proposes; the model runs the newest token and the proposed ones as rows of one step (`verify rows`); the
sampler then takes its tokens row by row, as it would have without drafts, until one differs from what was
proposed (`cedar.engine.sampling.Sampler`). Rows after that are rolled back by position. So drafts change how many
tokens a step gives, never which: greedy and seeded answers are the same tokens with any drafter that involves no
chance, and one that samples leaves the distribution as it is.

A sequences, G tokens of a block, V vocabulary, R Markov rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice, repeat
from operator import mul
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedar.config.serve import GenerationDefaults
from cedar.engine.request import SamplingParams
from cedar.engine.runner import Anchor, DecodeRunner
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
        for name, values in (("probs", self.probs), ("confidence", self.confidence)):
            if values is not None and len(values) != len(self.ids):
                raise ShapeError(f"a proposal of {len(self.ids)} tokens has {len(values)} {name}, expected one each")

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
    """Seconds of a step of generated tokens by its drafts, as steps have shown: a line for each number of sequences.

    A sequence more costs much more than a draft more, so the two are not mixed. What was seen long ago counts less, and
    a step that something else held up counts as twice the usual at most. Until widths have varied, a draft is taken to
    cost a few hundredths of a step.
    """

    # a draft's part of a step without drafts, as prior, and how many squared drafts of variation outweigh it
    _PRIOR, _WEIGHT = 0.06, 50.0
    _KEEP = 0.99

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}

    def note(self, sequences: int, drafts: int, seconds: float) -> None:
        """A step of so many sequences and drafts took so long."""
        old = self._sums.get(sequences, [0.0] * 5)
        if old[0]:
            expected = self.of(sequences)(sequences + drafts)
            seconds = min(seconds, 2 * expected)
            if 2 * seconds < expected:
                # those before were held up, all of them
                old = [0.0] * 5
        keep, (count, sum_x, sum_y, sum_xx, sum_xy) = self._KEEP, old
        self._sums[sequences] = [
            keep * count + 1,
            keep * sum_x + drafts,
            keep * sum_y + seconds,
            keep * sum_xx + drafts * drafts,
            keep * sum_xy + drafts * seconds,
        ]

    def of(self, sequences: int) -> Callable[[float], float]:
        """What a step of so many sequences takes, by its rows; in units of nothing before the first note."""
        prior = self._PRIOR / math.sqrt(sequences)
        count, sum_x, sum_y, sum_xx, sum_xy = self._sums.get(sequences, [0.0] * 5)
        if not count:
            return lambda rows: 1.0 + prior * (rows - sequences)
        mean_x, mean_y = sum_x / count, sum_y / count
        spread, covariance = sum_xx - count * mean_x**2, sum_xy - count * mean_x * mean_y
        expected = prior * mean_y / (1 + prior * mean_x)
        slope = max((covariance + self._WEIGHT * expected) / (spread + self._WEIGHT), 0.0)
        base = max(mean_y - slope * mean_x, 0.1 * mean_y)
        return lambda rows: base + slope * (rows - sequences)


class Pace:
    """Which of two ways has been the faster lately, by how many sequences decode at once.

    To draft, or not to: a pass of the draft costs the same whether its tokens are taken or not, so the choice of widths
    cannot tell. To verify all drafts, or those that pay: rows that fill up a graph or a product cost next to nothing,
    which a line through what steps took does not show.
    """

    # a step in so many goes the other way, to see whether that still holds
    _PROBE = 64
    # steps of each kind before the two are compared, and how often the other way is taken until then
    _FIRST, _FIRST_PROBE = 3, 8
    _KEEP = 0.9

    def __init__(self) -> None:
        # (bucket, first way) -> steps, and tokens and seconds of which the newest weigh most
        self._seen: dict[tuple[int, bool], tuple[int, float, float]] = {}
        self._turn = 0

    def prefers(self, num_sequences: int) -> bool:
        """Whether the next step should go the first way."""
        bucket = num_sequences.bit_length()
        known = [other for other in {bucket for bucket, _ in self._seen} if self._is_known(other)]
        if not known:
            second, first = self._of(bucket)
            # a few of each, the first way first
            return first[0] <= second[0]
        # until a number of sequences has shown its own, the nearest one's counts
        second, first = self._of(min(known, key=lambda other: (abs(other - bucket), other)))
        faster = first[1] * second[2] >= second[1] * first[2]
        self._turn += 1
        return faster != (self._turn % (self._PROBE if bucket in known else self._FIRST_PROBE) == 0)

    def _of(self, bucket: int) -> tuple[tuple[int, float, float], tuple[int, float, float]]:
        """(steps, tokens, seconds) of the second way and of the first."""
        none = 0, 0.0, 1.0
        return self._seen.get((bucket, False), none), self._seen.get((bucket, True), none)

    def _is_known(self, bucket: int) -> bool:
        return min(steps for steps, _, _ in self._of(bucket)) >= self._FIRST

    def note(self, num_sequences: int, first: bool, tokens: int, seconds: float) -> None:
        """A step of so many sequences gave so many tokens, the first way or the second."""
        key = num_sequences.bit_length(), first
        steps, old_tokens, old_seconds = self._seen.get(key, (0, 0.0, 0.0))
        self._seen[key] = (steps + 1, self._KEEP * old_tokens + tokens, self._KEEP * old_seconds + seconds)


def choose_widths(
    proposals: Sequence[Proposal],
    num_rows: int,
    *,
    base_rows: int | None = None,
    cost: Callable[[float], float] | None = None,
    spent: float = 0.0,
) -> list[int]:
    """How many tokens of each proposal are verified when `num_rows` more rows fit into the step.

    The likeliest to be accepted come first: by the product of confidences up to the token (1 where unknown), then
    the earlier token, then the earlier sequence. One more is taken while that raises the tokens to be expected a
    second, and none after the first that does not: whether a token is verified never depends on a later one of its
    sequence, which keeps the choice lossless.

    Args:
        base_rows: Rows that run anyway, each of which gives a token; one a proposal by default.
        cost: Seconds of a step of so many rows; None takes all steps for equal, and so every row that fits.
        spent: Seconds of the round that proposed, which the step's tokens have to make up for: the more it took, the
            more rows pay.

    Source: engram-dspark-vision-chat.md 2.5.

    >>> choose_widths([Proposal(ids=(1, 2, 3)), Proposal(ids=(4,))], 3)
    [2, 1]
    >>> one = Proposal(ids=(1, 2, 3, 4, 5), confidence=(0.9, 0.8, 0.5, 0.4, 0.3))
    >>> choose_widths([one], 5, cost=lambda rows: 1 / (100, 98, 95, 90, 85, 80)[int(rows) - 1])
    [3]
    >>> choose_widths([one], 5, cost=lambda rows: 1 / (100, 98, 95, 90, 85, 80)[int(rows) - 1], spent=0.01)
    [4]
    """
    widths = [len(proposal.ids) for proposal in proposals]
    if cost is None and sum(widths) <= num_rows:
        return widths
    ranked: list[tuple[float, int, int]] = []
    for number, proposal in enumerate(proposals):
        if proposal.confidence is None:
            survivals: Iterable[float] = repeat(-1.0, widths[number])
        else:
            confidence: Iterable[float] = proposal.confidence
            if widths[number] and not 0 <= min(confidence) <= max(confidence) <= 1:
                # never above an earlier one's, so that a prefix is taken whatever the drafter says
                confidence = [min(max(value, 0.0), 1.0) for value in confidence]
            survivals = islice(accumulate(confidence, mul, initial=-1.0), 1, None)
        ranked += zip(survivals, count(), repeat(number))
    ranked.sort()
    widths = [0] * len(proposals)
    rows = len(proposals) if base_rows is None else base_rows
    expected = float(rows)
    best = 0.0 if cost is None else expected / (spent + cost(rows))
    for negative, _, number in ranked[: max(num_rows, 0)]:
        rows, expected = rows + 1, expected - negative
        if cost is not None:
            speed = expected / (spent + cost(rows))
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
        defaults: Where the scaling of the confidence is found; none by default.
        runner: Runs the round in a graph, for the sequences in its slots.
    """

    def __init__(
        self, draft: Draft, defaults: GenerationDefaults | None = None, runner: DecodeRunner | None = None
    ) -> None:
        self._draft, self.runner = draft, runner
        found = defaults or GenerationDefaults()
        self._scaling = {
            kind: (
                self._places(found.draft_confidence_temperatures.get(kind, ()), 1.0),
                self._places(found.draft_confidence_offsets.get(kind, ()), 0.0),
            )
            for kind in ("sampled", "greedy")
        }

    def _places(self, values: Sequence[float], neutral: float) -> NDArray[np.float32]:
        """A value for each place of a block, `neutral` where there is none."""
        block_size = self._draft.config.draft.block_size
        return np.array([*values[:block_size], *[neutral] * (block_size - len(values))], dtype=np.float32)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        runner = self.runner
        slotted = [] if runner is None else runner.fitting([request.state for request in requests])
        if len(slotted) == len(requests):
            return self._propose_in_slots(requests)
        single = [place for place in range(len(requests)) if place not in slotted]
        proposals = [Proposal()] * len(requests)
        for places, propose in ((slotted, self._propose_in_slots), (single, self._propose_alone)):
            if places:
                for place, proposal in zip(places, propose([requests[place] for place in places]), strict=True):
                    proposals[place] = proposal
        return proposals

    def _propose_in_slots(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        assert self.runner is not None
        rows = []
        for request in requests:
            drawn = (request.sampling, request.generator) if _draws(request) else (None, None)
            rows.append(Anchor(request.state, request.tokens[-1], *drawn))
        drafted = self.runner.propose(rows)
        return self._proposals(requests, drafted.ids_AG.tolist(), drafted.confidence_AG, drafted.probs)

    @torch.inference_mode()
    def _propose_alone(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        draft, target = self._draft, self._draft.target
        rows, visible = zip(*(request.state.context() for request in requests), strict=True)
        anchor_A = torch.tensor([request.tokens[-1] for request in requests], device=target.device)
        position_A = torch.tensor([request.state.num_tokens for request in requests], device=target.device)
        context = torch.stack(rows).to(target.dtype), torch.stack(visible)
        blocks = draft(anchor_A, position_A, *context, target.rounding)
        return self._chosen(requests, blocks.base_AGV, blocks.hidden_AGD)

    @torch.inference_mode()
    def _chosen(self, requests: Sequence[DraftRequest], base_AGV: Tensor, hidden_AGD: Tensor) -> list[Proposal]:
        """Tokens left to right: the likeliest, or drawn."""
        draft, rounding = self._draft, self._draft.target.rounding
        sampled = [number for number, request in enumerate(requests) if _draws(request)]
        previous_A = torch.tensor([request.tokens[-1] for request in requests], device=base_AGV.device)
        tokens, embeddings = [], []
        probs: list[list[Tensor]] = [[] for _ in requests]
        for place in range(max(request.limit for request in requests)):
            embedding_AR, bias_AV = draft.markov(previous_A, rounding)
            logits_AV = base_AGV[:, place] + bias_AV
            previous_A = logits_AV.argmax(-1)
            for number in sampled:
                request = requests[number]
                previous_A[number], prob_V = draw(logits_AV[number], request.sampling, request.generator)
                probs[number].append(prob_V)
            tokens.append(previous_A)
            embeddings.append(embedding_AR)
        confidence_AG = draft.confidence(hidden_AGD[:, : len(tokens)], torch.stack(embeddings, 1), rounding)
        ids, confidence = torch.stack(tokens, 1).tolist(), confidence_AG.cpu().numpy()
        return self._proposals(requests, ids, confidence, probs)

    def _proposals(
        self,
        requests: Sequence[DraftRequest],
        ids: list[list[int]],
        confidence_AG: NDArray[np.float32],
        probs: Sequence[Sequence[Tensor] | None],
    ) -> list[Proposal]:
        num_places = confidence_AG.shape[1]
        kinds = ["greedy" if request.sampling.temperature == 0 else "sampled" for request in requests]
        said: dict[str, list[list[float]]] = {}
        for kind in set(kinds):
            temperature_G, offset_G = (values_G[:num_places] for values_G in self._scaling[kind])
            # a sigmoid, which as this never overflows; numpy, since torch calls cost more than all of this
            said[kind] = (0.5 + 0.5 * np.tanh(0.5 * (confidence_AG / temperature_G + offset_G))).tolist()
        proposals = []
        for number, (request, kind) in enumerate(zip(requests, kinds, strict=True)):
            limit, drawn = request.limit, probs[number]
            proposals.append(
                Proposal(
                    ids=tuple(ids[number][:limit]),
                    probs=tuple(drawn[:limit]) if drawn else None,
                    confidence=tuple(said[kind][number][:limit]),
                )
            )
        return proposals


def _draws(request: DraftRequest) -> bool:
    """Whether chance chooses this request's drafts."""
    return request.sampling.temperature > 0 and request.sampling.seed is None
