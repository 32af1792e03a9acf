"""Write docs/numbers.md and the README's table, from the planner and what an H200 measured.

`--check` writes nothing and fails when either is stale.
"""

from __future__ import annotations

import sys
from pathlib import Path

# run as a program, the folder above is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.goals import table
from cedar.config.presets import flash
from cedar.planner.report import numbers_page, readme_table

ROOT = Path(__file__).resolve().parents[1]
START, STOP = "<!-- numbers: made by `make numbers` -->\n", "<!-- end of numbers -->\n"


def pages() -> dict[Path, str]:
    """What each file must hold."""
    readme = ROOT / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(START)
    after = rest.split(STOP)[1]
    return {
        ROOT / "docs" / "numbers.md": numbers_page(flash()) + "\n" + table(ROOT / "benchmarks/results/h200.csv"),
        readme: before + START + readme_table(flash()) + STOP + after,
    }


def main() -> None:
    """Write both files, or check them."""
    for path, text in pages().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in sys.argv[1:]:
            sys.exit(f"{path.relative_to(ROOT)} is stale: run make numbers")
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
