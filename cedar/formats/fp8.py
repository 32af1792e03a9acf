"""FP8: E4M3 elements with one power-of-two (E8M0) scale per 32 channels, or per 32 x 32 tile of a weight.

The arithmetic is exact, so a row's bytes depend on that row alone and every device gives the same ones.
Legend: C channels, O rows and I columns of a weight, G a group of 32.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cedar.errors import ShapeError
from cedar.formats.spec import FP8

TILE = 32
E4M3_MAX = 448.0
# below this the scale stops shrinking (architecture.md 4.4)
_FP8_AMAX_FLOOR = 1e-4
# constants as tensors: torch wraps a Python number anew at each call, which costs as much as the operation
_INVERSE_E4M3_MAX = torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32, device="cpu")
_EXPONENT_MASK = torch.tensor(0x7F800000, dtype=torch.int32, device="cpu")
_MANTISSA_MASK = torch.tensor(0x007FFFFF, dtype=torch.int32, device="cpu")
_MANTISSA_BITS = torch.tensor(23, dtype=torch.int32, device="cpu")
_INFINITY = torch.tensor(float("inf"), dtype=torch.float32, device="cpu")
# 1.5 * 2**20: added to 2**e it has an ulp of 2**(e - 3), the step of E4M3 in that binade
_E4M3_SHIFTER = 1.5 * 2**20
_E4M3_MIN_EXPONENT_BITS = (127 - 6) << 23
_E4M3_NAN = 0x7F


@lru_cache(maxsize=16)
def e8m0_table(device: torch.device) -> Tensor:
    """`[256]` float32: 2 ** (byte - 127), byte 255 is NaN."""
    # a table first asked for while serving must also serve a later training step
    with torch.inference_mode(False):
        values = [2.0 ** (byte - 127) for byte in range(255)]
        return torch.tensor([*values, float("nan")], dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def e4m3_table(device: torch.device) -> Tensor:
    """`[256]` float32: the value of each E4M3 byte; 0x7F and 0xFF are NaN, there is no infinity."""
    with torch.inference_mode(False):
        magnitudes = []
        for code in range(128):
            exponent, mantissa = code >> 3, code & 7
            magnitudes.append((8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9)
        magnitudes[_E4M3_NAN] = float("nan")
        return torch.tensor([*magnitudes, *(-value for value in magnitudes)], dtype=torch.float32, device=device)


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """`table[codes]` for uint8 codes of any shape."""
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def decode_e8m0(scale_bytes: Tensor) -> Tensor:
    """Float32 scales of E8M0 bytes: 2 ** (byte - 127); byte 0 is the subnormal 2 ** -127, byte 255 is NaN."""
    return look_up(e8m0_table(scale_bytes.device), scale_bytes)


def decode_e4m3(codes: Tensor) -> Tensor:
    """Float32 values of E4M3 bytes."""
    return look_up(e4m3_table(codes.device), codes)


def ceil_power_of_two_(x: Tensor) -> Tensor:
    """Positive float32 values rounded up to a power of two, in place, from their bits; infinity stays."""
    x.view(torch.int32).add_(_MANTISSA_MASK).bitwise_and_(_EXPONENT_MASK)
    return x


def round_to_grid_(x: Tensor, *, min_exponent_bits: int, shifter: float) -> Tensor:
    """Float32 `x` rounded in place to a small float's grid, ties to the even code; zero loses its sign.

    Adding `shifter` times the value's power of two leaves no bit below the grid's step, so the adder's own
    rounding does the work; subtracting it again is exact. Exponents below the minimum share its step,
    which are the grid's subnormals.

    Args:
        min_exponent_bits: Bits of the float32 power of two where the grid's subnormals begin.
        shifter: 1.5 * 2**23 / (steps per power of two).
    """
    power = x.view(torch.int32).bitwise_and(_EXPONENT_MASK).clamp_min_(min_exponent_bits).view(torch.float32)
    return x.add_(power, alpha=shifter).sub_(power, alpha=shifter)


def round_to_e4m3_(x: Tensor) -> Tensor:
    """Float32 `x`, at most 464 in magnitude, rounded in place to E4M3 values."""
    return round_to_grid_(x, min_exponent_bits=_E4M3_MIN_EXPONENT_BITS, shifter=_E4M3_SHIFTER)


def fp8_scale(amax: Tensor) -> Tensor:
    """Float32 power-of-two scale of groups whose largest magnitude is `amax` (overwritten)."""
    return ceil_power_of_two_(amax.clamp_min_(_FP8_AMAX_FLOOR).mul_(_INVERSE_E4M3_MAX))


def e8m0_bytes(scale: Tensor) -> Tensor:
    """E8M0 bytes of float32 powers of two, at least 2 ** -126; an infinite scale is byte 255, NaN."""
    return scale.view(torch.int32).bitwise_right_shift(_MANTISSA_BITS).byte()


def largest_magnitude(groups: Tensor) -> Tensor:
    """`[..., 1]` largest magnitude of each group; infinity if the group holds a NaN, so that its scale is NaN."""
    return torch.fmin(groups.abs().amax(-1, keepdim=True), _INFINITY)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes and E8M0 scale bytes of vectors (Q8).

    The scale is the smallest power of two that brings the group's largest magnitude to at most 448. A group
    with a NaN or an infinity gets the NaN scale byte, so that the failure shows where it is read.

    Args:
        x: `[..., C]` float32 or bfloat16, C a multiple of 32.

    Returns:
        Codes `[..., C]` uint8 and scale bytes `[..., C / 32]` uint8.

    Raises:
        ShapeError: C is not a positive multiple of 32.

    Source: architecture.md 4.4.
    """
    num_groups = FP8.num_groups(x.shape[-1])
    x_NG = x.float().reshape(-1, FP8.group)
    scale_N1 = fp8_scale(largest_magnitude(x_NG))
    # never above 464, where the cast would give NaN: the quotient exceeds 448 by a rounding error at most
    codes = x_NG.div(scale_N1).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.view(x.shape), e8m0_bytes(scale_N1).view(*x.shape[:-1], num_groups)


