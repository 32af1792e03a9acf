"""The pages that `make numbers` writes are what the planner says today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_no_number_is_stale() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_numbers.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
