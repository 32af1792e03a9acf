"""Random histories of an engine under a strict cache: every answer is the cold one (2,000 steps, about 90 s)."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache, lru_cache
from pathlib import Path

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cedar.cache.manager import CacheManager
from cedar.cache.store import PageStore
from cedar.config import presets
from cedar.config.model import ModelConfig
from cedar.engine.engine import Engine
from cedar.engine.request import Finished, Handle, Request, SamplingParams, Token
from cedar.engine.scheduler import SchedulerConfig
from cedar.kernels.dispatch import deterministic
from cedar.model.sequence import Snapshot
from cedar.model.transformer import Transformer
from cedar.planner.kv import page_bytes
from tests.paths.random_models import random_model

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
def tiny_model() -> Transformer:
    return random_model(tiny(), 3)


def tokens_of(line: int, length: int, tail: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(line)
    return (*torch.randint(0, 56, (LENGTH,), generator=generator)[:length].tolist(), *([tail] * (tail % 4)))


@cache
def oracle(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Greedy answer of the bare model: no engine, no pages, no cache."""
    model, said = tiny_model(), []
    with deterministic():
        state = model.new_state()
        logits_V = model.prefill(state, torch.tensor(prompt), last_only=True)[-1]
        for _ in range(max_tokens):
            said.append(int(logits_V.argmax()))
            if len(said) < max_tokens:
                logits_V = model.decode(state, torch.tensor(said[-1:]))[-1]
    return tuple(said)


class Histories(RuleBasedStateMachine):
    """Submit, cancel, fork, rewind, evict, purge, restart."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.open: list[tuple[Request, Handle, bool]] = []
        self.checksums: dict[bytes, bytes] = {}

    @initialize(with_disk=st.booleans(), snapshots=st.booleans(), chunk=st.sampled_from([32, 100, 256]))
    def begin(self, with_disk: bool, snapshots: bool, chunk: int) -> None:
        self.with_disk, self.snapshots, self.chunk = with_disk, snapshots, chunk
        self.start()

    def start(self) -> None:
        config = tiny()
        store = None
        if self.with_disk:
            store = PageStore(
                self.directory, fingerprint=b"tiny", payload_bytes=page_bytes(config), budget_bytes=40 * 10_000
            )
        cache = CacheManager(
            config,
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
            scheduling=SchedulerConfig(max_step_tokens=self.chunk, max_running=3, reserve_tokens=2),
            max_context=600,
        )

    def submit(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        request = Request(prompt_ids=prompt, sampling=sampling)
        self.open.append((request, self.engine.submit(request), False))

    @rule(
        line=st.integers(0, LINES - 1),
        length=st.sampled_from([1, 5, 40, 127, 128, 130, 200, 255, 256, 258, 300, 384, LENGTH]),
        tail=st.integers(0, 7),
        max_tokens=st.sampled_from([1, 2, 7]),
    )
    def ask(self, line: int, length: int, tail: int, max_tokens: int) -> None:
        """A prompt that shares a beginning with all others of its line: a hit, a rewind or a branch."""
        self.submit(tokens_of(line, length, tail), max_tokens)

    @rule(line=st.integers(0, LINES - 1), length=st.sampled_from([130, 256, 300]), count=st.integers(2, 3))
    def fork(self, line: int, length: int, count: int) -> None:
        for _ in range(count):
            self.submit(tokens_of(line, length, 0), 3)

    @rule(line=st.integers(0, LINES - 1), length=st.sampled_from([100, 256, 300]))
    def next_turn(self, line: int, length: int) -> None:
        prompt = tokens_of(line, length, 0)
        self.submit((*prompt, *oracle(prompt, 7), 9, 9, 9), 2)

    @rule(place=st.integers(0, 5))
    def cancel(self, place: int) -> None:
        if self.open:
            place %= len(self.open)
            request, handle, _ = self.open[place]
            handle.cancel()
            self.open[place] = (request, handle, True)

    @rule()
    def wait(self) -> None:
        """Everybody answers, and says what a cold run says."""
        waited_for, self.open = self.open, []
        for request, handle, cancelled in waited_for:
            events = list(handle)
            end = events[-1]
            assert isinstance(end, Finished)
            assert end.reason == "length" or (cancelled and end.reason == "cancelled"), end
            said = tuple(event.id for event in events if isinstance(event, Token))
            assert said == oracle(request.prompt_ids, request.sampling.max_tokens)[: len(said)], end
            if end.reason == "length":
                assert len(said) == request.sampling.max_tokens
        self.cache.pool.check()
        assert self.cache.pool.num_free + self.cache.tree.num_nodes == NUM_PAGES
        for node in self.cache.tree.nodes():
            assert node.lineage == 0

    @rule(count=st.integers(1, NUM_PAGES))
    def evict(self, count: int) -> None:
        self.wait()
        self.cache._evict(count, ())

    @rule()
    def purge(self) -> None:
        self.wait()
        self.cache.purge()

    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        if orderly:
            self.wait()
        self.engine.close()
        for _, handle, _ in self.open:
            assert isinstance(list(handle)[-1], Finished)
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
TestHistories.settings = settings(
    max_examples=20, stateful_step_count=100, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
