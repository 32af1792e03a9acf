"""Where Triton kernels run: on CUDA, and on any device when Triton interprets them; where it keeps what it compiled."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import triton
from torch import Tensor

# compiled kernels outlive the process: a second start finds them
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "cedar" / "triton"
os.environ.setdefault("TRITON_CACHE_DIR", str(_CACHE))

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def unavailable(device: str) -> str:
    """Why Triton cannot run on `device`, or an empty string."""
    if device == "cuda" or INTERPRETED:
        return ""
    return "Triton compiles for CUDA"


def next_power_of_2(n: int) -> int:
    return int(triton.next_power_of_2(n))


def is_half_or_float(*tensors: Tensor) -> bool:
    """The dtypes that the kernels read: bfloat16 and float32."""
    return all(tensor.dtype in (torch.bfloat16, torch.float32) for tensor in tensors)
