"""ModelConfig <-> the two published JSON layouts, and `--set a.b=c`.

One table holds every key of both layouts. A key that is unknown, missing or fixed to another value is an
error that names the nearest spelling: a misspelt key must never fall back to a default.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from cedar.config.engram import engram_hashes
from cedar.config.model import ModelConfig
from cedar.errors import ConfigError

# our path -> (name in the nested layout's text_config, name in the flat layout), in the nested file's order
_TEXT_KEYS: dict[str, tuple[str, str]] = {
    "vocab_size": ("vocab_size", "vocab_size"),
    "hidden_size": ("hidden_size", "dim"),
    "moe.inner_size": ("moe_intermediate_size", "moe_inter_dim"),
    "num_layers": ("num_hidden_layers", "n_layers"),
    "attention.num_heads": ("num_attention_heads", "n_heads"),
    "attention.head_dim": ("head_dim", "head_dim"),
    "attention.rope_head_dim": ("qk_rope_head_dim", "rope_head_dim"),
    "attention.q_lora_rank": ("q_lora_rank", "q_lora_rank"),
    "attention.o_lora_rank": ("o_lora_rank", "o_lora_rank"),
    "attention.o_groups": ("o_groups", "o_groups"),
    "moe.swiglu_limit": ("swiglu_limit", "swiglu_limit"),
    "rms_norm_eps": ("rms_norm_eps", "norm_eps"),
    "initializer_range": ("initializer_range", ""),
    "max_position_embeddings": ("max_position_embeddings", ""),
    "attention.rope_theta": ("rope_theta", "rope_theta"),
    "attention.rope_scaling.factor": ("rope_scaling.factor", "rope_factor"),
    "attention.rope_scaling.beta_fast": ("rope_scaling.beta_fast", "beta_fast"),
    "attention.rope_scaling.beta_slow": ("rope_scaling.beta_slow", "beta_slow"),
    "attention.rope_scaling.original_max_position_embeddings": (
        "rope_scaling.original_max_position_embeddings",
        "original_seq_len",
    ),
    "moe.num_routed_experts": ("n_routed_experts", "n_routed_experts"),
    "moe.num_shared_experts": ("n_shared_experts", "n_shared_experts"),
    "moe.num_experts_per_token": ("num_experts_per_tok", "n_activated_experts"),
    "moe.routed_scaling_factor": ("routed_scaling_factor", "route_scale"),
    "attention.sliding_window": ("sliding_window", "window_size"),
    "attention.compress_ratios": ("compress_ratios", "compress_ratios"),
    "attention.compress_rope_theta": ("compress_rope_theta", "compress_rope_theta"),
    "attention.kv_source_layer_ids": ("kv_source_layer_ids", "kv_source_layers"),
    "indexer.source_layer_ids": ("index_source_layer_ids", "index_source_layers"),
    "indexer.num_heads": ("index_n_heads", "index_n_heads"),
    "indexer.head_dim": ("index_head_dim", "index_head_dim"),
    "indexer.topk": ("index_topk", "index_topk"),
    "indexer.candidate_source_layer_id": ("candidate_source_layer_id", "candidate_source_layer"),
    "indexer.candidate_topk_blocks": ("candidate_topk_blocks", "candidate_topk_blocks"),
    "indexer.candidate_block_size": ("candidate_block_size", "candidate_block_size"),
    "mhc.num_streams": ("hc_mult", "hc_mult"),
    "mhc.sinkhorn_iterations": ("hc_sinkhorn_iters", "hc_sinkhorn_iters"),
    "mhc.eps": ("hc_eps", "hc_eps"),
    "engram.layer_ids": ("engram_layer_ids", "engram_layer_ids"),
    "engram.max_ngram_size": ("engram_max_ngram_size", "engram_max_ngram_size"),
    "engram.vocab_size": ("engram_vocab_size", "engram_vocab_size"),
    "engram.num_heads": ("engram_n_heads", "engram_n_heads"),
    "engram.head_dim": ("engram_head_dim", "engram_head_dim"),
    "engram.pad_token_id": ("engram_pad_token_id", "engram_pad_id"),
    "engram.compressed_vocab_size": ("engram_compressed_vocab_size", "engram_compressed_vocab_size"),
    "draft.num_blocks": ("num_nextn_predict_layers", "n_mtp_layers"),
    "draft.block_size": ("dspark_block_size", "dspark_block_size"),
    "draft.noise_token_id": ("dspark_noise_token_id", "dspark_noise_token_id"),
    "draft.target_layer_ids": ("dspark_target_layer_ids", "dspark_target_layer_ids"),
    "draft.markov_rank": ("dspark_markov_rank", "dspark_markov_rank"),
    "draft.num_routed_experts": ("dspark_n_routed_experts", "dspark_n_routed_experts"),
    "draft.num_experts_per_token": ("dspark_num_experts_per_tok", "dspark_n_activated_experts"),
}
_VISION_KEYS: dict[str, tuple[str, str]] = {
    "num_layers": ("num_hidden_layers", "vision_n_layers"),
    "hidden_size": ("hidden_size", "vision_dim"),
    "num_heads": ("num_attention_heads", "vision_n_heads"),
    "intermediate_size": ("intermediate_size", "vision_inter_dim"),
    "patch_size": ("patch_size", "vision_patch_size"),
    "rope_theta": ("rope_theta", "vision_rope_theta"),
    "downsample_ratio": ("downsample_ratio", "vision_downsample_ratio"),
    "max_image_tokens": ("max_image_tokens", "vision_max_n_token"),
    "min_pixels": ("min_pixels", "vision_min_pixels"),
    "max_wh_ratio": ("max_wh_ratio", "vision_max_wh_ratio"),
}
# keys whose value the architecture fixes; another value would need another model
_FIXED_TOP: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
}
_FIXED_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_cache": True,
    "tie_word_embeddings": False,
    "rope_scaling.rope_type": "yarn",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
_FIXED_VISION: dict[str, Any] = {"model_type": "deepseek_v41_vision"}
_FIXED_FLAT: dict[str, Any] = {"score_func": "sqrtsoftplus", "dtype": "fp8", "expert_dtype": "fp4"}
_TOP_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
# the release's nested file, key by key; what is written is in this order
_TEXT_ORDER = (
    "model_type vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim qk_rope_head_dim q_lora_rank o_lora_rank o_groups hidden_act swiglu_limit "
    "rms_norm_eps attention_bias attention_dropout initializer_range use_cache tie_word_embeddings "
    "max_position_embeddings rope_theta rope_scaling n_routed_experts n_shared_experts num_experts_per_tok "
    "scoring_func topk_method norm_topk_prob routed_scaling_factor sliding_window compress_ratios "
    "compress_rope_theta kv_source_layer_ids index_source_layer_ids index_n_heads index_head_dim index_topk "
    "candidate_source_layer_id candidate_topk_blocks candidate_block_size hc_mult hc_sinkhorn_iters hc_eps "
    "engram_layer_ids engram_num_embeddings engram_max_ngram_size engram_vocab_size engram_n_heads "
    "engram_head_dim engram_pad_token_id engram_compressed_vocab_size num_nextn_predict_layers "
    "dspark_block_size dspark_noise_token_id dspark_target_layer_ids dspark_markov_rank "
    "dspark_n_routed_experts dspark_num_experts_per_tok"
).split()


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known spelling, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def load_config(path: str | Path) -> ModelConfig:
    """Read a `config.json` of either published layout.

    Args:
        path: The file, or the checkpoint directory that holds `config.json`.

    Raises:
        ConfigError: No such file, not JSON, or a key that is unknown, missing, wrongly typed or fixed
            to another value.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"no config at {file}: expected a config.json or a checkpoint directory that holds one")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a JSON {type(values).__name__}, expected an object")
    try:
        return config_from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def config_from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """A ModelConfig from either layout's JSON object. Raises ConfigError as `load_config` does."""
    if "text_config" in values:
        return _from_nested(values)
    if "dim" in values or "n_layers" in values:
        return _from_flat(values)
    raise ConfigError(
        "neither published layout: expected 'text_config' (nested config.json) or 'dim' and 'n_layers' "
        f"(flat inference/config.json), got {sorted(values)[:8]}"
    )


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """The nested layout of the release; `flash` gives the release's file byte for byte once dumped."""
    text = _nested(_FIXED_TEXT)
    for path, (name, _) in _TEXT_KEYS.items():
        _put(text, name, _plain(_get(config, path)))
    text["engram_num_embeddings"] = [h.num_rows for h in engram_hashes(config.engram).values()]
    scaling = text["rope_scaling"]
    text["rope_scaling"] = {"rope_type": scaling.pop("rope_type"), **scaling}
    result: dict[str, Any] = {
        "architectures": _FIXED_TOP["architectures"],
        "model_type": _FIXED_TOP["model_type"],
        "dtype": _FIXED_TOP["dtype"],
        "transformers_version": "5.6.0",
        **{name: getattr(config, name) for name in _TOP_TOKENS},
        "quantization_config": _FIXED_TOP["quantization_config"],
        "text_config": {key: text[key] for key in _TEXT_ORDER},
    }
    if config.vision is not None:
        vision = {name: _plain(getattr(config.vision, path)) for path, (name, _) in _VISION_KEYS.items()}
        result["vision_config"] = {**_FIXED_VISION, **vision}
    return result


