"""The routes: chat completions, models, health, and the chat page.

Nothing here computes: a request is checked, its prompt is encoded in a worker thread, and the engine's own
thread does the rest, so the event loop stays free to notice who hangs up.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cedar.chat.encode import encode
from cedar.chat.parse import AnswerReader, ChatParser, Delta
from cedar.config.serve import ServeConfig
from cedar.engine.load import ModelFiles
from cedar.engine.request import Finished, Request, check_room
from cedar.errors import RequestError
from cedar.planner.kv import global_bytes_per_token
from cedar.server.schema import Reply, conversation, error_body, in_reasoning, parse_chat_request
from cedar.server.stream import DONE, EventStream, Mailbox, answer, sse, unless_gone

log = logging.getLogger("cedar.server")

_PAGE = Path(__file__).with_name("static") / "index.html"
_PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


VERSION = importlib.metadata.version("cedar-lm")
FINGERPRINT = f"cedar-{VERSION}"


class Service:
    """One model behind the routes; requests that come before its weights are read wait for them.

    Attributes:
        engine: None while the weights are being read.
        stopping: The server was told to stop; open answers end with an error.
    """

    def __init__(self, files: ModelFiles, config: ServeConfig) -> None:
        self.files, self.config = files, config
        self.context = config.context(files.config)
        self.engine: Any = None
        self.stopping = False
        self.started_s = int(time.time())
        self._changed = asyncio.Event()

    def ready(self, engine: Any) -> None:
        """The weights are read; called in the event loop."""
        self.engine = engine
        self._changed.set()

    def stop(self) -> None:
        """Refuse what comes and end what runs; called in the event loop, waits for nothing."""
        self.stopping = True
        self._changed.set()
        if self.engine is not None:
            self.engine.close(timeout_s=0)

    async def wait(self) -> None:
        """Until there is an engine.

        Raises:
            RequestError: The server stops first.
        """
        await self._changed.wait()
        if self.stopping:
            raise RequestError("the server is shutting down", code="overloaded", status=503)

    def describe(self) -> dict[str, Any]:
        """The model as `GET /v1/models` shows it."""
        defaults = self.files.defaults
        return {
            "id": self.files.name,
            "object": "model",
            "created": self.started_s,
            "owned_by": "cedar",
            "max_model_len": self.context,
            "max_output_tokens": min(self.context, defaults.answer_tokens(thinking=False, effort=0)),
            "input_modalities": ["text"],
            "thinking": defaults.thinking,
            "global_kv_bytes_per_token": global_bytes_per_token(self.files.config),
        }


def create_app(service: Service) -> Starlette:
    """The application of one service."""
    routes = [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", show_model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/", page, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {RequestError: _request_error, HTTPException: _http_error, Exception: _server_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.service = service
    app.router.redirect_slashes = False
    app.add_middleware(RequestIds)
    return app


async def health(request: HttpRequest) -> Response:
    """The process is alive; `status` says whether the weights are read."""
    service: Service = request.app.state.service
    status = "stopping" if service.stopping else "loading" if service.engine is None else "ok"
    body = {"status": status, "model": service.files.name, "version": VERSION}
    if service.engine is not None:
        metrics = service.engine.metrics
        body |= {"running": metrics.running, "waiting": metrics.waiting}
    return _json(body)


async def ready(request: HttpRequest) -> Response:
    """200 once answers can begin at once."""
    service: Service = request.app.state.service
    is_ready = service.engine is not None and not service.stopping
    return _json({"ready": is_ready}, status=200 if is_ready else 503)


async def list_models(request: HttpRequest) -> Response:
    return _json({"object": "list", "data": [request.app.state.service.describe()]})


async def show_model(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    _check_model(service, request.path_params["name"])
    return _json(service.describe())


async def page(request: HttpRequest) -> Response:
    return Response(_PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)


async def chat_completions(request: HttpRequest) -> Any:
    """Validate, encode, submit; then stream the answer or collect it."""
    service: Service = request.app.state.service
    chat, warnings = parse_chat_request(await _body(request, service.config.max_body_bytes))
    _check_model(service, chat.model)
    prompt = conversation(chat, service.files.defaults)
    # a long prompt takes a while to encode, and the event loop has others to serve
    ids = await asyncio.to_thread(encode, prompt, service.files.tokenizer)
    sampling = service.files.sampling(
        context=service.context,
        num_prompt=len(ids),
        chat=True,
        thinking=prompt.thinking,
        effort=prompt.effort,
        temperature=chat.temperature,
        top_k=chat.top_k,
        top_p=chat.top_p,
        min_p=chat.min_p,
        max_tokens=chat.answer_tokens,
        seed=chat.seed,
    )
    check_room(len(ids), sampling.max_tokens, service.context)
    await service.wait()
    request_id = request.scope["state"]["request_id"]
    mailbox = Mailbox()
    handle = service.engine.submit(
        Request(prompt_ids=tuple(ids), sampling=sampling, id=request_id), on_event=mailbox.put
    )
    reader = AnswerReader(service.files.tokenizer, ChatParser(thinking=in_reasoning(prompt), stop=chat.stops))
    reply = Reply(reader, request_id=request_id, model=service.files.name, fingerprint=FINGERPRINT, warnings=warnings)
    pieces = answer(mailbox, reader, handle.cancel, ping_s=service.config.ping_s)
    if chat.stream:
        return EventStream(_stream(service, pieces, reply, include_usage=chat.include_usage), handle.cancel)
    return await _collect(request, service, pieces, reply, handle.cancel)


async def _stream(
    service: Service, pieces: AsyncIterator[Delta | Finished | bytes], reply: Reply, *, include_usage: bool
) -> AsyncIterator[bytes]:
    yield sse(reply.first_chunk())
    async for piece in pieces:
        if isinstance(piece, bytes):
            yield piece
        elif isinstance(piece, Delta):
            yield sse(reply.chunk(piece))
        elif piece.reason in ("error", "cancelled"):
            # the status line is long gone: an error event, and no [DONE]
            yield sse(_error_body(_failure(service, piece)))
        else:
            for chunk in reply.last_chunks(piece, include_usage=include_usage):
                yield sse(chunk)
            yield DONE


async def _collect(
    request: HttpRequest,
    service: Service,
    pieces: AsyncIterator[Delta | Finished | bytes],
    reply: Reply,
    cancel: Callable[[], None],
) -> Response:
    ends: list[Finished] = []

    async def gather() -> None:
        async for piece in pieces:
            if isinstance(piece, Delta):
                reply.answer.add([piece])
            elif isinstance(piece, Finished):
                ends.append(piece)

    await unless_gone(request.receive, gather(), cancel)
    if not ends:
        # the client hung up; nobody reads this
        return Response(status_code=499)
    if ends[0].reason in ("error", "cancelled"):
        raise _failure(service, ends[0])
    return _json(reply.body(ends[0]))


def _failure(service: Service, end: Finished) -> RequestError:
    if service.stopping:
        return RequestError("the server is shutting down", code="overloaded", status=503)
    # the cause is in the log: it may hold paths and shapes that are nobody's business
    return RequestError("the model failed on this request", code="internal_error", status=500)


async def _body(request: HttpRequest, limit: int) -> bytes:
    """The whole body, or as much as it takes to know that it is too long."""
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


def _check_model(service: Service, name: str) -> None:
    if name != service.files.name:
        raise RequestError(
            f"no model is called {name!r} here; there is {service.files.name!r} (GET /v1/models lists it)",
            param="model",
            code="model_not_found",
            status=404,
        )


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json", headers=headers)


def _error_body(error: RequestError) -> dict[str, Any]:
    return error_body(str(error), status=error.status, code=error.code, param=error.param)


async def _request_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _json(_error_body(error), error.status, {"retry-after": "1"} if error.status == 503 else None)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """No such route, or another method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        body = error_body(f"{what}: expected {allowed}", status=405, code="method_not_allowed")
    else:
        body = error_body(
            f"there is no {what}; there are POST /v1/chat/completions, GET /v1/models, GET /health and the page at /",
            status=error.status_code,
            code="not_found",
        )
    return _json(body, error.status_code, dict(error.headers or {}))


async def _server_error(request: HttpRequest, error: Exception) -> Response:
    request_id = request.scope["state"]["request_id"]
    body = error_body(f"internal error, request {request_id}", status=500, code="internal_error")
    return _json(body, 500, {"x-request-id": request_id})


class RequestIds:
    """Gives every request an id, tells it in a header, and logs one line when the answer has gone out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.monotonic(), 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [h for h in message.get("headers", []) if h[0] != b"x-request-id"]
                message = {**message, "headers": [*headers, (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            log.info(
                "%s %s %s %.3fs %s", scope["method"], scope["path"], status, time.monotonic() - began, request_id[:8]
            )
