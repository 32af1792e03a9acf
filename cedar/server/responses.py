"""`POST /v1/responses`: OpenAI's newer shape, stateless, translated to a chat and back.

Source: serving.md 6.1; field reports C16, C17, C18, C37.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest

from cedar.chat.encode import dumps
from cedar.chat.parse import Answer, Delta
from cedar.engine.request import Finished
from cedar.errors import RequestError
from cedar.server.chat import begin, calls_as_text
from cedar.server.schema import ChatRequest, Thinking, convert, draft_stats, error_body, parse_object, timings
from cedar.server.service import Answers, Service, read_body, respond
from cedar.server.stream import Step, sse


class Reasoning(msgspec.Struct):
    effort: str | int | None = None
    summary: Any = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/responses`; nothing is kept between requests."""

    model: str
    input: Any
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    text: Any = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    include: list[str] | None = None
    truncation: str | None = None
    max_tool_calls: int | None = None
    stream_options: Any = None


async def responses(request: HttpRequest) -> Any:
    """Translate, then as a chat; the answer goes back as items."""
    service: Service = request.app.state.service
    asked, warnings = convert(parse_object(await read_body(request)), ResponsesRequest, strict=service.config.strict)
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(asked, name):
            raise RequestError(f"{name}: nothing is kept between requests; send the whole input", param=name)
    chat, notes = to_chat(asked)
    chat.check()
    answers = await begin(service, request, chat, warnings + notes, param="input")
    writer = ResponsesWriter(service, answers, asked)
    return await respond(request, answers, writer, stream=bool(asked.stream))


def to_chat(asked: ResponsesRequest) -> tuple[ChatRequest, list[str]]:
    """The same question in the shape of chat completions, and what had to be left out.

    Raises:
        RequestError: An item, a tool or a format that cannot be understood.
    """
    turns, notes = _turns(asked.input)
    if asked.instructions:
        turns.insert(0, {"role": "system", "content": asked.instructions})
    chat = ChatRequest(
        model=asked.model,
        messages=turns,
        max_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        tool_choice=asked.tool_choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        thinking=asked.thinking,
        reasoning_effort=asked.reasoning.effort if asked.reasoning else None,
    )
    tools = []
    for i, tool in enumerate(asked.tools or ()):
        if isinstance(tool, Mapping) and tool.get("type") == "function":
            tools.append({"type": "function", "function": tool})
        elif isinstance(tool, Mapping) and isinstance(tool.get("type"), str):
            # agents offer the tools of their home; the functions beside them still work
            notes.append(f"tools[{i}] of type {tool['type']!r} was left out: this server runs no tools itself")
        else:
            raise RequestError(f"tools[{i}] must be an object with a type", param=f"tools[{i}]")
    chat.tools = tools or None
    form = asked.text.get("format") if isinstance(asked.text, Mapping) else None
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        chat.response_format = {"type": "json_schema", "json_schema": form}
    elif form is not None:
        chat.response_format = form
    return chat, notes


