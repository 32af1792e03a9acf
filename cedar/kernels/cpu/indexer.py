"""Index scores and exact top-k in C, of any number of rows; the rows of a long prompt are shared out to threads.

T rows, H index heads, I index channels, E entries, K selected entries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from cedar.kernels.cpu import native
from cedar.kernels.cpu.native import unavailable

__all__ = ["FORWARD_ONLY", "fits", "gathered_index_scores", "index_scores", "top_entries", "unavailable"]

FORWARD_ONLY = ("index_scores", "gathered_index_scores", "top_entries")
# a row of keys lies on the C stack, tile by tile
_MAX_CHANNELS = 256
# multiplications and comparisons that are worth a second thread
_SHARED_WORK = 2**22


def fits(op: str, first: Tensor, *others: Tensor) -> bool:
    """float32, with keys of at most 256 channels."""
    narrow = op == "top_entries" or first.shape[-1] <= _MAX_CHANNELS
    return narrow and all(tensor.dtype is torch.float32 for tensor in (first, *others))


def index_scores(query_THI: Tensor, weight_TH: Tensor, key_EI: Tensor) -> Tensor:
    return _scores("index_scores", query_THI, weight_TH, native.rows(key_EI))


def gathered_index_scores(query_THI: Tensor, weight_TH: Tensor, key_TEI: Tensor) -> Tensor:
    return _scores("gathered_index_scores", query_THI, weight_TH, native.rows(key_TEI))


def _scores(name: str, query_THI: Tensor, weight_TH: Tensor, keys: Tensor) -> Tensor:
    query_THI, weight_TH = native.rows(query_THI), native.rows(weight_TH)
    num_rows, num_heads, channels = query_THI.shape
    num_entries = keys.shape[-2]
    score_TE = torch.empty(num_rows, num_entries)
    run = native.function(name, "ppppllll")

    def some(start: int, stop: int) -> None:
        run(
            query_THI[start:].data_ptr(),
            weight_TH[start:].data_ptr(),
            (keys if keys.dim() == 2 else keys[start:]).data_ptr(),
            score_TE[start:].data_ptr(),
            stop - start,
            num_heads,
            channels,
            num_entries,
        )

    _share(some, num_rows, num_heads * channels * num_entries)
    return score_TE


def top_entries(score_TE: Tensor, k: int) -> Tensor:
    score_TE = native.rows(score_TE)
    num_rows, num_entries = score_TE.shape
    index_TK = torch.empty(num_rows, k, dtype=torch.int64)
    run = native.function("top_entries", "ppplll")

    def some(start: int, stop: int) -> None:
        scratch_E = torch.empty(num_entries, dtype=torch.int32)
        run(
            score_TE[start:].data_ptr(),
            index_TK[start:].data_ptr(),
            scratch_E.data_ptr(),
            stop - start,
            num_entries,
            k,
        )

    _share(some, num_rows, 16 * num_entries)
    return index_TK


@functools.lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="cedar-kernels")


def _share(run: Callable[[int, int], None], num_rows: int, work_per_row: int) -> None:
    """`run(start, stop)` over all rows, by as many threads as torch uses where there is enough to do.

    C code holds no interpreter lock, and no row's bits depend on who runs beside it.
    """
    parts = min(torch.get_num_threads(), num_rows, num_rows * work_per_row // _SHARED_WORK)
    if parts < 2:
        run(0, num_rows)
        return
    cuts = [num_rows * part // parts for part in range(parts + 1)]
    pool = _threads(torch.get_num_threads())
    for future in [pool.submit(run, *span) for span in zip(cuts, cuts[1:], strict=False)]:
        future.result()
