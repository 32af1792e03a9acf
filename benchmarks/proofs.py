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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

# sets the thread policy that torch reads when it loads
import cedar  # noqa: F401  isort: skip
import numpy as np
import torch
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
from cedar.train.data import Batches
from cedar.train.loop import Trainer
from cedar.train.measure import Meter, Scores, answers_only, rows
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
MIXTURE = {"ngram": 0.12, "pairs": 0.3, "mqar": 0.15, "mqar_bare": 0.15, "restate": 0.1, "lookup": 0.13, "copy": 0.05}
_HELD_OUT = 0xE7A1
_CUT = 112


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


def _two_pass_enter(
    self: Block, streams_TND: Tensor, premix_TN: Tensor, rounding: Rounding | None = None
) -> tuple[Mixes, Tensor]:
    mixes = self.hc_attn(streams_TND)
    return mixes, self.attn_norm(collapse(streams_TND, mixes.premix_TN), rounding)


def _two_pass_feed(
    self: Block, streams_TND: Tensor, premix_TN: Tensor, image_T: Tensor | None, state: AttentionState
) -> tuple[Tensor, Tensor, RouterStats]:
    """As `Block.feed`, but the sublayer's own pre-mix opens it: the streams are read twice."""
    mixes = self.hc_ffn(streams_TND)
    u_TD = self.ffn_norm(collapse(streams_TND, mixes.premix_TN), state.rounding)
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
        {"name": "A", "share": 0.4, "lengths": [32, 64], "dense_share": 0.5, **common},
        {"name": "B", "share": 0.3, "lengths": [64, 128, 256], "dense_share": 0.4, **common},
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


class Probe(Meter):
    """A trained model of an arm, as it serves, and held-out samples.

    Args:
        count: Samples of each kind.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer, arm: Arm, dtype: torch.dtype, count: int) -> None:
        super().__init__(model, compute_dtype=dtype)
        self.arm, self.count = arm, count
        self.tasks = Tasks(tokenizer, {}, window=WINDOW)

    def forward(self, ids_BS: Tensor, **mode: Any) -> Any:
        with self.arm.variant():
            return super().forward(ids_BS, **{"rounding": SERVING, **self.arm.selects(), **mode})

    def samples(self, source: str, length: int, count: int | None = None) -> list[Sample]:
        made = (
            self.tasks.maker(source)(np.random.default_rng((_HELD_OUT, length, number)), length)
            for number in range(count or self.count)
        )
        return [sample for sample in made if sample is not None]

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
        scores = self.score([answers_only(sample) for sample in self.samples("lookup", 256)], mode)
        values |= {"lookup_256_ce": scores.ce, "lookup_256_accuracy": scores.accuracy}
        values["ce"] = statistics.fmean(
            [values["ngram_excess"] + ideal, *(values[f"{n}_ce"] for n in ("mqar_256", "pairs_256", "restate_256"))]
        )
        return values

    def far(self) -> dict[str, float]:
        """Accuracy of key-value queries over lengths beyond the trained ones."""
        return {
            str(length): self.score(self.samples("mqar", length, max(2, self.count * 85 // length))).accuracy
            for length in (64, 128, 256, 512, 1024)
        }

    @contextlib.contextmanager
    def state(self, kind: type[PackState]) -> Iterator[None]:
        """Another state in place of the arm's own."""
        with mock.patch.object(self, "arm", replace(self.arm, variant=_state(kind))):
            yield

    def oracle(self, source: str, length: int) -> float:
        """Accuracy when every index source takes the teacher's top-k: what dense attention looked at."""
        scores = Scores()
        for part in self.batches(self.samples(source, length)):
            ids_BS, target_BS = rows(part, self.model.device)
            dense = self.forward(ids_BS, topk="all", collect=True)
            Oracle.masses = {group.layer: group.mass_TK for group in dense.index_groups}
            with self.state(Oracle):
                scores.add(self.forward(ids_BS).logits_BSV, target_BS)
        return scores.accuracy

    def mixed(self, sources: Sequence[str], count: int) -> list[Sample]:
        return [sample for source in sources for sample in self.samples(source, 256, count)]


def measure(model: Transformer, tokenizer: Tokenizer, name: str, dtype: torch.dtype, count: int) -> dict[str, Any]:
    """Every measurement of one arm; those that only switch something at evaluation for `base` and `no_stage_c`."""
    arm = ARMS[name]
    probe = Probe(model, tokenizer, arm, dtype, count)
    model.eval()
    result: dict[str, Any] = {
        "serving": probe.families({}),
        "unrounded": probe.families({"rounding": Rounding.none()}),
        "far": probe.far(),
        "indexer": asdict(probe.indexers(probe.mixed(("mqar", "pairs", "restate"), count))),
        "prefill_flops_per_token": sum(
            prefill_flops(model.config, 4096, "off" if name == "own_kv" else "bounded").values()
        )
        / 4096,
    }
    if name not in ("base", "no_stage_c"):
        return result
    result["rounding_off"] = {
        part: probe.families({"rounding": replace(SERVING, **dict.fromkeys(parts, False))})
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
        f"{source}_{length}_accuracy": probe.oracle(source, length)
        for source, length in (("mqar", 128), ("mqar", 256), ("pairs", 256), ("restate", 256))
    }
    with probe.state(NoPool):
        result["no_pool"] = probe.families({})
    replayed = probe.mixed(("ngram", "restate", "pairs"), max(1, count // 2))
    result["decoder_replay"] = asdict(probe.decoder_replay(replayed, _CUT))
    result["encoder_replay"] = asdict(probe.encoder_replay(replayed, _CUT))
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
