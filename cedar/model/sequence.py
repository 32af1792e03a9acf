"""One sequence's cache as real bytes, and the rows of one step over it.

T rows, C latent channels, I index channels, E entries, K selected entries, W window rows, L look-backs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import safetensors.torch
import torch
from torch import Tensor

from cedar.config.model import ModelConfig
from cedar.config.rounding import Rounding
from cedar.errors import CapacityError
from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8, FormatSpec
from cedar.kernels import attention as attention_ops
from cedar.kernels.dispatch import is_deterministic
from cedar.kernels.pages import Paged, Stored
from cedar.kernels.quantize import dequantize_rows, quantize_rows
from cedar.model.engram import lookback_ids
from cedar.model.rope import Rope
from cedar.model.select import select_rows, sliding
from cedar.model.state import DecoderReplay, SelectionRule, SharedKV

# rows a growing buffer starts with, one page
_FIRST_ROWS = 128


class RowStore:
    """Vectors by row number, held as the cache's real bytes, or as they come where rounding is off."""

    def __init__(self, num_channels: int, spec: FormatSpec | None, dtype: torch.dtype, device: torch.device) -> None:
        self.count = 0
        self.device = device
        self.dtype = dtype
        self._num_channels, self._spec, self._dtype = num_channels, spec, dtype
        if spec is None:
            self._planes = [torch.zeros(0, num_channels, dtype=dtype, device=device)]
        else:
            widths = (num_channels * spec.element_bits // 8, num_channels // spec.group)
            self._planes = [torch.zeros(0, width, dtype=torch.uint8, device=device) for width in widths]

    def append(self, rows_EC: Tensor) -> None:
        if rows_EC.shape[0] == 0:
            return
        stop = self.count + rows_EC.shape[0]
        self.reserve(stop)
        for plane, stored in zip(self._planes, self._encode(rows_EC), strict=True):
            plane[self.count : stop] = stored
        self.count = stop

    def reserve(self, num_rows: int) -> None:
        """Room for `num_rows` rows; doubles, so that appending is linear in the end."""
        capacity = self._planes[0].shape[0]
        if num_rows > capacity:
            extra = max(capacity, num_rows - capacity)
            extra += -(capacity + extra) % _FIRST_ROWS
            self._planes = [torch.cat([plane, plane.new_zeros(extra, plane.shape[1])]) for plane in self._planes]

    def put(self, row_T: Tensor, rows_TC: Tensor) -> None:
        """Overwrite rows; they must lie inside what was reserved."""
        for plane, stored in zip(self._planes, self._encode(rows_TC), strict=True):
            plane[row_T] = stored

    def all(self) -> Tensor:
        return self._decode([plane[: self.count] for plane in self._planes])

    def gather(self, index: Tensor) -> Tensor:
        """Rows by number in the shape of `index`; -1 gives zeros."""
        if self._planes[0].shape[0] == 0:
            return torch.zeros(*index.shape, self._num_channels, dtype=self._dtype, device=self.device)
        safe = index.clamp(min=0)
        rows = self._decode([plane[safe] for plane in self._planes])
        return rows * (index >= 0).unsqueeze(-1)

    def take(self, row_T: Tensor) -> Tensor:
        """Rows by number, all present."""
        return self._decode([plane[row_T] for plane in self._planes])

    def ring(self, num_rows: int) -> Stored:
        """The first rows as one page, in place."""
        assert self._spec is not None, "rows that are not rounded have no stored form"
        codes_NX, scales_NG = (plane[:num_rows] for plane in self._planes)
        return Stored(codes_NX.unsqueeze(0), scales_NG.unsqueeze(0), self._spec)

    def paged(self, slot_T: Tensor) -> Paged:
        """All rows in place, in pages that follow each other."""
        assert self._spec is not None, "rows that are not rounded have no stored form"
        capacity = max(self._planes[0].shape[0], 1)
        self.reserve(capacity + -capacity % _FIRST_ROWS)
        codes_PNX, scales_PNG = (plane.unflatten(0, (-1, _FIRST_ROWS)) for plane in self._planes)
        page_1P = torch.arange(codes_PNX.shape[0], device=self.device).unsqueeze(0)
        return Paged(Stored(codes_PNX, scales_PNG, self._spec), page_1P, slot_T)

    def truncate(self, count: int) -> None:
        """Forget the rows from `count` on."""
        self.count = min(self.count, count)

    def prefix(self, count: int) -> RowStore:
        """A store of its own that begins with the first `count` rows of this one."""
        store = RowStore(self._num_channels, self._spec, self._dtype, self.device)
        store._planes = [plane[:count].clone() for plane in self._planes]
        store.count = count
        return store

    def vector_bytes(self) -> int:
        return sum(plane.shape[1] * plane.element_size() for plane in self._planes)

    def read(self, row_T: Tensor) -> list[Tensor]:
        """Rows by number as they are stored, one tensor a plane."""
        return [plane[row_T] for plane in self._planes]

    def overwrite(self, row_T: Tensor, stored: Sequence[Tensor]) -> None:
        """What `read` gave, back into its rows."""
        for plane, rows in zip(self._planes, stored, strict=True):
            plane[row_T] = rows.to(self.device)

    def _encode(self, rows_EC: Tensor) -> Sequence[Tensor]:
        return (rows_EC,) if self._spec is None else quantize_rows(rows_EC, self._spec)

    def _decode(self, planes: list[Tensor]) -> Tensor:
        if self._spec is None:
            return planes[0]
        return dequantize_rows(planes[0], planes[1], self._spec, self._dtype)


class EntryStore(Protocol):
    """Where the entries or the index keys of one KV source lie; `RowStore`, or pages of a cache."""

    count: int

    def append(self, rows_EC: Tensor) -> None: ...

    def all(self) -> Tensor: ...

    def gather(self, index: Tensor) -> Tensor: ...

    def paged(self, slot_T: Tensor) -> Paged: ...

    def truncate(self, count: int) -> None: ...

    def vector_bytes(self) -> int: ...


# (what, KV source) -> where its rows go
MakeStore = Callable[[Literal["entries", "keys"], int], EntryStore]


# the rows of a step from one on, or by number where there are several sequences; None keeps all
Kept = slice | Tensor | None
# tails, and the counts of entries and keys by source
Mark = tuple[dict[int, tuple[Tensor, Tensor]], dict[int, tuple[int, int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What resumes a sequence bit for bit, next to its entries (grade G0): a copy that nothing changes.

    Attributes:
        num_tokens: Where the sequence stood.
        decoder_replay: How its decoder windows came to be; only a sequence of the same kind may resume.
        marks: The state's own positions, see `SequenceState._MARKS`.
        windows: Per layer, the last window's rows in position order, as stored; then those of a draft's context.
        tails: Per pairing source, the waiting half (content, gate); none after an even number of tokens.
        recent_L: The token ids that the next n-grams look back at.

    Source: serving.md 2.1 and 3.
    """

    num_tokens: int
    decoder_replay: DecoderReplay
    marks: dict[str, int]
    windows: list[list[Tensor]]
    tails: dict[int, tuple[Tensor, Tensor]]
    recent_L: Tensor

    @property
    def num_held(self) -> int:
        """Tokens whose entries must be there to go on."""
        return max(self.num_tokens, self.marks["_write_floor"])

    def num_bytes(self) -> int:
        """Window rows and waiting halves."""
        rows = [plane for planes in self.windows for plane in planes]
        return sum(t.numel() * t.element_size() for t in (*rows, *(t for pair in self.tails.values() for t in pair)))

    def to_bytes(self) -> bytes:
        """One safetensors file; `from_bytes` reads it."""
        tensors = {"recent": self.recent_L}
        for layer, planes in enumerate(self.windows):
            tensors |= {f"window.{layer}.{number}": plane for number, plane in enumerate(planes)}
        for layer, (content_1C, gate_1C) in self.tails.items():
            tensors |= {f"tail.{layer}.content": content_1C, f"tail.{layer}.gate": gate_1C}
        about = {"num_tokens": self.num_tokens, "decoder_replay": self.decoder_replay, "marks": self.marks}
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        return safetensors.torch.save(contiguous, metadata={"about": json.dumps(about)})

    @classmethod
    def from_bytes(cls, stored: bytes) -> Snapshot:
        tensors = safetensors.torch.load(stored)
        header = json.loads(stored[8 : 8 + int.from_bytes(stored[:8], "little")])
        about = json.loads(header["__metadata__"]["about"])
        windows: list[list[Tensor]] = []
        while f"window.{len(windows)}.0" in tensors:
            layer = len(windows)
            windows.append(
                [tensors[f"window.{layer}.{number}"] for number in range(2) if f"window.{layer}.{number}" in tensors]
            )
        tails = {
            int(name.split(".")[1]): (tensor, tensors[name.replace("content", "gate")])
            for name, tensor in tensors.items()
            if name.endswith(".content")
        }
        return cls(windows=windows, tails=tails, recent_L=tensors["recent"], **about)


def exact_span(
    config: ModelConfig, decoder_replay: DecoderReplay, cached_tokens: int, prompt_tokens: int
) -> tuple[int, int]:
    """(first row that an exact rebuild runs, first row that must be whole).

    The first is not positive where a rebuild saves nothing.
    """
    window, boundary = config.attention.sliding_window, config.boundary_layer_id
    first_decoder_row = prompt_tokens - window
    if decoder_replay == "exact":
        first_decoder_row -= (window - 1) * (config.num_layers - 2 - boundary)
    if decoder_replay != "bounded":
        first_decoder_row -= window - 1
    stop = min(cached_tokens, first_decoder_row)
    return stop - (window - 1) * boundary, stop


class SequenceState:
    """All that one sequence needs to go on: windows, entries, index keys, half-filled pairs, last token ids.

    Args:
        rounding: Decides what is stored as bytes; what is not rounded is stored as it comes.
        dtype: Compute dtype, float32 or bfloat16.
        decoder_replay: Rows the decoder runs during prefill (serving.md 1.2).
        selection_rule: `random` is the control of the recall evaluation.
        make_store: Where the entries and index keys of each KV source go; growing buffers by default.

    Source: architecture.md 4.5; serving.md 1 and 2.1.
    """

    # the positions that a snapshot carries: see `begin_prompt`, `resume_bounded` and `resume_exact`
    _MARKS = ("_prompt_stop", "_decoder_start", "_window_floor", "_first_row", "_write_floor", "_exact_stop")

    def __init__(
        self,
        config: ModelConfig,
        rope: Rope,
        *,
        rounding: Rounding,
        dtype: torch.dtype,
        device: torch.device,
        decoder_replay: DecoderReplay,
        selection_rule: SelectionRule,
        make_store: MakeStore | None = None,
    ) -> None:
        attention, indexer = config.attention, config.indexer
        self.config, self.rope, self.rounding = config, rope, rounding
        self.decoder_replay, self.selection_rule = decoder_replay, selection_rule
        self.device, self.dtype = device, dtype
        self.num_tokens = 0
        self._prompt_stop = 0
        self._decoder_start = 0
        self._window_floor = 0
        # oldest row a resumed sequence ran again: what its windows held before is gone
        self._first_row = 0
        # rows before it leave no entries: theirs came from a cache
        self._write_floor = 0
        # where a snapshot began: its windows and tails reach back no further
        self._restored_at = 0
        # the farthest that rows were written: those of a roll-back have overwritten older ones
        self._farthest = 0
        # position from which an exact rebuild needs whole encoder rows, 0 if there was none
        self._exact_stop = 0
        # steps hand stored bytes to the kernels; on a CPU rows are widened first
        self.in_place = device.type == "cuda" and rounding.window_kv and rounding.main_kv and rounding.index
        # room for rejected drafts beside the window (serving.md 2.4)
        self.num_slots = attention.sliding_window + config.draft.block_size + 1
        window_format = FP8 if rounding.window_kv else None
        self.windows = [RowStore(attention.head_dim, window_format, dtype, device) for _ in range(config.num_layers)]
        if config.draft.num_blocks:
            # a row of the draft's context, all its blocks side by side: rounded as window rows are, so bf16 holds it
            channels = config.draft.num_blocks * attention.head_dim
            context_dtype = torch.bfloat16 if rounding.window_kv else dtype
            self.windows.append(RowStore(channels, None, context_dtype, device))
        for window in self.windows:
            window.reserve(self.num_slots)
        main_format = FP4_MAIN if rounding.main_kv else None
        key_format = FP4_INDEX if rounding.index else None
        if make_store is None:
            formats = {"entries": (attention.head_dim, main_format), "keys": (indexer.head_dim, key_format)}
            make_store = lambda what, source: RowStore(*formats[what], dtype, device)  # noqa: E731
        sources = attention.kv_source_layer_ids
        self.entries = {source: make_store("entries", source) for source in sources}
        self.keys = {source: make_store("keys", source) for source in sources}
        # per pairing source, (content, gate) of the last rows: the waiting half, and those a roll-back may need
        self.tails: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_tail_rows = config.draft.block_size + 2
        self.num_lookbacks = config.engram.max_ngram_size - 1
        # newest last; more than the look-backs, so that a roll-back finds its own
        self._history = torch.full(
            (self.num_lookbacks + config.draft.block_size + 1,), -1, dtype=torch.int64, device=device
        )

    @property
    def recent_L(self) -> Tensor:
        """The token ids before the next row, -1 before the first token."""
        return self._history[self._history.shape[0] - self.num_lookbacks :]

    def begin_prompt(self, prompt_tokens: int) -> None:
        """Fix where the decoder starts for a prompt that ends at `prompt_tokens`, counted from the sequence's start.

        Called by the first chunk of each prompt; further chunks name the same end.

        Raises:
            CapacityError: The prompt ends before the tokens already held, or past the model's limit.
        """
        if prompt_tokens == self._prompt_stop and self.num_tokens < prompt_tokens:
            return
        if prompt_tokens <= self.num_tokens:
            raise CapacityError(
                f"the prompt ends at token {prompt_tokens}, but {self.num_tokens} are held already; "
                "prompt_tokens counts from the start of the sequence"
            )
        limit = self.config.max_position_embeddings
        if prompt_tokens > limit:
            raise CapacityError(f"the prompt has {prompt_tokens} tokens, the model's limit is {limit}")
        window_start = prompt_tokens - self.config.attention.sliding_window
        self._prompt_stop = prompt_tokens
        self._decoder_start = max(self.num_tokens, window_start)
        # a short prompt goes on from windows that are whole; a long one restarts them at its last window
        if window_start >= self.num_tokens:
            self._window_floor = max(window_start, 0)

    def check_room(self, num_tokens: int) -> None:
        """Raise CapacityError if `num_tokens` more would pass the model's limit."""
        limit = self.config.max_position_embeddings
        if self.num_tokens + num_tokens > limit:
            raise CapacityError(
                f"{self.num_tokens} tokens are held, {num_tokens} more pass the model's limit of {limit}"
            )

    def lookbacks(self, ids_T: Tensor) -> Tensor:
        """Raw ids of the next rows and their look-backs, newest first [T, L], -1 where dead."""
        reach = self.num_lookbacks
        ids_1S = torch.cat([self.recent_L, ids_T]).unsqueeze(0)
        raw_1SL = lookback_ids(
            ids_1S,
            torch.zeros_like(ids_1S),
            num_lookbacks=self.config.engram.max_ngram_size,
            image_token_id=self.config.image_token_id,
        )
        return raw_1SL[0, reach:]

    def advance(self, ids_T: Tensor) -> None:
        """The rows of `ids_T` are done."""
        self.num_tokens += ids_T.shape[0]
        self._farthest = max(self._farthest, self.num_tokens)
        self._history = torch.cat([self._history, ids_T])[-self._history.shape[0] :]

    def resume_bounded(self, ids_T: Tensor, cached_tokens: int) -> int:
        """Grade G2: the first `cached_tokens` have entries; the last window of them is to run again.

        The rows that run again see no window key before them and leave no entries. Call it on a fresh state
        whose stores hold the entries; then `prefill` from the position returned. Approximate.

        Args:
            ids_T: The prompt's token ids, at least the cached ones.

        Raises:
            CapacityError: An odd number of tokens, no more than a window, or entries that do not fit it.

        Source: serving.md 2.2.
        """
        window = self.config.attention.sliding_window
        if cached_tokens <= window:
            raise CapacityError(
                f"{cached_tokens} cached tokens are no more than the window of {window}, "
                "so all would run again; start cold"
            )
        self._adopt(ids_T, cached_tokens, cached_tokens - window)
        self._first_row = self.num_tokens
        return self.num_tokens

    def resume_exact(self, ids_T: Tensor, cached_tokens: int, prompt_tokens: int) -> int:
        """Grade G3: as `resume_bounded`, but so many rows run again that all that follows equals a cold prefill.

        Each encoder layer needs one window less of complete rows than the layer below it.

        Raises:
            CapacityError: As `resume_bounded`, or nothing would be saved, or `decoder_replay` is `off`, whose
                decoder windows reach back to the first token.

        Source: serving.md 2.1.
        """
        start, stop = exact_span(self.config, self.decoder_replay, cached_tokens, prompt_tokens)
        if self.decoder_replay == "off" or start <= 0:
            raise CapacityError(
                f"an exact rebuild of {cached_tokens} cached tokens for a prompt of {prompt_tokens} "
                "starts at the first token: start cold"
            )
        self._adopt(ids_T, cached_tokens, start)
        self._exact_stop = stop
        return start

    def _adopt(self, ids_T: Tensor, cached_tokens: int, start: int) -> None:
        if cached_tokens % 2:
            raise CapacityError(f"{cached_tokens} cached tokens end inside a pair, expected an even number")
        self.check_entries(cached_tokens)
        self.num_tokens, self._write_floor = start, cached_tokens
        self._remember(ids_T[:start])

    def _remember(self, ids_T: Tensor) -> None:
        """The token ids so far, of which the last ones are kept."""
        length = self._history.shape[0]
        self._history = torch.cat([torch.full_like(self._history, -1), ids_T.to(self.device)])[-length:]

    @property
    def num_held(self) -> int:
        """Tokens whose entries are there: more than `num_tokens` while cached ones run again."""
        return max(self.num_tokens, self._write_floor)

    def mark(self) -> Mark:
        """What `reset` needs to undo a step that failed half way."""
        return dict(self.tails), {
            source: (store.count, self.keys[source].count) for source, store in self.entries.items()
        }

    def reset(self, mark: Mark) -> None:
        """Undo what a failed step of no more than the rings' spare rows has written."""
        self.tails = dict(mark[0])
        # what the step wrote past the end has taken the place of the oldest rows
        self._restored_at = self.num_tokens
        for source, (num_entries, num_keys) in mark[1].items():
            self.entries[source].truncate(num_entries)
            self.keys[source].truncate(num_keys)

    def check_entries(self, num_tokens: int) -> None:
        """Raise CapacityError unless the stores hold exactly the entries of `num_tokens` tokens."""
        ratios = self.config.attention.compress_ratios
        for source, store in self.entries.items():
            wanted = num_tokens // ratios[source]
            if not store.count == self.keys[source].count == wanted:
                raise CapacityError(
                    f"layer {source} holds {store.count} entries and {self.keys[source].count} keys, "
                    f"{num_tokens} tokens have {wanted}"
                )

    def snapshot(self) -> Snapshot:
        """A copy of all but the entries, on the CPU: grade G0."""
        window = self.config.attention.sliding_window
        slot_W = torch.arange(self.num_tokens - window, self.num_tokens, device=self.device) % self.num_slots
        odd = self.num_tokens % 2 == 1
        return Snapshot(
            num_tokens=self.num_tokens,
            decoder_replay=self.decoder_replay,
            marks={name: getattr(self, name) for name in self._MARKS},
            windows=[[plane.cpu() for plane in store.read(slot_W)] for store in self.windows],
            tails={
                layer: (content_RC[-1:].to("cpu", copy=True), gate_RC[-1:].to("cpu", copy=True))
                for layer, (content_RC, gate_RC) in (self.tails if odd else {}).items()
            },
            recent_L=self.recent_L.to("cpu", copy=True),
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot; the stores hold the entries of its tokens already.

        Bit for bit the uninterrupted sequence. A prompt that then adds a window or more restarts the decoder's
        windows, so it equals a cold prefill (grade G1); a shorter one goes on from the snapshot's.

        Raises:
            CapacityError: The entries do not fit, or the snapshot is of another `decoder_replay`.
        """
        if snapshot.decoder_replay != self.decoder_replay:
            raise CapacityError(
                f"a snapshot of decoder_replay {snapshot.decoder_replay} cannot resume {self.decoder_replay}"
            )
        self.check_entries(snapshot.num_held)
        self.num_tokens = snapshot.num_tokens
        for name in self._MARKS:
            setattr(self, name, snapshot.marks[name])
        window = self.config.attention.sliding_window
        slot_W = torch.arange(self.num_tokens - window, self.num_tokens, device=self.device) % self.num_slots
        for store, planes in zip(self.windows, snapshot.windows, strict=True):
            store.overwrite(slot_W, planes)
        self.tails = {
            layer: (content_1C.to(self.device), gate_1C.to(self.device))
            for layer, (content_1C, gate_1C) in snapshot.tails.items()
        }
        self._remember(snapshot.recent_L)
        self._restored_at = self._farthest = self.num_tokens

    def fork(self, make_store: MakeStore | None = None) -> SequenceState:
        """The same sequence once more; what one does from here on leaves the other as it is.

        Args:
            make_store: Gives stores that hold the same entries; copies of them by default.
        """
        held = {"entries": self.entries, "keys": self.keys}

        def copied(what: Literal["entries", "keys"], source: int) -> EntryStore:
            store = held[what][source]
            assert isinstance(store, RowStore), "entries behind pages are shared by whoever owns the pages"
            return store.prefix(store.count)

        other = SequenceState(
            self.config,
            self.rope,
            rounding=self.rounding,
            dtype=self.dtype,
            device=self.device,
            decoder_replay=self.decoder_replay,
            selection_rule=self.selection_rule,
            make_store=make_store or copied,
        )
        for name in (*self._MARKS, "num_tokens", "_restored_at", "_farthest"):
            setattr(other, name, getattr(self, name))
        slot_R = torch.arange(self.num_slots, device=self.device)
        for mine, theirs in zip(self.windows, other.windows, strict=True):
            theirs.overwrite(slot_R, mine.read(slot_R))
        # neither is ever written in place
        other.tails, other._history = dict(self.tails), self._history
        return other

    @property
    def oldest_kept(self) -> int:
        """The fewest tokens that `roll_back` can go back to."""
        reach = self._farthest - self.num_tail_rows + 1
        return max(self._prompt_stop, self._write_floor, self._restored_at, reach)

    def roll_back(self, num_tokens: int) -> None:
        """Forget the newest tokens, as if they had never run: rejected drafts.

        Raises:
            CapacityError: More tokens than the rings and tails remember, or none that were run here.
        """
        if not self.oldest_kept <= num_tokens <= self.num_tokens:
            raise CapacityError(
                f"cannot roll back from token {self.num_tokens} to {num_tokens}: "
                f"at most {self.num_tail_rows - 1} tokens behind the farthest, here not before {self.oldest_kept}"
            )
        dropped = self.num_tokens - num_tokens
        if dropped == 0:
            return
        self.num_tokens = num_tokens
        for source, store in self.entries.items():
            count = num_tokens // self.config.attention.compress_ratios[source]
            store.truncate(count)
            self.keys[source].truncate(count)
        self.tails = {layer: (content[:-dropped], gate[:-dropped]) for layer, (content, gate) in self.tails.items()}
        self._history = torch.cat([torch.full_like(self._history[:dropped], -1), self._history[:-dropped]])

    def first_position(self, layer: int) -> int:
        """First position of the running prompt that `layer` runs completely."""
        config = self.config
        boundary = config.boundary_layer_id
        if layer < boundary:
            if not self._exact_stop:
                return 0
            return max(self._exact_stop - (config.attention.sliding_window - 1) * (boundary - layer), 0)
        if self.decoder_replay == "off":
            return 0
        if self.decoder_replay != "exact":
            return self._decoder_start
        # each layer above needs one window less of complete rows (serving.md 1.2)
        window = config.attention.sliding_window
        num_rows = window + (window - 1) * (config.num_layers - 1 - max(layer, boundary + 1))
        return max(self._prompt_stop - num_rows, 0)

    @property
    def decoder_stop(self) -> int:
        """End of the running prompt: rows from here on run every layer."""
        return self._prompt_stop

    def window_floor(self, layer: int) -> int:
        """Oldest position whose window row `layer` has written."""
        if layer < self.config.boundary_layer_id:
            return max(self.first_position(layer), self._first_row)
        if self.keeps_true_window(layer):
            return self._first_row
        floor = self.first_position(layer) if self.decoder_replay == "exact" else self._window_floor
        return max(floor, self._first_row)

    def context(self) -> tuple[Tensor, Tensor]:
        """(rows [W, channels] of the last window's positions for a draft, which of them are there [W])."""
        window = self.config.attention.sliding_window
        position_W = torch.arange(self.num_tokens - window, self.num_tokens, device=self.device)
        rows_WC = self.windows[self.config.num_layers].take(position_W % self.num_slots)
        # a context row is written by the rows that run the last layer
        return rows_WC, position_W >= self.window_floor(self.config.num_layers - 1)

    def first_entry_row(self, start: int) -> int:
        """First position at or after `start` whose entries are not there yet."""
        return max(start, self._write_floor)

    def keeps_true_window(self, layer: int) -> bool:
        """True where every row's window key is written, though only some rows run the layer."""
        if self.decoder_replay == "off":
            return True
        return self.decoder_replay != "bounded" and layer == self.config.boundary_layer_id

    def global_bytes(self) -> int:
        """Bytes of entries and index keys held now."""
        stores = (*self.entries.values(), *self.keys.values())
        return sum(store.count * store.vector_bytes() for store in stores)

    def window_bytes(self) -> int:
        """Bytes of the window rings, whatever the length."""
        return sum(self.num_slots * window.vector_bytes() for window in self.windows)

    def cache_bytes(self) -> int:
        """All bytes this sequence holds."""
        tails = sum(t.numel() * t.element_size() for pair in self.tails.values() for t in pair)
        return self.global_bytes() + self.window_bytes() + tails


class SequenceStep:
    """The rows [start, stop) of one forward over a `SequenceState`; fulfils `AttentionState`."""

    def __init__(self, state: SequenceState, start: int, stop: int) -> None:
        self.state = state
        self.rounding = state.rounding
        self.start, self.stop = start, stop
        self._positions_T = torch.arange(start, stop, device=state.device)
        self._rotations: dict[bool, tuple[Tensor, Tensor]] = {}
        self._window_RC = torch.empty(0)
        # the last layer's window keys by position, where they are read in place
        self._ring: Stored | None = None
        self.in_place = state.in_place and not is_deterministic()
        # (KV source, selection, its entries): layers that reuse a selection read the same ones
        self._gathered: tuple[int, Tensor, Tensor, Tensor] | None = None

    @property
    def positions_T(self) -> Tensor:
        return self._positions_T

    def narrowed(self, start: int) -> SequenceStep:
        """The same step from position `start` on."""
        step = SequenceStep(self.state, start, self.stop)
        cut = start - self.start
        step._rotations = {kind: (cos[cut:], sin[cut:]) for kind, (cos, sin) in self._rotations.items()}
        step._window_RC, step._ring = self._window_RC[cut:], self._ring
        return step

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """True if all rows run every layer and write all they make, as those of generated tokens do."""
        return self.start >= max(self.state.decoder_stop, self.state.first_entry_row(0))

    def entry_rows(self) -> tuple[slice | None, SequenceStep | None]:
        """The rows whose entries are not there yet: (which, their step); a step of none is None."""
        return self._from(self.state.first_entry_row(self.start))

    def window_rows(self, layer: int, *, cut: bool) -> tuple[slice | None, SequenceStep | None]:
        """The rows that write their window keys before (after) the step is cut to those that run `layer`."""
        return None, self if cut != self.state.keeps_true_window(layer) else None

    def layer_rows(self, layer: int) -> tuple[slice | None, SequenceStep | None]:
        """The rows that run `layer`."""
        return self._from(self.state.first_position(layer))

    def _from(self, position: int) -> tuple[slice | None, SequenceStep | None]:
        if position <= self.start:
            return None, self
        if position >= self.stop:
            return slice(self.num_rows, None), None
        return slice(position - self.start, None), self.narrowed(position)

    def rotation(self, *, compressed: bool) -> tuple[Tensor, Tensor]:
        if compressed not in self._rotations:
            self._rotations[compressed] = self.state.rope(self._positions_T, compressed=compressed)
        return self._rotations[compressed]

    def write_window(self, layer: int, kv_TC: Tensor) -> None:
        state = self.state
        store, num_slots = state.windows[layer], state.num_slots
        reach = state.config.attention.sliding_window - 1
        before_R = torch.arange(self.start - reach, self.start, device=state.device)
        if self.in_place:
            self._ring = self._write_ring(store, before_R, kv_TC)
            return
        before_R = before_R % num_slots
        if reach + kv_TC.shape[0] <= num_slots:
            store.put(self._positions_T % num_slots, kv_TC)
            self._window_RC = store.take(torch.cat([before_R, self._positions_T % num_slots]))
            return
        # a chunk longer than the ring: what it overwrites is read first
        before_RC = store.take(before_R)
        fresh = RowStore(kv_TC.shape[1], FP8 if self.rounding.window_kv else None, kv_TC.dtype, state.device)
        fresh.append(kv_TC)
        self._window_RC = torch.cat([before_RC, fresh.all()])
        store.put(self._positions_T[-num_slots:] % num_slots, kv_TC[-num_slots:])

    def _write_ring(self, store: RowStore, before_R: Tensor, kv_TC: Tensor) -> Stored:
        """Keep the rows; returns them and what they look back at by position."""
        num_slots, num_rows = self.state.num_slots, len(before_R) + kv_TC.shape[0]
        if num_rows <= num_slots:
            store.put(self._positions_T % num_slots, kv_TC)
            return store.ring(num_slots)
        # a chunk longer than the sequence's ring has one of its own, of few sizes: kernels are compiled for each
        size = 1 << (num_rows - 1).bit_length()
        longer = RowStore(kv_TC.shape[1], FP8, kv_TC.dtype, self.state.device)
        longer.reserve(size)
        longer.overwrite(before_R % size, store.read(before_R % num_slots))
        longer.put(self._positions_T % size, kv_TC)
        kept_T = self._positions_T[-num_slots:]
        store.overwrite(kept_T % num_slots, longer.read(kept_T % size))
        return longer.ring(size)

    def write_context(self, rows_TC: Tensor) -> None:
        """Keep what a draft reads of these rows."""
        store, num_slots = self.state.windows[self.state.config.num_layers], self.state.num_slots
        slot_T = self._positions_T[-num_slots:] % num_slots
        store.put(slot_T, rows_TC[-num_slots:].to(store.dtype))

    def complete_groups(self, layer: int, content_TC: Tensor, gate_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state, start = self.state, self.start
        if layer in state.tails:
            content_RC, gate_RC = state.tails[layer]
            content_RC, gate_RC = torch.cat([content_RC, content_TC]), torch.cat([gate_RC, gate_TC])
        else:
            content_RC, gate_RC = content_TC, gate_TC
        keep = state.num_tail_rows
        state.tails[layer] = content_RC[-keep:].clone(), gate_RC[-keep:].clone()
        waiting = start % 2
        start -= waiting
        num_rows = content_TC.shape[0] + waiting
        content_TC, gate_TC = content_RC[-num_rows:], gate_RC[-num_rows:]
        whole = num_rows // 2 * 2
        first_E = torch.arange(start, start + whole, 2, device=content_TC.device)
        return content_TC[:whole].unflatten(0, (-1, 2)), gate_TC[:whole].unflatten(0, (-1, 2)), first_E

    def write_entries(self, layer: int, main_EC: Tensor, key_EI: Tensor) -> None:
        self.state.entries[layer].append(main_EC)
        self.state.keys[layer].append(key_EI)

    def select(
        self, layer: int, kv_source: int, query_THI: Tensor, weight_TH: Tensor, *, pool: Tensor | None, make_pool: bool
    ) -> SharedKV:
        ratio = self.state.config.attention.compress_ratios[kv_source]
        keys = self.state.keys[kv_source]
        return select_rows(
            self.state.config.indexer,
            query_THI,
            weight_TH,
            keys,
            (self._positions_T + 1) // ratio,
            self.stop // ratio,
            topk=self.state.config.indexer.topk,
            pool_TN=pool,
            make_pool=make_pool,
            rule=self.state.selection_rule,
            num_common=(self.start + 1) // ratio,
            paged=keys.paged(self._first_T) if self.in_place else None,
        )

    def attend(self, layer: int, kv_source: int | None, query_THC: Tensor, shared: SharedKV, sink_H: Tensor) -> Tensor:
        if self._ring is not None:
            return self._attend_in_place(self._ring, layer, kv_source, query_THC, shared, sink_H)
        return attention_ops.attention(query_THC, *self.attended(layer, kv_source, shared), sink_H)

    def _attend_in_place(
        self,
        ring: Stored,
        layer: int,
        kv_source: int | None,
        query_THC: Tensor,
        shared: SharedKV,
        sink_H: Tensor,
    ) -> Tensor:
        # the queries are turned already, and the outputs will be turned back
        cos_TR = torch.ones_like(self.rotation(compressed=False)[0])
        entries = None
        if kv_source is not None and shared.selection is not None:
            entries = self.state.entries[kv_source].paged(self._first_T)
        return attention_ops.paged_attention(
            query_THC,
            cos_TR,
            torch.zeros_like(cos_TR),
            ring,
            self._first_T,
            self._positions_T,
            torch.full_like(self._positions_T, self.state.window_floor(layer)),
            entries,
            None if entries is None else shared.selection,
            sink_H,
            self.state.config.attention.sliding_window,
        )

    @property
    def _first_T(self) -> Tensor:
        """The only sequence, for each row."""
        return torch.zeros_like(self._positions_T)

    def attended(
        self, layer: int, kv_source: int | None, shared: SharedKV
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """What the rows attend to: window keys [T, W, C], which are visible, entries chosen, which are there."""
        num_window = self.state.config.attention.sliding_window
        column_W = torch.arange(1 - num_window, 1, device=self.state.device)
        visible_TW = self._positions_T.unsqueeze(-1) + column_W >= self.state.window_floor(layer)
        window_TWC = sliding(self._window_RC, num_window)
        if kv_source is None or shared.selection is None:
            return window_TWC, visible_TW, None, None
        gathered = self._gathered
        if gathered is None or gathered[0] != kv_source or gathered[1] is not shared.selection:
            entry_TKC = self.state.entries[kv_source].gather(shared.selection)
            gathered = self._gathered = (kv_source, shared.selection, entry_TKC, shared.selection >= 0)
        return window_TWC, visible_TW, gathered[2], gathered[3]
