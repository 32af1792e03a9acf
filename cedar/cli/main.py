"""`cedar`: runs one command and turns what the user can cause into one line on stderr."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cedar.cli import operations
from cedar.cli.commands import app
from cedar.errors import CedarError
from cedar.version import version

app.command()(operations.doctor)
app.command()(operations.key)
app.add_typer(operations.bench, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"cedar {version()}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print version and commit.")
    ] = False,
) -> None:
    """Train, inspect and serve models of the DeepSeek-V4.1-Flash architecture."""


def main() -> None:
    """Entry point. A CedarError ends with its message and status 2, Ctrl-C with status 130."""
    try:
        app()
    except CedarError as error:
        print(f"cedar: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # `cedar plan | head`: the reader left, and the interpreter must not complain while it flushes
        sys.stderr.close()
        sys.exit(141)


if __name__ == "__main__":
    main()
