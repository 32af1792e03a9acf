"""The engine over slots and fixed shapes, run op by op as a CPU can: the answers are those without."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cedar.cache.manager import CacheManager, Plan
from cedar.checkpoint.read import read_checkpoint
from cedar.config import presets
from cedar.engine.engine import Engine
from cedar.engine.request import Finished, Request, SamplingParams, Token
from cedar.engine.runner import Anchor, DecodeRunner, Row, unavailable
from cedar.engine.sampling import Sampler, choose, choose_against
from cedar.engine.scheduler import SchedulerConfig
from cedar.engine.speculate import DraftRequest, ModelDrafter, Proposal
from cedar.kernels import dispatch
from cedar.kernels.sampling import RowParams, choose_rows, draw_drafts, draw_rows, verify_rows
from cedar.model.draft import Draft
from cedar.model.engram import EngramTable
from cedar.model.init import initialise
from cedar.model.sequence import Snapshot
from cedar.model.transformer import Transformer
from tests import golden
from tests.device import DEVICE, ON_CPU, PRETENDED
from tests.paths.random_models import random_draft, random_model, tiny

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model(tiny(), 11)


@pytest.fixture(scope="module")
def draft() -> Draft:
    return random_draft(tiny())


class Corrected:
    """The draft's own proposals, with tokens that will stand put in for most of them."""

    def __init__(self, drafter: ModelDrafter, follows: dict[tuple[int, ...], int]) -> None:
        self._drafter, self._follows, self.runner = drafter, follows, drafter.runner
        self._draw = random.Random(3)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = []
        for request, said in zip(requests, self._drafter.propose(requests), strict=True):
            line, ids = tuple(request.tokens), []
            for own in said.ids:
                ids.append(self._follows.get(line, own) if self._draw.random() < 0.7 else own)
                line = (*line, ids[-1])
            # chance chose the draft's own tokens, not these
            probs = said.probs if tuple(ids) == said.ids else None
            proposals.append(Proposal(ids=tuple(ids), probs=probs, confidence=said.confidence))
        return proposals


def make_engine(model: Transformer, *, slots: int = 0, num_pages: int = 64, **options: object) -> Engine:
    cache = CacheManager(
        model.config,
        num_pages=num_pages,
        dtype=model.dtype,
        device=model.device,
        snapshot_bytes=2**24,
        read_snapshot=Snapshot.from_bytes,
    )
    # a row's bits must not depend on who runs beside it, or the last bit of a sum would choose other tokens
    options = {"max_context": 2048, "exact": True, **options}
    # exact mode runs references, and that of the experts makes shapes out of data
    capture = not ON_CPU and not options["exact"]
    draft = options.pop("draft", None)
    runner = None
    if slots:
        runner = DecodeRunner(model, cache, max_rows=slots, max_context=2048, capture=capture, draft=draft)
    if draft is not None:
        options["drafter"] = Corrected(ModelDrafter(draft, None, runner), options.pop("follows", {}))
    scheduling = SchedulerConfig(reserve_tokens=options.pop("reserve_tokens", 64))
    return Engine(model, cache=cache, runner=runner, scheduling=scheduling, **options)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(500) for _ in range(length))


def answers(engine: Engine, requests: list[Request]) -> list[tuple[list[int], Finished]]:
    handles = [engine.submit(request) for request in requests]
    collected = []
    for handle in handles:
        events = list(handle)
        collected.append(([e.id for e in events if isinstance(e, Token)], events[-1]))
    return collected


def requests(count: int, length: int = 8) -> list[Request]:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.2, "seed": 6, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.0, "seed": 7, "frequency_penalty": 1.0, "logprobs": 2},
        {"temperature": 1.0, "seed": 8, "min_p": 0.05},
    ]
    return [
        Request(
            prompt_ids=prompt(3 + 13 * number, number),
            sampling=SamplingParams(max_tokens=length + number, **kinds[number % len(kinds)]),  # type: ignore[arg-type]
        )
        for number in range(count)
    ]


