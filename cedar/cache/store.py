"""The disk tier: pages in append-only segment files, and one sqlite index that every process shares. No torch.

A record is a header and the page, whose parts (one for each KV source) can be read and checked by themselves, so
that a layer can start while the next one's part is on its way.

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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from cedar.cache.keys import child_key, common_length, squeezed, unsqueezed
from cedar.config.model import PAGE_TOKENS
from cedar.errors import CapacityError, FormatError
from cedar.planner.kv import PAGE_DISK_UNIT, PAGE_HEADER_BYTES

log = logging.getLogger(__name__)

FORMAT_VERSION = 2
MAGIC = b"V41P"
INDEX = "index.sqlite"
SEGMENT_BYTES = 64 * 2**20
MAX_PARTS = 16
# pages waiting for the writer; more are not kept, so that a slow disk never holds up a step
_MAX_QUEUED = 1024
_BATCH = 64
_BUSY_S = 10.0
_STARTING_S = 60.0
# one day, and what two clocks may differ by before one of them was set
_DAY_S = 86400.0
_DRIFT_S = 600.0
# keys in one question to the index
_ASKED = 400
# magic, version, parts of the page, lineage, tokens of the page
_HEAD = struct.Struct("<4sHHHH")
_TOKENS = struct.Struct(f"<{PAGE_TOKENS}I")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS pages (
    key BLOB PRIMARY KEY, parent BLOB NOT NULL, writer TEXT NOT NULL, segment INTEGER NOT NULL,
    slot INTEGER NOT NULL, lineage INTEGER NOT NULL, pinned INTEGER NOT NULL, tokens BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_parent ON pages (parent);
CREATE INDEX IF NOT EXISTS by_segment ON pages (writer, segment);
CREATE TABLE IF NOT EXISTS segments (
    writer TEXT NOT NULL, segment INTEGER NOT NULL, used REAL NOT NULL, PRIMARY KEY (writer, segment)
);
CREATE TABLE IF NOT EXISTS blobs (
    key BLOB PRIMARY KEY, used REAL NOT NULL, checksum BLOB NOT NULL, bytes BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS written (
    one INTEGER PRIMARY KEY CHECK (one = 1), since REAL NOT NULL, bytes INTEGER NOT NULL
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
    """One page as it lies on disk; `tokens` are those of `keys.cache_tokens`."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    lineage: int
    payload: bytes
    pinned: bool = False


class _Saved(NamedTuple):
    """A turn of the replay map on its way to the index."""

    key: bytes
    root: bytes
    value: bytes


class _Used(NamedTuple):
    """Pages that served a request."""

    keys: tuple[bytes, ...]


class Listed(NamedTuple):
    """What the index knows of a page; `key` has the bytes that the index keeps of it."""

    key: bytes
    tokens: tuple[int, ...]
    lineage: int
    pinned: bool
    place: tuple[str, int, int]


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


class Header(NamedTuple):
    """What stands before a page: whose it is, and the checksums of the whole and of each part."""

    key: bytes
    parent: bytes
    low_tokens: tuple[int, ...]
    lineage: int
    checksum: bytes
    part_sums: tuple[bytes, ...]


def pack_record(record: Record, record_bytes: int, parts: Sequence[int]) -> bytes:
    """Header and payload, padded to `record_bytes`.

    Args:
        parts: Bytes of each part of the payload, at most 16.

    Source: serving.md 4.4; the sums of parts are ours.
    """
    # an image position has its image in the index and in the key; here stands its id
    low = [token % 2**32 for token in record.tokens]
    start, sums = 0, []
    for size in parts:
        sums.append(xxhash.xxh3_64_digest(record.payload[start : start + size]))
        start += size
    header = b"".join(
        (
            _HEAD.pack(MAGIC, FORMAT_VERSION, len(parts), record.lineage, len(record.tokens)),
            _TOKENS.pack(*low, *([0] * (PAGE_TOKENS - len(low)))),
            record.parent,
            record.key,
            xxhash.xxh3_128_digest(record.payload),
            *sums,
        )
    )
    header += xxhash.xxh3_64_digest(header)
    packed = header.ljust(PAGE_HEADER_BYTES, b"\0") + record.payload
    return packed.ljust(record_bytes, b"\0")


