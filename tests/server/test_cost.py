"""What HTTP and chat handling add: CPU a streamed token, and the way of the first token (about 5 s)."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import httpx

from cedar.engine.request import Finished, Token

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": "nonsense", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


def loop_cpu_s(running: Any) -> float:
    """CPU seconds of the event loop's thread so far."""

    async def read() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(read(), running.loop).result(5)


def test_a_streamed_token_costs_little_cpu(acted: Callable[..., tuple[Any, Any]]) -> None:
    running, actor = acted("the old fox and the river " * 100)
    began = loop_cpu_s(running)
    text = httpx.post(running.url + CHAT, json=GOOD | {"max_tokens": 3000}, timeout=60).text
    spent = loop_cpu_s(running) - began
    num_tokens = sum(isinstance(event, Token) for _, event in actor.events)
    assert text.endswith("[DONE]\n\n") and num_tokens > 1000
    print(f"{1000 * spent / num_tokens:.3f} ms a token")
    assert spent / num_tokens < 0.002


def test_the_first_token_is_on_its_way_at_once(scripted: Callable[..., tuple[Any, Any]]) -> None:
    running, engine = scripted([(0.1, Token(70)), (0.2, Finished(reason="length", prompt_tokens=3))])
    said_s: list[float] = []
    submit = engine.submit

    def noting(request: Any, on_event: Callable[[Any], None]) -> Any:
        def note(event: Any) -> None:
            if isinstance(event, Token):
                said_s.append(time.monotonic())
            on_event(event)

        return submit(request, note)

    engine.submit = noting
    delays = []
    for _ in range(9):
        with httpx.stream("POST", running.url + CHAT, json=GOOD) as response:
            for line in response.iter_lines():
                if '"content":' in line and '"role"' not in line:
                    delays.append(time.monotonic() - said_s[-1])
                    break
    print(f"median {1000 * statistics.median(delays):.1f} ms")
    assert statistics.median(delays) < 0.03
