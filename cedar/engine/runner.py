"""Decoding on a GPU as captured graphs: a step is one copy in, one launch, one copy out.

A graph is made for a number of rows and a length of context, both rounded up, when it is first needed. Its inputs
lie in fixed places; positions, page tables and what is chosen stay on the device. A step that cannot run so is the
engine's to run op by op.

T rows, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cedar.cache.manager import CacheManager, Lease
from cedar.config.model import PAGE_TOKENS
from cedar.engine.sampling import Sampler
from cedar.errors import CapacityError
from cedar.kernels.pages import Stored
from cedar.kernels.sampling import RowParams, choose_rows, draw_rows
from cedar.model.decode import DecodeSlots, DecodeStep, SlotDecoder, unsuitable
from cedar.model.sequence import SequenceState
from cedar.model.transformer import Transformer

log = logging.getLogger(__name__)

_FIRST_CONTEXT = 1024
# rows of the staging buffer: slot, position, id, top_k as integers; temperature, top_p, min_p, uniform as floats
_NUM_INTEGERS, _NUM_FLOATS = 4, 4


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step."""

    state: SequenceState
    lease: Lease
    token_id: int
    sampler: Sampler


@dataclass(slots=True, eq=False)
class _Graph:
    """A captured step, or on a CPU the same calls."""

    num_rows: int
    context: int
    filtered: bool
    inputs: Tensor
    replay: Callable[[], None] = field(init=False)
    logits_TV: Tensor = field(init=False)


def unavailable(model: Transformer, cache: CacheManager | None, *, exact: bool) -> str:
    """Why this model cannot decode in graphs, or an empty string."""
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}"
    if cache is None:
        return "there is no page pool"
    if exact:
        return "exact mode runs rows in blocks of its own"
    tables = [block.engram.embed for block in model.layers if block.plan.engram]
    if any(table.codes is not None and table.codes.device.type != "cuda" for table in tables):
        return "an Engram table is not in the GPU's memory"
    return ""


