"""Many sequences of one model decoded side by side, all at the same position: text that the target itself writes.

A prompt is fed token by token like an answer, so that sequences with prompts of any length go together and a
step has the same shapes throughout. On a GPU, where each operation costs its launch, a step of 8,192 sequences takes
hardly longer than one of 64.

B sequences, W window slots, E entries, K selected entries, H heads, C latent channels, I index channels, N blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8
from cedar.kernels import attention as attention_ops
from cedar.kernels import indexer as indexer_ops
from cedar.kernels.mhc import collapse
from cedar.kernels.quantize import round_rows
from cedar.model.engram import lookback_ids
from cedar.model.state import SharedKV
from cedar.model.transformer import Transformer


class Lockstep:
    """The state of B sequences at one position; fulfils `AttentionState` for the next row of each.

    Values are kept as floats that went through the cache's formats, so they are those of the real cache.

    Args:
        length: Tokens of every sequence at most.
    """

    def __init__(self, model: Transformer, num_sequences: int, length: int) -> None:
        config, device = model.config, model.device
        attention = config.attention
        self.model, self.rounding, self.length = model, model.rounding, length
        self.position = 0
        self._slot_W = torch.arange(attention.sliding_window, device=device)
        # first position that each sequence's decoder windows may reach
        self.floor_B = torch.zeros(num_sequences, dtype=torch.int64, device=device)

        def rows(count: int, channels: int) -> Tensor:
            return torch.zeros(num_sequences, count, channels, dtype=model.dtype, device=device)

        self._window = [rows(attention.sliding_window, attention.head_dim) for _ in range(config.num_layers)]
        self._entries, self._keys = {}, {}
        for source in attention.kv_source_layer_ids:
            count = -(-length // attention.compress_ratios[source])
            self._entries[source] = rows(count, attention.head_dim)
            self._keys[source] = rows(count, config.indexer.head_dim)
        self._halves: dict[int, tuple[Tensor, Tensor]] = {}
        self._recent_BL = torch.full(
            (num_sequences, config.engram.max_ngram_size - 1), -1, dtype=torch.int64, device=device
        )
        self._rotations: dict[bool, tuple[Tensor, Tensor]] = {}
        self._pool_BN: Tensor | None = None

    @torch.inference_mode()
    def step(self, ids_B: Tensor) -> Tensor:
        """Run one token of every sequence: logits of the next, float32 [B, V]."""
        model, config = self.model, self.model.config
        assert self.position < self.length
        self._rotations = {}
        ids_BS = torch.cat([self._recent_BL, ids_B.unsqueeze(-1)], dim=1)
        raw_BL = lookback_ids(
            ids_BS,
            torch.zeros_like(ids_BS),
            num_lookbacks=config.engram.max_ngram_size,
            image_token_id=config.image_token_id,
        )[:, -1]
        compressed_BL = model.token_map(raw_BL) if config.engram.layer_ids else raw_BL
        streams_BND, premix_BN = model.enter_streams(ids_B)
        shared = SharedKV()
        for block in model.layers:
            if block.plan.engram:
                streams_BND = block.engram(streams_BND, compressed_BL, raw_BL[:, 0] < 0, self.rounding)
            mixes, u_BD = block.enter(streams_BND, premix_BN)
            block.attn.write_entries(u_BD, self)
            block.attn.write_window(u_BD, self)
            streams_BND, shared = block.attend(streams_BND, mixes, u_BD, self, shared)
            streams_BND, premix_BN, _ = block.feed(streams_BND, mixes.premix_TN, None, self)
        self._recent_BL = ids_BS[:, 1:]
        self.position += 1
        return model.head(model.norm(collapse(streams_BND, premix_BN)), self.rounding)

    @property
    def positions_T(self) -> Tensor:
        return torch.full_like(self.floor_B, self.position)

    def rotation(self, *, compressed: bool) -> tuple[Tensor, Tensor]:
        if compressed not in self._rotations:
            self._rotations[compressed] = self.model.rope(self.positions_T, compressed=compressed)
        return self._rotations[compressed]

    def write_window(self, layer: int, kv_TC: Tensor) -> None:
        window_BWC = self._window[layer]
        kv_TC = round_rows(kv_TC, FP8) if self.rounding.window_kv else kv_TC
        window_BWC[:, self.position % window_BWC.shape[1]] = kv_TC

    def complete_groups(self, layer: int, content_TC: Tensor, gate_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.position % 2 == 0:
            self._halves[layer] = content_TC, gate_TC
            # a pair of twins stands where the true pair comes with the next token; nobody sees it till then
            halves = content_TC, gate_TC
        else:
            halves = self._halves[layer]
        pairs = (torch.stack(pair, dim=1) for pair in zip(halves, (content_TC, gate_TC), strict=True))
        content_BRC, gate_BRC = pairs
        return content_BRC, gate_BRC, self.positions_T // 2 * 2

    def write_entries(self, layer: int, main_EC: Tensor, key_EI: Tensor) -> None:
        place = self.position // self.model.config.attention.compress_ratios[layer]
        self._entries[layer][:, place] = round_rows(main_EC, FP4_MAIN) if self.rounding.main_kv else main_EC
        self._keys[layer][:, place] = round_rows(key_EI, FP4_INDEX) if self.rounding.index else key_EI

    def select(
        self, layer: int, kv_source: int, query_THI: Tensor, weight_TH: Tensor, *, pool: Tensor | None, make_pool: bool
    ) -> SharedKV:
        config = self.model.config
        visible = (self.position + 1) // config.attention.compress_ratios[kv_source]
        key_BEI = self._keys[kv_source][:, :visible]
        score_BE = indexer_ops.gathered_index_scores(query_THI, weight_TH, key_BEI)
        if make_pool:
            pool = indexer_ops.candidate_blocks(
                score_BE,
                torch.full_like(self.floor_B, visible),
                block_size=config.indexer.candidate_block_size,
                topk_blocks=config.indexer.candidate_topk_blocks,
            )
        elif pool is not None:
            member_BE = pool.repeat_interleave(config.indexer.candidate_block_size, dim=1)[:, :visible]
            score_BE = score_BE.masked_fill(~member_BE, -torch.inf)
        selection_BK = indexer_ops.mask_to_index(
            indexer_ops.topk_mask(score_BE, config.indexer.topk), config.indexer.topk
        )
        return SharedKV(selection_BK, pool)

    def attend(self, layer: int, kv_source: int | None, query_THC: Tensor, shared: SharedKV, sink_H: Tensor) -> Tensor:
        window_BWC = self._window[layer]
        num_window = window_BWC.shape[1]
        held_W = self.position - (self.position - self._slot_W) % num_window
        floor_B1 = self.floor_B.unsqueeze(-1)
        decoder = layer >= self.model.config.boundary_layer_id
        visible_BW = held_W >= (floor_B1 if decoder else torch.zeros_like(floor_B1))
        if kv_source is None or shared.selection is None:
            return attention_ops.attention(query_THC, window_BWC, visible_BW, None, None, sink_H)
        there_BK = shared.selection >= 0
        index_BKC = shared.selection.clamp(min=0).unsqueeze(-1).expand(-1, -1, window_BWC.shape[2])
        entry_BKC = self._entries[kv_source].gather(1, index_BKC)
        return attention_ops.attention(query_THC, window_BWC, visible_BW, entry_BKC, there_BK, sink_H)


def sample(logits_BV: Tensor, temperature_B: Tensor, generator: torch.Generator) -> Tensor:
    """One token a row: the likeliest where the temperature is 0."""
    # the largest of (logit / temperature + Gumbel noise) is a draw from the softmax
    noise_BV = -torch.log(torch.empty_like(logits_BV).exponential_(generator=generator).clamp(min=1e-30))
    return (logits_BV + temperature_B.unsqueeze(-1) * noise_BV).argmax(-1)
