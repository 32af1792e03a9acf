"""Servers in this process: one over a random nano, and one whose engine follows a script."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cedar.cache.turns import ReplayMap
from cedar.config.serve import ServeConfig
from cedar.engine.load import ModelFiles, open_model, start_engine
from cedar.engine.metrics import Metrics
from cedar.server.run import _Server, uvicorn_config
from cedar.server.service import Service


@pytest.fixture(scope="session")
def files(model_dir: Path) -> ModelFiles:
    return open_model(model_dir)


class Running:
    """A server in a thread of this process."""

    def __init__(self, files: ModelFiles, config: ServeConfig, engine: Any) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.engine = engine
        self._files, self._config = files, config
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._ready.wait(10)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.service = Service(self._files, self._config)
        if self.engine is not None:
            self.service.ready(self.engine)
        self.server = _Server(uvicorn_config(self.service))
        self.loop.call_later(0.05, self._ready.set)
        await self.server.serve(sockets=[self.listener])

    def call(self, function: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        def end() -> None:
            self.service.stop()
            self.server.should_exit = True

        self.call(end)
        self._thread.join(10)
        assert not self._thread.is_alive()


def run_server(files: ModelFiles, **limits: Any) -> Iterator[Running]:
    """A server of the real engine."""
    config = ServeConfig(**limits)
    running = Running(files, config, start_engine(files, config))
    yield running
    running.stop()
    running.engine.close()


@pytest.fixture(scope="session")
def server(files: ModelFiles) -> Iterator[Running]:
    """One server of the real engine for all tests that leave it as it was."""
    yield from run_server(files, max_context=1024, max_body_bytes=200_000, max_step_tokens=64)


@pytest.fixture(scope="session")
def roomy(files: ModelFiles) -> Iterator[Running]:
    """The same with room for the prompts of tools, in a vocabulary that is nearly letters."""
    yield from run_server(files, max_context=8192, max_step_tokens=512)


@pytest.fixture(scope="session")
def start() -> Callable[..., Iterator[Running]]:
    """Makes servers with other limits."""
    return run_server


class ScriptedEngine:
    """Says what it is told, when it is told: `events` of (seconds to wait, event).

    `cancelled` belongs to the latest request.
    """

    def __init__(self, events: list[tuple[float, Any]]) -> None:
        self.events = events
        self.cancelled = threading.Event()
        self.metrics = Metrics()
        self.numerics = "scripted"
        self.requests: list[Any] = []

    def submit(self, request: Any, on_event: Callable[[Any], None]) -> Any:
        from cedar.engine.request import Finished

        cancelled = self.cancelled = threading.Event()
        self.requests.append(request)
        events = self.events

        def say() -> None:
            for delay, event in events:
                if cancelled.wait(delay):
                    on_event(Finished(reason="cancelled", prompt_tokens=len(request.prompt_ids)))
                    return
                on_event(event)

        threading.Thread(target=say, daemon=True).start()
        return SimpleNamespace(cancel=cancelled.set)

    def memory_stats(self) -> dict[str, float]:
        """No table is on disk."""
        return {"cached_rows": 0, "read_rows": 0, "stall_s": 0.0}

    def ask_cache(self, question: Callable[[Any], Any]) -> Future[Any]:
        """An empty cache, whatever the question."""
        asked: Future[Any] = Future()
        asked.set_result(
            {"pages": 4, "free_pages": 4, "tree_pages": 0, "snapshots": 0, "snapshot_bytes": 0, "disk": {}}
        )
        return asked

    def close(self, timeout_s: float = 0) -> None:
        self.cancelled.set()


def markup(files: ModelFiles, text: str) -> list[int]:
    """Token ids of what a model would say: special tokens where their names stand, plain text between."""
    special = files.tokenizer.special
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    return [i for part in parts for i in ([special[part]] if part in special else files.tokenizer.encode(part))]


class Actor(ScriptedEngine):
    """A stand-in model: answers its n-th request with the n-th of its lines, the last one for ever."""

    def __init__(self, files: ModelFiles, lines: Sequence[str], *, token_s: float = 0.0) -> None:
        super().__init__([])
        self._files, self._lines, self._token_s = files, lines, token_s
        self.cache = SimpleNamespace(turns=ReplayMap(files.tokenizer, b"actor"))
        self._lock = threading.Lock()

    def submit(self, request: Any, on_event: Callable[[Any], None]) -> Any:
        from cedar.engine.request import Finished, Token

        with self._lock:
            line = self._lines[min(len(self.requests), len(self._lines) - 1)]
            ids = markup(self._files, line)
            cut = ids[: request.sampling.max_tokens]
            self.events = [(self._token_s, Token(i)) for i in cut]
            end = Finished(
                reason="stop" if len(cut) == len(ids) else "length",
                prompt_tokens=len(request.prompt_ids),
                completion_tokens=len(cut),
            )
            self.events.append((0, end))
            return super().submit(request, on_event)

    def prompt(self, number: int = -1) -> str:
        """The text of a prompt it was given."""
        return self._files.tokenizer.decode(self.requests[number].prompt_ids)


@pytest.fixture
def acted(files: ModelFiles) -> Iterator[Callable[..., tuple[Running, Actor]]]:
    """Builds a server whose model is an actor."""
    made: list[Running] = []

    def build(*lines: str, token_s: float = 0.0, **config: Any) -> tuple[Running, Actor]:
        engine = Actor(files, lines, token_s=token_s)
        made.append(Running(files, ServeConfig(**config), engine))
        return made[-1], engine

    yield build
    for running in made:
        running.stop()


class StandIn(Actor):
    """An actor whose line follows from the prompt; `log` has the end of each prompt and what was said."""

    def __init__(self, files: ModelFiles, line: Callable[[ModelFiles, str], str]) -> None:
        super().__init__(files, [""])
        self._line = line
        self.log: list[tuple[str, str]] = []

    def submit(self, request: Any, on_event: Callable[[Any], None]) -> Any:
        prompt = self._files.tokenizer.decode(request.prompt_ids)
        said = self._line(self._files, prompt)
        self._lines = [said]
        self.log.append((prompt[-200:], said))
        return super().submit(request, on_event)


@pytest.fixture
def standing_in() -> Iterator[Callable[..., Running]]:
    """Builds a server of any model's files whose model is a stand-in."""
    made: list[Running] = []

    def build(files: ModelFiles, config: ServeConfig, line: Callable[[ModelFiles, str], str]) -> Running:
        made.append(Running(files, config, StandIn(files, line)))
        return made[-1]

    yield build
    for running in made:
        running.stop()


