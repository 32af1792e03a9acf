"""The files for running cedar elsewhere name options and metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from typer.testing import CliRunner

from cedar.cli.main import app
from cedar.server.metrics import ServerMetrics

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    text = ServerMetrics(lambda: (0, 0)).text().decode()
    known = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    known |= {f"{name}_bucket" for name in known}
    panels = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"\b([a-z_]+(?:_bucket|_total|_running|_waiting))\b", target["expr"])
    }
    assert len(panels) >= 6 and len(asked) >= 8
    assert asked <= known, asked - known


def test_the_options_of_the_unit_and_the_image_exist() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for name in ("cedar.service", "Dockerfile"):
        options = set(
            re.findall(
                r"(?<![\w-])(--(?:host|port|drain|api-key-file|model|alias|strict)\b)", (DEPLOY / name).read_text()
            )
        )
        assert len(options) >= 2
        for option in options:
            assert option in shown
