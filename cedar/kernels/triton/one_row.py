"""`packed_linear` of one row on Hopper, in Gluon, which says where each value lies: no tensor core, no shared memory.

A thread loads 16 bytes of a weight's row at a time, two steps ahead of their use, and what it multiplies them with
lies in its own registers: E4M3 becomes two float16 by one instruction, float32 by two more, and one multiplies and
adds. The scale multiplies x, once for all outputs under it. Nothing waits for another warp before the end.

B outputs of a program, K channels of a step.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cedar.kernels.triton.arrivals import counters
from cedar.kernels.triton.chain import AHEAD, HOPPER

__all__ = ["RUNS", "product"]

# two codes become float16 by one instruction from Ada on; it was measured on Hopper
RUNS = HOPPER
_OUTPUTS, _LANES, _WARPS = 32, 8, 2
# of a launch, and whose tiles may have shares: one counter each
_PROGRAMS, _MAX_SHARED = 1056, 512


@gluon.jit
def _widen(word):
    """Words of four E4M3 codes -> four float32."""
    return gl.inline_asm_elementwise(
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
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _scaled(four, scale):
    """int64 of four bfloat16 -> float32 of each, times the scale."""
    low, high = four.to(gl.int32), (four >> 32).to(gl.int32)
    a, b = (low << 16).to(gl.float32, bitcast=True), (low & -65536).to(gl.float32, bitcast=True)
    c, d = (high << 16).to(gl.float32, bitcast=True), (high & -65536).to(gl.float32, bitcast=True)
    return a * scale, b * scale, c * scale, d * scale


@gluon.jit
def _keep(y_ptr, y, ROUNDED: gl.constexpr):
    """Stores a program's outputs, a group of FP8 as `quantize.round_groups` rounds it."""
    y = y.to(gl.bfloat16)
    if ROUNDED:
        value = y.to(gl.float32)
        exponent = (gl.maximum(gl.max(gl.abs(value), axis=0), 1e-4) * (1.0 / 448.0)).to(gl.int32, bitcast=True)
        exponent = (exponent + 0x007FFFFF) & 0x7F800000
        # the scale is a power of two, its inverse exact
        value *= (0x7F000000 - exponent).to(gl.float32, bitcast=True)
        bits = gl.maximum(value.to(gl.int32, bitcast=True) & 0x7F800000, 121 << 23)
        shift = bits.to(gl.float32, bitcast=True) * 1572864.0
        y = (((value + shift) - shift) * exponent.to(gl.float32, bitcast=True)).to(gl.bfloat16)
    gl.store(y_ptr, y)


