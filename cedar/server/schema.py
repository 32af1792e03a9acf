"""What a client may send and what it gets back, in OpenAI's shapes with DeepSeek's fields.

Source: serving.md 6.2 to 6.4.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cedar.chat.effort import DEFAULT_EFFORT, effort_number
from cedar.chat.encode import Conversation, Message, Special, parse_messages, parse_tools
from cedar.chat.parse import Answer, AnswerReader, CallDelta, Delta
from cedar.chat.tokenizer import IMAGE
from cedar.config.serve import GenerationDefaults
from cedar.engine.request import Finished
from cedar.errors import RequestError

MAX_STOPS = 16

# understood by other servers, without effect here yet: the answer says so instead of failing
_IGNORED = (
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "parallel_tool_calls",
)
# without effect on the answer by their nature
_SILENT = ("user", "user_id", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled"]


class ChatRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/chat/completions`; messages, tools and effort have checks of their own in `cedar.chat`."""

    model: str
    messages: Any
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | int | None = None
    tools: Any = None
    tool_choice: Any = None
    response_format: Any = None

    @property
    def answer_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def parse_chat_request(body: bytes) -> tuple[ChatRequest, list[str]]:
    """The request, and warnings about fields that had no effect.

    Raises:
        RequestError: Not JSON, not an object, or a field of the wrong type or range (`param` names it).
    """
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        kind = {list: "a list", str: "a string", type(None): "null"}.get(type(values), "a number or a boolean")
        raise RequestError(f"the body is {kind}, expected a JSON object", code="invalid_json")
    try:
        request = msgspec.convert(values, ChatRequest)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    _check(request)
    return request, _warnings(values)


def _named(message: str) -> RequestError:
    """The message of msgspec with the field in front; it says "Expected `int`, got `str` - at `$.max_tokens`"."""
    what, _, path = message.partition(" - at `$")
    param = path.rstrip("`").removeprefix(".")
    if what.startswith("Object missing required field"):
        missing = what.split("`")[1]
        param = f"{param}.{missing}" if param else missing
        return RequestError(f"{param} is missing", param=param)
    return RequestError(f"{param}: {what[:1].lower()}{what[1:].replace('`', '')}", param=param or None)


def _check(request: ChatRequest) -> None:
    if len(request.stops) > MAX_STOPS or "" in request.stops:
        raise RequestError(
            f"stop holds {len(request.stops)} strings, expected at most {MAX_STOPS}, none empty", param="stop"
        )
    if request.n not in (None, 1):
        raise RequestError(f"n is {request.n}; this server gives one answer a request, send it n times", param="n")
    if request.tool_choice not in (None, "auto", "none"):
        raise RequestError(
            f"tool_choice is {msgspec.json.encode(request.tool_choice).decode()}; this server supports auto and none",
            param="tool_choice",
        )
    kind = (
        request.response_format.get("type") if isinstance(request.response_format, Mapping) else request.response_format
    )
    if kind not in (None, "text", "json_object"):
        raise RequestError(
            f"response_format is {kind!r}; this server supports text and json_object", param="response_format.type"
        )


def _warnings(values: dict[str, Any]) -> list[str]:
    known = {field.name for field in msgspec.structs.fields(ChatRequest)}
    warnings = []
    for name, value in values.items():
        if name in _IGNORED and value not in (None, 0, 1, False, {}):
            warnings.append(f"{name} has no effect on this server")
        elif name not in known and name not in _IGNORED and name not in _SILENT:
            warnings.append(f"unknown field {name!r} was ignored")
    return warnings


def conversation(request: ChatRequest, defaults: GenerationDefaults) -> Conversation:
    """What the prompt is made of.

    Thinking is on or off by the first of these that is there: `reasoning_effort` none, `thinking`, any other
    effort, the model's default.

    Raises:
        RequestError: A message, a tool or an effort that cannot be understood, or an image.
    """
    messages = parse_messages(request.messages)
    for i, message in enumerate(messages):
        if not isinstance(message.content, str) and Special(IMAGE) in message.content:
            raise RequestError(
                "images are not enabled: this model has no vision tower; send text only",
                param=f"messages[{i}].content[{message.content.index(Special(IMAGE))}]",
                code="invalid_image",
            )
    effort = None if request.reasoning_effort is None else effort_number(request.reasoning_effort)
    if request.reasoning_effort is not None and effort is None:
        thinking = False
    elif request.thinking is not None:
        thinking = request.thinking.type == "enabled"
    else:
        thinking = effort is not None or defaults.thinking
    as_json = isinstance(request.response_format, Mapping) and request.response_format.get("type") == "json_object"
    tools = () if request.tools is None or request.tool_choice == "none" else parse_tools(request.tools)
    return Conversation(
        messages=messages,
        tools=tools,
        thinking=thinking,
        effort=effort or DEFAULT_EFFORT,
        response_format={"type": "json_object"} if as_json else None,
        continue_last=_continues(request.messages, messages),
    )


