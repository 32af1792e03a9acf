"""Floating-point operations of a token, by component and context: decode, prefill, training.

A product of n multiply-adds counts 2n. What a token multiplies is read off `memory.tensors`; only
attention and index scoring depend on the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cedar.config.layers import LayerKind, LayerPlan, layer_plans
from cedar.config.model import ModelConfig
from cedar.errors import CapacityError, ConfigError
from cedar.planner.memory import tensors

DecoderReplay = Literal["bounded", "exact", "off"]
# products over the cache; every other component is a matrix of the model
ATTENTION, INDEX_SCORES = "attention core", "index scores"
# weights apply once a token; training adds a gradient of the inputs and one of the weights
_TRAINING_PASSES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighting:
    """What one operation counts, by the arithmetic it runs in; bf16 and f32 count 1.

    Attributes:
        fp4: FP4 times FP4: index scores.
        fp8: FP8 linears.
        routed: Routed experts, FP4 weights and FP8 activations.
        grouped_output: The grouped output projection: stored FP8, multiplied in bf16.
    """

    name: str
    fp4: float
    fp8: float
    routed: float
    grouped_output: float

    def weight(self, component: str) -> float:
        if component == INDEX_SCORES:
            return self.fp4
        if component == "routed experts":
            return self.routed
        if component == "grouped output":
            return self.grouped_output
        return self.fp8 if component in _FP8_COMPONENTS else 1.0


_FP8_COMPONENTS = ("attention projections", "index queries", "shared expert", "engram projection")
COUNTED = Weighting(name="every operation 1", fp4=1, fp8=1, routed=1, grouped_output=1)
# the report's growth of 1/4 is reproduced by this one
PRECISION = Weighting(name="FP4 x FP4 1/4, FP8 and routed 1/2", fp4=0.25, fp8=0.5, routed=0.5, grouped_output=1)
OUTPUT_FP8 = Weighting(name="the same, grouped output 1/2", fp4=0.25, fp8=0.5, routed=0.5, grouped_output=0.5)
ROUTED_FP4 = Weighting(name="the second, routed 1/4", fp4=0.25, fp8=0.5, routed=0.25, grouped_output=1)
WEIGHTINGS = (COUNTED, PRECISION, OUTPUT_FP8, ROUTED_FP4)


def weighted(flops: dict[str, float], weighting: Weighting) -> float:
    """The sum over components, each with its weight."""
    return sum(count * weighting.weight(component) for component, count in flops.items())


def decode_flops(config: ModelConfig, context: int) -> dict[str, float]:
    """Operations of one generated token that sees `context` tokens, itself included, by component.

    Source: architecture.md 8.

    Raises:
        CapacityError: A context below 1.

    >>> from cedar.config.presets import flash
    >>> round(sum(decode_flops(flash(), 2**12).values()) / 1e9, 1)
    35.7
    """
    if context < 1:
        raise CapacityError(f"a context of {context} tokens decodes nothing, expected at least 1")
    flops = _products(config, range(config.num_layers), head=True)
    plans = layer_plans(config)
    flops[ATTENTION] = sum(_attention_flops(config, plan, context, context) for plan in plans)
    flops[INDEX_SCORES] = sum(_score_flops(config, plan, context, context) for plan in plans)
    return flops


def decode_growth(config: ModelConfig, weighting: Weighting = PRECISION) -> float:
    """Decode FLOPs at 1M tokens over those at 4K, less one: 1/4 for `flash`. 1M is 2**20, 4K is 2**12."""
    short, long = (weighted(decode_flops(config, context), weighting) for context in (2**12, 2**20))
    return long / short - 1


def layer_rows(config: ModelConfig, prompt_tokens: int, replay: DecoderReplay = "bounded") -> tuple[int, ...]:
    """Rows that each layer runs over a cold prompt.

    `bounded` runs the decoder on the last window, `exact` on every row that the last token depends on,
    `off` on all rows.

    Source: serving.md 1.2.

    Raises:
        CapacityError: A negative prompt length.
        ConfigError: No such replay.
    """
    if prompt_tokens < 0:
        raise CapacityError(f"a prompt of {prompt_tokens} tokens does not exist, expected 0 or more")
    window, last = config.attention.sliding_window, config.num_layers - 1
    boundary = config.boundary_layer_id
    rows = []
    for layer in range(config.num_layers):
        if layer < boundary or replay == "off":
            rows.append(prompt_tokens)
        elif replay == "bounded":
            rows.append(min(window, prompt_tokens))
        elif replay == "exact":
            # the boundary layer writes its window rows everywhere, so the next layer sets its rows
            above = last - max(layer, min(boundary + 1, last))
            rows.append(min(window + (window - 1) * above, prompt_tokens))
        else:
            raise ConfigError(f"decoder replay is {replay!r}, expected bounded, exact or off")
    return tuple(rows)


def prefill_flops(config: ModelConfig, prompt_tokens: int, replay: DecoderReplay = "bounded") -> dict[str, float]:
    """Operations of a whole cold prompt, by component; the head runs on its last row alone.

    Every row runs the encoder. The rows of `layer_rows` run the decoder, the others only the producer of
    the boundary layer's cache: its mHC mix, compressor and index key.
    """
    plans = layer_plans(config)
    rows_by_layer = layer_rows(config, prompt_tokens, replay)
    producer_rows = prompt_tokens - rows_by_layer[config.boundary_layer_id]
    flops: dict[str, float] = {"producer": float(_producer(config) * producer_rows)}
    for plan, rows in zip(plans, rows_by_layer, strict=True):
        start = prompt_tokens - rows + 1
        for component, count in _products(config, (plan.layer,), head=False).items():
            flops[component] = flops.get(component, 0) + count * rows
        if rows:
            counted = (
                (ATTENTION, _attention_flops(config, plan, start, prompt_tokens)),
                (INDEX_SCORES, _score_flops(config, plan, start, prompt_tokens)),
            )
            for component, count in counted:
                flops[component] = flops.get(component, 0) + count
    if prompt_tokens:
        flops["head"] = 2.0 * config.vocab_size * config.hidden_size
    return flops


def training_flops(config: ModelConfig, sequence_tokens: int) -> dict[str, float]:
    """Operations per token of one training step over sequences of this length: three forward passes.

    All rows run all layers and the head. The indexer's dense teacher is not counted.

    Raises:
        CapacityError: A sequence below 1 token.
    """
    if sequence_tokens < 1:
        raise CapacityError(f"a sequence of {sequence_tokens} tokens trains nothing, expected at least 1")
    flops = _products(config, range(config.num_layers), head=True)
    plans = layer_plans(config)
    flops[ATTENTION] = sum(_attention_flops(config, plan, 1, sequence_tokens) for plan in plans) / sequence_tokens
    flops[INDEX_SCORES] = sum(_score_flops(config, plan, 1, sequence_tokens) for plan in plans) / sequence_tokens
    return {component: _TRAINING_PASSES * count for component, count in flops.items()}


def _products(config: ModelConfig, layers: range | tuple[int, ...], *, head: bool) -> dict[str, float]:
    """Operations of one row in the matrices of these layers, by component."""
    flops: dict[str, float] = {}
    for tensor in tensors(config):
        wanted = tensor.layer in layers or (head and tensor.part == "head")
        if tensor.product is not None and wanted:
            flops[tensor.product] = flops.get(tensor.product, 0) + 2.0 * tensor.active_values
    return flops


def _producer(config: ModelConfig) -> int:
    """Operations of one row in what the boundary layer needs to write its cache."""
    a, i, streams = config.attention, config.indexer, config.mhc.num_streams
    mix = streams * (streams + 2) * streams * config.hidden_size
    return 2 * (mix + a.head_dim * config.hidden_size + i.head_dim * a.head_dim)


def _attention_flops(config: ModelConfig, plan: LayerPlan, first: int, last: int) -> float:
    """Scores and values over window and selected entries, of the rows that see `first` to `last` tokens."""
    a = config.attention
    keys = _capped_sum(last, 1, a.sliding_window) - _capped_sum(first - 1, 1, a.sliding_window)
    if plan.ratio:
        topk = config.indexer.topk
        keys += _capped_sum(last, plan.ratio, topk) - _capped_sum(first - 1, plan.ratio, topk)
    return 4.0 * a.num_heads * a.head_dim * keys


def _score_flops(config: ModelConfig, plan: LayerPlan, first: int, last: int) -> float:
    """Index scores of the rows that see `first` to `last` tokens: all visible entries, or those of the pool."""
    if plan.kind not in (LayerKind.FULL, LayerKind.REINDEX):
        return 0.0
    i = config.indexer
    pool = i.candidate_topk_blocks * i.candidate_block_size if plan.uses_pool else last
    scored = _capped_sum(last, plan.ratio, pool) - _capped_sum(first - 1, plan.ratio, pool)
    return 2.0 * i.num_heads * i.head_dim * scored


def _capped_sum(rows: int, ratio: int, cap: int) -> int:
    """Sum of min(p // ratio, cap) for p in 1..rows.

    >>> _capped_sum(7, 2, 2) == sum(min(p // 2, 2) for p in range(1, 8))
    True
    """
    free = min(rows, cap * ratio)
    # whole groups of `ratio` rows with the quotients 0, 1, 2, ..., then the rest of a group
    groups, rest = divmod(free + 1, ratio)
    return ratio * groups * (groups - 1) // 2 + rest * groups + cap * (rows - free)
