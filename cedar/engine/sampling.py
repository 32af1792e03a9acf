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

# random numbers drawn at once
_DRAWS = 32


def choose(logits_V: Tensor, params: SamplingParams, uniform: float) -> int:
    """The token that `uniform`, in [0, 1), falls on.

    Filters apply in the order top-k, top-p, min-p, all after the temperature.
    """
    highest = logits_V.max()
    if not math.isfinite(highest):
        raise ArithmeticError(f"the model's logits are not finite (highest {float(highest)})")
    if params.temperature == 0:
        # the first of equals: argmax does not promise which one it takes
        return int((logits_V == highest).nonzero()[0])
    # relative to the highest, so that no temperature overflows
    scaled_V = (logits_V.double() - highest) / params.temperature
    if not (params.top_k or params.top_p < 1 or params.min_p):
        return _draw(scaled_V.exp(), uniform)
    scaled_K, token_K = scaled_V.sort(descending=True, stable=True)
    if params.top_k:
        scaled_K = scaled_K[: params.top_k]
    weight_K = scaled_K.exp()
    if params.top_p < 1:
        before_K = weight_K.cumsum(0) - weight_K
        weight_K = weight_K[before_K < params.top_p * weight_K.sum()]
    weight_K = weight_K[weight_K >= params.min_p * weight_K[0]]
    return int(token_K[_draw(weight_K, uniform)])


def _draw(weight_K: Tensor, uniform: float) -> int:
    running_K = weight_K.cumsum(0)
    index = int(torch.searchsorted(running_K, uniform * running_K[-1], right=True))
    # rounding may carry the last edge to the end; never land on a token of no weight
    return min(index, int(weight_K.nonzero()[-1]))


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
        # the next random numbers, last first: drawn many at a time, they are the same numbers
        self._draws: list[float] = []
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    @property
    def params(self) -> SamplingParams:
        return self._params

    @property
    def needs_logits(self) -> bool:
        """Whether `kernels.sampling` cannot choose for it: penalties, biases, a constraint, or log-probabilities."""
        return self._has_penalty or self._constraint is not None or self._params.logprobs is not None

    def uniform(self) -> float:
        """The random number of the next token; the same until a token was taken."""
        if not self._draws:
            self._draws = torch.rand(_DRAWS, generator=self._generator, dtype=torch.float64).tolist()[::-1]
        return self._draws[-1]

    def take(self, token_id: int) -> Token:
        """What `cedar.kernels.sampling.choose_rows` chose.

        Raises:
            ArithmeticError: It found logits that are not finite.
        """
        if token_id < 0:
            raise ArithmeticError("the model's logits are not finite")
        self.uniform()
        self._draws.pop()
        return Token(token_id)

    def __call__(self, logits_V: Tensor) -> Token:
        """The next token, with log-probabilities (the model's own, before anything below) if the request asked.

        Penalties and biases come first, then the constraint, then temperature and filters.
        """
        logits_V = logits_V.detach().to("cpu", torch.float32)
        token_id = choose(self._permitted(self._weighed(logits_V)), self._params, self.uniform())
        self._draws.pop()
        if self._has_penalty:
            self._counts[token_id] += 1
            self._seen.add(token_id)
        if self._constraint is not None:
            self._constraint.accept(token_id)
        if self._params.logprobs is None:
            return Token(token_id)
        logprob_V = logits_V.log_softmax(0)
        top = torch.topk(logprob_V, min(self._params.logprobs, logprob_V.numel()))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return Token(token_id, float(logprob_V[token_id]), tuple(pairs))

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
