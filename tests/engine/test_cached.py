"""The engine with its cache: hits, grades, tiers, restart, memory pressure, cancels (about 60 s)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cedar.cache.manager import CacheManager
from cedar.cache.store import PageStore
from cedar.config.presets import nano
from cedar.engine.engine import Engine
from cedar.engine.request import Finished, Request, SamplingParams, Token
from cedar.engine.scheduler import SchedulerConfig
from cedar.errors import RequestError
from cedar.model.sequence import Snapshot
from cedar.model.transformer import Transformer
from cedar.planner.kv import page_bytes
from tests.device import DEVICE
from tests.paths.random_models import random_model

pytestmark = pytest.mark.device

Build = Callable[..., Engine]
FINGERPRINT = b"one model"


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model(nano(), 11)


def make_engine(
    model: Transformer,
    *,
    num_pages: int = 64,
    strict: bool = False,
    directory: Path | None = None,
    snapshots: bool = True,
    budget: int = 2**26,
    **options: object,
) -> Engine:
    store = None
    if directory is not None:
        store = PageStore(
            directory, fingerprint=FINGERPRINT, payload_bytes=page_bytes(model.config), budget_bytes=budget
        )
    cache = CacheManager(
        model.config,
        device=DEVICE,
        num_pages=num_pages,
        strict=strict,
        snapshot_bytes=2**24 if snapshots else 0,
        fingerprint=FINGERPRINT,
        store=store,
        read_snapshot=Snapshot.from_bytes,
    )
    names = [name for name in ("max_running", "max_step_tokens", "reserve_tokens") if name in options]
    limits = {name: options.pop(name) for name in names}
    scheduling = SchedulerConfig(**{"reserve_tokens": 64, **limits})
    return Engine(model, cache=cache, scheduling=scheduling, **{"max_context": 4096, **options})


@pytest.fixture
def build(model: Transformer) -> Iterator[Build]:
    engines: list[Engine] = []

    def make(**options: object) -> Engine:
        engines.append(make_engine(model, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        assert not engine._thread.is_alive()
        engine.cache.pool.check()


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(500) for _ in range(length))


def ask(engine: Engine, ids: tuple[int, ...], max_tokens: int = 8, **options: object) -> tuple[list[int], Finished]:
    return answer(
        list(
            engine.submit(
                Request(prompt_ids=ids, sampling=SamplingParams(temperature=0, max_tokens=max_tokens), **options)
            )
        )
    )


def answer(events: list) -> tuple[list[int], Finished]:
    assert isinstance(events[-1], Finished) and not events[-1].error, events[-1]
    return [event.id for event in events if isinstance(event, Token)], events[-1]


def cold(model: Transformer, ids: tuple[int, ...], max_tokens: int = 8) -> list[int]:
    """What an engine without any cache says, in deterministic mode."""
    engine = Engine(model, exact=True)
    try:
        return ask(engine, ids, max_tokens)[0]
    finally:
        engine.close()


def test_a_second_turn_adopts_the_first(model: Transformer, build: Build) -> None:
    """The next turn hits every token that ran; the answer is the cold one under a strict cache."""
    engine = build(strict=True)
    first = prompt(300, 1)
    said, end = ask(engine, first)
    assert said == cold(model, first) and (end.cached_tokens, end.resume) == (0, "cold")
    second = (*first, *said, *prompt(60, 2))
    again, end = ask(engine, second)
    assert again == cold(model, second)
    # all but the last token of the answer, which never ran
    assert end.cached_tokens == len(first) + len(said) - 1 and end.resume == "g1" and end.cache_tier == "memory"
    assert engine.metrics.resumes == {"cold": 1, "g1": 1}


def test_without_a_snapshot_strict_rebuilds(model: Transformer, build: Build) -> None:
    engine = build(strict=True, snapshots=False)
    first = prompt(900, 3)
    ask(engine, first)
    for length in (640, 898, 771):
        second = (*first[:length], *prompt(9, length))
        said, end = ask(engine, second)
        assert said == cold(model, second), length
        assert end.resume == "g3" and length - 2 < end.cached_tokens <= length


def test_bounded_replay_is_the_default_and_runs_a_window(model: Transformer, build: Build) -> None:
    engine = build(snapshots=False)
    first = prompt(700, 4)
    ask(engine, first)
    before = engine.metrics.prompt_tokens
    _, end = ask(engine, (*first, *prompt(20, 5)))
    window = model.config.attention.sliding_window
    assert end.resume == "g2" and end.cached_tokens >= 700
    assert engine.metrics.prompt_tokens - before <= 20 + window + 2
    # what came after an approximate resume is not served to who asks for exact
    _, end = ask(engine, (*first, *prompt(20, 5), 7), replay="off")
    assert end.resume == "cold" and end.cached_tokens == 0


@pytest.mark.parametrize("tail", [1, 30, 400])
def test_hits_do_not_depend_on_the_tail(build: Build, tail: int) -> None:
    """Field reports B06, B08, B19: the common prefix minus less than a page, whatever follows."""
    engine = build()
    shared = prompt(500, 6)
    ask(engine, (*shared, *prompt(tail, 7)))
    _, end = ask(engine, (*shared, *prompt(tail, 8)))
    assert end.cached_tokens >= 500 - 2


def test_the_shortest_hit_is_one_window_and_two_tokens(model: Transformer, build: Build) -> None:
    window = model.config.attention.sliding_window
    engine = build(snapshots=False)
    for length, hit in ((window, False), (window + 4, True)):
        ids = prompt(length, length)
        ask(engine, ids)
        _, end = ask(engine, (*ids, 1, 2, 3))
        assert (end.cached_tokens > 0) == hit, length


def test_salts_do_not_share(build: Build) -> None:
    engine = build()
    ids = prompt(300, 9)
    ask(engine, ids, salt=b"one")
    assert ask(engine, ids, salt=b"two")[1].cached_tokens == 0
    assert ask(engine, ids, salt=b"one")[1].cached_tokens == 299


def test_keep_false_leaves_nothing(build: Build) -> None:
    engine = build()
    ids = prompt(300, 10)
    ask(engine, ids, keep=False)
    assert engine.cache.tree.num_nodes == 0 and ask(engine, ids)[1].cached_tokens == 0


def test_the_same_question_many_times(model: Transformer, build: Build) -> None:
    """Field reports B01 and B25: every run gives the same, pages being shared and recycled in between."""
    engine = build(strict=True, num_pages=12)
    ids = prompt(400, 11)
    want = cold(model, ids, 9)
    for number in range(4):
        assert ask(engine, ids, 9)[0] == want
        ask(engine, prompt(300, 100 + number))


def test_many_at_once_are_each_alone(model: Transformer, build: Build) -> None:
    """X5 and X7: prompts that share, prompts that do not, in one batch; in-flight pages are computed once."""
    engine = build(strict=True, num_pages=128, max_running=6)
    shared = prompt(400, 12)
    prompts = [(*shared, *prompt(10 + n, n)) for n in range(4)] + [prompt(90 + n, n) for n in range(4)]
    handles = [
        engine.submit(Request(prompt_ids=ids, sampling=SamplingParams(temperature=0, max_tokens=12))) for ids in prompts
    ]
    for ids, handle in zip(prompts, handles, strict=True):
        assert answer(list(handle))[0] == cold(model, ids, 12)
    assert engine.metrics.resumes["cold"] == 5
    assert engine.metrics.prompt_tokens < sum(map(len, prompts)) - 2 * 256


def test_memory_pressure_sets_aside_and_loses_nothing(model: Transformer, build: Build) -> None:
    """Field reports B31 and B32: a pool for two, four long requests; the same text, no token twice."""
    engine = build(strict=True, num_pages=5, reserve_tokens=1, max_running=4)
    prompts = [prompt(90 + 10 * n, 20 + n) for n in range(4)]
    handles = [
        engine.submit(Request(prompt_ids=ids, sampling=SamplingParams(temperature=0, max_tokens=50))) for ids in prompts
    ]
    for ids, handle in zip(prompts, handles, strict=True):
        said, end = answer(list(handle))
        assert end.completion_tokens == 50 == len(said)
        assert said == cold(model, ids, 50)
    assert engine.metrics.preempted > 0
    assert engine.cache.pool.num_free + engine.cache.tree.num_nodes == 5


def test_who_waits_does_not_keep_pages_from_who_runs_alone(model: Transformer, build: Build) -> None:
    """Field report B17's other side: pages that a waiting prompt will use make way when nothing else can."""
    engine = build(num_pages=12, max_running=1, reserve_tokens=1)
    known = prompt(600, 70)
    ask(engine, known)
    # the smaller one is asked second, and waits with half of the pool in mind
    handles = [
        engine.submit(Request(prompt_ids=ids, sampling=SamplingParams(max_tokens=2), priority=priority))
        for ids, priority in ((prompt(1300, 71), 1), (known, 0))
    ]
    for handle in handles:
        assert answer(list(handle))[1].reason == "length"


