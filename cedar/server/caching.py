"""Routes that look into the cache: its sizes, what of a prompt it holds, keeping and forgetting."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cedar.errors import CapacityError, RequestError
from cedar.server.auth import check_admin, key_of
from cedar.server.schema import PinRequest, PurgeRequest, conversation, convert, parse_chat_request, parse_object
from cedar.server.service import Service, cache_salt, json_response, read_body


async def cache_stats(request: HttpRequest) -> Response:
    """Pages, snapshots and bytes of each tier, and what they were good for."""
    check_admin(request)
    return json_response(await _ask(request, lambda cache: cache.describe()))


async def cache_purge(request: HttpRequest) -> Response:
    """Forget prefixes in memory; pages of running answers live on with them, files stay (`cedar cache purge`)."""
    check_admin(request)
    asked, _ = convert(parse_object(await read_body(request)), PurgeRequest)
    salt = None if asked.cache_salt is None else cache_salt(key_of(request), asked.cache_salt)
    return json_response({"pages": await _ask(request, lambda cache: cache.purge(salt))})


async def cache_explain(request: HttpRequest) -> Response:
    """What the cache holds of a chat request's prompt, and how both go on where they part."""
    service: Service = request.app.state.service
    chat, _ = parse_chat_request(await read_body(request), strict=service.config.strict)
    service.check_model(chat.model)
    prompt = conversation(chat, service.files.defaults, dropped_lines=service.config.dropped_lines)
    ids = await service.encode(request, prompt, chat.cache_salt)
    salt = cache_salt(key_of(request), chat.cache_salt)
    held, own, other = await _ask(request, lambda cache: cache.explain(ids, salt))
    decode = service.files.tokenizer.decode
    # around the place where they part: 16 tokens before it and after
    body = {"prompt_tokens": len(ids), "held_tokens": held, "prompt": decode(own), "nearest": decode(other)}
    note = "the whole prompt is held" if held >= len(ids) - 1 else None
    return json_response({**body, "note": note, "cache_note": _cache_note(body["prompt"], body["nearest"])})


async def cache_pin(request: HttpRequest) -> Response:
    """Keep what the cache holds of a chat request's prompt, or with `pinned: false` let it go again."""
    check_admin(request)
    service: Service = request.app.state.service
    chat, _ = convert(parse_object(await read_body(request)), PinRequest, strict=service.config.strict)
    service.check_model(chat.model)
    prompt = conversation(chat, service.files.defaults, dropped_lines=service.config.dropped_lines)
    ids = await service.encode(request, prompt, chat.cache_salt)
    salt = cache_salt(key_of(request), chat.cache_salt)
    try:
        tokens = await _ask(request, lambda cache: cache.pin(ids, salt, chat.pinned))
    except CapacityError as error:
        raise RequestError(str(error)) from None
    return json_response({"prompt_tokens": len(ids), "tokens": tokens, "pinned": chat.pinned})


def _cache_note(prompt: str, nearest: str) -> str | None:
    # the line of the effort stands first: another effort changes the key of every page
    own, other = (re.search(r"Reasoning Effort: (\d+)", text) for text in (prompt, nearest))
    return "effort_changed" if own and other and own[1] != other[1] else None


async def _ask(request: HttpRequest, question: Any) -> Any:
    service: Service = request.app.state.service
    await service.wait()
    return await asyncio.wrap_future(service.engine.ask_cache(question))
