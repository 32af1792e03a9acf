"""Resuming a sequence: golden encoder replay, and the four grades against cold and uninterrupted runs (about 60 s)."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cedar.config.model import ModelConfig
from cedar.config.presets import nano
from cedar.config.rounding import Rounding
from cedar.errors import CapacityError
from cedar.kernels.dispatch import deterministic
from cedar.model.batch import Part
from cedar.model.state import DecoderReplay
from cedar.model.transformer import Transformer
from tests import golden
from tests.paths.random_models import configs, random_model
from tests.paths.states import check_exact_rebuilds, random_ids, run, same, visible, with_entries

pytestmark = pytest.mark.device

REPLAYS: list[DecoderReplay] = ["bounded", "exact20", "exact"]


@pytest.fixture(scope="module")
def small() -> Transformer:
    """Nano, whose window is short; every gain and bias is random."""
    return random_model(nano(), 5)


@pytest.mark.parametrize("chunk", [1000, 5, 1])
@pytest.mark.parametrize("letter", ["a", "b"])
@pytest.mark.parametrize(("cached", "length"), [(24, 33), (32, 32), (40, 61)])
def test_golden_encoder_replay(letter: str, cached: int, length: int, chunk: int) -> None:
    data = golden.load("replay")
    for mode in ("f32_noquant", "f32_kv", "bf16"):
        model = golden.model(letter, mode)
        ids = data[f"{letter}.replay.h{cached}.n{length}.ids"]
        donor = model.new_state()
        model.prefill(donor, ids)
        for infix, replay in (("", "bounded"), ("wide.", "off")):
            key = f"{letter}.replay.h{cached}.n{length}.{infix}{mode}"
            if key not in data:
                continue
            state = with_entries(model, donor, cached, replay)
            start = state.resume_bounded(ids, cached)
            assert start == cached - model.config.attention.sliding_window
            got = torch.cat([model.prefill(state, part, prompt_tokens=length) for part in ids[start:].split(chunk)])
            assert got.shape == data[key].shape
            if mode == "f32_noquant":
                assert (got - data[key]).abs().max() <= 1e-4
            else:
                assert golden.rms(got, data[key]) <= max(0.3, float(data[f"{key}.rms_tol"]))


def whole_with_replay(model: Transformer, ids: Tensor, cached: int, before: int = 0) -> Tensor:
    """Logits of the last window's rows by the whole-sequence form: what training sees of encoder and decoder replay.

    Args:
        before: Rows of another sample in the same pack.
    """
    window = model.config.attention.sliding_window
    other = torch.full((before,), 7)
    row = torch.cat([other, ids[:cached], ids[cached - window : cached], ids[cached:]]).unsqueeze(0)
    start = torch.full_like(row, before)
    start[:, :before] = 0
    replay = torch.full_like(row, before + cached)
    replay[:, :before] = row.shape[1]
    # rows of the repeated part and after it are one window further on than their positions
    floor = torch.where(start == before, max(len(ids) - window, 0) + window + before, 0)
    output = model(row, segment_start_BS=start, replay_start_BS=replay, window_floor_BS=floor)
    return output.logits_BSV[0, -min(window, len(ids)) :]


@pytest.mark.parametrize("before", [0, 10])
@pytest.mark.parametrize("letter", ["a", "b"])
@pytest.mark.parametrize(("cached", "length"), [(24, 33), (32, 32), (40, 61)])
def test_whole_sequences_replay_as_serving_does(letter: str, cached: int, length: int, before: int) -> None:
    data = golden.load("replay")
    model = golden.model(letter, "f32_noquant")
    ids = data[f"{letter}.replay.h{cached}.n{length}.ids"]
    want = data[f"{letter}.replay.h{cached}.n{length}.f32_noquant"]
    got = whole_with_replay(model, ids, cached, before)
    assert (got[-len(want) :] - want).abs().max() <= 1e-4


@settings(max_examples=12, deadline=None)
@given(config=configs(), seed=st.integers(0, 2**16), data=st.data())
def test_whole_sequences_replay_as_a_cache_miss(config: ModelConfig, seed: int, data: st.DataObject) -> None:
    window = config.attention.sliding_window
    assume(window % 2 == 0)
    model = random_model(config, seed)
    model.rounding = Rounding.none()
    cached = 2 * data.draw(st.integers(window // 2 + 1, window + 6), label="cached pairs")
    ids = random_ids(config, cached + data.draw(st.integers(1, 30), label="suffix"), seed)
    donor = model.new_state()
    model.prefill(donor, ids)
    state = with_entries(model, donor, cached)
    start = state.resume_bounded(ids, cached)
    want = model.prefill(state, ids[start:], prompt_tokens=len(ids))
    got = whole_with_replay(model, ids, cached, before=data.draw(st.sampled_from([0, 6])))[-len(want) :]
    # a near tie between two entries or experts may go either way: most rows agree closely
    assert ((got - want).abs().amax(-1) < 1e-3).float().mean() >= 0.75


@settings(max_examples=12, deadline=None)
@given(config=configs(), seed=st.integers(0, 2**16), replay=st.sampled_from([*REPLAYS, "off"]), data=st.data())
def test_snapshot_goes_on_bit_for_bit(
    config: ModelConfig, seed: int, replay: DecoderReplay, data: st.DataObject
) -> None:
    """X3, at any point: inside the prompt, at its end, while decoding, at both parities."""
    model = random_model(config, seed)
    length, prompt = 60, data.draw(st.integers(1, 56), label="prompt")
    stop = data.draw(st.integers(1, 58), label="stop")
    ids = random_ids(config, length, seed)
    with deterministic():
        through = model.new_state(decoder_replay=replay)
        if stop <= prompt:
            model.prefill(through, ids[:stop], prompt_tokens=prompt)
        else:
            run(model, through, ids[:stop], prompt)
        snapshot, resumed = through.snapshot(), with_entries(model, through, stop, replay)
        want = run(model, through, ids, max(prompt, stop))
        resumed.restore(snapshot)
        assert torch.equal(run(model, resumed, ids, max(prompt, stop)), want)
    assert same(visible(resumed), visible(through))


@pytest.mark.parametrize("replay", REPLAYS)
def test_window_and_more_after_a_snapshot_equals_cold(small: Transformer, replay: DecoderReplay) -> None:
    """X13, W read for 128: N - P in {W, W + 1, 2 W, 3 W + 5}; one less may differ and is the other reference."""
    window = small.config.attention.sliding_window
    draw = random.Random(1)
    with deterministic():
        for extra in (window, window + 1, 2 * window, 3 * window + 5):
            for base in (2, window + 2, 2 * draw.randrange(1, 60)):
                ids = random_ids(small.config, base + extra + 4, base)
                first = small.new_state(decoder_replay=replay)
                small.prefill(first, ids[:base])
                resumed = with_entries(small, first, base, replay)
                resumed.restore(first.snapshot())
                cold = small.new_state(decoder_replay=replay)
                prompt = base + extra
                assert torch.equal(run(small, resumed, ids, prompt), run(small, cold, ids, prompt)), (base, extra)
                assert same(visible(resumed), visible(cold))


def exact_hits(model: Transformer, replay: DecoderReplay, prompt: int, hits: list[int]) -> None:
    with deterministic():
        check_exact_rebuilds(model, random_ids(model.config, prompt + 4, prompt), prompt, hits, replay)


@pytest.mark.parametrize("replay", REPLAYS)
def test_exact_rebuild_equals_cold(small: Transformer, replay: DecoderReplay) -> None:
    """X4, sampled: hits from the shortest on, at the prompt's end, around pages."""
    draw = random.Random(2)
    exact_hits(
        small, replay, 420, [130, 254, 256, 258, 384, 418, 420, *(2 * draw.randrange(65, 210) for _ in range(3))]
    )


