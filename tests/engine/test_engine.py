"""The loop: order, chunks, stopping, cancelling, failures, closing (about 5 s)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cedar.config.presets import nano
from cedar.engine.engine import Engine
from cedar.engine.request import Event, Finished, Progress, Request, SamplingParams, Token
from cedar.engine.scheduler import SchedulerConfig
from cedar.errors import RequestError
from cedar.kernels.dispatch import deterministic
from cedar.model.init import initialise
from cedar.model.transformer import Transformer

Start = Callable[..., Engine]
FakeModel = Any  # the one in conftest.py
GREEDY = SamplingParams(temperature=0, max_tokens=5)


def request(*prompt: int, **sampling: object) -> Request:
    return Request(prompt_ids=prompt, sampling=SamplingParams(**{"temperature": 0, "max_tokens": 5, **sampling}))


def tokens(events: list[Event]) -> list[int]:
    return [event.id for event in events if isinstance(event, Token)]


def end(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    assert not any(isinstance(event, Finished) for event in events[:-1])
    return events[-1]


def test_a_request_runs_to_its_length(start: Start) -> None:
    events = list(start().submit(request(1, 2, 3)))
    assert tokens(events) == [4, 5, 6, 7, 8]
    last = end(events)
    assert (last.reason, last.prompt_tokens, last.completion_tokens) == ("length", 3, 5)
    # the last generated token never ran
    assert last.cache_bytes == 70


def test_a_stop_token_ends_it_and_is_counted_but_not_sent(start: Start) -> None:
    events = list(start().submit(request(1, stop_token_ids=(4,))))
    assert tokens(events) == [2, 3]
    assert (end(events).reason, end(events).completion_tokens) == ("stop", 3)


@pytest.mark.parametrize(("num_prompt", "chunks"), [(1, [1]), (8, [8]), (9, [8, 1]), (30, [8, 8, 8, 6])])
def test_prompts_run_in_chunks_with_progress(
    start: Start, model: FakeModel, num_prompt: int, chunks: list[int]
) -> None:
    events = list(start(max_step_tokens=8, max_running=4).submit(request(*range(num_prompt))))
    assert model.chunks == chunks
    done = [event.done for event in events if isinstance(event, Progress)]
    assert done == [sum(chunks[: i + 1]) for i in range(len(chunks))]
    assert tokens(events)[0] == num_prompt


@pytest.mark.parametrize("exact", [False, True])
def test_generated_tokens_run_on_one_thread(
    start: Start, model: FakeModel, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """A prompt's chunks have all threads, and so has everything in exact mode."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    threads, run, set_now = [], model.step, [3]
    monkeypatch.setattr(torch, "set_num_threads", lambda number: set_now.append(number))

    def step(parts: list[Any]) -> list[torch.Tensor]:
        threads.append((parts[0].prompt_tokens is None, set_now[-1]))
        return run(parts)

    monkeypatch.setattr(model, "step", step)
    assert tokens(list(start(exact=exact).submit(request(1, 2)))) == [3, 4, 5, 6, 7]
    assert set(threads) == {(False, 3), (True, 3 if exact else 1)}
    assert set_now[-1] == 3


def test_requests_run_in_their_order(start: Start, model: FakeModel) -> None:
    model.gate.clear()
    engine, order = start(max_running=1), []
    handles = [engine.submit(request(i), on_event=lambda e, i=i: order.append((i, e))) for i in range(4)]
    assert engine.metrics.snapshot()["submitted"] == 4 and len(handles) == 4
    model.gate.set()
    _wait(lambda: sum(isinstance(event, Finished) for _, event in order) == 4)
    assert [i for i, _ in order] == sorted(i for i, _ in order)
    assert engine.metrics.finished == {"length": 4}


