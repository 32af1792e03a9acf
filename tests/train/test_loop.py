"""The step and the run: learning, micro-batches, gradients alive, exact resume, stops."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cedar.chat.tokenizer import PAD, train_tokenizer
from cedar.checkpoint.resume import checkpoints
from cedar.errors import CapacityError, CedarError, FormatError
from cedar.model.engram import Engram
from cedar.model.layers import RMSNorm
from cedar.train.data import Batches
from cedar.train.loop import Clock, Trainer
from cedar.train.run import new_model
from cedar.train.tasks import sample_text
from tests.train.conftest import tiny_recipe

Make = Callable[..., Trainer]
EVERYTHING = {
    "rounding": ["serving"],
    "replay_share": 0.5,
    "encoder_replay_share": 0.3,
    "mixture": {"lookup": 0.5, "pairs": 0.5},
    "lengths": [128],
}


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def test_one_batch_is_learnt_by_heart_in_200_steps(make_trainer: Make) -> None:
    trainer = make_trainer(steps=200, schedule={"warmup_steps": 20})
    batch = trainer.batches.batch(0, 0)
    losses = [trainer.train_step(replace(batch, dense=step % 2 == 0)).loss for step in range(200)]
    assert min(losses[-5:]) < 0.05
    assert losses[0] > 5


def test_nano_learns_a_language(make_trainer: Make) -> None:
    """Fresh batches: the loss falls in every window, from the vocabulary's to that of the language's few words."""
    trainer = make_trainer(
        steps=60, stage={"mixture": {"ngram": 1.0}}, schedule={"warmup_steps": 10}, optim={"learning_rate": 3e-3}
    )
    losses = [trainer.train_step(trainer.batches.batch(step, 0)).loss for step in range(60)]
    windows = [sum(losses[at : at + 12]) / 12 for at in range(0, 60, 12)]
    assert windows == sorted(windows, reverse=True)
    assert windows[-1] < 4.5 < losses[0]


@pytest.mark.slow
def test_micro_learns_one_batch_by_heart(tmp_path: Path) -> None:
    """About four minutes on an idle core."""
    words = np.random.default_rng(1).integers(97, 123, (20000, 5)).astype(np.uint8)
    text = " ".join(bytes(word).decode() for word in words)
    config = replace(tiny_recipe(steps=200, schedule={"warmup_steps": 20}), preset="micro")
    micro = train_tokenizer([sample_text(1, 2000), text], 1024)
    model = new_model(config, micro, torch.device("cpu"))
    batches = Batches(config, micro, {}, window=model.config.attention.sliding_window)
    trainer = Trainer(config, model, batches, tmp_path, report=lambda line: None)
    batch = trainer.batches.batch(0, 0)
    losses = [trainer.train_step(replace(batch, dense=step % 2 == 0)).loss for step in range(200)]
    assert min(losses[-5:]) < 0.05


def test_micro_batches_do_not_change_the_gradient(make_trainer: Make) -> None:
    def gradients(micro_batches: int) -> dict[str, torch.Tensor]:
        trainer = make_trainer(rows=4, micro_batches=micro_batches, optim={"learning_rate": 1e-30})
        found: dict[str, torch.Tensor] = {}

        def keep(rate: float) -> None:
            found.update({n: p.grad.clone() for n, p in trainer.parameters.items() if p.grad is not None})

        trainer.optimizers.step = keep  # type: ignore[method-assign]
        trainer.train_step(trainer.batches.batch(0, 0))
        return found

    # field report E01: the indexers' loss too
    whole, halves, quarters = gradients(1), gradients(2), gradients(4)
    for name, want in whole.items():
        for got in (halves[name], quarters[name]):
            assert (got - want).norm() <= 1e-5 * want.norm() + 1e-10, name


@pytest.mark.parametrize(
    ("micro_batches", "advice"), [(1, "micro_batches = 2"), (2, "micro_batches = 4"), (4, "shorter")]
)
def test_a_pass_too_large_for_the_gpu_says_what_to_change(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, micro_batches: int, advice: str
) -> None:
    trainer = make_trainer(rows=4, micro_batches=micro_batches)

    def too_large(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(trainer.model, "forward", too_large)
    with pytest.raises(CapacityError, match=advice):
        trainer.train_step(trainer.batches.batch(0, 0))


@pytest.mark.parametrize("stage", [{}, EVERYTHING], ids=["plain", "as it serves"])
def test_every_parameter_gets_a_gradient_and_moves(make_trainer: Make, stage: dict[str, object]) -> None:
    trainer = make_trainer(row_tokens=128, stage=stage, steps=4)
    before = parameters(trainer)
    alive: set[str] = set()
    step = trainer.optimizers.step

    def watch(rate: float) -> None:
        alive.update(n for n, p in trainer.parameters.items() if p.grad is not None and bool(p.grad.any()))
        step(rate)

    trainer.optimizers.step = watch  # type: ignore[method-assign]
    for number in range(3):
        trainer.train_step(trainer.batches.batch(number, 0))
    after = parameters(trainer)
    # the last layer's pre-mix is used by the head, so there is no exception but one: the window-only mixing of
    # streams that are still equal carries no signal before the first expand
    assert set(trainer.parameters) - alive == set()
    still = {name for name in trainer.parameters if torch.equal(before[name], after[name])}
    assert still == set()
    biases = [name for name in after if name.endswith("gate.bias")]
    assert all(after[name].any() for name in biases)
    assert not any(after[name].any() for name in after if name.endswith("bias_vl"))


def test_text_bias_moves_against_load(make_trainer: Make) -> None:
    trainer = make_trainer(steps=4)
    result = trainer.train_step(trainer.batches.batch(0, 0))
    assert result.load > 1
    bias = trainer.biases[0]
    # two of eight experts a row: the load cannot be even, so some bias went down and some up
    assert float(bias.min()) == pytest.approx(-0.003)
    assert float(bias.max()) == pytest.approx(0.003)


@pytest.mark.parametrize("stage", [{}, EVERYTHING], ids=["plain", "as it serves"])
def test_resume_is_exact_to_the_bit(make_trainer: Make, stage: dict[str, object]) -> None:
    shape = {"row_tokens": 128, "stage": stage, "steps": 6}
    straight = make_trainer(folder="straight", **shape)
    assert straight.run()
    first = make_trainer(folder="broken", save_every=3, **shape)
    first.config = replace(first.config, steps=6)
    first.report = lambda line: setattr(first, "_stop", first.step >= 3)
    assert not first.run()
    assert first.step == 3
    second = make_trainer(folder="broken", **shape)
    assert second.resume()
    assert second.step == 3
    assert second.run()
    assert second.step == straight.step == 6
    for name, want in parameters(straight).items():
        assert torch.equal(parameters(second)[name], want), name
    for name, want in straight.optimizers.state().items():
        assert torch.equal(second.optimizers.state()[name], want), name
    assert list(second.norms) == list(straight.norms)


def test_sigterm_saves_and_ends(make_trainer: Make) -> None:
    trainer = make_trainer(steps=10_000)
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    assert not trainer.run()
    timer.join()
    assert 0 < trainer.step < 10_000
    assert checkpoints(trainer.run_folder / "checkpoints")[0].name == f"step-{trainer.step:08d}"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_tensor_that_is_not_finite_is_named_and_nothing_changes(make_trainer: Make) -> None:
    trainer = make_trainer()
    name = "layers.3.attn.wo_b.weight"
    trainer.parameters[name].register_hook(lambda grad: grad * float("inf"))
    before = parameters(trainer)
    result = trainer.train_step(trainer.batches.batch(0, 0))
    assert name in result.skipped
    assert all(torch.equal(before[key], tensor) for key, tensor in parameters(trainer).items())
    trainer.skipped = 19
    with pytest.raises(CedarError, match=f"20 steps in a row.*{name}"):
        trainer.train_step(trainer.batches.batch(1, 0))


def test_a_spike_is_left_out(make_trainer: Make) -> None:
    trainer = make_trainer()
    trainer.norms.extend([1e-3] * 60)
    before = parameters(trainer)
    assert "usually 0.001" in trainer.train_step(trainer.batches.batch(0, 0)).skipped
    assert all(torch.equal(before[key], tensor) for key, tensor in parameters(trainer).items())


def test_a_checkpoint_of_another_recipe_is_refused(make_trainer: Make) -> None:
    make_trainer(steps=1).run()
    with pytest.raises(FormatError, match="another optim"):
        make_trainer(steps=1, optim={"learning_rate": 1e-3}).resume()
    with pytest.raises(FormatError, match="another model"):
        make_trainer(steps=1, model=["indexer.topk=8"]).resume()
    # how long and how often may change
    assert make_trainer(steps=9, save_every=2, log_every=5).resume()


class Ticks:
    """A clock that goes on by a tenth of a second whenever somebody looks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.1
        return self.seconds