def test_slots_change_no_answer(model: Transformer) -> None:
    plain, slotted = make_engine(model), make_engine(model, slots=4)
    try:
        # five requests for four slots: one goes on op by op
        want, got = answers(plain, requests(5)), answers(slotted, requests(5))
        assert [ids for ids, _ in got] == [ids for ids, _ in want]
        assert [end.reason for _, end in got] == ["length"] * 5
        # what they left in the cache serves the next turn alike
        longer = [
            Request(
                prompt_ids=(*request.prompt_ids, *ids, 3, 4),
                sampling=SamplingParams(max_tokens=3, temperature=0.0),
            )
            for request, (ids, _) in zip(requests(5), want, strict=True)
        ]
        want, got = answers(plain, longer), answers(slotted, longer)
        assert [ids for ids, _ in got] == [ids for ids, _ in want]
        assert {end.resume for _, end in got} == {end.resume for _, end in want}
    finally:
        plain.close()
        slotted.close()


def test_drafts_in_slots_change_no_answer(draft: Draft) -> None:
    """Greedy, seeded, filtered, with penalties and log-probabilities; the next turn finds the cache as it should be."""
    if not ON_CPU and not PRETENDED:
        pytest.skip("exact mode has no slots on a GPU: its batched products may differ with the number of rows")
    model = draft.target
    plain = make_engine(model)
    asked = [replace(request, draft="on") for request in requests(5, 24)]
    slotted = None
    try:
        want = answers(plain, asked)
        follows = {}
        for request, (ids, _) in zip(asked, want, strict=True):
            line = (*request.prompt_ids, *ids)
            follows |= {line[:n]: line[n] for n in range(len(request.prompt_ids), len(line))}
        slotted = make_engine(model, slots=4, draft=draft, follows=follows)
        assert slotted._runner is not None
        got = answers(slotted, asked)
        assert [ids for ids, _ in got] == [ids for ids, _ in want]
        ends = [end for _, end in got]
        # some were rejected and some stood, in every kind of request
        assert all(0 < end.accepted_tokens < end.drafted_tokens for end in ends)
        assert slotted._runner is not None and slotted._cost.of(1) is not None
        longer = [
            replace(
                request,
                prompt_ids=(*request.prompt_ids, *ids, 3, 4),
                sampling=SamplingParams(max_tokens=9, temperature=0.0),
            )
            for request, (ids, _) in zip(asked, want, strict=True)
        ]
        want, got = answers(plain, longer), answers(slotted, longer)
        assert [ids for ids, _ in got] == [ids for ids, _ in want]
        assert {end.resume for _, end in got} == {end.resume for _, end in want}
    finally:
        plain.close()
        if slotted is not None:
            slotted.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_in_slots_is_the_round_alone(draft: Draft, temperature: float) -> None:
    """The same proposals for sequences in slots and for one that has none."""
    model = draft.target
    cache = CacheManager(model.config, num_pages=64, dtype=model.dtype, device=model.device)
    runner = DecodeRunner(model, cache, max_rows=2, max_context=2048, capture=False, draft=draft)
    asked = []
    for length in (3, 40, 127):
        ids = prompt(length, length)
        state = model.new_state()
        model.prefill(state, torch.tensor(ids))
        asked.append((state, (*ids, 9)))

    def propose(drafter: ModelDrafter) -> list[Proposal]:
        return drafter.propose(
            [
                DraftRequest(
                    state=state,
                    tokens=tokens,
                    sampling=SamplingParams(temperature=temperature),
                    limit=4,
                    generator=torch.Generator().manual_seed(2),
                )
                for state, tokens in asked
            ]
        )

    want, got = propose(ModelDrafter(draft)), propose(ModelDrafter(draft, None, runner))
    assert [one.ids for one in got] == [one.ids for one in want] and {len(one.ids) for one in got} == {4}
    for one, other in zip(got, want, strict=True):
        assert one.confidence is not None and one.confidence == pytest.approx(other.confidence, abs=1e-4)
        assert (one.probs is None) == (temperature == 0)
    assert runner.fitting([state for state, _ in asked]) == [0, 1]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 40}], ids=["plain", "filtered"])
