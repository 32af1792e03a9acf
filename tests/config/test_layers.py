"""The layer table of the release, and the rules behind it on random schedules."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.config import presets
from cedar.config.layers import LayerKind, LayerPlan, layer_plans
from cedar.config.model import ModelConfig
from cedar.config.presets import _schedule

WINDOW, FULL, REINDEX, REUSE = LayerKind.WINDOW, LayerKind.FULL, LayerKind.REINDEX, LayerKind.REUSE


def test_flash_layer_table() -> None:
    """architecture.md 1.3, row by row."""
    plans = layer_plans(presets.flash())
    assert len(plans) == 40
    for layer in (0, 1):
        assert plans[layer].kind is WINDOW
        assert (plans[layer].ratio, plans[layer].kv_source, plans[layer].index_source) == (0, None, None)
    for source, last, ratio in ((2, 7, 2), (8, 13, 2), (14, 19, 2), (20, 23, 1)):
        assert plans[source].kind is FULL
        for plan in plans[source : last + 1]:
            assert (plan.ratio, plan.kv_source, plan.index_source) == (ratio, source, source)
            assert plan.kind is (FULL if plan.layer == source else REUSE)
            assert not plan.uses_pool
    for source in (24, 28, 32, 36):
        assert plans[source].kind is REINDEX
        for plan in plans[source : source + 4]:
            assert (plan.ratio, plan.kv_source, plan.index_source) == (1, 20, source)
            assert plan.kind is (REINDEX if plan.layer == source else REUSE)
            assert plan.uses_pool == (plan.layer == source)
    assert [plan.layer for plan in plans if plan.engram] == [1, 14]
    assert [plan.layer for plan in plans if plan.decoder] == list(range(20, 40))
    assert [plan.layer for plan in plans if plan.writes_entries] == [2, 8, 14, 20]
    assert [plan.layer for plan in plans if plan.selects] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert sum(plan.kind is REUSE for plan in plans) == 30


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("nano", "S S F2 U | F1 U R U"),
        ("micro", "S S F2 U U F2 | F1 U R U R U"),
        ("mini", "S S F2 U U F2 U U | F1 U R U R U R U"),
        ("small", "S S F2 U U F2 U U | F1 U R U R U R U"),
    ],
)
def test_presets_have_the_layout_they_were_chosen_with(name: str, layout: str) -> None:
    codes = {WINDOW: "S", REINDEX: "R", REUSE: "U"}
    plans = layer_plans(presets.preset(name))
    words = [codes.get(plan.kind, f"F{plan.ratio}") for plan in plans]
    border = next(plan.layer for plan in plans if plan.decoder)
    assert " ".join([*words[:border], "|", *words[border:]]) == layout


@st.composite
def schedules(draw: st.DrawFn) -> ModelConfig:
    """A nano with a random layout: windows, encoder groups at ratio 1 or 2, one decoder group."""
    words = ["S"] * draw(st.integers(0, 3))
    for _ in range(draw(st.integers(0, 3))):
        words += [f"F{draw(st.sampled_from([1, 2]))}", *draw(st.lists(st.sampled_from("RU"), max_size=3))]
    words += ["|", "F1", *draw(st.lists(st.sampled_from("RU"), max_size=6))]
    ratios, kv_sources, index_sources = _schedule(" ".join(words))
    nano = presets.nano()
    return dataclasses.replace(
        nano,
        num_layers=len(ratios),
        attention=dataclasses.replace(nano.attention, compress_ratios=ratios, kv_source_layer_ids=kv_sources),
        indexer=dataclasses.replace(
            nano.indexer, source_layer_ids=index_sources, candidate_source_layer_id=kv_sources[-1]
        ),
        engram=dataclasses.replace(nano.engram, layer_ids=()),
    )


@given(schedules())
def test_a_layer_reads_what_an_earlier_one_wrote(config: ModelConfig) -> None:
    plans = layer_plans(config)

    def source(plan: LayerPlan, layer: int | None) -> LayerPlan:
        assert layer is not None
        assert layer <= plan.layer
        return plans[layer]

    for plan in plans:
        assert plan.decoder == (plan.layer >= config.boundary_layer_id)
        if plan.kind is WINDOW:
            assert (plan.ratio, plan.kv_source, plan.index_source) == (0, None, None)
            continue
        written, selected = source(plan, plan.kv_source), source(plan, plan.index_source)
        assert written.writes_entries
        assert written.ratio == plan.ratio
        assert selected.selects
        # a selection is only good for the cache that it was made over
        assert selected.kv_source == plan.kv_source
        assert plan.selects == (selected is plan)
        assert plan.uses_pool == (plan.kind is REINDEX and plan.decoder)
