"""Pass keys of a trained model over lengths beyond its training: exact answers by length and depth, and a plot.

    python benchmarks/passkey.py measure --length 1048576 [--depth 0.5] [--model cedar/bundled] [--device cuda]
    python benchmarks/passkey.py plot

`measure` adds to `benchmarks/results/passkey.json`, each answer as soon as it is known; the documents are those of
`cedar eval`. `plot` draws all that is recorded, to `docs/plots/mini-passkey.png`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

# sets the thread policy that torch reads when it loads
import cedar  # noqa: F401  isort: skip
import torch

from cedar.train.run import load_model
from cedar.train.suite import QUICK, Suite

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/passkey.json"
_DEPTHS = (0.5, 0.0, 1.0, 0.25, 0.75)


def recorded() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return rows


def measure(folder: Path, device: str, lengths: list[int], depths: list[float], number: int) -> None:
    model, tokenizer, facts = load_model(folder, device=device)
    suite = Suite(model, tokenizer, facts, {}, replace(QUICK, lengths=tuple(lengths)))
    machine = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    for length in lengths:
        for depth in depths:
            began = time.monotonic()
            exact = suite.passkey_at(length, depth, [number])["exact"]
            seconds = round(time.monotonic() - began, 1)
            print(f"{length} tokens, depth {depth:g}: {exact:.0%}, {seconds} s", flush=True)
            row = {
                "date": datetime.date.today().isoformat(),
                "machine": machine,
                "length": length,
                "depth": depth,
                "documents": 1,
                "exact": exact,
                "seconds": seconds,
            }
            RESULTS.write_text(json.dumps([*recorded(), row], indent=1) + "\n", encoding="utf-8")


def plot(trained: int, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    totals: dict[int, list[float]] = {}
    for row in recorded():
        documents, exact = totals.setdefault(row["length"], [0, 0])
        totals[row["length"]] = [documents + row["documents"], exact + row["documents"] * row["exact"]]
    lengths = sorted(totals)
    shares = [100 * totals[length][1] / totals[length][0] for length in lengths]
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    axes.axvspan(lengths[0] / 1.3, trained, color="0.9", label="lengths it was trained on")
    axes.plot(lengths, shares, "o-")
    for length, share in zip(lengths, shares, strict=True):
        axes.annotate(f"of {totals[length][0]:g}", (length, share), (0, -14), textcoords="offset points", ha="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length // 1024}K" if length >= 1024 else str(length) for length in lengths])
    axes.set_ylim(0, 105)
    axes.set_xlabel("tokens of the document")
    axes.set_ylabel("exact answers, %")
    axes.set_title("Pass keys: one five-digit number in a long text")
    axes.legend(loc="lower left")
    figure.savefig(target, dpi=110)
    print(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure", help="ask for pass keys")
    one.add_argument("--model", type=Path, default=ROOT / "cedar/bundled")
    one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    one.add_argument("--length", type=int, action="append", required=True, help="tokens of a document; repeat")
    one.add_argument("--depth", type=float, action="append", help="where the key stands, 0 to 1; repeat")
    one.add_argument("--number", type=int, default=0, help="draws other documents")
    drawn = commands.add_parser("plot", help="draw what is recorded")
    drawn.add_argument("--trained", type=int, default=4096, help="longest sample of the model's training")
    drawn.add_argument("--out", type=Path, default=ROOT / "docs/plots/mini-passkey.png")
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.model, given.device, given.length, given.depth or list(_DEPTHS), given.number)
    else:
        plot(given.trained, given.out)


if __name__ == "__main__":
    main()
