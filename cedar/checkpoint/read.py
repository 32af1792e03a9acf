"""A model from a checkpoint directory: weights stream in one at a time and are decoded into their place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from cedar.chat.tokenizer import Tokenizer
from cedar.checkpoint.files import CheckpointFiles, open_checkpoint
from cedar.checkpoint.names import GROUP, TILE, Part, Storage, StoredWeight, stored_weights
from cedar.errors import FormatError
from cedar.formats.fp4 import dequantize_fp4_index
from cedar.formats.fp8 import dequantize_tiles
from cedar.kernels.experts import Packed
from cedar.model.draft import Draft
from cedar.model.engram import EngramTable
from cedar.model.layers import Linear, Tiles
from cedar.model.moe import Experts, retile_experts
from cedar.model.rows import DiskTable, Plane
from cedar.model.transformer import Transformer

# where Engram's tables lie while a model runs
EngramPlace = Literal["memory", "host", "mapped", "disk"]
# values decoded at once: bounds what decoding needs beyond the module itself
CHUNK_VALUES = 1 << 21


def read_checkpoint(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    engram: EngramPlace = "memory",
    engram_cache_bytes: int = 256 * 2**20,
    packed: bool = False,
) -> Transformer:
    """The text model of a checkpoint in the release's format, ready to run.

    Everything is checked before the first weight is read (`open_checkpoint`). Draft tensors are left to `read_draft`;
    vision tensors are known by the config and skipped. If the directory has a tokenizer.json, it is checked against
    the config and gives Engram's token map.

    Args:
        path: Directory with config.json, the shards and their index.
        dtype: float32 or bfloat16; both hold every stored weight exactly.
        engram: `memory` copies the FP8 tables to the device; `host` keeps them in host memory, where a GPU's kernels
            read the rows they need; `mapped` maps the file, so that what was touched stays as long as
            the machine has memory to spare; `disk` reads rows as they are asked for and keeps a bounded number.
        engram_cache_bytes: Rows that `disk` keeps, all tables together.
        packed: FP8 linears and MXFP4 experts keep their stored bytes, which products then read; it cannot be trained.

    Raises:
        ConfigError: config.json is missing or wrong.
        FormatError: A file or a tensor is not what the config asks for (`CheckpointError` lists all), or the
            tokenizer belongs to another model.

    Cost: memory of the module plus one shard at most.

    Source: architecture.md 7.
    """
    files = open_checkpoint(path)
    config = files.config
    # the float tables would be four times the packed ones, for nothing
    quantized_device = "meta" if packed else None
    model = Transformer(config, device=device, dtype=dtype, table_device="meta", quantized_device=quantized_device)
    load_weights(model, files, engram=engram, engram_cache_bytes=engram_cache_bytes)
    if config.engram.layer_ids and (files.directory / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(files.directory)
        tokenizer.check(config)
        model.token_map.set(tokenizer.compressed_map()[0])
    return model


def read_draft(path: str | Path, target: Transformer) -> Draft | None:
    """The draft of a checkpoint beside its text model, packed if that is; None if the checkpoint has none.

    Raises:
        ConfigError: config.json is missing or wrong.
        FormatError: A file or a tensor is not what the config asks for, or `target` is another model.
    """
    files = open_checkpoint(path)
    if files.config != target.config:
        raise FormatError(f"{path} is not the checkpoint of the model that it should draft for")
    if not files.config.draft.num_blocks:
        files.close()
        return None
    draft = Draft(files.config, target, device=target.device, quantized_device="meta" if target.packed else None)
    load_weights(draft, files)
    return draft


@torch.no_grad()
def load_weights(
    model: Transformer | Draft,
    files: CheckpointFiles,
    *,
    engram: EngramPlace = "memory",
    engram_cache_bytes: int = 256 * 2**20,
) -> None:
    """Fill `model` from a sound checkpoint of its own config; quantized weights keep their scale bytes.

    Quantized weights on `meta` become packed ones, experts in the order of a GPU's kernels if they are on one, and so
    do Engram tables.
    """
    device = model.device if isinstance(model, Transformer) else model.target.device
    part = Part.DRAFT if isinstance(model, Draft) else Part.TEXT
    weights = [weight for weight in stored_weights(files.config) if weight.part is part]
    # in file order, so that a disk reads forward
    weights.sort(
        key=lambda weight: (files.locations[weight.weight.name].file, files.locations[weight.weight.name].start)
    )
    try:
        for weight in weights:
            if weight.storage is Storage.FP8_ROWS:
                assert isinstance(model, Transformer)
                _load_table(model, files, weight, engram, engram_cache_bytes // len(files.config.engram.layer_ids))
            elif target(model, weight).is_meta:
                _load_packed(owner(model, weight), files, weight, device)
            else:
                _load_weight(model, files, weight)
    finally:
        files.close()
    if device.type == "cuda":
        retile_experts(model)


def target(model: nn.Module, weight: StoredWeight) -> Tensor:
    """The parameter or buffer that holds a text or draft weight, cut to its expert; shares its memory."""
    owner_name, _, name = weight.parameter.rpartition(".")
    held: Tensor = getattr(model.get_submodule(owner_name), name)
    held = held if weight.expert is None else held[weight.expert]
    assert tuple(held.shape) == weight.shape, (weight.name, tuple(held.shape), weight.shape)
    return held.detach()


def owner(model: nn.Module, weight: StoredWeight) -> nn.Module:
    """The module whose parameter it is."""
    return model.get_submodule(weight.parameter.rpartition(".")[0])


def row_chunks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Spans of rows to handle at once, in whole tiles; a vector is one span of one row."""
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    step = max(CHUNK_VALUES // columns // TILE, 1) * TILE
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _load_table(
    model: Transformer, files: CheckpointFiles, weight: StoredWeight, engram: EngramPlace, cache_bytes: int
) -> None:
    table = owner(model, weight)
    assert isinstance(table, EngramTable)
    rows, columns = weight.shape
    codes, scales = f"{weight.name}.weight", f"{weight.name}.scale"
    if engram == "mapped":
        table.set_packed(files.map(codes).view(rows, columns), files.map(scales).view(rows, columns // GROUP))
        return
    if engram == "disk":
        first, second = (
            Plane(files.locations[name].file, files.locations[name].start, width)
            for name, width in ((codes, columns), (scales, columns // GROUP))
        )
        table.set_disk(DiskTable(first, second, rows, cache_bytes=cache_bytes))
        return
    planes = files.read(codes).view(rows, columns), files.read(scales).view(rows, columns // GROUP)
    if engram == "host" and model.device.type == "cuda":
        table.set_packed(*(plane.pin_memory() for plane in planes))
    else:
        table.set_packed(*(plane.to(model.device) for plane in planes))


def _load_weight(model: nn.Module, files: CheckpointFiles, weight: StoredWeight) -> None:
    values = target(model, weight)
    stored, scale = weight.weight, weight.scale
    scale_bytes = None
    if scale is not None:
        scale_bytes = files.read(scale.name).view(scale.shape).to(values.device)
        _keep_scales(owner(model, weight), weight, scale_bytes)
    rows = values.view(1, -1) if values.dim() == 1 else values
    row_bytes = stored.num_bytes // rows.shape[0]
    for start, stop in row_chunks(weight.shape):
        data = files.read(stored.name, start * row_bytes, stop * row_bytes).to(values.device).view(stop - start, -1)
        match weight.storage:
            case Storage.F32:
                decoded = data.view(torch.float32)
            case Storage.BF16:
                decoded = data.view(torch.bfloat16)
            case Storage.FP8:
                assert scale_bytes is not None
                decoded = dequantize_tiles(data, scale_bytes[start // TILE : -(-stop // TILE)])
            case _:
                assert scale_bytes is not None
                decoded = dequantize_fp4_index(data, scale_bytes[start:stop])
        rows[start:stop].copy_(decoded)


def _load_packed(module: nn.Module, files: CheckpointFiles, weight: StoredWeight, device: torch.device) -> None:
    assert weight.scale is not None
    codes, scales = (files.read(stored.name).view(stored.shape).to(device) for stored in (weight.weight, weight.scale))
    if isinstance(module, Linear):
        module.set_packed(Tiles(codes, scales))
        return
    assert isinstance(module, Experts) and weight.expert is not None
    name = weight.parameter.rpartition(".")[2]
    if name not in module.packed:
        num_experts = getattr(module, name).shape[0]
        stack = Packed(codes.new_empty(num_experts, *codes.shape), scales.new_empty(num_experts, *scales.shape))
        module.set_packed({**module.packed, name: stack})
    held_codes, held_scales, *_ = module.packed[name]
    held_codes[weight.expert], held_scales[weight.expert] = codes, scales


def stored_bytes(module: nn.Module, weight: StoredWeight) -> tuple[Tensor, Tensor] | None:
    """(elements, scales) of a weight that is held as a checkpoint stores it, None of any other.

    Raises:
        FormatError: It is held in the order of a GPU's kernels.
    """
    if isinstance(module, Linear) and isinstance(module.held, Tiles):
        return module.held
    if isinstance(module, Experts) and module.packed:
        stack = module.packed[weight.parameter.rpartition(".")[2]]
        if not isinstance(stack, Packed):
            raise FormatError(f"{weight.name} lies in a GPU's order: write the checkpoint from a model on a CPU")
        assert weight.expert is not None
        return stack.codes[weight.expert], stack.scales[weight.expert]
    return None


def _keep_scales(module: nn.Module, weight: StoredWeight, scale_bytes: Tensor) -> None:
    if isinstance(module, Linear):
        module.scale_bytes = scale_bytes
        return
    assert isinstance(module, Experts)
    name = weight.parameter.rpartition(".")[2]
    num_experts = getattr(module, name).shape[0]
    if name not in module.scale_bytes:
        module.scale_bytes[name] = scale_bytes.new_zeros(num_experts, *scale_bytes.shape)
    assert weight.expert is not None
    module.scale_bytes[name][weight.expert] = scale_bytes


def kept_scales(module: nn.Module, weight: StoredWeight) -> Tensor | None:
    """The scale bytes a weight was loaded with, None if it was made or trained from nothing."""
    if isinstance(module, Linear):
        return module.scale_bytes
    if isinstance(module, Experts):
        stacked = module.scale_bytes.get(weight.parameter.rpartition(".")[2])
        return None if stacked is None or weight.expert is None else stacked[weight.expert]
    return None
