"""Each op against the golden data: hyper-connections, gate, selection, hash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cedar.kernels import engram, experts, indexer, mhc
from tests import golden

pytestmark = pytest.mark.device

VECTORS = Path(golden.VECTORS)


def _mixes(prefix: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    data = golden.load("mhc")
    return mhc.mix_coefficients(
        data["X"].float(),
        data[f"{prefix}fn"],
        data[f"{prefix}scale"],
        data[f"{prefix}base"],
        iterations=20,
        eps=1e-6,
        rms_eps=1e-20,
    )


@pytest.mark.parametrize(("prefix", "tolerance"), [("", 1e-6), ("steep.", 2e-6)])
def test_mix_coefficients(prefix: str, tolerance: float) -> None:
    data = golden.load("mhc")
    for name, got in zip("APC", _mixes(prefix), strict=True):
        torch.testing.assert_close(got, data[prefix + name], rtol=0, atol=tolerance)


def test_steep_case_tells_19_rounds_from_20() -> None:
    data = golden.load("mhc")
    _, _, short = mhc.mix_coefficients(
        data["X"].float(),
        data["steep.fn"],
        data["steep.scale"],
        data["steep.base"],
        iterations=19,
        eps=1e-6,
        rms_eps=1e-20,
    )
    assert (short - data["steep.C"]).abs().max() > 2e-6


def test_worked_mix_of_the_specification() -> None:
    """architecture.md 2.1: constants chosen so that every term shows; a transposed mixing gives other streams."""
    logits = torch.tensor([(-1) ** i * 0.1 * (i + 1) for i in range(24)])
    streams = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1)
    # a fn whose product with these streams, scaled by their rms, is exactly the logits wanted
    inverse_rms = streams.square().mean().rsqrt()
    fn = torch.zeros(24, 4)
    fn[:, 0] = logits / inverse_rms
    pre, post, mixing = mhc.mix_coefficients(
        streams, fn, torch.tensor([0.5, 1.0, 2.0]), torch.arange(24) * 0.01, iterations=20, eps=1e-6, rms_eps=1e-20
    )
    torch.testing.assert_close(pre[0], torch.tensor([0.512498, 0.477516, 0.542399, 0.457603]), rtol=0, atol=2e-6)
    torch.testing.assert_close(post[0], torch.tensor([1.263625, 0.731729, 1.362707, 0.650389]), rtol=0, atol=2e-6)
    torch.testing.assert_close(mixing[0, 1], torch.tensor([0.155335, 0.344718, 0.155335, 0.344611]), rtol=0, atol=2e-6)
    new = mhc.expand(torch.tensor([[10.0]]), streams, post, mixing)
    torch.testing.assert_close(new[0, :, 0], torch.tensor([15.8554, 9.0977, 16.8462, 8.2852]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_expand_and_collapse(mode: str) -> None:
    data = golden.load("mhc")
    dtype = golden.MODES[mode][0]
    streams, y = data["X"].to(dtype), data["y"].to(dtype)
    expanded = mhc.expand(y, streams, data["P"], data["C"])
    collapsed = mhc.collapse(streams, data["a_previous"])
    for got, want in ((expanded, data[f"expand.{mode}"]), (collapsed, data[f"collapse.{mode}"])):
        error, want = (got.float() - want.float()).abs(), want.float().abs()
        # float32: relative to the row, since sums of large terms cancel; bf16: one unit in the last place
        limit = 1e-6 * want.flatten(1).amax(1) if mode == "f32" else 2**-7 * want
        assert (error <= (limit.view(-1, *(1,) * (want.dim() - 1)) if mode == "f32" else limit)).all()


@pytest.mark.parametrize("case", ["small", "release"])
def test_route(case: str) -> None:
    data = {key.removeprefix(f"{case}."): value for key, value in golden.load("gate").items() if key.startswith(case)}
    ids, weights, _ = experts.route(
        data["u"].float(),
        data["image"],
        data["weight"].float(),
        data["bias"],
        data["bias_vl"],
        data["ids"].shape[1],
        float(data["scaling"]),
    )
    assert torch.equal(ids, data["ids"])
    torch.testing.assert_close(weights, data["weights"], rtol=0, atol=1e-5)


def test_route_gives_ties_to_the_lower_expert() -> None:
    data = golden.load("gate")
    logits, num_experts = data["ties.logits"], data["ties.logits"].shape[1]
    zero = torch.zeros(num_experts)
    ids, weights, _ = experts.route(logits, None, torch.eye(num_experts), zero, zero, 3, 1.5)
    assert torch.equal(ids, data["ties.ids"])
    torch.testing.assert_close(weights, data["ties.weights"], rtol=0, atol=1e-5)


def test_route_of_the_specification() -> None:
    """architecture.md 5: the bias chooses, the unbiased score weighs."""
    ids, weights, _ = experts.route(
        torch.tensor([[0.0, 1.0, -1.0, 2.0]]),
        None,
        torch.eye(4),
        torch.tensor([0.5, 0, 0, -0.6]),
        torch.zeros(4),
        2,
        1.5,
    )
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.631192, 0.868808]]), rtol=0, atol=2e-6)


def test_bias_changes_selection_and_never_weight() -> None:
    """Field reports A13 and A14: a shift of all biases, or of a chosen one, changes nothing."""
    torch.manual_seed(0)
    u, weight, bias = torch.randn(64, 16), torch.randn(8, 16), torch.randn(8)
    ids, weights, _ = experts.route(u, None, weight, bias, bias, 3, 1.5)
    for shift in (-5.0, 7.0):
        shifted_ids, shifted_weights, _ = experts.route(u, None, weight, bias + shift, bias, 3, 1.5)
        assert torch.equal(ids, shifted_ids)
        assert torch.equal(weights, shifted_weights)


def _cases() -> list[dict[str, int]]:
    with safe_open(VECTORS / "indexer.safetensors", "pt") as file:
        return json.loads(file.metadata()["cases"])


@pytest.mark.parametrize("case", _cases(), ids=lambda case: f"{case['case']}-{case['kind']}")
def test_selection_from_given_scores(case: dict[str, int]) -> None:
    data = golden.load("indexer")
    prefix = f"select.{case['case']}."
    scores, visible = data[prefix + "scores"], data[prefix + "visible"]
    entry = torch.arange(scores.shape[1])
    hidden = entry >= visible.unsqueeze(-1)
    scores = scores.masked_fill(hidden, -torch.inf)
    k = case["topk"]
    assert torch.equal(indexer.mask_to_index(indexer.topk_mask(scores, k), k), data[prefix + "topk"])
    blocks = indexer.candidate_blocks(scores, visible, block_size=case["block_size"], topk_blocks=case["keep_blocks"])
    assert torch.equal(indexer.mask_to_index(blocks, case["keep_blocks"]), data[prefix + "blocks"])
    member = blocks.repeat_interleave(case["block_size"], dim=1)[:, : scores.shape[1]]
    inside = scores.masked_fill(~member, -torch.inf)
    assert torch.equal(indexer.mask_to_index(indexer.topk_mask(inside, k), k), data[prefix + "restricted"])


@pytest.mark.parametrize("num_visible", range(1, 41))
def test_pool_keeps_every_visible_member_and_none_beyond(num_visible: int) -> None:
    """Field report A19, against a brute-force set."""
    torch.manual_seed(num_visible)
    scores = torch.randn(1, 40).masked_fill(torch.arange(40) >= num_visible, -torch.inf)
    got = indexer.candidate_blocks(scores, torch.tensor([num_visible]), block_size=8, topk_blocks=2)[0]
    best = {b: max(scores[0, 8 * b : 8 * b + 8].tolist()) for b in range((num_visible + 7) // 8)}
    newest = (num_visible - 1) // 8
    ranked = sorted(best, key=lambda b: (b != newest, -best[b], b))
    assert {b for b in range(5) if got[b]} == set(ranked[:2])


@pytest.mark.parametrize("case", ["a", "b", "release"])
def test_engram_rows(case: str) -> None:
    data = golden.load("engram")
    layers = sorted({key.split(".")[2] for key in data if key.startswith(f"{case}.layers") and key.endswith(".rows")})
    if case == "release":
        compressed = data["release.compressed_ids"]
        dead = data["release.image"]
        pad = 2
    else:
        token_map = data[f"{case}.token_map"]
        compressed, dead, pad = token_map[data[f"{case}.ids"]], data[f"{case}.image"], int(token_map[2])
    num_lookbacks = data[f"{case}.layers.{layers[0]}.multipliers"].shape[0]
    lookback = torch.full((compressed.shape[0], num_lookbacks), pad)
    for row in range(compressed.shape[0]):
        for back in range(num_lookbacks):
            if row - back < 0 or dead[row - back]:
                break
            lookback[row, back] = compressed[row - back]
    for layer in layers:
        constants = [data[f"{case}.layers.{layer}.{name}"] for name in ("multipliers", "primes", "offsets")]
        assert torch.equal(engram.engram_rows(lookback, *constants), data[f"{case}.layers.{layer}.rows"])


def test_engram_gate_of_the_specification() -> None:
    """engram-dspark-vision-chat.md 1.6: the sign, the root and its clamp."""
    key = torch.tensor([[[1.0, -1.0, 2.0, 0.5]]])
    key_weight = torch.tensor([[1.0, 0.5, 2.0, 1.0]])
    for stream, want in (([1.0, 2, 3, 4], 0.8069), ([-1.0, -2, -3, -4], 0.1931), ([0.0, 0, 0, 0], 0.50025)):
        before = torch.tensor([[stream]])
        after = engram.engram_gate(
            before, key, torch.ones(1, 4), torch.tensor([False]), torch.ones(1, 4), key_weight, 1e-20
        )
        torch.testing.assert_close(after - before, torch.full((1, 1, 4), want), rtol=0, atol=5e-5)
    untouched = engram.engram_gate(
        before, key, torch.ones(1, 4), torch.tensor([True]), torch.ones(1, 4), key_weight, 1e-20
    )
    assert torch.equal(untouched, before)
