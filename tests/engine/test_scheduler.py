"""Who runs next, and how many rows of whom: pure decisions (about 1 s)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.engine.request import Event, Request, SamplingParams, Sequence
from cedar.engine.scheduler import PrefillShare, SchedulerConfig, by_order, chunk_rows, order_key
from cedar.errors import ConfigError, RequestError

CONFIG = SchedulerConfig()


def waiting(num_prompt: int, submitted_s: float = 0.0, **options: object) -> Sequence:
    def ignore(event: Event) -> None:
        """Nobody listens."""

    request = Request(prompt_ids=(1,) * num_prompt, sampling=SamplingParams(max_tokens=1), **options)  # type: ignore[arg-type]
    return Sequence(request=request, emit=ignore, max_tokens=1, submitted_s=submitted_s, tokens=[1] * num_prompt)


def test_a_step_must_hold_everybody() -> None:
    with pytest.raises(ConfigError, match="at least 17"):
        SchedulerConfig(max_step_tokens=16)


def test_the_shortest_first_and_age_counts() -> None:
    # 200 rows a second: 900 rows more are made up for by four and a half seconds
    short, long, older = waiting(100, 10.0), waiting(1000, 6.0), waiting(1000, 5.0)
    assert [id(s) for s in by_order([long, short, older], 10.0, CONFIG, 0.0)] == [id(older), id(short), id(long)]


def test_priority_is_above_all() -> None:
    assert by_order([waiting(10), first := waiting(10_000, priority=1)], 0.0, CONFIG, 0.0)[0] is first


def test_a_deadline_that_is_near_goes_first_and_only_until_the_first_token() -> None:
    pressed, short = waiting(1000, timeout_s=10.0), waiting(10)
    # 1,000 rows a second: two seconds before its time it must go
    assert by_order([pressed, short], 7.9, CONFIG, 1000.0)[0] is short
    assert by_order([pressed, short], 8.0, CONFIG, 1000.0)[0] is pressed
    pressed.first_token_s = 8.0
    assert pressed.deadline_s is None and order_key(pressed, 1000, 9.9, CONFIG, 1000.0)[1]
    with pytest.raises(RequestError, match="timeout_s is 0"):
        waiting(1, timeout_s=0)


@given(st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 600), st.sampled_from([6, 16, 128]))
def test_chunks_make_progress_end_even_and_reach_the_end(start: int, length: int, budget: int, window: int) -> None:
    stop, position, chunks = start + length, start, 0
    while position < stop:
        rows = chunk_rows(position, stop, budget, window)
        assert 1 <= rows <= min(budget, stop - position)
        position += rows
        chunks += 1
        if position < stop and budget > 1:
            assert position % 2 == 0
    # whole pages but for the ends, so never more than twice as many as the budget asks for, and two
    assert chunks <= 2 * math.ceil(length / max(budget - 1, 1)) + 2


def test_a_rest_shorter_than_a_window_is_avoided() -> None:
    assert chunk_rows(0, 400, 390, 128) == 256
    assert chunk_rows(0, 400, 390, 6) == 384


def test_prompts_make_way_for_slow_tokens() -> None:
    share = PrefillShare(0.05, 512)
    for _ in range(20):
        share.note(0.2)
    assert share.rows == 256
    for _ in range(400):
        share.note(0.2)
    assert share.rows == 16
    for _ in range(20):
        share.note(0.045)
    assert share.rows == 16
    for _ in range(600):
        share.note(0.01)
    assert share.rows == 512
    # one of twenty may be slow
    for _ in range(5):
        share.note(1.0)
        for _ in range(19):
            share.note(0.01)
    assert share.rows == 512
    unbound = PrefillShare(None, 512)
    for _ in range(100):
        unbound.note(9.0)
    assert unbound.rows == 512
