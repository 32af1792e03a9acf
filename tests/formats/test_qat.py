"""Fake quantization equals storing and reading back, and lets the gradient through unharmed."""

import subprocess
import sys

import pytest
import torch

from cedar.errors import ShapeError
from cedar.formats import fp4, fp8
from cedar.formats.qat import fake_quantize, fake_quantize_tiles
from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8, FormatSpec

Golden = dict[str, torch.Tensor]
KINDS = {"Q8": FP8, "Q4m": FP4_INDEX, "Q4s": FP4_MAIN}
CODECS = {
    "Q8": (fp8.quantize_fp8, fp8.dequantize_fp8),
    "Q4m": (fp4.quantize_fp4_index, fp4.dequantize_fp4_index),
    "Q4s": (fp4.quantize_fp4_main, fp4.dequantize_fp4_main),
}
kinds = pytest.mark.parametrize("kind", KINDS)
specs = pytest.mark.parametrize("spec", KINDS.values(), ids=list(KINDS))


@kinds
def test_golden_groups_in_both_dtypes(golden: Golden, device: torch.device, kind: str) -> None:
    for x, y in (("x", "y"), ("x32", "y32")):
        got = fake_quantize(golden[f"{kind}.{x}"].to(device), KINDS[kind])
        assert got.dtype == golden[f"{kind}.{y}"].dtype
        assert torch.equal(got.cpu(), golden[f"{kind}.{y}"])


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_codec(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(64, 3, 96, generator=generator) * 2.0 ** torch.randint(-30, 12, (64, 1, 1), generator=generator)
    x = x.to(dtype).to(device)
    quantize, dequantize = CODECS[kind]
    assert torch.equal(fake_quantize(x, KINDS[kind]), dequantize(*quantize(x), dtype))


def test_golden_q4s_beyond_the_scale(golden: Golden) -> None:
    assert torch.equal(fake_quantize(golden["Q4s_beyond.x"], FP4_MAIN), golden["Q4s_beyond.y"])


@specs
def test_a_small_gradient_passes_unchanged(spec: FormatSpec) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    upstream = torch.full((4, 64), 1e-6)
    fake_quantize(x, spec).backward(upstream)
    assert torch.equal(x.grad, upstream)


def test_a_small_gradient_passes_through_tiles() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    upstream = torch.full((40, 64), 1e-6)
    fake_quantize_tiles(weight).backward(upstream)
    assert torch.equal(weight.grad, upstream)


def test_tiles_equal_the_codec() -> None:
    weight = torch.randn(40, 70, generator=torch.Generator().manual_seed(4))
    assert torch.equal(fake_quantize_tiles(weight), fp8.dequantize_tiles(*fp8.quantize_tiles(weight)))


@specs
def test_input_is_left_alone_and_views_are_fine(spec: FormatSpec) -> None:
    storage = torch.randn(2, 96, 5, generator=torch.Generator().manual_seed(8))
    view = storage.transpose(1, 2)
    before = storage.clone()
    assert torch.equal(fake_quantize(view, spec), fake_quantize(view.contiguous(), spec))
    assert torch.equal(storage, before)


@specs
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_a_row_does_not_depend_on_the_number_of_rows(spec: FormatSpec, rows: int) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(6))
    assert torch.equal(fake_quantize(x, spec)[:rows], fake_quantize(x[:rows], spec))


@pytest.mark.parametrize("spec", [FP8, FP4_INDEX], ids=["Q8", "Q4m"])
def test_applying_it_twice_changes_nothing(spec: FormatSpec) -> None:
    # not so for FP4_MAIN: its largest element was clipped or enlarged, which moves the scale
    x = fake_quantize(torch.randn(256, 96, generator=torch.Generator().manual_seed(9)), spec)
    assert torch.equal(fake_quantize(x, spec), x)


@specs
def test_nan_stays_visible(spec: FormatSpec) -> None:
    x = torch.full((2, 64), 1.5)
    x[1, 40] = float("nan")
    y = fake_quantize(x, spec)
    assert y[1, 40].isnan()
    assert torch.equal(y[0], x[0])


@specs
def test_channels_that_do_not_fill_groups_are_refused(spec: FormatSpec) -> None:
    with pytest.raises(ShapeError, match=f"groups of {spec.group}"):
        fake_quantize(torch.zeros(2, spec.group + 1), spec)


def test_tables_made_while_serving_serve_training() -> None:
    fp8.e4m3_table.cache_clear()
    with torch.inference_mode():
        fp8.decode_e4m3(torch.zeros(4, dtype=torch.uint8))
    weight = torch.ones(4, requires_grad=True)
    (fp8.decode_e4m3(torch.full((4,), 0x38, dtype=torch.uint8)) * weight).sum().backward()
    assert weight.grad.tolist() == [1.0] * 4


def test_constants_stay_on_the_cpu_whatever_the_default_device() -> None:
    code = (
        "import torch\n"
        "with torch.device('meta'):\n"
        "    from cedar.formats import fp4, qat, spec\n"
        "    y = fp4.dequantize_fp4_index(*fp4.quantize_fp4_index(torch.ones(32, device='cpu') * 6))\n"
        "assert y.tolist() == [6.0] * 32\n"
        "assert qat.fake_quantize(y, spec.FP4_MAIN).tolist() == [6.0] * 32\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
