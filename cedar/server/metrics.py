"""What `GET /metrics` tells Prometheus. Names: serving.md 6.7.

Most are counted in the event loop as answers end; what the engine and the cache count themselves is read when
somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cedar.engine.metrics import Metrics
from cedar.engine.request import Finished

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_WIDTHS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6)
# why a page on disk could not be used; other failures of the tier are of writing, or of its index
_READ_FAILURES = ("checksum", "format", "io")


class ServerMetrics:
    """Counters of one server; all changes happen in the event loop.

    Args:
        engine: Gives the engine, None before there is one.
    """

    def __init__(self, engine: Callable[[], Any]) -> None:
        self._registry = registry = CollectorRegistry()
        self._queue = Histogram("request_queue_seconds", "Wait for the engine", registry=registry, buckets=_SECONDS)
        self._ttft = Histogram(
            "ttft_seconds", "Request to first token, by whether a cache held some of the prompt", ("hit",),
            registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self._tpot = Histogram(
            "tpot_seconds", "Time a token after the first", registry=registry, buckets=_TOKEN_SECONDS
        )
        self._prefill = Counter(
            "prefill_tokens",
            "Prompt rows that ran: new ones in the encoder half, those of the decoder half, cached ones run again",
            ("kind",),
            registry=registry,
        )
        self._generated = Counter("completion_tokens", "Tokens generated", registry=registry)
        self._cached = Counter("cached_tokens", "Prompt tokens that a cache held", ("tier",), registry=registry)
        self._resume = Counter("resume", "Answers by how their prompt started", ("grade",), registry=registry)
        self._parse_fail = Counter("tool_parse_fail", "Calls that could not be read", registry=registry)
        self._accept_length = Histogram(
            "spec_accept_length", "Tokens a step with drafts, one mean an answer", registry=registry, buckets=_WIDTHS
        )
        self._verify_width = Histogram(
            "spec_verify_width", "Drafts verified a step, one mean an answer", registry=registry, buckets=_WIDTHS
        )
        self._cancel = Counter("cancel", "Requests let go, by what they were in", ("phase",), registry=registry)
        self._requests = Counter("http_requests", "HTTP answers", ("route", "status"), registry=registry)
        self._lag = Histogram(
            "event_loop_lag_seconds", "How late the event loop comes", registry=registry, buckets=_LAG_SECONDS
        )
        self._collector = _Engine(engine)
        registry.register(self._collector)

    def end(self, end: Finished, window: int, *, ttft_s: float | None = None) -> None:
        """An answer ended.

        Args:
            window: Rows that the decoder half runs of a prompt.
            ttft_s: Seconds from the request to its first token; None if there was none, or another answer of the
                same request had the first.
        """
        if end.reason == "cancelled":
            self._cancel.labels("decode" if end.completion_tokens else "queue or prefill").inc()
        self._queue.observe(end.queue_s)
        if ttft_s is not None:
            self._ttft.labels("yes" if end.cached_tokens else "no").observe(ttft_s)
        if end.completion_tokens > 1:
            self._tpot.observe(end.decode_s / (end.completion_tokens - 1))
        if end.completion_tokens:
            self._prefill.labels("encoder").inc(end.prompt_tokens - end.cached_tokens)
            self._prefill.labels("decoder_tail").inc(min(window, end.prompt_tokens))
            self._prefill.labels("replay").inc(end.replayed_tokens)
        if end.draft_steps:
            self._accept_length.observe(1 + end.accepted_tokens / end.draft_steps)
            self._verify_width.observe(end.drafted_tokens / end.draft_steps)
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

    def lagged(self, seconds: float) -> None:
        """The event loop came this late to something that was due."""
        self._lag.observe(seconds)

    def text(self, cache: Mapping[str, Any] | None = None) -> bytes:
        """All of it, in Prometheus' text format.

        Args:
            cache: What the cache says of itself now; None shows what it said last.
        """
        if cache is not None:
            self._collector.cache = cache
        return generate_latest(self._registry)


class _Engine:
    """What the engine and the cache count, read when somebody asks."""

    def __init__(self, engine: Callable[[], Any]) -> None:
        self.cache: Mapping[str, Any] = {}
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before there is an engine."""
        return ()

    def collect(self) -> Iterable[Metric]:
        engine = self._engine()
        if engine is not None:
            yield from self._counted(engine.metrics)
            yield from self._tables(engine.memory_stats())
        if not self.cache:
            return
        pages = GaugeMetricFamily("pages", "Pages of the cache now", labels=("tier", "state"))
        for (tier, state), count in count_pages(self.cache).items():
            pages.add_metric((tier, state), count)
        yield pages
        failed = CounterMetricFamily("cache_read_fail", "Pages on disk that could not be used", labels=("reason",))
        counts = self.cache["disk"].get("failed", {})
        for reason in _READ_FAILURES:
            failed.add_metric((reason,), counts.get(reason, 0))
        yield failed

    def _counted(self, metrics: Metrics) -> Iterable[Metric]:
        yield GaugeMetricFamily("requests_running", "Sequences at work", value=metrics.running)
        yield GaugeMetricFamily("requests_waiting", "Requests in the queue", value=metrics.waiting)
        yield CounterMetricFamily("preempt", "Sequences set aside for want of pages", value=metrics.preempted)
        yield CounterMetricFamily("spec_drafted_tokens", "Drafts that were verified", value=metrics.drafted_tokens)
        yield CounterMetricFamily("spec_accepted_tokens", "Drafts that stood", value=metrics.accepted_tokens)

    def _tables(self, stats: Mapping[str, float]) -> Iterable[Metric]:
        rows = CounterMetricFamily("engram_rows", "Rows of Engram tables on disk that steps used", labels=("src",))
        rows.add_metric(("memory",), stats["cached_rows"])
        rows.add_metric(("disk",), stats["read_rows"])
        yield rows
        yield CounterMetricFamily("engram_stall_seconds", "How long layers waited for them", value=stats["stall_s"])


def count_pages(cache: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """Pages by tier and state: `prefix` can serve later prompts, `running` belongs to an answer alone."""
    used = cache["pages"] - cache["free_pages"]
    counts = {
        ("memory", "free"): cache["free_pages"],
        ("memory", "prefix"): cache["tree_pages"],
        ("memory", "running"): max(0, used - cache["tree_pages"]),
    }
    if cache.get("host_pages"):
        counts["host", "prefix"] = cache["host_pages"]
    if "pages" in cache["disk"]:
        counts["disk", "prefix"] = cache["disk"]["pages"]
    return counts
