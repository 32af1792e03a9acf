"""Logits -> the next token.

`choose` is a pure function of logits, parameters and one uniform number, so a seeded request gets the same
tokens whatever runs beside it.

V vocabulary, K tokens kept, W words of 32 bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from cedar.engine.request import Constraint, SamplingParams, Token

_DRAFT_STREAM = 0x5DEECE66D
# random numbers drawn at once
_DRAWS = 32


def choose(logits_V: Tensor, params: SamplingParams, uniform: float) -> int:
    """The token that `uniform`, in [0, 1), falls on.

    Filters apply in the order top-k, top-p, min-p, all after the temperature.
    """
    token_K, weight_K = _weights(logits_V, params)
    place = _draw(weight_K, uniform)
    return place if token_K is None else int(token_K[place])


def choose_against(
    logits_V: Tensor, params: SamplingParams, draft_id: int, draft_prob_V: Tensor, uniforms: tuple[float, float]
) -> int:
    """A token distributed as `choose` gives it, equal to the draft as often as that allows.

    With p the distribution that the parameters make of the logits and q the one that the draft was drawn from: the
    draft with probability min(1, p / q), else a token of max(p - q, 0).

    Source: engram-dspark-vision-chat.md 2.4.
    """
    token_K, weight_K = _weights(logits_V.to("cpu"), params)
    p_V = weight_K / weight_K.sum()
    if token_K is not None:
        p_V = torch.zeros(len(logits_V), dtype=p_V.dtype).scatter_(0, token_K, p_V)
    q_V = draft_prob_V.to("cpu", p_V.dtype)
    if uniforms[0] * q_V[draft_id] < p_V[draft_id]:
        return draft_id
    rest_V = (p_V - q_V).clamp(min=0)
    # p and q equal but for rounding: nothing is left over
    return _draw(rest_V if rest_V.sum() > 1e-8 else p_V, uniforms[1])


def draw(logits_V: Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[int, Tensor]:
    """(a draft's token, the distribution [V] it was drawn from), by the parameters' temperature and filters."""
    logits_V = logits_V.to("cpu", torch.float32)
    token_K, weight_K = _weights(logits_V, params)
    place = _draw(weight_K, _uniform(generator))
    prob_K = weight_K / weight_K.sum()
    if token_K is None:
        return place, prob_K
    return int(token_K[place]), torch.zeros(len(logits_V), dtype=prob_K.dtype).scatter_(0, token_K, prob_K)


def _weights(logits_V: Tensor, params: SamplingParams) -> tuple[Tensor | None, Tensor]:
    """(token ids, their weights) of what may be chosen; ids None where every token is there."""
    highest = logits_V.max()
    if not math.isfinite(highest):
        raise ArithmeticError(f"the model's logits are not finite (highest {float(highest)})")
    if params.temperature == 0:
        # the first of equals: argmax does not promise which one it takes
        return (logits_V == highest).nonzero()[0], torch.ones(1, dtype=torch.float64)
    # relative to the highest, so that no temperature overflows
    scaled_V = (logits_V.double() - highest) / params.temperature
    if not (params.top_k or params.top_p < 1 or params.min_p):
        return None, scaled_V.exp()
    scaled_K, token_K = scaled_V.sort(descending=True, stable=True)
    if params.top_k:
        scaled_K = scaled_K[: params.top_k]
    weight_K = scaled_K.exp()
    if params.top_p < 1:
        before_K = weight_K.cumsum(0) - weight_K
        weight_K = weight_K[before_K < params.top_p * weight_K.sum()]
    weight_K = weight_K[weight_K >= params.min_p * weight_K[0]]
    return token_K[: len(weight_K)], weight_K


def _draw(weight_K: Tensor, uniform: float) -> int:
    running_K = weight_K.cumsum(0)
    index = int(torch.searchsorted(running_K, uniform * running_K[-1], right=True))
    # rounding may carry the last edge to the end; never land on a token of no weight
    return min(index, int(weight_K.nonzero()[-1]))


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator, dtype=torch.float64))


class Numbers:
    """A generator's random numbers, drawn many at a time: they are the same numbers."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._drawn: list[float] = []
        self._spent = 0

    def next(self, count: int) -> list[float]:
        """The next ones; the same until some are spent."""
        stop = self._spent + count
        if stop > len(self._drawn):
            fresh = torch.rand(max(_DRAWS, count), generator=self._generator, dtype=torch.float64)
            self._drawn = self._drawn[self._spent :] + fresh.tolist()
            self._spent, stop = 0, count
        return self._drawn[self._spent : stop]

    def spend(self, count: int) -> list[float]:
        """The next ones, which do not come again."""
        numbers = self.next(count)
        self._spent += count
        return numbers


class Sampler:
    """Chooses the tokens of one sequence; its random numbers depend on its seed alone.

    Args:
        prompt_ids: What the repetition penalty counts besides the answer itself.
        constraint: Tokens that it does not allow are never chosen.
    """

    def __init__(
        self, params: SamplingParams, *, prompt_ids: Sequence[int] = (), constraint: Constraint | None = None
    ) -> None:
        self._params = params
        self._constraint = constraint
        self._counts: Counter[int] = Counter()
        self._seen = set(prompt_ids) if params.repetition_penalty != 1 else set()
        self._has_penalty = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1 or params.logit_bias
        )
        # whether a choice takes more than temperature and chance
        self.filters = bool(params.top_k or params.top_p < 1 or params.min_p)
        self._prompt_seen = frozenset(self._seen)
        self._generator, self.draft_generator = torch.Generator(), torch.Generator()
        self._numbers, self._draft_numbers = Numbers(self._generator), Numbers(self.draft_generator)
        if params.seed is None:
            self._generator.seed()
            self.draft_generator.seed()
        else:
            self._generator.manual_seed(params.seed)
            # another stream, so that a seeded answer draws the same numbers with drafts and without
            self.draft_generator.manual_seed(params.seed ^ _DRAFT_STREAM)

    @property
    def params(self) -> SamplingParams:
        return self._params

    @property
    def needs_logits(self) -> bool:
        """Whether `kernels.sampling` cannot choose for it: penalties, biases, a constraint, or log-probabilities."""
        return self._has_penalty or self._constraint is not None or self._params.logprobs is not None

    def uniforms(self, count: int) -> list[float]:
        """The random numbers of the next tokens; the same until tokens were taken. The likeliest token needs none."""
        return self._numbers.next(count) if self._params.temperature else [0.0] * count

    def draft_uniforms(self, count: int) -> list[float]:
        """Those of the next tokens that differ from drafts that were drawn; the same until tokens were taken."""
        return self._draft_numbers.next(count)

    def take(self, token_ids: Sequence[int], num_drawn: int = 0) -> list[Token]:
        """What `cedar.kernels.sampling` chose, the first of them against drafts that were drawn.

        Raises:
            ArithmeticError: It found logits that are not finite.
        """
        if min(token_ids) < 0:
            raise ArithmeticError("the model's logits are not finite")
        self._spend(len(token_ids))
        if num_drawn:
            self._draft_numbers.spend(num_drawn)
        self._note(token_ids)
        return [Token(token_id) for token_id in token_ids]

    def __call__(self, logits_V: Tensor, draft_id: int | None = None, draft_prob_V: Tensor | None = None) -> Token:
        """The next token, with log-probabilities (the model's own, before anything below) if the request asked.

        Penalties and biases come first, then the constraint, then temperature and filters.

        Args:
            draft_id: What a drafter proposed here; the token is distributed as without it.
            draft_prob_V: The distribution that the draft was drawn from, None if no chance was involved: the
                token is then the very same as without a draft.
        """
        logits_V = logits_V.detach().to("cpu", torch.float32)
        (uniform,) = self._spend(1)
        permitted_V = self._permitted(self._weighed(logits_V))
        if draft_id is None or draft_prob_V is None or self._params.temperature == 0:
            token_id = choose(permitted_V, self._params, uniform)
        else:
            (other,) = self._draft_numbers.spend(1)
            token_id = choose_against(permitted_V, self._params, draft_id, draft_prob_V, (uniform, other))
        self._note([token_id])
        if self._params.logprobs is None:
            return Token(token_id)
        logprob_V = logits_V.log_softmax(0)
        top = torch.topk(logprob_V, min(self._params.logprobs, logprob_V.numel()))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return Token(token_id, float(logprob_V[token_id]), tuple(pairs))

    def inherit(self, token_ids: Sequence[int]) -> None:
        """The answer begins with tokens that this sampler did not choose; its random numbers for them are spent."""
        self._spend(len(token_ids))
        self._note(token_ids)

    def rewind(self, token_ids: Sequence[int], constraint: Constraint | None) -> None:
        """The answer is `token_ids` again; random numbers go on, so what follows may differ from what was.

        Args:
            constraint: A fresh one, that has accepted nothing.
        """
        self._constraint = constraint
        self._counts.clear()
        self._seen = set(self._prompt_seen)
        self._note(token_ids)

    def _spend(self, count: int) -> list[float]:
        return self._numbers.spend(count) if self._params.temperature else [0.0] * count

    def _note(self, token_ids: Sequence[int]) -> None:
        if self._has_penalty:
            self._counts.update(token_ids)
            self._seen.update(token_ids)
        if self._constraint is not None:
            for token_id in token_ids:
                self._constraint.accept(token_id)

    def _weighed(self, logits_V: Tensor) -> Tensor:
        params = self._params
        if not self._has_penalty:
            return logits_V
        logits_V = logits_V.clone()
        if params.repetition_penalty != 1 and self._seen:
            seen_K = torch.tensor(sorted(self._seen))
            logit_K = logits_V[seen_K]
            logits_V[seen_K] = torch.where(
                logit_K > 0, logit_K / params.repetition_penalty, logit_K * params.repetition_penalty
            )
        if self._counts:
            token_K = torch.tensor(list(self._counts))
            count_K = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            logits_V[token_K] -= params.presence_penalty + params.frequency_penalty * count_K
        for token_id, bias in params.logit_bias:
            logits_V[token_id] += bias
        return logits_V

    def _permitted(self, logits_V: Tensor) -> Tensor:
        mask = None if self._constraint is None else self._constraint.allowed()
        if mask is None:
            return logits_V
        word_W = torch.frombuffer(bytearray(mask), dtype=torch.int32)
        bit_V = (word_W[:, None] >> torch.arange(32, dtype=torch.int32)).bitwise_and(1).flatten()[: len(logits_V)]
        return logits_V.masked_fill(bit_V == 0, -math.inf)
