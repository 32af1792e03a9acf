"""Choosing a token: filters, ties, extremes, seeds (about 3 s)."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cedar.engine.request import SamplingParams
from cedar.engine.sampling import Sampler, choose
from cedar.errors import RequestError

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -math.inf])


def support(params: SamplingParams, logits_V: torch.Tensor = LOGITS) -> set[int]:
    return {choose(logits_V, params, (i + 0.5) / 2000) for i in range(2000)}


def test_greedy_takes_the_lower_of_equals() -> None:
    greedy = SamplingParams(temperature=0)
    assert choose(torch.tensor([0.0, 5.0, 5.0, 5.0]), greedy, 0.9) == 1


def test_filters_keep_what_they_say() -> None:
    assert support(SamplingParams()) == {0, 1, 2, 3}
    assert support(SamplingParams(top_k=1)) == {1}
    assert support(SamplingParams(top_k=2)) == {1, 2}
    assert support(SamplingParams(top_k=99)) == {0, 1, 2, 3}
    # probabilities 0.64, 0.24, 0.09, 0.03
    assert support(SamplingParams(top_p=0.6)) == {1}
    assert support(SamplingParams(top_p=0.65)) == {1, 2}
    assert support(SamplingParams(top_p=1e-9)) == {1}
    assert support(SamplingParams(min_p=0.2)) == {1, 2}
    assert support(SamplingParams(min_p=1.0)) == {1}
    assert support(SamplingParams(top_k=3, top_p=0.9, min_p=0.5)) == {1}


def test_frequencies_are_the_softmax() -> None:
    for params in (SamplingParams(temperature=0.7), SamplingParams(temperature=0.7, top_k=5)):
        counts = Counter(choose(LOGITS, params, (i + 0.5) / 4000) for i in range(4000))
        expected = (LOGITS / 0.7).softmax(0)
        assert [counts[i] / 4000 for i in range(5)] == pytest.approx(expected.tolist(), abs=1e-3)


@given(
    logits=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20),
    temperature=st.sampled_from([1e-6, 0.01, 1.0, 2.0]),
    top_k=st.integers(0, 5),
    top_p=st.sampled_from([1e-6, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_never_outside_never_impossible(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> None:
    logits_V = torch.tensor([*logits, -math.inf])
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    token = choose(logits_V, params, uniform)
    assert 0 <= token < len(logits)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=2)):
        with pytest.raises(ArithmeticError, match="not finite"):
            choose(torch.tensor([0.0, bad]), params, 0.5)
    with pytest.raises(ArithmeticError):
        choose(torch.full((3,), -math.inf), SamplingParams(), 0.5)


def test_a_seed_repeats_and_no_seed_does_not() -> None:
    flat_V = torch.zeros(1000)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed))
        return [sampler(flat_V).id for _ in range(20)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)
    assert draw(-1) == draw(-1)


def test_logprobs_are_of_the_untouched_distribution() -> None:
    token = Sampler(SamplingParams(temperature=0, logprobs=2))(LOGITS)
    expected = LOGITS.log_softmax(0)
    assert token.logprob == pytest.approx(float(expected[1]))
    assert [i for i, _ in token.top] == [1, 2]
    assert Sampler(SamplingParams(temperature=0, logprobs=0))(LOGITS).top == ()
    assert len(Sampler(SamplingParams(logprobs=20))(LOGITS).top) == 5


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("presence_penalty", 2.5), ("frequency_penalty", -3.0), ("repetition_penalty", 0.0),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan), ("top_k", -1), ("top_p", 0.0),
        ("top_p", 1.1), ("min_p", -0.1), ("max_tokens", 0), ("seed", 2**63), ("logprobs", 21),
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(param: str, value: float) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param


def greedy(count: int, logits_V: torch.Tensor = LOGITS, *, prompt: tuple[int, ...] = (), **penalties: Any) -> list[int]:
    sampler = Sampler(SamplingParams(temperature=0, **penalties), prompt_ids=prompt)
    return [sampler(logits_V).id for _ in range(count)]


def test_penalties_push_repeated_tokens_down() -> None:
    # gaps: 3, 2, 1, 0
    assert greedy(3) == [1, 1, 1]
    assert greedy(4, presence_penalty=1.5) == [1, 2, 1, 1]
    assert greedy(4, frequency_penalty=1.5) == [1, 2, 1, 0]
    # the prompt counts for repetition alone
    assert greedy(1, repetition_penalty=2, prompt=(1,)) == [2]
    assert greedy(1, presence_penalty=2, frequency_penalty=2, prompt=(1,)) == [1]
    # negative logits go down too, not up
    assert greedy(1, torch.tensor([-1.0, -1.5]), repetition_penalty=2, prompt=(0,)) == [1]
    assert greedy(2, torch.tensor([0.0, 1.0]), presence_penalty=-2) == [1, 1]


def test_logit_bias_bans_and_forces() -> None:
    assert greedy(1, logit_bias=((1, -100.0),)) == [2]
    assert greedy(1, logit_bias=((3, 100.0),)) == [3]


def test_penalties_leave_the_logits_and_the_reported_probabilities_alone() -> None:
    kept_V = LOGITS.clone()
    sampler = Sampler(SamplingParams(temperature=0, presence_penalty=2, logit_bias=((0, 5.0),), logprobs=1))
    token = sampler(LOGITS)
    assert token.id == 0 and token.logprob == pytest.approx(float(LOGITS.log_softmax(0)[0]))
    assert torch.equal(LOGITS, kept_V)


class EvenOnly:
    def __init__(self) -> None:
        self.taken: list[int] = []

    def allowed(self) -> bytes | None:
        return None if len(self.taken) >= 2 else (0x55555555).to_bytes(4, "little") * 2

    def accept(self, token_id: int) -> None:
        self.taken.append(token_id)


def test_a_constraint_decides_what_can_be_chosen() -> None:
    constraint = EvenOnly()
    logits_V = torch.zeros(40)
    logits_V[33] = 9
    sampler = Sampler(SamplingParams(temperature=0, logit_bias=((34, 1.0),)), constraint=constraint)
    assert [sampler(logits_V).id for _ in range(3)] == [34, 34, 33]
    assert constraint.taken == [34, 34, 33]
