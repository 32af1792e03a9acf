"""`POST /v1/chat/completions`: OpenAI's shape with DeepSeek's fields. The other chat APIs share `begin`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest

from cedar.chat.encode import Conversation, encode
from cedar.chat.parse import Answer, AnswerReader, CallDelta, ChatParser, Delta
from cedar.chat.tokenizer import Tokenizer
from cedar.engine.request import Constraint, Finished, Token
from cedar.errors import RequestError
from cedar.server.auth import key_of
from cedar.server.schema import (
    ChatRequest,
    answer_schema,
    conversation,
    draft_stats,
    error_body,
    in_reasoning,
    parse_chat_request,
    silent_calls,
    timings,
    tool_choice,
    usage,
)
from cedar.server.service import Answers, Ask, Service, cache_salt, read_body, respond, submit
from cedar.server.stream import DONE, Step, sse


async def chat_completions(request: HttpRequest) -> Any:
    """Validate, encode, submit; then stream the answer or collect it."""
    service: Service = request.app.state.service
    chat, warnings = parse_chat_request(await read_body(request), strict=service.config.strict)
    answers = await begin(service, request, chat, warnings)
    writer = ChatWriter(service, answers, chat)
    return await respond(request, answers, writer, stream=bool(chat.stream), timeout_s=chat.timeout_s)


async def begin(
    service: Service, request: HttpRequest, chat: ChatRequest, warnings: list[str], *, param: str = "messages"
) -> Answers:
    """Encode a chat and hand it to the engine.

    Args:
        warnings: What the client should know already; more may come.

    Raises:
        RequestError: Whatever is wrong with it.
    """
    service.check_model(chat.model)
    files = service.files
    prompt = conversation(chat, files.defaults, dropped_lines=service.config.dropped_lines, param=param)
    turns, salt = await service.turns(), cache_salt(key_of(request), chat.cache_salt)
    recall = None if turns is None else turns.reader(salt)
    # a long prompt takes a while to encode, and the event loop has others to serve
    ids = await asyncio.to_thread(encode, prompt, files.tokenizer, recall)
    sampling = files.sampling(
        context=service.context,
        num_prompt=len(ids),
        chat=True,
        thinking=prompt.thinking,
        effort=prompt.effort,
        max_tokens=chat.answer_tokens,
        logprobs=chat.num_logprobs,
        **chat.sampling(),
    )
    ask = Ask(
        prompts=[ids],
        sampling=sampling,
        n=chat.n or 1,
        new_reader=lambda: AnswerReader(files.tokenizer, ChatParser(thinking=in_reasoning(prompt), stop=chat.stops)),
        new_constraint=constraint_maker(service, chat, prompt),
        fields=chat,
        remember=None if turns is None or chat.cache is False else partial(turns.record, ids, salt=salt),
        warnings=[*warnings, *(silent_calls(prompt) if recall is None else recall.warnings)],
    )
    return await submit(service, request, ask)


def constraint_maker(service: Service, chat: ChatRequest, prompt: Conversation) -> Callable[[], Constraint | None]:
    """What makes the constraint of one answer.

    Raises:
        RequestError: A tool must be called and is not there.
    """
    mode, name = tool_choice(chat)
    schema = answer_schema(chat)
    tools = prompt.tools
    if mode == "required":
        allowed = [tool for tool in tools if not name or tool.name == name]
        if not allowed:
            what = f"the tool {name!r}, which is not among the tools" if name else "a call, and there are no tools"
            raise RequestError(f"tool_choice asks for {what}", param="tool_choice")
    grammars, thinking = service.grammars, in_reasoning(prompt)
    parallel = chat.parallel_tool_calls is not False

    def make() -> Constraint | None:
        if mode == "required":
            return grammars.of_calls(allowed, thinking=thinking, parallel=parallel, param="tools")
        if schema is not None and tools:
            return grammars.of_schema_or_calls(
                schema, tools, thinking=thinking, parallel=parallel, param="response_format"
            )
        if schema is not None:
            return grammars.of_schema(schema, thinking=thinking, param="response_format")
        if tools:
            return grammars.of_optional_calls(tools, parallel=parallel, param="tools")
        return None

    return make


class _Choice:
    """One answer so far."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.logprobs: list[dict[str, Any]] = []
        self.end: Finished | None = None

    @property
    def broken(self) -> str:
        """The name of a call whose arguments are no JSON object, or nothing."""
        return next((call.name for call in self.answer.calls if not call.valid), "")

    def reason(self) -> str:
        assert self.end is not None
        return "tool_calls" if self.answer.calls and self.end.reason == "stop" else self.end.reason


