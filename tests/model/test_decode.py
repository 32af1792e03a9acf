"""Decoding over slots and pages against decoding sequence by sequence."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cedar.cache.layout import PageLayout
from cedar.cache.manager import CacheManager, Lease, Plan
from cedar.checkpoint.read import read_checkpoint
from cedar.checkpoint.write import write_checkpoint
from cedar.config.model import ModelConfig
from cedar.config.presets import nano
from cedar.formats.spec import FP4_INDEX
from cedar.kernels import dispatch
from cedar.kernels.dispatch import use_kernels
from cedar.kernels.pages import Stored
from cedar.kernels.quantize import dequantize_rows
from cedar.model.decode import DecodeSlots, DecodeStep, SlotDecoder
from cedar.model.decode_draft import SlotDraft
from cedar.model.draft import Draft
from cedar.model.layers import Linear, Tiles
from cedar.model.moe import Experts, pack_weights, retile_experts
from cedar.model.sequence import SequenceState
from cedar.model.transformer import Transformer
from tests.paths.random_models import random_draft, random_model, tiny

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

    def __init__(
        self, model: Transformer, lengths: list[int], num_slots: int | None = None, draft: Draft | None = None
    ) -> None:
        self.model, config = model, model.config
        self.decoder = SlotDecoder(model, draft)
        self.cache = CacheManager(config, num_pages=200, dtype=model.dtype, device=model.device)
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
            ids = [generator.randrange(config.vocab_size) for _ in range(length)]
            ids_T = torch.tensor(ids, device=model.device)
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
        return self.verify([[i] for i in ids], idle=idle, context=context)

    def verify(self, lines: list[list[int]], *, idle: int = 0, context: int = 512) -> Tensor:
        """A row for each of these tokens, slot by slot."""
        slots = [slot for slot, line in enumerate(lines) for _ in line]
        places = [state.num_tokens + n for state, line in zip(self.paged, lines, strict=True) for n in range(len(line))]
        ids = [i for line in lines for i in line]
        rows = [*slots, *[self.slots.num_slots] * idle], [*places, *[0] * idle], [*ids, *[0] * idle]
        slot_T, position_T, ids_T = torch.tensor(rows, device=self.model.device)
        step = DecodeStep(self.slots, self.model.rope, slot_T, position_T, context=context)
        with torch.inference_mode():
            logits_TV = self.decoder(step, ids_T)
        for state, line in zip(self.paged, lines, strict=True):
            self.slots.stepped(state, len(line))
        return logits_TV[: len(ids)]

    def wanted(self, ids: list[int]) -> Tensor:
        return self.wanted_lines([[i] for i in ids])

    def wanted_lines(self, lines: list[list[int]]) -> Tensor:
        device = self.model.device
        pairs = zip(self.plain, lines, strict=True)
        return torch.cat([self.model.decode(state, torch.tensor(line, device=device)) for state, line in pairs])

    def roll_back(self, kept: list[int], lines: list[list[int]]) -> None:
        """Of each slot's rows the first so many stand."""
        for number, line, states in zip(kept, lines, zip(self.paged, self.plain, strict=True), strict=True):
            for state in states:
                state.roll_back(state.num_tokens - len(line) + number)


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


@pytest.fixture
def twins() -> tuple[Transformer, Transformer]:
    """A model that holds a checkpoint's bytes, and one that holds their values."""
    packed, decoded = random_model(tiny(), 5), random_model(tiny(), 5)
    pack_weights(packed)
    read = dict(decoded.named_modules())
    with torch.no_grad():
        for name, module in packed.named_modules():
            if isinstance(module, Linear):
                read[name].weight.copy_(module.effective_weight(packed.rounding))
            if isinstance(module, Experts):
                for part, stack in module.packed.items():
                    getattr(read[name], part).copy_(dequantize_rows(*stack, FP4_INDEX, torch.float32))
    return packed, decoded


def test_stored_bytes_decode_as_their_values_do(twins: tuple[Transformer, Transformer]) -> None:
    packed, decoded = (Rig(twin, [1, 2, 37, 130]) for twin in twins)
    assert twins[0].packed and not twins[1].packed
    for ids in ([1, 2, 3, 4], [5, 6, 7, 8]):
        logits_TV = packed.step(ids, idle=1)
        assert torch.equal(logits_TV, decoded.step(ids, idle=1))
        # what the prompts left, and the modules' own way
        torch.testing.assert_close(logits_TV, packed.wanted(ids), rtol=1e-4, atol=1e-4)


