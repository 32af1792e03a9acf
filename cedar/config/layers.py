"""One plan per layer: which attention it runs, whose cache it reads, whose selection it uses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cedar.config.model import ModelConfig


class LayerKind(Enum):
    """The four attention modes of CSA2 (report 2.3)."""

    WINDOW = "window"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """What one layer does.

    Attributes:
        ratio: Tokens per compressed entry that this layer reads; 0 for window only.
        kv_source: Layer whose entries are read, None for window only.
        index_source: Layer whose selection is used (itself for FULL and REINDEX), None for window only.
        uses_pool: True if the selection is made inside the candidate pool.
        decoder: True from the boundary layer on.
        engram: True if an Engram module runs before this layer.
    """

    layer: int
    kind: LayerKind
    ratio: int
    kv_source: int | None
    index_source: int | None
    uses_pool: bool
    decoder: bool
    engram: bool

    @property
    def writes_entries(self) -> bool:
        return self.kind is LayerKind.FULL

    @property
    def selects(self) -> bool:
        return self.kind in (LayerKind.FULL, LayerKind.REINDEX)


def _latest(sources: tuple[int, ...], layer: int) -> int:
    return max(source for source in sources if source <= layer)


def layer_plans(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """One `LayerPlan` per backbone layer.

    The source of a layer is the largest listed id that is not above it; a layer in both lists is FULL, in
    the index list alone REINDEX, in neither REUSE.

    Source: architecture.md 1.3.

    >>> from cedar.config.presets import flash
    >>> [plan.layer for plan in layer_plans(flash()) if plan.kind is LayerKind.REINDEX]
    [24, 28, 32, 36]
    """
    attention, indexer = config.attention, config.indexer
    plans = []
    for layer in range(config.num_layers):
        ratio = attention.compress_ratios[layer]
        if layer in attention.kv_source_layer_ids:
            kind = LayerKind.FULL
        elif layer in indexer.source_layer_ids:
            kind = LayerKind.REINDEX
        else:
            kind = LayerKind.REUSE if ratio else LayerKind.WINDOW
        plans.append(
            LayerPlan(
                layer=layer,
                kind=kind,
                ratio=ratio,
                kv_source=_latest(attention.kv_source_layer_ids, layer) if ratio else None,
                index_source=_latest(indexer.source_layer_ids, layer) if ratio else None,
                uses_pool=kind is LayerKind.REINDEX and layer > indexer.candidate_source_layer_id,
                decoder=layer >= config.boundary_layer_id,
                engram=layer in config.engram.layer_ids,
            )
        )
    return tuple(plans)
