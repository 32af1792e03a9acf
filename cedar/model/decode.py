"""The next tokens of several sequences with every shape fixed and every position on the device: what a graph can hold.

A sequence has one row a step, or as many as it verifies drafts and one more; its rows lie side by side, oldest first.
What a rejected row has written lies behind the sequence's end, where the next rows write again.

`DecodeSlots` keeps what decoding changes (windows, waiting halves, look-backs, page tables) in fixed places;
`DecodeStep` is one step over it, and `SlotDecoder` the layers. Entries and index keys stay in the cache's pages.

T rows, S slots, C latent channels, I index channels, H heads, L look-backs, R rows of a ring, P pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from cedar.config.layers import LayerKind, layer_plans
from cedar.config.model import PAGE_TOKENS, ModelConfig
from cedar.formats.fp8 import TILE
from cedar.formats.spec import FP8, FormatSpec
from cedar.kernels import attention as attention_ops
from cedar.kernels import indexer as indexer_ops
from cedar.kernels.compress import pool_pairs
from cedar.kernels.dense import (
    add_round,
    grouped_linear,
    linear_float32,
    packed_grouped_linear,
    packed_linear,
    swiglu_round,
)
from cedar.kernels.engram import engram_gate, look_back
from cedar.kernels.experts import Packed, Router, Tiled, Weights, advance_fed, advance_routed, packed_experts
from cedar.kernels.mhc import Entered, Sublayer, advance_projected, expand
from cedar.kernels.pages import Paged, Split, Stored, advance_split, locate, split_projected, store_normed
from cedar.kernels.quantize import dequantize_rows, quantize_rows
from cedar.model.attention import Attention
from cedar.model.block import Block
from cedar.model.engram import Engram, Recall
from cedar.model.layers import Linear, RMSNorm, Tiles
from cedar.model.mhc import HyperConnection
from cedar.model.rope import Rope
from cedar.model.sequence import SequenceState
from cedar.model.state import SharedKV
from cedar.model.transformer import Transformer, tap_of

if TYPE_CHECKING:
    from cedar.model.draft import Draft

# (what, KV source) -> the pool's bytes of it
StoredRows = Mapping[tuple[str, int], Stored]


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

    Attributes:
        windows: Rings of window keys by layer, then those of the draft's blocks.
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
            for _ in range(config.num_layers + config.draft.num_blocks)
        ]
        pairing = [plan.layer for plan in layer_plans(config) if plan.writes_entries and plan.ratio == 2]
        # (content, gate) by position modulo the ring
        ring = places, self.num_tail_rows, channels
        self.tails = {
            layer: (zeros(*ring, dtype=torch.float32), zeros(*ring, dtype=torch.float32)) for layer in pairing
        }
        self.history_SL = zeros(places, self.num_history)
        # one more than the longest sequence has: a draft looks beyond its end
        self.page_SP = torch.full((places, max_pages + 1), idle_page, dtype=torch.int64, device=device)
        self.floor_LS = zeros(config.num_layers, places)
        # what each slot's page table holds, and from which position its tails are true
        self._pages: list[list[int]] = [[] for _ in range(places)]
        self._first_tail = [0] * places

    def enter(self, state: SequenceState, slot: int) -> None:
        """Copy a sequence's windows, halves, look-backs and what its draft reads into a slot."""
        layers = self.config.num_layers
        row_R = torch.arange(self.num_ring, device=state.device)
        for window, store in zip(self.windows[:layers], state.windows[:layers], strict=True):
            for plane, stored in zip(window[:2], store.read(row_R), strict=True):
                plane[slot] = stored
        for window, rows_RC in zip(self.windows[layers:], self._context_rows(state, row_R), strict=True):
            # rounded to FP8 when they were made: no value changes
            for plane, stored in zip(window[:2], quantize_rows(rows_RC.float(), FP8), strict=True):
                plane[slot] = stored
        floors = [state.window_floor(layer) for layer in range(layers)]
        self.floor_LS[:, slot] = torch.tensor(floors).to(self.floor_LS.device)
        self._first_tail[slot] = state.num_tokens
        for layer, ring in self.tails.items():
            if layer not in state.tails:
                continue
            self._first_tail[slot] = state.num_tokens - state.tails[layer][0].shape[0]
            place_R = self._tail_places(state, slot)
            for plane, rows in zip(ring, state.tails[layer], strict=True):
                plane[slot, place_R] = rows
        self.history_SL[slot, self._history_places(state)] = state._history
        state.in_slot = True

    def leave(self, state: SequenceState, slot: int) -> None:
        """The opposite of `enter`, after any number of steps."""
        state.in_slot = False
        for source, entries in state.entries.items():
            count = state.num_tokens // self.config.attention.compress_ratios[source]
            entries.count = state.keys[source].count = count
        layers = self.config.num_layers
        row_R = torch.arange(self.num_ring, device=state.device)
        for window, store in zip(self.windows[:layers], state.windows[:layers], strict=True):
            store.overwrite(row_R, [plane[slot] for plane in window[:2]])
        if self.config.draft.num_blocks:
            store = state.windows[layers]
            rows = [
                dequantize_rows(codes[slot], scales[slot], FP8, store.dtype)
                for codes, scales, _ in self.windows[layers:]
            ]
            store.put(row_R, torch.cat(rows, dim=-1))
        for layer, (content_SRC, gate_SRC) in self.tails.items():
            place_R = self._tail_places(state, slot)
            state.tails[layer] = content_SRC[slot, place_R], gate_SRC[slot, place_R]
        # the oldest are those that rejected rows have overwritten
        position_L = torch.arange(state.num_tokens - self.num_history, state.num_tokens, device=state.device)
        overwritten_L = position_L < max(state._farthest - self.num_history, 0)
        state._history = self.history_SL[slot, self._history_places(state)].masked_fill(overwritten_L, -1)

    def stepped(self, state: SequenceState, num_rows: int = 1) -> None:
        """Tell the host's side of a sequence that its slot went so many tokens on; `roll_back` takes some back."""
        state.num_tokens += num_rows
        state._farthest = max(state._farthest, state.num_tokens)

    def set_pages(self, slot: int, pages: Sequence[int], *, entered: bool) -> None:
        """Make a slot's page table equal to `pages`; only what changed is copied.

        Args:
            entered: The sequence is new in its slot. Later its table changes at the end alone, by a page that is
                added or was shared, so nothing before that is compared.
        """
        held = self._pages[slot]
        if not entered and len(held) == len(pages) and held[-2:] == pages[-2:]:
            return
        same = 0 if entered else max(len(held) - 2, 0)
        while same < min(len(held), len(pages)) and held[same] == pages[same]:
            same += 1
        if same == len(held) == len(pages):
            return
        # entries behind the end keep naming some page: nothing reads them
        fresh_P = torch.tensor(pages[same:], dtype=torch.int64)
        with torch.inference_mode():
            self.page_SP[slot, same : len(pages)] = fresh_P.to(self.page_SP.device)
        self._pages[slot] = list(pages)

    def _context_rows(self, state: SequenceState, row_R: Tensor) -> Sequence[Tensor]:
        num_blocks = self.config.draft.num_blocks
        return state.windows[-1].take(row_R).chunk(num_blocks, dim=-1) if num_blocks else ()

    def _tail_places(self, state: SequenceState, slot: int) -> Tensor:
        first = max(self._first_tail[slot], state._farthest - self.num_tail_rows)
        return torch.arange(first, max(state.num_tokens, first), device=state.device) % self.num_tail_rows

    def _history_places(self, state: SequenceState) -> Tensor:
        stop = state.num_tokens
        return torch.arange(stop - self.num_history, stop, device=state.device) % self.num_history


