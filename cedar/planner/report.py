"""What `cedar plan` prints and `docs/numbers.md` holds: tables and JSON over the planner's functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from cedar.config.model import ModelConfig
from cedar.config.presets import PRESETS
from cedar.planner import fit, flops, kv, memory
from cedar.planner.peers import peers, v1

DEFAULT_CONTEXTS = (2**12, 2**14, 2**16, 2**18, 2**20)
# what a terminal of 80 columns shows when nobody asks for more
NARROW_CONTEXTS = (2**12, 2**16, 2**20)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table: the first column names the row, the others are right-aligned text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """As a Markdown table under its title."""
        lines = [f"## {self.title}", "", "| " + " | ".join(self.columns) + " |"]
        lines.append("|---|" + "---:|" * (len(self.columns) - 1))
        lines.extend("| " + " | ".join(row) + " |" for row in self.rows)
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One question to the planner.

    Attributes:
        name: What the model is called in the tables.
        contexts: Context lengths in tokens.
        memory_bytes: Device memory to fill, or None.
    """

    name: str
    config: ModelConfig
    contexts: tuple[int, ...] = DEFAULT_CONTEXTS
    memory_bytes: int | None = None


def tokens_text(tokens: int) -> str:
    """`64K` for whole multiples of 1,024, digits otherwise.

    >>> tokens_text(65536), tokens_text(2**20), tokens_text(1000)
    ('64K', '1M', '1,000')
    """
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


def bytes_text(count: float) -> str:
    """Bytes in the largest decimal unit that leaves at least one digit before the point.

    >>> bytes_text(890), bytes_text(3108864), bytes_text(510286023000)
    ('890 B', '3.11 MB', '510.29 GB')
    """
    for size, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:g} B"


def count_text(count: float) -> str:
    """Parameters with a decimal prefix.

    >>> count_text(551566180464), count_text(3279760)
    ('551.57 B', '3.28 M')
    """
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:g}"


def flops_text(count: float) -> str:
    """Operations in units of 10^9, of 10^6 where that leaves nothing to read.

    >>> flops_text(3397309190144), flops_text(78643200), flops_text(1492000)
    ('3,397.3 G', '0.08 G', '1.5 M')
    """
    if count < 1e7:
        return f"{count / 1e6:.1f} M"
    return f"{count / 1e9:,.1f} G" if count >= 1e9 else f"{count / 1e9:.2f} G"


def as_json(plan: Plan) -> dict[str, Any]:
    """Every number as plain JSON; bytes, parameters and operations are not scaled.

    `decode_flops_growth_4k_1m` is the increase (0.25 for a quarter), under the report's weighting.
    """
    config = plan.config
    head = config.vocab_size * config.hidden_size
    decode = memory.active_decode_parameters(config)
    result: dict[str, Any] = {
        "model": plan.name,
        "global_kv_bytes_per_token": _whole(kv.global_bytes_per_token(config)),
        "entry_bytes": kv.entry_bytes(config),
        "index_key_bytes": kv.index_key_bytes(config),
        "window_row_bytes": kv.window_row_bytes(config),
        "page_bytes": kv.page_bytes(config),
        "snapshot_bytes": kv.snapshot_bytes(config),
        "encoder_snapshot_bytes": kv.encoder_snapshot_bytes(config),
        "parameters_backbone": memory.backbone_parameters(config),
        "parameters_engram": memory.engram_parameters(config),
        "parameters_text": memory.text_parameters(config),
        "parameters_by_part": memory.parameters_by_part(config),
        "active_parameters_prefill": memory.active_prefill_parameters(config),
        "active_parameters_decode": decode,
        "active_parameters_decode_with_head": decode + head,
        "checkpoint_bytes": memory.checkpoint_bytes(config),
        "decode_flops_growth_4k_1m": flops.decode_growth(config),
        "decode_flops_ratio_1m_4k": 1 + flops.decode_growth(config),
        "tiers": {
            tier.name: {
                "page_bytes": tier.page_bytes,
                "bytes_per_token": _whole(tier.bytes_per_token),
                "sequence_bytes": tier.sequence_bytes,
                "bytes_by_context": {str(context): tier.total_bytes(context) for context in plan.contexts},
            }
            for tier in kv.tiers(config)
        },
        "decode_flops": {str(context): flops.decode_flops(config, context) for context in plan.contexts},
        "decode_flops_weighted": {
            weighting.name: {
                str(context): flops.weighted(flops.decode_flops(config, context), weighting)
                for context in plan.contexts
            }
            for weighting in flops.WEIGHTINGS
        },
        "prefill_flops": {str(context): flops.prefill_flops(config, context) for context in plan.contexts},
        "training_flops_per_token": {
            str(context): sum(flops.training_flops(config, context).values()) for context in plan.contexts
        },
        "compared": {
            peer.name: {
                "bytes_per_token": _whole(peer.bytes_per_token),
                "decode_flops": {str(context): peer.decode_flops(context) for context in plan.contexts},
            }
            for peer in peers(config, plan.name)
        },
    }
    if plan.memory_bytes is not None:
        result["memory_bytes"] = plan.memory_bytes
        result["fit"] = [
            {
                "weights": row.form,
                "weight_bytes": row.weights,
                "engram_bytes": row.engram_tables,
                "activation_bytes": row.activations,
                "missing_bytes": row.missing,
                "pages": row.pages,
                "tokens": row.tokens,
                "sequences": {str(context): count for context, count in row.sequences.items()},
            }
            for row in fit.fit(config, plan.memory_bytes, plan.contexts)
        ]
    return result


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def tables(plan: Plan) -> Iterator[Table]:
    """The tables of one plan, in the order they are read."""
    yield _cache_table(plan)
    yield _parameter_table(plan)
    yield _flops_table(plan)
    yield _weighting_table(plan)
    yield _prefill_table(plan)
    yield _peer_table(plan)
    if plan.memory_bytes is not None:
        yield _fit_table(plan, plan.memory_bytes)