@gluon.jit
def _codes(w_row, step, last, left, K: gl.constexpr):
    """A thread's words of a step: [B, K / 16, 4]; zeros past the end."""
    there = (step * K < left) & (step < last)
    return gl.load(w_row + step * (K // 4), mask=gl.expand_dims(there, 0), other=0)


@gluon.jit(do_not_specialize=["steps_a_share"])
def _one_row(
    x_ptr, codes_ptr, scales_ptr, y_ptr, partial_ptr, arrived_ptr, group_stride, channels, outputs, steps_a_share,
    SHARES: gl.constexpr, ROUNDED: gl.constexpr, B: gl.constexpr, L: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    # L lanes of a warp lie along the channels
    K: gl.constexpr = 16 * L
    HELD: gl.constexpr = gl.BlockedLayout([1, 1, 4], [32 // L, L, 1], [WARPS, 1, 1], [2, 1, 0])
    X: gl.constexpr = gl.SliceLayout(0, HELD)
    tiles = outputs // B
    group, tile = gl.program_id(0) // tiles, gl.program_id(0) % tiles
    share = gl.program_id(1)
    first = share * steps_a_share
    last = gl.minimum(first + steps_a_share, gl.cdiv(channels, K))
    inner = gl.expand_dims(gl.expand_dims(gl.arange(0, B, layout=gl.SliceLayout(1, gl.SliceLayout(2, HELD))), 1), 2)
    sixteen = gl.arange(0, L, layout=gl.SliceLayout(1, X))
    place = gl.expand_dims(sixteen * 4, 1) + gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, X)), 0)
    # of a thread's channels, which are there or not as one
    left = channels - gl.expand_dims(sixteen * 16, 1)
    codes_ptr += (group * outputs + tile * B).to(gl.int64) * channels
    w_row = codes_ptr.to(gl.pointer_type(gl.int32)) + inner * (channels // 4) + gl.expand_dims(place, 0)
    x_row = (x_ptr + group * group_stride).to(gl.pointer_type(gl.int64)) + place
    scale_row = scales_ptr + (group * (outputs // 32) + tile * B // 32) * (channels // 32)
    scale_row += gl.expand_dims(sixteen // 2, 1)
    # weights are nobody's output
    even = _codes(w_row, first, last, left, K)
    odd = _codes(w_row, first + 1, last, left, K)
    gdc_wait()
    total = gl.zeros([B, L, 4], gl.float32, HELD)
    for start in range(first, last, 2):
        for turn in gl.static_range(2):
            step = start + turn
            there = (step * K < left) & (step < last)
            four = gl.load(x_row + step * (K // 4), mask=there, other=0)
            byte = gl.load(scale_row + step * (K // 32), mask=there, other=0)
            if turn == 0:
                a, b, c, d = _widen(even)
                even = _codes(w_row, step + 2, last, left, K)
            else:
                a, b, c, d = _widen(odd)
                odd = _codes(w_row, step + 2, last, left, K)
            x0, x1, x2, x3 = _scaled(four, (byte.to(gl.int32) << 23).to(gl.float32, bitcast=True))
            total += a * gl.expand_dims(x0, 0)
            total += b * gl.expand_dims(x1, 0)
            total += c * gl.expand_dims(x2, 0)
            total += d * gl.expand_dims(x3, 0)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    y = gl.convert_layout(gl.sum(gl.sum(total, axis=2), axis=1), LINE)
    output = group * outputs + tile * B + gl.arange(0, B, layout=LINE)
    if SHARES == 1:
        _keep(y_ptr + output, y, ROUNDED)
    else:
        stride = gl.num_programs(0) * B
        gl.store(partial_ptr + share * stride + output, y)
        gl.thread_barrier()
        # who comes last adds all shares, always in the same order
        arrived_ptr += gl.program_id(0)
        if gl.atomic_add(arrived_ptr, 1, sem="acq_rel") == SHARES - 1:
            gl.store(arrived_ptr, 0)
            y = gl.zeros([B], gl.float32, LINE)
            for other in gl.static_range(SHARES):
                y += gl.load(partial_ptr + other * stride + output, cache_modifier=".cg")
            _keep(y_ptr + output, y, ROUNDED)


def product(x_GI: Tensor, codes_GOI: Tensor, scales: Tensor, rounded: bool) -> Tensor:
    """[G, O]; whole tiles of 32 outputs, x in bfloat16 and aligned to 16 bytes."""
    (num_groups, outputs, channels), device = codes_GOI.shape, x_GI.device
    tiles, steps = num_groups * outputs // _OUTPUTS, triton.cdiv(channels, 16 * _LANES)
    shares = max(1, min(steps // 2, _PROGRAMS // tiles)) if tiles <= _MAX_SHARED else 1
    steps_a_share = triton.cdiv(steps, shares)
    shares = triton.cdiv(steps, steps_a_share)
    y_GO = torch.empty(num_groups, outputs, device=device, dtype=torch.bfloat16)
    partial, arrived = y_GO, y_GO
    if shares > 1:
        partial = torch.empty(shares, num_groups, outputs, device=device, dtype=torch.float32)
        arrived = counters(device, tiles)
    _one_row[(tiles, shares)](
        x_GI, codes_GOI, scales, y_GO, partial, arrived, x_GI.stride(0), channels, outputs, steps_a_share,
        SHARES=shares, ROUNDED=rounded, B=_OUTPUTS, L=_LANES, WARPS=_WARPS, num_warps=_WARPS, launch_pdl=AHEAD,
    )  # fmt: skip
    return y_GO
