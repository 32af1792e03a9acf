"""Which weights a directory holds: a digest of every byte of its shards, kept beside them. No torch."""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from pathlib import Path

import xxhash

log = logging.getLogger(__name__)

NOTE = ".cedar-digests.json"
# smaller checkpoints are read again each time, which takes less than a second
WORTH_NOTING_BYTES = 256 * 2**20
# a file that changed this recently may change again without its times telling
_SETTLED_S = 2.0
_CHUNK_BYTES = 16 * 2**20


def weights_digest(directory: Path, *, worth_noting_bytes: int = WORTH_NOTING_BYTES) -> bytes:
    """32 bytes that follow from the names and contents of all shards, and from nothing else.

    Reading a large checkpoint takes as long as the disk needs, so what was read is noted beside it, under each
    shard's size, inode and times: a copy or a rewrite is read anew, whatever time of writing it was given. Where the
    note cannot be written the shards are read each time.

    Raises:
        OSError: A shard cannot be read.
    """
    shards = sorted(directory.glob("*.safetensors"))
    known = _read_note(directory / NOTE)
    noted: dict[str, list[int | str]] = {}
    running = xxhash.xxh3_128()
    read_bytes, began = 0, time.monotonic()
    for shard in shards:
        about = shard.stat()
        stamp = [about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns]
        entry = known.get(shard.name, [])
        if entry[:4] == stamp and len(entry) == 5:
            digest = str(entry[4])
        else:
            digest = _content_digest(shard)
            read_bytes += about.st_size
        if time.time() - about.st_ctime > _SETTLED_S:
            noted[shard.name] = [*stamp, digest]
        running.update(f"{shard.name} {about.st_size} {digest}\n".encode())
    if read_bytes >= worth_noting_bytes:
        log.info("read %d bytes of weights for their digest in %.1f s", read_bytes, time.monotonic() - began)
        _write_note(directory / NOTE, noted)
    return running.digest() + len(shards).to_bytes(16, "little")


def _content_digest(shard: Path) -> str:
    running = xxhash.xxh3_128()
    with shard.open("rb", buffering=0) as opened:
        chunk = bytearray(_CHUNK_BYTES)
        while count := opened.readinto(chunk):
            running.update(memoryview(chunk)[:count])
    return running.hexdigest()


def _read_note(file: Path) -> dict[str, list[int | str]]:
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: entry for name, entry in note.items() if isinstance(entry, list)} if isinstance(note, dict) else {}


def _write_note(file: Path, noted: dict[str, list[int | str]]) -> None:
    temporary = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(json.dumps(noted), encoding="utf-8")
        os.replace(temporary, file)
    except OSError as error:
        log.info("cannot note the weights' digest in %s (%s): they are read again next time", file, error)
