"""Learning rate and stages over a run."""

from __future__ import annotations

from cedar.config.train import ScheduleConfig
from cedar.train.schedule import rate_at, stage_at
from tests.train.conftest import tiny_recipe


def test_rate_warms_up_stays_falls_and_stays_low() -> None:
    config = ScheduleConfig(warmup_steps=100)
    rates = [rate_at(step, 2000, config) for step in range(2000)]
    assert rates[0] == 0.01
    assert all(rate == 1.0 for rate in rates[99:1200])
    assert all(one >= other for one, other in zip(rates[1200:], rates[1201:], strict=False))
    assert abs(rates[1900] - 0.1) < 1e-6


def test_a_short_run_reaches_its_full_rate() -> None:
    assert rate_at(5, 20, ScheduleConfig()) == 1.0


def test_stages_by_share() -> None:
    stage = {"mixture": {"copy": 1.0}, "lengths": [32]}
    stages = [stage | {"name": name, "share": share} for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2))]
    config = tiny_recipe(stages=stages)
    assert [stage_at(step, 10, config) for step in range(12)] == [0] * 5 + [1] * 3 + [2] * 4
