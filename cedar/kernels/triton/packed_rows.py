"""Products of one row with a stored FP8 weight, all of whose bytes a program holds in registers.

A program takes a row of the weight's tiles, whose scales are then the input's as well, and a share of the inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cedar.kernels.triton.arrivals import wait_for
from cedar.kernels.triton.chain import wait
from cedar.kernels.triton.stored import e4m3_half, e8m0_value

# inputs of a share
STORED_STEP = 1024


@triton.jit
def packed_products(
    x_ptr, codes_ptr, scales_ptr, tile, channel, inputs, outputs, counter_ptr, num_arrivals, BEHIND: tl.constexpr
):
    """float32 [32]. The weight is read while the kernel before still runs, the input when it is there.

    Args:
        tile: Which 32 outputs.
        num_arrivals: How many programs of the same launch make the input, if it is BEHIND them.
    """
    output = tile * 32 + tl.arange(0, 32)
    inside = channel < inputs
    place = codes_ptr + output[:, None].to(tl.int64) * inputs + channel[None, :]
    code = tl.load(place, mask=(output < outputs)[:, None] & inside[None, :], other=0)
    scale = tl.load(scales_ptr + tile * tl.cdiv(inputs, 32) + channel // 32, mask=inside, other=127)
    wait()
    if BEHIND:
        wait_for(counter_ptr, num_arrivals)
    x = tl.load(x_ptr + channel, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32) * e8m0_value(scale)
    return tl.sum(e4m3_half(code).to(tl.float32) * x[None, :], axis=1)
