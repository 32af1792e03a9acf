"""One launch where two would follow each other: programs wait for others that stand before them.

A GPU starts a launch's programs in order, so whatever is waited for runs or has run. The counters are zero before and
after each launch. Launches take them in turns, so that a few may run side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COUNTERS, _TURNS = 512, 64
# by device: the counters, and whose turn it is
_held: dict[torch.device, tuple[torch.Tensor, list[int]]] = {}


@triton.jit
def arrive(counter_ptr):
    """What this program has written is there for those that wait."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def wait_for(counter_ptr, num_arrivals):
    """Until so many programs have arrived. What they wrote lies behind the first cache: `cache_modifier=".cg"`."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < num_arrivals:
        pass


@triton.jit
def leave(counter_ptr, num_arrivals, num_waiting):
    """Once by each program that has waited, at its end: the last of all makes the counter zero."""
    if tl.atomic_add(counter_ptr, 1, sem="relaxed") == num_arrivals + num_waiting - 1:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed")


@triton.jit
def sum_shares(partial_ptr, place, inside, stride, SHARES: tl.constexpr):
    """float32 of other programs of this launch, in a fixed order."""
    total = tl.zeros(place.shape, tl.float32)
    for share in tl.static_range(SHARES):
        total += tl.load(partial_ptr + share * stride + place, mask=inside, other=0.0, cache_modifier=".cg")
    return total


def counters(device: torch.device, count: int) -> torch.Tensor:
    """int32 zeros, as many as asked for at least."""
    assert count <= COUNTERS
    if device not in _held:
        # memory of a graph would go with it
        assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before the capture"
        with torch.inference_mode(False):
            _held[device] = torch.zeros(_TURNS, COUNTERS, device=device, dtype=torch.int32), [0]
    held, turn = _held[device]
    turn[0] = (turn[0] + 1) % _TURNS
    return held[turn[0]]
