"""Every component's gradient against finite differences in float64, by parameter and by layer mode.

The model keeps parts of itself in float32 whatever its dtype; here `Tensor.float` keeps double precision, so that a
difference of 1e-6 can be measured. Selections and routings are constants of the gradient (training.md 1.2): steps are
so small that none changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from cedar.config.layers import layer_plans
from cedar.config.presets import _small_model
from cedar.config.rounding import Rounding
from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8
from cedar.kernels import attention, compress, dense, engram, experts, indexer, mhc
from cedar.kernels.dispatch import use_kernels
from cedar.kernels.quantize import round_rows
from cedar.model.attention import Attention
from cedar.model.layers import rounded_weight
from cedar.model.transformer import Output, Transformer
from cedar.train import losses
from tests.paths.random_models import random_model

CONFIG = _small_model(
    layout="S F2 U R | F1 U R",
    vocab_size=64,
    hidden_size=32,
    num_heads=2,
    head_dim=32,
    rope_head_dim=8,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=32,
    window=4,
    compress_rope_theta=100,
    num_experts=4,
    num_experts_per_token=2,
    inner_size=32,
    sinkhorn_iterations=4,
    index_heads=2,
    index_dim=32,
    topk=3,
    block_size=2,
    num_blocks=2,
    engram_layers=(1, 4),
    max_ngram_size=3,
    engram_vocab_size=31,
)
STEP = 1e-6


@pytest.fixture
def double() -> Iterator[None]:
    with mock.patch.object(Tensor, "float", Tensor.double), use_kernels("reference"):
        yield


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model(CONFIG, 3).double()


@pytest.fixture(scope="module")
def ids_BS() -> Tensor:
    return torch.randint(3, 56, (1, 20), generator=torch.Generator().manual_seed(1))


START_BS = torch.tensor([[0] * 8 + [8] * 12])


def run(model: Transformer, ids_BS: Tensor, topk: int | None) -> Output:
    return model(
        ids_BS,
        segment_start_BS=START_BS,
        rounding=Rounding.none(),
        topk="all" if topk is None else topk,
        collect=True,
        compute_dtype=torch.float64,
    )


def language_loss(output: Output, ids_BS: Tensor) -> Tensor:
    target_BS = ids_BS.roll(-1, 1).masked_fill(torch.arange(20) == 19, -1)
    loss = torch.nn.functional.cross_entropy(
        output.logits_BSV.flatten(0, 1), target_BS.flatten(), ignore_index=-1, reduction="sum"
    )
    sample_T = torch.tensor([0] * 8 + [1] * 12)
    return loss + losses.sequence_balance(output.routers, sample_T, 2)[0]


def index_loss(output: Output, ids_BS: Tensor) -> Tensor:
    return losses.index_divergence(output.index_groups)[0]


def groups(model: Transformer) -> dict[str, list[torch.nn.Parameter]]:
    """Parameters by role and by the mode of their layer."""
    kinds = {plan.layer: f"{plan.kind.value}, ratio {plan.ratio}" for plan in layer_plans(model.config)}
    found: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        match = re.match(r"layers\.(\d+)\.(.*)", name)
        key = name if match is None else f"{match[2]} of {kinds[int(match[1])]}"
        found.setdefault(key, []).append(parameter)
    return found


def slope(loss: Callable[[], float], parameters: list[Tensor], directions: list[Tensor]) -> float:
    """Central difference of `loss` along the directions."""
    values = []
    for sign in (1, -1):
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.data.add_(direction, alpha=sign * STEP)
        values.append(loss())
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.data.sub_(direction, alpha=sign * STEP)
    return (values[0] - values[1]) / (2 * STEP)


@pytest.mark.usefixtures("double")
def test_each_parameter_of_each_layer_mode(model: Transformer, ids_BS: Tensor) -> None:
    topk = 3
    output = run(model, ids_BS, topk)
    learnt = {name: parameters for name, parameters in groups(model).items() if ".indexer." not in f".{name}"}
    flat = [parameter for parameters in learnt.values() for parameter in parameters]
    grads = dict(zip(map(id, flat), torch.autograd.grad(language_loss(output, ids_BS), flat), strict=True))
    generator = torch.Generator().manual_seed(5)

    def loss() -> float:
        with torch.no_grad():
            return float(language_loss(run(model, ids_BS, topk), ids_BS))

    for name, parameters in learnt.items():
        directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
        told = sum(float((grads[id(p)] * d).sum()) for p, d in zip(parameters, directions, strict=True))
        assert told != 0, name
        assert slope(loss, parameters, directions) == pytest.approx(told, rel=1e-4, abs=1e-5), name


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("topk", [None, 3])
def test_each_part_of_each_indexer(model: Transformer, ids_BS: Tensor, topk: int | None) -> None:
    output = run(model, ids_BS, topk)
    learnt = {name: parameters for name, parameters in groups(model).items() if "indexer" in name}
    flat = [parameter for parameters in learnt.values() for parameter in parameters]
    assert len(learnt) > 8
    grads = dict(zip(map(id, flat), torch.autograd.grad(index_loss(output, ids_BS), flat), strict=True))
    generator = torch.Generator().manual_seed(6)

    def loss() -> float:
        with torch.no_grad():
            return float(index_loss(run(model, ids_BS, topk), ids_BS))

    for name, parameters in learnt.items():
        directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
        told = sum(float((grads[id(p)] * d).sum()) for p, d in zip(parameters, directions, strict=True))
        assert told != 0, name
        assert slope(loss, parameters, directions) == pytest.approx(told, rel=1e-4, abs=1e-6), name


@pytest.mark.usefixtures("double")
def test_the_two_losses_share_no_parameter(model: Transformer, ids_BS: Tensor) -> None:
    output = run(model, ids_BS, 3)
    named = dict(model.named_parameters())
    indexers = {name for name in named if ".indexer." in name}
    for loss, own in ((language_loss, set(named) - indexers), (index_loss, indexers)):
        grads = torch.autograd.grad(loss(output, ids_BS), list(named.values()), retain_graph=True, allow_unused=True)
        assert {name for name, grad in zip(named, grads, strict=True) if grad is not None} == own


@pytest.mark.usefixtures("double")
def test_shared_entries_get_the_sum_of_their_readers(model: Transformer, ids_BS: Tensor) -> None:
    """Every layer of a group adds to its source's gradient: without one reader it is another one (training.md 1.1)."""
    source = model.layers[4].attn.compressor.wkv.weight
    whole = torch.autograd.grad(language_loss(run(model, ids_BS, None), ids_BS), source)[0]
    attend = Attention.forward
    for reader in (4, 5, 6):

        def detached(self: object, u_TD: Tensor, state: object, shared: object, reader: int = reader) -> object:
            if self is not model.layers[reader].attn:
                return attend(self, u_TD, state, shared)
            entries = state._entries  # type: ignore[attr-defined]
            kept = dict(entries)
            entries.update({layer: (main.detach(), key) for layer, (main, key) in kept.items()})
            result = attend(self, u_TD, state, shared)
            entries.update(kept)
            return result

        with mock.patch.object(Attention, "forward", detached):
            without = torch.autograd.grad(language_loss(run(model, ids_BS, None), ids_BS), source)[0]
        assert (whole - without).norm() > 1e-3 * whole.norm(), reader


