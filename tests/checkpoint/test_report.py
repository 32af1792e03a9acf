"""`cedar inspect` and `cedar convert` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cedar.checkpoint.report import layer_letters, tokenizer_state
from cedar.cli.commands import app
from cedar.config import presets
from cedar.config.load import load_config
from cedar.errors import CedarError, FormatError
from tests.checkpoint.raw import VECTORS, RawCheckpoint


def run(*arguments: str | Path) -> tuple[int, str]:
    """Exit status and standard output; a CedarError, which `main` would print, is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, CedarError):
        raise result.exception
    return result.exit_code, result.stdout


def test_a_sound_checkpoint_shows_its_counts() -> None:
    status, text = run("inspect", VECTORS / "ckpt_a")
    assert status == 0
    lines = [line.split() for line in text.splitlines()]
    assert ["text", "1,136", "1,136", "2.57", "MB"] in lines
    assert ["draft", "169", "169", "414.58", "kB"] in lines
    assert any(line[:2] == ["all", "1,305"] for line in lines)
    assert lines[-1] == ["sound"]


def test_every_problem_is_listed(raw: RawCheckpoint, tmp_path: Path) -> None:
    gone = [name for name in raw.tensors if name.startswith("layers.1.ffn.experts")]
    for name in gone:
        del raw.tensors[name]
    directory = raw.save(tmp_path / "broken")
    status, text = run("inspect", directory)
    assert status == 1
    assert all(f"{name} is missing" in text for name in gone)
    assert text.rstrip().endswith(f"{len(gone)} problems")


def test_json_agrees(copied: Path) -> None:
    status, text = run("inspect", copied, "--json")
    answer = json.loads(text)
    assert (status, answer["sound"]) == (0, True)
    assert sum(part["bytes"] for part in answer["parts"].values()) == sum(
        dtype["bytes"] for dtype in answer["dtypes"].values()
    )
    (copied / "model-00002-of-00002.safetensors").unlink()
    status, text = run("inspect", copied, "--json")
    assert (status, json.loads(text)["sound"]) == (1, False)


def test_a_foreign_tokenizer_is_a_problem(copied: Path) -> None:
    from cedar.chat.tokenizer import train_tokenizer

    train_tokenizer(["a small text about small texts"] * 3, 280).save(copied)
    status, text = run("inspect", copied)
    assert status == 1
    assert "280 tokens, the config's vocab_size is 192" in text
    sentence, fits = tokenizer_state(VECTORS / "ckpt_a", load_config(VECTORS / "ckpt_a"))
    assert fits
    assert "none" in sentence


def test_inspect_of_nothing_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CedarError, match="no config at"):
        run("inspect", tmp_path / "nowhere")


def test_inspect_kernels_names_every_op() -> None:
    from cedar.kernels.dispatch import BACKENDS

    status, text = run("inspect", "kernels")
    assert status == 0
    assert all(op in text for op in BACKENDS)


def test_convert_says_what_it_wrote_and_what_it_left(copied: Path, tmp_path: Path) -> None:
    (copied / "generation_config.json").write_text("{}")
    (copied / "training.log").write_text("loss")
    status, text = run("convert", copied, tmp_path / "out", "--shard-size", "500kB")
    assert status == 0
    assert "draft tensors" in text
    assert "generation_config.json" in text
    assert "not taken along: training.log" in text
    assert RawCheckpoint.load(tmp_path / "out").tensors == RawCheckpoint.load(copied).tensors
    assert max(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) < 600_000


def test_convert_refuses_a_damaged_source(copied: Path, tmp_path: Path) -> None:
    (copied / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match="is missing although the index"):
        run("convert", copied, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_are_written_as_letters() -> None:
    assert layer_letters(presets.micro()) == "S S F2 U U F2 | F1 U R U R U"
