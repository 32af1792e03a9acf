"""How far the newest rows of `h200.csv` are from the goals on one H200, as a table for docs/numbers.md.

A row's time is a median with the L2 cold, its peer's was measured in the same run; a share is of the floor: the larger
of bytes at the card's copy rate and operations at its bfloat16 rate.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

# (op, case, peer) -> its newest row
Rows = dict[tuple[str, str, str], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Part:
    """One number of a goal: what it is measured on, and the bound of the first and of the final goal, if it has one.

    Attributes:
        least: Whether the bounds are least values; else they are the most.
    """

    label: str
    value: Callable[[Rows], float]
    first: float | None
    final: float | None = None
    form: str = ".2f"
    least: bool = False

    def reaches(self, value: float, bound: float) -> bool:
        return value >= bound if self.least else value <= bound

    def distance(self, value: float, bound: float) -> float:
        """1 where the bound is met exactly, more where it is missed."""
        return bound / value if self.least else value / bound


@dataclass(frozen=True, slots=True)
class Goal:
    name: str
    first: str
    final: str
    parts: tuple[Part, ...]


def newest(file: Path) -> Rows:
    rows: Rows = {}
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            rows[row["op"], row["case"], row["peer"]] = row
    return rows


def _of(rows: Rows, op: str, case: str, peer: str | None = None) -> dict[str, str]:
    """The newest row of a case, whatever stands beside it if `peer` is None."""
    found = [row for (*of, its_peer), row in rows.items() if of == [op, case] and peer in (None, its_peer)]
    if not found:
        raise LookupError(f"no row of {op} {case}")
    return found[-1]


def _times_peer(op: str, case: str, peer: str) -> Callable[[Rows], float]:
    return lambda rows: float((row := _of(rows, op, case, peer))["us_median"]) / float(row["peer_us"])


def _us(op: str, case: str) -> Callable[[Rows], float]:
    return lambda rows: float(_of(rows, op, case)["us_median"])


def _share(op: str, case: str) -> Callable[[Rows], float]:
    return lambda rows: 100 * float(_of(rows, op, case)["limit_fraction"])


def _times_kernels(case: str) -> Callable[[Rows], float]:
    def ratio(rows: Rows) -> float:
        found = [
            row for (op, its, peer), row in rows.items() if (op, its, peer[:6]) == ("decode_graph", case, "sum of")
        ]
        return float(found[-1]["us_median"]) / float(found[-1]["peer_us"])

    return ratio


def _inverse(one: Callable[[Rows], float], scale: float = 1.0) -> Callable[[Rows], float]:
    return lambda rows: scale / one(rows)


def _launches(op: str, case: str) -> Callable[[Rows], float]:
    # a layer's row says "25 launches"
    return lambda rows: float(_of(rows, op, case)["peer"].split()[0])


def _each(cases: Iterable[str], make: Callable[[str], Part]) -> tuple[Part, ...]:
    return tuple(map(make, cases))


_FLASH, _WIDENED, _GEMM = "FlashMLA, V4 rows", "FlashMLA, widening inside", "DeepGEMM FP8"
_DENSE, _MARLIN, _VLLM = "DeepGEMM FP8, mask, vLLM top-k", "Marlin W4A16", "vLLM top-k"
_MODES = "window", "full_r2", "full_r1", "reindex", "reuse"
_AT_128K = "B=32 T=131072"
_TOPK = "1x4096", "1x16384", "1x131072", "1x1048576", "32x65536", "128x16384", "128x65536"
_FEW, _MANY = ("T=1", "T=6", "T=32", "T=128"), ("T=32", "T=128", "T=32 Zipf", "T=128 Zipf")

GOALS = (
    Goal(
        "G1 sparse decode, of FlashMLA's time",
        "at most 1.3",
        "1.0 at B 1 and from 128",
        _each(
            ("B=1", "B=2", "B=8", "B=32", "B=64", "B=128", "B=256"),
            lambda case: Part(
                case,
                _times_peer("sparse_decode", case, _FLASH),
                1.3,
                1.0 if case in ("B=1", "B=128", "B=256") else None,
            ),
        ),
    ),
    Goal(
        "G2 sparse prefill, of FlashMLA's with its widening",
        "at most 1.3",
        "1.0",
        _each(("T=1024", "T=4096"), lambda case: Part(case, _times_peer("sparse_prefill", case, _WIDENED), 1.3, 1.0)),
    ),
    Goal(
        "G3 index scores, of DeepGEMM's",
        "at most 1.2",
        "0.8 at 1 M",
        _each(
            ("1x4096", "1x131072", "1x1048576", "32x65536", "128x65536"),
            lambda case: Part(
                case, _times_peer("index_logits", case, _GEMM), 1.2, 0.8 if case == "1x1048576" else None
            ),
        ),
    ),
    Goal(
        "G4 Reindex, times sooner than dense scores, mask and top-k",
        "4 at B 1, 10 at B 32",
        "12 and 30 us",
        (
            Part("B=1", _inverse(_times_peer("reindex", "B=1", _DENSE)), 4, form=".1f", least=True),
            Part("B=32", _inverse(_times_peer("reindex", "B=32", _DENSE)), 10, form=".1f", least=True),
            Part("us at B=1", _us("reindex", "B=1"), None, 12, ".1f"),
            Part("us at B=32", _us("reindex", "B=32"), None, 30, ".1f"),
        ),
    ),
    Goal(
        "G5 top 512, times sooner than torch.topk; of vLLM's time",
        "2",
        "vLLM's time; 15 us at 128 K, 25 at 1 M",
        (
            *_each(
                _TOPK,
                lambda case: Part(case, _inverse(_times_peer("topk", case, "torch.topk")), 2, form=".1f", least=True),
            ),
            *_each(_TOPK, lambda case: Part(f"{case} of vLLM's", _times_peer("topk", case, _VLLM), None, 1.0)),
            Part("us at 128 K", _us("topk", "1x131072"), None, 15, ".1f"),
            Part("us at 1 M", _us("topk", "1x1048576"), None, 25, ".1f"),
        ),
    ),
    Goal(
        "G6 step of hyper-connections, us; % of the copy",
        "8 us to 32 rows, 50 % at 8 K",
        "6 us, 75 %",
        (
            *_each(("T=1", "T=32"), lambda case: Part(f"us at {case}", _us("mhc", case), 8, 6, ".1f")),
            Part("% at T=8192", _share("mhc", "T=8192"), 50, 75, ".0f", least=True),
        ),
    ),
    Goal(
        "G7 MXFP4 experts to 128 rows, % of the copy; of Marlin's time",
        "60 % from 32 rows, 1.2",
        "75 %, 1.0",
        (
            *_each(_MANY, lambda case: Part(f"% at {case}", _share("moe", case), 60, 75, ".0f", least=True)),
            *_each(_FEW, lambda case: Part(f"{case} of Marlin's", _times_peer("moe", case, _MARLIN), 1.2, 1.0)),
        ),
    ),
    Goal(
        "G8 MXFP4 experts, 4,096 rows, % of 790 TFLOP/s",
        "45 %",
        "60 %",
        _each(("T=4096", "T=4096 Zipf"), lambda case: Part(case, _share("moe", case), 45, 60, ".0f", least=True)),
    ),
    Goal(
        "G9 FP8 linears to 32 rows, % of the copy",
        "60 %",
        "75 %",
        tuple(
            Part(f"{name} {rows}", _share("dense_fp8", f"{name} {rows}"), 60, 75, ".0f", least=True)
            for name in ("wq_b", "wo_b", "wo_a", "wq_a_wkv", "engram_wkv")
            for rows in ("T=1", "T=8", "T=32")
        ),
    ),
    Goal(
        "G10 a Reuse layer at B 1 and 128 K",
        "160 us, 13 launches",
        "110 us, 11",
        (
            Part("us", _us("layer_reuse", "B=1 T=131072"), 160, 110, ".0f"),
            Part("launches", _launches("layer_reuse", "B=1 T=131072"), 13, 11, ".0f"),
        ),
    ),
    Goal(
        "G11 a layer of each mode at B 32 and 128 K, of its floor",
        "2.0",
        "1.5",
        _each(_MODES, lambda mode: Part(mode, _inverse(_share(f"layer_{mode}", _AT_128K), 100), 2.0, 1.5)),
    ),
    Goal(
        "G12 cache bytes a token, allocated for 1 M tokens",
        "890",
        "890",
        (Part("bytes", lambda rows: float(_of(rows, "cache", "T=1048576")["bytes"]) / 2**20, 890.005, 890.005),),
    ),
    Goal(
        "G13 a decode graph, of its kernels one by one",
        "1.3",
        "1.1",
        _each(
            ("mini B=1 T=4096", "mini B=16 T=4096", "small B=1 T=4096", "small B=16 T=4096"),
            lambda case: Part(
                case,
                _times_kernels(case),
                1.3,
                1.1,
            ),
        ),
    ),
)


def line(goal: Goal, rows: Rows) -> str:
    values, absent = [], []
    for part in goal.parts:
        try:
            values.append((part, part.value(rows)))
        except LookupError:
            absent.append(part.label)
    measured = ", ".join(f"{part.label} {value:{part.form}}" for part, value in values)
    missed = [p.label for p, value in values if p.first is not None and not p.reaches(value, p.first)]
    verdict = f"**no**: {', '.join(missed)}" if missed else "yes" if values else "open"
    if absent:
        verdict += f"; not measured: {', '.join(absent)}"
    finals = [(p.distance(value, p.final), p.label) for p, value in values if p.final is not None]
    farthest, where = max(finals, default=(0.0, ""))
    distance = "" if not finals else "there" if farthest <= 1 else f"{farthest:.2f} times, {where}"
    return f"| {goal.name} | {measured} | {goal.first} | {verdict} | {goal.final} | {distance} |"


def table(file: Path) -> str:
    """The section of docs/numbers.md."""
    rows = newest(file)
    lines = "\n".join(line(goal, rows) for goal in GOALS)
    return f"""## The goals on one H200

From the newest row of each case in `benchmarks/results/h200.csv` (`benchmarks/goals.py`): B rows of a decode step, T
tokens. The distance is that of the number farthest from its final goal.

| goal | measured | first goal | met | final goal | still away |
|---|---|---|---|---|---|
{lines}
"""
