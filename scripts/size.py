"""Lines of code per package against the weight the design gives it.

A package far above its target either grew for a reason, which its commit names, or holds something twice.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "cedar"
TARGETS = {
    "formats": 550,
    "config": 850,
    "planner": 730,
    "chat": 820,
    "parallel": 270,
    "kernels": 4000,
    "model": 2810,
    "cache": 1680,
    "checkpoint": 860,
    "engine": 1600,
    "server": 630,
    "train": 2550,
    "cli": 360,
}


def lines(folder: Path) -> int:
    """Lines that are neither blank nor a comment, of every Python file below `folder`."""
    texts = (path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    return sum(bool(line.strip()) and not line.strip().startswith("#") for text in texts for line in text.splitlines())


def main() -> None:
    """Print the table."""
    print(f"{'package':<12}{'lines':>7}{'target':>8}{'of target':>11}")
    total = 0
    for name, target in TARGETS.items():
        count = lines(PACKAGE / name)
        total += count
        print(f"{name:<12}{count:>7}{target:>8}{count / target:>10.0%}")
    print(f"{'all':<12}{total:>7}{sum(TARGETS.values()):>8}{total / sum(TARGETS.values()):>10.0%}")


if __name__ == "__main__":
    main()
