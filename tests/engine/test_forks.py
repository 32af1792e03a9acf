"""Forks, rewinds, deadlines, steps of several prompts: the engine over a scripted model (about 5 s)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from cedar.engine.engine import Engine
from cedar.engine.request import Event, Finished, Handle, Request, Rewound, SamplingParams, Token
from cedar.errors import RequestError

Start = Callable[..., Engine]
FakeModel = Any  # the one in conftest.py


def request(*prompt: int, **options: Any) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=options.pop("max_tokens", 12))
    return Request(prompt_ids=prompt, sampling=sampling, **options)


class Listener:
    """Keeps events and lets a test wait for some of them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(self, condition: Callable[[list[Event]], bool]) -> list[Event]:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.events), 10)
            return list(self.events)

    def end(self) -> Finished:
        last = self.wait(lambda events: bool(events) and isinstance(events[-1], Finished))[-1]
        assert isinstance(last, Finished)
        return last


def numbers(events: list[Event]) -> list[int]:
    said: list[int] = []
    for event in events:
        if isinstance(event, Token):
            said.append(event.id)
        if isinstance(event, Rewound):
            del said[event.num_tokens :]
    return said


def has_said(count: int) -> Callable[[list[Event]], bool]:
    return lambda events: sum(isinstance(event, Token) for event in events) >= count


def test_forks_of_a_prompt_share_its_prefill(start: Start, model: FakeModel) -> None:
    model.gate.clear()
    engine = start()
    first = engine.submit(request(1, 2, 3))
    forks = [engine.fork(first.request_id) for _ in range(3)]
    model.gate.set()
    for handle in (first, *forks):
        assert numbers(list(handle)) == list(range(4, 16))
    assert model.chunks == [3]
    assert engine.metrics.finished == {"length": 4}


@pytest.mark.parametrize("num_tokens", [None, 0, 3])
def test_a_fork_sends_what_it_inherits(start: Start, model: FakeModel, num_tokens: int | None) -> None:
    model.step_s = 0.01
    engine, listener = start(), Listener()
    engine.submit(request(1, id="first"), listener)
    listener.wait(has_said(5))
    fork = engine.fork("first", num_tokens=num_tokens, sampling=SamplingParams(temperature=0, max_tokens=14))
    events = list(fork)
    assert numbers(events) == list(range(2, 16))
    assert isinstance(events[-1], Finished) and events[-1].completion_tokens == 14
    assert listener.end().reason == "length" and numbers(listener.events) == list(range(2, 14))


def test_a_fork_with_no_room_beside_waits_its_turn(start: Start, model: FakeModel) -> None:
    model.gate.clear()
    engine = start(max_running=1)
    first = engine.submit(request(1))
    second = engine.fork(first.request_id)
    model.gate.set()
    assert numbers(list(first)) == numbers(list(second)) == list(range(2, 14))


def test_a_fork_outlives_its_parent(start: Start, model: FakeModel) -> None:
    model.gate.clear()
    engine = start()
    first = engine.submit(request(1))
    fork = engine.fork(first.request_id)
    first.cancel()
    model.gate.set()
    assert numbers(list(fork)) == list(range(2, 14))


def test_a_fork_that_would_be_over_before_it_begins(start: Start, model: FakeModel) -> None:
    model.step_s = 0.01
    engine, listener = start(), Listener()
    engine.submit(request(1, id="first"), listener)
    listener.wait(has_said(4))
    end = list(engine.fork("first", sampling=SamplingParams(max_tokens=2)))[-1]
    assert isinstance(end, Finished) and end.reason == "error" and "max_tokens are 2" in end.error


def test_nobody_to_fork_or_to_rewind(start: Start) -> None:
    engine = start()
    for call in (engine.fork, lambda name: engine.rewind(name, 0)):
        with pytest.raises(RequestError, match="no request 'nobody'") as caught:
            call("nobody")
        assert caught.value.status == 404
    with pytest.raises(RequestError, match="num_tokens is -1"):
        engine.rewind("nobody", -1)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 9])
def test_a_rewound_answer_goes_on_from_there(start: Start, model: FakeModel, num_tokens: int) -> None:
    model.step_s = 0.01
    engine, listener = start(), Listener()
    engine.submit(request(1, id="one", max_tokens=20), listener)
    listener.wait(has_said(10))
    taken = engine.rewind("one", num_tokens).result(10)
    end = listener.end()
    events = listener.events
    assert taken >= 10 - num_tokens and sum(isinstance(event, Rewound) for event in events) == 1
    assert numbers(events) == list(range(2, 22)) and end.completion_tokens == 20
    # the last token never ran, whatever was run twice
    assert end.cache_bytes == 10 * 20


