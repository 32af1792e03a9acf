"""What each mechanism of the architecture is worth, on a model small enough to train some dozens of times.

    python benchmarks/proofs.py train --arm base --seed 1 --out runs/proofs [--steps 1200] [--minutes 5] [--device cuda]
    python benchmarks/proofs.py list
    python benchmarks/proofs.py summarise --runs runs/proofs

`train` trains one arm and measures it: one JSON file. Arms of one seed see the same tokens in the same order and start
from the same random numbers as far as their shapes allow; every arm runs the same number of steps. `summarise` pairs
the arms by seed and writes `docs/proofs.md`, `benchmarks/results/proofs.json` and `docs/plots/proofs.png`.

Variants are made by replacing parts of the model while an arm trains: the package itself has one architecture.

Source: training.md 5.4.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

# sets the thread policy that torch reads when it loads
import cedar  # noqa: F401  isort: skip
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.chat.tokenizer import Tokenizer, train_tokenizer
from cedar.config.rounding import Rounding
from cedar.config.train import StageConfig, TrainConfig, train_config_from_dict
from cedar.kernels.indexer import topk_mask
from cedar.kernels.mhc import collapse, expand
from cedar.model import transformer
from cedar.model.block import Block
from cedar.model.mhc import HyperConnection, Mixes
from cedar.model.packs import PackState
from cedar.model.state import AttentionState, RouterStats, SharedKV
from cedar.model.transformer import Transformer
from cedar.planner.flops import prefill_flops
from cedar.train import balance, losses
from cedar.train.data import Batches
from cedar.train.loop import Trainer
from cedar.train.optim import groups
from cedar.train.run import new_model
from cedar.train.sample import Sample
from cedar.train.schedule import stage_at
from cedar.train.tasks import Tasks, sample_text

ROOT = Path(__file__).parents[1]
WINDOW = 8
SERVING = Rounding(weights=True)
# nano with a window and a top-k so short that little of a text of 256 tokens is in reach
MODEL = (f"attention.sliding_window={WINDOW}", "indexer.topk=8")
MIXTURE = {"ngram": 0.3, "pairs": 0.2, "mqar": 0.2, "restate": 0.15, "lookup": 0.1, "copy": 0.05}
_HELD_OUT = 0xE7A1
_ANSWERED = 64


# variants of the model


class WindowOnly(PackState):
    """No entry is ever selected."""

    def select(
        self, layer: int, kv_source: int, query_THI: Tensor, weight_TH: Tensor, *, pool: Tensor | None, make_pool: bool
    ) -> SharedKV:
        shared = super().select(layer, kv_source, query_THI, weight_TH, pool=pool, make_pool=make_pool)
        assert shared.selection is not None
        return SharedKV(torch.zeros_like(shared.selection), shared.pool)


class NoPool(PackState):
    """Reindex layers choose among all visible entries."""

    def select(
        self, layer: int, kv_source: int, query_THI: Tensor, weight_TH: Tensor, *, pool: Tensor | None, make_pool: bool
    ) -> SharedKV:
        shared = super().select(layer, kv_source, query_THI, weight_TH, pool=None, make_pool=False)
        return SharedKV(shared.selection)


class SourceOnly(PackState):
    """The indexers' teacher is the source layer's attention alone."""

    def attend(self, layer: int, kv_source: int | None, query_THC: Tensor, shared: SharedKV, sink_H: Tensor) -> Tensor:
        collects = self.collect
        self.collect = collects and bool(self.index_groups) and layer == self.index_groups[-1].layer
        output_THC = super().attend(layer, kv_source, query_THC, shared, sink_H)
        self.collect = collects
        return output_THC


class Oracle(PackState):
    """Every index source takes the entries that dense attention gave the most mass, whatever its indexer says."""

    masses: Mapping[int, Tensor] = {}

    def select(
        self, layer: int, kv_source: int, query_THI: Tensor, weight_TH: Tensor, *, pool: Tensor | None, make_pool: bool
    ) -> SharedKV:
        shared = super().select(layer, kv_source, query_THI, weight_TH, pool=pool, make_pool=make_pool)
        assert self.topk is not None
        mass_TE = self.masses[layer].masked_fill(~self._visible(kv_source).flatten(0, 1), -torch.inf)
        chosen_TE = topk_mask(mass_TE, self.topk)
        return SharedKV(chosen_TE.view(*self.segment_start_BS.shape, -1), shared.pool)


def _two_pass_enter(self: Block, streams_TND: Tensor, premix_TN: Tensor) -> tuple[Mixes, Tensor]:
    mixes = self.hc_attn(streams_TND)
    return mixes, self.attn_norm(collapse(streams_TND, mixes.premix_TN))


def _two_pass_feed(
    self: Block, streams_TND: Tensor, premix_TN: Tensor, image_T: Tensor | None, state: AttentionState
) -> tuple[Tensor, Tensor, RouterStats]:
    """As `Block.feed`, but the sublayer's own pre-mix opens it: the streams are read twice."""
    mixes = self.hc_ffn(streams_TND)
    u_TD = self.ffn_norm(collapse(streams_TND, mixes.premix_TN))
    y_TD, stats = self.ffn(u_TD, image_T, state.rounding)
    return expand(y_TD, streams_TND, mixes.post_TN, mixes.mixing_TNN), mixes.premix_TN, stats


