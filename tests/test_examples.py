"""Every example runs as it stands, within a minute and 60 lines (about 25 s)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_example(example: Path, model_dir: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 60
    done = subprocess.run([sys.executable, str(example), str(model_dir)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