def _turns(items: object) -> tuple[list[dict[str, Any]], list[str]]:
    """Chat messages of the input: thoughts, text and calls of one answer together, results behind their calls."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}], []
    if not isinstance(items, list) or not items:
        raise RequestError("input must be a text or a list of items, and not empty", param="input")
    results: dict[str, Any] = {}
    for i, item in enumerate(items):
        if isinstance(item, Mapping) and item.get("type") == "function_call_output":
            call_id = item.get("call_id")
            if not isinstance(call_id, str) or call_id in results:
                raise RequestError(
                    f"input[{i}].call_id is {call_id!r}, expected an id with one output",
                    param=f"input[{i}].call_id",
                    code="invalid_messages",
                )
            results[call_id] = _output(item.get("output"), f"input[{i}].output")
    turns: list[dict[str, Any]] = []
    notes: list[str] = []
    answer: dict[str, Any] | None = None

    def close() -> None:
        nonlocal answer
        for call in (answer or {}).get("tool_calls", ()):
            if call["id"] in results:
                turns.append({"role": "tool", "tool_call_id": call["id"], "content": results.pop(call["id"])})
        answer = None

    def opened() -> dict[str, Any]:
        nonlocal answer
        if answer is None:
            answer = {"role": "assistant", "content": ""}
            turns.append(answer)
        return answer

    for i, item in enumerate(items):
        param = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise RequestError(f"{param} must be an object", param=param)
        kind = item.get("type", "message")
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
            opened().setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            if answer is not None and (answer["content"] or "tool_calls" in answer):
                close()
            thought = _parts(item.get("content")) or _parts(item.get("summary"))
            opened()["reasoning_content"] = opened().get("reasoning_content", "") + thought
        elif kind == "message" and item.get("role") == "assistant":
            if answer is not None and (answer["content"] or "tool_calls" in answer):
                close()
            content = item.get("content")
            opened()["content"] += content if isinstance(content, str) else _parts(content)
        elif kind == "message":
            close()
            turns.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call_output":
            # between two calls of one answer it closes nothing: the calls were made together
            following = items[i + 1] if i + 1 < len(items) else None
            if not (isinstance(following, Mapping) and following.get("type") == "function_call"):
                close()
        elif isinstance(kind, str):
            notes.append(f"{param} of type {kind!r} was left out")
        else:
            raise RequestError(f"{param}.type is {kind!r}", param=f"{param}.type")
    close()
    if results:
        raise RequestError(
            f"input answers the call {next(iter(results))!r}, which no earlier item made", param="input",
            code="invalid_messages",
        )  # fmt: skip
    if not turns:
        raise RequestError("input holds nothing that could be answered", param="input", code="invalid_messages")
    return turns, notes


def _parts(content: object) -> str:
    if not isinstance(content, list):
        return ""
    texts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _output(output: object, param: str) -> Any:
    if isinstance(output, str | list):
        return output
    if isinstance(output, Mapping):
        return dumps(output)
    raise RequestError(f"{param} must be a text or a list of parts", param=param)


class ResponsesWriter:
    """One answer as items: reasoning, a message, and an item a call."""

    def __init__(self, service: Service, answers: Answers, asked: ResponsesRequest) -> None:
        self._service, self._answers, self._asked = service, answers, asked
        self._warnings = {"warnings": answers.warnings} if answers.warnings else {}
        self._answer = Answer()
        self._end: Finished | None = None
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._num_events = 0

    def begin(self) -> Iterable[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress", []))

    def add(self, step: Step) -> None:
        self._answer.add(step.deltas)
        for delta in step.deltas:
            self._grow(delta)
        self._end = step.end

    def events(self, step: Step) -> Iterable[bytes]:
        self._answer.add(step.deltas)
        for delta in step.deltas:
            kind = _item_kind(delta)
            if not self._is_open or self._items[-1]["type"] != kind or (delta.call is not None and delta.call.id):
                yield from self._close_item()
                self._grow(delta)
                yield from self._open_item()
            else:
                self._grow(delta)
            place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
            if delta.reasoning:
                yield self._event("response.reasoning_text.delta", **place, content_index=0, delta=delta.reasoning)
            elif delta.content:
                yield self._event(
                    "response.output_text.delta", **place, content_index=0, delta=delta.content, logprobs=[]
                )
            elif delta.call is not None and delta.call.arguments:
                yield self._event("response.function_call_arguments.delta", **place, delta=delta.call.arguments)
        self._end = step.end
        if step.end is not None:
            yield from self._close_item()

    def close(self) -> Iterable[bytes]:
        status = self._status()
        yield self._event(f"response.{status}", response=self._response(status, self._items))

    def error(self, error: RequestError) -> bytes:
        detail = error_body(str(error), status=error.status, code=error.code, param=error.param)["error"]
        response = {**self._response("failed", self._items), "error": {"code": error.code, "message": str(error)}}
        return self._event("error", **{**detail, "type": "error"}) + self._event("response.failed", response=response)

    def body(self) -> dict[str, Any]:
        """The answer in one piece; a call whose arguments are no JSON object is shown as text instead."""
        items = self._items
        extra: dict[str, Any] = {}
        for item in items:
            item["status"] = "completed"
        broken = next((call.name for call in self._answer.calls if not call.valid), "")
        if broken:
            self._service.metrics.parse_failed()
            text = self._answer.content + calls_as_text(self._answer)
            items = [item for item in items if item["type"] == "reasoning"] + [self._message(text)]
            extra = {"tool_parse_error": f"the arguments of {broken!r} are not a JSON object"}
        return {**self._response(self._status(), items), **extra}

    def _grow(self, delta: Delta) -> None:
        """Put a piece where it belongs, opening an item if none of its kind is last."""
        kind = _item_kind(delta)
        call = delta.call
        is_new = not self._items or self._items[-1]["type"] != kind or (call is not None and bool(call.id))
        if call is not None and call.id:
            item = {
                "type": kind,
                "id": f"fc_{uuid.uuid4().hex}",
                "call_id": call.id,
                "name": call.name,
                "arguments": "",
            }
            self._items.append({**item, "status": "in_progress"})
        elif is_new and kind == "message":
            self._items.append(self._message("", status="in_progress"))
        elif is_new:
            part = {"type": "reasoning_text", "text": ""}
            thoughts = {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": [part]}
            self._items.append({**thoughts, "status": "in_progress"})
        last = self._items[-1]
        if call is not None:
            last["arguments"] += call.arguments
        else:
            last["content"][0]["text"] += delta.reasoning or delta.content

    def _message(self, text: str, status: str = "completed") -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "status": status}
        return {**item, "content": [part]}

    def _open_item(self) -> Iterable[bytes]:
        self._is_open = True
        item = self._items[-1]
        place = {"output_index": len(self._items) - 1}
        if item["type"] == "function_call":
            yield self._event("response.output_item.added", **place, item=item)
            return
        yield self._event("response.output_item.added", **place, item={**item, "content": []})
        part = {**item["content"][0], "text": ""}
        yield self._event("response.content_part.added", **place, item_id=item["id"], content_index=0, part=part)

    def _close_item(self) -> Iterable[bytes]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = "completed"
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if item["type"] == "function_call":
            yield self._event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
        else:
            part = item["content"][0]
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            extra: dict[str, Any] = {} if item["type"] == "reasoning" else {"logprobs": []}
            yield self._event(f"response.{kind}.done", **place, content_index=0, text=part["text"], **extra)
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return sse({"type": kind, "sequence_number": number, **fields}, kind)

    def _status(self) -> str:
        assert self._end is not None
        return "incomplete" if self._end.reason == "length" else "completed"

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        asked, end = self._asked, self._end
        tools = [tool for tool in asked.tools or () if isinstance(tool, Mapping)]
        body: dict[str, Any] = {
            "id": f"resp_{self._answers.request_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._service.files.name,
            "output": items,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "store": False,
            "temperature": asked.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": tools,
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None,
            **self._warnings,
        }
        if end is not None:
            body["usage"] = {
                "input_tokens": end.prompt_tokens,
                "input_tokens_details": {"cached_tokens": end.cached_tokens},
                "output_tokens": end.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._answers.readers[0].reasoning_tokens},
                "total_tokens": end.prompt_tokens + end.completion_tokens,
            }
            body |= {"timings": timings(end), **draft_stats(end)}
        return body


def _item_kind(delta: Delta) -> str:
    if delta.call is not None:
        return "function_call"
    return "reasoning" if delta.reasoning else "message"
