"""Sixty-four streams with hang-ups and cancels against a real engine (20 s; ten minutes in `make test-long`)."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

Running = Any  # the one in conftest.py
NUM_STREAMS = 64
QUESTIONS = [f"Question {i}: where is the fox?" for i in range(8)]


def body(number: int) -> dict[str, Any]:
    turn = {"role": "user", "content": QUESTIONS[number]}
    return {"model": "nonsense", "messages": [turn], "max_tokens": 6, "seed": number, "stream": True}


def said(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line[6:]).get("choices", ())
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def stream(
    client: httpx.AsyncClient, number: int, rng: random.Random, counts: Counter[str], right: dict[int, str]
) -> None:
    """One answer, perhaps abandoned on the way; a whole one must be what the model says when it is alone."""
    fate = rng.random()
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body(number)) as response:
        assert response.status_code == 200
        if fate < 0.15:
            await asyncio.sleep(rng.random() * 0.2)
            counts["hung up"] += 1
            return
        if fate < 0.25:
            answer = await client.post(f"/v1/requests/{response.headers['x-request-id']}/cancel")
            counts["cancelled"] += answer.status_code == 200
        async for line in response.aiter_lines():
            text += said(line)
            if '"error"' in line:
                counts["ended early"] += 1
                return
    assert text == right[number]
    counts["whole"] += 1


@pytest.mark.parametrize("seconds", [20, pytest.param(600, marks=pytest.mark.slow)])
def test_many_streams(server: Running, seconds: int) -> None:
    right = {
        number: "".join(
            map(said, httpx.post(f"{server.url}/v1/chat/completions", json=body(number)).text.split("\n\n"))
        )
        for number in range(len(QUESTIONS))
    }
    assert all(right.values()) and len(set(right.values())) > 1
    counts: Counter[str] = Counter()
    lags: list[float] = []
    process = psutil.Process()

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - began - 0.01)

    async def load(seconds: float, seed: int) -> None:
        rng = random.Random(seed)
        end_s = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=2 * NUM_STREAMS)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

            async def one() -> None:
                while time.monotonic() < end_s:
                    await stream(client, rng.randrange(len(QUESTIONS)), rng, counts, right)

            await asyncio.gather(*(one() for _ in range(NUM_STREAMS)))

    watcher = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    # the first part fills what is filled once: pools, caches, the allocator
    asyncio.run(load(seconds / 4, 1))
    memory = process.memory_info().rss
    asyncio.run(load(seconds * 3 / 4, 2))
    watcher.cancel()
    assert counts["whole"] > 20 and counts["hung up"] and counts["cancelled"]
    deadline = time.monotonic() + 10
    while server.service.open or server.engine.metrics.running or server.engine.metrics.waiting:
        assert time.monotonic() < deadline, (server.service.open, server.engine.metrics)
        time.sleep(0.05)
    grown = (process.memory_info().rss - memory) / 2**20
    lags.sort()
    lag_ms = 1000 * lags[int(0.99 * len(lags))]
    print(f"{dict(counts)}, memory {grown:+.1f} MiB, event loop lag p99 {lag_ms:.1f} ms")
    assert grown < 40
    # the client's loop and the server's share this process and its interpreter lock
    assert lag_ms < 250
