"""Engine events -> HTTP: the bridge from the engine's thread, server-sent events, and who notices a hang-up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from cedar.chat.parse import AnswerReader, Delta
from cedar.engine.request import Event, Finished, Progress, Token

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class Mailbox:
    """Events of one request, handed over from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """Called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def get(self, timeout_s: float) -> Event | None:
        """The next event, or None if none came in time."""
        # the queue is looked at first: a busy stream must not pay for a timer a token
        if not self._queue.empty():
            return self._queue.get_nowait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        return None


async def answer(
    mailbox: Mailbox, reader: AnswerReader, cancel: Callable[[], None], *, ping_s: float
) -> AsyncIterator[Delta | Finished | bytes]:
    """The pieces of one answer, `Finished` last, and a comment whenever nothing came for `ping_s` seconds.

    A stop string is text, which the engine does not know: it is found here, and the engine told to let go.
    """
    num_tokens = 0
    async for event in _events(mailbox, ping_s=ping_s):
        if isinstance(event, bytes):
            yield event
        elif isinstance(event, Finished):
            if reader.parser.stopped:
                event = replace(event, reason="stop", completion_tokens=num_tokens)
            for delta in reader.finish():
                yield delta
            yield event
        elif not reader.parser.stopped:
            num_tokens += 1
            for delta in reader.push(event.id):
                yield delta
            if reader.parser.stopped:
                cancel()


async def _events(mailbox: Mailbox, *, ping_s: float) -> AsyncIterator[Token | Finished | bytes]:
    """Tokens and the end; during silence a comment, with the progress of the prompt if there was any."""
    loop = asyncio.get_running_loop()
    comment, said = PING, loop.time()
    while True:
        event = await mailbox.get(max(0.0, said + ping_s - loop.time()))
        if isinstance(event, Progress):
            comment = f": prefill {event.done / event.total:.1%}\n\n".encode()
        if event is None or isinstance(event, Progress):
            if loop.time() - said >= ping_s:
                said = loop.time()
                yield comment
            continue
        comment, said = PING, loop.time()
        yield event
        if isinstance(event, Finished):
            return


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

    def __init__(self, source: AsyncIterator[bytes], cancel: Callable[[], None]) -> None:
        self._source, self._cancel = source, cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all() -> None:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-store"),
                # a proxy that collects the stream first would defeat it
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for piece in self._source:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await unless_gone(receive, send_all(), self._cancel)
