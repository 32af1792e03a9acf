"""TensorBoard is an extra: it has the log's numbers where it is installed, and is asked for by name where not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cedar.errors import ConfigError
from cedar.train.board import Board
from cedar.train.loop import Trainer


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"cedar-lm\[tensorboard\]"):
        Board(tmp_path)


def test_every_line_of_the_log_is_watched(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer = make_trainer(steps=2)
    seen: list[dict[str, object]] = []
    trainer.watch = seen.append
    trainer.run()
    lines = (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == seen
    assert [line["step"] for line in seen] == [1, 2]


def test_scalars_come_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is an extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Board(tmp_path) as board:
        board.add({"step": 3, "loss": 1.5, "stage": "dense", "dense": True, "index_recall": None})
        board.add({"step": 4, "loss": 1.25})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 1.5), (4, 1.25)]
