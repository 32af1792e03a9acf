"""What the engine has done so far, as plain numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from cedar.engine.request import Finished


@dataclass(slots=True)
class Metrics:
    """Counters since the start, and two gauges; written by the engine's thread alone.

    Attributes:
        finished: Requests by finish reason.
        cancelled: Those among them that were cancelled, by the phase they were in.
        preempted: Times that a sequence was set aside for want of pages.
        cached_tokens: Prompt tokens found in a cache, by tier.
        resumes: Requests by the way their prompt started.
        rows: Rows that ran: of prompts, of tokens that were known already, of generated tokens, of drafts.
        steps: Passes of the model.
        step_s: Seconds that they took.
        drafted_tokens: Drafts that were verified.
        accepted_tokens: Drafts that became part of an answer.
        draft_steps: Steps of a sequence that verified drafts.
        draft_s: Seconds that drafting took.
        waiting: Requests in the queue now.
        running: Sequences that hold a state now.
    """

    submitted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    cancelled: dict[str, int] = field(default_factory=dict)
    preempted: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)
    resumes: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    step_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_steps: int = 0
    draft_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    waiting: int = 0
    running: int = 0

    def count(self, end: Finished, *, prefilled: int) -> None:
        """Add a request that ended after `prefilled` prompt tokens."""
        self.finished[end.reason] = self.finished.get(end.reason, 0) + 1
        self.resumes[end.resume] = self.resumes.get(end.resume, 0) + 1
        if end.cached_tokens:
            self.cached_tokens[end.cache_tier] = self.cached_tokens.get(end.cache_tier, 0) + end.cached_tokens
        self.prompt_tokens += prefilled
        self.completion_tokens += end.completion_tokens
        self.drafted_tokens += end.drafted_tokens
        self.accepted_tokens += end.accepted_tokens
        self.draft_steps += end.draft_steps
        self.queue_s += end.queue_s
        self.prefill_s += end.prefill_s
        self.decode_s += end.decode_s

    def snapshot(self) -> dict[str, object]:
        """A copy that a server may send."""
        return asdict(self)
