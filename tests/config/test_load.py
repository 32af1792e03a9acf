"""Both published layouts, read strictly; every refusal names the key and the remedy."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.config import load, presets
from cedar.config.load import config_from_dict, config_to_dict, dump_config, load_config, nearest, override
from cedar.config.model import ModelConfig
from cedar.errors import ConfigError

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
NESTED = VECTORS / "config" / "config.release.json"
FLAT = VECTORS / "config" / "config.release.inference.json"


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def test_the_copied_files_are_the_release() -> None:
    # sha256 that the release's users pin
    assert hashlib.sha256(NESTED.read_bytes()).hexdigest().startswith("8be45ce0476004a3f529fd896115a4a2")
    assert hashlib.sha256(FLAT.read_bytes()).hexdigest().startswith("2e84f45c")


def test_both_layouts_are_the_flash_preset() -> None:
    assert load_config(NESTED) == presets.flash()
    assert load_config(FLAT) == presets.flash()


def test_the_release_is_written_back_byte_for_byte() -> None:
    assert dump_config(load_config(NESTED)).rstrip() == NESTED.read_text(encoding="utf-8").rstrip()
    assert dump_config(load_config(FLAT)) == dump_config(load_config(NESTED))


@pytest.mark.parametrize("name", ["ckpt_a", "ckpt_b"])
def test_golden_checkpoints_load_from_their_folder(name: str) -> None:
    config = load_config(VECTORS / name)
    assert config == load_config(VECTORS / name / "config.json")
    assert config.draft.num_blocks == {"ckpt_a": 3, "ckpt_b": 1}[name]
    assert config_to_dict(config)["text_config"] == read(VECTORS / name / "config.json")["text_config"]


@pytest.mark.parametrize("name", list(presets.PRESETS))
def test_presets_survive_a_file(name: str, tmp_path: Path) -> None:
    config = presets.preset(name)
    (tmp_path / "config.json").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path) == config


def test_no_preset_of_that_name() -> None:
    with pytest.raises(ConfigError, match="no preset is called 'large'; there are nano, micro, mini, small, flash"):
        presets.preset("large")


@pytest.mark.parametrize(
    ("path", "wrong", "right"),
    [
        (("text_config", "index_topk"), "index_topK", "index_topk"),
        (("text_config", "sliding_window"), "slidding_window", "sliding_window"),
        (("text_config", "rope_scaling", "beta_fast"), "beta_fasst", "rope_scaling.beta_fast"),
        (("vision_config", "patch_size"), "patchsize", "patch_size"),
        (("eos_token_id",), "eos_tokenid", "eos_token_id"),
    ],
)
def test_a_misspelt_key_is_named_with_its_nearest(path: tuple[str, ...], wrong: str, right: str) -> None:
    values = read(NESTED)
    target = values
    for name in path[:-1]:
        target = target[name]
    target[wrong] = target.pop(path[-1])
    with pytest.raises(ConfigError, match=f"unknown key '.*{wrong}'; did you mean '{right}'") as caught:
        config_from_dict(values)
    assert right in str(caught.value)


def test_a_misspelt_key_of_the_flat_layout_is_named() -> None:
    values = read(FLAT)
    values["windwo_size"] = values.pop("window_size")
    with pytest.raises(ConfigError, match="unknown key 'windwo_size'; did you mean 'window_size'"):
        config_from_dict(values)


def every_key(values: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    keys: list[tuple[str, ...]] = []
    for name, value in values.items():
        keys.append((*prefix, name))
        if isinstance(value, dict) and name != "quantization_config":
            keys.extend(every_key(value, (*prefix, name)))
    return keys


# not a shape: the version of a library, and the vision tower, which a text model does without
OPTIONAL = {("transformers_version",), ("vision_config",)}


@pytest.mark.parametrize("path", every_key(read(NESTED)), ids=".".join)
def test_every_key_of_the_nested_layout_is_needed(path: tuple[str, ...]) -> None:
    values = read(NESTED)
    target = values
    for name in path[:-1]:
        target = target[name]
    del target[path[-1]]
    if path in OPTIONAL:
        assert config_from_dict(values).vision == (None if path == ("vision_config",) else presets.flash().vision)
        return
    # without text_config nothing says which layout the file has
    with pytest.raises(ConfigError, match=path[-1] if path != ("text_config",) else "layout"):
        config_from_dict(values)


@pytest.mark.parametrize("path", every_key(read(FLAT)), ids=".".join)
def test_every_key_of_the_flat_layout_is_needed(path: tuple[str, ...]) -> None:
    values = read(FLAT)
    del values[path[0]]
    with pytest.raises(ConfigError, match=path[0]):
        config_from_dict(values)


@pytest.mark.parametrize("path", every_key(read(NESTED)), ids=".".join)
def test_no_key_of_the_nested_layout_takes_another_type(path: tuple[str, ...]) -> None:
    values = read(NESTED)
    target = values
    for name in path[:-1]:
        target = target[name]
    if path == ("transformers_version",):
        return
    target[path[-1]] = "seven" if not isinstance(target[path[-1]], str) else 7
    with pytest.raises(ConfigError):
        config_from_dict(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v4"}, "model_type is 'deepseek_v4', expected 'deepseek_v41'"),
        ({"dtype": "float16"}, "dtype is 'float16', expected 'bfloat16'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is"),
        ({"text_config": {"scoring_func": "sigmoid"}}, "scoring_func is 'sigmoid', expected 'sqrtsoftplus'"),
        ({"text_config": {"tie_word_embeddings": True}}, "tie_word_embeddings is True, expected False"),
        ({"text_config": {"num_key_value_heads": 8}}, "num_key_value_heads is 8, expected 1"),
        ({"text_config": {"rope_scaling": {"rope_type": "linear"}}}, "rope_type is 'linear', expected 'yarn'"),
        ({"text_config": {"rope_scaling": [16]}}, r"rope_scaling is \[16\], expected an object"),
        ({"text_config": []}, "text_config is a list, expected an object"),
        ({"vision_config": []}, "vision_config is a list, expected an object"),
        ({"text_config": {"index_topk": 512.5}}, "topk is 512.5, expected a whole number"),
        ({"text_config": {"index_topk": True}}, "topk is True, expected a whole number"),
        ({"text_config": {"rms_norm_eps": "1e-20"}}, "rms_norm_eps is '1e-20', expected a finite number"),
        ({"text_config": {"rms_norm_eps": float("nan")}}, "rms_norm_eps is nan, expected a finite number"),
        ({"text_config": {"kv_source_layer_ids": 2}}, "kv_source_layer_ids is 2, expected a list"),
        ({"text_config": {"compress_ratios": [0, "2"]}}, r"compress_ratios\[1\] is '2', expected a whole number"),
        ({"text_config": {"engram_num_embeddings": [384006168, 1]}}, r"expected \[384006168, 384016682\]"),
        ({"text_config": {"engram_vocab_size": 17000000}}, "the sums of the primes"),
        ({"image_token_id": None}, "image_token_id is None"),
    ],
)
def test_wrong_values_are_named(change: dict[str, Any], message: str) -> None:
    values = read(NESTED)

    def put(target: dict[str, Any], changes: dict[str, Any]) -> None:
        for name, value in changes.items():
            if isinstance(value, dict) and name != "quantization_config":
                put(target[name], value)
            else:
                target[name] = value

    put(values, change)
    with pytest.raises(ConfigError, match=message):
        config_from_dict(values)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "no config at .*config.json: expected"),
        (lambda path: path.write_text("{", encoding="utf-8"), "is not JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe{}"), "is not JSON"),
        (lambda path: path.write_text("[1]", encoding="utf-8"), "holds a JSON list, expected an object"),
        (lambda path: path.write_text("{}", encoding="utf-8"), "layout"),
        (lambda path: path.mkdir(), "no config at"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, write: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "config.json"
    write(path)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_whole_numbers_stay_whole_in_the_file() -> None:
    text = dump_config(presets.flash())
    assert '"rope_theta": 10000,' in text
    assert '"rms_norm_eps": 1e-20,' in text
    assert '"swiglu_limit": 10.0,' in text


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("indexer.topk", "expected path=value"),
        ("indexer.topkk=8", "unknown field 'indexer.topkk'; did you mean 'topk'"),
        ("indexr.topk=8", "unknown field 'indexr.topk'; did you mean 'indexer'"),
        ("vocab_size.x=8", "'vocab_size' has no fields, so x cannot be set in it"),
        ("vision.patch_size=7", "'vision' has no fields"),
        ("indexer.topk=0", "indexer.topk is 0, expected a positive number"),
        ("indexer.topk=8.5", "indexer.topk is 8.5, expected a whole number"),
        ("indexer=8", "indexer is 8"),
        ("moe.swiglu_limit=Infinity", "expected a finite number"),
    ],
)
def test_override_refuses(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(presets.nano(), [assignment])


def test_override_changes_one_field_and_no_other() -> None:
    nano = presets.nano()
    changed = override(nano, ["indexer.topk=8", "attention.rope_scaling.factor=4", "engram.layer_ids=[1]"])
    assert changed.indexer.topk == 8
    assert changed.attention.rope_scaling.factor == 4
    assert changed.engram.layer_ids == (1,)
    back = override(changed, ["indexer.topk=16", "attention.rope_scaling.factor=1", "engram.layer_ids=[1,2]"])
    assert back == nano
    assert override(nano, []) is not None
    assert nano == presets.nano()


# fields that break no rule whatever positive value they take
FREE = {
    "indexer.topk": st.integers(1, 10**6),
    "indexer.candidate_topk_blocks": st.integers(1, 10**6),
    "attention.sliding_window": st.integers(1, 10**5),
    "attention.rope_theta": st.floats(1, 1e9),
    "mhc.sinkhorn_iterations": st.integers(1, 100),
    "moe.routed_scaling_factor": st.floats(0.01, 100),
    "rms_norm_eps": st.floats(1e-30, 1e-3),
    "engram.vocab_size": st.integers(2, 10**6),
    "moe.num_routed_experts": st.integers(12, 500),
}


@given(st.sampled_from(["nano", "micro", "mini", "small", "flash"]), st.fixed_dictionaries({}, optional=FREE))
def test_any_override_survives_a_file_in_both_directions(name: str, changes: dict[str, float]) -> None:
    config = override(presets.preset(name), [f"{path}={value!r}" for path, value in changes.items()])
    for path, value in changes.items():
        assert load._get(config, path) == value
    assert config_from_dict(json.loads(dump_config(config))) == config


@given(st.dictionaries(st.sampled_from([".".join(path) for path in every_key(read(NESTED))]), st.none(), max_size=3))
def test_a_file_with_keys_missing_is_a_config_or_a_named_error(removed: dict[str, None]) -> None:
    values = read(NESTED)
    for dotted in removed:
        target: Any = values
        *parents, last = dotted.split(".")
        for name in parents:
            target = target.get(name, {})
        target.pop(last, None)
    try:
        config = config_from_dict(values)
    except ConfigError as error:
        assert str(error)
    else:
        assert isinstance(config, ModelConfig)


def test_nearest_is_silent_about_strangers() -> None:
    assert nearest("zzz", ["topk", "head_dim"]) == ""
    assert nearest("tokp", ["topk", "head_dim"]) == "; did you mean 'topk'?"


def test_reading_leaves_the_values_alone() -> None:
    values = read(NESTED)
    before = copy.deepcopy(values)
    config_from_dict(values)
    assert values == before
