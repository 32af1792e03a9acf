"""Conditional memory: hashed n-gram addresses, their table rows, and the gated residual.

B packs, S rows a pack, T rows, L look-backs, K table columns, N streams, D channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cedar.config.engram import EngramHash, engram_hashes
from cedar.config.model import ModelConfig
from cedar.config.rounding import Rounding
from cedar.errors import ConfigError
from cedar.formats.spec import FP8, FormatSpec
from cedar.kernels import engram as engram_ops
from cedar.kernels.quantize import dequantize_rows, round_rows
from cedar.model.layers import Linear, round_input, rounded_weight
from cedar.model.rows import DiskTable


def lookback_ids(ids_BS: Tensor, first_row_BS: Tensor, *, num_lookbacks: int, image_token_id: int) -> Tensor:
    """Each row's own and earlier raw token ids, newest first: [B, S, L], -1 where a look-back is dead.

    Dead are tokens before the row's sample and image tokens, and everything older than a dead one.

    Args:
        ids_BS: Raw ids; -1 stands for a token that does not exist.
        first_row_BS: First row of each row's sample.
    """
    row_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    dead_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
    columns = []
    for back in range(num_lookbacks):
        shifted_BS = F.pad(ids_BS, (back, 0), value=-1)[:, : ids_BS.shape[1]]
        dead_BS = dead_BS | (row_S - back < first_row_BS) | (shifted_BS == image_token_id) | (shifted_BS < 0)
        columns.append(shifted_BS.masked_fill(dead_BS, -1))
    return torch.stack(columns, dim=-1)


class EngramTable(nn.Module):
    """Rows of the memory: a trainable float table, or the checkpoint's own bytes: in memory, in host memory that a
    GPU reads, mapped, or on disk.

    Attributes:
        weight: float32 [rows, channels] while training, else None.
        codes: uint8 E4M3 [rows, channels] after `set_packed`, else None.
        scales: uint8 E8M0 [rows, channels / 32] after `set_packed`, else None.
        disk: Where rows come from after `set_disk`, else None.
    """

    codes: Tensor | None
    scales: Tensor | None

    def __init__(self, num_rows: int, num_channels: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.num_rows, self.num_channels = num_rows, num_channels
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(num_rows, num_channels, device=device, dtype=torch.float32)
        )
        self.codes = self.scales = None
        self.disk: DiskTable | None = None

    def set_packed(self, codes: Tensor, scales: Tensor) -> None:
        """Serve from stored bytes; the float table is dropped. The tensors may be views of a mapped file."""
        assert codes.shape == (self.num_rows, self.num_channels), codes.shape
        assert scales.shape == (self.num_rows, self.num_channels // FP8.group), scales.shape
        self.weight = None
        self.codes, self.scales = codes, scales

    def set_disk(self, disk: DiskTable) -> None:
        """Serve from rows that are read as they are asked for; the float table is dropped."""
        assert disk.num_rows == self.num_rows
        self.weight = None
        self.disk = disk

    @property
    def beside(self) -> bool:
        """Whether a GPU reads the rows where they lie, in host memory: slow to come, so asked for ahead."""
        return self.codes is not None and self.codes.device.type == "cpu" and self.codes.is_pinned()

    def prefetch(self, row_TK: Tensor) -> None:
        """These rows are needed soon."""
        if self.disk is not None:
            self.disk.prefetch(row_TK.flatten().cpu())

    def stored(self) -> Iterator[Tensor]:
        """A packed table's bytes: all codes, then all scales."""
        if self.disk is not None:
            yield from self.disk.stored()
            return
        assert self.codes is not None and self.scales is not None
        yield self.codes
        yield self.scales

    def unpack(self) -> None:
        """Go back to a float table of the same values, to train it."""
        assert self.codes is not None and self.scales is not None
        self.weight = nn.Parameter(dequantize_rows(self.codes, self.scales, FP8, torch.float32))
        self.codes = self.scales = None

    def forward(self, row_TK: Tensor, dtype: torch.dtype, rounding: Rounding) -> Tensor:
        """[T, K * channels] in column order."""
        if self.weight is not None:
            picked = F.embedding(row_TK, self.weight)
            if rounding.weights:
                # rounding picked rows equals rounding the table: each row has scales of its own
                picked = round_rows(picked, FP8)
            return picked.to(dtype).flatten(1)
        if self.disk is not None:
            codes, scales = (part.unflatten(0, row_TK.shape) for part in self.disk.get(row_TK.flatten().cpu()))
            rows = dequantize_rows(codes.to(row_TK.device), scales.to(row_TK.device), FP8, dtype)
            return rows.flatten(1)
        assert self.codes is not None and self.scales is not None
        where = row_TK.to(self.codes.device)
        rows = dequantize_rows(self.codes[where], self.scales[where], FP8, dtype)
        return rows.to(row_TK.device).flatten(1)


