"""Check that the test vectors are the files that were copied in; `--write` records them after a deliberate change.

The golden files come from an independent implementation and are not made here, so what can be checked is
that nobody changed them.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

VECTORS = Path(__file__).resolve().parents[1] / "tests" / "vectors"
SUMS = VECTORS / "SHA256SUMS"


def digests() -> str:
    """One line a file, as `sha256sum` writes them."""
    files = sorted(path for path in VECTORS.rglob("*") if path.is_file() and path != SUMS)
    named = ((path.relative_to(VECTORS).as_posix(), hashlib.sha256(path.read_bytes())) for path in files)
    return "".join(f"{digest.hexdigest()}  {name}\n" for name, digest in named)


def main() -> None:
    """Compare, or write."""
    now = digests()
    if "--write" in sys.argv[1:]:
        SUMS.write_text(now, encoding="utf-8")
        print(f"wrote {len(now.splitlines())} digests")
        return
    before = set(SUMS.read_text(encoding="utf-8").splitlines())
    changed = sorted({line.split("  ")[1] for line in before ^ set(now.splitlines())})
    if changed:
        sys.exit(f"tests/vectors is not what was recorded: {', '.join(changed)}; restore, or record with --write")
    print(f"{len(before)} files as recorded")


if __name__ == "__main__":
    main()
