"""What is refused before anything is loaded: packages that are too old, a machine that is too small (about 10 s)."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from cedar.cli import doctor, requirements
from cedar.config.presets import preset
from cedar.config.serve import ServeConfig
from cedar.errors import ConfigError


def test_this_environment_meets_them() -> None:
    requirements.check_packages()


def test_an_old_package_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    # field report G02
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.10.9" if name == "torch" else real(name))
    with pytest.raises(ConfigError, match=r"torch>=2\.11 \(2\.10\.9 is installed\).*pip install"):
        requirements.check_packages()
    (finding,) = [finding for finding in doctor._packages() if finding.state == "missing"]
    assert finding.what == "torch" and finding.remedy.startswith("pip install")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # field report G01
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "llguidance":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match=r"llguidance.* \(not installed\)"):
        requirements.check_packages()


@pytest.mark.parametrize(
    ("has", "least", "enough"),
    [("2.13.0+cpu", "2.11", True), ("2.11", "2.11.0", True), ("2.9", "2.11", False), ("1.10", "1.9", True),
     ("3.0rc1", "3", True), ("0.6.1", "0.6.2", False)],
)  # fmt: skip
def test_versions_are_numbers(has: str, least: str, enough: bool) -> None:
    assert (requirements._numbers(has) >= requirements._numbers(least)) is enough


def test_a_machine_that_is_too_small_gets_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    # field report G07
    monkeypatch.setattr(requirements, "memory_free", lambda: 2**30)
    monkeypatch.setattr(requirements.Path, "exists", lambda self: False)
    with pytest.raises(ConfigError, match=r"about 2[0-9]{3}\.\d\d GiB.* 1\.00 GiB are free"):
        requirements.check_memory(preset("flash"), ServeConfig())
    needed = requirements.check_memory(preset("nano"), ServeConfig(cache_bytes=9 * 2**20))
    assert needed["cache"] == 10 * 2**20 and needed["weights"] < 2**26


def test_a_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"memory.max": "3000\n", "memory.current": "1000\n"}

    def read_text(self: Any) -> str:
        return texts[self.name]

    monkeypatch.setattr(requirements.Path, "read_text", read_text)
    assert requirements.memory_free() == 2000
    texts["memory.max"] = "max\n"
    assert requirements.memory_free() > 2000
