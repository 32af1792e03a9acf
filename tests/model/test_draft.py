"""The draft model: golden rounds, and what a round may not depend on."""

from __future__ import annotations

import pytest
import torch

from cedar.checkpoint.read import read_draft
from cedar.model.draft import Draft
from tests import golden

pytestmark = pytest.mark.device


def _draft(mode: str) -> Draft:
    draft = read_draft(golden.VECTORS / "ckpt_a", golden.model("a", mode))
    assert draft is not None
    return draft


@pytest.mark.parametrize("mode", ["f32_noquant", "f32", "bf16"])
def test_golden_taps(mode: str) -> None:
    """The streams' plain mean at the entry of the target layers, not one layer later."""
    model = golden.model("a", mode)
    for num_tokens in (3, 8, 30):
        with torch.inference_mode():
            taps_BSX = model(
                golden.load("dspark")[f"n{num_tokens}.ids"].unsqueeze(0), form="gathered", tap=True
            ).taps_BSX
        assert taps_BSX is not None
        want = golden.load("dspark")[f"n{num_tokens}.{mode}.taps"].transpose(0, 1).flatten(1)
        # the stored taps are bfloat16, so a float32 model's differ by their rounding
        assert golden.relative_rms(taps_BSX[0].to(torch.bfloat16), want) <= (3e-3 if mode == "f32_noquant" else 0.1)


@pytest.mark.parametrize("num_tokens", [3, 8, 30])
@pytest.mark.parametrize("mode", ["f32_noquant", "f32", "bf16"])
def test_golden_round(mode: str, num_tokens: int) -> None:
    draft = _draft(mode)
    rounding, dtype = golden.MODES[mode][1], golden.MODES[mode][0]
    data = golden.load("dspark")
    want = {name: data[f"n{num_tokens}.{mode}.{name}"] for name in ("context", "hidden", "base_logits", "logits")}
    window = draft.config.attention.sliding_window
    taps_LTD = data[f"n{num_tokens}.{mode}.taps"].to(dtype)
    first = max(0, num_tokens - window)
    taps_TX = taps_LTD[:, first:].transpose(0, 1).flatten(1)
    with torch.inference_mode():
        context_TX = draft.context_rows(taps_TX, torch.arange(first, num_tokens), rounding)
        anchor_A = data[f"n{num_tokens}.{mode}.token"].reshape(1)
        visible_AW = torch.ones(1, num_tokens - first, dtype=torch.bool)
        proposal = draft(anchor_A, torch.tensor([num_tokens]), context_TX.unsqueeze(0), visible_AW, rounding)
        tokens_AG, logits_AGV, confidence_AG = draft.greedy(anchor_A, proposal, rounding)
    got = {
        "context": context_TX.unflatten(-1, (3, -1)).transpose(0, 1),
        "hidden": proposal.hidden_AGD[0],
        "base_logits": proposal.base_AGV[0],
        "logits": logits_AGV[0],
    }
    for name, value in got.items():
        if mode == "f32_noquant":
            assert (value - want[name]).abs().max() <= 1e-4, name
        else:
            assert golden.rms(value, want[name]) <= 0.1, name
    confidence = torch.sigmoid(confidence_AG[0])
    assert (confidence - data[f"n{num_tokens}.{mode}.confidence"]).abs().max() <= (
        1e-4 if mode == "f32_noquant" else 0.1
    )
    if mode == "f32_noquant":
        assert tokens_AG[0].tolist() == data[f"n{num_tokens}.{mode}.tokens"].tolist()
