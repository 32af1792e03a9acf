"""TrainConfig: everything that decides a training run, from a TOML recipe and `--set a.b=c`.

Steps are planned, not counted by hand: a stage takes a share of the run, so that one recipe serves 200
steps on a laptop and 5,000 on a GPU, or a time budget whose number of steps is measured on the way.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cedar.config.load import build, override
from cedar.config.rounding import Rounding
from cedar.errors import ConfigError


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the tokens come from.

    Attributes:
        folder: What `cedar train prepare` wrote: tokenizer.json and one folder a corpus.
        workers: Processes that build batches ahead; 0 builds them in the training process.
        held_out_names: One in this many name pairs of the lookup tasks is kept for the evaluation.
    """

    folder: str = "runs/data"
    workers: int = 0
    held_out_names: int = 8

    def __post_init__(self) -> None:
        _require(self.workers >= 0, f"data.workers is {self.workers}, expected 0 or more")
        _require(self.held_out_names >= 2, f"data.held_out_names is {self.held_out_names}, expected at least 2")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """The three optimisers (training.md 2). Rates are those of the flat part of the schedule.

    Attributes:
        learning_rate: One rate for all three: Muon and Sinkhorn updates have a fixed RMS.
        update_rms: RMS of one Muon or Sinkhorn update at rate 1.
        engram_rate: The Engram tables' rate over the others'.
        sinkhorn_mode: `touched` leaves table rows alone that the batch did not read; `paper` does not.
        clip_norm: Gradient norm of the AdamW group.
        spike_factor: A step whose gradient norm is above this many running medians is left out.
    """

    learning_rate: float = 2e-3
    momentum: float = 0.95
    update_rms: float = 0.18
    weight_decay: float = 0.1
    engram_rate: float = 3.0
    sinkhorn_rounds: int = 11
    sinkhorn_mode: Literal["paper", "touched"] = "touched"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-20
    clip_norm: float = 1.0
    spike_factor: float = 10.0

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, f"optim.learning_rate is {self.learning_rate}, expected a positive number")
        for name in ("momentum", "beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optim.{name} is {getattr(self, name)}, expected 0 <= x < 1")
        _require(
            self.sinkhorn_rounds % 2 == 1,
            f"optim.sinkhorn_rounds is {self.sinkhorn_rounds}, expected an odd number: the last step is on rows",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate over the run, as shares of it: warm up, stay, fall on a cosine, stay low.

    Source: training.md 2.4.
    """

    warmup_steps: int = 100
    warmup_share: float = 0.02
    decay_from: float = 0.6
    decay_to: float = 0.9
    final_rate: float = 0.1

    def __post_init__(self) -> None:
        _require(
            0 <= self.decay_from <= self.decay_to <= 1,
            f"schedule.decay_from is {self.decay_from} and decay_to {self.decay_to}, expected 0 <= from <= to <= 1",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig:
    """Expert load: the selection bias and the sequence-wise loss (training.md 1.9)."""

    first_speed: float = 0.003
    first_steps: int = 500
    speed: float = 0.001
    loss_weight: float = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """A part of the run with its own data, lengths and roundings.

    Attributes:
        share: Part of the run's steps; the shares of all stages sum to 1.
        mixture: Weight of each source, by tokens.
        lengths: Sample lengths, drawn evenly; none is above the row.
        dense_share: Part of the batches whose attention sees every visible entry. A sparse model of a
            small top-k learns what to select only from rows that saw all (training.md 1.4).
        rounding: Which of the model's own roundings are on: any of activations, window_kv, main_kv,
            index, weights; `serving` stands for all five.
        replay_share: Part of the samples trained as bounded decoder replay leaves them: rows before the
            last window of a prompt are not learnt from, and not seen by the decoder's windows.
        encoder_replay_share: Part of the samples trained as a cache miss leaves them: a window of rows is run
            again at a random place, and what follows sees no window key before it (training.md 1.10.3).
    """

    name: str
    share: float
    mixture: dict[str, float]
    lengths: tuple[int, ...]
    dense_share: float = 0.5
    rounding: tuple[str, ...] = ()
    replay_share: float = 0.0
    encoder_replay_share: float = 0.0

    def __post_init__(self) -> None:
        _require(self.share > 0, f"stage {self.name!r}: share is {self.share}, expected a positive number")
        _require(bool(self.lengths), f"stage {self.name!r}: lengths is empty, expected at least one sample length")
        _require(
            all(length >= 16 and length % 2 == 0 for length in self.lengths),
            f"stage {self.name!r}: lengths are {list(self.lengths)}, expected even numbers of at least 16",
        )
        _require(
            bool(self.mixture) and all(weight > 0 for weight in self.mixture.values()),
            f"stage {self.name!r}: mixture is {self.mixture}, expected a positive weight for each source",
        )
        for name in ("dense_share", "replay_share", "encoder_replay_share"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"stage {self.name!r}: {name} is {value}, expected 0..1")
        self.roundings()

    def roundings(self) -> Rounding:
        """The switches that `rounding` names.

        Raises:
            ConfigError: A name is not one of the switches.
        """
        known = set(Rounding.__dataclass_fields__)
        names = known if "serving" in self.rounding else set(self.rounding)
        _require(
            names <= known,
            f"stage {self.name!r}: rounding names {sorted(names - known)}, expected some of {sorted(known)} or serving",
        )
        return Rounding(**{name: name in names for name in known})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One run.

    Attributes:
        preset: The model's shape; `model` overrides parts of it (`indexer.topk=8`).
        row_tokens: Length of a packed row.
        rows: Rows of one step, over all its micro-batches.
        micro_batches: Passes of a step; only memory depends on it, the gradient does not.
        graphs: On a GPU, capture each kind of pass once and replay it; off starts every kernel anew.
        steps: Length of the run; a time budget replaces it.
        index_loss_weight: Of the indexer's KL; its inputs are detached, so 1 is safe (training.md 1.3).
        save_every: Steps between checkpoints; `keep` of them stay.
        eval_every: Steps between the small recall probes; 0 for none.
    """

    preset: str
    seed: int
    row_tokens: int
    rows: int
    steps: int
    stages: tuple[StageConfig, ...]
    model: tuple[str, ...] = ()
    micro_batches: int = 1
    graphs: bool = True
    index_loss_weight: float = 1.0
    log_every: int = 10
    save_every: int = 500
    keep: int = 2
    eval_every: int = 500
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)

    def __post_init__(self) -> None:
        for name in ("row_tokens", "rows", "micro_batches", "steps", "log_every", "save_every", "keep"):
            _require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}, expected a positive number")
        _require(self.row_tokens % 2 == 0, f"row_tokens is {self.row_tokens}, expected an even number")
        _require(
            self.rows % self.micro_batches == 0,
            f"rows is {self.rows}, expected a multiple of micro_batches {self.micro_batches}",
        )
        _require(bool(self.stages), "stages is empty, expected at least one [[stages]] table")
        total = sum(stage.share for stage in self.stages)
        _require(abs(total - 1) < 1e-6, f"the stages' shares sum to {total}, expected 1")
        for stage in self.stages:
            _require(
                max(stage.lengths) <= self.row_tokens,
                f"stage {stage.name!r}: a length of {max(stage.lengths)} does not fit a row of {self.row_tokens}",
            )

    @property
    def trained_length(self) -> int:
        """The longest sample the run trains on."""
        return max(length for stage in self.stages for length in stage.lengths)


