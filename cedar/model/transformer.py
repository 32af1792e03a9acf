"""The text model: embed, causal encoder, decoder, head; whole sequences, prefill and decode.

B packs, S rows a pack, T rows, N streams, D hidden, V vocabulary, L look-backs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from cedar.config.layers import layer_plans
from cedar.config.model import ModelConfig
from cedar.config.rounding import Rounding
from cedar.errors import ShapeError
from cedar.kernels.dense import linear_float32
from cedar.kernels.mhc import collapse
from cedar.model.batch import BatchStep, Part
from cedar.model.block import Block
from cedar.model.engram import TokenMap, lookback_ids
from cedar.model.layers import RMSNorm, rounded_weight
from cedar.model.packs import PackState
from cedar.model.rope import Rope
from cedar.model.sequence import MakeStore, SequenceState, SequenceStep
from cedar.model.state import DecoderReplay, IndexGroup, RouterStats, SelectionRule, SharedKV

# (taps [T, X], positions [T], rounding) -> what a draft keeps of these rows [T, channels]
ContextRows = Callable[[Tensor, Tensor, Rounding], Tensor]


@dataclass(slots=True)
class Output:
    """What a whole-sequence forward gives.

    Attributes:
        logits_BSV: float32.
        hidden_BSD: What the head reads: collapsed and normed.
        taps_BSX: Mean of the streams at the entry of each of the draft's target layers, side by side, if asked for.
        index_groups: One per index source if collected, for the indexer loss.
        routers: One per layer if collected, for load balance.
    """

    logits_BSV: Tensor
    hidden_BSD: Tensor
    taps_BSX: Tensor | None
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
        quantized_device: Where the float weights of FP8 linears and MXFP4 experts are made, likewise.

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
        quantized_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.rounding = Rounding()
        # a draft beside the model makes its context rows of the taps of every row that runs the whole decoder
        self.context: ContextRows | None = None
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
                quantized_device=quantized_device,
            )
            for plan in layer_plans(config)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype)
        self.head = Head(config, device=device, dtype=dtype)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def packed(self) -> bool:
        """Its quantized weights are held as the checkpoint stores them."""
        return bool(self.layers[0].ffn.experts.packed)

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
        tap: bool = False,
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
            tap: Fill `taps_BSX`.
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
        if state.rounding.weights:
            # rounding the picked rows equals rounding the table
            streams_TND = rounded_weight(streams_TND, "bf16")
        shared = SharedKV()
        compressed_TL, image_T = self._prepare(ids_BS.flatten(), raw_BSL.flatten(0, 1))
        taps: list[Tensor] = []
        for block in self.layers:
            if tap and block.plan.layer in config.draft.target_layer_ids:
                taps.append(tap_of(streams_TND))
            if block.plan.engram:
                streams_TND = block.engram(streams_TND, compressed_TL, raw_BSL.flatten(0, 1)[:, 0] < 0, state.rounding)
            mixes, u_TD = block.enter(streams_TND, premix_TN, state.rounding)
            block.attn.write_window(u_TD, state)
            block.attn.write_entries(u_TD, state)
            streams_TND, shared = block.attend(streams_TND, mixes, u_TD, state, shared)
            streams_TND, premix_TN, stats = block.feed(streams_TND, mixes.premix_TN, image_T, state)
            if collect:
                state.routers.append(stats)
        hidden_TD = self.norm(collapse(streams_TND, premix_TN), state.rounding)
        logits_TV = self.head(hidden_TD, state.rounding)
        return Output(
            logits_TV.unflatten(0, ids_BS.shape),
            hidden_TD.unflatten(0, ids_BS.shape),
            torch.cat(taps, dim=-1).unflatten(0, ids_BS.shape) if taps else None,
            state.index_groups,
            state.routers,
        )

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
        part = Part(state=state, ids_T=ids_T, prompt_tokens=prompt_tokens or stop, image_rows_TD=image_rows_TD)
        return self._run([part], last_only=last_only)[0]

    @torch.inference_mode()
    def decode(self, state: SequenceState, ids_T: Tensor) -> Tensor:
        """Run generated tokens through all layers: float32 [T, V].

        Raises:
            ShapeError: No ids.
            CapacityError: The model's limit is reached.
        """
        if ids_T.dim() != 1 or ids_T.shape[0] == 0:
            raise ShapeError(f"decode: ids have shape {tuple(ids_T.shape)}, expected one row of at least one id")
        return self._run([Part(state=state, ids_T=ids_T)])[0]

    @torch.inference_mode()
    def step(self, parts: Sequence[Part]) -> list[Tensor]:
        """The next rows of several sequences at once: chunks of prompts, replayed rows, generated and drafted tokens.

        In deterministic mode each sequence gets, bit for bit, what `prefill` or `decode` gives it alone.

        Returns:
            For each part float32 [rows, V]: every row of generated tokens unless they are silent, the last row of a
            chunk that ends its prompt, nothing of other chunks.

        Raises:
            ShapeError: No parts, a part without ids or past its prompt's end, or states of different roundings.
            CapacityError: The model's limit is reached by one of them; none has run.
        """
        if not parts or any(part.ids_T.dim() != 1 or part.ids_T.shape[0] == 0 for part in parts):
            raise ShapeError(f"step: {len(parts)} parts, expected one or more with at least one id each")
        if any(part.state.rounding != parts[0].state.rounding for part in parts):
            raise ShapeError("step: the states differ in rounding; run them one by one")
        for part in parts:
            stop = part.state.num_tokens + part.ids_T.shape[0]
            if part.prompt_tokens is not None and stop > part.prompt_tokens:
                raise ShapeError(f"step: a chunk ends at token {stop}, its prompt at {part.prompt_tokens}")
        return self._run(parts, last_only=True)

    def _run(self, parts: Sequence[Part], *, last_only: bool = False) -> list[Tensor]:
        """The parts' rows through the layers; `last_only` leaves a prompt's last row alone with logits."""
        for part in parts:
            if part.prompt_tokens is None:
                part.state.check_room(part.ids_T.shape[0])
            else:
                part.state.begin_prompt(part.prompt_tokens)
        steps = [
            SequenceStep(part.state, part.state.num_tokens, part.state.num_tokens + part.ids_T.shape[0])
            for part in parts
        ]
        step: SequenceStep | BatchStep = steps[0] if len(steps) == 1 else BatchStep(steps)
        ids_T = _joined([part.ids_T for part in parts])
        raw_TL = _joined([part.state.lookbacks(part.ids_T) for part in parts])
        streams_TND, premix_TN = self._embed(ids_T, _image_rows(parts), self.dtype)
        compressed_TL, image_T = self._prepare(ids_T, raw_TL)
        shared = SharedKV()
        ran_all = True
        taps: list[Tensor] = []
        for block in self.layers:
            layer = block.plan.layer
            if self.context is not None and layer in self.config.draft.target_layer_ids:
                taps.append(tap_of(streams_TND))
            if block.plan.engram:
                streams_TND = block.engram(streams_TND, compressed_TL, raw_TL[:, 0] < 0, step.rounding)
            mixes, u_TD = block.enter(streams_TND, premix_TN)
            kept, writing = step.entry_rows()
            if writing is not None:
                block.attn.write_entries(u_TD if kept is None else u_TD[kept], writing)
            kept, writing = step.window_rows(layer, cut=False)
            if writing is not None:
                block.attn.write_window(u_TD if kept is None else u_TD[kept], writing)
            kept, running = step.layer_rows(layer)
            if kept is not None:
                # rows before the last window leave here: their entries are written, nobody reads more of them.
                # So do, layer by layer, the oldest rows of an exact rebuild
                streams_TND, u_TD, mixes = streams_TND[kept], u_TD[kept], mixes.rows(kept)
                raw_TL, compressed_TL = raw_TL[kept], compressed_TL[kept]
                image_T = None if image_T is None else image_T[kept]
                shared, taps = shared.rows(kept), [tap_TD[kept] for tap_TD in taps]
                if running is None:
                    ran_all, premix_TN = False, mixes.premix_TN
                    break
                step = running
            kept, writing = step.window_rows(layer, cut=True)
            if writing is not None:
                block.attn.write_window(u_TD if kept is None else u_TD[kept], writing)
            streams_TND, shared = block.attend(streams_TND, mixes, u_TD, step, shared)
            streams_TND, premix_TN, _ = block.feed(streams_TND, mixes.premix_TN, image_T, step)
        if self.context is not None and ran_all:
            step.write_context(self.context(torch.cat(taps, dim=-1), step.positions_T, step.rounding))
        left = step.steps if isinstance(step, BatchStep) else [step]
        num_left = {id(one.state): one.num_rows for one in left} if ran_all else {}
        sizes = [num_left.get(id(part.state), 0) for part in parts]
        if last_only:
            streams_TND, premix_TN, sizes = _wanted(parts, streams_TND, premix_TN, sizes)
        logits_TV = self._head(streams_TND, premix_TN, parts[0].state.rounding)
        # last, so that a step that fails has moved nobody
        for part in parts:
            part.state.advance(part.ids_T)
        return list(logits_TV.split(sizes))

    def enter_streams(self, ids_T: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The streams and the first pre-mix of token rows, for blocks beside the backbone."""
        return self._embed(ids_T, None, self.dtype if dtype is None else dtype)

    def prefetch(self, ids: Sequence[int]) -> None:
        """These token ids, with the look-backs before them, run next: bring their rows of tables that are on disk."""
        memories = [block.engram for block in self.layers if block.plan.engram and block.engram.embed.disk is not None]
        if not memories or not ids:
            return
        ids_1S = torch.tensor([list(ids)], dtype=torch.int64, device=self.device)
        raw_1SL = lookback_ids(
            ids_1S,
            torch.zeros_like(ids_1S),
            num_lookbacks=self.config.engram.max_ngram_size,
            image_token_id=self.config.image_token_id,
        )
        compressed_TL = self.token_map(raw_1SL[0])
        for memory in memories:
            memory.prefetch(compressed_TL)

    def memory_stats(self) -> dict[str, float]:
        """What tables on disk have done, all layers together; zeros where there are none."""
        tables = [block.engram.embed.disk for block in self.layers if block.plan.engram]
        stats = [table.stats for table in tables if table is not None]
        return {
            "cached_rows": sum(one.cached for one in stats),
            "read_rows": sum(one.read for one in stats),
            "read_calls": sum(one.calls for one in stats),
            "stall_s": sum(one.stall_s for one in stats),
            "cache_bytes": sum(table.cache_bytes for table in tables if table is not None),
        }

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
        for block in self.layers:
            if block.plan.engram:
                # a table on disk is read while the layers below run
                block.engram.prefetch(compressed_TL)
        return compressed_TL, ids_T == self.config.image_token_id

    def _head(self, streams_TND: Tensor, premix_TN: Tensor, rounding: Rounding) -> Tensor:
        return self.head(self.norm(collapse(streams_TND, premix_TN), rounding), rounding)


