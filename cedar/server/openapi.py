"""The OpenAPI description, made from the same types that check the requests."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from cedar.server.completions import CompletionRequest
from cedar.server.messages import CountRequest, MessagesRequest
from cedar.server.responses import ResponsesRequest
from cedar.server.schema import ChatRequest, DetokenizeRequest, PinRequest, PurgeRequest, TokenizeRequest

_POSTS: tuple[tuple[str, type[msgspec.Struct], str], ...] = (
    ("/v1/chat/completions", ChatRequest, "An answer to a conversation"),
    ("/v1/completions", CompletionRequest, "Text that continues a prompt"),
    ("/v1/responses", ResponsesRequest, "An answer as items; nothing is kept"),
    ("/v1/messages", MessagesRequest, "An answer as content blocks"),
    ("/v1/messages/count_tokens", CountRequest, "Tokens of a prompt"),
    ("/apply_template", ChatRequest, "The prompt of a conversation"),
    ("/tokenize", TokenizeRequest, "The tokens of a text or a conversation"),
    ("/detokenize", DetokenizeRequest, "The text of tokens"),
    ("/v1/cache/explain", ChatRequest, "What the cache holds of a prompt"),
    ("/v1/cache/pin", PinRequest, "Keep what the cache holds of a prompt"),
    ("/v1/cache/purge", PurgeRequest, "Forget what is in memory"),
)
_GETS = (
    ("/v1/models", "The model"),
    ("/health", "The process lives"),
    ("/ready", "Answers can begin at once"),
    ("/version", "What runs"),
    ("/metrics", "What it counted, for Prometheus"),
    ("/v1/cache/stats", "Sizes of the cache's tiers"),
)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@lru_cache(maxsize=1)
def describe_api() -> dict[str, Any]:
    """The description as one JSON object."""
    kinds = list(dict.fromkeys(kind for _, kind, _ in _POSTS))
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    _say_what_types_cannot(components)
    paths: dict[str, Any] = {}
    for path, kind, summary in _POSTS:
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        operation = {"summary": summary, "requestBody": {"required": True, "content": content}}
        paths[path] = {"post": {**operation, "responses": _responses(200, 400, 401, 403, 404, 413, 415, 429, 503, 504)}}
    for path, summary in _GETS:
        paths[path] = {"get": {"summary": summary, "responses": _responses(200, 401, 503)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "cedar", "version": "1"},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }


def _responses(*statuses: int) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        str(status): {"description": "ok"} if status == 200 else {"description": "an error", "content": body}
        for status in statuses
    }


def _say_what_types_cannot(components: dict[str, Any]) -> None:
    """Fields with checks of their own in `cedar.chat` are open for msgspec: give a reader their shape."""
    for name, roles in (
        ("ChatRequest", ["system", "developer", "user", "assistant", "tool"]),
        ("PinRequest", ["system", "developer", "user", "assistant", "tool"]),
        ("MessagesRequest", ["user", "assistant", "system"]),
        ("CountRequest", ["user", "assistant", "system"]),
    ):
        message = {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": roles}, "content": {"type": "string"}},
        }
        components[name]["properties"]["messages"] = {"type": "array", "minItems": 1, "items": message}
    components["CompletionRequest"]["properties"]["prompt"] = {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}},
            {"type": "array", "items": {"type": "integer"}},
        ]
    }
    items = {"type": "array", "items": {"type": "object"}}
    components["ResponsesRequest"]["properties"]["input"] = {"anyOf": [{"type": "string"}, items]}
