"""The version names the code that runs."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest

from cedar.version import version

ROOT = Path(__file__).resolve().parents[1]


def test_it_is_the_installed_number_and_the_checkout_s_commit() -> None:
    text = version()
    assert text.startswith(importlib.metadata.version("cedar-lm"))
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout: there is no commit to name")
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        pytest.skip(f"git does not read this checkout: {head.stderr.strip()}")
    commit = re.search(r"\(([0-9a-f]+)(-dirty)?\)$", text)
    assert commit is not None
    assert head.stdout.startswith(commit[1])
