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
from itertools import accumulate
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
        ShapeError: A list of another length than `ids`, or a confidence that is no probability.
    """

    ids: tuple[int, ...] = ()
    probs: tuple[Tensor, ...] | None = None
    confidence: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name, values in (("probs", self.probs), ("confidence", self.confidence)):
            if values is not None and len(values) != len(self.ids):
                raise ShapeError(f"a proposal of {len(self.ids)} tokens has {len(values)} {name}, expected one each")
        if self.confidence and not 0 <= min(self.confidence) <= max(self.confidence) <= 1:
            raise ShapeError(f"a proposal has the confidences {self.confidence}, expected probabilities")

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


@dataclass(slots=True)
class _Line:
    """Seconds by drafts: the latest steps' means, and how steps differed from those just before them."""

    drafts: float
    seconds: float
    spread: float = 0.0
    covariance: float = 0.0


class StepCost:
    """Seconds of a step of generated tokens by its drafts, as steps have shown: a line for each size of batch.

    A machine's speed changes by more than a draft costs, so how long steps take is what the latest say, and what a
    draft costs, as a part of a step without any, is learnt over many from how each differs from those just before it.
    A step that something else held up counts as twice the usual at most. Until drafts have varied, one is taken to cost
    a few hundredths of a step.
    """

    # a draft's part of a step without drafts, as prior, of which a tenth always stays, and how many squared drafts of
    # variation a sequence outweigh it
    _PRIOR, _LEAST, _WEIGHT = 0.06, 0.1, 25.0
    # of a draft's part, and of how long steps take
    _KEEP, _KEEP_LEVEL = 0.998, 0.8

    def __init__(self) -> None:
        # by the sequences' number of bits
        self._lines: dict[int, _Line] = {}

    def note(self, sequences: int, rows: int, seconds: float) -> None:
        """A step of so many rows, those included that only fill it up, took so long."""
        drafts = rows - sequences
        line = self._lines.setdefault(sequences.bit_length(), _Line(drafts, seconds))
        part = self._part(line, sequences)
        base = line.seconds / (1 + part * line.drafts)
        expected = base * (1 + part * drafts)
        seconds = min(seconds, 2 * expected)
        if 2 * seconds < expected:
            # those before were held up, all of them
            line.drafts, line.seconds = drafts, seconds
        more, longer = drafts - line.drafts, seconds - line.seconds
        line.spread = self._KEEP * line.spread + more * more
        line.covariance = self._KEEP * line.covariance + more * longer / base
        line.drafts += (1 - self._KEEP_LEVEL) * more
        line.seconds += (1 - self._KEEP_LEVEL) * longer

    def of(self, sequences: int) -> Callable[[float], float] | None:
        """What a step of so many sequences takes, by its rows; None before the first note."""
        if not self._lines:
            return None
        line = self._lines[nearest(self._lines, sequences.bit_length())]
        part = self._part(line, sequences)
        base = line.seconds / (1 + part * line.drafts)
        return lambda rows: base * (1 + part * (rows - sequences))

    def _part(self, line: _Line, sequences: int) -> float:
        prior, weight = self._PRIOR / math.sqrt(sequences), self._WEIGHT * sequences
        return max((line.covariance + weight * prior) / (line.spread + weight), self._LEAST * prior)


@dataclass(slots=True)
class _Ways:
    """Steps without drafts and with them, and of these by sequence, the newest most: tokens, rows, a round's share."""

    plain: int = 0
    drafted: int = 0
    tokens: float = 0.0
    rows: float = 0.0
    share: float = 0.0


class Pace:
    """Whether drafting is the faster, by how many sequences decode at once.

    A round costs the same whether its tokens are taken or not, so the choice of widths cannot tell. What drafted steps
    brought lately is held against what the same steps would take without drafts (`StepCost`): both at the speed that
    the machine has now.
    """

    # a step in so many goes the other way, to see whether that still holds, and fewer where drafting is faster by a
    # quarter: its steps show by themselves when they bring less
    _PROBE, _CLEAR, _SELDOM = 64, 1.25, 512
    # steps of each kind before the two are compared, and how often the other way is taken until then
    _FIRST, _FIRST_PROBE = 3, 8
    _KEEP = 0.9

    def __init__(self) -> None:
        # by the sequences' number of bits
        self._seen: dict[int, _Ways] = {}
        self._turn = 0

    def prefers(self, sequences: int, cost: Callable[[int], float] | None) -> bool:
        """Whether the next step should draft, if steps of so many rows take so long."""
        bits = sequences.bit_length()
        known = [other for other, ways in self._seen.items() if min(ways.plain, ways.drafted) >= self._FIRST]
        if not known or cost is None:
            ways = self._seen.get(bits, _Ways())
            # a few of each, with drafts first
            return ways.drafted <= ways.plain
        # until a number of sequences has shown its own, the nearest one's counts
        ways = self._seen[nearest(known, bits)]
        step_s = cost(round(ways.rows * sequences)) * (1 + ways.share)
        gain = ways.tokens * cost(sequences) / step_s
        every = self._FIRST_PROBE if bits not in known else self._PROBE if gain < self._CLEAR else self._SELDOM
        self._turn += 1
        return (gain >= 1) != (self._turn % every == 0)

    def note(self, sequences: int, rows: int, tokens: int, seconds: float, drafted_s: float) -> None:
        """A step gave so many tokens and took so long, and its drafts before that, 0 for one without."""
        ways = self._seen.setdefault(sequences.bit_length(), _Ways())
        if not drafted_s:
            ways.plain += 1
            return
        ways.drafted += 1
        part = max(1 - self._KEEP, 1 / ways.drafted)
        ways.tokens += part * (tokens / sequences - ways.tokens)
        ways.rows += part * (rows / sequences - ways.rows)
        ways.share += part * (drafted_s / seconds - ways.share)


