"""Decode and prefill speed of whole models on a GPU: graphs, sampling included, tokens a second.

    python benchmarks/decode.py [--model DIR | --preset mini,small] [--batches 1,16,256] [--contexts 512,131072]
        [--prefill 131072] [--packed] [--profile FILE] [--csv benchmarks/results/h200.csv]

A preset gets random weights and a long context random bytes in its pages: speed does not depend on them. Beside the
step, with the host's share, stands its graph alone; `--kernels` adds the sum of that graph's kernels, by a process
that launches each after the one before (`cedar/kernels/triton/chain.py`), whose times are their own.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from kernels import COLUMNS
from layers import fill, kernels_of
from torch import Tensor

from cedar.cache.manager import CacheManager, Plan
from cedar.config.model import PAGE_TOKENS
from cedar.config.presets import preset
from cedar.engine.load import usual_step_tokens
from cedar.engine.request import SamplingParams
from cedar.engine.runner import DecodeRunner, Row
from cedar.engine.sampling import Sampler
from cedar.kernels.pages import Stored
from cedar.kernels.triton.chain import APART
from cedar.model.init import initialise
from cedar.model.moe import pack_weights, retile_experts
from cedar.model.transformer import Transformer
from cedar.planner.kv import page_bytes

# of the memory that is free: the rest is for scores and graphs
POOL_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Measured:
    """One number of rows at one context.

    Attributes:
        rate: Tokens a second, with the spread between fifths of the steps.
        first_ms: The first step: kernels are compiled, the graph is made.
        graph_us: The step's graph alone, with the spread between replays; None on a CPU.
        kernels: (name, microseconds) of each of its kernels.
    """

    rate: float
    spread: float
    first_ms: float
    graph_us: tuple[float, float] | None
    kernels: list[tuple[str, float]]


def open_model(arguments: argparse.Namespace, name: str) -> Transformer:
    if arguments.preset is None:
        from cedar.engine.load import load_model
        from cedar.engine.load import open_model as files

        return load_model(files(name), device=arguments.device, packed=arguments.packed)
    config = preset(name)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    model = Transformer(config, device=arguments.device, dtype=dtype)
    initialise(model, 1)
    if arguments.packed:
        pack_weights(model)
        retile_experts(model)
    model.token_map.set(torch.arange(config.vocab_size) % config.engram.compressed_vocab_size)
    for block in model.layers:
        if block.plan.engram:
            table = block.engram.embed
            size = table.num_rows, table.num_channels
            codes = torch.randint(0, 120, size, dtype=torch.uint8, device=arguments.device)
            table.set_packed(codes, torch.full((size[0], size[1] // 32), 120, dtype=torch.uint8, device=codes.device))
    return model


def random_ids(model: Transformer, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, model.config.vocab_size - 8, (count,), generator=generator).to(model.device)


def rows_of(model: Transformer, cache: CacheManager, count: int, context: int, steps: int) -> list[Row]:
    """Sequences of one random prompt, each with pages of its own full of random bytes; its last window alone is run."""
    prompt_T = random_ids(model, context)
    leases = [cache.lease((), b"", Plan()) for _ in range(count)]
    for lease in leases:
        assert cache.reserve(lease, context + steps + 1, 0), "the pool is too small"
    for part in cache.pool.layout.rows.values():
        fill(Stored(cache.pool.field(part.codes), cache.pool.field(part.scales), part.spec))
    cached = (context - 1) // 2 * 2
    first = model.new_state(make_store=cache.make_store(leases[0], cached))
    start = first.resume_bounded(prompt_T, cached)
    model.prefill(first, prompt_T[start:], prompt_tokens=context, last_only=True)
    snapshot = first.snapshot()
    states = [first]
    for lease in leases[1:]:
        states.append(model.new_state(make_store=cache.make_store(lease, context)))
        states[-1].restore(snapshot)
    return [
        Row(state, lease, [3], Sampler(SamplingParams(temperature=1.0, seed=number)))
        for number, (state, lease) in enumerate(zip(states, leases, strict=True))
    ]


def num_pages(count: int, context: int, steps: int) -> int:
    return count * -(-(context + steps + 1) // PAGE_TOKENS) + 2


def measure(model: Transformer, count: int, context: int, steps: int) -> Measured:
    cache = CacheManager(
        model.config, num_pages=num_pages(count, context, steps), dtype=model.dtype, device=model.device
    )
    on_gpu = model.device.type == "cuda"
    runner = DecodeRunner(model, cache, max_rows=count, max_context=context + steps + 1, capture=on_gpu)
    rows = rows_of(model, cache, count, context, steps)
    started = time.perf_counter()
    chosen, _ = runner.step(rows)
    first_ms = (time.perf_counter() - started) * 1e3
    assert min(chosen) >= 0
    rates = []
    part = max(steps // 5, 1)
    for _ in range(steps // part):
        started = time.perf_counter()
        for _ in range(part):
            rows = [Row(row.state, row.lease, [token], row.sampler) for row, token in zip(rows, chosen, strict=True)]
            for row, token in zip(rows, chosen, strict=True):
                row.sampler.take(token)
            chosen, _ = runner.step(rows)
        rates.append(count * part / (time.perf_counter() - started))
    graph_us, kernels = None, []
    if on_gpu:
        # the last step once more and once more: same places, same bytes
        *_, graph = runner._graphs.values()
        graph_us = replayed(graph.replay)
        if APART:
            kernels = kernels_of(graph.replay)
    return Measured(statistics.median(rates), max(rates) - min(rates), first_ms, graph_us, kernels)


def replayed(replay: Callable[[], None]) -> tuple[float, float]:
    """(median, spread) of a graph's microseconds, the host ahead of the device."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    marks[0].record()
    for mark in marks[1:]:
        replay()
        mark.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(stop) * 1e3 for start, stop in zip(marks[10:], marks[11:], strict=False)]
    return statistics.median(times), max(times) - min(times)


