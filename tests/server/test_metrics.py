"""What a server tells of itself: metrics by name, the dashboard that shows them, logs, versions (about 5 s)."""

from __future__ import annotations

import io
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cedar.engine.metrics import Metrics
from cedar.engine.request import Finished, Token
from cedar.server.logs import JsonLines
from cedar.server.metrics import ServerMetrics

Running = Any
CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": "nonsense", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
# serving.md 6.7, but for what has no source without images
NAMES = {
    "request_queue_seconds": (),
    "ttft_seconds": ("hit",),
    "tpot_seconds": (),
    "prefill_tokens_total": ("kind",),
    "cached_tokens_total": ("tier",),
    "resume_total": ("grade",),
    "pages": ("tier", "state"),
    "cache_read_fail_total": ("reason",),
    "tool_parse_fail_total": (),
    "cancel_total": ("phase",),
    "preempt_total": (),
    "engram_rows_total": ("src",),
    "engram_stall_seconds_total": (),
    "spec_accept_length": (),
    "spec_verify_width": (),
}


def samples(text: str) -> list[Any]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(text: str, name: str, **labels: str) -> float:
    (found,) = [sample.value for sample in samples(text) if sample.name == name and sample.labels == labels]
    return float(found)


def ask(running: Running, text: str) -> None:
    turn = {"role": "user", "content": text}
    assert httpx.post(running.url + CHAT, json=GOOD | {"messages": [turn]}, timeout=60).status_code == 200


def test_every_name_is_there_with_its_labels(server: Running) -> None:
    text = "The metrics of the fox, the river and the bridge by the old mill. " * 6
    before = httpx.get(f"{server.url}/metrics").text
    for _ in range(2):
        ask(server, text)
    after = httpx.get(f"{server.url}/metrics").text
    help_lines = set(re.findall(r"^# TYPE (\S+)", after, re.M))
    for name, labels in NAMES.items():
        assert name in help_lines, name
        found = [sample for sample in samples(after) if sample.name in (name, f"{name}_count")]
        # a counter with labels has no sample before its first event
        assert all(tuple(sorted(sample.labels)) == tuple(sorted(labels)) for sample in found), name
    assert value(after, "ttft_seconds_count", hit="yes") > 0 and value(after, "ttft_seconds_count", hit="no") > 0
    states = {(s.labels["tier"], s.labels["state"]) for s in samples(after) if s.name == "pages"}
    assert states == {("memory", "free"), ("memory", "prefix"), ("memory", "running")}
    assert value(after, "pages", tier="memory", state="prefix") > 0
    kinds = {s.labels["kind"] for s in samples(after) if s.name == "prefill_tokens_total"}
    assert kinds == {"encoder", "decoder_tail", "replay"}

    def cached(page: str) -> float:
        return sum(s.value for s in samples(page) if s.name == "cached_tokens_total")

    assert cached(after) > cached(before)


def test_rows_that_run_again_are_counted_apart() -> None:
    metrics = ServerMetrics(lambda: None)
    metrics.end(
        Finished(reason="stop", prompt_tokens=300, completion_tokens=2, cached_tokens=256, run_tokens=60, resume="g2",
                 cache_tier="memory"),
        window=16, ttft_s=0.2,
    )  # fmt: skip
    text = metrics.text().decode()
    assert value(text, "prefill_tokens_total", kind="encoder") == 44
    assert value(text, "prefill_tokens_total", kind="replay") == 16
    assert value(text, "prefill_tokens_total", kind="decoder_tail") == 16
    assert value(text, "cached_tokens_total", tier="memory") == 256 and value(text, "resume_total", grade="g2") == 1
    assert value(text, "ttft_seconds_count", hit="yes") == 1


def test_drafts_are_measured_an_answer() -> None:
    metrics = ServerMetrics(lambda: None)
    counts = {"drafted_tokens": 12, "accepted_tokens": 6, "draft_steps": 4}
    metrics.end(Finished(reason="stop", prompt_tokens=3, completion_tokens=10, **counts), window=16)
    metrics.end(Finished(reason="stop", prompt_tokens=3, completion_tokens=10), window=16)
    text = metrics.text().decode()
    assert (value(text, "spec_accept_length_sum"), value(text, "spec_accept_length_count")) == (2.5, 1)
    assert value(text, "spec_verify_width_sum") == 3


