"""Attention over a window and a masked set of entries for whole packs: one softmax, never a score matrix in memory.

A block is P of the S * H rows (a row is one head of one position) against J keys; a block of entries that no
row of it selected is skipped. The backward computes the scores again, once for the queries and once for the keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable

__all__ = ["fits", "masked_attention", "unavailable"]

_ROWS, _KEYS = 64, 64


def fits(op: str, query_BSHC: Tensor, *others: Tensor) -> bool:
    """bfloat16 or float32; 16 to 128 channels, a power of two."""
    channels = query_BSHC.shape[-1]
    small = 16 <= channels <= 128 and channels & (channels - 1) == 0
    return small and is_half_or_float(query_BSHC) and query_BSHC.numel() > 0


@triton.jit
def _near(row, key, num_rows, start, num_window):
    """Window mask [P, J]: the key's position is not after the row's, in its window, not before its sample."""
    position = row[:, None]
    seen = (key[None, :] <= position) & (key[None, :] > position - num_window) & (key[None, :] >= start[:, None])
    return seen & (position < num_rows) & (key >= 0)[None, :]


@triton.jit
def _far(visible_ptr, row, entry, num_rows, num_entries):
    """Selection mask [P, J]."""
    inside = (row[:, None] < num_rows) & (entry[None, :] < num_entries)
    return tl.load(visible_ptr + row[:, None].to(tl.int64) * num_entries + entry[None, :], mask=inside, other=0) != 0


@triton.jit
def _occupancy(
    visible_ptr, occupied_ptr, num_rows, num_entries,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Whether any row of a block selected any entry of a block: read once instead of in every kernel."""
    pack = tl.program_id(2).to(tl.int64)
    first = (tl.program_id(0) * P) // H
    row = first + tl.arange(0, R)
    key = tl.program_id(1) * J + tl.arange(0, J)
    mask = _far(visible_ptr + pack * num_rows * num_entries, row, key, num_rows, num_entries)
    # R is a power of two, the block's own rows may be fewer
    mask = mask & (row <= (tl.program_id(0) * P + P - 1) // H)[:, None]
    place = (pack * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
    tl.store(occupied_ptr + place, tl.max(tl.max(mask.to(tl.int32), axis=1), axis=0).to(tl.int8))


@triton.jit
def _keys(key_ptr, key, num_keys, C: tl.constexpr):
    inside = (key >= 0) & (key < num_keys)
    return tl.load(key_ptr + key[:, None] * C + tl.arange(0, C)[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _add_keys(query, keys, mask, peak, total, value, scale, PRECISION: tl.constexpr):
    score = tl.where(mask, tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, axis=1))
    shrink = tl.exp(peak - new_peak)
    weight = tl.exp(score - new_peak[:, None])
    total = total * shrink + tl.sum(weight, axis=1)
    value = value * shrink[:, None] + tl.dot(weight.to(keys.dtype), keys, input_precision=PRECISION)
    return new_peak, total, value


@triton.jit
def _attend(
    query_ptr, window_ptr, start_ptr, entry_ptr, visible_ptr, occupied_ptr, sink_ptr, output_ptr, lse_ptr,
    num_rows, num_entries, num_window, scale,
    H: tl.constexpr, C: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr, P: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    pack = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * P + tl.arange(0, P)
    row, head = place // H, place % H
    known = row < num_rows
    cells = (pack * num_rows * H + place)[:, None] * C + tl.arange(0, C)[None, :]
    query = tl.load(query_ptr + cells, mask=known[:, None], other=0.0)
    start = tl.load(start_ptr + pack * num_rows + row, mask=known, other=0)
    # the sink is one more score whose value is nothing
    peak = tl.load(sink_ptr + head)
    total = tl.full([P], 1.0, tl.float32)
    value = tl.zeros([P, C], tl.float32)
    first_row = (tl.program_id(0) * P) // H
    last_row = tl.minimum((tl.program_id(0) * P + P - 1) // H, num_rows - 1)
    for block in range(tl.maximum(first_row - num_window + 1, 0) // J, last_row // J + 1):
        key = block * J + tl.arange(0, J)
        keys = _keys(window_ptr + pack * num_rows * C, key, num_rows, C)
        mask = _near(row, key, num_rows, start, num_window)
        peak, total, value = _add_keys(query, keys, mask, peak, total, value, scale, PRECISION)
    if FAR:
        occupied = occupied_ptr + (pack * tl.num_programs(0) + tl.program_id(0)) * tl.cdiv(num_entries, J)
        for block in range(tl.cdiv(num_entries, J)):
            if tl.load(occupied + block) > 0:
                key = block * J + tl.arange(0, J)
                mask = _far(visible_ptr + pack * num_rows * num_entries, row, key, num_rows, num_entries)
                keys = _keys(entry_ptr + pack * num_entries * C, key, num_entries, C)
                peak, total, value = _add_keys(query, keys, mask, peak, total, value, scale, PRECISION)
    output = value / total[:, None]
    tl.store(output_ptr + cells, output.to(output_ptr.dtype.element_ty), mask=known[:, None])
    tl.store(lse_ptr + pack * num_rows * H + place, peak + tl.log(total), mask=known)


@triton.jit
def _mass(
    query_ptr, entry_ptr, visible_ptr, lse_ptr, mass_ptr, num_rows, num_entries, scale,
    H: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, P: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    pack = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * P + tl.arange(0, P)
    entry = tl.program_id(1) * J + tl.arange(0, J)
    mask = _far(visible_ptr + pack * num_rows * num_entries, row, entry, num_rows, num_entries)
    mass = tl.zeros([P, J], tl.float32)
    if tl.max(tl.max(mask.to(tl.int32), axis=1), axis=0) > 0:
        keys = _keys(entry_ptr + pack * num_entries * C, entry, num_entries, C)
        for head in range(H):
            place = (pack * num_rows + row) * H + head
            known = row < num_rows
            query = tl.load(query_ptr + place[:, None] * C + tl.arange(0, C)[None, :], mask=known[:, None], other=0.0)
            lse = tl.load(lse_ptr + place, mask=known, other=0.0)
            mass += tl.exp(tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale - lse[:, None])
        mass = tl.where(mask, mass, 0.0)
    inside = (row[:, None] < num_rows) & (entry[None, :] < num_entries)
    tl.store(mass_ptr + (pack * num_rows + row)[:, None] * num_entries + entry[None, :], mass, mask=inside)


@triton.jit
def _weights(query, keys, mask, lse, grad, delta, scale, PRECISION: tl.constexpr):
    """(softmax weights, gradient of the scaled scores) of a block, both [P, J]."""
    score = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
    weight = tl.where(mask, tl.exp(score - lse[:, None]), 0.0)
    return weight, weight * (tl.dot(grad, tl.trans(keys), input_precision=PRECISION) - delta[:, None])


@triton.jit
def _grad_query(
    query_ptr, window_ptr, start_ptr, entry_ptr, visible_ptr, occupied_ptr, lse_ptr, delta_ptr, grad_ptr,
    grad_query_ptr, num_rows, num_entries, num_window, scale,
    H: tl.constexpr, C: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr, P: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    pack = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * P + tl.arange(0, P)
    row = place // H
    known = row < num_rows
    cells = (pack * num_rows * H + place)[:, None] * C + tl.arange(0, C)[None, :]
    query = tl.load(query_ptr + cells, mask=known[:, None], other=0.0)
    grad = tl.load(grad_ptr + cells, mask=known[:, None], other=0.0)
    lse = tl.load(lse_ptr + pack * num_rows * H + place, mask=known, other=0.0)
    delta = tl.load(delta_ptr + pack * num_rows * H + place, mask=known, other=0.0)
    start = tl.load(start_ptr + pack * num_rows + row, mask=known, other=0)
    total = tl.zeros([P, C], tl.float32)
    first_row = (tl.program_id(0) * P) // H
    last_row = tl.minimum((tl.program_id(0) * P + P - 1) // H, num_rows - 1)
    for block in range(tl.maximum(first_row - num_window + 1, 0) // J, last_row // J + 1):
        key = block * J + tl.arange(0, J)
        keys = _keys(window_ptr + pack * num_rows * C, key, num_rows, C)
        mask = _near(row, key, num_rows, start, num_window)
        weight, slope = _weights(query, keys, mask, lse, grad, delta, scale, PRECISION)
        total += tl.dot(slope.to(keys.dtype), keys, input_precision=PRECISION)
    if FAR:
        occupied = occupied_ptr + (pack * tl.num_programs(0) + tl.program_id(0)) * tl.cdiv(num_entries, J)
        for block in range(tl.cdiv(num_entries, J)):
            if tl.load(occupied + block) > 0:
                key = block * J + tl.arange(0, J)
                mask = _far(visible_ptr + pack * num_rows * num_entries, row, key, num_rows, num_entries)
                keys = _keys(entry_ptr + pack * num_entries * C, key, num_entries, C)
                weight, slope = _weights(query, keys, mask, lse, grad, delta, scale, PRECISION)
                total += tl.dot(slope.to(keys.dtype), keys, input_precision=PRECISION)
    tl.store(grad_query_ptr + cells, (total * scale).to(grad_query_ptr.dtype.element_ty), mask=known[:, None])


@triton.jit
def _grad_keys(
    query_ptr, key_ptr, start_ptr, visible_ptr, occupied_ptr, lse_ptr, delta_ptr, grad_ptr, grad_key_ptr,
    num_rows, num_keys, num_window, scale,
    H: tl.constexpr, C: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr, P: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    pack = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * J + tl.arange(0, J)
    keys = _keys(key_ptr + pack * num_keys * C, key, num_keys, C)
    total = tl.zeros([J, C], tl.float32)
    first, last = 0, num_rows * H
    if not FAR:
        first = tl.program_id(0) * J * H
        last = tl.minimum((tl.program_id(0) * J + J - 1 + num_window) * H, num_rows * H)
    for begin in range(first, last, P):
        place = begin + tl.arange(0, P)
        row = place // H
        known = row < num_rows
        needed = True
        if FAR:
            block = pack * tl.cdiv(num_rows * H, P) + begin // P
            needed = tl.load(occupied_ptr + block * tl.num_programs(0) + tl.program_id(0)) > 0
        if needed:
            if FAR:
                mask = _far(visible_ptr + pack * num_rows * num_keys, row, key, num_rows, num_keys)
            else:
                start = tl.load(start_ptr + pack * num_rows + row, mask=known, other=0)
                mask = _near(row, key, num_rows, start, num_window)
            cells = (pack * num_rows * H + place)[:, None] * C + tl.arange(0, C)[None, :]
            query = tl.load(query_ptr + cells, mask=known[:, None], other=0.0)
            grad = tl.load(grad_ptr + cells, mask=known[:, None], other=0.0)
            lse = tl.load(lse_ptr + pack * num_rows * H + place, mask=known, other=0.0)
            delta = tl.load(delta_ptr + pack * num_rows * H + place, mask=known, other=0.0)
            weight, slope = _weights(query, keys, mask, lse, grad, delta, scale, PRECISION)
            # a key is its own value
            total += tl.dot(tl.trans(weight.to(grad.dtype)), grad, input_precision=PRECISION)
            total += tl.dot(tl.trans((slope * scale).to(query.dtype)), query, input_precision=PRECISION)
    cells = (pack * num_keys + key)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(grad_key_ptr + cells, total.to(grad_key_ptr.dtype.element_ty), mask=(key < num_keys)[:, None])


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BSHC: Tensor,
        window_BSC: Tensor,
        window_start_BS: Tensor,
        entry_BEC: Tensor | None,
        entry_visible_BSE: Tensor | None,
        sink_H: Tensor,
        num_window: int,
    ) -> tuple[Tensor, Tensor | None]:
        num_packs, num_rows, num_heads, channels = query_BSHC.shape
        query_BSHC, window_BSC = query_BSHC.contiguous(), window_BSC.contiguous()
        window_start_BS = window_start_BS.contiguous()
        far = entry_BEC is not None and entry_visible_BSE is not None and entry_BEC.shape[1] > 0
        # without entries the kernels never read these two
        entry = entry_BEC.contiguous() if far and entry_BEC is not None else window_BSC
        visible = entry_visible_BSE.contiguous() if far and entry_visible_BSE is not None else window_BSC
        num_entries = entry.shape[1] if far else 0
        constants = {
            "H": num_heads,
            "C": channels,
            "PRECISION": "ieee" if query_BSHC.dtype == torch.float32 else "tf32",
            "P": _ROWS,
            "J": _KEYS,
        }
        scale = channels**-0.5
        output_BSHC = torch.empty_like(query_BSHC)
        lse_BSH = torch.empty(query_BSHC.shape[:3], device=query_BSHC.device, dtype=torch.float32)
        blocks, key_blocks = triton.cdiv(num_rows * num_heads, _ROWS), triton.cdiv(num_entries, _KEYS)
        occupied = torch.empty(num_packs, blocks, max(1, key_blocks), device=query_BSHC.device, dtype=torch.int8)
        if far:
            # a block's rows may begin and end inside a position
            most_rows = next_power_of_2((_ROWS - 2) // num_heads + 2)
            _occupancy[(blocks, key_blocks, num_packs)](
                visible, occupied, num_rows, num_entries, H=num_heads, R=most_rows, P=_ROWS, J=_KEYS
            )
        _attend[(blocks, num_packs)](
            query_BSHC, window_BSC, window_start_BS, entry, visible, occupied, sink_H, output_BSHC, lse_BSH,
            num_rows, num_entries, num_window, scale, FAR=far, **constants,
        )  # fmt: skip
        mass_BSE = None
        if entry_BEC is not None:
            mass_BSE = lse_BSH.new_empty(num_packs, num_rows, num_entries)
            ctx.mark_non_differentiable(mass_BSE)
        if far and mass_BSE is not None:
            _mass[(triton.cdiv(num_rows, _ROWS), triton.cdiv(num_entries, _KEYS), num_packs)](
                query_BSHC, entry, visible, lse_BSH, mass_BSE, num_rows, num_entries, scale, **constants
            )
        ctx.save_for_backward(
            query_BSHC, window_BSC, window_start_BS, entry, visible, occupied, sink_H, output_BSHC, lse_BSH
        )
        ctx.has_entries, ctx.far, ctx.num_window, ctx.constants, ctx.scale = (
            entry_BEC is not None, far, num_window, constants, scale,
        )  # fmt: skip
        return output_BSHC, mass_BSE

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query_BSHC, window_BSC, start_BS, entry, visible, occupied, sink_H, output_BSHC, lse_BSH = ctx.saved_tensors
        num_packs, num_rows, num_heads, _ = query_BSHC.shape
        grad_BSHC = grads[0].contiguous()
        num_entries = entry.shape[1] if ctx.far else 0
        delta_BSH = (grad_BSHC.float() * output_BSHC.float()).sum(-1)
        grad_sink = -(torch.exp(sink_H - lse_BSH) * delta_BSH).sum((0, 1))
        grad_query = torch.empty_like(query_BSHC)
        _grad_query[(triton.cdiv(num_rows * num_heads, _ROWS), num_packs)](
            query_BSHC, window_BSC, start_BS, entry, visible, occupied, lse_BSH, delta_BSH, grad_BSHC, grad_query,
            num_rows, num_entries, ctx.num_window, ctx.scale, FAR=ctx.far, **ctx.constants,
        )  # fmt: skip
        grad_window = torch.empty_like(window_BSC)
        _grad_keys[(triton.cdiv(num_rows, _KEYS), num_packs)](
            query_BSHC, window_BSC, start_BS, visible, occupied, lse_BSH, delta_BSH, grad_BSHC, grad_window,
            num_rows, num_rows, ctx.num_window, ctx.scale, FAR=False, **ctx.constants,
        )  # fmt: skip
        grad_entry = None
        if ctx.far:
            grad_entry = torch.empty_like(entry)
            _grad_keys[(triton.cdiv(num_entries, _KEYS), num_packs)](
                query_BSHC, entry, start_BS, visible, occupied, lse_BSH, delta_BSH, grad_BSHC, grad_entry,
                num_rows, num_entries, ctx.num_window, ctx.scale, FAR=True, **ctx.constants,
            )  # fmt: skip
        return grad_query, grad_window, None, grad_entry, None, grad_sink.to(sink_H.dtype), None


def masked_attention(
    query_BSHC: Tensor,
    window_BSC: Tensor,
    window_start_BS: Tensor,
    entry_BEC: Tensor | None,
    entry_visible_BSE: Tensor | None,
    sink_H: Tensor,
    num_window: int,
) -> tuple[Tensor, Tensor | None]:
    result: tuple[Tensor, Tensor | None] = _MaskedAttention.apply(
        query_BSHC, window_BSC, window_start_BS, entry_BEC, entry_visible_BSE, sink_H, num_window
    )
    return result
