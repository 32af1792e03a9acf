"""Agent traces against the engine: what each tier of the cache saves. Run `python -m benchmarks.serve`.

A trace is generated: sessions that share a system prompt and run beside each other; many turns, short additions, a
pause after each for a tool; now and then a step back, or a side question from an earlier turn. Each setting plays the
same trace on a fresh engine: all tiers, each of them off, replay exact instead of bounded. With `restart` the engine is
closed after half of the turns and opened again, and the row is that of the second half alone.

Writes `benchmarks/results/serve.csv` and, with `--plot FILE`, a plot. Without obstore there is no shared tier to play.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from cedar.cache.manager import CacheManager
from cedar.cache.shared import SharedStore
from cedar.cache.store import PageStore
from cedar.config.presets import preset
from cedar.engine.engine import Engine
from cedar.engine.load import load_model, open_model
from cedar.engine.request import Finished, Replay, Request, SamplingParams, Token
from cedar.model.init import initialise
from cedar.model.sequence import Snapshot
from cedar.model.transformer import Transformer
from cedar.planner.kv import page_bytes

RESULTS = Path(__file__).parent / "results" / "serve.csv"
ANSWER_TOKENS = 16
TIERS = ("memory", "host", "disk", "shared")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is on.

    Attributes:
        restart: Close and open the engine after half of the turns.
        lost_disk: The restart is on another machine: what it finds is in the shared tier alone.
    """

    name: str
    cache: bool = True
    snapshots: bool = True
    disk: bool = True
    shared: bool = True
    replay: Replay = "bounded"
    restart: bool = False
    lost_disk: bool = False
    pages: int = 512


