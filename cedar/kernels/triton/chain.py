"""Kernels that depend on each other one by one, launched ahead of time.

A step of a small model is some hundred short kernels, and between two of them a GPU idles for about as long as one
of them runs. `follow` at the top of a kernel lets the next one take its place on the chip at once and then waits
until the one before is done, so nothing but the launch overlaps. A kernel launched with `launch_pdl=AHEAD` must call
it before it touches memory; one that is short of time calls the two halves itself and reads weights between them.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cedar.kernels.triton.device import INTERPRETED

# from Hopper on; without a GPU kernels are compiled for it. Launched apart, each kernel's time is its own: a profiler
# counts the waiting of the others as theirs
APART = os.environ.get("CEDAR_LAUNCH") == "apart"
HOPPER = not INTERPRETED and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0))
AHEAD = HOPPER and not APART
_AHEAD = tl.constexpr(AHEAD)


@triton.jit
def announce():
    """The kernel behind may be launched."""
    if _AHEAD:
        gdc_launch_dependents()


@triton.jit
def wait():
    """For the kernel before.

    Only what no kernel of a step writes may be read earlier, weights, and what the kernel before waited for itself
    before it announced this one.
    """
    if _AHEAD:
        gdc_wait()


@triton.jit
def follow():
    """Wait for the kernel before; the one behind may be launched."""
    announce()
    wait()
