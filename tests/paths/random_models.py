"""Random small configs and models whose parameters hide no term (field report A32)."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import strategies as st

from cedar.config import presets
from cedar.config.model import ModelConfig
from cedar.model.draft import Draft
from cedar.model.init import initialise
from cedar.model.transformer import Transformer
from tests.device import DEVICE


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any schedule the architecture allows at toy sizes: fewer entries than top-k, windows longer than the text."""
    encoder = ["S"] * draw(st.integers(1, 2))
    for _ in range(draw(st.integers(0, 2))):
        encoder += [draw(st.sampled_from(["F2", "F1"]))] + ["U"] * draw(st.integers(0, 1))
        encoder += draw(st.sampled_from([[], ["R"]]))
    decoder = ["F1"] + draw(st.lists(st.sampled_from(["U", "R"]), min_size=1, max_size=3))
    layout = f"{' '.join(encoder)} | {' '.join(decoder)}"
    num_layers = len(layout.replace("|", "").split())
    base = presets.nano()
    config = presets._small_model(
        layout=layout,
        vocab_size=64,
        hidden_size=32,
        num_heads=draw(st.sampled_from([2, 4])),
        head_dim=32,
        rope_head_dim=draw(st.sampled_from([4, 8, 16])),
        q_lora_rank=32,
        o_groups=draw(st.sampled_from([1, 2])),
        o_lora_rank=32,
        window=draw(st.integers(2, 40)),
        compress_rope_theta=draw(st.sampled_from([100, 10000])),
        num_experts=4,
        num_experts_per_token=draw(st.integers(1, 4)),
        inner_size=32,
        sinkhorn_iterations=draw(st.integers(1, 5)),
        index_heads=draw(st.sampled_from([1, 4])),
        index_dim=32,
        topk=draw(st.integers(1, 12)),
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        num_blocks=draw(st.integers(1, 6)),
        engram_layers=tuple(sorted(draw(st.sets(st.integers(0, num_layers - 1), max_size=2)))),
        max_ngram_size=draw(st.integers(2, 4)),
        engram_vocab_size=31,
    )
    return dataclasses.replace(config, initializer_range=base.initializer_range)


def tiny() -> ModelConfig:
    """One layer of each kind, where a test runs the engine in exact mode."""
    return presets._small_model(
        layout="S F2 U | F1 R U",
        vocab_size=512,
        hidden_size=32,
        num_heads=2,
        head_dim=32,
        rope_head_dim=8,
        q_lora_rank=32,
        o_groups=1,
        o_lora_rank=32,
        window=12,
        compress_rope_theta=100,
        num_experts=4,
        num_experts_per_token=2,
        inner_size=32,
        sinkhorn_iterations=3,
        index_heads=2,
        index_dim=32,
        topk=6,
        block_size=4,
        num_blocks=4,
        engram_layers=(1,),
        max_ngram_size=3,
        engram_vocab_size=31,
    )


def random_model(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Transformer:
    """A model in which every gain, bias, sink and scale is random."""
    model = Transformer(config, device=DEVICE, dtype=dtype)
    initialise(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            if name.endswith(("norm.weight", "q_weight", "k_weight")):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith(("attn_sink", "base", ".scale")):
                parameter.add_((0.3 * noise).to(parameter.dtype))
            elif name.endswith(("embed.weight", "head.weight")):
                parameter.copy_(noise * (1 if name == "embed.weight" else 0.2))
        for name, buffer in model.named_buffers():
            if name.endswith(("gate.bias", "gate.bias_vl")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    model.token_map.set(torch.randint(0, config.vocab_size, (config.vocab_size,), generator=generator))
    return model


def random_draft(config: ModelConfig, *, num_blocks: int = 2) -> Draft:
    """A draft that says something, attached to a random model of this config."""
    config = presets.with_draft(config, num_blocks=num_blocks, num_routed_experts=2, markov_rank=32)
    draft = Draft(config, random_model(config, 5), device=DEVICE)
    initialise(draft, 6)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        # a head that tells tokens apart, and tables whose logits count
        for weight, scale in (
            (draft.mtp[-1].confidence_head.proj.weight, 0.1),
            (draft.mtp[-1].markov_head.head.weight, 0.5),
        ):
            weight.copy_(torch.empty(weight.shape, device="cpu").normal_(0, scale, generator=generator))
    draft.attach()
    return draft
