"""`packed_linear` of one row without the tensor core: each byte of the weight goes from memory to a register.

A program has 32 outputs, which share their scales, so the scale multiplies x once for all of them. Words are loaded
two steps ahead of their use, the first ones while the kernel before still runs; a code is widened by half an
instruction to float16 and one to float32. Long inputs are cut into shares that run side by side; who comes last adds
them all, always in the same order. The programs fill the chip's registers, and the kernel behind is let in late: that
takes 3 to 5 us off a layer.

K channels of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.triton.arrivals import counters
from cedar.kernels.triton.chain import AHEAD, HOPPER, announce, wait
from cedar.kernels.triton.device import INTERPRETED
from cedar.kernels.triton.quantize import round_groups
from cedar.kernels.triton.stored import e4m3_half, e8m0_value

__all__ = ["fits", "one_row"]

_CHANNELS = 128
# that keep a Hopper chip's memory busy, and the tiles of which a launch may have shares: one counter each
_PROGRAMS, _MAX_SHARED = 1056, 512
_INTERPRETED = tl.constexpr(INTERPRETED)
# where it was measured
_RUNS = HOPPER or INTERPRETED


def fits(x_GI: Tensor, codes_GOI: Tensor) -> bool:
    """bfloat16, whole tiles of 32 outputs."""
    return _RUNS and x_GI.dtype == torch.bfloat16 and codes_GOI.shape[1] % 32 == 0


@triton.jit
def _widen(word):
    """Words of four E4M3 codes -> four float32."""
    if _INTERPRETED:
        a, b = e4m3_half((word & 0xFF).to(tl.uint8)), e4m3_half((word >> 8 & 0xFF).to(tl.uint8))
        c, d = e4m3_half((word >> 16 & 0xFF).to(tl.uint8)), e4m3_half((word >> 24 & 0xFF).to(tl.uint8))
        a, b, c, d = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, first, second;
            .reg .b32 pair;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 pair, low;
            mov.b32 {first, second}, pair;
            cvt.f32.f16 $0, first;
            cvt.f32.f16 $1, second;
            cvt.rn.f16x2.e4m3x2 pair, high;
            mov.b32 {first, second}, pair;
            cvt.f32.f16 $2, first;
            cvt.f32.f16 $3, second;
            }""",
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return a, b, c, d


@triton.jit
def _words(w_row, step, last, channels, K: tl.constexpr):
    """A step's words of 32 outputs; zeros past the end."""
    quad = tl.arange(0, K // 4)
    inside = (step * (K // 4) + quad < channels // 4)[None, :] & (step < last)
    return tl.load(w_row + step * (K // 4), mask=inside, other=0)


@triton.jit
def _keep(y_ptr, y, ROUNDED: tl.constexpr):
    y = y.to(y_ptr.dtype.element_ty)
    if ROUNDED:
        # the outputs of a program are one group
        y = tl.reshape(round_groups(tl.reshape(y.to(tl.float32), (1, 32)), 0), (32,))
    tl.store(y_ptr + tl.arange(0, 32), y.to(y_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["steps_a_share"])
def _one_row(
    x_ptr, codes_ptr, scales_ptr, y_ptr, partial_ptr, arrived_ptr, group_stride, channels, outputs, steps_a_share,
    SHARES: tl.constexpr, ROUNDED: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tiles = outputs // 32
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    share = tl.program_id(1)
    first = share * steps_a_share
    last = tl.minimum(first + steps_a_share, tl.cdiv(channels, K))
    channel, part = tl.arange(0, K), tl.arange(0, K // 32)
    codes_ptr += (group * outputs + tile * 32).to(tl.int64) * channels
    w_row = codes_ptr.to(tl.pointer_type(tl.int32)) + tl.arange(0, 32)[:, None] * (channels // 4)
    w_row += tl.arange(0, K // 4)[None, :]
    scale_row = scales_ptr + tl.program_id(0) * (channels // 32) + part
    x_row = x_ptr + group * group_stride + channel
    total = tl.zeros([32, K // 4], tl.float32)
    word = _words(w_row, first, last, channels, K)
    next_word = _words(w_row, first + 1, last, channels, K)
    wait()
    for step in tl.range(first, last, num_stages=1):
        x = tl.load(x_row + step * K, mask=step * K + channel < channels, other=0.0).to(tl.float32)
        exponent = tl.load(scale_row + step * (K // 32), mask=step * K + part * 32 < channels, other=0)
        second = _words(w_row, step + 2, last, channels, K)
        x = tl.reshape(x, (K // 32, 32)) * e8m0_value(exponent)[:, None]
        even, odd = tl.split(tl.reshape(x, (K // 4, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        a, b, c, d = _widen(word)
        total += a * x0[None, :]
        total += b * x1[None, :]
        total += c * x2[None, :]
        total += d * x3[None, :]
        word, next_word = next_word, second
    announce()
    y = tl.sum(total, axis=1)
    y_ptr += tl.program_id(0) * 32
    if SHARES == 1:
        _keep(y_ptr, y, ROUNDED)
    else:
        stride = tl.num_programs(0) * 32
        place = tl.program_id(0) * 32 + tl.arange(0, 32)
        tl.store(partial_ptr + share * stride + place, y)
        tl.debug_barrier()
        arrived_ptr += tl.program_id(0)
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == SHARES - 1:
            tl.store(arrived_ptr, 0)
            y = tl.zeros([32], tl.float32)
            for other in tl.static_range(SHARES):
                y += tl.load(partial_ptr + other * stride + place, cache_modifier=".cg")
            _keep(y_ptr, y, ROUNDED)


def one_row(x_GI: Tensor, codes_GOI: Tensor, scales: Tensor, rounded: bool) -> Tensor:
    """[G, O], rounded to FP8 if told to."""
    (num_groups, outputs, channels), device = codes_GOI.shape, x_GI.device
    tiles, steps = num_groups * outputs // 32, triton.cdiv(channels, _CHANNELS)
    shares = max(1, min(steps // 2, _PROGRAMS // tiles)) if tiles <= _MAX_SHARED else 1
    steps_a_share = triton.cdiv(steps, shares)
    shares = triton.cdiv(steps, steps_a_share)
    y_GO = torch.empty(num_groups, outputs, device=device, dtype=x_GI.dtype)
    # unused pointers must still be tensors
    partial, arrived = y_GO, y_GO
    if shares > 1:
        partial = torch.empty(shares, num_groups, outputs, device=device, dtype=torch.float32)
        arrived = counters(device, tiles)
    _one_row[(tiles, shares)](
        x_GI, codes_GOI, scales, y_GO, partial, arrived, x_GI.stride(0), channels, outputs, steps_a_share,
        SHARES=shares, ROUNDED=rounded, K=_CHANNELS, num_warps=2, launch_pdl=AHEAD,
    )  # fmt: skip
    return y_GO
