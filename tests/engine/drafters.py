"""Drafters that follow a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cedar.engine.speculate import DraftRequest, Proposal


class Scripted:
    """Proposes what a function says of the tokens so far: the first `right` as it says, the others off by one.

    Args:
        sampled: Draw each token from a distribution that favours what the function says.
        limits: Filled with the limit of each request.
    """

    def __init__(
        self,
        follow: Callable[[Sequence[int]], int],
        *,
        width: int,
        right: int,
        vocab_size: int = 512,
        sampled: bool = False,
        limits: list[int] | None = None,
    ) -> None:
        self.follow, self.width, self.right = follow, width, right
        self.vocab_size, self.sampled, self.limits = vocab_size, sampled, limits

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if self.limits is not None:
            self.limits += [request.limit for request in requests]
        return [self._one(request) for request in requests]

    def _one(self, request: DraftRequest) -> Proposal:
        tokens, ids, probs = list(request.tokens), [], []
        for place in range(min(self.width, request.limit)):
            token_id = (self.follow(tokens) + (place >= self.right)) % self.vocab_size
            if self.sampled:
                prob_V = torch.full((self.vocab_size,), 0.3 / (self.vocab_size - 1))
                prob_V[token_id] = 0.7
                token_id = int(torch.multinomial(prob_V, 1, generator=request.generator))
                probs.append(prob_V)
            ids.append(token_id)
            tokens.append(token_id)
        return Proposal(ids=tuple(ids), probs=tuple(probs) if self.sampled else None)
