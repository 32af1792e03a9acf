"""Memory to sequences and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.config import presets
from cedar.errors import CapacityError, ConfigError
from cedar.planner import fit, kv


@given(st.sampled_from(["nano", "micro", "mini", "small"]), st.integers(1, 5000), st.integers(1, 50))
def test_what_is_needed_fits_and_one_byte_less_does_not(name: str, context: int, sequences: int) -> None:
    config = presets.preset(name)
    for form, needed in fit.memory_needed(config, context=context, sequences=sequences).items():
        for memory_bytes, expected in ((needed, sequences), (needed - 1, sequences - 1)):
            rows = fit.fit(config, memory_bytes, [context])
            row = next(row for row in rows if row.form == form and row.engram_tables)
            assert row.sequences == {context: expected}


def test_mapped_tables_leave_their_room_to_the_cache() -> None:
    flash = presets.flash()
    held, mapped = fit.fit(flash, 600 * 10**9, [2**20])[:2]
    assert held.engram_tables == 202_758_032_400
    assert mapped.engram_tables == 0
    assert mapped.left - held.left == held.engram_tables
    assert mapped.sequences[2**20] > held.sequences[2**20] > 100
    assert held.tokens == held.pages * 128
    assert held.left - held.pages * kv.page_bytes(flash) < kv.page_bytes(flash)


def test_too_little_memory_says_how_much_is_missing() -> None:
    row = fit.fit(presets.flash(), 80 * 2**30, [4096])[0]
    assert row.pages == 0
    assert row.sequences == {4096: 0}
    assert row.missing == row.weights + row.engram_tables + row.activations - 80 * 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("1024", 1024), ("24GiB", 24 * 2**30), ("24 GB", 24 * 10**9), ("1.5t", 1_500_000_000_000), ("2k", 2000)],
)
def test_parse_bytes(text: str, expected: int) -> None:
    assert fit.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "24 parsecs", "1e9", "nan"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="24GiB"):
        fit.parse_bytes(text)


@pytest.mark.parametrize(("text", "expected"), [("4096", 4096), ("64K", 65536), ("1m", 2**20), (" 7 ", 7)])
def test_parse_tokens(text: str, expected: int) -> None:
    assert fit.parse_tokens(text) == expected


@pytest.mark.parametrize("text", ["0", "-4", "4.5K", "many", "", "4G"])
def test_parse_tokens_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="64K"):
        fit.parse_tokens(text)


def test_no_memory_and_no_context_are_refused() -> None:
    with pytest.raises(CapacityError, match="0 bytes"):
        fit.fit(presets.nano(), 0, [128])
    with pytest.raises(CapacityError, match="context of 0"):
        fit.sequence_bytes(presets.nano(), 0)
