"""Every backend of every op against the reference: values at odd sizes, poisoned outputs, forced choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cedar.errors import KernelUnavailable, ShapeError
from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8
from cedar.kernels import attention, dense, dispatch, experts, indexer, mhc, quantize
from cedar.kernels.dispatch import BACKENDS, deterministic, explain, select, use_kernels


def backends(op: str, device: str = "cpu") -> list[str]:
    """Backends beside the reference that can run `op` here."""
    return [b for b in BACKENDS[op] if b != "reference" and b in {name for _, name, _ in _can(op, device)}]


def _can(op: str, device: str) -> list[tuple[str, str, str]]:
    return [row for row in explain(device) if row[0] == op]


def _mix(rows: int) -> Callable[[], Any]:
    streams, fn = torch.randn(rows, 4, 40), torch.randn(24, 160) * 0.1
    scale, base = torch.tensor([0.5, 1.0, 2.0]), torch.randn(24)
    return lambda: mhc.mix_coefficients(streams, fn, scale, base, iterations=20, eps=1e-6, rms_eps=1e-20)


def _collapse(rows: int) -> Callable[[], Any]:
    streams, premix = torch.randn(rows, 4, 40), torch.rand(rows, 4)
    return lambda: mhc.collapse(streams, premix)


def _expand(rows: int) -> Callable[[], Any]:
    # not symmetric: a transposed mixing must show
    y, streams, post, mixing = (
        torch.randn(rows, 40),
        torch.randn(rows, 4, 40),
        torch.rand(rows, 4),
        torch.rand(rows, 4, 4),
    )
    return lambda: mhc.expand(y, streams, post, mixing)


def _norm(rows: int) -> Callable[[], Any]:
    # field report A01: activations near 1e-11, where only an epsilon of 1e-20 leaves them as they are
    x, gain = torch.randn(rows, 96) * 1e-11, torch.randn(96)
    return lambda: dense.rms_norm(x, gain, 1e-20)


def _linear(rows: int) -> Callable[[], Any]:
    x, weight = torch.randn(rows, 96), torch.randn(33, 96)
    return lambda: dense.linear(x, weight)


def _rotate(rows: int) -> Callable[[], Any]:
    x, angle = torch.randn(rows, 3, 32), torch.randn(rows, 6) * 100
    return lambda: dense.rotate(x, angle.cos(), angle.sin())


def _swiglu(rows: int) -> Callable[[], Any]:
    gate, up = torch.randn(rows, 32) * 20, torch.randn(rows, 32) * 20
    return lambda: dense.swiglu(gate, up, 10.0)


def _attention(rows: int) -> Callable[[], Any]:
    query, window, entries = torch.randn(rows, 4, 32) * 3, torch.randn(rows, 7, 32), torch.randn(rows, 5, 32)
    seen, present = torch.rand(rows, 7) < 0.7, torch.rand(rows, 5) < 0.5
    # a row that sees nothing at all gives zeros
    seen[0], present[0] = False, False
    sink = torch.randn(4)
    return lambda: attention.attention(query, window, seen, entries, present, sink)


def _route(rows: int) -> Callable[[], Any]:
    u, weight = torch.randn(rows, 32), torch.randn(8, 32)
    # two experts with equal rows tie everywhere
    weight[5] = weight[2]
    image, bias, image_bias = torch.rand(rows) < 0.3, torch.zeros(8), torch.randn(8)
    return lambda: experts.route(u, image, weight, bias, image_bias, 3, 1.5)


def _experts(rows: int) -> Callable[[], Any]:
    u, weights = torch.randn(rows, 32), torch.rand(rows, 3)
    ids = torch.stack([torch.randperm(8)[:3].sort().values for _ in range(rows)])
    w1, w3, w2 = torch.randn(8, 64, 32), torch.randn(8, 64, 32), torch.randn(8, 32, 64)
    return lambda: experts.experts(u, ids, weights, w1, w3, w2, limit=2.0, round_inner=False)


# the most rows that a compiled op takes; deterministic mode's blocks are larger, so they never mix backends
LIMITS = {"experts": 4, "linear": 2}


def _index_scores(rows: int) -> Callable[[], Any]:
    query, u, keys = torch.randn(rows, 5, 32), torch.randn(rows, 5), torch.randn(300, 32)
    return lambda: indexer.index_scores(query, u, keys)


def _gathered_index_scores(rows: int) -> Callable[[], Any]:
    query, u, entries = torch.randn(rows, 5, 32), torch.randn(rows, 5), torch.randn(rows, 90, 32)
    return lambda: indexer.gathered_index_scores(query, u, entries)


def _top_entries(rows: int) -> Callable[[], Any]:
    # every third value again, so that ties decide
    x = torch.randint(0, 40, (rows, 200)).float()
    return lambda: indexer.top_entries(x, 9)


CASES: dict[str, Callable[[int], Callable[[], Any]]] = {
    "mix_coefficients": _mix,
    "collapse": _collapse,
    "expand": _expand,
    "rms_norm": _norm,
    "linear": _linear,
    "rotate": _rotate,
    "swiglu": _swiglu,
    "attention": _attention,
    "route": _route,
    "experts": _experts,
    "index_scores": _index_scores,
    "gathered_index_scores": _gathered_index_scores,
    "top_entries": _top_entries,
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("entries", "heads", "channels"), [(1, 1, 32), (63, 3, 32), (65, 8, 32), (3000, 5, 96)])
def test_index_scores_of_a_long_prompt(entries: int, heads: int, channels: int, threads: int) -> None:
    """Any number of entries; the bits of one do not depend on how many there are, nor on who shares the rows."""
    query, weight, keys = torch.randn(130, heads, channels), torch.randn(130, heads), torch.randn(entries, channels)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = indexer.index_scores(query, weight, keys)
    finally:
        torch.set_num_threads(before)
    with use_kernels("reference"):
        want = indexer.index_scores(query, weight, keys)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * channels**0.5)
    if backends("index_scores"):
        assert torch.equal(indexer.index_scores(query[7:8], weight[7:8], keys), got[7:8])
        assert torch.equal(indexer.index_scores(query, weight, keys[: entries // 2]), got[:, : entries // 2])
        # a row that gathers its keys gets the same bits
        own = keys.expand(3, -1, -1)
        assert torch.equal(indexer.gathered_index_scores(query[:3], weight[:3], own), got[:3])


@pytest.mark.parametrize("k", [1, 7, 64, 5000])
def test_the_largest_scores_are_the_same_ones(k: int) -> None:
    """Ties to the lower column, zeros of both signs equal, -inf never, and rows with too few."""
    score = torch.randn(40, 3000)
    score[:10] = torch.randint(-3, 3, (10, 3000)).float()
    score[5, ::3] *= -0.0
    score[10:20] = score[10:20].masked_fill(torch.rand(10, 3000) < 0.99, -torch.inf)
    score[20] = -torch.inf
    score[21] = 1e-40 * torch.arange(3000)
    score[22, 100:], score[23, 7] = -torch.inf, torch.inf
    for rows in (score, score[:, :50], score[:, 1:70]):
        with use_kernels("reference"):
            want = indexer.top_entries(rows, k)
        assert torch.equal(indexer.top_entries(rows, k), want)


def _as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("rows", [1, 2, 15, 64])
@pytest.mark.parametrize(("op", "backend"), [(op, b) for op in CASES for b in backends(op)])
def test_backend_equals_reference(op: str, backend: str, rows: int) -> None:
    call = CASES[op](min(rows, LIMITS.get(op, rows)))
    with use_kernels("reference"):
        want = _as_tuple(call())
    got = _as_tuple(_only(op, backend, call))
    for have, expected in zip(got, want, strict=True):
        # sums of three products in a row, in another order on each processor
        atol = 1e-5 if op == "experts" else 2e-6
        torch.testing.assert_close(have, expected, rtol=2e-5, atol=atol)


@pytest.mark.parametrize(("op", "backend"), [(op, b) for op in CASES for b in backends(op)])
def test_a_backend_reads_views_as_what_they_show(op: str, backend: str) -> None:
    """Every tensor, weights too, as every second value of another one."""
    call = CASES[op](2)
    want = _as_tuple(_only(op, backend, call))
    cells = [cell for cell in call.__closure__ or () if isinstance(cell.cell_contents, Tensor)]
    assert cells
    for cell in cells:
        tensor = cell.cell_contents
        cell.cell_contents = torch.stack([tensor, tensor.flip(0)], dim=-1)[..., 0]
        assert tensor.numel() == 1 or not cell.cell_contents.is_contiguous()
    for have, expected in zip(_as_tuple(_only(op, backend, call)), want, strict=True):
        assert torch.equal(have, expected)


def _only(op: str, backend: str, call: Callable[[], Any]) -> Any:
    """Run `call` and require that `op` really came from `backend`."""
    taken = []
    original = dispatch._choices

    def spy(name: str, *rest: Any) -> Any:
        found = original(name, *rest)
        if name == op:
            taken.append(found[0][0])
        return found

    dispatch._choices = spy  # type: ignore[assignment]
    try:
        result = call()
    finally:
        dispatch._choices = original
    assert taken and set(taken) == {backend}
    return result


@pytest.mark.parametrize("spec", [FP8, FP4_MAIN, FP4_INDEX], ids=["fp8", "fp4_main", "fp4_index"])
def test_compiled_rounding_is_bit_exact(spec: Any) -> None:
    if not backends("round_rows"):
        pytest.skip("no compiled kernels on this machine: there is no C compiler")
    x = torch.randn(64, 96) * torch.logspace(-12, 4, 64).unsqueeze(1)
    # exact ties of the coarse grid, zeros of both signs, and values below every floor
    x[0, :16] = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -2.5, -3.5, -5.0, 0.0, -0.0]
    )
    x[1] = 0.0
    x[2] = 1e-30
    with use_kernels("reference"):
        want = quantize.round_rows(x, spec)
    assert torch.equal(_only("round_rows", "cpu", lambda: quantize.round_rows(x, spec)), want)


@pytest.mark.parametrize("op", list(CASES))
def test_deterministic_rows_do_not_depend_on_their_neighbours(op: str) -> None:
    """Each op alone on a row, and on that row among others, gives the same bits."""
    call = CASES[op](37)
    with deterministic():
        everything = _as_tuple(call())
        one_by_one = [_as_tuple(part()) for part in _row_calls(call, 37)]
    for i, whole in enumerate(everything):
        assert torch.equal(whole, torch.cat([part[i] for part in one_by_one]))


def _row_calls(call: Callable[[], Any], rows: int) -> list[Callable[[], Any]]:
    """The same call for each row alone: every captured tensor with that many rows is cut."""
    function = call
    cells = {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }
    per_row = {"streams", "premix", "y", "post", "mixing", "x", "angle", "gate", "up", "query", "window", "entries"}
    per_row |= {"seen", "present", "u", "image", "ids", "weights"}

    def cut(row: int) -> Callable[[], Any]:
        import types

        new = tuple(
            types.CellType(value[row : row + 1] if name in per_row and isinstance(value, Tensor) else value)
            for name, value in cells.items()
        )
        return types.FunctionType(function.__code__, function.__globals__, "one_row", None, new)

    return [cut(row) for row in range(rows)]


def test_forced_backend_is_obeyed_or_raises() -> None:
    x = torch.randn(3, 4)
    with use_kernels("reference"):
        assert select("rms_norm", x).__module__ == "cedar.kernels.reference.dense"
    with use_kernels("cuda"), pytest.raises(KernelUnavailable, match="has no rms_norm"):
        select("rms_norm", x)
    with use_kernels("cuda"), pytest.raises(KernelUnavailable, match="cannot run experts on cpu"):
        select("experts", x)
    if backends("rms_norm"):
        with use_kernels("cpu"), pytest.raises(KernelUnavailable, match="within its limits"):
            select("rms_norm", torch.randn(1000, 4))


def test_a_gradient_never_goes_through_a_kernel_without_one() -> None:
    x = torch.randn(2, 32, requires_grad=True)
    dense.rms_norm(x, torch.ones(32), 1e-20).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_shapes_are_checked_once_and_named() -> None:
    with pytest.raises(ShapeError, match=r"linear: weight has shape \(3, 5\), expected \(any, 4\)"):
        dense.linear(torch.zeros(2, 4), torch.zeros(3, 5))
