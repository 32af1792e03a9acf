"""The page that is shipped is the one that its source makes, and it asks for nothing from elsewhere."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WEB, SHIPPED = ROOT / "web", ROOT / "cedar" / "server" / "static" / "index.html"


def test_the_shipped_page_is_of_these_sources() -> None:
    names = ["build.mjs", "index.html", "page.css", *(f"src/{file.name}" for file in (WEB / "src").iterdir())]
    running = hashlib.sha256()
    for name in sorted(names):
        running.update(f"{name}\n".encode() + (WEB / name).read_bytes())
    first = SHIPPED.read_text(encoding="utf-8").split("\n")[0]
    assert running.hexdigest() in first, "web/ has changed: run `make page`"


def test_building_it_again_gives_the_same(tmp_path: Path) -> None:
    if shutil.which("node") is None or not (WEB / "node_modules").exists():
        pytest.skip("no Node.js, or no web/node_modules: `make page` gets what the build needs")
    target = tmp_path / "index.html"
    subprocess.run(["node", "build.mjs", str(target)], cwd=WEB, check=True, timeout=60)
    assert target.read_bytes() == SHIPPED.read_bytes()


def test_nothing_is_loaded() -> None:
    page = SHIPPED.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    for mark in ("http://", "https://", "@import", "url(", " src=", "import(", '<link rel="stylesheet"'):
        assert mark not in page, mark
    # what the policy allows is what is there: one style, one script, no handlers in attributes
    assert (page.count("<style>"), page.count("<script>")) == (1, 1) and not re.search(r"<[^>]* on[a-z]+=", page)
