"""FP8 codec against the golden rounding cases, byte for byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.errors import ShapeError
from cedar.formats import fp8
from cedar.formats.fp8 import dequantize_fp8, dequantize_tiles, quantize_fp8, quantize_tiles

Golden = dict[str, torch.Tensor]


def positive_zero(codes: torch.Tensor) -> torch.Tensor:
    """The two zeros of E4M3 count as equal."""
    return codes.masked_fill(codes == 0x80, 0)


def test_every_e4m3_byte_decodes_as_published(golden: Golden, device: torch.device) -> None:
    value = fp8.decode_e4m3(torch.arange(256, dtype=torch.uint8, device=device)).cpu()
    assert value.isnan().nonzero().flatten().tolist() == [127, 255]
    torch.testing.assert_close(value, golden["e4m3.value"], rtol=0, atol=0, equal_nan=True)
    torch_value = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(value, torch_value, rtol=0, atol=0, equal_nan=True)


def test_every_e8m0_byte_decodes_as_published(golden: Golden, device: torch.device) -> None:
    value = fp8.decode_e8m0(torch.arange(256, dtype=torch.uint8, device=device)).cpu()
    assert torch.equal(value[:255].double(), golden["e8m0.value"])
    assert value[0] == 2.0**-127
    assert value[255].isnan()


def test_every_bfloat16_rounds_to_the_published_e4m3_code(golden: Golden, device: torch.device) -> None:
    x = golden["e4m3.x"].to(device)
    rounded = fp8.round_to_e4m3_(x.float())
    assert torch.equal(rounded.cpu(), fp8.decode_e4m3(golden["e4m3.code"]))
    codes = x.float().to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(positive_zero(codes.cpu()), positive_zero(golden["e4m3.code"]))


def test_every_largest_magnitude_gets_the_published_scale(golden: Golden, device: torch.device) -> None:
    amax = golden["amax"].to(device)
    x = torch.zeros(len(amax), 32, dtype=torch.bfloat16, device=device)
    x[:, 5] = -amax
    assert torch.equal(quantize_fp8(x)[1].flatten().cpu(), golden["Q8.amax_scale_byte"])


def test_golden_groups(golden: Golden, device: torch.device) -> None:
    codes, scale_bytes = quantize_fp8(golden["Q8.x"].to(device))
    assert torch.equal(fp8.decode_e8m0(scale_bytes).flatten().cpu(), golden["Q8.scale"])
    assert torch.equal(positive_zero(codes.cpu()), positive_zero(golden["Q8.code"]))
    y = dequantize_fp8(codes, scale_bytes, torch.bfloat16)
    assert torch.equal(y.cpu(), golden["Q8.y"])


def test_golden_float32_groups(golden: Golden, device: torch.device) -> None:
    assert torch.equal(dequantize_fp8(*quantize_fp8(golden["Q8.x32"].to(device))).cpu(), golden["Q8.y32"])


@pytest.mark.parametrize(
    ("amax", "scale"), [(448, 1), (1.75, 2**-8), (1.0, 2**-8), (22.6, 2**-4), (449, 2), (0, 2**-22)]
)
def test_scale_values_of_the_specification(amax: float, scale: float) -> None:
    x = torch.zeros(32)
    x[7] = amax
    assert fp8.decode_e8m0(quantize_fp8(x)[1]).item() == scale


def test_a_quotient_just_above_448_does_not_overflow() -> None:
    # the smallest float32 above a power of two times 448 rounds to that power when scaled by 1/448
    above = torch.nextafter(448.0 * 2.0 ** torch.arange(-10, 10), torch.tensor(torch.inf))
    values = dequantize_fp8(*quantize_fp8(above[:, None].repeat(1, 32)))
    assert values.isfinite().all()
    assert ((values / above[:, None] - 1).abs() < 2**-3).all()


def test_values_just_above_a_midpoint_round_up_once(device: torch.device) -> None:
    # 272.16 lies above the midpoint of 256 and 288; rounding through bfloat16 first would fall back to 256
    x = torch.full((32,), 272.16, device=device)
    x[0] = 448
    assert fp8.decode_e4m3(quantize_fp8(x)[0])[1].item() == 288
    sample = torch.empty(2**18).uniform_(-448, 448, generator=torch.Generator().manual_seed(27)).to(device)
    assert torch.equal(fp8.round_to_e4m3_(sample.clone()), sample.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_group_that_is_not_finite_reads_back_as_nan_alone(poison: float) -> None:
    x = torch.ones(2, 64)
    x[1, 40] = poison
    y = dequantize_fp8(*quantize_fp8(x))
    assert y[1, 32:].isnan().all()
    assert torch.equal(y[0], x[0])
    assert torch.equal(y[1, :32], x[1, :32])


def test_a_negative_value_that_rounds_to_zero_keeps_its_sign() -> None:
    x = torch.tensor([448.0, -1e-9] + [0.0] * 30)
    assert quantize_fp8(x)[0][1] == 0x80


@pytest.mark.parametrize("shape", [(33,), (2, 16), (0,)])
def test_channels_that_do_not_fill_groups_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="groups of 32"):
        quantize_fp8(torch.zeros(shape))


def test_scales_that_do_not_fit_are_refused() -> None:
    codes, scale_bytes = quantize_fp8(torch.ones(3, 64))
    with pytest.raises(ShapeError, match=r"scale bytes \[3, 1\].*expected \[3, 2\]"):
        dequantize_fp8(codes, scale_bytes[:, :1])
    with pytest.raises(ShapeError, match="multiple of 32"):
        dequantize_fp8(codes[:, :40], scale_bytes)


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(0, 5), groups=st.integers(1, 4), seed=st.integers(0, 2**31), exponent=st.integers(-40, 30))
def test_error_is_at_most_half_a_step_and_rows_do_not_meet(rows: int, groups: int, seed: int, exponent: int) -> None:
    x = torch.randn(rows, 32 * groups, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scale_bytes = quantize_fp8(x)
    scale = fp8.decode_e8m0(scale_bytes).repeat_interleave(32, 1)
    error = (dequantize_fp8(codes, scale_bytes) - x).abs()
    # three mantissa bits, and the step of the subnormals
    assert (error <= torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10)).all()
    for row in range(rows):
        assert torch.equal(codes[row], quantize_fp8(x[row])[0])


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (40, 70), (1, 33), (31, 5)])
def test_tiles_share_one_scale(shape: tuple[int, int], device: torch.device) -> None:
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3).to(device)
    codes, scale_bytes = quantize_tiles(weight)
    assert scale_bytes.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    for t in range(scale_bytes.shape[0]):
        for u in range(scale_bytes.shape[1]):
            tile = weight[32 * t : 32 * t + 32, 32 * u : 32 * u + 32]
            expected = 2.0 ** torch.ceil(torch.log2(tile.abs().amax().double() / 448))
            assert fp8.decode_e8m0(scale_bytes)[t, u].item() == expected.item()
    values = dequantize_tiles(codes, scale_bytes)
    scale = fp8.decode_e8m0(scale_bytes).repeat_interleave(32, 0).repeat_interleave(32, 1)[: shape[0], : shape[1]]
    assert ((values - weight).abs() <= torch.maximum(weight.abs() * 2.0**-4, scale * 2.0**-10)).all()
    assert torch.equal(dequantize_tiles(*quantize_tiles(values, scale_bytes)), values)


def test_tile_bytes_of_the_released_checkpoint_decode_as_published() -> None:
    codes = torch.tensor([[0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5]], dtype=torch.uint8)
    values = dequantize_tiles(codes, torch.tensor([[0x73]], dtype=torch.uint8))
    expected = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    assert values[0].tolist() == expected


def test_tile_scales_that_do_not_fit_are_refused() -> None:
    codes, scale_bytes = quantize_tiles(torch.ones(64, 32))
    with pytest.raises(ShapeError, match=r"expected \[2, 1\], one per 32 x 32 tile"):
        dequantize_tiles(codes, scale_bytes.T)
