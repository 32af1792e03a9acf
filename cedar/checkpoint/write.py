"""The release's format from any of our models: shards with an index, all or nothing.

Shapes and dtypes come from the names table, so every header is known before a weight is encoded, and
weights are encoded and written a chunk at a time.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cedar.checkpoint.files import INDEX_NAME, SINGLE_NAME, CheckpointFiles, placement
from cedar.checkpoint.names import TILE, Part, Storage, StoredWeight, stored_weights
from cedar.checkpoint.read import kept_scales, owner, row_chunks, stored_bytes, target
from cedar.config.load import dump_config
from cedar.config.model import ModelConfig
from cedar.errors import CapacityError, FormatError
from cedar.formats import fp4, fp8
from cedar.model.draft import Draft
from cedar.model.engram import EngramTable
from cedar.model.transformer import Transformer

SHARD_BYTES = 4 << 30
# copied along with a converted checkpoint when they lie beside it
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md", "NOTICE", "LICENSE")
_COPY_BYTES = 1 << 26

# a weight's bytes on disk, in chunks, elements first, then scales
Payload = Callable[[StoredWeight], Iterator[Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a write left behind.

    Attributes:
        tensors: By part.
        num_bytes: Payload of all shards.
        shards: File names.
        files: Other files beside them.
    """

    tensors: dict[Part, int]
    num_bytes: int
    shards: tuple[str, ...]
    files: tuple[str, ...]


def write_checkpoint(
    model: Transformer,
    path: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    draft: Draft | None = None,
    source: CheckpointFiles | None = None,
    files: Iterable[Path] = (),
) -> Written:
    """Write a model in the release's format: config.json, shards, index.

    A weight that was loaded and not changed since gets its bytes back. A trained one is rounded to its
    storage format, with the scales of `quantize_fp8`, `quantize_tiles` and `quantize_fp4_index`.

    Args:
        path: Directory, made if need be. What a checkpoint there held is replaced at the very end; until
            then, and if anything fails, it stays as it was.
        shard_bytes: Payload of one shard at most, unless a single weight is larger.
        draft: The model's draft, trained beside it; its config is the one that is written.
        source: The checkpoint whose vision tensors, and draft tensors if no `draft` is given, are carried over.
        files: Further files to copy, for example tokenizer.json and generation_config.json.

    Raises:
        FormatError: A weight holds NaN or infinity (its name is given), or the config has draft blocks or
            vision and no source gives their tensors.
        CapacityError: The disk is full.
    """
    config = model.config if draft is None else draft.config
    weights = stored_weights(config)
    held = {Part.TEXT: model} if draft is None else {Part.TEXT: model, Part.DRAFT: draft}
    rest = [weight for weight in weights if weight.part not in held]
    if rest and source is None:
        raise FormatError(
            f"the config asks for {', '.join(sorted({weight.part.value for weight in rest}))} tensors, first "
            f"{rest[0].weight.name}, which the text model does not hold: give `source`, the checkpoint to take them "
            "from, or a config without that part"
        )

    def payload(weight: StoredWeight) -> Iterator[Tensor]:
        if weight.part in held:
            return encode(held[weight.part], weight)
        assert source is not None
        return _stored_bytes(source, weight)

    if source is not None:
        _require_tensors(source, rest)
    return _write(Path(path), config, weights, payload, shard_bytes, files)


def convert_checkpoint(
    files: CheckpointFiles,
    path: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
) -> Written:
    """Write a sound checkpoint anew: same tensors byte for byte, draft and vision too, in shards of another size.

    config.json comes out in the release's nested layout. The files of `COMPANIONS` are copied along.

    Args:
        progress: Called with the number of bytes just written.

    Raises:
        CapacityError: The disk is full.
    """
    files.require_sound()
    beside = [files.directory / name for name in COMPANIONS if (files.directory / name).is_file()]

    def payload(weight: StoredWeight) -> Iterator[Tensor]:
        return _stored_bytes(files, weight)

    try:
        return _write(Path(path), files.config, stored_weights(files.config), payload, shard_bytes, beside, progress)
    finally:
        files.close()