def test_a_gpus_order_of_stored_bytes_changes_no_value(twins: tuple[Transformer, Transformer]) -> None:
    packed, decoded = twins
    retile_experts(packed)
    first, second = (Rig(twin, [2, 37]) for twin in (packed, decoded))
    assert torch.equal(first.step([1, 2]), second.step([1, 2]))


def test_stored_bytes_are_held_once(twins: tuple[Transformer, Transformer]) -> None:
    """What a decoder joins is shared with the modules, and nothing of it exists decoded."""
    packed, _ = twins
    decoder = SlotDecoder(packed)
    for layer in decoder._layers:
        attention = layer.block.attn
        assert isinstance(layer.latent, Tiles) and isinstance(attention.wkv.held, Tiles)
        first, last = attention.wkv.held.codes, layer.latent.codes[attention.wq_a.weight.shape[0] :]
        assert first.data_ptr() == last.data_ptr()
    quantized = [module.weight for module in packed.modules() if isinstance(module, Linear) and module.storage == "fp8"]
    assert quantized and all(weight.is_meta for weight in quantized)


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


def same_rows(got: Tensor, want: Tensor) -> Tensor:
    """Which rows agree; those that do not are not far off.

    The two ways sum in different orders. Where a value lies on the edge between two FP8 or FP4 codes the last bit
    decides, which moves that row and those of its sequence that follow.
    """
    error_T = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    assert float(error_T.max()) < 0.5, error_T
    same_T = error_T < 1e-4
    assert float(same_T.double().mean()) >= 0.25, error_T
    return same_T


@pytest.mark.parametrize("seed", range(3))
def test_rejected_rows_leave_nothing(model: Transformer, seed: int) -> None:
    """One to six rows a slot, of which some stand; then the slots are left, and go on as sequences of their own."""
    rig = Rig(model, [1, 11, 37, 126])
    generator = random.Random(seed)
    for _ in range(6):
        lines = [[generator.randrange(500) for _ in range(generator.randrange(1, 7))] for _ in range(4)]
        same_rows(rig.verify(lines, idle=generator.randrange(3)), rig.wanted_lines(lines))
        rig.roll_back([generator.randrange(1, len(line) + 1) for line in lines], lines)
    ids_T, rows = torch.tensor([7, 8, 9]), []
    for slot, (paged, plain) in enumerate(zip(rig.paged, rig.plain, strict=True)):
        rig.slots.leave(paged, slot)
        assert torch.equal(paged.snapshot().recent_L, plain.snapshot().recent_L)
        assert paged.oldest_kept == plain.oldest_kept
        rows.append([model.decode(state, ids_T) for state in (paged, plain)])
        back = max(paged.oldest_kept, paged.num_tokens - 3)
        paged.roll_back(back)
        plain.roll_back(back)
        rows.append([model.decode(state, ids_T) for state in (paged, plain)])
    same_rows(*(torch.cat(one) for one in zip(*rows, strict=True)))


@pytest.fixture(scope="module")
def draft() -> Draft:
    return random_draft(nano())


