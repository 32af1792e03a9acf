"""The files of a checkpoint directory: headers read, sizes checked, every tensor located. No tensor is loaded here.

safetensors lays a file out as 8 bytes of header length, a JSON header, then the tensors' bytes. The headers
are read here because the library refuses a damaged file as a whole, where we must say which tensors it costs.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections import Counter
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cedar.checkpoint.names import Part, StoredTensor, stored_tensors
from cedar.config.load import load_config
from cedar.config.model import ModelConfig
from cedar.errors import FormatError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# safetensors' own bound on a header
_MAX_HEADER_BYTES = 100_000_000
# bits of every dtype that safetensors names, so that a wrong one can still be measured
_DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_SHOWN_PROBLEMS = 50
_STORED_AS = {
    "F8_E4M3": "FP8 elements",
    "F8_E8M0": "the power-of-two scales of the weight beside it",
    "I8": "packed FP4, two columns a byte",
    "BF16": "not quantized",
    "F32": "kept in float32",
}


class CheckpointError(FormatError):
    """A checkpoint differs from its config.

    Attributes:
        problems: Every difference, one line each, all of them named.
    """

    def __init__(self, message: str, problems: tuple[str, ...]) -> None:
        super().__init__(message)
        self.problems = problems


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Where a tensor's bytes lie: `start` and `stop` count from the beginning of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """A checkpoint directory held against its config.

    Attributes:
        expected: Tensors by part that the config asks for.
        matched: Of those, how many are there as expected.
        locations: Every tensor found in the files, expected or not.
        problems: One line per difference; empty for a sound checkpoint.
    """

    directory: Path
    config: ModelConfig
    locations: dict[str, Location]
    expected: dict[Part, int]
    matched: dict[Part, int]
    problems: tuple[str, ...]
    _handles: dict[Path, Any] = field(default_factory=dict, repr=False)

    def require_sound(self) -> None:
        """Raises CheckpointError with matched / total and every problem, unless there is none."""
        if not self.problems:
            return
        counts = ", ".join(
            f"{self.matched[part]} of {total} {part.value} tensors match" for part, total in self.expected.items()
        )
        shown = [f"  {problem}" for problem in self.problems[:_SHOWN_PROBLEMS]]
        hidden = len(self.problems) - len(shown)
        if hidden:
            shown.append(f"  and {hidden} more; `cedar inspect {self.directory}` lists them all")
        raise CheckpointError(
            f"{self.directory} does not hold what its config.json asks for: {counts}; "
            f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}:\n" + "\n".join(shown),
            self.problems,
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Bytes `start` to `stop` of a tensor, as flat uint8 in memory of their own.

        Raises:
            FormatError: The file became shorter since its header was read.
        """
        location = self.locations[name]
        length = (location.stop - location.start if stop is None else stop) - start
        data = torch.zeros(length, dtype=torch.uint8)
        stream = self._handles.get(location.file)
        if stream is None:
            # one shard at a time: a checkpoint has dozens, a process a limited number of open files
            self.close()
            stream = self._handles[location.file] = location.file.open("rb", buffering=0)
        stream.seek(location.start + start)
        view = data.numpy().data
        while len(view):
            count = stream.readinto(view)
            if not count:
                raise FormatError(f"{location.file} ended inside {name}: it was cut while being read; copy it again")
            view = view[count:]
        return data

    def map(self, name: str) -> Tensor:
        """A tensor's bytes as flat uint8, memory-mapped read-only: pages load as they are touched."""
        location = self.locations[name]
        if location.start == location.stop:
            return torch.zeros(0, dtype=torch.uint8)
        base = location.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with location.file.open("rb") as stream:
            mapping = mmap.mmap(stream.fileno(), location.stop - base, access=mmap.ACCESS_READ, offset=base)
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns; a writable mapping would count as memory to be had
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(mapping, dtype=torch.uint8, offset=location.start - base)

    def close(self) -> None:
        """Close the shard that is open for reading. Mapped tensors stay valid."""
        for stream in self._handles.values():
            stream.close()
        self._handles.clear()


