"""Trainer: batch -> loss -> gradient -> update, and around it progress, checkpoints, time.

`train_step` is the whole of one step, top to bottom.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from cedar.checkpoint.resume import TrainState, load_newest, save_state
from cedar.config.train import TrainConfig, train_config_to_dict
from cedar.errors import CedarError, FormatError
from cedar.model.transformer import Transformer
from cedar.train import balance
from cedar.train.data import Batch, Batches, stream
from cedar.train.optim.groups import Optimizers, rule_of
from cedar.train.passes import Passes, PassSums
from cedar.train.schedule import rate_at, stage_at
from cedar.train.speed import peak_flops, trained_token_flops

# a run that cannot make one good step out of this many is over
_MOST_SKIPPED = 20
# gradient norms that the spike guard's median is taken over
_REMEMBERED_NORMS = 101


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step measured.

    Attributes:
        loss: Nats a learnt token.
        index_loss: Nats a counted row of an index group.
        index_recall: Part of the teacher's best 8 entries that the indexers' top-k holds; None where not measured.
        load: Largest over mean expert load of the worst layer.
        grad_norm: Over all gradients.
        grad_norms: Over those of each optimiser, and of the indexers apart: one that stands at 0 learns nothing.
        skipped: Why the update was left out, or an empty string.
    """

    step: int
    loss: float
    index_loss: float
    index_recall: float | None
    load: float
    grad_norm: float
    grad_norms: dict[str, float]
    rate: float
    tokens: int
    dense: bool
    skipped: str


@dataclass
class Clock:
    """Time spent training, over all commands of a run; sets the number of steps where there is a budget.

    Attributes:
        minutes: Budget of the whole run; None leaves the recipe's steps.
        stop_after: This command ends after so many minutes, the run does not.
        now: Seconds from any fixed moment.
    """

    minutes: float | None = None
    stop_after: float | None = None
    before_s: float = 0.0
    now: Callable[[], float] = time.monotonic
    started_s: float = field(init=False)
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=50))

    def __post_init__(self) -> None:
        self.started_s = self.now()

    @property
    def here_s(self) -> float:
        return self.now() - self.started_s

    @property
    def elapsed_s(self) -> float:
        return self.before_s + self.here_s

    def is_over(self) -> bool:
        over = self.minutes is not None and self.elapsed_s >= 60 * self.minutes
        return over or (self.stop_after is not None and self.here_s >= 60 * self.stop_after)

    def total_steps(self, step: int, planned: int) -> int:
        """Steps of the whole run as far as the recent speed tells."""
        if self.minutes is None or not self.recent_s:
            return planned
        left_s = max(0.0, 60 * self.minutes - self.elapsed_s)
        # the mean, not the median: dense steps and checkpoints cost what they cost
        return step + int(left_s / statistics.fmean(self.recent_s))