@pytest.mark.parametrize("seed", range(3))
def test_slots_draft_what_sequences_draft(draft: Draft, seed: int) -> None:
    """Short sequences and long ones, before the first step, between rejected rows, and after they left their slots."""
    model = draft.target
    rig, slot_draft = Rig(model, [1, 5, 40, 130], draft=draft), SlotDraft(draft)
    generator, rounding = random.Random(seed), model.rounding
    for _ in range(4):
        anchor_A = torch.tensor([generator.randrange(500) for _ in range(4)])
        rows, visible = zip(*(state.context() for state in rig.plain), strict=True)
        with torch.inference_mode():
            position_A = torch.tensor([state.num_tokens for state in rig.plain])
            proposal = draft(anchor_A, position_A, torch.stack(rows).to(model.dtype), torch.stack(visible), rounding)
            want = draft.greedy(anchor_A, proposal, rounding)
            idle = torch.tensor([rig.slots.num_slots])
            got = slot_draft(
                rig.slots,
                torch.cat([torch.arange(4), idle]),
                torch.cat([position_A, torch.tensor([0])]),
                torch.cat([anchor_A, torch.tensor([0])]),
            )
        same_A = same_rows(got.base_AGV[:4], proposal.base_AGV) & same_rows(got.hidden_AGD[:4], proposal.hidden_AGD)
        torch.testing.assert_close(got.confidence_AG[:4][same_A], want[2][same_A], rtol=1e-3, atol=1e-3)
        assert torch.equal(got.ids_AG[:4][same_A], want[0][same_A])
        lines = [[int(i), *(int(i) for i in ids)] for i, ids in zip(anchor_A, want[0], strict=True)]
        lines = [line[: generator.randrange(1, 7)] for line in lines]
        same_rows(rig.verify(lines), rig.wanted_lines(lines))
        rig.roll_back([generator.randrange(1, len(line) + 1) for line in lines], lines)
    contexts = []
    for slot, (paged, plain) in enumerate(zip(rig.paged, rig.plain, strict=True)):
        rig.slots.leave(paged, slot)
        (got_rows, got_there), (want_rows, want_there) = paged.context(), plain.context()
        assert torch.equal(got_there, want_there)
        contexts.append((got_rows[got_there], want_rows[want_there]))
    same_rows(*(torch.cat(one) for one in zip(*contexts, strict=True)))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU's choice of kernels, run in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled where there is a GPU: tests/engine/test_runner.py runs them there")
    monkeypatch.setitem(dispatch.ORDER, "cpu", dispatch.ORDER["cuda"])
    dispatch._choices.cache_clear()
    yield
    monkeypatch.undo()
    dispatch._choices.cache_clear()


def test_the_kernels_of_a_gpu_draft_and_verify(interpreted: None) -> None:
    """A round and the step that verifies it, whole, in the kernels that a GPU runs (about 30 s)."""
    draft = random_draft(tiny(), num_blocks=1)
    model, rounding = draft.target, draft.target.rounding
    with use_kernels("reference"):
        rig, slot_draft = Rig(model, [5, 130], draft=draft), SlotDraft(draft)
        anchor_A, position_A = torch.tensor([7, 8]), torch.tensor([5, 130])
        rows, visible = zip(*(state.context() for state in rig.plain), strict=True)
        with torch.inference_mode():
            want = draft(anchor_A, position_A, torch.stack(rows), torch.stack(visible), rounding)
            want_AG = draft.greedy(anchor_A, want, rounding)[0]
    with torch.inference_mode():
        got = slot_draft(rig.slots, torch.arange(2), position_A, anchor_A)
    torch.testing.assert_close(got.base_AGV, want.base_AGV.to(got.base_AGV.dtype), rtol=1e-4, atol=1e-4)
    assert torch.equal(got.ids_AG, want_AG)
    lines = [[7, *want_AG[0, :2].tolist()], [8]]
    logits_TV = rig.verify(lines, idle=1)
    with use_kernels("reference"):
        torch.testing.assert_close(logits_TV, rig.wanted_lines(lines), rtol=1e-4, atol=1e-4)


def test_the_kernels_of_a_gpu_run_a_prompt(interpreted: None) -> None:
    """Chunks longer and shorter than the ring over keys where they are stored, then two drafted tokens."""
    model = random_model(tiny(), 4)
    prompt_T = torch.randint(0, model.config.vocab_size, (29,), generator=torch.Generator().manual_seed(5))
    pieces = prompt_T.split([3, 17, 4, 5])
    with use_kernels("reference"):
        plain = model.new_state()
        want = [model.prefill(plain, piece, prompt_tokens=29) for piece in pieces]
        want.append(model.decode(plain, prompt_T[:2]))
    state = model.new_state()
    state.in_place = True
    got = [model.prefill(state, piece, prompt_tokens=29) for piece in pieces]
    got.append(model.decode(state, prompt_T[:2]))
    torch.testing.assert_close(torch.cat(got), torch.cat(want), rtol=1e-4, atol=1e-4)


def test_the_kernels_of_a_gpu_read_stored_bytes(interpreted: None) -> None:
    model = random_model(tiny(), 3)
    pack_weights(model)
    with use_kernels("reference"):
        rig = Rig(model, [15])
    logits_TV = rig.verify([[7]], context=16)
    with use_kernels("reference"):
        torch.testing.assert_close(logits_TV, rig.wanted_lines([[7]]), rtol=2e-3, atol=2e-3)


