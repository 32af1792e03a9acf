"""Every rule of ModelConfig: what breaks it, and what the message says."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.config import presets
from cedar.config.engram import engram_hashes
from cedar.config.layers import layer_plans
from cedar.config.load import build, config_from_dict, config_to_dict, override
from cedar.config.model import IndexerConfig, ModelConfig, RopeScaling
from cedar.config.rounding import Rounding
from cedar.errors import ConfigError

# nano: layout S S F2 U | F1 U R U; sources 2 and 4, indices at 2, 4 and 6
RULES = [
    ("hidden_size=100", "hidden_size is 100, expected a positive multiple of 32"),
    ("attention.head_dim=48", "head_dim is 48, expected a positive multiple of 32"),
    ("attention.q_lora_rank=65", "q_lora_rank is 65, expected a positive multiple of 32"),
    ("moe.inner_size=63", "moe_intermediate_size is 63, expected a positive multiple of 32"),
    ("indexer.head_dim=40", "index_head_dim is 40, expected a positive multiple of 32"),
    ("attention.num_heads=5", "num_attention_heads is 5, expected a positive multiple of 2"),
    ("attention.o_lora_rank=48", "o_lora_rank is 48, expected a positive multiple of 32"),
    ("engram.head_dim=16", "engram_head_dim is 16, expected a positive multiple of 32"),
    ("attention.rope_head_dim=7", "qk_rope_head_dim is 7, expected an even number below head_dim 32"),
    ("attention.rope_head_dim=32", "qk_rope_head_dim is 32, expected an even number below head_dim 32"),
    ("attention.rope_head_dim=18", "qk_rope_head_dim is 18, expected at most half of index_head_dim 32"),
    ("indexer.candidate_block_size=3", r"candidate_block_size is 3, expected a divisor of the page \(128\)"),
    ("moe.num_experts_per_token=9", r"num_experts_per_tok is 9, expected 1..8 \(n_routed_experts\)"),
    ("moe.num_shared_experts=2", "n_shared_experts is 2, expected 1"),
    ("bos_token_id=512", "bos_token_id is 512, expected an id below vocab_size 512"),
    ("eos_token_id=-1", "eos_token_id is -1, expected an id below vocab_size 512"),
    ("pad_token_id=512", "pad_token_id is 512"),
    ("image_token_id=600", "image_token_id is 600"),
    ("engram.pad_token_id=512", "engram_pad_token_id is 512"),
    ("engram.max_ngram_size=1", "engram_max_ngram_size is 1, expected at least 2"),
    ("attention.kv_source_layer_ids=[4,2]", r"kv_source_layer_ids is \[4, 2\], expected ascending layer ids below 8"),
    ("attention.kv_source_layer_ids=[2,8]", "expected ascending layer ids below 8"),
    ("attention.kv_source_layer_ids=[2,2,4]", "expected ascending layer ids below 8"),
    ("attention.kv_source_layer_ids=[]", "kv_source_layer_ids is empty"),
    ("indexer.source_layer_ids=[2,6,4]", "index_source_layer_ids is"),
    ("engram.layer_ids=[2,1]", "engram_layer_ids is"),
    ("engram.layer_ids=[8]", "engram_layer_ids is"),
    ("attention.compress_ratios=[0,0,2,2,1,1,1]", "compress_ratios has 7 entries, expected 8"),
    ("attention.compress_ratios=[0,0,2,2,1,1,1,3]", r"compress_ratios holds \[0, 1, 2, 3\], expected only 0"),
    ("attention.compress_ratios=[0,1,2,2,1,1,1,1]", "must be 0 before layer 2"),
    ("attention.compress_ratios=[0,0,2,2,1,1,0,1]", "1 or 2 from it on"),
    ("attention.compress_ratios=[0,0,2,1,1,1,1,1]", r"compress_ratios of layers 2..3 are \[1, 2\], expected one ratio"),
    ("attention.compress_ratios=[0,0,1,1,2,2,2,2]", r"compress_ratios\[4\] is 2, expected 1: the decoder keeps"),
    ("indexer.source_layer_ids=[2,6]", r"index_source_layer_ids lacks \[4\]"),
    ("indexer.candidate_source_layer_id=2", "candidate_source_layer_id is 2, expected 4, the last of"),
]
DRAFT_RULES = [
    ("attention.compress_ratios=[0,0,2,2,1,1,1,1,1]", "compress_ratios of the draft blocks must be 0"),
    ("draft.num_blocks=2", "compress_ratios has 9 entries, expected 10"),
    ("draft.target_layer_ids=[]", "dspark_target_layer_ids is empty"),
    ("draft.target_layer_ids=[5,8]", "dspark_target_layer_ids is"),
    ("draft.markov_rank=60", "dspark_markov_rank is 60, expected a positive multiple of 32"),
    ("draft.num_experts_per_token=5", r"dspark_num_experts_per_tok is 5, expected 1..4 \(dspark_n_routed_experts\)"),
    ("draft.noise_token_id=512", "dspark_noise_token_id is 512, expected an id below vocab_size 512"),
    ("draft.block_size=0", "draft.block_size is 0, expected a positive number"),
]


def drafting_nano() -> ModelConfig:
    return override(presets.nano(), ["draft.num_blocks=1", "attention.compress_ratios=[0,0,2,2,1,1,1,1,0]"])


@pytest.mark.parametrize(("change", "message"), RULES)
def test_rules(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(presets.nano(), [change])


@pytest.mark.parametrize(("change", "message"), DRAFT_RULES)
def test_draft_rules(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(drafting_nano(), [change])


def test_the_groups_of_the_output_hold_whole_formats() -> None:
    narrow = ["attention.num_heads=3", "attention.head_dim=32", "attention.o_groups=3"]
    assert override(presets.nano(), narrow).attention.o_groups == 3
    with pytest.raises(ConfigError, match="vision hidden_size is 1000, expected a positive multiple of 16"):
        override(presets.flash(), ["vision.hidden_size=1000"])


def test_absent_modules_may_have_empty_sizes() -> None:
    nano = override(presets.nano(), ["engram.layer_ids=[]", "engram.head_dim=0", "engram.vocab_size=0"])
    assert engram_hashes(nano.engram) == {}
    assert override(presets.nano(), ["draft.block_size=0", "draft.markov_rank=0"]).draft.num_blocks == 0


def leaves(part: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


LEAVES = list(leaves(presets.flash()))


@pytest.mark.parametrize("path", LEAVES)
def test_no_field_of_the_release_takes_nothing_or_less(path: str) -> None:
    """0 is fine for a token id alone; nothing takes -1."""
    flash = presets.flash()
    with pytest.raises(ConfigError):
        override(flash, [f"{path}=-1"])
    if not path.endswith("token_id"):
        with pytest.raises(ConfigError):
            override(flash, [f"{path}=0"])


VALUES = st.one_of(
    st.integers(-3, 70), st.floats(allow_nan=True), st.booleans(), st.none(), st.text(max_size=3),
    st.lists(st.integers(-1, 9), max_size=9),
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(LEAVES), VALUES, min_size=1, max_size=3))
def test_any_change_gives_a_usable_config_or_a_named_error(changes: dict[str, Any]) -> None:
    try:
        config = override(drafting_nano(), [f"{path}={json.dumps(value)}" for path, value in changes.items()])
    except ConfigError as error:
        assert str(error)
        return
    assert len(layer_plans(config)) == config.num_layers
    assert len(engram_hashes(config.engram)) == len(config.engram.layer_ids)
    assert config_from_dict(config_to_dict(config)) == config


def test_configs_are_frozen_and_hashable() -> None:
    nano = presets.nano()
    with pytest.raises(dataclasses.FrozenInstanceError):
        nano.indexer.topk = 3  # type: ignore[misc]
    assert hash(nano) == hash(presets.nano())
    assert nano != presets.micro()


def test_the_boundary_is_the_last_layer_that_writes_a_cache() -> None:
    # equal to half of the layers in the release, not in nano
    assert presets.flash().boundary_layer_id == 20
    assert presets.nano().boundary_layer_id == 4
    assert presets.micro().boundary_layer_id == 6
    assert presets.mini().boundary_layer_id == presets.small().boundary_layer_id == 8


def test_build_names_what_is_missing_unknown_or_mistyped() -> None:
    with pytest.raises(ConfigError, match="missing num_heads, head_dim, source_layer_ids"):
        build(IndexerConfig, {"topk": 3, "candidate_source_layer_id": 2, "candidate_topk_blocks": 1,
                              "candidate_block_size": 1})  # fmt: skip
    with pytest.raises(ConfigError, match="unknown field 'beta_fst'; did you mean 'beta_fast'"):
        build(RopeScaling, {"beta_fst": 1.0})
    with pytest.raises(ConfigError, match="factor is 'x', expected a finite number"):
        build(RopeScaling, {"factor": "x"})
    assert build(RopeScaling, {}) == RopeScaling()


@given(st.fixed_dictionaries({}, optional={"factor": st.floats(1, 100), "beta_fast": st.integers(1, 99)}))
def test_build_keeps_what_it_is_given(values: dict[str, float]) -> None:
    scaling = build(RopeScaling, values)
    for name, value in values.items():
        assert getattr(scaling, name) == value


def test_rounding_modes_are_the_golden_ones() -> None:
    assert Rounding() == Rounding(activations=True, window_kv=True, main_kv=True, index=True, weights=False)
    assert not any(getattr(Rounding.none(), name) for name in typing.get_type_hints(Rounding))
    assert Rounding.cache_only() == dataclasses.replace(Rounding(), activations=False)