def test_drawn_drafts_are_verified_as_row_by_row(draft: Draft, filters: dict[str, float]) -> None:
    """A step over drafts that its slots drew, beside a greedy sequence, takes what samplers take from its logits."""
    model = draft.target
    cache = CacheManager(model.config, num_pages=64, dtype=model.dtype, device=model.device)
    runner = DecodeRunner(model, cache, max_rows=3, max_context=2048, capture=not ON_CPU, draft=draft)
    drawn, greedy = SamplingParams(temperature=0.9, seed=3, **filters), SamplingParams(temperature=0)  # type: ignore[arg-type]
    generator, lines = torch.Generator().manual_seed(1), []
    for length, params in ((5, drawn), (40, greedy), (130, drawn)):
        lease = cache.lease((), b"", Plan())
        assert cache.reserve(lease, length + 100, 0)
        state = model.new_state(make_store=cache.make_store(lease, 0))
        model.prefill(state, torch.tensor(prompt(length, length), device=model.device))
        lines.append((state, lease, params, Sampler(params), Sampler(params), [9]))
    stood = fell = 0
    for _ in range(12):
        anchors, rows = [], []
        for state, _, params, *_, said in lines:
            anchors.append(Anchor(state, said[-1], params if params is drawn else None, generator))
        given = runner.propose(anchors)
        every = given.ids_AG.tolist()
        for (state, lease, params, sampler, _, said), ids in zip(lines, every, strict=True):
            rows.append(Row(state, lease, [said[-1], *ids], sampler, drawn=params is drawn))
        chosen, logits_TV = runner.step(rows)
        width = len(every[0])
        for number, (state, _, params, sampler, twin, said) in enumerate(lines):
            ids, probs, want = every[number], given.probs[number], list[int]()
            assert (probs is None) == (params is greedy)
            first = number * (width + 1)
            while len(want) <= width and want == ids[: len(want)]:
                place = len(want)
                held = (ids[place], probs[place]) if probs is not None and place < width else ()
                want.append(twin(logits_TV[first + place], *held).id)
            assert chosen[first : first + len(want)] == want
            sampler.take(want, num_drawn=min(len(want), width) if params is drawn else 0)
            state.roll_back(state.num_tokens - (width + 1) + len(want))
            said += want
            stood, fell = stood + len(want) - 1, fell + (len(want) <= width)
    assert stood and fell


def test_drawn_drafts_in_an_engine(draft: Draft, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(draft.target, slots=2, draft=draft)
    try:
        sampling = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=24)
        asked = [Request(prompt_ids=prompt(9, n), sampling=sampling, draft="on") for n in range(3)]
        ends = [end for _, end in answers(engine, asked)]
        assert engine._runner is not None and any(graph.rule == "drawn" for graph in engine._runner._graphs.values())
    finally:
        engine.close()
    assert [end.reason for end in ends] == ["length"] * 3 and not caplog.text
    assert all(0 < end.accepted_tokens < end.drafted_tokens for end in ends)


def test_a_sequence_that_is_set_aside_comes_back(model: Transformer) -> None:
    # both start on one page and need two each: one waits until the other is done
    plain, slotted = make_engine(model), make_engine(model, num_pages=4, slots=2, max_context=300, reserve_tokens=1)
    try:
        asked = [
            Request(prompt_ids=prompt(120, n), sampling=SamplingParams(max_tokens=16, temperature=0.0))
            for n in range(2)
        ]
        want, got = answers(plain, asked), answers(slotted, asked)
        assert [ids for ids, _ in got] == [ids for ids, _ in want]
        assert slotted.metrics.preempted > 0
    finally:
        plain.close()
        slotted.close()


