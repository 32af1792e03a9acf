"""Decode kernels at the release's shapes: our time, the least it could be, and a peer's time in the same run.

    python benchmarks/kernels.py [--only sparse_decode,topk] [--csv benchmarks/results/h200.csv]

Each timed call finds the L2 cache full of something else: a captured graph of (flush, call) pairs, less one of
flushes alone, so that neither the host nor the flush is in the figure. The floor is the larger of bytes over the
card's copy rate and operations over its bf16 rate, both measured at the start. Every output is checked against the
reference before it is timed.

B rows, T tokens of context.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8, FormatSpec
from cedar.kernels import attention, dense, experts, indexer, mhc, pages
from cedar.kernels.dispatch import use_kernels
from cedar.kernels.pages import Paged, Stored
from cedar.kernels.quantize import round_rows

DEVICE = "cuda"
COLUMNS = (
    "date", "commit", "machine", "op", "case", "us_median", "us_spread", "bytes", "flops", "limit_fraction", "peer",
    "peer_us",
)  # fmt: skip
_PAIRS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One op at one size.

    Attributes:
        bytes: Least that must move, each input and output once.
        run: Our kernel.
        want: The reference, on a part of the rows if it cannot hold all; None where the check is made elsewhere.
        peer: (name, call) of another implementation of the same.
    """

    op: str
    case: str
    bytes: int
    flops: int
    run: Callable[[], object]
    want: Callable[[], object] | None = None
    peer: tuple[str, Callable[[], object]] | None = None
    tolerance: float = 3e-3


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
        # more than the cache holds, written anew before each call
        self._buffer = torch.empty(256 * 2**20, dtype=torch.uint8, device=DEVICE)
        self._flush_us = statistics.median(_times(_captured(self._pairs(None)), 9)) / _PAIRS

    def _pairs(self, call: Callable[[], object] | None) -> Callable[[], object]:
        def run() -> None:
            for _ in range(_PAIRS):
                self._buffer.fill_(1)
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


def sparse_decode() -> Iterator[Case]:
    heads, channels, window, k, num_pages = 64, 512, 128, 512, 8192
    entries = _stored(FP4_MAIN, num_pages, 128, channels)
    for rows in (1, 2, 8, 32, 64, 128, 256):
        ring = _stored(FP8, rows, window + 6, channels)
        slot_T = torch.arange(rows, device=DEVICE)
        # sequences of different pages, all near the model's limit
        page_SP = torch.randint(0, num_pages, (rows, 8192), device=DEVICE)
        position_T = torch.full((rows,), 2**20 - 5, device=DEVICE) - slot_T
        paged = Paged(entries, page_SP, slot_T)
        selection_TK = torch.randint(0, 2**20 - 512, (rows, k), device=DEVICE).sort(-1).values
        query = torch.randn(rows, heads, channels, device=DEVICE, dtype=torch.bfloat16)
        sink = torch.randn(heads, device=DEVICE)
        cos, sin = _angles(rows, 32)
        floor_T = torch.zeros_like(slot_T)
        arguments = query, cos, sin, ring, slot_T, position_T, floor_T, paged, selection_TK, sink, window

        def run(arguments: tuple[object, ...] = arguments) -> Tensor:
            return attention.paged_attention(*arguments)  # type: ignore[arg-type]

        num_bytes = rows * (window * 528 + k * 288 + k * 8 + 2 * heads * channels * 2)
        yield Case(
            op="sparse_decode", case=f"B={rows}", bytes=num_bytes, flops=rows * 4 * heads * channels * (window + k),
            run=run, want=run,
        )  # fmt: skip


def index_logits() -> Iterator[Case]:
    heads, channels = 32, 128
    for rows, tokens in ((1, 4096), (1, 131072), (1, 2**20), (32, 65536), (128, 65536)):
        num_pages = tokens // 128
        keys = _stored(FP4_INDEX, num_pages * rows, 128, channels)
        page_SP = torch.randperm(num_pages * rows, device=DEVICE).view(rows, num_pages)
        slot_T = torch.arange(rows, device=DEVICE)
        paged = Paged(keys, page_SP, slot_T)
        query = torch.randn(rows, heads, channels, device=DEVICE, dtype=torch.bfloat16)
        weight = torch.randn(rows, heads, device=DEVICE, dtype=torch.bfloat16)
        visible_T = torch.full((rows,), tokens, device=DEVICE)
        arguments = query, *_angles(rows, 32), weight, paged, visible_T

        def run(arguments: tuple[object, ...] = arguments, tokens: int = tokens) -> Tensor:
            return indexer.paged_index_scores(*arguments, tokens)  # type: ignore[arg-type]

        yield Case(
            op="index_logits", case=f"{rows}x{tokens}", bytes=rows * tokens * (68 + 4),
            flops=rows * tokens * 2 * heads * channels, run=run, want=run if rows * tokens <= 2**21 else None,
        )  # fmt: skip


