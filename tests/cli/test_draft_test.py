"""What `cedar bench draft` counts as a batch."""

from __future__ import annotations

from cedar.cli.draft_test import _Watch
from cedar.engine.request import Finished, Progress, Token


def test_tokens_count_while_all_answers_are_written() -> None:
    watch = _Watch(2)
    token, end = Token(1), Finished(reason="length", prompt_tokens=3)
    # the second answer's prompt still runs
    for number, event in ((0, Progress(1, 3)), (0, token), (0, token), (1, Progress(3, 3))):
        watch.hear(number, event)
    assert not watch.marks and watch.tokens == 0
    # its first token opens the batch, the first answer's end closes it
    for number in (1, 0, 1, 1):
        watch.hear(number, token)
    watch.hear(0, end)
    assert watch.tokens == 3 and len(watch.marks) == 2 and not watch.all_ended.is_set()
    watch.hear(1, token)
    watch.hear(1, end)
    assert watch.tokens == 3 and watch.all_ended.is_set()
    assert watch.marks == sorted(watch.marks) and len(watch.marks) == 3
    assert [len(events) for events in watch.events] == [5, 6]


def test_a_batch_of_one_ends_once() -> None:
    watch = _Watch(1)
    for event in (Token(1), Token(2), Finished(reason="length", prompt_tokens=3)):
        watch.hear(0, event)
    assert watch.tokens == 1 and len(watch.marks) == 2 and watch.all_ended.is_set()
