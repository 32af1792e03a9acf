"""Tables, JSON and figures of one plan."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from cedar.config import presets
from cedar.errors import ConfigError
from cedar.planner import report
from cedar.planner.plot import draw

FLASH = report.Plan(name="flash", config=presets.flash())


def test_json_holds_what_scripts_rely_on() -> None:
    answer = json.loads(json.dumps(report.as_json(FLASH)))
    assert answer["global_kv_bytes_per_token"] == 890
    assert answer["parameters_backbone"] == 551_566_180_464
    assert answer["parameters_engram"] == 196_613_849_600
    assert answer["active_parameters_prefill"] == 7_892_875_448
    assert answer["active_parameters_decode"] == 15_468_670_064
    assert answer["decode_flops_growth_4k_1m"] == pytest.approx(0.25, abs=0.005)
    assert answer["tiers"]["device"]["bytes_by_context"]["1048576"] == 890 * 2**20 + 3_388_416
    assert answer["compared"]["V1 67B (GQA)"]["bytes_per_token"] == 389_120
    assert "fit" not in answer


@pytest.mark.parametrize("name", list(presets.PRESETS))
def test_every_preset_prints_whole_tables(name: str) -> None:
    plan = report.Plan(name=name, config=presets.preset(name), contexts=(1, 129, 2**20), memory_bytes=2**34)
    out = io.StringIO()
    report.print_tables(plan, Console(file=out, width=80))
    text = out.getvalue()
    assert "per token" in text
    assert "mapped" in text
    assert "…" not in text
    assert len(report.as_json(plan)["fit"]) == 6


def test_a_model_without_engram_has_no_row_for_its_tables() -> None:
    from cedar.config.load import override

    plain = override(presets.nano(), ["engram.layer_ids=[]"])
    answer = report.as_json(report.Plan(name="plain", config=plain, memory_bytes=10**9))
    assert answer["parameters_engram"] == 0
    assert [row["weights"] for row in answer["fit"]] == ["release", "bf16", "f32"]


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: no figures without it")
    target = tmp_path / "figures.png"
    draw(FLASH, target)
    data = target.read_bytes()
    assert data.startswith(b"\x89PNG")
    # wide enough to hold two figures, and not an empty canvas
    assert int.from_bytes(data[16:20], "big") >= 1200
    assert len(data) > 20_000


@pytest.mark.parametrize(("name", "message"), [("figures.pdf", ".png"), ("nowhere/figures.png", "no folder")])
def test_a_figure_that_cannot_be_written_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw(FLASH, tmp_path / name)
