"""Mixture of experts: a router with one bias per modality, routed experts and a shared one.

T rows, D hidden, E experts, K experts a row, I inner channels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.config.rounding import Rounding
from cedar.formats.fp4 import quantize_fp4_index
from cedar.kernels import experts as expert_ops
from cedar.kernels.experts import Packed, Tiled, retile
from cedar.model.layers import Linear, SwiGLU, round_input, rounded_weight
from cedar.model.state import RouterStats


class Router(nn.Module):
    """Scores are sqrt(softplus); the bias moves selection only and is no parameter of any optimizer.

    Attributes:
        bias: float32 [E], text rows.
        bias_vl: float32 [E], rows inside an image span.
    """

    bias: Tensor
    bias_vl: Tensor

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        num_experts = config.moe.num_routed_experts
        self.k, self.scaling = config.moe.num_experts_per_token, config.moe.routed_scaling_factor
        # the product runs in float32, so the weight is held so (the checkpoint has bf16)
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size, device=device, dtype=torch.float32))
        self.register_buffer("bias", torch.zeros(num_experts, device=device))
        self.register_buffer("bias_vl", torch.zeros(num_experts, device=device))

    def forward(self, u_TD: Tensor, image_T: Tensor | None, rounding: Rounding) -> tuple[Tensor, Tensor, Tensor]:
        weight = rounded_weight(self.weight, "bf16") if rounding.weights else self.weight
        return expert_ops.route(u_TD, image_T, weight, self.bias, self.bias_vl, self.k, self.scaling)


class Experts(nn.Module):
    """All routed experts' weights, stacked: MXFP4 on disk, one tensor per expert there.

    Attributes:
        scale_bytes: By weight, the scale bytes [E, out, in / 32] it was loaded with, so that writing gives them back.
        packed: By weight, the stored bytes themselves after `set_packed`, in a GPU's order after `retile`, else empty;
            the weights are then on `meta`.
    """

    scale_bytes: dict[str, Tensor]
    packed: dict[str, Packed | Tiled]

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        num, hidden, inner = config.moe.num_routed_experts, config.hidden_size, config.moe.inner_size
        self.limit = config.moe.swiglu_limit
        self.w1 = nn.Parameter(torch.empty(num, inner, hidden, device=device, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(num, inner, hidden, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(num, hidden, inner, device=device, dtype=dtype))
        self.scale_bytes, self.packed = {}, {}

    def set_packed(self, packed: Mapping[str, Packed | Tiled]) -> None:
        """Compute from stored bytes of `w1`, `w3` and `w2`; the decoded weights are dropped."""
        for name, stack in packed.items():
            weight: Tensor = getattr(self, name)
            assert stack.codes.shape[0] == weight.shape[0], (name, stack.codes.shape)
            setattr(self, name, nn.Parameter(weight.detach().to("meta"), requires_grad=False))
        self.packed = dict(packed)

    def retile(self) -> None:
        """Bring the stored bytes into the order of a GPU's kernels, which a checkpoint cannot be written from."""
        for name, stack in self.packed.items():
            if isinstance(stack, Packed):
                # one at a time: what was read is free again
                self.packed[name] = retile(stack)

    def pack(self) -> None:
        """Hold the weights as a checkpoint would."""
        stacks = {name: getattr(self, name).detach() for name in ("w1", "w3", "w2")}
        self.set_packed(
            {name: Packed(*quantize_fp4_index(stack, self.scale_bytes.get(name))) for name, stack in stacks.items()}
        )

    def forward(self, u_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, rounding: Rounding) -> Tensor:
        if self.packed:
            stacks = (self.packed[name] for name in ("w1", "w3", "w2"))
            return expert_ops.packed_experts(
                u_TD, ids_TK, weights_TK, *stacks, limit=self.limit, round_inner=rounding.activations
            )
        w1: Tensor = self.w1
        w3: Tensor = self.w3
        w2: Tensor = self.w2
        if rounding.weights:
            w1, w3, w2 = (rounded_weight(w, "fp4") for w in (w1, w3, w2))
        return expert_ops.experts(
            u_TD, ids_TK, weights_TK, w1, w3, w2, limit=self.limit, round_inner=rounding.activations
        )


def pack_weights(module: nn.Module) -> None:
    """Every quantized weight in `module` is held as a checkpoint would hold it, and its float values are dropped."""
    for part in module.modules():
        if isinstance(part, Experts) or (isinstance(part, Linear) and part.storage == "fp8"):
            part.pack()


def retile_experts(module: nn.Module) -> None:
    """`Experts.retile` of all in `module`; those with decoded weights stay as they are."""
    for part in module.modules():
        if isinstance(part, Experts):
            part.retile()


class MoE(nn.Module):
    """Routed experts plus the shared one, summed in float32.

    Source: architecture.md 5.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        quantized_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.gate = Router(config, device=device)
        quantized_device = quantized_device or device
        self.experts = Experts(config, device=quantized_device, dtype=dtype)
        self.shared_experts = SwiGLU(
            config.hidden_size, config.moe.inner_size, config.moe.swiglu_limit, device=quantized_device, dtype=dtype
        )

    def forward(self, u_TD: Tensor, image_T: Tensor | None, rounding: Rounding) -> tuple[Tensor, RouterStats]:
        ids_TK, weights_TK, scores_TE = self.gate(u_TD, image_T, rounding)
        # router in full precision, experts on the rounded rows
        u_TD = round_input(u_TD, rounding)
        routed_TD = self.experts(u_TD, ids_TK, weights_TK, rounding)
        output_TD = (routed_TD + self.shared_experts(u_TD, rounding).float()).to(u_TD.dtype)
        return output_TD, RouterStats(self.layer, scores_TE, ids_TK)
