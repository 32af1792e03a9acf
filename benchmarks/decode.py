"""Decode speed of a model on a GPU: graphs, sampling included, tokens a second at some batch sizes.

    python benchmarks/decode.py [--model DIR | --preset mini] [--batches 1,16,256] [--context 512] [--profile FILE]

A preset gets random weights: speed does not depend on them. Prints a table; `--csv FILE` appends rows.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import logging
import statistics
import subprocess
import time
from pathlib import Path

import torch

from cedar.cache.manager import CacheManager, Plan
from cedar.config.presets import preset
from cedar.engine.request import SamplingParams
from cedar.engine.runner import DecodeRunner, Row
from cedar.engine.sampling import Sampler
from cedar.model.init import initialise
from cedar.model.transformer import Transformer


def open_model(arguments: argparse.Namespace) -> Transformer:
    if arguments.preset is None:
        from cedar.engine.load import load_model
        from cedar.engine.load import open_model as files

        return load_model(files(arguments.model), device=arguments.device)
    config = preset(arguments.preset)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    model = Transformer(config, device=arguments.device, dtype=dtype)
    initialise(model, 1)
    model.token_map.set(torch.arange(config.vocab_size) % config.engram.compressed_vocab_size)
    for block in model.layers:
        if block.plan.engram:
            table = block.engram.embed
            size = table.num_rows, table.num_channels
            codes = torch.randint(0, 120, size, dtype=torch.uint8, device=arguments.device)
            table.set_packed(codes, torch.full((size[0], size[1] // 32), 120, dtype=torch.uint8, device=codes.device))
    return model


def rows_of(model: Transformer, cache: CacheManager, count: int, context: int, steps: int) -> list[Row]:
    """Sequences of the same random prompt, each with pages of its own."""
    generator = torch.Generator().manual_seed(3)
    prompt_T = torch.randint(0, model.config.vocab_size - 8, (context,), generator=generator).to(model.device)
    rows: list[Row] = []
    snapshot = None
    for number in range(count):
        lease = cache.lease((), b"", Plan())
        assert cache.reserve(lease, context + steps + 1, 0), "the pool is too small"
        if snapshot is None:
            state = model.new_state(make_store=cache.make_store(lease, 0))
            for start in range(0, context, 4096):
                model.prefill(state, prompt_T[start : start + 4096], prompt_tokens=context, last_only=True)
            snapshot = state.snapshot()
        else:
            # the first one's bytes, on pages of its own
            for part in cache.pool.layout.rows.values():
                for plane_PNX in (cache.pool.field(part.codes), cache.pool.field(part.scales)):
                    plane_PNX[lease.table.pages] = plane_PNX[rows[0].lease.table.pages]
            state = model.new_state(make_store=cache.make_store(lease, context))
            state.restore(snapshot)
        rows.append(Row(state, lease, [3], Sampler(SamplingParams(temperature=1.0, seed=number))))
    return rows


def measure(
    model: Transformer, count: int, context: int, steps: int, profile: Path | None
) -> tuple[float, float, float]:
    """(tokens a second, spread, milliseconds of the first step)."""
    pages = count * (-(-(context + steps + 1) // 128)) + 2
    cache = CacheManager(model.config, num_pages=pages, dtype=model.dtype, device=model.device)
    runner = DecodeRunner(
        model, cache, max_rows=count, max_context=context + steps + 1, capture=model.device.type == "cuda"
    )
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
    if profile is not None and model.device.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(3):
                runner.step(rows)
        table = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=60)
        profile.write_text(table)
    return statistics.median(rates), max(rates) - min(rates), first_ms


def measure_prefill(model: Transformer, num_tokens: int, chunk: int) -> float:
    """Seconds of a prompt, in chunks, the second time."""
    cache = CacheManager(model.config, num_pages=num_tokens // 128 + 2, dtype=model.dtype, device=model.device)
    generator = torch.Generator().manual_seed(3)
    prompt_T = torch.randint(0, model.config.vocab_size - 8, (num_tokens,), generator=generator).to(model.device)
    seconds = 0.0
    # a short prompt first: kernels are compiled
    for stop in (min(2 * chunk, num_tokens), num_tokens):
        lease = cache.lease((), b"", Plan())
        assert cache.reserve(lease, stop, 0)
        state = model.new_state(make_store=cache.make_store(lease, 0))
        started = time.perf_counter()
        for start in range(0, stop, chunk):
            logits_TV = model.prefill(state, prompt_T[start : start + chunk], prompt_tokens=stop, last_only=True)
        assert bool(logits_TV.isfinite().all())
        seconds = time.perf_counter() - started
        cache.release(lease)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--preset")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", default="1,16,256")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--prefill", type=int, default=0, help="time a prompt of so many tokens instead")
    parser.add_argument("--chunk", type=int, default=4096)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    model = open_model(arguments)
    name = arguments.preset or Path(arguments.model).name
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    if arguments.prefill:
        seconds = measure_prefill(model, arguments.prefill, arguments.chunk)
        print(
            f"{name}: a prompt of {arguments.prefill} tokens in chunks of {arguments.chunk}: {seconds:.2f} s, "
            f"{arguments.prefill / seconds:,.0f} tokens/s",
            flush=True,
        )
        return
    for count in map(int, arguments.batches.split(",")):
        profile = None if arguments.profile is None else arguments.profile.with_suffix(f".{count}.txt")
        rate, spread, first_ms = measure(model, count, arguments.context, arguments.steps, profile)
        print(
            f"{name}: {count} rows at {arguments.context} tokens: {rate:,.0f} tokens/s (spread {spread:,.0f}), "
            f"{1e6 * count / rate:,.0f} us a step, first step {first_ms:,.0f} ms",
            flush=True,
        )
        if arguments.csv is not None:
            fresh = not arguments.csv.exists()
            with arguments.csv.open("a", newline="") as file:
                writer = csv.writer(file)
                if fresh:
                    writer.writerow(
                        ["date", "commit", "machine", "model", "rows", "context", "tokens_s", "spread", "us_a_step"]
                    )
                writer.writerow(
                    [
                        datetime.date.today().isoformat(),
                        commit,
                        machine,
                        name,
                        count,
                        arguments.context,
                        round(rate),
                        round(spread),
                        round(1e6 * count / rate),
                    ]  # fmt: skip
                )


if __name__ == "__main__":
    main()
