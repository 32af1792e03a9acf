"""Whole sequences at once, for training and scoring; differentiable.

B packs, S rows a pack, T = B * S rows, H heads, C latent channels, I index channels, E entries a pack,
K selected entries, W window rows, N candidate blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.config.model import ModelConfig
from cedar.config.rounding import Rounding
from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8
from cedar.kernels import attention as attention_ops
from cedar.kernels import indexer as indexer_ops
from cedar.kernels.quantize import round_rows
from cedar.model.rope import Rope
from cedar.model.select import Keys, gather_rows, select_rows, sliding
from cedar.model.state import IndexGroup, RouterStats, SelectionRule, SharedKV


@dataclass
class PackState:
    """Whole sequences, B packs of S rows, every row at once.

    Two forms of the same attention: `masked` (training: scores against all entries of the pack, a mask for the
    selection, any number of samples in a pack) and `gathered` (one sample a pack: the arithmetic of
    prefill and decode, so that deterministic mode gives equal bits).

    Attributes:
        segment_start_BS: First row of each row's sample; even, since a pair never straddles two samples.
        decoder_floor_BS: Decoder layers' windows start not before this row (replay masks), or None.
        replay_start_BS: First of the window's worth of rows by which this row's sample repeats the rows before
            them, any row beyond the pack where it repeats none; even. None if no sample does. Rows from there
            on see no window key before it, and what the repeated rows leave as entries is nobody's: encoder
            replay on a cache miss (training.md 1.10.3).
        topk: Entries a row selects; None means all visible.
        collect: Keep what the auxiliary losses read.
    """

    config: ModelConfig
    rope: Rope
    rounding: Rounding
    segment_start_BS: Tensor
    form: Literal["masked", "gathered"]
    topk: int | None
    decoder_floor_BS: Tensor | None = None
    replay_start_BS: Tensor | None = None
    selection_rule: SelectionRule = "learned"
    collect: bool = False
    index_groups: list[IndexGroup] = field(default_factory=list)
    routers: list[RouterStats] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_packs, num_rows = self.segment_start_BS.shape
        self._row_S = torch.arange(num_rows, device=self.segment_start_BS.device)
        self._position_BS = self._row_S - self.segment_start_BS
        self._window_start_BS = self.segment_start_BS
        if self.replay_start_BS is not None:
            replays_BS = self._row_S >= self.replay_start_BS
            self._position_BS = self._position_BS - replays_BS * self.config.attention.sliding_window
            self._window_start_BS = torch.where(replays_BS, self.replay_start_BS, self.segment_start_BS)
        self._rotations: dict[bool, tuple[Tensor, Tensor]] = {}
        self._window_BSC = torch.empty(0)
        self._entries: dict[int, tuple[Tensor, Tensor]] = {}
        self._kv_ratio = {
            source: self.config.attention.compress_ratios[source]
            for source in self.config.attention.kv_source_layer_ids
        }

    @property
    def positions_T(self) -> Tensor:
        return self._position_BS.flatten()

    def rotation(self, *, compressed: bool) -> tuple[Tensor, Tensor]:
        if compressed not in self._rotations:
            self._rotations[compressed] = self.rope(self.positions_T, compressed=compressed)
        return self._rotations[compressed]

    def write_window(self, layer: int, kv_TC: Tensor) -> None:
        kv_TC = round_rows(kv_TC, FP8) if self.rounding.window_kv else kv_TC
        self._window_BSC = kv_TC.view(*self.segment_start_BS.shape, -1)

    def complete_groups(self, layer: int, content_TC: Tensor, gate_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_packs, num_rows = self.segment_start_BS.shape
        num_pairs = num_rows // 2

        def pairs(rows_TC: Tensor) -> Tensor:
            channels = rows_TC.shape[-1]
            rows_BSC = rows_TC.view(num_packs, num_rows, channels)[:, : 2 * num_pairs]
            return rows_BSC.reshape(num_packs * num_pairs, 2, channels)

        first_E = self._position_BS[:, : 2 * num_pairs : 2].flatten()
        return pairs(content_TC), pairs(gate_TC), first_E

    def write_entries(self, layer: int, main_EC: Tensor, key_EI: Tensor) -> None:
        main_EC = round_rows(main_EC, FP4_MAIN) if self.rounding.main_kv else main_EC
        key_EI = round_rows(key_EI, FP4_INDEX) if self.rounding.index else key_EI
        num_packs = self.segment_start_BS.shape[0]
        per_pack = main_EC.shape[0] // num_packs
        self._entries[layer] = (
            main_EC.view(num_packs, per_pack, main_EC.shape[-1]),
            key_EI.view(num_packs, per_pack, key_EI.shape[-1]),
        )

    def select(
        self, layer: int, kv_source: int, query_THI: Tensor, weight_TH: Tensor, *, pool: Tensor | None, make_pool: bool
    ) -> SharedKV:
        _, key_BEI = self._entries[kv_source]
        if self.form == "gathered":
            return self._select_gathered(kv_source, query_THI, weight_TH, key_BEI, pool, make_pool)
        num_packs, num_rows = self.segment_start_BS.shape
        query_BSHI = query_THI.view(num_packs, num_rows, *query_THI.shape[1:])
        visible_BSE = self._visible(kv_source)
        score_BSE = indexer_ops.masked_index_scores(query_BSHI, weight_TH.view(num_packs, num_rows, -1), key_BEI)
        ranked_BSE = torch.where(visible_BSE, score_BSE.detach(), -torch.inf)
        if self.selection_rule == "random":
            ranked_BSE = torch.where(visible_BSE, torch.rand_like(ranked_BSE), -torch.inf)
        elif pool is not None and self.topk is not None:
            ranked_BSE = torch.where(pool, ranked_BSE, -torch.inf)
        if self.topk is None:
            selection_BSE = ranked_BSE > -torch.inf
        else:
            selection_BSE = indexer_ops.topk_mask(ranked_BSE.flatten(0, 1), self.topk).view_as(ranked_BSE)
        if self.collect:
            support_BSE = torch.where(selection_BSE, score_BSE, -torch.inf)
            self.index_groups.append(
                IndexGroup(layer, support_BSE.flatten(0, 1), torch.zeros_like(ranked_BSE).flatten(0, 1))
            )
        return SharedKV(selection_BSE, self._masked_pool(ranked_BSE, kv_source) if make_pool else pool)

    def attend(self, layer: int, kv_source: int | None, query_THC: Tensor, shared: SharedKV, sink_H: Tensor) -> Tensor:
        start_BS = self._window_start_BS
        if self.decoder_floor_BS is not None and layer >= self.config.boundary_layer_id:
            start_BS = torch.maximum(start_BS, self.decoder_floor_BS)
        if self.form == "gathered":
            return self._attend_gathered(kv_source, query_THC, shared, sink_H)
        entry_BEC = selection_BSE = None
        if kv_source is not None:
            entry_BEC, selection_BSE = self._entries[kv_source][0], shared.selection
        output_BSHC, mass_BSE = attention_ops.masked_attention(
            query_THC.view(*start_BS.shape, *query_THC.shape[1:]),
            self._window_BSC,
            start_BS,
            entry_BEC,
            selection_BSE,
            sink_H,
            self.config.attention.sliding_window,
        )
        if self.collect and mass_BSE is not None:
            # the latest index source serves this layer
            self.index_groups[-1].mass_TK += mass_BSE.flatten(0, 1)
        return output_BSHC.flatten(0, 1)

    def _visible(self, kv_source: int) -> Tensor:
        """bool [B, S, E]: entries of the row's own sample whose last token the row has reached."""
        ratio, num_entries = self._kv_ratio[kv_source], self._entries[kv_source][0].shape[1]
        entry_E = torch.arange(num_entries, device=self._row_S.device)
        reached_SE = (entry_E + 1) * ratio <= self._row_S.unsqueeze(-1) + 1
        visible_BSE = reached_SE & (entry_E * ratio >= self.segment_start_BS.unsqueeze(-1))
        if self.replay_start_BS is None:
            return visible_BSE
        # a repeated row sees what its first self saw: entries up to its position, by whichever row wrote them
        first_BE = self._position_BS[:, : num_entries * ratio : ratio]
        reached_BSE = first_BE.unsqueeze(1) + ratio <= self._position_BS.unsqueeze(-1) + 1
        return visible_BSE & reached_BSE & ~self._repeated(ratio)[:, :num_entries].unsqueeze(1)

    def _repeated(self, ratio: int) -> Tensor:
        """bool [B, S / ratio]: entries that a sample's repeated rows wrote."""
        assert self.replay_start_BS is not None
        since_BS = self._row_S - self.replay_start_BS
        return ((since_BS >= 0) & (since_BS < self.config.attention.sliding_window))[:, ::ratio]

    def _masked_pool(self, score_BSE: Tensor, kv_source: int) -> Tensor:
        """The candidate pool as a mask over entries; blocks are counted from each sample's first entry."""
        indexer, ratio = self.config.indexer, self._kv_ratio[kv_source]
        num_entries = score_BSE.shape[-1]
        first_BS1 = (self.segment_start_BS // ratio).unsqueeze(-1)
        visible_T = ((self._position_BS + 1) // ratio).flatten()
        entry_E = torch.arange(num_entries, device=score_BSE.device)
        # column e of the relative scores is the e-th entry of the row's own sample
        source_BSE = entry_E + first_BS1
        back_BSE = entry_E - first_BS1
        own_BSE = back_BSE >= 0
        if self.replay_start_BS is not None:
            # the entries of repeated rows stand between the others and count for none
            repeated_BS1 = (self.replay_start_BS // ratio).unsqueeze(-1)
            num_repeated = self.config.attention.sliding_window // ratio
            source_BSE = source_BSE + num_repeated * (source_BSE >= repeated_BS1)
            own_BSE = own_BSE & ~self._repeated(ratio)[:, :num_entries].unsqueeze(1)
            back_BSE = back_BSE - num_repeated * (entry_E >= repeated_BS1 + num_repeated)
        relative_BSE = score_BSE.gather(-1, source_BSE.clamp(max=num_entries - 1))
        relative_BSE = relative_BSE.masked_fill(source_BSE >= num_entries, -torch.inf)
        block_TN = indexer_ops.candidate_blocks(
            relative_BSE.flatten(0, 1),
            visible_T,
            block_size=indexer.candidate_block_size,
            topk_blocks=indexer.candidate_topk_blocks,
        )
        member_TE = block_TN.repeat_interleave(indexer.candidate_block_size, dim=-1)[:, :num_entries]
        return member_TE.view_as(score_BSE).gather(-1, back_BSE.clamp(min=0)) & own_BSE

    def _select_gathered(
        self,
        kv_source: int,
        query_THI: Tensor,
        weight_TH: Tensor,
        key_BEI: Tensor,
        pool: Tensor | None,
        make_pool: bool,
    ) -> SharedKV:
        num_packs = key_BEI.shape[0]
        visible_S = (self._row_S + 1) // self._kv_ratio[kv_source]
        packs = [
            select_rows(
                self.config.indexer,
                query_SHI,
                weight_SH,
                Keys(key_EI),
                visible_S,
                self._row_S.shape[0] // self._kv_ratio[kv_source],
                topk=self.topk,
                pool_TN=None if pool is None else pool[b],
                make_pool=make_pool,
                rule=self.selection_rule,
            )
            for b, (query_SHI, weight_SH, key_EI) in enumerate(
                zip(query_THI.chunk(num_packs), weight_TH.chunk(num_packs), key_BEI, strict=True)
            )
        ]
        next_pool = torch.stack([pack.pool for pack in packs if pack.pool is not None]) if make_pool else pool
        return SharedKV(torch.stack([pack.selection for pack in packs if pack.selection is not None]), next_pool)

    def _attend_gathered(self, kv_source: int | None, query_THC: Tensor, shared: SharedKV, sink_H: Tensor) -> Tensor:
        num_packs = self.segment_start_BS.shape[0]
        num_window = self.config.attention.sliding_window
        outputs = []
        for b, query_SHC in enumerate(query_THC.chunk(num_packs)):
            window_SWC = sliding(F.pad(self._window_BSC[b], (0, 0, num_window - 1, 0)), num_window)
            column_W = torch.arange(num_window, device=query_SHC.device) - (num_window - 1)
            visible_SW = self._row_S.unsqueeze(-1) + column_W >= 0
            entry_SKC = present_SK = None
            if kv_source is not None and shared.selection is not None:
                index_SK = shared.selection[b]
                present_SK = index_SK >= 0
                entry_SKC = gather_rows(self._entries[kv_source][0][b], index_SK)
            outputs.append(attention_ops.attention(query_SHC, window_SWC, visible_SW, entry_SKC, present_SK, sink_H))
        return torch.cat(outputs)