@pytest.fixture(scope="module")
def fuzzed(files: ModelFiles) -> Iterator[Running]:
    """A server that answers two words to whatever is understood."""
    running = Running(files, ServeConfig(max_context=100_000), Actor(files, ["A fox."]))
    yield running
    running.stop()


@pytest.fixture
def scripted(files: ModelFiles) -> Iterator[Callable[..., tuple[Running, ScriptedEngine]]]:
    """Builds a server whose engine follows a script."""
    made: list[Running] = []

    def build(events: list[tuple[float, Any]], **config: Any) -> tuple[Running, ScriptedEngine]:
        engine = ScriptedEngine(events)
        made.append(Running(files, ServeConfig(**config), engine))
        return made[-1], engine

    yield build
    for running in made:
        running.stop()


def check_shape(path: str, response: httpx.Response) -> None:
    """Whatever was asked: no server error, and a refusal in the shape of the route's API."""
    assert response.status_code < 500, (path, response.request.content[:500], response.text)
    kind = response.headers["content-type"]
    if response.status_code == 200:
        assert kind in ("application/json", "text/event-stream; charset=utf-8")
        return
    assert kind == "application/json"
    body = response.json()
    if path.startswith("/v1/messages"):
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"} and body["request_id"]
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["message"]


@pytest.fixture(scope="session")
def assert_shape() -> Callable[[str, httpx.Response], None]:
    return check_shape


SLEEPER = """
import select, sys, time
lags = []
while True:
    began = time.monotonic()
    if select.select([sys.stdin], [], [], 0.01)[0]:
        break
    lags.append(time.monotonic() - began - 0.01)
print(*sorted(lags))
"""


@pytest.fixture
def machine_lag() -> Iterator[Callable[[float], float]]:
    """Seconds that a process which only sleeps comes late here: the machine's own share of any lag, by quantile."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdin=pipe, stdout=pipe, text=True)

    def quantile(share: float) -> float:
        lags = [float(word) for word in process.communicate("end\n", timeout=20)[0].split()]
        return lags[int(share * len(lags))] if lags else 0.0

    yield quantile
    process.kill()
    process.wait()