class Trainer:
    """One run.

    Args:
        run: Its folder: `checkpoints/`, `log.jsonl`.
        compute_dtype: bfloat16 on a GPU; the parameters are float32 masters either way.
        report: Takes each line of progress.
        watch: Takes the values of each line of the log.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Transformer,
        batches: Batches,
        run: str | Path,
        *,
        clock: Clock | None = None,
        report: Callable[[str], None] = print,
        watch: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.config, self.model, self.batches, self.run_folder = config, model, batches, Path(run)
        self.clock = clock or Clock()
        self.report, self.watch = report, watch
        self.optimizers = Optimizers(model.named_parameters(), model.config, config.optim)
        self.parameters = dict(model.named_parameters())
        self._parts = {name: "indexer" if ".indexer." in name else rule_of(name).optimizer for name in self.parameters}
        self.biases = [buffer for name, buffer in model.named_buffers() if name.endswith("ffn.gate.bias")]
        self.compute_dtype = torch.bfloat16 if model.device.type == "cuda" else torch.float32
        self.peak_flops = peak_flops(model.device)
        self.token_flops = trained_token_flops(model.config, config)
        self.passes = Passes(model, config, self.compute_dtype)
        if self.passes.captures:
            self.optimizers.capture_steps()
        self.step = 0
        self.stage = 0
        self.total_steps = config.steps
        self.tokens_seen = 0
        # facts of the runs whose weights this one began from
        self.earlier: list[dict[str, Any]] = []
        self.skipped = 0
        self.norms: deque[float] = deque(maxlen=_REMEMBERED_NORMS)
        self._stop = False

    def train_step(self, batch: Batch, *, measure_recall: bool = False) -> StepResult:
        """One update from one batch.

        The loss is that of the whole batch whatever the number of micro-batches: sums are divided by counts of
        the batch. The count of the indexers' loss is known only after the last pass; its gradients, which no
        other loss reaches, are scaled then.
        """
        config = self.config
        rate = config.optim.learning_rate * rate_at(self.step, self.total_steps, config.schedule)
        learnt = max(1, int((batch.targets_BS >= 0).sum()))
        sums = self.passes.run(batch.to(self.model.device), measure_recall=measure_recall)
        factor = config.index_loss_weight * sums.num_groups * learnt
        self._scale_index_gradients(factor / sums.totals_3[2].clamp(min=1))
        loss, index_loss, load, norms, skipped = self._check(sums, learnt)
        if not skipped:
            self.optimizers.step(rate)
            balance.update(self.biases, sums.load_LE, balance.speed_at(self.step, config.balance))
        self.passes.clear()
        self.step += 1
        self.stage = batch.stage
        self.tokens_seen += batch.ids_BS.numel()
        return StepResult(
            step=self.step,
            loss=loss,
            index_loss=index_loss,
            index_recall=None if sums.recall is None else float(sums.recall),
            load=load,
            grad_norm=_joined(norms.values()),
            grad_norms=norms,
            rate=rate,
            tokens=batch.ids_BS.numel(),
            dense=batch.dense,
            skipped=skipped,
        )

    def _scale_index_gradients(self, factor: Tensor) -> None:
        grads = [p.grad for name, p in self.parameters.items() if ".indexer." in name and p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def _check(self, sums: PassSums, learnt: int) -> tuple[float, float, float, dict[str, float], str]:
        """(loss, index loss, load, gradient norms by part, why to skip): what the host must know, in one transfer."""
        named = [(name, p.grad) for name, p in self.parameters.items() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm([grad for _, grad in named]))
        values = torch.cat([sums.totals_3, balance.spread(sums.load_LE).reshape(1), norms.float()]).tolist()
        loss_sum, index_sum, index_rows, load = values[:4]
        loss, index_loss = loss_sum / learnt, index_sum / max(1.0, index_rows)
        by_part: dict[str, list[float]] = {}
        for (name, _), value in zip(named, values[4:], strict=True):
            by_part.setdefault(self._parts[name], []).append(value)
        norm = _joined(values[4:])
        skipped = ""
        if not math.isfinite(loss):
            skipped = f"the loss is {loss}"
        elif not math.isfinite(norm):
            wrong = next(name for (name, _), value in zip(named, values[4:], strict=True) if not math.isfinite(value))
            skipped = f"the gradient of {wrong} is not finite"
        elif len(self.norms) >= _REMEMBERED_NORMS // 2:
            usual = statistics.median(self.norms)
            if norm > self.config.optim.spike_factor * usual:
                skipped = f"gradient norm {norm:.3g}, usually {usual:.3g}"
        self.skipped = self.skipped + 1 if skipped else 0
        if self.skipped >= _MOST_SKIPPED:
            raise CedarError(
                f"{_MOST_SKIPPED} steps in a row could not be taken, the last because {skipped}; "
                "lower optim.learning_rate, or resume from an earlier checkpoint"
            )
        if math.isfinite(norm):
            self.norms.append(norm)
        return loss, index_loss, load, {part: _joined(found) for part, found in by_part.items()}, skipped

    # around the step

    def run(self, probe: Callable[[], dict[str, Any]] | None = None) -> bool:
        """Train to the end of the run, of the time, or to SIGTERM, saving on the way. True if the run is complete.

        Args:
            probe: Called every `eval_every` steps; what it gives goes to the log.
        """
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        self.run_folder.mkdir(parents=True, exist_ok=True)
        pin = self.model.device.type == "cuda"
        saved = self.step
        try:
            for batch in stream(self.batches, self._keys(), workers=self.config.data.workers, pin=pin):
                start = self.clock.now()
                logs = self.step % self.config.log_every == 0
                result = self.train_step(batch, measure_recall=logs)
                # the first steps compile and capture: they say nothing of the speed to come
                if self.passes.is_warm and self.optimizers.is_warm:
                    self.clock.recent_s.append(self.clock.now() - start)
                self.total_steps = self.clock.total_steps(self.step, self.total_steps)
                if logs or result.skipped:
                    self._log(result)
                if probe is not None and self.config.eval_every and self.step % self.config.eval_every == 0:
                    self._write({"step": self.step, **probe()})
                if self.step % self.config.save_every == 0:
                    self.save()
                    saved = self.step
                if self._stop or self.clock.is_over() or self.step >= self.total_steps:
                    break
            if saved != self.step:
                self.save()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        over = self.clock.minutes is not None and self.clock.elapsed_s >= 60 * self.clock.minutes
        return self.step >= self.total_steps or over

    def _keys(self) -> Iterator[tuple[int, int]]:
        """(step, stage) of each batch to come; a stage never goes back, even where the plan's length changes."""
        step, stage = self.step, self.stage
        # with a budget of time the length is a guess: batches are made ahead of it
        while step < self.total_steps or self.clock.minutes is not None:
            stage = max(stage, stage_at(step, self.total_steps, self.config))
            yield step, stage
            step += 1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = True

    def _log(self, result: StepResult) -> None:
        seconds = statistics.fmean(self.clock.recent_s) if self.clock.recent_s else math.inf
        speed = result.tokens / seconds
        left_s = (self.total_steps - self.step) * seconds
        mfu = None if self.peak_flops is None else round(speed * self.token_flops / self.peak_flops, 5)
        stage = self.config.stages[self.stage].name
        recall = "" if result.index_recall is None else f"  recall {result.index_recall:.2f}"
        self.report(
            f"step {result.step}/{self.total_steps} {stage}{' dense' if result.dense else ''}  loss {result.loss:.3f}  "
            f"index {result.index_loss:.3f}{recall}  load {result.load:.2f}  norm {result.grad_norm:.2f}  "
            f"lr {result.rate:.1e}"
            + (f"  {speed:,.0f} tok/s" if speed else "")
            + (f"  MFU {mfu:.1%}" if speed and mfu is not None else "")
            + (f"  {_minutes(left_s)} left" if speed else "")
            + (f"  SKIPPED: {result.skipped}" if result.skipped else "")
        )
        values = {name: getattr(result, name) for name in StepResult.__slots__}
        self._write(
            {
                **values,
                "stage": stage,
                "seconds": round(self.clock.elapsed_s, 1),
                "tokens_per_s": round(speed),
                "mfu": mfu,
            }
        )

    def _write(self, values: dict[str, Any]) -> None:
        with (self.run_folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(values) + "\n")
        if self.watch is not None:
            self.watch(values)

    def save(self) -> Path:
        """Write a checkpoint. Raises CapacityError if the disk refuses; earlier ones stay."""
        random = {"torch": torch.get_rng_state()}
        if self.model.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.model.device)
        state = TrainState(
            step=self.step,
            model=self.model.state_dict(),
            optimizer=self.optimizers.state(),
            random=random,
            meta={
                "config": train_config_to_dict(self.config),
                "updates": self.optimizers.updates,
                "stage": self.stage,
                "total_steps": self.total_steps,
                "tokens_seen": self.tokens_seen,
                "earlier": self.earlier,
                "skipped": self.skipped,
                "norms": list(self.norms),
                "elapsed_s": self.clock.elapsed_s,
                "device": torch.cuda.get_device_name() if self.model.device.type == "cuda" else "a CPU",
                "tokenizer": self.batches.tasks.tokenizer.fingerprint,
            },
        )
        return save_state(self.run_folder / "checkpoints", state, keep=self.config.keep)

    def resume(self) -> bool:
        """Go on from the run's newest whole checkpoint; False if there is none.

        Raises:
            FormatError: The checkpoint belongs to another config, tokenizer or model.
        """
        state, problems = load_newest(self.run_folder / "checkpoints")
        for problem in problems:
            self.report(f"passed over a damaged checkpoint: {problem}")
        if state is None:
            return False
        # what may change between commands: how long, how often, with how many helpers
        free = ("steps", "log_every", "save_every", "keep", "eval_every", "micro_batches", "graphs", "data")
        ours, theirs = train_config_to_dict(self.config), dict(state.meta["config"])
        changed = [name for name in ours if name not in free and ours[name] != theirs.get(name)]
        if changed:
            raise FormatError(
                f"{self.run_folder} was trained with another {changed[0]} ({theirs.get(changed[0])!r}, now "
                f"{ours[changed[0]]!r}); use its own recipe, or another run folder"
            )
        if state.meta["tokenizer"] != self.batches.tasks.tokenizer.fingerprint:
            raise FormatError(f"{self.run_folder} was trained with another tokenizer; use its own data folder")
        self.model.load_state_dict(dict(state.model))
        self.optimizers.load(dict(state.optimizer), state.meta["updates"])
        torch.set_rng_state(state.random["torch"])
        if "cuda" in state.random and self.model.device.type == "cuda":
            torch.cuda.set_rng_state(state.random["cuda"], self.model.device)
        self.step, self.stage = state.step, state.meta["stage"]
        if self.clock.minutes is not None:
            self.total_steps = state.meta["total_steps"]
        self.tokens_seen, self.skipped = state.meta["tokens_seen"], state.meta["skipped"]
        self.norms.extend(state.meta["norms"])
        self.earlier = list(state.meta.get("earlier", ()))
        self.clock.before_s = state.meta["elapsed_s"]
        return True


def _joined(norms: Iterable[float]) -> float:
    """The norm of everything whose parts have these norms."""
    return math.sqrt(sum(norm * norm for norm in norms))


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