def in_reasoning(prompt: Conversation) -> bool:
    """Whether the answer begins inside its reasoning: a continued answer that has content is past it."""
    return prompt.thinking and not (prompt.continue_last and prompt.messages[-1].content)


def _continues(raw: Any, messages: tuple[Message, ...]) -> bool:
    # DeepSeek's `prefix`: the last assistant message is the beginning of the answer
    return messages[-1].role == "assistant" and bool(raw[-1].get("prefix"))


class Reply:
    """One answer on its way: the chunks of a stream, or the whole body at the end."""

    def __init__(
        self, reader: AnswerReader, *, request_id: str, model: str, fingerprint: str, warnings: list[str]
    ) -> None:
        self._reader = reader
        self.answer = Answer()
        self._id = f"chatcmpl-{request_id}"
        self._model, self._fingerprint = model, fingerprint
        self._created = int(time.time())
        self._warnings = warnings

    def first_chunk(self) -> dict[str, Any]:
        chunk = self._chunk({"role": "assistant", "content": ""})
        return {**chunk, "warnings": self._warnings} if self._warnings else chunk

    def chunk(self, delta: Delta) -> dict[str, Any]:
        self.answer.add([delta])
        if delta.reasoning:
            return self._chunk({"reasoning_content": delta.reasoning})
        if delta.call is not None:
            return self._chunk({"tool_calls": [_call_delta(delta.call)]})
        return self._chunk({"content": delta.content})

    def last_chunks(self, end: Finished, *, include_usage: bool) -> list[dict[str, Any]]:
        """The chunk with the reason; usage rides on it, or comes in one of its own if that was asked for."""
        chunk = {**self._chunk({}, self._reason(end)), "timings": timings(end), **self._parse_error()}
        usage = self._usage(end)
        if not include_usage:
            return [{**chunk, "usage": usage}]
        return [chunk, {**self._envelope("chat.completion.chunk"), "choices": [], "usage": usage}]

    def body(self, end: Finished) -> dict[str, Any]:
        """The answer in one piece; a call whose arguments are no JSON object is shown as text instead."""
        message: dict[str, Any] = {"role": "assistant", "content": self.answer.content}
        if self.answer.reasoning:
            message["reasoning_content"] = self.answer.reasoning
        error = self._parse_error()
        reason = self._reason(end)
        if error:
            message["content"] += "".join(f"\n{call.name}({call.arguments})" for call in self.answer.calls)
            reason = "stop" if reason == "tool_calls" else reason
        elif self.answer.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.answer.calls
            ]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        body = {**self._envelope("chat.completion"), "choices": [choice], "usage": self._usage(end), **error}
        body["timings"] = timings(end)
        return {**body, "warnings": self._warnings} if self._warnings else body

    def _reason(self, end: Finished) -> str:
        return "tool_calls" if self.answer.calls and end.reason == "stop" else end.reason

    def _parse_error(self) -> dict[str, Any]:
        broken = [call.name for call in self.answer.calls if not call.valid]
        return {"tool_parse_error": f"the arguments of {broken[0]!r} are not a JSON object"} if broken else {}

    def _usage(self, end: Finished) -> dict[str, Any]:
        return {
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": end.completion_tokens,
            "total_tokens": end.prompt_tokens + end.completion_tokens,
            "prompt_cache_hit_tokens": end.cached_tokens,
            "prompt_cache_miss_tokens": end.prompt_tokens - end.cached_tokens,
            "prompt_tokens_details": {"cached_tokens": end.cached_tokens, "image_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
        }

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._envelope("chat.completion.chunk"), "choices": [choice]}


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if call.id:
        return {
            "index": call.index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": ""},
        }
    return {"index": call.index, "function": {"arguments": call.arguments}}


def timings(end: Finished) -> dict[str, Any]:
    """An extension: where the time went, in seconds, and what the sequence's cache held."""
    return {
        "queue_s": round(end.queue_s, 4),
        "prefill_s": round(end.prefill_s, 4),
        "decode_s": round(end.decode_s, 4),
        "cache_bytes": end.cache_bytes,
    }


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(message: str, *, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