def open_checkpoint(path: str | Path) -> CheckpointFiles:
    """A checkpoint directory, checked in full against its config before any tensor is read.

    Raises:
        ConfigError: config.json is missing or wrong.
        FormatError: There are no safetensors files, or the index is not one.
        CheckpointError: A shard is missing or damaged; a tensor is missing, unexpected, or has another shape
            or dtype. All problems are in one error, with matched / total.
    """
    files = inspect_checkpoint(path)
    files.require_sound()
    return files


def inspect_checkpoint(path: str | Path) -> CheckpointFiles:
    """As `open_checkpoint`, but problems with shards and tensors are collected, not raised."""
    directory = Path(path)
    config = load_config(directory)
    problems: list[str] = []
    placed = placement(directory)
    locations: dict[str, Location] = {}
    lost: set[str] = set()
    for file_name, names in placed.items():
        try:
            found = read_header(directory / file_name)
        except FormatError as error:
            problems.append(f"{error}; it costs {len(names) or 'all'} tensors")
            lost |= names
            continue
        for name, location in found.items():
            if name in locations:
                problems.append(f"{name} is in {locations[name].file.name} and in {file_name}; keep one")
            elif names and name not in names:
                problems.append(f"{file_name} holds {name}, which the index does not place there")
            locations.setdefault(name, location)
        problems.extend(
            f"the index places {name} in {file_name}, which does not hold it" for name in sorted(names - found.keys())
        )
        lost |= names - found.keys()
    table = stored_tensors(config)
    matched: Counter[Part] = Counter()
    missing = [tensor for name, tensor in table.items() if name not in locations]
    for name, location in locations.items():
        if name in table:
            difference = _difference(table[name], location, config)
            matched[table[name].part] += not difference
            problems.extend(difference)
    unexpected = sorted(locations.keys() - table.keys())
    problems.extend(
        f"{tensor.name} is missing: expected {tensor.dtype} {list(tensor.shape)} ({_STORED_AS[tensor.dtype]})"
        for tensor in missing
        if tensor.name not in lost
    )
    problems.extend(
        _unexpected(name, locations[name], config, [tensor.name for tensor in missing]) for name in unexpected
    )
    expected = Counter(tensor.part for tensor in table.values())
    return CheckpointFiles(
        directory=directory,
        config=config,
        locations=locations,
        expected={part: expected[part] for part in Part if expected[part]},
        matched={part: matched[part] for part in Part},
        problems=tuple(problems),
    )


