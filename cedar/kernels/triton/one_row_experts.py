"""`packed_experts` of a row or two: nothing is sorted, and so many programs that the memory is never idle.

A row chose experts of its own, so each choice is a product of one row. A program has some outputs and a share of the
channels; its words go from memory to registers and from there to the tensor core. Of the eight columns that the core
multiplies at least, a group of 32 channels takes one: its sum comes out alone and is scaled once, where a product of
all channels needs each weight scaled. Who comes last adds the shares, always in the same order.

What a thread holds is written out as assembly (`_multiply`), so tensors here are in the order of threads: four words
each, then the next thread. B outputs of a program of B / 16 warps, K choices of a row. A step is 256 channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.experts import Tiled
from cedar.kernels.triton.arrivals import COUNTERS, counters
from cedar.kernels.triton.chain import AHEAD, HOPPER, announce, wait
from cedar.kernels.triton.device import INTERPRETED
from cedar.kernels.triton.few_rows import round_channels

# with more, each expert's bytes once for all of its rows are fewer
MOST_ROWS = 2
# outputs of a program up and down
_UP, _DOWN = 64, 32
_INTERPRETED = tl.constexpr(INTERPRETED)
# where it was measured
_RUNS = HOPPER or INTERPRETED


def fits(u_TD: Tensor, ids_TK: Tensor, w1: Tiled) -> bool:
    """A row or two, and a counter for each program that adds shares or choices."""
    num_rows, channels = u_TD.shape
    most = max(num_rows * triton.cdiv(channels, _DOWN), ids_TK.shape[1] * w1.codes.shape[1])
    return _RUNS and num_rows <= MOST_ROWS and most <= COUNTERS


def _multiply() -> str:
    """A warp's 16 outputs times a step of a row: $0 and $1 are a lane's outputs g and g + 8 over its groups q.

    $16 to $31 are words of codes (half of the step, output, word), $32 to $47 pairs of channels (word, pair), $48 the
    four scales. Lane 4 g + q has the codes of groups q and 4 + q, and the channels of one of them only if column g is
    that group's: 2 q in the first half of the step, 2 q + 1 in the second. What the other columns sum up is not read.
    """
    lines = [".reg .b32 a<8>, t<2>;", ".reg .f32 d<8>, s<4>;", ".reg .b16 h<4>;"]
    lines += [f"mov.f32 d{i}, 0f00000000;" for i in range(8)]
    for half, i in ((half, i) for half in range(2) for i in range(4)):
        for output in range(2):
            word = f"${16 + 8 * half + 4 * output + i}"
            # as `retile` wrote them: pair n of a word is codes n and n + 4, as two float16 of 2**-14 of their values
            for pair, shifts in enumerate(((), (3,), (6, 1), (9, 2))):
                lines += [f"shl.b32 t{n}, {word}, {shift};" for n, shift in enumerate(shifts)]
                lines += ["xor.b32 t0, t0, t1;"] * (len(shifts) == 2)
                lines.append(f"and.b32 a{2 * pair + output}, {'t0' if shifts else word}, 0x8E008E00;")
        d = ", ".join(f"d{4 * half + n}" for n in range(4))
        for pair in (0, 2):
            a = ", ".join(f"a{2 * pair + n}" for n in range(4))
            x = f"${32 + 4 * i + pair}, ${33 + 4 * i + pair}"
            lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{d}}}, {{{a}}}, {{{x}}}, {{{d}}};")
    # a scale is the upper byte of a float16
    lines += ["prmt.b32 t0, $48, 0, 0x1404;", "prmt.b32 t1, $48, 0, 0x3424;"]
    lines += ["mov.b32 {h0, h1}, t0;", "mov.b32 {h2, h3}, t1;"]
    lines += [f"cvt.f32.f16 s{i}, h{i};" for i in range(4)]
    for output in range(2):
        first, second = f"d{2 * output}", f"d{5 + 2 * output}"
        lines.append(f"mul.f32 {first}, {first}, s{output};")
        lines.append(f"fma.rn.f32 ${output}, {second}, s{2 + output}, {first};")
    lines += [f"mov.f32 ${i}, 0f00000000;" for i in range(2, 16)]
    return "{\n" + "\n".join(lines) + "\n}"


def _pair(half: bool) -> str:
    """Eight channels, two a word, to words of two float16 whose channels are four apart, as the codes of a pair are."""
    if half:
        lines = [f"prmt.b32 ${i}, ${4 + i // 2}, ${6 + i // 2}, {'0x7632' if i % 2 else '0x5410'};" for i in range(4)]
    else:
        lines = [".reg .b32 a<8>;"]
        for i in range(4):
            lines += [f"shl.b32 a{2 * i}, ${4 + i}, 16;", f"and.b32 a{2 * i + 1}, ${4 + i}, 0xFFFF0000;"]
        lines += [f"cvt.rn.f16x2.f32 ${i}, a{4 + i}, a{i};" for i in range(4)]
    return "{\n" + "\n".join(lines) + "\n}"


_MULTIPLY, _OPERANDS = tl.constexpr(_multiply()), tl.constexpr(",".join(["=&f"] * 16 + ["r"] * 48))
_PAIR_HALF, _PAIR = tl.constexpr(_pair(True)), tl.constexpr(_pair(False))


@triton.jit
def _ask(codes_ptr, scales_ptr, first_output, step, last, steps, B: tl.constexpr):
    """A step's words of B outputs and their scales; zeros past the end."""
    place, lane = tl.arange(0, B * 32), tl.arange(0, B * 2)
    block, inside = first_output // 64 * steps + step, first_output % 64
    place = place // (B * 8) * 512 + place % (B * 8) + inside * 8
    word = tl.load(codes_ptr + block * 2048 + place, mask=step < last, other=0)
    return word, tl.load(scales_ptr + block * 128 + inside * 2 + lane, mask=step < last, other=0)


