"""FP4: E2M1 elements, two a byte (even channel in the low nibble), with E4M3 or E8M0 scales.

`main` is the compressed KV (one E4M3 scale per 16 channels, not a power of two, no second scale); `index`
is the indexer's keys and queries and, along K, the routed experts (one E8M0 scale per 32). The arithmetic
is exact, as in `fp8`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cedar.formats import fp8
from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FormatSpec

E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# below these the scales stop shrinking (architecture.md 4.4); above the second the main scale saturates
_INDEX_AMAX_FLOOR = E2M1_MAX * 2.0**-126
_MAIN_AMAX_FLOOR = E2M1_MAX * 2.0**-9
_MAIN_AMAX_CEILING = E2M1_MAX * fp8.E4M3_MAX
# constants as tensors, as in `fp8`
_E2M1_MAX = torch.tensor(E2M1_MAX, dtype=torch.float32, device="cpu")
_INVERSE_E2M1_MAX = torch.tensor(1.0 / E2M1_MAX, dtype=torch.float32, device="cpu")
# 1.5 * 2**22: added to 2**e it has an ulp of 2**(e - 1), the step of E2M1 in that binade
_E2M1_SHIFTER = 1.5 * 2**22
_E2M1_MIN_EXPONENT_BITS = 127 << 23


@lru_cache(maxsize=16)
def _pair_table(device: torch.device) -> Tensor:
    """`[256]` int64: per byte the two float32 values, even channel first, as one word."""
    # a table first asked for while serving must also serve a later training step
    with torch.inference_mode(False):
        nibble = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float32, device="cpu")
        byte = torch.arange(256, device="cpu")
        return torch.stack((nibble[byte & 15], nibble[byte >> 4]), dim=1).view(torch.int64).flatten().to(device)


def round_to_e2m1_(x: Tensor) -> Tensor:
    """Float32 `x`, below 7 in magnitude, rounded in place to E2M1 values."""
    return fp8.round_to_grid_(x, min_exponent_bits=_E2M1_MIN_EXPONENT_BITS, shifter=_E2M1_SHIFTER)


def index_scale(amax: Tensor) -> Tensor:
    """Float32 power-of-two scale of groups whose largest magnitude is `amax` (overwritten)."""
    return fp8.ceil_power_of_two_(amax.clamp_min_(_INDEX_AMAX_FLOOR).mul_(_INVERSE_E2M1_MAX))


def main_scale(amax: Tensor) -> Tensor:
    """Float32 E4M3 scale of groups whose largest magnitude is `amax` (overwritten); saturates at 448."""
    return fp8.round_to_e4m3_(amax.clamp_(_MAIN_AMAX_FLOOR, _MAIN_AMAX_CEILING).div_(_E2M1_MAX))


def _pack(quotient_NG: Tensor) -> Tensor:
    """Bytes `[N, G / 2]` of quotients below 7 in magnitude, even channel in the low nibble; overwrites them."""
    sign_NG = quotient_NG.signbit()
    value_NG = round_to_e2m1_(quotient_NG.abs_())
    # values 0 .5 1 1.5 2 | 3 4 | 6 are codes 0 1 2 3 4 | 5 6 | 7: slope 2, then 1, then 1/2
    upper_NG = value_NG.clamp_max(4.0).add_(value_NG)
    code_NG = value_NG.clamp_max_(2.0).add_(upper_NG, alpha=0.5).add_(sign_NG, alpha=8)
    return torch.add(code_NG[:, 0::2], code_NG[:, 1::2], alpha=16).byte()


def _unpack(packed: Tensor, scale: Tensor, spec: FormatSpec, dtype: torch.dtype) -> Tensor:
    pairs = fp8.look_up(_pair_table(packed.device), packed)
    values = pairs.view(torch.float32)
    return values.view(-1, spec.group).mul_(scale.view(-1, 1)).view(values.shape).to(dtype)


def _check(packed: Tensor, scale_bytes: Tensor, spec: FormatSpec) -> None:
    fp8.check_scales(2 * packed.shape[-1], packed.shape, scale_bytes, spec.group)


def quantize_fp4_main(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packed E2M1 and E4M3 scale bytes of compressed entries (Q4s).

    Elements are divided by the scale that is stored, not by the exact one. A group with a NaN gets the NaN
    scale byte; magnitudes above 2688 clip.

    Args:
        x: `[..., C]` float32 or bfloat16, C a multiple of 16.

    Returns:
        Bytes `[..., C / 2]` uint8 and scale bytes `[..., C / 16]` uint8.

    Raises:
        ShapeError: C is not a positive multiple of 16.

    Source: architecture.md 4.4.
    """
    num_groups = FP4_MAIN.num_groups(x.shape[-1])
    x_NG = x.float().reshape(-1, FP4_MAIN.group)
    scale_N1 = main_scale(x_NG.abs().amax(-1, keepdim=True))
    packed = _pack(x_NG.div(scale_N1).clamp_(-E2M1_MAX, E2M1_MAX))
    scale_bytes = scale_N1.to(torch.float8_e4m3fn).view(torch.uint8)
    return packed.view(*x.shape[:-1], -1), scale_bytes.view(*x.shape[:-1], num_groups)


def dequantize_fp4_main(packed: Tensor, scale_bytes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Entries `[..., C]` from packed bytes `[..., C / 2]` and E4M3 scale bytes `[..., C / 16]`.

    Raises:
        ShapeError: The scale bytes do not fit the packed bytes.
    """
    _check(packed, scale_bytes, FP4_MAIN)
    return _unpack(packed, fp8.decode_e4m3(scale_bytes), FP4_MAIN, dtype)


def quantize_fp4_index(x: Tensor, scale_bytes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Packed E2M1 and E8M0 scale bytes of index keys, or of an expert's weight along its columns (Q4m, MXFP4).

    Args:
        x: `[..., C]` float32 or bfloat16, C a multiple of 32.
        scale_bytes: Scales to use instead of the canonical ones; magnitudes above 6 of them clip.

    Returns:
        Bytes `[..., C / 2]` uint8 and scale bytes `[..., C / 32]` uint8; a group with a NaN or an infinity
        gets the NaN scale byte.

    Raises:
        ShapeError: C is not a positive multiple of 32.

    Source: architecture.md 4.4.
    """
    num_groups = FP4_INDEX.num_groups(x.shape[-1])
    x_NG = x.float().reshape(-1, FP4_INDEX.group)
    if scale_bytes is None:
        scale_N1 = index_scale(fp8.largest_magnitude(x_NG))
        scale_bytes = fp8.e8m0_bytes(scale_N1).view(*x.shape[:-1], num_groups)
    else:
        scale_N1 = fp8.decode_e8m0(scale_bytes).view(-1, 1)
    packed = _pack(x_NG.div(scale_N1).clamp_(-E2M1_MAX, E2M1_MAX))
    return packed.view(*x.shape[:-1], -1), scale_bytes


def dequantize_fp4_index(packed: Tensor, scale_bytes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Vectors `[..., C]` from packed bytes `[..., C / 2]` and E8M0 scale bytes `[..., C / 32]`.

    Raises:
        ShapeError: The scale bytes do not fit the packed bytes.
    """
    _check(packed, scale_bytes, FP4_INDEX)
    return _unpack(packed, fp8.decode_e8m0(scale_bytes), FP4_INDEX, dtype)
