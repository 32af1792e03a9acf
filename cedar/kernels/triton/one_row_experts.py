"""`packed_experts` of one row: no plan, and programs so small that the memory is never without a question.

A row's choices are experts of its own, so each is a product of one row and nothing is sorted. A program has 32 or 64
outputs and a share of the channels; its words are loaded steps ahead of their use, into registers, and go to a tensor core
without passing shared memory. Who comes last adds all shares, always in the same order.

K choices of a row, B outputs of a program. A step is 256 channels, a tile 64 outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.experts import Tiled
from cedar.kernels.triton.arrivals import counters
from cedar.kernels.triton.chain import AHEAD, announce, wait
from cedar.kernels.triton.few_rows import round_channels
from cedar.kernels.triton.device import INTERPRETED

_STEP = 256
_INTERPRETED = tl.constexpr(INTERPRETED)
UP = dict(B=32, SHARES=2, DEPTH=1, LATE=True, UNROLL=1, HINT="", warps=2)
DOWN = dict(B=32, SHARES=1, DEPTH=2, LATE=True, EARLY=True, UNROLL=1, HINT="", warps=2)


@triton.jit
def _words(codes_ptr, tile, first, step, last, steps, B: tl.constexpr, HINT: tl.constexpr):
    """A step's words of B outputs; zeros past the end. Their order: half of the step, half of sixteen, lane, word."""
    place = tl.arange(0, B * 32)
    place = place // (B * 8) * 512 + place % (B * 8) + first * 8
    return tl.load(codes_ptr + (tile * steps + step) * 2048 + place, mask=step < last, other=0, eviction_policy=HINT)


@triton.jit
def _scales(scales_ptr, tile, first, step, last, steps, B: tl.constexpr):
    lane = tl.arange(0, B * 2)
    return tl.load(scales_ptr + (tile * steps + step) * 128 + first * 2 + lane, mask=step < last, other=0)


def _assembly() -> str:
    """One warp: 16 words a thread times 32 channels, two chains of products, one for each half of the step."""
    lines = ["{", ".reg .b32 a<4>, b<4>, t<4>;", ".reg .f32 d<4>, e<4>, s<4>;", ".reg .b16 h<4>;"]
    lines += [f"mov.f32 {name}{i}, 0f00000000;" for name in "de" for i in range(4)]
    for half, name in enumerate("de"):
        for i in range(4):
            for a, regs in enumerate("ab"):
                w = f"${16 + half * 8 + a * 4 + i}"
                lines += [
                    f"and.b32 {regs}0, {w}, 0x8E008E00;",
                    f"shl.b32 t0, {w}, 3;", f"and.b32 {regs}1, t0, 0x8E008E00;",
                    f"shl.b32 t0, {w}, 6;", f"shl.b32 t1, {w}, 1;", "xor.b32 t0, t0, t1;", f"and.b32 {regs}2, t0, 0x8E008E00;",
                    f"shl.b32 t0, {w}, 9;", f"shl.b32 t1, {w}, 2;", "xor.b32 t0, t0, t1;", f"and.b32 {regs}3, t0, 0x8E008E00;",
                ]
            d = ", ".join(f"{name}{k}" for k in range(4))
            for p in (0, 2):
                x0, x1 = f"${32 + i * 4 + p}", f"${33 + i * 4 + p}"
                lines.append(
                    f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{d}}}, "
                    f"{{a{p}, b{p}, a{p + 1}, b{p + 1}}}, {{{x0}, {x1}}}, {{{d}}};"
                )
    lines += [
        "prmt.b32 t0, $48, 0, 0x1404;", "prmt.b32 t1, $48, 0, 0x3424;",
        "mov.b32 {h0, h1}, t0;", "mov.b32 {h2, h3}, t1;",
        *(f"cvt.f32.f16 s{i}, h{i};" for i in range(4)),
        "mul.f32 d0, d0, s0;", "fma.rn.f32 $0, e1, s2, d0;",
        "mul.f32 d2, d2, s1;", "fma.rn.f32 $1, e3, s3, d2;",
        *(f"mov.f32 ${i}, 0f00000000;" for i in range(2, 16)), "}",
    ]
    return "\n".join(lines)


