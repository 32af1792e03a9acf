"""Sixty-four streams with hang-ups and cancels against a real engine: a minute, or ten in `make test-long`.

The clients are a process of their own (this file, run): the server's event loop must not wait for their Python.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

Running = Any  # the one in conftest.py
NUM_STREAMS = 64
# the longest silence of a stream whose turn it may not be yet
LONGEST_GAP_S = 20
QUESTIONS = [f"Question {i}: where is the fox? {'It lives by the river. ' * (i % 4) * 4}" for i in range(8)]


def body(number: int) -> dict[str, Any]:
    turn = {"role": "user", "content": QUESTIONS[number]}
    return {"model": "nonsense", "messages": [turn], "max_tokens": 6, "seed": number, "stream": True}


def said(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line[6:]).get("choices", ())
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def stream(
    client: httpx.AsyncClient, number: int, rng: random.Random, counts: Counter[str], right: list[str]
) -> None:
    """One answer, perhaps abandoned on the way; a whole one must be what the model says when it is alone."""
    fate = rng.random()
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body(number)) as response:
        if response.status_code != 200:
            counts[f"status {response.status_code}"] += 1
            return
        if fate < 0.15:
            await asyncio.sleep(rng.random() * 0.2)
            counts["hung up"] += 1
            return
        if fate < 0.25:
            answer = await client.post(f"/v1/requests/{response.headers['x-request-id']}/cancel")
            counts["cancelled"] += answer.status_code == 200
        heard = time.monotonic()
        async for line in response.aiter_lines():
            now = time.monotonic()
            counts["stalled"] += now - heard > LONGEST_GAP_S
            heard = now
            text += said(line)
            if '"error"' in line:
                counts["ended early"] += 1
                return
    counts["whole" if text == right[number] else "wrong"] += 1


async def clients(url: str, seconds: float, seed: int, right: list[str]) -> Counter[str]:
    """Sixty-four at once until the time is over, and what became of their answers."""
    counts: Counter[str] = Counter()
    rng = random.Random(seed)
    end_s = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=2 * NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def one() -> None:
            while time.monotonic() < end_s:
                await stream(client, rng.randrange(len(QUESTIONS)), rng, counts, right)

        await asyncio.gather(*(one() for _ in range(NUM_STREAMS)))
    return counts


def load(url: str, seconds: float, seed: int, right: list[str]) -> Counter[str]:
    """`clients` in a process of its own."""
    told = json.dumps([url, seconds, seed, right])
    done = subprocess.run(
        [sys.executable, __file__], input=told, capture_output=True, text=True, timeout=seconds + 180, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Counter(json.loads(done.stdout))


@pytest.fixture
def exact_server(files: Any, start: Any) -> Iterator[Running]:
    """A server of a strict cache: its arithmetic does not depend on what runs beside a request."""
    yield from start(files, max_context=1024, max_step_tokens=64, strict_cache=True, cache_bytes=8 * 2**20)


def wait_until_idle(server: Running) -> None:
    deadline = time.monotonic() + 20
    while server.service.open or server.engine.metrics.running or server.engine.metrics.waiting:
        assert time.monotonic() < deadline, (server.service.open, server.engine.metrics)
        time.sleep(0.05)


def pages_in_use(server: Running) -> int:
    """Pages that nobody could take: what is neither free nor a prefix."""
    told = httpx.get(f"{server.url}/v1/cache/stats").json()
    return int(told["pages"] - told["free_pages"] - told["tree_pages"])


@pytest.mark.parametrize("seconds", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_many_streams(exact_server: Running, seconds: int, machine_lag: Callable[[float], float]) -> None:
    server = exact_server
    right = [
        "".join(map(said, httpx.post(f"{server.url}/v1/chat/completions", json=body(number)).text.split("\n\n")))
        for number in range(len(QUESTIONS))
    ]
    assert all(right) and len(set(right)) > 1
    lags: list[float] = []
    process = psutil.Process()

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - began - 0.01)

    watcher = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    # the first part fills what is filled once: pools, caches, the allocator
    counts = load(server.url, seconds / 4, 1, right)
    wait_until_idle(server)
    memory, files = process.memory_info().rss, process.num_fds()
    counts += load(server.url, seconds * 3 / 4, 2, right)
    wait_until_idle(server)
    watcher.cancel()
    grown = (process.memory_info().rss - memory) / 2**20
    lags.sort()
    lag_ms = 1000 * lags[int(0.99 * len(lags))]
    idle_ms = 1000 * machine_lag(0.99)
    print(f"{dict(counts)}, memory {grown:+.1f} MiB, event loop lag p99 {lag_ms:.1f} ms, most {1000 * lags[-1]:.0f} ms")
    print(f"a process that only sleeps: p99 {idle_ms:.1f} ms late")
    assert counts["whole"] > 20 and counts["hung up"] and counts["cancelled"]
    assert not counts["wrong"] and not counts["stalled"]
    assert set(counts) <= {"whole", "hung up", "cancelled", "ended early", "stalled"}, counts
    assert grown < 40 and process.num_fds() <= files + 8
    assert pages_in_use(server) == 0
    # on a busy machine everybody comes late
    assert lag_ms < 50 + idle_ms


if __name__ == "__main__":
    print(json.dumps(asyncio.run(clients(*json.loads(sys.stdin.read())))))
