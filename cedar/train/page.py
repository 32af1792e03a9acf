"""A model's evaluation as one HTML file that needs nothing else: tables, and curves where matplotlib is installed."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .6rem 0 1.2rem }
td, th { padding: .2rem .7rem; border-bottom: 1px solid #ddd }
td { text-align: right } th { text-align: left; font-weight: 600 } td:first-child { text-align: left }
.yes { color: #176b2c } .no { color: #a11 } svg { max-width: 100%; height: auto } p { max-width: 48rem }
@media (prefers-color-scheme: dark) { body { background: #16181b; color: #ddd } td, th { border-color: #333 }
svg { background: #fff } .yes { color: #6fcf87 } .no { color: #ff8a80 } }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One number that a model of this project is asked for (issue and training.md 5.3)."""

    name: str
    value: float | None
    bound: float
    at_least: bool
    form: str

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def told(self) -> tuple[str, str, str]:
        """(value, what is asked for, verdict with the distance where it is missed)."""
        asked = f"at {'least' if self.at_least else 'most'} {format(self.bound, self.form)}"
        if self.value is None:
            return "not measured", asked, ""
        missed = format(abs(self.value - self.bound), self.form)
        return format(self.value, self.form), asked, "yes" if self.met else f"no, by {missed}"


def gates(results: Mapping[str, Any]) -> list[Gate]:
    """The numbers of the issue, from an evaluation's results."""
    trained = results["model"]["trained_length"] or 0
    queries = [row["accuracy"] for row in results["queries"] if row["length"] <= trained]
    far = next((row["exact"] for row in results["passkey"] if row["length"] == 8192), None)
    return [
        Gate(
            name="n-gram loss above the known entropy, nats",
            value=results["language"]["excess"],
            bound=0.15,
            at_least=False,
            form=".3f",
        ),
        Gate(name="MQAR at trained lengths", value=min(queries, default=None), bound=0.95, at_least=True, form=".1%"),
        Gate(name="pass key at 8,192 tokens", value=far, bound=0.95, at_least=True, form=".1%"),
        Gate(
            name="indexers' recall of the teacher's best 8",
            value=results["indexers"]["all"]["recall"],
            bound=0.9,
            at_least=True,
            form=".3f",
        ),
        Gate(
            name="busiest expert over the mean",
            value=results["indexers"]["all"]["load"],
            bound=1.5,
            at_least=False,
            form=".2f",
        ),
        Gate(
            name="FP4, pool and replay together, nats",
            value=results["replay"]["together"]["costs"],
            bound=0.02,
            at_least=False,
            form=".4f",
        ),
    ]


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's card takes from an evaluation: words that need no more arithmetic."""
    return {
        "device": results["model"]["device"],
        "gates": [[gate.name, *gate.told()] for gate in gates(results)],
        "by_length": {
            kind: {str(length): f"{share:.1%} of {count}" for length, (share, count) in values.items()}
            for kind, values in _by_length(results).items()
        },
    }


def page(results: Mapping[str, Any], *, title: str) -> str:
    """The whole page."""
    model = results["model"]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(str(model['preset'] or 'a model'))}, {model['layers']} layers, window {model['window']} "
        f"(all windows together reach {model['reach_of_windows']} tokens), top-k {model['topk']}, trained on samples "
        f"of at most {model['trained_length']} tokens. Measured on {escape(model['device'])} in {model['dtype']}, "
        f"{results['seconds']:,.0f} s. As it serves, unless a line says otherwise.</p>",
        "<h2>What was asked for</h2>",
        _gates(gates(results)),
        "<h2>Retrieval by length</h2>",
        _figure(results, _draw_lengths),
        _lengths(results),
        "<h2>Pass key by depth</h2>",
        _depths(results["passkey"]),
        "<h2>Losses</h2>",
        _losses(results),
        "<h2>Indexers and experts</h2>",
        _indexers(results["indexers"]),
        "<h2>One mechanism off at a time</h2>",
        "<p>On held-out text, restated records and the answers of lookups: what each mechanism costs.</p>",
        _table(
            ["", "nats", "token accuracy", "costs, nats"],
            [
                [name, f"{v['nats']:.4f}", f"{v['token_accuracy']:.2%}", f"{v['costs']:+.4f}"]
                for name, v in results["switches"].items()
            ],
        ),
        "<h2>Replay by the cut's offset in the window</h2>",
        f"<p>Nats that replay adds to the first {results['replay']['first_tokens']} tokens after a prompt (decoder) or "
        "after a cached prefix (encoder).</p>",
        _figure(results, _draw_replay),
        _replay(results["replay"]),
    ]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n{body}\n'
        "</body></html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>\n{body}</table>"


def _gates(found: Sequence[Gate]) -> str:
    rows = []
    for gate in found:
        value, asked, verdict = gate.told()
        kind = "yes" if gate.met else "no"
        rows.append(
            f"<tr><td>{escape(gate.name)}</td><td>{value}</td><td>{asked}</td><td class={kind}>{verdict}</td></tr>"
        )
    return "<table><tr><th></th><th>measured</th><th>asked for</th><th>met</th></tr>" + "\n".join(rows) + "</table>"


