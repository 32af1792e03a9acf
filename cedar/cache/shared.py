"""The shared tier: pages in an object store, for machines that share no disk. No torch.

An object is one record, as on disk, with the page's tokens behind it: PREFIX/<fingerprint>/<parent>/<key>. Records
check themselves, so a reader needs to trust neither the store nor another writer's version: what does not fit its
own key is a miss. Objects never change. What they may grow to, and how long they stay, the store's own life-cycle
rules say.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from cedar.cache.keys import child_key, common_length, squeezed, unsqueezed
from cedar.cache.store import FORMAT_VERSION, Record, check_tokens, pack_record, unpack_header, unpack_record
from cedar.config.model import PAGE_TOKENS
from cedar.errors import ConfigError, FormatError
from cedar.planner.kv import PAGE_HEADER_BYTES

log = logging.getLogger(__name__)

_MAX_QUEUED = 256
# pages that end before a full one, looked at below one parent
_MAX_CHILDREN = 16


@dataclass(slots=True)
class SharedStats:
    """Counters of one process; `failed` by cause."""

    written: int = 0
    read: int = 0
    failed: dict[str, int] = field(default_factory=dict)


class SharedStore:
    """The pages of one model in one object store.

    Args:
        url: What obstore takes: s3://bucket/prefix, gs://, az://, or file:///folder. Keys come from the environment,
            as obstore's documentation says.

    Raises:
        ConfigError: obstore is not installed, or the URL is none of its kinds.
    """

    def __init__(self, url: str, *, fingerprint: bytes, payload_bytes: int) -> None:
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError:
            raise ConfigError("a shared cache needs obstore: pip install 'cedar-lm[shared]'") from None
        self.url, self.payload_bytes = url, payload_bytes
        self.stats = SharedStats()
        # a folder's errors are Python's own
        self._api: Any = obstore
        self._errors: tuple[type[Exception], ...] = (BaseError, OSError)
        if urlparse(url).scheme == "file":
            # the files hold prompts, and the store gives them the mode of all others
            Path(urlparse(url).path).mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._store: Any = from_url(url)
        except self._errors as error:
            raise ConfigError(f"{url!r} is no object store: {str(error).splitlines()[0]}") from None
        self._prefix = f"cedar-{FORMAT_VERSION}/{fingerprint.hex()[:32]}"
        self._lock = threading.Lock()
        self._queue: queue.Queue[Record | threading.Event | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._write_loop, name="cedar-shared", daemon=True)
        self._thread.start()

    def get(self, parent: bytes, tokens: Sequence[int]) -> Record | None:
        """The page of exactly these tokens below `parent`, None if it is not there or not what was written."""
        return self._read(parent, child_key(parent, tokens))

    def get_child(self, parent: bytes, tokens: Sequence[int]) -> Record | None:
        """The page below `parent` that agrees with most of `tokens`."""
        best, length = "", 0
        try:
            for path in self._children(parent):
                head = bytes(self._api.get_range(self._store, path, start=0, length=PAGE_HEADER_BYTES))
                with contextlib.suppress(FormatError):
                    common = common_length(unpack_header(head).low_tokens, [token % 2**32 for token in tokens])
                    if common > length:
                        best, length = path, common
        except self._errors as error:
            self._failed("io", error)
        return self._read(parent, bytes.fromhex(best.rpartition("/")[2])) if best else None

    def put(self, record: Record) -> bool:
        """Hand a page to the writer; False if it is too far behind and the page is not kept."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._failed("behind")
            return False
        return True

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all that was put is there; False if that took too long."""
        done = threading.Event()
        try:
            self._queue.put(done, timeout=timeout_s)
        except queue.Full:
            return False
        return done.wait(timeout_s)

    def close(self) -> None:
        """Write what waits, then end; what a store that hangs did not take by then is lost to it."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=10.0)
            self._thread.join(10.0)

    def describe(self) -> dict[str, object]:
        """This process's counters."""
        with self._lock:
            return {"url": self.url, **asdict(self.stats)}

    def _path(self, parent: bytes, key: bytes) -> str:
        return f"{self._prefix}/{parent.hex()}/{key.hex()}"

    def _children(self, parent: bytes) -> list[str]:
        listed = self._api.list_with_delimiter(self._store, f"{self._prefix}/{parent.hex()}/")["objects"]
        # newest first: what a conversation came to stands beside what it was before
        listed = sorted(listed, key=lambda entry: entry["last_modified"], reverse=True)
        return [entry["path"] for entry in listed[:_MAX_CHILDREN]]

    def _read(self, parent: bytes, key: bytes) -> Record | None:
        try:
            stored = bytes(self._api.get(self._store, self._path(parent, key)).bytes())
        except FileNotFoundError:
            return None
        except self._errors as error:
            self._failed("io", error)
            return None
        try:
            record = unpack_record(stored, self.payload_bytes)
            tokens = unsqueezed(stored[PAGE_HEADER_BYTES + self.payload_bytes :])
            if (record.key, record.parent) != (key, parent) or len(tokens) > PAGE_TOKENS:
                raise FormatError("the object is another page's")
            check_tokens(key, parent, tokens)
        except FormatError as error:
            self._failed("checksum", error)
            # it can never be good again, and would be read each time
            with contextlib.suppress(*self._errors):
                self._api.delete(self._store, self._path(parent, key))
            return None
        with self._lock:
            self.stats.read += 1
        return record._replace(tokens=tokens)

    def _write_loop(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            packed = pack_record(item, PAGE_HEADER_BYTES + self.payload_bytes, (self.payload_bytes,))
            try:
                path = self._path(item.parent, item.key)
                self._api.put(self._store, path, packed + squeezed(item.tokens), mode="create")
            except self._api.exceptions.AlreadyExistsError:
                continue
            except Exception as error:  # the tier may fail, serving must not
                self._failed("write", error)
                continue
            with self._lock:
                self.stats.written += 1

    def _failed(self, cause: str, error: Exception | None = None) -> None:
        with self._lock:
            self.stats.failed[cause] = self.stats.failed.get(cause, 0) + 1
        if error is not None:
            log.warning("shared tier, %s: %s", cause, str(error).splitlines()[0] if str(error) else repr(error))