def tap_of(streams_TND: Tensor) -> Tensor:
    """What a draft reads of a layer's input: the plain mean over the streams, summed in float32.

    Source: engram-dspark-vision-chat.md 2.1 (the layer's input, not its output; not the pre-mix collapse).
    """
    return streams_TND.float().mean(1).to(streams_TND.dtype)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _image_rows(parts: Sequence[Part]) -> Tensor | None:
    """Embeddings of image tokens, zeros for parts without; None if there are none at all."""
    given = [part.image_rows_TD for part in parts if part.image_rows_TD is not None]
    if not given:
        return None
    return _joined(
        [
            given[0].new_zeros(part.ids_T.shape[0], given[0].shape[1])
            if part.image_rows_TD is None
            else part.image_rows_TD
            for part in parts
        ]
    )


def _wanted(
    parts: Sequence[Part], streams_TND: Tensor, premix_TN: Tensor, sizes: list[int]
) -> tuple[Tensor, Tensor, list[int]]:
    """The rows whose logits somebody reads, of the `sizes` rows of each part that have run all layers."""
    wanted, rows, first = [], [], 0
    for part, size in zip(parts, sizes, strict=True):
        count = 0 if part.silent else size
        if part.prompt_tokens is not None:
            ends = part.state.num_tokens + part.ids_T.shape[0] == part.prompt_tokens
            count = min(size, int(ends))
        wanted.append(count)
        rows.append(torch.arange(first + size - count, first + size, device=streams_TND.device))
        first += size
    if wanted == sizes:
        return streams_TND, premix_TN, sizes
    row_T = torch.cat(rows)
    return streams_TND[row_T], premix_TN[row_T], wanted


class Head(nn.Module):
    """Logits in float32; untied, never quantized."""

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype))

    def forward(self, hidden_TD: Tensor, rounding: Rounding) -> Tensor:
        weight = rounded_weight(self.weight, "bf16") if rounding.weights else self.weight
        return linear_float32(hidden_TD, weight)
