"""Engine events -> HTTP: the bridge from the engine's thread, server-sent events, and who notices a hang-up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from cedar.chat.parse import Delta
from cedar.engine.request import Event, Finished, Progress, Token
from cedar.errors import RequestError

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def sse(body: dict[str, Any], event: str = "") -> bytes:
    """One server-sent event, with a name where the protocol has names."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + msgspec.json.encode(body) + b"\n\n"


class Reader(Protocol):
    """Token ids of one answer -> what people read; `cedar.chat.parse` has two."""

    reasoning_tokens: int

    @property
    def stopped(self) -> bool: ...

    def push(self, token_id: int) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


@dataclass(slots=True)
class Step:
    """What one engine event added to answer number `index`; `end` is there with the last."""

    index: int
    deltas: list[Delta]
    token: Token | None = None
    end: Finished | None = None


class Bell:
    """Wakes the event loop for all mailboxes at once, so that the engine's thread pays for it once a step."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._filled: deque[asyncio.Event] = deque()
        # the loop has been told to look, and has not
        self._told = False

    def ring(self, arrived: asyncio.Event) -> None:
        """Set an event in the loop; called in the engine's thread."""
        self._filled.append(arrived)
        if not self._told:
            self._told = True
            self.loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        # in this order: the loop is told again of what comes meanwhile
        self._told = False
        while self._filled:
            self._filled.popleft().set()


class Mailbox:
    """Events of the answers of one request, handed over from the engine's thread to the event loop.

    Attributes:
        heard_s: When the latest came, by the monotonic clock; 0 before the first.
    """

    def __init__(self, bell: Bell) -> None:
        self.heard_s = 0.0
        self._bell = bell
        self._events: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()

    def put(self, index: int, event: Event) -> None:
        """Called in the engine's thread."""
        self.heard_s = time.monotonic()
        self._events.append((index, event))
        self._bell.ring(self._arrived)

    async def get(self, timeout_s: float) -> tuple[int, Event] | None:
        """The next event and whose it is, or None if none came in time."""
        # the events are looked at first: a busy stream must not pay for a timer a token
        if not self._events:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not self._events:
                        self._arrived.clear()
                        await self._arrived.wait()
        return self._events.popleft() if self._events else None


def late(timeout_s: float | None) -> RequestError:
    """No token came in time, whoever noticed first: the engine or the route."""
    within = "" if timeout_s is None else f" within {timeout_s:g} seconds"
    return RequestError(f"no token came{within}; try again later or raise timeout_s", code="timeout", status=504)


async def read_answers(
    mailbox: Mailbox,
    readers: Sequence[Reader],
    cancels: Sequence[Callable[[], None]],
    *,
    ping_s: float,
    deadline_s: float | None = None,
) -> AsyncIterator[Step | bytes]:
    """The steps of all answers until each has ended, and a comment whenever nothing came for `ping_s` seconds.

    A stop string is text, which the engine does not know: it is found here, and the engine told to let go.

    Args:
        deadline_s: Seconds within which the first token must come.

    Raises:
        RequestError: It did not; everything is cancelled then.
    """
    num_tokens = [0] * len(readers)
    running = len(readers)
    loop = asyncio.get_running_loop()
    deadline = None if deadline_s is None else loop.time() + deadline_s
    comment, said = PING, loop.time()
    while running:
        wake = said + ping_s if deadline is None else min(said + ping_s, deadline)
        got = await mailbox.get(max(0.0, wake - loop.time()))
        event = None if got is None else got[1]
        if got is None or isinstance(event, Progress):
            if isinstance(event, Progress):
                comment = f": prefill {event.done / event.total:.1%}\n\n".encode()
            if deadline is not None and loop.time() >= deadline:
                for cancel in cancels:
                    cancel()
                raise late(deadline_s)
            if loop.time() - said >= ping_s:
                said = loop.time()
                yield comment
            continue
        comment, said = PING, loop.time()
        index, reader = got[0], readers[got[0]]
        if isinstance(event, Finished):
            running -= 1
            if reader.stopped and event.reason == "cancelled":
                event = replace(event, reason="stop", completion_tokens=num_tokens[index])
            yield Step(index, reader.finish(), end=event)
        elif isinstance(event, Token) and not reader.stopped:
            deadline = None
            num_tokens[index] += 1
            yield Step(index, reader.push(event.id), token=event)
            if reader.stopped:
                cancels[index]()


async def hung_up(receive: Receive) -> None:
    """Returns once the client has gone; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[None], cancel: Callable[[], None]) -> None:
    """Do `work`, but stop and call `cancel` as soon as the client hangs up; `cancel` is called in every case."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(hung_up(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        cancel()
        watcher.cancel()
        if not worker.done():
            worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker


class EventStream:
    """An ASGI response of server-sent events that ends, and cancels its request, when the client hangs up."""

    def __init__(
        self, source: AsyncIterator[bytes], cancel: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> None:
        self._source, self._cancel, self._headers = source, cancel, headers or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all() -> None:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-store"),
                # a proxy that collects the stream first would defeat it
                (b"x-accel-buffering", b"no"),
                *((name.encode(), value.encode()) for name, value in self._headers.items()),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for piece in self._source:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await unless_gone(receive, send_all(), self._cancel)
