"""Which cedar runs: the installed number, and the commit when the code lies in a git checkout."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def version() -> str:
    """`0.1.0`, or `0.1.0 (1ccafed)` from a checkout, `1ccafed-dirty` if files differ from the commit.

    The commit is that of the files which run, wherever the package was installed from.
    """
    number = importlib.metadata.version("cedar-lm")
    return f"{number} ({commit()})" if commit() else number


@lru_cache(maxsize=1)
def commit() -> str:
    """`1ccafed`, `1ccafed-dirty`, or nothing outside a checkout."""
    checkout = Path(__file__).resolve().parents[1]
    git = shutil.which("git")
    if git is None or not (checkout / ".git").exists():
        return ""
    command = [git, "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=7"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else ""
