"""Pages in host memory beside a device's own: what left the device, and what came from other machines. No torch.

On a CPU pages of the pool lie in host memory already, so the two coincide and there is no such tier, unless pages
come from a shared store and need a place to arrive at.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from cedar.cache.keys import common_length
from cedar.cache.store import Record


class HostTier:
    """Pages by key, within a budget; the one used longest ago leaves first. Any thread may call it.

    Attributes:
        num_bytes: Payloads held now.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes, self.num_bytes = budget_bytes, 0
        self._lock = threading.Lock()
        self._pages: OrderedDict[bytes, tuple[Record, str]] = OrderedDict()
        self._children: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def put(self, record: Record, origin: str = "host") -> bool:
        """Keep a page; False if it alone is larger than the budget.

        Args:
            origin: The tier that a hit is counted for.
        """
        if len(record.payload) > self.budget_bytes:
            return False
        with self._lock:
            self._drop(record.key)
            while self.num_bytes + len(record.payload) > self.budget_bytes:
                self._drop(next(iter(self._pages)))
            self._pages[record.key] = record, origin
            self._children.setdefault(record.parent, set()).add(record.key)
            self.num_bytes += len(record.payload)
        return True

    def get(self, key: bytes) -> tuple[Record, str] | None:
        """(the page of a key, where it came from)."""
        with self._lock:
            if key not in self._pages:
                return None
            self._pages.move_to_end(key)
            return self._pages[key]

    def get_child(self, parent: bytes, tokens: Sequence[int]) -> tuple[Record, str] | None:
        """The page below `parent` that agrees with most of `tokens`."""
        with self._lock:
            pages = [self._pages[key] for key in self._children.get(parent, ())]
        return max(pages, key=lambda page: common_length(page[0].tokens, tokens), default=None)

    def forget(self, key: bytes) -> None:
        """This page is no good."""
        with self._lock:
            self._drop(key)

    def clear(self) -> int:
        """Forget all; how many pages."""
        with self._lock:
            count = len(self._pages)
            self._pages.clear()
            self._children.clear()
            self.num_bytes = 0
        return count

    def _drop(self, key: bytes) -> None:
        found = self._pages.pop(key, None)
        if found is None:
            return
        record = found[0]
        self.num_bytes -= len(record.payload)
        siblings = self._children[record.parent]
        siblings.discard(key)
        if not siblings:
            del self._children[record.parent]
