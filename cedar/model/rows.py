"""Rows of a memory table that stays on disk: a bounded cache of them, read ahead while other layers run.

N rows asked for, C channels, S scales, G sets of the cache, W ways of a set.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedar.errors import CapacityError, FormatError

_WAYS = 8
# rows this far apart are cheaper to read together, and so many runs at once
_GAP_BYTES = 4096
_READERS = 8
_CHUNK_ROWS = 1 << 14
_Bytes = NDArray[np.uint8]
_Rows = NDArray[np.int64]


@dataclass(slots=True)
class RowStats:
    """Counters since the start; rows are counted once a step, however often it uses them.

    Attributes:
        cached: Rows that were in memory when a layer asked.
        read: Rows that came from the file, ahead of their use or not.
        calls: Reads of the file that took.
        stall_s: How long layers waited for rows.
    """

    cached: int = 0
    read: int = 0
    calls: int = 0
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plane:
    """Where a table's codes, or its scales, lie in a file: row after row of `row_bytes`."""

    file: Path
    start: int
    row_bytes: int


class DiskTable:
    """One table in the checkpoint's own file.

    Rows of one set of the cache compete for its 8 ways; the one used longest ago makes way.

    Args:
        cache_bytes: What rows in memory may take.

    Raises:
        CapacityError: The cache holds not even one set.
        FormatError: A file cannot be opened.
    """

    def __init__(self, codes: Plane, scales: Plane, num_rows: int, *, cache_bytes: int) -> None:
        self.num_rows, self.stats = num_rows, RowStats()
        self._planes = (codes, scales)
        row_bytes = codes.row_bytes + scales.row_bytes
        # beside each row its number and when it was used
        num_sets = min(cache_bytes // (_WAYS * (row_bytes + 16)), -(-num_rows // _WAYS))
        if num_sets < 1:
            raise CapacityError(
                f"a row cache of {cache_bytes} bytes holds no set of {_WAYS} rows of {row_bytes}: give it more"
            )
        self.cache_bytes = num_sets * _WAYS * (row_bytes + 16)
        try:
            self._files = tuple(os.open(plane.file, os.O_RDONLY) for plane in self._planes)
        except OSError as error:
            raise FormatError(f"cannot read a memory table: {error}") from None
        self._row_GW = np.full((num_sets, _WAYS), -1, dtype=np.int64)
        self._used_GW = np.zeros((num_sets, _WAYS), dtype=np.int64)
        self._cache = tuple(np.zeros((num_sets, _WAYS, plane.row_bytes), dtype=np.uint8) for plane in self._planes)
        self._step = 0
        self._lock = threading.Lock()
        self._ahead: list[tuple[_Rows, Future[None]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cedar-rows")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="cedar-rows")

    def get(self, row_N: Tensor) -> tuple[Tensor, Tensor]:
        """(codes [N, C], scales [N, S]) of rows by number, in any order and as often as they are named.

        Raises:
            FormatError: The file became shorter than it was.
        """
        began = time.perf_counter()
        wanted, inverse_N = np.unique(row_N.numpy(), return_inverse=True)
        self._await(wanted)
        planes, missing = self._look_up(wanted)
        self.stats.cached += int(len(wanted) - missing.sum())
        if missing.any():
            fresh = self._read(wanted[missing])
            for plane, rows in zip(planes, fresh, strict=True):
                plane[missing] = rows
            self._keep(wanted[missing], fresh)
        codes, scales = (torch.from_numpy(plane[inverse_N]) for plane in planes)
        self.stats.stall_s += time.perf_counter() - began
        return codes, scales

    def prefetch(self, row_N: Tensor) -> None:
        """Begin to bring rows into the cache; `get` waits for them rather than read them again."""
        wanted = np.unique(row_N.numpy())
        _, missing = self._look_up(wanted)
        rows = wanted[missing]
        if len(rows) == 0:
            return
        with self._lock:
            self._ahead = [pair for pair in self._ahead if not pair[1].done()]
            self._ahead.append((rows, self._thread.submit(self._bring, rows)))

    def stored(self) -> Iterator[Tensor]:
        """All codes, then all scales, in chunks: the table as it lies on disk."""
        for number, plane in enumerate(self._planes):
            for start in range(0, self.num_rows, _CHUNK_ROWS):
                count = min(_CHUNK_ROWS, self.num_rows - start)
                data = self._pread(number, start, count)
                yield torch.from_numpy(data.reshape(count, plane.row_bytes).copy())

    def close(self) -> None:
        """Give back threads and files."""
        self._thread.shutdown(cancel_futures=True)
        self._readers.shutdown()
        for file in self._files:
            os.close(file)
        self._files = ()

    def _bring(self, rows: _Rows) -> None:
        # a second request ahead of this one may have brought some
        _, missing = self._look_up(rows)
        rows = rows[missing]
        if len(rows):
            self._keep(rows, self._read(rows))

    def _await(self, wanted: _Rows) -> None:
        with self._lock:
            ahead = list(self._ahead)
        for rows, brought in ahead:
            if not brought.done() and np.isin(wanted, rows, assume_unique=True).any():
                # what went wrong there goes wrong again below, for whoever asks
                brought.exception()

    def _look_up(self, rows: _Rows) -> tuple[tuple[_Bytes, ...], NDArray[np.bool_]]:
        """(planes with the rows that are cached in their places, which are not)."""
        with self._lock:
            self._step += 1
            set_N = rows % len(self._row_GW)
            match_NW = self._row_GW[set_N] == rows[:, None]
            hit = match_NW.any(axis=1)
            way_N = match_NW.argmax(axis=1)
            self._used_GW[set_N[hit], way_N[hit]] = self._step
            planes = []
            for cache in self._cache:
                plane = np.zeros((len(rows), cache.shape[2]), dtype=np.uint8)
                plane[hit] = cache[set_N[hit], way_N[hit]]
                planes.append(plane)
        return tuple(planes), ~hit

    def _keep(self, rows: _Rows, planes: tuple[_Bytes, ...]) -> None:
        with self._lock:
            set_N = rows % len(self._row_GW)
            # rows of the same set take its ways in turn, oldest first; more than there are ways stay out
            order = np.argsort(set_N, kind="stable")
            ordered = set_N[order]
            first = np.searchsorted(ordered, ordered)
            rank_N = np.zeros(len(rows), dtype=np.int64)
            rank_N[order] = np.arange(len(rows)) - first
            fits = rank_N < _WAYS
            set_N, rank_N = set_N[fits], rank_N[fits]
            way_N = np.argsort(self._used_GW[set_N], axis=1, kind="stable")[np.arange(len(set_N)), rank_N]
            # a row that came twice at once must not be there twice
            known = (self._row_GW[set_N] == rows[fits][:, None]).any(axis=1)
            set_N, way_N = set_N[~known], way_N[~known]
            self._row_GW[set_N, way_N] = rows[fits][~known]
            self._used_GW[set_N, way_N] = self._step
            for cache, plane in zip(self._cache, planes, strict=True):
                cache[set_N, way_N] = plane[fits][~known]

    def _read(self, rows: _Rows) -> tuple[_Bytes, ...]:
        """Rows in ascending order from the file, neighbours together."""
        planes = []
        for number, plane in enumerate(self._planes):
            gap = max(_GAP_BYTES // plane.row_bytes, 1)
            cuts = np.flatnonzero(np.diff(rows) > gap) + 1
            starts, stops = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(rows)]])
            out = np.zeros((len(rows), plane.row_bytes), dtype=np.uint8)

            def run(
                span: tuple[NDArray[np.int64], NDArray[np.int64]],
                number: int = number,
                out: _Bytes = out,
                row_bytes: int = plane.row_bytes,
            ) -> None:
                for start, stop in zip(*(part.tolist() for part in span), strict=True):
                    first, last = int(rows[start]), int(rows[stop - 1])
                    data = self._pread(number, first, last - first + 1).reshape(-1, row_bytes)
                    out[start:stop] = data[rows[start:stop] - first]

            if len(starts) < 2 * _READERS:
                run((starts, stops))
            else:
                parts = zip(np.array_split(starts, _READERS), np.array_split(stops, _READERS), strict=True)
                list(self._readers.map(run, parts))
            with self._lock:
                self.stats.calls += len(starts)
            planes.append(out)
        with self._lock:
            self.stats.read += len(rows)
        return tuple(planes)

    def _pread(self, number: int, first: int, count: int) -> _Bytes:
        plane = self._planes[number]
        data = os.pread(self._files[number], count * plane.row_bytes, plane.start + first * plane.row_bytes)
        if len(data) != count * plane.row_bytes:
            raise FormatError(
                f"{plane.file} ended inside a memory table: it was cut since it was opened; copy it again"
            )
        return np.frombuffer(data, dtype=np.uint8)
