"""The text model: embed, causal encoder, decoder, head; whole sequences, prefill and decode.

B packs, S rows a pack, T rows, N streams, D hidden, V vocabulary, L look-backs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from cedar.config.layers import layer_plans
from cedar.config.model import ModelConfig
from cedar.config.rounding import Rounding
from cedar.errors import ShapeError
from cedar.kernels.dense import linear
from cedar.kernels.mhc import collapse
from cedar.model.batch import BatchStep
from cedar.model.block import Block
from cedar.model.engram import TokenMap, lookback_ids
from cedar.model.layers import RMSNorm, rounded_weight
from cedar.model.packs import PackState
from cedar.model.rope import Rope
from cedar.model.sequence import MakeStore, SequenceState, SequenceStep
from cedar.model.state import DecoderReplay, IndexGroup, RouterStats, SelectionRule, SharedKV


@dataclass(slots=True)
class Output:
    """What a whole-sequence forward gives.

    Attributes:
        logits_BSV: float32.
        index_groups: One per index source if collected, for the indexer loss.
        routers: One per layer if collected, for load balance.
    """

    logits_BSV: Tensor
    index_groups: list[IndexGroup]
    routers: list[RouterStats]


class Transformer(nn.Module):
    """DeepSeek-V4.1-Flash's text model at any size.

    Args:
        config: Its shape.
        device: Where parameters are made; `meta` allocates nothing.
        dtype: float32 or bfloat16, the dtype of activations and of most weights. What the architecture
            keeps in float32 (mHC, router, ratio-2 compressor, sinks, head product) stays so.
        table_device: Where the Engram tables' float weights are made, `device` if None. `meta` for tables
            that `EngramTable.set_packed` will replace.

    Parameters are uninitialised: `init.initialise` or `checkpoint.read` fills them.

    Source: architecture.md 2.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        table_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.rounding = Rounding()
        self.rope = Rope(config, device)
        self.token_map = TokenMap(config, device=device)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, device="meta", dtype=dtype)
        self.embed.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype))
        # a ModuleList forgets the type of what it holds
        self.layers: Sequence[Block] = nn.ModuleList(  # type: ignore[assignment]
            Block(
                config,
                plan,
                self.rope,
                device=device,
                dtype=dtype,
                table_device=device if table_device is None else table_device,
            )
            for plan in layer_plans(config)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype)
        self.head = Head(config, device=device, dtype=dtype)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def forward(
        self,
        ids_BS: Tensor,
        *,
        segment_start_BS: Tensor | None = None,
        rounding: Rounding | None = None,
        topk: int | Literal["all"] | None = None,
        window_floor_BS: Tensor | None = None,
        replay_start_BS: Tensor | None = None,
        image_rows_BSD: Tensor | None = None,
        selection: SelectionRule = "learned",
        form: Literal["masked", "gathered"] = "masked",
        collect: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> Output:
        """Logits at every position of whole sequences; differentiable.

        Args:
            ids_BS: Token ids, int64.
            segment_start_BS: First row (inside the pack) of each row's sample, even; None for one sample a pack.
                Positions, windows, entries and n-grams restart there.
            rounding: Which roundings are on; the model's own by default.
            topk: Entries a row selects, instead of the config's; `all` attends to every visible one.
            window_floor_BS: First row that the decoder layers' windows may reach (replay masks).
            replay_start_BS: First of the window's worth of rows by which a sample repeats the rows before them, as a
                cache miss makes the encoder run them again; any row beyond the pack where there are none.
            image_rows_BSD: Embeddings that replace those of image tokens.
            selection: `random` takes random visible entries everywhere (a control).
            form: `masked` for training; `gathered` is the arithmetic of prefill and decode.
            collect: Fill `index_groups` and `routers`.
            compute_dtype: Dtype of activations, the model's own by default; float32 weights are cast.

        Raises:
            ShapeError: Ids are not [B, S], or `gathered` was asked for packs of several samples.
        """
        config = self.config
        if ids_BS.dim() != 2 or ids_BS.shape[1] == 0:
            raise ShapeError(
                f"forward: ids have shape {tuple(ids_BS.shape)}, expected (packs, rows) with at least one row"
            )
        floors = window_floor_BS is not None or replay_start_BS is not None
        if form == "gathered" and (segment_start_BS is not None or floors or collect):
            raise ShapeError(
                "forward: the gathered form takes one sample a pack, no window floor, no replay, and collects nothing"
            )
        start_BS = torch.zeros_like(ids_BS) if segment_start_BS is None else segment_start_BS
        state = PackState(
            config=config,
            rope=self.rope,
            rounding=self.rounding if rounding is None else rounding,
            segment_start_BS=start_BS,
            form=form,
            topk=None if topk == "all" else config.indexer.topk if topk is None else topk,
            decoder_floor_BS=window_floor_BS,
            replay_start_BS=replay_start_BS,
            selection_rule=selection,
            collect=collect,
        )
        raw_BSL = lookback_ids(
            ids_BS,
            start_BS,
            num_lookbacks=config.engram.max_ngram_size,
            image_token_id=config.image_token_id,
        )
        if replay_start_BS is not None:
            window = config.attention.sliding_window
            if window % 2:
                raise ShapeError(f"forward: replay of a window of {window} rows would part a pair; it must be even")
            # a repeated row looks back at what its first self looked back at
            row_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
            repeats_BS = (row_S >= replay_start_BS) & (row_S < replay_start_BS + window)
            raw_BSL = torch.where(repeats_BS.unsqueeze(-1), raw_BSL.roll(window, dims=1), raw_BSL)
        image_rows_TD = None if image_rows_BSD is None else image_rows_BSD.flatten(0, 1)
        dtype = self.dtype if compute_dtype is None else compute_dtype
        streams_TND, premix_TN = self._embed(ids_BS.flatten(), image_rows_TD, dtype)
        shared = SharedKV()
        compressed_TL, image_T = self._prepare(ids_BS.flatten(), raw_BSL.flatten(0, 1))
        for block in self.layers:
            if block.plan.engram:
                streams_TND = block.engram(streams_TND, compressed_TL, raw_BSL.flatten(0, 1)[:, 0] < 0, state.rounding)
            mixes, u_TD = block.enter(streams_TND, premix_TN)
            block.attn.write_window(u_TD, state)
            block.attn.write_entries(u_TD, state)
            streams_TND, shared = block.attend(streams_TND, mixes, u_TD, state, shared)
            streams_TND, premix_TN, stats = block.feed(streams_TND, mixes.premix_TN, image_T, state)
            if collect:
                state.routers.append(stats)
        logits_TV = self._head(streams_TND, premix_TN, state.rounding)
        return Output(logits_TV.unflatten(0, ids_BS.shape), state.index_groups, state.routers)

    def new_state(
        self,
        *,
        decoder_replay: DecoderReplay = "bounded",
        rounding: Rounding | None = None,
        selection: SelectionRule = "learned",
        make_store: MakeStore | None = None,
    ) -> SequenceState:
        """An empty sequence for `prefill` and `decode`; `make_store` says where its entries go."""
        return SequenceState(
            self.config,
            self.rope,
            rounding=self.rounding if rounding is None else rounding,
            dtype=self.dtype,
            device=self.device,
            decoder_replay=decoder_replay,
            selection_rule=selection,
            make_store=make_store,
        )

    @torch.inference_mode()
    def prefill(
        self,
        state: SequenceState,
        ids_T: Tensor,
        *,
        prompt_tokens: int | None = None,
        image_rows_TD: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Run the next chunk of a prompt: the encoder on all its rows, the decoder on the last window only.

        Any cut of a prompt into chunks gives the same cache bytes and logits (deterministic mode: bit for bit).

        Args:
            ids_T: The chunk's token ids, int64.
            prompt_tokens: Tokens of the sequence once the prompt is complete; the chunk's end if None.
            image_rows_TD: Embeddings for the chunk's image tokens, zeros elsewhere.
            last_only: Logits of the chunk's last row alone.

        Returns:
            float32 [rows, V] of the rows that ran the whole decoder, none for a chunk before the last window.

        Raises:
            ShapeError: The chunk is empty or reaches past the prompt's end.
            CapacityError: The prompt is longer than the model's limit.
        """
        stop = state.num_tokens + ids_T.shape[0]
        if ids_T.dim() != 1 or ids_T.shape[0] == 0:
            raise ShapeError(f"prefill: the chunk has shape {tuple(ids_T.shape)}, expected one row of at least one id")
        if prompt_tokens is not None and stop > prompt_tokens:
            raise ShapeError(f"prefill: the chunk ends at token {stop}, the prompt at {prompt_tokens}")
        state.begin_prompt(stop if prompt_tokens is None else prompt_tokens)
        return self._run(state, ids_T, image_rows_TD, last_only)

    @torch.inference_mode()
    def decode(self, state: SequenceState, ids_T: Tensor) -> Tensor:
        """Run generated tokens through all layers: float32 [T, V].

        Raises:
            ShapeError: No ids.
            CapacityError: The model's limit is reached.
        """
        if ids_T.dim() != 1 or ids_T.shape[0] == 0:
            raise ShapeError(f"decode: ids have shape {tuple(ids_T.shape)}, expected one row of at least one id")
        state.check_room(ids_T.shape[0])
        return self._run(state, ids_T, None, False)

    @torch.inference_mode()
    def decode_many(self, states: Sequence[SequenceState], ids: Sequence[Tensor]) -> list[Tensor]:
        """One step of several sequences: for each of its next tokens' ids, float32 [T, V].

        In deterministic mode each gets, bit for bit, what `decode` gives it alone.

        Raises:
            ShapeError: No sequences, a sequence without ids, or states of different roundings.
            CapacityError: The model's limit is reached by one of them; none has run.
        """
        if not states or any(part.dim() != 1 or part.shape[0] == 0 for part in ids):
            raise ShapeError(f"decode_many: {len(states)} sequences, expected one or more with at least one id each")
        if any(state.rounding != states[0].rounding for state in states):
            raise ShapeError("decode_many: the states differ in rounding; run them one by one")
        for state, part in zip(states, ids, strict=True):
            state.check_room(part.shape[0])
        sizes = [part.shape[0] for part in ids]
        step = BatchStep(
            [
                SequenceStep(state, state.num_tokens, state.num_tokens + size)
                for state, size in zip(states, sizes, strict=True)
            ]
        )
        ids_T = torch.cat(list(ids))
        raw_TL = torch.cat([state.lookbacks(part) for state, part in zip(states, ids, strict=True)])
        streams_TND, premix_TN = self._embed(ids_T, None, self.dtype)
        compressed_TL, image_T = self._prepare(ids_T, raw_TL)
        shared = SharedKV()
        for block in self.layers:
            if block.plan.engram:
                streams_TND = block.engram(streams_TND, compressed_TL, raw_TL[:, 0] < 0, step.rounding)
            mixes, u_TD = block.enter(streams_TND, premix_TN)
            block.attn.write_entries(u_TD, step)
            block.attn.write_window(u_TD, step)
            streams_TND, shared = block.attend(streams_TND, mixes, u_TD, step, shared)
            streams_TND, premix_TN, _ = block.feed(streams_TND, mixes.premix_TN, image_T, step)
        for state, part in zip(states, ids, strict=True):
            state.advance(part)
        return list(self._head(streams_TND, premix_TN, step.rounding).split(sizes))

    def _run(self, state: SequenceState, ids_T: Tensor, image_rows_TD: Tensor | None, last_only: bool) -> Tensor:
        start, stop = state.num_tokens, state.num_tokens + ids_T.shape[0]
        step = SequenceStep(state, start, stop)
        raw_TL = state.lookbacks(ids_T)
        streams_TND, premix_TN = self._embed(ids_T, image_rows_TD, self.dtype)
        compressed_TL, image_T = self._prepare(ids_T, raw_TL)
        shared = SharedKV()
        for block in self.layers:
            layer = block.plan.layer
            if block.plan.engram:
                dead_T = raw_TL[:, 0] < 0
                streams_TND = block.engram(streams_TND, compressed_TL, dead_T, state.rounding)
            mixes, u_TD = block.enter(streams_TND, premix_TN)
            writes = state.first_entry_row(step.start) - step.start
            if writes < u_TD.shape[0]:
                block.attn.write_entries(u_TD[writes:], step.narrowed(step.start + writes) if writes else step)
            if state.keeps_true_window(layer):
                block.attn.write_window(u_TD, step)
            first = state.first_position(layer)
            if first > step.start:
                # rows before the last window leave here: their entries are written, nobody reads more of them.
                # So do, layer by layer, the oldest rows of an exact rebuild
                cut = min(first, stop) - step.start
                streams_TND, u_TD, mixes = streams_TND[cut:], u_TD[cut:], mixes.rows(cut)
                raw_TL, compressed_TL = raw_TL[cut:], compressed_TL[cut:]
                image_T = None if image_T is None else image_T[cut:]
                shared = shared.rows(cut)
                step = step.narrowed(step.start + cut)
                if step.start == stop:
                    premix_TN = mixes.premix_TN
                    break
            if not state.keeps_true_window(layer):
                block.attn.write_window(u_TD, step)
            streams_TND, shared = block.attend(streams_TND, mixes, u_TD, step, shared)
            streams_TND, premix_TN, _ = block.feed(streams_TND, mixes.premix_TN, image_T, step)
        state.advance(ids_T)
        if last_only:
            streams_TND, premix_TN = streams_TND[-1:], premix_TN[-1:]
        return self._head(streams_TND, premix_TN, state.rounding)

    def _embed(self, ids_T: Tensor, image_rows_TD: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The streams, all equal to the embedding, and the first pre-mix: stream 0 alone."""
        num_streams = self.config.mhc.num_streams
        hidden_TD = self.embed(ids_T).to(dtype)
        if image_rows_TD is not None:
            is_image_T1 = (ids_T == self.config.image_token_id).unsqueeze(-1)
            hidden_TD = torch.where(is_image_T1, image_rows_TD.to(dtype), hidden_TD)
        streams_TND = hidden_TD.unsqueeze(1).expand(-1, num_streams, -1).contiguous()
        premix_TN = torch.zeros(ids_T.shape[0], num_streams, device=ids_T.device)
        premix_TN[:, 0] = 1
        return streams_TND, premix_TN

    def _prepare(self, ids_T: Tensor, raw_TL: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compressed look-back ids, and which rows are image rows (None if none can be)."""
        compressed_TL = self.token_map(raw_TL) if self.config.engram.layer_ids else raw_TL
        return compressed_TL, ids_T == self.config.image_token_id

    def _head(self, streams_TND: Tensor, premix_TN: Tensor, rounding: Rounding) -> Tensor:
        return self.head(self.norm(collapse(streams_TND, premix_TN)), rounding)


class Head(nn.Module):
    """Logits in float32; untied, never quantized."""

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype))

    def forward(self, hidden_TD: Tensor, rounding: Rounding) -> Tensor:
        weight = rounded_weight(self.weight, "bf16") if rounding.weights else self.weight
        return linear(hidden_TD.float(), weight.float())
