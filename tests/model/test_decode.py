"""Decoding over slots and pages against decoding sequence by sequence."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cedar.cache.layout import PageLayout
from cedar.cache.manager import CacheManager, Lease, Plan
from cedar.config.model import ModelConfig
from cedar.config.presets import nano
from cedar.kernels.dispatch import use_kernels
from cedar.kernels.pages import Stored
from cedar.model.decode import DecodeSlots, DecodeStep, SlotDecoder
from cedar.model.sequence import SequenceState
from cedar.model.transformer import Transformer
from tests.paths.random_models import random_model, tiny

# what asks the device, or makes a shape out of data
SYNCHRONISES = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "equal",
}


class NoSynchronisation(TorchDispatchMode):
    """Fails at the first op that a graph could not hold."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        assert name not in SYNCHRONISES, f"{func} asks the device"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{func} with a mask makes a shape out of data"
        return func(*args, **(kwargs or {}))


class Rig:
    """A few sequences twice: in slots, and on their own."""

    def __init__(self, model: Transformer, lengths: list[int], num_slots: int | None = None) -> None:
        self.model, config = model, model.config
        self.decoder = SlotDecoder(model)
        self.cache = CacheManager(config, num_pages=40, dtype=model.dtype)
        layout = PageLayout(config)
        rows = {
            (what, source): Stored(self.cache.pool.field(field.codes), self.cache.pool.field(field.scales), field.spec)
            for (what, source), field in layout.rows.items()
        }
        self.slots = DecodeSlots(
            config,
            rows,
            num_slots=num_slots or len(lengths),
            max_pages=8,
            idle_page=self.cache.pool.take(),
            device=model.device,
        )
        generator = random.Random(sum(lengths))
        self.leases: list[Lease] = []
        self.paged: list[SequenceState] = []
        self.plain: list[SequenceState] = []
        for slot, length in enumerate(lengths):
            ids_T = torch.tensor([generator.randrange(config.vocab_size) for _ in range(length)])
            lease = self.cache.lease((), b"", Plan())
            assert self.cache.reserve(lease, 8 * 128, 0)
            self.leases.append(lease)
            self.paged.append(model.new_state(make_store=self.cache.make_store(lease, 0)))
            self.plain.append(model.new_state())
            for state in (self.paged[-1], self.plain[-1]):
                model.prefill(state, ids_T)
            self.slots.enter(self.paged[-1], slot)
            self.slots.set_pages(slot, lease.table.pages, entered=True)

    def step(self, ids: list[int], *, idle: int = 0, context: int = 512) -> Tensor:
        slot_T = torch.tensor([*range(len(ids)), *[self.slots.num_slots] * idle])
        position_T = torch.tensor([*(state.num_tokens for state in self.paged), *[0] * idle])
        step = DecodeStep(self.slots, self.model.rope, slot_T, position_T, context=context)
        with torch.inference_mode():
            logits_TV = self.decoder(step, torch.tensor([*ids, *[0] * idle]))
        for slot, state in enumerate(self.paged):
            self.slots.stepped(state, slot)
        return logits_TV[: len(ids)]

    def wanted(self, ids: list[int]) -> Tensor:
        rows = [self.model.decode(state, torch.tensor([i])) for state, i in zip(self.plain, ids, strict=True)]
        return torch.cat(rows)


@pytest.fixture(scope="module", params=[nano, tiny], ids=["nano", "tiny"])
def model(request: pytest.FixtureRequest) -> Transformer:
    config: ModelConfig = request.param()
    return random_model(config, 5)


def test_slots_decode_what_sequences_decode(model: Transformer) -> None:
    rig = Rig(model, [1, 2, 37, 130])
    generator = random.Random(1)
    for idle in (0, 3, 1, 0):
        ids = [generator.randrange(model.config.vocab_size) for _ in range(4)]
        with use_kernels("reference"):
            got, want = rig.step(ids, idle=idle), rig.wanted(ids)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_sequence_that_left_its_slot_goes_on(model: Transformer) -> None:
    rig = Rig(model, [21, 40])
    generator = random.Random(2)
    for _ in range(3):
        ids = [generator.randrange(model.config.vocab_size) for _ in range(2)]
        rig.step(ids)
        rig.wanted(ids)
    for slot, (paged, plain) in enumerate(zip(rig.paged, rig.plain, strict=True)):
        rig.slots.leave(paged, slot)
        got, want = paged.snapshot(), plain.snapshot()
        assert got.num_tokens == want.num_tokens and got.tails.keys() == want.tails.keys()
        assert torch.equal(got.recent_L, want.recent_L)
        assert paged._history.tolist() == plain._history.tolist()
        ids_T = torch.tensor([7, 8, 9])
        torch.testing.assert_close(model.decode(paged, ids_T), model.decode(plain, ids_T), rtol=1e-4, atol=1e-4)
        paged.roll_back(paged.num_tokens - 2)
        plain.roll_back(plain.num_tokens - 2)
        torch.testing.assert_close(model.decode(paged, ids_T), model.decode(plain, ids_T), rtol=1e-4, atol=1e-4)


def test_a_step_asks_the_device_nothing(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(model, [9, 40], num_slots=3)
    # the reference loops over experts by asking who is hit; on a GPU sorted rows take its place
    _without_expert_loop(monkeypatch)
    with use_kernels("reference"), NoSynchronisation():
        rig.step([1, 2], idle=1)


def test_a_chunk_of_a_prompt_asks_the_device_nothing(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(model, [9], num_slots=1)
    state = model.new_state(make_store=rig.cache.make_store(rig.leases[0], 0))
    ids_T = torch.arange(60)
    _without_expert_loop(monkeypatch)
    with use_kernels("reference"), NoSynchronisation():
        model.prefill(state, ids_T[:40], prompt_tokens=60)
        model.prefill(state, ids_T[40:], prompt_tokens=60)


def _without_expert_loop(patch: pytest.MonkeyPatch) -> None:
    from cedar.kernels.reference import experts as reference

    def experts(u_TD: Tensor, *rest: object) -> Tensor:
        return u_TD.float()

    patch.setattr(reference, "experts", experts)