def load_train_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """A recipe with `--set a.b=c` applied; a stage is set by name, `stages.sparse.dense_share=0.2`.

    Raises:
        ConfigError: No such file, not TOML, or a field that is unknown (the nearest is named), missing,
            wrongly typed or out of range.
    """
    file = Path(path)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {file}: {error.strerror}; expected a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    try:
        config = train_config_from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return override_train(config, overrides)


def train_config_from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """A TrainConfig from a recipe's tables, or from `train_config_to_dict`. Raises ConfigError."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name == "stages":
            _require(
                isinstance(value, (list, tuple)) and all(isinstance(stage, Mapping) for stage in value),
                "stages is no list of tables, expected [[stages]]",
            )
            flat[name] = [build(StageConfig, stage) for stage in value]
        elif isinstance(value, Mapping):
            flat.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    return build(TrainConfig, flat)


def override_train(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """`config` with assignments applied; `stages.NAME.field=value` changes one stage."""
    stages = {stage.name: stage for stage in config.stages}
    rest = []
    for assignment in overrides:
        head, _, tail = assignment.partition(".")
        name, _, inner = tail.partition(".")
        if head != "stages":
            rest.append(assignment)
        elif name not in stages:
            raise ConfigError(f"--set {assignment!r}: no stage is called {name!r}; there are {', '.join(stages)}")
        else:
            stages[name] = override(stages[name], [inner])
    values = asdict(override(config, rest))
    values["stages"] = [asdict(stage) for stage in stages.values()]
    return train_config_from_dict(values)


def train_config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """Plain JSON values; `train_config_from_dict` reads them back."""
    return json.loads(json.dumps(asdict(config)))