def unpack_header(packed: bytes) -> Header:
    """The header of a record.

    Raises:
        FormatError: Too short, another format, or any bit that differs from what was written.
    """
    if len(packed) < PAGE_HEADER_BYTES:
        raise FormatError(f"a header of {PAGE_HEADER_BYTES} bytes ends after {len(packed)}")
    magic, version, num_parts, lineage, length = _HEAD.unpack_from(packed)
    if magic != MAGIC or version != FORMAT_VERSION or length > PAGE_TOKENS or num_parts > MAX_PARTS:
        raise FormatError(f"magic {magic!r}, version {version}: this cedar reads {MAGIC!r}, version {FORMAT_VERSION}")
    size = _HEAD.size + _TOKENS.size + 32 + 32 + 16 + 8 * num_parts
    header = packed[:size]
    if xxhash.xxh3_64_digest(header) != packed[size : size + 8]:
        raise FormatError("the header's checksum does not match")
    tokens = _TOKENS.unpack_from(header, _HEAD.size)[:length]
    keys = header[_HEAD.size + _TOKENS.size :]
    sums = tuple(keys[80 + 8 * i : 88 + 8 * i] for i in range(num_parts))
    return Header(keys[32:64], keys[:32], tokens, lineage, keys[64:80], sums)


def unpack_record(packed: bytes, payload_bytes: int) -> Record:
    """What `pack_record` packed, but for the images among its tokens and for its pin.

    Raises:
        FormatError: Too short, another format, or any bit that differs from what was written.
    """
    header = unpack_header(packed)
    if len(packed) < PAGE_HEADER_BYTES + payload_bytes:
        raise FormatError(f"a record of {PAGE_HEADER_BYTES + payload_bytes} bytes ends after {len(packed)}")
    payload = packed[PAGE_HEADER_BYTES : PAGE_HEADER_BYTES + payload_bytes]
    if xxhash.xxh3_128_digest(payload) != header.checksum:
        raise FormatError("the payload's checksum does not match")
    return Record(header.key, header.parent, header.low_tokens, header.lineage, payload)


def check_tokens(key: bytes, parent: bytes, tokens: Sequence[int]) -> None:
    """Raise FormatError unless the tokens, images included, are those of the key."""
    if child_key(parent, tokens) != key:
        raise FormatError("the tokens are not those of the page's key")


