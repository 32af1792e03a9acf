"""One attention layer: low-rank queries, window keys, the CSA2 part its plan asks for, grouped output.

T rows, D hidden, Q query latent, H heads, C latent channels, G output groups, R group rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.layers import LayerKind, LayerPlan
from cedar.config.model import ModelConfig
from cedar.config.rounding import Rounding
from cedar.formats.spec import FP8
from cedar.kernels import dense
from cedar.model import csa2
from cedar.model.csa2 import Compressor, Indexer
from cedar.model.layers import Linear, RMSNorm, Tiles, round_input
from cedar.model.rope import Rope
from cedar.model.state import AttentionState, SharedKV


class Attention(nn.Module):
    """Multi-query attention whose one key vector a position is also its value.

    `write_window` and `write_entries` are what every row does for later rows; `forward` is what a row does
    for itself. Prefill runs the first two on rows for which it skips the third.

    Source: architecture.md 3.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        rope: Rope,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        quantized_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        attention, hidden = config.attention, config.hidden_size
        self.plan = plan
        self.num_heads, self.head_dim = attention.num_heads, attention.head_dim
        self.num_groups, self.group_rank = attention.o_groups, attention.o_lora_rank
        # one table for the whole model, owned by the transformer
        self._rope = [rope]

        quantized_device = quantized_device or device

        def linear(num_inputs: int, num_outputs: int) -> Linear:
            return Linear(num_inputs, num_outputs, "fp8", device=quantized_device, dtype=dtype)

        self.wq_a = linear(hidden, attention.q_lora_rank)
        self.q_norm = RMSNorm(attention.q_lora_rank, config.rms_norm_eps, device=device, dtype=dtype)
        self.wq_b = linear(attention.q_lora_rank, self.num_heads * self.head_dim)
        self.wkv = linear(hidden, self.head_dim)
        self.kv_norm = RMSNorm(self.head_dim, config.rms_norm_eps, device=device, dtype=dtype)
        self.attn_sink = nn.Parameter(torch.zeros(self.num_heads, device=device, dtype=torch.float32))
        self.wo_a = linear(self.num_heads * self.head_dim // self.num_groups, self.num_groups * self.group_rank)
        self.wo_b = linear(self.num_groups * self.group_rank, hidden)
        if plan.writes_entries:
            self.compressor = Compressor(config, plan.ratio, device=device, dtype=dtype)
        if plan.selects:
            self.indexer = Indexer(
                config,
                owns_keys=plan.writes_entries,
                device=device,
                dtype=dtype,
                quantized_device=quantized_device,
            )

    def write_window(self, u_TD: Tensor, state: AttentionState) -> None:
        """Window keys of the rows: normed, rotated by the layer's table, rounded by the state."""
        kv_TC = self.kv_norm(self.wkv(round_input(u_TD, state.rounding), state.rounding), state.rounding)
        rotation = state.rotation(compressed=self.plan.ratio > 0)
        state.write_window(self.plan.layer, dense.rotate(kv_TC.unsqueeze(1), *rotation).squeeze(1))

    def write_entries(self, u_TD: Tensor, state: AttentionState) -> None:
        """Compressed entries and index keys of the rows, if this layer is a KV source."""
        if self.plan.writes_entries:
            csa2.write_entries(self.plan.layer, self.compressor, self.indexer, u_TD, state, self._rope[0])

    def forward(self, u_TD: Tensor, state: AttentionState, shared: SharedKV) -> tuple[Tensor, SharedKV]:
        """(output [T, D], what the next layer shares). The rows' window keys and entries are written already."""
        rounding, plan = state.rounding, self.plan
        latent_TQ = self.q_norm(self.wq_a(round_input(u_TD, rounding), rounding), rounding)
        latent_TQ = round_input(latent_TQ, rounding)
        query_THC = self.wq_b(latent_TQ, rounding).unflatten(-1, (self.num_heads, self.head_dim))
        cos_TR, sin_TR = state.rotation(compressed=plan.ratio > 0)
        query_THC = dense.rotate(query_THC, cos_TR, sin_TR)
        if plan.kind is LayerKind.FULL:
            shared = csa2.full(plan.layer, self.indexer, latent_TQ, u_TD, state, make_pool=plan.decoder)
        elif plan.kind is LayerKind.REINDEX:
            assert plan.kv_source is not None
            shared = csa2.reindex(plan.layer, plan.kv_source, self.indexer, latent_TQ, u_TD, state, shared)
        elif plan.kind is LayerKind.REUSE:
            shared = csa2.reuse(shared)
        output_THC = state.attend(plan.layer, plan.kv_source, query_THC, shared, self.attn_sink)
        # the key is the value, so its rotation comes back with the output and is undone here
        return self._project(dense.rotate(output_THC, cos_TR, -sin_TR), rounding), shared

    def _project(self, output_THC: Tensor, rounding: Rounding) -> Tensor:
        """Each group of heads through its own block of wo_a (unrounded input), then wo_b."""
        output_TGX, held = output_THC.unflatten(1, (self.num_groups, -1)).flatten(2), self.wo_a.held
        if isinstance(held, Tiles):
            spec = FP8 if rounding.activations else None
            mixed_TGR = dense.packed_grouped_linear(output_TGX, *held.groups(self.num_groups), spec)
            return self.wo_b(mixed_TGR.flatten(1), rounding)
        weight_GRX = self.wo_a.effective_weight(rounding).unflatten(0, (self.num_groups, self.group_rank))
        groups = [dense.linear(output_TGX[:, g], weight_GRX[g]) for g in range(self.num_groups)]
        return self.wo_b(round_input(torch.cat(groups, dim=-1), rounding), rounding)