def reindex() -> Iterator[Case]:
    heads, channels, blocks, size, tokens, k = 32, 128, 2048, 8, 2**20, 512
    num_pages = tokens // 128
    keys = _stored(FP4_INDEX, num_pages, 128, channels)
    for rows in (1, 32, 128):
        page_SP = torch.stack([torch.randperm(num_pages, device=DEVICE) for _ in range(rows)])
        slot_T = torch.arange(rows, device=DEVICE)
        paged = Paged(keys, page_SP, slot_T)
        query = torch.randn(rows, heads, channels, device=DEVICE, dtype=torch.bfloat16)
        weight = torch.randn(rows, heads, device=DEVICE, dtype=torch.bfloat16)
        block_TN = torch.stack(
            [torch.randperm(tokens // size, device=DEVICE)[:blocks].sort().values for _ in range(rows)]
        )
        visible_T = torch.full((rows,), tokens, device=DEVICE)
        arguments = query, *_angles(rows, 32), weight, paged, visible_T, block_TN, size

        def scores(arguments: tuple[object, ...] = arguments) -> Tensor:
            return indexer.paged_pool_scores(*arguments)  # type: ignore[arg-type]

        def run(scores: Callable[[], Tensor] = scores, block_TN: Tensor = block_TN) -> Tensor:
            return indexer.top_members(scores(), k, block_TN, size)

        yield Case(
            op="reindex", case=f"B={rows}", bytes=rows * (blocks * size * 68 + blocks * 8 + k * 8),
            flops=rows * blocks * size * 2 * heads * channels, run=run, want=scores if rows == 1 else None,
        )  # fmt: skip


def topk() -> Iterator[Case]:
    for rows, columns in ((1, 4096), (1, 16384), (1, 131072), (1, 2**20), (32, 65536), (128, 16384), (128, 65536)):
        score = torch.randn(rows, columns, device=DEVICE)

        def run(score: Tensor = score) -> Tensor:
            return indexer.top_entries(score, 512)

        def peer(score: Tensor = score) -> object:
            return score.topk(512, dim=-1, sorted=False)

        yield Case(
            op="topk", case=f"{rows}x{columns}", bytes=rows * (columns * 4 + 512 * 8), flops=0, run=run,
            want=run, peer=("torch.topk", peer),
        )  # fmt: skip


def mhc_step() -> Iterator[Case]:
    channels = 5120
    fn, scale = torch.randn(24, 4 * channels, device=DEVICE) * 0.01, torch.ones(3, device=DEVICE)
    base, gain = torch.randn(24, device=DEVICE), torch.randn(channels, device=DEVICE, dtype=torch.bfloat16)
    sublayer = mhc.Sublayer(fn, scale, base, gain, 20, 1e-6, 1e-20, 1e-20)
    for rows in (1, 32, 128, 8192):
        y = torch.randn(rows, channels, device=DEVICE, dtype=torch.bfloat16)
        streams = torch.randn(rows, 4, channels, device=DEVICE, dtype=torch.bfloat16)
        post, premix, mixing = (torch.rand(rows, *shape, device=DEVICE) for shape in ((4,), (4,), (4, 4)))
        arguments = y, streams, post, mixing, premix, sublayer, FP8

        def run(arguments: tuple[object, ...] = arguments) -> object:
            return mhc.advance(*arguments)[:2]  # type: ignore[arg-type]

        yield Case(
            op="mhc", case=f"T={rows}", bytes=rows * 10 * channels * 2 + fn.numel() * 4,
            flops=rows * 2 * 24 * 4 * channels, run=run, want=run if rows <= 128 else None, tolerance=1e-2,
        )  # fmt: skip


def window_write() -> Iterator[Case]:
    channels = 512
    gain = torch.randn(channels, device=DEVICE, dtype=torch.bfloat16)
    for rows in (1, 128):
        ring = _stored(FP8, rows, 134, channels)
        x = torch.randn(rows, channels, device=DEVICE, dtype=torch.bfloat16)
        slot_T = torch.arange(rows, device=DEVICE)
        arguments = x, gain, 1e-20, *_angles(rows, 32), ring, slot_T, slot_T % 134, slot_T >= 0

        def run(arguments: tuple[object, ...] = arguments) -> Tensor:
            return pages.store_normed(*arguments)  # type: ignore[arg-type]

        yield Case(
            op="window_write", case=f"T={rows}", bytes=rows * (2 * channels * 2 + 528), flops=0, run=run, want=run
        )


def moe() -> Iterator[Case]:
    num_experts, hidden, inner, k = 384, 5120, 2304, 6

    def weights(outputs: int, inputs: int) -> experts.Packed:
        codes = torch.randint(0, 256, (num_experts, outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
        # about 2 ** -7
        scales = torch.randint(118, 122, (num_experts, outputs, inputs // 32), dtype=torch.uint8, device=DEVICE)
        return experts.Packed(codes, scales)

    stacks = weights(inner, hidden), weights(inner, hidden), weights(hidden, inner)
    for rows in (1, 8, 32, 128):
        u = round_rows(torch.randn(rows, hidden, device=DEVICE), FP8).bfloat16()
        ids = torch.rand(rows, num_experts, device=DEVICE).topk(k).indices.sort(-1).values
        share = torch.rand(rows, k, device=DEVICE)
        hit = int(ids.unique().numel())

        def run(u: Tensor = u, ids: Tensor = ids, share: Tensor = share) -> Tensor:
            return experts.packed_experts(u, ids, share, *stacks, limit=10.0, round_inner=True)

        def part(u: Tensor = u, ids: Tensor = ids, share: Tensor = share) -> Tensor:
            # sixteen experts are what the reference can decode at once
            few = [experts.Packed(stack.codes[:16], stack.scales[:16]) for stack in stacks]
            some = torch.rand(u.shape[0], 16, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
            chosen = some.topk(k).indices.sort(-1).values
            return experts.packed_experts(u, chosen, share, *few, limit=10.0, round_inner=True)

        num_bytes = hit * 3 * inner * hidden * 17 // 32 + rows * (hidden * 2 + hidden * 4)
        # an inner value may round to the next FP8 code
        yield Case(
            op="moe", case=f"B={rows} ({hit} hit)", bytes=num_bytes, flops=rows * k * 6 * inner * hidden, run=run,
            want=part, tolerance=1e-2,
        )  # fmt: skip


def dense_fp8() -> Iterator[Case]:
    for name, outputs, inputs in (("wq_b", 32768, 1280), ("wq_a_wkv", 1792, 5120), ("wo_b", 5120, 8192)):
        codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, device=DEVICE) & 0xBF
        scales = torch.randint(115, 121, (outputs // 32, inputs // 32), dtype=torch.uint8, device=DEVICE)
        for rows in (1, 8, 32, 128):
            x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)

            def run(x: Tensor = x, codes: Tensor = codes, scales: Tensor = scales) -> Tensor:
                return dense.packed_linear(x, codes, scales, FP8)

            num_bytes = outputs * inputs + outputs * inputs // 1024 + rows * 2 * (inputs + outputs)
            yield Case(
                op="dense_fp8", case=f"{name} B={rows}", bytes=num_bytes, flops=rows * 2 * outputs * inputs, run=run,
                want=run,
            )  # fmt: skip


OPS: dict[str, Callable[[], Iterator[Case]]] = {
    "sparse_decode": sparse_decode,
    "topk": topk,
    "index_logits": index_logits,
    "reindex": reindex,
    "moe": moe,
    "dense_fp8": dense_fp8,
    "mhc": mhc_step,
    "window_write": window_write,
}


def _error(got: object, want: object) -> float:
    """Relative error of floats, share of different integers."""
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) and isinstance(want, tuple) else [(got, want)]
    worst = 0.0
    for one, other in pairs:
        assert isinstance(one, Tensor) and isinstance(other, Tensor)
        if one.is_floating_point():
            here = other.isfinite()
            difference = (one[here].double() - other[here].double()).norm() / other[here].double().norm()
            worst = max(worst, float(difference), float((one.isfinite() != here).any()))
        else:
            worst = max(worst, float((one != other).double().mean()))
    return worst if math.isfinite(worst) else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(OPS))
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    copy, products = ceilings()
    machine = torch.cuda.get_device_name()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"{machine}: copy {copy / 1e12:.2f} TB/s, bf16 {products / 1e12:.0f} TFLOP/s", flush=True)
    clock = Clock()
    for name in arguments.only.split(","):
        for case in OPS[name]():
            if case.want is not None:
                with use_kernels("reference"):
                    want = case.want()
                got = case.want() if case.want is not case.run else case.run()
                error = _error(got, want)
                if not error <= case.tolerance:
                    print(f"{case.op} {case.case}: WRONG by {error:.2g}, not timed", flush=True)
                    continue
            median, spread = clock(case.run)
            peer_us = None if case.peer is None else clock(case.peer[1])[0]
            floor = max(case.bytes / copy, case.flops / products) * 1e6
            row = (
                datetime.date.today().isoformat(), commit, machine, case.op, case.case, f"{median:.2f}",
                f"{spread:.2f}", case.bytes, case.flops, f"{floor / median:.3f}",
                "" if case.peer is None else case.peer[0],
                "" if peer_us is None else f"{peer_us:.2f}",
            )  # fmt: skip
            print(
                f"{case.op:14} {case.case:12} {median:9.2f} us (spread {spread:.2f}), floor {floor:.2f}, "
                f"{floor / median:.1%}" + ("" if peer_us is None else f", {row[10]} {peer_us:.2f} us"),
                flush=True,
            )
            if arguments.csv is not None:
                fresh = not arguments.csv.exists()
                with arguments.csv.open("a", newline="") as file:
                    writer = csv.writer(file)
                    if fresh:
                        writer.writerow(COLUMNS)
                    writer.writerow(row)


if __name__ == "__main__":
    main()
