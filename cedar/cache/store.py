"""The disk tier: pages in append-only segment files, and one sqlite index that every process shares. No torch.

A record is written and synced before the index names it, so the index never names bytes that are not there.
A reader checks what it read against the record's own checksums: torn, flipped, overwritten or vanished bytes
are a miss, never a wrong page.

Each process appends to segments of its own and reads those of all. Whole segments are dropped when the tier
outgrows its budget, least recently used first. Files are readable by their owner alone: they hold prompts.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import sqlite3
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from cedar.cache.keys import common_length
from cedar.config.model import PAGE_TOKENS
from cedar.errors import CapacityError, FormatError
from cedar.planner.kv import PAGE_DISK_UNIT, PAGE_HEADER_BYTES

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
MAGIC = b"V41P"
INDEX = "index.sqlite"
SEGMENT_BYTES = 64 * 2**20
# pages waiting for the writer; more are not kept, so that a slow disk never holds up a step
_MAX_QUEUED = 1024
_BATCH = 64
_BUSY_S = 10.0
_STARTING_S = 60.0
# magic, version, flags, lineage, tokens of the page
_HEAD = struct.Struct("<4sHHHH")
_TOKENS = struct.Struct(f"<{PAGE_TOKENS}I")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS pages (
    key BLOB PRIMARY KEY, parent BLOB NOT NULL, writer TEXT NOT NULL, segment INTEGER NOT NULL,
    slot INTEGER NOT NULL, lineage INTEGER NOT NULL, tokens BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_parent ON pages (parent);
CREATE INDEX IF NOT EXISTS by_segment ON pages (writer, segment);
CREATE TABLE IF NOT EXISTS segments (
    writer TEXT NOT NULL, segment INTEGER NOT NULL, used REAL NOT NULL, pinned INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (writer, segment)
);
CREATE TABLE IF NOT EXISTS blobs (
    key BLOB PRIMARY KEY, used REAL NOT NULL, checksum BLOB NOT NULL, bytes BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS turns (
    key BLOB PRIMARY KEY, root BLOB NOT NULL, used REAL NOT NULL, checksum BLOB NOT NULL, bytes BLOB NOT NULL
) WITHOUT ROWID;
"""
# turns of the replay map; above it those used longest ago leave
_MAX_TURNS = 65536
_TRIM_TURNS = 1024
# bytes of a key that the index keeps; records hold all 32
_KEY_BYTES = 16