_ASM = tl.constexpr(_assembly())
_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 16 + ["r"] * 48))


@triton.jit
def _pairs(x, HALF: tl.constexpr):
    """Words of two channels, eight a thread -> words of two float16, channels four apart, as the codes of a word are."""
    if _INTERPRETED:
        return x
    if HALF:
        return tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $4, $6, 0x5410;
            prmt.b32 $1, $4, $6, 0x7632;
            prmt.b32 $2, $5, $7, 0x5410;
            prmt.b32 $3, $5, $7, 0x7632;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r", [x], dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a<8>;
        shl.b32 a0, $4, 16;
        and.b32 a1, $4, 0xffff0000;
        shl.b32 a2, $5, 16;
        and.b32 a3, $5, 0xffff0000;
        shl.b32 a4, $6, 16;
        and.b32 a5, $6, 0xffff0000;
        shl.b32 a6, $7, 16;
        and.b32 a7, $7, 0xffff0000;
        cvt.rn.f16x2.f32 $0, a4, a0;
        cvt.rn.f16x2.f32 $1, a5, a1;
        cvt.rn.f16x2.f32 $2, a6, a2;
        cvt.rn.f16x2.f32 $3, a7, a3;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r", [x], dtype=tl.int32, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _place(channel):
    """Where an inner channel is kept: beside the one four further, as `_pairs` would bring it."""
    return channel // 8 * 8 + channel % 4 * 2 + channel // 4 % 2


