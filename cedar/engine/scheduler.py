"""Who runs next: order in the queue, admission, the rows of a step, and who is set aside when memory is short.

Pure decisions over sequences, rows and page counts; the engine carries them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from cedar.cache.keys import common_length
from cedar.config.model import PAGE_TOKENS
from cedar.engine.request import Sequence, Status
from cedar.errors import ConfigError

# a prompt that runs beside tokens that come too slowly gets at least so many rows a step
_LEAST_SHARE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one engine.

    Attributes:
        max_running: Sequences that hold a state at once.
        max_step_tokens: Rows of a step: generated, drafted and replayed tokens and chunks of prompts together.
        prefill_steps_between_decodes: Steps of prompts alone that may pass before those who decode get a token.
        target_tpot_s: Time between two tokens of a stream that 95 in 100 should keep; prompts get fewer rows a step
            while they do not. None has no target.
        reserve_tokens: Answer tokens that a request must find room for before it starts; more are taken as it grows.
        aging_tokens_s: Rows of computation that a second of waiting makes up for, so that nobody starves.

    Raises:
        ConfigError: A step that does not hold one row of everybody who may decode and one of a prompt.
    """

    max_running: int = 16
    max_step_tokens: int = 272
    prefill_steps_between_decodes: int = 1
    target_tpot_s: float | None = None
    reserve_tokens: int = 4096
    aging_tokens_s: float = 200.0

    def __post_init__(self) -> None:
        if self.max_step_tokens <= self.max_running:
            raise ConfigError(
                f"max_step_tokens is {self.max_step_tokens} and max_running {self.max_running}: a step must hold a row "
                f"of each sequence and one of a prompt, so at least {self.max_running + 1}"
            )


def num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


def pages_to_start(sequence: Sequence, reserve_tokens: int) -> int:
    """Pages of the prompt and of the part of the answer that must find room."""
    answer = max(min(sequence.max_tokens, reserve_tokens), sequence.num_generated)
    return num_pages(sequence.num_prompt + answer)


def order_key(
    sequence: Sequence, remaining: int, now: float, config: SchedulerConfig, rows_s: float = 0.0
) -> tuple[int, bool, float]:
    """Least goes first: priority, then a deadline that is near, then fewest rows left, less what waiting has earned.

    Args:
        rows_s: Rows that a second computes, 0 if unknown; near means twice the time that the rows left need.
    """
    waited = max(now - sequence.submitted_s, 0.0)
    needed_s = 2 * remaining / rows_s if rows_s else 0.0
    is_near = sequence.deadline_s is not None and sequence.deadline_s - now <= needed_s
    return -sequence.request.priority, not is_near, remaining - waited * config.aging_tokens_s


def waits_for_another(sequence: Sequence, cached_tokens: int, running: Iterable[Sequence]) -> bool:
    """True if a page that this prompt lacks is being computed by a sequence that runs."""
    request = sequence.request
    for other in running:
        if other.status is not Status.PREFILL or other.request.salt != request.salt or not other.request.keep:
            continue
        shared = common_length(sequence.prompt_keys, other.prompt_keys) // PAGE_TOKENS * PAGE_TOKENS
        if shared > max(cached_tokens, other.num_done):
            return True
    return False


def chunk_rows(start: int, stop: int, budget: int, window: int) -> int:
    """Rows of a prompt's next chunk: all that are left if they fit, else up to a page's edge.

    What runs is the same for any cut; this one saves work: chunks that end even leave no half of a pair, and a rest of
    a window or more lets the decoder run once for the prompt.

    Args:
        start: First row to run.
        stop: Where the prompt ends, or is to be cut.
        budget: Rows that the step still holds.

    Source: serving.md 1.2.

    >>> chunk_rows(0, 1000, 400, 128), chunk_rows(900, 1000, 400, 128), chunk_rows(0, 1000, 100, 128)
    (384, 100, 100)
    >>> chunk_rows(0, 400, 390, 128)
    256
    """
    if stop - start <= budget:
        return stop - start
    edge = (start + budget) // PAGE_TOKENS * PAGE_TOKENS
    if edge <= start:
        # no edge within reach: any even end but for a single row
        return max(budget - (start + budget) % 2, min(budget, 1))
    if stop - edge < window and edge - PAGE_TOKENS > start:
        edge -= PAGE_TOKENS
    return edge - start


def by_order(prompts: Iterable[Sequence], now: float, config: SchedulerConfig, rows_s: float) -> list[Sequence]:
    """Whose chunk comes first."""
    return sorted(prompts, key=lambda s: order_key(s, s.remaining, now, config, rows_s))


def victim(running: Several[Sequence], spare: Sequence) -> Sequence | None:
    """Who is set aside so that `spare` can go on: the lowest priority, then the latest to start.

    None if `spare` itself would be next: it must wait for the others.
    """
    candidates = [sequence for sequence in running if sequence.lease is not None and sequence.state is not None]
    if not candidates:
        return None
    chosen = min(candidates, key=lambda s: (s.request.priority, -s.admitted_s))
    return None if chosen is spare else chosen


class PrefillShare:
    """Rows of prompts that a step may hold beside rows that decode: fewer while tokens come too slowly.

    Halves when the slowest of 20 steps took longer than the target, grows by a quarter while they are well below.
    """

    def __init__(self, target_s: float | None, most: int) -> None:
        self.rows = most
        self._target_s, self._most = target_s, most
        self._took: deque[float] = deque(maxlen=20)

    def note(self, seconds: float) -> None:
        """A stream waited so long for its next token."""
        if self._target_s is None:
            return
        self._took.append(seconds)
        if len(self._took) < 20:
            return
        # of twenty, the one that nineteen do not pass
        slowest = sorted(self._took)[-2]
        if slowest > self._target_s:
            self.rows = max(self.rows // 2, min(_LEAST_SHARE, self._most))
        elif slowest < 0.8 * self._target_s:
            self.rows = min(self.rows * 5 // 4 + 1, self._most)
        else:
            return
        self._took.clear()