class DecodeStep:
    """Rows of one token each: where they stand and what they read and write, without asking the device anything.

    Args:
        slot_T: Each row's slot, int64; idle rows name the one behind the last.
        position_T: Position of each row's token, int64.
        context: No row stands at or beyond this token: scans end there.
    """

    def __init__(self, slots: DecodeSlots, rope: Rope, slot_T: Tensor, position_T: Tensor, *, context: int) -> None:
        self.slots, self.context = slots, context
        self._slot_T, self._position_T = slot_T, position_T
        self._at = at = locate(
            slot_T,
            position_T,
            slots.floor_LS,
            slots.page_SP,
            rope.window_frequency_R,
            rope.compressed_frequency_R,
            num_ring=slots.num_ring,
            page_tokens=PAGE_TOKENS,
        )
        # by compression ratio: rotation of rows and of the entries they complete, entries seen, where new ones go
        plain = at.cos_TR, at.sin_TR
        self._rotations = {0: (at.window_cos_TR, at.window_sin_TR), 1: plain, 2: plain}
        # a pair stands where its first token does
        self._entry_rotations = {1: plain, 2: (at.pair_cos_TR, at.pair_sin_TR)}
        self._visible = {1: at.visible_T, 2: at.visible_pairs_T}
        self._places = {
            1: (at.page_T, at.row_T, at.busy_T),
            2: (at.pair_page_T, at.pair_row_T, at.pair_T),
        }

    def look_back(self, ids_T: Tensor, compressed_V: Tensor) -> Tensor:
        """Compressed ids of the rows' tokens and their look-backs, newest first [T, L]; the tokens join the history."""
        config = self.slots.config
        return look_back(
            ids_T,
            self.slots.history_SL,
            self._slot_T,
            self._position_T,
            compressed_V,
            num_lookbacks=config.engram.max_ngram_size,
            image_token_id=config.image_token_id,
            pad_token_id=config.engram.pad_token_id,
        )

    def split(self, layer: int, attention: Attention, spec: FormatSpec | None) -> Split:
        """What becomes of a layer's latents: queries' are normed and rounded, window keys are kept."""
        query, key = attention.q_norm, attention.kv_norm
        places = self._slot_T, self._at.ring_T, self._at.busy_T
        rotation = self._rotations[attention.plan.ratio]
        norms = query.weight, query.eps, spec, key.weight, key.eps
        return Split(*norms, *rotation, self.slots.windows[layer], *places)

    def pool_pairs(self, layer: int, fresh_TX: Tensor, dtype: torch.dtype) -> Tensor:
        """Each row pooled with the row before it; one of an even position completes no pair, and nobody keeps it."""
        return pool_pairs(fresh_TX, *self.slots.tails[layer], self._slot_T, self._position_T, dtype)

    def write_entries(self, source: int, what: Literal["entries", "keys"], rows_TC: Tensor, norm: RMSNorm) -> Tensor:
        """Norm, rotate and keep what the rows complete; returns the normed rows before their rotation."""
        ratio = self._ratio(source)
        stored = self.slots.rows[what, source]
        rotation, places = self._entry_rotations[ratio], self._places[ratio]
        return store_normed(rows_TC, norm.weight, norm.eps, *rotation, stored, *places)

    def select(
        self, kv_source: int, query_THI: Tensor, weight_TH: Tensor, *, pool: Tensor | None, make_pool: bool
    ) -> SharedKV:
        """The selection [T, K], and the pool as numbers of candidate blocks [T, N].

        Args:
            query_THI: As the linear gave it: neither rotated nor rounded.
            weight_TH: Up to a positive factor, which changes no order.
        """
        indexer, ratio = self.slots.config.indexer, self._ratio(kv_source)
        keys, visible_T = self._paged("keys", kv_source), self._visible[ratio]
        size, num_blocks = indexer.candidate_block_size, indexer.candidate_topk_blocks
        query = query_THI, *self._rotations[ratio], weight_TH, keys, visible_T
        if pool is not None:
            score_TP = indexer_ops.paged_pool_scores(*query, pool, size)
            return SharedKV(indexer_ops.top_members(score_TP, indexer.topk, pool, size), pool)
        score_TE = indexer_ops.paged_index_scores(*query, self.context // ratio)
        selection_TK = indexer_ops.top_entries(score_TE, indexer.topk)
        if make_pool:
            pool = indexer_ops.top_blocks(score_TE, visible_T, block_size=size, topk_blocks=num_blocks)
        return SharedKV(selection_TK, pool)

    def attend(
        self, layer: int, kv_source: int | None, query_THC: Tensor, ratio: int, shared: SharedKV, sink_H: Tensor
    ) -> Tensor:
        return attention_ops.paged_attention(
            query_THC,
            *self._rotations[ratio],
            self.slots.windows[layer],
            self._slot_T,
            self._position_T,
            self._at.floor_LT[layer],
            None if kv_source is None else self._paged("entries", kv_source),
            shared.selection,
            sink_H,
            self.slots.config.attention.sliding_window,
        )

    def write_context(self, draft: Draft, taps_TX: Tensor) -> None:
        """Keep what the draft's blocks read of these rows, as `Draft.context_rows` makes it."""
        at = self._at
        for block, kv_TC in zip(draft.mtp, draft.context_keys(taps_TX, draft.target.rounding), strict=True):
            norm, window = block.attn.kv_norm, self.slots.windows[block.plan.layer]
            rotation = at.window_cos_TR, at.window_sin_TR
            store_normed(kv_TC, norm.weight, norm.eps, *rotation, window, self._slot_T, at.ring_T, at.busy_T)

    def attend_block(self, layer: int, query_THC: Tensor, last_T: Tensor, block_size: int, sink_H: Tensor) -> Tensor:
        """Every row of a draft block sees the window before its anchor and the whole block.

        Args:
            last_T: Position of the last row of each row's block, whose keys are in the ring already.
        """
        return attention_ops.paged_attention(
            query_THC,
            *self._rotations[0],
            self.slots.windows[layer],
            self._slot_T,
            last_T,
            # a context row is written by the rows that run the last layer
            self._at.floor_LT[self.slots.config.num_layers - 1],
            None,
            None,
            sink_H,
            self.slots.config.attention.sliding_window + block_size,
        )

    def _paged(self, what: Literal["entries", "keys"], source: int) -> Paged:
        return Paged(self.slots.rows[what, source], self.slots.page_SP, self._slot_T)

    def _ratio(self, source: int) -> int:
        return self.slots.config.attention.compress_ratios[source]


class SlotDecoder:
    """The model's layers for rows of one token each, in as few kernels as there are steps that depend on each other.

    Linears that read the same rows become one; their weights become views of it, so nothing is held twice. Weights
    that the model holds packed are read so.

    Args:
        model: Its weights must not be rounded on the fly (`Rounding.weights`), as no served model's are.
        draft: Keep what it reads of each row.
    """

    def __init__(self, model: Transformer, draft: Draft | None = None) -> None:
        assert not model.rounding.weights, "a checkpoint's weights are rounded already"
        self.model, self._draft = model, draft
        self._spec = FP8 if model.rounding.activations else None
        with torch.inference_mode(False), torch.no_grad():
            self._layers = [DecodeLayer(block) for block in model.layers]

    def __call__(self, step: DecodeStep, ids_T: Tensor) -> Tensor:
        """The rows' tokens: logits float32 [T, V]. A graph may hold the whole call."""
        model = self.model
        streams_TND, premix_TN = model._embed(ids_T, None, model.dtype)
        image_T = ids_T == model.config.image_token_id
        recall = None
        if model.config.engram.layer_ids:
            compressed_TL = step.look_back(ids_T, model.token_map.compressed_V)
            memories = [layer.block.engram for layer in self._layers if layer.block.plan.engram]
            recall = Recall(memories, compressed_TL, model.dtype, self._spec)
        y = post_TN = mixing_TNN = None
        shared = SharedKV()
        taps: list[Tensor] = []
        for layer in self._layers:
            block = layer.block
            tapped = self._draft is not None and block.plan.layer in model.config.draft.target_layer_ids
            if recall is not None and block.plan.engram:
                if y is not None and post_TN is not None and mixing_TNN is not None:
                    streams_TND, y = expand(y.whole(), streams_TND, post_TN, mixing_TNN), None
                if tapped:
                    taps.append(tap_of(streams_TND))
                streams_TND = self._remember(block.engram, streams_TND, recall, image_T)
            streams = y, streams_TND, post_TN, mixing_TNN, premix_TN
            entered, query_TX = layer.enter(step, *streams, self._spec)
            if tapped and not block.plan.engram:
                taps.append(tap_of(entered.streams_TND))
            y_TD, shared = layer.attend(step, entered, query_TX, shared, self._spec)
            y, entered = layer.run_experts(y_TD, entered, image_T, self._spec)
            streams_TND, premix_TN = entered.streams_TND, entered.premix_TN
            post_TN, mixing_TNN = entered.post_TN, entered.mixing_TNN
        if self._draft is not None:
            step.write_context(self._draft, torch.cat(taps, dim=-1))
        assert y is not None and post_TN is not None and mixing_TNN is not None
        return model._head(expand(y.whole(), streams_TND, post_TN, mixing_TNN), premix_TN, model.rounding)

    def _remember(self, engram: Engram, streams_TND: Tensor, recall: Recall, dead_T: Tensor) -> Tensor:
        if engram.embed.codes is None:
            return engram(streams_TND, recall.compressed_TL, dead_T, self.model.rounding)
        memory_TX = recall.of(engram)
        kv_TX = project(memory_TX, engram.wkv.held)
        keys = engram.num_streams * engram.hidden
        key_TND = kv_TX[:, :keys].unflatten(-1, (engram.num_streams, engram.hidden))
        return engram_gate(streams_TND, key_TND, kv_TX[:, keys:], dead_T, engram.q_weight, engram.k_weight, engram.eps)


class Output(NamedTuple):
    """What a sublayer gives the streams: the sum of two halves that the next one adds as it reads, or one tensor."""

    y_TD: Tensor
    more_TD: Tensor | None = None

    def whole(self) -> Tensor:
        return self.y_TD if self.more_TD is None else add_round(self.y_TD, self.more_TD)


class PackedFeed(NamedTuple):
    """Gate, up and down of the routed experts, and of the shared one, as the checkpoint holds them."""

    w1: Packed | Tiled
    w3: Packed | Tiled
    w2: Packed | Tiled
    # gate above up
    shared13: Tiles
    shared2: Tiles

    def run_routed(
        self, u_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, limit: float, spec: FormatSpec | None
    ) -> Tensor:
        """float32 [T, D]."""
        stacks = self.w1, self.w3, self.w2
        return packed_experts(u_TD, ids_TK, weights_TK, *stacks, limit=limit, round_inner=spec is not None)

    def run_shared(self, u_TD: Tensor, limit: float, spec: FormatSpec | None) -> Tensor:
        inner_TI = swiglu_round(packed_linear(u_TD, *self.shared13, None), limit, spec)
        return packed_linear(inner_TI, *self.shared2, None)


class DecodeLayer:
    """A block's weights as decoding uses them, and one layer's share of a step."""

    def __init__(self, block: Block) -> None:
        attention, ffn, dtype = block.attn, block.ffn, block.attn_norm.weight.dtype
        self.block = block
        self.attention = _sublayer(block.hc_attn, block.attn_norm)
        self.experts = _sublayer(block.hc_ffn, block.ffn_norm)
        self.latent = _joined(attention.wq_a, attention.wkv)
        indexes = [attention.indexer.wq_b] if block.plan.selects else []
        self.query = _joined(attention.wq_b, *indexes)
        self.entry: Tensor | None = None
        if block.plan.writes_entries:
            gates = [] if attention.compressor.wgate is None else [attention.compressor.wgate]
            entry = _joined(attention.compressor.wkv, *gates)
            assert not isinstance(entry, Tiles), "a compressor is never quantized"
            self.entry = _narrowed(entry, dtype)
        gate = ffn.gate
        # hundreds of experts: as many bytes as the checkpoint's
        router = _narrowed(gate.weight, dtype) if ffn.experts.packed else gate.weight
        self.router = Router(router, gate.bias, gate.bias_vl, gate.k, gate.scaling)
        routed, shared = ffn.experts, ffn.shared_experts
        self.feed: Weights | PackedFeed
        self._side: torch.cuda.Stream | None = None
        if routed.packed:
            device = gate.weight.device
            # the shared expert needs no routing: its few blocks fill what the routed ones leave
            self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
            w1, w3, w2 = (routed.packed[name] for name in ("w1", "w3", "w2"))
            shared13, shared2 = _joined(shared.w1, shared.w3), shared.w2.held
            assert isinstance(shared13, Tiles) and isinstance(shared2, Tiles)
            self.feed = PackedFeed(w1, w3, w2, shared13, shared2)
        else:
            self.feed = Weights(routed.w1, routed.w3, routed.w2, shared.w1.weight, shared.w3.weight, shared.w2.weight)

    def enter(
        self,
        step: DecodeStep,
        y: Output | None,
        streams_TND: Tensor,
        post_TN: Tensor | None,
        mixing_TNN: Tensor | None,
        premix_TN: Tensor,
        spec: FormatSpec | None,
    ) -> tuple[Entered, Tensor]:
        """From the last layer's output to what entered attention, and the queries; the window keys are kept."""
        split = step.split(self.block.plan.layer, self.block.attn, spec)
        streams = streams_TND, post_TN, mixing_TNN, premix_TN
        if isinstance(self.latent, Tiles):
            y_TD, more_TD = (None, None) if y is None else y
            entered, latent_TQ = advance_split(y_TD, *streams, self.attention, spec, more_TD, *self.latent, split)
            return entered, project(latent_TQ, self.query)
        assert isinstance(self.query, Tensor)
        y_TD = None if y is None else y.whole()
        entered, latent_TX = advance_projected(y_TD, *streams, self.attention, spec, self.latent)
        return entered, split_projected(latent_TX, *split, self.query)

    def attend(
        self, step: DecodeStep, entered: Entered, query_TX: Tensor, shared: SharedKV, spec: FormatSpec | None
    ) -> tuple[Tensor, SharedKV]:
        """From what entered attention to its output: (that, what the next layer shares)."""
        attention, plan = self.block.attn, self.block.plan
        if plan.writes_entries:
            self._write_entries(step, entered.normed_TD)
        num_queries = attention.num_heads * attention.head_dim
        if plan.selects:
            assert plan.kv_source is not None
            indexer = attention.indexer
            index_THI = query_TX[:, num_queries:].unflatten(-1, (indexer.num_heads, indexer.head_dim))
            weight_TH = project(entered.normed_TD, indexer.weights_proj.weight)
            full = plan.kind is LayerKind.FULL
            shared = step.select(
                plan.kv_source,
                index_THI,
                weight_TH,
                pool=None if full else shared.pool,
                make_pool=full and plan.decoder,
            )
        query_THC = query_TX[:, :num_queries].unflatten(-1, (attention.num_heads, attention.head_dim))
        output_THC = step.attend(plan.layer, plan.kv_source, query_THC, plan.ratio, shared, attention.attn_sink)
        return self.join_heads(output_THC, spec), shared

    def _write_entries(self, step: DecodeStep, normed_TD: Tensor) -> None:
        attention, source = self.block.attn, self.block.plan.layer
        assert self.entry is not None
        compressor, indexer = attention.compressor, attention.indexer
        if compressor.ratio == 1:
            latent_TC = project(normed_TD, self.entry)
        else:
            latent_TC = step.pool_pairs(source, linear_float32(normed_TD, self.entry), normed_TD.dtype)
        latent_TC = step.write_entries(source, "entries", latent_TC, compressor.norm)
        step.write_entries(source, "keys", project(latent_TC, indexer.wk.weight), indexer.k_norm)

    def join_heads(self, output_THC: Tensor, spec: FormatSpec | None) -> Tensor:
        """The grouped output projection."""
        attention = self.block.attn
        output_TGX = output_THC.unflatten(1, (attention.num_groups, -1)).flatten(2)
        mixed_TGR = project_groups(output_TGX, attention.wo_a.held, spec)
        return project(mixed_TGR.flatten(1), attention.wo_b.held)

    def run_experts(
        self, y_TD: Tensor, entered: Entered, image_T: Tensor, spec: FormatSpec | None
    ) -> tuple[Output, Entered]:
        """From attention's output to the experts': (that, how the streams entered the experts)."""
        streams = entered.streams_TND, entered.post_TN, entered.mixing_TNN, entered.premix_TN
        chosen, limit = self.router, self.block.ffn.experts.limit
        if isinstance(self.feed, PackedFeed):
            entered, ids_TK, weights_TK = advance_routed(y_TD, *streams, self.experts, spec, chosen, image_T)
            u_TD, packed = entered.rounded_TD, self.feed
            shared = aside(lambda: packed.run_shared(u_TD, limit, spec), self._side)
            routed_TD = packed.run_routed(u_TD, ids_TK, weights_TK, limit, spec)
            return Output(routed_TD, shared()), entered
        entered, y_TD = advance_fed(y_TD, *streams, self.experts, spec, chosen, image_T, self.feed, limit=limit)
        return Output(y_TD), entered


def _sublayer(connection: HyperConnection, norm: RMSNorm) -> Sublayer:
    return Sublayer(
        connection.fn,
        connection.scale,
        connection.base,
        norm.weight,
        connection.iterations,
        connection.eps,
        connection.rms_eps,
        norm.eps,
    )


def _narrowed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight that the modules widen, as the checkpoint holds it; as it is where that would change it."""
    narrow = weight.to(dtype)
    return narrow if torch.equal(narrow.to(weight.dtype), weight) else weight


def _joined(*linears: Linear) -> Tensor | Tiles:
    """The weights one below the other; each linear's own becomes a view of its part."""
    if len(linears) == 1:
        return linears[0].held
    sizes = [linear.weight.shape[0] for linear in linears]
    if linears[0].codes is None:
        joined = torch.cat([linear.weight for linear in linears])
        for linear, part in zip(linears, joined.split(sizes), strict=True):
            linear.weight.data = part
        return joined
    assert all(size % TILE == 0 for size in sizes[:-1]), f"outputs {sizes}: a weight must end where a tile does"
    packed = [linear.held for linear in linears]
    tiles = Tiles(torch.cat([held[0] for held in packed]), torch.cat([held[1] for held in packed]))
    scale_sizes = [-(-size // TILE) for size in sizes]
    for linear, *part in zip(linears, tiles.codes.split(sizes), tiles.scales.split(scale_sizes), strict=True):
        linear.codes, linear.scale_bytes = part
    return tiles


def project(x_TI: Tensor, weight_OI: Tensor | Tiles) -> Tensor:
    """A linear of rows that are rounded already."""
    if isinstance(weight_OI, Tiles):
        return packed_linear(x_TI, *weight_OI, None)
    return grouped_linear(x_TI.unsqueeze(1), weight_OI.unsqueeze(0), None).squeeze(1)


def project_groups(x_TGI: Tensor, weight_XI: Tensor | Tiles, spec: FormatSpec | None) -> Tensor:
    """Each group of channels through its part of a weight's outputs, rounded to `spec`: [T, G, O]."""
    num_groups = x_TGI.shape[1]
    if isinstance(weight_XI, Tiles):
        return packed_grouped_linear(x_TGI, *weight_XI.groups(num_groups), spec)
    return grouped_linear(x_TGI, weight_XI.unflatten(0, (num_groups, -1)), spec)


def aside(call: Callable[[], Tensor], side: torch.cuda.Stream | None) -> Callable[[], Tensor]:
    """Start `call` beside what follows, on a stream of its own; the answer gives its result and waits for it.

    A graph that is being captured gets a branch.
    """
    if side is None:
        result = call()
        return lambda: result
    stream = torch.cuda.current_stream(side.device)
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        result = call()

    def join() -> Tensor:
        stream.wait_stream(side)
        return result

    return join
