"""Which parameter goes to which optimiser: one table, every parameter in exactly one row of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.config.train import OptimConfig
from cedar.errors import ConfigError, FormatError
from cedar.train.optim.adamw import AdamW
from cedar.train.optim.muon import Muon, Piece
from cedar.train.optim.sinkhorn import Sinkhorn


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A row of the table.

    Attributes:
        pattern: Matches the whole parameter name, its layer's or draft block's number left out.
        decays: Weight decay applies.
        blocks: Row blocks that Muon orthogonalises apart.
        engram: The table's own rate applies.
    """

    pattern: str
    optimizer: Literal["muon", "sinkhorn", "adamw"]
    decays: bool
    blocks: Callable[[ModelConfig], int] = lambda config: 1
    engram: bool = False


RULES = (
    Rule(pattern=r"(embed|head)\.weight", optimizer="sinkhorn", decays=False),
    Rule(pattern=r"layers\.engram\.embed\.weight", optimizer="sinkhorn", decays=False, engram=True),
    # a draft block is named as a layer; these are its ends
    Rule(pattern=r"layers\.markov_head\.(embed|head)\.weight", optimizer="sinkhorn", decays=False),
    Rule(pattern=r"layers\.main_proj\.weight", optimizer="muon", decays=True),
    Rule(pattern=r"layers\.(main_norm|norm)\.weight", optimizer="adamw", decays=True),
    Rule(pattern=r"layers\.confidence_head\.proj\.weight", optimizer="adamw", decays=True),
    Rule(pattern=r"(norm|layers\.(attn_norm|ffn_norm))\.weight", optimizer="adamw", decays=True),
    Rule(
        pattern=r"layers\.attn\.(q_norm|kv_norm|compressor\.norm|indexer\.k_norm)\.weight",
        optimizer="adamw",
        decays=True,
    ),
    Rule(pattern=r"layers\.attn\.attn_sink", optimizer="adamw", decays=False),
    Rule(pattern=r"layers\.hc_(attn|ffn)\.(base|scale)", optimizer="adamw", decays=False),
    Rule(pattern=r"layers\.hc_(attn|ffn)\.fn", optimizer="muon", decays=True),
    Rule(pattern=r"layers\.engram\.[qk]_weight", optimizer="adamw", decays=False),
    # one key a stream, then one value
    Rule(
        pattern=r"layers\.engram\.wkv\.weight",
        optimizer="muon",
        decays=True,
        blocks=lambda config: config.mhc.num_streams + 1,
    ),
    Rule(pattern=r"layers\.attn\.(wq_a|wkv|wo_b|compressor\.(wkv|wgate))\.weight", optimizer="muon", decays=True),
    Rule(pattern=r"layers\.attn\.indexer\.(wk|weights_proj)\.weight", optimizer="muon", decays=True),
    Rule(
        pattern=r"layers\.attn\.wq_b\.weight",
        optimizer="muon",
        decays=True,
        blocks=lambda config: config.attention.num_heads,
    ),
    Rule(
        pattern=r"layers\.attn\.indexer\.wq_b\.weight",
        optimizer="muon",
        decays=True,
        blocks=lambda config: config.indexer.num_heads,
    ),
    Rule(
        pattern=r"layers\.attn\.wo_a\.weight",
        optimizer="muon",
        decays=True,
        blocks=lambda config: config.attention.o_groups,
    ),
    Rule(pattern=r"layers\.ffn\.(gate|shared_experts\.w[123])\.weight", optimizer="muon", decays=True),
    Rule(
        pattern=r"layers\.ffn\.experts\.w[123]",
        optimizer="muon",
        decays=True,
        blocks=lambda config: config.moe.num_routed_experts,
    ),
)


def rule_of(name: str) -> Rule:
    """The one row that a parameter belongs to.

    Raises:
        ConfigError: No row matches, or more than one does.
    """
    plain = re.sub(r"^(layers|mtp)\.\d+\.", "layers.", name)
    matching = [rule for rule in RULES if re.fullmatch(rule.pattern, plain)]
    if len(matching) != 1:
        rows = ", ".join(rule.pattern for rule in matching) or "none"
        raise ConfigError(f"parameter {name!r} matches {rows} of the optimiser table, expected exactly one row")
    return matching[0]


