"""What `GET /metrics` tells Prometheus. Names: serving.md 6.7, those that have a meaning so far."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cedar.engine.request import Finished

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class ServerMetrics:
    """Counters of one server; all changes happen in the event loop.

    Args:
        gauges: Gives how many sequences run and how many requests wait.
    """

    def __init__(self, gauges: Callable[[], tuple[int, int]]) -> None:
        self._registry = registry = CollectorRegistry()
        self._queue = Histogram("request_queue_seconds", "Wait for the engine", registry=registry, buckets=_SECONDS)
        self._ttft = Histogram("ttft_seconds", "Request to first token", registry=registry, buckets=_SECONDS)
        self._tpot = Histogram(
            "tpot_seconds", "Time a token after the first", registry=registry, buckets=_TOKEN_SECONDS
        )
        self._prefill = Counter(
            "prefill_tokens", "Prompt rows that ran, by half of the model", ("kind",), registry=registry
        )
        self._generated = Counter("completion_tokens", "Tokens generated", registry=registry)
        self._cached = Counter("cached_tokens", "Prompt tokens that a cache held", ("tier",), registry=registry)
        self._resume = Counter("resume", "Answers by how their prompt started", ("grade",), registry=registry)
        self._parse_fail = Counter("tool_parse_fail", "Calls that could not be read", registry=registry)
        self._cancel = Counter("cancel", "Requests let go, by what they were in", ("phase",), registry=registry)
        self._requests = Counter("http_requests", "HTTP answers", ("route", "status"), registry=registry)
        Gauge("requests_running", "Sequences at work", registry=registry).set_function(lambda: gauges()[0])
        Gauge("requests_waiting", "Requests in the queue", registry=registry).set_function(lambda: gauges()[1])

    def first_token(self, seconds: float) -> None:
        """The first token of a request came."""
        self._ttft.observe(seconds)

    def end(self, end: Finished, window: int) -> None:
        """An answer ended."""
        if end.reason == "cancelled":
            self._cancel.labels("decode" if end.completion_tokens else "queue or prefill").inc()
        self._queue.observe(end.queue_s)
        if end.completion_tokens > 1:
            self._tpot.observe(end.decode_s / (end.completion_tokens - 1))
        if end.completion_tokens:
            self._prefill.labels("encoder").inc(end.prompt_tokens - end.cached_tokens)
            self._prefill.labels("decoder_tail").inc(min(window, end.prompt_tokens))
        self._generated.inc(end.completion_tokens)
        self._resume.labels(end.resume).inc()
        if end.cached_tokens:
            self._cached.labels(end.cache_tier).inc(end.cached_tokens)

    def parse_failed(self) -> None:
        """A call's arguments were no JSON object."""
        self._parse_fail.inc()

    def answered(self, route: str, status: int) -> None:
        """An HTTP answer has gone out."""
        self._requests.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)
