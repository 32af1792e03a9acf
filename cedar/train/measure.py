"""Losses of a trained model on samples, whole sequences at once, with any of its mechanisms switched.

B rows, S tokens of a row, T rows of all packs, L layers, E experts.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.model.transformer import Transformer
from cedar.train import losses
from cedar.train.balance import spread
from cedar.train.sample import Sample

# what a row may hold of scores against entries, in all heads, before fewer rows go at once
_MOST_SCORES = 1 << 27
# tokens after a cut whose loss replay may change (training.md 5.4)
_AFTER_A_CUT = 64


@dataclass
class Scores:
    """Nats and right guesses of learnt tokens."""

    nats: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)

    @property
    def ce(self) -> float:
        """Mean nats a token."""
        return statistics.fmean(self.nats)

    @property
    def accuracy(self) -> float:
        """Part of the tokens that were the likeliest."""
        return statistics.fmean(self.right)

    def add(self, logits_BSV: Tensor, target_BS: Tensor) -> None:
        """Count every row whose target is not -1."""
        learnt_BS = target_BS >= 0
        logits_TV, target_T = logits_BSV[learnt_BS].float(), target_BS[learnt_BS]
        self.nats += F.cross_entropy(logits_TV, target_T, reduction="none").tolist()
        self.right += (logits_TV.argmax(-1) == target_T).tolist()


def answers_only(sample: Sample) -> Sample:
    """The sample with nothing to learn but its answers."""
    learn = np.zeros_like(sample.learn)
    for start, stop in sample.answers:
        learn[start:stop] = True
    return Sample(sample.ids, learn, sample.answers)


def rows(samples: Sequence[Sample], device: torch.device) -> tuple[Tensor, Tensor]:
    """Each sample alone in a row: (ids, targets with -1 where nothing is learnt), int64 [B, S], S even."""
    width = max(len(sample.ids) for sample in samples)
    width += width % 2
    ids_BS = torch.zeros(len(samples), width, dtype=torch.int64)
    target_BS = torch.full_like(ids_BS, -1)
    for row, sample in enumerate(samples):
        ids = torch.from_numpy(sample.ids.astype(np.int64))
        ids_BS[row, : len(ids)] = ids
        target_BS[row, : len(ids) - 1] = torch.where(torch.from_numpy(sample.learn[1:]), ids[1:], -1)
    return ids_BS.to(device), target_BS.to(device)


class Meter:
    """Measures one model.

    Args:
        compute_dtype: Of activations, the model's own by default.
    """

    def __init__(self, model: Transformer, *, compute_dtype: torch.dtype | None = None) -> None:
        self.model, self.compute_dtype = model, compute_dtype

    def forward(self, ids_BS: Tensor, **mode: Any) -> Any:
        """The model's output without gradients; `mode` goes to its forward."""
        with torch.no_grad():
            return self.model(ids_BS, compute_dtype=self.compute_dtype, **mode)

    def at_once(self, length: int) -> int:
        """Samples of a length that fit one pass."""
        return max(1, min(32, _MOST_SCORES // (self.model.config.attention.num_heads * length * length)))

    def score(self, samples: Sequence[Sample], mode: Mapping[str, Any] | None = None) -> Scores:
        """Losses of the learnt tokens; `mode` goes to the model's forward."""
        scores = Scores()
        for part in self.batches(samples):
            ids_BS, target_BS = rows(part, self.model.device)
            scores.add(self.forward(ids_BS, **(mode or {})).logits_BSV, target_BS)
        return scores

    def batches(self, samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
        count = self.at_once(max(len(sample.ids) for sample in samples))
        for start in range(0, len(samples), count):
            yield samples[start : start + count]

    def indexers(self, samples: Sequence[Sample], *, best: int = 8, mode: Mapping[str, Any] | None = None) -> Indexing:
        """How well the indexers rank what dense attention looks at, and how even the experts' load is."""
        found: dict[int, list[float]] = {}
        loads: list[Tensor] = []
        topk = self.model.config.indexer.topk
        for part in self.batches(samples):
            ids_BS, _ = rows(part, self.model.device)
            output = self.forward(ids_BS, topk="all", collect=True, **(mode or {}))
            for group in output.index_groups:
                found.setdefault(group.layer, []).append(float(losses.index_recall([group], best, topk)))
            real_T = torch.where(self._real(part, ids_BS), 0, -1).flatten()
            loads.append(losses.expert_loads(output.routers, real_T))
        load_LE = torch.stack(loads).sum(0)
        by_layer = {layer: statistics.fmean(values) for layer, values in found.items()}
        return Indexing(
            recall=statistics.fmean(by_layer.values()) if by_layer else 0.0,
            recall_by_layer=by_layer,
            load=float(spread(load_LE)),
            load_by_layer=(load_LE.amax(-1) / load_LE.mean(-1)).tolist(),
        )

    def _real(self, samples: Sequence[Sample], ids_BS: Tensor) -> Tensor:
        length_B1 = torch.tensor([[len(sample.ids)] for sample in samples], device=ids_BS.device)
        return torch.arange(ids_BS.shape[1], device=ids_BS.device) < length_B1

    @contextlib.contextmanager
    def without_pool(self) -> Iterator[None]:
        """A candidate pool that holds every block, which is none."""
        config = self.model.config
        blocks = config.max_position_embeddings
        self.model.config = replace(config, indexer=replace(config.indexer, candidate_topk_blocks=blocks))
        try:
            yield
        finally:
            self.model.config = config

    def decoder_replay(self, samples: Sequence[Sample], cut: int, *, offsets: Sequence[int] = ()) -> ReplayCost:
        """What bounded decoder replay adds to the loss of the first tokens after a prompt of `cut` + offset tokens.

        Args:
            offsets: Every offset of the window by default.
        """
        window = self.model.config.attention.sliding_window

        def change(ids_BS: Tensor, at: int) -> tuple[Tensor, dict[str, Tensor]]:
            return ids_BS, {"window_floor_BS": decoder_floor(ids_BS, at, window)}

        # the prompt's last row predicts the first token
        return self._replay_cost(samples, change, cut, offsets or range(window), shift=0, before=1)

    def encoder_replay(self, samples: Sequence[Sample], cut: int, *, offsets: Sequence[int] = ()) -> ReplayCost:
        """The same where `cut` + offset tokens came from a cache and the last window of them runs again.

        The decoder's windows begin there too, as they do when such a prompt is served.
        """
        window = self.model.config.attention.sliding_window

        def change(ids_BS: Tensor, at: int) -> tuple[Tensor, dict[str, Tensor]]:
            again_BS = torch.cat([ids_BS[:, :at], ids_BS[:, at - window : at], ids_BS[:, at:]], 1)
            return again_BS, {"replay_start_BS": torch.full_like(again_BS, at)}

        return self._replay_cost(samples, change, cut, offsets or range(0, window, 2), shift=window, before=0)

    def _replay_cost(
        self,
        samples: Sequence[Sample],
        change: Callable[[Tensor, int], tuple[Tensor, dict[str, Tensor]]],
        cut: int,
        offsets: Sequence[int],
        *,
        shift: int,
        before: int,
    ) -> ReplayCost:
        """Rows from `before` the cut on are compared; a change moves those behind the cut by `shift` rows."""
        costs: dict[int, tuple[Scores, Scores]] = {offset: (Scores(), Scores()) for offset in offsets}
        for part in self.batches(samples):
            ids_BS, target_BS = rows(part, self.model.device)
            logits_BSV = self.forward(ids_BS).logits_BSV
            for offset, (exact, replayed) in costs.items():
                at = cut + offset
                after_BS = torch.full_like(target_BS, -1)
                first = at - before
                after_BS[:, first : first + _AFTER_A_CUT] = target_BS[:, first : first + _AFTER_A_CUT]
                exact.add(logits_BSV, after_BS)
                changed_BS, mode = change(ids_BS, at)
                moved_BS = F.pad(after_BS[:, first:], (first + shift, 0), value=-1)
                replayed.add(self.forward(changed_BS, **mode).logits_BSV, moved_BS)
        by_offset = {offset: replayed.ce - exact.ce for offset, (exact, replayed) in costs.items()}
        accuracy = [replayed.accuracy - exact.accuracy for exact, replayed in costs.values()]
        return ReplayCost(
            cost=statistics.fmean(by_offset.values()),
            by_offset=by_offset,
            accuracy_change=statistics.fmean(accuracy),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexing:
    """What `Meter.indexers` found.

    Attributes:
        recall: Part of the teacher's best entries that the indexers' top-k holds, over the index sources.
        load: Busiest expert over the mean, worst layer.
    """

    recall: float
    recall_by_layer: dict[int, float]
    load: float
    load_by_layer: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayCost:
    """Nats a token that replay adds to the first tokens after a cut, in the mean and by the cut's offset."""

    cost: float
    by_offset: dict[int, float]
    accuracy_change: float


def decoder_floor(ids_BS: Tensor, prompt: int, window: int) -> Tensor:
    """First row that each decoder window may see when the first `prompt` rows are a prompt."""
    first = max(0, prompt - window)
    row_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    return torch.where(row_S >= first, first, 0).expand_as(ids_BS)
