"""Pages of 128 tokens on one device: taken, shared by count, copied before a write, given back.

P pages, B bytes of a page, N rows of a field, X bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.cache.layout import Field, PageLayout
from cedar.config.model import PAGE_TOKENS
from cedar.errors import CapacityError


class PagePool:
    """A fixed number of pages: for each field of each KV source a plane with one part for each page.

    A layer reads planes, with the strides that kernels want; disk and other machines get a page as one record,
    plane after plane.

    Args:
        num_pages: On a CPU a page costs memory once it was used.
    """

    def __init__(self, layout: PageLayout, num_pages: int, device: torch.device | str = "cpu") -> None:
        if num_pages < 1:
            raise CapacityError(f"a pool of {num_pages} pages holds nothing, expected at least 1")
        self.layout, self.num_pages, self.device = layout, num_pages, torch.device(device)
        # by the field's place in the record
        self._planes = {
            field.offset: torch.zeros(num_pages, field.num_rows, field.row_bytes, dtype=torch.uint8, device=self.device)
            for field in layout.fields()
        }
        self._refs = [0] * num_pages
        # the page given back last is taken first: its memory is there already
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        return self._refs[page]

    def take(self) -> int:
        """A page of zeros with one holder.

        Raises:
            CapacityError: None is free; evict prefixes or preempt a sequence first.
        """
        return self.take_many(1)[0]

    def take_many(self, count: int) -> list[int]:
        """As `take`, of several at once: a device clears them in one go.

        Raises:
            CapacityError: So many are not free; none was taken.
        """
        if count > len(self._free):
            raise CapacityError(f"{count} pages are needed, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        # what another conversation left there must not reach a disk record
        where = pages[0] if count == 1 else torch.tensor(pages, dtype=torch.int64, device=self.device)
        for plane_PNX in self._planes.values():
            plane_PNX[where] = 0
        return pages

    def share(self, page: int) -> int:
        """One more holder of a page that has one."""
        assert self._refs[page] > 0, f"page {page} is free"
        self._refs[page] += 1
        return page

    def release(self, page: int) -> None:
        """One holder less; the last one frees the page."""
        assert self._refs[page] > 0, f"page {page} is free already"
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)

    def copy(self, page: int) -> int:
        """A page of its own with the same bytes.

        Raises:
            CapacityError: As `take`.
        """
        new = self.take()
        for plane_PNX in self._planes.values():
            plane_PNX[new] = plane_PNX[page]
        return new

    def field(self, field: Field) -> Tensor:
        """[P, N, X]: one field of every page."""
        return self._planes[field.offset]

    def read(self, page: int) -> bytes:
        """The page as one record."""
        return torch.cat([plane_PNX[page].flatten() for plane_PNX in self._planes.values()]).cpu().numpy().tobytes()

    def write(self, page: int, payload: bytes) -> None:
        """Fill a page with what `read` gave; nobody else may hold it."""
        assert self._refs[page] == 1, f"page {page} has {self._refs[page]} holders"
        start = 0
        for source, size in self.layout.sections.items():
            self.write_section(page, source, payload[start : start + size])
            start += size

    def write_section(self, page: int, source: int, section: bytes) -> None:
        """Fill one KV source's part of a page. Any thread may, on a page that only it touches."""
        section_X = torch.frombuffer(bytearray(section), dtype=torch.uint8)
        start = 0
        for field in self.layout.fields(source):
            stop = start + field.num_rows * field.row_bytes
            rows_NX = section_X[start:stop].unflatten(0, (field.num_rows, field.row_bytes))
            # straight into its place: a copy on the device would need memory there
            self._planes[field.offset][page].copy_(rows_NX)
            start = stop

    def mark(self) -> torch.cuda.Event | None:
        """What this thread has asked of the pages so far, for `follow`; None where nothing runs behind its back."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def follow(self, mark: torch.cuda.Event | None) -> None:
        """Writes of this thread come after what another thread has marked."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def finish(self) -> None:
        """Wait until this thread's writes have happened, so that any thread may read them."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def check(self) -> None:
        """Every page is either free or held."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert all((page in free) == (count == 0) for page, count in enumerate(self._refs)), "a page is lost"


class PageTable:
    """The pages of one sequence, in order; it holds each of them until it is closed."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self._page_P: Tensor | None = None

    def adopt(self, page: int) -> None:
        """Append a page that others hold too."""
        self.pages.append(self.pool.share(page))
        self._page_P = None

    def missing(self, num_tokens: int, write_from: int) -> int:
        """Pages that `reserve` would take."""
        wanted, references = -(-num_tokens // PAGE_TOKENS), self.pool.references
        missing = max(wanted - len(self.pages), 0)
        for page in self.pages[write_from // PAGE_TOKENS : wanted]:
            missing += references(page) > 1
        return missing

    def reserve(self, num_tokens: int, write_from: int) -> None:
        """Make the tokens [write_from, num_tokens) writable: new pages at the end, copies of shared ones.

        Raises:
            CapacityError: The pool has too few free pages; nothing was taken.
        """
        missing = self.missing(num_tokens, write_from)
        if missing > self.pool.num_free:
            raise CapacityError(f"{missing} pages are needed, {self.pool.num_free} of {self.pool.num_pages} are free")
        if missing == 0:
            return
        self._page_P = None
        for index in range(write_from // PAGE_TOKENS, len(self.pages)):
            page = self.pages[index]
            if index * PAGE_TOKENS < num_tokens and self.pool.references(page) > 1:
                self.pages[index] = self.pool.copy(page)
                self.pool.release(page)
        self.pages += self.pool.take_many(max(-(-num_tokens // PAGE_TOKENS) - len(self.pages), 0))

    def truncate(self, num_tokens: int) -> None:
        """Give back the pages behind the first `num_tokens` tokens."""
        keep = -(-num_tokens // PAGE_TOKENS)
        for page in self.pages[keep:]:
            self.pool.release(page)
        del self.pages[keep:]
        self._page_P = None

    def page_P(self) -> Tensor:
        """The pages' numbers on the pool's device."""
        if self._page_P is None:
            self._page_P = torch.tensor(self.pages, dtype=torch.int64, device=self.pool.device)
        return self._page_P

    def fork(self) -> PageTable:
        """The same pages once more; whoever writes first copies."""
        table = PageTable(self.pool)
        for page in self.pages:
            table.adopt(page)
        return table

    def close(self) -> None:
        for page in self.pages:
            self.pool.release(page)
        self.pages, self._page_P = [], None
