"""The golden files are the ones that were copied in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_nobody_changed_the_vectors() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "vectors.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
