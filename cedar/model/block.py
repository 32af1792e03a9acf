"""The body every layer runs: mHC(attention), then mHC(MoE), after the layer's Engram if it has one.

T rows, N streams, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.layers import LayerPlan
from cedar.config.model import ModelConfig
from cedar.config.rounding import Rounding
from cedar.kernels.mhc import collapse, expand
from cedar.model.attention import Attention
from cedar.model.engram import Engram
from cedar.model.layers import RMSNorm
from cedar.model.mhc import HyperConnection, Mixes
from cedar.model.moe import MoE
from cedar.model.rope import Rope
from cedar.model.state import AttentionState, RouterStats, SharedKV


class Block(nn.Module):
    """One layer, cut where prefill may drop rows: `enter`, then `attend`, then `feed`."""

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        rope: Rope,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        table_device: torch.device | str | None = None,
        quantized_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        if plan.engram:
            self.engram = Engram(
                config,
                plan.layer,
                device=device,
                dtype=dtype,
                table_device=table_device,
                quantized_device=quantized_device,
            )
        self.hc_attn = HyperConnection(config, device=device)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype)
        self.attn = Attention(config, plan, rope, device=device, dtype=dtype, quantized_device=quantized_device)
        self.hc_ffn = HyperConnection(config, device=device)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype)
        self.ffn = MoE(config, plan.layer, device=device, dtype=dtype, quantized_device=quantized_device)

    def enter(self, streams_TND: Tensor, premix_TN: Tensor, rounding: Rounding | None = None) -> tuple[Mixes, Tensor]:
        """The attention sublayer's mixes and its normed input [T, D]."""
        return self.hc_attn(streams_TND), self.attn_norm(collapse(streams_TND, premix_TN), rounding)

    def attend(
        self, streams_TND: Tensor, mixes: Mixes, u_TD: Tensor, state: AttentionState, shared: SharedKV
    ) -> tuple[Tensor, SharedKV]:
        """The streams after attention. Window keys and entries of the rows are written already."""
        y_TD, shared = self.attn(u_TD, state, shared)
        return expand(y_TD, streams_TND, mixes.post_TN, mixes.mixing_TNN), shared

    def feed(
        self, streams_TND: Tensor, premix_TN: Tensor, image_T: Tensor | None, state: AttentionState
    ) -> tuple[Tensor, Tensor, RouterStats]:
        """The streams after the MoE, the pre-mix that the next layer's collapse uses, and the routing."""
        mixes = self.hc_ffn(streams_TND)
        u_TD = self.ffn_norm(collapse(streams_TND, premix_TN), state.rounding)
        y_TD, stats = self.ffn(u_TD, image_T, state.rounding)
        return expand(y_TD, streams_TND, mixes.post_TN, mixes.mixing_TNN), mixes.premix_TN, stats
