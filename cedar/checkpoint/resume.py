"""Training state on disk: parameters, optimiser, data position, random state. Atomic, checked, few kept.

A checkpoint is a folder `step-00000500` that appears whole or not at all: it is written under another name,
flushed, then renamed. A process killed at any moment leaves the previous one as it was.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from cedar.errors import CapacityError, FormatError

FORMAT_VERSION = 1
_PARTIAL = ".partial-"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """One moment of a run.

    Attributes:
        step: Steps done; the next batch is that of this number.
        model: Parameters and buffers by name, float32 masters.
        optimizer: Its tensors by name.
        random: Random generators' states by name.
        meta: Plain JSON values: config, counters.
    """

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    meta: Mapping[str, Any]


def save_state(folder: str | Path, state: TrainState, *, keep: int = 2) -> Path:
    """Write a checkpoint into `folder` and drop all but the newest `keep`.

    Raises:
        CapacityError: The disk is full or cannot be written; the earlier checkpoints are untouched.
    """
    folder = Path(folder)
    target = folder / f"step-{state.step:08d}"
    partial = folder / f"{_PARTIAL}{target.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        checks = {}
        for name in ("model", "optimizer", "random"):
            tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in getattr(state, name).items()}
            data = safetensors.torch.save(tensors)
            checks[name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
            _write(partial / f"{name}.safetensors", data)
        values = {"format": FORMAT_VERSION, "step": state.step, "files": checks, "meta": dict(state.meta)}
        _write(partial / "state.json", (json.dumps(values, indent=1) + "\n").encode())
        _flush_folder(partial)
        if target.exists():
            shutil.rmtree(target)
        os.rename(partial, target)
        _flush_folder(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        cause = "the disk is full" if error.errno == errno.ENOSPC else f"{error.strerror} ({error.filename})"
        kept = [old.name for old in checkpoints(folder)]
        raise CapacityError(
            f"cannot save step {state.step} in {folder}: {cause}; {kept[0] if kept else 'no checkpoint'} is still there"
        ) from error
    for old in checkpoints(folder)[keep:]:
        shutil.rmtree(old)
    return target


def checkpoints(folder: str | Path) -> list[Path]:
    """Complete checkpoints of a run, newest first."""
    folder = Path(folder)
    names = folder.iterdir() if folder.is_dir() else ()
    found = [path for path in names if re.fullmatch(r"step-\d{8}", path.name)]
    return sorted(found, reverse=True)


def load_state(path: str | Path) -> TrainState:
    """Read one checkpoint folder back, every byte checked.

    Raises:
        FormatError: A file is missing or damaged, or another version wrote it; the message names the file.
    """
    path = Path(path)
    try:
        values = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} is no training checkpoint: state.json cannot be read ({error})") from error
    if values.get("format") != FORMAT_VERSION:
        raise FormatError(f"{path} has format {values.get('format')}, this version of cedar reads {FORMAT_VERSION}")
    parts = {}
    for name, check in values["files"].items():
        file = path / f"{name}.safetensors"
        try:
            data = file.read_bytes()
        except OSError as error:
            raise FormatError(f"cannot read {file}: {error.strerror}") from error
        if len(data) != check["bytes"] or zlib.crc32(data) != check["crc32"]:
            raise FormatError(f"{file} is damaged: {len(data)} bytes, expected {check['bytes']} with another checksum")
        parts[name] = safetensors.torch.load(data)
    return TrainState(
        step=values["step"],
        model=parts["model"],
        optimizer=parts["optimizer"],
        random=parts["random"],
        meta=values["meta"],
    )


def load_newest(folder: str | Path) -> tuple[TrainState | None, list[str]]:
    """(the newest checkpoint that is whole, or None; what was wrong with newer ones)."""
    problems: list[str] = []
    for path in checkpoints(folder):
        try:
            return load_state(path), problems
        except FormatError as error:
            problems.append(str(error))
    return None, problems


def save_weights(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 15 << 20,
) -> list[Path]:
    """Parameters and buffers alone in shards, to go on from on another machine with a fresh optimiser."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        # biases of the router are tiny and steer by small differences: they stay as they are
        stored = tensor.detach().cpu()
        stored = (
            stored.to(dtype).contiguous() if stored.is_floating_point() and stored.dim() > 1 else stored.contiguous()
        )
        if shards[-1] and size + stored.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += stored.nbytes
    files = []
    for number, shard in enumerate(shards, start=1):
        files.append(folder / f"weights-{number:05d}-of-{len(shards):05d}.safetensors")
        safetensors.torch.save_file(shard, files[-1])
    return files


def load_weights(folder: str | Path) -> dict[str, Tensor]:
    """What `save_weights` wrote, float32.

    Raises:
        FormatError: No shard, a missing one, or one that cannot be read.
    """
    files = sorted(Path(folder).glob("weights-*-of-*.safetensors"))
    expected = int(files[0].stem.rsplit("-", 1)[1]) if files else 0
    if not files or len(files) != expected:
        raise FormatError(f"{folder} holds {len(files)} weight shards, expected {expected or 'at least one'}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= safetensors.torch.load_file(file)
        except (safetensors.SafetensorError, OSError) as error:
            raise FormatError(f"cannot read {file}: {error}") from error
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _write(file: Path, data: bytes) -> None:
    with file.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