def dump_config(config: ModelConfig) -> str:
    """`config_to_dict` as the release formats it: two spaces, a newline at the end."""
    return json.dumps(config_to_dict(config), indent=2) + "\n"


ConfigT = TypeVar("ConfigT")


def override(config: ConfigT, assignments: typing.Iterable[str]) -> ConfigT:
    """Any frozen config with `--set a.b=c` applied; the value is JSON, or a bare word for a string.

    Raises:
        ConfigError: No such field (the nearest is named), a value of another type, or one that breaks a rule.

    >>> from cedar.config.presets import nano
    >>> override(nano(), ["indexer.topk=8"]).indexer.topk
    8
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment!r}: expected path=value, for example indexer.topk=8")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        changes[path] = value
    return _replace(config, changes, prefix="")


def build(kind: type[ConfigT], values: Mapping[str, Any], *, prefix: str = "") -> ConfigT:
    """A frozen dataclass from dotted paths, each value checked against its field's type.

    Raises:
        ConfigError: An unknown, missing or wrongly typed field.
    """
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        head, _, rest = path.partition(".")
        if head not in fields:
            raise ConfigError(f"unknown field {prefix + path!r}{nearest(head, fields)}")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            own[head] = _typed(prefix + head, value, hints[head])
    for head, rest_values in nested.items():
        own[head] = build(_dataclass_of(hints[head]), rest_values, prefix=f"{prefix}{head}.")
    missing = [
        name
        for name, f in fields.items()
        if name not in own and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"missing {', '.join(prefix + name for name in missing)}")
    return kind(**own)


def _replace(config: ConfigT, changes: Mapping[str, Any], *, prefix: str) -> ConfigT:
    hints = typing.get_type_hints(type(config))
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        if head not in hints:
            raise ConfigError(f"unknown field {prefix + path!r}{nearest(head, hints)}")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            own[head] = _typed(prefix + head, value, hints[head])
    for head, rest_changes in nested.items():
        part = getattr(config, head)
        if not dataclasses.is_dataclass(part):
            raise ConfigError(f"{prefix + head!r} has no fields, so {', '.join(rest_changes)} cannot be set in it")
        own[head] = _replace(part, rest_changes, prefix=f"{prefix}{head}.")
    return dataclasses.replace(config, **own)  # type: ignore[type-var]


def _dataclass_of(hint: Any) -> Any:
    for option in typing.get_args(hint) or (hint,):
        if dataclasses.is_dataclass(option):
            return option
    raise ConfigError(f"{hint} has no fields of its own")


def _typed(path: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type: lists become tuples, whole numbers may stand for floats."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        return _typed(path, value, next(option for option in options if option is not type(None)))
    if typing.get_origin(hint) is tuple:
        element = typing.get_args(hint)[0]
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path} is {value!r}, expected a list")
        return tuple(_typed(f"{path}[{i}]", item, element) for i, item in enumerate(value))
    if typing.get_origin(hint) is dict:
        element = typing.get_args(hint)[1]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} is {value!r}, expected a table of name = value")
        return {str(name): _typed(f"{path}.{name}", item, element) for name, item in value.items()}
    if typing.get_origin(hint) is typing.Literal:
        if value not in typing.get_args(hint):
            raise ConfigError(f"{path} is {value!r}, expected one of {', '.join(map(repr, typing.get_args(hint)))}")
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and is_number and math.isfinite(value):
        # a whole number stays whole, so that what was read is written back byte for byte
        return value
    if hint is int and is_number and value == int(value) and not isinstance(value, float):
        return value
    if hint in (bool, str) and isinstance(value, hint):
        return value
    if dataclasses.is_dataclass(hint) and isinstance(value, hint):  # type: ignore[arg-type]
        return value
    expected = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}
    raise ConfigError(f"{path} is {value!r}, expected {expected.get(hint, hint)}")


def _from_nested(values: Mapping[str, Any]) -> ModelConfig:
    known_top = {*_FIXED_TOP, *_TOP_TOKENS, "transformers_version", "text_config", "vision_config"}
    _reject_unknown("", values, known_top)
    _check_fixed("", values, _FIXED_TOP)
    text = values["text_config"]
    if not isinstance(text, dict):
        raise ConfigError(f"text_config is a {type(text).__name__}, expected an object")
    flat_text = _flat(text, "rope_scaling")
    known = {name for name, _ in _TEXT_KEYS.values()} | set(_FIXED_TEXT) | {"engram_num_embeddings"}
    _reject_unknown("text_config.", flat_text, known)
    _check_fixed("text_config.", flat_text, _FIXED_TEXT)
    fields = {path: _take("text_config.", flat_text, name) for path, (name, _) in _TEXT_KEYS.items()}
    for name in _TOP_TOKENS:
        fields[name] = _take("", values, name)
    if values.get("vision_config") is not None:
        vision = values["vision_config"]
        if not isinstance(vision, dict):
            raise ConfigError(f"vision_config is a {type(vision).__name__}, expected an object")
        _reject_unknown("vision_config.", vision, {name for name, _ in _VISION_KEYS.values()} | set(_FIXED_VISION))
        _check_fixed("vision_config.", vision, _FIXED_VISION)
        for path, (name, _) in _VISION_KEYS.items():
            fields[f"vision.{path}"] = _take("vision_config.", vision, name)
    config = build(ModelConfig, fields)
    _check_tables(config, _take("text_config.", flat_text, "engram_num_embeddings"))
    return config


def _from_flat(values: Mapping[str, Any]) -> ModelConfig:
    text = {path: flat for path, (_, flat) in _TEXT_KEYS.items() if flat}
    vision = {f"vision.{path}": flat for path, (_, flat) in _VISION_KEYS.items()}
    known = {*text.values(), *vision.values(), *_FIXED_FLAT, *_TOP_TOKENS}
    _reject_unknown("", values, known | {"engram_num_embeddings", "max_position_embeddings", "initializer_range"})
    _check_fixed("", values, _FIXED_FLAT)
    fields = {path: _take("", values, flat) for path, flat in text.items()}
    if any(flat in values for flat in vision.values()):
        fields |= {path: _take("", values, flat) for path, flat in vision.items()}
    # what this layout leaves out has one value in the release (architecture.md 1.1)
    for name, default in (("bos_token_id", 0), ("eos_token_id", 1), ("pad_token_id", 2)):
        fields[name] = values.get(name, default)
    fields["image_token_id"] = _take("", values, "image_token_id")
    fields["max_position_embeddings"] = values.get("max_position_embeddings", 1048576)
    fields["initializer_range"] = values.get("initializer_range", 0.02)
    config = build(ModelConfig, fields)
    _check_tables(config, _take("", values, "engram_num_embeddings"))
    return config


def _check_tables(config: ModelConfig, num_embeddings: Any) -> None:
    expected = [h.num_rows for h in engram_hashes(config.engram).values()]
    if num_embeddings != expected:
        raise ConfigError(
            f"engram_num_embeddings is {num_embeddings}, expected {expected}: the sums of the primes that "
            "engram_vocab_size, engram_n_heads and engram_max_ngram_size give"
        )


def _reject_unknown(prefix: str, values: Mapping[str, Any], known: typing.Iterable[str]) -> None:
    known = set(known)
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown key {prefix + name!r}{nearest(name, known)}")


def _check_fixed(prefix: str, values: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    for name, expected in fixed.items():
        if _take(prefix, values, name) != expected:
            raise ConfigError(
                f"{prefix}{name} is {values[name]!r}, expected {expected!r}: this is another architecture"
            )


def _take(prefix: str, values: Mapping[str, Any], name: str) -> Any:
    if name not in values:
        raise ConfigError(f"missing key {prefix + name!r}{nearest(name, values)}")
    return values[name]


def _flat(values: Mapping[str, Any], parent: str) -> dict[str, Any]:
    """`values` with the object under `parent` lifted to dotted keys."""
    inner = values.get(parent, {})
    if not isinstance(inner, dict):
        raise ConfigError(f"{parent} is {inner!r}, expected an object")
    return {name: v for name, v in values.items() if name != parent} | {f"{parent}.{k}": v for k, v in inner.items()}


def _get(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _nested(fixed: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in fixed.items():
        _put(result, name, value)
    return result


def _put(target: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
    target[leaf] = value
