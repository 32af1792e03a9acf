"""Entries and index keys of one sequence as layers see them, read and written through its pages.

E entries, C channels, P pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from cedar.cache.pages import PageTable
from cedar.errors import CapacityError
from cedar.kernels.pages import Paged, Stored
from cedar.kernels.quantize import dequantize_rows, quantize_rows


class PagedRows:
    """Rows by number behind a page table; fulfils the model's `EntryStore`.

    Args:
        count: Rows that the table's pages hold already.
        dtype: Of the rows that come out.
        wait: Called before the rows are touched for the first time: their pages may be on their way.
    """

    def __init__(
        self,
        table: PageTable,
        what: Literal["entries", "keys"],
        source: int,
        *,
        count: int,
        dtype: torch.dtype,
        wait: Callable[[], None] | None = None,
    ) -> None:
        layout = table.pool.layout
        self._rows = layout.rows[what, source]
        self._ratio = layout.ratios[source]
        self._per_page = self._rows.codes.num_rows
        self._table, self._dtype = table, dtype
        self._fields = [table.pool.field(field) for field in (self._rows.codes, self._rows.scales)]
        self.count = count
        self._wait = wait

    def append(self, rows_EC: Tensor) -> None:
        """Write the next rows; the table must have room and must not share the pages they fall on.

        Raises:
            CapacityError: `PageTable.reserve` was not called for them.
        """
        num_rows = rows_EC.shape[0]
        if num_rows == 0:
            return
        if self.count + num_rows > len(self._table.pages) * self._per_page:
            raise CapacityError(f"{num_rows} rows do not fit the {len(self._table.pages)} pages reserved")
        self._arrived()
        first, last = self.count // self._per_page, (self.count + num_rows - 1) // self._per_page
        for page in self._table.pages[first : last + 1]:
            assert self._table.pool.references(page) == 1, "a shared page must not be written"
        page_E, row_E = self._places(torch.arange(self.count, self.count + num_rows, device=rows_EC.device))
        for field, stored in zip(self._fields, quantize_rows(rows_EC, self._rows.spec), strict=True):
            field[page_E, row_E] = stored
        self.count += num_rows

    def all(self) -> Tensor:
        self._arrived()
        page_P = self._table.page_P()[: -(-self.count // self._per_page)]
        codes, scales = (field[page_P].flatten(0, 1)[: self.count] for field in self._fields)
        return dequantize_rows(codes, scales, self._rows.spec, self._dtype)

    def gather(self, index: Tensor) -> Tensor:
        """Rows by number in the shape of `index`; -1 gives zeros."""
        if self.count == 0:
            return torch.zeros(*index.shape, self._rows.channels, dtype=self._dtype, device=index.device)
        codes, scales = self.read(index.clamp(min=0))
        rows = dequantize_rows(codes, scales, self._rows.spec, self._dtype)
        return rows * (index >= 0).unsqueeze(-1)

    def read(self, index: Tensor) -> Sequence[Tensor]:
        """(codes, scales) of rows by number, as stored."""
        self._arrived()
        page, row = self._places(index)
        return [field[page, row] for field in self._fields]

    def paged(self, slot_T: Tensor) -> Paged:
        """The rows in place, behind the only sequence's page table."""
        self._arrived()
        codes_PNX, scales_PNG = self._fields
        return Paged(Stored(codes_PNX, scales_PNG, self._rows.spec), self._table.page_P().unsqueeze(0), slot_T)

    def truncate(self, count: int) -> None:
        self.count = min(self.count, count)

    def vector_bytes(self) -> int:
        return self._rows.codes.row_bytes + self._rows.scales.row_bytes

    def _arrived(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None

    def _places(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self._table.page_P()[index // self._per_page], index % self._per_page
