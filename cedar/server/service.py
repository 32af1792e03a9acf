"""One model behind the routes, and the way every answer goes: submit, read, stream or collect."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cedar.cache.turns import ReplayMap
from cedar.chat.encode import Conversation, encode
from cedar.chat.grammar import Grammars
from cedar.chat.parse import Answer
from cedar.config.serve import ServeConfig
from cedar.engine.load import ModelFiles, context_tokens
from cedar.engine.request import Constraint, Finished, Handle, Request, SamplingParams, check_room
from cedar.errors import RequestError
from cedar.planner.kv import global_bytes_per_token
from cedar.server.auth import Key, key_of, load_keys
from cedar.server.metrics import ServerMetrics
from cedar.server.schema import Fields
from cedar.server.stream import Bell, EventStream, Mailbox, Reader, Step, late, read_answers, unless_gone
from cedar.version import version

log = logging.getLogger("cedar.server")

VERSION = version()
_LOOK_S = 0.05


class Service:
    """One model behind the routes; requests that come before its weights are read wait for them.

    Attributes:
        engine: None while the weights are being read.
        stopping: The server was told to stop; open answers end with an error.
        draining: It was told to stop once the open answers have ended; new requests are refused.
        open: Answers on their way, by request id.
    """

    def __init__(self, files: ModelFiles, config: ServeConfig) -> None:
        self.files, self.config = files, config
        self.context = context_tokens(files, config)
        self.engine: Any = None
        self.stopping = self.draining = False
        self.started_s = int(time.time())
        self.metrics = ServerMetrics(lambda: self.engine)
        self.grammars = Grammars(files.tokenizer, files.config.vocab_size)
        self.keys = [] if config.api_key_file is None else load_keys(config.api_key_file)
        self.open: dict[str, Answers] = {}
        self.bell = Bell()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._heard_s = time.monotonic()
        self._look(self._loop.time())

    def _look(self, due_s: float) -> None:
        """Twenty times a second: is the event loop late, and does the engine still say something?"""
        if self.stopping:
            return
        self.metrics.lagged(max(0.0, self._loop.time() - due_s))
        self._notice_silence(time.monotonic())
        due_s = self._loop.time() + _LOOK_S
        self._loop.call_at(due_s, self._look, due_s)

    def _notice_silence(self, now: float) -> None:
        # one request alone may wait in the queue for long
        heard_s = max((answers.mailbox.heard_s for answers in self.open.values()), default=now)
        self._heard_s = max(self._heard_s, heard_s)
        if now - self._heard_s > self.config.stall_s:
            oldest = next(iter(self.open))
            silent_s, self._heard_s = now - heard_s, now
            fields = {"fields": {"request_id": oldest}}
            log.warning(
                "the engine says nothing: no event for %.0f s, %d requests are open, the oldest is %s",
                silent_s, len(self.open), oldest, extra=fields,
            )  # fmt: skip

    def ready(self, engine: Any) -> None:
        """The weights are read; called in the event loop."""
        self.engine = engine
        self._changed.set()

    def drain(self) -> None:
        """Refuse what comes, let what runs go on; called in the event loop."""
        self.draining = True

    def stop(self) -> None:
        """Refuse what comes and end what runs; called in the event loop, waits for nothing."""
        self.stopping = True
        self._changed.set()
        if self.engine is not None:
            self.engine.close(timeout_s=0)

    async def wait(self) -> None:
        """Until there is an engine.

        Raises:
            RequestError: The server stops, or stops first.
        """
        if not self.draining:
            await self._changed.wait()
        if self.stopping or self.draining:
            raise RequestError("the server is shutting down", code="overloaded", status=503)

    async def turns(self) -> ReplayMap | None:
        """What knows assistant turns by the tokens they were generated as; None if nothing does.

        Raises:
            RequestError: The server stops.
        """
        await self.wait()
        cache = getattr(self.engine, "cache", None)
        return None if cache is None else cache.turns

    async def encode(self, request: HttpRequest, prompt: Conversation, salt: str | None) -> list[int]:
        """Token ids of a prompt as `begin` of `cedar.server.chat` makes them, for routes that only look."""
        turns = None if self.engine is None else await self.turns()
        recall = None if turns is None else turns.reader(cache_salt(key_of(request), salt))
        return await asyncio.to_thread(encode, prompt, self.files.tokenizer, recall)

    def check_model(self, name: str) -> None:
        """Refuse a name that nobody gave this model.

        Raises:
            RequestError: `model_not_found`, with the names that exist.
        """
        names = (self.files.name, *self.config.aliases)
        if name not in names and "*" not in names:
            raise RequestError(
                f"no model is called {name!r} here; there is {', '.join(map(repr, names))} (GET /v1/models lists it)",
                param="model",
                code="model_not_found",
                status=404,
            )

    def describe(self) -> dict[str, Any]:
        """The model as `GET /v1/models` shows it."""
        defaults = self.files.defaults
        return {
            "id": self.files.name,
            "object": "model",
            "type": "model",
            "display_name": self.files.name,
            "created": self.started_s,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started_s)),
            "owned_by": "cedar",
            "aliases": list(self.config.aliases),
            "max_model_len": self.context,
            "max_output_tokens": min(self.context, defaults.answer_tokens(thinking=False, effort=0)),
            "input_modalities": ["text"],
            "thinking": defaults.thinking,
            "global_kv_bytes_per_token": global_bytes_per_token(self.files.config),
        }

    @property
    def fingerprint(self) -> str:
        """Which weights and which arithmetic an answer comes from (serving.md 6.3)."""
        if self.engine is None:
            return "loading"
        mark = getattr(getattr(self.engine, "cache", None), "fingerprint", b"")
        return f"{mark.hex()[:12]}-{self.engine.numerics}"

    def gauges(self) -> tuple[int, int]:
        """Sequences that run, and requests that wait."""
        return (0, 0) if self.engine is None else (self.engine.metrics.running, self.engine.metrics.waiting)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What a route wants of the engine.

    Attributes:
        prompts: Each gets `n` answers, numbered prompt by prompt.
        fields: How the cache may be used, and for whom.
        new_constraint: Makes the constraint of one answer.
        remember: Told the ids and the reading of an answer that came to its end; called in a worker thread.
        warnings: What the client should know beside the answer.
    """

    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    n: int
    new_reader: Callable[[], Reader]
    fields: Fields
    new_constraint: Callable[[], Constraint | None] = lambda: None
    remember: Callable[[Sequence[int], Answer], object] | None = None
    warnings: Sequence[str] = ()