@triton.jit
def _place(channel):
    """Where an inner channel is kept: beside the one four further on."""
    return channel // 8 * 8 + channel % 4 * 2 + channel // 4 % 2


@triton.jit
def _row(x_ptr, step, last, channels, B: tl.constexpr, PLACED: tl.constexpr):
    """A step of a row: 32 channels in a thread whose column is their group's, two a word; others have zeros."""
    if _INTERPRETED:
        channel = step * 256 + tl.arange(0, 256)
        place = _place(channel) if PLACED else channel
        x = tl.load(x_ptr + place, mask=(channel < channels) & (step < last), other=0.0).to(tl.float32)
    else:
        place = tl.arange(0, B * 32)
        lane = place // 4 % 32
        group = step * 8 + lane // 4 % 2 * 4 + lane % 4
        word = x_ptr.to(tl.pointer_type(tl.int32)) + group * 16 + place // (B * 8) * 4 + place % 4
        x = tl.load(word, mask=(lane // 8 == lane % 4) & (group * 32 < channels) & (step < last), other=0)
        if not PLACED:
            x = tl.inline_asm_elementwise(
                _PAIR_HALF if x_ptr.dtype.element_ty == tl.float16 else _PAIR, "=&r,=&r,=&r,=&r,r,r,r,r", [x],
                dtype=tl.int32, is_pure=True, pack=4,
            )  # fmt: skip
    return x


@triton.jit
def _products(word, scale, x, B: tl.constexpr):
    """[2 B, 2] float32, 2**-7 of a step's products: two outputs of a thread over its groups."""
    if _INTERPRETED:
        return _interpreted_products(word.to(tl.uint32, bitcast=True), scale.to(tl.uint32, bitcast=True), x, B)
    scale = tl.reshape(tl.broadcast_to(scale[None, :, None], (4, B * 2, 4)), (B * 32,))
    y = tl.inline_asm_elementwise(_MULTIPLY, _OPERANDS, [word, x, scale], dtype=tl.float32, is_pure=True, pack=16)
    # the first two of a thread's sixteen results
    y = tl.permute(tl.reshape(y, (2, 2, B * 2, 2, 2)), (2, 4, 3, 1, 0))
    return tl.split(tl.split(tl.split(y)[0])[0])[0]


@triton.jit
def _halves(word):
    low, high = (word & 0xFFFF).to(tl.uint16), (word >> 16).to(tl.uint16)
    return tl.join(low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)).to(tl.float32)


@triton.jit
def _interpreted_products(word, scale, x, B: tl.constexpr):
    """What the assembly does, for the interpreter."""
    M: tl.constexpr = 0x8E008E00
    a, b, c, d = word & M, word << 3 & M, ((word << 6) ^ (word << 1)) & M, ((word << 9) ^ (word << 2)) & M
    w = tl.join(tl.join(_halves(a), _halves(b)), tl.join(_halves(c), _halves(d)))
    w = tl.reshape(tl.permute(w, (0, 1, 3, 2)), (2, 2, B // 2, 4, 32))
    y = tl.sum(w * tl.reshape(x, (2, 1, 1, 4, 32)), axis=4)
    factor = tl.join(_halves(scale << 8 & 0xFF00FF00), _halves(scale & 0xFF00FF00))
    return tl.trans(tl.sum(tl.reshape(y, (2, 2, B * 2)) * tl.permute(factor, (1, 2, 0)), axis=0))


@triton.jit
def _outputs(total, B: tl.constexpr):
    """[B] from `_products`, over all groups."""
    total = tl.sum(tl.reshape(total, (B // 16, 8, 4, 2)), axis=2)
    return tl.reshape(tl.permute(total, (0, 2, 1)), (B,)) * 128.0


@triton.jit
def _activate(gate, up, weight_ptr, inner_ptr, first_output, limit, DTYPE: tl.constexpr, ROUNDED: tl.constexpr):
    """SwiGLU times the routing weight, rounded."""
    B: tl.constexpr = gate.shape[0]
    gate = tl.minimum(gate.to(DTYPE).to(tl.float32), limit)
    up = tl.minimum(tl.maximum(up.to(DTYPE).to(tl.float32), -limit), limit)
    y = (gate * tl.sigmoid(gate) * up * tl.load(weight_ptr)).to(DTYPE).to(tl.float32)
    if ROUNDED:
        y = tl.reshape(round_channels(tl.reshape(y, (1, B)), 1, B, 0, 32), (B,))
    tl.store(inner_ptr + _place(first_output + tl.arange(0, B)), y.to(tl.float16))


@triton.jit
def _up_alone(
    u_ptr, ids_ptr, weights_ptr, codes1_ptr, scales1_ptr, codes3_ptr, scales3_ptr, inner_ptr, partial_ptr, arrived_ptr,
    channels, steps, inner_width, k, limit, words, num_scales, steps_a_share,
    DTYPE: tl.constexpr, ROUNDED: tl.constexpr, SHARES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Gates and ups of one choice: B outputs over a share of the channels."""
    wait()
    first_output, share, choice = tl.program_id(0) // SHARES * B, tl.program_id(0) % SHARES, tl.program_id(1)
    expert = tl.load(ids_ptr + choice).to(tl.int64)
    codes1_ptr += expert * words
    codes3_ptr += expert * words
    scales1_ptr += expert * num_scales
    scales3_ptr += expert * num_scales
    u_ptr += (choice // k).to(tl.int64) * channels
    first = share * steps_a_share
    last = tl.minimum(first + steps_a_share, steps)
    word1, scale1 = _ask(codes1_ptr, scales1_ptr, first_output, first, last, steps, B)
    word3, scale3 = _ask(codes3_ptr, scales3_ptr, first_output, first, last, steps, B)
    x = _row(u_ptr, first, last, channels, B, False)
    gate, up = tl.zeros([B * 2, 2], tl.float32), tl.zeros([B * 2, 2], tl.float32)
    for step in tl.range(first, last, num_stages=1):
        next1, next_scale1 = _ask(codes1_ptr, scales1_ptr, first_output, step + 1, last, steps, B)
        next3, next_scale3 = _ask(codes3_ptr, scales3_ptr, first_output, step + 1, last, steps, B)
        next_x = _row(u_ptr, step + 1, last, channels, B, False)
        gate += _products(word1, scale1, x, B)
        up += _products(word3, scale3, x, B)
        word1, scale1, word3, scale3, x = next1, next_scale1, next3, next_scale3, next_x
    # not sooner: `_down_alone` reads the choices before its wait, so they must have been waited for here
    announce()
    gate, up = _outputs(gate, B), _outputs(up, B)
    if SHARES > 1:
        tile = (choice * tl.num_programs(0) + tl.program_id(0)) // SHARES
        partial_ptr += tile * SHARES * 2 * B + tl.arange(0, B)
        tl.store(partial_ptr + share * 2 * B, gate)
        tl.store(partial_ptr + share * 2 * B + B, up)
        tl.debug_barrier()
        complete = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SHARES - 1
        if complete:
            tl.store(arrived_ptr + tile, 0)
            gate, up = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
            for other in tl.static_range(SHARES):
                gate += tl.load(partial_ptr + other * 2 * B, cache_modifier=".cg")
                up += tl.load(partial_ptr + other * 2 * B + B, cache_modifier=".cg")
    else:
        complete = True
    if complete:
        inner_ptr += choice.to(tl.int64) * inner_width
        _activate(gate, up, weights_ptr + choice, inner_ptr, first_output, limit, DTYPE, ROUNDED)


@triton.jit
def _down_alone(
    inner_ptr, ids_ptr, codes_ptr, scales_ptr, choice_ptr, arrived_ptr, y_ptr, channels, steps, num_inner, inner_width,
    words, num_scales, DTYPE: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """B outputs of one choice; the last of a row's adds all of them."""
    first_output, choice = tl.program_id(0) * B, tl.program_id(1)
    expert = tl.load(ids_ptr + choice, cache_modifier=".cg").to(tl.int64)
    codes_ptr += expert * words
    scales_ptr += expert * num_scales
    inner_ptr += choice.to(tl.int64) * inner_width
    word, scale = _ask(codes_ptr, scales_ptr, first_output, 0, steps, steps, B)
    next_word, next_scale = _ask(codes_ptr, scales_ptr, first_output, 1, steps, steps, B)
    wait()
    x = _row(inner_ptr, 0, steps, num_inner, B, True)
    total = tl.zeros([B * 2, 2], tl.float32)
    for step in tl.range(0, steps, num_stages=1, loop_unroll_factor=2):
        second, second_scale = _ask(codes_ptr, scales_ptr, first_output, step + 2, steps, steps, B)
        next_x = _row(inner_ptr, step + 1, steps, num_inner, B, True)
        total += _products(word, scale, x, B)
        word, scale, next_word, next_scale, x = next_word, next_scale, second, second_scale, next_x
    announce()
    channel = first_output + tl.arange(0, B)
    known = channel < channels
    tl.store(choice_ptr + choice * channels + channel, _outputs(total, B), mask=known)
    tl.debug_barrier()
    row = choice // K
    arrived_ptr += row * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == K - 1:
        tl.store(arrived_ptr, 0)
        y = tl.zeros([B], tl.float32)
        for slot in tl.static_range(K):
            one = choice_ptr + (row * K + slot) * channels + channel
            y += tl.load(one, mask=known, other=0.0, cache_modifier=".cg").to(DTYPE).to(tl.float32)
        tl.store(y_ptr + row * channels + channel, y, mask=known)


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
    """As `packed_experts`."""
    (num_rows, channels), k, device = u_TD.shape, ids_TK.shape[1], u_TD.device
    num_choices, (_, blocks, steps, _) = num_rows * k, w1.codes.shape
    dtype = tl.bfloat16 if u_TD.dtype == torch.bfloat16 else tl.float32
    if u_TD.dtype == torch.float32:
        u_TD = u_TD.half()
    new: dict[str, Any] = {"device": device, "dtype": torch.float32}
    # the choices of two rows keep the memory busy without
    shares = 2 if num_rows == 1 and steps > 1 else 1
    # the zeros that fill the last block have outputs as well
    inner = torch.empty(num_choices, blocks * _UP, device=device, dtype=torch.float16)
    # unused pointers must still be tensors
    partial, arrived = inner, inner
    if shares > 1:
        partial = torch.empty(num_choices * blocks, shares, 2, _UP, **new)
        arrived = counters(device, num_choices * blocks)
    _up_alone[(blocks * shares, num_choices)](
        u_TD, ids_TK, weights_TK, *w1[:2], *w3[:2], inner, partial, arrived, channels, steps, inner.shape[1], k, limit,
        w1.codes[0].numel(), w1.scales[0].numel(), triton.cdiv(steps, shares), DTYPE=dtype, ROUNDED=round_inner,
        SHARES=shares, B=_UP, num_warps=_UP // 16, launch_pdl=AHEAD,
    )  # fmt: skip
    choice = torch.empty(num_choices, channels, **new)
    y_TD = torch.empty(num_rows, channels, **new)
    blocks = triton.cdiv(channels, _DOWN)
    _down_alone[(blocks, num_choices)](
        inner, ids_TK, *w2[:2], choice, counters(device, num_rows * blocks), y_TD, channels, w2.codes.shape[2],
        w1.outputs, inner.shape[1], w2.codes[0].numel(), w2.scales[0].numel(), DTYPE=dtype, K=k, B=_DOWN,
        num_warps=_DOWN // 16, launch_pdl=AHEAD,
    )  # fmt: skip
    return y_TD
