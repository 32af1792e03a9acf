"""Pages that come in while the engine works: late, broken, unwanted, from another machine (about 15 s)."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cedar.cache.keys import ImageSpan
from cedar.cache.manager import CacheManager
from cedar.cache.shared import SharedStore
from cedar.cache.store import PageStore
from cedar.config.presets import nano
from cedar.engine.engine import Engine
from cedar.engine.request import Finished, Request, SamplingParams, Token
from cedar.model.transformer import Transformer
from cedar.planner.kv import page_bytes
from tests.device import DEVICE
from tests.paths.random_models import random_model

pytestmark = pytest.mark.device

Build = Callable[..., Engine]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model(nano(), 11)


@pytest.fixture
def build(model: Transformer, tmp_path: Path) -> Iterator[Build]:
    engines: list[Engine] = []

    def make(*, strict: bool = True, folder: str = "disk", shared: bool = False) -> Engine:
        about: dict[str, Any] = {"fingerprint": b"f", "payload_bytes": page_bytes(model.config)}
        cache = CacheManager(
            model.config,
            device=DEVICE,
            num_pages=64,
            strict=strict,
            fingerprint=b"f",
            store=PageStore(tmp_path / folder, budget_bytes=2**26, **about),
            shared=SharedStore(f"file://{tmp_path}/bucket", **about) if shared else None,
            host_bytes=2**24 if shared else 0,
        )
        engines.append(Engine(model, cache=cache, max_context=4096))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        assert not engine._thread.is_alive()
        assert engine.cache is not None
        engine.cache.pool.check()
        assert engine.cache.pool.num_free + engine.cache.tree.num_nodes == 64


def prompt(length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(500) for _ in range(length))


def request(ids: tuple[int, ...], max_tokens: int = 4, **options: Any) -> Request:
    return Request(prompt_ids=ids, sampling=SamplingParams(temperature=0, max_tokens=max_tokens), **options)


def ask(engine: Engine, ids: tuple[int, ...]) -> tuple[list[int], Finished]:
    events = list(engine.submit(request(ids)))
    end = events[-1]
    assert isinstance(end, Finished) and not end.error, end
    return [event.id for event in events if isinstance(event, Token)], end


def restarted(build: Build, length: int = 800) -> tuple[Engine, tuple[int, ...], list[int]]:
    """An engine whose disk holds a prompt, the next turn of it, and what a cold engine says to that."""
    ids = prompt(length, 1)
    engine = build()
    said, _ = ask(engine, ids)
    second = (*ids, *said, *prompt(30, 2))
    engine.close()
    cold = build(folder="nothing")
    want, _ = ask(cold, second)
    cold.close()
    return build(), second, want


def slow_parts(monkeypatch: pytest.MonkeyPatch, engine: Engine, seconds: float) -> threading.Event:
    """Parts of pages come late; the event tells that the first is being read."""
    assert engine.cache is not None and engine.cache._store is not None
    store, began = engine.cache._store, threading.Event()
    read = store.read_part

    def late(*arguments: Any) -> bytes:
        began.set()
        time.sleep(seconds)
        return read(*arguments)

    monkeypatch.setattr(store, "read_part", late)
    return began


def test_two_images_with_equal_ids_share_what_stands_before_them(build: Build, model: Transformer) -> None:
    """All positions of all images have one id; here no tower tells them apart, so the answers are the same."""
    engine = build()
    image = model.config.image_token_id
    ids = (*prompt(300, 8), *([image] * 60), *prompt(100, 9))

    def seen(name: bytes) -> Finished:
        digest = hashlib.sha256(name).digest()
        span = ImageSpan(start=300, stop=360, digest=digest, grid=(6, 9))
        end = list(engine.submit(request(ids, images=(span,))))[-1]
        assert isinstance(end, Finished) and not end.error
        return end

    assert [seen(name).cached_tokens for name in (b"fox", b"key", b"fox", b"owl", b"key")] == [0, 300, 460, 300, 460]
    assert ask(engine, ids)[1].cached_tokens == 300


def test_late_pages_change_no_answer_and_stop_no_stream(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report B05; and while they come, another stream goes on."""
    engine, second, want = restarted(build)
    stream = iter(engine.submit(request(prompt(20, 3), max_tokens=400)))
    assert isinstance(next(event for event in stream if isinstance(event, Token)), Token)
    slow_parts(monkeypatch, engine, 0.02)
    said, end = ask(engine, second)
    assert said == want and end.cached_tokens > 700 and end.cache_tier == "disk"
    assert engine.cache is not None and engine.cache.metrics.loaded_pages == 7
    assert engine.metrics.running == 1


