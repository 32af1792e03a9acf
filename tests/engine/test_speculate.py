"""Drafts: widths, lossless choice, and an engine with scripted drafters (about 15 s)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cedar.engine.engine import Engine
from cedar.engine.request import Event, Finished, Request, SamplingParams, Token
from cedar.engine.sampling import Sampler, choose, choose_against
from cedar.engine.speculate import DraftRequest, Proposal, choose_widths
from cedar.errors import ShapeError
from tests.engine.drafters import Scripted

Start = Callable[..., Engine]
FakeModel = Any  # the one in conftest.py
VOCAB = 512


def ask(engine: Engine, *prompt: int, **sampling: Any) -> tuple[list[int], Finished]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 20, **sampling})
    return said(list(engine.submit(Request(prompt_ids=prompt, sampling=params))))


def said(events: list[Event]) -> tuple[list[int], Finished]:
    end = events[-1]
    assert isinstance(end, Finished)
    return [event.id for event in events if isinstance(event, Token)], end


def next_number(tokens: Sequence[int]) -> int:
    """What the scripted model says: the number after the last one."""
    return (tokens[-1] + 1) % VOCAB


def test_a_proposal_has_one_of_everything() -> None:
    with pytest.raises(ShapeError, match="2 tokens has 1 confidence"):
        Proposal(ids=(1, 2), confidence=(0.5,))
    whole = Proposal(ids=(1, 2, 3), probs=(torch.ones(4),) * 3, confidence=(0.9, 0.8, 0.7))
    assert whole.cut(5) is whole
    assert (whole.cut(1).ids, len(whole.cut(1).probs or ()), whole.cut(1).confidence) == ((1,), 1, (0.9,))


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=5), max_size=6),
    st.integers(-1, 12),
)
def test_widths_take_the_likeliest_first(confidences: list[list[float]], budget: int) -> None:
    proposals = [Proposal(ids=tuple(range(len(c))), confidence=tuple(c)) for c in confidences]
    widths = choose_widths(proposals, budget)
    assert sum(widths) == max(min(budget, sum(map(len, confidences))), 0)
    survival = [[float(torch.tensor(c[: n + 1]).double().prod()) for n in range(len(c))] for c in confidences]
    taken = [s for row, width in zip(survival, widths, strict=True) for s in row[:width]]
    left = [row[width] for row, width in zip(survival, widths, strict=True) if width < len(row)]
    assert not taken or not left or min(taken) >= max(left) - 1e-6


def test_the_worked_example_of_rejection() -> None:
    """engram-dspark-vision-chat.md 2.4: accepted with 0.5, and if not, the bonus is token 0."""
    logits, q = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.6, 0.2])
    params = SamplingParams()
    grid = [(i + 0.5) / 1000 for i in range(1000)]
    outcomes = Counter(choose_against(logits, params, 1, q, (u, v)) for u in grid for v in (0.01, 0.5, 0.99))
    assert outcomes == {0: 1500, 1: 1500}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=4),
        SamplingParams(temperature=1.6, top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=0),
    ],
)
def test_rejection_keeps_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 4,000 draws from a draft that is wrong in every way: shape, support, temperature."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(7, generator=generator) * 1.5
    q = torch.softmax(torch.randn(7, generator=generator) * 2, 0)
    q[2] = 0
    q /= q.sum()
    draft = torch.multinomial(q, 4_000, replacement=True, generator=generator).tolist()
    uniform = torch.rand(4_000, 2, generator=generator, dtype=torch.float64).tolist()
    drawn = Counter(choose_against(logits, params, x, q, (u, v)) for x, (u, v) in zip(draft, uniform, strict=True))
    grid = Counter(choose(logits, params, (i + 0.5) / 4_000) for i in range(4_000))
    expected = [grid[i] for i in range(7)]
    assert set(drawn) <= {i for i in range(7) if expected[i] > 0}
    chi = sum((drawn[i] - expected[i]) ** 2 / expected[i] for i in range(7) if expected[i] > 0)
    # 6 degrees of freedom: 1 in 1,000 is above 22.5
    assert chi < 22.5


def test_a_draft_without_chance_changes_no_seeded_token() -> None:
    """The same numbers are drawn, whatever was proposed."""
    draw = random.Random(1)
    params = SamplingParams(seed=7, temperature=1.3, top_p=0.9, frequency_penalty=0.5)
    plain, drafted = Sampler(params), Sampler(params)
    for _ in range(200):
        logits = torch.randn(20)
        token = plain(logits)
        assert drafted(logits, draw.choice([token.id, draw.randrange(20)])) == token


@pytest.mark.parametrize("accepted", range(6))
def test_scripted_drafts_give_the_same_answer_in_fewer_steps(start: Start, model: FakeModel, accepted: int) -> None:
    plain, end = ask(start(), 3)
    assert end.drafted_tokens == 0
    model.batches.clear()
    engine = start(drafter=Scripted(next_number, width=5, right=accepted))
    tokens, end = ask(engine, 3)
    assert tokens == plain and end.completion_tokens == 20
    most = model.config.draft.block_size
    assert len(model.batches) == -(-19 // (min(accepted, most) + 1))
    assert end.accepted_tokens == 19 - len(model.batches)
    assert engine.metrics.accepted_tokens == end.accepted_tokens <= engine.metrics.drafted_tokens
    assert engine.metrics.rows["verify"] == end.drafted_tokens


def test_a_stop_token_inside_the_accepted_ends_the_answer(start: Start) -> None:
    engine = start(drafter=Scripted(next_number, width=5, right=5))
    tokens, end = ask(engine, 3, stop_token_ids=(6,))
    assert (tokens, end.reason, end.completion_tokens) == ([4, 5], "stop", 3)
    assert end.cache_bytes == 10 * 3


def test_drafts_fit_what_is_left_of_the_answer(start: Start, model: FakeModel) -> None:
    seen: list[int] = []

    def note(tokens: Sequence[int]) -> int:
        return next_number(tokens)

    drafter = Scripted(note, width=5, right=5, limits=seen)
    tokens, _ = ask(start(drafter=drafter, max_context=12), 1, max_tokens=4)
    assert tokens == [2, 3, 4, 5] and seen == [2]
    assert ask(start(drafter=drafter), 1, max_tokens=1)[0] == [2] and seen == [2]


@pytest.mark.parametrize("bad", ["raises", "short", "unknown"])
def test_a_broken_drafter_costs_nothing_but_speed(start: Start, bad: str) -> None:
    class Broken:
        def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
            if bad == "raises":
                raise RuntimeError("no draft today")
            return [] if bad == "short" else [Proposal(ids=(VOCAB,)) for _ in requests]

    tokens, end = ask(start(drafter=Broken()), 3, max_tokens=5)
    assert tokens == [4, 5, 6, 7, 8] and end.drafted_tokens == 0


def test_a_grammar_is_asked_about_accepted_tokens_only(start: Start) -> None:
    """Every second number: the drafts, which follow the model, are refused, and the constraint never hears of them."""

    class Even:
        def __init__(self) -> None:
            self.accepted: list[int] = []

        def allowed(self) -> bytes:
            bits = sum(1 << i for i in range(0, 32, 2))
            return b"".join(bits.to_bytes(4, "little") for _ in range(VOCAB // 32))

        def accept(self, token_id: int) -> None:
            self.accepted.append(token_id)

    answers = []
    for drafter in (None, Scripted(next_number, width=5, right=5)):
        constraint = Even()
        engine = start(drafter=drafter)
        request = Request(
            prompt_ids=(3,), constraint=constraint, sampling=SamplingParams(temperature=0, max_tokens=8, logprobs=1)
        )
        events = list(engine.submit(request))
        tokens, _ = said(events)
        assert constraint.accepted == tokens
        answers.append([event for event in events if isinstance(event, Token)])
    assert answers[0] == answers[1]


def test_sampled_drafts_in_an_engine_keep_their_seed(start: Start) -> None:
    """A drafter that draws gives the same answer for the same seed, and one of the right kind."""
    answers = []
    for _ in range(2):
        engine = start(drafter=Scripted(next_number, width=3, right=3, sampled=True))
        answers.append(ask(engine, 3, temperature=2.0, seed=11, max_tokens=40)[0])
    assert answers[0] == answers[1] and len(set(answers[0])) > 10
