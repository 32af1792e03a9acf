"""The loop that turns requests into tokens, in a thread of its own.

The engine is the only place where a model and the cache meet. A step is one pass of the model over rows of many
sequences, within one budget: the next token of everybody who decodes and the drafts that are verified with it, then
rows that are replayed and chunks of prompts. So no stream waits longer than a step, and no prompt longer than the
streams' rows. Between steps the loop lets go who was cancelled, forks and rewinds, and takes in who waits: nothing is
given back to the pool while a pass may still read it.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, Protocol

import torch
from torch import Tensor

from cedar.cache.loading import LoadFailed
from cedar.cache.manager import CacheManager, Plan
from cedar.cache.prefix import Node
from cedar.config.model import PAGE_TOKENS, ModelConfig
from cedar.engine.metrics import Metrics
from cedar.engine.request import (
    Constraint,
    DecoderReplay,
    Event,
    Finished,
    FinishReason,
    Handle,
    Progress,
    Request,
    Rewound,
    SamplingParams,
    Sequence,
    Status,
    Token,
    check_room,
)
from cedar.engine.runner import DecodeRunner, Row
from cedar.engine.sampling import Sampler
from cedar.engine.scheduler import (
    PrefillShare,
    SchedulerConfig,
    by_order,
    chunk_rows,
    order_key,
    pages_to_start,
    victim,
    waits_for_another,
)
from cedar.engine.speculate import Drafter, DraftRequest, Pace, Proposal, StepCost, choose_widths
from cedar.errors import CapacityError, RequestError, ShapeError
from cedar.kernels.dispatch import deterministic
from cedar.model.batch import Part
from cedar.model.sequence import exact_span

log = logging.getLogger(__name__)
P = ParamSpec("P")

# waiting prompts that are looked up in the cache each time there is room
_LOOKED_AT = 16
# how long a prompt waits for its pages from a shared tier, and how often an idle engine looks
_FETCH_LIMIT_S, _FETCH_WAIT_S = 10.0, 0.005


class ModelLike(Protocol):
    """What the engine asks of a model; `cedar.model.transformer.Transformer` is the one. A state is its own affair."""

    config: ModelConfig

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def memory_stats(self) -> dict[str, float]: ...

    def new_state(self, *, decoder_replay: DecoderReplay) -> Any: ...

    def step(self, parts: Several[Part]) -> list[Tensor]: ...

    def prefetch(self, ids: Several[int]) -> None: ...


@dataclass(slots=True, eq=False)
class _Work:
    """What one sequence runs in a step.

    Attributes:
        num_rows: Rows of tokens that are known.
        proposal: Drafts that run behind them.
        mark: How its state stood before, if that can be brought back.
    """

    sequence: Sequence
    num_rows: int
    proposal: Proposal = Proposal()
    mark: Any = None


class Engine:
    """Serves one model.

    Args:
        max_context: Longest prompt plus answer; the model's own limit if None, and never more than the cache
            can hold.
        max_waiting: Requests that may queue.
        scheduling: Limits of a step and of who runs.
        drafter: Proposes tokens ahead; None drafts nothing.
        cache: Prefixes of earlier requests; None keeps none. The engine closes it.
        exact: Rows get the same bits whatever runs beside them; slower. A strict cache needs it.
        runner: Decodes in graphs where there is a GPU; None decodes op by op. A drafter beside it must read its slots
            (`ModelDrafter.runner`), or it is not used.
        keep_snapshots: Write the snapshots to the disk tier when the engine ends.
    """

    def __init__(
        self,
        model: ModelLike,
        *,
        max_context: int | None = None,
        max_waiting: int = 256,
        scheduling: SchedulerConfig | None = None,
        drafter: Drafter | None = None,
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
        self.scheduling = scheduling or SchedulerConfig()
        self.drafter = drafter
        self.exact = exact or (cache is not None and cache.strict)
        self.metrics = Metrics()
        # what a slot holds of a sequence a drafter does not find in its state
        self._runner = runner if drafter is None or getattr(drafter, "runner", None) is runner else None
        # as of the latest step
        self._num_graphs = 0
        self._keep_snapshots = keep_snapshots
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._orders: list[tuple[Callable[[], object], Future[Any]]] = []
        self._share = PrefillShare(self.scheduling.target_tpot_s, self.scheduling.max_step_tokens)
        self._cost, self._pace = StepCost(), Pace()
        # which step was the last of generated tokens alone, and when it was done with
        self._turn = (-1, 0.0)
        # seconds that the step's drafts took, 0 for one without
        self._drafted_s = 0.0
        self._num_steps = self._since_decode = 0
        self._last_tokens_s = self._rows_s = 0.0
        # exact mode keeps one number of threads: nobody has shown that bits do not depend on it
        self._threads = 1 if self.exact or model.device.type != "cpu" else torch.get_num_threads()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="cedar-engine", daemon=True)
        self._thread.start()

    @property
    def numerics(self) -> str:
        """The arithmetic that answers come from: where, in which type, and whether it is the same whatever else runs.

        Two servers of one model with the same numerics give the same answer.
        """
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"{self.model.device.type}-{dtype}{'-exact' if self.exact else ''}"

    def memory_stats(self) -> dict[str, float]:
        """What Engram tables on disk have done; zeros where they are in memory."""
        return self.model.memory_stats()

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
            request=request,
            emit=on_event or handle.events.put,
            max_tokens=max_tokens,
            submitted_s=time.monotonic(),
            tokens=list(request.prompt_ids),
        )
        with self._changed:
            self._admit_one_more()
            self._waiting.append(sequence)
            self.metrics.submitted += 1
            self._gauges()
            self._changed.notify()
        return handle

    def fork(
        self,
        request_id: str,
        *,
        sampling: SamplingParams | None = None,
        constraint: Constraint | None = None,
        num_tokens: int | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> Handle:
        """Another answer to the prompt of a request that runs or waits, over the same pages.

        It begins with the first tokens of the other's answer, which it sends anew, and is from there on a request of
        its own: bit for bit one that said those tokens itself. A fork of a request whose prompt has not ended yet, or
        with `num_tokens` 0, is a separate run.

        Args:
            sampling: How the fork chooses; as the other does by default.
            constraint: A fresh one for the fork, which must have one if the other has.
            num_tokens: Tokens of the answer to begin with, if there are so many; all there are by default.

        Raises:
            RequestError: Nobody of that id runs or waits, a constraint is missing, the fork's `max_tokens` do not
                fit, or as `submit`.
        """
        with self._changed:
            parent = self._find(request_id)
            if parent.request.constraint is not None and constraint is None:
                raise RequestError("a fork of a constrained answer needs a fresh constraint", param="constraint")
            request = replace(
                parent.request,
                id=uuid.uuid4().hex,
                sampling=sampling or parent.request.sampling,
                constraint=constraint,
            )
            max_tokens = self.check(request)
            self._admit_one_more()
            handle = Handle(request.id, lambda: self.cancel(request.id))
            child = Sequence(
                request=request,
                emit=on_event or handle.events.put,
                max_tokens=max_tokens,
                submitted_s=time.monotonic(),
                tokens=list(request.prompt_ids),
                # until its order is carried out it only queues
                waits_for=parent,
            )
            self._waiting.append(child)
            self.metrics.submitted += 1
            self._gauges()
            self._orders.append((functools.partial(self._split, parent, child, num_tokens), Future()))
            self._changed.notify()
        return handle

    def rewind(self, request_id: str, num_tokens: int, *, constraint: Constraint | None = None) -> Future[int]:
        """Take back the newest tokens of an answer: it goes on from its first `num_tokens`.

        Who listens gets a `Rewound` event between the last token taken back and the next one. What goes on is bit for
        bit the sequence that had never said the tokens; random numbers are not repeated. A few tokens are
        forgotten by position; for more, the prompt resumes from the cache and the tokens that stay run again.

        Args:
            constraint: A fresh one, if the request has one.

        Returns:
            How many tokens were taken back; 0 if there were no more than `num_tokens`. The future raises RequestError
            if the request has ended meanwhile.

        Raises:
            RequestError: Nobody of that id runs or waits, a constraint is missing, or a negative number.
        """
        if num_tokens < 0:
            raise RequestError(f"num_tokens is {num_tokens}, expected 0 or more", param="num_tokens")
        done: Future[int] = Future()
        with self._changed:
            sequence = self._find(request_id)
            if sequence.request.constraint is not None and constraint is None:
                raise RequestError("to rewind a constrained answer takes a fresh constraint", param="constraint")
            self._orders.append((functools.partial(self._take_back, sequence, num_tokens, constraint), done))
            self._changed.notify()
        return done

    def _find(self, request_id: str) -> Sequence:
        for sequence in (*self._waiting, *self._running):
            if sequence.request.id == request_id and not sequence.cancelled:
                return sequence
        raise RequestError(f"no request {request_id!r} runs or waits", code="not_found", status=404)

    def _admit_one_more(self) -> None:
        """Raise unless one more request may queue; the lock is held."""
        if self._closing:
            raise RequestError("the server is shutting down", code="overloaded", status=503)
        if len(self._waiting) >= self.max_waiting:
            raise RequestError(
                f"{len(self._waiting)} requests are waiting already; try again later", code="overloaded", status=503
            )

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
        cache, asked = self.cache, Future[Any]()
        with self._changed:
            if self._closing:
                raise RequestError("the server is shutting down", code="overloaded", status=503)
            self._orders.append((lambda: question(cache), asked))
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
                self._carry_out()
                self._let_go()
                self._take_in()
                self._step()
        if self.cache is not None:
            self.cache.close(keep_snapshots=self._keep_snapshots)

    def _wait(self) -> bool:
        """Until there is something to do; False when the engine closes and all have left."""
        with self._changed:
            while not self._waiting and not self._running and not self._orders:
                if self._closing:
                    return False
                # nobody waits for tokens: the time till the next ones is not a step's
                self._last_tokens_s = 0.0
                self._changed.wait()
        return True

    def _carry_out(self) -> None:
        """What was asked from outside and must not meet a step: looks into the cache, forks, rewinds."""
        if not self._orders:
            return
        with self._changed:
            orders, self._orders = self._orders, []
        for order, done in orders:
            try:
                done.set_result(order())
            except Exception as error:  # whoever asked hears of it; the engine goes on
                done.set_exception(error)

    def _let_go(self) -> None:
        now = time.monotonic()
        with self._changed:
            everybody = (*self._waiting, *self._running)
        for sequence in everybody:
            if sequence.cancelled:
                phase = sequence.phase
                self.metrics.cancelled[phase] = self.metrics.cancelled.get(phase, 0) + 1
                self._leave(sequence, "cancelled")
            elif sequence.request.timeout_s is not None:
                deadline_s = sequence.deadline_s
                if deadline_s is not None and now >= deadline_s:
                    self._leave(sequence, "timeout")

    # -- admission

    def _take_in(self) -> None:
        """Start those who wait while there is room: shortest computation first, aged."""
        while self._waiting and len(self._running) < self.scheduling.max_running:
            with self._changed:
                looked_at = list(self._waiting[:_LOOKED_AT])
            chosen = self._choose(looked_at)
            if chosen is None:
                if looked_at and not self._running:
                    # their pages are on the way from the shared tier
                    with self._changed:
                        self._changed.wait(_FETCH_WAIT_S)
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
            if sequence.cancelled or sequence.waits_for is not None:
                continue
            cached = 0
            if sequence.status is Status.PREEMPTED:
                # it has been promised an answer already
                return sequence
            request = sequence.request
            if self.cache is not None and request.replay != "off":
                if not self._fetched(sequence, self.cache, now):
                    continue
                cached = self.cache.cached_tokens(sequence.prompt_keys, request.salt)
                if waits_for_another(sequence, cached, self._running):
                    continue
            remaining = len(sequence.tokens) - cached
            ranked.append((order_key(sequence, remaining, now, self.scheduling, self._rows_s), sequence))
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None

    def _fetched(self, sequence: Sequence, cache: CacheManager, now: float) -> bool:
        """Whether all that a shared tier has of its prompt is here, or has taken too long."""
        if not sequence.looked_far:
            sequence.looked_far = True
            sequence.fetch = cache.prefetch(sequence.prompt_keys, sequence.request.salt)
        return sequence.fetch is None or sequence.fetch.done() or now - sequence.submitted_s > _FETCH_LIMIT_S

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
        sequence.status, sequence.admitted_s = Status.PREFILL, sequence.admitted_s or time.monotonic()
        if sequence.sampler is None:
            sequence.sampler = self._sampler(sequence)

    def _sampler(self, sequence: Sequence) -> Sampler:
        request = sequence.request
        sampler = Sampler(request.sampling, prompt_ids=request.prompt_ids, constraint=request.constraint)
        sampler.inherit(sequence.tokens[sequence.num_prompt :])
        return sampler

    def _open_state(self, sequence: Sequence, cache: CacheManager) -> bool:
        request = sequence.request
        plan = cache.plan(
            sequence.prompt_keys,
            request.salt,
            replay=request.replay,
            decoder_replay=request.decoder_replay,
            exact_span=functools.partial(exact_span, self.model.config, request.decoder_replay),
        )
        wanted = pages_to_start(sequence, self.scheduling.reserve_tokens)
        own = cache.protect(sequence.prompt_keys[: plan.held_tokens], request.salt)
        fresh = wanted - plan.held_tokens // PAGE_TOKENS
        others = any(other is not sequence for other in self._running)
        if others and cache.room(own) < fresh + self._promised():
            return False
        try:
            lease = cache.lease(sequence.prompt_keys, request.salt, plan, keep=request.keep)
        except CapacityError:
            if others or not cache.unpin_memory():
                raise
            lease = cache.lease(sequence.prompt_keys, request.salt, plan, keep=request.keep)
        try:
            sequence.state = self._state_over(sequence, lease, plan.cached_tokens)
            self._begin(sequence, plan)
        except BaseException:
            cache.release(lease)
            raise
        sequence.lease, sequence.reserved_pages = lease, wanted
        sequence.num_done = plan.first_row
        return True

    def _promised(self) -> int:
        """Pages that those who run have not taken yet, but found room for when they started."""
        return sum(
            max(other.reserved_pages - len(other.lease.table.pages), 0) for other in self._running if other.lease
        )

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

    # -- forks and rewinds

    def _split(self, parent: Sequence, child: Sequence, num_tokens: int | None) -> None:
        child.waits_for = None
        count = parent.num_generated if num_tokens is None else min(num_tokens, parent.num_generated)
        if count >= child.max_tokens:
            error = f"the fork begins with {count} tokens, its max_tokens are {child.max_tokens}"
            self._leave(child, "error", error=error)
            return
        with self._changed:
            lives = parent in self._waiting or parent in self._running
        if lives and parent.num_generated == 0:
            # it begins where the prompt ends
            child.waits_for = parent
            parent.forks.append(child)
            return
        child.tokens += parent.tokens[parent.num_prompt :][:count]
        if not self._guarded(lambda child: self._send(child, parent.said[:count]), child):
            return
        target = len(child.tokens) - 1
        self._leave_slot(parent)
        if count and parent.status is Status.DECODE and parent.state is not None and parent.state.oldest_kept <= target:
            self._guarded(self._start_beside, child, parent, target)

    def _start_beside(self, child: Sequence, parent: Sequence, num_done: int) -> bool:
        """Start a fork from a state that stands at its tokens or some behind them; False if it has to wait."""
        self._leave_slot(parent)
        if len(self._running) >= self.scheduling.max_running:
            return False
        wanted = pages_to_start(child, self.scheduling.reserve_tokens)
        if self.cache is not None and parent.lease is not None:
            fresh = wanted - num_done // PAGE_TOKENS
            if self.cache.room() < fresh + self._promised():
                return False
            lease = self.cache.fork(parent.lease)
            held = min(num_done, child.num_prompt)
            plan = replace(lease.plan, grade="g0", cached_tokens=held, first_row=num_done, tier="memory", kept=None)
            lease.plan = plan
            try:
                child.state = parent.state.fork(self.cache.make_store(lease, parent.num_done))
            except BaseException:
                self.cache.release(lease)
                raise
            child.lease, child.reserved_pages = lease, wanted
        else:
            child.state = parent.state.fork()
        child.status, child.admitted_s, child.num_done = Status.DECODE, time.monotonic(), num_done
        if num_done < parent.num_done:
            self._forget(child)
        child.sampler = self._sampler(child)
        with self._changed:
            self._waiting.remove(child)
            self._running.append(child)
            self._gauges()
        return True

    def _forget(self, sequence: Sequence) -> None:
        """Bring a state back to the `num_done` rows that the sequence keeps."""
        sequence.state.roll_back(sequence.num_done)
        if self.cache is not None and sequence.lease is not None:
            self.cache.rewind(sequence.lease, sequence.num_done)

    def _take_back(self, sequence: Sequence, num_tokens: int, constraint: Constraint | None) -> int:
        with self._changed:
            if sequence not in self._waiting and sequence not in self._running:
                raise RequestError(f"request {sequence.request.id!r} has ended", code="not_found", status=404)
        taken = sequence.num_generated - num_tokens
        if taken <= 0:
            return 0
        del sequence.tokens[sequence.num_prompt + num_tokens :], sequence.said[num_tokens:]
        if sequence.sampler is not None:
            sequence.sampler.rewind(sequence.tokens[sequence.num_prompt :], constraint)
        target = len(sequence.tokens) - 1
        self._leave_slot(sequence)
        if sequence.status is Status.DECODE and num_tokens and sequence.state.oldest_kept <= target:
            sequence.num_done = target
            self._forget(sequence)
        elif sequence.state is not None or sequence.aside is not None:
            self._restart(sequence)
        self._guarded(lambda sequence: sequence.emit(Rewound(num_tokens)), sequence)
        return taken

    def _restart(self, sequence: Sequence) -> None:
        """Back to the queue's head with what it has said; the prompt finds its pages again."""
        if self.cache is not None and sequence.lease is not None:
            self.cache.release(sequence.lease)
        if self._runner is not None:
            self._runner.forget(sequence.state)
        sequence.state = sequence.aside = sequence.lease = None
        sequence.status, sequence.num_done, sequence.width = Status.WAITING, 0, 0
        with self._changed:
            if sequence in self._running:
                self._running.remove(sequence)
                self._waiting.insert(0, sequence)
            self._gauges()

    # -- memory

    def _has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a sequence has its next rows' pages already, as most steps of a token do."""
        lease = sequence.lease
        return self.cache is None or lease is None or not lease.table.missing(num_tokens, sequence.num_done)

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Room for a sequence's next rows, at others' cost if need be; False if it must wait itself."""
        if self.cache is None or sequence.lease is None:
            return True
        write_from = min(sequence.state.num_held, num_tokens)
        while not self.cache.reserve(sequence.lease, num_tokens, write_from, self._protected()):
            other = victim(self._running, sequence)
            if other is None:
                if len([s for s in self._running if s.lease is not None]) == 1:
                    # whoever waits can only come after it
                    if self.cache.reserve(sequence.lease, num_tokens, write_from):
                        return True
                    if self.cache.unpin_memory():
                        continue
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
            pages |= self.cache.protect(sequence.prompt_keys, sequence.request.salt)
        # never so many that nothing is left to evict
        return pages if len(pages) < self.cache.pool.num_pages // 2 else set()

    def _set_aside(self, sequence: Sequence) -> None:
        """Take a sequence's pages; its snapshot and their bytes wait in host memory (grade G0)."""
        assert self.cache is not None and sequence.lease is not None
        self._leave_slot(sequence)
        snapshot = sequence.state.snapshot()
        try:
            sequence.aside = (snapshot, self.cache.swap_out(sequence.lease))
        except LoadFailed:
            # it has nothing to go on from but its prompt
            self._restart(sequence)
            return
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
            if not others and not self.cache.unpin_memory():
                raise CapacityError("the pool is too small for this sequence alone")
            return
        sequence.state = self._state_over(sequence, sequence.lease, snapshot.num_held)
        sequence.state.restore(snapshot)
        sequence.aside = None
        behind = sequence.remaining > 1 or not sequence.num_generated
        sequence.status = Status.PREFILL if behind else Status.DECODE

    # -- steps

    def _step(self) -> None:
        """One pass of the model, within the budget of rows."""
        work = self._plan()
        if self._runner is not None:
            work = self._step_slots(work, self._runner)
        if not work:
            return
        for one in work:
            self._leave_slot(one.sequence)
            if one.sequence.status is Status.DECODE:
                one.mark = one.sequence.state.mark()
        self._read_ahead(work)
        began = time.monotonic()
        few = all(one.sequence.status is Status.DECODE for one in work)
        try:
            with self._few_rows() if few else nullcontext():
                logits = self.model.step([self._part(one) for one in work])
        except Exception as error:  # whose fault it is shows when each runs alone
            self._take_apart(work, error)
            return
        self._note(work, began)
        decodes = all(one.sequence.status is Status.DECODE for one in work)
        before = sum(len(one.sequence.tokens) for one in work)
        for one, rows_TV in zip(work, logits, strict=True):
            one.sequence.alone = False
            absorb = self._absorb_tokens if one.sequence.status is Status.DECODE else self._absorb_chunk
            self._guarded(absorb, one.sequence, one, rows_TV)
        if decodes:
            # steps with chunks of prompts tell nothing of what a draft's row costs
            self._note_drafts(work, before)

    @contextmanager
    def _few_rows(self) -> Iterator[None]:
        """On a CPU one thread: sharing out the work of a few rows costs more than the work."""
        if self._threads == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)

    def _note_drafts(self, work: list[_Work], before: int, *, is_usual: bool = True) -> None:
        """Learn what drafts cost and bring, from a step of generated tokens alone; there were `before` tokens.

        What lies between steps counts as a step's own, so one behind another kind of step, or an unusual one, tells
        nothing.
        """
        number, ended = self._turn
        self._turn = self._num_steps, time.monotonic()
        if self.drafter is None or not is_usual or number != self._num_steps - 1:
            return
        sequences, seconds = len(work), self._turn[1] - ended - self._drafted_s
        rows = self._rows_run(sequences + sum(len(one.proposal.ids) for one in work))
        tokens = sum(len(one.sequence.tokens) for one in work) - before
        self._cost.note(sequences, rows, seconds)
        self._pace.note(sequences, rows, tokens, seconds, self._drafted_s)

    def _rows_run(self, count: int) -> int:
        """Rows that a step of so many generated tokens and drafts runs, those included that only fill it up."""
        return count if self._runner is None else self._runner.filled(count)

    def _step_slots(self, work: list[_Work], runner: DecodeRunner) -> list[_Work]:
        """A token and drafts of those who decode and have a slot or get one; returns the others, all if it failed."""
        together = [
            one
            for one in work
            if one.sequence.status is Status.DECODE and not one.sequence.alone and one.sequence.lease is not None
        ]
        together = [together[place] for place in runner.fitting([one.sequence.state for one in together])]
        if not together:
            return work
        rows = []
        for one in together:
            sequence = one.sequence
            assert sequence.sampler is not None and sequence.lease is not None
            sampler, proposal = sequence.sampler, one.proposal
            drawn = bool(proposal.probs) and not sampler.needs_logits and runner.drew(sequence.state, proposal.probs)
            ids = (sequence.tokens[-1], *proposal.ids)
            rows.append(Row(sequence.state, sequence.lease, ids, sampler, drawn))
        began = time.monotonic()
        try:
            chosen, logits_TV = runner.step(rows)
        except Exception:  # whatever a device may say: op by op they go on
            log.warning("decode graphs are off from here on: a step of %d rows failed", len(rows), exc_info=True)
            self._runner = None
            for sequence in list(self._running):
                if sequence.state is not None:
                    self._guarded(lambda s: runner.leave(s.state), sequence)
            runner.retire()
            return [one for one in work if one.sequence.state is not None]
        self._note(together, began)
        before = sum(len(one.sequence.tokens) for one in together)
        first = 0
        for one, row in zip(together, rows, strict=True):
            stop = first + len(row.ids)
            self._guarded(
                self._absorb_slot, one.sequence, one.proposal, row.drawn, chosen[first:stop], logits_TV, first
            )
            first = stop
        # one in which a graph was made says nothing of those that find it
        is_usual, self._num_graphs = runner.num_graphs == self._num_graphs, runner.num_graphs
        if len(together) < len(work):
            return [one for one in work if one not in together]
        self._note_drafts(work, before, is_usual=is_usual)
        return []

    def _absorb_slot(
        self, sequence: Sequence, proposal: Proposal, drawn: bool, chosen: list[int], logits_TV: Tensor, first: int
    ) -> None:
        """A generated token and its drafts have run in a graph, from row `first` on.

        It chose tokens by the plain rules, of which those up to the first that differs from its draft stand.
        """
        sampler, num_rows = sequence.sampler, len(chosen)
        assert sampler is not None
        sequence.width = num_rows - 1
        if sampler.needs_logits or (proposal.probs and not drawn):
            self._take(sequence, logits_TV[first : first + num_rows], proposal)
            return
        count = 1
        for draft_id in proposal.ids:
            if chosen[count - 1] != draft_id:
                break
            count += 1
        taken, reason = self._up_to_end(sequence, chosen[:count])
        tokens = sampler.take(taken, num_drawn=min(len(taken), num_rows - 1) if drawn else 0)
        self._accept(sequence, tokens, reason, proposal, num_rows=num_rows)

    def _leave_slot(self, sequence: Sequence) -> None:
        """Before a state is read or runs op by op: what the runner holds of it comes back."""
        if self._runner is not None:
            self._runner.leave(sequence.state)

    def _read_ahead(self, work: list[_Work]) -> None:
        """While a chunk runs, what the next one needs of tables on disk comes in."""
        reach = self.model.config.engram.max_ngram_size - 1
        for one in work:
            sequence, stop = one.sequence, one.sequence.num_done + one.num_rows
            ids = sequence.tokens[max(stop - reach, 0) : stop + one.num_rows]
            if sequence.status is Status.PREFILL and stop < len(sequence.tokens):
                self.model.prefetch(ids)

    def _plan(self) -> list[_Work]:
        """Who runs which rows: tokens first, then drafts, then chunks in the order of the queue."""
        now = time.monotonic()
        running = next(([s] for s in self._running if s.alone), self._running)
        prompts = [s for s in running if s.status is Status.PREFILL]
        if len(prompts) > 1:
            prompts = by_order(prompts, now, self.scheduling, self._rows_s)
        decoding = [s for s in running if s.status is Status.DECODE]
        if prompts and self._since_decode + 1 < self.scheduling.prefill_steps_between_decodes:
            decoding = []
        work: list[_Work] = []
        for sequence in decoding:
            # an earlier one may have set it aside meanwhile
            if sequence.state is None:
                continue
            stop = sequence.num_done + 1
            if self._has_room(sequence, stop) or self._guarded(self._reserve, sequence, stop):
                work.append(_Work(sequence, 1))
        work = [one for one in work if one.sequence.state is not None]
        budget = self.scheduling.max_step_tokens - len(work)
        self._draft(work, budget // 2 if prompts else budget)
        if not prompts:
            return work
        budget -= sum(len(one.proposal.ids) for one in work)
        if work:
            budget = min(budget, self._share.rows)
        for sequence in prompts:
            if budget <= 0:
                break
            if sequence.state is None:
                continue
            rows = chunk_rows(
                sequence.num_done, self._chunk_stop(sequence), budget, self.model.config.attention.sliding_window
            )
            if self._guarded(self._reserve, sequence, sequence.num_done + rows) and sequence.state is not None:
                work.append(_Work(sequence, rows))
                budget -= rows
        return [one for one in work if one.sequence.state is not None]

    def _chunk_stop(self, sequence: Sequence) -> int:
        """Where a sequence's chunk ends at the latest: before its prompt's last token, at its end, at the newest token.

        The last token of a prompt may change next time: it runs alone, and what stands before it is kept.
        """
        if sequence.num_done >= sequence.num_prompt:
            return len(sequence.tokens) - 1
        return sequence.num_prompt - self._has_boundary(sequence)

    def _has_boundary(self, sequence: Sequence) -> bool:
        keeps = sequence.lease is not None and sequence.lease.keep
        return keeps and sequence.num_done < sequence.num_prompt - 1

    def _draft(self, work: list[_Work], num_rows: int) -> None:
        """Let the drafter propose, and verify as many drafts as pay and as the step has rows for."""
        self._drafted_s = 0.0
        if self._runner is not None:
            num_rows = min(num_rows, self._runner.max_step_rows - len(work))
        if self.drafter is None or num_rows <= 0:
            return
        most = self.model.config.draft.block_size
        pays: bool | None = None
        drafted: list[_Work] = []
        asked: list[DraftRequest] = []
        for one in work:
            sequence = one.sequence
            request, limit = sequence.request, min(most, sequence.max_tokens - sequence.num_generated - 1)
            if limit <= 0 or request.draft == "off":
                continue
            if request.draft == "auto":
                if pays is None:
                    pays = self._pace.prefers(len(work), self._cost_of(len(work)))
                if not pays:
                    continue
            assert sequence.sampler is not None
            drafted.append(one)
            asked.append(
                DraftRequest(
                    state=sequence.state,
                    tokens=sequence.tokens,
                    sampling=request.sampling,
                    limit=limit,
                    generator=sequence.sampler.draft_generator,
                )
            )
        if not drafted:
            return
        began = time.monotonic()
        try:
            with self._few_rows():
                proposals = self.drafter.propose(asked)
            for proposal in proposals:
                if proposal.ids and not 0 <= min(proposal.ids) <= max(proposal.ids) < self.model.config.vocab_size:
                    raise ShapeError(f"a drafter proposed ids outside the vocabulary: {proposal.ids}")
            pairs = list(zip(asked, proposals, strict=True))
        except Exception:  # drafts only make answers faster
            log.warning("the drafter failed; the step runs without drafts", exc_info=True)
            return
        proposals = [proposal.cut(request.limit) for request, proposal in pairs]
        # without confidences there is nothing to weigh a row's cost against
        weighs = any(proposal.confidence is not None for proposal in proposals)
        widths = choose_widths(
            proposals,
            num_rows,
            base_rows=len(work),
            cost=self._cost.of(len(work)) if weighs else None,
            filled=None if self._runner is None else self._runner.filled,
            spent=time.monotonic() - began,
        )
        for one, proposal, width in zip(drafted, proposals, widths, strict=True):
            one.proposal = proposal.cut(self._width_with_room(one.sequence, width))
        self._drafted_s = time.monotonic() - began
        self.metrics.draft_s += self._drafted_s

    def _cost_of(self, sequences: int) -> Callable[[int], float] | None:
        """Seconds of a step by the rows asked for, if that is known."""
        cost = self._cost.of(sequences)
        return None if cost is None else lambda count: cost(self._rows_run(count))

    def _width_with_room(self, sequence: Sequence, width: int) -> int:
        """As many of the drafts as find pages; nobody is set aside for them."""
        first = sequence.num_done + 1
        if width == 0 or self._has_room(sequence, first + width):
            return width
        assert self.cache is not None and sequence.lease is not None
        if self.cache.reserve(sequence.lease, first + width, sequence.num_done, self._protected()):
            return width
        return min(width, len(sequence.lease.table.pages) * PAGE_TOKENS - first)

    def _part(self, work: _Work) -> Part:
        sequence = work.sequence
        start = sequence.num_done
        ids_T = self._ids((*sequence.tokens[start : start + work.num_rows], *work.proposal.ids))
        in_prompt = start < sequence.num_prompt
        return Part(
            state=sequence.state,
            ids_T=ids_T,
            prompt_tokens=sequence.num_prompt if in_prompt else None,
            silent=sequence.status is Status.PREFILL and not in_prompt,
        )

    def _take_apart(self, work: list[_Work], error: Exception) -> None:
        """A step failed: everybody in it goes back to where it began and runs alone next; who fails alone ends."""
        broken = [one for one in work if one.sequence.lease is not None and one.sequence.lease.broken]
        for one in broken:
            log.warning("request %s starts again: %s", one.sequence.request.id, error)
            self._restart(one.sequence)
        work = [one for one in work if one not in broken]
        if len(work) == 1 and not broken:
            log.error("request %s failed", work[0].sequence.request.id, exc_info=error)
            self._leave(work[0].sequence, "error", error=f"{type(error).__name__}: {error}")
            return
        log.warning("a step of %d sequences failed, they run one by one", len(work), exc_info=error)
        for one in work:
            one.sequence.alone = True
            if one.mark is not None:
                one.sequence.state.reset(one.mark)
            else:
                # a chunk may have overwritten windows that it still needs
                self._restart(one.sequence)

    def _note(self, work: list[_Work], began: float) -> None:
        """Count the step's rows and learn how long such steps take."""
        now = time.monotonic()
        self._num_steps += 1
        counts = {"decode": 0, "verify": 0}
        for one in work:
            if one.sequence.status is Status.DECODE:
                counts["decode"] += one.num_rows
                counts["verify"] += len(one.proposal.ids)
            else:
                phase = one.sequence.phase
                counts[phase] = counts.get(phase, 0) + one.num_rows
        metrics, decodes = self.metrics, counts["decode"] > 0
        for phase, count in counts.items():
            if count:
                metrics.rows[phase] = metrics.rows.get(phase, 0) + count
        rate = sum(counts.values()) / max(now - began, 1e-6)
        self._rows_s = rate if not self._rows_s else 0.9 * self._rows_s + 0.1 * rate
        metrics.steps += 1
        metrics.step_s += now - began
        if decodes:
            if self._last_tokens_s:
                self._share.note(now - self._last_tokens_s)
            self._last_tokens_s, self._since_decode = now, 0
        else:
            self._since_decode += 1
            if not any(sequence.status is Status.DECODE for sequence in self._running):
                self._last_tokens_s = 0.0

    def _absorb_chunk(self, sequence: Sequence, work: _Work, rows_TV: Tensor) -> None:
        """Rows of a prompt, or of answer tokens that were known already, have run."""
        at_boundary = self._has_boundary(sequence)
        sequence.num_done += work.num_rows
        sequence.num_run += work.num_rows
        if at_boundary and sequence.num_done == sequence.num_prompt - 1:
            self._publish_end(sequence)
        else:
            self._publish(sequence)
        if sequence.num_done <= sequence.num_prompt:
            sequence.emit(Progress(sequence.num_done, sequence.num_prompt))
        if sequence.remaining == 0:
            sequence.status = Status.DECODE
            self._start_forks(sequence, rows_TV[-1])
            self._take(sequence, rows_TV, Proposal())
        elif sequence.remaining == 1 and sequence.num_generated:
            sequence.status = Status.DECODE

    def _start_forks(self, sequence: Sequence, logits_V: Tensor) -> None:
        """Those who wait for a prompt's end take their first token there; who finds no room starts by itself."""
        forks, sequence.forks = sequence.forks, []
        for child in forks:
            child.waits_for = None
            if child.cancelled:
                continue

            def begin(child: Sequence) -> None:
                if self._start_beside(child, sequence, sequence.num_done):
                    self._take(child, logits_V[None], Proposal())

            self._guarded(begin, child)

    def _absorb_tokens(self, sequence: Sequence, work: _Work, rows_TV: Tensor) -> None:
        """A generated token and its drafts have run: as many of them stand as the sampler agrees with."""
        sequence.width = len(work.proposal.ids)
        self._take(sequence, rows_TV, work.proposal)

    def _take(self, sequence: Sequence, rows_TV: Tensor, proposal: Proposal) -> None:
        """The tokens that a step's logits give: one for each draft that is accepted, and one more."""
        sampler = sequence.sampler
        assert sampler is not None
        taken: list[Token] = []
        reason: FinishReason | None = None
        for place, logits_V in enumerate(rows_TV):
            draft_id = proposal.ids[place] if place < len(proposal.ids) else None
            probs = None if proposal.probs is None or draft_id is None else proposal.probs[place]
            taken.append(sampler(logits_V, draft_id, probs))
            _, reason = self._up_to_end(sequence, [token.id for token in taken])
            if reason is not None or taken[-1].id != draft_id:
                break
        self._accept(sequence, taken, reason, proposal, num_rows=rows_TV.shape[0])

    def _up_to_end(self, sequence: Sequence, ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """The next tokens up to one that ends the answer, and why it does."""
        stops, room = sequence.request.sampling.stop_token_ids, sequence.max_tokens - sequence.num_generated
        if stops:
            for place, token_id in enumerate(ids[:room]):
                if token_id in stops:
                    return ids[: place + 1], "stop"
        return (ids, None) if len(ids) < room else (ids[:room], "length")

    def _accept(
        self,
        sequence: Sequence,
        taken: list[Token],
        reason: FinishReason | None,
        proposal: Proposal,
        *,
        num_rows: int,
    ) -> None:
        """Tokens that were chosen after a step of `num_rows` rows, and whether they end the answer."""
        if not sequence.first_token_s:
            sequence.first_token_s = time.monotonic()
        if sequence.num_done < len(sequence.tokens):
            # the newest token's row and those of the accepted drafts stand; the others never were
            sequence.num_done += len(taken)
            if proposal.ids:
                sequence.drafted += len(proposal.ids)
                sequence.accepted += len(taken) - 1
                sequence.draft_steps += 1
            if len(taken) < num_rows:
                sequence.state.roll_back(sequence.num_done)
        for token in taken:
            sequence.tokens.append(token.id)
        self._publish(sequence)
        self._send(sequence, taken[:-1] if reason == "stop" else taken)
        if reason is not None:
            self._leave(sequence, reason)

    def _send(self, sequence: Sequence, tokens: Iterable[Token]) -> None:
        said, emit = sequence.said, sequence.emit
        for token in tokens:
            said.append(token)
            emit(token)

    def _guarded(
        self, action: Callable[Concatenate[Sequence, P], object], sequence: Sequence, *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Run one sequence's part of a step; its failure ends it alone. False if it failed."""
        try:
            action(sequence, *args, **kwargs)
        except LoadFailed as error:
            log.warning("request %s starts again: %s", sequence.request.id, error)
            self._restart(sequence)
            return False
        except Exception as error:  # one request's failure must not end the engine, whatever it is
            log.exception(
                "request %s failed", sequence.request.id, extra={"fields": {"request_id": sequence.request.id}}
            )
            self._leave(sequence, "error", error=f"{type(error).__name__}: {error}")
            return False
        return True

    # -- leaving

    def _publish(self, sequence: Sequence) -> None:
        """Offer the whole pages of the rows that have run."""
        lease = sequence.lease
        if lease is None or sequence.num_done < lease.published + PAGE_TOKENS:
            return
        assert self.cache is not None
        if self.cache.keeps(lease):
            self.cache.publish(lease, sequence.keys(sequence.num_done))

    def _publish_end(self, sequence: Sequence) -> None:
        assert self.cache is not None and sequence.lease is not None
        state = sequence.state
        self._leave_slot(sequence)
        # while cached tokens run again their halves of pairs are not there: nothing to go on from
        whole = state.num_held == state.num_tokens
        snapshot = state.snapshot() if whole and self.cache.snapshots.budget_bytes else None
        self.cache.publish_end(sequence.lease, sequence.keys(sequence.num_done), snapshot)

    def _leave(self, sequence: Sequence, reason: FinishReason, *, error: str = "") -> None:
        # a state that failed may not be able to answer
        cache_bytes = 0
        if not error and sequence.state is not None:
            self._leave_slot(sequence)
            cache_bytes = sequence.state.cache_bytes()
        end = self._finished(sequence, reason, cache_bytes, error)
        if self.cache is not None and sequence.lease is not None:
            if reason in ("stop", "length"):
                self._publish_end(sequence)
            elif reason == "error" and sequence.lease.plan.cached_tokens:
                self.cache.distrust(sequence.lease, sequence.keys(len(sequence.tokens)))
            self.cache.release(sequence.lease)
        if self._runner is not None:
            self._runner.forget(sequence.state)
        sequence.state = sequence.aside = sequence.lease = None
        for child in sequence.forks:
            child.waits_for = None
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
            prompt_tokens=sequence.num_prompt,
            completion_tokens=sequence.num_generated,
            cached_tokens=plan.cached_tokens,
            run_tokens=sequence.num_run,
            queue_s=admitted - sequence.submitted_s,
            prefill_s=first - admitted,
            decode_s=now - first,
            cache_bytes=cache_bytes,
            drafted_tokens=sequence.drafted,
            accepted_tokens=sequence.accepted,
            draft_steps=sequence.draft_steps,
            error=error,
            resume=plan.grade,
            cache_tier=plan.tier,
        )

    def _gauges(self) -> None:
        self.metrics.waiting, self.metrics.running = len(self._waiting), len(self._running)

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64, device=self.model.device)
