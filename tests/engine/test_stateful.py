"""Random histories of an engine under a strict cache: every answer is the cold one (2,000 steps, about 100 s)."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cedar.cache.manager import CacheManager
from cedar.cache.store import PageStore
from cedar.config import presets
from cedar.config.model import ModelConfig
from cedar.engine.engine import Engine
from cedar.engine.request import Event, Finished, Handle, Request, Rewound, SamplingParams, Token
from cedar.engine.scheduler import SchedulerConfig
from cedar.engine.speculate import Drafter, DraftRequest, ModelDrafter, Proposal
from cedar.errors import RequestError
from cedar.kernels.dispatch import deterministic
from cedar.model.draft import Draft
from cedar.model.init import initialise
from cedar.model.sequence import SequenceState, Snapshot
from cedar.model.transformer import Transformer
from cedar.planner.kv import page_bytes
from tests.device import DEVICE
from tests.paths.random_models import random_model

pytestmark = pytest.mark.device

NUM_PAGES = 10
# a conversation is a line of these tokens; requests leave it anywhere
LINES = 2
LENGTH = 420


def tiny() -> ModelConfig:
    """Every kind of layer, a window of 6, so that all grades occur at a few hundred tokens."""
    return presets._small_model(
        layout="S F2 U | F1 R U",
        vocab_size=64,
        hidden_size=32,
        num_heads=2,
        head_dim=32,
        rope_head_dim=8,
        q_lora_rank=32,
        o_groups=1,
        o_lora_rank=32,
        window=6,
        compress_rope_theta=10000,
        num_experts=4,
        num_experts_per_token=1,
        inner_size=32,
        sinkhorn_iterations=2,
        index_heads=2,
        index_dim=32,
        topk=8,
        block_size=4,
        num_blocks=4,
        engram_layers=(1,),
        max_ngram_size=3,
        engram_vocab_size=31,
    )


@lru_cache(maxsize=1)
def tiny_draft() -> Draft:
    """A draft beside its model, both random."""
    config = presets.with_draft(
        tiny(), num_blocks=2, num_routed_experts=2, num_experts_per_token=1, markov_rank=32, noise_token_id=56
    )
    draft = Draft(config, random_model(config, 3), device=DEVICE)
    initialise(draft, 4)
    draft.attach()
    return draft


def tiny_model() -> Transformer:
    return tiny_draft().target


def tokens_of(line: int, length: int, tail: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(line)
    return (*torch.randint(0, 56, (LENGTH,), generator=generator)[:length].tolist(), *([tail] * (tail % 4)))


# prompt -> (the state behind what is known of its answer, the answer as far as it is known)
COLD: dict[tuple[int, ...], tuple[SequenceState, list[int]]] = {}


def oracle(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Greedy answer of the bare model: no engine, no pages, no cache."""
    model = tiny_model()
    with deterministic():
        if prompt not in COLD:
            state = model.new_state()
            COLD[prompt] = state, [int(model.prefill(state, torch.tensor(prompt), last_only=True)[-1].argmax())]
        state, said = COLD[prompt]
        while len(said) < max_tokens:
            said.append(int(model.decode(state, torch.tensor(said[-1:]))[-1].argmax()))
    for count, token in enumerate(said):
        FOLLOWS[(*prompt, *said[:count])] = token
    return tuple(said[:max_tokens])


# what the drafter below knows: what greedy answers go on with
FOLLOWS: dict[tuple[int, ...], int] = {}