class Writer(Protocol):
    """Puts the steps of the answers of one request into the shape of one API."""

    def begin(self) -> Iterable[bytes]:
        """Events before the first step."""

    def events(self, step: Step) -> Iterable[bytes]:
        """Events that one step causes."""

    def add(self, step: Step) -> None:
        """Take a step in for `body`."""

    def close(self) -> Iterable[bytes]:
        """Events after the last step."""

    def body(self) -> dict[str, Any]:
        """The answer in one piece."""

    def error(self, error: RequestError) -> bytes:
        """The event of an error after streaming began."""


class Answers:
    """The answers of one request while the engine works on them.

    Attributes:
        key: Whose they are; None where the server has no keys.
        was_cancelled: Somebody asked for that, by `POST /v1/requests/ID/cancel`.
        told: What the request's line in the log says beside its route.
        warnings: What the client should know beside the answer.
    """

    def __init__(self, service: Service, request_id: str, ask: Ask, key: Key | None) -> None:
        self.request_id, self.key, self.prompts = request_id, key, ask.prompts
        self.readers = [ask.new_reader() for _ in range(len(ask.prompts) * ask.n)]
        self.warnings, self._remember = list(ask.warnings), ask.remember
        self.was_cancelled = False
        self.mailbox = Mailbox(service.bell)
        self.handles: list[Handle] = []
        self.began_s = time.monotonic()
        self.told: dict[str, Any] = {}
        self._service = service

    def cancel(self) -> None:
        """Let the engine go."""
        for handle in self.handles:
            handle.cancel()
        self._service.open.pop(self.request_id, None)

    async def steps(self, timeout_s: float | None) -> AsyncIterator[Step | bytes]:
        """All steps, counted on the way.

        Raises:
            RequestError: The model failed, or no token came in time.
        """
        metrics = self._service.metrics
        cancels = [handle.cancel for handle in self.handles]
        ping_s = self._service.config.ping_s
        ttft_s = first_index = None
        said: list[tuple[list[int], Answer]] = [([], Answer()) for _ in self.readers]
        async for step in read_answers(self.mailbox, self.readers, cancels, ping_s=ping_s, deadline_s=timeout_s):
            if not isinstance(step, bytes):
                if self._remember is not None:
                    ids, answer = said[step.index]
                    answer.add(step.deltas)
                    if step.token is not None:
                        ids.append(step.token.id)
                    if step.end is not None and step.end.reason in ("stop", "length"):
                        # before the client knows that it has ended, and can ask again
                        await asyncio.to_thread(self._remember, ids, answer)
                if step.token is not None and ttft_s is None:
                    ttft_s, first_index = time.monotonic() - self.began_s, step.index
                if step.end is not None:
                    window = self._service.files.config.attention.sliding_window
                    is_first = step.index == first_index
                    metrics.end(step.end, window, ttft_s=ttft_s if is_first else None)
                    self._tell(step.end, ttft_s)
                    if self.key is not None:
                        self.key.spend(step.end.prompt_tokens + step.end.completion_tokens)
                    if step.end.reason == "timeout":
                        raise late(timeout_s)
                    if step.end.reason in ("error", "cancelled"):
                        raise self._failure()
            yield step

    def _tell(self, end: Finished, ttft_s: float | None) -> None:
        told = self.told
        told["prompt_tokens"], told["cached_tokens"] = end.prompt_tokens, end.cached_tokens
        told["completion_tokens"] = told.get("completion_tokens", 0) + end.completion_tokens
        told["resume"], told["finish_reason"] = end.resume, end.reason
        if ttft_s is not None:
            told["ttft_s"] = round(ttft_s, 4)
        elif end.reason == "stop":
            fields = {"fields": {"request_id": self.request_id}}
            log.warning("request %s: the model ended its answer with its first token", self.request_id, extra=fields)

    def _failure(self) -> RequestError:
        if self.was_cancelled:
            return RequestError("the request was cancelled", code="cancelled", status=499)
        if self._service.stopping:
            return RequestError("the server is shutting down", code="overloaded", status=503)
        # the cause is in the log: it may hold paths and shapes that are nobody's business
        return RequestError("the model failed on this request", code="internal_error", status=500)


