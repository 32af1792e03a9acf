"""Forward and backward of a micro-batch: the losses' sums, and gradients of the whole step's mean.

On a GPU the pass is captured once for each kind of batch and replayed: a small model's step is some ten
thousand kernels, and starting them one by one takes several times as long as running them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cedar.config.train import TrainConfig
from cedar.errors import CapacityError
from cedar.model.transformer import Transformer
from cedar.train import losses
from cedar.train.data import Batch

# the teacher's best entries that indexer recall is measured on
_BEST = 8
# passes before a capture: they compile kernels and make the libraries' buffers
_WARM_UP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSums:
    """What one pass measured; tensors on the model's device.

    Attributes:
        totals_3: Summed nats of the next token, summed indexer divergence, rows counted in the second.
        load_LE: Rows each expert of each layer got.
        recall: The indexers' recall, a scalar; None unless asked for.
        num_groups: Index groups of the model.
    """

    totals_3: Tensor
    load_LE: Tensor
    recall: Tensor | None
    num_groups: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Captured:
    graph: Any
    part: Batch
    learnt: Tensor
    samples: Tensor
    sums: PassSums


class Passes:
    """Runs micro-batches of one model; gradients add up in its parameters until `clear`.

    Args:
        compute_dtype: Of activations.

    Attributes:
        is_warm: The latest step compiled and captured nothing.
    """

    def __init__(self, model: Transformer, config: TrainConfig, compute_dtype: torch.dtype) -> None:
        self.model, self.config, self.compute_dtype = model, config, compute_dtype
        self.captures = config.graphs and model.device.type == "cuda"
        self._captured: dict[tuple[int, bool, bool], _Captured] = {}
        self._pool: Any = None
        self.is_warm = False

    def run(self, batch: Batch, *, measure_recall: bool = False) -> PassSums:
        """All micro-batches of a step. The loss is that of the whole batch whatever their number.

        Args:
            batch: On the model's device.

        Raises:
            CapacityError: The GPU's memory does not hold a pass.
        """
        try:
            return self._run(batch, measure_recall)
        except torch.OutOfMemoryError as error:
            rows = self.config.rows // self.config.micro_batches
            more = next(
                (n for n in range(self.config.micro_batches + 1, self.config.rows + 1) if not self.config.rows % n), 0
            )
            advice = (
                f"set micro_batches = {more}, which changes no gradient" if more else "use shorter rows (row_tokens)"
            )
            raise CapacityError(
                f"a pass of {rows} rows of {self.config.row_tokens} tokens does not fit the GPU's memory: {advice}"
            ) from error

    def _run(self, batch: Batch, measure_recall: bool) -> PassSums:
        micro_rows = self.config.rows // self.config.micro_batches
        learnt = (batch.targets_BS >= 0).sum().clamp(min=1).float()
        samples = torch.full((), float(batch.num_samples), device=learnt.device)
        measure = measure_recall and batch.dense
        key = (batch.stage, batch.dense, measure)
        self.is_warm = not self.captures or key in self._captured
        if not self.is_warm:
            self._captured[key] = self._capture(batch.rows(0, micro_rows), learnt, samples, measure)
        sums: PassSums | None = None
        for start in range(0, self.config.rows, micro_rows):
            part = batch.rows(start, start + micro_rows)
            if self.captures:
                new = self._replay(self._captured[key], part, learnt, samples)
            else:
                new = self._pass(part, learnt, samples, batch.num_samples, measure)
            sums = new if sums is None else _added(sums, new)
        assert sums is not None
        return sums

    def clear(self) -> None:
        """Forget the gradients. A captured pass keeps its buffers."""
        if not self._captured:
            self.model.zero_grad(set_to_none=True)
            return
        torch._foreach_zero_([p.grad for p in self.model.parameters() if p.grad is not None])

    def _pass(self, part: Batch, learnt: Tensor, samples: Tensor, most_samples: int, measure: bool) -> PassSums:
        """One forward and backward; the indexers' gradients are of a sum, which the loop divides."""
        stage = self.config.stages[part.stage]
        output = self.model(
            part.ids_BS.long(),
            segment_start_BS=part.segment_start_BS.long(),
            window_floor_BS=part.window_floor_BS.long() if stage.replay_share else None,
            replay_start_BS=part.replay_start_BS.long() if stage.encoder_replay_share else None,
            rounding=stage.roundings(),
            topk="all" if part.dense else None,
            collect=True,
            compute_dtype=self.compute_dtype,
        )
        loss_sum, _ = losses.next_token(output.logits_BSV.flatten(0, 1), part.targets_BS.long().flatten())
        index_sum, index_rows = losses.index_divergence(output.index_groups)
        sample_T = part.sample_BS.long().flatten()
        balance_sum, _ = losses.sequence_balance(output.routers, sample_T, most_samples)
        balance_loss = self.config.balance.loss_weight * balance_sum / samples
        (loss_sum / learnt + index_sum / learnt + balance_loss).backward()
        recall = None
        if measure:
            recall = losses.index_recall(output.index_groups, _BEST, self.model.config.indexer.topk)
        return PassSums(
            totals_3=torch.stack([loss_sum, index_sum, index_rows.float()]).detach(),
            load_LE=losses.expert_loads(output.routers, sample_T),
            recall=recall,
            num_groups=len(output.index_groups),
        )

    def _capture(self, part: Batch, learnt: Tensor, samples: Tensor, measure: bool) -> _Captured:
        """A graph of one pass over buffers of its own; leaves the gradients at zero."""
        part, learnt, samples = part.each(Tensor.clone), learnt.clone(), samples.clone()
        # the graph's sizes are fixed: as many samples as a batch can have, the shortest has two rows
        most_samples = self.config.rows * self.config.row_tokens // 2
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._pass(part, learnt, samples, most_samples, measure)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            sums = self._pass(part, learnt, samples, most_samples, measure)
        self._pool = graph.pool()
        torch._foreach_zero_([p.grad for p in self.model.parameters() if p.grad is not None])
        return _Captured(graph=graph, part=part, learnt=learnt, samples=samples, sums=sums)

    def _replay(self, captured: _Captured, part: Batch, learnt: Tensor, samples: Tensor) -> PassSums:
        captured.part.copy_(part)
        captured.learnt.copy_(learnt)
        captured.samples.copy_(samples)
        captured.graph.replay()
        sums = captured.sums
        # the next replay writes into the same buffers
        return PassSums(
            totals_3=sums.totals_3.clone(),
            load_LE=sums.load_LE.clone(),
            recall=None if sums.recall is None else sums.recall.clone(),
            num_groups=sums.num_groups,
        )


def _added(first: PassSums, second: PassSums) -> PassSums:
    """Sums of both; recall stays that of the first micro-batch."""
    return PassSums(
        totals_3=first.totals_3 + second.totals_3,
        load_LE=first.load_LE + second.load_LE,
        recall=first.recall,
        num_groups=first.num_groups,
    )