@triton.jit
def _x(x_ptr, step, last, channels, B: tl.constexpr, PERMUTED: tl.constexpr):
    """A step of a row: each thread whose column is its group's has 32 channels."""
    if _INTERPRETED:
        channel = step * 256 + tl.arange(0, 256)
        x = tl.load(x_ptr + (_place(channel) if PERMUTED else channel), mask=(channel < channels) & (step < last), other=0.0)
        return x.to(tl.float16)
    place = tl.arange(0, B * 32)
    lane, part = place // 4 % 32, place // (B * 8)
    group = step * 8 + lane // 4 % 2 * 4 + lane % 4
    inside = (lane // 8 == lane % 4) & (group * 32 < channels) & (step < last)
    words = x_ptr.to(tl.pointer_type(tl.int32))
    return tl.load(words + group * 16 + part * 4 + place % 4, mask=inside, other=0)


@triton.jit
def _halves(word):
    low, high = word & 0xFFFF, word >> 16
    return tl.join(low.to(tl.uint16).to(tl.float16, bitcast=True), high.to(tl.uint16).to(tl.float16, bitcast=True))


@triton.jit
def _interpreted_products(word, scale, x, B: tl.constexpr):
    M: tl.constexpr = 0x8E008E00
    word, scale = word.to(tl.uint32, bitcast=True), scale.to(tl.uint32, bitcast=True)
    a, b, c, d = word & M, (word << 3) & M, ((word << 6) ^ (word << 1)) & M, ((word << 9) ^ (word << 2)) & M
    w = tl.join(tl.join(_halves(a), _halves(b)), tl.join(_halves(c), _halves(d)))
    w = tl.reshape(tl.permute(w, (0, 1, 3, 2)), (2, 2, B // 2, 4, 32)).to(tl.float32)
    y = tl.sum(w * tl.reshape(x, (2, 1, 1, 4, 32)).to(tl.float32), axis=4)
    # bytes of (half of the step, half of sixteen outputs)
    first, second = _halves(scale << 8 & 0xFF00FF00), _halves(scale & 0xFF00FF00)
    factor = tl.permute(tl.join(first, second), (1, 2, 0)).to(tl.float32)
    y = tl.sum(tl.reshape(y, (2, 2, B * 2)) * factor, axis=0)
    return tl.trans(y)


@triton.jit
def _products(word, scale, x, B: tl.constexpr):
    """[2 B, 2] float32: a thread's groups of two outputs."""
    if _INTERPRETED:
        return _interpreted_products(word, scale, x, B)
    scale = tl.reshape(tl.broadcast_to(scale[None, :, None], (4, B * 2, 4)), (B * 32,))
    out = tl.inline_asm_elementwise(_ASM, _CONSTRAINTS, [word, x, scale], dtype=tl.float32, is_pure=True, pack=16)
    out = tl.permute(tl.reshape(out, (2, 2, B * 2, 2, 2)), (2, 4, 3, 1, 0))
    return tl.split(tl.split(tl.split(out)[0])[0])[0]


@triton.jit
def _outputs(total, B: tl.constexpr):
    total = tl.sum(tl.reshape(total, (B // 16, 8, 4, 2)), axis=2)
    return tl.reshape(tl.permute(total, (0, 2, 1)), (B,))


@triton.jit
def _up_one(
    u_ptr, ids_ptr, weights_ptr, codes1_ptr, scales1_ptr, codes3_ptr, scales3_ptr, inner_ptr, partial_ptr, arrived_ptr,
    channels, steps, inner_width, k, limit, words, bytes_, steps_a_share,
    DTYPE: tl.constexpr, ROUNDED: tl.constexpr, B: tl.constexpr, SHARES: tl.constexpr, DEPTH: tl.constexpr,
    LATE: tl.constexpr, UNROLL: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """Gates and ups of one choice."""
    wait()
    # not before: the next one reads what this one has waited for
    if not LATE:
        announce()
    block, choice, share = tl.program_id(0) // SHARES, tl.program_id(1), tl.program_id(0) % SHARES
    expert = tl.load(ids_ptr + choice).to(tl.int64)
    codes1_ptr += expert * words
    codes3_ptr += expert * words
    scales1_ptr += expert * bytes_
    scales3_ptr += expert * bytes_
    u_ptr += (choice // k).to(tl.int64) * channels
    tile, start = block * B // 64, block * B % 64
    first = share * steps_a_share
    last = tl.minimum(first + steps_a_share, steps)
    word1, scale1 = _words(codes1_ptr, tile, start, first, last, steps, B, HINT), _scales(scales1_ptr, tile, start, first, last, steps, B)
    word3, scale3 = _words(codes3_ptr, tile, start, first, last, steps, B, HINT), _scales(scales3_ptr, tile, start, first, last, steps, B)
    x = _x(u_ptr, first, last, channels, B, False)
    if DEPTH == 2:
        more1, more_scale1 = _words(codes1_ptr, tile, start, first + 1, last, steps, B, HINT), _scales(scales1_ptr, tile, start, first + 1, last, steps, B)
        more3, more_scale3 = _words(codes3_ptr, tile, start, first + 1, last, steps, B, HINT), _scales(scales3_ptr, tile, start, first + 1, last, steps, B)
    gate = tl.zeros([B * 2, 2], tl.float32)
    up = tl.zeros([B * 2, 2], tl.float32)
    for step in tl.range(first, last, num_stages=1, loop_unroll_factor=UNROLL):
        ahead = step + DEPTH
        new1, new_scale1 = _words(codes1_ptr, tile, start, ahead, last, steps, B, HINT), _scales(scales1_ptr, tile, start, ahead, last, steps, B)
        new3, new_scale3 = _words(codes3_ptr, tile, start, ahead, last, steps, B, HINT), _scales(scales3_ptr, tile, start, ahead, last, steps, B)
        next_x = _x(u_ptr, step + 1, last, channels, B, False)
        pairs = _pairs(x, DTYPE == tl.float32)
        gate += _products(word1, scale1, pairs, B)
        up += _products(word3, scale3, pairs, B)
        x = next_x
        if DEPTH == 2:
            word1, scale1, word3, scale3 = more1, more_scale1, more3, more_scale3
            more1, more_scale1, more3, more_scale3 = new1, new_scale1, new3, new_scale3
        else:
            word1, scale1, word3, scale3 = new1, new_scale1, new3, new_scale3
    if LATE:
        announce()
    gate, up = _outputs(gate, B), _outputs(up, B)
    output = tl.arange(0, B)
    if SHARES == 1:
        _activate(gate, up, weights_ptr + choice, inner_ptr + choice * inner_width, block, limit, DTYPE, ROUNDED)
    else:
        place = choice * tl.num_programs(0) // SHARES + block
        partial_ptr += place * SHARES * 2 * B + output
        tl.store(partial_ptr + share * 2 * B, gate)
        tl.store(partial_ptr + share * 2 * B + B, up)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel") == SHARES - 1:
            tl.store(arrived_ptr + place, 0)
            gate, up = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
            for other in tl.static_range(SHARES):
                gate += tl.load(partial_ptr + other * 2 * B, cache_modifier=".cg")
                up += tl.load(partial_ptr + other * 2 * B + B, cache_modifier=".cg")
            _activate(gate, up, weights_ptr + choice, inner_ptr + choice * inner_width, block, limit, DTYPE, ROUNDED)


@triton.jit
def _activate(gate, up, weight_ptr, inner_ptr, block, limit, DTYPE: tl.constexpr, ROUNDED: tl.constexpr):
    """SwiGLU times the routing weight, rounded, where a product down wants it."""
    B: tl.constexpr = gate.shape[0]
    gate = tl.minimum((gate * 128.0).to(DTYPE).to(tl.float32), limit)
    up = tl.minimum(tl.maximum((up * 128.0).to(DTYPE).to(tl.float32), -limit), limit)
    y = (gate * tl.sigmoid(gate) * up * tl.load(weight_ptr)).to(DTYPE).to(tl.float32)
    if ROUNDED:
        y = tl.reshape(round_channels(tl.reshape(y, (1, B)), 1, B, 0, 32), (B,))
    tl.store(inner_ptr + _place(block * B + tl.arange(0, B)), y.to(tl.float16))


@triton.jit
def _down_one(
    inner_ptr, ids_ptr, codes_ptr, scales_ptr, partial_ptr, arrived_ptr, y_ptr, channels, steps, num_inner, inner_width,
    words, bytes_, steps_a_share,
    DTYPE: tl.constexpr, K: tl.constexpr, B: tl.constexpr, SHARES: tl.constexpr, DEPTH: tl.constexpr,
    LATE: tl.constexpr, EARLY: tl.constexpr, UNROLL: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """One choice's outputs; the last of all choices of a row adds them."""
    if not LATE:
        announce()
    if not EARLY:
        wait()
    block, choice, share = tl.program_id(0) // SHARES, tl.program_id(1), tl.program_id(0) % SHARES
    # written before the kernel before began: whoever starts this one has waited for it
    expert = tl.load(ids_ptr + choice, cache_modifier=".cg").to(tl.int64)
    codes_ptr += expert * words
    scales_ptr += expert * bytes_
    inner_ptr += choice * inner_width
    tile, start = block * B // 64, block * B % 64
    first = share * steps_a_share
    last = tl.minimum(first + steps_a_share, steps)
    word, scale = _words(codes_ptr, tile, start, first, last, steps, B, HINT), _scales(scales_ptr, tile, start, first, last, steps, B)
    if DEPTH >= 2:
        more, more_scale = _words(codes_ptr, tile, start, first + 1, last, steps, B, HINT), _scales(scales_ptr, tile, start, first + 1, last, steps, B)
    if DEPTH >= 3:
        third, third_scale = _words(codes_ptr, tile, start, first + 2, last, steps, B, HINT), _scales(scales_ptr, tile, start, first + 2, last, steps, B)
    if EARLY:
        wait()
    x = _x(inner_ptr, first, last, num_inner, B, True)
    total = tl.zeros([B * 2, 2], tl.float32)
    for step in tl.range(first, last, num_stages=1, loop_unroll_factor=UNROLL):
        ahead = step + DEPTH
        new, new_scale = _words(codes_ptr, tile, start, ahead, last, steps, B, HINT), _scales(scales_ptr, tile, start, ahead, last, steps, B)
        next_x = _x(inner_ptr, step + 1, last, num_inner, B, True)
        total += _products(word, scale, x, B)
        x = next_x
        if DEPTH == 3:
            word, scale, more, more_scale, third, third_scale = more, more_scale, third, third_scale, new, new_scale
        elif DEPTH == 2:
            word, scale, more, more_scale = more, more_scale, new, new_scale
        else:
            word, scale = new, new_scale
    if LATE:
        announce()
    channel = block * B + tl.arange(0, B)
    known = channel < channels
    row = choice // K
    tl.store(partial_ptr + (choice * SHARES + share) * channels + channel, _outputs(total, B), mask=known)
    tl.debug_barrier()
    arrived_ptr += row * tl.num_programs(0) // SHARES + block
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == K * SHARES - 1:
        tl.store(arrived_ptr, 0)
        y = tl.zeros([B], tl.float32)
        for slot in tl.static_range(K):
            one = tl.zeros([B], tl.float32)
            for other in tl.static_range(SHARES):
                place = ((row * K + slot) * SHARES + other) * channels + channel
                one += tl.load(partial_ptr + place, mask=known, other=0.0, cache_modifier=".cg")
            y += (one * 128.0).to(DTYPE).to(tl.float32)
        tl.store(y_ptr + row.to(tl.int64) * channels + channel, y, mask=known)


def _shares(steps: int, wanted: int) -> tuple[int, int]:
    """(how many, steps of each)."""
    a_share = triton.cdiv(steps, max(1, min(wanted, steps)))
    return triton.cdiv(steps, a_share), a_share


def one_row_experts(
    u_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1: Tiled,
    w3: Tiled,
    w2: Tiled,
    limit: float,
    round_inner: bool,
) -> Tensor:
    (num_rows, channels), k, num_inner = u_TD.shape, ids_TK.shape[1], w1.outputs
    dtype = tl.bfloat16 if u_TD.dtype == torch.bfloat16 else tl.float32
    if u_TD.dtype == torch.float32:
        u_TD = u_TD.half()
    device, choices = u_TD.device, num_rows * k
    new: dict[str, Any] = {"device": device, "dtype": torch.float32}
    
    up, down = dict(UP), dict(DOWN)
    warps = up.pop("warps")
    steps, inner_steps = w1.codes.shape[2], w2.codes.shape[2]
    shares, a_share = _shares(steps, up.pop("SHARES"))
    blocks = w1.codes.shape[1] * 64 // up["B"]
    # outputs of the last tile that no expert has are zeros; what lies behind them is never read
    inner_width = blocks * up["B"]
    width = max(inner_width, inner_steps * _STEP)
    inner = torch.empty(choices, width, device=device, dtype=torch.float16)
    partial, arrived = inner, inner
    if shares > 1:
        partial = torch.empty(choices * blocks * shares * 2 * up["B"], **new)
        arrived = counters(device, choices * blocks)
    _up_one[(blocks * shares, choices)](
        u_TD, ids_TK, weights_TK, *w1[:2], *w3[:2], inner, partial, arrived, channels, steps, width, k, limit,
        w1.codes[0].numel(), w1.scales[0].numel(), a_share, DTYPE=dtype, ROUNDED=round_inner, SHARES=shares, **up,
        num_warps=warps, launch_pdl=AHEAD,
    )  # fmt: skip
    warps = down.pop("warps")
    shares, a_share = _shares(inner_steps, down.pop("SHARES"))
    blocks = triton.cdiv(channels, down["B"])
    partial = torch.empty(choices * shares * channels, **new)
    y_TD = torch.empty(num_rows, channels, **new)
    _down_one[(blocks * shares, choices)](
        inner, ids_TK, *w2[:2], partial, counters(device, num_rows * blocks), y_TD, channels, inner_steps, num_inner,
        width, w2.codes[0].numel(), w2.scales[0].numel(), a_share, DTYPE=dtype, K=k, SHARES=shares, **down,
        num_warps=warps, launch_pdl=AHEAD,
    )  # fmt: skip
    return y_TD
