"""What Engram's tables cost where they lie: memory, time to load, prefill and decode of one model in three placements.

`python -m benchmarks.engram` makes a checkpoint whose tables are large beside the rest, random throughout, and runs
each placement in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PLACES = ("memory", "mapped", "disk")
PROMPT_TOKENS, ANSWER_TOKENS, CHUNK = 2048, 64, 256


def make_checkpoint(directory: Path, vocab_size: int) -> int:
    """A nano with tables of about `vocab_size` rows a column; their bytes."""
    import torch

    from cedar.checkpoint.write import write_checkpoint
    from cedar.config.load import override
    from cedar.config.presets import nano
    from cedar.model.init import initialise
    from cedar.model.transformer import Transformer

    config = override(nano(), [f"engram.vocab_size={vocab_size}"])
    torch.manual_seed(0)
    model = Transformer(config, table_device="meta")
    total = 0
    for block in model.layers:
        if block.plan.engram:
            table = block.engram.embed
            codes = torch.randint(0, 120, (table.num_rows, table.num_channels), dtype=torch.uint8)
            scales = torch.randint(118, 124, (table.num_rows, table.num_channels // 32), dtype=torch.uint8)
            table.set_packed(codes, scales)
            total += codes.numel() + scales.numel()
    initialise(model, seed=0)
    write_checkpoint(model, directory)
    return total


def measure(directory: Path, place: str, cache_bytes: int) -> dict[str, float | str]:
    """One placement, in this process."""
    import psutil
    import torch

    from cedar.checkpoint.read import read_checkpoint

    process = psutil.Process()
    before = process.memory_info()
    began = time.perf_counter()
    model = read_checkpoint(directory, engram=place, engram_cache_bytes=cache_bytes)  # type: ignore[arg-type]
    loaded = time.perf_counter() - began
    generator = torch.Generator().manual_seed(1)
    model.token_map.set(
        torch.randint(0, model.config.engram.compressed_vocab_size, (model.config.vocab_size,), generator=generator)
    )
    ids_T = torch.randint(3, model.config.vocab_size - 8, (PROMPT_TOKENS + ANSWER_TOKENS,), generator=generator)
    state = model.new_state()
    began = time.perf_counter()
    for start in range(0, PROMPT_TOKENS, CHUNK):
        model.prefetch(ids_T[start + CHUNK - 2 : start + 2 * CHUNK].tolist())
        model.prefill(state, ids_T[start : start + CHUNK], prompt_tokens=PROMPT_TOKENS, last_only=True)
    prefill = time.perf_counter() - began
    began = time.perf_counter()
    checksum = 0.0
    for place_ in range(PROMPT_TOKENS, PROMPT_TOKENS + ANSWER_TOKENS):
        checksum += float(model.decode(state, ids_T[place_ : place_ + 1]).sum())
    decode = time.perf_counter() - began
    after = process.memory_info()
    return {
        "place": place,
        "load_s": loaded,
        # what the machine cannot take back, and all that it holds now, pages of mapped files with it
        "own_mib": ((after.rss - after.shared) - (before.rss - before.shared)) / 2**20,
        "resident_mib": (after.rss - before.rss) / 2**20,
        "prefill_tokens_s": PROMPT_TOKENS / prefill,
        "decode_tokens_s": ANSWER_TOKENS / decode,
        "checksum": checksum,
        **model.memory_stats(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=1_000_003, help="rows of a column")
    parser.add_argument("--cache-mib", type=int, default=32, help="rows that `disk` keeps")
    parser.add_argument("--one", nargs=2, metavar=("DIR", "PLACE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(Path(options.one[0]), options.one[1], options.cache_mib * 2**20)))
        return
    with tempfile.TemporaryDirectory() as directory:
        total = make_checkpoint(Path(directory), options.vocab_size)
        print(f"tables of {total / 2**20:.0f} MiB")
        for place in PLACES:
            command = [sys.executable, "-m", "benchmarks.engram", "--cache-mib", str(options.cache_mib)]
            told = subprocess.run([*command, "--one", directory, place], check=True, capture_output=True, text=True)
            print(told.stdout.strip())


if __name__ == "__main__":
    main()
