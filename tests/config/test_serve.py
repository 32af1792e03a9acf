"""What a model's generation_config.json may say, and the limits of a server (under a second)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cedar.config.serve import GenerationDefaults, ServeConfig, load_generation_defaults
from cedar.errors import ConfigError


def write(directory: Path, values: object) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_without_a_file_the_releases_defaults_apply(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == GenerationDefaults()


def test_what_is_there_is_taken_and_the_published_keys_are_known(tmp_path: Path) -> None:
    published = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "top_p": 0.95}
    own = {"temperature": 0, "thinking": False, "max_new_tokens": 200, "top_k": 5, "min_p": 0.1}
    assert load_generation_defaults(write(tmp_path, published | own)) == GenerationDefaults(
        temperature=0, top_p=0.95, top_k=5, min_p=0.1, max_new_tokens=200, thinking=False
    )


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ([], "expected an object"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"temperature": 3}, "temperature is 3"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": -1}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"thinking": 1}, "thinking is 1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, values: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_generation_defaults(write(tmp_path, values))


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        load_generation_defaults(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"port": -1},
        {"port": 65536},
        {"max_context": 1},
        {"max_step_tokens": 0},
        {"ping_s": 0},
        {"engram": "disc"},
        {"engram_cache_bytes": 0},
        {"cache_day_bytes": -1},
        {"cache_shared": "file:///x", "cache_host_bytes": 0},
        {"snapshot_bytes": -1},
        {"replay_turns": 0},
    ],
)
def test_limits_must_make_sense(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        ServeConfig(**change)


def test_the_answers_own_length_depends_on_thinking() -> None:
    plain = GenerationDefaults()
    assert plain.answer_tokens(thinking=False, effort=75) == 8192
    assert plain.answer_tokens(thinking=True, effort=75) == 65536
    assert plain.answer_tokens(thinking=True, effort=100) == 131072
    assert GenerationDefaults(max_new_tokens=5).answer_tokens(thinking=True, effort=100) == 5


def test_snapshots_have_a_tenth_unless_told() -> None:
    assert ServeConfig(cache_bytes=900).snapshot_budget == 100
    assert ServeConfig(cache_bytes=900, snapshot_bytes=0).snapshot_budget == 0
