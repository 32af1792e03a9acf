"""Every parameter's initial distribution, in one table.

Source: training.md 1.7 and 2.5 (our choices; the report gives none).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

Fill = Callable[[Tensor, torch.Generator], None]


def _normal(std: float) -> Fill:
    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, std, generator=generator)

    return fill


def _fan_in(factor: float = 1.0) -> Fill:
    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, factor / math.sqrt(tensor.shape[-1]), generator=generator)

    return fill


def _constant(value: float) -> Fill:
    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.fill_(value)

    return fill


def _mix_base(tensor: Tensor, generator: torch.Generator) -> None:
    """Pre-mix about 1/N, post about 1, mixing near the identity: streams start apart and stay so."""
    num_streams = round(math.sqrt(tensor.shape[0] + 1)) - 1
    tensor.zero_()
    tensor[:num_streams] = math.log((1 / num_streams) / (1 - 1 / num_streams))
    identity = torch.eye(num_streams, device=tensor.device, dtype=tensor.dtype)
    tensor[2 * num_streams :] = (4.0 * identity).flatten()


# first match wins; names as in `Transformer.named_parameters` and `Draft.named_parameters`
TABLE: tuple[tuple[str, Fill], ...] = (
    ("embed.weight", _normal(0.02)),
    ("head.weight", _normal(0.02)),
    ("*.markov_head.*.weight", _normal(0.02)),
    # the draft starts with even odds for every token
    ("*.confidence_head.proj.weight", _constant(0.0)),
    ("*.engram.embed.weight", _normal(0.02)),
    # the memory starts as nothing: its value rows are small, so the module is close to the identity
    ("*.engram.wkv.weight", _normal(0.02)),
    ("*.engram.?_weight", _constant(1.0)),
    ("*norm.weight", _constant(1.0)),
    ("*.attn_sink", _constant(0.0)),
    ("*.fn", _normal(0.02)),
    ("*.scale", _constant(1.0)),
    ("*.base", _mix_base),
    # a small gate starts the pair's pooling as a mean
    ("*.compressor.wgate.weight", _fan_in(0.1)),
    ("*.attn.wo_b.weight", _fan_in(0.5)),
    ("*.w2", _fan_in(0.5)),
    ("*.w2.weight", _fan_in(0.5)),
    ("*", _fan_in()),
)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill all parameters; the same seed gives the same values on every device.

    Routing biases are zeroed. The order of draws is the order of names, so a layer that is added at the end
    changes none before it.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        fill = next(fill for pattern, fill in TABLE if fnmatch(name, pattern))
        values = torch.empty(parameter.shape, dtype=torch.float32)
        fill(values, generator)
        parameter.copy_(values)
    for name, buffer in model.named_buffers():
        if name.endswith(("gate.bias", "gate.bias_vl")):
            buffer.zero_()
