"""What the engine has done so far, as plain numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from cedar.engine.request import Finished


@dataclass(slots=True)
class Metrics:
    """Counters since the start, and two gauges; written by the engine's thread alone.

    Attributes:
        finished: Requests by finish reason.
        waiting: Requests in the queue now.
        running: Sequences that hold a state now.
    """

    submitted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    waiting: int = 0
    running: int = 0

    def count(self, end: Finished, *, prefilled: int) -> None:
        """Add a request that ended after `prefilled` prompt tokens."""
        self.finished[end.reason] = self.finished.get(end.reason, 0) + 1
        self.prompt_tokens += prefilled
        self.completion_tokens += end.completion_tokens
        self.queue_s += end.queue_s
        self.prefill_s += end.prefill_s
        self.decode_s += end.decode_s

    def snapshot(self) -> dict[str, object]:
        """A copy that a server may send."""
        return asdict(self)