def measure_prefill(model: Transformer, num_tokens: int, chunk: int) -> float:
    """Seconds of a prompt, in chunks, the second time: the first one compiles kernels for each size of context."""
    cache = CacheManager(model.config, num_pages=num_tokens // PAGE_TOKENS + 2, dtype=model.dtype, device=model.device)
    prompt_T = random_ids(model, num_tokens)
    seconds = 0.0
    for _ in range(2):
        lease = cache.lease((), b"", Plan())
        assert cache.reserve(lease, num_tokens, 0)
        state = model.new_state(make_store=cache.make_store(lease, 0))
        started = time.perf_counter()
        for start in range(0, num_tokens, chunk):
            chunk_T = prompt_T[start : start + chunk]
            logits_TV = model.prefill(state, chunk_T, prompt_tokens=num_tokens, last_only=True)
        assert bool(logits_TV.isfinite().all())
        seconds = time.perf_counter() - started
        cache.release(lease)
    return seconds


def cases(model: Transformer, arguments: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """(rows, context) as asked for, as far as their pages fit."""
    for context in map(int, arguments.contexts.split(",")):
        for count in map(int, arguments.batches.split(",")):
            need = num_pages(count, context, arguments.steps) * page_bytes(model.config)
            if arguments.device == "cuda" and need > POOL_SHARE * torch.cuda.mem_get_info()[0]:
                print(f"{count} rows at {context} tokens: {need:,} bytes of pages do not fit", flush=True)
                continue
            yield count, context


def report(file: Path | None, op: str, case: str, us: float, spread: float, peer: str = "", peer_us: str = "") -> None:
    if file is None:
        return
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    fresh = not file.exists()
    with file.open("a", newline="") as target:
        writer = csv.writer(target)
        if fresh:
            writer.writerow(COLUMNS)
        today = datetime.date.today().isoformat()
        writer.writerow((today, commit, machine, op, case, f"{us:.2f}", f"{spread:.2f}", "", "", "", peer, peer_us))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--preset", help="one or more, by commas")
    parser.add_argument("--packed", action="store_true", help="FP8 and MXFP4 weights stay as they are stored")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", default="1,16,256")
    parser.add_argument("--contexts", default="512")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kernels", action="store_true", help="compare each graph with the sum of its kernels")
    parser.add_argument("--kernels-to", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=Path, help="with --kernels: each case's kernels, in files of this name")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--prefill", default="", help="time prompts of so many tokens instead")
    parser.add_argument("--chunk", type=int, help="tokens of a prompt at once; by default what the engine takes")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    apart = kernels_apart() if arguments.kernels and arguments.kernels_to is None else {}
    seen: dict[str, list[tuple[str, float]]] = {}
    for name in (arguments.preset or arguments.model).split(","):
        model = open_model(arguments, name)
        title = Path(name).name + (" packed" if model.packed else "")
        for num_tokens in map(int, filter(None, arguments.prefill.split(","))):
            chunk = arguments.chunk or usual_step_tokens(model)
            seconds = measure_prefill(model, num_tokens, chunk)
            print(
                f"{title}: a prompt of {num_tokens} tokens in chunks of {chunk}: {seconds:.2f} s, "
                f"{num_tokens / seconds:,.0f} tokens/s",
                flush=True,
            )
            report(arguments.csv, "prefill", f"{title} T={num_tokens} in {chunk}", seconds * 1e6, 0.0)
        for count, context in () if arguments.prefill else cases(model, arguments):
            measured = measure(model, count, context, arguments.steps)
            case = f"{title} B={count} T={context}"
            if arguments.kernels_to is not None:
                seen[case] = measured.kernels
                continue
            step_us = 1e6 * count / measured.rate
            print(
                f"{title}: {count} rows at {context} tokens: {measured.rate:,.0f} tokens/s (spread "
                f"{measured.spread:,.0f}), {step_us:,.0f} us a step, first step {measured.first_ms:,.0f} ms",
                flush=True,
            )
            report(arguments.csv, "decode", case, step_us, step_us * measured.spread / measured.rate)
            if measured.graph_us is None:
                continue
            kernels = apart.get(case, [])
            peer, peer_us, more = "", "", ""
            if kernels:
                summed = sum(us for _, us in kernels)
                peer, peer_us = f"sum of {len(kernels)} kernels", f"{summed:.2f}"
                more = f", its {len(kernels)} kernels one by one {summed:,.0f} us, x{measured.graph_us[0] / summed:.2f}"
            print(f"    its graph {measured.graph_us[0]:,.0f} us{more}", flush=True)
            report(arguments.csv, "decode_graph", case, *measured.graph_us, peer, peer_us)
            if arguments.profile is not None:
                file = arguments.profile.with_name(f"{arguments.profile.stem}-{case.replace(' ', '-')}.txt")
                file.write_text("".join(f"{us:10.2f} us {kernel[:100]}\n" for kernel, us in kernels))
    if arguments.kernels_to is not None:
        arguments.kernels_to.write_text(json.dumps(seen))


def kernels_apart() -> dict[str, list[tuple[str, float]]]:
    """Each case's kernels, from a process that launches none ahead of another."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.json"
        command = [sys.executable, *sys.argv, "--kernels-to", str(file), "--steps", "5"]
        subprocess.run(command, env={**os.environ, "CEDAR_LAUNCH": "apart"}, stdout=subprocess.DEVNULL, check=True)
        kernels: dict[str, list[tuple[str, float]]] = json.loads(file.read_text())
    return kernels


if __name__ == "__main__":
    main()
