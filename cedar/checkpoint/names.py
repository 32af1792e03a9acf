"""The table of the release's format: published tensor name -> shape, dtype, part, and our parameter.

Built from a ModelConfig alone, so that a checkpoint can be checked before a byte of it is read. One
`StoredWeight` is one weight; on disk it is one tensor, or two when it is quantized (`.weight`, `.scale`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod

from cedar.config.engram import engram_hashes
from cedar.config.layers import LayerPlan, layer_plans
from cedar.config.model import ModelConfig, VisionConfig

TILE = 32
GROUP = 32

# bytes of one element, by the dtype names of safetensors
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


class Part(Enum):
    """What a weight belongs to: the text model, the draft beside it, or the vision tower (known and skipped)."""

    TEXT = "text"
    DRAFT = "draft"
    VISION = "vision"


class Storage(Enum):
    """How a weight lies on disk.

    FP8 has one E8M0 scale per 32 x 32 tile, FP8_ROWS one per row and 32 columns (Engram tables), FP4 is packed
    E2M1 with one E8M0 scale per row and 32 columns (routed experts).
    """

    F32 = "f32"
    BF16 = "bf16"
    FP8 = "fp8"
    FP8_ROWS = "fp8_rows"
    FP4 = "fp4"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a file: `dtype` is the name safetensors gives it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    part: Part

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeight:
    """One weight of the model.

    Attributes:
        name: Published name; of a quantized weight without its `.weight` or `.scale`.
        shape: Logical shape, as the model computes with it.
        storage: How it lies on disk.
        part: Text, draft or vision.
        parameter: Name in our `Transformer` or `Draft`, empty for the parts that neither holds.
        expert: Index along the first axis of a stacked parameter, None if the parameter is this weight.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    part: Part
    parameter: str = ""
    expert: int | None = None

    @property
    def weight(self) -> StoredTensor:
        """The tensor that holds the elements."""
        match self.storage:
            case Storage.F32 | Storage.BF16:
                return StoredTensor(name=self.name, shape=self.shape, dtype=self.storage.value.upper(), part=self.part)
            case Storage.FP8 | Storage.FP8_ROWS:
                return StoredTensor(name=f"{self.name}.weight", shape=self.shape, dtype="F8_E4M3", part=self.part)
            case Storage.FP4:
                rows, columns = self.shape
                return StoredTensor(name=f"{self.name}.weight", shape=(rows, columns // 2), dtype="I8", part=self.part)

    @property
    def scale(self) -> StoredTensor | None:
        """The tensor that holds the scales, None if the weight is not quantized."""
        if self.storage in (Storage.F32, Storage.BF16):
            return None
        rows, columns = self.shape
        if self.storage is Storage.FP8:
            shape = (-(-rows // TILE), -(-columns // TILE))
        else:
            shape = (rows, columns // GROUP)
        return StoredTensor(name=f"{self.name}.scale", shape=shape, dtype="F8_E8M0", part=self.part)

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        scale = self.scale
        return (self.weight,) if scale is None else (self.weight, scale)


class _Table:
    """Collects weights under a prefix; `ours` renames the published name to our parameter's."""

    def __init__(self, part: Part, prefix: str = "") -> None:
        self.part = part
        self.prefix = prefix
        self.weights: list[StoredWeight] = []

    def add(
        self, storage: Storage, name: str, *shape: int, parameter: str | None = None, expert: int | None = None
    ) -> None:
        quantized = storage not in (Storage.F32, Storage.BF16)
        ours = parameter or (f"{name}.weight" if quantized else name)
        self.weights.append(
            StoredWeight(
                name=self.prefix + name,
                shape=shape,
                storage=storage,
                part=self.part,
                parameter=self.prefix + ours if self.part is not Part.VISION else "",
                expert=expert,
            )
        )

    def bf16(self, name: str, *shape: int) -> None:
        self.add(Storage.BF16, name, *shape)


def _block(table: _Table, config: ModelConfig, *, num_experts: int) -> None:
    """What every layer and every draft block has: mHC, window attention, experts."""
    a, m, n, hidden = config.attention, config.moe, config.mhc.num_streams, config.hidden_size
    table.bf16("attn_norm.weight", hidden)
    table.bf16("ffn_norm.weight", hidden)
    num_coefficients = n * (n + 2)
    for sublayer in ("attn", "ffn"):
        for name, shape in (("fn", (num_coefficients, n * hidden)), ("base", (num_coefficients,)), ("scale", (3,))):
            table.add(Storage.F32, f"hc_{sublayer}_{name}", *shape, parameter=f"hc_{sublayer}.{name}")
    heads = a.num_heads * a.head_dim
    table.add(Storage.FP8, "attn.wq_a", a.q_lora_rank, hidden)
    table.bf16("attn.q_norm.weight", a.q_lora_rank)
    table.add(Storage.FP8, "attn.wq_b", heads, a.q_lora_rank)
    table.add(Storage.FP8, "attn.wkv", a.head_dim, hidden)
    table.bf16("attn.kv_norm.weight", a.head_dim)
    table.add(Storage.F32, "attn.attn_sink", a.num_heads)
    table.add(Storage.FP8, "attn.wo_a", a.o_groups * a.o_lora_rank, heads // a.o_groups)
    table.add(Storage.FP8, "attn.wo_b", hidden, a.o_groups * a.o_lora_rank)
    table.bf16("ffn.gate.weight", num_experts, hidden)
    table.add(Storage.F32, "ffn.gate.bias", num_experts)
    table.add(Storage.F32, "ffn.gate.bias_vl", num_experts)
    inner = {"w1": (m.inner_size, hidden), "w2": (hidden, m.inner_size), "w3": (m.inner_size, hidden)}
    for name, shape in inner.items():
        table.add(Storage.FP8, f"ffn.shared_experts.{name}", *shape)
    for expert in range(num_experts):
        for name, shape in inner.items():
            table.add(
                Storage.FP4,
                f"ffn.experts.{expert}.{name}",
                *shape,
                parameter=f"ffn.experts.{name}",
                expert=expert,
            )


def _csa2(table: _Table, config: ModelConfig, plan: LayerPlan) -> None:
    """The compressor of a layer that writes entries, the indexer of one that selects."""
    a, i, hidden = config.attention, config.indexer, config.hidden_size
    if plan.writes_entries:
        table.bf16("attn.compressor.wkv.weight", a.head_dim, hidden)
        # at ratio 1 there is nothing to pool
        if plan.ratio > 1:
            table.bf16("attn.compressor.wgate.weight", a.head_dim, hidden)
        table.bf16("attn.compressor.norm.weight", a.head_dim)
        table.bf16("attn.indexer.wk.weight", i.head_dim, a.head_dim)
        table.bf16("attn.indexer.k_norm.weight", i.head_dim)
    if plan.selects:
        table.add(Storage.FP8, "attn.indexer.wq_b", i.num_heads * i.head_dim, a.q_lora_rank)
        table.bf16("attn.indexer.weights_proj.weight", i.num_heads, hidden)


def _engram(table: _Table, config: ModelConfig, num_rows: int) -> None:
    e, n, hidden = config.engram, config.mhc.num_streams, config.hidden_size
    table.add(Storage.FP8_ROWS, "engram.embed", num_rows, e.head_dim)
    # one key per stream, then one value
    table.add(Storage.FP8, "engram.wkv", (n + 1) * hidden, e.num_columns * e.head_dim)
    table.bf16("engram.q_weight", n, hidden)
    table.bf16("engram.k_weight", n, hidden)


def _text(config: ModelConfig) -> Iterator[StoredWeight]:
    top = _Table(Part.TEXT)
    top.bf16("embed.weight", config.vocab_size, config.hidden_size)
    yield from top.weights
    hashes = engram_hashes(config.engram)
    for plan in layer_plans(config):
        layer = _Table(Part.TEXT, f"layers.{plan.layer}.")
        _block(layer, config, num_experts=config.moe.num_routed_experts)
        _csa2(layer, config, plan)
        if plan.engram:
            _engram(layer, config, hashes[plan.layer].num_rows)
        yield from layer.weights
    end = _Table(Part.TEXT)
    end.bf16("norm.weight", config.hidden_size)
    end.bf16("head.weight", config.vocab_size, config.hidden_size)
    yield from end.weights


def _draft(config: ModelConfig) -> Iterator[StoredWeight]:
    d, hidden = config.draft, config.hidden_size
    for block in range(d.num_blocks):
        table = _Table(Part.DRAFT, f"mtp.{block}.")
        _block(table, config, num_experts=d.num_routed_experts)
        if block == 0:
            table.add(Storage.FP8, "main_proj", hidden, len(d.target_layer_ids) * hidden)
            table.bf16("main_norm.weight", hidden)
        if block == d.num_blocks - 1:
            table.bf16("norm.weight", hidden)
            table.bf16("markov_head.embed.weight", config.vocab_size, d.markov_rank)
            table.bf16("markov_head.head.weight", config.vocab_size, d.markov_rank)
            table.bf16("confidence_head.proj.weight", 1, hidden + d.markov_rank)
        yield from table.weights


def _vision(vision: VisionConfig, hidden_size: int) -> Iterator[StoredWeight]:
    table = _Table(Part.VISION)
    width, inner = vision.hidden_size, vision.intermediate_size
    table.bf16("vision.patch_embed.proj.weight", width, 3 * vision.patch_size**2)
    table.bf16("vision.patch_embed.proj.bias", width)
    for block in range(vision.num_layers):
        prefix = f"vision.blocks.{block}"
        table.bf16(f"{prefix}.norm1.weight", width)
        table.bf16(f"{prefix}.norm2.weight", width)
        table.bf16(f"{prefix}.attn.wqkv.weight", 3 * width, width)
        table.bf16(f"{prefix}.attn.wqkv.bias", 3 * width)
        table.bf16(f"{prefix}.attn.wo.weight", width, width)
        table.bf16(f"{prefix}.attn.wo.bias", width)
        table.bf16(f"{prefix}.mlp.w1.weight", 2 * inner, width)
        table.bf16(f"{prefix}.mlp.w2.weight", width, inner)
    table.bf16("vision.norm.weight", width)
    table.bf16("aligner.w1.weight", hidden_size, width * vision.downsample_ratio**2)
    table.bf16("aligner.w1.bias", hidden_size)
    table.bf16("aligner.w2.weight", hidden_size, hidden_size)
    table.bf16("aligner.w2.bias", hidden_size)
    for name in ("image_start", "image_newline", "image_end"):
        table.bf16(name, hidden_size)
    yield from table.weights


@lru_cache(maxsize=8)
def stored_weights(config: ModelConfig) -> tuple[StoredWeight, ...]:
    """Every weight a checkpoint of `config` holds: text in layer order, then draft, then vision.

    No draft blocks in the config, no `mtp.*`; no vision part, no `vision.*`, `aligner.*` or `image_*`. The
    image bias of the router is there all the same.

    Source: architecture.md 7.2 and 7.3.
    """
    vision = () if config.vision is None else _vision(config.vision, config.hidden_size)
    return (*_text(config), *_draft(config), *vision)


@lru_cache(maxsize=8)
def stored_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Every tensor of the files by its published name, in the order of `stored_weights`.

    >>> from cedar.config.presets import flash
    >>> len(stored_tensors(flash()))
    96085
    """
    return {tensor.name: tensor for weight in stored_weights(config) for tensor in weight.tensors}


def count_by_part(config: ModelConfig) -> dict[Part, int]:
    """Tensors of each part that the config asks for."""
    counts = Counter(tensor.part for tensor in stored_tensors(config).values())
    return {part: counts[part] for part in Part if counts[part]}