def test_time_decides_the_number_of_steps(make_trainer: Make) -> None:
    trainer = make_trainer(steps=10_000, clock=Clock(minutes=20 / 60, now=Ticks()))
    assert trainer.run()
    assert trainer.step < 10_000
    lines = [json.loads(line) for line in (trainer.run_folder / "log.jsonl").read_text().splitlines()]
    # the schedule ends with the run: the last rate is a low one
    assert lines[-1]["rate"] < 0.5 * max(line["rate"] for line in lines)
    assert trainer.total_steps <= trainer.step + 1


def test_stop_after_ends_the_command_not_the_run(make_trainer: Make) -> None:
    trainer = make_trainer(steps=10_000, clock=Clock(minutes=10, stop_after=1 / 60))
    assert not trainer.run()
    again = make_trainer(steps=10_000, clock=Clock(minutes=10, stop_after=1 / 60))
    assert again.resume()
    assert again.step == trainer.step
    assert again.clock.before_s > 0.9


# field report E04: sequences too short for a pair gave no gradient, or hung
def test_samples_of_one_token_give_a_finite_step(make_trainer: Make) -> None:
    trainer = make_trainer(row_tokens=16, stage={"lengths": [16]})
    batch = trainer.batches.batch(0, 0)
    row_S = torch.arange(16, dtype=torch.int32)
    # each sample has one token and its padding: no entry of ratio 2 is ever complete before a row that reads it
    start_S = row_S - row_S % 2
    ids_BS = torch.where(row_S % 2 == 0, batch.ids_BS, trainer.batches.tasks.tokenizer.special[PAD]).int()
    alone = replace(
        batch,
        ids_BS=ids_BS,
        targets_BS=torch.where(row_S % 2 == 0, 7, -1).int().expand_as(ids_BS).contiguous(),
        segment_start_BS=start_S.expand_as(ids_BS).contiguous(),
        window_floor_BS=start_S.expand_as(ids_BS).contiguous(),
        sample_BS=torch.where(row_S % 2 == 0, row_S // 2, -1).int().expand_as(ids_BS).contiguous(),
        num_samples=8,
        dense=False,
    )
    result = trainer.train_step(alone)
    assert not result.skipped
    assert math.isfinite(result.loss)
    assert all(torch.isfinite(p).all() for p in trainer.parameters.values())


# field report E12: norms that kept a library's default
def test_every_norm_carries_the_eps_of_the_config(make_trainer: Make) -> None:
    model = make_trainer().model
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert len(norms) > 30
    eps = {module.eps for module in (*norms, *(m for m in model.modules() if isinstance(m, Engram)))}
    assert eps == {model.config.rms_norm_eps} == {1e-20}


# field report E02: what must stay in high precision did not, and groups of two dtypes came back wrong
def test_masters_and_states_are_float32_whatever_is_rounded(make_trainer: Make) -> None:
    trainer = make_trainer(stage=EVERYTHING, row_tokens=128)
    trainer.train_step(trainer.batches.batch(0, 0))
    assert {p.dtype for p in trainer.parameters.values()} == {torch.float32}
    state = trainer.optimizers.state()
    assert {t.dtype for t in state.values() if t.is_floating_point()} == {torch.float32}
    other = make_trainer(folder="other", stage=EVERYTHING, row_tokens=128)
    other.optimizers.load(state, trainer.optimizers.updates)
    for name, tensor in other.optimizers.state().items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name]), name


