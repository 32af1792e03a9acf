"""What a GPU could do at most, and what a trained token asks of it: MFU is the ratio."""

from __future__ import annotations

import torch

from cedar.config.model import ModelConfig
from cedar.config.train import TrainConfig
from cedar.planner.flops import decode_flops

# dense bfloat16 products a second, from the makers' data sheets
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "B200": 2250e12,
}
# a backward is two forwards
_PASSES = 3


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 operations a second of a known GPU; None for a CPU and for GPUs that are not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)


def trained_token_flops(model: ModelConfig, config: TrainConfig) -> float:
    """Operations of forward and backward for one token, in a sample of the recipe's mean length.

    Counts what the architecture asks (the planner's sums), not what a kernel does twice or for nothing.
    """
    lengths = [length * stage.share / len(stage.lengths) for stage in config.stages for length in stage.lengths]
    # the mean token of a sample sees half of it
    return _PASSES * sum(decode_flops(model, max(1, int(sum(lengths) / 2))).values())
