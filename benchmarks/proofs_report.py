"""The results of `proofs.py` as a page, one JSON and a plot: arms paired by seed, means and ranges."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Run = dict[str, Any]
Runs = dict[str, dict[int, Run]]


@dataclass(frozen=True)
class Claim:
    """One line of the page.

    Attributes:
        other: The arm that the base is compared with; the base itself where only something is switched.
        value: (base, other) of one seed -> the number.
        target: What training.md 5.4 asks for, in words.
        met: Whether a mean meets it; None where only a report is asked for.
        unit: `nat`, `points` (hundredths), `ratio` or `share`.
    """

    mechanism: str
    what: str
    other: str
    value: Callable[[Run, Run], float]
    target: str
    met: Callable[[float], bool] | None
    unit: str = "nat"


def _at(run: Run, *path: str) -> float:
    value: Any = run["measured"]
    for key in path:
        value = value[key]
    return float(value)


RETRIEVAL = ("pairs_256_accuracy", "restate_256_accuracy", "lookup_256_accuracy")


def _retrieval(run: Run, *path: str) -> float:
    """Right tokens of pairs, restated records and lookups, in points."""
    return 100 * statistics.fmean(_at(run, *path, metric) for metric in RETRIEVAL)


def _loss(run: Run, *path: str) -> float:
    """Nats over the two tasks that every arm has learnt: the n-gram language and restated records."""
    return statistics.fmean((_at(run, *path, "ngram_excess"), _at(run, *path, "restate_256_ce")))


def _early(run: Run) -> float:
    """Mean training loss of the first fifth of the steps; arms of a seed see the same batches."""
    return statistics.fmean(line["loss"] for line in run["curve"] if line["step"] <= run["steps"] / 5)


CLAIMS = (
    Claim(
        "CED",
        "loss above own-layer KV",
        "own_kv",
        lambda b, o: _loss(b, "serving") - _loss(o, "serving"),
        "at most +0.02",
        lambda v: v <= 0.02,
    ),
    Claim(
        "CED",
        "prefill operations a token over own-layer KV's, 4,096 tokens",
        "own_kv",
        lambda b, o: _at(b, "prefill_flops_per_token") / _at(o, "prefill_flops_per_token"),
        "at most 0.55",
        lambda v: v <= 0.55,
        "ratio",
    ),
    Claim(
        "top-k against dense",
        "loss above attention over all entries, trained so",
        "dense",
        lambda b, o: _loss(b, "serving") - _loss(o, "serving"),
        "at most +0.02",
        lambda v: v <= 0.02,
    ),
    Claim(
        "top-k against dense",
        "retrieval below it",
        "dense",
        lambda b, o: _retrieval(o, "serving") - _retrieval(b, "serving"),
        "within 1 point",
        lambda v: v <= 1,
        "points",
    ),
    Claim(
        "indexer",
        "retrieval above random selection",
        "base",
        lambda b, o: _retrieval(b, "serving") - _retrieval(b, "random_selection"),
        "far above",
        lambda v: v > 10,
        "points",
    ),
    Claim(
        "indexer",
        "retrieval above indexers that stay as drawn",
        "frozen_indexer",
        lambda b, o: _retrieval(b, "serving") - _retrieval(o, "serving"),
        "above",
        lambda v: v > 1,
        "points",
    ),
    Claim(
        "indexer",
        "retrieval below the teacher's own top-k",
        "base",
        lambda b, o: (
            100 * statistics.fmean(_at(b, "oracle", metric) - _at(b, "serving", metric) for metric in RETRIEVAL[:2])
        ),
        "at most 1 point",
        lambda v: v <= 1,
        "points",
    ),
    Claim(
        "Reindex",
        "loss of the same stack with Reuse in its place, above",
        "reuse",
        lambda b, o: _loss(o, "serving") - _loss(b, "serving"),
        "worse; if not, say so",
        lambda v: v > 0,
    ),
    Claim(
        "Reindex",
        "its retrieval, below",
        "reuse",
        lambda b, o: _retrieval(b, "serving") - _retrieval(o, "serving"),
        "report",
        None,
        "points",
    ),
    Claim(
        "teacher",
        "recall of the teacher's best 8, all served layers above source only",
        "source_only",
        lambda b, o: 100 * (_at(b, "indexer", "recall") - _at(o, "indexer", "recall")),
        "report",
        None,
        "points",
    ),
    Claim(
        "teacher",
        "retrieval, all served layers above source only",
        "source_only",
        lambda b, o: _retrieval(b, "serving") - _retrieval(o, "serving"),
        "report",
        None,
        "points",
    ),
    Claim(
        "candidate pool",
        "retrieval lost to the pool, trained with it",
        "base",
        lambda b, o: _retrieval(b, "no_pool") - _retrieval(b, "serving"),
        "at most 0.5 point",
        lambda v: v <= 0.5,
        "points",
    ),
    Claim(
        "candidate pool",
        "retrieval lost to the pool, trained without it",
        "no_stage_c",
        lambda b, o: _retrieval(o, "no_pool") - _retrieval(o, "serving"),
        "larger",
        None,
        "points",
    ),
    Claim(
        "FP4 cache",
        "loss it costs, trained with it",
        "base",
        lambda b, o: _loss(b, "serving") - _loss(b, "rounding_off", "fp4"),
        "at most 0.005",
        lambda v: v <= 0.005,
    ),
    Claim(
        "FP4 cache",
        "loss it costs, trained without it",
        "no_stage_c",
        lambda b, o: _loss(o, "serving") - _loss(o, "rounding_off", "fp4"),
        "over twice the line above",
        None,
    ),
    Claim(
        "FP8 windows",
        "loss they cost",
        "base",
        lambda b, o: _loss(b, "serving") - _loss(b, "rounding_off", "window_kv"),
        "at most 0.003",
        lambda v: v <= 0.003,
    ),
    Claim(
        "decoder replay",
        "loss it costs the first 64 tokens, trained with it",
        "base",
        lambda b, o: _at(b, "decoder_replay", "cost"),
        "at most 0.02",
        lambda v: v <= 0.02,
    ),
    Claim(
        "decoder replay",
        "the same, trained without it",
        "no_stage_c",
        lambda b, o: _at(o, "decoder_replay", "cost"),
        "report",
        None,
    ),
    Claim(
        "encoder replay",
        "loss it costs the first 64 tokens, trained with it",
        "base",
        lambda b, o: _at(b, "encoder_replay", "cost"),
        "at most 0.02",
        lambda v: v <= 0.02,
    ),
    Claim(
        "encoder replay",
        "the same, trained without it",
        "no_stage_c",
        lambda b, o: _at(o, "encoder_replay", "cost"),
        "report",
        None,
    ),
    Claim(
        "stage C",
        "loss as it serves, above the model that never trained for it and runs unrounded",
        "no_stage_c",
        lambda b, o: _loss(b, "serving") - _loss(o, "unrounded"),
        "at most 0.02",
        lambda v: v <= 0.02,
    ),
    Claim(
        "Engram",
        "training loss of the first fifth without it, same parameters, above",
        "no_engram",
        lambda b, o: _early(o) - _early(b),
        "at least 0.05",
        lambda v: v >= 0.05,
    ),
    Claim(
        "Engram",
        "n-gram loss at the end without it, above",
        "no_engram",
        lambda b, o: _at(o, "serving", "ngram_excess") - _at(b, "serving", "ngram_excess"),
        "report",
        None,
    ),
    Claim(
        "Engram",
        "n-gram loss with its hash shuffled, above",
        "base",
        lambda b, o: _at(b, "shuffled_engram", "ngram_excess") - _at(b, "serving", "ngram_excess"),
        "above 0",
        lambda v: v > 0,
    ),
    Claim(
        "single-pass mHC",
        "loss above two-pass",
        "two_pass",
        lambda b, o: _loss(b, "serving") - _loss(o, "serving"),
        "within 0.01",
        lambda v: abs(v) <= 0.01 or v < 0,
    ),
    Claim(
        "single-pass mHC",
        "loss of one plain residual stream, above",
        "plain_residual",
        lambda b, o: _loss(o, "serving") - _loss(b, "serving"),
        "report",
        None,
    ),
    Claim(
        "Sinkhorn update",
        "loss above AdamW's for embedding, head and tables",
        "adam_tables",
        lambda b, o: _loss(b, "serving") - _loss(o, "serving"),
        "within 0.01",
        lambda v: v <= 0.01,
    ),
    Claim(
        "Sinkhorn update",
        "training loss of the first fifth, above AdamW's",
        "adam_tables",
        lambda b, o: _early(b) - _early(o),
        "report",
        None,
    ),
    Claim(
        "Sinkhorn update",
        "state bytes of these over AdamW's",
        "adam_tables",
        lambda b, o: b["state_bytes"]["sinkhorn"] / (o["state_bytes"]["adamw"] - b["state_bytes"]["adamw"]),
        "0.5 and a counter a row",
        lambda v: abs(v - 0.5) < 0.02,
        "ratio",
    ),
    Claim(
        "far context",
        "lookups over 256 tokens, above windows alone",
        "window_only",
        lambda b, o: 100 * (_at(b, "serving", "lookup_256_accuracy") - _at(o, "serving", "lookup_256_accuracy")),
        "far above",
        lambda v: v > 10,
        "points",
    ),
)


def summarise(folder: Path, root: Path) -> None:
    """Write `docs/proofs.md`, `benchmarks/results/proofs.json` and `docs/plots/proofs.png` from a folder's runs.

    Runs of the same recipe that are recorded already and not in the folder stay, with the values recorded of them.
    """
    target = root / "benchmarks/results/proofs.json"
    fresh = _load(folder)
    if "base" not in fresh:
        raise SystemExit(f"no finished run of the base in {folder}: train it first")
    recipe = _shared(next(iter(fresh["base"].values()))["recipe"])
    runs, known = _recorded(target, recipe)
    for arm, seeds in fresh.items():
        runs.setdefault(arm, {}).update(seeds)
    lines = [_line(claim, runs, fresh, known) for claim in CLAIMS]
    # the claims are made from whole curves; a fourth of their points is recorded and drawn
    for seeds in fresh.values():
        for run in seeds.values():
            run["curve"] = run["curve"][::4]
    results = {
        "runs": [
            {k: v for k, v in run.items() if k not in ("recipe", "commit")}
            for seeds in runs.values()
            for _, run in sorted(seeds.items())
        ],
        "recipe": recipe,
        "claims": lines,
    }
    target.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (root / "docs/proofs.md").write_text(_page(runs, lines, recipe), encoding="utf-8")
    _plot(runs, root / "docs/plots/proofs.png")
    print(f"{sum(map(len, runs.values()))} runs of {len(runs)} arms: docs/proofs.md")


def _load(folder: Path) -> Runs:
    runs: Runs = {}
    for file in sorted(folder.glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        runs.setdefault(run["arm"], {})[int(run["seed"])] = run
    return runs


def _shared(recipe: dict[str, Any]) -> dict[str, Any]:
    """What the runs of all seeds have in common."""
    return {name: value for name, value in recipe.items() if name != "seed"}


def _recorded(file: Path, recipe: dict[str, Any]) -> tuple[Runs, dict[tuple[str, str], dict[int, float]]]:
    """The runs recorded of this recipe, and each claim's values by seed."""
    if not file.exists():
        return {}, {}
    results = json.loads(file.read_text(encoding="utf-8"))
    if _shared(results["recipe"]) != recipe:
        print(f"{file} is of another recipe: its runs are left out")
        return {}, {}
    runs: Runs = {}
    for run in results["runs"]:
        runs.setdefault(run["arm"], {})[int(run["seed"])] = run
    known = {
        (line["mechanism"], line["what"]): dict(zip(line["seeds"], line["values"], strict=True))
        for line in results["claims"]
    }
    return runs, known


