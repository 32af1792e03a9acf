"""Where each vector lies inside a page: the one record that memory, disk and the planner share. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from cedar.config.layers import layer_plans
from cedar.config.model import PAGE_TOKENS, ModelConfig
from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FormatSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """Codes or scales of one KV source's entries or index keys, for all tokens of a page, row after row.

    Attributes:
        offset: First byte inside the page.
        num_rows: Entries of 128 tokens at the source's ratio.
        row_bytes: Bytes of one vector's codes, or of its scales.
    """

    offset: int
    num_rows: int
    row_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Entries or index keys of one KV source: two fields and how to read them."""

    codes: Field
    scales: Field
    channels: int
    spec: FormatSpec


class PageLayout:
    """Fields of a page of 128 tokens, of all KV sources together.

    Attributes:
        rows: Entries and index keys by (what, KV source).
        ratios: Tokens of an entry, by KV source.
        sections: Bytes of all that one KV source has in a page, by source, in the order they lie there.

    Source: serving.md 3.

    >>> from cedar.config.presets import flash
    >>> PageLayout(flash()).page_bytes
    113920
    """

    def __init__(self, config: ModelConfig) -> None:
        self.rows: dict[tuple[str, int], Rows] = {}
        self.ratios: dict[int, int] = {}
        self.sections: dict[int, int] = {}
        offset = 0
        for plan in layer_plans(config):
            if not plan.writes_entries:
                continue
            self.ratios[plan.layer] = plan.ratio
            num_rows, start = PAGE_TOKENS // plan.ratio, offset
            for what, channels, spec in (
                ("entries", config.attention.head_dim, FP4_MAIN),
                ("keys", config.indexer.head_dim, FP4_INDEX),
            ):
                codes = Field(offset=offset, num_rows=num_rows, row_bytes=channels * spec.element_bits // 8)
                offset += num_rows * codes.row_bytes
                scales = Field(offset=offset, num_rows=num_rows, row_bytes=channels // spec.group)
                offset += num_rows * scales.row_bytes
                self.rows[what, plan.layer] = Rows(codes=codes, scales=scales, channels=channels, spec=spec)
            self.sections[plan.layer] = offset - start
        self.page_bytes = offset

    def fields(self, source: int | None = None) -> list[Field]:
        """The fields of one KV source, or of all, as they follow each other."""
        return [
            field
            for (_, owner), rows in self.rows.items()
            if source in (None, owner)
            for field in (rows.codes, rows.scales)
        ]