def test_a_step_that_fails_turns_the_graphs_off(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, slotted = make_engine(model), make_engine(model, slots=4)
    runner = slotted._runner
    assert runner is not None
    steps = iter(range(1000))
    run = runner._run

    def fails_at_the_third(graph: object) -> None:
        if next(steps) == 2:
            raise RuntimeError("the device said no")
        run(graph)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "_run", fails_at_the_third)
    try:
        want, got = answers(plain, requests(3, 5)), answers(slotted, requests(3, 5))
        assert [ids for ids, _ in got] == [ids for ids, _ in want]
        assert slotted._runner is None and "the device said no" in caplog.text
    finally:
        plain.close()
        slotted.close()


def test_tables_in_host_memory_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits as with tables on the device; on a GPU their rows come on a stream of their own."""
    config = golden.model("a", "bf16").config
    want: list[Tensor] = []
    for place in ("memory", "host"):
        model = read_checkpoint(golden.VECTORS / "ckpt_a", dtype=torch.bfloat16, device=DEVICE, engram=place)  # type: ignore[arg-type]
        model.token_map.set(golden.load("engram")["a.token_map"])
        tables = [block.engram.embed for block in model.layers if block.plan.engram]
        if place == "host":
            monkeypatch.setattr(EngramTable, "beside", property(lambda _: True))
            assert ON_CPU or PRETENDED or all(table.codes is not None and table.codes.is_pinned() for table in tables)
        cache = CacheManager(config, num_pages=16, dtype=model.dtype, device=DEVICE)
        assert ON_CPU or not unavailable(model, cache, exact=False)
        runner = DecodeRunner(model, cache, max_rows=2, max_context=512, capture=not ON_CPU and not PRETENDED)
        rows = []
        for length in (3, 17):
            lease = cache.lease((), b"", Plan())
            assert cache.reserve(lease, length + 20, 0)
            state = model.new_state(make_store=cache.make_store(lease, 0))
            model.prefill(state, torch.tensor(prompt(length, length)) % config.vocab_size)
            rows.append((state, lease))
        got = []
        for number in range(2):
            step = [Row(state, lease, [5 + number], Sampler(SamplingParams(temperature=0.0))) for state, lease in rows]
            got.append(runner.step(step)[1].clone())
        want = want or got
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True)), place


@pytest.fixture
def broken_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's `rms_norm` comes first and does not compile; every other op has its usual kernels."""
    errors = pytest.importorskip("triton.runtime.errors")
    from cedar.kernels.triton import dense

    def cannot(*_: object) -> None:
        raise errors.OutOfResources(300_000, 232_448, "shared memory")

    device = "cpu" if ON_CPU else "cuda"
    usual = {op: {b: f for b, f in backends.items() if b != "triton"} for op, backends in dispatch.BACKENDS.items()}
    monkeypatch.setattr(dense, "rms_norm", cannot)
    if ON_CPU:
        monkeypatch.setattr(dispatch, "BACKENDS", {**usual, "rms_norm": {"triton": "dense", **usual["rms_norm"]}})
        monkeypatch.setitem(dispatch.ORDER, device, ("triton", *dispatch.ORDER[device]))
    monkeypatch.setattr(dispatch, "_broken", {})
    dispatch._choices.cache_clear()
    yield
    monkeypatch.undo()
    dispatch._choices.cache_clear()


