"""Linear, RMSNorm, SwiGLU: the parts every layer is made of."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from cedar.config.rounding import Rounding
from cedar.formats.fp8 import TILE, dequantize_tiles, quantize_tiles
from cedar.formats.qat import fake_quantize_tiles
from cedar.formats.spec import FP4_INDEX, FP8
from cedar.kernels import dense
from cedar.kernels.quantize import round_rows

# how a weight lies on disk: fp8 in 32x32 tiles, fp4 (MXFP4) in groups of 32 along its input, bf16, f32
Storage = Literal["fp8", "fp4", "bf16", "f32"]


def rounded_weight(weight: Tensor, storage: Storage) -> Tensor:
    """`weight` as its storage format holds it, with a straight-through gradient (training only)."""
    if storage == "f32":
        return weight
    if storage == "fp4":
        return round_rows(weight, FP4_INDEX)
    if storage == "fp8":
        return fake_quantize_tiles(weight)
    if weight.dtype == torch.bfloat16:
        return weight
    return weight + (weight.to(torch.bfloat16).to(weight.dtype) - weight).detach()


def round_input(x: Tensor, rounding: Rounding) -> Tensor:
    """`x` as an FP8 linear sees it: rounded per 32 channels, once for all linears that read it."""
    return round_rows(x, FP8) if rounding.activations else x


class Tiles(NamedTuple):
    """An FP8 weight as the checkpoint holds it: E4M3 codes [out, in], E8M0 scales of 32 x 32 tiles, both uint8."""

    codes: Tensor
    scales: Tensor

    def groups(self, count: int) -> Tiles:
        """The same bytes as the weights of so many groups of outputs, which must end where tiles do: [G, out, in]."""
        assert self.codes.shape[0] % (count * TILE) == 0, (self.codes.shape, count)
        return Tiles(*(plane.unflatten(0, (count, -1)) for plane in self))


class Linear(nn.Module):
    """`x @ weight.T` without bias; `storage` is how the checkpoint holds the weight.

    Here it is decoded, or after `set_packed` the stored bytes themselves. The caller rounds the input
    (`round_input`), because several linears read the same rows.

    Attributes:
        weight: [out, in]; on `meta`, a shape without values, once the stored bytes are held.
        codes: uint8 E4M3 [out, in] after `set_packed`, else None.
        scale_bytes: The scale bytes the weight was loaded with (uint8), so that writing it gives them back;
            None for a weight made here.
    """

    codes: Tensor | None
    scale_bytes: Tensor | None

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        storage: Storage,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.storage = storage
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs, device=device, dtype=dtype))
        self.register_buffer("codes", None, persistent=False)
        self.register_buffer("scale_bytes", None, persistent=False)

    @property
    def held(self) -> Tensor | Tiles:
        """The weight, as it is held."""
        if self.codes is None or self.scale_bytes is None:
            return self.weight
        return Tiles(self.codes, self.scale_bytes)

    def set_packed(self, tiles: Tiles) -> None:
        """Compute from stored bytes; the decoded weight is dropped."""
        assert self.storage == "fp8", self.storage
        assert tiles.codes.shape == self.weight.shape, (tiles.codes.shape, self.weight.shape)
        self.weight = nn.Parameter(self.weight.detach().to("meta"), requires_grad=False)
        self.codes, self.scale_bytes = tiles

    def pack(self) -> None:
        """Hold an FP8 weight as a checkpoint would."""
        self.set_packed(Tiles(*quantize_tiles(self.weight.detach(), self.scale_bytes)))

    def forward(self, x: Tensor, rounding: Rounding) -> Tensor:
        held = self.held
        if isinstance(held, Tiles):
            return dense.packed_linear(x, *held, None)
        return dense.linear(x, self.effective_weight(rounding))

    def effective_weight(self, rounding: Rounding) -> Tensor:
        """The decoded weight, rounded where training rounds it."""
        held = self.held
        if isinstance(held, Tiles):
            return dequantize_tiles(*held, self.weight.dtype)
        return rounded_weight(held, self.storage) if rounding.weights else held


class RMSNorm(nn.Module):
    """`weight * x / rms(x)`, the gain not centred."""

    def __init__(
        self,
        num_channels: int,
        eps: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_channels, device=device, dtype=dtype))

    def forward(self, x: Tensor, rounding: Rounding | None = None) -> Tensor:
        """`rounding` says whether the gain is rounded as its checkpoint holds it (training)."""
        rounds = rounding is not None and rounding.weights
        return dense.rms_norm(x, rounded_weight(self.weight, "bf16") if rounds else self.weight, self.eps)


class SwiGLU(nn.Module):
    """The shared expert: `w2(silu(min(w1 x, limit)) * clamp(w3 x, +-limit))`."""

    def __init__(
        self,
        num_channels: int,
        num_inner: int,
        limit: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.limit = limit
        self.w1 = Linear(num_channels, num_inner, "fp8", device=device, dtype=dtype)
        self.w3 = Linear(num_channels, num_inner, "fp8", device=device, dtype=dtype)
        self.w2 = Linear(num_inner, num_channels, "fp8", device=device, dtype=dtype)

    def forward(self, x_TD: Tensor, rounding: Rounding) -> Tensor:
        """`x_TD` already went through `round_input`."""
        inner_TI = dense.swiglu(self.w1(x_TD, rounding), self.w3(x_TD, rounding), self.limit).to(x_TD.dtype)
        return self.w2(round_input(inner_TI, rounding), rounding)
