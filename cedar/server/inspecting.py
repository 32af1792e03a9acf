"""Routes that say something instead of answering: models, health, metrics, tokens, templates, cancel, the page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cedar.chat.encode import render, to_ids
from cedar.errors import RequestError
from cedar.server.auth import check_admin, key_of
from cedar.server.completions import prompt_ids
from cedar.server.openapi import describe_api
from cedar.server.schema import (
    ChatRequest,
    DetokenizeRequest,
    TokenizeRequest,
    conversation,
    convert,
    parse_chat_request,
    parse_object,
)
from cedar.server.service import VERSION, Service, json_response, read_body
from cedar.version import commit

_PAGE = Path(__file__).with_name("static") / "index.html"
_SCRAPE_S = 1.0


async def health(request: HttpRequest) -> Response:
    """The process is alive; `status` says whether the weights are read."""
    service: Service = request.app.state.service
    status = "stopping" if service.stopping or service.draining else "loading" if service.engine is None else "ok"
    body: dict[str, Any] = {
        "status": status,
        "model": service.files.name,
        "version": VERSION,
        "commit": commit() or None,
    }
    if service.engine is not None:
        running, waiting = service.gauges()
        body |= {"running": running, "waiting": waiting}
    return json_response(body)


async def ready(request: HttpRequest) -> Response:
    """200 once answers can begin at once."""
    service: Service = request.app.state.service
    is_ready = service.engine is not None and not (service.stopping or service.draining)
    return json_response({"ready": is_ready}, status=200 if is_ready else 503)


async def show_version(request: HttpRequest) -> Response:
    """What runs: cedar's version and commit, its compiled kernels, and the fingerprint that answers carry."""
    service: Service = request.app.state.service
    kernels = None
    if service.engine is not None:
        # torch is there by now; before, importing it would hold up the event loop
        from cedar.kernels.cpu.native import build_id

        kernels = build_id() or None
    body = {"version": VERSION, "commit": commit() or None, "kernels": kernels}
    return json_response({**body, "system_fingerprint": service.fingerprint})


async def metrics(request: HttpRequest) -> Response:
    """Prometheus' text format; with keys, only for a key that may administer."""
    check_admin(request)
    service: Service = request.app.state.service
    cache = None
    if service.engine is not None:
        # a long step of the engine must not hold up who scrapes: what the cache said last is shown then
        with contextlib.suppress(RequestError, TimeoutError):
            asked = asyncio.wrap_future(service.engine.ask_cache(lambda cache: cache.describe()))
            cache = await asyncio.wait_for(asked, timeout=_SCRAPE_S)
    return Response(service.metrics.text(cache), media_type="text/plain; version=0.0.4; charset=utf-8")


async def openapi(request: HttpRequest) -> Response:
    """The OpenAPI description of all routes."""
    return json_response(describe_api())


async def list_models(request: HttpRequest) -> Response:
    """One model, in a list that OpenAI's and Anthropic's clients both read."""
    model = request.app.state.service.describe()
    return json_response(
        {"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}
    )


async def show_model(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    service.check_model(request.path_params["name"])
    return json_response(service.describe())


async def tokenize(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    asked, _ = convert(parse_object(await read_body(request)), TokenizeRequest, strict=service.config.strict)
    tokenizer = service.files.tokenizer
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    if asked.messages is not None:
        chat = ChatRequest(model="", messages=asked.messages, tools=asked.tools)
        prompt = conversation(chat, service.files.defaults, dropped_lines=service.config.dropped_lines)
        ids = await asyncio.to_thread(lambda: to_ids(render(prompt), tokenizer))
    elif asked.add_special_tokens:
        ids = (await asyncio.to_thread(prompt_ids, asked.prompt, tokenizer))[0]
    else:
        ids = await asyncio.to_thread(tokenizer.encode, asked.prompt or "")
    pieces = [tokenizer.token_bytes(token_id).decode("utf-8", errors="replace") for token_id in ids]
    return json_response({"count": len(ids), "max_model_len": service.context, "tokens": ids, "token_strs": pieces})


async def detokenize(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    asked, _ = convert(parse_object(await read_body(request)), DetokenizeRequest, strict=service.config.strict)
    size = len(service.files.tokenizer)
    for i, token_id in enumerate(asked.tokens):
        if not 0 <= token_id < size:
            raise RequestError(f"tokens[{i}] is {token_id}, expected 0 to {size - 1}", param=f"tokens[{i}]")
    return json_response({"prompt": service.files.tokenizer.decode(asked.tokens)})


async def apply_template(request: HttpRequest) -> Response:
    """The prompt that a chat request would have: its text, special tokens by name, and its ids."""
    service: Service = request.app.state.service
    chat, warnings = parse_chat_request(await read_body(request), strict=service.config.strict)
    service.check_model(chat.model)
    prompt = conversation(chat, service.files.defaults, dropped_lines=service.config.dropped_lines)
    ids = await service.encode(request, prompt, chat.cache_salt)
    text = service.files.tokenizer.decode(ids)
    return json_response({"prompt": text, "tokens": ids, "count": len(ids), "warnings": warnings})


async def cancel(request: HttpRequest) -> Response:
    """End a request by the id that its `x-request-id` header or its answer's `id` gave."""
    service: Service = request.app.state.service
    name = request.path_params["name"].rpartition("-")[2].rpartition("_")[2]
    answers = service.open.get(name)
    key = key_of(request)
    if answers is None or (key is not None and not key.admin and answers.key is not key):
        raise RequestError(f"no request {name!r} is running", code="not_found", status=404)
    answers.was_cancelled = True
    answers.cancel()
    return json_response({"id": name, "cancelled": True})


async def page(request: HttpRequest) -> Response:
    """The chat page: one file that may run its own script and style, load nothing, and talk to this server alone."""
    content, headers = _page()
    return Response(content, media_type="text/html; charset=utf-8", headers=headers)


@lru_cache(maxsize=1)
def _page() -> tuple[bytes, dict[str, str]]:
    content = _PAGE.read_bytes()

    def digest(tag: bytes) -> str:
        inside = content.partition(b"<" + tag + b">")[2].partition(b"</" + tag + b">")[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"

    policy = (
        f"default-src 'none'; style-src {digest(b'style')}; script-src {digest(b'script')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return content, {"cache-control": "no-cache", "content-security-policy": policy}