@settings(max_examples=12, deadline=None)
@given(config=configs(), seed=st.integers(0, 2**16), replay=st.sampled_from(REPLAYS), half=st.integers(1, 300))
def test_exact_rebuild_of_any_schedule(config: ModelConfig, seed: int, replay: DecoderReplay, half: int) -> None:
    exact_hits(random_model(config, seed), replay, 610, [2 * half])


def test_bounded_replay_depends_on_tokens_and_hit_alone(small: Transformer) -> None:
    """X5 without batch mates: chunks and the donor's own way do not matter; X2: the adopted entries stay."""
    ids = random_ids(small.config, 320, 3)
    with deterministic():
        donor = small.new_state()
        small.prefill(donor, ids[:300])
        before = [part.clone() for part in visible(donor)]
        outcomes = []
        for chunk in (1000, 37, 128):
            state = with_entries(small, donor, 256)
            state.resume_bounded(ids, 256)
            outcomes.append((run(small, state, ids, 310, chunk), visible(state)))
            for source, store in state.entries.items():
                count = 256 // small.config.attention.compress_ratios[source]
                row = torch.arange(count)
                assert same(store.read(row), donor.entries[source].read(row))
                assert same(state.keys[source].read(row), donor.keys[source].read(row))
    for logits, rows in outcomes[1:]:
        assert torch.equal(logits, outcomes[0][0]) and same(rows, outcomes[0][1])
    assert same(before, visible(donor))


def test_short_and_odd_hits_are_refused(small: Transformer) -> None:
    """X6: lengths 1 to W + 1; field report B02."""
    window = small.config.attention.sliding_window
    ids = random_ids(small.config, 4 * window, 4)
    donor = small.new_state()
    small.prefill(donor, ids)
    for cached in range(1, window + 2):
        with pytest.raises(CapacityError, match="start cold|even"):
            with_entries(small, donor, cached).resume_bounded(ids, cached)
    state = with_entries(small, donor, window + 2 + window % 2)
    with pytest.raises(CapacityError, match="entries"):
        state.resume_bounded(ids, window + 4 + window % 2)


def test_snapshot_of_another_kind_is_refused(small: Transformer) -> None:
    ids = random_ids(small.config, 50, 5)
    donor = small.new_state(decoder_replay="exact20")
    small.prefill(donor, ids)
    with pytest.raises(CapacityError, match="exact20"):
        with_entries(small, donor, 50).restore(donor.snapshot())


