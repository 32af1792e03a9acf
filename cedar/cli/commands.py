"""One function per subcommand, each a few calls into the packages.

Nothing is imported above that a command might not need: `cedar --help` and `cedar plan` load no torch.
"""

from __future__ import annotations

import typer

app = typer.Typer(
    name="cedar",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
