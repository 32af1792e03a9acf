"""Training checkpoints: whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import errno
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cedar.checkpoint import resume
from cedar.checkpoint.resume import (
    TrainState,
    checkpoints,
    load_newest,
    load_state,
    load_weights,
    save_state,
    save_weights,
)
from cedar.errors import CapacityError, FormatError


def state(step: int) -> TrainState:
    generator = torch.Generator().manual_seed(step)
    return TrainState(
        step=step,
        model={"w": torch.randn(8, 4, generator=generator), "bias": torch.full((3,), float(step))},
        optimizer={"muon/momentum/w": torch.randn(8, 4, generator=generator)},
        random={"torch": generator.get_state()},
        meta={"updates": step, "config": {"seed": 1}},
    )


def equal(one: TrainState, other: TrainState) -> bool:
    parts = ((getattr(one, name), getattr(other, name)) for name in ("model", "optimizer", "random"))
    same = all(set(a) == set(b) and all(torch.equal(a[k], b[k]) for k in a) for a, b in parts)
    return same and one.step == other.step and one.meta == other.meta


def test_what_was_saved_comes_back_and_few_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_state(tmp_path, state(step), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000030", "step-00000020"]
    newest, problems = load_newest(tmp_path)
    assert newest is not None
    assert equal(newest, state(30))
    assert problems == []
    save_state(tmp_path, state(30), keep=2)
    assert equal(load_state(tmp_path / "step-00000030"), state(30))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path, file: str, damage: str) -> None:
    for step in (1, 2):
        save_state(tmp_path, state(step))
    target = tmp_path / "step-00000002" / file
    data = target.read_bytes()
    if damage == "gone":
        target.unlink()
    elif damage == "cut":
        target.write_bytes(data[: len(data) // 2])
    else:
        middle = data.index(b'"crc32": ') + 9 if file == "state.json" else len(data) - 3
        target.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    newest, problems = load_newest(tmp_path)
    assert newest is not None
    assert newest.step == 1
    assert len(problems) == 1
    assert "step-00000002" in problems[0]


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    save_state(tmp_path, state(1))
    written = []

    def full(file: Path, data: bytes) -> None:
        if len(written) == at:
            file.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        written.append(file)
        file.write_bytes(data)

    monkeypatch.setattr(resume, "_write", full)
    with pytest.raises(CapacityError, match="the disk is full; step-00000001 is still there"):
        save_state(tmp_path, state(2))
    newest, problems = load_newest(tmp_path)
    assert newest is not None
    assert equal(newest, state(1))
    assert problems == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


# the writer is another process, killed at random moments
def test_a_writer_that_is_killed_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    code = (
        "import sys, torch, itertools\n"
        "from cedar.checkpoint.resume import TrainState, save_state\n"
        "for step in itertools.count(1):\n"
        "    tensor = {'w': torch.full((64, 1024), float(step))}\n"
        "    state = TrainState(step=step, model=tensor, optimizer=tensor, random=tensor, meta={})\n"
        "    save_state(sys.argv[1], state)\n"
        "    print(step, flush=True)\n"
    )
    chance = random.Random(1)
    for trial in range(3):
        folder = tmp_path / str(trial)
        writer = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "1\n"
        time.sleep(chance.uniform(0, 0.3))
        writer.kill()
        writer.wait()
        writer.stdout.close()
        newest, problems = load_newest(folder)
        assert problems == []
        assert newest is not None
        for part in (newest.model, newest.optimizer, newest.random):
            assert (part["w"] == newest.step).all()


def test_no_checkpoint_and_another_format(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "none") == (None, [])
    path = save_state(tmp_path, state(1))
    values = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(values | {"format": 9}))
    with pytest.raises(FormatError, match="has format 9"):
        load_state(path)


def test_weights_alone_travel_in_shards(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.w": torch.randn(64, 64) for i in range(5)} | {"bias": torch.tensor([1 / 3, 1e-9])}
    files = save_weights(tmp_path, tensors, shard_bytes=3 * 64 * 64 * 2)
    assert [file.name for file in files] == [f"weights-0000{i}-of-00002.safetensors" for i in (1, 2)]
    back = load_weights(tmp_path)
    assert torch.equal(back["bias"], tensors["bias"])
    assert torch.equal(back["layers.3.w"], tensors["layers.3.w"].bfloat16().float())
    files[0].unlink()
    with pytest.raises(FormatError, match="holds 1 weight shards, expected 2"):
        load_weights(tmp_path)
