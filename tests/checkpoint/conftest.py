"""Golden checkpoints as fixtures, to be broken."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.raw import VECTORS, RawCheckpoint


@pytest.fixture(scope="session")
def _golden_raw() -> dict[str, RawCheckpoint]:
    return {name: RawCheckpoint.load(VECTORS / name) for name in ("ckpt_a", "ckpt_b")}


@pytest.fixture
def raw(_golden_raw: dict[str, RawCheckpoint]) -> RawCheckpoint:
    """Golden ckpt_b, to be changed freely."""
    golden = _golden_raw["ckpt_b"]
    return RawCheckpoint(golden.config, dict(golden.tensors))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of golden ckpt_b's files."""
    return Path(shutil.copytree(VECTORS / "ckpt_b", tmp_path / "ckpt"))