class PageStore:
    """The pages of one model on one disk.

    Args:
        directory: The tier's root; each fingerprint has a directory of its own below it.
        fingerprint: Weights, config and format that the pages belong to; another one sees none of them.
        payload_bytes: Bytes of a page.
        budget_bytes: Segment files of all processes together.
        day_bytes: What all processes together may write in a day; None sets no limit.
        read_only: Open what is there; write no page.

    Raises:
        FormatError: The directory belongs to another format.
        CapacityError: The budget does not hold two segments of one page.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fingerprint: bytes,
        payload_bytes: int,
        budget_bytes: int,
        day_bytes: int | None = None,
        read_only: bool = False,
    ) -> None:
        self.payload_bytes, self.day_bytes, self.fingerprint = payload_bytes, day_bytes, fingerprint
        self.parts: tuple[int, ...] = (payload_bytes,)
        self.record_bytes = -(-(PAGE_HEADER_BYTES + payload_bytes) // PAGE_DISK_UNIT) * PAGE_DISK_UNIT
        if budget_bytes < 2 * self.record_bytes:
            raise CapacityError(f"a disk tier of {budget_bytes} bytes holds no page of {self.record_bytes}")
        self.budget_bytes = budget_bytes
        # small budgets must still be able to drop a part of what they hold
        self._slots = max(min(SEGMENT_BYTES, budget_bytes // 8) // self.record_bytes, 1)
        self.directory = directory / fingerprint.hex()[:32]
        self.stats = StoreStats()
        # of the connection that writes, which may have to wait for other processes, and of the one that never does
        self._lock, self._asking = threading.RLock(), threading.Lock()
        self._queue: queue.Queue[Record | _Saved | _Used | threading.Event | None] = queue.Queue(_MAX_QUEUED)
        self._num_turns = 0
        # (start of the day, wall clock and steady clock when this process first saw it)
        self._day: tuple[float, float, float] | None = None
        self._segment = -1
        self._slot = self._slots
        self._file = -1
        self._thread: threading.Thread | None = None
        self._closed = False
        if not read_only:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write_format(fingerprint)
        self._index = self._open_index(read_only)
        self._asked = self._connect(self.directory / INDEX)
        if read_only:
            return
        self.writer = f"w-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        (self.directory / self.writer).mkdir(mode=0o700)
        self._writer_lock = _hold(self.directory / self.writer)
        self._sweep()
        self._thread = threading.Thread(target=self._write_loop, name="cedar-store", daemon=True)
        self._thread.start()

    def divide(self, parts: Sequence[int]) -> None:
        """Say of how many bytes the parts of a page are that `read_part` reads; before the first page is written."""
        assert sum(parts) == self.payload_bytes and len(parts) <= MAX_PARTS, parts
        self.parts = tuple(parts)

    # -- reading

    def get(self, key: bytes) -> Record | None:
        """The page of a key, None if it is not there or not what was written; the cause is counted."""
        listed = self.locate([key]).get(key)
        return None if listed is None else self.read(key, listed)

    def read(self, key: bytes, listed: Listed) -> Record | None:
        """As `get`, of a page that was found already."""
        try:
            packed = self._pread(listed.place, 0, self.record_bytes)
            record = unpack_record(packed, self.payload_bytes)
            if record.key != key:
                raise FormatError("the record is another page's")
            check_tokens(key, record.parent, listed.tokens)
        except (FormatError, OSError) as error:
            self.reject(key, error, listed)
            return None
        self.stats.read += 1
        return record._replace(tokens=listed.tokens, pinned=listed.pinned)

    def read_header(self, key: bytes, listed: Listed) -> Header:
        """The checked header of a page, for `read_part`.

        Raises:
            FormatError: It is not what was written, or another page's.
            OSError: It cannot be read.
        """
        header = unpack_header(self._pread(listed.place, 0, PAGE_HEADER_BYTES))
        if header.key != key or len(header.part_sums) != len(self.parts):
            raise FormatError("the record is another page's")
        check_tokens(key, header.parent, listed.tokens)
        return header

    def read_part(self, header: Header, listed: Listed, part: int) -> bytes:
        """One part of a page.

        Raises:
            FormatError: It is not what was written.
            OSError: It cannot be read.
        """
        section = self._pread(listed.place, PAGE_HEADER_BYTES + sum(self.parts[:part]), self.parts[part])
        if len(section) != self.parts[part] or xxhash.xxh3_64_digest(section) != header.part_sums[part]:
            raise FormatError(f"part {part} of a page does not match its checksum")
        if part == len(self.parts) - 1:
            self.stats.read += 1
        return section

    def reject(self, key: bytes, error: Exception, listed: Listed | None = None, cause: str = "") -> None:
        """A page turned out broken: count the cause and forget it.

        Args:
            listed: What was found; the page may lie elsewhere by now, and stays if it does.
        """
        self._failed(cause or ("io" if isinstance(error, OSError) else "checksum"), error)
        query = "DELETE FROM pages WHERE key = ?"
        if listed is None:
            self._change(query, key[:_KEY_BYTES])
        else:
            self._change(f"{query} AND writer = ? AND segment = ? AND slot = ?", key[:_KEY_BYTES], *listed.place)

    def has(self, key: bytes) -> bool:
        """Whether the index names the page; only `get` knows whether it is whole."""
        return self._one("SELECT 1 FROM pages WHERE key = ?", key[:_KEY_BYTES]) is not None

    def locate(self, keys: Sequence[bytes]) -> dict[bytes, Listed]:
        """Those of the pages that the index names."""
        found = {}
        for start in range(0, len(keys), _ASKED):
            asked = {key[:_KEY_BYTES]: key for key in keys[start : start + _ASKED]}
            marks = ", ".join("?" * len(asked))
            for listed in self._listed(f"WHERE key IN ({marks})", *asked):
                found[asked[listed.key]] = listed
        return found

    def children(self, parent: bytes) -> list[Listed]:
        """The pages that follow a page or a root."""
        return self._listed("WHERE parent = ?", parent[:_KEY_BYTES])

    def get_child(self, parent: bytes, tokens: Sequence[int]) -> Listed | None:
        """The page below `parent` that agrees with most of `tokens`."""
        children = self.children(parent)
        return max(children, key=lambda child: common_length(child.tokens, tokens), default=None)

    def pin(self, keys: Sequence[bytes], pinned: bool = True) -> int:
        """Pages that no budget drops from now on, or that it may drop again; how many of them are there.

        Raises:
            CapacityError: The segments that hold pinned pages would take more than half of the budget.
        """
        there = self.locate(keys)
        if pinned:
            segments = {listed.place[:2] for listed in there.values()}
            segments |= set(self._all("SELECT DISTINCT writer, segment FROM pages WHERE pinned"))
            size = len(segments) * self._slots * self.record_bytes
            if size > self.budget_bytes // 2:
                raise CapacityError(
                    f"pinned pages would hold {len(segments)} segments, {size} bytes, and at most half of the disk "
                    f"tier's {self.budget_bytes} may be pinned: unpin others or raise the budget"
                )
        try:
            with self._writing():
                return self._index.executemany(
                    "UPDATE pages SET pinned = ? WHERE key = ?", [(int(pinned), key[:_KEY_BYTES]) for key in there]
                ).rowcount
        except sqlite3.Error as error:
            self._failed("index", error)
            return 0

    def pin_prompt(self, root: bytes, tokens: Sequence[int], pinned: bool = True) -> int:
        """`pin` the pages that a prompt begins with; how many of its tokens they hold.

        Args:
            root: `keys.root_key` of the tenant.
            tokens: `keys.cache_tokens` of the prompt.

        Raises:
            CapacityError: As `pin`.
        """
        keys, parent, held = [], root, 0
        while held + PAGE_TOKENS <= len(tokens):
            parent = child_key(parent, tokens[held : held + PAGE_TOKENS])
            keys.append(parent)
            held += PAGE_TOKENS
        there = self.locate(keys)
        whole = next((place for place, key in enumerate(keys) if key not in there), len(keys))
        held, parent = whole * PAGE_TOKENS, keys[whole - 1] if whole else root
        keys = keys[:whole]
        last = self.get_child(parent, tokens[held : held + PAGE_TOKENS])
        common = 0 if last is None else common_length(last.tokens, tokens[held:])
        if last is not None and common:
            keys.append(last.key)
        self.pin(keys, pinned)
        return held + common

    def used(self, keys: Sequence[bytes]) -> None:
        """These pages served a request: their segments stay longer. The writer notes it."""
        try:
            self._queue.put_nowait(_Used(tuple(keys)))
        except queue.Full:
            self.stats.fail("behind")

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
        with self._lock, self._asking:
            self._index.close()
            self._asked.close()

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
                if not self._allowed(1, len(value)):
                    self._failed("day budget", CapacityError(f"{len(value)} bytes are over the day's writes"))
                    return False
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
        pages = self._one("SELECT COUNT(*), COALESCE(SUM(pinned), 0) FROM pages")
        day = self._one("SELECT bytes FROM written")
        blobs = self._one("SELECT COUNT(*), COALESCE(SUM(LENGTH(bytes)), 0) FROM blobs")
        turns = self._one("SELECT COUNT(*) FROM turns")
        return {
            "pages": pages[0] if pages else 0,
            "pinned_pages": pages[1] if pages else 0,
            "segments": len(list(self._segment_files())),
            "segment_bytes": self._segment_bytes(),
            "index_bytes": sum(file.stat().st_size for file in self.directory.glob(f"{INDEX}*")),
            "turns": turns[0] if turns else 0,
            "snapshots": blobs[0] if blobs else 0,
            "snapshot_bytes": blobs[1] if blobs else 0,
            "budget_bytes": self.budget_bytes,
            "day_bytes": self.day_bytes,
            "day_bytes_written": day[0] if day else 0,
            **asdict(self.stats),
        }

    def verify(self) -> tuple[int, int]:
        """Read every page the index names: (whole, broken). Broken ones leave the index."""
        whole = broken = 0
        for listed in self.walk():
            try:
                record = unpack_record(self._pread(listed.place, 0, self.record_bytes), self.payload_bytes)
                if record.key[:_KEY_BYTES] != listed.key:
                    raise FormatError("the record is another page's")
                check_tokens(record.key, record.parent, listed.tokens)
                whole += 1
            except (FormatError, OSError) as error:
                self.reject(listed.key, error, listed)
                broken += 1
        return whole, broken

    def walk(self) -> Iterator[Listed]:
        """Every page the index names."""
        yield from self._listed("")

    def purge(self, *, pinned: bool = False) -> int:
        """Forget every page, snapshot and turn, and delete the files; how many pages.

        Args:
            pinned: Pinned pages too; without it they stay, with the segments that hold them.
        """
        kept = "" if pinned else " WHERE NOT pinned"
        with self._lock:
            count = self._index.execute(f"DELETE FROM pages{kept}").rowcount
            self._index.execute(
                "DELETE FROM segments WHERE NOT EXISTS"
                " (SELECT 1 FROM pages WHERE pages.writer = segments.writer AND pages.segment = segments.segment)"
            )
            for table in ("blobs", "turns"):
                self._index.execute(f"DELETE FROM {table}")
            self._index.commit()
            self._index.execute("VACUUM")
            self._slot = self._slots
            named = self._named()
            for file in list(self._segment_files()):
                if (file.parent.name, int(file.stem)) not in named:
                    file.unlink(missing_ok=True)
        return count

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
                if isinstance(item, _Used):
                    self._note_use(item.keys)
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            if None in items:
                return

    def _write(self, records: list[Record]) -> None:
        there = self.locate([record.key for record in records])
        records = [record for record in records if record.key not in there]
        allowed = self._allowed(len(records), self.record_bytes)
        if allowed < len(records):
            self._failed("day budget", CapacityError(f"{len(records) - allowed} pages are over the day's writes"))
        dropped = self._append(records[:allowed])
        if dropped:
            dropped = self._append(dropped)
        for _ in dropped:
            self.stats.fail("dropped")

    def _append(self, records: list[Record]) -> list[Record]:
        """Write pages and name them in the index; those whose segment another process dropped meanwhile come back."""
        rows = []
        for record in records:
            if self._slot >= self._slots or os.fstat(self._file).st_nlink == 0:
                # full, or another process has dropped it
                self._next_segment()
            packed = pack_record(record, self.record_bytes, self.parts)
            os.pwrite(self._file, packed, self._slot * self.record_bytes)
            place = (self.writer, self._segment, self._slot)
            about = (record.lineage, int(record.pinned), squeezed(record.tokens))
            rows.append((record.key[:_KEY_BYTES], record.parent[:_KEY_BYTES], *place, *about))
            self._slot += 1
        if not rows:
            return []
        os.fdatasync(self._file)
        with self._writing():
            # whoever drops a segment takes its rows in the same transaction: no row may come after it
            named = {segment for writer, segment in self._named() if writer == self.writer}
            kept = [row for row in rows if row[3] in named]
            self._index.executemany("INSERT OR IGNORE INTO pages VALUES (?, ?, ?, ?, ?, ?, ?, ?)", kept)
        if self._segment not in named:
            self._slot = self._slots
        self.stats.written += len(kept)
        self.stats.bytes_written += len(rows) * self.record_bytes
        return [record for record, row in zip(records, rows, strict=True) if row[3] not in named]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that no other process writes beside; undone if it fails."""
        with self._lock:
            self._index.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._index.commit()
            except BaseException:
                self._index.rollback()
                raise

    def _note_use(self, keys: Sequence[bytes]) -> None:
        segments = {listed.place[:2] for listed in self.locate(keys).values()}
        with self._lock:
            try:
                self._index.executemany(
                    "UPDATE segments SET used = ? WHERE writer = ? AND segment = ?",
                    [(time.time(), *segment) for segment in segments],
                )
                self._index.commit()
            except sqlite3.Error as error:
                self._index.rollback()
                self._failed("index", error)

    def _allowed(self, count: int, size: int) -> int:
        """How many of so many things of a size the day's budget still takes; they are counted as written."""
        if self.day_bytes is None or count == 0:
            return count
        # other processes count in the same row
        with self._writing():
            self._index.execute("INSERT OR IGNORE INTO written VALUES (1, ?, 0)", (time.time(),))
            since, num_bytes = self._index.execute("SELECT since, bytes FROM written").fetchone()
            since, num_bytes = self._turn_day(since, num_bytes)
            allowed = min(max(self.day_bytes - num_bytes, 0) // size, count)
            num_bytes += allowed * size
            self._index.execute("UPDATE written SET since = ?, bytes = ?", (since, num_bytes))
        return allowed

    def _turn_day(self, since: float, num_bytes: int) -> tuple[float, int]:
        """The running day's (start, bytes written), a new one if it is over.

        The wall clock alone would open a day whenever somebody sets it. What this process saw passing on the
        steady clock decides; the wall clock counts for the time before it.
        """
        wall, steady = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._day is None or self._day[0] != since:
            self._day = since, wall, steady
        jumped = (wall - self._day[1]) - (steady - self._day[2])
        if abs(jumped) > _DRIFT_S:
            since += jumped
        # a day that begins later than now was seen on a clock that ran ahead
        since = min(since, wall)
        if wall - since >= _DAY_S:
            since, num_bytes = wall, 0
        self._day = since, wall, steady
        return since, num_bytes

    def _write_turns(self, turns: list[_Saved]) -> None:
        now = time.time()
        rows = [(key, root, now, xxhash.xxh3_128_digest(root + value), value) for key, root, value in turns]
        with self._lock:
            try:
                if not self._allowed(1, sum(len(turn.value) for turn in turns)):
                    self._failed("day budget", CapacityError(f"{len(turns)} turns are over the day's writes"))
                    return
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
        self._unlink_unnamed()
        while self._segment_bytes() + new > self.budget_bytes:
            # in one transaction: nobody pins or fills what is being dropped
            with self._writing():
                oldest = self._index.execute(
                    "SELECT writer, segment FROM segments WHERE NOT EXISTS (SELECT 1 FROM pages WHERE pinned"
                    " AND pages.writer = segments.writer AND pages.segment = segments.segment)"
                    " ORDER BY used, segment LIMIT 1"
                ).fetchone()
                if oldest is None:
                    return
                self._index.execute("DELETE FROM pages WHERE writer = ? AND segment = ?", oldest)
                self._index.execute("DELETE FROM segments WHERE writer = ? AND segment = ?", oldest)
            self._segment_file(*oldest).unlink(missing_ok=True)

    def _unlink_unnamed(self) -> None:
        """Remove this process's segments that another one dropped from the index, and died before it removed them."""
        named = {segment for writer, segment in self._named() if writer == self.writer}
        for file in (self.directory / self.writer).glob("*.seg"):
            if int(file.stem) not in named:
                file.unlink(missing_ok=True)

    def _named(self) -> set[tuple[str, int]]:
        """(writer, segment) of all segments.

        Raises:
            sqlite3.Error: The index does not answer: that must not read as an index that names none.
        """
        with self._lock:
            return set(self._index.execute("SELECT writer, segment FROM segments"))

    def _sweep(self) -> None:
        """Remove segments that no index row names and whose writer is gone."""
        try:
            named = self._named()
        except sqlite3.Error as error:
            self._failed("index", error)
            return
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

    def _pread(self, place: tuple[str, int, int], start: int, length: int) -> bytes:
        """Bytes of the record at a place."""
        writer, segment, slot = place
        file = os.open(self._segment_file(writer, segment), os.O_RDONLY)
        try:
            return os.pread(file, length, slot * self.record_bytes + start)
        finally:
            os.close(file)

    def _listed(self, where: str, *values: object) -> list[Listed]:
        query = f"SELECT key, tokens, lineage, pinned, writer, segment, slot FROM pages {where}"
        listed = []
        for key, tokens, lineage, pinned, *place in self._all(query, *values):
            try:
                listed.append(Listed(key, unsqueezed(tokens), lineage, bool(pinned), tuple(place)))
            except FormatError as error:
                self.reject(key, error)
        return listed

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
        with self._asking:
            try:
                return self._asked.execute(query, values).fetchall()
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