def _line(
    claim: Claim, runs: Runs, fresh: Runs, known: Mapping[tuple[str, str], Mapping[int, float]]
) -> dict[str, Any]:
    base, other = runs["base"], runs.get(claim.other, {})
    seeds = sorted(set(base) & set(other))
    # a recorded curve has every fourth point only, so its claims are not computed again
    earlier = known.get((claim.mechanism, claim.what), {})
    whole = set(fresh["base"]) & set(fresh.get(claim.other, {}))
    seeds = [seed for seed in seeds if seed in whole or seed in earlier]
    values = [claim.value(base[seed], other[seed]) if seed in whole else earlier[seed] for seed in seeds]
    line = {
        "mechanism": claim.mechanism,
        "what": claim.what,
        "arm": claim.other,
        "target": claim.target,
        "unit": claim.unit,
        "seeds": seeds,
        "values": [round(value, 5) for value in values],
    }
    if not values:
        return {**line, "mean": None, "met": None}
    mean = statistics.fmean(values)
    met = None if claim.met is None else claim.met(mean)
    # a verdict that one of the seeds contradicts is none
    if met is not None and any(claim.met(value) != met for value in values if claim.met is not None):
        return {**line, "mean": round(mean, 5), "met": "undecided"}
    return {**line, "mean": round(mean, 5), "met": met}