def test_pages_and_failures_of_the_disk_tier() -> None:
    engine = SimpleNamespace(
        metrics=Metrics(running=1, waiting=2, preempted=3, drafted_tokens=9, accepted_tokens=6),
        memory_stats=lambda: {"cached_rows": 30, "read_rows": 4, "stall_s": 0.5},
    )
    metrics = ServerMetrics(lambda: engine)
    cache = {"pages": 9, "free_pages": 2, "tree_pages": 4, "disk": {"pages": 7, "failed": {"checksum": 5, "write": 1}}}
    for shown in (cache, None):
        # what was said last is shown while the engine is busy
        text = metrics.text(shown).decode()
        assert value(text, "pages", tier="memory", state="running") == 3
        assert value(text, "pages", tier="disk", state="prefix") == 7
        assert value(text, "cache_read_fail_total", reason="checksum") == 5
        assert value(text, "cache_read_fail_total", reason="io") == 0
        assert (
            value(text, "engram_rows_total", src="disk") == 4 and value(text, "engram_rows_total", src="memory") == 30
        )
        assert value(text, "engram_stall_seconds_total") == 0.5 and value(text, "spec_accepted_tokens_total") == 6
        assert value(text, "preempt_total") == 3 and value(text, "requests_waiting") == 2


def test_the_dashboard_asks_for_what_is_there(server: Running) -> None:
    ask(server, "Hi")
    there = httpx.get(f"{server.url}/metrics").text
    labels_of: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(there):
        names = {family.name, f"{family.name}_total", *(f"{family.name}_{end}" for end in ("bucket", "count", "sum"))}
        for name in names:
            labels_of.setdefault(name, set()).update(*(sample.labels for sample in family.samples), {"le"})
    dashboard = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    asked: set[str] = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            names = set(re.findall(r"[a-z_]+(?=\[|\{|$|\))", re.sub(r"by \([^)]*\)", "", expression)))
            assert names and names <= set(labels_of), (panel["title"], expression)
            for labels in re.findall(r"by \(([a-z_, ]+)\)", expression):
                for label in labels.split(","):
                    known = set().union(*(labels_of[name] for name in names))
                    # counters of rare events have no sample yet
                    assert label.strip() in known | {"phase", "reason"}, (panel["title"], label)
            asked |= names
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    assert set(NAMES) <= shown, set(NAMES) - shown


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What is logged as JSON while a test runs."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("cedar")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(level)


def until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 5
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    return found()


def test_a_line_a_request(server: Running, lines: Callable[[], list[dict[str, Any]]]) -> None:
    response = httpx.post(server.url + CHAT, json=GOOD)
    request_id = response.headers["x-request-id"]
    (line,) = until(lambda: [line for line in lines() if line.get("request_id") == request_id])
    assert (line["method"], line["path"], line["status"], line["level"]) == ("POST", CHAT, 200, "INFO")
    usage = response.json()["usage"]
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert 0 < line["ttft_s"] <= line["seconds"] and line["resume"] in ("cold", "g0", "g1", "g2", "g3")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])


def test_a_bug_is_in_the_log_with_the_id_that_the_client_got(
    scripted: Callable[..., tuple[Running, Any]], lines: Callable[[], list[dict[str, Any]]], monkeypatch: Any
) -> None:
    running, engine = scripted([])
    monkeypatch.setattr(engine, "submit", lambda *_, **__: 1 / 0)
    response = httpx.post(running.url + CHAT, json=GOOD)
    assert response.status_code == 500 and "ZeroDivisionError" not in response.text
    request_id = response.headers["x-request-id"]
    assert request_id in response.json()["error"]["message"]
    (line,) = until(lambda: [line for line in lines() if "exception" in line])
    assert line["request_id"] == request_id and "ZeroDivisionError" in line["exception"]


def test_an_engine_that_says_nothing_is_in_the_log(
    scripted: Callable[..., tuple[Running, Any]], lines: Callable[[], list[dict[str, Any]]]
) -> None:
    # field report C33
    running, _ = scripted(
        [(0.5, Token(5)), (0, Finished(reason="stop", prompt_tokens=5, completion_tokens=1))], stall_s=0.2
    )
    request_id = httpx.post(running.url + CHAT, json=GOOD).headers["x-request-id"]
    warnings = [line for line in lines() if line["level"] == "WARNING"]
    assert warnings and warnings[0]["request_id"] == request_id and "no event" in warnings[0]["message"]
    # time and again, not for every request and every look
    assert len(warnings) <= 2


def test_versions_say_what_runs(server: Running, scripted: Callable[..., tuple[Running, Any]]) -> None:
    # field report G05
    told = httpx.get(f"{server.url}/version").json()
    assert set(told) == {"version", "commit", "kernels", "system_fingerprint"}
    assert told["commit"] is None or told["commit"] in told["version"]
    weights, _, numerics = told["system_fingerprint"].partition("-")
    assert re.fullmatch("[0-9a-f]{12}", weights) and re.fullmatch("(cpu|cuda)-(float32|bfloat16)", numerics)
    assert httpx.post(server.url + CHAT, json=GOOD).json()["system_fingerprint"] == told["system_fingerprint"]
    health = httpx.get(f"{server.url}/health").json()
    assert (health["version"], health["commit"]) == (told["version"], told["commit"])
