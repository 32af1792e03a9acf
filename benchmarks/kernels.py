"""Kernels at the release's shapes and at those that training runs: our time, the least it could be, and the time of
other people's kernels in the same run.

    python benchmarks/kernels.py [--only sparse_decode,topk] [--csv benchmarks/results/h200.csv] [--peers DIR]
    python benchmarks/kernels.py plot [--csv benchmarks/results/h200.csv] [--out docs/plots/h200-kernels.png]

Each timed call finds the L2 cache full of something else: a captured graph of (flush, call) pairs, less one of
flushes alone, so that neither the host nor the flush is in the figure. The floor is the larger of bytes over the
card's copy rate and operations over its bf16 rate, both measured at the start. Every output is checked against the
reference before it is timed, ours and the peers', in memory that was NaN. Where no kernel takes a size, the reason is
printed and nothing is timed. docs/kernels.md says what DIR holds.

B rows of a decode step, T tokens.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

# run as a program, the folder above is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers import Peer, Peers, grouped_experts, widen_experts
from cedar.errors import KernelUnavailable
from cedar.formats.fp8 import dequantize_tiles
from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8, FormatSpec
from cedar.kernels import attention, dense, engram, experts, indexer, mhc, pages
from cedar.kernels.dispatch import select, use_kernels
from cedar.kernels.pages import Paged, Stored
from cedar.kernels.quantize import round_rows

DEVICE = "cuda"
COLUMNS = (
    "date", "commit", "machine", "op", "case", "us_median", "us_spread", "bytes", "flops", "limit_fraction", "peer",
    "peer_us",
)  # fmt: skip
_PAIRS = 10
_EMPTY = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))


@dataclass(kw_only=True, slots=True)
class Case:
    """One op at one size.

    Attributes:
        bytes: Least that must move, each input and output once.
        needs: (op, tensors) that decide which backend runs.
        run: Our kernel, on all rows or on the first so many.
        part: Rows that the reference can do; None for all.
        check: What is compared in place of run's result.
        written: Storage that run writes; compared as well.
    """

    op: str
    case: str
    bytes: int
    flops: int
    needs: tuple[Any, ...]
    run: Callable[..., object]
    part: int | None = None
    check: Callable[..., object] | None = None
    written: tuple[Tensor, ...] = ()
    tolerance: float = 3e-3
    peers: tuple[Peer, ...] = ()


def _captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _times(graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return times


class Clock:
    """Times calls with a cold L2."""

    def __init__(self) -> None:
        # more than the cache holds, read before each call: lines that were written would go back to memory during it
        self._buffer = torch.randn(64 * 2**20, device=DEVICE)
        self._total = torch.empty((), device=DEVICE)
        self._flush_us = statistics.median(_times(_captured(self._pairs(None)), 9)) / _PAIRS

    def _pairs(self, call: Callable[[], object] | None) -> Callable[[], object]:
        def run() -> None:
            for _ in range(_PAIRS):
                torch.sum(self._buffer, 0, out=self._total)
                if call is not None:
                    call()

        return run

    def __call__(self, call: Callable[[], object]) -> tuple[float, float]:
        """(median, spread) in microseconds."""
        times = [time / _PAIRS - self._flush_us for time in _times(_captured(self._pairs(call)), 9)]
        return statistics.median(times), max(times) - min(times)


def ceilings() -> tuple[float, float]:
    """(copy bytes a second, bf16 operations a second) of this card."""
    source = torch.randn(2**29, device=DEVICE)
    target = torch.empty_like(source)
    # a kernel: the copy engine that `copy_` takes is slower
    copy = statistics.median(_times(_captured(lambda: torch.mul(source, 1, out=target)), 5))
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = statistics.median(_times(_captured(lambda: a @ b), 5))
    return 2 * source.numel() * 4 / (copy * 1e-6), 2 * 8192**3 / (product * 1e-6)


def _stored(spec: FormatSpec, num_pages: int, num_rows: int, channels: int) -> Stored:
    """Random codes under sane scales."""
    codes = torch.randint(
        0, 256, (num_pages, num_rows, channels * spec.element_bits // 8), dtype=torch.uint8, device=DEVICE
    )
    if spec == FP8:
        codes &= 0xBF
    # E4M3 of about 1/4 to 2, or powers of two around 1
    low, high = (44, 64) if spec == FP4_MAIN else (125, 129)
    scales = torch.randint(low, high, (num_pages, num_rows, channels // spec.group), dtype=torch.uint8, device=DEVICE)
    return Stored(codes, scales, spec)


def _angles(rows: int, count: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, count, device=DEVICE) * 1e6
    return angle.cos(), angle.sin()


def _first(paged: Paged, part: int | None) -> Paged:
    return paged._replace(slot_T=paged.slot_T[:part])


def _copy(num_bytes: int) -> Peer:
    """A kernel that reads half as many bytes and writes the other half."""
    source = torch.randn(max(1, num_bytes // 8), device=DEVICE)
    target = torch.empty_like(source)
    return Peer("copy", lambda: torch.mul(source, 1, out=target), lambda: 0.0)


def _torch(name: str, run: Callable[[], object]) -> Peer:
    return Peer(name, run, lambda: 0.0)


def _eager(run: Callable[..., object]) -> Peer:
    def reference() -> object:
        with use_kernels("reference"):
            return run()

    return _torch("torch reference", reference)


# decode and prefill


def _attention(
    op: str, case: str, rows: int, ring_rows: int, slot_T: Tensor, page_SP: Tensor, entries: Stored | None, last: int
) -> tuple[Case, Tensor, Tensor, Tensor | None]:
    """The case, its queries, its sinks and its selection: rows at the positions up to `last`."""
    heads, channels, window, k = 64, 512, 128, 512
    ring = _stored(FP8, int(slot_T.max()) + 1, ring_rows, channels)
    position_T = torch.arange(last - rows + 1, last + 1, device=DEVICE)
    floor_T = position_T - window + 1
    query = torch.randn(rows, heads, channels, device=DEVICE, dtype=torch.bfloat16)
    sink = torch.randn(heads, device=DEVICE)
    cos, sin = _angles(rows, 32)
    paged = selection = None
    if entries is not None:
        paged = Paged(entries, page_SP, slot_T)
        most = min(page_SP.shape[1] * entries.codes_PNX.shape[1], last - rows)
        selection = torch.randint(0, most, (rows, k), device=DEVICE).sort(-1).values

    def run(part: int | None = None) -> Tensor:
        return attention.paged_attention(
            query[:part], cos[:part], sin[:part], ring, slot_T[:part], position_T[:part], floor_T[:part],
            None if paged is None else _first(paged, part), None if selection is None else selection[:part], sink,
            window,
        )  # fmt: skip

    # a prompt's rows share what they read
    ring_bytes = min(rows * window, ring_rows * ring.codes_PNX.shape[0]) * 528
    entry_bytes = 0 if entries is None else min(rows * k, entries.codes_PNX[..., 0].numel()) * 288 + rows * k * 8
    seen = window + (0 if entries is None else k)
    made = Case(
        op=op, case=case, bytes=ring_bytes + entry_bytes + rows * 2 * heads * channels * 2,
        flops=rows * 4 * heads * channels * seen, needs=("paged_attention", query), run=run, part=min(rows, 8),
    )  # fmt: skip
    return made, query, sink, selection


def sparse_decode(peers: Peers) -> Iterator[Case]:
    num_pages = 8192
    entries = _stored(FP4_MAIN, num_pages, 128, 512)
    for rows, windowed in (*((rows, False) for rows in (1, 2, 8, 32, 64, 128, 256)), (1, True), (128, True)):
        # sequences of different pages, all near the model's limit
        page_SP = torch.randint(0, num_pages, (rows, 8192), device=DEVICE)
        slot_T = torch.arange(rows, device=DEVICE)
        name = f"B={rows}" + (" window" if windowed else "")
        case, query, sink, selection = _attention(
            "sparse_decode", name, rows, 134, slot_T, page_SP, None if windowed else entries, 2**20 - 5
        )
        if selection is not None:
            case.peers = peers.attempt("sparse_decode", peers.sparse_decode, query, selection, sink, 2**20)
        yield case


def sparse_prefill(peers: Peers) -> Iterator[Case]:
    tokens = 131072
    entries = _stored(FP4_MAIN, tokens // 128, 128, 512)
    page_SP = torch.randperm(tokens // 128, device=DEVICE).unsqueeze(0)
    for rows in (1024, 4096):
        slot_T = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        case, query, sink, selection = _attention(
            "sparse_prefill", f"T={rows}", rows, rows + 128, slot_T, page_SP, entries, tokens - 1
        )
        for widened in (False, True):
            arguments = query, selection, sink, tokens, widened
            case.peers += peers.attempt("sparse_prefill", peers.sparse_prefill, *arguments)
        yield case


def _index_query(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query, cos, sin, weights) of an indexer's rows."""
    query = torch.randn(rows, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    return query, *_angles(rows, 32), torch.randn(rows, 32, device=DEVICE, dtype=torch.bfloat16)


def index_logits(peers: Peers) -> Iterator[Case]:
    for rows, tokens in ((1, 4096), (1, 131072), (1, 2**20), (32, 65536), (128, 65536)):
        num_pages = tokens // 128
        keys = _stored(FP4_INDEX, num_pages * rows, 128, 128)
        page_SP = torch.randperm(num_pages * rows, device=DEVICE).view(rows, num_pages)
        paged = Paged(keys, page_SP, torch.arange(rows, device=DEVICE))
        asked = _index_query(rows)
        visible_T = torch.full((rows,), tokens, device=DEVICE)

        def run(
            part: int | None = None, asked: Any = asked, paged: Paged = paged, visible_T: Tensor = visible_T,
            tokens: int = tokens,
        ) -> Tensor:  # fmt: skip
            rowwise = (x[:part] for x in asked)
            return indexer.paged_index_scores(*rowwise, _first(paged, part), visible_T[:part], tokens)

        yield Case(
            op="index_logits", case=f"{rows}x{tokens}", bytes=rows * tokens * (68 + 4),
            flops=rows * tokens * 2 * 32 * 128, needs=("paged_index_scores", asked[0]), run=run, part=1,
            peers=peers.attempt("index_logits", peers.index_logits, rows, tokens),
        )  # fmt: skip


def reindex(peers: Peers) -> Iterator[Case]:
    blocks, size, tokens, k = 2048, 8, 2**20, 512
    num_pages = tokens // 128
    keys = _stored(FP4_INDEX, num_pages, 128, 128)
    for rows in (1, 32, 128):
        page_SP = torch.stack([torch.randperm(num_pages, device=DEVICE) for _ in range(rows)])
        paged = Paged(keys, page_SP, torch.arange(rows, device=DEVICE))
        asked = _index_query(rows)
        block_TN = torch.stack(
            [torch.randperm(tokens // size, device=DEVICE)[:blocks].sort().values for _ in range(rows)]
        )
        visible_T = torch.full((rows,), tokens, device=DEVICE)

        def scores(
            part: int | None = None, asked: Any = asked, paged: Paged = paged, visible_T: Tensor = visible_T,
            block_TN: Tensor = block_TN,
        ) -> Tensor:  # fmt: skip
            rowwise = (x[:part] for x in asked)
            return indexer.paged_pool_scores(*rowwise, _first(paged, part), visible_T[:part], block_TN[:part], size)

        def run(scores: Callable[[], Tensor] = scores, block_TN: Tensor = block_TN) -> Tensor:
            return indexer.top_members(scores(), k, block_TN, size)

        def checked(
            part: int | None = None, scores: Any = scores, block_TN: Tensor = block_TN
        ) -> tuple[Tensor, Tensor]:
            # the scores of what was chosen: of two that rounding made equal either may be
            score, block = scores(part), block_TN[:part].contiguous()
            entry = indexer.top_members(score, k, block, size)
            place = torch.searchsorted(block, entry // size) * size + entry % size
            return score, score.gather(1, place)

        def dense_run(
            asked: Any = asked, paged: Paged = paged, visible_T: Tensor = visible_T, block_TN: Tensor = block_TN
        ) -> Tensor:
            score = indexer.paged_index_scores(*asked, paged, visible_T, tokens).unflatten(1, (-1, size))
            outside = torch.ones(score.shape[:2], dtype=torch.bool, device=DEVICE).scatter_(1, block_TN, False)
            return (
                score.masked_fill_(outside.unsqueeze(-1), -torch.inf).flatten(1).topk(k, dim=-1, sorted=False).indices
            )

        yield Case(
            op="reindex", case=f"B={rows}", bytes=rows * (blocks * size * 68 + blocks * 8 + k * 8),
            flops=rows * blocks * size * 2 * 32 * 128, needs=("paged_pool_scores", asked[0]), run=run, check=checked,
            part=min(rows, 4),
            peers=(
                *peers.attempt("reindex", peers.reindex, block_TN, tokens, size, k),
                _torch("our dense scores, mask, torch.topk", dense_run),
            ),
        )  # fmt: skip


def topk(peers: Peers) -> Iterator[Case]:
    k = 512
    for rows, columns in ((1, 4096), (1, 16384), (1, 131072), (1, 2**20), (32, 65536), (128, 16384), (128, 65536)):
        score = torch.randn(rows, columns, device=DEVICE)

        def run(part: int | None = None, score: Tensor = score) -> Tensor:
            return indexer.top_entries(score[:part], k)

        yield Case(
            op="topk", case=f"{rows}x{columns}", bytes=rows * (columns * 4 + k * 8), flops=0,
            needs=("top_entries", score), run=run,
            peers=(
                _torch("torch.topk", lambda score=score: score.topk(k, dim=-1, sorted=False)),
                *peers.attempt("topk", peers.topk, score, k),
            ),
        )  # fmt: skip
    size, blocks = 8, 2048
    for rows, columns in ((1, 131072), (1, 2**20), (32, 65536), (128, 65536)):
        score = torch.randn(rows, columns, device=DEVICE)
        visible_T = torch.full((rows,), columns, device=DEVICE)
        best = score.unflatten(1, (-1, size)).amax(-1)

        def run_blocks(part: int | None = None, score: Tensor = score, visible_T: Tensor = visible_T) -> Tensor:
            return indexer.top_blocks(score[:part], visible_T[:part], block_size=size, topk_blocks=blocks)

        def largest(score: Tensor = score) -> object:
            return score.unflatten(1, (-1, size)).amax(-1).topk(blocks, dim=-1, sorted=False)

        yield Case(
            op="topk", case=f"{blocks} blocks of {rows}x{columns}", bytes=rows * (columns * 4 + blocks * 8), flops=0,
            needs=("top_entries", best), run=run_blocks,
            peers=(_torch("torch.amax, topk", largest), *peers.attempt("topk", peers.topk, best, blocks)),
        )  # fmt: skip


def mhc_step(peers: Peers) -> Iterator[Case]:
    channels = 5120
    fn, scale = torch.randn(24, 4 * channels, device=DEVICE) * 0.01, torch.ones(3, device=DEVICE)
    base, gain = torch.randn(24, device=DEVICE), torch.randn(channels, device=DEVICE, dtype=torch.bfloat16)
    sublayer = mhc.Sublayer(fn, scale, base, gain, 20, 1e-6, 1e-20, 1e-20)
    for rows in (1, 32, 128, 1024, 8192):
        y = torch.randn(rows, channels, device=DEVICE, dtype=torch.bfloat16)
        streams = torch.randn(rows, 4, channels, device=DEVICE, dtype=torch.bfloat16)
        post, premix, mixing = (torch.rand(rows, *shape, device=DEVICE) for shape in ((4,), (4,), (4, 4)))
        rowwise = y, streams, post, mixing, premix

        def run(part: int | None = None, rowwise: tuple[Tensor, ...] = rowwise) -> tuple[Tensor, ...]:
            entered = mhc.advance(*(x[:part] for x in rowwise), sublayer, FP8)
            # not the rounded input: a last bit before rounding is a whole code after it
            return entered.streams_TND, entered.normed_TD, entered.premix_TN, entered.post_TN, entered.mixing_TNN

        num_bytes = rows * 10 * channels * 2 + fn.numel() * 4
        yield Case(
            op="mhc", case=f"T={rows}", bytes=num_bytes, flops=rows * 2 * 24 * 4 * channels,
            needs=("advance", streams, premix), run=run, part=min(rows, 256), tolerance=1e-2,
            peers=(_copy(num_bytes), *peers.attempt("mhc", peers.mhc, streams, fn)),
        )  # fmt: skip


def _chosen(rows: int, num_experts: int, k: int, skewed: bool) -> Tensor:
    """Distinct experts of each row, ascending: all equally likely, or by Zipf's law."""
    rank = torch.randperm(num_experts, device=DEVICE) + 1
    popular = -rank.float().log() if skewed else torch.zeros(num_experts, device=DEVICE)
    noise = -(-torch.rand(rows, num_experts, device=DEVICE).clamp(min=1e-20).log()).log()
    return (popular + noise).topk(k).indices.sort(-1).values


def moe(peers: Peers) -> Iterator[Case]:
    num_experts, hidden, inner, k, limit = 384, 5120, 2304, 6, 10.0

    def weights(outputs: int, inputs: int) -> experts.Packed:
        codes = torch.randint(0, 256, (num_experts, outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
        # about 2 ** -7
        scales = torch.randint(118, 122, (num_experts, outputs, inputs // 32), dtype=torch.uint8, device=DEVICE)
        return experts.Packed(codes, scales)

    stacks = weights(inner, hidden), weights(inner, hidden), weights(hidden, inner)
    held = tuple(experts.retile(stack) for stack in stacks)
    # each peer's own form of the weights, made once
    up = torch.cat([widen_experts(stacks[0]), widen_experts(stacks[1])], dim=1)
    down = widen_experts(stacks[2])
    marlin = peers.attempt("moe, Marlin's weights", peers.marlin_weights, stacks)
    narrow = peers.attempt("moe, FP8 weights", peers.fp8_stacks, num_experts, hidden, inner)
    for rows in (1, 6, 32, 128, 512, 4096):
        for skewed in (False, True):
            u = round_rows(torch.randn(rows, hidden, device=DEVICE), FP8).bfloat16()
            ids = _chosen(rows, num_experts, k, skewed)
            share = torch.rand(rows, k, device=DEVICE)
            hit = int(ids.unique().numel())

            def run(part: int | None = None, u: Tensor = u, ids: Tensor = ids, share: Tensor = share) -> Tensor:
                if part is None:
                    return experts.packed_experts(u, ids, share, *held, limit=limit, round_inner=True)
                # the few experts that these rows chose: the reference widens all that it is given
                few, place = ids[:part].unique(return_inverse=True)
                small = (experts.Packed(stack.codes[few], stack.scales[few]) for stack in stacks)
                return experts.packed_experts(u[:part], place, share[:part], *small, limit=limit, round_inner=True)

            num_bytes = hit * 3 * inner * hidden * 17 // 32 + rows * (hidden * 2 + hidden * 4)
            # an inner value may round to the next FP8 code
            yield Case(
                op="moe", case=f"T={rows}" + (" Zipf" if skewed else ""), bytes=num_bytes,
                flops=rows * k * 6 * inner * hidden, needs=("packed_experts", u, held[0].codes, ids), run=run, part=2,
                tolerance=1e-2,
                peers=(
                    grouped_experts(u, ids, share, up, down, stacks),
                    *(peers.attempt("moe, Marlin", peers.marlin, u, ids, share, marlin[0], stacks) if marlin else ()),
                    *(peers.attempt("moe, DeepGEMM", peers.grouped_fp8, ids, narrow[0]) if narrow else ()),
                ),
            )  # fmt: skip


def dense_fp8(peers: Peers) -> Iterator[Case]:
    shapes = (
        ("wq_b", 32768, 1280), ("wq_a_wkv", 1792, 5120), ("wo_a", 8 * 1024, 4096), ("wo_b", 5120, 8192),
        ("engram_wkv", 25600, 6144),
    )  # fmt: skip
    for name, outputs, inputs in shapes:
        groups = 8 if name == "wo_a" else 1
        codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, device=DEVICE) & 0xBF
        scales = torch.randint(115, 121, (outputs // 32, inputs // 32), dtype=torch.uint8, device=DEVICE)
        wide = dequantize_tiles(codes, scales, torch.bfloat16)
        for rows in (1, 8, 32, 128, 4096):
            # but for wo_a's, whatever made an input has rounded it
            x = torch.randn(rows, groups, inputs, device=DEVICE, dtype=torch.bfloat16)
            x = x if groups > 1 else round_rows(x, FP8)
            if groups == 1:
                needs: tuple[Any, ...] = ("packed_linear", x[:, 0], codes)
            else:
                needs = ("packed_grouped_linear", x, codes.view(groups, -1, inputs))

            def run(
                part: int | None = None, x: Tensor = x, codes: Tensor = codes, scales: Tensor = scales,
                groups: int = groups,
            ) -> Tensor:  # fmt: skip
                if groups == 1:
                    return dense.packed_linear(x[:part, 0], codes, scales, None)
                each = (stored.view(groups, -1, stored.shape[-1]) for stored in (codes, scales))
                return dense.packed_grouped_linear(x[:part], *each, None)

            def product(x: Tensor = x, wide: Tensor = wide, groups: int = groups) -> Tensor:
                if groups == 1:
                    return x[:, 0] @ wide.T
                return x.transpose(0, 1) @ wide.view(groups, -1, wide.shape[-1]).transpose(1, 2)

            num_bytes = outputs * inputs + outputs * inputs // 1024 + rows * 2 * (groups * inputs + outputs)
            yield Case(
                op="dense_fp8", case=f"{name} T={rows}", bytes=num_bytes, flops=rows * 2 * outputs * inputs,
                needs=needs, run=run, part=min(rows, 128), peers=(_torch("torch bf16 product", product),),
            )  # fmt: skip


def engram_memory(peers: Peers) -> Iterator[Case]:
    columns, channels, lookbacks, streams, hidden = 24, 256, 4, 4, 5120
    prime = 160001 + 2 * torch.randperm(1000, device=DEVICE)[:columns]
    offset = prime.cumsum(0) - prime
    table = _stored(FP8, 1, int(prime.sum()), channels)
    codes, scales = table.codes_PNX[0], table.scales_PNG[0]
    multiplier = torch.randint(1, 2**40, (lookbacks,), device=DEVICE) | 1
    weights = (torch.randn(2, streams, hidden, device=DEVICE) * 0.1).bfloat16()
    for rows in (1, 32, 128, 4096):
        ids = torch.randint(0, 99092, (rows, lookbacks), device=DEVICE)
        state = torch.randn(2, rows, streams, hidden, device=DEVICE, dtype=torch.bfloat16)
        value = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
        dead = torch.zeros(rows, dtype=torch.bool, device=DEVICE)

        def gather(part: int | None = None, ids: Tensor = ids) -> Tensor:
            found = ids[:part], multiplier, prime, offset, codes, scales
            return engram.engram_memory(*found, torch.bfloat16, FP8)

        def gate(part: int | None = None, state: Tensor = state, value: Tensor = value, dead: Tensor = dead) -> Tensor:
            rowwise = state[0, :part], state[1, :part], value[:part], dead[:part]
            return engram.engram_gate(*rowwise, *weights, 1e-6)

        num_bytes = rows * (columns * (channels * 33 // 32 + channels * 2) + lookbacks * 8)
        yield Case(
            op="engram", case=f"gather T={rows}", bytes=num_bytes, flops=0, needs=("engram_memory", ids, codes),
            run=gather, part=min(rows, 128), peers=(_copy(num_bytes),),
        )  # fmt: skip
        num_bytes = rows * (3 * streams + 1) * hidden * 2
        yield Case(
            op="engram", case=f"gate T={rows}", bytes=num_bytes, flops=0,
            needs=("engram_gate", state[0], state[1], value), run=gate, part=min(rows, 128), peers=(_copy(num_bytes),),
        )  # fmt: skip


def quantize(peers: Peers) -> Iterator[Case]:
    for name, spec, channels in (("FP8", FP8, 5120), ("FP4 main", FP4_MAIN, 512), ("FP4 index", FP4_INDEX, 128)):
        for rows in (1, 128, 8192):
            x = torch.randn(rows, channels, device=DEVICE, dtype=torch.bfloat16)

            def run(part: int | None = None, x: Tensor = x, spec: FormatSpec = spec) -> Tensor:
                return round_rows(x[:part], spec)

            num_bytes = rows * channels * 4
            yield Case(
                op="quantize", case=f"{name} {rows}x{channels}", bytes=num_bytes, flops=0, needs=("round_rows", x),
                run=run, peers=(_copy(num_bytes),),
            )  # fmt: skip


def scatter_gather(peers: Peers) -> Iterator[Case]:
    channels, per_page = 512, 128
    for name, spec in (("FP8", FP8), ("FP4", FP4_MAIN)):
        for rows in (1, 128, 4096):
            stored = _stored(spec, -(-rows // per_page), per_page, channels)
            place = torch.randperm(stored.codes_PNX.shape[0] * per_page, device=DEVICE)[:rows]
            where = place // per_page, place % per_page
            x = torch.randn(rows, channels, device=DEVICE, dtype=torch.bfloat16)
            there = torch.ones(rows, dtype=torch.bool, device=DEVICE)

            def scatter(
                part: int | None = None, x: Tensor = x, stored: Stored = stored, where: Any = where,
                there: Tensor = there,
            ) -> tuple[()]:  # fmt: skip
                pages.store_rows(x, stored, *where, there)
                return ()

            def gather(part: int | None = None, stored: Stored = stored, where: Any = where) -> Tensor:
                return pages.load_rows(stored, *where, torch.bfloat16)

            num_bytes = rows * (channels * 2 + spec.vector_bytes(channels))
            yield Case(
                op="pages", case=f"scatter {name} T={rows}", bytes=num_bytes, flops=0, needs=("store_rows", x),
                run=scatter, written=(stored.codes_PNX, stored.scales_PNG), peers=(_copy(num_bytes),),
            )  # fmt: skip
            yield Case(
                op="pages", case=f"gather {name} T={rows}", bytes=num_bytes, flops=0,
                needs=("load_rows", stored.codes_PNX), run=gather, peers=(_copy(num_bytes),),
            )  # fmt: skip


def window_write(peers: Peers) -> Iterator[Case]:
    channels = 512
    gain = torch.randn(channels, device=DEVICE, dtype=torch.bfloat16)
    for rows in (1, 128):
        ring = _stored(FP8, rows, 134, channels)
        x = torch.randn(rows, channels, device=DEVICE, dtype=torch.bfloat16)
        slot_T = torch.arange(rows, device=DEVICE)
        arguments = x, gain, 1e-20, *_angles(rows, 32), ring, slot_T, slot_T % 134, slot_T >= 0

        def run(part: int | None = None, arguments: Any = arguments) -> Tensor:
            return pages.store_normed(*arguments)

        yield Case(
            op="window_write", case=f"T={rows}", bytes=rows * (2 * channels * 2 + 528), flops=0,
            needs=("store_normed", x), run=run,
        )  # fmt: skip


# training: a forward and its backward, against the same in torch


@dataclass(frozen=True)
class Training:
    """Sizes of a model and of a captured pass: packs of so many rows."""

    name: str
    packs: int
    rows: int
    hidden: int
    heads: int
    channels: int
    window: int
    topk: int
    index_heads: int
    index_channels: int
    num_experts: int
    k: int
    inner: int


# what recipes/mini.toml and small.toml run (small in four parts), and the release's widths with as much as fits
TRAININGS = (
    Training("mini", 16, 2048, 256, 8, 64, 32, 32, 8, 32, 8, 2, 160),
    Training("small", 4, 4096, 512, 8, 128, 64, 64, 8, 64, 12, 3, 256),
    Training("release", 1, 4096, 5120, 64, 512, 128, 512, 32, 128, 16, 6, 2304),
)


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().requires_grad_() for tensor in tensors)


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def mhc_backward(peers: Peers) -> Iterator[Case]:
    for size in TRAININGS:
        rows, channels = size.packs * size.rows, size.hidden
        fn = _normal(24, 4 * channels, dtype=torch.float32) * 0.01
        leaves = _leaves(_normal(rows, 4, channels), fn, torch.ones(3, device=DEVICE), torch.randn(24, device=DEVICE))
        premix = torch.rand(rows, 4, device=DEVICE)
        upstream = _normal(rows, 4, channels), torch.randn(rows, 4, device=DEVICE)

        def run(
            part: int | None = None, leaves: Any = leaves, premix: Tensor = premix, upstream: Any = upstream
        ) -> Any:
            streams, *mix = leaves
            following, post, mixing = mhc.mix_coefficients(streams, *mix, iterations=20, eps=1e-6, rms_eps=1e-20)
            # the sublayer between collapse and expand is left out
            new = mhc.expand(mhc.collapse(streams, premix), streams, post, mixing)
            return torch.autograd.grad((new, following), leaves, upstream)

        # streams before and after, what lies between them; in the backward these and their gradients
        num_bytes = rows * (10 + 14) * channels * 2
        yield Case(
            op="mhc_backward", case=size.name, bytes=num_bytes, flops=rows * 3 * 2 * 24 * 4 * channels,
            needs=("mix_coefficients", *leaves), run=run, tolerance=2e-2, peers=(_copy(num_bytes), _eager(run)),
        )  # fmt: skip


def _selected(packs: int, rows: int, k: int) -> Tensor:
    """A random choice of k earlier entries of each row: bool [packs, rows, rows]."""
    earlier = torch.ones(rows, rows, dtype=torch.bool, device=DEVICE).tril()
    chosen = torch.zeros(packs, rows, rows, dtype=torch.bool, device=DEVICE)
    for pack in chosen:
        score = torch.rand(rows, rows, device=DEVICE).masked_fill(~earlier, -1)
        pack.scatter_(1, score.topk(k).indices, True)
    return chosen & earlier


def attention_backward(peers: Peers) -> Iterator[Case]:
    for size in TRAININGS:
        shape = size.packs, size.rows, size.heads, size.channels
        leaves = _leaves(
            _normal(*shape), _normal(size.packs, size.rows, size.channels),
            _normal(size.packs, size.rows, size.channels), torch.randn(size.heads, device=DEVICE),
        )  # fmt: skip
        selection = _selected(size.packs, size.rows, size.topk)
        start = torch.zeros(shape[:2], dtype=torch.int64, device=DEVICE)
        upstream = _normal(*shape)

        def run(
            part: int | None = None, leaves: Any = leaves, selection: Tensor = selection, start: Tensor = start,
            upstream: Tensor = upstream, window: int = size.window,
        ) -> Any:  # fmt: skip
            query, near, far, sink = leaves
            output, mass = attention.masked_attention(query, near, start, far, selection, sink, window)
            return *torch.autograd.grad(output, leaves, upstream), mass

        tokens = size.packs * size.rows
        num_bytes = 4 * upstream.numel() * 2 + selection.numel() + 8 * tokens * size.channels * 2
        flops = tokens * size.heads * size.channels * (size.window + size.topk) * 14
        yield Case(
            op="attention_backward", case=size.name, bytes=num_bytes, flops=flops,
            needs=("masked_attention", leaves[0], leaves[1], leaves[3]), run=run, tolerance=2e-2,
            peers=(_eager(run),),
        )  # fmt: skip


def indexer_backward(peers: Peers) -> Iterator[Case]:
    for size in TRAININGS:
        shape = size.packs, size.rows, size.index_heads, size.index_channels
        leaves = _leaves(_normal(*shape), _normal(*shape[:3]), _normal(size.packs, size.rows, size.index_channels))
        selection = _selected(size.packs, size.rows, size.topk)
        mass = torch.rand(selection.shape, device=DEVICE) * selection

        def run(
            part: int | None = None, leaves: Any = leaves, selection: Tensor = selection, mass: Tensor = mass
        ) -> Any:
            score = torch.where(selection, indexer.masked_index_scores(*leaves), -torch.inf)
            divergence, _ = indexer.index_divergence(score.flatten(0, 1), mass.flatten(0, 1))
            return torch.autograd.grad(divergence.sum(), leaves)

        tokens = size.packs * size.rows
        num_bytes = 2 * sum(leaf.numel() for leaf in leaves) * 2 + selection.numel() * 5
        flops = 3 * tokens * size.topk * 2 * size.index_heads * size.index_channels
        yield Case(
            op="indexer_backward", case=size.name, bytes=num_bytes, flops=flops, needs=("masked_index_scores", *leaves),
            run=run, tolerance=2e-2, peers=(_eager(run),),
        )  # fmt: skip


def experts_backward(peers: Peers) -> Iterator[Case]:
    for size in TRAININGS:
        rows = size.packs * size.rows
        shapes = [(size.num_experts, size.inner, size.hidden)] * 2 + [(size.num_experts, size.hidden, size.inner)]
        leaves = _leaves(
            _normal(rows, size.hidden), torch.rand(rows, size.k, device=DEVICE),
            *(_normal(*shape) * shape[2] ** -0.5 for shape in shapes),
        )  # fmt: skip
        ids = _chosen(rows, size.num_experts, size.k, skewed=False)
        upstream = _normal(rows, size.hidden, dtype=torch.float32)

        def run(part: int | None = None, leaves: Any = leaves, ids: Tensor = ids, upstream: Tensor = upstream) -> Any:
            u, share, *stacks = leaves
            output = experts.experts(u, ids, share, *stacks, limit=10.0, round_inner=False)
            return torch.autograd.grad(output, leaves, upstream)

        weights = sum(stack.numel() for stack in leaves[2:])
        yield Case(
            op="experts_backward", case=size.name, bytes=3 * weights * 2 + rows * size.hidden * (2 + 4 + 4 + 2),
            flops=3 * rows * size.k * 6 * size.inner * size.hidden, needs=("experts", leaves[0], *leaves[2:]), run=run,
            tolerance=2e-2,
        )  # fmt: skip


OPS: dict[str, Callable[[Peers], Iterator[Case]]] = {
    "sparse_decode": sparse_decode,
    "sparse_prefill": sparse_prefill,
    "index_logits": index_logits,
    "reindex": reindex,
    "topk": topk,
    "mhc": mhc_step,
    "moe": moe,
    "dense_fp8": dense_fp8,
    "engram": engram_memory,
    "quantize": quantize,
    "pages": scatter_gather,
    "window_write": window_write,
    "mhc_backward": mhc_backward,
    "attention_backward": attention_backward,
    "indexer_backward": indexer_backward,
    "experts_backward": experts_backward,
}


def no_kernel(op: str, *tensors: Tensor) -> str:
    """Why only the reference takes these tensors, or an empty string."""
    if ".reference." not in select(op, *tensors).__module__:
        return ""
    try:
        with use_kernels("triton"):
            select(op, *tensors)
    except KernelUnavailable as error:
        # without the advice that follows
        return str(error).split(". ")[0]
    return "the reference is forced"


def _tensors(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    assert isinstance(result, tuple)
    return [one for one in result if one is not None]


def difference(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest relative error of floats, or share of different integers."""
    worst = 0.0
    for one, other in zip(got, want, strict=True):
        if one.is_floating_point():
            here = other.isfinite()
            apart = (one[here].double() - other[here].double()).norm() / other[here].double().norm()
            worst = max(worst, float(apart), float((one.isfinite() != here).any()))
        else:
            worst = max(worst, float((one != other).double().mean()))
    return worst if math.isfinite(worst) else math.inf


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory reads as NaN."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def empty(*arguments: Any, **keywords: Any) -> Tensor:
            tensor = make(*arguments, **keywords)
            return tensor.fill_(math.nan) if tensor.is_floating_point() and tensor.element_size() > 1 else tensor

        return empty

    patches = [mock.patch.object(owner, name, poison(getattr(owner, name))) for owner, name in _EMPTY]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def check(case: Case) -> tuple[float, bool]:
    """(the error of our result against the reference's, whether a second run gives the same bits)."""
    run = case.check or case.run

    def result(part: int | None) -> list[Tensor]:
        for storage in case.written:
            storage.fill_(0xA5)
        return [one.clone() for one in (*_tensors(run(part)), *case.written)]

    with use_kernels("reference"):
        want = result(case.part)
    with poisoned():
        got, again = result(None), result(None)
    same = all(torch.equal(one, other) for one, other in zip(got, again, strict=True))
    return difference([one[: case.part] for one in got] if case.part is not None else got, want), same


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class Bench:
    """Checks, times, prints and records cases."""

    def __init__(self, file: Path | None, checked_only: bool) -> None:
        self.machine = torch.cuda.get_device_name()
        self.copy, self.products = ceilings()
        self._clock = None if checked_only else Clock()
        self._file = file
        self._date = datetime.date.today().isoformat()
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        self._commit = head.stdout.strip()

    def run(self, case: Case) -> None:
        reason = no_kernel(*case.needs)
        if reason:
            print(f"{case.op:18} {case.case:18} no kernel: {reason}", flush=True)
            return
        error, same = check(case)
        said = f"{case.op:18} {case.case:18} error {error:.1e}" + ("" if same else ", other bits when run again")
        if not error <= case.tolerance:
            print(f"{said}: WRONG, not timed", flush=True)
            return
        if self._clock is None:
            print(said, flush=True)
            for peer in case.peers:
                self._peer(peer)
            return
        median, spread = self._clock(case.run)
        floor = max(case.bytes / self.copy, case.flops / self.products) * 1e6
        print(f"{said}, {median:9.2f} us (spread {spread:.2f}), floor {floor:.2f}, {floor / median:.1%}", flush=True)
        times = [(peer.name, self._peer(peer)) for peer in case.peers]
        for name, time in [(name, time) for name, time in times if time is not None] or [("", None)]:
            self._write(
                self._date, self._commit, self.machine, case.op, case.case, f"{median:.2f}", f"{spread:.2f}",
                case.bytes, case.flops, f"{floor / median:.3f}", name, "" if time is None else f"{time:.2f}",
            )  # fmt: skip

    def _peer(self, peer: Peer) -> float | None:
        try:
            error = peer.error()
            if not error <= peer.tolerance:
                print(f"    {peer.name}: WRONG by {error:.2g}, not timed", flush=True)
                return None
            median, spread = (math.nan, math.nan) if self._clock is None else self._clock(peer.run)
        except Exception as failure:
            print(f"    {peer.name}: {_short(failure)}", flush=True)
            return None
        print(f"    {peer.name:36} {median:9.2f} us (spread {spread:.2f}), error {error:.1e}", flush=True)
        return median

    def _write(self, *row: object) -> None:
        if self._file is None:
            return
        fresh = not self._file.exists()
        with self._file.open("a", newline="") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow(COLUMNS)
            writer.writerow(row)


def measure(arguments: argparse.Namespace) -> None:
    # the backward of a captured pass and the references warn about what they do on purpose
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.manual_seed(1)
    bench, peers = Bench(arguments.csv, arguments.check), Peers(arguments.peers)
    print(f"{bench.machine}: copy {bench.copy / 1e12:.2f} TB/s, bf16 {bench.products / 1e12:.0f} TFLOP/s", flush=True)
    for name in arguments.only.split(","):
        cases = OPS[name](peers)
        # a failure inside one op must not cost the others their turn of the card
        try:
            for case in cases:
                try:
                    bench.run(case)
                except Exception as failure:
                    print(f"{case.op:18} {case.case:18} {_short(failure)}", flush=True)
        except Exception as failure:
            print(f"{name:18} {_short(failure)}", flush=True)
        torch.cuda.empty_cache()


class Shown(NamedTuple):
    """A row as it is plotted; the peer's time is None where it did not run."""

    us: float
    fraction: float
    peer_us: float | None


def latest(file: Path) -> dict[str, dict[str, dict[str, Shown]]]:
    """By op, case and peer: each op's rows of the last commit that measured it, so that times are of one run."""
    found: dict[str, dict[str, dict[str, Shown]]] = {}
    runs: dict[str, tuple[str, str]] = {}
    with file.open(newline="") as rows:
        for row in csv.DictReader(rows):
            if row["op"] not in OPS:
                continue
            run = row["date"], row["commit"]
            if runs.get(row["op"]) != run:
                runs[row["op"]], found[row["op"]] = run, {}
            peer_us = float(row["peer_us"]) if row["peer_us"] else None
            by_peer = found[row["op"]].setdefault(row["case"], {})
            by_peer[row["peer"]] = Shown(float(row["us_median"]), float(row["limit_fraction"]), peer_us)
    return found


def plot(arguments: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = latest(arguments.csv or _RESULTS)
    ops = [op for op in OPS if op in found]
    names = sorted({peer for cases in found.values() for by_peer in cases.values() for peer in by_peer if peer})
    ratios = [
        part.us / part.peer_us
        for cases in found.values()
        for by_peer in cases.values()
        for part in by_peer.values()
        if part.peer_us
    ]
    around = min([0.5, *ratios]) / 1.3, max([2.0, *ratios]) * 1.3
    colour = {name: pyplot.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    heights = [max(len(found[op]), 2) for op in ops]
    figure, axes = pyplot.subplots(
        len(ops), 2, figsize=(13, 0.21 * sum(heights) + 0.75 * len(ops)), squeeze=False,
        gridspec_kw={"height_ratios": heights}, layout="constrained",
    )  # fmt: skip
    for op, (left, right) in zip(ops, axes, strict=True):
        cases = found[op]
        place = range(len(cases))
        parts = [next(iter(by_peer.values())) for by_peer in cases.values()]
        left.barh(place, [100 * part.fraction for part in parts], color="#4c78a8", height=0.7)
        for y, part in zip(place, parts, strict=True):
            left.text(100 * part.fraction + 1, y, f"{part.fraction:.1%}, {part.us:,.1f} µs", va="center", fontsize=7)
        left.set(xlim=(0, 140), yticks=place, yticklabels=list(cases), title=op)
        used: set[str] = set()
        for y, by_peer in zip(place, cases.values(), strict=True):
            for name, part in by_peer.items():
                if part.peer_us:
                    label = None if name in used else name
                    used.add(name)
                    right.plot(part.us / part.peer_us, y, "o", color=colour[name], label=label, markersize=5)
        right.axvline(1, color="black", linewidth=0.8)
        right.set(xscale="log", xlim=around, yticks=place, yticklabels=[], ylim=left.get_ylim())
        right.grid(axis="x", which="both", linewidth=0.3)
        if used:
            right.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        for axis in (left, right):
            axis.invert_yaxis()
            axis.tick_params(labelsize=7)
    axes[-1][0].set_xlabel("% of the limit: bytes at the copy rate, or operations at the bf16 rate", fontsize=8)
    axes[-1][1].set_xlabel("our time over the peer's: left of the line we are faster", fontsize=8)
    figure.suptitle("Kernels on one H200: newest rows of benchmarks/results/h200.csv", fontsize=11)
    figure.savefig(arguments.out, dpi=80)


_RESULTS = Path(__file__).parent / "results" / "h200.csv"
_PLOT = Path(__file__).parents[1] / "docs" / "plots" / "h200-kernels.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("measure", "plot"), default="measure")
    parser.add_argument("--only", default=",".join(OPS))
    parser.add_argument("--csv", type=Path, help="rows are appended to it, or plotted from it")
    parser.add_argument("--peers", type=Path, help="an unpacked vLLM wheel, or the part that docs/kernels.md names")
    parser.add_argument("--check", action="store_true", help="compare, do not time")
    parser.add_argument("--out", type=Path, default=_PLOT)
    arguments = parser.parse_args()
    if arguments.what == "measure" and not torch.cuda.is_available():
        parser.error("no CUDA device: these kernels are timed on a GPU; `plot` draws the recorded rows without one")
    (plot if arguments.what == "plot" else measure)(arguments)


if __name__ == "__main__":
    main()
