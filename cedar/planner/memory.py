"""Every tensor of a model as shape, storage and use, and the sums over them: parameters, bytes, memory.

`tensors` is the one table; parameter counts, active parameters, bytes on disk and in memory and (in
`planner/flops.py`) the products of a token are sums over it. `checkpoint/names.py` holds the same tensors
under their published names, and a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from cedar.config.engram import engram_hashes
from cedar.config.layers import LayerPlan, layer_plans
from cedar.config.model import ModelConfig

Storage = Literal["fp8", "fp4", "fp8_rows", "bf16", "f32"]
Arithmetic = Literal["fp8", "w4a8", "bf16", "f32"]
_TILE = 32
# channels of an image patch: red, green, blue
_PIXEL_CHANNELS = 3
# draft blocks and the vision tower are stored and counted, but are no part of the backbone
BESIDE_BACKBONE = ("engram projection", "engram table", "draft", "vision")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One stored tensor, or `copies` alike (the experts of a layer).

    Attributes:
        part: Row of the parameter table it counts in.
        storage: `fp8` in 32 x 32 tiles, `fp8_rows` with a scale per 32 channels of a row, `fp4` (MXFP4), `bf16`, `f32`.
        layer: Backbone layer, or None.
        copies: How many are stored.
        active: How many of them one token passes through; a table that is only looked up has 0.
        product: Component of the FLOP table it counts in, or None if it multiplies nothing.
        arithmetic: What its product is computed in, or None without a product.
    """

    part: str
    shape: tuple[int, ...]
    storage: Storage
    layer: int | None = None
    copies: int = 1
    active: int = 1
    product: str | None = None
    arithmetic: Arithmetic | None = None

    @property
    def values(self) -> int:
        return math.prod(self.shape) * self.copies

    @property
    def active_values(self) -> int:
        return math.prod(self.shape) * self.active

    @property
    def stored_bytes(self) -> int:
        """Bytes in the release format, scales included."""
        if self.storage in ("bf16", "f32"):
            return self.values * (2 if self.storage == "bf16" else 4)
        rows, columns = self.shape
        scales = math.ceil(columns / _TILE) * (math.ceil(rows / _TILE) if self.storage == "fp8" else rows)
        elements = rows * columns // (2 if self.storage == "fp4" else 1)
        return (elements + scales) * self.copies

    @property
    def optimizer_values(self) -> int:
        """Optimizer state: two moments for what AdamW trains, one momentum for Muon and Sinkhorn.

        Source: training.md 2.1. Routing biases follow the load and hold no state.
        """
        if self.part == "routing bias":
            return 0
        adamw = self.product is None and self.part not in ("embedding", "engram table")
        return self.values * (2 if adamw else 1)


@lru_cache(maxsize=32)
def tensors(config: ModelConfig) -> tuple[Tensor, ...]:
    """All tensors of the model in the order of the forward pass, draft blocks and vision last.

    Source: architecture.md 7.2.
    """
    embedding = Tensor(part="embedding", shape=(config.vocab_size, config.hidden_size), storage="bf16", active=0)
    head = Tensor(
        part="head",
        shape=(config.vocab_size, config.hidden_size),
        storage="bf16",
        product="head",
        arithmetic="f32",
    )
    backbone = [tensor for plan in layer_plans(config) for tensor in _layer(config, plan)]
    return (
        embedding,
        *backbone,
        _gain(config.hidden_size, None),
        head,
        *_draft(config),
        *_vision(config),
    )


def _gain(channels: int, layer: int | None) -> Tensor:
    return Tensor(part="norms and gains", shape=(channels,), storage="bf16", layer=layer)


def _layer(config: ModelConfig, plan: LayerPlan) -> Iterator[Tensor]:
    if plan.engram:
        yield from _engram(config, plan.layer)
    yield from _attention(config, plan.layer)
    if plan.writes_entries:
        yield from _compressor(config, plan)
    if plan.selects:
        yield from _indexer(config, plan)
    yield from _sublayers(config, plan.layer)
    m = config.moe
    yield from _experts(config, plan.layer, m.num_routed_experts, m.num_experts_per_token)


def _fp8(part: str, product: str, layer: int | None, rows: int, columns: int) -> Tensor:
    return Tensor(part=part, shape=(rows, columns), storage="fp8", layer=layer, product=product, arithmetic="fp8")


def _bf16(part: str, layer: int | None, rows: int, columns: int) -> Tensor:
    return Tensor(
        part=part,
        shape=(rows, columns),
        storage="bf16",
        layer=layer,
        product="small projections",
        arithmetic="bf16",
    )


