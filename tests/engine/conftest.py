"""A scripted model: what it says depends on the last token alone, and it can be made slow or made to fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from cedar.config.presets import nano
from cedar.engine.engine import Engine


class FakeState:
    def __init__(self) -> None:
        self.ids: list[int] = []

    def cache_bytes(self) -> int:
        return 10 * len(self.ids)

    def mark(self) -> int:
        return len(self.ids)

    def reset(self, mark: int) -> None:
        del self.ids[mark:]


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

    def prefill(self, state: FakeState, ids_T: Tensor, *, prompt_tokens: int, last_only: bool) -> Tensor:
        assert last_only == (len(state.ids) + len(ids_T) == prompt_tokens)
        self.chunks.append(len(ids_T))
        logits_TV = self._run(state, ids_T)
        return logits_TV[-1:] if last_only else logits_TV[:0]

    def decode(self, state: FakeState, ids_T: Tensor) -> Tensor:
        return self._run(state, ids_T)

    def decode_many(self, states: list[FakeState], ids: list[Tensor]) -> list[Tensor]:
        self.batches.append(len(states))
        return [self._run(state, part) for state, part in zip(states, ids, strict=True)]

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

    def build(**options: int) -> Engine:
        engines.append(Engine(model, **options))
        return engines[-1]

    yield build
    for engine in engines:
        model.gate.set()
        engine.close()
        assert not engine._thread.is_alive()
