"""The digest of weights: contents and nothing else, noted beside them, and never believed wrongly (about 1 s)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cedar.checkpoint import digest
from cedar.checkpoint.digest import NOTE, weights_digest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for number in range(3):
        (directory / f"model-{number}.safetensors").write_bytes(bytes([number]) * 100_000)
    return directory


def noting(directory: Path) -> bytes:
    return weights_digest(directory, worth_noting_bytes=1)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that were read, and files settle at once."""
    names: list[str] = []
    read = digest._content_digest

    def listed(shard: Path) -> str:
        names.append(shard.name)
        return read(shard)

    monkeypatch.setattr(digest, "_content_digest", listed)
    monkeypatch.setattr(digest, "_SETTLED_S", -1.0)
    return names


def test_a_copy_has_the_same_and_a_changed_byte_another(model: Path, tmp_path: Path) -> None:
    """The same size, name, header and time of writing: what a fingerprint over those would call the same weights."""
    one = weights_digest(model)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert weights_digest(copy) == one and not (model / NOTE).exists()
    shard = copy / "model-1.safetensors"
    about = shard.stat()
    content = bytearray(shard.read_bytes())
    content[77_777] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert shard.stat().st_mtime_ns == about.st_mtime_ns and weights_digest(copy) != one


def test_swapped_names_and_a_missing_shard_are_others(model: Path) -> None:
    one = weights_digest(model)
    (model / "model-0.safetensors").rename(model / "x")
    (model / "model-1.safetensors").rename(model / "model-0.safetensors")
    two = weights_digest(model)
    (model / "x").rename(model / "model-1.safetensors")
    assert len({one, two, weights_digest(model)}) == 3


def test_what_was_noted_is_not_read_again_unless_it_changed(model: Path, reads: list[str]) -> None:
    one = noting(model)
    assert len(reads) == 3 and (model / NOTE).exists()
    assert noting(model) == one and len(reads) == 3
    shard = model / "model-2.safetensors"
    about = shard.stat()
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    os.utime(shard, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert noting(model) != one and reads[3:] == ["model-2.safetensors"]


def test_a_fresh_file_is_not_noted(model: Path) -> None:
    """Two writes within a tick of the clock have the same times."""
    noting(model)
    assert NOTE in {file.name for file in model.iterdir()} and digest._read_note(model / NOTE) == {}


@pytest.mark.parametrize("note", ["nonsense", "[]", '{"model-0.safetensors": 5}', '{"model-0.safetensors": [1, 2]}'])
def test_a_broken_note_is_ignored(model: Path, reads: list[str], note: str) -> None:
    one = noting(model)
    (model / NOTE).write_text(note)
    assert noting(model) == one and len(reads) == 6


def test_a_directory_that_cannot_be_written_is_read_each_time(
    model: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refused)
    assert noting(model) == noting(model) and len(reads) == 6


def test_it_is_fast_and_imports_no_torch(model: Path) -> None:
    (model / "large.safetensors").write_bytes(bytes(64 * 2**20))
    began = time.process_time()
    weights_digest(model)
    # half a gigabyte a second on the slowest of machines
    assert time.process_time() - began < 0.13 * 4
    code = "import sys, cedar.checkpoint.digest; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