class DecodeRunner:
    """Decodes up to `max_rows` sequences a step.

    Args:
        max_context: Longest sequence, in tokens.
        capture: False runs the same calls one by one, which is how a CPU tests them.

    Raises:
        CapacityError: The pool has no page to spare.
    """

    def __init__(
        self, model: Transformer, cache: CacheManager, *, max_rows: int, max_context: int, capture: bool = True
    ) -> None:
        self.model, self.max_rows, self._capture = model, max_rows, capture
        self._decoder = SlotDecoder(model)
        max_pages = min(-(-max_context // PAGE_TOKENS), cache.pool.num_pages)
        rows = {
            place: Stored(cache.pool.field(part.codes), cache.pool.field(part.scales), part.spec)
            for place, part in cache.pool.layout.rows.items()
        }
        with torch.inference_mode():
            self.slots = DecodeSlots(
                model.config,
                rows,
                num_slots=max_rows,
                max_pages=max_pages,
                idle_page=cache.pool.take(),
                device=model.device,
            )
        self._max_context = max_pages * PAGE_TOKENS
        self._free = list(range(max_rows - 1, -1, -1))
        self._held: dict[SequenceState, int] = {}
        self._graphs: dict[tuple[int, int, bool], _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle() if capture else None
        self._staged = torch.zeros((_NUM_INTEGERS + _NUM_FLOATS) * max_rows, dtype=torch.int64, pin_memory=capture)
        self._answers = torch.zeros(max_rows, dtype=torch.int64, pin_memory=capture)
        self._host_staged, self._host_answers = self._staged.numpy(), self._answers.numpy()

    def suits(self, state: SequenceState) -> bool:
        """Whether a sequence may take part: it has a slot, or could."""
        return state in self._held or (bool(self._free) and not unsuitable(state))

    @torch.inference_mode()
    def warm_up(self, report: Callable[[str], None] = log.info) -> None:
        """Make the graphs of every number of rows at the shortest context, telling how far it is."""
        counts = sorted({self._rounded_rows(count) for count in range(1, self.max_rows + 1)})
        for place, count in enumerate(counts):
            started = time.monotonic()
            self._graph(count, 1, filtered=False)
            report(
                f"decode graph {place + 1} of {len(counts)}: {count} rows, {time.monotonic() - started:.1f} s "
                f"on {self.model.device}"
            )

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> tuple[list[int], Tensor]:
        """One token of each row: the tokens chosen (-1 where logits are not finite), and the logits [T, V].

        The logits lie in the graph's own memory: the next step overwrites them. A row whose sampler needs logits
        gets a token that means nothing.

        Raises:
            CapacityError: More rows than slots.
        """
        if len(rows) > self.max_rows:
            raise CapacityError(f"{len(rows)} rows for {self.max_rows} slots: run them in several steps")
        for row in rows:
            self._place(row)
        filtered = any(
            params.top_k or params.top_p < 1 or params.min_p for params in (row.sampler.params for row in rows)
        )
        longest = max(row.state.num_tokens for row in rows) + 1
        graph = self._graph(self._rounded_rows(len(rows)), longest, filtered=filtered)
        self._stage(graph, rows)
        graph.replay()
        if self._capture:
            torch.cuda.current_stream(self.model.device).synchronize()
        for row in rows:
            self.slots.stepped(row.state, self._held[row.state])
        return self._host_answers[: len(rows)].tolist(), graph.logits_TV[: len(rows)]

    @torch.inference_mode()
    def leave(self, state: SequenceState) -> None:
        """Give a sequence back all that it left in its slot; without one nothing happens."""
        if state in self._held:
            self.slots.leave(state, self._held[state])
            self.forget(state)

    def forget(self, state: SequenceState) -> None:
        """Free a sequence's slot; what is in it is lost."""
        slot = self._held.pop(state, None)
        if slot is not None:
            self._free.append(slot)

    def _place(self, row: Row) -> None:
        slot = self._held.get(row.state)
        entered = slot is None
        if slot is None:
            slot = self._free.pop()
            self._held[row.state] = slot
            self.slots.enter(row.state, slot)
        self.slots.set_pages(slot, row.lease.table.pages, entered=entered)

    def _stage(self, graph: _Graph, rows: Sequence[Row]) -> None:
        idle = graph.num_rows - len(rows)
        samplers = [row.sampler for row in rows]
        integers = [
            [self._held[row.state] for row in rows] + [self.slots.num_slots] * idle,
            [row.state.num_tokens for row in rows] + [0] * idle,
            [row.token_id for row in rows] + [0] * idle,
            [sampler.params.top_k for sampler in samplers] + [0] * idle,
        ]
        floats = [
            [float(sampler.params.temperature) for sampler in samplers] + [0.0] * idle,
            [float(sampler.params.top_p) for sampler in samplers] + [1.0] * idle,
            [float(sampler.params.min_p) for sampler in samplers] + [0.0] * idle,
            [sampler.uniform() for sampler in samplers] + [0.0] * idle,
        ]
        # numpy: a torch call costs as much as all of this
        staged = self._host_staged[: graph.inputs.numel()].reshape(-1, graph.num_rows)
        staged[:_NUM_INTEGERS] = integers
        staged[_NUM_INTEGERS:].view(np.float64)[:] = floats

    def _rounded_rows(self, num_rows: int) -> int:
        return min(1 << (num_rows - 1).bit_length(), self.max_rows)

    def _graph(self, num_rows: int, longest: int, *, filtered: bool) -> _Graph:
        context = _FIRST_CONTEXT
        while context < longest:
            context *= 4
        context = min(context, self._max_context)
        key = num_rows, context, filtered
        if key not in self._graphs:
            self._graphs[key] = self._build(*key)
        return self._graphs[key]

    def _build(self, num_rows: int, context: int, filtered: bool) -> _Graph:
        device = self.model.device
        inputs = torch.zeros(_NUM_INTEGERS + _NUM_FLOATS, num_rows, dtype=torch.int64, device=device)
        # every row is idle until a step says otherwise
        self._staged.zero_()
        self._staged[:num_rows] = self.slots.num_slots
        graph = _Graph(num_rows, context, filtered, inputs)
        if not self._capture:
            graph.replay = lambda: self._run(graph)
            return graph
        # once outside: kernels are compiled and libraries make their handles
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._run(graph)
        torch.cuda.current_stream(device).wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, pool=self._memory, capture_error_mode="thread_local"):
            self._run(graph)
        graph.replay = captured.replay
        return graph

    def _run(self, graph: _Graph) -> None:
        # the graph holds the copies in and out, from and to host memory that never moves
        graph.inputs.copy_(self._staged[: graph.inputs.numel()].view_as(graph.inputs), non_blocking=True)
        slot_T, position_T, ids_T, top_k_T = graph.inputs[:_NUM_INTEGERS]
        temperature_T, top_p_T, min_p_T, uniform_T = graph.inputs[_NUM_INTEGERS:].view(torch.float64)
        step = DecodeStep(self.slots, self.model.rope, slot_T, position_T, context=graph.context)
        graph.logits_TV = self._decoder(step, ids_T)
        if graph.filtered:
            params = RowParams(temperature_T, top_k_T, top_p_T, min_p_T, uniform_T)
            chosen_T = choose_rows(graph.logits_TV, params)
        else:
            chosen_T = draw_rows(graph.logits_TV, temperature_T, uniform_T)
        self._answers[: graph.num_rows].copy_(chosen_T, non_blocking=True)
