"""`POST /v1/messages` and its token count: Anthropic's shapes, translated to a chat and back.

Source: serving.md 6.1 to 6.4; field reports C19, C20, C34.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cedar.chat.parse import Answer, AnswerReader, Delta
from cedar.engine.request import Finished
from cedar.errors import RequestError
from cedar.server.chat import begin, calls_as_text
from cedar.server.schema import ChatRequest, Thinking, anthropic_error, conversation, convert, parse_object
from cedar.server.service import Answers, Service, json_response, read_body, respond
from cedar.server.stream import Step, sse


class CountRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`: what decides the prompt."""

    model: str
    messages: list[Any]
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    thinking: Any = None
    output_config: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    stop_sequences: list[str] | None = None


async def messages(request: HttpRequest) -> Any:
    """Translate, then as a chat; the answer goes back as content blocks."""
    service: Service = request.app.state.service
    asked, warnings = convert(parse_object(await read_body(request)), MessagesRequest, strict=service.config.strict)
    chat = to_chat(asked)
    chat.max_tokens, chat.temperature, chat.top_p, chat.top_k = (
        asked.max_tokens,
        asked.temperature,
        asked.top_p,
        asked.top_k,
    )
    chat.stop = asked.stop_sequences or None
    chat.check()
    answers = await begin(service, request, chat, warnings)
    writer = MessagesWriter(service, answers, chat)
    return await respond(request, answers, writer, stream=bool(asked.stream))


async def count_tokens(request: HttpRequest) -> Response:
    """Tokens of the prompt that the same request to `/v1/messages` would have."""
    service: Service = request.app.state.service
    # clients send the whole request here too: its other fields count for nothing
    asked, _ = convert(parse_object(await read_body(request)), CountRequest)
    chat = to_chat(asked)
    service.check_model(chat.model)
    prompt = conversation(chat, service.files.defaults, dropped_lines=service.config.dropped_lines)
    ids = await service.encode(request, prompt, None)
    return json_response({"input_tokens": len(ids)})


def to_chat(asked: CountRequest) -> ChatRequest:
    """The same question in OpenAI's shape.

    Raises:
        RequestError: A block or a tool that cannot be understood.
    """
    translated: list[dict[str, Any]] = []
    system = _system(asked.system)
    if system:
        translated.append({"role": "system", "content": system})
    for i, message in enumerate(asked.messages):
        translated += _message(message, f"messages[{i}]")
    chat = ChatRequest(model=asked.model, messages=translated)
    if asked.tools:
        chat.tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools)]
    choice = asked.tool_choice
    if choice is not None:
        kind = choice.get("type") if isinstance(choice, Mapping) else choice
        plain = {"auto": "auto", "any": "required", "none": "none"}
        if kind == "tool" and isinstance(choice.get("name"), str):
            chat.tool_choice = {"type": "function", "function": {"name": choice["name"]}}
        elif kind in plain:
            chat.tool_choice = plain[kind]
        else:
            raise RequestError(f"tool_choice is {choice!r}, expected auto, any, none or tool", param="tool_choice")
        if choice.get("disable_parallel_tool_use"):
            chat.parallel_tool_calls = False
    _thinking(asked, chat)
    return chat


def _thinking(asked: CountRequest, chat: ChatRequest) -> None:
    if asked.thinking is not None:
        kind = asked.thinking.get("type") if isinstance(asked.thinking, Mapping) else asked.thinking
        if kind not in ("enabled", "disabled", "adaptive"):
            raise RequestError(
                f"thinking.type is {kind!r}, expected enabled, disabled or adaptive", param="thinking.type"
            )
        chat.thinking = Thinking(type="disabled" if kind == "disabled" else "enabled")
    options = asked.output_config
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise RequestError("output_config must be an object", param="output_config")
    if options.get("effort") is not None:
        chat.reasoning_effort = options["effort"]
    form = options.get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        chat.response_format = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _system(system: object) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    if not isinstance(system, list):
        raise RequestError("system must be a text or a list of text blocks", param="system")
    return "\n\n".join(_block_text(block, f"system[{i}]") for i, block in enumerate(system))


def _block_text(block: object, param: str) -> str:
    if isinstance(block, Mapping) and block.get("type") == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    kind = block.get("type") if isinstance(block, Mapping) else block
    raise RequestError(f"{param} is a block of type {kind!r}, expected text", param=param)


