"""Every `file: name` in docs/architecture.md exists, so the page cannot rot."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TARGETS = sorted(set(re.findall(r"`([\w/.]+\.py): ([\w.]+)`", PAGE)))
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
SOURCES = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")


def names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What a module or class defines at its top: functions, classes and assigned names."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign):
            found.update({target.id: node for target in node.targets if isinstance(target, ast.Name)})
    return found


@pytest.mark.parametrize(("file", "name"), TARGETS, ids=[f"{file}:{name}" for file, name in TARGETS])
def test_every_stop_exists(file: str, name: str) -> None:
    path = ROOT / file
    assert path.is_file(), f"docs/architecture.md names {file}, which does not exist"
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = names(body)
        assert part in found, f"{file} has no {name}; it has {', '.join(found)}"
        node = found[part]
        body = node.body if isinstance(node, ast.ClassDef) else []


def test_the_lines_are_numbered_without_gaps() -> None:
    rows = [int(row) for row in re.findall(r"^\| (\d+) \| `", PAGE, flags=re.MULTILINE)]
    starts = [place for place, row in enumerate(rows) if row == 1]
    assert len(starts) == 3
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        assert rows[start:stop] == list(range(1, stop - start + 1))
    assert len(TARGETS) > 30


@pytest.mark.parametrize("page", [GLOSSARY, SOURCES, PAGE], ids=["glossary", "sources", "architecture"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    for file in set(re.findall(r"`((?:cedar|tests|docs|scripts|benchmarks|examples)/[\w/.]+)[:`]", page)):
        assert (ROOT / file).exists(), f"{file} does not exist"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.relative_to(ROOT)} links to {link}"