def placement(directory: Path) -> dict[str, set[str]]:
    """Shard file -> names the index places there; of a single file without index no name is known."""
    index = directory / INDEX_NAME
    if not index.is_file():
        if (directory / SINGLE_NAME).is_file():
            return {SINGLE_NAME: set()}
        stray = sorted(file.name for file in directory.glob("*.safetensors"))
        found = f"found {', '.join(stray[:3])} but no index, as after an interrupted copy" if stray else "found neither"
        raise FormatError(f"{directory}: expected {INDEX_NAME} or {SINGLE_NAME}, {found}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        placed: dict[str, set[str]] = {}
        for name, file_name in weight_map.items():
            placed.setdefault(file_name, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{index}: expected a JSON object with weight_map, name -> file ({error!r})") from None
    outside = [name for name in placed if Path(name).name != name]
    if outside:
        raise FormatError(f"{index} names {outside[0]!r}: expected plain file names beside the index")
    return placed


def read_header(file: Path) -> dict[str, Location]:
    """Name -> location of every tensor of one safetensors file.

    Raises:
        FormatError: The file is missing, truncated, longer than its header says, or no safetensors file.
    """
    if not file.is_file():
        raise FormatError(f"{file.name} is missing although the index names it; copy it from where the others came")
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"it promises a header of {header_bytes} bytes")
            header = json.loads(stream.read(header_bytes))
        begin = 8 + header_bytes
        header.pop("__metadata__", None)
        found = {
            name: Location(
                file=file,
                dtype=str(entry["dtype"]),
                shape=tuple(map(int, entry["shape"])),
                start=begin + int(entry["data_offsets"][0]),
                stop=begin + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FormatError(
            f"{file.name} ({size} bytes) has no safetensors header ({error}): truncated or another kind of file; "
            "copy it again"
        ) from None
    end = begin
    for name, location in sorted(found.items(), key=lambda item: item[1].start):
        bits = _DTYPE_BITS.get(location.dtype)
        length = location.stop - location.start
        if bits is not None and length * 8 != prod(location.shape) * bits:
            raise FormatError(
                f"{file.name}: {name} has {length} bytes, which {location.dtype} {list(location.shape)} does not fill"
            )
        if location.start != end:
            raise FormatError(
                f"{file.name}: {name} does not begin where the tensor before it ends; the header is damaged"
            )
        end = location.stop
    if end != size:
        cut = [name for name, location in found.items() if location.stop > size]
        what = (
            f"truncated: {size} bytes, expected {end}; {len(cut)} tensors are cut, first {cut[0]}"
            if cut
            else (f"{size} bytes, expected {end}: something was appended")
        )
        raise FormatError(f"{file.name} is {what}; copy it again" if cut else f"{file.name} has {what}; copy it again")
    return found


def _difference(tensor: StoredTensor, location: Location, config: ModelConfig) -> list[str]:
    """What is wrong with a tensor that is there, or nothing."""
    problems = []
    if location.dtype != tensor.dtype:
        problems.append(
            f"{tensor.name} is {location.dtype}, expected {tensor.dtype} ({_STORED_AS[tensor.dtype]}); "
            "write it in the released format"
        )
    if location.shape != tensor.shape:
        hint = ""
        if location.shape == tensor.shape[::-1]:
            hint = ": rows and columns are swapped"
        elif tensor.dtype == "I8" and location.shape == (tensor.shape[0], 2 * tensor.shape[1]):
            hint = ": not packed, two columns share a byte"
        elif tensor.dtype == "I8":
            hint = f" for {[tensor.shape[0], 2 * tensor.shape[1]]} values, two columns a byte"
        elif tensor.dtype == "F8_E8M0":
            hint = ": one scale per 32 x 32 tile, of experts and Engram rows per 32 columns"
        problems.append(f"{tensor.name} has shape {list(location.shape)}, expected {list(tensor.shape)}{hint}")
    return problems


def _unexpected(name: str, location: Location, config: ModelConfig, missing: list[str]) -> str:
    """Why a tensor has no place, with the nearest name that has."""
    table = stored_tensors(config)
    if name.startswith("model.") and name.removeprefix("model.") in table:
        hint = "the released names have no 'model.' in front"
    elif name.startswith("mtp.") and not config.draft.num_blocks:
        hint = "the config has num_nextn_predict_layers 0, so no draft blocks"
    elif name.startswith(("vision.", "aligner.", "image_")) and config.vision is None:
        hint = "the config has no vision_config"
    elif name.endswith("_scale") and name.rsplit(".", 1)[0] + ".weight" in table:
        hint = "activations are scaled as they come, and a weight's scales end in .scale"
    else:
        near = get_close_matches(name, missing[:2000], n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "remove it, or correct the config"
    return f"{name} is unexpected ({location.dtype} {list(location.shape)}): {hint}"


def total_bytes(files: CheckpointFiles) -> int:
    """Payload of all tensors found."""
    return sum(location.stop - location.start for location in files.locations.values())


def shard_sizes(files: CheckpointFiles) -> dict[str, int]:
    """File name -> size in bytes, of the shards that were read."""
    return {file.name: os.path.getsize(file) for file in sorted({where.file for where in files.locations.values()})}
