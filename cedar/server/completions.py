"""`POST /v1/completions`: text that goes on where a prompt ends, no chat format."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request as HttpRequest

from cedar.chat.parse import TextReader
from cedar.chat.tokenizer import BOS, Tokenizer
from cedar.engine.request import Finished, Token
from cedar.errors import RequestError
from cedar.server.schema import Fields, convert, draft_stats, error_body, parse_object, timings, usage
from cedar.server.service import Answers, Ask, Service, read_body, respond, submit
from cedar.server.stream import DONE, Step, sse

MAX_ANSWERS = 16
DEFAULT_TOKENS = 16


class CompletionRequest(Fields, kw_only=True):
    """`prompt` is a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: Any
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise RequestError("this model cannot fill a gap: send no suffix", param="suffix")
        if self.best_of not in (None, self.n or 1):
            raise RequestError(f"best_of is {self.best_of}, expected n or nothing: no ranking here", param="best_of")
        if self.echo and self.logprobs is not None:
            raise RequestError(
                "echo with logprobs is not supported: prompts have no log-probabilities here", param="echo"
            )


async def completions(request: HttpRequest) -> Any:
    """Validate, encode, submit; then stream the text or collect it."""
    service: Service = request.app.state.service
    values = parse_object(await read_body(request))
    asked, warnings = convert(values, CompletionRequest, strict=service.config.strict)
    asked.check()
    service.check_model(asked.model)
    prompts = await asyncio.to_thread(prompt_ids, asked.prompt, service.files.tokenizer)
    n = asked.n or 1
    if len(prompts) * n > MAX_ANSWERS:
        raise RequestError(
            f"{len(prompts)} prompts of n = {n} make {len(prompts) * n} answers, expected at most {MAX_ANSWERS}",
            param="prompt",
        )
    longest = max(map(len, prompts))
    sampling = service.files.sampling(
        context=service.context,
        num_prompt=longest,
        chat=False,
        max_tokens=asked.max_tokens or max(1, min(DEFAULT_TOKENS, service.context - longest)),
        logprobs=asked.logprobs,
        **asked.sampling(),
    )
    ask = Ask(
        prompts=prompts,
        sampling=sampling,
        n=n,
        new_reader=lambda: TextReader(service.files.tokenizer, asked.stops),
        fields=asked,
        warnings=warnings,
    )
    answers = await submit(service, request, ask)
    echoes = [
        service.files.tokenizer.decode(_spoken(ids, service.files.tokenizer)) if asked.echo else "" for ids in prompts
    ]
    writer = CompletionWriter(service, answers, asked, [echo for echo in echoes for _ in range(n)])
    return await respond(request, answers, writer, stream=bool(asked.stream), timeout_s=asked.timeout_s)


def prompt_ids(prompt: object, tokenizer: Tokenizer, *, param: str = "prompt") -> list[list[int]]:
    """Token ids of each prompt; texts get the beginning-of-text token in front, ids are taken as they are.

    Raises:
        RequestError: Empty, or of another shape.
    """
    if isinstance(prompt, str):
        return prompt_ids([prompt], tokenizer, param=param)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return [[tokenizer.special[BOS], *tokenizer.encode(item)] for item in prompt]
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(item, list) and item and _are_ids(item) for item in prompt):
            return list(prompt)
    raise RequestError(f"{param} must be a text, a list of texts, or token ids, and not empty", param=param)


def _are_ids(items: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31 for item in items)


def _spoken(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    known = [token_id for token_id in ids if token_id < len(tokenizer)]
    return known[1:] if known[:1] == [tokenizer.special[BOS]] else known


class _Text:
    """One continuation so far."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.logprobs: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        self.end: Finished | None = None


class CompletionWriter:
    """Continuations in OpenAI's older shape."""

    def __init__(self, service: Service, answers: Answers, asked: CompletionRequest, echoes: list[str]) -> None:
        self._service, self._answers, self._asked = service, answers, asked
        self._texts = [_Text(echo) for echo in echoes]
        self._warnings = {"warnings": answers.warnings} if answers.warnings else {}
        self._created = int(time.time())

    def begin(self) -> Iterable[bytes]:
        for index, text in enumerate(self._texts):
            if text.text or (index == 0 and self._warnings):
                yield sse({**self._chunk(index, text.text), **self._warnings})

    def add(self, step: Step) -> None:
        text = self._texts[step.index]
        if step.token is not None and self._asked.logprobs is not None:
            self._note(text, step.token)
        text.text += "".join(delta.content for delta in step.deltas)
        text.end = step.end

    def events(self, step: Step) -> Iterable[bytes]:
        text = self._texts[step.index]
        num_before = len(text.logprobs["tokens"])
        self.add(step)
        said = "".join(delta.content for delta in step.deltas)
        logprobs = {name: values[num_before:] for name, values in text.logprobs.items()}
        if said or logprobs["tokens"]:
            yield sse(self._chunk(step.index, said, logprobs=logprobs if logprobs["tokens"] else None))
        if step.end is not None:
            chunk = {**self._chunk(step.index, "", step.end.reason), "timings": timings(step.end)}
            chunk |= draft_stats(step.end)
            is_last = all(other.end is not None for other in self._texts)
            yield sse({**chunk, "usage": self._usage()} if is_last and not self._asked.include_usage else chunk)

    def close(self) -> Iterable[bytes]:
        if self._asked.include_usage:
            yield sse({**self._envelope(), "choices": [], "usage": self._usage()})
        yield DONE

    def error(self, error: RequestError) -> bytes:
        return sse(error_body(str(error), status=error.status, code=error.code, param=error.param))

    def body(self) -> dict[str, Any]:
        choices = []
        for index, text in enumerate(self._texts):
            assert text.end is not None
            logprobs = text.logprobs if self._asked.logprobs is not None else None
            choices.append({"index": index, "text": text.text, "logprobs": logprobs, "finish_reason": text.end.reason})
        assert self._texts[0].end is not None
        body = {**self._envelope(), "choices": choices, "usage": self._usage(), "timings": timings(self._texts[0].end)}
        return {**body, **draft_stats(self._texts[0].end), **self._warnings}

    def _note(self, text: _Text, token: Token) -> None:
        def named(token_id: int) -> str:
            return self._service.files.tokenizer.decode([token_id])

        text.logprobs["tokens"].append(named(token.id))
        text.logprobs["token_logprobs"].append(max(token.logprob, -9999.0))
        text.logprobs["top_logprobs"].append({named(i): max(logprob, -9999.0) for i, logprob in token.top})
        text.logprobs["text_offset"].append(len(text.text))

    def _usage(self) -> dict[str, Any]:
        ends = [text.end for text in self._texts if text.end is not None]
        counts = usage(ends, reasoning_tokens=0)
        # several prompts count each once
        per_prompt = ends[:: self._asked.n or 1]
        counts["prompt_tokens"] = sum(end.prompt_tokens for end in per_prompt)
        counts["prompt_cache_hit_tokens"] = sum(end.cached_tokens for end in per_prompt)
        counts["prompt_cache_miss_tokens"] = counts["prompt_tokens"] - counts["prompt_cache_hit_tokens"]
        counts["prompt_tokens_details"]["cached_tokens"] = counts["prompt_cache_hit_tokens"]
        counts["total_tokens"] = counts["prompt_tokens"] + counts["completion_tokens"]
        return counts

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self._answers.request_id}",
            "object": "text_completion",
            "created": self._created,
            "model": self._service.files.name,
            "system_fingerprint": self._service.fingerprint,
        }

    def _chunk(
        self, index: int, text: str, reason: str | None = None, *, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**self._envelope(), "choices": [choice]}
