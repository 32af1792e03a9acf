"""`LLM`: text in, text out, for scripts; chat and engine in one object."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cedar.chat.effort import DEFAULT_EFFORT, effort_number
from cedar.chat.encode import Conversation, encode, parse_messages, parse_tools
from cedar.chat.parse import Answer, AnswerReader, ChatParser, Delta, StopStrings
from cedar.chat.tokenizer import BOS, StreamDecoder
from cedar.config.serve import ServeConfig
from cedar.engine.load import BUNDLED, ModelFiles, open_model, start_engine
from cedar.engine.request import Finished, Handle, Request, SamplingParams, Token
from cedar.errors import CedarError, RequestError

Messages = str | Sequence[Mapping[str, Any]]


class LLM:
    """One loaded model.

    Args:
        model: A model directory in the release's format, or `bundled`.
        serve: Limits; the server's own by default.

    Raises:
        ConfigError: No such model, or a config that breaks a rule.
        FormatError: Its files do not fit together.

    >>> with LLM() as llm:  # doctest: +SKIP
    ...     print(llm.chat("Tell me about a fox.").content)
    """

    def __init__(self, model: str | Path = BUNDLED, *, serve: ServeConfig | None = None) -> None:
        self.files: ModelFiles = open_model(model)
        self.engine = start_engine(self.files, serve or ServeConfig())
        self.last: Finished | None = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine's thread; what was still being generated ends too."""
        self.engine.close()

    def generate(self, prompt: str, *, stop: Sequence[str] = (), **sampling: Any) -> str:
        """The text that follows `prompt`; `stream_generate` gives it piece by piece."""
        return "".join(self.stream_generate(prompt, stop=stop, **sampling))

    def stream_generate(self, prompt: str, *, stop: Sequence[str] = (), **sampling: Any) -> Generator[str]:
        """Pieces of the text that follows `prompt`, as they come.

        Args:
            stop: Strings that end the text and are not part of it.
            sampling: temperature, top_k, top_p, min_p, max_tokens, seed; the model's defaults otherwise.

        Raises:
            RequestError: Empty prompt, a value out of range, or no room in the context.
        """
        if not prompt:
            raise RequestError("the prompt is empty; write something to continue", param="prompt")
        tokenizer = self.files.tokenizer
        ids = (tokenizer.special[BOS], *tokenizer.encode(prompt))
        params = self._params(len(ids), chat=False, **sampling)
        decoder, stops = StreamDecoder(tokenizer), StopStrings(stop)
        handle = self.engine.submit(Request(prompt_ids=ids, sampling=params))
        try:
            for token in self._tokens(handle):
                yield stops.push(decoder.push(token.id))
                if stops.met:
                    return
            yield stops.push(decoder.finish()) + stops.finish()
        finally:
            handle.cancel()

    def chat(self, messages: Messages, **options: Any) -> Answer:
        """The model's answer to a conversation; `stream_chat` gives it piece by piece."""
        answer = Answer()
        for delta in self.stream_chat(messages, **options):
            answer.add([delta])
        return answer

    def stream_chat(
        self,
        messages: Messages,
        *,
        thinking: bool | None = None,
        effort: str | int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Generator[Delta]:
        """Pieces of the answer, as they come.

        Args:
            messages: A question, or messages of the OpenAI shape.
            thinking: Let the model reason first; its own default if None.
            effort: A name or a number 1..100; `none` switches thinking off.
            tools: Functions of the OpenAI shape.
            stop: Strings that end the answer.
            sampling: temperature, top_k, top_p, min_p, max_tokens, seed.

        Raises:
            RequestError: A message, a tool or a value that cannot be understood, or no room in the context.
        """
        raw = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        number = DEFAULT_EFFORT if effort is None else effort_number(effort)
        on = (self.files.defaults.thinking if thinking is None else thinking) and number is not None
        conversation = Conversation(
            messages=parse_messages(raw), tools=parse_tools(tools), thinking=on, effort=number or DEFAULT_EFFORT
        )
        turns = None if self.engine.cache is None else self.engine.cache.turns
        ids = tuple(encode(conversation, self.files.tokenizer, None if turns is None else turns.reader(b"")))
        params = self._params(len(ids), chat=True, thinking=on, effort=conversation.effort, **sampling)
        reader = AnswerReader(self.files.tokenizer, ChatParser(thinking=on, stop=stop))
        handle = self.engine.submit(Request(prompt_ids=ids, sampling=params))
        answer, said = Answer(), []
        try:
            for token in self._tokens(handle):
                said.append(token.id)
                deltas = reader.push(token.id)
                answer.add(deltas)
                yield from deltas
                if reader.parser.stopped:
                    return
            deltas = reader.finish()
            answer.add(deltas)
            yield from deltas
            if turns is not None:
                turns.record(ids, said, answer, b"")
        finally:
            handle.cancel()

    def _params(self, num_prompt: int, **values: Any) -> SamplingParams:
        return self.files.sampling(context=self.engine.max_context, num_prompt=num_prompt, **values)

    def _tokens(self, handle: Handle) -> Iterator[Token]:
        for event in handle:
            if isinstance(event, Token):
                yield event
            elif isinstance(event, Finished):
                self.last = event
                if event.reason == "error":
                    raise CedarError(f"the model failed: {event.error}")
