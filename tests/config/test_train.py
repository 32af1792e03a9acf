"""Recipes: read, overridden, refused with the nearest spelling."""

from __future__ import annotations

from pathlib import Path

import pytest

from cedar.config.rounding import Rounding
from cedar.config.train import load_train_config, train_config_from_dict, train_config_to_dict
from cedar.errors import ConfigError

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
SMALLEST = """
preset = "nano"
seed = 1
row_tokens = 64
rows = 4
steps = 10
[optim]
eps = 1e-20
[[stages]]
name = "only"
share = 1.0
mixture = { copy = 1 }
lengths = [32, 64]
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_reads_and_comes_back_from_json(file: Path) -> None:
    config = load_train_config(file)
    assert train_config_from_dict(train_config_to_dict(config)) == config
    if file.stem == "mini":
        # stage A alone; mini-serve goes on from its weights
        return
    # the last stretch runs as the model serves (issue 2, item 7)
    assert config.stages[-1].roundings() == Rounding(weights=True)
    assert config.stages[-1].dense_share == 0
    assert config.stages[-1].replay_share > 0


# field report E05: `1e-20` without a point read as a string
def test_numbers_are_numbers(tmp_path: Path) -> None:
    config = load_train_config(write(tmp_path, SMALLEST))
    assert config.optim.eps == 1e-20
    assert config.trained_length == 64
    assert config.stages[0].roundings() == Rounding.none()


def test_overrides_reach_stages_by_name(tmp_path: Path) -> None:
    changes = ["stages.only.dense_share=0.25", "optim.learning_rate=0.001", 'stages.only.mixture={"pairs": 2}']
    config = load_train_config(write(tmp_path, SMALLEST), changes)
    assert config.stages[0].dense_share == 0.25
    assert config.stages[0].mixture == {"pairs": 2}
    assert config.optim.learning_rate == 0.001


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seed = 1", "seeed = 1"), "did you mean 'seed'"),
        (("lengths", "lenghts"), "did you mean 'lengths'"),
        (("steps = 10", "steps = 'ten'"), "expected a whole number"),
        (("share = 1.0", "share = 0.5"), "sum to 0.5"),
        (("[32, 64]", "[32, 128]"), "does not fit a row of 64"),
        (("[32, 64]", "[33]"), "even numbers"),
        (("{ copy = 1 }", "{ copy = 'much' }"), "mixture.copy"),
        (("rows = 4", "rows = 4\nmicro_batches = 3"), "multiple of micro_batches"),
        (("lengths", "rounding = ['main_kvs']\nlengths"), "main_kvs"),
        (("preset", "preset ="), "not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_train_config(write(tmp_path, SMALLEST.replace(*change)))


def test_no_such_recipe_or_stage(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the recipe"):
        load_train_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="there are only"):
        load_train_config(write(tmp_path, SMALLEST), ["stages.onyl.share=1"])
