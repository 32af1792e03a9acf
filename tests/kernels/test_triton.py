"""Triton kernels against the references, value and gradient: interpreted at odd sizes here, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8, FormatSpec
from cedar.kernels.reference import attention as reference_attention
from cedar.kernels.reference import dense as reference_dense
from cedar.kernels.reference import indexer as reference_indexer
from cedar.kernels.reference import mhc as reference_mhc
from cedar.kernels.reference import quantize as reference_quantize

pytest.importorskip("triton")
from cedar.kernels.triton import dense, masked_attention, masked_indexer, mhc, quantize
from cedar.kernels.triton.device import INTERPRETED

# the interpreter has no bfloat16 products, so that dtype is a GPU's
CPU = pytest.param("cpu", torch.float32, id="interpreted", marks=pytest.mark.skipif(not INTERPRETED, reason="compiled"))
GPU = [
    pytest.param("cuda", torch.float32, id="gpu-float32", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, id="gpu-bfloat16", marks=pytest.mark.gpu),
]
# largest difference over the largest value: sums in another order, and one rounding more in bfloat16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
on_devices = pytest.mark.parametrize("device, dtype", [CPU, *GPU])


def same(
    run: Callable[..., Any], reference: Callable[..., Any], inputs: list[Tensor], dtype: torch.dtype, *rest: Any
) -> None:
    """Outputs and input gradients agree, for random gradients of every output."""
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.clone().requires_grad_() for x in inputs]
    got, expected = run(*ours, *rest), reference(*theirs, *rest)
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    weights = [torch.randn_like(x.float()) for x in expected]
    for outputs in (got, expected):
        sum((x.float() * weight).sum() for x, weight in zip(outputs, weights, strict=True)).backward()  # type: ignore[union-attr]
    pairs = [*zip(got, expected, strict=True), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))]
    for number, (value, wanted) in enumerate(pairs):
        assert value.dtype == wanted.dtype and value.shape == wanted.shape
        error = (value.float() - wanted.float()).abs().max().item()
        assert error <= TOLERANCE[dtype] * max(1.0, wanted.float().abs().max().item()), number


def rand(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


@on_devices
@pytest.mark.parametrize("rows, channels, iterations", [(1, 32, 1), (70, 48, 8), (131, 160, 20)])
def test_mix_coefficients(device: str, dtype: torch.dtype, rows: int, channels: int, iterations: int) -> None:
    streams = rand(device, dtype, rows, 4, channels)
    fn, base = rand(device, torch.float32, 24, 4 * channels) * 0.1, rand(device, torch.float32, 24)
    scale = torch.tensor([1.0, 0.7, 1.3], device=device)
    run, reference = mhc.mix_coefficients, reference_mhc.mix_coefficients
    same(run, reference, [streams, fn, scale, base], dtype, iterations, 1e-6, 1e-20)


@on_devices
@pytest.mark.parametrize("rows, channels", [(1, 32), (33, 160), (70, 48)])
def test_collapse_and_expand(device: str, dtype: torch.dtype, rows: int, channels: int) -> None:
    streams, y = rand(device, dtype, rows, 4, channels), rand(device, dtype, rows, channels)
    mix, mixing = torch.rand(rows, 4, device=device), torch.rand(rows, 4, 4, device=device)
    same(mhc.collapse, reference_mhc.collapse, [streams, mix], dtype)
    same(mhc.expand, reference_mhc.expand, [y, streams, mix, mixing], dtype)


@on_devices
def test_norm_rotation_and_swiglu(device: str, dtype: torch.dtype) -> None:
    gain = rand(device, torch.float32, 48)
    for scale in (1.0, 1e-11):
        # field report A01: activations near 1e-11; their gradient is as much larger, so it is not compared
        x = rand(device, dtype, 37, 48) * scale
        got, wanted = dense.rms_norm(x, gain, 1e-20), reference_dense.rms_norm(x, gain, 1e-20)
        assert (got - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()
    same(dense.rms_norm, reference_dense.rms_norm, [rand(device, dtype, 37, 48), gain], dtype, 1e-20)
    cos, sin = rand(device, torch.float32, 13, 4), rand(device, torch.float32, 13, 4)
    same(
        lambda x: dense.rotate(x, cos, sin),
        lambda x: reference_dense.rotate(x, cos, sin),
        [rand(device, dtype, 13, 3, 24)],
        dtype,
    )
    gate, up = 3 * rand(device, dtype, 37, 48), 3 * rand(device, dtype, 37, 48)
    same(dense.swiglu, reference_dense.swiglu, [gate, up], dtype, 2.0)


@on_devices
@pytest.mark.parametrize("spec", [FP8, FP4_MAIN, FP4_INDEX], ids=["fp8", "fp4_main", "fp4_index"])
def test_round_rows_is_exact_and_lets_the_gradient_through(device: str, dtype: torch.dtype, spec: FormatSpec) -> None:
    x = rand(device, dtype, 50, 96) * torch.logspace(-9, 3, 50, device=device).unsqueeze(1).to(dtype)
    x[3], x[4, 5], x[7, 40] = 0, float("nan"), float("inf")
    x[9] *= 1e-30
    got, wanted = quantize.round_rows(x, spec), reference_quantize.round_rows(x, spec)
    assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.nan_to_num(), wanted.nan_to_num())
    x = rand(device, dtype, 2, 32).requires_grad_()
    quantize.round_rows(x, spec).backward(torch.full_like(x, 1e-6))
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 1e-6))


def packs(device: str, rows: int, ratio: int) -> tuple[Tensor, Tensor]:
    """(first row of each row's sample, a random selection of its visible entries) of two packs of two samples."""
    start = torch.zeros(2, rows, dtype=torch.long, device=device)
    start[:, 40:] = 40
    entry, row = torch.arange(rows // ratio, device=device), torch.arange(rows, device=device)
    visible = ((entry + 1) * ratio <= row[:, None] + 1) & (entry * ratio >= start[..., None])
    return start, visible & (torch.rand(visible.shape, device=device) < 0.3)


@on_devices
@pytest.mark.parametrize("rows, heads, channels, window, ratio", [(70, 4, 32, 16, 2), (90, 3, 16, 7, 1)])
def test_masked_attention(
    device: str, dtype: torch.dtype, rows: int, heads: int, channels: int, window: int, ratio: int
) -> None:
    start, visible = packs(device, rows, ratio)
    query, keys = rand(device, dtype, 2, rows, heads, channels), rand(device, dtype, 2, rows, channels)
    entries, sink = rand(device, dtype, 2, rows // ratio, channels), rand(device, torch.float32, heads)

    def near(module: Any) -> Callable[..., Any]:
        return lambda q, w, s: module.masked_attention(q, w, start, None, None, s, window)[0]

    def far(module: Any) -> Callable[..., Any]:
        return lambda q, w, e, s: module.masked_attention(q, w, start, e, visible, s, window)[0]

    same(near(masked_attention), near(reference_attention), [query, keys, sink], dtype)
    same(far(masked_attention), far(reference_attention), [query, keys, entries, sink], dtype)
    got = masked_attention.masked_attention(query, keys, start, entries, visible, sink, window)[1]
    wanted = reference_attention.masked_attention(query, keys, start, entries, visible, sink, window)[1]
    assert got is not None and wanted is not None
    assert (got - wanted).abs().max() <= TOLERANCE[dtype] * wanted.max()
    assert (got[~visible] == 0).all()


@on_devices
@pytest.mark.parametrize("rows, heads, channels, entries", [(70, 4, 32, 35), (90, 3, 16, 130)])
def test_masked_index_scores(
    device: str, dtype: torch.dtype, rows: int, heads: int, channels: int, entries: int
) -> None:
    inputs = [
        rand(device, dtype, 2, rows, heads, channels),
        rand(device, dtype, 2, rows, heads),
        rand(device, dtype, 2, entries, channels),
    ]
    same(masked_indexer.masked_index_scores, reference_indexer.masked_index_scores, inputs, dtype)
    one = [x[1].clone() for x in inputs]
    same(masked_indexer.index_scores, reference_indexer.index_scores, one, dtype)


@on_devices
@pytest.mark.parametrize("rows, scores, k", [(5, 9, 3), (70, 130, 16), (3, 2049, 512)])
def test_topk_mask_is_exact(device: str, dtype: torch.dtype, rows: int, scores: int, k: int) -> None:
    # few different values, so that ties cross the cut; both zeros; rows with fewer scores than k
    score = torch.randint(-3, 4, (rows, scores), device=device).float() * 0.5
    score[0, ::2] = -0.0
    score[1, 2:] = -torch.inf
    score[2] = -torch.inf
    for values in (score, torch.randn(rows, scores, device=device)):
        assert torch.equal(masked_indexer.topk_mask(values, k), reference_indexer.topk_mask(values, k))


@on_devices
def test_index_divergence(device: str, dtype: torch.dtype) -> None:
    score = torch.randn(37, 70, device=device)
    mass = torch.rand(37, 70, device=device) * (torch.rand(37, 70, device=device) < 0.5)
    unsupported = torch.rand(37, 70, device=device) < 0.4
    unsupported[3], mass[5], mass[6] = True, 0.0, 1e-7
    score = score.masked_fill(unsupported, -torch.inf)
    run, reference = masked_indexer.index_divergence, reference_indexer.index_divergence
    assert torch.equal(run(score, mass)[1], reference(score, mass)[1])
    same(lambda s: run(s, mass)[0], lambda s: reference(s, mass)[0], [score], torch.float32)
