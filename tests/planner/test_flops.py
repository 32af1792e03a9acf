"""Operations of a token: the release's table, and closed sums against counting row by row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.config import presets
from cedar.config.load import override
from cedar.errors import CapacityError, ConfigError
from cedar.planner import flops
from cedar.planner.peers import v1, v3_2, v4_flash

CONTEXTS = (2**12, 2**14, 2**16, 2**18, 2**20)


# architecture.md 8; its sums were rounded by component, so the last digit may differ by one
@pytest.mark.parametrize(
    ("weighting", "expected", "ratio"),
    [
        (flops.COUNTED, (35.7, 36.4, 37.4, 41.4, 57.5), 1.61),
        (flops.PRECISION, (21.6, 21.7, 22.0, 23.0, 27.0), 1.25),
        (flops.OUTPUT_FP8, (20.2, 20.4, 20.6, 21.6, 25.7), 1.27),
        (flops.ROUTED_FP4, (17.3, 17.5, 17.7, 18.7, 22.8), 1.31),
    ],
)
def test_decode_table(weighting: flops.Weighting, expected: tuple[float, ...], ratio: float) -> None:
    flash = presets.flash()
    got = [flops.weighted(flops.decode_flops(flash, context), weighting) / 1e9 for context in CONTEXTS]
    assert got == pytest.approx(list(expected), abs=0.06)
    assert got[-1] / got[0] == pytest.approx(ratio, abs=0.006)


def test_decode_grows_by_a_quarter() -> None:
    assert flops.decode_growth(presets.flash()) == pytest.approx(0.25, abs=0.005)


def test_decode_components() -> None:
    counts = flops.decode_flops(presets.flash(), 2**20)
    expected = {
        "routed experts": 16.99,
        "shared expert": 2.83,
        "attention projections": 7.45,
        "grouped output": 2.68,
        "engram projection": 0.63,
        "head": 1.32,
        "small projections": 0.20,
        "mhc": 0.08,
        "index queries": 0.08,
        "attention core": 3.22,
        "index scores": 22.0,
    }
    assert counts.keys() == expected.keys()
    for component, value in expected.items():
        assert counts[component] / 1e9 == pytest.approx(value, abs=0.012), component


@given(st.sampled_from(["nano", "mini", "flash"]), st.integers(1, 400_000), st.integers(0, 5000))
def test_decode_never_gets_cheaper(name: str, context: int, more: int) -> None:
    config = presets.preset(name)
    short, long = flops.decode_flops(config, context), flops.decode_flops(config, context + more)
    assert all(long[component] >= count for component, count in short.items())


@given(st.integers(0, 300), st.sampled_from([1, 2, 4]), st.integers(1, 40))
def test_closed_sum_equals_counting(rows: int, ratio: int, cap: int) -> None:
    assert flops._capped_sum(rows, ratio, cap) == sum(min(p // ratio, cap) for p in range(1, rows + 1))


@pytest.mark.parametrize("prompt", [1, 2, 15, 16, 17, 33, 100])
def test_a_prompt_without_replay_costs_its_rows(prompt: int) -> None:
    nano = presets.nano()
    whole = flops.prefill_flops(nano, prompt, "off")
    rows = [flops.decode_flops(nano, context) for context in range(1, prompt + 1)]
    for component, count in whole.items():
        # the head runs on the last row alone, and the producer is part of the boundary layer
        expected = rows[-1]["head"] if component == "head" else sum(row.get(component, 0) for row in rows)
        assert count == pytest.approx(expected), component


def test_rows_of_each_replay() -> None:
    flash = presets.flash()
    bounded, exact, off = (flops.layer_rows(flash, 100_000, replay) for replay in ("bounded", "exact", "off"))
    assert bounded == (100_000,) * 20 + (128,) * 20
    assert off == (100_000,) * 40
    # serving.md 1.2: 2,414 rows leave the boundary layer, 26,563 row-layers in all
    assert exact[20:22] == (2414, 2414)
    assert exact[39] == 128
    assert sum(exact[20:]) == 26_563
    assert flops.layer_rows(flash, 100, "exact") == (100,) * 40


def test_bounded_prefill_costs_half_of_decoding_every_token() -> None:
    flash = presets.flash()
    bounded = sum(flops.prefill_flops(flash, 2**17).values())
    full = sum(flops.prefill_flops(flash, 2**17, "off").values())
    assert 0.48 < bounded / full < 0.52


def test_training_is_three_passes_over_all_layers() -> None:
    nano = presets.nano()
    rows = [sum(flops.decode_flops(nano, context).values()) for context in range(1, 65)]
    assert sum(flops.training_flops(nano, 64).values()) == pytest.approx(3 * sum(rows) / 64)


def test_the_pool_caps_what_reindex_layers_score() -> None:
    nano = presets.nano()
    unlimited = override(nano, ["indexer.candidate_topk_blocks=4096"])
    assert flops.decode_flops(nano, 32) == flops.decode_flops(unlimited, 32)
    assert flops.decode_flops(nano, 64)["index scores"] < flops.decode_flops(unlimited, 64)["index scores"]


def test_peers_have_the_size_that_their_makers_name() -> None:
    # without context, a token costs two operations per active parameter; FP8 counts one half
    assert v1().decode_flops(1) / 2e9 == pytest.approx(66.6, abs=0.2)
    assert v3_2().decode_flops(1) / 1e9 == pytest.approx(37, rel=0.06)
    assert v4_flash().decode_flops(1) / 1e9 == pytest.approx(13 + 2.4, rel=0.15)
    # V4.1's decode is the cheapest of the four at 1M and nearly flat
    ours = flops.weighted(flops.decode_flops(presets.flash(), 2**20), flops.PRECISION)
    assert ours < min(peer.decode_flops(2**20) for peer in (v1(), v3_2(), v4_flash()))


def test_impossible_lengths_are_refused() -> None:
    nano = presets.nano()
    with pytest.raises(CapacityError, match="context of 0"):
        flops.decode_flops(nano, 0)
    with pytest.raises(CapacityError, match="prompt of -1"):
        flops.prefill_flops(nano, -1)
    with pytest.raises(CapacityError, match="sequence of 0"):
        flops.training_flops(nano, 0)
    with pytest.raises(ConfigError, match="bounded, exact or off"):
        flops.layer_rows(nano, 5, "bonded")  # type: ignore[arg-type]