# ops alone


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()


def _attention() -> tuple[Callable[..., object], list[Tensor]]:
    start_BS = torch.tensor([[0] * 4 + [4] * 5])
    chosen_BSE = torch.rand(1, 9, 6, generator=torch.Generator().manual_seed(2)) < 0.5

    def op(query: Tensor, window: Tensor, entry: Tensor, sink: Tensor) -> Tensor:
        return attention.masked_attention(query, window, start_BS, entry, chosen_BSE, sink, 4)[0]

    return op, [draw(1, 9, 2, 8), draw(1, 9, 8), draw(1, 6, 8), draw(2)]


def _gathered_attention() -> tuple[Callable[..., object], list[Tensor]]:
    seen_TW, seen_TK = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(3)) < 0.7
    op = lambda q, w, e, s: attention.attention(q, w, seen_TW, e, seen_TK, s)  # noqa: E731
    return op, [draw(5, 2, 8), draw(5, 4, 8), draw(5, 4, 8, seed=1), draw(2)]


def _mix() -> tuple[Callable[..., object], list[Tensor]]:
    op = lambda x, fn, scale, base: mhc.mix_coefficients(  # noqa: E731
        x, fn, scale, base, iterations=4, eps=1e-6, rms_eps=1e-20
    )
    return op, [draw(3, 4, 8), draw(24, 32, scale=0.2), draw(3), draw(24)]