def _number(value: float, unit: str) -> str:
    return f"{value:+.1f}" if unit == "points" else f"{value:.2f}" if unit == "ratio" else f"{value:+.4f}"


def _told(line: dict[str, Any]) -> str:
    if line["mean"] is None:
        return f"| {line['mechanism']} | {line['what']} | not run | | {line['target']} | |"
    unit = line["unit"]
    spread = f"{_number(min(line['values']), unit)} to {_number(max(line['values']), unit)}"
    name = {"points": " points", "ratio": ""}.get(unit, " nat")
    verdict = {True: "yes", False: "**no**", None: "", "undecided": "seeds differ"}[line["met"]]
    mean = _number(line["mean"], unit) + name
    return f"| {line['mechanism']} | {line['what']} | {mean} | {spread} | {line['target']} | {verdict} |"


def _cell(seeds: dict[int, Run], *path: str, scale: float = 1.0, form: str = ".3f") -> str:
    values = [scale * _at(run, *path) for run in seeds.values()]
    mean = format(statistics.fmean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ({format(min(values), form)} to {format(max(values), form)})"


def _page(runs: Runs, lines: list[dict[str, Any]], recipe: dict[str, Any]) -> str:
    one = next(iter(runs["base"].values()))
    stopped = [f"{r['arm']}-{r['seed']}" for s in runs.values() for r in s.values() if r["steps"] < r["planned_steps"]]
    claims = "\n".join(map(_told, lines))
    columns = (
        ("n-gram loss above entropy", ("serving", "ngram_excess"), 1.0, ".3f"),
        ("queries, 256", ("serving", "mqar_256_accuracy"), 100.0, ".1f"),
        ("pairs, 256", ("serving", "pairs_256_accuracy"), 100.0, ".1f"),
        ("restated, 256", ("serving", "restate_256_accuracy"), 100.0, ".1f"),
        ("lookups, 256", ("serving", "lookup_256_accuracy"), 100.0, ".1f"),
        ("recall of best 8", ("indexer", "recall"), 100.0, ".1f"),
        ("load", ("indexer", "load"), 1.0, ".2f"),
    )
    head = " | ".join(["arm", "runs", *(name for name, *_ in columns)])
    arms = "\n".join(
        " | ".join(
            [
                f"| `{arm}`: {next(iter(seeds.values()))['about']}",
                str(len(seeds)),
                *(_cell(seeds, *path, scale=scale, form=form) for _, path, scale, form in columns),
            ]
        )
        + " |"
        for arm, seeds in runs.items()
    )
    far = sorted(map(int, one["measured"]["far"]))
    far_rows = "\n".join(
        f"| `{arm}` | "
        + " | ".join(_cell(runs[arm], "far", str(length), scale=100, form=".0f") for length in far)
        + " |"
        for arm in ("base", "dense", "window_only", "frozen_indexer", "reuse", "own_kv")
        if arm in runs
    )
    offsets = "\n".join(
        f"| {kind.replace('_', ' ')}, {told} | "
        + " | ".join(
            _cell(runs[arm], kind, "by_offset", str(o), form="+.3f") if kind == "decoder_replay" or o % 2 == 0 else ""
            for o in range(8)
        )
        + " |"
        for kind in ("decoder_replay", "encoder_replay")
        for arm, told in (("base", "trained with it"), ("no_stage_c", "trained without it"))
        if arm in runs
    )
    cut = f"\nStopped by the clock before their last step: {', '.join(stopped)}.\n" if stopped else ""
    stages = "; ".join(
        f"{stage['name']}: {stage['share']:.0%} of the steps, {stage['dense_share']:.0%} of the batches dense, "
        f"samples of {min(stage['lengths'])} to {max(stage['lengths'])} tokens"
        for stage in recipe["stages"]
    )
    mixture = ", ".join(f"{name} {weight:g}" for name, weight in recipe["stages"][0]["mixture"].items())
    recipe_told = textwrap.fill(
        f"Mixture by tokens: {mixture}. Stages: {stages}; the last with every rounding, the pool and replay.", 116
    )
    best = max(_at(run, "far", "64") for seeds in runs.values() for run in seeds.values())
    unlearnt = "" if best > 0.5 else " No arm learnt them in so few steps, so they decide nothing."
    learnt = (
        "Arms whose\nindexers learn answer nearly all queries by key when the runs end."
        if best > 0.5
        else "Key-value retrieval was still\nbeing learnt when the runs ended, so each difference in it is partly who "
        "was earlier."
    )
    return f"""# Proofs

What each mechanism is worth, measured on {one["parameters"] / 1e6:.1f} million parameters (`nano` with a window of 8
and a top-k of 8, text of at most 256 tokens). A table, not a promise: nothing here says how a large model behaves.
Arms of one seed saw the same {one["tokens"] / 1e6:.1f} million tokens in the same order, {one["steps"]} steps; on
{one["device"]}. Written by `python benchmarks/proofs.py summarise`; every number is in
`benchmarks/results/proofs.json`.

{recipe_told}

A loss is in nats a learnt token, over held-out documents of the two tasks that every arm has learnt: the n-gram
language (above its entropy) and restated records. Retrieval is the share of right tokens of pairs, restated records
and lookups of 256 tokens, most of them beyond the reach of all windows together (56 tokens). {learnt}
Ranges are over seeds; a verdict holds for every seed, or it is given as open.
{cut}
| mechanism | measured | mean | range | asked for | met |
|---|---|---|---|---|---|
{claims}

![retrieval by arm, and training loss](plots/proofs.png)

## Arms

As they serve: every rounding on, top-k and pool; accuracies in per cent.

| {head} |
|{"---|" * (len(columns) + 2)}
{arms}

## Queries by length

Right values in per cent.{unlearnt}

| arm | {" | ".join(map(str, far))} |
|---|{"---|" * len(far)}
{far_rows}

## Replay by the prompt's end modulo the window

Nats a token over the first 64 tokens from the cut on; a cache miss restarts at even tokens alone.

| | {" | ".join(map(str, range(8)))} |
|---|{"---|" * 8}
{offsets}
"""


def _plot(runs: Runs, file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    arms = list(runs)
    for place, arm in enumerate(arms):
        values = [_retrieval(run, "serving") for run in runs[arm].values()]
        left.barh(place, statistics.fmean(values), color="tab:blue" if arm == "base" else "tab:gray", alpha=0.6)
        left.plot(values, [place] * len(values), "k.", markersize=5)
    left.set_yticks(range(len(arms)), arms)
    left.invert_yaxis()
    left.set_xlabel("retrieval, right tokens in per cent (dots: seeds)")
    for arm in ("base", "dense", "no_engram", "adam_tables", "frozen_indexer", "window_only"):
        if arm not in runs:
            continue
        curves = [[line["loss"] for line in run["curve"]] for run in runs[arm].values()]
        steps = [line["step"] for line in next(iter(runs[arm].values()))["curve"]]
        right.plot(steps, [statistics.fmean(losses) for losses in zip(*curves, strict=True)], label=arm, linewidth=1)
    right.set_xlabel("step")
    right.set_ylabel("training loss, nats")
    right.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
