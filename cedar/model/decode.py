"""One token of several sequences with every shape fixed and every position on the device: what a graph can hold.

`DecodeSlots` keeps what decoding changes (windows, waiting halves, look-backs, page tables) in fixed places;
`DecodeStep` is one step over it and fulfils `AttentionState`. Entries and index keys stay in the cache's pages.

T rows, S slots, C latent channels, I index channels, H heads, L look-backs, R rows of a ring, P pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from cedar.config.layers import layer_plans
from cedar.config.model import ModelConfig
from cedar.config.rounding import Rounding
from cedar.formats.spec import FP8
from cedar.kernels import attention as attention_ops
from cedar.kernels import indexer as indexer_ops
from cedar.kernels.pages import Paged, Stored, store_rows
from cedar.model.engram import lookback_ids
from cedar.model.rope import Rope
from cedar.model.sequence import SequenceState
from cedar.model.state import SharedKV

# (what, KV source) -> the pool's bytes of it
StoredRows = Mapping[tuple[Literal["entries", "keys"], int], Stored]


def unsuitable(state: SequenceState) -> str:
    """Why a sequence cannot decode in a slot, or an empty string."""
    rounding = state.rounding
    if not (rounding.window_kv and rounding.main_kv and rounding.index):
        return "its cache is not stored in the release's formats"
    return "" if state.selection_rule == "learned" else "its selection is random"


class DecodeSlots:
    """Fixed places for `num_slots` sequences, and one more where idle rows write.

    Args:
        rows: Views of the page pool's bytes.
        idle_page: A page of the pool that belongs to nobody.
        max_pages: Pages of the longest sequence.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: StoredRows,
        *,
        num_slots: int,
        max_pages: int,
        idle_page: int,
        device: torch.device,
    ) -> None:
        attention = config.attention
        self.config, self.rows, self.num_slots, self.idle_page = config, rows, num_slots, idle_page
        self.num_ring = attention.sliding_window + config.draft.block_size + 1
        self.num_tail_rows = config.draft.block_size + 2
        self.num_history = config.engram.max_ngram_size + config.draft.block_size
        places = num_slots + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        channels = attention.head_dim
        self.windows = [
            Stored(
                zeros(places, self.num_ring, channels, dtype=torch.uint8),
                zeros(places, self.num_ring, channels // FP8.group, dtype=torch.uint8),
                FP8,
            )
            for _ in range(config.num_layers)
        ]
        pairing = [plan.layer for plan in layer_plans(config) if plan.writes_entries and plan.ratio == 2]
        # (content, gate) by position modulo the ring
        self.tails = {
            layer: tuple(zeros(places, self.num_tail_rows, channels, dtype=torch.float32) for _ in range(2))
            for layer in pairing
        }
        self.history_SL = zeros(places, self.num_history)
        self.page_SP = torch.full((places, max_pages), idle_page, dtype=torch.int64, device=device)
        self.floor_LS = zeros(config.num_layers, places)
        # what each slot's page table holds, and how many rows of tails are true
        self._pages: list[list[int]] = [[] for _ in range(places)]
        self._tail_rows = [0] * places

    def enter(self, state: SequenceState, slot: int) -> None:
        """Copy a sequence's windows, halves and look-backs into a slot."""
        for layer, (window, store) in enumerate(zip(self.windows, state.windows, strict=True)):
            row_R = torch.arange(self.num_ring, device=state.device)
            for plane, stored in zip(window[:2], store.read(row_R), strict=True):
                plane[slot] = stored
        floors = [state.window_floor(layer) for layer in range(len(self.windows))]
        self.floor_LS[:, slot] = torch.tensor(floors).to(self.floor_LS.device)
        self._tail_rows[slot] = 0
        for layer, ring in self.tails.items():
            if layer not in state.tails:
                continue
            num_rows = state.tails[layer][0].shape[0]
            place_R = self._tail_places(state, num_rows)
            for plane, rows in zip(ring, state.tails[layer], strict=True):
                plane[slot, place_R] = rows
            self._tail_rows[slot] = num_rows
        self.history_SL[slot] = state.history_L[-self.num_history :]

    def leave(self, state: SequenceState, slot: int) -> None:
        """The opposite of `enter`, after any number of steps."""
        row_R = torch.arange(self.num_ring, device=state.device)
        for window, store in zip(self.windows, state.windows, strict=True):
            store.overwrite(row_R, [plane[slot] for plane in window[:2]])
        for layer, (content_SRC, gate_SRC) in self.tails.items():
            place_R = self._tail_places(state, self._tail_rows[slot])
            state.tails[layer] = content_SRC[slot, place_R], gate_SRC[slot, place_R]
        state.history_L = self.history_SL[slot].clone()

    def stepped(self, state: SequenceState, slot: int) -> None:
        """Tell the host's side of a sequence that its slot went one token on."""
        state.num_tokens += 1
        for source, store in state.entries.items():
            count = state.num_tokens // self.config.attention.compress_ratios[source]
            store.count = state.keys[source].count = count
        self._tail_rows[slot] = min(self._tail_rows[slot] + 1, self.num_tail_rows)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Make a slot's page table equal to `pages`; only what changed is copied."""
        held = self._pages[slot]
        same = 0
        for old, new in zip(held, pages, strict=False):
            if old != new:
                break
            same += 1
        if same == len(held) == len(pages):
            return
        # entries behind the end keep naming some page: nothing reads them
        fresh_P = torch.tensor(pages[same:], dtype=torch.int64)
        self.page_SP[slot, same : len(pages)] = fresh_P.to(self.page_SP.device)
        self._pages[slot] = list(pages)

    def _tail_places(self, state: SequenceState, num_rows: int) -> Tensor:
        stop = state.num_tokens
        return torch.arange(stop - num_rows, stop, device=state.device) % self.num_tail_rows


class DecodeStep:
    """One token a row; fulfils `AttentionState` without asking the device anything.

    Args:
        slot_T: Each row's slot, int64; idle rows name the one behind the last.
        position_T: Position of each row's token, int64.
        context: No row stands at or beyond this token: scans end there.
    """

    def __init__(
        self,
        slots: DecodeSlots,
        rope: Rope,
        rounding: Rounding,
        slot_T: Tensor,
        position_T: Tensor,
        *,
        context: int,
    ) -> None:
        self.slots, self.rounding, self.context = slots, rounding, context
        self._rope, self._slot_T, self._position_T = rope, slot_T, position_T
        self._busy_T = slot_T < slots.num_slots
        self._pair_T = self._busy_T & (position_T % 2 == 1)
        self._ring_T = position_T % slots.num_ring
        self._floor_LT = slots.floor_LS[:, slot_T]
        self._rotations: dict[bool, tuple[Tensor, Tensor]] = {}

    @property
    def positions_T(self) -> Tensor:
        return self._position_T

    def rotation(self, *, compressed: bool) -> tuple[Tensor, Tensor]:
        if compressed not in self._rotations:
            self._rotations[compressed] = self._rope(self._position_T, compressed=compressed)
        return self._rotations[compressed]

    def lookbacks(self, ids_T: Tensor) -> Tensor:
        """Raw ids of the rows' tokens and their look-backs, newest first [T, L]; the tokens join the history."""
        slots = self.slots
        history_TL = torch.cat([slots.history_SL[self._slot_T, 1:], ids_T.unsqueeze(-1)], dim=-1)
        slots.history_SL[self._slot_T] = history_TL
        config = slots.config
        raw_TSL = lookback_ids(
            history_TL,
            torch.zeros_like(history_TL),
            num_lookbacks=config.engram.max_ngram_size,
            image_token_id=config.image_token_id,
        )
        return raw_TSL[:, -1]

    def write_window(self, layer: int, kv_TC: Tensor) -> None:
        store_rows(kv_TC, self.slots.windows[layer], self._slot_T, self._ring_T, self._busy_T)

    def complete_groups(self, layer: int, content_TC: Tensor, gate_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A pair for every row; those of even positions are not whole, and `write_entries` leaves them out."""
        num_rows = self.slots.num_tail_rows
        own_T, before_T = self._position_T % num_rows, (self._position_T - 1) % num_rows
        pairs = []
        for ring_SRC, fresh_TC in zip(self.slots.tails[layer], (content_TC, gate_TC), strict=True):
            ring_SRC[self._slot_T, own_T] = fresh_TC
            pairs.append(torch.stack([ring_SRC[self._slot_T, before_T], fresh_TC], dim=1))
        return pairs[0], pairs[1], (self._position_T - 1).clamp(min=0)

    def write_entries(self, layer: int, main_EC: Tensor, key_EI: Tensor) -> None:
        ratio = self._ratio(layer)
        entry_T = self._position_T // ratio
        present_T = self._busy_T if ratio == 1 else self._pair_T
        for what, fresh in (("entries", main_EC), ("keys", key_EI)):
            place = self._paged(what, layer)
            per_page = place.stored.codes_PNX.shape[1]
            page_T = place.page_SP[self._slot_T, entry_T // per_page]
            store_rows(fresh, place.stored, page_T, entry_T % per_page, present_T)

    def select(
        self, layer: int, kv_source: int, query_THI: Tensor, weight_TH: Tensor, *, pool: Tensor | None, make_pool: bool
    ) -> SharedKV:
        """The selection [T, K], and the pool as numbers of candidate blocks [T, N]."""
        indexer, ratio = self.slots.config.indexer, self._ratio(kv_source)
        keys, visible_T = self._paged("keys", kv_source), (self._position_T + 1) // ratio
        size, num_blocks = indexer.candidate_block_size, indexer.candidate_topk_blocks
        if pool is not None:
            score_TP = indexer_ops.paged_pool_scores(query_THI, weight_TH, keys, visible_T, pool, size)
            place_TK = indexer_ops.top_entries(score_TP, indexer.topk)
            safe_TK = place_TK.clamp(min=0)
            selection_TK = pool.gather(1, safe_TK // size) * size + safe_TK % size
            return SharedKV(selection_TK.masked_fill(place_TK < 0, -1), pool)
        score_TE = indexer_ops.paged_index_scores(query_THI, weight_TH, keys, visible_T, self.context // ratio)
        selection_TK = indexer_ops.top_entries(score_TE, indexer.topk)
        if make_pool:
            pool = indexer_ops.top_blocks(score_TE, visible_T, block_size=size, topk_blocks=num_blocks)
        return SharedKV(selection_TK, pool)

    def attend(self, layer: int, kv_source: int | None, query_THC: Tensor, shared: SharedKV, sink_H: Tensor) -> Tensor:
        return attention_ops.paged_attention(
            query_THC,
            self.slots.windows[layer],
            self._slot_T,
            self._position_T,
            self._floor_LT[layer],
            None if kv_source is None else self._paged("entries", kv_source),
            shared.selection,
            sink_H,
            self.slots.config.attention.sliding_window,
        )

    def _paged(self, what: Literal["entries", "keys"], source: int) -> Paged:
        return Paged(self.slots.rows[what, source], self.slots.page_SP, self._slot_T)

    def _ratio(self, source: int) -> int:
        return self.slots.config.attention.compress_ratios[source]