def dequantize_fp8(codes: Tensor, scale_bytes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Vectors from their codes `[..., C]` and scale bytes `[..., C / 32]`, rounded once to `dtype`.

    Raises:
        ShapeError: The scale bytes do not fit the codes.
    """
    check_scales(codes.shape[-1], codes.shape, scale_bytes, FP8.group)
    values_NG = decode_e4m3(codes.reshape(-1, FP8.group)).mul_(decode_e8m0(scale_bytes).view(-1, 1))
    return values_NG.view(codes.shape).to(dtype)


def check_scales(channels: int, codes_shape: torch.Size, scale_bytes: Tensor, group: int) -> None:
    """Raises ShapeError unless there is one scale byte per group of every vector."""
    expected = (*codes_shape[:-1], channels // group)
    if channels % group or tuple(scale_bytes.shape) != expected:
        raise ShapeError(
            f"scale bytes {list(scale_bytes.shape)} for codes {list(codes_shape)}: expected {list(expected)}, "
            f"one per {group} channels of a multiple of {group}"
        )


def _tiles(weight_OI: Tensor) -> Tensor:
    """`[O/32, I/32, 32 * 32]` float32 copy of the tiles, zero where the weight ends inside one."""
    rows, columns = weight_OI.shape
    pad = (0, -columns % TILE, 0, -rows % TILE)
    padded = torch.nn.functional.pad(weight_OI.float(), pad) if any(pad) else weight_OI.float()
    return padded.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).transpose(1, 2).flatten(2)


def _spread(scale_TU: Tensor, rows: int, columns: int) -> Tensor:
    """One value per weight from one value per tile."""
    return scale_TU.repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE, 1)[:, :columns]


def tile_scale(weight_OI: Tensor) -> Tensor:
    """Float32 `[ceil(O/32), ceil(I/32)]` canonical scale of each tile: the rule of `quantize_fp8`."""
    return fp8_scale(largest_magnitude(_tiles(weight_OI)).squeeze(-1))


def quantize_tiles(weight_OI: Tensor, scale_bytes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """E4M3 codes `[O, I]` and E8M0 scale bytes `[ceil(O/32), ceil(I/32)]` of a weight matrix.

    Args:
        weight_OI: Float32 or bfloat16.
        scale_bytes: Scales to use instead of the canonical ones; a value that then exceeds 448 becomes NaN.

    Source: architecture.md 7.2; the scale rule of weights is that of activations (assumed).
    """
    scale_TU = tile_scale(weight_OI) if scale_bytes is None else decode_e8m0(scale_bytes)
    codes_OI = (weight_OI.float() / _spread(scale_TU, *weight_OI.shape)).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes_OI, e8m0_bytes(scale_TU) if scale_bytes is None else scale_bytes


def dequantize_tiles(codes_OI: Tensor, scale_bytes_TU: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight matrix from its codes and the scale bytes of its 32 x 32 tiles, rounded once to `dtype`.

    Raises:
        ShapeError: The scale bytes do not fit the codes.
    """
    rows, columns = codes_OI.shape
    expected = (-(-rows // TILE), -(-columns // TILE))
    if tuple(scale_bytes_TU.shape) != expected:
        raise ShapeError(
            f"scale bytes {list(scale_bytes_TU.shape)} for a weight {[rows, columns]}: expected {list(expected)}, "
            f"one per {TILE} x {TILE} tile"
        )
    return decode_e4m3(codes_OI).mul_(_spread(decode_e8m0(scale_bytes_TU), rows, columns)).to(dtype)