@pytest.mark.skipif(PRETENDED, reason="a pretended device runs the references alone")
def test_a_kernel_that_does_not_build_is_left_out(
    model: Transformer, broken_kernel: None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(model, slots=4, exact=False)
    try:
        said = answers(engine, requests(3, 5))
        assert engine._runner is not None
    finally:
        engine.close()
    assert [end.reason for _, end in said] == ["length"] * 3
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 1 and "kernel rms_norm" in lines[0] and "out of resource: shared memory" in lines[0], lines


@pytest.mark.skipif(not ON_CPU, reason="it asks what a CPU says")
def test_why_a_cpu_has_no_graphs(model: Transformer) -> None:
    assert unavailable(model, None, exact=False) == "the model is on cpu"


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_chosen_as_one_by_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_TV = torch.randn(40, 50, generator=generator) * 3
    logits_TV[:, 7] = logits_TV[:, 3]
    logits_TV[5, 2] = torch.inf
    draws = torch.rand(4, 40, generator=generator, dtype=torch.float64)
    every = []
    for row in range(40):
        every.append(
            SamplingParams(
                temperature=[0.0, 0.7, 1.5][row % 3],
                top_k=[0, 1, 5][row % 5 % 3],
                top_p=[1.0, 0.3, 0.9][row % 7 % 3],
                min_p=[0.0, 0.2][row % 2],
            )
        )
    params = RowParams(
        torch.tensor([p.temperature for p in every], dtype=torch.float64),
        torch.tensor([p.top_k for p in every]),
        torch.tensor([p.top_p for p in every], dtype=torch.float64),
        torch.tensor([p.min_p for p in every], dtype=torch.float64),
        draws[0],
    )
    got = choose_rows(logits_TV, params).tolist()
    assert got[5] == -1
    rows = [row for row in range(40) if row != 5]
    assert [got[row] for row in rows] == [choose(logits_TV[row], every[row], float(draws[0, row])) for row in rows]
    got = draw_rows(logits_TV, params.temperature_T, params.uniform_T).tolist()
    want = [
        choose(logits_TV[row], SamplingParams(temperature=every[row].temperature), float(draws[0, row])) for row in rows
    ]
    assert [got[row] for row in rows] == want


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_verified_as_one_by_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_TV = torch.randn(40, 50, generator=generator) * 3
    logits_TV[5, 2] = torch.inf
    every = [
        SamplingParams(
            temperature=[0.7, 1.5][row % 2],
            top_k=[0, 1, 5][row % 3],
            top_p=[1.0, 0.3, 0.9][row % 5 % 3],
            min_p=[0.0, 0.2][row % 7 % 2],
        )
        for row in range(40)
    ]

    def numbers() -> Tensor:
        return torch.rand(40, generator=generator, dtype=torch.float64)

    def params(uniform_T: Tensor) -> RowParams:
        names = ("temperature", "top_k", "top_p", "min_p")
        values = [torch.tensor([float(getattr(one, name)) for one in every], dtype=torch.float64) for name in names]
        return RowParams(values[0], values[1].long(), values[2], values[3], uniform_T)

    drawn_T, other_T = params(numbers()), numbers()
    draft_T, prob_TV = draw_drafts(logits_TV + torch.randn(40, 50, generator=generator), drawn_T)
    torch.testing.assert_close(prob_TV[:5].sum(-1), torch.ones(5))
    draft_T[::4] = -1
    verified = params(numbers())
    got = verify_rows(logits_TV, verified, draft_T, prob_TV, other_T).tolist()
    assert got[5] == -1
    want = []
    for row in (row for row in range(40) if row != 5):
        uniform = float(verified.uniform_T[row])
        if draft_T[row] < 0:
            want.append(choose(logits_TV[row], every[row], uniform))
        else:
            uniforms = uniform, float(other_T[row])
            want.append(choose_against(logits_TV[row], every[row], int(draft_T[row]), prob_TV[row], uniforms))
    assert got[:5] + got[6:] == want


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_captured_steps_equal_single_ones(dtype: torch.dtype) -> None:
    model = random_model(tiny(), 11, dtype).to("cuda")
    cache = CacheManager(model.config, num_pages=64, dtype=dtype, device="cuda")
    runner = DecodeRunner(model, cache, max_rows=4, max_context=2048)
    generator = random.Random(4)
    rows, plain = [], []
    for length in (3, 40, 127, 250):
        ids_T = torch.tensor(prompt(length, length), device="cuda")
        lease = cache.lease((), b"", Plan())
        assert cache.reserve(lease, length + 20, 0)
        state, other = model.new_state(make_store=cache.make_store(lease, 0)), model.new_state()
        model.prefill(state, ids_T)
        model.prefill(other, ids_T)
        rows.append((state, lease))
        plain.append(other)
    errors = []
    # all, some, one that left and came back, one alone
    for members in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 2], [0, 2], [1, 2, 3], [3], [0, 1, 2, 3]):
        if len(members) == 1:
            runner.leave(rows[0][0])
        step = []
        for member in members:
            sampler = Sampler(SamplingParams(temperature=0.0))
            step.append(Row(*rows[member], [generator.randrange(500)], sampler))
        chosen, logits_TV = runner.step(step)
        for place, member in enumerate(members):
            want_V = model.decode(plain[member], torch.tensor(step[place].ids, device="cuda"))[-1]
            errors.append(float((logits_TV[place] - want_V).norm() / want_V.norm()))
            assert chosen[place] == int(logits_TV[place].argmax())
    # a rounding to FP4 or FP8 that falls the other way moves all that follows it, so one row may be far off
    assert statistics.median(errors) < (2e-2 if dtype == torch.float32 else 0.25), errors
    assert max(errors) < 0.8, errors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_captured_rounds_equal_single_ones(dtype: torch.dtype) -> None:
    """Rounds of drafts and the steps that verify them, captured and op by op; a part of the rows is rejected."""
    config = presets.with_draft(tiny(), num_blocks=2, num_routed_experts=2, markov_rank=32)
    draft = Draft(config, random_model(config, 5, dtype).to("cuda"), device="cuda")
    initialise(draft, 6)
    draft.attach()
    model = draft.target
    cache = CacheManager(config, num_pages=64, dtype=dtype, device="cuda")
    runner = DecodeRunner(model, cache, max_rows=4, max_context=2048, draft=draft)
    generator = random.Random(4)
    states, leases, plain = [], [], []
    for length in (3, 40, 127):
        ids_T = torch.tensor(prompt(length, length), device="cuda")
        lease = cache.lease((), b"", Plan())
        assert cache.reserve(lease, length + 60, 0)
        states.append(model.new_state(make_store=cache.make_store(lease, 0)))
        plain.append(model.new_state())
        leases.append(lease)
        for state in (states[-1], plain[-1]):
            model.prefill(state, ids_T)
    errors = []
    for _ in range(4):
        anchors = [generator.randrange(500) for _ in states]
        drafted = runner.propose([Anchor(*pair) for pair in zip(states, anchors, strict=True)])
        assert int(drafted.ids_AG.min()) >= 0 and int(drafted.ids_AG.max()) < config.vocab_size
        contexts, visible = zip(*(state.context() for state in plain), strict=True)
        with torch.inference_mode():
            want = draft(
                torch.tensor(anchors, device="cuda"),
                torch.tensor([state.num_tokens for state in plain], device="cuda"),
                torch.stack(contexts).to(dtype),
                torch.stack(visible),
                model.rounding,
            )
        (graph,) = runner._draft_graphs.values()
        base_AGV = graph.drafted.base_AGV[: len(states)]
        errors.append(float((base_AGV - want.base_AGV).norm() / want.base_AGV.norm()))
        rows = [
            Row(state, lease, [anchor, *ids[: generator.randrange(6)]], Sampler(SamplingParams(temperature=0.0)))
            for state, lease, anchor, ids in zip(states, leases, anchors, drafted.ids_AG.tolist(), strict=True)
        ]
        _, logits_TV = runner.step(rows)
        widths = [len(row.ids) for row in rows]
        got = logits_TV[: sum(widths)].split(widths)
        for row, logits, other in zip(rows, got, plain, strict=True):
            want_TV = model.decode(other, torch.tensor(row.ids, device="cuda"))
            errors.append(float((logits - want_TV).norm() / want_TV.norm()))
            kept = other.num_tokens - generator.randrange(len(row.ids))
            for state in (row.state, other):
                state.roll_back(kept)
    assert statistics.median(errors) < (2e-2 if dtype == torch.float32 else 0.25), errors
    assert max(errors) < 0.8, errors
