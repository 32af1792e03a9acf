"""Prefill and decode of a model on the CPU: tokens a second, and where the time goes.

    python benchmarks/cpu.py [--model DIR] [--threads 2] [--profile]

Appends rows to `benchmarks/results/cpu.csv`. Each case runs through the default kernels and, as the peer of the same
run, through the plain torch references. The limit of decode is the time to read the active weights once at the copy
bandwidth measured in the same run; that of prefill is its products at the measured float32 matrix rate.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import datetime
import io
import platform
import pstats
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

# sets the thread policy that torch reads when it loads
import cedar  # noqa: F401  isort: skip
import torch

from cedar.engine.load import load_model, open_model
from cedar.kernels.dispatch import use_kernels
from cedar.model.transformer import Transformer
from cedar.planner import flops
from cedar.planner.memory import active_decode_parameters, active_prefill_parameters

RESULTS = Path(__file__).parent / "results"
COLUMNS = "date commit machine op case us_median us_spread tokens_per_s bytes flops limit_fraction peer peer_us".split()


def machine() -> str:
    """Processor, cores used and torch, as the results file names them."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model} {torch.get_num_threads()} threads torch {torch.__version__}"


def commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def seconds(body: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(median, half of the spread between the quartiles) of `repeats` runs after one that warms up."""
    body()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        body()
        times.append(time.perf_counter() - start)
    quarters = statistics.quantiles(times, n=4)
    return statistics.median(times), (quarters[2] - quarters[0]) / 2


def copy_bandwidth() -> float:
    """Bytes a second read plus written by a copy that fits no cache."""
    source = torch.empty(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    median, _ = seconds(lambda: target.copy_(source), 9)
    return 2 * source.numel() / median


def matrix_rate() -> float:
    """float32 operations a second of a product of 1,024."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    out = torch.empty(1024, 1024)
    median, _ = seconds(lambda: torch.mm(a, b, out=out), 9)
    return 2 * 1024**3 / median


def prefill_case(model: Transformer, num_tokens: int, chunk: int) -> Callable[[], None]:
    ids_T = torch.randint(3, model.config.vocab_size - 8, (num_tokens,))

    def body() -> None:
        state = model.new_state()
        for part in ids_T.split(chunk):
            model.prefill(state, part, prompt_tokens=num_tokens, last_only=True)

    return body


def decode_case(model: Transformer, context: int, num_tokens: int) -> Callable[[], None]:
    ids_T = torch.randint(3, model.config.vocab_size - 8, (context,))
    state = model.new_state()
    model.prefill(state, ids_T, last_only=True)
    one_T = ids_T[:1]

    def body() -> None:
        for _ in range(num_tokens):
            model.decode(state, one_T)

    return body


def profile(body: Callable[[], None], lines: int = 25) -> str:
    """The functions of cedar by the time spent in them and below."""
    profiler = cProfile.Profile()
    body()
    profiler.runcall(body)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(lines)
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="checkpoint directory; the bundled model if left out")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="also write results/cpu-profile.txt")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    opened = open_model(given.model)
    model = load_model(opened)
    name = opened.name
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    print(f"{machine()}: copy {bandwidth / 1e9:.1f} GB/s, float32 products {rate / 1e9:.0f} GFLOP/s")
    # float32 weights on the CPU
    decode_bytes = 4 * active_decode_parameters(model.config)
    rows = []
    cases: list[tuple[str, str, int, Callable[[], None]]] = [
        ("prefill", f"{name} 2048 tokens in chunks of 256", 2048, prefill_case(model, 2048, 256)),
        ("decode", f"{name} batch 1 at 64", 100, decode_case(model, 64, 100)),
        ("decode", f"{name} batch 1 at 2048", 100, decode_case(model, 2048, 100)),
        ("decode", f"{name} batch 1 at 16384", 50, decode_case(model, 16384, 50)),
    ]
    for op, case, num_tokens, body in cases:
        median, spread = seconds(body, given.repeats)
        with use_kernels("reference"):
            peer, _ = seconds(body, 3)
        decode_flops = sum(flops.decode_flops(model.config, 2048).values())
        num_flops = decode_flops if op == "decode" else 2 * active_prefill_parameters(model.config)
        limit = decode_bytes / bandwidth if op == "decode" else num_flops / rate
        per_token = median / num_tokens
        rows.append(
            [
                datetime.date.today().isoformat(),
                commit(),
                machine(),
                op,
                case,
                f"{per_token * 1e6:.1f}",
                f"{spread / num_tokens * 1e6:.1f}",
                f"{1 / per_token:.0f}",
                decode_bytes if op == "decode" else "",
                int(num_flops),
                f"{limit / per_token:.3f}",
                "plain torch references",
                f"{peer / num_tokens * 1e6:.1f}",
            ]
        )
        print(
            f"{op:8} {case:44} {1 / per_token:8.0f} tokens/s  "
            f"({limit / per_token:.1%} of the limit; references {num_tokens / peer:.0f})"
        )
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / "cpu.csv"
    new = not file.exists()
    with file.open("a", newline="") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        writer.writerows(rows)
    if given.profile:
        text = "\n".join(
            f"{title}\n{profile(body)}"
            for title, body in (
                ("prefill of 2,048 tokens in chunks of 256", prefill_case(model, 2048, 256)),
                ("decode of 100 tokens at 2,048", decode_case(model, 2048, 100)),
            )
        )
        (RESULTS / "cpu-profile.txt").write_text(text)


if __name__ == "__main__":
    main()
