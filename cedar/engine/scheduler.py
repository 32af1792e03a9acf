"""Who runs next: order in the queue, admission, chunks of prompts, and who is set aside when memory is short.

Pure decisions over sequences and page counts; the engine carries them out.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from cedar.cache.keys import common_length
from cedar.config.model import PAGE_TOKENS
from cedar.engine.request import Sequence, Status


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one engine.

    Attributes:
        max_running: Sequences that hold a state at once.
        prefill_chunk: Prompt tokens per step.
        reserve_tokens: Answer tokens that a request must find room for before it starts; more are taken as it grows.
        aging_tokens_s: Rows of computation that a second of waiting makes up for, so that nobody starves.
    """

    max_running: int = 16
    prefill_chunk: int = 256
    reserve_tokens: int = 4096
    aging_tokens_s: float = 200.0


def num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


def pages_to_start(sequence: Sequence, reserve_tokens: int) -> int:
    """Pages of the prompt and of the part of the answer that must find room."""
    answer = min(sequence.max_tokens, reserve_tokens)
    return num_pages(len(sequence.request.prompt_ids) + answer)


def order_key(sequence: Sequence, remaining: int, now: float, config: SchedulerConfig) -> tuple[int, float]:
    """Least goes first: priority, then fewest rows left to compute, less what waiting has earned."""
    waited = max(now - sequence.submitted_s, 0.0)
    return -sequence.request.priority, remaining - waited * config.aging_tokens_s


def waits_for_another(sequence: Sequence, cached_tokens: int, running: Iterable[Sequence]) -> bool:
    """True if a page that this prompt lacks is being computed by a sequence that runs."""
    request = sequence.request
    for other in running:
        if other.status is not Status.PREFILL or other.request.salt != request.salt or not other.request.keep:
            continue
        shared = common_length(request.prompt_ids, other.request.prompt_ids) // PAGE_TOKENS * PAGE_TOKENS
        if shared > max(cached_tokens, other.num_prefilled):
            return True
    return False


def next_prefill(running: Several[Sequence], now: float, config: SchedulerConfig) -> Sequence | None:
    """The prompt whose chunk runs next."""
    prompts = [sequence for sequence in running if sequence.status is Status.PREFILL]
    return min(
        prompts,
        key=lambda s: order_key(s, len(s.request.prompt_ids) - s.num_prefilled, now, config),
        default=None,
    )


def victim(running: Several[Sequence], spare: Sequence) -> Sequence | None:
    """Who is set aside so that `spare` can go on: the lowest priority, then the latest to start.

    None if `spare` itself would be next: it must wait for the others.
    """
    candidates = [sequence for sequence in running if sequence.lease is not None and sequence.state is not None]
    if not candidates:
        return None
    chosen = min(candidates, key=lambda s: (s.request.priority, -s.admitted_s))
    return None if chosen is spare else chosen
