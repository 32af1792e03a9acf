"""The five shapes cedar knows by name: nano, micro, mini, small, and flash (the release)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from cedar.config.model import (
    AttentionConfig,
    DraftConfig,
    EngramConfig,
    HyperConnectionConfig,
    IndexerConfig,
    ModelConfig,
    MoEConfig,
    RopeScaling,
    VisionConfig,
)
from cedar.errors import ConfigError


def _schedule(layout: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Ratios, KV sources and index sources of a layout such as `S S F2 U | F1 U R U`.

    S window only, F2 and F1 full at ratio 2 and 1, U reuse, R reindex; the bar is the encoder/decoder border.

    >>> _schedule("S F2 U | F1 R")
    ((0, 2, 2, 1, 1), (1, 3), (1, 3, 4))
    """
    ratios: list[int] = []
    kv_sources: list[int] = []
    index_sources: list[int] = []
    ratio = 0
    for layer, code in enumerate(layout.replace("|", "").split()):
        if code.startswith("F"):
            ratio = int(code[1:])
            kv_sources.append(layer)
        if code.startswith(("F", "R")):
            index_sources.append(layer)
        ratios.append(0 if code == "S" else ratio)
    return tuple(ratios), tuple(kv_sources), tuple(index_sources)


def _small_model(
    *,
    layout: str,
    vocab_size: int,
    hidden_size: int,
    num_heads: int,
    head_dim: int,
    rope_head_dim: int,
    q_lora_rank: int,
    o_groups: int,
    o_lora_rank: int,
    window: int,
    compress_rope_theta: float,
    num_experts: int,
    num_experts_per_token: int,
    inner_size: int,
    sinkhorn_iterations: int,
    index_heads: int,
    index_dim: int,
    topk: int,
    block_size: int,
    num_blocks: int,
    engram_layers: tuple[int, ...],
    max_ngram_size: int,
    engram_vocab_size: int,
) -> ModelConfig:
    """What nano, micro, mini and small have in common (training.md 5.1, 'common to the four')."""
    ratios, kv_sources, index_sources = _schedule(layout)
    # the eight chat tokens take the last ids, in the order of chat/tokenizer.py; system first, image last
    system_token_id, image_token_id = vocab_size - 8, vocab_size - 1
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=len(ratios),
        rms_norm_eps=1e-20,
        max_position_embeddings=1048576,
        initializer_range=0.02,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=image_token_id,
        attention=AttentionConfig(
            num_heads=num_heads,
            head_dim=head_dim,
            rope_head_dim=rope_head_dim,
            q_lora_rank=q_lora_rank,
            o_lora_rank=o_lora_rank,
            o_groups=o_groups,
            sliding_window=window,
            rope_theta=10000,
            compress_rope_theta=compress_rope_theta,
            rope_scaling=RopeScaling(factor=1),
            compress_ratios=ratios,
            kv_source_layer_ids=kv_sources,
        ),
        indexer=IndexerConfig(
            num_heads=index_heads,
            head_dim=index_dim,
            topk=topk,
            source_layer_ids=index_sources,
            candidate_source_layer_id=kv_sources[-1],
            candidate_topk_blocks=num_blocks,
            candidate_block_size=block_size,
        ),
        moe=MoEConfig(
            num_routed_experts=num_experts,
            num_shared_experts=1,
            num_experts_per_token=num_experts_per_token,
            inner_size=inner_size,
            routed_scaling_factor=1.5,
            swiglu_limit=10.0,
        ),
        mhc=HyperConnectionConfig(num_streams=4, sinkhorn_iterations=sinkhorn_iterations, eps=1e-6),
        engram=EngramConfig(
            layer_ids=engram_layers,
            max_ngram_size=max_ngram_size,
            vocab_size=engram_vocab_size,
            num_heads=4,
            head_dim=32,
            pad_token_id=2,
            compressed_vocab_size=vocab_size,
        ),
        draft=DraftConfig(
            num_blocks=0,
            block_size=5,
            noise_token_id=system_token_id,
            target_layer_ids=tuple(range(len(ratios) - 3, len(ratios))),
            markov_rank=64,
            num_routed_experts=4,
            num_experts_per_token=2,
        ),
    )


def with_draft(config: ModelConfig, *, num_blocks: int, **sizes: Any) -> ModelConfig:
    """`config` with draft blocks, which read no compressed cache.

    Args:
        sizes: Other fields of `DraftConfig`; the config's own by default.

    >>> with_draft(nano(), num_blocks=2, block_size=3).attention.compress_ratios
    (0, 0, 2, 2, 1, 1, 1, 1, 0, 0)
    """
    ratios = config.attention.compress_ratios[: config.num_layers] + (0,) * num_blocks
    return dataclasses.replace(
        config,
        draft=dataclasses.replace(config.draft, num_blocks=num_blocks, **sizes),
        attention=dataclasses.replace(config.attention, compress_ratios=ratios),
    )