def _plain(self: HyperConnection, streams_TND: Tensor) -> Mixes:
    """Stream 0 is an ordinary residual stream, the others are never read."""
    num_rows, num_streams = streams_TND.shape[:2]
    first_TN = torch.eye(num_streams, device=streams_TND.device)[0].expand(num_rows, -1)
    return Mixes(first_TN, first_TN, torch.eye(num_streams, device=streams_TND.device).expand(num_rows, -1, -1))


def _state(kind: type[PackState]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    return lambda: mock.patch.object(transformer, "PackState", kind)


@contextlib.contextmanager
def _two_pass() -> Iterator[None]:
    with mock.patch.object(Block, "enter", _two_pass_enter), mock.patch.object(Block, "feed", _two_pass_feed):
        yield


@contextlib.contextmanager
def _adam_tables() -> Iterator[None]:
    rules = tuple(replace(r, optimizer="adamw") if r.optimizer == "sinkhorn" else r for r in groups.RULES)
    with mock.patch.object(groups, "RULES", rules):
        yield


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training.

    Attributes:
        about: What is different from the base.
        model: Changes of the model's config.
        stage: A stage of the base -> that of this arm.
        variant: Replaces parts of the model, in training and in every measurement.
        training: Replaces parts while training alone.
        topk: What every measurement selects.
        frozen: Parts of parameter names that do not learn.
    """

    about: str
    model: tuple[str, ...] = ()
    stage: Callable[[StageConfig], StageConfig] = lambda stage: stage
    variant: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    training: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    topk: int | None = None
    frozen: str | None = None

    def selects(self) -> dict[str, Any]:
        return {"topk": "all"} if self.topk == 0 else {}


def _plain_stage(stage: StageConfig) -> StageConfig:
    return replace(stage, rounding=(), replay_share=0.0, encoder_replay_share=0.0)


ARMS: dict[str, Arm] = {
    "base": Arm(about="every mechanism, stages A to C"),
    "no_stage_c": Arm(
        about="the last stage without roundings, pool and replay", stage=_plain_stage, training=_state(NoPool)
    ),
    "own_kv": Arm(
        about="each decoder layer makes its own entries from its own input (and its own index keys)",
        model=(
            "attention.kv_source_layer_ids=[2,4,5,6,7]",
            "indexer.source_layer_ids=[2,4,5,6,7]",
            "indexer.candidate_source_layer_id=7",
        ),
    ),
    "no_engram": Arm(
        about="no Engram; as many parameters in wider experts", model=("engram.layer_ids=[]", "moe.inner_size=96")
    ),
    "reuse": Arm(about="the Reindex layer reuses", model=("indexer.source_layer_ids=[2,4]",)),
    "dense": Arm(about="attention over every visible entry", stage=lambda s: replace(s, dense_share=1.0), topk=0),
    "window_only": Arm(about="windows alone", variant=_state(WindowOnly)),
    "frozen_indexer": Arm(about="indexers stay as they were drawn", frozen=".indexer."),
    "source_only": Arm(about="the indexers' teacher is their own layer alone", training=_state(SourceOnly)),
    "two_pass": Arm(about="two-pass mHC: each sublayer's pre-mix from its own streams", variant=_two_pass),
    "plain_residual": Arm(
        about="one residual stream, no mHC", variant=lambda: mock.patch.object(HyperConnection, "forward", _plain)
    ),
    "adam_tables": Arm(about="AdamW for embedding, head and tables", training=_adam_tables),
}


def recipe(arm: Arm, seed: int, steps: int) -> TrainConfig:
    """Stages A (half of the batches dense), B (longer samples) and C (as it serves)."""
    common = {"mixture": MIXTURE}
    stages = [
        {"name": "A", "share": 0.5, "lengths": [64, 128], "dense_share": 0.5, **common},
        {"name": "B", "share": 0.2, "lengths": [128, 256], "dense_share": 0.25, **common},
        {
            "name": "C",
            "share": 0.3,
            "lengths": [128, 256],
            "dense_share": 0.0,
            "rounding": ["serving"],
            "replay_share": 0.5,
            "encoder_replay_share": 0.3,
            **common,
        },
    ]
    config = train_config_from_dict(
        {
            "preset": "nano",
            "model": [*MODEL, *arm.model],
            "seed": seed,
            "row_tokens": 256,
            "rows": 32,
            "steps": steps,
            "stages": stages,
            "optim": {"learning_rate": 2.5e-3},
            "schedule": {"warmup_steps": 50, "decay_from": 0.6, "decay_to": 0.95},
        }
    )
    return replace(config, stages=tuple(arm.stage(stage) for stage in config.stages))


# measurements


@dataclass
class Scores:
    """Sums over the learnt tokens of some samples."""

    nats: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)

    @property
    def ce(self) -> float:
        return statistics.fmean(self.nats)

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.right)


class Probe:
    """A trained model and held-out samples.

    Args:
        dtype: Of activations.
        count: Samples of each kind.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer, arm: Arm, dtype: torch.dtype, count: int) -> None:
        self.model, self.arm, self.dtype, self.count = model, arm, dtype, count
        self.tasks = Tasks(tokenizer, {}, window=WINDOW)

    def samples(self, source: str, length: int, count: int | None = None) -> list[Sample]:
        made = (
            self.tasks.maker(source)(np.random.default_rng((_HELD_OUT, length, number)), length)
            for number in range(count or self.count)
        )
        return [sample for sample in made if sample is not None]

    def score(self, samples: Sequence[Sample], mode: Mapping[str, Any], *, rows: int = 32) -> Scores:
        """Samples alone in their rows; `mode` goes to the model's forward."""
        scores = Scores()
        for start in range(0, len(samples), rows):
            part = samples[start : start + rows]
            ids_BS, target_BS = self.rows(part)
            self._add(scores, ids_BS, target_BS, mode)
        return scores

    def rows(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        width = max(len(sample.ids) for sample in samples)
        width += width % 2
        ids_BS = torch.zeros(len(samples), width, dtype=torch.int64)
        target_BS = torch.full_like(ids_BS, -1)
        for row, sample in enumerate(samples):
            ids = torch.from_numpy(sample.ids.astype(np.int64))
            ids_BS[row, : len(ids)] = ids
            learnt = torch.from_numpy(sample.learn[1:])
            target_BS[row, : len(ids) - 1] = torch.where(learnt, ids[1:], -1)
        return ids_BS.to(self.model.device), target_BS.to(self.model.device)

    def _add(self, scores: Scores, ids_BS: Tensor, target_BS: Tensor, mode: Mapping[str, Any]) -> None:
        with torch.no_grad(), self.arm.variant():
            given = {"rounding": SERVING, **self.arm.selects(), **mode}
            logits_BSV = self.model(ids_BS, compute_dtype=self.dtype, **given).logits_BSV
        learnt_BS = target_BS >= 0
        logits_TV, target_T = logits_BSV[learnt_BS].float(), target_BS[learnt_BS]
        scores.nats += F.cross_entropy(logits_TV, target_T, reduction="none").tolist()
        scores.right += (logits_TV.argmax(-1) == target_T).tolist()

    def families(self, mode: Mapping[str, Any]) -> dict[str, float]:
        """The numbers that most comparisons are made of."""
        values: dict[str, float] = {}
        ngram = self.samples("ngram", 256)
        ideal = statistics.fmean(x for s in ngram for x in self.tasks.language.entropy(s.ids)[1].tolist())
        values["ngram_excess"] = self.score(ngram, mode).ce - ideal
        values["ngram_entropy"] = ideal
        for source, length in (("mqar", 128), ("mqar", 256), ("pairs", 256), ("restate", 256)):
            scores = self.score(self.samples(source, length), mode)
            values |= {f"{source}_{length}_ce": scores.ce, f"{source}_{length}_accuracy": scores.accuracy}
        answers = [self._answers_only(sample) for sample in self.samples("lookup", 256)]
        scores = self.score(answers, mode)
        values |= {"lookup_256_ce": scores.ce, "lookup_256_accuracy": scores.accuracy}
        values["ce"] = statistics.fmean(
            [values["ngram_excess"] + ideal, *(values[f"{n}_ce"] for n in ("mqar_256", "pairs_256", "restate_256"))]
        )
        return values

    @staticmethod
    def _answers_only(sample: Sample) -> Sample:
        learn = np.zeros_like(sample.learn)
        for start, stop in sample.answers:
            learn[start:stop] = True
        return Sample(sample.ids, learn, sample.answers)

    def far(self, mode: Mapping[str, Any]) -> dict[str, float]:
        """Accuracy of key-value queries over lengths beyond the trained ones."""
        return {
            str(length): self.score(
                self.samples("mqar", length, max(2, self.count * 85 // length)), mode, rows=4
            ).accuracy
            for length in (64, 128, 256, 512, 1024)
        }

    @contextlib.contextmanager
    def state(self, kind: type[PackState]) -> Iterator[None]:
        """Another state in place of the arm's own."""
        with mock.patch.object(self, "arm", replace(self.arm, variant=_state(kind))):
            yield

    def oracle(self, source: str, length: int) -> Scores:
        """The teacher's top-k: what dense attention looked at, per batch."""
        scores = Scores()
        samples = self.samples(source, length)
        for start in range(0, len(samples), 32):
            ids_BS, target_BS = self.rows(samples[start : start + 32])
            with torch.no_grad():
                dense = self.model(ids_BS, compute_dtype=self.dtype, rounding=SERVING, topk="all", collect=True)
            Oracle.masses = {group.layer: group.mass_TK for group in dense.index_groups}
            with self.state(Oracle):
                self._add(scores, ids_BS, target_BS, {})
        return scores

    def indexer(self) -> dict[str, float]:
        """The indexers' recall of the teacher's best 8 in dense batches, and the experts' load."""
        found, loads = [], []
        for source in ("mqar", "pairs", "restate"):
            ids_BS, _ = self.rows(self.samples(source, 256))
            with torch.no_grad(), self.arm.variant():
                output = self.model(ids_BS, compute_dtype=self.dtype, rounding=SERVING, topk="all", collect=True)
            found.append(float(losses.index_recall(output.index_groups, 8, self.model.config.indexer.topk)))
            loads.append(losses.expert_loads(output.routers, torch.zeros_like(ids_BS.flatten())))
        return {"recall_of_8": statistics.fmean(found), "load": float(balance.spread(torch.stack(loads).sum(0)))}

    def decoder_replay(self) -> dict[str, Any]:
        """What bounded decoder replay costs the first tokens after a prompt, by the prompt's end modulo the window."""
        return self._replay_cost(
            lambda ids_BS, cut: (ids_BS, {"window_floor_BS": self._floor(ids_BS, cut)}), shift=0, step=1
        )

    def encoder_replay(self) -> dict[str, Any]:
        """The same after a cache miss: a window of rows runs again (the decoder's floor comes with it)."""

        def change(ids_BS: Tensor, cut: int) -> tuple[Tensor, dict[str, Tensor]]:
            again = torch.cat([ids_BS[:, :cut], ids_BS[:, cut - WINDOW : cut], ids_BS[:, cut:]], 1)
            return again, {"replay_start_BS": torch.full_like(again, cut)}

        return self._replay_cost(change, shift=WINDOW, step=2)

    @staticmethod
    def _floor(ids_BS: Tensor, cut: int) -> Tensor:
        row_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        return torch.where(row_S >= cut - WINDOW, cut - WINDOW, 0).expand_as(ids_BS)

    def _replay_cost(
        self, change: Callable[[Tensor, int], tuple[Tensor, dict[str, Tensor]]], *, shift: int, step: int
    ) -> dict[str, Any]:
        """Nats a token more over the first tokens from a cut on, exact against replayed."""
        costs: dict[int, list[float]] = {}
        accuracy = []
        for source in ("ngram", "restate", "pairs"):
            ids_BS, target_BS = self.rows(self.samples(source, 256, max(1, self.count // 2)))
            for offset in range(0, WINDOW, step):
                cut = 112 + offset
                mask_BS = torch.zeros_like(target_BS, dtype=torch.bool)
                mask_BS[:, cut : cut + _ANSWERED] = True
                exact, replayed = Scores(), Scores()
                self._add(exact, ids_BS, target_BS.masked_fill(~mask_BS, -1), {})
                changed_BS, mode = change(ids_BS, cut)
                moved_BS = torch.full_like(changed_BS, -1)
                moved_BS[:, cut + shift :] = target_BS[:, cut:].masked_fill(~mask_BS[:, cut:], -1)
                self._add(replayed, changed_BS, moved_BS, mode)
                costs.setdefault(offset, []).append(replayed.ce - exact.ce)
                accuracy.append(replayed.accuracy - exact.accuracy)
        means = {str(offset): statistics.fmean(values) for offset, values in costs.items()}
        return {
            "cost": statistics.fmean(means.values()),
            "by_offset": means,
            "accuracy_change": statistics.fmean(accuracy),
        }


def measure(model: Transformer, tokenizer: Tokenizer, name: str, dtype: torch.dtype, count: int) -> dict[str, Any]:
    """Every measurement of one arm; those that only switch something at evaluation for `base` and `no_stage_c`."""
    arm = ARMS[name]
    probe = Probe(model, tokenizer, arm, dtype, count)
    model.eval()
    result: dict[str, Any] = {
        "serving": probe.families({}),
        "unrounded": probe.families({"rounding": Rounding.none()}),
        "far": probe.far({}),
        "indexer": probe.indexer(),
        "prefill_flops_per_token": sum(
            prefill_flops(model.config, 4096, "off" if name == "own_kv" else "bounded").values()
        )
        / 4096,
    }
    if name not in ("base", "no_stage_c"):
        return result
    result["rounding_off"] = {
        part: probe.families({"rounding": replace(SERVING, **{p: False for p in parts})})
        for part, parts in {
            "fp4": ("main_kv", "index"),
            "main_kv": ("main_kv",),
            "window_kv": ("window_kv",),
            "activations": ("activations",),
            "weights": ("weights",),
        }.items()
    }
    result["random_selection"] = probe.families({"selection": "random"})
    result["all_entries"] = probe.families({"topk": "all"})
    result["oracle"] = {
        f"{source}_{length}_accuracy": probe.oracle(source, length).accuracy
        for source, length in (("mqar", 128), ("mqar", 256), ("pairs", 256), ("restate", 256))
    }
    with probe.state(NoPool):
        result["no_pool"] = probe.families({})
    result["decoder_replay"] = probe.decoder_replay()
    result["encoder_replay"] = probe.encoder_replay()
    compressed = model.token_map.compressed_V
    shuffled = compressed[torch.randperm(len(compressed), generator=torch.Generator().manual_seed(1))]
    with mock.patch.object(model.token_map, "compressed_V", shuffled):
        result["shuffled_engram"] = probe.families({})
    return result


# running


def train(name: str, *, seed: int, steps: int, minutes: float, out: Path, device: str, samples: int) -> Path:
    """Train and measure one arm; writes `NAME-SEED.json`. The clock stops the training, never the measurement."""
    arm = ARMS[name]
    config = recipe(arm, seed, steps)
    # one vocabulary for every seed: the tasks are part of the comparison
    tokenizer = train_tokenizer([sample_text(1, 4000)], 512)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    curve = []
    with arm.variant(), arm.training():
        model = new_model(config, tokenizer, torch.device(device))
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(arm.frozen is None or arm.frozen not in parameter_name)
        batches = Batches(config, tokenizer, {}, window=WINDOW)
        trainer = Trainer(config, model, batches, out / f"{name}-{seed}")
        while trainer.step < steps and time.monotonic() - started < 60 * minutes:
            logs = trainer.step % max(1, steps // 40) == 0
            batch = batches.batch(trainer.step, stage_at(trainer.step, steps, config))
            result = trainer.train_step(batch, measure_recall=logs)
            if logs or result.skipped:
                curve.append({k: v for k, v in ((k, getattr(result, k)) for k in _LOGGED) if v is not None})
                seconds = time.monotonic() - started
                print(f"{name}-{seed} {seconds:6.1f} s  {json.dumps(curve[-1])}", flush=True)
        state_bytes = trainer.optimizers.state_bytes()
    trained_s = time.monotonic() - started
    result_file = out / f"{name}-{seed}.json"
    values = {
        "arm": name,
        "about": arm.about,
        "seed": seed,
        "steps": trainer.step,
        "planned_steps": steps,
        "tokens": trainer.tokens_seen,
        "train_seconds": round(trained_s, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "a CPU",
        "commit": _commit(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": state_bytes,
        "recipe": asdict(config),
        "curve": curve,
        "measured": measure(model, tokenizer, name, trainer.compute_dtype, samples),
    }
    # a reader sees all of a run or nothing
    partial_file = result_file.with_suffix(".partial")
    partial_file.write_text(json.dumps(values) + "\n", encoding="utf-8")
    partial_file.rename(result_file)
    print(
        f"{name}-{seed}: trained {trained_s:.0f} s, measured {time.monotonic() - started - trained_s:.0f} s", flush=True
    )
    return result_file


_LOGGED = ("step", "loss", "index_loss", "index_recall", "load", "grad_norm", "dense", "skipped")


def _commit() -> str:
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train", help="train and measure one arm")
    one.add_argument("--arm", choices=sorted(ARMS), required=True)
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--steps", type=int, default=1200)
    one.add_argument("--minutes", type=float, default=60.0, help="stop training after so long, then measure")
    one.add_argument("--samples", type=int, default=48, help="held-out samples of each kind")
    one.add_argument("--out", type=Path, default=Path("runs/proofs"))
    one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    commands.add_parser("list", help="name every arm")
    tell = commands.add_parser("summarise", help="write docs/proofs.md and its numbers and plot")
    tell.add_argument("--runs", type=Path, default=Path("runs/proofs"))
    given = parser.parse_args()
    if given.command == "train":
        run = partial(train, given.arm, seed=given.seed, steps=given.steps, minutes=given.minutes)
        run(out=given.out, device=given.device, samples=given.samples)
    elif given.command == "list":
        for name, arm in ARMS.items():
            print(f"{name:16} {arm.about}")
    else:
        from proofs_report import summarise

        summarise(given.runs, ROOT)


if __name__ == "__main__":
    main()
