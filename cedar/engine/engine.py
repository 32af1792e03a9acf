"""The loop that turns requests into tokens, in a thread of its own.

The engine is the only place where a model and the cache meet. A step is one token of every sequence that
decodes, together, and then one chunk of one prompt: so no stream waits longer than a chunk, and no prompt longer
than the streams' tokens. Between steps the loop lets go who was cancelled and takes in who waits.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from cedar.cache.manager import CacheManager, Plan
from cedar.cache.prefix import Node
from cedar.config.model import PAGE_TOKENS, ModelConfig
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
    Token,
    check_room,
)
from cedar.engine.runner import DecodeRunner, Row
from cedar.engine.sampling import Sampler
from cedar.engine.scheduler import (
    SchedulerConfig,
    next_prefill,
    order_key,
    pages_to_start,
    victim,
    waits_for_another,
)
from cedar.errors import CapacityError, RequestError
from cedar.kernels.dispatch import deterministic
from cedar.model.sequence import exact_span

log = logging.getLogger(__name__)

# waiting prompts that are looked up in the cache each time there is room
_LOOKED_AT = 16


class ModelLike(Protocol):
    """What the engine asks of a model; `cedar.model.transformer.Transformer` is the one. A state is its own affair."""

    config: ModelConfig

    @property
    def device(self) -> torch.device: ...

    def new_state(self, *, decoder_replay: DecoderReplay) -> Any: ...

    def prefill(self, state: Any, ids_T: Tensor, *, prompt_tokens: int, last_only: bool) -> Tensor: ...

    def decode(self, state: Any, ids_T: Tensor) -> Tensor: ...

    def decode_many(self, states: Several[Any], ids: Several[Tensor]) -> list[Tensor]: ...


class Engine:
    """Serves one model.

    Args:
        max_context: Longest prompt plus answer; the model's own limit if None, and never more than the cache
            can hold.
        prefill_chunk: Prompt tokens per step.
        max_waiting: Requests that may queue.
        max_running: Sequences that hold a state at once.
        reserve_tokens: Answer tokens that must find room before a request starts.
        cache: Prefixes of earlier requests; None keeps none. The engine closes it.
        exact: Rows get the same bits whatever runs beside them; slower. A strict cache needs it.
        runner: Decodes in graphs where there is a GPU; None decodes op by op.
        keep_snapshots: Write the snapshots to the disk tier when the engine ends.
    """

    def __init__(
        self,
        model: ModelLike,
        *,
        max_context: int | None = None,
        prefill_chunk: int = 256,
        max_waiting: int = 256,
        max_running: int = 16,
        reserve_tokens: int = 4096,
        cache: CacheManager | None = None,
        exact: bool = False,
        runner: DecodeRunner | None = None,
        keep_snapshots: bool = True,
    ) -> None:
        limit = model.config.max_position_embeddings
        self.model, self.cache = model, cache
        if cache is not None:
            # a sequence must fit alone, beside a shared copy of its last page
            limit = min(limit, (cache.pool.num_pages - 1) * PAGE_TOKENS)
        self.max_context = limit if max_context is None else min(limit, max_context)
        self.max_waiting = max_waiting
        self.scheduling = SchedulerConfig(
            max_running=max_running, prefill_chunk=prefill_chunk, reserve_tokens=reserve_tokens
        )
        self.exact = exact or (cache is not None and cache.strict)
        self.metrics = Metrics()
        self._runner = runner
        self._keep_snapshots = keep_snapshots
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._questions: list[tuple[Callable[[CacheManager], object], Future[Any]]] = []
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
            self._gauges()
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
            for sequence in (*self._waiting, *self._running):
                if sequence.request.id == request_id:
                    sequence.cancelled = True
            self._changed.notify()

    def ask_cache(self, question: Callable[[CacheManager], object]) -> Future[Any]:
        """What `question` says of the cache, asked in the engine's thread between two steps.

        Raises:
            RequestError: There is no cache, or the engine is closing.
        """
        if self.cache is None:
            raise RequestError("this server keeps no cache", code="not_found", status=404)
        asked: Future[Any] = Future()
        with self._changed:
            if self._closing:
                raise RequestError("the server is shutting down", code="overloaded", status=503)
            self._questions.append((question, asked))
            self._changed.notify()
        return asked

    def close(self, timeout_s: float = 30.0) -> None:
        """Cancel everything and end the thread; later requests are refused."""
        with self._changed:
            self._closing = True
            for sequence in (*self._waiting, *self._running):
                sequence.cancelled = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        with deterministic(self.exact):
            while self._wait():
                self._tell()
                self._let_go()
                self._take_in()
                self._decode()
                self._prefill()
        if self.cache is not None:
            self.cache.close(keep_snapshots=self._keep_snapshots)

    def _wait(self) -> bool:
        """Until there is something to do; False when the engine closes and all have left."""
        with self._changed:
            while not self._waiting and not self._running and not self._questions:
                if self._closing:
                    return False
                self._changed.wait()
        return True

    def _tell(self) -> None:
        with self._changed:
            questions, self._questions = self._questions, []
        for question, asked in questions:
            assert self.cache is not None
            try:
                asked.set_result(question(self.cache))
            except Exception as error:  # whoever asked hears of it; the engine goes on
                asked.set_exception(error)

    def _let_go(self) -> None:
        with self._changed:
            gone = [sequence for sequence in (*self._waiting, *self._running) if sequence.cancelled]
        for sequence in gone:
            self.metrics.cancelled[sequence.status.value] = self.metrics.cancelled.get(sequence.status.value, 0) + 1
            self._leave(sequence, "cancelled")

    # -- admission

    def _take_in(self) -> None:
        """Start those who wait while there is room: shortest computation first, aged."""
        while len(self._running) < self.scheduling.max_running:
            with self._changed:
                looked_at = list(self._waiting[:_LOOKED_AT])
            chosen = self._choose(looked_at)
            if chosen is None:
                return
            with self._changed:
                self._waiting.remove(chosen)
                self._running.append(chosen)
                self._gauges()
            if not self._guarded(self._start, chosen):
                continue
            if chosen.state is None:
                # no room after all: it keeps its place
                with self._changed:
                    self._running.remove(chosen)
                    self._waiting.insert(0, chosen)
                    self._gauges()
                return

    def _choose(self, waiting: list[Sequence]) -> Sequence | None:
        now = time.monotonic()
        ranked = []
        for sequence in waiting:
            if sequence.cancelled:
                continue
            cached = 0
            if sequence.status is Status.PREEMPTED:
                # it has been promised an answer already
                return sequence
            request = sequence.request
            if self.cache is not None and request.replay != "off":
                cached = self.cache.cached_tokens(request.prompt_ids, request.salt)
                if waits_for_another(sequence, cached, self._running):
                    continue
            ranked.append((order_key(sequence, len(request.prompt_ids) - cached, now, self.scheduling), sequence))
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None

    def _start(self, sequence: Sequence) -> None:
        """Give a sequence its state; without room it stays as it was."""
        request = sequence.request
        if sequence.status is Status.PREEMPTED:
            self._resume(sequence)
            return
        if self.cache is None:
            sequence.state = self.model.new_state(decoder_replay=request.decoder_replay)
        elif not self._open_state(sequence, self.cache):
            return
        sequence.status, sequence.admitted_s = Status.PREFILL, time.monotonic()
        sequence.sampler = Sampler(request.sampling, prompt_ids=request.prompt_ids, constraint=request.constraint)

    def _open_state(self, sequence: Sequence, cache: CacheManager) -> bool:
        request = sequence.request
        plan = cache.plan(
            request.prompt_ids,
            request.salt,
            replay=request.replay,
            decoder_replay=request.decoder_replay,
            exact_span=functools.partial(exact_span, self.model.config, request.decoder_replay),
        )
        wanted = pages_to_start(sequence, self.scheduling.reserve_tokens)
        promised = sum(
            max(other.reserved_pages - len(other.lease.table.pages), 0) for other in self._running if other.lease
        )
        own = cache.protect(request.prompt_ids[: plan.cached_tokens], request.salt)
        fresh = wanted - plan.cached_tokens // PAGE_TOKENS
        others = any(other is not sequence for other in self._running)
        if others and cache.room(own) < fresh + promised:
            return False
        lease = cache.lease(request.prompt_ids, request.salt, plan, keep=request.keep)
        try:
            sequence.state = self._state_over(sequence, lease, plan.cached_tokens)
            self._begin(sequence, plan)
        except BaseException:
            cache.release(lease)
            raise
        sequence.lease, sequence.reserved_pages = lease, wanted
        sequence.num_prefilled = plan.first_row
        return True

    def _state_over(self, sequence: Sequence, lease: Any, num_tokens: int) -> Any:
        assert self.cache is not None
        make_store = self.cache.make_store(lease, num_tokens)
        # only a model with a paged state is given a cache
        return self.model.new_state(decoder_replay=sequence.request.decoder_replay, make_store=make_store)  # type: ignore[call-arg]

    def _begin(self, sequence: Sequence, plan: Plan) -> None:
        """Bring a fresh state to where the plan starts."""
        if plan.grade == "cold":
            return
        if plan.kept is not None:
            sequence.state.restore(plan.kept.snapshot)
            return
        prompt_T = self._ids(sequence.request.prompt_ids)
        if plan.grade == "g2":
            sequence.state.resume_bounded(prompt_T, plan.cached_tokens)
        else:
            sequence.state.resume_exact(prompt_T, plan.cached_tokens, len(sequence.request.prompt_ids))

    # -- memory

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Room for a sequence's next rows, at others' cost if need be; False if it must wait itself."""
        if self.cache is None or sequence.lease is None:
            return True
        write_from = min(sequence.state.num_held, num_tokens)
        while not self.cache.reserve(sequence.lease, num_tokens, write_from, self._protected()):
            other = victim(self._running, sequence)
            if other is None:
                if len([s for s in self._running if s.lease is not None]) == 1:
                    raise CapacityError("the pool is too small for this sequence alone")
                other = sequence
            self._set_aside(other)
            if other is sequence:
                return False
        return True

    def _protected(self) -> set[Node]:
        """Pages that the first of those who wait will use (field report B17)."""
        assert self.cache is not None
        with self._changed:
            first = self._waiting[:2]
        if self.cache.pool.num_free or not first:
            return set()
        pages: set[Node] = set()
        for sequence in first:
            pages |= self.cache.protect(sequence.request.prompt_ids, sequence.request.salt)
        # never so many that nothing is left to evict
        return pages if len(pages) < self.cache.pool.num_pages // 2 else set()

    def _set_aside(self, sequence: Sequence) -> None:
        """Take a sequence's pages; its snapshot and their bytes wait in host memory (grade G0)."""
        assert self.cache is not None and sequence.lease is not None
        self._leave_slot(sequence)
        snapshot = sequence.state.snapshot()
        sequence.aside = (snapshot, self.cache.swap_out(sequence.lease))
        sequence.state = None
        sequence.status = Status.PREEMPTED
        self.metrics.preempted += 1
        with self._changed:
            self._running.remove(sequence)
            self._waiting.insert(0, sequence)
            self._gauges()

    def _resume(self, sequence: Sequence) -> None:
        assert self.cache is not None and sequence.aside is not None and sequence.lease is not None
        snapshot, payloads = sequence.aside
        others = any(other is not sequence for other in self._running)
        # one page to grow into, or it would be set aside again at once
        if others and self.cache.room() < len(payloads) + 1:
            return
        if not self.cache.swap_in(sequence.lease, payloads):
            if not others:
                raise CapacityError("the pool is too small for this sequence alone")
            return
        sequence.state = self._state_over(sequence, sequence.lease, snapshot.num_held)
        sequence.state.restore(snapshot)
        sequence.aside = None
        sequence.status = Status.DECODE if sequence.generated else Status.PREFILL

    # -- steps

    def _prefill(self) -> None:
        sequence = next_prefill(self._running, time.monotonic(), self.scheduling)
        if sequence is not None:
            self._guarded(self._run_chunk, sequence)

    def _run_chunk(self, sequence: Sequence) -> None:
        prompt = sequence.request.prompt_ids
        start, num_prompt = sequence.num_prefilled, len(prompt)
        stop = min(start + self.scheduling.prefill_chunk, num_prompt)
        boundary = num_prompt - 1
        at_boundary = sequence.lease is not None and sequence.lease.keep and start < boundary <= stop
        if at_boundary:
            # the token that may change next time runs alone, and what stands before it is kept
            stop = boundary
        if not self._reserve(sequence, stop):
            return
        logits_TV = self.model.prefill(
            sequence.state, self._ids(prompt[start:stop]), prompt_tokens=num_prompt, last_only=stop == num_prompt
        )
        sequence.num_prefilled = stop
        sequence.num_run += stop - start
        if self.cache is not None and sequence.lease is not None:
            if at_boundary:
                self._publish_end(sequence)
            else:
                self.cache.publish(sequence.lease, prompt[:stop])
        sequence.emit(Progress(stop, num_prompt))
        if stop == num_prompt:
            sequence.status = Status.DECODE
            self._take(sequence, logits_TV[-1])

    def _decode(self) -> None:
        """One token of everybody who decodes."""
        ready = []
        for sequence in [s for s in self._running if s.status is Status.DECODE]:
            # an earlier one may have set it aside meanwhile
            if sequence.status is Status.DECODE and sequence.state is not None:
                num_tokens = len(sequence.request.prompt_ids) + len(sequence.generated)
                if self._guarded(functools.partial(self._reserve, num_tokens=num_tokens), sequence):
                    ready.append(sequence)
        ready = [s for s in ready if s.status is Status.DECODE and s.state is not None]
        if self._runner is not None:
            ready = self._decode_in_slots(ready, self._runner)
        if not ready:
            return
        ids = [self._ids(sequence.generated[-1:]) for sequence in ready]
        rows: list[Tensor] | None = None
        if len(ready) > 1:
            marks = [sequence.state.mark() for sequence in ready]
            try:
                rows = self.model.decode_many([sequence.state for sequence in ready], ids)
            except Exception:  # one of them fails; alone, the others go on
                log.warning("a step of %d sequences failed, they run one by one", len(ready), exc_info=True)
                for sequence, mark in zip(ready, marks, strict=True):
                    sequence.state.reset(mark)
        for place, sequence in enumerate(ready):

            def run(sequence: Sequence, place: int = place) -> None:
                logits_TV = self.model.decode(sequence.state, ids[place]) if rows is None else rows[place]
                if self.cache is not None and sequence.lease is not None:
                    self.cache.publish(sequence.lease, self._written(sequence))
                self._take(sequence, logits_TV[-1])

            self._guarded(run, sequence)

    def _decode_in_slots(self, ready: list[Sequence], runner: DecodeRunner) -> list[Sequence]:
        """One token of those whose state has a slot or gets one; returns the others, or all if the step failed."""
        rows: dict[int, Row] = {}
        for place, sequence in enumerate(ready):
            if len(rows) < runner.max_rows and sequence.lease is not None and runner.suits(sequence.state):
                assert sequence.sampler is not None
                rows[place] = Row(sequence.state, sequence.lease, sequence.generated[-1], sequence.sampler)
        if not rows:
            return ready
        try:
            chosen, logits_TV = runner.step(list(rows.values()))
        except Exception:  # whatever a device may say: op by op they go on
            log.warning("decode graphs are off from here on: a step of %d rows failed", len(rows), exc_info=True)
            self._runner = None
            for sequence in self._running:
                if sequence.state is not None:
                    self._guarded(lambda s: runner.leave(s.state), sequence)
            return [sequence for sequence in ready if sequence in self._running]
        for number, place in enumerate(rows):

            def run(sequence: Sequence, number: int = number) -> None:
                assert self.cache is not None and sequence.lease is not None and sequence.sampler is not None
                lease = sequence.lease
                # the tokens so far are gathered only when they fill a page
                if lease.keep and sequence.state.num_tokens >= lease.published + PAGE_TOKENS:
                    self.cache.publish(lease, self._written(sequence))
                if sequence.sampler.needs_logits:
                    self._take(sequence, logits_TV[number])
                else:
                    self._taken(sequence, sequence.sampler.take(chosen[number]))

            self._guarded(run, ready[place])
        return [sequence for place, sequence in enumerate(ready) if place not in rows]

    def _take(self, sequence: Sequence, logits_V: Tensor) -> None:
        assert sequence.sampler is not None
        self._taken(sequence, sequence.sampler(logits_V))

    def _taken(self, sequence: Sequence, token: Token) -> None:
        sequence.first_token_s = sequence.first_token_s or time.monotonic()
        sequence.generated.append(token.id)
        if token.id in sequence.request.sampling.stop_token_ids:
            self._leave(sequence, "stop")
            return
        sequence.emit(token)
        if len(sequence.generated) >= sequence.max_tokens:
            self._leave(sequence, "length")

    def _guarded(self, action: Callable[[Sequence], object], sequence: Sequence) -> bool:
        """Run one sequence's part of a step; its failure ends it alone. False if it failed."""
        try:
            action(sequence)
        except Exception as error:  # one request's failure must not end the engine, whatever it is
            log.exception("request %s failed", sequence.request.id)
            self._leave(sequence, "error", error=f"{type(error).__name__}: {error}")
            return False
        return True

    # -- leaving

    def _written(self, sequence: Sequence) -> tuple[int, ...]:
        """The tokens whose rows have run: all but the newest."""
        return (*sequence.request.prompt_ids, *sequence.generated)[: sequence.state.num_tokens]

    def _publish_end(self, sequence: Sequence) -> None:
        assert self.cache is not None and sequence.lease is not None
        state = sequence.state
        self._leave_slot(sequence)
        # while cached tokens run again their halves of pairs are not there: nothing to go on from
        whole = state.num_held == state.num_tokens
        snapshot = state.snapshot() if whole and self.cache.snapshots.budget_bytes else None
        self.cache.publish_end(sequence.lease, self._written(sequence), snapshot)

    def _leave_slot(self, sequence: Sequence) -> None:
        """Before a state is read: what the runner holds of it comes back."""
        if self._runner is not None:
            self._runner.leave(sequence.state)

    def _leave(self, sequence: Sequence, reason: FinishReason, *, error: str = "") -> None:
        # a state that failed may not be able to answer
        cache_bytes = 0 if error or sequence.state is None else sequence.state.cache_bytes()
        end = self._finished(sequence, reason, cache_bytes, error)
        if self.cache is not None and sequence.lease is not None:
            if reason in ("stop", "length"):
                self._publish_end(sequence)
            self.cache.release(sequence.lease)
        if self._runner is not None:
            self._runner.forget(sequence.state)
        sequence.state = sequence.aside = sequence.lease = None
        with self._changed:
            for line in (self._waiting, self._running):
                if sequence in line:
                    line.remove(sequence)
            self.metrics.count(end, prefilled=sequence.num_run)
            self._gauges()
        try:
            sequence.emit(end)
        except Exception:  # whoever listened has gone, and has no use for the news
            log.debug("nobody took the last event of %s", sequence.request.id, exc_info=True)

    def _finished(self, sequence: Sequence, reason: FinishReason, cache_bytes: int, error: str) -> Finished:
        now = time.monotonic()
        admitted = sequence.admitted_s or now
        first = sequence.first_token_s or now
        plan = Plan() if sequence.lease is None else sequence.lease.plan
        return Finished(
            reason=reason,
            prompt_tokens=len(sequence.request.prompt_ids),
            completion_tokens=len(sequence.generated),
            cached_tokens=plan.cached_tokens,
            queue_s=admitted - sequence.submitted_s,
            prefill_s=first - admitted,
            decode_s=now - first,
            cache_bytes=cache_bytes,
            error=error,
            resume=plan.grade,
            cache_tier=plan.tier,
        )

    def _gauges(self) -> None:
        self.metrics.waiting, self.metrics.running = len(self._waiting), len(self._running)

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64, device=self.model.device)