def as_near(got_TV: Tensor, other_TV: Tensor, exact_TV: Tensor) -> None:
    """One way of adding up in bfloat16 is not much further from float32's logits than another.

    It moves a random model's by a fifth and more.
    """
    assert got_TV.isfinite().all() and got_TV.shape == exact_TV.shape
    error, usual = (float((x - exact_TV).norm() / exact_TV.norm()) for x in (got_TV, other_TV))
    assert error < 1.5 * usual < 0.9, (error, usual)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[5, 40], [200] * 20])
def test_a_gpu_decodes_stored_bytes_as_their_values(tmp_path: Path, lengths: list[int]) -> None:
    made = random_model(nano(), 5)
    write_checkpoint(made, tmp_path)
    logits = []
    for packed, dtype in ((True, torch.bfloat16), (False, torch.bfloat16), (False, torch.float32)):
        model = read_checkpoint(tmp_path, dtype=dtype, device="cuda", packed=packed)
        model.token_map.set(made.token_map.compressed_V)
        rig = Rig(model, lengths)
        logits += [torch.cat([rig.step([i % 500 for i in range(n, n + len(lengths))]) for n in (1, 7)])]
    as_near(*logits)


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [[4096], [1000, 40, 2000, 1056]])
def test_a_gpu_runs_a_prompt_over_stored_keys_as_over_widened_ones(tmp_path: Path, pieces: list[int]) -> None:
    made = random_model(nano(), 6)
    write_checkpoint(made, tmp_path)
    prompt_T = torch.arange(4096, device="cuda") ** 2 % made.config.vocab_size

    def run(dtype: torch.dtype, in_place: bool) -> Tensor:
        model = read_checkpoint(tmp_path, dtype=dtype, device="cuda")
        model.token_map.set(made.token_map.compressed_V)
        state = model.new_state()
        assert state.in_place
        state.in_place = in_place
        parts = [model.prefill(state, piece, prompt_tokens=4096) for piece in prompt_T.split(pieces)]
        return torch.cat(parts).float()

    exact = run(torch.float32, False)
    assert float((run(torch.float32, True) - exact).norm() / exact.norm()) < 0.05
    as_near(run(torch.bfloat16, True), run(torch.bfloat16, False), exact)


@pytest.mark.usefixtures("without_expert_loop")
def test_a_round_asks_the_device_nothing(draft: Draft) -> None:
    rig, slot_draft = Rig(draft.target, [9, 40], draft=draft), SlotDraft(draft)
    slot_A = torch.tensor([0, 1, 2])
    with use_kernels("reference"), NoSynchronisation(), torch.inference_mode():
        rig.verify([[1, 2, 3], [4]])
        slot_draft(rig.slots, slot_A, torch.tensor([12, 41, 0]), slot_A + 5)


@pytest.mark.usefixtures("without_expert_loop")
def test_a_step_asks_the_device_nothing(model: Transformer) -> None:
    rig = Rig(model, [9, 40], num_slots=3)
    with use_kernels("reference"), NoSynchronisation():
        rig.step([1, 2], idle=1)


@pytest.mark.usefixtures("without_expert_loop")
def test_a_chunk_of_a_prompt_asks_the_device_nothing(model: Transformer) -> None:
    rig = Rig(model, [9], num_slots=1)
    state = model.new_state(make_store=rig.cache.make_store(rig.leases[0], 0))
    ids_T = torch.arange(60)
    with use_kernels("reference"), NoSynchronisation():
        model.prefill(state, ids_T[:40], prompt_tokens=60)
        model.prefill(state, ids_T[40:], prompt_tokens=60)


@pytest.fixture
def without_expert_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference loops over experts by asking who is hit; on a GPU sorted rows take its place."""
    from cedar.kernels.reference import experts as reference

    def experts(u_TD: Tensor, *rest: object) -> Tensor:
        return u_TD.float()

    monkeypatch.setattr(reference, "experts", experts)
    # what was chosen is remembered, for those who come after too
    dispatch._choices.cache_clear()
    yield
    dispatch._choices.cache_clear()