class Engram(nn.Module):
    """One layer's memory: table, projection to a key per stream and one value, gate.

    Source: engram-dspark-vision-chat.md 1; report 2.4.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        table_device: torch.device | str | None = None,
        quantized_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        engram = config.engram
        self.num_streams, self.hidden, self.eps = config.mhc.num_streams, config.hidden_size, config.rms_norm_eps
        constants: EngramHash = engram_hashes(engram)[layer]
        self.embed = EngramTable(constants.num_rows, engram.head_dim, device=table_device or device)
        self.wkv = Linear(
            engram.num_columns * engram.head_dim,
            (self.num_streams + 1) * self.hidden,
            "fp8",
            device=quantized_device or device,
            dtype=dtype,
        )
        self.q_weight = nn.Parameter(torch.ones(self.num_streams, self.hidden, device=device, dtype=dtype))
        self.k_weight = nn.Parameter(torch.ones(self.num_streams, self.hidden, device=device, dtype=dtype))
        for name, values in (
            ("multiplier_L", constants.multipliers),
            ("prime_K", constants.primes),
            ("offset_K", constants.offsets),
        ):
            # not in any checkpoint: derived from the config, and never in floating point
            tensor = torch.tensor(values, dtype=torch.int64, device=device)
            self.register_buffer(name, tensor, persistent=False)

    multiplier_L: Tensor
    prime_K: Tensor
    offset_K: Tensor

    def prefetch(self, compressed_TL: Tensor) -> None:
        """Rows of these look-backs are needed soon; nothing happens unless the table is on disk."""
        if self.embed.disk is not None:
            self.embed.prefetch(engram_ops.engram_rows(compressed_TL, self.multiplier_L, self.prime_K, self.offset_K))

    def recall(self, compressed_TL: Tensor, dtype: torch.dtype, spec: FormatSpec | None) -> Tensor:
        """The rows of a packed table in memory that these look-backs name, side by side and rounded to `spec`."""
        table = self.embed
        assert table.codes is not None and table.scales is not None
        addresses = compressed_TL, self.multiplier_L, self.prime_K, self.offset_K
        return engram_ops.engram_memory(*addresses, table.codes, table.scales, dtype, spec)

    def forward(self, streams_TND: Tensor, compressed_TL: Tensor, dead_T: Tensor, rounding: Rounding) -> Tensor:
        """The streams with the memory added.

        Args:
            compressed_TL: Compressed ids of the row and its look-backs, int64.
            dead_T: bool, True at image rows.
        """
        row_TK = engram_ops.engram_rows(compressed_TL, self.multiplier_L, self.prime_K, self.offset_K)
        memory_TX = self.embed(row_TK, streams_TND.dtype, rounding)
        kv_TX = self.wkv(round_input(memory_TX, rounding), rounding)
        key_TND = kv_TX[:, : self.num_streams * self.hidden].unflatten(-1, (self.num_streams, self.hidden))
        value_TD = kv_TX[:, self.num_streams * self.hidden :]
        gains: list[Tensor] = [self.q_weight, self.k_weight]
        if rounding.weights:
            gains = [rounded_weight(gain_ND, "bf16") for gain_ND in gains]
        return engram_ops.engram_gate(streams_TND, key_TND, value_TD, dead_T, gains[0], gains[1], self.eps)


class Recall:
    """The tables' rows that a step reads, gathered before the layers that read them.

    Rows in host memory take longer to come than a layer takes to run, so they come on a stream of their own beside
    the layers below.

    Args:
        spec: What the rows are rounded to for the product that reads them.
    """

    def __init__(
        self, memories: Sequence[Engram], compressed_TL: Tensor, dtype: torch.dtype, spec: FormatSpec | None
    ) -> None:
        self._ahead: torch.cuda.Stream | None = None
        beside = [memory for memory in memories if memory.embed.beside]
        if beside and compressed_TL.is_cuda:
            self._ahead = torch.cuda.Stream(compressed_TL.device)
            self._ahead.wait_stream(torch.cuda.current_stream(compressed_TL.device))
        with nullcontext() if self._ahead is None else torch.cuda.stream(self._ahead):
            self._come = {memory: memory.recall(compressed_TL, dtype, spec) for memory in beside}
        self.compressed_TL, self._dtype, self._spec = compressed_TL, dtype, spec

    def of(self, memory: Engram) -> Tensor:
        """[T, columns * channels] of one layer's table."""
        if memory not in self._come:
            return memory.recall(self.compressed_TL, self._dtype, self._spec)
        if self._ahead is not None:
            torch.cuda.current_stream(self.compressed_TL.device).wait_stream(self._ahead)
        return self._come[memory]


class TokenMap(nn.Module):
    """Raw token id -> compressed id of the n-gram hash; it comes from the tokenizer, no checkpoint holds it."""

    compressed_V: Tensor

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._engram, self._vocab_size = config.engram, config.vocab_size
        self.register_buffer("compressed_V", torch.empty(0, dtype=torch.int64, device=device), persistent=False)

    def set(self, compressed_ids: list[int] | Tensor) -> None:
        """Install the tokenizer's map.

        Raises:
            ConfigError: It has another length than the vocabulary, or an id at or above
                `engram_compressed_vocab_size`.
        """
        mapped = torch.as_tensor(compressed_ids, dtype=torch.int64)
        if mapped.shape != (self._vocab_size,):
            raise ConfigError(
                f"the token map has {mapped.numel()} entries, the model's vocabulary {self._vocab_size}: "
                "this tokenizer belongs to another model"
            )
        bound = self._engram.compressed_vocab_size
        if int(mapped.max()) >= bound or int(mapped.min()) < 0:
            raise ConfigError(
                f"the token map holds ids {int(mapped.min())}..{int(mapped.max())}, expected 0..{bound - 1} "
                "(engram_compressed_vocab_size): this tokenizer belongs to another model"
            )
        self.compressed_V = mapped.to(self.compressed_V.device)

    def forward(self, raw_TL: Tensor) -> Tensor:
        """Compressed ids; dead look-backs (-1) get the pad's.

        Raises:
            ConfigError: No map was set.
        """
        if self.compressed_V.numel() == 0:
            raise ConfigError(
                "the Engram hash needs the tokenizer's token map: load the checkpoint with its tokenizer.json beside "
                "it, or call model.token_map.set(...)"
            )
        pad = self.compressed_V[self._engram.pad_token_id]
        return torch.where(raw_TL < 0, pad, self.compressed_V[raw_TL.clamp(min=0)])
