"""The step and the run: learning, micro-batches, gradients alive, exact resume, stops."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cedar.checkpoint.resume import checkpoints
from cedar.errors import CedarError, FormatError
from cedar.train.loop import Clock, Trainer

Make = Callable[..., Trainer]
EVERYTHING = {"rounding": ["serving"], "replay_share": 0.5, "mixture": {"lookup": 0.5, "pairs": 0.5}, "lengths": [128]}


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def test_one_batch_is_learnt_by_heart_in_200_steps(make_trainer: Make) -> None:
    trainer = make_trainer(steps=200, schedule={"warmup_steps": 20})
    batch = trainer.batches.batch(0, 0)
    losses = [trainer.train_step(replace(batch, dense=step % 2 == 0)).loss for step in range(200)]
    assert min(losses[-5:]) < 0.05
    assert losses[0] > 5


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
            assert (got - want).norm() <= 1e-4 * want.norm() + 1e-9, name


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
