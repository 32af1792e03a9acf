"""The report's two figures: cache bytes a token, and decode FLOPs against context."""

from __future__ import annotations

import math
from pathlib import Path

from cedar.errors import ConfigError
from cedar.planner.peers import Peer, peers
from cedar.planner.report import Plan, tokens_text

_CONTEXTS = tuple(2**power for power in range(12, 21))
# ours first; told apart without colour too, by the labels at the lines' ends
_COLOURS = ("#b5482f", "#2f6f8f", "#7a8b3a", "#6b6b6b")


def draw(plan: Plan, path: Path) -> None:
    """Write both figures side by side as a PNG.

    Raises:
        ConfigError: matplotlib is missing, the name does not end in .png, or its folder does not exist.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: expected a file name that ends in .png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install 'cedar-lm[plot]'") from error
    models = peers(plan.config, plan.name)
    figure = Figure(figsize=(12, 4.8), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    _draw_bytes(left, models)
    _draw_flops(right, models)
    figure.savefig(path, dpi=150)


def _draw_bytes(axes, models: tuple[Peer, ...]) -> None:  # type: ignore[no-untyped-def]
    """Horizontal bars on a logarithmic axis, each with its number."""
    names = [model.name for model in models]
    values = [model.bytes_per_token for model in models]
    axes.barh(names, values, color=_COLOURS, height=0.6)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(10 ** math.floor(math.log10(min(values))), max(values) * 12)
    for row, value in enumerate(values):
        times = f"  ({value / values[0]:,.3g}x)" if row else ""
        axes.text(value * 1.12, row, f"{value:,.0f} B{times}", va="center", fontsize=10)
    axes.set_title("Cache kept per token of context", loc="left", fontweight="bold")
    axes.set_xlabel("bytes per token (logarithmic)")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e4e4")


def _draw_flops(axes, models: tuple[Peer, ...]) -> None:  # type: ignore[no-untyped-def]
    """One line per model over 4K to 1M tokens, labelled at its end."""
    for model, colour in zip(models, _COLOURS, strict=True):
        values = [model.decode_flops(context) / 1e9 for context in _CONTEXTS]
        axes.plot(_CONTEXTS, values, color=colour, linewidth=2.2 if model is models[0] else 1.5)
        growth = values[-1] / values[0]
        axes.text(
            _CONTEXTS[-1] * 1.08,
            values[-1],
            f"{model.name}\n{values[-1]:,.4g} G, {growth:.3g}x",
            color=colour,
            va="center",
            fontsize=9,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(_CONTEXTS[0], _CONTEXTS[-1] * 4.5)
    axes.set_xticks(_CONTEXTS[::2], [tokens_text(context) for context in _CONTEXTS[::2]])
    axes.minorticks_off()
    axes.set_title("One generated token, by context", loc="left", fontweight="bold")
    axes.set_xlabel("context in tokens")
    axes.set_ylabel("GFLOP, FP8 counted 1/2, FP4 x FP4 1/4")
    axes.grid(color="#e4e4e4")
