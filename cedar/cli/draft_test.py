"""What drafting brings: the same greedy answers with the draft and without, in turns, in one process."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from cedar.chat.tokenizer import BOS
from cedar.config.serve import ServeConfig
from cedar.engine.engine import Engine
from cedar.engine.load import ModelFiles, start_engine
from cedar.engine.request import Drafting, Event, Finished, Request, SamplingParams, Token
from cedar.engine.speculate import Drafter, DraftRequest, Proposal
from cedar.errors import ConfigError

Mode = Literal["off", "all", "on", "auto"]
# `all` verifies every draft, whatever the confidence; `on` as many as pay; `auto` also leaves drafting out
MODES: tuple[Mode, ...] = ("off", "all", "on", "auto")
STORIES = (
    "Once upon a time there was a little",
    "The old man sat down by the fire and",
    "It was a cold morning in winter when",
    "The captain looked out over the sea.",
    "When the children came to the wood, they",
    "My father was a poor man who",
    "There was no light in the house, and",
    "The king had a daughter who",
    "At last the train came in, and",
    "She opened the letter and",
    "A long way from the village there lived",
    "The two brothers went into the garden.",
    "In the evening the wind began to blow, and",
    "The dog ran down to the river and",
    "Nobody knew where the boy had gone.",
    "The door was opened by a tall woman who",
)
TEMPLATES = (
    "- the red fox\n" * 3,
    "The key is in the barn.\n" * 3,
    "Anna went to the mill and Tom stayed at home.\n" * 3,
    "lamp, old, cellar;\nbook, new, tower;\n" * 2,
    '{"name": "Rose", "place": "market"},\n' * 3,
    "One bell, two bells, three bells.\n" * 3,
    "Sam said to Kate: come to the river with me.\n" * 2,
    "Ben has a blue drum.\nIda has a white cup.\n" * 2,
)
_CLASSES = (
    ("Train", "speed, name, weight, owner"),
    ("Garden", "width, height, color, name"),
    ("Bridge", "name, owner, weight, price"),
    ("Clock", "color, price, height, speed"),
    ("Coat", "owner, speed, color, weight"),
    ("Tower", "height, width, owner, price"),
    ("Lamp", "price, color, width, name"),
    ("Ship", "weight, width, speed, height"),
)
# the head of a small class, after which every line is determined
CODE = tuple(f"class {name}:\n    def __init__(self, {fields}):\n" for name, fields in _CLASSES)


class _All:
    """A drafter whose confidences nobody hears of, so that every draft is verified."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = self._drafter.propose(requests)
        return [Proposal(ids=proposal.ids, probs=proposal.probs) for proposal in proposals]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        batches: Requests at once.
        rounds: Turns of all modes over fresh prompts; four times as many at batch 1.
        max_tokens: Of each answer, generated to the end.
    """

    batches: tuple[int, ...] = (1, 16)
    rounds: int = 3
    max_tokens: int = 96
    temperature: float = 0.0
    identity_prompts: int = 24


@dataclass(slots=True)
class _Run:
    """Tokens and seconds while all answers were being written, and of the whole."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    whole_tokens: int = 0
    whole_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    answers: list[list[int]] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """Tokens a drafted step gives, the target's own included."""
        return (self.accepted + self.steps) / self.steps if self.steps else 1.0


class _Watch:
    """Hears the events of answers that are written at once, in the engine's thread.

    A batch is one while all its answers are being written: from the first token of the last to begin until the first
    one ends. Before that is prefill, after it a smaller batch.
    """

    def __init__(self, count: int) -> None:
        self.events: list[list[Event]] = [[] for _ in range(count)]
        self.all_ended = threading.Event()
        self.tokens = 0
        self._silent = self._unended = count
        # (seconds, seconds of the processor) at the begin, at the first end and at the last
        self.marks: list[tuple[float, float]] = []

    def hear(self, number: int, event: Event) -> None:
        events, finished = self.events[number], isinstance(event, Finished)
        if isinstance(event, Token):
            if len(self.marks) == 1:
                self.tokens += 1
            elif not any(isinstance(earlier, Token) for earlier in events):
                self._silent -= 1
                if not self._silent:
                    self._mark()
        events.append(event)
        if finished:
            self._unended -= 1
            if len(self.marks) == 1 or not self._unended:
                self._mark()
            if not self._unended:
                self.all_ended.set()

    def _mark(self) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))