@pytest.mark.parametrize("part", [0, 1])
def test_a_page_that_breaks_on_the_way_costs_only_time(
    build: Build, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    engine, second, want = restarted(build)
    assert engine.cache is not None and engine.cache._store is not None
    store = engine.cache._store
    read = store.read_part

    def broken(header: Any, listed: Any, number: int) -> bytes:
        if number == part and listed.tokens[0] == second[5 * 128]:
            raise OSError(5, "Input/output error")
        return read(header, listed, number)

    monkeypatch.setattr(store, "read_part", broken)
    said, end = ask(engine, second)
    assert said == want and end.cached_tokens == 5 * 128
    assert engine.cache.metrics.failed_loads == 1 and store.stats.failed == {"io": 1}
    # it is written again, and whole
    assert store.flush()
    monkeypatch.setattr(store, "read_part", read)
    engine.close()
    said, end = ask(build(), second)
    assert said == want and end.cached_tokens > 800


def test_a_client_that_leaves_while_pages_come_frees_them(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, second, want = restarted(build)
    began = slow_parts(monkeypatch, engine, 0.01)
    for _ in range(3):
        handle = engine.submit(request(second))
        assert began.wait(10)
        handle.cancel()
        list(handle)
        # whatever had come in whole is cache; the next one has to read again
        engine.ask_cache(lambda cache: cache.purge()).result(10)
        began.clear()
    assert ask(engine, second)[0] == want


def test_another_machine_goes_on_with_a_shared_conversation(build: Build) -> None:
    ids = prompt(700, 5)
    one = build(folder="one", shared=True)
    said, _ = ask(one, ids)
    assert one.cache is not None and one.cache._shared is not None and one.cache._shared.flush()
    second = (*ids, *said, *prompt(30, 6))
    want, _ = ask(build(folder="nothing"), second)
    again, end = ask(build(folder="two", shared=True), second)
    assert again == want and end.cached_tokens >= 700 and end.cache_tier == "shared"


def test_a_shared_store_that_hangs_holds_nobody_up_for_long(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(shared=True)
    assert engine.cache is not None and engine.cache._shared is not None
    free = threading.Event()

    def hangs(*arguments: Any) -> None:
        free.wait(30)

    monkeypatch.setattr(engine.cache._shared, "get", hangs)
    monkeypatch.setattr("cedar.engine.engine._FETCH_LIMIT_S", 0.3)
    began = time.monotonic()
    _, end = ask(engine, prompt(300, 7))
    assert end.cached_tokens == 0 and end.queue_s >= 0.3 and time.monotonic() - began < 20
    free.set()


def test_a_pool_that_pins_have_halved_still_serves_its_longest_prompt(model: Transformer) -> None:
    cache = CacheManager(model.config, num_pages=8, device=DEVICE)
    engine = Engine(model, cache=cache)
    try:
        ask(engine, prompt(500, 24))
        engine.ask_cache(lambda cache: cache.pin(prompt(500, 24), b"")).result(10)
        _, end = ask(engine, prompt(850, 25))
        assert end.completion_tokens == 4 and cache.cached_tokens(prompt(500, 24), b"") < 500
    finally:
        engine.close()
