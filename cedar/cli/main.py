"""`cedar`: runs one command and turns what the user can cause into one line on stderr."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from cedar.cli.commands import app
from cedar.errors import CedarError


def version() -> str:
    """`0.1.0`, followed by the commit when cedar runs from a git checkout."""
    number = importlib.metadata.version("cedar-lm")
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return number
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    commit = answer.stdout.strip()
    return f"{number} ({commit})" if answer.returncode == 0 and commit else number


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
