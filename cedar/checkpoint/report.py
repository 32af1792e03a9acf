"""What `cedar inspect` and `cedar convert` print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cedar.chat.tokenizer import Tokenizer
from cedar.checkpoint.files import CheckpointFiles
from cedar.checkpoint.names import Part, stored_tensors
from cedar.checkpoint.write import COMPANIONS, Written
from cedar.config.layers import LayerKind, layer_plans
from cedar.config.model import ModelConfig
from cedar.errors import FormatError
from cedar.planner.memory import backbone_parameters, engram_parameters
from cedar.planner.report import bytes_text, count_text

_KIND_LETTERS = {LayerKind.WINDOW: "S", LayerKind.FULL: "F", LayerKind.REINDEX: "R", LayerKind.REUSE: "U"}


def bytes_by_part(files: CheckpointFiles) -> dict[Part, int]:
    """Payload found of each part that the config knows."""
    table = stored_tensors(files.config)
    counts: Counter[Part] = Counter()
    for name, location in files.locations.items():
        if name in table:
            counts[table[name].part] += location.stop - location.start
    return {part: counts[part] for part in files.expected}


def dtypes(files: CheckpointFiles) -> dict[str, tuple[int, int]]:
    """Number of tensors and bytes of each dtype found."""
    found: dict[str, tuple[int, int]] = {}
    for location in files.locations.values():
        tensors, num_bytes = found.get(location.dtype, (0, 0))
        found[location.dtype] = (tensors + 1, num_bytes + location.stop - location.start)
    return dict(sorted(found.items()))


def layer_letters(config: ModelConfig) -> str:
    """The layers in order: S window only, F1 and F2 full at ratio 1 and 2, R reindex, U reuse; the bar is the border
    of encoder and decoder.

    >>> from cedar.config.presets import nano
    >>> layer_letters(nano())
    'S S F2 U | F1 U R U'
    """
    words = []
    for plan in layer_plans(config):
        if plan.layer == config.boundary_layer_id:
            words.append("|")
        ratio = str(plan.ratio) if plan.kind is LayerKind.FULL else ""
        words.append(_KIND_LETTERS[plan.kind] + ratio)
    return " ".join(words)


def tokenizer_state(directory: Path, config: ModelConfig) -> tuple[str, bool]:
    """A sentence on the directory's tokenizer, and whether it is in order (none at all is)."""
    if not (directory / "tokenizer.json").is_file():
        return "none beside the weights; Engram needs its token map before the model can run", True
    try:
        tokenizer = Tokenizer.load(directory)
        tokenizer.check(config)
    except FormatError as error:
        return str(error), False
    return f"{len(tokenizer)} tokens, {tokenizer.compressed_map()[1]} for Engram; fits the config", True


def as_json(files: CheckpointFiles) -> dict[str, Any]:
    """Everything `print_report` shows, for programs."""
    sizes = bytes_by_part(files)
    sentence, tokenizer_fits = tokenizer_state(files.directory, files.config)
    return {
        "directory": str(files.directory),
        "sound": not files.problems and tokenizer_fits,
        "parts": {
            part.value: {"matched": files.matched[part], "expected": total, "bytes": sizes[part]}
            for part, total in files.expected.items()
        },
        "dtypes": {name: {"tensors": tensors, "bytes": size} for name, (tensors, size) in dtypes(files).items()},
        "shards": len({location.file for location in files.locations.values()}),
        "parameters_backbone": backbone_parameters(files.config),
        "parameters_engram": engram_parameters(files.config),
        "tokenizer": sentence,
        "problems": list(files.problems),
    }


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_report(files: CheckpointFiles, console: Console) -> bool:
    """Tables of a checkpoint, then every problem; returns whether it is sound."""
    config = files.config
    a, e = config.attention, config.engram
    facts = [
        ("layers", layer_letters(config)),
        ("hidden, heads", f"{config.hidden_size}, {a.num_heads} x {a.head_dim}, window {a.sliding_window}"),
        (
            "experts",
            f"{config.moe.num_routed_experts} routed of {config.moe.inner_size}, "
            f"{config.moe.num_experts_per_token} a token, and a shared one",
        ),
        ("vocabulary", f"{config.vocab_size}, {e.compressed_vocab_size} for Engram in layers {list(e.layer_ids)}"),
        (
            "parameters",
            f"{count_text(backbone_parameters(config))} backbone, {count_text(engram_parameters(config))} Engram",
        ),
        ("draft", f"{config.draft.num_blocks} blocks" if config.draft.num_blocks else "none"),
        ("vision", f"{config.vision.num_layers} layers" if config.vision else "none"),
    ]
    sentence, tokenizer_fits = tokenizer_state(files.directory, config)
    facts.append(("tokenizer", sentence))
    summary = Table(title=str(files.directory), title_justify="left", title_style="bold", box=None, show_header=False)
    for name, fact in facts:
        summary.add_row(name, escape(fact))
    console.print(summary)
    console.print()
    sizes = bytes_by_part(files)
    console.print(
        _table(
            "tensors by part",
            ("part", "matched", "expected", "bytes"),
            (
                (part.value, f"{files.matched[part]:,}", f"{total:,}", bytes_text(sizes[part]))
                for part, total in files.expected.items()
            ),
        )
    )
    found = dtypes(files)
    total = (sum(count for count, _ in found.values()), sum(size for _, size in found.values()))
    num_shards = len({location.file for location in files.locations.values()})
    console.print(
        _table(
            f"tensors by dtype, in {num_shards} file{'s' if num_shards != 1 else ''}",
            ("dtype", "tensors", "bytes"),
            ((name, f"{count:,}", bytes_text(size)) for name, (count, size) in (*found.items(), ("all", total))),
        )
    )
    for problem in files.problems:
        console.print(f"[red]problem[/red] {escape(problem)}", highlight=False)
    if not tokenizer_fits:
        console.print(f"[red]problem[/red] {escape(sentence)}", highlight=False)
    num_problems = len(files.problems) + (not tokenizer_fits)
    plural = "" if num_problems == 1 else "s"
    console.print(f"[red]{num_problems} problem{plural}[/red]" if num_problems else "[green]sound[/green]")
    return not num_problems


def left_behind(source: Path, target: Path) -> list[str]:
    """Files of `source` that a conversion does not take along: neither weights nor companions."""
    if source.resolve() == target.resolve():
        return []
    known = {*COMPANIONS, "config.json", "model.safetensors.index.json"}
    return sorted(
        entry.name for entry in source.iterdir() if entry.name not in known and entry.suffix != ".safetensors"
    )


def print_written(written: Written, source: Path, target: Path, console: Console) -> None:
    """What a conversion wrote, and what it left behind."""
    parts = ", ".join(f"{count:,} {part.value}" for part, count in written.tensors.items())
    shards = f"{len(written.shards)} file{'s' if len(written.shards) != 1 else ''}"
    console.print(escape(f"{target}: {parts} tensors, {bytes_text(written.num_bytes)} in {shards}"), highlight=False)
    console.print(escape(f"beside them: {', '.join(sorted(written.files))}"), highlight=False)
    behind = left_behind(source, target)
    if behind:
        console.print(escape(f"not taken along: {', '.join(behind)}"), highlight=False)
