"""Inverse transform sampling in float64, a row a program: three passes over the logits.

T rows, V vocabulary, B tokens of a pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import next_power_of_2, unavailable

__all__ = ["FORWARD_ONLY", "draw_rows", "fits", "unavailable"]

FORWARD_ONLY = ("draw_rows",)


def fits(op: str, logits: Tensor) -> bool:
    """float32."""
    return logits.dtype == torch.float32 and logits.numel() > 0


@triton.jit
def _draw_rows(logits_ptr, temperature_ptr, uniform_ptr, out_ptr, vocab_size, B: tl.constexpr):
    follow()
    t = tl.program_id(0).to(tl.int64)
    row = logits_ptr + t * vocab_size
    highest = tl.full([], float("-inf"), tl.float32)
    broken = 0
    for start in range(0, vocab_size, B):
        token = start + tl.arange(0, B)
        logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
        broken = tl.maximum(broken, tl.max((logit != logit).to(tl.int32), axis=0))
        highest = tl.maximum(highest, tl.max(logit, axis=0))
    temperature = tl.load(temperature_ptr + t)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    first = vocab_size
    total = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, B):
        token = start + tl.arange(0, B)
        logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
        first = tl.minimum(first, tl.min(tl.where(logit == highest, token, vocab_size), axis=0))
        weight = tl.exp((logit.to(tl.float64) - highest.to(tl.float64)) / divisor)
        total += tl.sum(tl.where(token < vocab_size, weight, 0.0), axis=0)
    target = tl.load(uniform_ptr + t) * total
    below = 0
    last = 0
    running = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, B):
        token = start + tl.arange(0, B)
        inside = token < vocab_size
        logit = tl.load(row + token, mask=inside, other=float("-inf"))
        weight = tl.where(inside, tl.exp((logit.to(tl.float64) - highest.to(tl.float64)) / divisor), 0.0)
        edge = running + tl.cumsum(weight, axis=0)
        below += tl.sum((inside & (edge <= target)).to(tl.int32), axis=0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, token, 0), axis=0))
        running += tl.sum(weight, axis=0)
    # rounding may carry the last edge to the end; never land on a token of no weight
    chosen = tl.where(temperature == 0.0, first, tl.minimum(below, last))
    infinite = (highest == float("inf")) | (highest == float("-inf")) | (broken > 0)
    tl.store(out_ptr + t, tl.where(infinite, -1, chosen).to(tl.int64))


def draw_rows(logits_TV: Tensor, temperature_T: Tensor, uniform_T: Tensor) -> Tensor:
    num_rows, vocab_size = logits_TV.shape
    chosen_T = torch.empty(num_rows, device=logits_TV.device, dtype=torch.int64)
    width = min(4096, next_power_of_2(vocab_size))
    _draw_rows[(num_rows,)](
        logits_TV.contiguous(),
        temperature_T,
        uniform_T,
        chosen_T,
        vocab_size,
        B=width,
        num_warps=8,
        launch_pdl=AHEAD,
    )
    return chosen_T
