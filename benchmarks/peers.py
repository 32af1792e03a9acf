"""Other people's kernels for the operations that `benchmarks/kernels.py` times: loaded by path, fed with data of their
own formats at the same sizes, held against float32 torch.

A folder given by `--peers` is an unpacked vLLM wheel, or the part of it that docs/kernels.md names. What does not load
there is named with its reason once, and its cases go without a peer. Formats and call signatures are those of the
wheel's Python wrappers; nothing here runs without a GPU.

B rows, T tokens of a prompt, H heads, C channels, K selected entries, E experts.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cedar.formats.spec import FP4_INDEX
from cedar.kernels.experts import Packed
from cedar.kernels.quantize import dequantize_rows

DEVICE = "cuda"
Built = TypeVar("Built")
# a V4 record: 448 E4M3 and 64 bfloat16; the scales of a page (one a 64 channels, eight bytes) follow its records
_RECORD, _SCALES, _PAGE = 576, 8, 64
# a page is padded to whole records
_PAGE_BYTES = -(-_PAGE * (_RECORD + _SCALES) // _RECORD) * _RECORD
# FP4 without infinities in the extension's numbering of scalar types: exponent and mantissa bits, sign, finite
_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49


class Peer(NamedTuple):
    """Another implementation of a case.

    Attributes:
        error: Relative error against float32 torch on a part of the rows.
        tolerance: The largest error that is its formats' and not a wrong call's.
    """

    name: str
    run: Callable[[], object]
    error: Callable[[], float]
    tolerance: float = 1e-2


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def _random_e4m3(*shape: int) -> Tensor:
    """Bytes of E4M3 below 2."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE) & 0xBF


def _e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _powers(low: int, high: int, *shape: int) -> Tensor:
    """Random powers of two, float32."""
    return torch.randint(low, high, shape, device=DEVICE).float().exp2()


# FlashMLA's cache


def _records(num_pages: int) -> Tensor:
    """Pages of random V4 records: uint8 [pages, page bytes]."""
    pages = torch.zeros(num_pages, _PAGE_BYTES, dtype=torch.uint8, device=DEVICE)
    record = pages[:, : _PAGE * _RECORD].view(num_pages, _PAGE, _RECORD)
    record[..., :448] = _random_e4m3(num_pages, _PAGE, 448)
    rope = torch.randn(num_pages, _PAGE, 64, device=DEVICE, dtype=torch.bfloat16)
    record[..., 448:] = rope.view(torch.uint8)
    scales = pages[:, _PAGE * _RECORD : _PAGE * (_RECORD + _SCALES)]
    scales.copy_(torch.randint(125, 129, scales.shape, dtype=torch.uint8, device=DEVICE))
    return pages


def _as_cache(pages: Tensor) -> Tensor:
    """The view that FlashMLA takes: [pages, rows, 1, bytes a row]."""
    size = _RECORD + _SCALES
    return pages.as_strided((pages.shape[0], _PAGE, 1, size), (_PAGE_BYTES, size, size, 1))