async def submit(service: Service, request: HttpRequest, ask: Ask) -> Answers:
    """Hand a request to the engine, once there is one.

    Raises:
        RequestError: No room in the context, a grammar that cannot be compiled, a full queue, or a server that stops.
    """
    for prompt in ask.prompts:
        check_room(len(prompt), ask.sampling.max_tokens, service.context)
    count = len(ask.prompts) * ask.n
    # a large schema takes a while to compile
    constraints = [await asyncio.to_thread(ask.new_constraint) for _ in range(count)]
    await service.wait()
    request_id = request.scope["state"]["request_id"]
    answers = Answers(service, request_id, ask, key_of(request))
    request.scope["state"]["told"] = answers.told
    try:
        for index in range(count):
            one = Request(
                prompt_ids=tuple(ask.prompts[index // ask.n]),
                sampling=replace(ask.sampling, seed=derived_seed(ask.sampling.seed, index % ask.n)),
                constraint=constraints[index],
                id=request_id if count == 1 else f"{request_id}-{index}",
                decoder_replay=ask.fields.decoder_replay or "bounded",
                replay=ask.fields.replay or "bounded",
                salt=cache_salt(answers.key, ask.fields.cache_salt),
                priority=ask.fields.priority or 0,
                draft=ask.fields.draft or "auto",
                # of several answers the first token of any is in time
                timeout_s=ask.fields.timeout_s if count == 1 else None,
                keep=ask.fields.cache is not False,
            )
            answers.handles.append(service.engine.submit(one, on_event=partial(answers.mailbox.put, index)))
    except RequestError:
        answers.cancel()
        raise
    service.open[request_id] = answers
    return answers


def cache_salt(key: Key | None, salt: str | None) -> bytes:
    """Prefixes are shared among the requests of one key alone: a hit would tell of another's prompt.

    >>> cache_salt(None, None)
    b''
    """
    return f"{key.name}\0{salt or ''}".encode() if key is not None else (salt or "").encode()


def derived_seed(seed: int | None, index: int) -> int | None:
    """The seed of answer `index`; the first has the request's own."""
    if seed is None or index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little", signed=True)


async def respond(
    request: HttpRequest, answers: Answers, writer: Writer, *, stream: bool, timeout_s: float | None = None
) -> Any:
    """The HTTP answer: a stream of events, or one body."""
    if stream:
        return EventStream(_stream(answers, writer, timeout_s), answers.cancel, _warning_headers(answers))
    ends: list[Finished] = []
    failures: list[RequestError] = []

    async def gather() -> None:
        try:
            async for step in answers.steps(timeout_s):
                if not isinstance(step, bytes):
                    writer.add(step)
                    if step.end is not None:
                        ends.append(step.end)
        except RequestError as error:
            failures.append(error)

    await unless_gone(request.receive, gather(), answers.cancel)
    if failures:
        raise failures[0]
    if len(ends) < len(answers.readers):
        # the client hung up; nobody reads this
        return Response(status_code=499)
    return json_response(writer.body(), headers=_cost_headers(ends[0]) | _warning_headers(answers))


async def _stream(answers: Answers, writer: Writer, timeout_s: float | None) -> AsyncIterator[bytes]:
    for event in writer.begin():
        yield event
    try:
        async for step in answers.steps(timeout_s):
            if isinstance(step, bytes):
                yield step
                continue
            for event in writer.events(step):
                yield event
    except RequestError as error:
        # the status line is long gone
        yield writer.error(error)
        return
    for event in writer.close():
        yield event


def _warning_headers(answers: Answers) -> dict[str, str]:
    if not answers.warnings:
        return {}
    # a header holds no line ends, and of letters only the simplest
    return {"x-warning": "; ".join(answers.warnings).encode("ascii", "backslashreplace").decode().replace("\n", " ")}


def _cost_headers(end: Finished) -> dict[str, str]:
    return {
        "x-cache-hit": f"{end.cached_tokens}/{end.prompt_tokens};tier={end.cache_tier};resume={end.resume}",
        "x-queue-ms": f"{end.queue_s * 1000:.0f}",
        "x-prefill-ms": f"{end.prefill_s * 1000:.0f}",
    }


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json", headers=headers)


async def read_body(request: HttpRequest) -> bytes:
    """The whole body, or as much as it takes to know that it is too long.

    Raises:
        RequestError: Not JSON by its content type, or too large.
    """
    limit = request.app.state.service.config.max_body_bytes
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            f"the content type is {kind!r}, expected application/json (curl: -H 'content-type: application/json')",
            code="unsupported_media_type",
            status=415,
        )
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        # a little more is read and dropped, so that the client has finished sending when the answer comes
        if size <= limit:
            pieces.append(piece)
        elif size > 2 * limit:
            break
    if size > limit:
        raise RequestError(f"the body is larger than {limit} bytes; send less", code="request_too_large", status=413)
    return b"".join(pieces)