def test_the_context_is_what_memory_holds(build: Build) -> None:
    engine = build(num_pages=4)
    assert engine.max_context == 384
    with pytest.raises(RequestError, match="holds 384 tokens"):
        engine.submit(Request(prompt_ids=prompt(300, 1), sampling=SamplingParams(max_tokens=100)))
    assert ask(engine, prompt(300, 1), 84)[1].completion_tokens == 84


@pytest.mark.parametrize("strict", [True, False])
def test_restart_goes_on(model: Transformer, tmp_path: Path, strict: bool) -> None:
    """Tier disk: a new process (here a new engine) finds the conversation, with its snapshot or without."""
    first = prompt(600, 30)
    engine = make_engine(model, directory=tmp_path, strict=strict)
    said, _ = ask(engine, first)
    engine.close()
    second = (*first, *said, *prompt(50, 31))
    for snapshots in (True, False):
        engine = make_engine(model, directory=tmp_path, strict=strict, snapshots=snapshots, keep_snapshots=False)
        again, end = ask(engine, second)
        assert end.cached_tokens >= 606 and end.cache_tier == "disk"
        if strict:
            assert again == cold(model, second)
        assert end.resume == ("g1" if snapshots else "g3" if strict else "g2")
        third = (*second, *again, 5)
        # strict goes back to the older snapshot if that runs fewer rows than a rebuild
        assert ask(engine, third)[1].cached_tokens > (606 if strict and snapshots else len(second))
        engine.close()
        engine.cache.pool.check()


