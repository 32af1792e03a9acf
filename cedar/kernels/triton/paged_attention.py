"""Attention of decoding rows over FP8 window rows and FP4 entries as they lie in the cache.

A program reads one share of one row's keys for all its heads, each key once, as key and as value; with several
shares a second kernel joins them. Queries turn on the way in, outputs turn back on the way out.

T rows, H heads, C latent channels, W window rows, K selected entries, S shares, J keys of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.pages import Paged, Stored
from cedar.kernels.triton.chain import AHEAD, HOPPER, follow
from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.stored import e2m1_planes, e4m3_half, e4m3_value, e8m0_half, e8m0_value
from cedar.kernels.triton.wide_attention import _attend_wide

__all__ = ["FORWARD_ONLY", "fits", "paged_attention", "unavailable"]

FORWARD_ONLY = ("paged_attention",)
# programs that fill a Hopper chip
_PROGRAMS = 132
# warp groups multiply on Hopper alone; without a GPU kernels are compiled for it
_WIDE = HOPPER and (not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9)


def fits(op: str, query: Tensor) -> bool:
    """At most 64 heads of a power of two of channels: 32 to 512, in float32 to 256."""
    channels = query.shape[-1]
    power = channels & (channels - 1) == 0 and 32 <= channels <= (256 if query.dtype == torch.float32 else 512)
    return power and query.shape[1] <= 64 and is_half_or_float(query) and query.stride(-1) == 1


@triton.jit
def _scores_and_values(
    query_even, query_odd, even, odd, there, best, total, out_even, out_odd, scale, EXACT: tl.constexpr
):
    """One tile of keys into the running softmax."""
    if EXACT:
        score = tl.dot(query_even, tl.trans(even), input_precision="ieee")
        score = tl.dot(query_odd, tl.trans(odd), score, input_precision="ieee")
    else:
        score = tl.dot(query_even, tl.trans(even))
        score = tl.dot(query_odd, tl.trans(odd), score)
    score = tl.where(there[None, :], score * scale, -1e30)
    higher = tl.maximum(best, tl.max(score, axis=1))
    shrink = tl.exp2(best - higher)
    weight = tl.where(there[None, :], tl.exp2(score - higher[:, None]), 0.0)
    total = total * shrink + tl.sum(weight, axis=1)
    if EXACT:
        out_even = tl.dot(weight, even, out_even * shrink[:, None], input_precision="ieee")
        out_odd = tl.dot(weight, odd, out_odd * shrink[:, None], input_precision="ieee")
    else:
        out_even = tl.dot(weight.to(tl.float16), even, out_even * shrink[:, None])
        out_odd = tl.dot(weight.to(tl.float16), odd, out_odd * shrink[:, None])
    return higher, total, out_even, out_odd


@triton.jit
def _turned_back(out_even, out_odd, cos, sin, dtype: tl.constexpr):
    even, odd = out_even.to(dtype).to(tl.float32), out_odd.to(dtype).to(tl.float32)
    return (even * cos + odd * sin).to(dtype), (odd * cos - even * sin).to(dtype)


@triton.jit
def _attend(
    query_ptr, cos_ptr, sin_ptr, slot_ptr, position_ptr, floor_ptr,
    codes_ptr, scales_ptr, code_page, code_row, scale_page, scale_row,
    entry_codes_ptr, entry_scales_ptr, entry_code_page, entry_code_row, entry_scale_page, entry_scale_row,
    page_ptr, entry_slot_ptr, page_stride, selection_ptr, sink_ptr, out_ptr, partial_ptr, peak_ptr,
    query_stride, num_heads, num_angles, num_window, num_selected, tiles_a_share, scale,
    RING: tl.constexpr, PER_PAGE: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, J: tl.constexpr, ALONE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    follow()
    HALF: tl.constexpr = C // 2
    t, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, pair, key = tl.arange(0, H), tl.arange(0, HALF), tl.arange(0, J)
    known = (head < num_heads)[:, None]
    operand: tl.constexpr = tl.float32 if EXACT else tl.float16
    # float16 keys are 2**4 of their value: entries reach 2688, window rows go down to 2**-18 of their scale
    KEYS: tl.constexpr = 1.0 if EXACT else 0.0625
    dtype: tl.constexpr = out_ptr.dtype.element_ty

    # the queries, in planes, turned
    place = query_ptr + t * query_stride + head[:, None] * C + 2 * pair[None, :]
    even = tl.load(place, mask=known, other=0.0).to(tl.float32)
    odd = tl.load(place + 1, mask=known, other=0.0).to(tl.float32)
    turned = pair - (HALF - num_angles)
    cos = tl.load(cos_ptr + t * num_angles + turned, mask=turned >= 0, other=1.0)[None, :]
    sin = tl.load(sin_ptr + t * num_angles + turned, mask=turned >= 0, other=0.0)[None, :]
    query_even = (even * cos - odd * sin).to(dtype).to(operand)
    query_odd = (even * sin + odd * cos).to(dtype).to(operand)

    best = tl.full([H], -1e30, tl.float32)
    total = tl.zeros([H], tl.float32)
    out_even = tl.zeros([H, HALF], tl.float32)
    out_odd = tl.zeros([H, HALF], tl.float32)
    slot, position, floor = tl.load(slot_ptr + t), tl.load(position_ptr + t), tl.load(floor_ptr + t)
    window_tiles = tl.cdiv(num_window, J)
    first = share * tiles_a_share
    last = tl.minimum(first + tiles_a_share, window_tiles + tl.cdiv(num_selected, J))

    group32 = tl.arange(0, C // 32)
    for tile in range(first, tl.minimum(last, window_tiles)):
        column = tile * J + key
        where = position - num_window + 1 + column
        there = (column < num_window) & (where >= floor) & (where >= 0)
        row = tl.where(there, where, 0) % RING
        code = codes_ptr + slot * code_page + row[:, None] * code_row
        exponent = tl.load(
            scales_ptr + slot * scale_page + row[:, None] * scale_row + group32[None, :], mask=there[:, None], other=127
        )
        # both channels of a pair in one load
        both = tl.load(code.to(tl.pointer_type(tl.uint16)) + pair[None, :], mask=there[:, None], other=0)
        even_byte, odd_byte = (both & 0xFF).to(tl.uint8), (both >> 8).to(tl.uint8)
        if EXACT:
            spread = tl.reshape(tl.broadcast_to(e8m0_value(exponent)[:, :, None], (J, C // 32, 16)), (J, HALF))
            key_even, key_odd = e4m3_value(even_byte) * spread, e4m3_value(odd_byte) * spread
        else:
            half = tl.reshape(tl.broadcast_to(e8m0_half(exponent, 4)[:, :, None], (J, C // 32, 16)), (J, HALF))
            key_even, key_odd = e4m3_half(even_byte) * half, e4m3_half(odd_byte) * half
        best, total, out_even, out_odd = _scores_and_values(
            query_even, query_odd, key_even, key_odd, there, best, total, out_even, out_odd, scale * KEYS, EXACT
        )

    group16 = tl.arange(0, C // 16)
    page_ptr += tl.load(entry_slot_ptr + t) * page_stride
    for tile in range(tl.maximum(first, window_tiles), last):
        column = (tile - window_tiles) * J + key
        entry = tl.load(selection_ptr + t * num_selected + column, mask=column < num_selected, other=-1)
        there = entry >= 0
        entry = tl.where(there, entry, 0)
        page = tl.load(page_ptr + entry // PER_PAGE, mask=there, other=0)
        row = entry % PER_PAGE
        code = entry_codes_ptr + page[:, None] * entry_code_page + row[:, None] * entry_code_row + pair[None, :]
        byte = tl.load(code, mask=there[:, None], other=0)
        scale_place = entry_scales_ptr + page[:, None] * entry_scale_page + row[:, None] * entry_scale_row
        factor = tl.load(scale_place + group16[None, :], mask=there[:, None], other=0)
        low, high = e2m1_planes(byte)
        if EXACT:
            scales = e4m3_value(factor) * 16384.0
            spread = tl.reshape(tl.broadcast_to(scales[:, :, None], (J, C // 16, 8)), (J, HALF))
            key_even, key_odd = low.to(tl.float32) * spread, high.to(tl.float32) * spread
        else:
            # 2**-3 of the nibble times 2**7 of the scale: both, and their product, are exact in float16
            scales = e4m3_half(factor) * 128.0
            half = tl.reshape(tl.broadcast_to(scales[:, :, None], (J, C // 16, 8)), (J, HALF))
            key_even, key_odd = (low * 2048.0) * half, (high * 2048.0) * half
        best, total, out_even, out_odd = _scores_and_values(
            query_even, query_odd, key_even, key_odd, there, best, total, out_even, out_odd, scale * KEYS, EXACT
        )

    out = t * num_heads * C + head[:, None] * C + 2 * pair[None, :]
    if ALONE:
        sink = tl.load(sink_ptr + head, mask=head < num_heads, other=0.0) * 1.4426950408889634
        peak = tl.maximum(best, sink)
        shrink = tl.exp2(best - peak)
        whole = (shrink * KEYS / (total * shrink + tl.exp2(sink - peak)))[:, None]
        even_out, odd_out = _turned_back(out_even * whole, out_odd * whole, cos, sin, dtype)
        tl.store(out_ptr + out, even_out, mask=known)
        tl.store(out_ptr + out + 1, odd_out, mask=known)
    else:
        base = (t * tl.num_programs(1) + share) * num_heads + head
        tl.store(peak_ptr + 2 * base, best, mask=head < num_heads)
        tl.store(peak_ptr + 2 * base + 1, total, mask=head < num_heads)
        partial = partial_ptr + base[:, None] * C + pair[None, :]
        tl.store(partial, out_even * KEYS, mask=known)
        tl.store(partial + HALF, out_odd * KEYS, mask=known)


@triton.jit
def _join(
    partial_ptr, peak_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, num_heads, num_angles, shares,
    C: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    follow()
    HALF: tl.constexpr = C // 2
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    share, pair = tl.arange(0, S), tl.arange(0, HALF)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    # all shares at once: one wait for memory
    base = (t * shares + share) * num_heads + head
    there = share < shares
    peak_S = tl.load(peak_ptr + 2 * base, mask=there, other=-1e30)
    total_S = tl.load(peak_ptr + 2 * base + 1, mask=there, other=0.0)
    place = partial_ptr + base[:, None] * C + pair[None, :]
    even_SP = tl.load(place, mask=there[:, None], other=0.0)
    odd_SP = tl.load(place + HALF, mask=there[:, None], other=0.0)
    sink = tl.load(sink_ptr + head) * 1.4426950408889634
    turned = pair - (HALF - num_angles)
    cos = tl.load(cos_ptr + t * num_angles + turned, mask=turned >= 0, other=1.0)
    sin = tl.load(sin_ptr + t * num_angles + turned, mask=turned >= 0, other=0.0)
    peak = tl.maximum(tl.max(peak_S, axis=0), sink)
    shrink_S = tl.exp2(peak_S - peak)
    whole = 1.0 / (tl.sum(shrink_S * total_S, axis=0) + tl.exp2(sink - peak))
    even = tl.sum(shrink_S[:, None] * even_SP, axis=0) * whole
    odd = tl.sum(shrink_S[:, None] * odd_SP, axis=0) * whole
    even_out, odd_out = _turned_back(even, odd, cos, sin, dtype)
    out = out_ptr + (t * num_heads + head) * C + 2 * pair
    tl.store(out, even_out)
    tl.store(out + 1, odd_out)


def _of_words(stored: Stored) -> bool:
    """Whether codes can be read four bytes at a time."""
    codes = stored.codes_PNX
    return (codes.stride(0) | codes.stride(1) | codes.data_ptr()) % 4 == 0


def _num_shares(num_rows: int, num_tiles: int, wide: bool) -> int:
    """Shares of a row's tiles that pay (64 heads of 512 channels measured)."""
    # two tiles are not worth a second kernel
    if num_tiles <= 2:
        return 1
    at_once = max(1, min(num_tiles, _PROGRAMS // num_rows))
    if not wide or num_rows <= 4:
        return at_once
    # a wide program takes two tiles in the time that it takes to join two
    return 1 if at_once == 2 else min(at_once, triton.cdiv(num_tiles, 2))


def paged_attention(
    query_THC: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    window: Stored,
    slot_T: Tensor,
    position_T: Tensor,
    floor_T: Tensor,
    entries: Paged | None,
    selection_TK: Tensor | None,
    sink_H: Tensor,
    num_window: int,
    *,
    shares: int | None = None,
    wide: bool | None = None,
) -> Tensor:
    """As the public op.

    Args:
        shares: Of a row's keys, side by side; as many as pay if None.
        wide: Whether `wide_attention` runs, whose window is no longer than its ring; where it was measured if None.
    """
    num_rows, num_heads, channels = query_THC.shape
    output_THC = torch.empty(num_rows, num_heads, channels, device=query_THC.device, dtype=query_THC.dtype)
    if num_rows == 0:
        return output_THC
    exact = query_THC.dtype == torch.float32
    num_selected = 0 if selection_TK is None else selection_TK.shape[1]
    # unused pointers must still be tensors
    stored, page_SP, entry_slot_T = (window, slot_T, slot_T) if entries is None else entries
    if wide is None:
        wide = _WIDE and not exact and channels == 512 and num_selected <= 4096
        wide = wide and num_window <= window.codes_PNX.shape[1] and _of_words(window) and _of_words(stored)
    tile = 16 if exact and channels > 128 else min(64, max(16, next_power_of_2(max(num_window, num_selected))))
    num_tiles = triton.cdiv(num_window, tile) + triton.cdiv(num_selected, tile)
    if shares is None:
        shares = _num_shares(num_rows, num_tiles, wide)
    tiles_a_share = triton.cdiv(num_tiles, shares)
    shares = triton.cdiv(num_tiles, tiles_a_share)
    selection = slot_T if selection_TK is None else selection_TK.contiguous()
    new: dict[str, Any] = {"device": query_THC.device, "dtype": torch.float32}
    partial = torch.empty(num_rows * shares * num_heads * channels if shares > 1 else 1, **new)
    peak = torch.empty(num_rows * shares * num_heads * 2 if shares > 1 else 1, **new)
    codes, scales = window.codes_PNX, window.scales_PNG
    arguments = (
        query_THC, cos_TR, sin_TR, slot_T, position_T, floor_T.contiguous(),
        codes, scales, codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1),
        stored.codes_PNX, stored.scales_PNG, stored.codes_PNX.stride(0), stored.codes_PNX.stride(1),
        stored.scales_PNG.stride(0), stored.scales_PNG.stride(1),
        page_SP, entry_slot_T, page_SP.stride(0), selection, sink_H, output_THC, partial, peak,
        query_THC.stride(0), num_heads, cos_TR.shape[-1], num_window, num_selected, tiles_a_share,
        channels**-0.5 * 1.4426950408889634,
    )  # fmt: skip
    constants = {"RING": codes.shape[1], "PER_PAGE": stored.codes_PNX.shape[1], "C": channels, "J": tile}
    if wide:
        tiles = max(1, next_power_of_2(triton.cdiv(num_selected, tile)))
        _attend_wide[(num_rows, shares)](
            *arguments, **constants, TILES=tiles, H=64, ALONE=shares == 1, num_warps=8, launch_pdl=AHEAD
        )
    else:
        _attend[(num_rows, shares)](
            *arguments, **constants, H=max(16, next_power_of_2(num_heads)), ALONE=shares == 1, EXACT=exact,
            num_warps=8 if channels >= 256 else 4, num_stages=1, launch_pdl=AHEAD,
        )  # fmt: skip
    if shares > 1:
        _join[(num_rows, num_heads)](
            partial,
            peak,
            sink_H,
            cos_TR,
            sin_TR,
            output_THC,
            num_heads,
            cos_TR.shape[-1],
            shares,
            C=channels,
            S=next_power_of_2(shares),
            launch_pdl=AHEAD,
        )
    return output_THC