@torch.no_grad()
def encode(model: nn.Module, weight: StoredWeight) -> Iterator[Tensor]:
    """A text or draft weight's bytes on disk, in chunks. Raises FormatError if it holds NaN or infinity."""
    module = owner(model, weight)
    if isinstance(module, EngramTable) and module.weight is None:
        yield from module.stored()
        return
    if (stored := stored_bytes(module, weight)) is not None:
        yield from stored
        return
    values = target(model, weight)
    rows = values.view(1, -1) if values.dim() == 1 else values
    given = kept_scales(module, weight)
    scale_chunks: list[Tensor] = []
    for start, stop in row_chunks(weight.shape):
        chunk = rows[start:stop].float()
        match weight.storage:
            case Storage.F32 | Storage.BF16:
                chunk = chunk if weight.storage is Storage.F32 else chunk.to(torch.bfloat16)
                _require_finite(weight, chunk)
                yield chunk
                continue
            case Storage.FP8:
                part = None if given is None else given[start // TILE : -(-stop // TILE)]
                _require_finite(weight, chunk)
                codes, scales = _encode_tiles(chunk, part)
            case Storage.FP8_ROWS:
                _require_finite(weight, chunk)
                codes, scales = fp8.quantize_fp8(chunk)
            case Storage.FP4:
                _require_finite(weight, chunk)
                codes, scales = _encode_fp4(chunk, None if given is None else given[start:stop])
        yield codes
        scale_chunks.append(scales)
    yield from scale_chunks


def _encode_tiles(weight_OI: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales; `given` scales are used where the weight still reads back exactly with them."""
    if given is not None:
        codes, scales = fp8.quantize_tiles(weight_OI, given)
        if torch.equal(fp8.dequantize_tiles(codes, scales), weight_OI):
            return codes, scales
    return fp8.quantize_tiles(weight_OI)


def _encode_fp4(weight_OI: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    if given is not None:
        packed, scales = fp4.quantize_fp4_index(weight_OI, given)
        if torch.equal(fp4.dequantize_fp4_index(packed, scales), weight_OI):
            return packed, scales
    return fp4.quantize_fp4_index(weight_OI)


def _require_finite(weight: StoredWeight, values: Tensor) -> None:
    if not values.isfinite().all():
        raise FormatError(
            f"{weight.parameter or weight.name} holds NaN or infinity and cannot be stored as {weight.weight.dtype}; "
            "nothing was replaced: go back to the last good checkpoint and look for the step that broke it"
        )


def _require_tensors(source: CheckpointFiles, weights: list[StoredWeight]) -> None:
    for weight in weights:
        for tensor in weight.tensors:
            location = source.locations.get(tensor.name)
            if location is None or (location.dtype, location.shape) != (tensor.dtype, tensor.shape):
                raise FormatError(
                    f"{source.directory} cannot give {tensor.name}, expected {tensor.dtype} {list(tensor.shape)}: "
                    "it belongs to another model"
                )


def _stored_bytes(files: CheckpointFiles, weight: StoredWeight) -> Iterator[Tensor]:
    for tensor in weight.tensors:
        for start in range(0, tensor.num_bytes, _COPY_BYTES):
            yield files.read(tensor.name, start, min(start + _COPY_BYTES, tensor.num_bytes))


def _shards(weights: Iterable[StoredWeight], shard_bytes: int) -> list[list[StoredWeight]]:
    """Weights cut into shards, whole weights each; inside a shard in the order of their bytes.

    Engram tables come last, as in the release, so that the shards of the rest are read without passing them.
    """
    order = sorted(weights, key=lambda weight: weight.storage is Storage.FP8_ROWS)
    shards: list[list[StoredWeight]] = [[]]
    filled = 0
    for weight in order:
        size = sum(tensor.num_bytes for tensor in weight.tensors)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += size
    # wide elements first keep every tensor aligned to its own element
    width = {Storage.F32: 0, Storage.BF16: 1}
    return [sorted(shard, key=lambda weight: width.get(weight.storage, 2)) for shard in shards]


def _write(
    directory: Path,
    config: ModelConfig,
    weights: Iterable[StoredWeight],
    payload: Payload,
    shard_bytes: int,
    files: Iterable[Path],
    progress: Callable[[int], None] | None = None,
) -> Written:
    """Everything into a staging folder, synced, then moved into place, the index last."""
    if shard_bytes <= 0:
        raise CapacityError(f"shard_bytes is {shard_bytes}, expected a positive number of bytes")
    shards = _shards(weights, shard_bytes)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    num_bytes = sum(tensor.num_bytes for shard in shards for weight in shard for tensor in weight.tensors)
    # read before anything is written: a file may lie in the very folder that is replaced
    copies = {file.name: file.read_bytes() for file in files}
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    staging = directory / f".writing-{os.getpid()}"
    try:
        free = shutil.disk_usage(directory).free
        if free < num_bytes:
            raise CapacityError(
                f"{directory} has {free:,} bytes free, the checkpoint needs {num_bytes:,}; free some or choose another "
                "disk. Nothing was changed"
            )
        staging.mkdir()
        weight_map: dict[str, str] = {}
        for name, shard in zip(names, shards, strict=True):
            _write_shard(staging / name, shard, payload, progress)
            weight_map |= {tensor.name: name for weight in shard for tensor in weight.tensors}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        copies["config.json"] = dump_config(config).encode()
        copies[INDEX_NAME] = (json.dumps(index, indent=2) + "\n").encode()
        for name, data in copies.items():
            _write_synced(staging / name, [data])
        _move_into_place(staging, directory, names, copies)
    except OSError as error:
        _discard(staging, directory if is_new else None)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"the disk is full: {directory} needs {num_bytes:,} bytes for the checkpoint; free some or choose "
                "another disk. What was there is untouched"
            ) from None
        raise
    except BaseException:
        _discard(staging, directory if is_new else None)
        raise
    parts = {
        part: sum(len(weight.tensors) for shard in shards for weight in shard if weight.part is part) for part in Part
    }
    return Written(
        tensors={part: count for part, count in parts.items() if count},
        num_bytes=num_bytes,
        shards=tuple(names),
        files=tuple(copies),
    )


def _write_shard(
    file: Path, shard: list[StoredWeight], payload: Payload, progress: Callable[[int], None] | None
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in shard:
        for tensor in weight.tensors:
            start, end = end, end + tensor.num_bytes
            header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # spaces up to a multiple of eight, so that the tensors begin aligned
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little")
        yield text
        for weight in shard:
            written = 0
            for chunk in payload(weight):
                data = chunk.cpu().contiguous().view(-1).view(torch.uint8)
                yield data.numpy().data
                written += data.numel()
                if progress is not None:
                    progress(data.numel())
            assert written == sum(tensor.num_bytes for tensor in weight.tensors), weight.name

    _write_synced(file, pieces())


def _write_synced(file: Path, pieces: Iterable[bytes | memoryview]) -> None:
    with file.open("wb", buffering=0) as stream:
        for piece in pieces:
            view = memoryview(piece)
            while len(view):
                view = view[stream.write(view) :]
        os.fsync(stream.fileno())


def _move_into_place(staging: Path, directory: Path, shards: list[str], copies: Iterable[str]) -> None:
    """From here on only a crash can interfere, and it leaves a directory without an index, which no reader takes.

    Were the old index still there, a mixture of old and new shards would load without a word.
    """
    stale = _old_shards(directory) - set(shards)
    (directory / INDEX_NAME).unlink(missing_ok=True)
    for name in (*shards, *(name for name in copies if name != INDEX_NAME)):
        os.replace(staging / name, directory / name)
    _sync_directory(directory)
    os.replace(staging / INDEX_NAME, directory / INDEX_NAME)
    for name in stale:
        (directory / name).unlink(missing_ok=True)
    staging.rmdir()
    _sync_directory(directory)


def _old_shards(directory: Path) -> set[str]:
    """Shards of the checkpoint that is about to be replaced."""
    try:
        return set(placement(directory)) | ({SINGLE_NAME} if (directory / SINGLE_NAME).is_file() else set())
    except FormatError:
        return set()


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _discard(staging: Path, made: Path | None) -> None:
    shutil.rmtree(staging, ignore_errors=True)
    if made is not None and made.is_dir() and not any(made.iterdir()):
        made.rmdir()
