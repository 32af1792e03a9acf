"""One layer of each of CSA2's modes at the release's shape, holding random bytes as a checkpoint stores them.

    python benchmarks/layers.py [--modes full_r1,reuse] [--batches 1,32] [--contexts 4096,131072,1048576] [--csv FILE]

Decode: the layer as `SlotDecoder` runs it, in a captured graph, with a cold L2 (`benchmarks/kernels.py: Clock`); how
many kernels that is, and the sum of its parts' floors, a part's being the larger of its bytes over the card's copy
rate and its operations over its bf16 rate. Then all layers of the model from one of each mode, a prompt's chunk
(`--prefill 4096`), and what a pool of a million tokens takes of the card's memory. With `CEDAR_LAUNCH=apart` in the
environment no kernel is launched ahead of another, and `--profile` gives each its own time.

A cold cache is what a layer finds in a model of many, but for its kernels' own code: `--row 4` times that.

B rows, T tokens of context.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from kernels import COLUMNS, Clock, ceilings
from torch import Tensor

from cedar.cache.manager import CacheManager
from cedar.config.layers import LayerKind, LayerPlan, layer_plans
from cedar.config.model import PAGE_TOKENS, ModelConfig
from cedar.config.presets import preset
from cedar.config.rounding import Rounding
from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8
from cedar.kernels import indexer
from cedar.kernels.dispatch import use_kernels
from cedar.kernels.experts import Packed
from cedar.kernels.mhc import Entered
from cedar.kernels.pages import Stored
from cedar.kernels.triton.chain import APART
from cedar.model.block import Block
from cedar.model.decode import DecodeLayer, DecodeSlots, DecodeStep
from cedar.model.layers import Linear, Tiles
from cedar.model.moe import Experts
from cedar.model.rope import Rope
from cedar.model.sequence import SequenceState, SequenceStep
from cedar.model.state import SharedKV
from cedar.planner.kv import global_bytes_per_token

DTYPE = torch.bfloat16


class Floor(NamedTuple):
    """The least that one part of a layer can be."""

    bytes: float
    flops: float

    def us(self, copy: float, products: float) -> float:
        return max(self.bytes / copy, self.flops / products) * 1e6


def modes(config: ModelConfig) -> dict[str, tuple[LayerPlan, int]]:
    """A layer of each mode, the last one and one without Engram if there is, and how many of the mode there are."""
    plans = sorted(layer_plans(config), key=lambda plan: not plan.engram)
    counts = Counter(map(_mode, plans))
    return {_mode(plan): (plan, counts[_mode(plan)]) for plan in plans}


def _mode(plan: LayerPlan) -> str:
    return f"full_r{plan.ratio}" if plan.kind is LayerKind.FULL else plan.kind.value


def release_block(config: ModelConfig, plan: LayerPlan, device: str) -> Block:
    """A layer of random weights: FP8 and MXFP4 as stored, the rest as a model holds it; no product grows its input."""
    block = Block(config, plan, Rope(config, device), device=device, dtype=DTYPE, quantized_device="meta")
    for name, parameter in block.named_parameters():
        if parameter.is_meta:
            continue
        if name.endswith(("norm.weight", "scale")):
            torch.nn.init.ones_(parameter)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            # the module may widen it, a checkpoint holds it in bfloat16
            parameter.copy_(parameter.bfloat16())
        else:
            torch.nn.init.normal_(parameter, std=0.1)
    for module in block.modules():
        if isinstance(module, Linear) and module.storage == "fp8":
            outputs, inputs = module.weight.shape
            codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, device=device) & 0xBF
            scales = _scales((-(-outputs // 32), -(-inputs // 32)), inputs, 0.6, device)
            module.set_packed(Tiles(codes, scales))
        if isinstance(module, Experts):
            module.set_packed({name: _experts(getattr(module, name), device) for name in ("w1", "w3", "w2")})
            module.retile()
    return block


def _experts(weight: Tensor, device: str) -> Packed:
    count, outputs, inputs = weight.shape
    codes = torch.randint(0, 256, (count, outputs, inputs // 2), dtype=torch.uint8, device=device)
    return Packed(codes, _scales((count, outputs, inputs // 32), inputs, 3.0, device))


def _scales(shape: tuple[int, ...], inputs: int, spread: float, device: str) -> Tensor:
    """E8M0 bytes that bring random codes of this spread to about 1 / sqrt(inputs)."""
    middle = 127 - round(torch.tensor(spread * inputs**0.5).log2().item())
    return torch.randint(middle - 1, middle + 2, shape, dtype=torch.uint8, device=device)


def floors(
    config: ModelConfig, plan: LayerPlan, rows: int, context: int, hit: int, *, all_rows: int | None = None
) -> dict[str, Floor]:
    """The parts of a layer (spec/performance.md 1): bytes of inputs, outputs and weights once each, and operations.

    Args:
        context: Tokens a row sees.
        hit: Routed experts that any row chose.
        all_rows: Rows that write entries, if more than run the layer (a prompt's chunk).
    """
    attention, moe, index = config.attention, config.moe, config.indexer
    hidden, channels = config.hidden_size, attention.head_dim
    heads = attention.num_heads * channels
    latent, grouped = attention.q_lora_rank, attention.o_groups * attention.o_lora_rank
    writers = rows if all_rows is None else all_rows

    def product(outputs: int, inputs: int, weight_bytes: float, rows: int = rows, outer: int | None = None) -> Floor:
        """Rows of bf16 in and out; `outer` inputs where the weight is one of groups."""
        moved = outputs * inputs * weight_bytes + rows * 2 * ((outer or inputs) + outputs)
        return Floor(moved, rows * 2 * outputs * inputs)

    fp8, mxfp4 = 1 + 1 / 1024, 17 / 32
    seen = 0 if plan.ratio == 0 else min(context // plan.ratio, index.topk)
    window = min(context, attention.sliding_window)
    mix = Floor(24 * 4 * hidden * 4 + rows * 10 * hidden * 2, rows * 2 * 24 * 4 * hidden)
    parts = {
        "mhc": Floor(2 * mix.bytes, 2 * mix.flops),
        "wq_a, wkv": product(latent + channels, hidden, fp8, writers),
        "window write": Floor(writers * (2 * channels + FP8.vector_bytes(channels)), 0),
        "wq_b": product(heads, latent, fp8),
        "attention": Floor(
            rows * (window * FP8.vector_bytes(channels) + seen * FP4_MAIN.vector_bytes(channels) + 4 * heads),
            rows * 4 * heads * (window + seen),
        ),
        "wo_a": product(grouped, heads // attention.o_groups, fp8, outer=heads),
        "wo_b": product(hidden, grouped, fp8),
        "gate": product(moe.num_routed_experts, hidden, 2),
        "shared": Floor(3 * moe.inner_size * hidden * fp8 + rows * 4 * hidden, rows * 6 * moe.inner_size * hidden),
        "routed": Floor(
            hit * 3 * moe.inner_size * hidden * mxfp4 + rows * 4 * hidden,
            rows * moe.num_experts_per_token * 6 * moe.inner_size * hidden,
        ),
    }
    key_bytes = FP4_INDEX.vector_bytes(index.head_dim)
    score_flops = 2 * index.num_heads * index.head_dim
    if plan.writes_entries:
        entry = product(channels * plan.ratio, hidden, 2, writers)
        key = product(index.head_dim, channels, 2, writers // plan.ratio)
        parts["compressor"], parts["index key"] = entry, key
    if plan.selects:
        query, weight = product(index.num_heads * index.head_dim, latent, fp8), product(index.num_heads, hidden, 2)
        parts["index query"] = Floor(query.bytes + weight.bytes, query.flops + weight.flops)
        blocks = min(index.candidate_topk_blocks, context // plan.ratio // index.candidate_block_size)
        scored = blocks * index.candidate_block_size if plan.uses_pool else context // plan.ratio
        if plan.uses_pool:
            parts["reindex"] = Floor(rows * (scored * key_bytes + blocks * 8 + seen * 8), rows * scored * score_flops)
        else:
            parts["index logits"] = Floor(rows * scored * (key_bytes + 4), rows * scored * score_flops)
            parts["top-k"] = Floor(rows * scored * 4, 0)
    return parts


class Bench:
    """One layer and so many sequences of one length, all pages of their own and full of random bytes."""

    def __init__(self, config: ModelConfig, block: Block, rows: int, context: int, device: str) -> None:
        self.config, self.block, self.rows, self.context = config, block, rows, context
        self.layer = DecodeLayer(block)
        num_pages = rows * -(-context // PAGE_TOKENS)
        cache = CacheManager(config, num_pages=num_pages + 1, dtype=DTYPE, device=torch.device(device))
        idle_page = cache.pool.take()
        stored = {}
        for place, part in cache.pool.layout.rows.items():
            stored[place] = Stored(cache.pool.field(part.codes), cache.pool.field(part.scales), part.spec)
            if place[1] == block.plan.kv_source:
                fill(stored[place])
        pages = num_pages // rows
        slots = DecodeSlots(
            config, stored, num_slots=rows, max_pages=pages, idle_page=idle_page, device=torch.device(device)
        )
        fill(slots.windows[block.plan.layer])
        page_P = torch.arange(num_pages + 1, device=device)
        page_P = page_P[page_P != idle_page][torch.randperm(num_pages, device=device)]
        slots.page_SP[:rows, :pages] = page_P.view(rows, -1)
        for ring in slots.tails.values():
            for plane in ring:
                plane.normal_()
        slot_T = torch.arange(rows, device=device)
        # the last token of a pair, so that entries of either ratio are completed
        position_T = torch.full((rows,), context - 1, device=device)
        self.step = DecodeStep(slots, Rope(config, device), slot_T, position_T, context=context)
        hidden, streams = config.hidden_size, config.mhc.num_streams
        self.y_TD = torch.randn(rows, hidden, device=device, dtype=DTYPE)
        self.streams_TND = torch.randn(rows, streams, hidden, device=device, dtype=DTYPE)
        self.post_TN, self.premix_TN = (torch.rand(rows, streams, device=device) for _ in range(2))
        self.mixing_TNN = torch.rand(rows, streams, streams, device=device) / streams
        self.image_T = torch.zeros(rows, device=device, dtype=torch.bool)
        self.shared = shared_rows(config, block.plan, position_T, context)

    def run(self, before: tuple[Tensor, Entered] | None = None) -> tuple[Tensor, Entered]:
        """The layer, as `SlotDecoder` runs it, behind another one."""
        entered, latent_TX = self.enter(before)
        y_TD, _ = self.layer.attend(self.step, entered, latent_TX, self.shared, FP8)
        return self.layer.run_experts(y_TD, entered, self.image_T, FP8)

    def enter(self, before: tuple[Tensor, Entered] | None = None) -> tuple[Entered, Tensor]:
        if before is not None:
            y_TD, last = before
            streams = last.streams_TND, last.post_TN, last.mixing_TNN, last.premix_TN
            return self.layer.enter(y_TD, *streams, FP8)
        streams = self.streams_TND, self.post_TN, self.mixing_TNN, self.premix_TN
        return self.layer.enter(self.y_TD, *streams, FP8)

    def attend(self) -> tuple[Tensor, SharedKV]:
        return self.layer.attend(self.step, *self.enter(), self.shared, FP8)

    def num_hit(self) -> int:
        """Routed experts that the rows choose."""
        _, entered = self.run()
        ids_TK, _, _ = self.block.ffn.gate(entered.normed_TD, None, Rounding())
        return int(ids_TK.unique().numel())


def fill(stored: Stored) -> None:
    """Random codes under sane scales."""
    stored.codes_PNX.random_(0, 256)
    if stored.spec == FP8:
        stored.codes_PNX.bitwise_and_(0xBF)
    # E4M3 of about 1/4 to 2, or powers of two around 1
    stored.scales_PNG.random_(*((44, 64) if stored.spec == FP4_MAIN else (125, 129)))


def shared_rows(config: ModelConfig, plan: LayerPlan, position_T: Tensor, context: int) -> SharedKV:
    """What the layer before leaves: a random selection and a random candidate pool."""
    if plan.ratio == 0 or plan.kind is LayerKind.FULL:
        return SharedKV()
    score_TE = torch.rand(position_T.shape[0], context // plan.ratio, device=position_T.device)
    visible_T = (position_T + 1) // plan.ratio
    score_TE.masked_fill_(torch.arange(score_TE.shape[1], device=position_T.device) >= visible_T[:, None], -torch.inf)
    if plan.kind is LayerKind.REUSE:
        return SharedKV(indexer.top_entries(score_TE, config.indexer.topk))
    size, blocks = config.indexer.candidate_block_size, config.indexer.candidate_topk_blocks
    return SharedKV(None, indexer.top_blocks(score_TE, visible_T, block_size=size, topk_blocks=blocks))


def kernels_of(call: Callable[[], object]) -> list[tuple[str, float]]:
    """(name, microseconds) of each kernel that a call starts, in order."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [(event.name, event.time_range.elapsed_us()) for event in sorted(events, key=lambda e: e.time_range.start)]


def run_row(benches: list[Bench]) -> tuple[Tensor, Entered]:
    """Layers one behind the other, each of weights of its own."""
    before = None
    for bench in benches:
        before = bench.run(before)
    assert before is not None
    return before


def difference(bench: Bench) -> float:
    """How far attention's output is from the references', relative; experts are checked op by op elsewhere.

    Of a layer that selects: the share of entries that only one of them chose. Queries that differ by a rounding rank
    random keys a little differently, and what is not the same cannot be compared.
    """
    got, got_shared = bench.attend()
    with use_kernels("reference"):
        want, want_shared = bench.attend()
    if bench.block.plan.selects and got_shared.selection is not None and want_shared.selection is not None:
        pairs = zip(got_shared.selection.tolist(), want_shared.selection.tolist(), strict=True)
        return max(1 - len(set(one) & set(other)) / len(set(one) | set(other)) for one, other in pairs)
    return float((got.float() - want.float()).norm() / want.float().norm())


@dataclass
class Chunk:
    """A prompt's last chunk through one layer, as `Transformer.prefill` runs it: decoder layers on its last window.

    The prompt has `context` tokens; those before the chunk have entries already.
    """

    config: ModelConfig
    block: Block
    num_tokens: int
    context: int
    device: str

    def __post_init__(self) -> None:
        plan, device = self.block.plan, self.device
        self.rope = Rope(self.config, device)
        hidden, streams = self.config.hidden_size, self.config.mhc.num_streams
        self.streams_TND = torch.randn(self.num_tokens, streams, hidden, device=device, dtype=DTYPE)
        self.premix_TN = torch.rand(self.num_tokens, streams, device=device)
        self.image_T = torch.zeros(self.num_tokens, device=device, dtype=torch.bool)
        window = self.config.attention.sliding_window
        self.num_run = min(window, self.num_tokens) if plan.decoder else self.num_tokens
        position_T = torch.arange(self.context - self.num_run, self.context, device=device)
        self.shared = shared_rows(self.config, plan, position_T, self.context)
        if self.shared.pool is not None and device == "cpu":
            # a prefill that does not read keys in place passes a pool on as marks
            num_blocks = -(-self.context // plan.ratio // self.config.indexer.candidate_block_size)
            marks_TN = torch.zeros(self.num_run, num_blocks + 1, device=device, dtype=torch.bool)
            block_TN = self.shared.pool
            marks_TN.scatter_(1, torch.where(block_TN < 0, num_blocks, block_TN), True)
            self.shared = SharedKV(None, marks_TN[:, :num_blocks])

    def state(self) -> SequenceState:
        state = SequenceState(
            self.config,
            self.rope,
            rounding=Rounding(),
            dtype=DTYPE,
            device=torch.device(self.device),
            decoder_replay="bounded",
            selection_rule="learned",
        )
        plan, start = self.block.plan, self.context - self.num_tokens
        if plan.kv_source is not None:
            attention, index = self.config.attention, self.config.indexer
            count = (start if plan.writes_entries else self.context) // plan.ratio
            for store, channels in (
                (state.entries[plan.kv_source], attention.head_dim),
                (state.keys[plan.kv_source], index.head_dim),
            ):
                store.append(torch.randn(count, channels, device=self.device, dtype=DTYPE))
        state.num_tokens = start
        state.begin_prompt(self.context)
        return state

    def run(self, state: SequenceState) -> Tensor:
        block, step = self.block, SequenceStep(state, self.context - self.num_tokens, self.context)
        mixes, u_TD = block.enter(self.streams_TND, self.premix_TN)
        block.attn.write_entries(u_TD, step)
        _, writing = step.window_rows(block.plan.layer, cut=False)
        if writing is not None:
            block.attn.write_window(u_TD, writing)
        kept, running = step.layer_rows(block.plan.layer)
        assert running is not None and (kept is None or isinstance(kept, slice))
        streams_TND, image_T = self.streams_TND, self.image_T
        if kept is not None:
            streams_TND, u_TD, mixes, image_T = streams_TND[kept], u_TD[kept], mixes.rows(kept), image_T[kept]
        _, writing = running.window_rows(block.plan.layer, cut=True)
        if writing is not None:
            block.attn.write_window(u_TD, writing)
        streams_TND, _ = block.attend(streams_TND, mixes, u_TD, running, self.shared)
        return block.feed(streams_TND, mixes.premix_TN, image_T, running)[0]


def timed(call: Callable[[SequenceState], Tensor], make: Callable[[], SequenceState]) -> tuple[float, float]:
    """(median, spread) in microseconds, each call over a fresh state."""
    times = []
    for _ in range(6):
        state = make()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        output = call(state)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
        assert bool(output.isfinite().all())
    # the first one compiles
    return statistics.median(times[1:]), max(times[1:]) - min(times[1:])


def pool_bytes(config: ModelConfig, tokens: int = 2**20) -> tuple[float, float]:
    """Bytes a token that the allocator gives for the pages of so many tokens, and for the slot of one such sequence."""
    device = torch.device("cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    cache = CacheManager(config, num_pages=tokens // PAGE_TOKENS, dtype=DTYPE, device=device)
    pages = torch.cuda.memory_allocated() - before
    rows = {
        place: Stored(cache.pool.field(part.codes), cache.pool.field(part.scales), part.spec)
        for place, part in cache.pool.layout.rows.items()
    }
    before = torch.cuda.memory_allocated()
    held = DecodeSlots(config, rows, num_slots=1, max_pages=tokens // PAGE_TOKENS, idle_page=0, device=device)
    slot = torch.cuda.memory_allocated() - before
    del held
    # one of two places is where idle rows write
    return pages / tokens, slot / 2 / tokens


def cases(arguments: argparse.Namespace) -> Iterator[tuple[int, int]]:
    for context in map(int, arguments.contexts.split(",")):
        for rows in map(int, arguments.batches.split(",")):
            yield rows, context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="flash")
    parser.add_argument("--device", default="cuda", help="on a CPU everything runs once and nothing is timed")
    parser.add_argument("--modes", help="all by default")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--contexts", default="4096,131072,1048576")
    parser.add_argument(
        "--prefill", type=int, default=0, help="also time the last so many tokens of a prompt of each context"
    )
    parser.add_argument("--row", type=int, default=1, help="also time so many layers of a mode one behind the other")
    parser.add_argument("--profile", action="store_true", help="print each case's kernels and the parts' floors")
    parser.add_argument("--compile", action="store_true", help="run each case once and time nothing")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    config, device = preset(arguments.preset), arguments.device
    timing = device == "cuda" and not arguments.compile
    machine = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    copy, products = ceilings() if timing else (1.0, 1.0)
    if timing:
        print(f"{machine}: copy {copy / 1e12:.2f} TB/s, bf16 {products / 1e12:.0f} TFLOP/s", flush=True)
        pages, slot = pool_bytes(config)
        planned = global_bytes_per_token(config)
        print(
            f"a pool of 2**20 tokens: {pages:.2f} bytes a token, planned {planned:.2f}; a slot of one such sequence "
            f"{slot:.2f} more",
            flush=True,
        )
    clock = Clock() if timing else None

    def record(op: str, case: str, *values: object) -> None:
        if arguments.csv is None:
            return
        fresh = not arguments.csv.exists()
        with arguments.csv.open("a", newline="") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow(COLUMNS)
            writer.writerow((datetime.date.today().isoformat(), commit, machine, op, case, *values))

    def report(
        op: str, case: str, us: tuple[float, float], parts: dict[str, Floor], more: str, launches: int | None = None
    ) -> None:
        floor = sum(part.us(copy, products) for part in parts.values())
        print(f"{op:16} {case:14} {us[0]:9.1f} us (spread {us[1]:.1f}), floor {floor:.1f}, x{us[0] / floor:.2f}{more}")
        num_bytes, flops = (round(sum(part[k] for part in parts.values())) for k in range(2))
        beside = "" if launches is None else f"{launches} launches"
        record(op, case, f"{us[0]:.2f}", f"{us[1]:.2f}", num_bytes, flops, f"{floor / us[0]:.3f}", beside, "")

    if timing:
        record("cache", "T=1048576", "", "", round(pages * 2**20), 0, "", "", "")
    totals: dict[tuple[int, int], float] = {}
    measured: set[str] = set()
    wanted = modes(config)
    for name in (arguments.modes or ",".join(wanted)).split(","):
        plan, count = wanted[name]
        block = release_block(config, plan, device)
        others = [release_block(config, plan, device) for _ in range(arguments.row - 1)]
        measured.add(name)
        for rows, context in cases(arguments):
            bench = Bench(config, block, rows, context, device)
            y_TD, _ = bench.run()
            assert bool(y_TD.isfinite().all()), (name, rows, context)
            if rows * context <= 2**17:
                worst = difference(bench)
                most = 0.3 if plan.selects else 0.02
                assert worst < most, f"{name} B={rows} T={context}: attention is off by {worst:.2g}"
            if clock is None:
                print(f"{name} B={rows} T={context}: ran", flush=True)
                continue
            parts = floors(config, plan, rows, context, bench.num_hit())
            us = clock(bench.run)
            graph = captured(bench.run)
            graph.replay()
            launched = kernels_of(graph.replay)
            more = f", {len(launched)} kernels"
            if APART:
                more += f" of {sum(time for _, time in launched):.1f} us"
            report(f"layer_{name}", f"B={rows} T={context}", us, parts, more, len(launched))
            if arguments.profile:
                for kernel, time in launched:
                    print(f"    {time:8.2f} us {kernel[:100]}")
                print("    floors: " + ", ".join(f"{part} {one.us(copy, products):.1f}" for part, one in parts.items()))
            if others:
                row = [bench, *(Bench(config, other, rows, context, device) for other in others)]
                us = clock(functools.partial(run_row, row))
                each = us[0] / len(row), us[1] / len(row)
                report(f"layer_{name}", f"B={rows} T={context} in a row of {len(row)}", each, parts, "")
                del row
            totals[rows, context] = totals.get((rows, context), 0.0) + count * us[0]
            del bench, graph
        for context in map(int, arguments.contexts.split(",")) if arguments.prefill else ():
            num_tokens = min(arguments.prefill, context)
            chunk = Chunk(config, block, num_tokens, context, device)
            case = f"chunk={num_tokens} of {context}"
            if clock is None:
                chunk.run(chunk.state())
                print(f"{name} {case}: ran", flush=True)
                continue
            try:
                us = timed(chunk.run, chunk.state)
            except torch.OutOfMemoryError as error:
                print(f"layer_{name} {case}: {str(error).splitlines()[0]}", flush=True)
                continue
            # what the chunk's rows see on average
            seen = context if plan.decoder else context - num_tokens // 2
            experts = config.moe.num_routed_experts
            parts = floors(config, plan, chunk.num_run, seen, experts, all_rows=num_tokens)
            report(f"layer_{name}", case, us, parts, f", {chunk.num_run} rows run")
            del chunk
    if clock is not None and measured == set(wanted):
        for (rows, context), total in totals.items():
            growth = total / min(other for (count, _), other in totals.items() if count == rows)
            print(f"all {config.num_layers} layers, B={rows} T={context}: {total / 1e3:.2f} ms, x{growth:.2f}")


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


if __name__ == "__main__":
    main()