@pytest.mark.parametrize("accepted", range(6))
def test_rejected_drafts_leave_nothing(small: Transformer, accepted: int) -> None:
    """X9, a scripted drafter of 5: every visible byte, both parities, around the window's edge (report B12)."""
    window = small.config.attention.sliding_window
    for position in (*range(window - 2, window + 5), 127, 128, 129):
        ids = random_ids(small.config, position + 9, position)
        wrong = (ids[position + accepted : position + 6] + 1) % 100
        with deterministic():
            drafted, plain = small.new_state(), small.new_state()
            for state in (drafted, plain):
                small.prefill(state, ids[:position])
            small.decode(drafted, torch.cat([ids[position : position + accepted], wrong])[:6])
            drafted.roll_back(position + accepted)
            if accepted:
                small.decode(plain, ids[position : position + accepted])
            assert same(visible(drafted), visible(plain)), position
            following = [
                small.decode(state, ids[position + accepted : position + accepted + 3]) for state in (drafted, plain)
            ]
        assert torch.equal(*following)
    with pytest.raises(CapacityError, match="roll back"):
        drafted.roll_back(position - 1)


def test_a_batch_of_sequences_is_each_alone(small: Transformer) -> None:
    """X7 and field report B04: any company, any order, different lengths and parities."""
    lengths = [1, 2, 9, 30, 75, 131]
    ids = [random_ids(small.config, length + 4, length) for length in lengths]
    with deterministic():
        alone = []
        for part, length in zip(ids, lengths, strict=True):
            state = small.new_state()
            run(small, state, part[:length], length)
            alone.append((torch.cat([small.decode(state, part[i : i + 1]) for i in range(length, length + 4)]), state))
        for order in ([0, 1, 2, 3, 4, 5], [5, 2, 0, 4, 1, 3], [3]):
            states = [small.new_state() for _ in order]
            for state, number in zip(states, order, strict=True):
                run(small, state, ids[number][: lengths[number]], lengths[number])
            steps = []
            for i in range(4):
                parts = [ids[number][lengths[number] + i : lengths[number] + i + 1] for number in order]
                steps.append(small.step([Part(state=s, ids_T=i) for s, i in zip(states, parts, strict=True)]))
            for place, number in enumerate(order):
                assert torch.equal(torch.cat([step[place] for step in steps]), alone[number][0])
                assert same(visible(states[place]), visible(alone[number][1]))


def test_a_batch_may_mix_one_row_and_several(small: Transformer) -> None:
    """Restored copies run one by one, the originals together."""
    states = [small.new_state() for _ in range(3)]
    for number, state in enumerate(states):
        small.prefill(state, random_ids(small.config, 20 + number, number))
    copies = [with_entries(small, state, state.num_tokens) for state in states]
    for copy, state in zip(copies, states, strict=True):
        copy.restore(state.snapshot())
    ids = [torch.tensor([7]), torch.tensor([8, 9]), torch.tensor([10])]
    with deterministic():
        together = small.step([Part(state=s, ids_T=i) for s, i in zip(states, ids, strict=True)])
        for copy, part, rows in zip(copies, ids, together, strict=True):
            assert torch.equal(small.decode(copy, part), rows)


@pytest.mark.parametrize("replay", [*REPLAYS, "off"])
def test_a_step_of_mixed_rows_is_each_alone(small: Transformer, replay: DecoderReplay) -> None:
    """Decode rows, drafted rows, chunks before, across and at the end of the last window, replayed rows."""
    window = small.config.attention.sliding_window
    donor = small.new_state(decoder_replay=replay)
    given = random_ids(small.config, 700, 1)
    small.prefill(donor, given[:600])

    def make() -> list[Part]:
        """(state, rows) of each kind, fresh."""
        parts = []
        for number, (held, rows, prompt) in enumerate(
            [(40, 1, None), (41, 6, None), (0, 300, 700), (90, 33, 123), (7, 2 * window, 7 + 3 * window), (0, 1, 1)]
        ):
            state = small.new_state(decoder_replay=replay)
            ids = random_ids(small.config, held + rows, number)
            if held:
                small.prefill(state, ids[:held], prompt_tokens=prompt or held)
            parts.append(Part(state=state, ids_T=ids[held:], prompt_tokens=prompt))
        for exact in (True, False):
            state = with_entries(small, donor, 600, replay)
            if exact and replay != "off":
                start = state.resume_exact(given, 600, 650)
            else:
                start = state.resume_bounded(given, 600)
            parts.append(Part(state=state, ids_T=given[start:640], prompt_tokens=650))
        return parts

    with deterministic():
        together, alone = make(), make()
        logits = small.step(together)
        for part, one, rows in zip(together, alone, logits, strict=True):
            want = small.step([one])[0]
            assert torch.equal(rows, want)
            assert rows.shape[0] == (
                len(part.ids_T) if part.prompt_tokens is None else part.state.num_tokens == part.prompt_tokens
            )
            assert same(visible(part.state), visible(one.state))
