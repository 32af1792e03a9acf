"""Load on an OpenAI-compatible server, measured from outside: closed loop (N at once) or open loop (N a second).

Uses nothing of cedar's own server, so that it compares cedar with others.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cedar.errors import CedarError

_WORDS = (
    "river forest fox key room city paper winter garden letter window morning stone bridge music market teacher "
    "island engine mirror candle shadow harbour table orange silver thunder village carpet ladder"
).split()
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to send.

    Attributes:
        rate: Requests a second on average, at random times; None keeps `concurrency` requests open instead.
    """

    url: str
    model: str | None = None
    num_requests: int = 32
    concurrency: int = 4
    rate: float | None = None
    prompt_words: int = 100
    max_tokens: int = 64
    api_key: str = "none"
    seed: int = 0


@dataclass(slots=True)
class Timing:
    """One answer: when it was due, when its tokens came (seconds), or why it failed."""

    due_s: float
    token_s: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""


@dataclass(slots=True)
class Report:
    """All answers, and how long it took."""

    plan: Plan
    model: str
    timings: list[Timing]
    wall_s: float

    def ttft_s(self) -> list[float]:
        """Time to the first token; in the open loop from when the request was due, so that a late start counts."""
        return [timing.token_s[0] - timing.due_s for timing in self.timings if timing.token_s]

    def tpot_s(self) -> list[float]:
        """Time a token after the first, one mean an answer."""
        return [
            (timing.token_s[-1] - timing.token_s[0]) / (timing.tokens - 1)
            for timing in self.timings
            if timing.tokens > 1 and timing.token_s
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything that is printed, as plain numbers."""
        tokens = sum(timing.tokens for timing in self.timings)
        plan = {name: value for name, value in asdict(self.plan).items() if name not in ("api_key", "model")}
        return {
            "plan": plan,
            "model": self.model,
            "wall_s": round(self.wall_s, 3),
            "failed": sum(bool(timing.error) for timing in self.timings),
            "errors": sorted({timing.error for timing in self.timings if timing.error}),
            "requests_per_s": round(len(self.timings) / self.wall_s, 3),
            "prompt_tokens": sum(timing.prompt_tokens for timing in self.timings),
            "completion_tokens": tokens,
            "completion_tokens_per_s": round(tokens / self.wall_s, 2),
            "ttft_ms": _spread(self.ttft_s()),
            "tpot_ms": _spread(self.tpot_s()),
        }

    def as_text(self) -> str:
        """A table."""
        values = self.as_dict()
        loop = f"{self.plan.concurrency} at once" if self.plan.rate is None else f"{self.plan.rate:g} a second"
        lines = [
            f"{len(self.timings)} requests, {loop}, to {self.model} at {self.plan.url}",
            f"{values['wall_s']:.1f} s, {values['requests_per_s']:.2f} requests/s, "
            f"{values['completion_tokens_per_s']:.1f} tokens/s, {values['failed']} failed",
            f"{'ms':<10}{'mean':>10}" + "".join(f"{f'p{p}':>10}" for p in _PERCENTILES),
        ]
        for title, name in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
            lines.append(f"{title:<10}" + "".join(f"{value:>10.1f}" for value in values[name].values()))
        return "\n".join([*lines, *(f"error: {error}" for error in values["errors"])])


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    mean = {"mean": round(1000 * sum(ordered) / len(ordered), 3)}
    return mean | {f"p{p}": round(1000 * percentile(ordered, p), 3) for p in _PERCENTILES}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """By linear interpolation between neighbours, as numpy's default.

    >>> percentile([1.0, 2.0, 3.0], 75)
    2.5
    """
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


async def measure(plan: Plan) -> Report:
    """Send what the plan says.

    Raises:
        CedarError: The server cannot be reached, or lists no model.
    """
    model = plan.model or await _first_model(plan)
    rng = random.Random(plan.seed)
    prompts = [" ".join(rng.choices(_WORDS, k=plan.prompt_words)) for _ in range(plan.num_requests)]
    began = time.monotonic()
    timings: list[Timing] = []
    if plan.rate is None:
        waiting = iter(prompts)

        async def worker() -> None:
            for prompt in waiting:
                timings.append(await _ask(plan, model, prompt, time.monotonic()))

        await asyncio.gather(*(worker() for _ in range(min(plan.concurrency, plan.num_requests))))
    else:
        due_s, tasks = began, []
        for prompt in prompts:
            tasks.append(asyncio.create_task(_ask_at(plan, model, prompt, due_s)))
            due_s += rng.expovariate(plan.rate)
        timings += await asyncio.gather(*tasks)
    return Report(plan, model, timings, time.monotonic() - began)


async def _ask_at(plan: Plan, model: str, prompt: str, due_s: float) -> Timing:
    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    return await _ask(plan, model, prompt, due_s)


async def _ask(plan: Plan, model: str, prompt: str, due_s: float) -> Timing:
    timing = Timing(due_s)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": plan.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async for event in _events(plan, "POST", "/v1/chat/completions", body):
            _take(timing, event)
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        timing.error = f"{type(error).__name__}: {error}"[:200]
    return timing


def _take(timing: Timing, event: dict[str, Any]) -> None:
    if "error" in event:
        timing.error = str(event["error"])[:200]
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
            timing.token_s.append(time.monotonic())
    usage = event.get("usage")
    if usage:
        timing.tokens, timing.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


async def _first_model(plan: Plan) -> str:
    try:
        (listed,) = [event async for event in _events(plan, "GET", "/v1/models", None)]
        return str(listed["data"][0]["id"])
    except (OSError, ValueError, LookupError, asyncio.IncompleteReadError) as error:
        raise CedarError(f"cannot read the models of {plan.url}: {error}; is a server there?") from None


async def _events(plan: Plan, method: str, path: str, body: dict[str, Any] | None) -> Any:
    """JSON objects of one answer: the only one, or those of its events as they come. Plain HTTP/1.1."""
    parts = urlsplit(plan.url)
    is_secure = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or (443 if is_secure else 80), ssl=is_secure or None, limit=2**24
    )
    try:
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {parts.path}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {plan.api_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + content)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        headers = {}
        while (line := (await reader.readline()).strip()) != b"":
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        if status != 200 or b"event-stream" not in headers.get(b"content-type", b""):
            text = b"".join([piece async for piece in _pieces(reader, headers)])
            if status != 200:
                raise ValueError(f"status {status}: {text[:150].decode(errors='replace')}")
            yield json.loads(text)
            return
        rest = b""
        async for piece in _pieces(reader, headers):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[6:])
    finally:
        writer.close()


async def _pieces(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> Any:
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readline()
    else:
        while piece := await reader.read(2**16):
            yield piece


def draw(report: Report, file: Path) -> None:
    """Both distributions as curves: what share of the answers was at least this fast."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, (title, seconds) in zip(
        figure.subplots(1, 2),
        (("time to first token", report.ttft_s()), ("time a token", report.tpot_s())),
        strict=True,
    ):
        ordered = [1000 * value for value in sorted(seconds)]
        axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post")
        axes.set(title=title, xlabel="ms", ylabel="share of answers", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
