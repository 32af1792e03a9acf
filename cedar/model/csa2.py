"""CSA2: the compressor, the indexer, and the three ways a layer uses them.

T rows, D hidden, Q query latent, C latent channels, E entries, H index heads, I index channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.config.rounding import Rounding
from cedar.formats.spec import FP4_INDEX
from cedar.kernels.compress import pool_groups
from cedar.kernels.dense import rotate
from cedar.kernels.quantize import round_rows
from cedar.model.layers import Linear, RMSNorm
from cedar.model.state import AttentionState, SharedKV


class Compressor(nn.Module):
    """Rows of a KV source to latent entries: one a token at ratio 1, one a pair at ratio 2.

    Ratio 1 has no gate and stays in the model's dtype; ratio 2 projects and pools in float32.
    """

    def __init__(
        self, config: ModelConfig, ratio: int, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        channels = config.attention.head_dim
        weight_dtype = torch.float32 if ratio == 2 else dtype
        self.ratio = ratio
        self.wkv = Linear(config.hidden_size, channels, "bf16", device=device, dtype=weight_dtype)
        self.wgate = (
            Linear(config.hidden_size, channels, "bf16", device=device, dtype=weight_dtype) if ratio == 2 else None
        )
        self.norm = RMSNorm(channels, config.rms_norm_eps, device=device, dtype=dtype)

    def forward(self, layer: int, u_TD: Tensor, state: AttentionState) -> tuple[Tensor, Tensor]:
        """(latent entries [E, C] before rotation and rounding, position of each entry's first token [E])."""
        if self.wgate is None:
            return self.norm(self.wkv(u_TD, state.rounding), state.rounding), state.positions_T
        content_TC = self.wkv(u_TD.float(), state.rounding)
        gate_TC = self.wgate(u_TD.float(), state.rounding)
        content_ERC, gate_ERC, first_E = state.complete_groups(layer, content_TC, gate_TC)
        return self.norm(pool_groups(content_ERC, gate_ERC).to(u_TD.dtype), state.rounding), first_E


class Indexer(nn.Module):
    """Scores entries for each row. Only a KV source owns index keys; the others score against its keys.

    During training every input is detached: the indexer learns from its own loss alone (training.md 1.3).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        owns_keys: bool,
        device: torch.device | str | None,
        dtype: torch.dtype,
        quantized_device: torch.device | str | None,
    ) -> None:
        super().__init__()
        indexer, attention = config.indexer, config.attention
        self.num_heads, self.head_dim = indexer.num_heads, indexer.head_dim
        num_queries = indexer.num_heads * indexer.head_dim
        self.wq_b = Linear(attention.q_lora_rank, num_queries, "fp8", device=quantized_device, dtype=dtype)
        self.weights_proj = Linear(config.hidden_size, indexer.num_heads, "bf16", device=device, dtype=dtype)
        if owns_keys:
            self.wk = Linear(attention.head_dim, indexer.head_dim, "bf16", device=device, dtype=dtype)
            self.k_norm = RMSNorm(indexer.head_dim, config.rms_norm_eps, device=device, dtype=dtype)

    def keys(self, latent_EC: Tensor, rotation: tuple[Tensor, Tensor], rounding: Rounding) -> Tensor:
        """Index keys [E, I] of latent entries, taken before the entries are rotated or rounded."""
        key_EI = self.k_norm(self.wk(latent_EC.detach(), rounding), rounding)
        return rotate(key_EI.unsqueeze(1), *rotation).squeeze(1)

    def queries(self, latent_TQ: Tensor, u_TD: Tensor, state: AttentionState) -> tuple[Tensor, Tensor]:
        """(queries [T, H, I] rotated and rounded, head weights [T, H]).

        Args:
            latent_TQ: The normed query latent as the FP8 linear sees it.
        """
        query_TX = self.wq_b(latent_TQ.detach(), state.rounding)
        query_THI = query_TX.unflatten(-1, (self.num_heads, self.head_dim))
        query_THI = rotate(query_THI, *state.rotation(compressed=True))
        if state.rounding.index:
            query_THI = round_rows(query_THI, FP4_INDEX)
        weight_TH = self.weights_proj(u_TD.detach(), state.rounding)
        return query_THI, weight_TH * (self.head_dim**-0.5 * self.num_heads**-0.5)


def write_entries(
    layer: int, compressor: Compressor, indexer: Indexer, u_TD: Tensor, state: AttentionState, rope: nn.Module
) -> None:
    """What a KV source does for every row: new entries and their index keys."""
    latent_EC, first_E = compressor(layer, u_TD, state)
    rotation = rope(first_E, compressed=True)
    key_EI = indexer.keys(latent_EC, rotation, state.rounding)
    main_EC = rotate(latent_EC.unsqueeze(1), *rotation).squeeze(1)
    state.write_entries(layer, main_EC, key_EI)


def full(
    layer: int, indexer: Indexer, latent_TQ: Tensor, u_TD: Tensor, state: AttentionState, *, make_pool: bool
) -> SharedKV:
    """Select among all visible entries of the layer's own cache; the boundary layer publishes the pool."""
    query_THI, weight_TH = indexer.queries(latent_TQ, u_TD, state)
    return state.select(layer, layer, query_THI, weight_TH, pool=None, make_pool=make_pool)


def reindex(
    layer: int,
    kv_source: int,
    indexer: Indexer,
    latent_TQ: Tensor,
    u_TD: Tensor,
    state: AttentionState,
    shared: SharedKV,
) -> SharedKV:
    """Select anew with own queries and another layer's keys, inside the candidate pool if there is one."""
    query_THI, weight_TH = indexer.queries(latent_TQ, u_TD, state)
    return state.select(layer, kv_source, query_THI, weight_TH, pool=shared.pool, make_pool=False)


def reuse(shared: SharedKV) -> SharedKV:
    """Attend with the selection of the latest index source."""
    return shared