def _widened(pages: Tensor, row: Tensor) -> Tensor:
    """Records by row number, float32 [..., 512]."""
    page = pages[row // _PAGE]
    start = (row % _PAGE).unsqueeze(-1)
    record = page.gather(-1, start * _RECORD + torch.arange(_RECORD, device=DEVICE))
    exponent = page.gather(-1, _PAGE * _RECORD + start * _SCALES + torch.arange(7, device=DEVICE))
    scale = (exponent.float() - 127).exp2().repeat_interleave(64, dim=-1)
    return torch.cat([_e4m3(record[..., :448].contiguous()) * scale, _bfloat16(record[..., 448:])], dim=-1)


def _bfloat16(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.bfloat16).float()


@triton.jit
def _widen(pages_ptr, out_ptr, num_rows, PAGE_BYTES: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr):
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    known = row < num_rows
    page = pages_ptr + row // PAGE * PAGE_BYTES
    place = row % PAGE
    channel = tl.arange(0, 512)[None, :]
    stored = channel < 448
    code = tl.load(page + place * 576 + channel, mask=known & stored, other=0)
    exponent = tl.load(page + PAGE * 576 + place * 8 + channel // 64, mask=known & stored, other=127)
    pair = (page + place * 576 + 448).to(tl.pointer_type(tl.bfloat16))
    rope = tl.load(pair + (channel - 448), mask=known & (channel >= 448), other=0.0)
    scale = tl.exp2(exponent.to(tl.float32) - 127.0)
    value = tl.where(stored, code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale, rope.to(tl.float32))
    tl.store(out_ptr + row * 512 + channel, value.to(tl.bfloat16), mask=known)


def _attention(query_BHC: Tensor, key_BKC: Tensor, sink_H: Tensor) -> Tensor:
    score_BHK = query_BHC.float() @ key_BKC.transpose(1, 2) * query_BHC.shape[-1] ** -0.5
    joined = torch.cat([score_BHK, sink_H.view(1, -1, 1).expand(score_BHK.shape[0], -1, 1)], dim=-1)
    return joined.softmax(-1)[..., :-1] @ key_BKC


# Marlin's weights


@functools.cache
def _marlin_order() -> Tensor:
    """Where each nibble of a 16 x 64 tile (by tile of 16 columns, row, column) is taken from."""
    lane = torch.arange(32).view(32, 1, 1)
    tile = torch.arange(4).view(1, 4, 1)
    # nibble n of a lane's word: the even ones first, so that two neighbours unpack together
    nibble = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    row = 2 * (lane % 4) + torch.tensor([0, 1, 8, 9])[nibble % 4]
    column = lane // 4 + 8 * (nibble // 4)
    return (tile * 256 + row * 16 + column).flatten().to(DEVICE)


def _marlin_codes(codes_OI: Tensor) -> Tensor:
    """uint8 nibble pairs [outputs, inputs / 2] -> int32 [inputs / 16, outputs * 2]."""
    nibble_IO = torch.stack([codes_OI & 15, codes_OI >> 4], dim=-1).flatten(1).T
    inputs, outputs = nibble_IO.shape
    tiles = nibble_IO.reshape(inputs // 16, 16, outputs // 16, 16).permute(0, 2, 1, 3).reshape(-1, 1024)
    words = tiles[:, _marlin_order()].view(-1, 8).to(torch.int64)
    packed = (words << (4 * torch.arange(8, device=DEVICE))).sum(-1)
    return (packed - ((packed >> 31) << 32)).to(torch.int32).view(inputs // 16, outputs * 2)


def _marlin_scales(scales_EOG: Tensor) -> Tensor:
    """uint8 exponents [experts, outputs, groups] -> E8M0 [experts, groups, outputs] in the kernel's order."""
    num_experts, outputs, groups = scales_EOG.shape
    eights = torch.arange(64, device=DEVICE).view(8, 8).T.flatten()
    order = eights.view(-1, 4)[:, [0, 2, 1, 3]].flatten()
    scales = scales_EOG.transpose(1, 2).reshape(-1, 64)[:, order]
    return scales.reshape(num_experts, groups, outputs).contiguous().view(torch.float8_e8m0fnu)


class MarlinWeights(NamedTuple):
    """Experts as Marlin holds them: gate and up side by side, and down."""

    up: Tensor
    up_scales: Tensor
    down: Tensor
    down_scales: Tensor


def _expert(stack: Packed, expert: Tensor) -> Tensor:
    return dequantize_rows(stack.codes[expert], stack.scales[expert], FP4_INDEX, torch.float32)


def moe_reference(u: Tensor, ids: Tensor, share: Tensor, stacks: tuple[Packed, Packed, Packed], limit: float) -> Tensor:
    """`packed_experts` of a few rows in float32, nothing rounded on the way."""
    rows = []
    for x, chosen, weights in zip(u.float(), ids, share, strict=True):
        total = torch.zeros_like(x)
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up, down = (_expert(stack, expert) for stack in stacks)
            inner = F.silu((gate @ x).clamp(max=limit)) * (up @ x).clamp(-limit, limit)
            total += down @ (inner * weight)
        rows.append(total)
    return torch.stack(rows)


# experts in torch


def widen_experts(stack: Packed) -> Tensor:
    """A stack in bfloat16, expert by expert."""
    num_experts, outputs, half = stack.codes.shape
    wide = torch.empty(num_experts, outputs, 2 * half, device=DEVICE, dtype=torch.bfloat16)
    for expert in range(num_experts):
        wide[expert] = dequantize_rows(stack.codes[expert], stack.scales[expert], FP4_INDEX, torch.bfloat16)
    return wide


def grouped_experts(
    u: Tensor, ids: Tensor, share: Tensor, up: Tensor, down: Tensor, stacks: tuple[Packed, Packed, Packed]
) -> Peer:
    """`F.grouped_mm` on widened weights, sorting and summing inside.

    Args:
        up: bfloat16 [experts, 2 * inner, channels], gate first.
        down: bfloat16 [experts, channels, inner].
    """
    num_experts, k, limit = up.shape[0], ids.shape[1], 10.0

    def run() -> Tensor:
        expert, choice = ids.flatten().sort()
        stop = torch.searchsorted(expert, torch.arange(1, num_experts + 1, device=DEVICE)).to(torch.int32)
        row = choice // k
        gate, value = F.grouped_mm(u[row], up.transpose(1, 2), offs=stop).chunk(2, dim=-1)
        inner = F.silu(gate.clamp(max=limit)) * value.clamp(-limit, limit) * share.flatten()[choice].unsqueeze(-1)
        output = F.grouped_mm(inner.bfloat16(), down.transpose(1, 2), offs=stop)
        return torch.zeros(u.shape, device=DEVICE).index_add_(0, row, output.float())

    def error() -> float:
        return relative(run()[:2], moe_reference(u[:2], ids[:2], share[:2], stacks, limit))

    return Peer("F.grouped_mm bf16", run, error, 2e-2)


class Peers:
    """The peers of one folder; each method builds one, or says why it cannot and returns None."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._said: set[str] = set()

    def attempt(self, what: str, build: Callable[..., Built], *arguments: Any) -> tuple[Built, ...]:
        """What is built alone in a tuple, or an empty one."""
        if self._folder is None:
            return ()
        try:
            return (build(*arguments),)
        except Exception as error:
            # whatever a foreign library raises, the other cases go on
            said = str(error).strip().splitlines()
            reason = f"no peer {what}: {type(error).__name__}: {said[0] if said else ''}"
            if reason not in self._said:
                print(reason, flush=True)
                self._said.add(reason)
            return ()

    def _find(self, name: str) -> Path:
        assert self._folder is not None
        found = sorted(self._folder.rglob(name))
        if not found:
            raise FileNotFoundError(f"no {name} under {self._folder}")
        return found[0].resolve()

    @functools.cache  # noqa: B019  one object a run
    def _flashmla(self) -> Any:
        torch.ops.load_library(str(self._find("_flashmla_C.abi3.so")))
        return torch.ops._flashmla_C

    @functools.cache  # noqa: B019
    def _deep_gemm(self) -> Any:
        sys.path.insert(0, str(self._find("_C_extension.abi3.so").parent.parent))
        module = importlib.import_module("deep_gemm")
        module.set_pdl(True)
        return module

    @functools.cache  # noqa: B019
    def _marlin(self) -> Any:
        torch.ops.load_library(str(self._find("_moe_C_stable_libtorch.abi3.so")))
        return torch.ops._moe_C

    @functools.cache  # noqa: B019
    def _vllm(self) -> Any:
        torch.ops.load_library(str(self._find("_C_stable_libtorch.abi3.so")))
        return torch.ops._C

    @functools.cache  # noqa: B019
    def _candidate_mask(self) -> Callable[..., None]:
        """vLLM's mask of everything outside the candidate blocks; the names it imports and we do not need are empty."""

        def nothing(*_: object) -> bool:
            return False

        contents: dict[str, dict[str, object]] = {
            "vllm.model_executor.kernels.attention.dsa.sparse_mqa_logits": {"has_deep_select": nothing},
            "vllm.model_executor.layers.indexer_topk": {
                "deep_select_topk": nothing,
                "get_deep_select_stride_requirement": nothing,
                "is_deep_select_supported": nothing,
            },
            "vllm.triton_utils": {"triton": triton, "tl": tl},
            "vllm.utils.math_utils": {"round_up": nothing},
        }
        for name, values in contents.items():
            parts = name.split(".")
            for depth in range(1, len(parts) + 1):
                module = sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
            vars(module).update(values)
        spec = importlib.util.spec_from_file_location("vllm_candidate_blocks", self._find("candidate_blocks.py"))
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        # Triton reads a kernel's source through its module
        sys.modules[spec.name] = loaded
        spec.loader.exec_module(loaded)
        mask: Callable[..., None] = loaded.apply_candidate_mask
        return mask

    def sparse_decode(self, query_BHC: Tensor, selection_BK: Tensor, sink_H: Tensor, num_rows: int) -> Peer:
        """FlashMLA on V4 records: 128 rows of a window and the selection, out of a pool of `num_rows` entries."""
        ops = self._flashmla()
        batch, num_window = query_BHC.shape[0], 128
        pool, window = _records(num_rows // _PAGE), _records(batch * num_window // _PAGE)
        near_BW = torch.arange(batch * num_window, device=DEVICE).view(batch, num_window)
        query, scale = query_BHC.unsqueeze(1), query_BHC.shape[-1] ** -0.5
        near, far = (index.to(torch.int32).unsqueeze(1) for index in (near_BW, selection_BK))
        caches = _as_cache(window), _as_cache(pool)

        def call(plan: Tensor | None, splits: Tensor | None) -> Any:
            return ops.sparse_decode_fwd(
                query, caches[0], near, None, sink_H, plan, splits, caches[1], far, None, 512, scale, None, False
            )

        # a serving step makes the plan once for all layers of a kind
        plan, splits = call(None, None)[2:]

        def run() -> Tensor:
            output: Tensor = call(plan, splits)[0]
            return output

        def error() -> float:
            key = torch.cat([_widened(window, near_BW[:4]), _widened(pool, selection_BK[:4])], dim=1)
            return relative(run()[:4, 0], _attention(query_BHC[:4], key, sink_H))

        return Peer("FlashMLA, V4 rows", run, error)

    def sparse_prefill(
        self, query_THC: Tensor, selection_TK: Tensor, sink_H: Tensor, num_entries: int, widened: bool
    ) -> Peer:
        """FlashMLA over bfloat16 rows, which a prompt's entries and window are widened to first, as vLLM does.

        Args:
            widened: Leave the widening out of the timed call.
        """
        ops = self._flashmla()
        num_tokens, num_window = query_THC.shape[0], 128
        near_rows = -(-(num_tokens + num_window) // _PAGE) * _PAGE
        entries, window = _records(num_entries // _PAGE), _records(near_rows // _PAGE)
        key = torch.empty(num_entries + near_rows, 1, 512, device=DEVICE, dtype=torch.bfloat16)
        token = torch.arange(num_tokens, device=DEVICE).unsqueeze(-1)
        near_TW = num_entries + token + 1 + torch.arange(num_window, device=DEVICE)
        index_TK = torch.cat([selection_TK, near_TW], dim=-1)
        index = index_TK.to(torch.int32).unsqueeze(1)
        scale = query_THC.shape[-1] ** -0.5

        def widen() -> None:
            _widen[(triton.cdiv(num_entries, 4),)](entries, key, num_entries, _PAGE_BYTES, _PAGE, R=4)
            _widen[(triton.cdiv(near_rows, 4),)](window, key[num_entries:], near_rows, _PAGE_BYTES, _PAGE, R=4)

        widen()

        def run() -> Tensor:
            if not widened:
                widen()
            output: Tensor = ops.sparse_prefill_fwd(query_THC, key, index, scale, 512, sink_H, None, None)[0]
            return output

        def error() -> float:
            output = run()
            far = _widened(entries, selection_TK[:4])
            near = _widened(window, near_TW[:4] - num_entries)
            return relative(output[:4], _attention(query_THC[:4], torch.cat([far, near], dim=1), sink_H))

        return Peer("FlashMLA alone" if widened else "FlashMLA, widening inside", run, error)

    def _dense_logits(
        self, batch: int, num_tokens: int, shared: bool
    ) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """(DeepGEMM's index logits of `batch` rows in FP8, the same of the first two rows in float32).

        Args:
            shared: The rows see the same keys in an order of their own; otherwise each has its own.
        """
        dg = self._deep_gemm()
        heads, channels, pages = 32, 128, num_tokens // _PAGE
        num_pages = pages if shared else pages * batch
        keys = torch.empty(num_pages, _PAGE * (channels + 4), dtype=torch.uint8, device=DEVICE)
        keys[:, : _PAGE * channels] = _random_e4m3(num_pages, _PAGE * channels)
        scales = _powers(-2, 2, num_pages, _PAGE)
        keys[:, _PAGE * channels :] = scales.view(torch.uint8)
        query = torch.randn(batch, 1, heads, channels, device=DEVICE).to(torch.float8_e4m3fn)
        weight = torch.randn(batch, heads, device=DEVICE)
        order = torch.stack([torch.randperm(pages, device=DEVICE) for _ in range(batch)])
        table = order if shared else order + pages * torch.arange(batch, device=DEVICE).unsqueeze(-1)
        lengths = torch.full((batch, 1), num_tokens, dtype=torch.int32, device=DEVICE)
        # made once a step, for all layers
        plan = dg.get_paged_mqa_logits_metadata(lengths, _PAGE, dg.get_num_sms())
        cache, pages_of = keys.view(num_pages, _PAGE, 1, channels + 4), table.to(torch.int32)

        def run() -> Tensor:
            logits: Tensor = dg.fp8_fp4_paged_mqa_logits(
                (query, None), cache, weight, lengths, pages_of, plan, num_tokens
            )
            return logits

        def want() -> Tensor:
            rows = []
            for row in range(min(batch, 2)):
                key = _e4m3(keys[table[row], : _PAGE * channels]).view(-1, channels)
                key = key * scales[table[row]].view(-1, 1)
                rows.append(weight[row] @ (query[row, 0].float() @ key.T).relu())
            return torch.stack(rows)

        return run, want

    def index_logits(self, batch: int, num_tokens: int) -> Peer:
        run, want = self._dense_logits(batch, num_tokens, shared=False)
        return Peer("DeepGEMM FP8", run, lambda: relative(run()[:2, :num_tokens], want()))

    def reindex(self, block_BN: Tensor, num_tokens: int, block_size: int, k: int) -> Peer:
        """Scores of everything, the candidates' mask, the k largest: what vLLM runs on Hopper."""
        logits, want = self._dense_logits(block_BN.shape[0], num_tokens, shared=True)
        mask = self._candidate_mask()
        blocks = block_BN.to(torch.int32)
        stop = torch.full((block_BN.shape[0],), num_tokens, dtype=torch.int32, device=DEVICE)
        select = self._select(logits(), k)

        def run() -> Tensor:
            score = logits()
            mask(score, None, stop, blocks, block_size)
            return select(score)

        def error() -> float:
            # a share of wrong members, of those that rounding does not decide
            chosen = run()[:2].long()
            score = want().unflatten(-1, (-1, block_size))
            allowed = torch.zeros(score.shape[:2], dtype=torch.bool, device=DEVICE)
            allowed = allowed.scatter(1, block_BN[: score.shape[0]], True)
            score = score.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)
            best = score.topk(k).values
            cut = best[:, -1:] - 1e-3 * best[:, :1].abs()
            return float((score.gather(1, chosen) < cut).double().mean())

        return Peer("DeepGEMM FP8, mask, vLLM top-k", run, error)

    def _select(self, score: Tensor, k: int) -> Callable[[Tensor], Tensor]:
        """vLLM's choice for these rows: the cooperative kernel up to 64 of them, above the persistent one."""
        ops = self._vllm()
        rows = score.shape[0]
        select = ops.cooperative_topk if rows <= 64 and score.stride(0) % 4 == 0 else ops.persistent_topk
        lengths = torch.full((rows, 1), score.shape[1], dtype=torch.int32, device=DEVICE)
        workspace = torch.zeros(2**20, dtype=torch.uint8, device=DEVICE)
        output = torch.empty(rows, k, dtype=torch.int32, device=DEVICE)

        def run(score: Tensor) -> Tensor:
            select(score, lengths, output, workspace, k, score.shape[1])
            return output

        return run

    def topk(self, score: Tensor, k: int) -> Peer:
        select = self._select(score, k)

        def error() -> float:
            got = score.gather(1, select(score).long()).sort(-1).values
            return relative(got, score.topk(k).values.sort(-1).values)

        return Peer("vLLM top-k", lambda: select(score), error, 0.0)

    def mhc(self, streams_TND: Tensor, fn: Tensor) -> Peer:
        """Of the step, the product and the sum of squares alone."""
        dg = self._deep_gemm()
        x = streams_TND.flatten(1)
        rows, blocks = x.shape[0], -(-x.shape[0] // 64)
        splits = 16 if blocks <= 8 else 4 if blocks <= 32 else 1
        mixed = torch.empty(splits, rows, fn.shape[0], device=DEVICE)
        square = torch.empty(splits, rows, device=DEVICE)

        def run() -> None:
            dg.tf32_hc_prenorm_gemm(x, fn, mixed, square, splits)

        def error() -> float:
            run()
            worst = relative(square.sum(0), x.float().square().sum(-1))
            return max(worst, relative(mixed.sum(0)[:256], x[:256].float() @ fn.T))

        return Peer("DeepGEMM prenorm product alone", run, error, 3e-3)

    def marlin_weights(self, stacks: tuple[Packed, Packed, Packed]) -> MarlinWeights:
        """The same experts in Marlin's order; seconds, so once for all cases."""
        w1, w3, w2 = stacks
        self._marlin()
        num_experts = w1.codes.shape[0]
        up = torch.stack([_marlin_codes(torch.cat([w1.codes[e], w3.codes[e]])) for e in range(num_experts)])
        down = torch.stack([_marlin_codes(w2.codes[e]) for e in range(num_experts)])
        scales = _marlin_scales(torch.cat([w1.scales, w3.scales], dim=1)), _marlin_scales(w2.scales)
        return MarlinWeights(up, scales[0], down, scales[1])

    def marlin(
        self, u: Tensor, ids: Tensor, share: Tensor, weights: MarlinWeights, stacks: tuple[Packed, Packed, Packed]
    ) -> Peer:
        """bfloat16 rows on MXFP4 weights, sorting and summing inside."""
        ops, others = self._marlin(), self._vllm()
        (rows, channels), k, num_experts = u.shape, ids.shape[1], weights.up.shape[0]
        num_inner, limit = stacks[0].codes.shape[1], 10.0
        size = next((s for s in (8, 16, 32, 48) if rows * k / num_experts / s < 0.9), 64)
        padded = -(-(rows * k + num_experts * (size - 1)) // size) * size
        padded = min(padded, rows * k * size) if rows * k < num_experts else padded
        new: dict[str, Any] = {"device": DEVICE, "dtype": torch.int32}
        workspace = torch.zeros(4 * torch.cuda.get_device_properties(0).multi_processor_count, **new)
        ids32, x = ids.to(torch.int32), u.contiguous()
        place, expert, count = torch.empty(padded, **new), torch.empty(-(-padded // size), **new), torch.empty(1, **new)

        def product(a: Tensor, out: Tensor, codes: Tensor, scales: Tensor, top: int, weighted: bool) -> None:
            ops.moe_wna16_marlin_gemm(
                a, out, codes, None, scales, None, None, None, workspace, place, expert, count, share, size, top,
                weighted, _E2M1, a.shape[0], out.shape[1], a.shape[1], False, True, False, -1, -1, -1,
            )  # fmt: skip

        def run() -> Tensor:
            ops.moe_align_block_size(ids32, num_experts, size, place, expert, count, None, None)
            both = torch.empty(rows * k, 2 * num_inner, device=DEVICE, dtype=torch.bfloat16)
            product(x, both, weights.up, weights.up_scales, k, False)
            inner = torch.empty(rows * k, num_inner, device=DEVICE, dtype=torch.bfloat16)
            others.silu_and_mul_with_clamp(inner, both, limit)
            output = torch.empty(rows * k, channels, device=DEVICE, dtype=torch.bfloat16)
            product(inner, output, weights.down, weights.down_scales, 1, True)
            return output.view(rows, k, channels).sum(1)

        def error() -> float:
            return relative(run()[:2], moe_reference(u[:2], ids[:2], share[:2], stacks, limit))

        return Peer("Marlin W4A16", run, error, 2e-2)

    def grouped_fp8(self, ids: Tensor, weights: tuple[tuple[Tensor, Tensor], ...]) -> Peer:
        """DeepGEMM's masked products of random rows, as many an expert as `ids` say: no sorting, no activation.

        Args:
            weights: From `fp8_stacks`.
        """
        dg = self._deep_gemm()
        num_experts = weights[0][0].shape[0]
        count = torch.bincount(ids.flatten(), minlength=num_experts)
        most = -(-int(count.max()) // 64) * 64
        expected = max(1, -(-ids.numel() // num_experts))
        if num_experts * most * (weights[0][0].shape[1] + weights[0][0].shape[2]) * 2 > 40 * 2**30:
            raise MemoryError(f"{most} rows for each of {num_experts} experts")
        held = count.to(torch.int32)

        def one(codes: Tensor, scales: Tensor) -> tuple[Callable[[], Tensor], Callable[[], float]]:
            outputs, inputs = codes.shape[1:]
            rows = _random_e4m3(num_experts, most, inputs).view(torch.float8_e4m3fn)
            row_scales = dg.get_mn_major_tma_aligned_tensor(_powers(-2, 2, num_experts, most, inputs // 128))
            out = torch.empty(num_experts, most, outputs, device=DEVICE, dtype=torch.bfloat16)

            def run() -> Tensor:
                dg.m_grouped_fp8_gemm_nt_masked(
                    (rows, row_scales), (codes, scales), out, held, expected, disable_ue8m0_cast=True
                )
                return out

            def error() -> float:
                expert = int(count.argmax())
                x = rows[expert, :1].float() * row_scales[expert, :1].repeat_interleave(128, dim=-1)
                wide = scales[expert].repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
                return relative(run()[expert, :1], x @ (codes[expert].float() * wide).T)

            return run, error

        (up, up_error), (down, down_error) = (one(*pair) for pair in weights)
        return Peer("DeepGEMM FP8, products alone", lambda: (up(), down()), lambda: max(up_error(), down_error()))

    def fp8_stacks(self, num_experts: int, hidden: int, inner: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Random weights of up (gate and value side by side) and down, in FP8 under 128 x 128 scales."""
        self._deep_gemm()
        stacks = []
        for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
            codes = _random_e4m3(num_experts, outputs, inputs).view(torch.float8_e4m3fn)
            stacks.append((codes, _powers(-8, -5, num_experts, outputs // 128, inputs // 128)))
        return tuple(stacks)
