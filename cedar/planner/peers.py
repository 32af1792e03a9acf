"""The models that the planner sets beside cedar's: what they keep per token and what a token costs.

Only shapes and sums: none of them runs here. The figures of the report compare the same four.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cedar.config.model import ModelConfig
from cedar.planner import flops, kv


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One model of the comparison.

    Attributes:
        bytes_per_token: What a token leaves in the cache for ever.
        decode_flops: Operations of one generated token at a context, FP8 counted 1/2 and FP4 x FP4 1/4.
    """

    name: str
    bytes_per_token: float
    decode_flops: Callable[[int], float]


def peers(config: ModelConfig, name: str) -> tuple[Peer, ...]:
    """Our `config` first, then V4-Flash, V3.2 and V1 (grouped-query attention)."""
    ours = Peer(
        name="V4.1-Flash" if name == "flash" else name,
        bytes_per_token=kv.global_bytes_per_token(config),
        decode_flops=lambda context: flops.weighted(flops.decode_flops(config, context), flops.PRECISION),
    )
    return (ours, v4_flash(), v3_2(), v1())


def v1() -> Peer:
    """DeepSeek V1 67B: a dense model with grouped-query attention, all of it in bf16.

    Source: architecture.md 8, from public configs at second hand; sums derived.

    >>> v1().bytes_per_token
    389120
    """
    layers, hidden, heads, kv_heads, head_dim, inner, vocab = 95, 8192, 64, 8, 128, 22016, 102400
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    matrices = layers * (attention + 3 * hidden * inner) + hidden * vocab

    def decode(context: int) -> float:
        return 2.0 * matrices + layers * 4.0 * heads * head_dim * context

    return Peer(name="V1 67B (GQA)", bytes_per_token=layers * 2 * kv_heads * head_dim * 2, decode_flops=decode)


def v3_2() -> Peer:
    """DeepSeek V3.2: latent attention over the 2,048 tokens that an indexer in every layer picks.

    The projections into and out of the latent are absorbed into query and output, as engines run it.

    Source: architecture.md 8, from public configs at second hand; sums derived.

    >>> v3_2().bytes_per_token
    48068
    """
    layers, dense_layers, hidden, heads = 61, 3, 7168, 128
    q_latent, kv_latent, rope, nope, value = 1536, 512, 64, 128, 128
    index_heads, index_dim, topk, vocab = 64, 128, 2048, 129280
    attention = (
        hidden * (q_latent + kv_latent + rope)
        + q_latent * heads * (nope + rope)
        + heads * kv_latent * (nope + value)
        + heads * value * hidden
    )
    index = q_latent * index_heads * index_dim + hidden * index_dim
    experts = (8 + 1) * 3 * hidden * 2048
    fp8 = layers * (attention + index) + dense_layers * 3 * hidden * 18432 + (layers - dense_layers) * experts
    wide = (layers - dense_layers) * hidden * 256 + layers * hidden * index_heads + hidden * vocab

    def decode(context: int) -> float:
        core = 2.0 * heads * (kv_latent + rope + kv_latent) * min(context, topk)
        scores = 2.0 * index_heads * index_dim * context
        return 2.0 * (0.5 * fp8 + wide) + layers * (core + 0.5 * scores)

    # an FP8 record of 656 bytes and an FP8 index key of 132
    return Peer(name="V3.2", bytes_per_token=layers * (656 + 132), decode_flops=decode)


def v4_flash() -> Peer:
    """DeepSeek V4-Flash: 21 layers that choose among entries of 4 tokens, 20 that read all entries of 128.

    Source: architecture.md 8, from public configs at second hand; sums derived. The compressors' widths
    are assumed: entries of ratio 4 pool two overlapping groups, so their projections are twice as wide.

    >>> v4_flash().bytes_per_token
    3514.25
    """
    layers, chosen_layers, full_layers = 43, 21, 20
    hidden, heads, head_dim, q_latent, window, vocab = 4096, 64, 512, 1024, 128, 129280
    groups, o_rank, streams = 8, 1024, 4
    index_heads, index_dim, topk = 64, 128, 512
    attention = hidden * (q_latent + head_dim) + q_latent * heads * head_dim + groups * o_rank * hidden
    experts = (6 + 1) * 3 * hidden * 2048
    fp8 = layers * (attention + experts) + chosen_layers * q_latent * index_heads * index_dim
    grouped_output = layers * o_rank * heads * head_dim
    mix = layers * 2 * streams * (streams + 2) * streams * hidden
    compress = chosen_layers * 4 * hidden * (head_dim + index_dim) + full_layers * 2 * hidden * head_dim
    small = layers * hidden * 256 + chosen_layers * hidden * index_heads
    wide = grouped_output + mix + compress + small + hidden * vocab

    def decode(context: int) -> float:
        keys = layers * min(context, window) + chosen_layers * min(context // 4, topk) + full_layers * (context // 128)
        scores = chosen_layers * 2.0 * index_heads * index_dim * (context // 4)
        return 2.0 * (0.5 * fp8 + wide) + 4.0 * heads * head_dim * keys + 0.25 * scores

    # a record of 584 bytes, and beside it an FP4 index key of 68 where entries are chosen
    bytes_per_token = chosen_layers * (584 + 68) / 4 + full_layers * 584 / 128
    return Peer(name="V4-Flash", bytes_per_token=bytes_per_token, decode_flops=decode)