def _by_length(results: Mapping[str, Any]) -> dict[str, dict[int, tuple[float, int]]]:
    """(part right, questions) by kind and length."""
    return {
        "pass key": {r["length"]: (r["exact"], r["questions"]) for r in results["passkey"]},
        "lookups": {r["length"]: (r["accuracy"], r["questions"]) for r in results["recall"]},
        "three at once": {r["length"]: (r["exact"], r["questions"]) for r in results["needles"]},
        "MQAR": {r["length"]: (r["accuracy"], r["questions"]) for r in results["queries"]},
    }


def _lengths(results: Mapping[str, Any]) -> str:
    kinds = _by_length(results)
    lengths = sorted({length for values in kinds.values() for length in values})
    rows = [
        [f"{length:,}", *(f"{v[length][0]:.1%} of {v[length][1]}" if length in v else "" for v in kinds.values())]
        for length in lengths
    ]
    control = next((r["accuracy_random_selection"] for r in results["recall"]), None)
    told = "" if control is None else f"<p>Lookups with random entries in place of the indexers': {control:.1%}.</p>"
    return _table(["tokens", *kinds], rows) + told


def _depths(rows: Sequence[Mapping[str, Any]]) -> str:
    depths = sorted({depth for row in rows for depth in row["by_depth"]}, key=float)
    return _table(
        ["tokens", *(f"depth {depth}" for depth in depths)],
        [
            [
                f"{row['length']:,}",
                *(f"{row['by_depth'][d]['exact']:.0%}" if d in row["by_depth"] else "" for d in depths),
            ]
            for row in rows
        ],
    )


def _losses(results: Mapping[str, Any]) -> str:
    rows = [
        [f"{name}: text", f"{v['nats_per_token']:.3f}", f"{v['bits_per_byte']:.3f} bits per byte"]
        for name, v in results["text"].items()
    ]
    rows += [
        [f"{name}: answers", f"{v['nats']:.3f}", f"{v['exact_answers']:.1%} of {v['answers']} exact"]
        for name, v in results["chats"].items()
    ]
    language = results["language"]
    told = f"{language['excess']:+.3f} above {language['ideal']:.3f} (entropy {language['entropy']:.3f})"
    rows.append(["n-gram language", f"{language['nats']:.3f}", told])
    for name, values in results["exercises"].items():
        exact = f", {values['exact_answers']:.1%} of answers exact" if "exact_answers" in values else ""
        rows.append([name, f"{values['nats']:.3f}", f"{values['token_accuracy']:.1%} of tokens{exact}"])
    return _table(["", "nats a token", ""], rows)


def _indexers(found: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            f"{v['recall']:.3f}",
            ", ".join(f"{layer}: {value:.2f}" for layer, value in v["recall_by_layer"].items()),
            f"{v['load']:.2f}",
            ", ".join(f"{value:.2f}" for value in v["load_by_layer"]),
        ]
        for name, v in found.items()
    ]
    return _table(["on", "recall of best 8", "by index source", "load", "by layer"], rows)


def _replay(found: Mapping[str, Any]) -> str:
    together = found["together"]
    rows = [
        [f"{kind} replay", f"{found[kind]['cost']:+.4f}", f"{100 * found[kind]['accuracy_change']:+.2f} points"]
        for kind in ("decoder", "encoder")
    ]
    rows.append(["FP4, pool and decoder replay together", f"{together['costs']:+.4f}", ""])
    return _table(["", "nats", "accuracy"], rows)


def _figure(results: Mapping[str, Any], draw: Callable[[Any, Mapping[str, Any]], None]) -> str:
    """A plot as SVG in the page, or nothing where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        return ""
    figure, axes = pyplot.subplots(figsize=(8.5, 3.8))
    draw(axes, results)
    figure.tight_layout()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    pyplot.close(figure)
    text = drawn.getvalue()
    return text[text.index("<svg") :]


def _draw_lengths(axes: Any, results: Mapping[str, Any]) -> None:
    for kind, values in _by_length(results).items():
        axes.plot(list(values), [share for share, _ in values.values()], "o-", markersize=4, label=kind)
    trained = results["model"]["trained_length"]
    if trained:
        axes.axvline(trained, color="gray", linestyle=":", label="longest trained")
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("tokens")
    axes.set_ylabel("exact answers")
    axes.legend()


def _draw_replay(axes: Any, results: Mapping[str, Any]) -> None:
    for kind in ("decoder", "encoder"):
        by_offset = {int(offset): cost for offset, cost in results["replay"][kind]["by_offset"].items()}
        axes.plot(list(by_offset), list(by_offset.values()), "o-", markersize=4, label=f"{kind} replay")
    axes.axhline(0.02, color="gray", linestyle=":", label="0.02")
    axes.set_xlabel("offset of the cut, tokens")
    axes.set_ylabel("nats a token more")
    axes.legend()
