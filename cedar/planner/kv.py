"""Bytes that a conversation costs: per token, per page and per sequence, on each tier.

Everything here follows from three vector formats and the config: the 890 B/token of `flash` are the sum
in `global_bytes_per_token`, nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cedar.config.layers import layer_plans
from cedar.config.model import PAGE_TOKENS, ModelConfig
from cedar.errors import CapacityError
from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8

# what stands before a page's payload on disk, and the unit that header and payload are rounded up to
PAGE_HEADER_BYTES = 768
PAGE_DISK_UNIT = 512
_F32_BYTES = 4
_BF16_BYTES = 2


def entry_bytes(config: ModelConfig) -> int:
    """One compressed main entry: FP4 with an E4M3 scale per 16 channels. 288 in `flash`."""
    return FP4_MAIN.vector_bytes(config.attention.head_dim)


def index_key_bytes(config: ModelConfig) -> int:
    """One index key: FP4 with an E8M0 scale per 32 channels. 68 in `flash`."""
    return FP4_INDEX.vector_bytes(config.indexer.head_dim)


def window_row_bytes(config: ModelConfig) -> int:
    """One window row of one layer: FP8 with an E8M0 scale per 32 channels. 528 in `flash`."""
    return FP8.vector_bytes(config.attention.head_dim)


def source_ratios(config: ModelConfig) -> tuple[int, ...]:
    """Tokens per entry of each layer that writes a compressed cache, in layer order."""
    return tuple(plan.ratio for plan in layer_plans(config) if plan.writes_entries)


def global_bytes_per_token(config: ModelConfig) -> float:
    """What a token leaves for ever: one entry and one index key per source layer, shared by `ratio` tokens.

    Source: report 2.3; derived: (288 + 68) * (1/2 + 1/2 + 1/2 + 1).

    >>> from cedar.config.presets import flash
    >>> global_bytes_per_token(flash())
    890.0
    """
    row_bytes = entry_bytes(config) + index_key_bytes(config)
    return sum(row_bytes / ratio for ratio in source_ratios(config))


def page_bytes(config: ModelConfig) -> int:
    """One page: the entries and index keys of 128 tokens, of all source layers together."""
    row_bytes = entry_bytes(config) + index_key_bytes(config)
    return sum(PAGE_TOKENS // ratio * row_bytes for ratio in source_ratios(config))


def disk_page_bytes(config: ModelConfig) -> int:
    """One page as a record on disk: header and payload, rounded up to whole units of 512 bytes.

    Source: serving.md 4.4.
    """
    return math.ceil((PAGE_HEADER_BYTES + page_bytes(config)) / PAGE_DISK_UNIT) * PAGE_DISK_UNIT


def num_pages(tokens: int) -> int:
    """Pages that `tokens` tokens need.

    Raises:
        CapacityError: A negative number of tokens.
    """
    if tokens < 0:
        raise CapacityError(f"a context of {tokens} tokens does not exist, expected 0 or more")
    return -(-tokens // PAGE_TOKENS)


def tail_row_bytes(config: ModelConfig) -> int:
    """A half-filled pair of one layer: content and gate score of one token, fp32. 4,096 in `flash`."""
    return 2 * config.attention.head_dim * _F32_BYTES


def _num_pairing_sources(config: ModelConfig) -> int:
    return sum(ratio > 1 for ratio in source_ratios(config))


def draft_row_bytes(config: ModelConfig) -> int:
    """The context row of one draft block for one token, bf16. 1,024 in `flash`."""
    return config.attention.head_dim * _BF16_BYTES


def snapshot_bytes(config: ModelConfig) -> int:
    """All that resumes a sequence bit for bit, next to its pages (grade G0): 3,108,864 in `flash`.

    Window rows of every layer, the half-filled pairs, the context rows of the draft blocks.

    Source: serving.md 3.
    """
    window = config.attention.sliding_window
    rows = window * config.num_layers * window_row_bytes(config)
    tails = _num_pairing_sources(config) * tail_row_bytes(config)
    return rows + tails + window * config.draft.num_blocks * draft_row_bytes(config)


def encoder_snapshot_bytes(config: ModelConfig) -> int:
    """The encoder's window rows alone (grade G1): 1,351,680 in `flash`."""
    return config.attention.sliding_window * config.boundary_layer_id * window_row_bytes(config)


def resident_bytes(config: ModelConfig) -> int:
    """What a running sequence holds on the device besides its pages: 3,388,416 in `flash`.

    Window rings of W + k + 1 rows, so that k rejected draft rows never overwrite a row that is still
    needed; unpaired rows of the last k + 2 positions; draft context rows. Row counts are rounded up to
    multiples of 8. Without draft blocks k is 0.

    Source: serving.md 2.4 and 3.
    """
    drafted = config.draft.block_size if config.draft.num_blocks else 0
    ring_rows = _whole_rows(config.attention.sliding_window + drafted + 1)
    tail_rows = _whole_rows(drafted + 2)
    rings = ring_rows * config.num_layers * window_row_bytes(config)
    tails = tail_rows * _num_pairing_sources(config) * tail_row_bytes(config)
    return rings + tails + ring_rows * config.draft.num_blocks * draft_row_bytes(config)


def _whole_rows(rows: int) -> int:
    return math.ceil(rows / 8) * 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """Where a conversation's bytes lie.

    Attributes:
        page_bytes: One page of 128 tokens, with what the tier adds to it.
        sequence_bytes: What a sequence holds besides its pages, whatever its length.
    """

    name: str
    page_bytes: int
    sequence_bytes: int

    @property
    def bytes_per_token(self) -> float:
        return self.page_bytes / PAGE_TOKENS

    def total_bytes(self, tokens: int) -> int:
        """One sequence of `tokens` tokens, in whole pages."""
        return num_pages(tokens) * self.page_bytes + self.sequence_bytes


def tiers(config: ModelConfig) -> tuple[Tier, ...]:
    """Device (a running sequence), host (a parked one: pages and a snapshot), disk (pages alone).

    Source: serving.md 4.1; window rows never go to disk by default.
    """
    page = page_bytes(config)
    return (
        Tier(name="device", page_bytes=page, sequence_bytes=resident_bytes(config)),
        Tier(name="host", page_bytes=page, sequence_bytes=snapshot_bytes(config)),
        Tier(name="disk", page_bytes=disk_page_bytes(config), sequence_bytes=0),
    )