class Knowing:
    """Drafts what the answer will be, up to a place where it goes wrong; each step another width."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = []
        for request in requests:
            tokens, ids = tuple(request.tokens), []
            width, right = self.draw.randrange(7), self.draw.randrange(7)
            for place in range(min(width, request.limit)):
                ids.append((FOLLOWS.get(tokens, 0) + (place >= right)) % 56)
                tokens = (*tokens, ids[-1])
            proposals.append(Proposal(ids=tuple(ids)))
        return proposals


class Asking:
    """Asks the model's own draft and puts right two of three tokens, so that drafts of every length stand."""

    def __init__(self) -> None:
        self._drafter = ModelDrafter(tiny_draft())

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = []
        for request, proposal in zip(requests, self._drafter.propose(requests), strict=True):
            tokens, ids = tuple(request.tokens), []
            for token in proposal.ids:
                ids.append(FOLLOWS.get(tokens, 0) if len(tokens) % 3 else token)
                tokens = (*tokens, ids[-1])
            proposals.append(Proposal(ids=tuple(ids), confidence=proposal.confidence))
        return proposals


def drafter(kind: int) -> Drafter | None:
    return (None, Asking(), Knowing(2), Knowing(3))[kind]


@dataclass
class Asked:
    """One request whose answer is still to come."""

    request: Request
    handle: Handle
    cancelled: bool = False


def answer(events: list[Event]) -> tuple[int, ...]:
    """The tokens that stand in the end."""
    said: list[int] = []
    for event in events:
        if isinstance(event, Token):
            said.append(event.id)
        if isinstance(event, Rewound):
            assert event.num_tokens < len(said)
            del said[event.num_tokens :]
    return tuple(said)


