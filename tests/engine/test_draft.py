"""The model's own draft in the engine: the same proposals whatever came before, the same answers (about 20 s)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from cedar.cache.manager import CacheManager
from cedar.config import presets
from cedar.engine.engine import Engine
from cedar.engine.request import Finished, Request, SamplingParams, Token
from cedar.engine.sampling import Sampler, draw
from cedar.engine.scheduler import SchedulerConfig
from cedar.engine.speculate import DraftRequest, ModelDrafter, Pace, Proposal, StepCost, choose_widths
from cedar.kernels.dispatch import deterministic
from cedar.model.draft import Draft
from cedar.model.sequence import SequenceState, Snapshot
from tests.device import DEVICE
from tests.paths.random_models import random_draft
from tests.paths.states import with_entries

pytestmark = pytest.mark.device

LENGTH = 90
Build = Callable[..., Engine]


@pytest.fixture(scope="module")
def draft() -> Draft:
    return random_draft(presets.nano())


def ids_of(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed))


def request(state: SequenceState, token: int, **sampling: Any) -> DraftRequest:
    return DraftRequest(
        state=state,
        tokens=[0] * state.num_tokens + [token],
        sampling=SamplingParams(**{"temperature": 0, **sampling}),
        limit=5,
        generator=torch.Generator().manual_seed(3),
    )


def propose(draft: Draft, state: SequenceState, token: int, **sampling: Any) -> Proposal:
    (proposal,) = ModelDrafter(draft).propose([request(state, token, **sampling)])
    return proposal


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}])
def test_proposals_do_not_depend_on_chunks_snapshots_or_company(draft: Draft, sampling: dict[str, Any]) -> None:
    model, ids = draft.target, ids_of(LENGTH)
    with deterministic():
        cold = model.new_state()
        model.prefill(cold, ids)
        want = propose(draft, cold, 7, **sampling)
        for chunk in (1, 7, 32):
            state = model.new_state()
            for start in range(0, LENGTH, chunk):
                model.prefill(state, ids[start : start + chunk], prompt_tokens=LENGTH)
            assert repr(propose(draft, state, 7, **sampling)) == repr(want)
        kept = Snapshot.from_bytes(cold.snapshot().to_bytes())
        resumed = with_entries(model, cold, LENGTH)
        resumed.restore(kept)
        assert repr(propose(draft, resumed, 7, **sampling)) == repr(want)
        assert repr(propose(draft, cold.fork(), 7, **sampling)) == repr(want)
        # beside others the rows of a sequence are its own
        other = model.new_state()
        model.prefill(other, ids_of(50, 2))
        both = [request(state, 7, **sampling) for state in (other, cold)]
        assert repr(ModelDrafter(draft).propose(both)[1]) == repr(want)


@pytest.mark.parametrize("accepted", range(6))
def test_rejected_rows_leave_the_context_as_it_was(draft: Draft, accepted: int) -> None:
    model = draft.target
    window = model.config.attention.sliding_window
    for position in (3, window - 1, window + 3, 40):
        ids = ids_of(position + 8, position)
        wrong = (ids[position + accepted :] + 1) % 500
        with deterministic():
            drafted, plain = model.new_state(), model.new_state()
            for state in (drafted, plain):
                model.prefill(state, ids[:position])
            model.decode(drafted, torch.cat([ids[position : position + accepted], wrong])[:6])
            drafted.roll_back(position + accepted)
            if accepted:
                model.decode(plain, ids[position : position + accepted])
            rows, there = drafted.context()
            want, want_there = plain.context()
            assert torch.equal(there, want_there) and torch.equal(rows[there], want[there])


def test_a_hit_leaves_as_full_a_window_as_a_cold_prompt(draft: Draft) -> None:
    """Field report B10: a drafter whose window is cleared on a hit drafts badly for a window."""
    model, ids = draft.target, ids_of(LENGTH)
    cold = model.new_state()
    model.prefill(cold, ids)
    state = with_entries(model, cold, 80)
    start = state.resume_bounded(ids, 80)
    model.prefill(state, ids[start:], prompt_tokens=LENGTH)
    assert torch.equal(state.context()[1], cold.context()[1]) and bool(cold.context()[1].all())
    short = model.new_state()
    model.prefill(short, ids[:5])
    assert short.context()[1].sum() == 5


@pytest.fixture
def build(draft: Draft) -> Iterator[Build]:
    engines: list[Engine] = []

    def make(*, drafting: bool = True, num_pages: int = 64, strict: bool = True, **limits: int) -> Engine:
        cache = CacheManager(
            draft.config,
            device=DEVICE,
            num_pages=num_pages,
            strict=strict,
            snapshot_bytes=2**22,
            fingerprint=b"drafted",
            read_snapshot=Snapshot.from_bytes,
        )
        engines.append(
            Engine(
                draft.target,
                cache=cache,
                drafter=ModelDrafter(draft) if drafting else None,
                scheduling=SchedulerConfig(**{"max_running": 6, "reserve_tokens": 8, **limits}),
                max_context=1024,
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def answers(engine: Engine, requests: Sequence[Request]) -> list[tuple[list[Token], Finished]]:
    handles = [engine.submit(request) for request in requests]
    results = []
    for handle in handles:
        events = list(handle)
        end = events[-1]
        assert isinstance(end, Finished) and end.reason != "error", end
        results.append(([event for event in events if isinstance(event, Token)], end))
    return results


def test_the_same_answers_with_hits_preemption_and_mixed_batches(build: Build) -> None:
    """Greedy, seeded and penalised answers with log-probabilities, over few pages, twice so that prompts hit."""
    shared = ids_of(140).tolist()
    variants: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2, "repetition_penalty": 1.3},
        {"temperature": 0.9, "seed": 5, "top_k": 20},
        {"temperature": 0, "frequency_penalty": 0.7, "logit_bias": ((9, 2.0),)},
        {"temperature": 1.1, "seed": 6, "min_p": 0.01, "logprobs": 1},
        {"temperature": 0, "stop_token_ids": tuple(range(100, 140))},
    ]

    def requests(draft: str) -> list[Request]:
        return [
            Request(
                prompt_ids=(*shared[: 100 + 8 * number], number),
                sampling=SamplingParams(max_tokens=24, **variant),
                draft=draft,  # type: ignore[arg-type]
            )
            for number, variant in enumerate(variants)
        ]

    plain = build(drafting=False, num_pages=9)
    want = [*answers(plain, requests("off")), *answers(plain, requests("off"))]
    drafted = build(num_pages=9)
    got = [*answers(drafted, requests("on")), *answers(drafted, requests("auto"))]
    for (tokens, end), (want_tokens, want_end) in zip(got, want, strict=True):
        assert [token.id for token in tokens] == [token.id for token in want_tokens]
        assert tokens == want_tokens and end.reason == want_end.reason
    assert drafted.metrics.drafted_tokens > 0 and drafted.metrics.draft_s > 0
    ends = [end for _, end in got]
    assert sum(end.draft_steps for end in ends) == drafted.metrics.draft_steps > 0
    assert all(end.accepted_tokens <= end.drafted_tokens <= 5 * end.draft_steps for end in ends)


def test_a_request_says_whether_it_is_drafted_for(build: Build) -> None:
    engine = build()
    prompt = tuple(ids_of(20).tolist())
    sampling = SamplingParams(temperature=0, max_tokens=12)
    (off,), (on,) = (
        answers(engine, [Request(prompt_ids=prompt, sampling=sampling, draft=draft)]) for draft in ("off", "on")
    )
    assert off[1].drafted_tokens == off[1].draft_steps == 0
    assert on[1].draft_steps > 0 and on[0] == off[0]


def test_a_cancel_between_drafts_ends_the_answer(build: Build) -> None:
    engine = build()
    seen = threading.Event()
    events: list[Any] = []

    def note(event: Any) -> None:
        events.append(event)
        if isinstance(event, Token):
            seen.set()

    request = Request(
        prompt_ids=tuple(ids_of(20).tolist()), sampling=SamplingParams(temperature=0, max_tokens=400), draft="on"
    )
    handle = engine.submit(request, on_event=note)
    assert seen.wait(20)
    handle.cancel()
    answers(engine, [Request(prompt_ids=(5, 6), sampling=SamplingParams(temperature=0, max_tokens=2), draft="on")])
    assert isinstance(events[-1], Finished) and events[-1].reason == "cancelled"
    assert engine.metrics.running == 0


# -- distribution


class Allowed:
    """A grammar of one choice: some tokens first, others after one of them."""

    def __init__(self) -> None:
        self.said: list[int] = []

    def allowed(self) -> bytes:
        odd = bool(self.said) and self.said[-1] % 2 == 1
        bits = sum(1 << i for i in range(8) if i % 3 != (1 if odd else 0))
        return bits.to_bytes(4, "little")

    def accept(self, token_id: int) -> None:
        self.said.append(token_id)


def distribution(draws: int, *, drafted: bool, seed: int) -> Counter[tuple[int, ...]]:
    """Three tokens of a small Markov chain, with a grammar, penalties, a bias and filters, from a draft that is wrong.

    The draft's tokens are drawn as `ModelDrafter` draws them, with the request's temperature and filters.
    """
    generator = torch.Generator().manual_seed(9)
    target, wrong = (torch.randn(9, 8, generator=generator) for _ in range(2))
    params = SamplingParams(
        temperature=0.8, top_k=6, top_p=0.95, presence_penalty=0.6, frequency_penalty=0.3, logit_bias=((2, 0.7),)
    )
    counts: Counter[tuple[int, ...]] = Counter()
    sampler = Sampler(params, constraint=Allowed())
    sampler._generator.manual_seed(seed)
    sampler.draft_generator.manual_seed(seed + 1)
    for _ in range(draws):
        sampler.rewind((), Allowed())
        said: list[int] = []
        while len(said) < 3:
            width = 2 if drafted else 0
            ids: list[int] = []
            probs: list[torch.Tensor] = []
            for _ in range(width):
                previous = ids[-1] if ids else (said[-1] if said else 8)
                token, prob_V = draw(wrong[previous], params, sampler.draft_generator)
                ids.append(token)
                probs.append(prob_V)
            for place in range(width + 1):
                previous = said[-1] if said else 8
                known = place < width
                token_id = sampler(target[previous], ids[place] if known else None, probs[place] if known else None).id
                said.append(token_id)
                if len(said) == 3 or not known or token_id != ids[place]:
                    break
        counts[tuple(said)] += 1
    return counts


def chi_square(first: Counter[tuple[int, ...]], second: Counter[tuple[int, ...]]) -> tuple[float, int]:
    """(statistic, degrees of freedom) of two samples of equal size; rare outcomes are pooled."""
    statistic, cells, rare = 0.0, 0, [0, 0]
    for outcome in set(first) | set(second):
        a, b = first[outcome], second[outcome]
        if a + b < 20:
            rare = [rare[0] + a, rare[1] + b]
            continue
        statistic, cells = statistic + (a - b) ** 2 / (a + b), cells + 1
    if sum(rare) >= 20:
        statistic, cells = statistic + (rare[0] - rare[1]) ** 2 / sum(rare), cells + 1
    return statistic, cells - 1


def limit(degrees: int) -> float:
    """What a chi-square of so many degrees of freedom passes once in 10,000 (Wilson and Hilferty)."""
    return float(degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3)


def check_distribution(draws: int) -> None:
    plain, drafted = (distribution(draws, drafted=drafted, seed=21 + drafted) for drafted in (False, True))
    statistic, degrees = chi_square(plain, drafted)
    assert degrees > 20 and statistic < limit(degrees), (statistic, degrees)


def test_sampled_answers_keep_their_distribution() -> None:
    """1,000 answers of three tokens each way."""
    check_distribution(1_000)


@pytest.mark.slow
def test_sampled_answers_keep_their_distribution_over_200000_draws() -> None:
    """35,000 answers of three tokens each way: 210,000 draws with a grammar, penalties, a bias and filters."""
    check_distribution(35_000)


# -- widths, cost, pace


def test_the_cost_of_a_draft_is_learnt() -> None:
    cost = StepCost()
    assert cost.of(1) is None
    for step in range(1200):
        # a sequence costs ten times what a draft costs, and now and then one ends
        sequences, drafts = (1, step % 6) if step // 40 % 3 else (4, step % 7)
        # now and then something else holds a step up, and the machine is half as fast for a while
        slower = (1 if step % 50 else 30) * (1 if step // 100 % 2 else 2)
        cost.note(sequences, sequences + drafts, (0.010 * sequences + 0.001 * drafts) * slower)
    for sequences in (1, 4):
        of = cost.of(sequences)
        assert of is not None
        base = of(sequences)
        assert base == pytest.approx(0.010 * sequences, rel=0.2)
        assert (of(sequences + 5) - base) / base == pytest.approx(0.5 / sequences, rel=0.3)
    # a draft costs a tenth of a step: the third stands once in thirty-five times and does not pay
    sure = Proposal(ids=(1, 2, 3), confidence=(0.95, 0.3, 0.1))
    assert choose_widths([sure], 3, cost=cost.of(1)) == [2]
    # after a round as long as ten steps it does: what is spent already is spent
    assert choose_widths([sure], 3, cost=cost.of(1), spent=0.1) == [3]
    assert choose_widths([sure], 3, cost=lambda rows: 1.0) == [3]
    assert choose_widths([Proposal(ids=(1,), confidence=(0.01,))], 3, cost=cost.of(1)) == [0]


def test_a_machine_that_gets_slower_does_not_make_rows_dear() -> None:
    """All drafts for a while, then none, on a machine that is half as fast for longer stretches."""
    cost = StepCost()
    for step in range(2000):
        drafts = 80 if step // 50 % 2 else 0
        cost.note(16, 16 + drafts, (0.1 + 0.001 * drafts) * (1 + step // 170 % 2))
    of = cost.of(16)
    assert of is not None and of(96) / of(16) == pytest.approx(1.8, rel=0.25)


@pytest.mark.parametrize("drawn", [False, True])
def test_rows_that_fill_up_a_step_are_taken(drawn: bool) -> None:
    """Steps run 4, 8 or 16 rows: what a fifth row costs it costs with the three behind it."""

    def filled(rows: int) -> int:
        return next(size for size in (4, 8, 16) if rows <= size)

    probs = (torch.ones(3),) * 3 if drawn else None
    proposals = [Proposal(ids=(1, 2, 3), confidence=(0.6, 0.9, 0.9), probs=probs) for _ in range(4)]

    def cost(rows: float) -> float:
        return 1 + 0.1 * rows

    widths = choose_widths(proposals, 12, cost=cost, filled=filled)
    # 4 + 2.4 tokens in 1.8 are more than 4 in 1.4, and 4 + 2.4 + 2.16 + 1.94 in 2.6 more still
    assert widths == [3, 3, 3, 3]
    unlikely = [Proposal(ids=(1, 2, 3), confidence=(0.4, 0.3, 0.2), probs=probs) for _ in range(4)]
    # what is drawn is added row by row at a row's price, then filled up
    assert choose_widths(unlikely, 12, cost=cost, filled=filled) == [1, 1, 1, 1]
    assert choose_widths(unlikely, 3, cost=lambda rows: 1.0, filled=filled) == [1, 1, 1, 0]
    assert choose_widths(unlikely, 12, cost=lambda rows: rows**3, filled=filled) == [0, 0, 0, 0]


def test_whether_drafts_pay_is_learnt() -> None:
    pace = Pace()

    def steps(sequences: int, count: int, tokens: int, drafted_s: float, row_s: float) -> list[bool]:
        asked = []
        for step in range(count):
            # half as fast in every other stretch, whichever way goes on then
            slower = 1 + step // 70 % 2
            rows = 6 * sequences

            def cost(rows: int, slower: int = slower) -> float:
                return (0.010 + row_s * rows) * slower

            asked.append(pace.prefers(sequences, cost))
            if asked[-1]:
                pace.note(sequences, rows, tokens, cost(rows), drafted_s * slower)
            else:
                pace.note(sequences, sequences, sequences, cost(sequences), 0.0)
        return asked

    # three tokens in less than three times the time
    assert 0.9 < sum(steps(1, 300, 3, 0.004, 0.001)) / 300 < 1
    # 18 for 16 in twice the time
    seldom = steps(16, 300, 18, 0.020, 0.001)[30:]
    assert 0 < sum(seldom) / len(seldom) < 0.1
    # another number of sequences begins with the nearest one's verdict, and looks for itself now and then
    assert sum(pace.prefers(9, lambda rows: 0.01 + 0.001 * rows) for _ in range(16)) == 2
    assert sum(pace.prefers(2, lambda rows: 0.01 + 0.001 * rows) for _ in range(16)) == 14