def print_tables(plan: Plan, console: Console) -> None:
    """All tables of `plan` to a terminal."""
    # all of them first: a question that cannot be answered prints no half of an answer
    for table in list(tables(plan)):
        drawn = RichTable(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for position, column in enumerate(table.columns):
            drawn.add_column(column, justify="right" if position else "left", no_wrap=position > 0)
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
        console.print()


def _contexts(plan: Plan) -> tuple[str, ...]:
    return tuple(tokens_text(context) for context in plan.contexts)


def _cache_table(plan: Plan) -> Table:
    rows = tuple(
        (
            tier.name,
            f"{tier.bytes_per_token:g} B",
            bytes_text(tier.sequence_bytes),
            *(bytes_text(tier.total_bytes(context)) for context in plan.contexts),
        )
        for tier in kv.tiers(plan.config)
    )
    columns = ("tier", "per token", "sequence", *_contexts(plan))
    return Table(title=f"{plan.name}: a conversation in bytes", columns=columns, rows=rows)


def _parameter_table(plan: Plan) -> Table:
    config = plan.config
    head = config.vocab_size * config.hidden_size
    decode = memory.active_decode_parameters(config)
    rows = [(part, count_text(count)) for part, count in memory.parameters_by_part(config).items()]
    rows += [
        ("backbone (no Engram, draft, vision)", count_text(memory.backbone_parameters(config))),
        ("active, prefill", count_text(memory.active_prefill_parameters(config))),
        ("active, decode", count_text(decode)),
        ("active, decode with head", count_text(decode + head)),
        ("checkpoint", bytes_text(memory.checkpoint_bytes(config))),
    ]
    return Table(title=f"{plan.name}: parameters", columns=("part", "stored"), rows=tuple(rows))


def _flops_table(plan: Plan) -> Table:
    counts = [flops.decode_flops(plan.config, context) for context in plan.contexts]
    rows = [(component, *(flops_text(count[component]) for count in counts)) for component in counts[0]]
    rows.append(("all", *(flops_text(sum(count.values())) for count in counts)))
    return Table(
        title=f"{plan.name}: operations of one generated token, by context",
        columns=("component", *_contexts(plan)),
        rows=tuple(rows),
    )


def _weighting_table(plan: Plan) -> Table:
    counts = [flops.decode_flops(plan.config, context) for context in plan.contexts]
    rows = tuple(
        (
            weighting.name,
            *(flops_text(flops.weighted(count, weighting)) for count in counts),
            f"{1 + flops.decode_growth(plan.config, weighting):.2f}",
        )
        for weighting in flops.WEIGHTINGS
    )
    return Table(
        title=f"{plan.name}: the same, weighted by arithmetic",
        columns=("one operation counts", *_contexts(plan), "1M / 4K"),
        rows=rows,
    )


def _prefill_table(plan: Plan) -> Table:
    replays: tuple[flops.DecoderReplay, ...] = ("bounded", "exact", "off")
    rows = [
        (
            f"prompt, decoder replay {replay}",
            *(
                flops_text(sum(flops.prefill_flops(plan.config, context, replay).values()) / context)
                for context in plan.contexts
            ),
        )
        for replay in replays
    ]
    training = (flops_text(sum(flops.training_flops(plan.config, context).values())) for context in plan.contexts)
    rows.append(("training step", *training))
    return Table(
        title=f"{plan.name}: operations per token of a prompt or a training sequence",
        columns=("", *_contexts(plan)),
        rows=tuple(rows),
    )


def _peer_table(plan: Plan) -> Table:
    models = peers(plan.config, plan.name)
    rows = tuple(
        (
            peer.name,
            f"{peer.bytes_per_token:,g} B",
            f"{peer.bytes_per_token / models[0].bytes_per_token:,.4g}",
            *(flops_text(peer.decode_flops(context)) for context in plan.contexts),
        )
        for peer in models
    )
    return Table(
        title="Beside other models: cache bytes a token, weighted operations of one generated token",
        columns=("model", "per token", "times ours", *_contexts(plan)),
        rows=rows,
    )


def _fit_table(plan: Plan, memory_bytes: int) -> Table:
    rows = []
    answers = fit.fit(plan.config, memory_bytes, plan.contexts)
    for answer in answers:
        engram = bytes_text(answer.engram_tables) if answer.engram_tables else "mapped"
        if answer.missing:
            tail = (f"{bytes_text(answer.missing)} short", *("-" for _ in plan.contexts))
        else:
            tail = (f"{count_text(answer.tokens)} tokens", *(f"{count:,}" for count in answer.sequences.values()))
        rows.append((answer.form, bytes_text(answer.weights), engram, *tail))
    title = (
        f"{plan.name}: sequences of each length in {bytes_text(memory_bytes)}, "
        f"{bytes_text(answers[0].activations)} of it for the activations of a step"
    )
    columns = ("form", "weights", "Engram", "cache", *_contexts(plan))
    return Table(title=title, columns=columns, rows=tuple(rows))


def _preset_table() -> Table:
    rows = []
    for name, make in PRESETS.items():
        config = make()
        head = config.vocab_size * config.hidden_size
        rows.append(
            (
                name,
                count_text(memory.text_parameters(config)),
                count_text(memory.engram_parameters(config)),
                count_text(memory.active_prefill_parameters(config)),
                count_text(memory.active_decode_parameters(config) + head),
                bytes_text(memory.checkpoint_bytes(config)),
                f"{kv.global_bytes_per_token(config):g} B",
                f"{kv.window_row_bytes(config)} B",
            )
        )
    columns = (
        "preset",
        "text parameters",
        "of them Engram tables",
        "active, prefill",
        "active, decode with head",
        "checkpoint",
        "cache per token",
        "window row",
    )
    return Table(title="The presets", columns=columns, rows=tuple(rows))


def numbers_page(flash: ModelConfig) -> str:
    """`docs/numbers.md`: the presets, then every table of the release."""
    plan = Plan(name="flash", config=flash)
    parts = [
        "# Numbers\n",
        "Made by `make numbers` from `cedar/planner`; a test fails when this page is stale. Decimal units: 1 MB is\n"
        "10^6 bytes. Contexts are binary: 1M is 2^20 tokens. What is counted how: `docs/sources.md`.\n",
        _preset_table().markdown(),
        *(table.markdown() for table in tables(plan)),
    ]
    return "\n".join(parts)


def readme_table(flash: ModelConfig) -> str:
    """The six numbers of the README's first screen."""
    per_token = kv.global_bytes_per_token(flash)
    backbone = memory.backbone_parameters(flash)
    prefill = memory.active_prefill_parameters(flash)
    decode = memory.active_decode_parameters(flash)
    rows = (
        (
            "what a token of context leaves in the cache",
            f"{per_token:g} bytes, 1/{v1().bytes_per_token / per_token:.0f} of DeepSeek V1",
        ),
        ("a conversation of 1M tokens, 2^20", f"{per_token * 2**20 / 2**20:g} MiB"),
        ("what resumes it bit for bit, beside that, at any length", bytes_text(kv.snapshot_bytes(flash))),
        ("one generated token, at 1M instead of 4K of context", f"+{flops.decode_growth(flash):.0%} operations"),
        ("parameters", f"{count_text(backbone)} and {count_text(memory.engram_parameters(flash))} of Engram"),
        ("of them at work for a token", f"{count_text(prefill)} in a prompt, {count_text(decode)} in an answer"),
    )
    lines = ["| DeepSeek-V4.1-Flash as `cedar plan` computes it | |", "|---|---|"]
    lines.extend(f"| {name} | {value} |" for name, value in rows)
    return "\n".join(lines) + "\n"
