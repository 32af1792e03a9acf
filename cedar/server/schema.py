"""What a client may send, and the shapes that several routes share.

Every route of answers ends up as a `ChatRequest` or a `CompletionRequest`: the others are translated first, so a
field means the same whatever API it came by.

Source: serving.md 6.2 to 6.4, 6.6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from cedar.chat.effort import DEFAULT_EFFORT, effort_number
from cedar.chat.encode import Conversation, Message, Tool, parse_messages, parse_tools
from cedar.chat.grammar import check_schema
from cedar.config.serve import GenerationDefaults
from cedar.engine.request import DecoderReplay, Finished, Replay
from cedar.errors import RequestError

MAX_STOPS = 16
MAX_TOOLS = 128

# without effect on the answer by their nature
_SILENT = (
    "user", "user_id", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "verbosity",
)  # fmt: skip

Parsed = TypeVar("Parsed", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled"]


class Fields(msgspec.Struct, kw_only=True):
    """What chat and plain completions have in common: how tokens are chosen, and how the answer is sent."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_STOPS)] | None = None
    decoder_replay: DecoderReplay | None = None
    replay: Replay | None = None
    cache_salt: str | None = None
    cache: bool | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check(self) -> None:
        """What types alone do not say.

        Raises:
            RequestError: The field is named.
        """
        if len(self.stops) > MAX_STOPS or "" in self.stops:
            raise RequestError(
                f"stop holds {len(self.stops)} strings, expected at most {MAX_STOPS}, none empty", param="stop"
            )
        for token_id in self.logit_bias or ():
            if not (token_id.isascii() and token_id.isdigit()):
                raise RequestError(
                    f"logit_bias has the key {token_id!r}, expected token ids (POST /tokenize gives them)",
                    param="logit_bias",
                )

    def sampling(self) -> dict[str, Any]:
        """Arguments of `ModelFiles.sampling`, but for the answer's length and log-probabilities."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": [(int(token_id), bias) for token_id, bias in (self.logit_bias or {}).items()],
            "seed": self.seed,
            "stop_token_ids": self.stop_token_ids or (),
        }


class ChatRequest(Fields, kw_only=True):
    """`POST /v1/chat/completions`; messages, tools and effort have checks of their own in `cedar.chat`."""

    messages: Any
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None

    @property
    def answer_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: the tokens of a text, without anything around it, or of a chat's whole prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    add_special_tokens: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class PurgeRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/cache/purge`: everything, or what one salt of the asking key has."""

    cache_salt: str | None = None
    model: str | None = None