def _experts() -> tuple[Callable[..., object], list[Tensor]]:
    def op(u: Tensor, gate: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        ids, weights, _ = expert_route(u, gate)
        return experts.experts(u, ids, weights, w1, w3, w2, limit=10.0, round_inner=False)

    return op, [draw(6, 8), draw(4, 8), draw(4, 12, 8), draw(4, 8, 12), draw(4, 12, 8, seed=1)]


def expert_route(u_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bias_E = torch.zeros(weight_ED.shape[0], dtype=torch.float64)
    return experts.route(u_TD, None, weight_ED, bias_E, bias_E, 2, 1.5)


CASES: dict[str, Callable[[], tuple[Callable[..., object], list[Tensor]]]] = {
    "masked_attention": _attention,
    "attention": _gathered_attention,
    "masked_index_scores": lambda: (
        indexer.masked_index_scores,
        [draw(1, 5, 2, 8), draw(1, 5, 2), draw(1, 4, 8)],
    ),
    "mix_coefficients": _mix,
    "collapse": lambda: (mhc.collapse, [draw(3, 4, 8), draw(3, 4)]),
    "expand": lambda: (mhc.expand, [draw(3, 8), draw(3, 4, 8), draw(3, 4), draw(3, 4, 4)]),
    "pool_groups": lambda: (compress.pool_groups, [draw(5, 2, 8), draw(5, 2, 8, seed=1)]),
    "engram_gate": lambda: (
        lambda x, k, v, q, g: engram.engram_gate(x, k, v, torch.zeros(3, dtype=torch.bool), q, g, 1e-20),
        [draw(3, 4, 8), draw(3, 4, 8, seed=1), draw(3, 8), draw(4, 8), draw(4, 8, seed=1)],
    ),
    "route": lambda: (lambda u, w: expert_route(u, w)[1:], [draw(6, 8), draw(4, 8)]),
    "experts": _experts,
    "rms_norm": lambda: (lambda x, g: dense.rms_norm(x, g, 1e-20), [draw(3, 8), draw(8)]),
    "rotate": lambda: (lambda x, c, s: dense.rotate(x, c, s), [draw(3, 2, 8), draw(3, 2), draw(3, 2, seed=1)]),
    "swiglu": lambda: (lambda a, b: dense.swiglu(a, b, 1.0), [draw(4, 8), draw(4, 8, seed=1)]),
    "linear": lambda: (dense.linear, [draw(4, 8), draw(6, 8)]),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CASES)
def test_op(name: str) -> None:
    op, inputs = CASES[name]()
    assert torch.autograd.gradcheck(op, inputs, eps=1e-6, atol=1e-5, rtol=1e-4)


# roundings


@pytest.mark.parametrize("spec", [FP8, FP4_MAIN, FP4_INDEX], ids=["fp8", "fp4 main", "fp4 index"])
def test_rows_round_straight_through(spec: object) -> None:
    """The gradient of what is rounded is that of the rounded value, unchanged, however small (training.md 1.6)."""
    x = torch.randn(3, 64).requires_grad_()
    upstream = torch.full((3, 64), 1e-6)
    (got,) = torch.autograd.grad(round_rows(x, spec), x, upstream)  # type: ignore[arg-type]
    assert torch.equal(got, upstream)


@pytest.mark.parametrize("storage", ["fp8", "fp4", "bf16"])
def test_weights_round_straight_through(storage: str) -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64))
    rounded = rounded_weight(weight, storage)  # type: ignore[arg-type]
    assert not torch.equal(rounded, weight)
    upstream = torch.full_like(weight, 1e-6)
    (got,) = torch.autograd.grad(rounded, weight, upstream)
    assert torch.equal(got, upstream)


@pytest.mark.parametrize("switch", list(Rounding.__dataclass_fields__))
def test_each_rounding_leaves_every_gradient_alive(ids_BS: Tensor, switch: str) -> None:
    """With one rounding on, gradients are those of a slightly different model; none is zero or absent."""
    model = random_model(CONFIG, 3)
    found = []
    for rounding in (Rounding.none(), replace(Rounding.none(), **{switch: True})):
        output = model(ids_BS, segment_start_BS=START_BS, rounding=rounding, topk="all", collect=True)
        loss = language_loss(output, ids_BS) + index_loss(output, ids_BS)
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    cosines = []
    for (name, _), plain, rounded in zip(model.named_parameters(), *found, strict=True):
        assert rounded.any(), name
        cosines.append(float(torch.nn.functional.cosine_similarity(plain.flatten(), rounded.flatten(), dim=0)))
    # a few are small and turn with any change of the model
    assert torch.tensor(cosines).quantile(0.1) > 0.7