class ChatWriter:
    """Answers in OpenAI's shape: the chunks of a stream, or the whole body at the end."""

    def __init__(self, service: Service, answers: Answers, chat: ChatRequest) -> None:
        self._service, self._answers = service, answers
        self._choices = [_Choice() for _ in answers.readers]
        self._include_usage, self._with_logprobs = chat.include_usage, bool(chat.logprobs)
        self._warnings = {"warnings": answers.warnings} if answers.warnings else {}
        self._created = int(time.time())

    def begin(self) -> Iterable[bytes]:
        for index in range(len(self._choices)):
            chunk = self._chunk(index, {"role": "assistant", "content": ""})
            yield sse({**chunk, **self._warnings} if index == 0 else chunk)

    def add(self, step: Step) -> None:
        choice = self._choices[step.index]
        choice.answer.add(step.deltas)
        choice.end = step.end
        if self._with_logprobs and step.token is not None and self._is_content(step):
            choice.logprobs.append(logprob_entry(self._service.files.tokenizer, step.token))

    def events(self, step: Step) -> Iterable[bytes]:
        choice = self._choices[step.index]
        num_before = len(choice.logprobs)
        self.add(step)
        entries = choice.logprobs[num_before:]
        for delta in step.deltas:
            yield sse(self._chunk(step.index, self._delta(delta), logprobs=entries))
            entries = []
        if entries:
            # the token's text is held back, or part of a character: its probability goes ahead
            yield sse(self._chunk(step.index, {"content": ""}, logprobs=entries))
        if step.end is not None:
            chunk = {**self._chunk(step.index, {}, choice.reason()), "timings": timings(step.end)}
            chunk |= draft_stats(step.end)
            chunk |= self._parse_error(choice)
            is_last = all(other.end is not None for other in self._choices)
            yield sse({**chunk, "usage": self._usage()} if is_last and not self._include_usage else chunk)

    def close(self) -> Iterable[bytes]:
        if self._include_usage:
            yield sse({**self._envelope("chat.completion.chunk"), "choices": [], "usage": self._usage()})
        yield DONE

    def error(self, error: RequestError) -> bytes:
        return sse(error_body(str(error), status=error.status, code=error.code, param=error.param))

    def body(self) -> dict[str, Any]:
        """The answers in one piece; a call whose arguments are no JSON object is shown as text instead."""
        choices, extra = [], {}
        for index, choice in enumerate(self._choices):
            message: dict[str, Any] = {"role": "assistant", "content": choice.answer.content}
            if choice.answer.reasoning:
                message |= self._reasoning(choice.answer.reasoning)
            reason = choice.reason()
            if choice.broken:
                message["content"] += calls_as_text(choice.answer)
                reason = "stop" if reason == "tool_calls" else reason
                extra = self._parse_error(choice)
            elif choice.answer.calls:
                message["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in choice.answer.calls
                ]
            logprobs = {"content": choice.logprobs, "refusal": None} if self._with_logprobs else None
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
        body = {**self._envelope("chat.completion"), "choices": choices, "usage": self._usage(), **extra}
        assert self._choices[0].end is not None
        end = self._choices[0].end
        return {**body, "timings": timings(end), **draft_stats(end), **self._warnings}

    def _delta(self, delta: Delta) -> dict[str, Any]:
        if delta.reasoning:
            return self._reasoning(delta.reasoning)
        return {"content": delta.content} if delta.call is None else {"tool_calls": [_call_delta(delta.call)]}

    def _reasoning(self, text: str) -> dict[str, Any]:
        return {"reasoning_content": text, **({"reasoning": text} if self._service.config.reasoning_alias else {})}

    def _is_content(self, step: Step) -> bool:
        """The token belongs to what people read, not to reasoning or a call."""
        reader = self._answers.readers[step.index]
        assert isinstance(reader, AnswerReader)
        if any(delta.reasoning or delta.call for delta in step.deltas):
            return False
        return not (reader.parser.in_reasoning or reader.parser.num_calls)

    def _parse_error(self, choice: _Choice) -> dict[str, Any]:
        if not choice.broken:
            return {}
        self._service.metrics.parse_failed()
        return {"tool_parse_error": f"the arguments of {choice.broken!r} are not a JSON object"}

    def _usage(self) -> dict[str, Any]:
        ends = [choice.end for choice in self._choices if choice.end is not None]
        return usage(ends, reasoning_tokens=sum(reader.reasoning_tokens for reader in self._answers.readers))

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._answers.request_id}",
            "object": kind,
            "created": self._created,
            "model": self._service.files.name,
            "system_fingerprint": self._service.fingerprint,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        *,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            "finish_reason": reason,
        }
        return {**self._envelope("chat.completion.chunk"), "choices": [choice]}


def calls_as_text(answer: Answer) -> str:
    """Calls that could not be read, for people."""
    return "".join(f"\n{call.name}({call.arguments})" for call in answer.calls)


def logprob_entry(tokenizer: Tokenizer, token: Token) -> dict[str, Any]:
    """One token's probability in OpenAI's shape; `bytes` has the parts of a split character."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        # minus infinity is no JSON number
        return {"token": raw.decode("utf-8", errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}

    return {**named(token.id, token.logprob), "top_logprobs": [named(*pair) for pair in token.top]}


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if call.id:
        return {
            "index": call.index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": ""},
        }
    return {"index": call.index, "function": {"arguments": call.arguments}}