def measure(files: ModelFiles, plan: Plan, report: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Tokens a second of each mode, acceptance by the kinds of the card, and whether the answers are the same.

    Args:
        report: Told how far it is.

    Returns:
        `speedup` (batch 1, `auto` over `off`), `identical` (in deterministic mode), `acceptance` by text with all
        drafts verified, and for each batch the modes.

    Raises:
        ConfigError: The model has no draft.
    """
    if not files.config.draft.num_blocks:
        raise ConfigError(f"the model {files.name} has no draft (num_nextn_predict_layers is 0)")
    prompts = {
        kind: [[files.tokenizer.special[BOS], *files.tokenizer.encode(text)] for text in texts]
        for kind, texts in (("stories", STORIES), ("templates", TEMPLATES), ("code", CODE))
    }
    engine = start_engine(files, ServeConfig(snapshot_bytes=0))
    try:
        report(f"{files.name} on {engine.model.device}: answers with all drafts verified")
        acceptance = {kind: round(_together(engine, some, plan, "all").acceptance, 3) for kind, some in prompts.items()}
        batches = [_batch(engine, prompts["stories"], plan, size, report) for size in plan.batches]
    finally:
        engine.close()
    report(f"{plan.identity_prompts} answers with drafts and without in deterministic mode, which is slow")
    same, differing = _identity(files, [prompt for some in prompts.values() for prompt in some], plan)
    return {
        "model": files.name,
        "device": str(engine.model.device),
        "speedup": batches[0]["modes"]["auto"]["speedup"],
        "cpu_speedup": batches[0]["modes"]["auto"]["cpu_speedup"],
        "identical": differing == 0,
        "identical_answers": same,
        "acceptance": acceptance,
        "batches": batches,
    }


def _batch(
    engine: Engine, prompts: list[list[int]], plan: Plan, size: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """One batch size: every mode on the same prompts before the next ones, so that a busy machine is busy for all.

    A speedup is the median over these turns; processor time does not count what others did meanwhile.
    """
    total: dict[Mode, _Run] = {mode: _Run() for mode in MODES}
    turns: dict[Mode, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    num_turns = max(plan.rounds * max(1, 4 // size), 1)
    for number in range(num_turns):
        chosen = [prompts[(number * size + i) % len(prompts)] for i in range(size)]
        parts = {mode: _together(engine, chosen, plan, mode) for mode in MODES}
        base = parts["off"]
        for mode, part in parts.items():
            for name in ("tokens", "seconds", "cpu_s", "whole_tokens", "whole_s", "drafted", "accepted", "steps"):
                setattr(total[mode], name, getattr(total[mode], name) + getattr(part, name))
            scale = part.tokens / base.tokens
            turns[mode].append((scale * base.seconds / part.seconds, scale * base.cpu_s / max(part.cpu_s, 1e-9)))
        rates = ", ".join(f"{mode} {part.tokens / part.seconds:.1f}" for mode, part in parts.items())
        report(f"batch {size}, turn {number + 1} of {num_turns}: {rates} tokens/s")
    return {
        "batch": size,
        "modes": {
            mode: {
                "tokens_per_s": round(run.tokens / run.seconds, 2),
                "tokens_per_cpu_s": round(run.tokens / max(run.cpu_s, 1e-9), 2),
                "whole_tokens_per_s": round(run.whole_tokens / run.whole_s, 2),
                "speedup": round(statistics.median(wall for wall, _ in turns[mode]), 3),
                "cpu_speedup": round(statistics.median(cpu for _, cpu in turns[mode]), 3),
                "acceptance": round(run.acceptance, 3),
                "width": round(run.drafted / run.steps, 2) if run.steps else 0.0,
                "wasted_rows": run.drafted - run.accepted,
            }
            for mode, run in total.items()
        },
    }


def _together(engine: Engine, prompts: list[list[int]], plan: Plan, mode: Mode) -> _Run:
    """All prompts at once."""
    drafter = engine.drafter
    assert drafter is not None
    if mode == "all":
        engine.drafter = _All(drafter)
    draft: Drafting = "on" if mode == "all" else mode
    sampling = SamplingParams(temperature=plan.temperature, max_tokens=plan.max_tokens)
    run, watch = _Run(), _Watch(len(prompts))
    try:
        for number, prompt in enumerate(prompts):
            request = Request(prompt_ids=tuple(prompt), sampling=sampling, draft=draft, replay="off", keep=False)
            engine.submit(request, partial(watch.hear, number))
        watch.all_ended.wait()
    finally:
        engine.drafter = drafter
    for events in watch.events:
        end = events[-1]
        assert isinstance(end, Finished)
        if end.reason == "error":
            raise RuntimeError(f"an answer failed: {end.error}")
        run.answers.append([event.id for event in events if isinstance(event, Token)])
        run.whole_tokens += end.completion_tokens - 1
        run.drafted += end.drafted_tokens
        run.accepted += end.accepted_tokens
        run.steps += end.draft_steps
    began, first_end, last_end = watch.marks[0], watch.marks[1], watch.marks[-1]
    run.tokens, run.seconds, run.cpu_s = watch.tokens, first_end[0] - began[0], first_end[1] - began[1]
    run.whole_s = last_end[0] - began[0]
    return run


def _identity(files: ModelFiles, prompts: list[list[int]], plan: Plan) -> tuple[int, int]:
    """(answers that are the same with drafts and without, answers that differ), many at once in deterministic mode."""
    engine = start_engine(files, ServeConfig(strict_cache=True))
    try:
        chosen = [prompts[i % len(prompts)] for i in range(plan.identity_prompts)]
        plain, drafted = (_together(engine, chosen, plan, mode).answers for mode in ("off", "on"))
    finally:
        engine.close()
    same = sum(a == b for a, b in zip(plain, drafted, strict=True))
    return same, len(chosen) - same


def as_text(values: dict[str, Any]) -> str:
    """A table."""
    lines = [
        f"{values['model']} on {values['device']}: {values['speedup']:.2f} times as fast with drafts, answers "
        + (f"the same ({values['identical_answers']})" if values["identical"] else "DIFFER"),
        "tokens a step with all drafts: "
        + ", ".join(f"{kind} {number:.2f}" for kind, number in values["acceptance"].items()),
        f"{'batch':>5} {'drafts':>6} {'tokens/s':>9} {'speedup':>8} {'by CPU time':>11} "
        f"{'tokens a step':>14} {'verified':>9} {'wasted':>7} {'to the last end':>16}",
    ]
    for batch in values["batches"]:
        for mode, run in batch["modes"].items():
            lines.append(
                f"{batch['batch']:>5} {mode:>6} {run['tokens_per_s']:>9.1f} {run['speedup']:>8.2f} "
                f"{run['cpu_speedup']:>11.2f} "
                f"{run['acceptance']:>14.2f} {run['width']:>9.2f} {run['wasted_rows']:>7} "
                f"{run['whole_tokens_per_s']:>16.1f}"
            )
    return "\n".join(lines)
