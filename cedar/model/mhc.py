"""Single-pass hyper-connections around a sublayer.

T rows, N streams, D channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.kernels import mhc as mhc_ops


class Mixes(NamedTuple):
    """What one sublayer does to the streams, float32.

    `premix_TN` is consumed by the *next* sublayer's collapse: the coefficients are one sublayer early, which is what
    makes one pass over the streams enough.
    """

    premix_TN: Tensor
    post_TN: Tensor
    mixing_TNN: Tensor

    def rows(self, kept: slice | Tensor) -> Mixes:
        """The same for some of the rows."""
        return Mixes(self.premix_TN[kept], self.post_TN[kept], self.mixing_TNN[kept])


class HyperConnection(nn.Module):
    """The coefficients of one sublayer. `fn`, `base`, `scale` are the release's `hc_*_fn`, `_base`, `_scale`.

    Source: architecture.md 2.1; report 2.2.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        num_streams = config.mhc.num_streams
        num_outputs = num_streams * (2 + num_streams)
        self.iterations, self.eps, self.rms_eps = config.mhc.sinkhorn_iterations, config.mhc.eps, config.rms_norm_eps

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=torch.float32))

        self.fn = parameter(num_outputs, num_streams * config.hidden_size)
        self.base = parameter(num_outputs)
        self.scale = parameter(3)

    def forward(self, streams_TND: Tensor) -> Mixes:
        return Mixes(
            *mhc_ops.mix_coefficients(
                streams_TND,
                self.fn,
                self.scale,
                self.base,
                iterations=self.iterations,
                eps=self.eps,
                rms_eps=self.rms_eps,
            )
        )