def nano() -> ModelConfig:
    """3.3 M parameters: proof of code, learns in minutes on two cores."""
    return _small_model(
        layout="S S F2 U | F1 U R U",
        vocab_size=512,
        hidden_size=128,
        num_heads=4,
        head_dim=32,
        rope_head_dim=8,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=32,
        window=16,
        compress_rope_theta=100,
        num_experts=8,
        num_experts_per_token=2,
        inner_size=64,
        sinkhorn_iterations=4,
        index_heads=4,
        index_dim=32,
        topk=16,
        block_size=4,
        num_blocks=8,
        engram_layers=(1, 2),
        max_ngram_size=3,
        engram_vocab_size=1009,
    )


def micro() -> ModelConfig:
    """10 M parameters: the first bundled model."""
    return _small_model(
        layout="S S F2 U U F2 | F1 U R U R U",
        vocab_size=1024,
        hidden_size=160,
        num_heads=4,
        head_dim=64,
        rope_head_dim=16,
        q_lora_rank=96,
        o_groups=2,
        o_lora_rank=64,
        window=16,
        compress_rope_theta=100,
        num_experts=8,
        num_experts_per_token=2,
        inner_size=128,
        sinkhorn_iterations=8,
        index_heads=4,
        index_dim=32,
        topk=16,
        block_size=4,
        num_blocks=12,
        engram_layers=(1, 2),
        max_ngram_size=3,
        engram_vocab_size=2003,
    )


def mini() -> ModelConfig:
    """27 M parameters: one GPU for some minutes."""
    return _small_model(
        layout="S S F2 U U F2 U U | F1 U R U R U R U",
        vocab_size=2048,
        hidden_size=256,
        num_heads=8,
        head_dim=64,
        rope_head_dim=16,
        q_lora_rank=128,
        o_groups=4,
        o_lora_rank=64,
        window=32,
        compress_rope_theta=1000,
        num_experts=8,
        num_experts_per_token=2,
        inner_size=160,
        sinkhorn_iterations=20,
        index_heads=8,
        index_dim=32,
        topk=32,
        block_size=8,
        num_blocks=16,
        engram_layers=(1, 5),
        max_ngram_size=4,
        engram_vocab_size=4093,
    )


def small() -> ModelConfig:
    """130 M parameters: one GPU for half an hour."""
    return _small_model(
        layout="S S F2 U U F2 U U | F1 U R U R U R U",
        vocab_size=4096,
        hidden_size=512,
        num_heads=8,
        head_dim=128,
        rope_head_dim=32,
        q_lora_rank=256,
        o_groups=4,
        o_lora_rank=128,
        window=64,
        compress_rope_theta=1000,
        num_experts=12,
        num_experts_per_token=3,
        inner_size=256,
        sinkhorn_iterations=20,
        index_heads=8,
        index_dim=64,
        topk=64,
        block_size=8,
        num_blocks=32,
        engram_layers=(1, 5),
        max_ngram_size=4,
        engram_vocab_size=32749,
    )


def flash() -> ModelConfig:
    """DeepSeek-V4.1-Flash as released: 551.6 B backbone and 196.6 B Engram parameters."""
    return ModelConfig(
        vocab_size=129280,
        hidden_size=5120,
        num_layers=40,
        rms_norm_eps=1e-20,
        max_position_embeddings=1048576,
        initializer_range=0.02,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=129264,
        attention=AttentionConfig(
            num_heads=64,
            head_dim=512,
            rope_head_dim=64,
            q_lora_rank=1280,
            o_lora_rank=1024,
            o_groups=8,
            sliding_window=128,
            rope_theta=10000,
            compress_rope_theta=160000,
            rope_scaling=RopeScaling(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536),
            compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
            kv_source_layer_ids=(2, 8, 14, 20),
        ),
        indexer=IndexerConfig(
            num_heads=32,
            head_dim=128,
            topk=512,
            source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
            candidate_source_layer_id=20,
            candidate_topk_blocks=2048,
            candidate_block_size=8,
        ),
        moe=MoEConfig(
            num_routed_experts=384,
            num_shared_experts=1,
            num_experts_per_token=6,
            inner_size=2304,
            routed_scaling_factor=1.5,
            swiglu_limit=10.0,
        ),
        mhc=HyperConnectionConfig(num_streams=4, sinkhorn_iterations=20, eps=1e-6),
        engram=EngramConfig(
            layer_ids=(1, 14),
            max_ngram_size=4,
            vocab_size=16000000,
            num_heads=8,
            head_dim=256,
            pad_token_id=2,
            compressed_vocab_size=99092,
        ),
        draft=DraftConfig(
            num_blocks=3,
            block_size=5,
            noise_token_id=128799,
            target_layer_ids=(37, 38, 39),
            markov_rank=256,
            num_routed_experts=128,
            num_experts_per_token=3,
        ),
        vision=VisionConfig(
            num_layers=32,
            hidden_size=1024,
            num_heads=16,
            intermediate_size=2816,
            patch_size=14,
            rope_theta=10000,
            downsample_ratio=3,
            max_image_tokens=1024,
            min_pixels=295936,
            max_wh_ratio=None,
        ),
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "nano": nano,
    "micro": micro,
    "mini": mini,
    "small": small,
    "flash": flash,
}


def preset(name: str) -> ModelConfig:
    """The preset called `name`.

    Raises:
        ConfigError: No preset has that name; the message lists those that exist.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset is called {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]()