SETTINGS = (
    Setting(name="no cache", cache=False),
    Setting(name="all tiers"),
    Setting(name="no shared tier", shared=False),
    Setting(name="no disk", disk=False, shared=False),
    Setting(name="no snapshots", snapshots=False),
    Setting(name="no snapshots, replay exact", snapshots=False, replay="exact"),
    Setting(name="small memory, disk", pages=18, shared=False),
    Setting(name="small memory, no disk", pages=18, disk=False, shared=False),
    Setting(name="after a restart: no cache", cache=False, restart=True),
    Setting(name="after a restart: disk", restart=True, shared=False),
    Setting(name="after a restart: disk, no snapshots", restart=True, snapshots=False, shared=False),
    Setting(name="after a restart: the same, exact", restart=True, snapshots=False, shared=False, replay="exact"),
    Setting(name="after a restart: another machine", restart=True, lost_disk=True),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client sends: its history less some turns, and these tokens.

    Attributes:
        back: Earlier turns to drop first.
        stays: False for a side question: the conversation goes on as if it had not been.
        pause_s: How long its tool takes.
    """

    tokens: tuple[int, ...]
    back: int = 0
    stays: bool = True
    pause_s: float = 0.0


@dataclass
class Row:
    """What one setting gave."""

    first_token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    answered: int = 0
    seconds: float = 0.0
    run_tokens: int = 0
    replayed_tokens: int = 0
    cached: Counter[str] = field(default_factory=Counter)
    resumes: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def figures(self) -> dict[str, float | str]:
        """The numbers of the table."""
        first = sorted(self.first_token_s)
        hits = {tier: self.cached[tier] / max(self.prompt_tokens, 1) for tier in TIERS}
        return {
            "first_token_ms_median": 1000 * statistics.median(first),
            "first_token_ms_p95": 1000 * first[int(0.95 * len(first))],
            "tokens_per_s": self.answered / self.seconds,
            "hit_rate": sum(hits.values()),
            **{f"hit_{tier}": rate for tier, rate in hits.items()},
            "prompt_tokens": self.prompt_tokens,
            "rows_run": self.run_tokens,
            "rows_replayed": self.replayed_tokens,
            "resumes": " ".join(f"{grade}:{count}" for grade, count in sorted(self.resumes.items())),
        }


def trace(sessions: int, turns: int, system_tokens: int, vocab: int, seed: int) -> list[list[Turn]]:
    """The turns of each session."""
    draw = random.Random(seed)
    system = tuple(draw.randrange(vocab) for _ in range(system_tokens))
    plans = []
    for _ in range(sessions):
        plan = []
        for turn in range(turns):
            tokens = tuple(draw.randrange(vocab) for _ in range(draw.randrange(20, 120)))
            kind = draw.random() if turn > 2 else 1.0
            plan.append(
                Turn(
                    tokens=system + tokens if turn == 0 else tokens,
                    back=2 if kind < 0.3 else 0,
                    stays=not 0.15 < kind < 0.3,
                    pause_s=draw.expovariate(1 / 0.2),
                )
            )
        plans.append(plan)
    return plans


def play(model: Transformer, setting: Setting, plans: list[list[Turn]]) -> Row:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        histories: list[list[tuple[int, ...]]] = [[] for _ in plans]
        half = len(plans[0]) // 2
        spans = [slice(0, half), slice(half, None)] if setting.restart else [slice(0, None)]
        for number, span in enumerate(spans):
            engine = open_engine(model, setting, directory / ("other" if setting.lost_disk and number else "disk"))
            row = Row()
            began = time.monotonic()
            threads = [
                threading.Thread(target=converse, args=(engine, setting, plan[span], history, row))
                for plan, history in zip(plans, histories, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            row.seconds = time.monotonic() - began
            row.run_tokens = engine.metrics.prompt_tokens
            row.replayed_tokens = 0 if engine.cache is None else engine.cache.metrics.replayed_tokens
            engine.close()
    return row


def converse(engine: Engine, setting: Setting, plan: list[Turn], history: list[tuple[int, ...]], row: Row) -> None:
    """One session: asks, listens, waits for its tool."""
    for turn in plan:
        kept = history[: len(history) - 2 * turn.back]
        prompt = tuple(token for part in (*kept, turn.tokens) for token in part)
        sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
        asked, said, first = time.monotonic(), [], 0.0
        for event in engine.submit(Request(prompt_ids=prompt, sampling=sampling, replay=setting.replay)):
            if isinstance(event, Token):
                first = first or time.monotonic() - asked
                said.append(event.id)
            if isinstance(event, Finished):
                assert event.reason == "length", event
                with row.lock:
                    row.first_token_s.append(first)
                    row.prompt_tokens += len(prompt)
                    row.answered += event.completion_tokens
                    row.cached[event.cache_tier] += event.cached_tokens
                    row.resumes[event.resume] += 1
        if turn.stays:
            history[:] = [*kept, turn.tokens, tuple(said)]
        time.sleep(turn.pause_s)


def open_engine(model: Transformer, setting: Setting, directory: Path) -> Engine:
    if not setting.cache:
        return Engine(model)
    size = page_bytes(model.config)
    store = shared = None
    if setting.disk:
        store = PageStore(directory, fingerprint=b"benchmark", payload_bytes=size, budget_bytes=2**30)
    if setting.shared:
        folder = directory.parent / "shared"
        folder.mkdir(exist_ok=True)
        shared = SharedStore(folder.as_uri(), fingerprint=b"benchmark", payload_bytes=size)
    cache = CacheManager(
        model.config,
        num_pages=setting.pages,
        dtype=model.dtype,
        device=model.device,
        snapshot_bytes=2**26 if setting.snapshots else 0,
        fingerprint=b"benchmark",
        host_bytes=2**26 if setting.shared else 0,
        store=store,
        shared=shared,
        read_snapshot=Snapshot.from_bytes,
    )
    return Engine(model, cache=cache)


def time_restart(model: Transformer, num_tokens: int) -> None:
    """First token of a long conversation's next turn: cold, after a restart, and after one that kept snapshots."""
    draw = random.Random(2)
    prompt = tuple(draw.randrange(model.config.vocab_size - 16) for _ in range(num_tokens))
    turn = tuple(draw.randrange(model.config.vocab_size - 16) for _ in range(40))
    pages = num_tokens // 128 + 64

    def first_token(setting: Setting, directory: Path, ids: tuple[int, ...]) -> float:
        engine = open_engine(model, setting, directory)
        asked = time.monotonic()
        took = 0.0
        end = None
        for event in engine.submit(Request(prompt_ids=ids, sampling=SamplingParams(temperature=0, max_tokens=2))):
            if isinstance(event, Token) and not took:
                took = time.monotonic() - asked
            end = event
        assert isinstance(end, Finished)
        print(f"{setting.name}: first token after {took:.3f} s, {end.resume}, {end.cached_tokens} of {len(ids)} cached")
        engine.close()
        return took

    with tempfile.TemporaryDirectory() as name:
        disk = Setting(name="disk, snapshots", pages=pages, shared=False)
        plain = Setting(name="disk, no snapshots", pages=pages, snapshots=False, shared=False)
        cold = first_token(disk, Path(name), prompt)
        for setting in (plain, disk):
            print(f"  cold / resumed: {cold / first_token(setting, Path(name), prompt + turn):.0f}")


def plot(rows: dict[str, Row], file: Path) -> None:
    """Time to first token and share of the prompts by tier, a bar a setting."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    times, hits = figure.subplots(1, 2, sharey=True)
    names = list(rows)[::-1]
    figures = [rows[name].figures() for name in names]
    times.barh(names, [float(one["first_token_ms_median"]) for one in figures], color="#4477aa")
    times.plot([float(one["first_token_ms_p95"]) for one in figures], names, "|", color="black", label="95 in 100")
    times.set_xlabel("first token, median ms")
    times.legend()
    left = [0.0] * len(names)
    for tier, color in zip(TIERS, ("#228833", "#ccbb44", "#ee6677", "#aa3377"), strict=True):
        widths = [100 * float(one[f"hit_{tier}"]) for one in figures]
        hits.barh(names, widths, left=left, color=color, label=tier)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    hits.set_xlabel("prompt tokens found, %")
    hits.legend(loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=len(TIERS))
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano", help="A preset with random weights, or a model directory.")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--system", type=int, default=1500, metavar="TOKENS")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="Draw it too.")
    parser.add_argument("--restart", type=int, metavar="TOKENS", help="Only time a restart at so many tokens.")
    options = parser.parse_args()
    if Path(options.model).exists():
        model = load_model(open_model(options.model))
    else:
        model = Transformer(preset(options.model))
        with torch.no_grad():
            initialise(model, seed=0)
        model.token_map.set(list(range(model.config.vocab_size)))
    if options.restart:
        time_restart(model, options.restart)
        return
    plans = trace(options.sessions, options.turns, options.system, model.config.vocab_size - 16, 1)
    settings = SETTINGS
    if importlib.util.find_spec("obstore") is None:
        settings = tuple(replace(one, shared=False) for one in SETTINGS if not one.lost_disk)
    print("| setting | first token, median ms | p95 ms | tokens/s | found | by tier | rows run | replayed | resumes |")
    print("|---|--:|--:|--:|--:|---|--:|--:|---|")
    rows: dict[str, Row] = {}
    for setting in settings:
        rows[setting.name] = play(model, setting, plans)
        one = rows[setting.name].figures()
        tiers = ", ".join(f"{tier} {one[f'hit_{tier}']:.0%}" for tier in TIERS if one[f"hit_{tier}"])
        print(
            f"| {setting.name} | {one['first_token_ms_median']:.0f} | {one['first_token_ms_p95']:.0f} "
            f"| {one['tokens_per_s']:.1f} | {one['hit_rate']:.0%} | {tiers} | {one['rows_run']} "
            f"| {one['rows_replayed']} | {one['resumes']} |",
            flush=True,
        )
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        table = [{"setting": name, "model": options.model, **row.figures()} for name, row in rows.items()]
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