def test_rewinding_to_more_than_there_is_does_nothing(start: Start, model: FakeModel) -> None:
    model.step_s = 0.01
    engine, listener = start(), Listener()
    engine.submit(request(1, id="one"), listener)
    listener.wait(has_said(2))
    assert engine.rewind("one", 100).result(10) == 0
    listener.end()
    assert not any(isinstance(event, Rewound) for event in listener.events)


def test_a_constrained_answer_needs_a_fresh_constraint(start: Start, model: FakeModel) -> None:
    class Anything:
        def __init__(self) -> None:
            self.accepted: list[int] = []

        def allowed(self) -> bytes | None:
            return None

        def accept(self, token_id: int) -> None:
            self.accepted.append(token_id)

    model.step_s = 0.01
    engine, listener = start(), Listener()
    engine.submit(request(1, id="one", constraint=Anything()), listener)
    listener.wait(has_said(5))
    for call in (engine.fork, lambda name: engine.rewind(name, 0)):
        with pytest.raises(RequestError, match="fresh constraint"):
            call("one")
    fresh, again = Anything(), Anything()
    fork = engine.fork("one", constraint=fresh)
    engine.rewind("one", 2, constraint=again).result(10)
    assert numbers(list(fork)) == fresh.accepted == list(range(2, 14))
    listener.end()
    assert numbers(listener.events) == again.accepted == list(range(2, 14))


def test_no_first_token_in_time(start: Start, model: FakeModel) -> None:
    model.step_s = 0.02
    engine = start(max_running=1)
    first = engine.submit(request(1, max_tokens=100))
    late = list(engine.submit(request(2, timeout_s=0.1)))
    assert isinstance(late[-1], Finished) and (late[-1].reason, len(late)) == ("timeout", 1)
    first.cancel()
    # a first token in time is enough
    ends = list(engine.submit(request(3, timeout_s=0.2, max_tokens=30)))
    assert isinstance(ends[-1], Finished) and ends[-1].reason == "length"


def test_one_budget_for_everybody(start: Start, model: FakeModel) -> None:
    """Streams first, then chunks of several prompts; never more rows than the step holds."""
    steps: list[list[int]] = []
    real = model.step

    def step(parts: Any) -> Any:
        steps.append([len(part.ids_T) for part in parts])
        time.sleep(0.002)
        return real(parts)

    model.step = step
    engine, listener = start(max_step_tokens=20, max_running=8), Listener()
    engine.submit(request(1, id="stream", max_tokens=60), listener)
    listener.wait(has_said(2))
    model.gate.clear()
    handles = [engine.submit(request(*range(length))) for length in (9, 9, 50)]
    model.gate.set()
    for handle in handles:
        assert isinstance(list(handle)[-1], Finished)
    listener.end()
    assert all(sum(rows) <= 20 for rows in steps)
    assert [1, 9, 9] in [rows[:3] for rows in steps]
    # from its first token on the stream is in every step until it ends
    assert all(rows[0] == 1 for rows in steps[1:40])


def test_streams_may_wait_some_steps_of_prompts(start: Start, model: FakeModel) -> None:
    kinds: list[str] = []
    real = model.step

    def step(parts: Any) -> Any:
        kinds.append("tokens" if any(part.prompt_tokens is None for part in parts) else "prompts")
        time.sleep(0.002)
        return real(parts)

    model.step = step
    engine, listener = start(max_step_tokens=9, max_running=4, prefill_steps_between_decodes=3), Listener()
    engine.submit(request(1, max_tokens=40), listener)
    listener.wait(has_said(2))
    list(engine.submit(request(*range(100), max_tokens=1)))
    listener.end()
    first = kinds.index("prompts", 1)
    assert kinds[first : first + 9] == ["prompts", "prompts", "tokens"] * 3


def test_who_fails_alone_ends_and_the_others_lose_nothing(start: Start, model: FakeModel) -> None:
    model.fail_at = 300
    model.gate.clear()
    engine = start()
    handles: list[Handle] = [engine.submit(request(*ids)) for ids in ((5,), (7, 8), (299,), (9, 9))]
    model.gate.set()
    ends = [list(handle) for handle in handles]
    assert [end[-1].reason for end in ends if isinstance(end[-1], Finished)] == ["length", "length", "error", "length"]
    assert numbers(ends[0]) == list(range(6, 18)) and numbers(ends[3]) == list(range(10, 22))
