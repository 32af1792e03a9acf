"""One function per subcommand, each a few calls into the packages.

Nothing is imported above that a command might not need: `cedar --help` and `cedar plan` load no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="cedar",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def plan(
    preset: Annotated[str | None, typer.Option(help="A shape cedar knows: nano, micro, mini, small, flash.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json, or the checkpoint folder that holds one.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change one field, for example indexer.topk=256.")
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option(metavar="TOKENS", help="Context lengths: 4096, 64K, 1M. Repeat for more.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Device memory to fill, for example 24GiB.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw cache and FLOPs beside other models.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Bytes, parameters and FLOPs of a model, before it runs; `flash` if none is named."""
    from cedar.config.load import load_config, override
    from cedar.config.presets import preset as preset_config
    from cedar.errors import ConfigError
    from cedar.planner import fit, report

    if preset is not None and config is not None:
        raise ConfigError("--preset and --config both name a model: give one of them")
    from rich.console import Console

    console = Console()
    # a pipe has no width of its own
    console = console if console.is_terminal else Console(width=120)
    shape = preset_config(preset or "flash") if config is None else load_config(config)
    name = (preset or "flash") if config is None else str(config)
    contexts = report.DEFAULT_CONTEXTS if as_json or console.width >= 100 else report.NARROW_CONTEXTS
    asked = report.Plan(
        name=f"{name} (changed)" if change else name,
        config=override(shape, change or ()),
        contexts=tuple(fit.parse_tokens(text) for text in context) if context else contexts,
        memory_bytes=None if memory is None else fit.parse_bytes(memory),
    )
    if plot is not None:
        from cedar.planner.plot import draw

        draw(asked, plot)
    if as_json:
        import json

        print(json.dumps(report.as_json(asked), indent=2))
        return
    report.print_tables(asked, console)
    if plot is not None:
        print(f"figures: {plot}")