def _wait(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def test_cancel_while_waiting_does_not_wait_for_the_running_one(start: Start, model: FakeModel) -> None:
    model.step_s = 0.02
    engine = start()
    first = engine.submit(request(1, max_tokens=100))
    second = engine.submit(request(2))
    second.cancel()
    began = time.monotonic()
    assert end(list(second)).reason == "cancelled"
    assert time.monotonic() - began < 0.5
    first.cancel()
    assert end(list(first)).reason == "cancelled"


def test_cancel_between_chunks(start: Start, model: FakeModel) -> None:
    model.step_s = 0.02
    handle = start(max_step_tokens=4, max_running=2).submit(request(*range(400)))
    iterator = iter(handle)
    assert isinstance(next(iterator), Progress)
    handle.cancel()
    events = list(iterator)
    assert end(events).reason == "cancelled" and len(events) < 4
    assert sum(model.chunks) < 40


def test_cancel_while_decoding(start: Start, model: FakeModel) -> None:
    model.step_s = 0.01
    engine = start()
    handle = engine.submit(request(1, max_tokens=400))
    iterator = iter(handle)
    seen = [next(iterator) for _ in range(4)]
    handle.cancel()
    rest = list(iterator)
    assert end(rest).reason == "cancelled" and len(rest) < 5
    assert end(rest).completion_tokens == len(tokens(seen + rest))
    assert tokens(list(engine.submit(request(9)))) == [10, 11, 12, 13, 14]


def test_cancelling_what_is_not_there_does_nothing(start: Start) -> None:
    engine = start()
    engine.cancel("nobody")
    handle = engine.submit(request(1))
    assert end(list(handle)).reason == "length"
    handle.cancel()


def test_one_failure_ends_one_request(start: Start, model: FakeModel) -> None:
    model.fail_at = 4
    engine = start()
    bad, good = engine.submit(request(2)), engine.submit(request(10))
    last = end(list(bad))
    assert (last.reason, last.error) == ("error", "RuntimeError: boom at 4")
    assert end(list(good)).reason == "length"
    assert engine.metrics.finished == {"error": 1, "length": 1}


def test_a_listener_that_raises_ends_its_own_request_only(start: Start) -> None:
    def gone(event: Event) -> None:
        raise RuntimeError("the loop is closed")

    engine = start()
    engine.submit(request(1), on_event=gone)
    assert end(list(engine.submit(request(5)))).reason == "length"
    assert engine.metrics.finished["error"] == 1


def test_not_finite_logits_are_an_error(start: Start, model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "step", lambda parts: [torch.full((1, 512), float("nan")) for _ in parts])
    last = end(list(start().submit(request(1))))
    assert last.reason == "error" and "not finite" in last.error


@pytest.mark.parametrize(
    ("bad", "param", "match"),
    [
        (Request(prompt_ids=(), sampling=GREEDY), "prompt", "empty"),
        (Request(prompt_ids=(512,), sampling=GREEDY), "prompt", "512"),
        (Request(prompt_ids=(-1,), sampling=GREEDY), "prompt", "vocabulary"),
        (Request(prompt_ids=(1,) * 20, sampling=GREEDY), "messages", "holds 20 tokens; the prompt has 20 and 5"),
        (Request(prompt_ids=(1,) * 18, sampling=GREEDY), "max_tokens", "lower max_tokens to 2"),
    ],
)
def test_refused_before_any_work(start: Start, model: FakeModel, bad: Request, param: str, match: str) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        start(max_context=20).submit(bad)
    assert caught.value.param == param
    assert model.chunks == []


def test_an_open_length_fills_the_context(start: Start) -> None:
    events = list(start(max_context=20).submit(request(*range(12), max_tokens=None)))
    assert end(events).completion_tokens == 8
    assert end(list(start(max_context=13).submit(request(*range(12), max_tokens=None)))).completion_tokens == 1


def test_a_full_queue_says_so(start: Start, model: FakeModel) -> None:
    model.gate.clear()
    engine = start(max_waiting=2)
    engine.submit(request(1))
    _wait(lambda: engine.metrics.running == 1)
    engine.submit(request(2))
    engine.submit(request(3))
    with pytest.raises(RequestError, match="2 requests are waiting") as caught:
        engine.submit(request(4))
    assert caught.value.status == 503


def test_close_ends_what_runs_and_what_waits(start: Start, model: FakeModel) -> None:
    model.step_s = 0.01
    engine = start()
    handles = [engine.submit(request(i, max_tokens=400)) for i in range(3)]
    assert isinstance(next(iter(handles[0])), Progress)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 1
    assert [end(list(handle)).reason for handle in handles] == ["cancelled"] * 3
    with pytest.raises(RequestError, match="shutting down"):
        engine.submit(request(1))
    engine.close()


def test_many_threads_submit_and_cancel(start: Start) -> None:
    engine, ends = start(max_waiting=1000), []

    def client(number: int) -> None:
        for i in range(20):
            handle = engine.submit(request(number, i, max_tokens=3))
            if (number + i) % 3 == 0:
                handle.cancel()
            ends.append(end(list(handle)))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(ends) == 160
    assert {last.reason for last in ends} <= {"length", "cancelled"}
    assert sum(engine.metrics.finished.values()) == 160
    assert (engine.metrics.waiting, engine.metrics.running) == (0, 0)


def test_the_real_model_gives_what_its_forward_gives() -> None:
    """Greedy tokens of the engine, any chunk, are the argmax chain of prefill and decode."""
    torch.manual_seed(0)
    model = Transformer(nano())
    with torch.no_grad():
        initialise(model, seed=1)
    model.token_map.set(list(range(512)))
    prompt = tuple(torch.randint(0, 512, (45,)).tolist())
    # a random model's roundings turn a sum's last bit, which the number of rows decides, into another token
    with deterministic():
        state = model.new_state()
        logits_V = model.prefill(state, torch.tensor(prompt))[-1]
        expected = []
        for _ in range(6):
            expected.append(int(logits_V.argmax()))
            logits_V = model.decode(state, torch.tensor(expected[-1:]))[-1]
    for chunk in (128, 45, 13):
        engine = Engine(model, scheduling=SchedulerConfig(max_step_tokens=chunk, max_running=4), exact=True)
        events = list(engine.submit(Request(prompt_ids=prompt, sampling=SamplingParams(temperature=0, max_tokens=6))))
        engine.close()
        assert tokens(events) == expected
        assert end(events).cache_bytes > 0
