"""A process that writes pages until it is killed: `python store_writer.py DIRECTORY SEED [BUDGET]`, without torch."""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

from cedar.cache.keys import child_key, root_key
from cedar.cache.store import PageStore, Record

PAYLOAD_BYTES = 5000
FINGERPRINT = b"writer"


def payload(key: bytes) -> bytes:
    """What the page of a key must hold: known to whoever knows the key."""
    return (hashlib.sha256(key).digest() * (PAYLOAD_BYTES // 32 + 1))[:PAYLOAD_BYTES]


def chain(seed: int, count: int) -> list[Record]:
    """A conversation's pages, one below the other."""
    draw = random.Random(seed)
    parent, records = root_key(FINGERPRINT, b""), []
    for _ in range(count):
        tokens = tuple(draw.randrange(1000) for _ in range(128))
        key = child_key(parent, tokens)
        records.append(Record(key, parent, tokens, 0, payload(key)))
        parent = key
    return records


def open_store(directory: Path, budget_bytes: int = 2**30) -> PageStore:
    return PageStore(directory, fingerprint=FINGERPRINT, payload_bytes=PAYLOAD_BYTES, budget_bytes=budget_bytes)


def main() -> None:
    store = open_store(Path(sys.argv[1]), int(sys.argv[3]) if len(sys.argv) > 3 else 2**30)
    assert "torch" not in sys.modules
    print("ready", flush=True)
    number = int(sys.argv[2]) * 1_000_000
    while True:
        number += 1
        for record in chain(number, 6):
            store.put(record)
        store.flush()
        # all of this conversation is committed now, whatever happens next
        print(number, flush=True)


if __name__ == "__main__":
    main()
