"""Requests made from the types of the openai and anthropic SDKs: what they can say is understood (about 20 s)."""

from __future__ import annotations

import random
import types
import typing
from collections import abc
from collections.abc import Callable
from typing import Any, Literal, NotRequired, Required, Union

import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from typing_extensions import get_type_hints, is_typeddict

Running = Any
KINDS: dict[str, type] = {
    "/v1/chat/completions": chat_create_params.CompletionCreateParamsNonStreaming,
    "/v1/completions": completion_create_params.CompletionCreateParamsNonStreaming,
    "/v1/responses": response_create_params.ResponseCreateParamsNonStreaming,
    "/v1/messages": message_create_params.MessageCreateParamsNonStreaming,
    "/v1/messages/count_tokens": message_count_tokens_params.MessageCountTokensParams,
}
DEEPEST = 7


class Unmakeable(Exception):
    """The type is no JSON, or lies too deep."""


def make(hint: Any, rng: random.Random, depth: int = 0) -> Any:
    """A random value of a type as JSON."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Required, NotRequired, typing.Annotated):
        return make(arguments[0], rng, depth)
    if origin is Literal:
        return rng.choice(arguments)
    if origin in (Union, types.UnionType):
        for choice in rng.sample(arguments, len(arguments)):
            try:
                return make(choice, rng, depth)
            except Unmakeable:
                continue
        raise Unmakeable
    if origin in (list, abc.Iterable, abc.Sequence) or hint in (list, abc.Iterable):
        number = rng.choice((0, 1, 1, 2))
        try:
            return [make(arguments[0] if arguments else str, rng, depth + 1) for _ in range(number)]
        except Unmakeable:
            return []
    if origin in (dict, abc.Mapping):
        return {rng.choice(("k", "1", "ä")): make(arguments[1], rng, depth + 1) for _ in range(rng.randrange(2))}
    if is_typeddict(hint):
        return make_object(hint, rng, depth)
    simple: dict[Any, Callable[[], Any]] = {
        str: lambda: rng.choice(("", "Hi", "fox 🦊", "json", "call_1", "user", "a\nb", "data:image/png;base64,AAAA")),
        int: lambda: rng.choice((0, 1, 2, 7, -1, 2**31)),
        float: lambda: rng.choice((0.0, 0.5, 1.0, 1.9, 5.0)),
        bool: lambda: rng.random() < 0.5,
        type(None): lambda: None,
        object: lambda: rng.choice((None, 1, "x", {"type": "string"})),
        Any: lambda: rng.choice((None, 1, "x", {"type": "object"})),
        dict: lambda: {"type": "object"},
    }
    if hint in simple:
        return simple[hint]()
    raise Unmakeable(hint)


def make_object(kind: type, rng: random.Random, depth: int) -> dict[str, Any]:
    if depth > DEEPEST:
        raise Unmakeable
    needed = getattr(kind, "__required_keys__", frozenset())
    # few of the optional fields: each request reaches further into the checks that way
    share = rng.choice((0.0, 0.05, 0.2)) if depth == 0 else 0.3
    made = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name not in needed and typing.get_origin(hint) is not Required and rng.random() >= share:
            continue
        try:
            made[name] = make(hint, rng, depth + 1)
        except Unmakeable:
            if name in needed:
                raise
    return made


def settle(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Often a model that exists and a short answer, so that what lies behind those checks is reached."""
    if rng.random() < 0.8:
        body["model"] = "nonsense"
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if name in body:
                body[name] = 3
    if rng.random() < 0.5 and "messages" in body:
        body["messages"] = [*body["messages"][:1], {"role": "user", "content": "Hi"}]
    return body


@pytest.mark.parametrize("num_requests", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_bodies_of_the_sdks(
    fuzzed: Any, num_requests: int, assert_shape: Callable[[str, httpx.Response], None]
) -> None:
    rng = random.Random(num_requests)
    statuses: dict[str, set[int]] = {path: set() for path in KINDS}
    with httpx.Client(base_url=fuzzed.url, timeout=30) as client:
        for number in range(num_requests):
            path = list(KINDS)[number % len(KINDS)]
            body = settle(make(KINDS[path], rng), rng)
            if rng.random() < 0.2:
                body["stream"] = True
            response = client.post(path, json=body)
            statuses[path].add(response.status_code)
            assert_shape(path, response)
    print(statuses)
    # both what is served and what is refused by name occurs everywhere
    assert all({200, 400} <= found for found in statuses.values()), statuses


def test_a_value_of_every_kind_can_be_made() -> None:
    for kind in KINDS.values():
        seen: set[str] = set()
        for seed in range(400):
            seen |= set(make(kind, random.Random(seed)))
        fields = set(get_type_hints(kind))
        assert len(seen) > 0.9 * len(fields), fields - seen