def _message(message: object, param: str) -> list[dict[str, Any]]:
    """One message becomes several where tool results stand beside text."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{param} must be an object with role and content", param=param)
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{param}.role is {role!r}, expected user, assistant or system", param=f"{param}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{param}.content must be a text or a list of blocks", param=f"{param}.content")
    return _assistant(content, param) if role == "assistant" else _user(content, str(role), param)


def _assistant(content: list[Any], param: str) -> list[dict[str, Any]]:
    texts, reasoning, calls = [], "", []
    for j, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "thinking":
            reasoning += str(block.get("thinking") or "")
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        # the thoughts of another model, sealed: nothing can be read there
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, f"{param}.content[{j}]"))
    turn: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(texts)}
    turn |= {"reasoning_content": reasoning} if reasoning else {}
    return [turn | ({"tool_calls": calls} if calls else {})]


def _user(content: list[Any], role: str, param: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for j, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            if parts:
                turns.append({"role": role, "content": parts})
                parts = []
            turns.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": _result(block.get("content"), f"{param}.content[{j}].content"),
                }
            )
        elif kind == "image":
            parts.append({"type": "image_url", "image_url": {}})
        else:
            parts.append({"type": "text", "text": _block_text(block, f"{param}.content[{j}]")})
    if parts or not turns:
        turns.append({"role": role, "content": parts})
    return turns


def _result(content: object, param: str) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{param} must be a text or a list of blocks", param=param)
    return [
        {"type": "image_url", "image_url": {}}
        if isinstance(block, Mapping) and block.get("type") == "image"
        else {"type": "text", "text": _block_text(block, f"{param}[{i}]")}
        for i, block in enumerate(content)
    ]


def _tool(tool: object, param: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise RequestError(
            f"{param} is of type {kind!r}; this server runs no tools itself: offer functions with an input_schema",
            param=param,
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


class MessagesWriter:
    """One answer as content blocks: thinking, text, and a block a call."""

    def __init__(self, service: Service, answers: Answers, chat: ChatRequest) -> None:
        self._service, self._answers, self._chat = service, answers, chat
        self._warnings = {"warnings": answers.warnings} if answers.warnings else {}
        self._answer = Answer()
        self._end: Finished | None = None
        self._open = ""
        self._num_blocks = 0

    def begin(self) -> Iterable[bytes]:
        # the prompt's tokens are known, what was cached is not yet: both come again with message_delta
        num_prompt = len(self._answers.prompts[0])
        usage = {**_usage(Finished(reason="stop", prompt_tokens=num_prompt)), "output_tokens": 0}
        message = {**self._envelope(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield sse({"type": "message_start", "message": message}, "message_start")
        yield sse({"type": "ping"}, "ping")

    def add(self, step: Step) -> None:
        self._answer.add(step.deltas)
        self._end = step.end

    def events(self, step: Step) -> Iterable[bytes]:
        self.add(step)
        for delta in step.deltas:
            yield from self._delta(delta)
        if step.end is not None:
            yield from self._stop_block()
            reason, stop = self._reason()
            body = {"stop_reason": reason, "stop_sequence": stop}
            yield sse({"type": "message_delta", "delta": body, "usage": _usage(step.end)}, "message_delta")

    def close(self) -> Iterable[bytes]:
        yield sse({"type": "message_stop"}, "message_stop")

    def error(self, error: RequestError) -> bytes:
        body = anthropic_error(str(error), status=error.status, request_id=self._answers.request_id)
        return sse(body, "error")

    def body(self) -> dict[str, Any]:
        """The answer in one piece; a call whose input is no JSON object is shown as text instead."""
        assert self._end is not None
        answer, blocks = self._answer, []
        broken = not all(call.valid for call in answer.calls)
        if answer.reasoning:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        text = answer.content + (calls_as_text(answer) if broken else "")
        if text:
            blocks.append({"type": "text", "text": text})
        if broken:
            self._service.metrics.parse_failed()
        else:
            blocks += [
                {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
                for call in answer.calls
            ]
        reason, stop = self._reason()
        if broken and reason == "tool_use":
            reason = "end_turn"
        message = {**self._envelope(), "content": blocks, "stop_reason": reason, "stop_sequence": stop}
        return {**message, "usage": _usage(self._end)}

    def _delta(self, delta: Delta) -> Iterable[bytes]:
        if delta.call is not None and delta.call.id:
            yield from self._start_block(
                f"call {delta.call.index}",
                {"type": "tool_use", "id": delta.call.id, "name": delta.call.name, "input": {}},
            )
            return
        if delta.call is not None:
            piece = {"type": "input_json_delta", "partial_json": delta.call.arguments}
        elif delta.reasoning:
            yield from self._start_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            piece = {"type": "thinking_delta", "thinking": delta.reasoning}
        else:
            yield from self._start_block("text", {"type": "text", "text": ""})
            piece = {"type": "text_delta", "text": delta.content}
        yield self._event("content_block_delta", delta=piece)

    def _start_block(self, kind: str, block: dict[str, Any]) -> Iterable[bytes]:
        if kind == self._open:
            return
        yield from self._stop_block()
        self._open = kind
        yield self._event("content_block_start", content_block=block)

    def _stop_block(self) -> Iterable[bytes]:
        if self._open:
            if self._open == "thinking":
                yield self._event("content_block_delta", delta={"type": "signature_delta", "signature": ""})
            yield self._event("content_block_stop")
            self._open = ""
            self._num_blocks += 1

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse({"type": kind, "index": self._num_blocks, **fields}, kind)

    def _reason(self) -> tuple[str, str | None]:
        assert self._end is not None
        reader = self._answers.readers[0]
        assert isinstance(reader, AnswerReader)
        if reader.stopped:
            return "stop_sequence", reader.parser.stop_met
        if self._end.reason == "length":
            return "max_tokens", None
        return ("tool_use" if self._answer.calls else "end_turn"), None

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._answers.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._service.files.name,
            **self._warnings,
        }


def _usage(end: Finished) -> dict[str, Any]:
    # clients add the three: they are a partition of the prompt
    return {
        "input_tokens": end.prompt_tokens - end.cached_tokens,
        "cache_read_input_tokens": end.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": end.completion_tokens,
    }