class PinRequest(ChatRequest, kw_only=True):
    """`POST /v1/cache/pin`: the prompt of a chat request, to be kept or let go."""

    pinned: bool = True


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        RequestError: `invalid_json`.
    """
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        kind = {list: "a list", str: "a string", type(None): "null"}.get(type(values), "a number or a boolean")
        raise RequestError(f"the body is {kind}, expected a JSON object", code="invalid_json")
    return values


def convert(values: Mapping[str, Any], kind: type[Parsed], *, strict: bool = False) -> tuple[Parsed, list[str]]:
    """The request of an object, and warnings about fields that had no effect.

    Raises:
        RequestError: A field of the wrong type or range (`param` names it), or in strict mode an unknown one.
    """
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    warnings = []
    for name in values:
        if name in known or name in _SILENT:
            continue
        if strict:
            raise RequestError(
                f"unknown field {name!r}; this server is strict: leave it out", param=name, code="unknown_field"
            )
        warnings.append(f"unknown field {name!r} was ignored")
    try:
        return msgspec.convert(values, kind), warnings
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None


def parse_chat_request(body: bytes, *, strict: bool = False) -> tuple[ChatRequest, list[str]]:
    """The request, and warnings about fields that had no effect.

    Raises:
        RequestError: Not JSON, not an object, or a field of the wrong type or range (`param` names it).
    """
    request, warnings = convert(parse_object(body), ChatRequest, strict=strict)
    request.check()
    return request, warnings


def _named(message: str) -> RequestError:
    """The message of msgspec with the field in front; it says "Expected `int`, got `str` - at `$.max_tokens`"."""
    what, _, path = message.partition(" - at `$")
    param = path.rstrip("`").removeprefix(".")
    if what.startswith("Object missing required field"):
        missing = what.split("`")[1]
        param = f"{param}.{missing}" if param else missing
        return RequestError(f"{param} is missing", param=param)
    return RequestError(f"{param}: {what[:1].lower()}{what[1:].replace('`', '')}", param=param or None)


def thinking_of(request: ChatRequest, defaults: GenerationDefaults) -> tuple[bool, int]:
    """Whether the model reasons, and with what effort.

    The first of these that is there decides: `reasoning_effort` none, `thinking`, any other effort, the model's
    default.

    Raises:
        RequestError: An effort that nobody knows.
    """
    effort = None if request.reasoning_effort is None else effort_number(request.reasoning_effort)
    if request.reasoning_effort is not None and effort is None:
        return False, DEFAULT_EFFORT
    if request.thinking is not None:
        return request.thinking.type == "enabled", effort or DEFAULT_EFFORT
    return effort is not None or defaults.thinking, effort or DEFAULT_EFFORT


def conversation(
    request: ChatRequest,
    defaults: GenerationDefaults,
    *,
    dropped_lines: Sequence[str] = (),
    param: str = "messages",
) -> Conversation:
    """What the prompt is made of.

    Args:
        dropped_lines: A line of a system message that begins with one of these is left out: some clients put a
            number there that differs in every request, and nothing could be found in a cache.

    Raises:
        RequestError: A message, a tool or an effort that cannot be understood, or an image.
    """
    messages = parse_messages(request.messages, param=param, images=False)
    thinking, effort = thinking_of(request, defaults)
    continues = _continues(request.messages, messages)
    schema = answer_schema(request)
    if continues and (schema is not None or tool_choice(request)[0] == "required"):
        raise RequestError("an answer with a prefix cannot have a response_format or a forced tool", param=param)
    mode, _ = tool_choice(request)
    return Conversation(
        messages=tuple(_without_lines(message, dropped_lines) for message in messages),
        tools=() if request.tools is None or mode == "none" else offered_tools(request.tools),
        thinking=thinking,
        effort=effort,
        response_format={"type": "json_object"} if schema == {"type": "object"} else schema,
        continue_last=continues,
    )


def offered_tools(raw: object) -> tuple[Tool, ...]:
    """The tools of a request, within the limits.

    Raises:
        RequestError: Not function tools, too many, a name given twice, or a schema that is none or too large.
    """
    tools = parse_tools(raw)
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"there are {len(tools)} tools, expected at most {MAX_TOOLS}", param="tools")
    for i, tool in enumerate(tools):
        check_schema(tool.parameters or {}, f"tools[{i}].function.parameters")
        if tool.name in {other.name for other in tools[:i]}:
            raise RequestError(f"two tools are called {tool.name!r}", param=f"tools[{i}].function.name")
    return tools


def tool_choice(request: ChatRequest) -> tuple[Literal["none", "auto", "required"], str]:
    """The mode, and the name of the function that must be called if there is one.

    Raises:
        RequestError: Something else.
    """
    choice = request.tool_choice
    if choice is None:
        return "auto", ""
    if choice in ("none", "auto", "required"):
        return choice, ""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if isinstance(name, str):
            return "required", name
    raise RequestError(
        f"tool_choice is {msgspec.json.encode(choice).decode()}, expected none, auto, required or "
        '{"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def answer_schema(request: ChatRequest) -> Mapping[str, Any] | None:
    """The JSON schema that the answer must follow, or None.

    Raises:
        RequestError: A `response_format` of an unknown type or without its schema.
    """
    form = request.response_format
    kind = form.get("type") if isinstance(form, Mapping) else form
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema" or not isinstance(form, Mapping):
        raise RequestError(
            f"response_format is {kind!r}, expected text, json_object or json_schema", param="response_format.type"
        )
    holder = form.get("json_schema")
    if not isinstance(holder, Mapping) or "schema" not in holder:
        raise RequestError(
            "response_format.json_schema needs a schema", param="response_format.json_schema.schema"
        )  # fmt: skip
    check_schema(holder["schema"], "response_format.json_schema.schema")
    return dict(holder["schema"])


def silent_calls(prompt: Conversation) -> list[str]:
    """A warning if calls of earlier turns came without the reasoning that belongs to them."""
    silent = sum(bool(message.tool_calls and not message.reasoning.strip()) for message in prompt.messages)
    if not (silent and prompt.thinking and prompt.tools):
        return []
    return [f"{silent} assistant messages with tool calls came without reasoning_content: it was left empty; send it"]


def in_reasoning(prompt: Conversation) -> bool:
    """Whether the answer begins inside its reasoning: a continued answer that has content is past it."""
    return prompt.thinking and not (prompt.continue_last and prompt.messages[-1].content)


def _continues(raw: Any, messages: tuple[Message, ...]) -> bool:
    # DeepSeek's `prefix`: the last assistant message is the beginning of the answer
    return messages[-1].role == "assistant" and bool(raw[-1].get("prefix"))


def _without_lines(message: Message, starts: Sequence[str]) -> Message:
    if message.role != "system" or not starts:
        return message

    def kept(text: str) -> str:
        if not any(start in text for start in starts):
            return text
        return "\n".join(line for line in text.split("\n") if not line.startswith(tuple(starts)))

    if isinstance(message.content, str):
        return replace(message, content=kept(message.content))
    pieces = [kept(piece) if isinstance(piece, str) else piece for piece in message.content]
    return replace(message, content=tuple(piece for piece in pieces if piece != ""))


def usage(ends: Sequence[Finished], *, reasoning_tokens: int) -> dict[str, Any]:
    """OpenAI's and DeepSeek's counts; several answers to one prompt count it once."""
    first = ends[0]
    completion_tokens = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": first.prompt_tokens + completion_tokens,
        "prompt_cache_hit_tokens": first.cached_tokens,
        "prompt_cache_miss_tokens": first.prompt_tokens - first.cached_tokens,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens, "image_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def timings(end: Finished) -> dict[str, Any]:
    """An extension: where the time went, in seconds, what the sequence's cache held, and what of it ran again."""
    return {
        "queue_s": round(end.queue_s, 4),
        "prefill_s": round(end.prefill_s, 4),
        "decode_s": round(end.decode_s, 4),
        "cache_bytes": end.cache_bytes,
        "cache_tier": end.cache_tier,
        "resume": end.resume,
        "replayed_tokens": end.replayed_tokens,
    }


def draft_stats(end: Finished) -> dict[str, Any]:
    """An extension, where there were drafts: `x_spec`, how many were verified and how many stood."""
    if not end.drafted_tokens:
        return {}
    return {"x_spec": {name: getattr(end, name) for name in ("drafted_tokens", "accepted_tokens", "draft_steps")}}


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    **_TYPES,
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(message: str, *, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error(message: str, *, status: int, request_id: str) -> dict[str, Any]:
    """Anthropic's shape of an error."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
