"""Rotary positions: two tables a model, chosen per layer.

T positions, R angles (half the rotated channels).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig, RopeScaling
from cedar.kernels.dispatch import row_op


def inverse_frequencies(num_channels: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """float32 [num_channels / 2]: computed in double, rounded once.

    Args:
        num_channels: Rotated channels of a head, even.
        scaling: YaRN of the layers that read a compressed cache; None (or factor 1) for plain RoPE.

    Source: architecture.md 3.3. The released code computes in float32, so its last bit is the device's.

    >>> [round(float(f), 6) for f in inverse_frequencies(64, 160000, RopeScaling(factor=16))[[0, 15, 16]]]
    [1.0, 0.003636, 0.002266]
    """
    frequency = theta ** -(torch.arange(0, num_channels, 2, dtype=torch.float64) / num_channels)
    if scaling is not None and scaling.factor != 1:

        def channel(rotations: float) -> float:
            span = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
            return num_channels * math.log(span) / (2 * math.log(theta))

        low = max(math.floor(channel(scaling.beta_fast)), 0)
        high = min(math.ceil(channel(scaling.beta_slow)), num_channels - 1)
        width = (high - low) or 0.001
        ramp = ((torch.arange(num_channels // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
        frequency = frequency * (1 - ramp) + frequency / scaling.factor * ramp
    return frequency.float()


@row_op(1)
def _angles(position_T: Tensor, frequency_R: Tensor) -> tuple[Tensor, Tensor]:
    angle_TR = position_T.float().unsqueeze(-1) * frequency_R
    return angle_TR.cos(), angle_TR.sin()


class Rope(nn.Module):
    """cos and sin of positions, float32: the plain table for window-only layers, the compressed one for the rest."""

    window_frequency_R: Tensor
    compressed_frequency_R: Tensor

    def __init__(self, config: ModelConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        attention = config.attention
        plain = inverse_frequencies(attention.rope_head_dim, attention.rope_theta, None)
        compressed = inverse_frequencies(attention.rope_head_dim, attention.compress_rope_theta, attention.rope_scaling)
        self.register_buffer("window_frequency_R", plain.to(device), persistent=False)
        self.register_buffer("compressed_frequency_R", compressed.to(device), persistent=False)

    def forward(self, position_T: Tensor, *, compressed: bool) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, R]. At positions near 1M keep float32: bf16 tables are wrong."""
        return _angles(position_T, self.compressed_frequency_R if compressed else self.window_frequency_R)
