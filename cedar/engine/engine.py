"""The loop that turns requests into tokens, in a thread of its own.

The engine is the only place where a model and the state of a sequence meet. It takes requests in their
order and runs one sequence at a time, a step at a time: a chunk of the prompt, or one token. Between steps
it looks who was cancelled, so no request waits longer than a step to be let go.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from cedar.config.model import ModelConfig
from cedar.engine.metrics import Metrics
from cedar.engine.request import (
    DecoderReplay,
    Event,
    Finished,
    FinishReason,
    Handle,
    Progress,
    Request,
    Sequence,
    Status,
    check_room,
)
from cedar.engine.sampling import Sampler
from cedar.errors import RequestError

log = logging.getLogger(__name__)


class ModelLike(Protocol):
    """What the engine asks of a model; `cedar.model.transformer.Transformer` is the one. A state is its own affair."""

    config: ModelConfig

    @property
    def device(self) -> torch.device: ...

    def new_state(self, *, decoder_replay: DecoderReplay) -> Any: ...

    def prefill(self, state: Any, ids_T: Tensor, *, prompt_tokens: int, last_only: bool) -> Tensor: ...

    def decode(self, state: Any, ids_T: Tensor) -> Tensor: ...


class Engine:
    """Serves one model.

    Args:
        max_context: Longest prompt plus answer; the model's own limit if None.
        prefill_chunk: Prompt tokens per step.
        max_waiting: Requests that may queue.
    """

    def __init__(
        self, model: ModelLike, *, max_context: int | None = None, prefill_chunk: int = 256, max_waiting: int = 256
    ) -> None:
        limit = model.config.max_position_embeddings
        self.model = model
        self.max_context = limit if max_context is None else min(limit, max_context)
        self.prefill_chunk, self.max_waiting = prefill_chunk, max_waiting
        self.metrics = Metrics()
        self._waiting: deque[Sequence] = deque()
        self._running: Sequence | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="cedar-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> Handle:
        """Queue a request.

        Args:
            on_event: Called in the engine's thread with each event; it must not block. Without it the
                events wait in the handle.

        Raises:
            RequestError: Empty prompt, an id outside the vocabulary, no room in the context, a full queue,
                or an engine that is closing.
        """
        max_tokens = self.check(request)
        handle = Handle(request.id, lambda: self.cancel(request.id))
        sequence = Sequence(
            request=request, emit=on_event or handle.events.put, max_tokens=max_tokens, submitted_s=time.monotonic()
        )
        with self._changed:
            if self._closing:
                raise RequestError("the server is shutting down", code="overloaded", status=503)
            if len(self._waiting) >= self.max_waiting:
                raise RequestError(
                    f"{len(self._waiting)} requests are waiting already; try again later", code="overloaded", status=503
                )
            self._waiting.append(sequence)
            self.metrics.submitted += 1
            self.metrics.waiting = len(self._waiting)
            self._changed.notify()
        return handle

    def check(self, request: Request) -> int:
        """Tokens that the request may generate.

        Raises:
            RequestError: As `submit`, for what can be known before it queues.
        """
        if not request.prompt_ids:
            raise RequestError("the prompt is empty; send at least one token", param="prompt")
        vocab_size = self.model.config.vocab_size
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
            raise RequestError(f"the prompt holds ids outside the vocabulary of {vocab_size}", param="prompt")
        if any(token_id >= vocab_size for token_id, _ in request.sampling.logit_bias):
            raise RequestError(f"logit_bias holds ids outside the vocabulary of {vocab_size}", param="logit_bias")
        return check_room(len(request.prompt_ids), request.sampling.max_tokens, self.max_context)

    def cancel(self, request_id: str) -> None:
        """Let a request go, in whatever phase it is; an unknown or finished id is ignored."""
        with self._changed:
            for sequence in (*self._waiting, self._running):
                if sequence is not None and sequence.request.id == request_id:
                    sequence.cancelled = True
            self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel everything and end the thread; later requests are refused."""
        with self._changed:
            self._closing = True
            for sequence in (*self._waiting, self._running):
                if sequence is not None:
                    sequence.cancelled = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        while (sequence := self._next()) is not None:
            try:
                end = self._step(sequence)
            except Exception as error:  # one request's failure must not end the engine, whatever it is
                log.exception("request %s failed", sequence.request.id)
                end = self._finished(sequence, "error", error=f"{type(error).__name__}: {error}")
            if end is not None:
                self._leave(sequence, end)

    def _next(self) -> Sequence | None:
        """The sequence whose step comes next, once there is one; None when the engine closes and all have left."""
        with self._changed:
            while True:
                # a waiting request that was cancelled must not wait for the running one to hear of it
                gone = [sequence for sequence in self._waiting if sequence.cancelled]
                if gone:
                    self._waiting.remove(gone[0])
                    self.metrics.waiting = len(self._waiting)
                    return gone[0]
                if self._running is None and self._waiting:
                    self._running = self._waiting.popleft()
                    self.metrics.waiting, self.metrics.running = len(self._waiting), 1
                if self._running is not None:
                    return self._running
                if self._closing:
                    return None
                self._changed.wait()

    def _step(self, sequence: Sequence) -> Finished | None:
        """One chunk of the prompt, or one token; the last event if this was the end."""
        if sequence.cancelled:
            return self._finished(sequence, "cancelled")
        request = sequence.request
        if sequence.status is Status.WAITING:
            sequence.status, sequence.admitted_s = Status.PREFILL, time.monotonic()
            sequence.state = self.model.new_state(decoder_replay=request.decoder_replay)
            sequence.sampler = Sampler(request.sampling, prompt_ids=request.prompt_ids, constraint=request.constraint)
        if sequence.status is Status.PREFILL:
            start = sequence.num_prefilled
            chunk = request.prompt_ids[start : start + self.prefill_chunk]
            num_prompt = len(request.prompt_ids)
            logits_TV = self.model.prefill(
                sequence.state, self._ids(chunk), prompt_tokens=num_prompt, last_only=start + len(chunk) == num_prompt
            )
            sequence.num_prefilled += len(chunk)
            sequence.emit(Progress(sequence.num_prefilled, num_prompt))
            if sequence.num_prefilled < num_prompt:
                return None
            sequence.status = Status.DECODE
        else:
            logits_TV = self.model.decode(sequence.state, self._ids(sequence.generated[-1:]))
        return self._take(sequence, logits_TV[-1])

    def _take(self, sequence: Sequence, logits_V: Tensor) -> Finished | None:
        assert sequence.sampler is not None
        token = sequence.sampler(logits_V)
        sequence.first_token_s = sequence.first_token_s or time.monotonic()
        sequence.generated.append(token.id)
        if token.id in sequence.request.sampling.stop_token_ids:
            return self._finished(sequence, "stop")
        sequence.emit(token)
        return self._finished(sequence, "length") if len(sequence.generated) >= sequence.max_tokens else None

    def _finished(self, sequence: Sequence, reason: FinishReason, *, error: str = "") -> Finished:
        now = time.monotonic()
        admitted = sequence.admitted_s or now
        first = sequence.first_token_s or now
        return Finished(
            reason=reason,
            prompt_tokens=len(sequence.request.prompt_ids),
            completion_tokens=len(sequence.generated),
            queue_s=admitted - sequence.submitted_s,
            prefill_s=first - admitted,
            decode_s=now - first,
            # a state that failed may not be able to answer
            cache_bytes=0 if error or sequence.state is None else sequence.state.cache_bytes(),
            error=error,
        )

    def _leave(self, sequence: Sequence, end: Finished) -> None:
        with self._changed:
            if self._running is sequence:
                self._running, self.metrics.running = None, 0
            self.metrics.count(end, prefilled=sequence.num_prefilled)
        sequence.state = None
        try:
            sequence.emit(end)
        except Exception:  # whoever listened has gone, and has no use for the news
            log.debug("nobody took the last event of %s", sequence.request.id, exc_info=True)

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64, device=self.model.device)
