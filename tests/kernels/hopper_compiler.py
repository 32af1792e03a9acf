"""Compiles the decode kernels for sm_90 without a GPU: each wrapper is called with CPU tensors, each launch compiled.

Run as a program, because Triton decides when it is imported whether it interprets. Prints one line a kernel: its
name, registers are not known before ptxas, so the bytes of shared memory and of machine code.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8
from cedar.kernels.experts import Packed, Router, Weights, retile
from cedar.kernels.mhc import Sublayer
from cedar.kernels.pages import Paged, Split, Stored

TARGET = GPUTarget("cuda", 90, 32)
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")
compiled: dict[tuple[Any, ...], Any] = {}


def _run(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
    options = {name: keywords.pop(name) for name in _OPTIONS if name in keywords}
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            signature[parameter.name] = "i1"
        elif isinstance(value, int) and value == 1 and parameter.name not in (kernel.do_not_specialize or ()):
            # as a launch does
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    key = (kernel.__name__, tuple(signature.items()), tuple(map(str, constants.items())))
    if key in compiled:
        return
    started = time.monotonic()
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(kernel, signature, constexprs=constants, attrs=attributes)
    compiled[key] = binary = triton.compile(source, target=TARGET, options=options)
    print(
        f"{kernel.__name__}: {binary.metadata.shared} bytes of shared memory, {len(binary.asm['cubin'])} of code, "
        f"{time.monotonic() - started:.1f} s",
        flush=True,
    )


def _stored(spec: Any, pages: int, rows: int, channels: int) -> Stored:
    codes = torch.zeros(pages, rows, channels * spec.element_bits // 8, dtype=torch.uint8)
    return Stored(codes, torch.zeros(pages, rows, channels // spec.group, dtype=torch.uint8), spec)


def shapes(name: str) -> dict[str, int]:
    release = {
        "rows": 2, "heads": 64, "channels": 512, "angles": 32, "window": 128, "topk": 512, "index_heads": 32,
        "index_channels": 128, "hidden": 5120, "latent": 1280, "experts": 8, "inner": 2304, "entries": 4096,
        "layers": 40, "vocabulary": 129280,
    }  # fmt: skip
    mini = {
        "rows": 2, "heads": 8, "channels": 64, "angles": 8, "window": 32, "topk": 32, "index_heads": 8,
        "index_channels": 32, "hidden": 256, "latent": 128, "experts": 8, "inner": 160, "entries": 1024,
        "layers": 16, "vocabulary": 2048,
    }  # fmt: skip
    return {"release": release, "mini": mini}[name]


def threads_have_words() -> None:
    """Assembly that counts on four words a thread gets them so."""
    for (name, *_), binary in compiled.items():
        if name in ("_up_alone", "_down_alone"):
            text = binary.asm["ttgir"]
            layouts = re.findall(r"packed_element = (?:4|16) .*? : tensor<\d+xi32, (#\w+)>", text)
            (layout,) = set(layouts)
            assert f"{layout} = #ttg.blocked<{{sizePerThread = [4], threadsPerWarp = [32]," in text, (name, layout)


def call_all(size: dict[str, int]) -> None:
    """Every wrapper once."""
    from cedar.kernels.triton import (
        advance,
        blocks,
        compress,
        engram,
        feed,
        few_rows,
        gates,
        locate,
        packed_experts,
        packed_linear,
        paged_attention,
        paged_indexer,
        pages,
        route,
        sampling,
        topk,
    )

    rows, channels, hidden = size["rows"], size["channels"], size["hidden"]
    half = {"dtype": torch.bfloat16}
    row = torch.zeros(rows, dtype=torch.int64)
    present = torch.ones(rows, dtype=torch.bool)
    cos = torch.ones(rows, size["angles"])
    ring = _stored(FP8, 3, size["window"] + 6, channels)
    entries = Paged(_stored(FP4_MAIN, 3, 128, channels), torch.zeros(3, 8, dtype=torch.int64), row)
    keys = Paged(_stored(FP4_INDEX, 3, 128, size["index_channels"]), torch.zeros(3, 8, dtype=torch.int64), row)
    selection = torch.zeros(rows, size["topk"], dtype=torch.int64)
    # 512 channels have a kernel of their own
    for width in {channels, 512}:
        query = torch.zeros(rows, size["heads"], width, **half)
        wide_ring = _stored(FP8, 3, size["window"] + 6, width)
        wide = Paged(_stored(FP4_MAIN, 3, 128, width), *entries[1:])
        sink, window = torch.zeros(size["heads"]), size["window"]
        for found, shares in (((wide, selection), 1), ((wide, selection), 2), ((None, None), 1)):
            paged_attention.paged_attention(
                query, cos, cos, wide_ring, row, row, row, *found, sink, window, shares=shares
            )
    index = torch.zeros(rows, size["index_heads"], size["index_channels"], **half)
    weight = torch.zeros(rows, size["index_heads"], **half)
    paged_indexer.paged_index_scores(index, cos, cos, weight, keys, row, size["entries"])
    block = torch.zeros(rows, 16, dtype=torch.int64)
    paged_indexer.paged_pool_scores(index, cos, cos, weight, keys, row, block, 8)
    topk.top_entries(torch.zeros(rows, size["entries"]), size["topk"])
    topk.top_members(torch.zeros(rows, 128), size["topk"], block, 8)
    # the release's heads over both kinds of its pages, and rows of several tiles
    index, weight = torch.zeros(rows, 32, 128, **half), torch.zeros(rows, 32, **half)
    for per_page in (64, 128):
        pages_of = Paged(_stored(FP4_INDEX, 3, per_page, 128), torch.zeros(3, 8, dtype=torch.int64), row)
        # a tile a program, and several
        for columns in (size["entries"], 2**17):
            paged_indexer.paged_index_scores(index, cos, cos, weight, pages_of, row, columns)
        for blocks_of in (block, torch.zeros(rows, 2**14, dtype=torch.int64)):
            paged_indexer.paged_pool_scores(index, cos, cos, weight, pages_of, row, blocks_of, 8)
    topk.top_entries(torch.zeros(rows, 2**17), 512)
    topk.top_members(torch.zeros(rows, 2**15), 512, torch.zeros(rows, 2**12, dtype=torch.int64), 8)
    for spec, width in ((FP8, channels), (FP4_MAIN, channels), (FP4_INDEX, size["index_channels"])):
        x, gain = torch.zeros(rows, width, **half), torch.zeros(width, **half)
        pages.store_normed(x, gain, 1e-20, cos, cos, _stored(spec, 3, 128, width), row, row, present)
    latent = torch.zeros(rows, size["latent"] + channels, **half)
    gains = torch.zeros(size["latent"], **half), 1e-20, FP8, torch.zeros(channels, **half), 1e-20
    pages.split_latent(latent, *gains, cos, cos, ring, row, row, present)
    tables = torch.zeros(size["layers"], 3, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.int64)
    locate.locate(row, row, *tables, cos[0], cos[0], size["window"] + 6, 128)
    sampling.draw_rows(torch.zeros(rows, size["vocabulary"]), row.double(), row.double())
    tails = torch.zeros(3, 7, channels)
    compress.pool_pairs(torch.zeros(rows, 2 * channels), tails, tails, row, row, torch.bfloat16)
    engram.look_back(row, torch.zeros(3, 9, dtype=torch.int64), row, row, row, 4, 5, 2)
    x, weight = torch.zeros(rows, 1, hidden, **half), torch.zeros(1, size["latent"], hidden, **half)
    few_rows.grouped_linear(x, weight, FP8)
    few_rows.grouped_linear(x, weight, None)
    few_rows.norm_round(x[:, 0], torch.zeros(hidden, **half), 1e-20, FP8)
    u = x[:, 0]
    num_experts, inner = size["experts"], size["inner"]
    matrices = Weights(
        *(torch.zeros(num_experts, *pair, **half) for pair in ((inner, hidden), (inner, hidden), (hidden, inner))),
        *(torch.zeros(pair, **half) for pair in ((inner, hidden), (inner, hidden), (hidden, inner))),
    )
    ids, weights, _ = route.route(
        u, None, torch.zeros(num_experts, hidden), torch.zeros(num_experts), torch.zeros(num_experts), 2, 1.5
    )
    many = torch.zeros(384, hidden, **half), torch.zeros(384), torch.zeros(384)
    route.route(u, present, *many, 6, 1.5)
    gates.swiglu_round(torch.zeros(rows, 2 * inner, **half), 10.0, FP8)
    blocks.block_scores(torch.zeros(rows, size["entries"]), row, 8)
    gates.add_round(torch.zeros(rows, hidden), u)
    feed.feed(u, ids, weights, matrices, 10.0, True)
    inner_up, inner_down = (
        Packed(
            torch.zeros(num_experts, a, b // 2, dtype=torch.uint8),
            torch.zeros(num_experts, a, b // 32, dtype=torch.uint8),
        )
        for a, b in ((inner, hidden), (hidden, inner))
    )
    for up, down in ((inner_up, inner_down), (retile(inner_up), retile(inner_down))):
        packed_experts.packed_experts(u, ids, weights, up, up, down, 10.0, True)
        # more rows than run alone
        some = (tensor.repeat(2, 1) for tensor in (u, ids, weights))
        packed_experts.packed_experts(*some, up, up, down, 10.0, True)
        for one in (u[:1], u[:1].float()):
            packed_experts.packed_experts(one, ids[:1], weights[:1], up, up, down, 10.0, True)
    threads_have_words()
    # wider tiles; the widest take 20 s
    many = (tensor.repeat(2 * num_experts, 1) for tensor in (u, ids, weights))
    packed_experts.packed_experts(*many, retile(inner_up), retile(inner_up), retile(inner_down), 10.0, True)
    packed_experts._sorted_tiles(u, ids, num_experts)
    plan, code, scale = (torch.zeros(n, dtype=torch.int32) for n in (16, 4 * 2048, 4 * 128))
    # many rows; half a minute each, so gates and ups at the release's shape alone
    for up in (True, False) if hidden > 1024 else (False,):
        packed_experts._multiply_tiles[(132,)](
            u.half(), weights, plan, plan, plan, code, scale, code, scale, u.half() if up else u, 4, 1, 256, 6, 10.0,
            UP=up, HALF_OUT=True, ROUNDED=up, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    if hidden > 1024:
        many = (tensor.repeat(128, 1) for tensor in (u, ids, weights))
        packed_experts.packed_experts(*many, retile(inner_up), retile(inner_up), retile(inner_down), 10.0, True)
    tiles = torch.zeros(size["latent"] // 32, hidden // 32, dtype=torch.uint8)
    codes = torch.zeros(size["latent"], hidden, dtype=torch.uint8)
    for count in (1, rows, 32, 64, 512):
        packed_linear.packed_linear(torch.zeros(count, hidden, **half), codes, tiles, FP8)
    packed_linear.packed_linear(torch.zeros(rows, hidden), codes, tiles, None)
    for part in (x, x[:1]):
        packed_linear.packed_grouped_linear(part, codes.unsqueeze(0), tiles.unsqueeze(0), FP8)
    sublayer = Sublayer(
        torch.zeros(24, 4 * hidden),
        torch.zeros(3),
        torch.zeros(24),
        torch.zeros(hidden, **half),
        20,
        1e-6,
        1e-20,
        1e-20,
    )
    streams, four = torch.zeros(rows, 4, hidden, **half), torch.zeros(rows, 4)
    if hidden <= 1024:
        router = Router(torch.zeros(num_experts, hidden), torch.zeros(num_experts), torch.zeros(num_experts), 2, 1.5)
        mixing = torch.zeros(rows, 4, 4)
        entering = streams, four, mixing, four, sublayer, FP8
        advance.advance_routed(u, *entering, router, present)
        advance.advance_fed(u, *entering, router, present, matrices, 10.0)
        latent_OD = torch.zeros(size["latent"] + channels, hidden, **half)
        advance.advance_projected(u, *entering, latent_OD)
        advance.advance_projected(None, streams, None, None, four, sublayer, FP8, latent_OD)
        query_OQ = torch.zeros(size["heads"] * channels, size["latent"], **half)
        pages.split_projected(latent, *gains, cos, cos, ring, row, row, present, query_OQ)
    for many, wide in ((rows, hidden), (rows, 512), (80, hidden)):
        several = torch.zeros(many, 4, wide, **half), torch.zeros(many, 4), torch.zeros(many, 4, 4)
        coefficients = sublayer._replace(fn=torch.zeros(24, 4 * wide), gain_D=torch.zeros(wide, **half))
        advance.advance(torch.zeros(many, wide, **half), *several, several[1], coefficients, FP8)
        advance.advance(None, several[0], None, None, several[1], coefficients, FP8)
        if many == rows and wide > 256:
            y, router = torch.zeros(many, wide), Router(torch.zeros(384, wide, **half), *torch.zeros(2, 384), 6, 1.5)
            advance.advance(y, *several, several[1], coefficients, FP8, y.bfloat16())
            advance.advance_routed(y.bfloat16(), *several, several[1], coefficients, FP8, router, present)
            outputs = size["latent"] + channels
            sizes = (outputs, wide), (outputs // 32, wide // 32)
            stored = tuple(torch.zeros(shape, dtype=torch.uint8) for shape in sizes)
            both = *stored, Split(*gains, cos, cos, ring, row, row, present)
            advance.advance_split(y, *several, several[1], coefficients, FP8, y.bfloat16(), *both)
            advance.advance_split(None, several[0], None, None, several[1], coefficients, FP8, None, *both)
    ids_L, column = torch.zeros(rows, 4, dtype=torch.int64), torch.ones(24, dtype=torch.int64)
    codes, scales = torch.zeros(64, 32, dtype=torch.uint8), torch.zeros(64, 1, dtype=torch.uint8)
    engram.engram_memory(ids_L, ids_L[0], column, column, codes, scales, torch.bfloat16, FP8)
    gains = torch.zeros(4, hidden, **half)
    engram.engram_gate(
        torch.zeros(rows, 4, hidden, **half), torch.zeros(rows, 4, hidden, **half), u, present, gains, gains, 1e-20
    )


if __name__ == "__main__":
    JITFunction.run = _run
    for name in sys.argv[1:]:
        call_all(shapes(name))