class Record(NamedTuple):
    """One page as it lies on disk."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    lineage: int
    payload: bytes


class _Saved(NamedTuple):
    """A turn of the replay map on its way to the index."""

    key: bytes
    root: bytes
    value: bytes


class Listed(NamedTuple):
    """What the index knows of a page."""

    key: bytes
    tokens: tuple[int, ...]
    lineage: int


@dataclass(slots=True)
class StoreStats:
    """Counters of one process.

    Attributes:
        failed: Reads that became a miss and writes that were dropped, by cause.
    """

    written: int = 0
    read: int = 0
    bytes_written: int = 0
    failed: dict[str, int] = field(default_factory=dict)

    def fail(self, cause: str) -> None:
        self.failed[cause] = self.failed.get(cause, 0) + 1


def pack_record(record: Record, record_bytes: int) -> bytes:
    """Header and payload, padded to `record_bytes`.

    Source: serving.md 4.4.
    """
    tokens = (*record.tokens, *([0] * (PAGE_TOKENS - len(record.tokens))))
    header = b"".join(
        (
            _HEAD.pack(MAGIC, FORMAT_VERSION, 0, record.lineage, len(record.tokens)),
            _TOKENS.pack(*tokens),
            record.parent,
            record.key,
            xxhash.xxh3_128_digest(record.payload),
        )
    )
    header += xxhash.xxh3_64_digest(header)
    packed = header.ljust(PAGE_HEADER_BYTES, b"\0") + record.payload
    return packed.ljust(record_bytes, b"\0")


def unpack_record(packed: bytes, payload_bytes: int) -> Record:
    """What `pack_record` packed.

    Raises:
        FormatError: Too short, another format, or any bit that differs from what was written.
    """
    size = _HEAD.size + _TOKENS.size + 32 + 32 + 16
    if len(packed) < PAGE_HEADER_BYTES + payload_bytes:
        raise FormatError(f"a record of {PAGE_HEADER_BYTES + payload_bytes} bytes ends after {len(packed)}")
    header = packed[:size]
    if xxhash.xxh3_64_digest(header) != packed[size : size + 8]:
        raise FormatError("the header's checksum does not match")
    magic, version, _, lineage, length = _HEAD.unpack_from(header)
    if magic != MAGIC or version != FORMAT_VERSION or length > PAGE_TOKENS:
        raise FormatError(f"magic {magic!r}, version {version}: this cedar reads {MAGIC!r}, version {FORMAT_VERSION}")
    tokens = _TOKENS.unpack_from(header, _HEAD.size)[:length]
    keys = header[_HEAD.size + _TOKENS.size :]
    payload = packed[PAGE_HEADER_BYTES : PAGE_HEADER_BYTES + payload_bytes]
    if xxhash.xxh3_128_digest(payload) != keys[64:80]:
        raise FormatError("the payload's checksum does not match")
    return Record(keys[32:64], keys[:32], tokens, lineage, payload)


class PageStore:
    """The pages of one model on one disk.

    Args:
        directory: The tier's root; each fingerprint has a directory of its own below it.
        fingerprint: Weights, config and format that the pages belong to; another one sees none of them.
        payload_bytes: Bytes of a page.
        budget_bytes: Segment files of all processes together.
        read_only: Open what is there and write nothing, not even the index.

    Raises:
        FormatError: The directory belongs to another format.
        CapacityError: The budget does not hold two segments of one page.
    """

    def __init__(
        self, directory: Path, *, fingerprint: bytes, payload_bytes: int, budget_bytes: int, read_only: bool = False
    ) -> None:
        self.payload_bytes = payload_bytes
        self.record_bytes = -(-(PAGE_HEADER_BYTES + payload_bytes) // PAGE_DISK_UNIT) * PAGE_DISK_UNIT
        if budget_bytes < 2 * self.record_bytes:
            raise CapacityError(f"a disk tier of {budget_bytes} bytes holds no page of {self.record_bytes}")
        self.budget_bytes = budget_bytes
        # small budgets must still be able to drop a part of what they hold
        self._slots = max(min(SEGMENT_BYTES, budget_bytes // 8) // self.record_bytes, 1)
        self.directory = directory / fingerprint.hex()[:32]
        self.stats = StoreStats()
        self._lock = threading.RLock()
        self._queue: queue.Queue[Record | _Saved | threading.Event | None] = queue.Queue(_MAX_QUEUED)
        self._num_turns = 0
        self._segment = -1
        self._slot = self._slots
        self._file = -1
        self._thread: threading.Thread | None = None
        self._closed = False
        if not read_only:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write_format(fingerprint)
        self._index = self._open_index(read_only)
        if read_only:
            return
        self.writer = f"w-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        (self.directory / self.writer).mkdir(mode=0o700)
        self._writer_lock = _hold(self.directory / self.writer)
        self._sweep()
        self._thread = threading.Thread(target=self._write_loop, name="cedar-store", daemon=True)
        self._thread.start()

    # -- reading

    def get(self, key: bytes) -> Record | None:
        """The page of a key, None if it is not there or not what was written; the cause is counted."""
        place = self._one("SELECT writer, segment, slot FROM pages WHERE key = ?", key[:_KEY_BYTES])
        if place is None:
            return None
        writer, segment, slot = place
        try:
            record = self._read(writer, segment, slot)
            if record.key != key:
                raise FormatError("the record is another page's")
        except FormatError as error:
            self._tombstone(key, "checksum", error)
            return None
        except OSError as error:
            self._tombstone(key, "io", error)
            return None
        self.stats.read += 1
        return record

    def has(self, key: bytes) -> bool:
        """Whether the index names the page; only `get` knows whether it is whole."""
        return self._one("SELECT 1 FROM pages WHERE key = ?", key[:_KEY_BYTES]) is not None

    def children(self, parent: bytes) -> list[Listed]:
        """The pages that follow a page or a root."""
        rows = self._all("SELECT key, tokens, lineage FROM pages WHERE parent = ?", parent[:_KEY_BYTES])
        return [Listed(key, struct.unpack(f"<{len(tokens) // 4}I", tokens), lineage) for key, tokens, lineage in rows]

    def get_child(self, parent: bytes, tokens: Sequence[int]) -> Listed | None:
        """The page below `parent` that agrees with most of `tokens`."""
        children = self.children(parent)
        return max(children, key=lambda child: common_length(child.tokens, tokens), default=None)

    def used(self, keys: Sequence[bytes]) -> None:
        """These pages served a request: their segments stay longer."""
        with self._lock:
            try:
                for key in keys:
                    self._index.execute(
                        "UPDATE segments SET used = ? WHERE (writer, segment) ="
                        " (SELECT writer, segment FROM pages WHERE key = ?)",
                        (time.time(), key[:_KEY_BYTES]),
                    )
                self._index.commit()
            except sqlite3.Error as error:
                self._index.rollback()
                self._failed("index", error)

    # -- writing

    def put(self, record: Record) -> bool:
        """Hand a page to the writer; False if it is too far behind and the page is not kept."""
        assert len(record.payload) == self.payload_bytes
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.stats.fail("behind")
            return False
        return True

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all that was put is in the index; False if that took too long."""
        done = threading.Event()
        try:
            self._queue.put(done, timeout=timeout_s)
        except queue.Full:
            return False
        return done.wait(timeout_s)

    def close(self) -> None:
        """Write what waits, then end; a closed store answers nothing."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(30.0)
            if self._file >= 0:
                os.close(self._file)
            os.close(self._writer_lock)
        with self._lock:
            self._index.close()

    # -- turns of the replay map

    def put_turn(self, key: bytes, root: bytes, value: bytes) -> bool:
        """Hand a turn to the writer; False if it is too far behind."""
        try:
            self._queue.put_nowait(_Saved(key, root, value))
        except queue.Full:
            self.stats.fail("behind")
            return False
        return True

    def get_turn(self, key: bytes) -> tuple[bytes, bytes] | None:
        """(root, value) of a key; what does not match its checksum is not there."""
        row = self._one("SELECT root, checksum, bytes FROM turns WHERE key = ?", key)
        if row is None:
            return None
        root, checksum, value = row
        if xxhash.xxh3_128_digest(root + value) != checksum:
            self.stats.fail("checksum")
            self._change("DELETE FROM turns WHERE key = ?", key)
            return None
        return root, value

    def forget_turns(self, root: bytes | None) -> None:
        """Forget the turns of one root, or all."""
        if root is None:
            self._change("DELETE FROM turns")
        else:
            self._change("DELETE FROM turns WHERE root = ?", root)

    # -- snapshots and other small things that are one value

    def put_blob(self, key: bytes, value: bytes) -> bool:
        """Keep a value under a key, in the index itself."""
        with self._lock:
            try:
                self._index.execute(
                    "INSERT OR REPLACE INTO blobs VALUES (?, ?, ?, ?)",
                    (key, time.time(), xxhash.xxh3_128_digest(value), value),
                )
                self._index.commit()
            except sqlite3.Error as error:
                self._index.rollback()
                self._failed("index", error)
                return False
        return True

    def blobs(self, limit: int) -> list[tuple[bytes, bytes]]:
        """(key, value), newest first; what does not match its checksum is left out."""
        rows = self._all("SELECT key, checksum, bytes FROM blobs ORDER BY used DESC LIMIT ?", limit)
        whole = [(key, value) for key, checksum, value in rows if xxhash.xxh3_128_digest(value) == checksum]
        for _ in range(len(rows) - len(whole)):
            self.stats.fail("checksum")
        return whole

    def trim_blobs(self, keep: int) -> None:
        """Keep the newest ones alone."""
        self._change("DELETE FROM blobs WHERE key NOT IN (SELECT key FROM blobs ORDER BY used DESC LIMIT ?)", keep)

    # -- housekeeping

    def describe(self) -> dict[str, object]:
        """Counts and bytes of the whole tier, and this process's counters."""
        pages = self._one("SELECT COUNT(*) FROM pages")
        blobs = self._one("SELECT COUNT(*), COALESCE(SUM(LENGTH(bytes)), 0) FROM blobs")
        turns = self._one("SELECT COUNT(*) FROM turns")
        return {
            "pages": pages[0] if pages else 0,
            "segments": len(list(self._segment_files())),
            "segment_bytes": self._segment_bytes(),
            "index_bytes": sum(file.stat().st_size for file in self.directory.glob(f"{INDEX}*")),
            "turns": turns[0] if turns else 0,
            "snapshots": blobs[0] if blobs else 0,
            "snapshot_bytes": blobs[1] if blobs else 0,
            "budget_bytes": self.budget_bytes,
            **asdict(self.stats),
        }

    def verify(self) -> tuple[int, int]:
        """Read every page the index names: (whole, broken). Broken ones leave the index."""
        keys = [row[0] for row in self._all("SELECT key FROM pages")]
        whole = 0
        for key in keys:
            place = self._one("SELECT writer, segment, slot FROM pages WHERE key = ?", key)
            if place is None:
                continue
            try:
                record = self._read(*place)
                if record.key[:_KEY_BYTES] != key:
                    raise FormatError("the record is another page's")
                whole += 1
            except (FormatError, OSError) as error:
                self._tombstone(key, "checksum", error)
        return whole, len(keys) - whole

    def walk(self) -> Iterator[Listed]:
        """Every page the index names."""
        for key, tokens, lineage in self._all("SELECT key, tokens, lineage FROM pages"):
            yield Listed(key, struct.unpack(f"<{len(tokens) // 4}I", tokens), lineage)

    def purge(self) -> int:
        """Forget every page and snapshot, and delete the files; how many pages."""
        with self._lock:
            count = self._one("SELECT COUNT(*) FROM pages")
            for table in ("pages", "segments", "blobs", "turns"):
                self._index.execute(f"DELETE FROM {table}")
            self._index.commit()
            self._index.execute("VACUUM")
            self._slot = self._slots
            for file in list(self._segment_files()):
                file.unlink(missing_ok=True)
        return count[0] if count else 0

    # -- inside

    def _write_format(self, fingerprint: bytes) -> None:
        file = self.directory / "FORMAT"
        mine = {"format": FORMAT_VERSION, "fingerprint": fingerprint.hex(), "payload_bytes": self.payload_bytes}
        if file.exists():
            try:
                theirs = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                theirs = None
            if theirs != mine:
                raise FormatError(f"{file} says {theirs}, expected {mine}; remove the directory to start anew")
            return
        temporary = file.with_suffix(f".{uuid.uuid4().hex}")
        with os.fdopen(_create(temporary), "w", encoding="utf-8") as opened:
            json.dump(mine, opened)
        temporary.rename(file)

    def _open_index(self, read_only: bool) -> sqlite3.Connection:
        file = self.directory / INDEX
        if read_only:
            if not file.exists():
                raise FormatError(f"there is no cache in {self.directory}")
            return self._connect(file)
        try:
            return self._connect(file)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise FormatError(f"cannot open {file}: {error}") from None
            log.warning("the cache index %s is broken (%s): starting a new one", file, error)
            for part in self.directory.glob(f"{INDEX}*"):
                part.unlink(missing_ok=True)
            return self._connect(file)

    def _connect(self, file: Path) -> sqlite3.Connection:
        if not file.exists():
            # sqlite gives its side files the mode of this one
            os.close(_create(file, exclusive=False))
        index = sqlite3.connect(file, timeout=_BUSY_S, check_same_thread=False)
        index.execute("PRAGMA journal_mode = WAL")
        index.execute("PRAGMA synchronous = NORMAL")
        index.executescript(_SCHEMA)
        return index

    def _write_loop(self) -> None:
        while True:
            items = [self._queue.get()]
            while len(items) < _BATCH and not self._queue.empty():
                items.append(self._queue.get())
            records = [item for item in items if isinstance(item, Record)]
            if records:
                try:
                    self._write(records)
                except Exception as error:  # the tier may fail, serving must not
                    self._failed("write", error)
                    self._slot = self._slots
            turns = [item for item in items if isinstance(item, _Saved)]
            if turns:
                self._write_turns(turns)
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            if None in items:
                return

    def _write(self, records: list[Record]) -> None:
        rows = []
        for record in records:
            if self.has(record.key):
                continue
            if self._slot >= self._slots or os.fstat(self._file).st_nlink == 0:
                # full, or another process has dropped it
                self._next_segment()
            os.pwrite(self._file, pack_record(record, self.record_bytes), self._slot * self.record_bytes)
            tokens = struct.pack(f"<{len(record.tokens)}I", *record.tokens)
            parent = record.parent[:_KEY_BYTES]
            rows.append(
                (record.key[:_KEY_BYTES], parent, self.writer, self._segment, self._slot, record.lineage, tokens)
            )
            self._slot += 1
        if not rows:
            return
        os.fdatasync(self._file)
        with self._lock:
            try:
                self._index.executemany("INSERT OR IGNORE INTO pages VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
                self._index.commit()
            except sqlite3.Error:
                self._index.rollback()
                raise
        self.stats.written += len(rows)
        self.stats.bytes_written += len(rows) * self.record_bytes

    def _write_turns(self, turns: list[_Saved]) -> None:
        now = time.time()
        rows = [(key, root, now, xxhash.xxh3_128_digest(root + value), value) for key, root, value in turns]
        with self._lock:
            try:
                self._index.executemany("INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?)", rows)
                self._index.commit()
            except sqlite3.Error as error:
                self._index.rollback()
                self._failed("index", error)
                return
        self._num_turns += len(rows)
        if self._num_turns >= _TRIM_TURNS:
            self._num_turns = 0
            self._change(
                "DELETE FROM turns WHERE key NOT IN (SELECT key FROM turns ORDER BY used DESC LIMIT ?)", _MAX_TURNS
            )

    def _next_segment(self) -> None:
        if self._file >= 0:
            # what the old segment holds must be there before the index names it
            os.fdatasync(self._file)
            os.close(self._file)
            self._file = -1
        self._make_room()
        self._segment += 1
        self._file = _create(self._segment_file(self.writer, self._segment))
        with self._lock:
            self._index.execute(
                "INSERT INTO segments (writer, segment, used) VALUES (?, ?, ?)",
                (self.writer, self._segment, time.time()),
            )
            self._index.commit()
        self._slot = 0

    def _make_room(self) -> None:
        """Drop whole segments, least recently used first, until one more fits the budget."""
        new = self._slots * self.record_bytes
        while self._segment_bytes() + new > self.budget_bytes:
            oldest = self._one("SELECT writer, segment FROM segments ORDER BY used, segment LIMIT 1")
            if oldest is None:
                return
            with self._lock:
                self._index.execute("DELETE FROM pages WHERE writer = ? AND segment = ?", oldest)
                self._index.execute("DELETE FROM segments WHERE writer = ? AND segment = ?", oldest)
                self._index.commit()
            self._segment_file(*oldest).unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove segments that no index row names and whose writer is gone."""
        named = set(self._all("SELECT writer, segment FROM segments"))
        for writer in self.directory.glob("w-*"):
            # a writer that starts right now has not locked its directory yet
            if writer.name == self.writer or abs(time.time() - writer.stat().st_mtime) < _STARTING_S:
                continue
            lock = _hold(writer)
            if lock < 0:
                continue
            for file in writer.glob("*.seg"):
                if (writer.name, int(file.stem)) not in named:
                    file.unlink(missing_ok=True)
            os.close(lock)
            if not list(writer.glob("*.seg")):
                for file in writer.iterdir():
                    file.unlink(missing_ok=True)
                writer.rmdir()

    def _read(self, writer: str, segment: int, slot: int) -> Record:
        file = os.open(self._segment_file(writer, segment), os.O_RDONLY)
        try:
            packed = os.pread(file, self.record_bytes, slot * self.record_bytes)
        finally:
            os.close(file)
        return unpack_record(packed, self.payload_bytes)

    def _segment_file(self, writer: str, segment: int) -> Path:
        return self.directory / writer / f"{segment:06d}.seg"

    def _segment_files(self) -> Iterator[Path]:
        return self.directory.glob("w-*/*.seg")

    def _segment_bytes(self) -> int:
        total = 0
        for file in self._segment_files():
            try:
                total += file.stat().st_size
            except FileNotFoundError:
                continue
        return total

    def _one(self, query: str, *values: object) -> tuple | None:  # type: ignore[type-arg]
        rows = self._all(query, *values)
        return rows[0] if rows else None

    def _all(self, query: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock:
            try:
                return self._index.execute(query, values).fetchall()
            except sqlite3.Error as error:
                self._failed("index", error)
                return []

    def _change(self, query: str, *values: object) -> None:
        with self._lock:
            try:
                self._index.execute(query, values)
                self._index.commit()
            except sqlite3.Error as error:
                self._index.rollback()
                self._failed("index", error)

    def _tombstone(self, key: bytes, cause: str, error: Exception) -> None:
        self._failed(cause, error)
        self._change("DELETE FROM pages WHERE key = ?", key[:_KEY_BYTES])

    def _failed(self, cause: str, error: Exception) -> None:
        self.stats.fail(cause)
        log.warning("disk tier, %s: %s", cause, error)


def _create(file: Path, *, exclusive: bool = True) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | (os.O_EXCL if exclusive else 0), 0o600)


def _hold(writer: Path) -> int:
    """A lock that lasts as long as the writer's process, or -1 if another process has it."""
    file = os.open(writer / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return -1
    return file