def test_another_model_finds_nothing(model: Transformer, tmp_path: Path) -> None:
    engine = make_engine(model, directory=tmp_path)
    ids = prompt(300, 32)
    ask(engine, ids)
    engine.close()
    store = PageStore(tmp_path, fingerprint=b"other", payload_bytes=page_bytes(model.config), budget_bytes=2**26)
    assert store.describe()["pages"] == 0
    store.close()


def test_eviction_to_disk_and_back(model: Transformer, build: Build, tmp_path: Path) -> None:
    """Field report B17: two chats that alternate in a memory for one; every later turn hits."""
    engine = build(strict=True, num_pages=8, directory=tmp_path)
    chats = [prompt(520, 40), prompt(520, 41)]
    for turn in range(3):
        for number, ids in enumerate(chats):
            said, end = ask(engine, ids, 4)
            assert said == cold(model, ids, 4)
            if turn:
                assert end.cached_tokens >= 512, (turn, number)
            chats[number] = (*ids, *said, *prompt(20, turn))
            engine.cache._store.flush()
    assert engine.metrics.cached_tokens["disk"] > 0


def test_bytes_of_a_long_sequence_are_the_planners(model: Transformer, build: Build) -> None:
    engine = build(num_pages=40)
    ask(engine, prompt(4000, 50), 1)
    pages = engine.cache.pool.num_pages - engine.cache.pool.num_free
    assert pages == -(-4000 // 128)
    assert len(engine.cache.pool.read(0)) == page_bytes(model.config)


def test_cancel_anywhere_leaves_the_pool_whole(model: Transformer, build: Build) -> None:
    """X11: at random moments of every phase; then everything still answers, and nothing leaks."""
    engine = build(num_pages=48, max_running=3, max_step_tokens=64)
    draw = random.Random(5)
    for number in range(25):
        handles = [
            engine.submit(
                Request(
                    prompt_ids=prompt(draw.randrange(2, 500), number * 10 + n), sampling=SamplingParams(max_tokens=30)
                )
            )
            for n in range(3)
        ]
        time.sleep(draw.random() * 0.03)
        for handle in handles:
            handle.cancel()
        for handle in handles:
            assert list(handle)[-1].reason in ("cancelled", "length")
    assert engine.metrics.cancelled
    assert engine.cache.pool.num_free + engine.cache.tree.num_nodes == 48
    ids = prompt(300, 51)
    assert ask(engine, ids)[1].reason == "length"


def test_a_stream_goes_on_while_a_long_prompt_runs(build: Build) -> None:
    """Field reports F02 and F03: one token at least for each chunk."""
    engine = build(max_step_tokens=64, num_pages=64)
    times: list[float] = []
    done = threading.Event()

    def note(event: object) -> None:
        if isinstance(event, Token):
            times.append(time.monotonic())
        if isinstance(event, Finished):
            done.set()

    engine.submit(Request(prompt_ids=prompt(10, 1), sampling=SamplingParams(max_tokens=60)), on_event=note)
    long = engine.submit(Request(prompt_ids=prompt(2000, 2), sampling=SamplingParams(max_tokens=1)))
    assert list(long)[-1].reason == "length"
    assert done.wait(30)
    gaps = sorted(b - a for a, b in zip(times, times[1:], strict=False))
    assert gaps[-1] < 20 * max(gaps[len(gaps) // 2], 0.01)


def test_published_pages_never_change(model: Transformer, build: Build) -> None:
    """X2: every page of the tree has the bytes it was published with, whatever hits, forks and cancels follow."""
    engine = build(num_pages=64, strict=True)
    shared = prompt(333, 60)
    ask(engine, shared)
    cache = engine.cache
    before = {node.key: (cache.pool.read(node.page), len(node.tokens)) for node in cache.tree.nodes()}
    handles = [
        engine.submit(Request(prompt_ids=(*shared, *prompt(n, n)), sampling=SamplingParams(seed=1, max_tokens=9)))
        for n in range(1, 6)
    ]
    handles[2].cancel()
    for handle in handles:
        list(handle)
    for node in cache.tree.nodes():
        if node.key in before:
            assert cache.pool.read(node.page) == before[node.key][0]


def test_the_snapshot_survives_its_bytes(model: Transformer) -> None:
    for length in (1, 2, 77):
        state = model.new_state()
        model.prefill(state, torch.tensor(prompt(length, 70)))
        one = state.snapshot()
        other = Snapshot.from_bytes(one.to_bytes())
        assert (one.num_tokens, one.decoder_replay, one.marks) == (other.num_tokens, other.decoder_replay, other.marks)
        assert all(
            torch.equal(a, b)
            for one_planes, other_planes in zip(one.windows, other.windows, strict=True)
            for a, b in zip(one_planes, other_planes, strict=True)
        )
        assert one.tails.keys() == other.tails.keys() and torch.equal(one.recent_L, other.recent_L)
