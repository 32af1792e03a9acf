"""Memory over many requests: none that is not a cache's (120 here, about 8 s; 10,000 in `make test-long`)."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import psutil
import pytest

from cedar.cache.manager import CacheManager
from cedar.cache.store import PageStore
from cedar.engine.engine import Engine
from cedar.engine.request import Finished, Request, SamplingParams
from cedar.engine.scheduler import SchedulerConfig
from cedar.model.sequence import Snapshot
from cedar.planner.kv import page_bytes
from tests.device import DEVICE, ON_CPU
from tests.engine.drafters import Scripted
from tests.engine.test_stateful import tiny, tiny_model

pytestmark = pytest.mark.device

NUM_PAGES = 40


def footprint() -> tuple[int, int]:
    """(bytes of this process, objects that Python tracks)."""
    gc.collect()
    return psutil.Process().memory_info().rss, len(gc.get_objects())


@pytest.mark.parametrize("count", [120, pytest.param(10_000, marks=pytest.mark.slow)])
def test_memory_is_flat(tmp_path: Path, count: int) -> None:
    """Hits, misses, forks, cancels, drafts, evictions to disk; the first quarter fills what may be full."""
    config, draw = tiny(), random.Random(1)
    store = PageStore(tmp_path, fingerprint=b"tiny", payload_bytes=page_bytes(config), budget_bytes=2**22)
    cache = CacheManager(
        config,
        device=DEVICE,
        num_pages=NUM_PAGES,
        snapshot_bytes=2**16,
        fingerprint=b"tiny",
        store=store,
        read_snapshot=Snapshot.from_bytes,
    )
    guess = Scripted(lambda tokens: tokens[-1], width=3, right=1, vocab_size=config.vocab_size)
    engine = Engine(
        tiny_model(), cache=cache, drafter=guess, scheduling=SchedulerConfig(max_running=4, reserve_tokens=8)
    )
    lines = [[draw.randrange(56) for _ in range(300)] for _ in range(8)]
    footprints: list[tuple[int, int]] = []
    try:
        for number in range(0, count, 4):
            handles = []
            for _ in range(3):
                shared = draw.choice(lines)[: draw.randrange(1, 300)]
                ids = (*shared, *(draw.randrange(56) for _ in range(draw.randrange(1, 20))))
                sampling = SamplingParams(max_tokens=draw.randrange(1, 9), seed=number)
                handles.append(engine.submit(Request(prompt_ids=ids, sampling=sampling)))
            handles.append(engine.fork(handles[0].request_id, num_tokens=0))
            if draw.random() < 0.2:
                handles[1].cancel()
            for handle in handles:
                assert isinstance(list(handle)[-1], Finished)
            if number % (count // 4) < 4:
                footprints.append(footprint())
        footprints.append(footprint())
    finally:
        engine.close()
    cache.pool.check()
    (early_bytes, early_objects), (late_bytes, late_objects) = footprints[1], footprints[-1]
    # the heap breathes by some megabytes, and on a GPU kernels for sizes not seen yet are loaded on the way; a kilobyte
    # a request would be 10 MB over 10,000
    assert late_bytes - early_bytes < (8 if ON_CPU else 16) * 2**20, footprints
    assert late_objects - early_objects < 3000 + count // 20, footprints