class Optimizers:
    """The three optimisers of one model, stepped together.

    Args:
        named_parameters: The model's; every one must match a row of the table.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], model: ModelConfig, config: OptimConfig
    ) -> None:
        pieces: list[Piece] = []
        tables: list[tuple[str, nn.Parameter, float]] = []
        rest: list[tuple[str, nn.Parameter, float]] = []
        for name, parameter in named_parameters:
            rule = rule_of(name)
            if rule.optimizer == "muon":
                pieces.append(Piece(name, parameter, rule.blocks(model)))
            elif rule.optimizer == "sinkhorn":
                tables.append((name, parameter, config.engram_rate if rule.engram else 1.0))
            else:
                rest.append((name, parameter, config.weight_decay if rule.decays else 0.0))
        self.updates = 0
        self.clip_norm = config.clip_norm
        device = (pieces[0].parameter if pieces else (tables or rest)[0][1]).device
        # on the device, so that a captured step reads the values of its time
        self._rate = torch.zeros((), device=device)
        self._number = torch.zeros((), dtype=torch.int32, device=device)
        self._captures, self._steps = False, 0
        self._graph: Any = None
        self.muon = Muon(
            pieces, momentum=config.momentum, update_rms=config.update_rms, weight_decay=config.weight_decay
        )
        self.sinkhorn = Sinkhorn(
            tables,
            momentum=config.momentum,
            update_rms=config.update_rms,
            rounds=config.sinkhorn_rounds,
            mode=config.sinkhorn_mode,
        )
        self.adamw = AdamW(rest, beta1=config.beta1, beta2=config.beta2, eps=config.eps)

    def step(self, rate: float) -> None:
        """Clip the AdamW group's gradient, then update every parameter.

        After `capture_steps` the second step is captured and later ones are replayed.
        """
        self.updates += 1
        self._rate.fill_(rate)
        self._number.fill_(self.updates)
        if self._graph is not None:
            self._graph.replay()
        elif self._captures and self._steps:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            self._graph = graph
            graph.replay()
        else:
            self._step()
        self._steps += 1

    @property
    def is_warm(self) -> bool:
        """The latest step captured nothing and was not the first."""
        return self._steps > 2

    def capture_steps(self) -> None:
        """From now on every parameter keeps its gradient's memory, on a GPU."""
        self._captures = True

    def _step(self) -> None:
        grads = [p.grad for _, p, _ in self.adamw.parameters if p.grad is not None]
        if grads:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            torch._foreach_mul_(grads, (self.clip_norm / norm.clamp(min=1e-30)).clamp(max=1.0))
        self.muon.step(self._rate)
        self.sinkhorn.step(self._rate, self._number)
        self.adamw.step(self._rate, self._number)

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the state, by `<optimiser>/<kind>/<parameter>`; writing into them changes the state."""
        return {f"{part}/{name}": tensor for part, state in self._states().items() for name, tensor in state.items()}

    def _states(self) -> dict[str, dict[str, Tensor]]:
        return {"muon": self.muon.state(), "sinkhorn": self.sinkhorn.state(), "adamw": self.adamw.state()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Take a state that `state` gave.

        Raises:
            FormatError: A tensor is missing, unexpected, or has another shape or dtype; nothing was changed.
        """
        own = self.state()
        missing, extra = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
        if missing or extra:
            raise FormatError(
                f"the optimiser state lacks {missing[:3]} and has unknown {extra[:3]}: "
                "it belongs to another model or config"
            )
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
                raise FormatError(
                    f"optimiser state {name} is {tensor.dtype} {list(tensor.shape)}, "
                    f"expected {own[name].dtype} {list(own[name].shape)}"
                )
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
        self.updates = updates

    def state_bytes(self) -> dict[str, int]:
        """Bytes of state per optimiser, to compare with Adam's two buffers."""
        return {part: sum(tensor.nbytes for tensor in state.values()) for part, state in self._states().items()}
