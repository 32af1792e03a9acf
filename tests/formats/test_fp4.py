"""FP4 codecs against the golden rounding cases, byte for byte."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.errors import ShapeError
from cedar.formats import fp4, fp8
from cedar.formats.fp4 import (
    dequantize_fp4_index,
    dequantize_fp4_main,
    quantize_fp4_index,
    quantize_fp4_main,
)

Golden = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Dequantize = Callable[..., torch.Tensor]

KINDS: dict[str, tuple[Quantize, Dequantize, Callable[[torch.Tensor], torch.Tensor], int]] = {
    "Q4m": (quantize_fp4_index, dequantize_fp4_index, fp8.decode_e8m0, 32),
    "Q4s": (quantize_fp4_main, dequantize_fp4_main, fp8.decode_e4m3, 16),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Codes, even channel first; the two zeros count as equal."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return codes.masked_fill(codes == 8, 0)


def test_every_byte_decodes_as_published(golden: Golden, device: torch.device) -> None:
    packed = torch.arange(256, dtype=torch.uint8, device=device).view(-1, 16)
    ones = torch.full((16, 1), 127, dtype=torch.uint8, device=device)
    values = dequantize_fp4_index(packed, ones).view(256, 2)
    assert torch.equal(values.cpu(), golden["fp4_byte.values"])
    # a negative zero stays one, so that bytes survive a trip through values
    assert torch.equal(values.cpu().signbit(), torch.stack((golden_sign(0), golden_sign(4)), 1))


def golden_sign(shift: int) -> torch.Tensor:
    return (torch.arange(256) >> shift & 8).bool()


def test_every_bfloat16_rounds_to_the_published_e2m1_code(golden: Golden, device: torch.device) -> None:
    x = golden["e2m1.x"].to(device).float()
    table = torch.tensor([*fp4.E2M1_VALUES, *(-value for value in fp4.E2M1_VALUES)])
    assert torch.equal(fp4.round_to_e2m1_(x.clone()).cpu(), table[golden["e2m1.code"].long()])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("quantize", [quantize_fp4_index, quantize_fp4_main])
def test_ties_round_to_the_even_code(quantize: Quantize, sign: int) -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor([6.0, *(sign * tie for tie in ties)] + [0.0] * 24)
    codes = nibbles(quantize(x)[0])
    assert (codes[1:8] & 7).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert (codes[2:8] >> 3).tolist() == [int(sign < 0)] * 6


@kinds
def test_every_largest_magnitude_gets_the_published_scale(golden: Golden, device: torch.device, kind: str) -> None:
    quantize, _, _, group = KINDS[kind]
    expected = golden[f"{kind}.amax_scale_byte"]
    amax = golden["amax"][: len(expected)].to(device)
    x = torch.zeros(len(amax), group, dtype=torch.bfloat16, device=device)
    x[:, 9] = amax
    assert torch.equal(quantize(x)[1].flatten().cpu(), expected)


@kinds
def test_golden_groups(golden: Golden, device: torch.device, kind: str) -> None:
    quantize, dequantize, decode_scale, _ = KINDS[kind]
    packed, scale_bytes = quantize(golden[f"{kind}.x"].to(device))
    assert torch.equal(decode_scale(scale_bytes).flatten().cpu(), golden[f"{kind}.scale"])
    assert torch.equal(nibbles(packed.cpu()), nibbles(golden[f"{kind}.packed"]))
    assert torch.equal(dequantize(packed, scale_bytes, torch.bfloat16).cpu(), golden[f"{kind}.y"])


@kinds
def test_golden_float32_groups(golden: Golden, device: torch.device, kind: str) -> None:
    quantize, dequantize, _, _ = KINDS[kind]
    assert torch.equal(dequantize(*quantize(golden[f"{kind}.x32"].to(device))).cpu(), golden[f"{kind}.y32"])


def test_main_scale_saturates(golden: Golden) -> None:
    y = dequantize_fp4_main(*quantize_fp4_main(golden["Q4s_beyond.x"]), torch.bfloat16)
    assert torch.equal(y, golden["Q4s_beyond.y"])


@pytest.mark.parametrize(
    ("values", "scale", "expected"),
    [
        ([1, 0.5, 0.25, -0.1, 0.05, 0], 0.171875, [1.03125, 0.515625, 0.2578125, -0.0859375, 0.0859375, 0]),
        ([10, 5, 2.5, 1.25], 1.625, [9.75, 4.875, 2.4375, 1.625]),
        ([0.02, 0.01, -0.003], 2**-8, [0.0234375, 0.01171875, -0.00390625]),
        ([0], 2**-9, [0]),
    ],
)
def test_main_values_of_the_specification(values: list[float], scale: float, expected: list[float]) -> None:
    x = torch.zeros(16, dtype=torch.bfloat16)
    x[: len(values)] = torch.tensor(values)
    packed, scale_bytes = quantize_fp4_main(x)
    assert fp8.decode_e4m3(scale_bytes).item() == scale
    assert dequantize_fp4_main(packed, scale_bytes)[: len(values)].tolist() == expected


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-8, 6))
def test_main_elements_are_cut_by_the_scale_that_is_stored(seed: int, exponent: int) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    packed, scale_bytes = quantize_fp4_main(x)
    scale = fp8.decode_e4m3(scale_bytes).repeat_interleave(16, 1)
    clipped = torch.minimum(x.abs(), 6 * scale)
    error = (dequantize_fp4_main(packed, scale_bytes).abs() - clipped).abs()
    half_step = torch.where(clipped <= 2 * scale, 0.25, torch.where(clipped <= 4 * scale, 0.5, 1.0)) * scale
    assert (error <= half_step * 1.000001).all()


@kinds
def test_rows_do_not_meet(kind: str) -> None:
    quantize, _, _, _ = KINDS[kind]
    x = torch.randn(7, 2, 96, generator=torch.Generator().manual_seed(1))
    packed, scale_bytes = quantize(x)
    for row in range(7):
        alone = quantize(x[row])
        assert torch.equal(packed[row], alone[0])
        assert torch.equal(scale_bytes[row], alone[1])


@kinds
def test_a_group_with_a_nan_reads_back_as_nan(kind: str) -> None:
    quantize, dequantize, _, group = KINDS[kind]
    x = torch.full((2, 2 * group), 1.5)
    x[1, 3] = float("nan")
    y = dequantize(*quantize(x))
    assert y[1, :group].isnan().all()
    assert torch.equal(y[0], x[0])
    assert torch.equal(y[1, group:], x[1, group:])


def test_fp4_experts_widen_to_fp8_without_loss() -> None:
    # every code with scales 2^-20..2^20: the FP8 tile's scale only has to cover the group
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(2)
    for exponent in range(-20, 21):
        scale_bytes = torch.tensor([127 + exponent], dtype=torch.uint8)
        values = dequantize_fp4_index(packed, scale_bytes)
        e4m3, e8m0 = fp8.quantize_tiles(values[None], scale_bytes[None])
        assert torch.equal(fp8.dequantize_tiles(e4m3, e8m0)[0], values)


def test_given_scales_reproduce_bytes_that_are_not_canonical() -> None:
    packed = torch.randint(0, 256, (4, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    scale_bytes = torch.tensor([[120, 130], [0, 1], [127, 250], [3, 90]], dtype=torch.uint8)
    again, _ = quantize_fp4_index(dequantize_fp4_index(packed, scale_bytes), scale_bytes)
    assert torch.equal(again, packed)


@kinds
def test_wrong_sizes_are_refused(kind: str) -> None:
    quantize, dequantize, _, group = KINDS[kind]
    with pytest.raises(ShapeError, match=f"groups of {group}"):
        quantize(torch.zeros(2, group + 1))
    packed, scale_bytes = quantize(torch.zeros(2, 2 * group))
    with pytest.raises(ShapeError, match="scale bytes"):
        dequantize(packed, scale_bytes[:, :1])
    with pytest.raises(ShapeError, match=f"multiple of {group}"):
        dequantize(packed[:, : group // 2 + 1], scale_bytes[:, :1])