class Histories(RuleBasedStateMachine):
    """Submit, cancel, fork, rewind, evict, purge, restart; with drafts or without."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.open: list[Asked] = []
        self.checksums: dict[bytes, bytes] = {}

    @initialize(
        with_disk=st.booleans(),
        snapshots=st.booleans(),
        chunk=st.sampled_from([32, 100, 256]),
        drafts=st.integers(0, 3),
    )
    def begin(self, with_disk: bool, snapshots: bool, chunk: int, drafts: int) -> None:
        self.with_disk, self.snapshots, self.chunk, self.drafts = with_disk, snapshots, chunk, drafts
        self.start()

    def start(self) -> None:
        config = tiny_model().config
        store = None
        if self.with_disk:
            store = PageStore(
                self.directory, fingerprint=b"tiny", payload_bytes=page_bytes(config), budget_bytes=40 * 10_000
            )
        cache = CacheManager(
            config,
            device=DEVICE,
            num_pages=NUM_PAGES,
            strict=True,
            snapshot_bytes=2**20 if self.snapshots else 0,
            fingerprint=b"tiny",
            store=store,
            read_snapshot=Snapshot.from_bytes,
        )
        self.cache = cache
        self.engine = Engine(
            tiny_model(),
            cache=cache,
            drafter=drafter(self.drafts),
            scheduling=SchedulerConfig(max_step_tokens=self.chunk, max_running=3, reserve_tokens=2),
            max_context=600,
        )

    def submit(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        # known before it is asked, so that the drafter knows it
        oracle(prompt, max_tokens)
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        request = Request(prompt_ids=prompt, sampling=sampling, draft="on")
        self.open.append(Asked(request, self.engine.submit(request)))

    @rule(
        line=st.integers(0, LINES - 1),
        length=st.sampled_from([1, 5, 40, 127, 128, 130, 200, 255, 256, 258, 300, 384, LENGTH]),
        tail=st.integers(0, 7),
        max_tokens=st.sampled_from([1, 2, 7, 16]),
    )
    def ask(self, line: int, length: int, tail: int, max_tokens: int) -> None:
        """A prompt that shares a beginning with all others of its line: a hit, a rewind or a branch."""
        self.submit(tokens_of(line, length, tail), max_tokens)

    @rule(line=st.integers(0, LINES - 1), length=st.sampled_from([130, 256, 300]), count=st.integers(2, 3))
    def ask_alike(self, line: int, length: int, count: int) -> None:
        for _ in range(count):
            self.submit(tokens_of(line, length, 0), 3)

    @rule(place=st.integers(0, 5), num_tokens=st.sampled_from([None, 0, 1, 5]), max_tokens=st.sampled_from([9, 14]))
    def fork(self, place: int, num_tokens: int | None, max_tokens: int) -> None:
        """Another answer to the prompt of whoever runs, from wherever it stands."""
        if not self.open:
            return
        request = self.open[place % len(self.open)].request
        oracle(request.prompt_ids, max_tokens)
        # longer than what it may inherit: else the engine rightly refuses
        num_tokens = 8 if num_tokens is None else num_tokens
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        try:
            handle = self.engine.fork(request.id, sampling=sampling, num_tokens=num_tokens)
        except RequestError as error:
            # it has answered already, or was cancelled
            assert error.status == 404
            return
        forked = Request(prompt_ids=request.prompt_ids, sampling=sampling, id=handle.request_id)
        self.open.append(Asked(forked, handle))

    @rule(place=st.integers(0, 5), num_tokens=st.sampled_from([0, 1, 2, 6]))
    def rewind(self, place: int, num_tokens: int) -> None:
        """Take tokens back while it answers; a greedy answer is the same in the end."""
        if not self.open:
            return
        try:
            done = self.engine.rewind(self.open[place % len(self.open)].request.id, num_tokens)
            assert done.result(60) >= 0
        except RequestError as error:
            assert error.status == 404

    @rule(line=st.integers(0, LINES - 1), length=st.sampled_from([100, 256, 300]))
    def next_turn(self, line: int, length: int) -> None:
        prompt = tokens_of(line, length, 0)
        self.submit((*prompt, *oracle(prompt, 7), 9, 9, 9), 2)

    @rule(place=st.integers(0, 5))
    def cancel(self, place: int) -> None:
        if self.open:
            asked = self.open[place % len(self.open)]
            asked.handle.cancel()
            asked.cancelled = True

    @rule()
    def wait(self) -> None:
        """Everybody answers, and says what a cold run says."""
        waited_for, self.open = self.open, []
        for asked in waited_for:
            events = list(asked.handle)
            end = events[-1]
            assert isinstance(end, Finished)
            assert end.reason == "length" or (asked.cancelled and end.reason == "cancelled"), end
            said, max_tokens = answer(events), asked.request.sampling.max_tokens
            assert max_tokens is not None
            assert said == oracle(asked.request.prompt_ids, max_tokens)[: len(said)], end
            if end.reason == "length":
                assert len(said) == max_tokens
        self.cache.pool.check()
        assert self.cache.pool.num_free + self.cache.tree.num_nodes == NUM_PAGES
        for node in self.cache.tree.nodes():
            assert node.lineage == 0

    @rule(count=st.integers(1, NUM_PAGES))
    def evict(self, count: int) -> None:
        self.wait()
        self.cache.evict(count)

    @rule()
    def purge(self) -> None:
        self.wait()
        self.cache.purge()

    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        if orderly:
            self.wait()
        self.engine.close()
        for asked in self.open:
            assert isinstance(list(asked.handle)[-1], Finished)
        self.open, self.checksums = [], {}
        self.start()

    @invariant()
    def pages_do_not_change(self) -> None:
        """Whole pages of the tree, looked at between steps that wait for everybody."""
        if self.open or not hasattr(self, "cache"):
            return
        now = {node.key: self.cache.pool.read(node.page) for node in self.cache.tree.nodes() if node.full}
        for key, before in self.checksums.items():
            assert now.get(key, before) == before
        self.checksums |= now

    def teardown(self) -> None:
        self.wait()
        self.engine.close()
        shutil.rmtree(self.directory)


TestHistories = Histories.TestCase
# a thread runs the engine, so a history does not fail the same way twice: shrinking would only take time
_PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
TestHistories.settings = settings(max_examples=20, stateful_step_count=100, deadline=None, phases=_PHASES)


@pytest.mark.slow
class TestManyHistories(Histories.TestCase):  # type: ignore[misc]
    """The same, twenty times as long."""

    settings = settings(max_examples=400, stateful_step_count=100, deadline=None, phases=_PHASES, derandomize=False)
