"""Agent traces against the engine: what each cache tier saves. Run `python -m benchmarks.serve`.

A trace is generated: sessions that share a system prompt, many turns, short additions, and a branch that goes back
some turns; one session runs after another. Each setting plays the same trace on a fresh engine. With `restart`
the engine is closed and opened again in the middle.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cedar.cache.manager import CacheManager
from cedar.cache.store import PageStore
from cedar.config.presets import preset
from cedar.engine.engine import Engine
from cedar.engine.load import load_model, open_model
from cedar.engine.request import Finished, Request, SamplingParams, Token
from cedar.model.init import initialise
from cedar.model.sequence import Snapshot
from cedar.model.transformer import Transformer
from cedar.planner.kv import page_bytes


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is on."""

    name: str
    cache: bool = True
    snapshots: bool = True
    disk: bool = True
    replay: str = "bounded"
    restart: bool = False
    pages: int = 512


SETTINGS = (
    Setting(name="no cache", cache=False),
    Setting(name="memory", disk=False, snapshots=False),
    Setting(name="memory, snapshots", disk=False),
    Setting(name="memory, snapshots, disk"),
    Setting(name="small memory, no disk", disk=False, pages=48),
    Setting(name="small memory, disk", pages=48),
    Setting(name="no snapshots, replay exact", snapshots=False, replay="exact"),
    Setting(name="restart, disk", restart=True),
    Setting(name="restart, disk, no snapshots", restart=True, snapshots=False),
    Setting(name="restart, no disk", restart=True, disk=False),
)


@dataclass
class Row:
    """What one setting gave."""

    first_token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    run_tokens: int = 0
    answered: int = 0
    seconds: float = 0.0
    resumes: dict[str, int] = field(default_factory=dict)
    disk_tokens: int = 0


def trace(sessions: int, turns: int, system_tokens: int, vocab: int, seed: int) -> list[list[tuple[int, list[int]]]]:
    """Per turn, for each session: (how many earlier turns to drop first, the tokens that the client adds)."""
    draw = random.Random(seed)
    system = [draw.randrange(vocab) for _ in range(system_tokens)]
    rounds = []
    for turn in range(turns):
        additions = []
        for _ in range(sessions):
            tokens = [draw.randrange(vocab) for _ in range(draw.randrange(20, 120))]
            back = 2 if turn > 3 and draw.random() < 0.1 else 0
            additions.append((back, system + tokens if turn == 0 else tokens))
        rounds.append(additions)
    return rounds


def play(model: Transformer, setting: Setting, rounds: list[list[tuple[int, list[int]]]]) -> Row:
    row = Row()
    with tempfile.TemporaryDirectory() as directory:
        engine = open_engine(model, setting, Path(directory))
        histories: list[list[list[int]]] = [[] for _ in rounds[0]]
        began = time.monotonic()
        for turn, additions in enumerate(rounds):
            if setting.restart and turn == len(rounds) // 2:
                note(row, engine)
                engine.close()
                engine = open_engine(model, setting, Path(directory))
            for history, (back, tokens) in zip(histories, additions, strict=True):
                if back:
                    del history[-2 * back :]
                history.append(tokens)
                prompt = tuple(token for part in history for token in part)
                asked = time.monotonic()
                sampling = SamplingParams(temperature=0, max_tokens=16)
                said = []
                for event in engine.submit(Request(prompt_ids=prompt, sampling=sampling, replay=setting.replay)):  # type: ignore[arg-type]
                    if isinstance(event, Token):
                        if not said:
                            row.first_token_s.append(time.monotonic() - asked)
                        said.append(event.id)
                    if isinstance(event, Finished):
                        row.cached_tokens += event.cached_tokens
                        row.answered += event.completion_tokens
                row.prompt_tokens += len(prompt)
                history.append(said)
        row.seconds = time.monotonic() - began
        note(row, engine)
        engine.close()
    return row


def note(row: Row, engine: Engine) -> None:
    """Add an engine's own counters."""
    row.run_tokens += engine.metrics.prompt_tokens
    row.disk_tokens += engine.metrics.cached_tokens.get("disk", 0)
    for grade, count in engine.metrics.resumes.items():
        row.resumes[grade] = row.resumes.get(grade, 0) + count


def open_engine(model: Transformer, setting: Setting, directory: Path) -> Engine:
    if not setting.cache:
        return Engine(model)
    size = page_bytes(model.config)
    store = None
    if setting.disk:
        store = PageStore(directory, fingerprint=b"benchmark", payload_bytes=size, budget_bytes=2**30)
    cache = CacheManager(
        model.config,
        num_pages=setting.pages,
        dtype=model.dtype,
        device=model.device,
        snapshot_bytes=2**26 if setting.snapshots else 0,
        fingerprint=b"benchmark",
        store=store,
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
        disk = Setting(name="disk, snapshots", pages=pages)
        plain = Setting(name="disk, no snapshots", pages=pages, snapshots=False)
        cold = first_token(disk, Path(name), prompt)
        for setting in (plain, disk):
            print(f"  cold / resumed: {cold / first_token(setting, Path(name), prompt + turn):.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano", help="A preset with random weights, or a model directory.")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--system", type=int, default=1500, metavar="TOKENS")
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
    rounds = trace(options.sessions, options.turns, options.system, model.config.vocab_size - 16, 1)
    print("| setting | first token, median ms | p95 ms | tokens/s | cached | of it disk | rows run | resumes |")
    print("|---|--:|--:|--:|--:|--:|--:|---|")
    for setting in SETTINGS:
        row = play(model, setting, rounds)
        first = sorted(row.first_token_s)
        grades = " ".join(f"{grade}:{count}" for grade, count in sorted(row.resumes.items()))
        print(
            f"| {setting.name} | {1000 * statistics.median(first):.0f} | {1000 * first[int(0.95 * len(first))]:.0f} "
            f"| {row.answered / row.seconds:.1f} | {row.cached_tokens / row.prompt_tokens:.0%} "
            f"| {row.disk_tokens / max(row.cached_tokens, 1):.0%} | {row.run_tokens} | {grades} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
