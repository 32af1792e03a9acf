"""Logits -> the next token.

`choose` is a pure function of logits, parameters and one uniform number, so a seeded request gets the same
tokens whatever runs beside it.

V vocabulary, K tokens kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cedar.engine.request import SamplingParams, Token


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
    """Chooses the tokens of one sequence; its random numbers depend on its seed alone."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def __call__(self, logits_V: Tensor) -> Token:
        """The next token, with log-probabilities (before temperature) if the request asked."""
        logits_V = logits_V.detach().to("cpu", torch.float32)
        uniform = float(torch.rand((), generator=self._generator, dtype=torch.float64))
        token_id = choose(logits_V, self._params, uniform)
        if self._params.logprobs is None:
            return Token(token_id)
        logprob_V = logits_V.log_softmax(0)
        top = torch.topk(logprob_V, min(self._params.logprobs, logprob_V.numel()))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return Token(token_id, float(logprob_V[token_id]), tuple(pairs))
