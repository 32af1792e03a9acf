"""A scripted model: what it says depends on the last token alone, and it can be made slow or made to fail."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cedar.config.presets import nano
from cedar.engine.engine import Engine
from cedar.engine.scheduler import SchedulerConfig
from cedar.model.batch import Part


class FakeState:
    def __init__(self) -> None:
        self.ids: list[int] = []

    def cache_bytes(self) -> int:
        return 10 * len(self.ids)

    def mark(self) -> int:
        return len(self.ids)

    def reset(self, mark: int) -> None:
        del self.ids[mark:]

    @property
    def oldest_kept(self) -> int:
        return 0

    def roll_back(self, num_tokens: int) -> None:
        del self.ids[num_tokens:]

    def fork(self) -> FakeState:
        other = FakeState()
        other.ids = list(self.ids)
        return other


class FakeModel:
    """After token t comes t + 1; `gate` holds every step until it is set."""

    def __init__(self) -> None:
        self.config = nano()
        self.device = torch.device("cpu")
        self.gate = threading.Event()
        self.gate.set()
        self.step_s = 0.0
        self.fail_at: int | None = None
        self.chunks: list[int] = []
        self.batches: list[int] = []

    def new_state(self, *, decoder_replay: str = "bounded") -> FakeState:
        return FakeState()

    def prefetch(self, ids: Sequence[int]) -> None:
        """It has no tables."""

    def step(self, parts: list[Part]) -> list[Tensor]:
        tokens = [part for part in parts if part.prompt_tokens is None]
        self.chunks += [len(part.ids_T) for part in parts if part.prompt_tokens is not None]
        if tokens:
            self.batches.append(len(tokens))
        logits = []
        for part in parts:
            rows_TV = self._run(part.state, part.ids_T)
            if part.prompt_tokens is not None:
                rows_TV = rows_TV[-1:] if len(part.state.ids) == part.prompt_tokens else rows_TV[:0]
            logits.append(rows_TV)
        return logits

    def _run(self, state: FakeState, ids_T: Tensor) -> Tensor:
        assert self.gate.wait(10)
        time.sleep(self.step_s)
        state.ids += ids_T.tolist()
        if self.fail_at in state.ids:
            raise RuntimeError(f"boom at {self.fail_at}")
        logits_TV = torch.zeros(len(ids_T), self.config.vocab_size)
        logits_TV[torch.arange(len(ids_T)), (ids_T + 1) % self.config.vocab_size] = 20
        return logits_TV


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def start(model: FakeModel) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def build(**options: Any) -> Engine:
        names = {field.name for field in dataclasses.fields(SchedulerConfig)} & options.keys()
        scheduling = SchedulerConfig(**{name: options.pop(name) for name in names})
        engines.append(Engine(model, scheduling=scheduling, **options))
        return engines[-1]

    yield build
    for engine in engines:
        model.gate.set()
        engine.close()
        assert not engine._thread.is_alive()
