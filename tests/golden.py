"""The golden data in `tests/vectors/` and the models it belongs to. Its README says what each tensor is."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from cedar.checkpoint.read import read_checkpoint
from cedar.config.rounding import Rounding
from cedar.model.transformer import Transformer
from tests.device import DEVICE

VECTORS = Path(__file__).parent / "vectors"
# golden mode -> (dtype, roundings)
MODES = {
    "f32_noquant": (torch.float32, Rounding.none()),
    "f32_kv": (torch.float32, Rounding.cache_only()),
    "f32": (torch.float32, Rounding()),
    "bf16": (torch.bfloat16, Rounding()),
}


@lru_cache(maxsize=32)
def load(name: str) -> dict[str, Tensor]:
    return load_file(VECTORS / f"{name}.safetensors", device=str(DEVICE))


@lru_cache(maxsize=8)
def _checkpoint(letter: str, dtype: torch.dtype) -> Transformer:
    model = read_checkpoint(VECTORS / f"ckpt_{letter}", dtype=dtype, device=DEVICE)
    model.token_map.set(load("engram")[f"{letter}.token_map"])
    return model


def model(letter: str, mode: str) -> Transformer:
    """Checkpoint `a` or `b` with the arithmetic of a golden mode."""
    dtype, rounding = MODES[mode]
    loaded = _checkpoint(letter, dtype)
    loaded.rounding = rounding
    return loaded


def relative_rms(got: Tensor, want: Tensor) -> float:
    """rms(got - want) / rms(want)."""
    want = want.double()
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


def rms(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).square().mean().sqrt())
