"""The routes, what stands in front of them, and how errors look.

Nothing here computes: a request is checked, its prompt is encoded in a worker thread, and the engine's own
thread does the rest, so the event loop stays free to notice who hangs up.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cedar.errors import RequestError
from cedar.server import caching, inspecting
from cedar.server.auth import OPEN_ROUTES, Key, RateError, find_key
from cedar.server.chat import chat_completions
from cedar.server.completions import completions
from cedar.server.messages import count_tokens, messages
from cedar.server.responses import responses
from cedar.server.schema import anthropic_error, error_body
from cedar.server.service import Service, json_response

log = logging.getLogger("cedar.server")

_POSTS: dict[str, Any] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
    "/chat/completions": chat_completions,
    "/completions": completions,
    "/responses": responses,
    "/beta/chat/completions": chat_completions,
    "/beta/completions": completions,
    "/anthropic/v1/messages": messages,
    "/anthropic/v1/messages/count_tokens": count_tokens,
    "/tokenize": inspecting.tokenize,
    "/detokenize": inspecting.detokenize,
    "/apply_template": inspecting.apply_template,
    "/v1/requests/{name}/cancel": inspecting.cancel,
    "/v1/cache/purge": caching.cache_purge,
    "/v1/cache/pin": caching.cache_pin,
    "/v1/cache/explain": caching.cache_explain,
}
_GETS: dict[str, Any] = {
    "/v1/models": inspecting.list_models,
    "/v1/models/{name:path}": inspecting.show_model,
    "/models": inspecting.list_models,
    "/health": inspecting.health,
    "/ready": inspecting.ready,
    "/version": inspecting.show_version,
    "/metrics": inspecting.metrics,
    "/v1/cache/stats": caching.cache_stats,
    "/openapi.json": inspecting.openapi,
    "/": inspecting.page,
}
MAX_HEADER_BYTES = 64 * 2**10
_ANTHROPIC = ("/v1/messages", "/anthropic/")


def create_app(service: Service) -> Starlette:
    """The application of one service."""
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in _POSTS.items()]
    routes += [Route(path, endpoint, methods=["GET"]) for path, endpoint in _GETS.items()]
    handlers: dict[Any, Any] = {RequestError: _request_error, HTTPException: _http_error, Exception: _server_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.service = service
    app.router.redirect_slashes = False
    app.add_middleware(Gate, service=service)
    app.add_middleware(RequestIds, service=service)
    return app


def _error(scope: Scope, error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """An error in the shape of the API that was asked."""
    request_id = scope["state"]["request_id"]
    if scope["path"].startswith(_ANTHROPIC):
        body = anthropic_error(str(error), status=error.status, request_id=request_id)
    else:
        body = error_body(str(error), status=error.status, code=error.code, param=error.param)
    headers = dict(headers or {})
    if isinstance(error, RateError):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    elif error.status == 503:
        headers["retry-after"] = "1"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(body, error.status, headers)


async def _request_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error(request.scope, error)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """No such route, or another method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        told = RequestError(f"{what}: expected {allowed}", status=405, code="method_not_allowed")
    else:
        posts = ", ".join(f"POST {path}" for path in list(_POSTS)[:5])
        told = RequestError(
            f"there is no {what}; there are {posts}, GET /v1/models, GET /openapi.json and the page at /",
            status=error.status_code,
            code="not_found",
        )
    return _error(request.scope, told, dict(error.headers or {}))


async def _server_error(request: HttpRequest, error: Exception) -> Response:
    request_id = request.scope["state"]["request_id"]
    told = RequestError(f"internal error, request {request_id}", status=500, code="internal_error")
    return _error(request.scope, told, {"x-request-id": request_id})


class Gate:
    """Lets a request in if its key may: who, which route, how often, how many at once."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._keys = app, service.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in OPEN_ROUTES:
            await self._app(scope, receive, send)
            return
        try:
            key = find_key(self._keys, dict(scope["headers"]))
            key.enter(scope["path"])
        except RequestError as error:
            await _error(scope, error)(scope, receive, send)
            return
        scope["state"]["api_key"] = key
        try:
            await self._app(scope, receive, send)
        finally:
            key.leave()


class RequestIds:
    """Gives every request an id, tells it in a header, and logs one line when the answer has gone out."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

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
                headers = [h for h in message.get("headers", []) if h[0] not in (b"x-request-id", b"request-id")]
                names = (b"x-request-id", b"request-id")
                message = {**message, "headers": [*headers, *((name, request_id.encode()) for name in names)]}
            await send(message)

        app = self._app
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            app = _error(scope, RequestError(f"the headers have more than {MAX_HEADER_BYTES} bytes; send less"))
        try:
            await app(scope, receive, send_named)
        except Exception:
            log.exception("request %s failed", request_id, extra={"fields": {"request_id": request_id}})
            raise
        finally:
            path = scope["path"] if scope["path"] in _POSTS or scope["path"] in _GETS else "other"
            self._service.metrics.answered(path, status)
            key = scope["state"].get("api_key")
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(time.monotonic() - began, 4),
                **({"key": key.name} if isinstance(key, Key) else {}),
                **scope["state"].get("told", {}),
            }
            log.info(
                "%s %s %s %.3fs %s%s",
                scope["method"],
                scope["path"],
                status,
                fields["seconds"],
                request_id[:8],
                f" {key.name}" if isinstance(key, Key) else "",
                extra={"fields": fields},
            )
