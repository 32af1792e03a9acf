"""Pages on their way into memory, one KV source after the other, while the layers before them run.

A sequence starts as soon as its pages are found. A thread reads them part by part: those of the first KV source of
all pages, then those of the second. A layer that touches a source waits for its part alone. What turns out broken
on the way ends the load: the sequence starts anew without that page.

Source: serving.md 4.6, load order.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

from cedar.cache.pages import PagePool
from cedar.cache.store import Header, Listed, PageStore, Record
from cedar.cache.tiers import HostTier
from cedar.errors import CedarError

TierName = Literal["none", "memory", "host", "disk", "shared"]


class LoadFailed(CedarError):
    """A page that was found could not be read after all; the sequence must start again, without it."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A page below memory: where it was found, and what its key says of it.

    Attributes:
        stored: The record itself, or its place on disk.
    """

    key: bytes
    tokens: tuple[int, ...]
    lineage: int
    pinned: bool
    tier: TierName
    stored: Record | Listed


class Loading:
    """The pages of one sequence that a thread fills.

    Args:
        pages: (what was found, the page to fill), in order; nobody else holds the pages.
    """

    def __init__(
        self, pages: list[tuple[Found, int]], pool: PagePool, store: PageStore | None, host: HostTier | None = None
    ) -> None:
        self.pages = pages
        self.error: Exception | None = None
        self._pool, self._store, self._host = pool, store, host
        self._ready = {source: threading.Event() for source in pool.layout.sections}
        self._finished = threading.Event()
        self._cancelled = False
        # whoever took the pages also cleared them
        self._taken = pool.mark()

    @property
    def finished(self) -> bool:
        """The thread is done with the pages, well or not."""
        return self._finished.is_set()

    def wait(self, source: int | None = None) -> None:
        """Until the part of one KV source is there, or all.

        Raises:
            LoadFailed: It never will be.
        """
        (self._finished if source is None else self._ready[source]).wait()
        if self.error is not None:
            raise LoadFailed(f"a cached page could not be read: {self.error}")

    def cancel(self) -> None:
        """Nobody waits any more; the thread stops at the next page."""
        self._cancelled = True

    def settle(self) -> None:
        """Wait until the thread touches the pages no more."""
        self._finished.wait()

    def run(self) -> None:
        """Fill the pages; in the thread."""
        headers: dict[bytes, Header] = {}
        try:
            self._pool.follow(self._taken)
            for part, source in enumerate(self._pool.layout.sections):
                for found, page in self.pages:
                    if self._cancelled:
                        raise LoadFailed("the sequence has left")
                    try:
                        self._pool.write_section(page, source, self._section(found, part, headers))
                    except Exception as error:
                        self._reject(found, error)
                        raise
                self._pool.finish()
                self._ready[source].set()
        except Exception as error:  # whatever it is, whoever waits must hear of it
            self.error = error
        finally:
            for event in self._ready.values():
                event.set()
            self._finished.set()

    def _section(self, found: Found, part: int, headers: dict[bytes, Header]) -> bytes:
        if isinstance(found.stored, Record):
            sizes = list(self._pool.layout.sections.values())
            start = sum(sizes[:part])
            return found.stored.payload[start : start + sizes[part]]
        assert self._store is not None
        if found.key not in headers:
            headers[found.key] = self._store.read_header(found.key, found.stored)
        return self._store.read_part(headers[found.key], found.stored, part)

    def _reject(self, found: Found, error: Exception) -> None:
        """Whatever was wrong with it: it is not found again, or its sequence would start again for ever."""
        if isinstance(found.stored, Listed):
            assert self._store is not None
            self._store.reject(found.key, error, found.stored)
        elif self._host is not None:
            self._host.forget(found.key)
