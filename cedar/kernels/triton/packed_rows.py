"""Products of one or two rows with a stored FP8 weight, whose bytes lie in registers before the rows are there.

A program takes a row of the weight's tiles, whose scales are then the input's as well, and a share of the inputs. It
asks for all of its bytes before it waits for the kernel before: while that one leaves memory idle, they arrive.

T rows, G groups, I inputs and O outputs of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.formats.spec import FP8, FormatSpec
from cedar.kernels.triton.arrivals import counters, sum_shares
from cedar.kernels.triton.chain import AHEAD, announce, wait
from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable
from cedar.kernels.triton.quantize import round_groups
from cedar.kernels.triton.stored import e4m3_half, e8m0_value

__all__ = ["FORWARD_ONLY", "STORED_STEP", "fits", "packed_ahead", "unavailable"]

FORWARD_ONLY = ("packed_ahead",)
# inputs of a share, and how many more one program takes rather than two shares
STORED_STEP, _MORE = 1024, 256
_MOST_ROWS, _MOST_TILES = 2, 256


def fits(op: str, x: Tensor, codes: Tensor) -> bool:
    """Two rows; up to 8,192 outputs where their inputs are cut into shares; groups of whole tiles."""
    (num_rows, _, inputs), (num_groups, outputs, _) = x.shape, codes.shape
    whole = inputs % 32 == 0 and (num_groups == 1 or outputs % 32 == 0) and x.stride(2) == 1 and codes.is_contiguous()
    few = inputs <= STORED_STEP + _MORE or num_groups * outputs <= 32 * _MOST_TILES
    return 0 < num_rows <= _MOST_ROWS and whole and few and is_half_or_float(x)


@triton.jit
def stored_tile(codes_ptr, scales_ptr, tile, channel, inputs, outputs):
    """(Codes of 32 outputs, scale bytes) at some channels, for `stored_products`."""
    output, inside = tile * 32 + tl.arange(0, 32), channel < inputs
    place = codes_ptr + output[:, None].to(tl.int64) * inputs + channel[None, :]
    codes = tl.load(place, mask=(output < outputs)[:, None] & inside[None, :], other=0)
    return codes, tl.load(scales_ptr + tile * (inputs // 32) + channel // 32, mask=inside, other=127)


@triton.jit
def stored_products(stored, x):
    """float32 [32] of float32 inputs."""
    x = x.to(tl.float32) * e8m0_value(stored[1])
    return tl.sum(e4m3_half(stored[0]).to(tl.float32) * x[None, :], axis=1)


@triton.jit
def _packed_ahead(
    x_ptr, codes_ptr, scales_ptr, y_ptr, partial_ptr, counter_ptr, num_rows, row_stride, group_stride, inputs, outputs,
    tiles_a_group,
    ROUNDED: tl.constexpr, SHARES: tl.constexpr, PIECES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    announce()
    program, tiles = tl.program_id(0), tl.cdiv(outputs, 32)
    t, share = (program % num_rows).to(tl.int64), program // num_rows % SHARES
    tile = program // (num_rows * SHARES)
    output, channel = tile * 32 + tl.arange(0, 32), share * (PIECES * STEP) + tl.arange(0, STEP)
    there = output < outputs
    stored = ()
    for piece in tl.static_range(PIECES):
        one = stored_tile(codes_ptr, scales_ptr, tile, channel + piece * STEP, inputs, outputs)
        stored = stored + (one,)  # type: ignore[assignment]
    wait()
    x_ptr += t * row_stride + tile // tiles_a_group * group_stride
    total = tl.zeros([32], tl.float32)
    for piece in tl.static_range(PIECES):
        place = channel + piece * STEP
        total += stored_products(stored[piece], tl.load(x_ptr + place, mask=place < inputs, other=0.0))
    last = True
    if SHARES > 1:
        partial_ptr += t * SHARES * outputs
        tl.store(partial_ptr + share * outputs + output, total, mask=there)
        # whoever comes last adds them all, always in the same order
        tl.debug_barrier()
        counter_ptr += t * tiles + tile
        last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SHARES - 1
        if last:
            total = sum_shares(partial_ptr, output, there, outputs, SHARES)
            tl.atomic_xchg(counter_ptr, 0, sem="relaxed")
    if last:
        dtype: tl.constexpr = y_ptr.dtype.element_ty
        y = total.to(dtype)
        if ROUNDED:
            y = tl.reshape(round_groups(tl.reshape(y.to(tl.float32), (1, 32)), 0), (32,)).to(dtype)
        tl.store(y_ptr + t * outputs + output, y, mask=there)


def packed_ahead(x_TGI: Tensor, codes_GOI: Tensor, scales: Tensor, spec: FormatSpec | None) -> Tensor:
    assert spec is None or spec == FP8
    (num_rows, num_groups, inputs), outputs = x_TGI.shape, codes_GOI.shape[1]
    # as few shares as there are, of steps that leave little over
    shares = 1 if inputs <= STORED_STEP + _MORE else triton.cdiv(inputs, STORED_STEP)
    span = triton.cdiv(inputs, shares)
    step = span if next_power_of_2(span) == span else min(_MORE, next_power_of_2(span))
    pieces, tiles = triton.cdiv(span, step), triton.cdiv(num_groups * outputs, 32)
    y_TGO = torch.empty(num_rows, num_groups, outputs, device=x_TGI.device, dtype=x_TGI.dtype)
    size = y_TGO.numel() * shares if shares > 1 else 1
    partial = torch.empty(size, device=x_TGI.device, dtype=torch.float32)
    _packed_ahead[(num_rows * tiles * shares,)](
        x_TGI, codes_GOI, scales, y_TGO, partial, counters(x_TGI.device, num_rows * tiles if shares > 1 else 0),
        num_rows, x_TGI.stride(0), x_TGI.stride(1), inputs, num_groups * outputs, tiles // num_groups,
        ROUNDED=spec is not None, SHARES=shares, PIECES=pieces, STEP=step, num_warps=4,
        launch_pdl=AHEAD,
    )  # fmt: skip
    return y_TGO
