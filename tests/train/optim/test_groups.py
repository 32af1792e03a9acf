"""The optimiser table is total, AdamW is AdamW, and the state goes out and back in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cedar.config.presets import PRESETS, nano, preset
from cedar.config.train import OptimConfig
from cedar.errors import ConfigError, FormatError
from cedar.model.init import initialise
from cedar.model.transformer import Transformer
from cedar.train.optim.adamw import AdamW
from cedar.train.optim.groups import Optimizers, rule_of


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_parameter_is_in_exactly_one_row(name: str) -> None:
    config = preset(name)
    model = Transformer(config, device="meta")
    kinds: dict[str, int] = {}
    for parameter_name, parameter in model.named_parameters():
        rule = rule_of(parameter_name)
        kinds[rule.optimizer] = kinds.get(rule.optimizer, 0) + parameter.numel()
        if rule.optimizer == "muon":
            assert parameter.shape[:-1].numel() % rule.blocks(config) == 0, parameter_name
        assert (parameter.dim() == 1) <= (rule.optimizer == "adamw"), parameter_name
    assert sum(kinds.values()) == sum(p.numel() for p in model.parameters())
    assert set(kinds) == {"muon", "sinkhorn", "adamw"}


@pytest.mark.parametrize("name", ["layers.0.attn.wq_c.weight", "layers.0.ffn.gate.bias", "lm_head.weight"])
def test_unknown_parameter_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="exactly one row"):
        rule_of(name)


@pytest.mark.parametrize(
    ("name", "decays"),
    [
        ("layers.3.attn.attn_sink", False),
        ("layers.3.hc_ffn.scale", False),
        ("layers.1.engram.q_weight", False),
        ("layers.3.attn_norm.weight", True),
        ("embed.weight", False),
        ("layers.3.ffn.experts.w2", True),
    ],
)
def test_weight_decay_by_name(name: str, decays: bool) -> None:
    assert rule_of(name).decays is decays


def test_adamw_equals_torch() -> None:
    ours = [nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(5))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    own = AdamW([("a", ours[0], 0.1), ("b", ours[1], 0.0)], beta1=0.9, beta2=0.95, eps=1e-20)
    reference = torch.optim.AdamW(
        [{"params": [theirs[0]], "weight_decay": 0.1}, {"params": [theirs[1]], "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-20,
    )
    for number in range(1, 20):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape) * 1e-3
            other.grad = one.grad.clone()
        own.step(torch.tensor(1e-2), torch.tensor(number))
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_adamw_survives_a_parameter_that_never_gets_a_gradient() -> None:
    parameter = nn.Parameter(torch.ones(3))
    adamw = AdamW([("a", parameter, 0.0)], beta1=0.9, beta2=0.95, eps=1e-20)
    parameter.grad = torch.zeros(3)
    adamw.step(torch.tensor(1e-2), torch.tensor(1))
    assert torch.equal(parameter.detach(), torch.ones(3))


def trained(seed: int) -> tuple[Transformer, Optimizers]:
    model = Transformer(nano())
    initialise(model, seed)
    optimizers = Optimizers(model.named_parameters(), model.config, OptimConfig())
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizers.step(1e-3)
    return model, optimizers


def test_state_goes_out_and_back_in_tensor_by_tensor() -> None:
    model, optimizers = trained(1)
    other_model, other = trained(1)
    other.step(1e-3)
    other.load({name: tensor.clone() for name, tensor in optimizers.state().items()}, optimizers.updates)
    for name, tensor in optimizers.state().items():
        assert torch.equal(tensor, other.state()[name]), name
    other_model.load_state_dict(model.state_dict())
    for one in (optimizers, other):
        one.step(1e-3)
    for (name, p), q in zip(model.named_parameters(), other_model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_state_of_another_model_is_refused_by_name() -> None:
    _, optimizers = trained(1)
    state = dict(optimizers.state())
    name = next(iter(state))
    with pytest.raises(FormatError, match=r"lacks"):
        optimizers.load({k: v for k, v in state.items() if k != name}, 1)
    with pytest.raises(FormatError, match="expected"):
        optimizers.load(state | {name: state[name].double()}, 1)


def test_sinkhorn_halves_adams_state_for_the_tables() -> None:
    model, optimizers = trained(1)
    tables = sum(p.nbytes for name, p in model.named_parameters() if rule_of(name).optimizer == "sinkhorn")
    assert optimizers.state_bytes()["sinkhorn"] < 1.05 * tables