# field reports E14 and E08: an indexer that no loss reaches, a bias that never moves
def test_indexers_learn_only_where_their_loss_is_on(make_trainer: Make) -> None:
    for weight, learns in ((1.0, True), (0.0, False)):
        trainer = make_trainer(folder=f"run{weight}", index_loss_weight=weight)
        found: dict[str, float] = {}

        def keep(rate: float, trainer: Trainer = trainer, found: dict[str, float] = found) -> None:
            grads = {n: p.grad for n, p in trainer.parameters.items() if ".indexer." in n and p.grad is not None}
            found.update({name: float(grad.norm()) for name, grad in grads.items()})

        trainer.optimizers.step = keep  # type: ignore[method-assign]
        result = trainer.train_step(trainer.batches.batch(1, 0))
        assert len(found) > 8
        assert all((norm > 0) is learns for norm in found.values())
        # the log tells it apart from the rest
        assert set(result.grad_norms) == {"muon", "sinkhorn", "adamw", "indexer"}
        assert (result.grad_norms["indexer"] > 0) is learns
        assert result.grad_norm == pytest.approx(sum(x * x for x in result.grad_norms.values()) ** 0.5)


# field report E15: not a number after a restore
def test_losses_go_on_after_a_restore(make_trainer: Make) -> None:
    first = make_trainer(steps=10, stage=EVERYTHING, row_tokens=128)
    before = [first.train_step(first.batches.batch(step, 0)).loss for step in range(5)]
    first.save()
    second = make_trainer(steps=10, stage=EVERYTHING, row_tokens=128)
    assert second.resume()
    after = [second.train_step(second.batches.batch(step, 0)).loss for step in range(5, 10)]
    assert all(math.isfinite(loss) for loss in after)
    assert max(after) < max(before) + 0.5