def _attention(config: ModelConfig, layer: int | None) -> Iterator[Tensor]:
    a, hidden = config.attention, config.hidden_size
    width, rank = a.num_heads * a.head_dim, a.o_groups * a.o_lora_rank
    projection = "attention projections"
    yield _fp8("attention", projection, layer, a.q_lora_rank, hidden)
    yield _gain(a.q_lora_rank, layer)
    yield _fp8("attention", projection, layer, width, a.q_lora_rank)
    yield _fp8("attention", projection, layer, a.head_dim, hidden)
    yield _gain(a.head_dim, layer)
    yield Tensor(part="norms and gains", shape=(a.num_heads,), storage="f32", layer=layer)
    # stored as FP8, multiplied in bf16: its input is not quantized
    yield Tensor(
        part="attention",
        shape=(rank, width // a.o_groups),
        storage="fp8",
        layer=layer,
        product="grouped output",
        arithmetic="bf16",
    )
    yield _fp8("attention", projection, layer, hidden, rank)


def _compressor(config: ModelConfig, plan: LayerPlan) -> Iterator[Tensor]:
    head_dim, hidden = config.attention.head_dim, config.hidden_size
    yield _bf16("compressor", plan.layer, head_dim, hidden)
    if plan.ratio > 1:
        yield _bf16("compressor", plan.layer, head_dim, hidden)
    yield _gain(head_dim, plan.layer)


def _indexer(config: ModelConfig, plan: LayerPlan) -> Iterator[Tensor]:
    i, a = config.indexer, config.attention
    if plan.writes_entries:
        yield _bf16("indexer", plan.layer, i.head_dim, a.head_dim)
        yield _gain(i.head_dim, plan.layer)
    yield _fp8("indexer", "index queries", plan.layer, i.num_heads * i.head_dim, a.q_lora_rank)
    yield _bf16("indexer", plan.layer, i.num_heads, config.hidden_size)


def _sublayers(config: ModelConfig, layer: int | None) -> Iterator[Tensor]:
    """What stands around attention and experts: norms and the mHC coefficients, twice each."""
    streams = config.mhc.num_streams
    coefficients = streams * (streams + 2)
    for _ in ("attention", "ffn"):
        yield _gain(config.hidden_size, layer)
        yield Tensor(
            part="mhc",
            shape=(coefficients, streams * config.hidden_size),
            storage="f32",
            layer=layer,
            product="mhc",
            arithmetic="f32",
        )
        yield Tensor(part="mhc scale", shape=(coefficients,), storage="f32", layer=layer)
        yield Tensor(part="mhc scale", shape=(3,), storage="f32", layer=layer)


def _experts(config: ModelConfig, layer: int | None, num_experts: int, per_token: int) -> Iterator[Tensor]:
    inner, hidden = config.moe.inner_size, config.hidden_size
    yield _bf16("router", layer, num_experts, hidden)
    for _ in ("text", "image"):
        yield Tensor(part="routing bias", shape=(num_experts,), storage="f32", layer=layer)
    for shape in ((inner, hidden), (inner, hidden), (hidden, inner)):
        yield _fp8("shared expert", "shared expert", layer, *shape)
        yield Tensor(
            part="routed experts",
            shape=shape,
            storage="fp4",
            layer=layer,
            copies=num_experts,
            active=per_token,
            product="routed experts",
            arithmetic="w4a8",
        )


def _engram(config: ModelConfig, layer: int) -> Iterator[Tensor]:
    e, hidden, streams = config.engram, config.hidden_size, config.mhc.num_streams
    rows = engram_hashes(e)[layer].num_rows
    yield Tensor(part="engram table", shape=(rows, e.head_dim), storage="fp8_rows", layer=layer, active=0)
    # one key per stream, then one value
    width = e.num_columns * e.head_dim
    yield _fp8("engram projection", "engram projection", layer, (streams + 1) * hidden, width)
    for _ in ("query", "key"):
        yield Tensor(part="engram projection", shape=(streams, hidden), storage="bf16", layer=layer)


def _draft(config: ModelConfig) -> Iterator[Tensor]:
    d, hidden = config.draft, config.hidden_size
    if not d.num_blocks:
        return
    once = [
        Tensor(part="draft", shape=(hidden, len(d.target_layer_ids) * hidden), storage="fp8"),
        Tensor(part="draft", shape=(hidden,), storage="bf16"),
        Tensor(part="draft", shape=(hidden,), storage="bf16"),
        Tensor(part="draft", shape=(config.vocab_size, d.markov_rank), storage="bf16"),
        Tensor(part="draft", shape=(config.vocab_size, d.markov_rank), storage="bf16"),
        Tensor(part="draft", shape=(1, hidden + d.markov_rank), storage="bf16"),
    ]
    yield from once
    for _ in range(d.num_blocks):
        block = (
            *_attention(config, None),
            *_sublayers(config, None),
            *_experts(config, None, d.num_routed_experts, d.num_experts_per_token),
        )
        for tensor in block:
            yield Tensor(part="draft", shape=tensor.shape, storage=tensor.storage, copies=tensor.copies)


def _vision(config: ModelConfig) -> Iterator[Tensor]:
    v, hidden = config.vision, config.hidden_size
    if v is None:
        return
    width = v.hidden_size
    merged = width * v.downsample_ratio**2
    per_block: tuple[tuple[int, ...], ...] = (
        (width,),
        (width,),
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        (2 * v.intermediate_size, width),
        (width, v.intermediate_size),
    )
    once: tuple[tuple[int, ...], ...] = (
        (width, _PIXEL_CHANNELS * v.patch_size**2),
        (width,),
        (width,),
        (hidden, merged),
        (hidden,),
        (hidden, hidden),
        (hidden,),
        *((hidden,),) * 3,
    )
    for shape in once:
        yield Tensor(part="vision", shape=shape, storage="bf16")
    for shape in per_block:
        yield Tensor(part="vision", shape=shape, storage="bf16", copies=v.num_layers)


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """Stored values of each part, in the order of the forward pass."""
    counts: dict[str, int] = {}
    for tensor in tensors(config):
        counts[tensor.part] = counts.get(tensor.part, 0) + tensor.values
    return counts


def backbone_parameters(config: ModelConfig) -> int:
    """Everything but Engram, draft and vision.

    >>> from cedar.config.presets import flash
    >>> backbone_parameters(flash())
    551566180464
    """
    return sum(count for part, count in parameters_by_part(config).items() if part not in BESIDE_BACKBONE)


def engram_parameters(config: ModelConfig) -> int:
    """Values of the Engram tables (their projections are not counted)."""
    return parameters_by_part(config).get("engram table", 0)


def text_parameters(config: ModelConfig) -> int:
    """Backbone and Engram with its projections: what a text model holds."""
    return sum(count for part, count in parameters_by_part(config).items() if part not in ("draft", "vision"))


def active_prefill_parameters(config: ModelConfig) -> int:
    """Weights that a prompt token passes through: the encoder's layers.

    The producer of the boundary layer's cache and the decoder's last window are left out, as the report
    does; `flops.prefill_flops` counts both.
    """
    return _active(config, range(config.boundary_layer_id))


def active_decode_parameters(config: ModelConfig) -> int:
    """Weights that a generated token passes through in all layers, without embedding and head."""
    return _active(config, range(config.num_layers))


def _active(config: ModelConfig, layers: Iterable[int]) -> int:
    wanted = set(layers)
    return sum(tensor.active_values for tensor in tensors(config) if tensor.layer in wanted)


def checkpoint_bytes(config: ModelConfig) -> int:
    """Payload of the release format: FP8, MXFP4, bf16 and f32 tensors with their scales."""
    return sum(tensor.stored_bytes for tensor in tensors(config))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBytes:
    """A loaded text model in one form.

    Attributes:
        form: `release` (codes as stored), `bf16` or `f32` (decoded).
        dense: Everything but the Engram tables.
        engram_tables: The tables: they keep their codes in every form, and may stay on disk, memory-mapped.
    """

    form: Literal["release", "bf16", "f32"]
    dense: int
    engram_tables: int


def weight_bytes(config: ModelConfig) -> tuple[WeightBytes, ...]:
    """Memory of the text model as stored, decoded to bf16 and decoded to f32."""
    text = [tensor for tensor in tensors(config) if tensor.part not in ("draft", "vision")]
    tables = sum(tensor.stored_bytes for tensor in text if tensor.part == "engram table")
    dense = [tensor for tensor in text if tensor.part != "engram table"]
    values = sum(tensor.values for tensor in dense)
    stored = sum(tensor.stored_bytes for tensor in dense)
    return (
        WeightBytes(form="release", dense=stored, engram_tables=tables),
        WeightBytes(form="bf16", dense=2 * values, engram_tables=tables),
        WeightBytes(form="f32", dense=4 * values, engram_tables=tables),
    )


def step_bytes(config: ModelConfig, *, rows: int) -> int:
    """Activations of one forward step of `rows` rows, in f32.

    The widest moment of a layer: streams before and after, queries and attention output of all heads,
    and the inner rows of the experts; logits of one window.

    Source: assumed, an upper estimate for planning; measure with the engine where it matters.
    """
    a, m = config.attention, config.moe
    streams = 2 * config.mhc.num_streams * config.hidden_size
    heads = 2 * a.num_heads * a.head_dim
    inner = 3 * m.inner_size * (m.num_experts_per_token + m.num_shared_experts)
    logits = min(rows, a.sliding_window) * config.vocab_size
    return 4 * (rows * (streams + heads + inner) + logits)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBytes:
    """Memory of one training process, f32 throughout.

    Attributes:
        weights: Master weights; each rank of a sharded run holds its share.
        gradients: As many again.
        optimizer: One momentum under Muon and Sinkhorn, two moments under AdamW.
        activations: Streams kept at every layer, one layer's inner activations recomputed.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def training_bytes(config: ModelConfig, *, tokens: int, ranks: int = 1) -> TrainingBytes:
    """Memory of one of `ranks` processes that share weights and optimizer state, `tokens` tokens each.

    Source: derived from training.md 2.1; activations assume a checkpoint per layer.
    """
    text = [tensor for tensor in tensors(config) if tensor.part not in ("draft", "vision")]
    values = sum(tensor.values for tensor in text)
    state = sum(tensor.optimizer_values for tensor in text)
    streams = config.num_layers * config.mhc.num_streams * config.hidden_size
    return TrainingBytes(
        weights=4 * values // ranks,
        gradients=4 * values // ranks,
        optimizer=4 * state // ranks,
        activations=4 * tokens * (streams + config.vocab_size) + step_bytes(config, rows=tokens),
    )
