"""What the training tests share: a tokenizer of nano's size and tiny recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cedar.chat.tokenizer import Tokenizer, train_tokenizer
from cedar.config.train import TrainConfig, train_config_from_dict
from cedar.train.data import Batches
from cedar.train.loop import Clock, Trainer
from cedar.train.run import new_model
from cedar.train.tasks import sample_text


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer([sample_text(1, 2000)], 512)


def tiny_recipe(**changes: Any) -> TrainConfig:
    """nano on the tasks that need no corpus: a few rows, one stage."""
    stage = {"name": "only", "share": 1.0, "mixture": {"restate": 1.0}, "lengths": [64], "dense_share": 0.5}
    values: dict[str, Any] = {
        "preset": "nano",
        "seed": 3,
        "row_tokens": 64,
        "rows": 2,
        "steps": 6,
        "save_every": 100,
        "eval_every": 0,
        "log_every": 1,
        "stages": [stage | changes.pop("stage", {})],
    }
    return train_config_from_dict(values | changes)


@pytest.fixture
def make_trainer(tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., Trainer]:
    """A trainer of a tiny recipe; its run folder is `tmp_path / folder`."""

    def make(*, folder: str = "run", clock: Clock | None = None, **changes: Any) -> Trainer:
        config = tiny_recipe(**changes)
        model = new_model(config, tokenizer, torch.device("cpu"))
        batches = Batches(config, tokenizer, {}, window=model.config.attention.sliding_window)
        return Trainer(config, model, batches, tmp_path / folder, clock=clock, report=lambda line: None)

    return make