def nearest(known: Iterable[int], number: int) -> int:
    """Of the known numbers the one nearest to another; the smaller of two.

    >>> nearest([1, 5], 3)
    1
    """
    return min(known, key=lambda other: (abs(other - number), other))


def choose_widths(
    proposals: Sequence[Proposal],
    num_rows: int,
    *,
    base_rows: int | None = None,
    cost: Callable[[float], float] | None = None,
    filled: Callable[[int], int] | None = None,
    spent: float = 0.0,
) -> list[int]:
    """How many tokens of each proposal are verified when `num_rows` more rows fit into the step.

    The likeliest to be accepted come first: by the product of confidences up to the token, or where some are unknown
    and count as 1 by that and the earlier token; then the earlier sequence. As many are taken as give the most tokens a
    second, by what is to be expected. Where drafts were drawn, rows are added one by one while that raises it and none
    after the first that does not: whether a token is verified never depends on a later one of its sequence, which keeps
    the choice lossless.

    Args:
        base_rows: Rows that run anyway, each of which gives a token; one a proposal by default.
        cost: Seconds of a step of so many rows; None takes all steps for equal, and so every row that fits.
        filled: Rows that really run in place of so many, all of which cost the same; by default only those asked for.
        spent: Seconds of the round that proposed, which the step's tokens have to make up for: the more it took, the
            more rows pay.

    Source: engram-dspark-vision-chat.md 2.5.

    >>> choose_widths([Proposal(ids=(1, 2, 3)), Proposal(ids=(4,))], 3)
    [2, 1]
    >>> one = Proposal(ids=(1, 2, 3, 4, 5), confidence=(0.9, 0.8, 0.5, 0.4, 0.3))
    >>> times = (1 / 100, 1 / 98, 1 / 95, 1 / 90, 1 / 85, 1 / 80)
    >>> choose_widths([one], 5, cost=lambda rows: times[int(rows) - 1])
    [3]
    >>> choose_widths([one], 5, cost=lambda rows: times[int(rows) - 1], spent=0.01)
    [4]
    >>> choose_widths([one], 5, cost=lambda rows: times[int(rows) - 1], filled=lambda rows: -(-rows // 3) * 3)
    [5]
    """
    widths = [len(proposal.ids) for proposal in proposals]
    if cost is None and sum(widths) <= num_rows:
        return widths
    # by draft, one sequence after the other: whose it is, and the probability that it is accepted
    owners: list[int] = []
    survivals: list[float] = []
    for number, (proposal, width) in enumerate(zip(proposals, widths, strict=True)):
        owners += [number] * width
        survivals += [1.0] * width if proposal.confidence is None else accumulate(proposal.confidence, mul)
    order: list[int] | range = range(len(owners))
    if any(proposal.confidence is None for proposal in proposals):
        # the earlier token first
        order = sorted(order, key=[place for width in widths for place in range(width)].__getitem__)
    order = sorted(order, key=survivals.__getitem__, reverse=True)
    taken = min(max(num_rows, 0), len(order))
    if cost is not None:
        base = len(proposals) if base_rows is None else base_rows
        drawn = any(proposal.probs for proposal in proposals)
        taken = _fastest([survivals[draft] for draft in order[:taken]], base, cost, filled, spent, drawn=drawn)
    widths = [0] * len(proposals)
    for draft in order[:taken]:
        widths[owners[draft]] += 1
    return widths


def _fastest(
    survivals: list[float],
    base: int,
    cost: Callable[[float], float],
    filled: Callable[[int], int] | None,
    spent: float,
    *,
    drawn: bool,
) -> int:
    """How many of the drafts, the likeliest first, give the most tokens a second."""
    expected = list(accumulate(survivals, initial=float(base)))
    taken = 0
    if filled is None or drawn:
        fastest = 0.0
        for count, tokens in enumerate(expected):
            speed = tokens / (spent + cost(base + count))
            if speed <= fastest:
                break
            fastest, taken = speed, count
        # what fills a step up costs nothing
        return taken if filled is None or not taken else min(filled(base + taken) - base, len(survivals))
    fastest, count = 0.0, 0
    while count <= len(survivals):
        # a step's last row, since all up to it cost the same
        rows = filled(base + count)
        count = min(rows - base, len(survivals))
        speed = expected[count] / (spent + cost(rows))
        if speed > fastest:
            fastest, taken = speed, count
        count += 1
    return taken


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
        sampled = [number for number, request in enumerate(requests) if _draws(request)]
        probs: list[list[Tensor]] = [[] for _ in requests]

        def choose(place: int, logits_AV: Tensor) -> Tensor:
            chosen_A = logits_AV.argmax(-1)
            for number in sampled:
                request = requests[number]
                if place < request.limit:
                    chosen_A[number], prob_V = draw(logits_AV[number], request.sampling, request.generator)
                    probs[number].append(prob_V)
            return chosen_A

        ids_AG, _, confidence_AG = draft.greedy(anchor_A, blocks, target.rounding, choose)
        return self._proposals(requests, ids_AG.tolist(), confidence_AG.cpu().numpy(), probs)

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
