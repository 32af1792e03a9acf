"""What is exact, by the names of serving.md 2.7: X1 to X13, on random and on trained weights, deterministic mode.

Each takes a seeded sample with every edge here (about two minutes in all) and its full range in `make test-long`.
Where the names say 128 for the window, a model with another window reads its own; one of the models has 128.
A1 to A3, which are approximate, are in `tests/engine/test_approximate.py`.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cedar.cache.manager import CacheManager
from cedar.config import presets
from cedar.engine.engine import Engine
from cedar.engine.load import load_model, open_model
from cedar.engine.request import Event, Finished, Request, SamplingParams, Token
from cedar.engine.scheduler import SchedulerConfig
from cedar.kernels.dispatch import deterministic
from cedar.model.batch import Part
from cedar.model.sequence import SequenceState, Snapshot
from cedar.model.transformer import Transformer
from tests.device import DEVICE
from tests.engine.drafters import Scripted
from tests.paths.random_models import random_model
from tests.paths.states import check_exact_rebuilds, random_ids, run, same, visible, with_entries

pytestmark = pytest.mark.device

MODELS = ["random", "trained", "window 128"]
SAMPLED = pytest.mark.parametrize(
    "full", [pytest.param(False, id="sampled"), pytest.param(True, id="full", marks=pytest.mark.slow)]
)
MAX_DRAFTS = 5


@lru_cache(maxsize=4)
def model_of(name: str) -> Transformer:
    """Nano with random weights, the bundled model, and two kinds of layers behind a window of 128."""
    if name == "trained":
        return load_model(open_model(), device=str(DEVICE), dtype=torch.float32)
    if name == "random":
        return random_model(presets.nano(), 5)
    config = presets._small_model(
        layout="S F2 U | F1 R",
        vocab_size=64,
        hidden_size=32,
        num_heads=2,
        head_dim=32,
        rope_head_dim=8,
        q_lora_rank=32,
        o_groups=1,
        o_lora_rank=32,
        window=128,
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
    return random_model(config, 3)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[Transformer]:
    with deterministic():
        yield model_of(request.param)


def window_of(model: Transformer) -> int:
    return model.config.attention.sliding_window


def make_engine(model: Transformer, *, num_pages: int = 64, snapshots: bool = True, **options: Any) -> Engine:
    limits = {name: options.pop(name) for name in ("max_running", "max_step_tokens") if name in options}
    cache = CacheManager(
        model.config,
        device=DEVICE,
        num_pages=num_pages,
        strict=options.pop("strict", True),
        snapshot_bytes=2**24 if snapshots else 0,
        fingerprint=b"exact",
        read_snapshot=Snapshot.from_bytes,
    )
    return Engine(model, cache=cache, scheduling=SchedulerConfig(reserve_tokens=32, **limits), **options)


def tokens_of(events: Sequence[Event]) -> list[int]:
    assert isinstance(events[-1], Finished) and not events[-1].error, events[-1]
    return [event.id for event in events if isinstance(event, Token)]


def greedy(ids: Tensor, max_tokens: int, **options: Any) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(prompt_ids=tuple(ids.tolist()), sampling=sampling, **options)


def answers(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    return [tokens_of(list(handle)) for handle in [engine.submit(request) for request in requests]]


def partition(draw: random.Random, length: int, window: int) -> list[int]:
    """Chunks of any size; every other time the last one is a single row."""
    sizes, left = [], length
    last = draw.randrange(2) if length > 1 else 0
    left -= last
    while left:
        sizes.append(min(left, draw.choice([1, 2, 3, window - 1, window, 40, 128, 300])))
        left -= sizes[-1]
    return sizes + [1] * last


@SAMPLED
def test_x1_chunked_equals_unchunked(model: Transformer, full: bool) -> None:
    window, draw = window_of(model), random.Random(1)
    edges = sorted({1, 2, window - 1, window, window + 1, 127, 128, 129, 3 * window + 5})
    for length in range(1, 701) if full else edges:
        ids = random_ids(model.config, length, length)
        whole, cut = model.new_state(), model.new_state()
        want = model.prefill(whole, ids)
        rows = [model.prefill(cut, part, prompt_tokens=length) for part in ids.split(partition(draw, length, window))]
        assert torch.equal(torch.cat(rows), want), length
        assert same(visible(cut), visible(whole)), length


@SAMPLED
def test_x2_published_pages_never_change(model: Transformer, full: bool) -> None:
    """Hits, verify steps, cancels, forks, rewinds and preemption pass; what the tree held, it still holds."""
    draw = random.Random(2)
    guess = Scripted(lambda tokens: tokens[-1], width=MAX_DRAFTS, right=2, vocab_size=model.config.vocab_size)
    engine = make_engine(model, num_pages=12, drafter=guess, max_running=3)
    try:
        cache, line = engine.cache, random_ids(model.config, 400, 3)
        assert cache is not None
        seen: dict[bytes, bytes] = {}
        for turn in range(40 if full else 2):
            handles = []
            for number in range(4):
                ids = torch.cat([line[: draw.choice([130, 256, 300])], random_ids(model.config, 1 + number, turn)])
                handles.append(engine.submit(greedy(ids, 14)))
            handles.append(engine.fork(handles[0].request_id))
            engine.rewind(handles[1].request_id, 1)
            handles[2].cancel()
            for handle in handles:
                assert isinstance(list(handle)[-1], Finished)
            now = {node.key: cache.pool.read(node.page) for node in cache.tree.nodes() if node.full}
            assert now and all(seen.get(key, stored) == stored for key, stored in now.items())
            seen |= now
    finally:
        engine.close()
    cache.pool.check()


def digest(state: SequenceState, logits: Tensor) -> str:
    running = hashlib.sha256(logits.cpu().numpy().tobytes())
    for part in visible(state):
        running.update(part.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return running.hexdigest()


def resume_all(file: str) -> None:
    """What the other process does: restore each case, go on for two tokens, print what it holds."""
    for name, entries, keys, snapshot, ids in torch.load(file):
        model = model_of(name)
        held = {"entries": entries, "keys": keys}
        with deterministic():
            donor = model.new_state()
            for what, stores in (("entries", donor.entries), ("keys", donor.keys)):
                for source, store in stores.items():
                    planes = held[what][source]
                    assert hasattr(store, "reserve")
                    store.reserve(len(planes[0]))
                    store.overwrite(torch.arange(len(planes[0])), planes)
                    store.count = len(planes[0])
            restored = Snapshot.from_bytes(snapshot)
            state = with_entries(model, donor, restored.num_tokens)
            state.restore(restored)
            print(digest(state, model.decode(state, ids)), flush=True)


@SAMPLED
def test_x3_a_snapshot_resumes_the_uninterrupted(tmp_path: Path, full: bool) -> None:
    """Steps 1 to 300, prompt and answer, in a fresh process that serves the whole list."""
    cases, want = [], []
    with deterministic():
        for name in MODELS if full else MODELS[:2]:
            model = model_of(name)
            window = window_of(model)
            steps = range(1, 301) if full else (1, 2, window - 1, window, window + 1, 40, 41, 47)
            ids = random_ids(model.config, max(steps) + 3, 7)
            through = model.new_state()
            for step in range(max(steps) + 1):
                if step in steps:
                    taken = [
                        {source: store.read(torch.arange(store.count)) for source, store in stores.items()}
                        for stores in (through.entries, through.keys)
                    ]
                    cases.append((name, *taken, through.snapshot().to_bytes(), ids[step : step + 2]))
                    copy = through.fork()
                    want.append(digest(copy, model.decode(copy, ids[step : step + 2])))
                if step < 40:
                    model.prefill(through, ids[step : step + 1], prompt_tokens=40)
                else:
                    model.decode(through, ids[step : step + 1])
    torch.save(cases, tmp_path / "cases")
    script = (
        "from tests.device import TestTensors; from tests.engine.test_exactness import resume_all; "
        f"TestTensors().__enter__(); resume_all({str(tmp_path / 'cases')!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == want


@SAMPLED
def test_x4_an_exact_rebuild_equals_cold(model: Transformer, full: bool) -> None:
    """Hits at 130 to 3000, thirty-two to a prompt that ends with the last of them or up to 3 W + 5 rows later."""
    window, draw = window_of(model), random.Random(4)
    if full:
        blocks = [range(first, min(first + 64, 3001), 2) for first in range(130, 3001, 64)]
        prompts = [(block[-1] + draw.randrange(3 * window + 6), block) for block in blocks]
    else:
        # long enough that a rebuild starts within it, whatever the window
        end = 420 if window < 128 else 800
        prompts = [(end, (130, 256, 258, end - window, end))]
    rebuilt = sum(
        check_exact_rebuilds(model, random_ids(model.config, prompt + 2, prompt), prompt, hits)
        for prompt, hits in prompts
    )
    assert rebuilt > (1000 if full else 1)


@SAMPLED
def test_x5_a_bounded_replay_depends_on_tokens_and_hit_alone(model: Transformer, full: bool) -> None:
    """The same hit twice, with other sequences in the same steps."""
    window = window_of(model)
    prompt = 2 * window + 300
    ids = random_ids(model.config, prompt, 5)
    donor = model.new_state()
    model.prefill(donor, ids)
    hits = range(window + 2, prompt, 2) if full else (window + 2, 256, prompt - 2)
    for cached in hits:
        ends = []
        for mates in (0, 3):
            state = with_entries(model, donor, cached)
            start = state.resume_bounded(ids, cached)
            others = [model.new_state() for _ in range(mates)]
            logits = torch.empty(0)
            for part in ids[start:].split(window + 7 * mates + 1):
                company = [
                    Part(state=other, ids_T=random_ids(model.config, 3 + n, n)) for n, other in enumerate(others)
                ]
                mine = Part(state=state, ids_T=part, prompt_tokens=prompt)
                logits = model.step([*company[:1], mine, *company[1:]])[min(1, mates)]
            ends.append((logits, visible(state)))
        assert torch.equal(ends[0][0], ends[1][0]) and same(ends[0][1], ends[1][1]), cached


@SAMPLED
def test_x6_short_hits_are_refused(model: Transformer, full: bool) -> None:
    """Lengths 1 to W + 1: nothing is said to be cached, and the answer is the cold one."""
    window = window_of(model)
    engine, cold = make_engine(model, snapshots=False), Engine(model, exact=True)
    try:
        for length in range(1, window + 2) if full else (1, 2, window - 1, window, window + 1):
            ids = random_ids(model.config, length, 60 + length)
            longer = torch.cat([ids, random_ids(model.config, 3, 1)])
            assert answers(engine, [greedy(ids, 1)]) == answers(cold, [greedy(ids, 1)])
            events = list(engine.submit(greedy(longer, 2)))
            assert isinstance(events[-1], Finished) and events[-1].cached_tokens == 0, length
            assert tokens_of(events) == answers(cold, [greedy(longer, 2)])[0]
    finally:
        engine.close()
        cold.close()


@SAMPLED
def test_x7_company_changes_nothing(model: Transformer, full: bool) -> None:
    """Alone, and among 1 to 32 others in any order: chunks, single rows and several."""
    draw = random.Random(7)
    ids = random_ids(model.config, 60, 1)

    def three_steps(num_others: int) -> tuple[Tensor, list[Tensor]]:
        state = model.new_state()
        others = [(model.new_state(), random_ids(model.config, 40, 100 + n)) for n in range(num_others)]
        rows = []
        for part, prompt in ((ids[:50], 50), (ids[50:51], None), (ids[51:57], None)):
            parts = [Part(state=state, ids_T=part, prompt_tokens=prompt)]
            for other, theirs in others:
                start, size = other.num_tokens, draw.randrange(1, 7)
                until = start + size + draw.randrange(2) if other.decoder_stop <= start and start < 9 else None
                if start < other.decoder_stop:
                    until, size = other.decoder_stop, other.decoder_stop - start
                parts.append(Part(state=other, ids_T=theirs[start : start + size], prompt_tokens=until))
            draw.shuffle(parts)
            logits = model.step(parts)
            rows.append(next(rows for one, rows in zip(parts, logits, strict=True) if one.state is state))
        return torch.cat(rows), visible(state)

    want, held = three_steps(0)
    for num_others in range(1, 33) if full else (1, 6, 32):
        got, now = three_steps(num_others)
        assert torch.equal(got, want) and same(now, held), num_others


def odd_prompts(model: Transformer, full: bool) -> list[Tensor]:
    window = window_of(model)
    draw = random.Random(8)
    edges = {1, window - 1 + window % 2, window + 1 + window % 2, 127, 129, 3 * window + 1 + window % 2}
    lengths = [2 * draw.randrange(1, 150) + 1 for _ in range(200)] if full else sorted(edges)
    return [random_ids(model.config, length | 1, 1000 + n) for n, length in enumerate(lengths)]


@SAMPLED
def test_x8_drafting_changes_no_greedy_token(model: Transformer, full: bool) -> None:
    """Odd lengths, depths 0 to 5 of right drafts among 5, in the engine, with pages and company."""
    length = 24 if full else 5
    prompts = odd_prompts(model, full)
    plain = Engine(model, exact=True, max_waiting=300)
    try:
        want = answers(plain, [greedy(ids, length) for ids in prompts])
    finally:
        plain.close()
    follows = {}
    for ids, said in zip(prompts, want, strict=True):
        line = (*ids.tolist(), *said)
        follows |= {line[: len(ids) + n]: line[len(ids) + n] for n in range(len(said))}
    for depth in range(MAX_DRAFTS + 1):
        drafter = Scripted(
            lambda tokens: follows.get(tuple(tokens), 0),
            width=MAX_DRAFTS,
            right=depth,
            vocab_size=model.config.vocab_size,
        )
        engine = make_engine(model, num_pages=120, drafter=drafter, max_waiting=300)
        try:
            assert answers(engine, [greedy(ids, length) for ids in prompts]) == want, depth
            assert engine.metrics.drafted_tokens > 0
            assert (engine.metrics.accepted_tokens > 0) == (depth > 0)
        finally:
            engine.close()


@SAMPLED
@pytest.mark.parametrize("accepted", range(MAX_DRAFTS + 1))
def test_x9_rejected_drafts_leave_nothing(model: Transformer, accepted: int, full: bool) -> None:
    """Every visible byte, both parities, around the window's and a page's edge (field report B12)."""
    window = window_of(model)
    positions = [*range(window - 2, window + 5), 126, 127, 128, 129, 130, 131, 132]
    if not full:
        positions = [window - 2 + accepted, 126 + accepted] + [window + 4, 132] * (accepted == MAX_DRAFTS)
    for position in positions:
        ids = random_ids(model.config, position + 9, position)
        wrong = (ids[position + accepted : position + 6] + 1) % (model.config.vocab_size - 8)
        drafted = model.new_state()
        model.prefill(drafted, ids[:position])
        plain = drafted.fork()
        model.decode(drafted, torch.cat([ids[position : position + accepted], wrong])[:6])
        drafted.roll_back(position + accepted)
        if accepted:
            model.decode(plain, ids[position : position + accepted])
        assert same(visible(drafted), visible(plain)), position
        following = ids[position + accepted : position + accepted + 3]
        assert torch.equal(model.decode(drafted, following), model.decode(plain, following)), position


@SAMPLED
def test_x10_a_fork_is_a_run_of_its_own(model: Transformer, full: bool) -> None:
    """Four of the same prompt from its end, and four from the middle of an answer; each with its seed."""
    length = 24 if full else 6
    window = window_of(model)
    for size in (1, window + 1, 127, 128, 129, 300) if full else (129,):
        ids = random_ids(model.config, size, 10 + size)
        params = [SamplingParams(seed=seed, temperature=1.2, max_tokens=length) for seed in range(4)]
        engine, alone = make_engine(model, num_pages=24), Engine(model, exact=True)
        try:
            prompt = tuple(ids.tolist())
            want = answers(alone, [Request(prompt_ids=prompt, sampling=one) for one in params])
            first = engine.submit(Request(prompt_ids=prompt, sampling=params[0]))
            forks = [engine.fork(first.request_id, sampling=one, num_tokens=0) for one in params[1:]]
            assert [tokens_of(list(handle)) for handle in (first, *forks)] == want, size
            # from the middle: the same seed goes on as the first did, and what was said already is sent anew
            begun, ready, events = threading.Event(), threading.Event(), []

            def note(event: Event) -> None:
                events.append(event)  # noqa: B023
                if sum(isinstance(one, Token) for one in events) == 3:  # noqa: B023
                    begun.set()  # noqa: B023
                if isinstance(event, Finished):
                    ready.set()  # noqa: B023

            again = engine.submit(Request(prompt_ids=prompt, sampling=params[0]), note)
            assert begun.wait(60)
            middle = [engine.fork(again.request_id, sampling=params[0]) for _ in range(2) if not ready.is_set()]
            for handle in middle:
                assert tokens_of(list(handle)) == want[0], size
            assert ready.wait(60) and tokens_of(events) == want[0]
        finally:
            engine.close()
            alone.close()


@SAMPLED
def test_x11_cancel_at_any_point_leaves_the_pool_as_it_was(full: bool) -> None:
    """After every event of a run that queues, replays, prefills, is set aside, decodes and verifies."""
    model = model_of("random")
    guess = Scripted(lambda tokens: tokens[-1], width=MAX_DRAFTS, right=1)
    engine = make_engine(model, num_pages=9, strict=False, snapshots=False, drafter=guess, max_step_tokens=70)
    cache = engine.cache
    assert cache is not None
    shared = random_ids(model.config, 300, 11)
    try:
        answers(engine, [greedy(shared, 2)])
        kept = {node.key: cache.pool.read(node.page) for node in cache.tree.nodes()}
        longest = 60 if full else 24
        for point in range(0, longest, 1 if full else 4):
            handles: list[Any] = []
            others = [greedy(torch.cat([shared, random_ids(model.config, n, n)]), 20, keep=False) for n in (3, 90)]

            def stop(event: Event, seen: list[Event], number: int) -> None:
                seen.append(event)
                if len(seen) >= point + number and not isinstance(event, Finished):  # noqa: B023
                    handles[number].cancel()  # noqa: B023

            ends = [threading.Event() for _ in others]
            for number, request in enumerate(others):

                def listen(event: Event, seen: list[Event] = [], number: int = number) -> None:  # noqa: B006
                    if handles[number:]:  # noqa: B023
                        stop(event, seen, number)
                    if isinstance(event, Finished):
                        ends[number].set()  # noqa: B023

                handles.append(engine.submit(request, lambda event, listen=listen, seen=[]: listen(event, seen)))
            if point == 0:
                for handle in handles:
                    handle.cancel()
            assert all(end.wait(60) for end in ends)
            engine.ask_cache(lambda cache: cache.pool.check()).result(60)
            assert cache.pool.num_free + cache.tree.num_nodes == 9, point
            assert all(kept[node.key] == cache.pool.read(node.page) for node in cache.tree.nodes() if node.key in kept)
        assert engine.metrics.cancelled
        assert answers(engine, [greedy(shared, 2)])
    finally:
        engine.close()


@SAMPLED
def test_x12_every_row_of_a_prompt(model: Transformer, full: bool) -> None:
    """Logits of all rows: chunks of a prompt without narrowing give what generated rows give, whatever the cut."""
    window, draw = window_of(model), random.Random(12)
    for length in range(2, 300) if full else (2, window + 1):
        ids = random_ids(model.config, length, length)
        whole, cut, rows = (model.new_state(decoder_replay="off") for _ in range(3))
        want = model.prefill(whole, ids)
        assert want.shape[0] == length
        parts = [model.prefill(cut, part, prompt_tokens=length) for part in ids.split(partition(draw, length, window))]
        assert torch.equal(torch.cat(parts), want)
        first = model.prefill(rows, ids[:1])
        assert torch.equal(torch.cat([first, model.decode(rows, ids[1:])]), want)
        assert same(visible(whole), visible(cut)) and same(visible(whole), visible(rows))


@SAMPLED
def test_x13_a_window_and_more_after_a_snapshot_equals_cold(model: Transformer, full: bool) -> None:
    """N - P in {W, W + 1, 2 W, 3 W + 5}; one row less goes on from the snapshot's windows instead."""
    window = window_of(model)
    bases = range(2, 901, 2) if full else (window + 2, 2)
    for extra in (window, window + 1, 2 * window, 3 * window + 5):
        for base in bases if full or extra == window else bases[:1]:
            ids = random_ids(model.config, base + extra + 2, base)
            first = model.new_state()
            model.prefill(first, ids[:base])
            resumed = with_entries(model, first, base)
            resumed.restore(first.snapshot())
            cold = model.new_state()
            prompt = base + extra
            assert torch.equal(run(model, resumed, ids, prompt), run(model, cold, ids, prompt)), (base, extra)
            assert same(visible(resumed), visible(cold))
    # W - 1 is refused under a strict cache: it resumes by a rebuild, or starts cold
    engine = make_engine(model)
    try:
        ids = random_ids(model.config, 260 + window - 1, 13)
        answers(engine, [greedy(ids[:261], 1)])
        end = list(engine.submit(greedy(ids, 1)))[-1]
        assert isinstance(end, Finished) and end.resume in ("g3", "cold")
    finally:
        engine.close()


@pytest.mark.parametrize("replay", ["bounded", "off"])
def test_a_later_token_changes_no_earlier_row(model: Transformer, replay: Any) -> None:
    """Causality, in every chunk and in generated rows."""
    ids = random_ids(model.config, 90, 14)
    other = ids.clone()
    other[70] = (other[70] + 1) % (model.config.vocab_size - 8)
    rows = []
    for line in (ids, other):
        state = model.new_state(decoder_replay=replay)
        first = model.prefill(state, line[:40])
        rows.append((first, model.decode(state, line[40:])))
    assert torch.equal(rows[0][0], rows[1][0])
    assert torch.equal(rows[0][1][:30], rows[1][1][:30]) and not torch.equal(rows[0][1][30:], rows[1][1][30:])
