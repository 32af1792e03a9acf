"""Decoding on a GPU as captured graphs: a step is one copy in, one launch, one copy out.

A graph is made for a number of rows and a length of context, both rounded up, when it is first needed. Its inputs
lie in fixed places; positions, page tables and what is chosen stay on the device. A step that cannot run so is the
engine's to run op by op. A draft's round is a graph of its own, before the step that verifies it.

T rows, A sequences that draft, G tokens of a round, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedar.cache.manager import CacheManager, Lease
from cedar.config.model import PAGE_TOKENS
from cedar.engine.request import SamplingParams
from cedar.engine.sampling import Sampler
from cedar.errors import CapacityError
from cedar.kernels.pages import Stored
from cedar.kernels.sampling import RowParams, choose_rows, draw_rows, verify_rows
from cedar.model.decode import DecodeSlots, DecodeStep, SlotDecoder, unsuitable
from cedar.model.decode_draft import Drafted, SlotDraft
from cedar.model.draft import Draft
from cedar.model.sequence import SequenceState
from cedar.model.transformer import Transformer

log = logging.getLogger(__name__)

_FIRST_CONTEXT = 1024
_MOST_ROWS = 512
# rows of a step's staging buffer: slot, position, id, top_k as integers; temperature, top_p, min_p, uniform as floats;
# where drafts were drawn, also the draft behind each row (-1 for none), its place, and as a float another uniform
_NUM_INTEGERS, _NUM_FLOATS, _NUM_DRAWN = 4, 4, 3
# how rows are chosen: by temperature, with filters, or against drafts that were drawn
Rule = Literal["plain", "filtered", "drawn"]


class Anchor(NamedTuple):
    """One sequence's part of a draft's round: its newest token, and what its drafts are drawn with.

    `sampling` is None where the likeliest are wanted.
    """

    state: SequenceState
    token_id: int
    sampling: SamplingParams | None = None
    generator: torch.Generator | None = None


class Round(NamedTuple):
    """Tokens and confidence logits of a draft's round, on the host until the next one.

    Attributes:
        probs: By place, what each sequence's tokens were drawn from, on the device until its slot's next round that
            draws; None if they are the likeliest.
    """

    ids_AG: NDArray[np.int64]
    confidence_AG: NDArray[np.float32]
    probs: list[tuple[Tensor, ...] | None]


class Row(NamedTuple):
    """One sequence's part of a step: its newest token, then the drafts that are verified.

    `drawn` says that the drafts are those of its last round, which drew them.
    """

    state: SequenceState
    lease: Lease
    ids: Sequence[int]
    sampler: Sampler
    drawn: bool = False


@dataclass(slots=True, eq=False)
class _Graph:
    """A captured step, or on a CPU the same calls."""

    num_rows: int
    context: int
    rule: Rule
    inputs: Tensor
    replay: Callable[[], None] = field(init=False)
    logits_TV: Tensor = field(init=False)


@dataclass(slots=True, eq=False)
class _DraftGraph:
    """A captured round of drafts, or on a CPU the same calls."""

    num_rows: int
    draws: bool
    inputs: Tensor
    replay: Callable[[], None] = field(init=False)
    drafted: Drafted = field(init=False)


def unavailable(model: Transformer, cache: CacheManager | None, *, exact: bool) -> str:
    """Why this model cannot decode in graphs, or an empty string."""
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}"
    if cache is None:
        return "there is no page pool"
    if exact:
        return "exact mode runs rows in blocks of its own"
    for table in (block.engram.embed for block in model.layers if block.plan.engram):
        if table.disk is not None or (table.codes is not None and not table.codes.is_cuda and not table.beside):
            return "an Engram table is not in memory that the GPU reads"
    return ""


class DecodeRunner:
    """Decodes up to `max_rows` sequences a step, with drafts up to `max_step_rows` rows.

    Args:
        max_context: Longest sequence, in tokens.
        draft: Keep what it reads of every row, and run its rounds (`propose`).
        capture: False runs the same calls one by one, which is how a CPU tests them.

    Raises:
        CapacityError: The pool has no page to spare.
    """

    def __init__(
        self,
        model: Transformer,
        cache: CacheManager,
        *,
        max_rows: int,
        max_context: int,
        draft: Draft | None = None,
        capture: bool = True,
    ) -> None:
        self.model, self.max_rows, self._capture = model, max_rows, capture
        self._decoder = SlotDecoder(model, draft)
        self._draft = None if draft is None else SlotDraft(draft)
        # of a sequence: the newest token and its drafts
        self._num_tokens = 1 if draft is None else 1 + draft.config.draft.block_size
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
        # slots whose page table is another sequence's yet
        self._unpaged: set[int] = set()
        # by slot, and neutral for the idle one: top_k; temperature, top_p, min_p; whose they are
        self._top_k = np.zeros(max_rows + 1, dtype=np.int64)
        self._floats = np.zeros((_NUM_FLOATS - 1, max_rows + 1))
        self._floats[1] = 1
        self._samplers: list[Sampler | None] = [None] * max_rows
        # by slot and place, what drafts were drawn from; made when some first are
        self._prob_SGV = torch.empty(0)
        self._probs: list[tuple[Tensor, ...]] = []
        self._graphs: dict[tuple[int, int, Rule], _Graph] = {}
        self._draft_graphs: dict[tuple[int, bool], _DraftGraph] = {}
        self._memory = torch.cuda.graph_pool_handle() if capture else None

        def staged(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(count, dtype=dtype, pin_memory=capture)

        # beyond some hundred rows the kernels for few rows give way to others
        self.max_step_rows = most = max(max_rows, min(self._num_tokens * max_rows, _MOST_ROWS))
        self._filled = [_rounded(max(count, 1), most) for count in range(most + 1)]
        # a round's rows are fewer than a step's, but each has a random number for every token
        self._staged = staged((_NUM_INTEGERS + _NUM_FLOATS + max(_NUM_DRAWN, self._num_tokens)) * most)
        self._answers = staged(most)
        self._host_staged, self._host_answers = self._staged.numpy(), self._answers.numpy()
        self._drafted_ids, self._confidence = staged(most), staged(most, torch.float32)
        self._host_drafted, self._host_confidence = self._drafted_ids.numpy(), self._confidence.numpy()

    @property
    def num_graphs(self) -> int:
        """Graphs made so far."""
        return len(self._graphs) + len(self._draft_graphs)

    def fitting(self, states: Sequence[SequenceState]) -> list[int]:
        """The places of those among `states` that may take part together: each has a slot, or there is one for it."""
        free, places = len(self._free), []
        for place, state in enumerate(states):
            if state not in self._held:
                if not free or unsuitable(state):
                    continue
                free -= 1
            places.append(place)
        return places

    def filled(self, count: int) -> int:
        """Rows that the graph of so many has; what no graph holds runs as it is."""
        return self._filled[count] if count < len(self._filled) else count

    def retire(self) -> None:
        """Take nobody in any more, once all have left."""
        self._free.clear()

    @torch.inference_mode()
    def warm_up(self, report: Callable[[str], None] = log.info) -> None:
        """Make the graphs of every number of rows at the shortest context, telling how far it is."""
        counts = sorted(set(self._filled))
        rounds = [] if self._draft is None else [count for count in counts if count <= self.max_rows]
        makers: list[tuple[str, Callable[[], object]]] = [
            *((f"{count} rows", partial(self._graph, count, 1, "plain")) for count in counts),
            *((f"drafts for {count}", partial(self._draft_graph, count, draws=False)) for count in rounds),
        ]
        for place, (what, make) in enumerate(makers):
            started = time.monotonic()
            make()
            report(
                f"decode graph {place + 1} of {len(makers)}: {what}, {time.monotonic() - started:.1f} s "
                f"on {self.model.device}"
            )

    def propose(self, rows: Sequence[Anchor]) -> Round:
        """A draft's round behind the newest token of each sequence, which gets a slot if it has none."""
        num_rows, draws = len(rows), any(row.sampling is not None for row in rows)
        graph = self._draft_graph(_rounded(num_rows, self.max_rows), draws=draws)
        slots = [self._enter(row.state) for row in rows]
        staged = self._host_staged[: graph.inputs.numel()].reshape(-1, graph.num_rows)
        staged[0, num_rows:], staged[1:, num_rows:] = self.slots.num_slots, 0
        staged[0, :num_rows] = slots
        staged[1, :num_rows] = [row.state.num_tokens for row in rows]
        staged[2, :num_rows] = [row.token_id for row in rows]
        if draws:
            floats = staged[_NUM_INTEGERS:].view(np.float64)
            floats[1] = 1
            for place, (_, _, sampling, generator) in enumerate(rows):
                if sampling is not None:
                    uniform_G = torch.rand(self._num_tokens - 1, generator=generator, dtype=torch.float64)
                    staged[3, place] = sampling.top_k
                    floats[:, place] = sampling.temperature, sampling.top_p, sampling.min_p, *uniform_G.tolist()
        graph.replay()
        self._wait()
        num_values = num_rows * graph.drafted.ids_AG.shape[1]
        return Round(
            self._host_drafted[:num_values].reshape(num_rows, -1),
            self._host_confidence[:num_values].reshape(num_rows, -1),
            [None if row.sampling is None else self._probs[slot] for row, slot in zip(rows, slots, strict=True)],
        )

    def drew(self, state: SequenceState, probs: Sequence[Tensor] | None) -> bool:
        """Whether these are what the last round of a sequence's slot drew from."""
        if not probs or not self._probs or state not in self._held:
            return False
        return probs[0] is self._probs[self._held[state]][0]

    def step(self, rows: Sequence[Row]) -> tuple[list[int], Tensor]:
        """The rows' tokens: those chosen behind each (-1 where logits are not finite), and the logits [T, V].

        All of them count as held: `roll_back` forgets the rejected. The logits, of idle rows too, lie in the graph's
        own memory: the next step overwrites them. A row whose sampler needs logits gets a token that means nothing,
        and so does one before a draft that another drafter drew.

        Raises:
            CapacityError: More sequences than slots, or more rows than a step takes.
        """
        num_rows = sum(len(row.ids) for row in rows)
        if len(rows) > self.max_rows or num_rows > self.max_step_rows:
            raise CapacityError(
                f"{num_rows} rows of {len(rows)} sequences for {self.max_step_rows} rows of {self.max_rows} slots: "
                "run them in several steps"
            )
        slots: list[int] = []
        positions: list[int] = []
        ids: list[int] = []
        uniforms: list[float] = []
        longest, rule = 0, self._rule(rows)
        for row in rows:
            slot, start, width = self._place(row), row.state.num_tokens, len(row.ids)
            slots += [slot] * width
            positions += range(start, start + width)
            ids += row.ids
            uniforms += row.sampler.uniforms(width)
            longest = max(longest, start + width)
        graph = self._graph(self._filled[num_rows], longest, rule)
        self._stage(graph, slots, positions, ids, uniforms)
        if rule == "drawn":
            self._stage_drawn(graph, rows)
        graph.replay()
        # while the device works
        for row in rows:
            self.slots.stepped(row.state, len(row.ids))
        self._wait()
        return self._host_answers[:num_rows].tolist(), graph.logits_TV

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

    def _enter(self, state: SequenceState) -> int:
        slot = self._held.get(state)
        if slot is None:
            slot = self._free.pop()
            self._held[state] = slot
            self._unpaged.add(slot)
            with torch.inference_mode():
                self.slots.enter(state, slot)
        return slot

    def _place(self, row: Row) -> int:
        """A sequence's slot, which knows its pages and how it samples."""
        slot = self._enter(row.state)
        entered = slot in self._unpaged
        self.slots.set_pages(slot, row.lease.table.pages, entered=entered)
        if entered:
            self._unpaged.discard(slot)
        if self._samplers[slot] is not row.sampler:
            params = row.sampler.params
            self._samplers[slot], self._top_k[slot] = row.sampler, params.top_k
            self._floats[:, slot] = params.temperature, params.top_p, params.min_p
        return slot

    def _wait(self) -> None:
        """Until a graph's answers have arrived."""
        if self._capture:
            torch.cuda.current_stream(self.model.device).synchronize()

    def _rule(self, rows: Sequence[Row]) -> Rule:
        if any(row.drawn for row in rows):
            return "drawn"
        return "filtered" if any(row.sampler.filters for row in rows) else "plain"

    def _stage(
        self, graph: _Graph, slots: list[int], positions: list[int], ids: list[int], uniforms: list[float]
    ) -> None:
        """What a graph reads; rows beyond those given are idle."""
        count, num_rows = len(slots), graph.num_rows
        # numpy: a torch call costs as much as all of this
        staged = self._host_staged[: (_NUM_INTEGERS + _NUM_FLOATS) * num_rows].reshape(-1, num_rows)
        floats = staged[_NUM_INTEGERS:].view(np.float64)
        slot_T = staged[0]
        slot_T[:count], slot_T[count:] = slots, self.slots.num_slots
        staged[1:3, :count], staged[1:3, count:] = (positions, ids), 0
        staged[3] = self._top_k[slot_T]
        floats[:-1] = self._floats[:, slot_T]
        floats[-1, :count], floats[-1, count:] = uniforms, 0

    def _stage_drawn(self, graph: _Graph, rows: Sequence[Row]) -> None:
        """Which drafts the rows are held against, and the random numbers of those that differ."""
        drafts: list[int] = []
        places: list[int] = []
        others: list[float] = []
        for row in rows:
            num_drafts = len(row.ids) - 1
            places += range(num_drafts + 1)
            drafts += [*row.ids[1:], -1] if row.drawn else [-1] * (num_drafts + 1)
            others += [*row.sampler.draft_uniforms(num_drafts), 0.0] if row.drawn else [0.0] * (num_drafts + 1)
        num_rows, count = graph.num_rows, len(drafts)
        staged = self._host_staged[(_NUM_INTEGERS + _NUM_FLOATS) * num_rows : graph.inputs.numel()].reshape(
            -1, num_rows
        )
        # the last place of a sequence has no draft: which probabilities are read there does not matter
        staged[0, :count], staged[1, :count] = drafts, np.minimum(places, self._num_tokens - 2)
        staged[2].view(np.float64)[:count] = others
        staged[0, count:], staged[1:, count:] = -1, 0

    def _graph(self, num_rows: int, longest: int, rule: Rule) -> _Graph:
        context = _FIRST_CONTEXT
        while context < longest:
            context *= 4
        context = min(context, self._max_context)
        key = num_rows, context, rule
        if key not in self._graphs:
            self._graphs[key] = self._build(*key)
        return self._graphs[key]

    @torch.inference_mode()
    def _build(self, num_rows: int, context: int, rule: Rule) -> _Graph:
        num_inputs = _NUM_INTEGERS + _NUM_FLOATS + (_NUM_DRAWN if rule == "drawn" else 0)
        inputs = torch.zeros(num_inputs, num_rows, dtype=torch.int64, device=self.model.device)
        # every row is idle until a step says otherwise
        self._staged.zero_()
        self._staged[:num_rows] = self.slots.num_slots
        graph = _Graph(num_rows, context, rule, inputs)
        if not self._capture:
            graph.replay = lambda: self._run(graph)
        else:
            graph.replay = self._captured(lambda: self._run(graph))
        return graph

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        # once outside: kernels are compiled and libraries make their handles
        device = self.model.device
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(device).wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, pool=self._memory, capture_error_mode="thread_local"):
            run()
        return captured.replay

    def _draft_graph(self, num_rows: int, *, draws: bool) -> _DraftGraph:
        key = num_rows, draws
        if key not in self._draft_graphs:
            self._draft_graphs[key] = self._build_draft(*key)
        return self._draft_graphs[key]

    @torch.inference_mode()
    def _build_draft(self, num_rows: int, draws: bool) -> _DraftGraph:
        num_places, device = self._num_tokens - 1, self.model.device
        if draws and not self._probs:
            shape = self.max_rows + 1, num_places, self.model.config.vocab_size
            self._prob_SGV = torch.zeros(shape, dtype=torch.float32, device=device)
            self._probs = [prob_GV.unbind() for prob_GV in self._prob_SGV]
        num_inputs = _NUM_INTEGERS + _NUM_FLOATS - 1 + num_places if draws else 3
        inputs = torch.zeros(num_inputs, num_rows, dtype=torch.int64, device=device)
        self._staged.zero_()
        self._staged[:num_rows] = self.slots.num_slots
        graph = _DraftGraph(num_rows, draws, inputs)
        if self._capture:
            graph.replay = self._captured(lambda: self._run_draft(graph))
        else:
            graph.replay = lambda: self._run_draft(graph)
        return graph

    @torch.inference_mode()
    def _run_draft(self, graph: _DraftGraph) -> None:
        assert self._draft is not None
        graph.inputs.copy_(self._staged[: graph.inputs.numel()].view_as(graph.inputs), non_blocking=True)
        slot_A, position_A, anchor_A, *rest = graph.inputs
        params: list[RowParams] = []
        if graph.draws:
            temperature_A, top_p_A, min_p_A, *uniforms = graph.inputs[_NUM_INTEGERS:].view(torch.float64)
            params = [RowParams(temperature_A, rest[0], top_p_A, min_p_A, uniform_A) for uniform_A in uniforms]
        graph.drafted = self._draft(self.slots, slot_A, position_A, anchor_A, params)
        if graph.drafted.prob_AGV is not None:
            self._prob_SGV[slot_A] = graph.drafted.prob_AGV
        for host, values in (
            (self._drafted_ids, graph.drafted.ids_AG),
            (self._confidence, graph.drafted.confidence_AG),
        ):
            host[: values.numel()].copy_(values.flatten(), non_blocking=True)

    @torch.inference_mode()
    def _run(self, graph: _Graph) -> None:
        # the graph holds the copies in and out, from and to host memory that never moves
        graph.inputs.copy_(self._staged[: graph.inputs.numel()].view_as(graph.inputs), non_blocking=True)
        slot_T, position_T, ids_T, top_k_T = graph.inputs[:_NUM_INTEGERS]
        numbers = graph.inputs[_NUM_INTEGERS:].view(torch.float64)
        temperature_T, top_p_T, min_p_T, uniform_T = numbers[:_NUM_FLOATS]
        step = DecodeStep(self.slots, self.model.rope, slot_T, position_T, context=graph.context)
        graph.logits_TV = self._decoder(step, ids_T)
        params = RowParams(temperature_T, top_k_T, top_p_T, min_p_T, uniform_T)
        if graph.rule == "drawn":
            draft_T, place_T, _ = graph.inputs[-_NUM_DRAWN:]
            chosen_T = verify_rows(graph.logits_TV, params, draft_T, self._prob_SGV[slot_T, place_T], numbers[-1])
        elif graph.rule == "filtered":
            chosen_T = choose_rows(graph.logits_TV, params)
        else:
            chosen_T = draw_rows(graph.logits_TV, temperature_T, uniform_T)
        self._answers[: graph.num_rows].copy_(chosen_T, non_blocking=True)


def _rounded(count: int, most: int) -> int:
    """Rows of the graph that runs so many: a power of two, or three quarters of it from 24 on.

    >>> [_rounded(count, 96) for count in (3, 16, 17, 33, 49, 65)]
    [4, 16, 24, 48, 64, 96]
    """
    power = 1 << (count - 1).bit_length()
    if power >= 32 and count <= power // 4 * 3:
        power = power // 4 * 3
    return min(power, most)
