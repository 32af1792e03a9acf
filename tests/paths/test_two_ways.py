"""Two ways through the same layers, any cut of a prompt, and nothing that looks ahead."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cedar.config.model import ModelConfig
from cedar.config.presets import nano
from cedar.config.rounding import Rounding
from cedar.kernels.dispatch import deterministic
from cedar.model import select
from cedar.model.sequence import SequenceState
from cedar.model.transformer import Transformer
from tests.paths.random_models import configs, random_model, tiny

pytestmark = pytest.mark.device

EXAMPLES = settings(max_examples=25, deadline=None)


def _pieces(ids: Tensor, cuts: list[int]) -> list[Tensor]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:stop] for start, stop in zip(edges, edges[1:], strict=False)]


def _stateful(model: Transformer, ids: Tensor, cuts: list[int], prompt_tokens: int) -> Tensor:
    """Prompt in pieces, then one token at a time, decoder on all rows: logits of every position."""
    state = model.new_state(decoder_replay="off")
    parts = [model.prefill(state, piece, prompt_tokens=prompt_tokens) for piece in _pieces(ids[:prompt_tokens], cuts)]
    parts += [model.decode(state, ids[i : i + 1]) for i in range(prompt_tokens, len(ids))]
    return torch.cat(parts)


def _cache(state: SequenceState) -> list[Tensor]:
    """Everything the state stores, as the bytes that are valid."""
    stores = [*state.entries.values(), *state.keys.values()]
    planes = [plane[: store.count] for store in stores for plane in store._planes]
    # window rows a bounded prefill never wrote stay zero whatever the cut
    planes += [plane for window in state.windows for plane in window._planes]
    return planes + [half for pair in state.tails.values() for half in pair] + [state.recent_L]


@EXAMPLES
@given(
    config=configs(),
    seed=st.integers(0, 2**16),
    length=st.integers(1, 45),
    prompt=st.integers(1, 45),
    cuts=st.lists(st.integers(0, 45), max_size=4),
)
def test_whole_equals_prefill_and_decode(
    config: ModelConfig, seed: int, length: int, prompt: int, cuts: list[int]
) -> None:
    model = random_model(config, seed)
    ids = torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
    prompt = min(prompt, length)
    with deterministic(), torch.inference_mode():
        whole = model(ids[None], form="gathered").logits_BSV[0]
        assert torch.equal(whole, _stateful(model, ids, cuts, prompt))
    model.rounding = Rounding.none()
    with torch.inference_mode():
        whole = model(ids[None], form="gathered").logits_BSV[0]
        masked = model(ids[None]).logits_BSV[0]
    stateful = _stateful(model, ids, cuts, prompt)
    assert (whole - stateful).abs().max() <= 1e-4
    assert (whole - masked).abs().max() <= 1e-4


@EXAMPLES
@given(
    config=configs(),
    seed=st.integers(0, 2**16),
    length=st.integers(1, 90),
    cuts=st.lists(st.integers(0, 90), max_size=5),
    replay=st.sampled_from(["bounded", "exact20", "exact", "off"]),
    new_tokens=st.integers(0, 3),
)
def test_any_cut_gives_the_same_bytes_and_logits(
    config: ModelConfig, seed: int, length: int, cuts: list[int], replay: str, new_tokens: int
) -> None:
    model = random_model(config, seed)
    ids = torch.randint(0, config.vocab_size, (length + new_tokens,), generator=torch.Generator().manual_seed(seed))
    outcomes = []
    with deterministic():
        for pieces in ([ids[:length]], _pieces(ids[:length], cuts)):
            state = model.new_state(decoder_replay=replay)
            logits = [model.prefill(state, piece, prompt_tokens=length) for piece in pieces]
            logits += [model.decode(state, ids[i : i + 1]) for i in range(length, length + new_tokens)]
            outcomes.append((torch.cat(logits), _cache(state)))
    (one_logits, one_cache), (cut_logits, cut_cache) = outcomes
    assert torch.equal(one_logits, cut_logits)
    assert len(one_cache) == len(cut_cache)
    for one, cut in zip(one_cache, cut_cache, strict=True):
        assert torch.equal(one, cut)


@EXAMPLES
@given(config=configs(), seed=st.integers(0, 2**16), length=st.integers(2, 40), data=st.data())
def test_a_later_token_changes_no_earlier_logit(
    config: ModelConfig, seed: int, length: int, data: st.DataObject
) -> None:
    """Field report A16, at every position of both forms."""
    model = random_model(config, seed)
    ids = torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
    changed = data.draw(st.integers(1, length - 1))
    other = ids.clone()
    other[changed] = (other[changed] + 1) % config.vocab_size
    with deterministic(), torch.inference_mode():
        before = model(ids[None], form="gathered").logits_BSV[0]
        after = model(other[None], form="gathered").logits_BSV[0]
    assert torch.equal(before[:changed], after[:changed])
    assert not torch.equal(before[changed:], after[changed:])
    with torch.inference_mode():
        before = model(ids[None], rounding=Rounding.none()).logits_BSV[0]
        after = model(other[None], rounding=Rounding.none()).logits_BSV[0]
    torch.testing.assert_close(before[:changed], after[:changed], rtol=0, atol=1e-5)


@EXAMPLES
@given(config=configs(), seed=st.integers(0, 2**16), length=st.integers(1, 90))
def test_exact_replay_gives_the_last_logits_of_all_rows(config: ModelConfig, seed: int, length: int) -> None:
    """`exact` runs fewer decoder rows than `off` and loses nothing: the last logits and all that follow."""
    model = random_model(config, seed)
    ids = torch.randint(0, config.vocab_size, (length + 3,), generator=torch.Generator().manual_seed(seed))
    lasts = []
    with deterministic():
        for replay in ("exact", "off"):
            state = model.new_state(decoder_replay=replay)
            last = model.prefill(state, ids[:length], last_only=True)
            lasts.append(torch.cat([last, *(model.decode(state, ids[i : i + 1]) for i in range(length, length + 3))]))
    assert torch.equal(*lasts)


@settings(max_examples=15, deadline=None)
@given(config=configs(), seed=st.integers(0, 2**16), lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4))
def test_packed_samples_do_not_see_each_other(config: ModelConfig, seed: int, lengths: list[int]) -> None:
    """All eight resets at a sample boundary: a pack gives each sample what it gets alone (training.md 6, trap 10)."""
    model = random_model(config, seed)
    model.rounding = Rounding.none()
    generator = torch.Generator().manual_seed(seed)
    samples = [torch.randint(0, config.vocab_size, (length,), generator=generator) for length in lengths]
    pack, starts, firsts = [], [], []
    for sample in samples:
        padded = torch.cat([sample, sample.new_full((len(sample) % 2,), config.pad_token_id)])
        firsts.append(len(pack))
        starts += [len(pack)] * len(padded)
        pack += padded.tolist()
    with torch.inference_mode():
        packed = model(torch.tensor([pack]), segment_start_BS=torch.tensor([starts])).logits_BSV[0]
        for sample, first in zip(samples, firsts, strict=True):
            alone = model(sample[None]).logits_BSV[0]
            torch.testing.assert_close(packed[first : first + len(sample)], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("in_place", [False, True])
def test_rows_whose_scores_do_not_fit_take_turns(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    model = random_model(tiny(), 9)
    ids = torch.randint(0, model.config.vocab_size, (70,), generator=torch.Generator().manual_seed(9))
    outcomes = []
    for most in (1 << 27, 300):
        for name in ("_MOST_PRODUCTS", "_MOST_PRODUCTS_GPU"):
            monkeypatch.setattr(select, name, most)
        state = model.new_state(decoder_replay="off")
        state.in_place = in_place
        with nullcontext() if in_place else deterministic():
            outcomes.append(model.prefill(state, ids))
    if in_place:
        torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(*outcomes)


def test_bfloat16_ways_agree_in_deterministic_mode() -> None:
    for seed in range(3):
        model = random_model(nano(), seed, torch.bfloat16)
        ids = torch.randint(0, 500, (37,), generator=torch.Generator().manual_seed(seed))
        with deterministic(), torch.inference_mode():
            whole = model(ids[None], form="gathered").logits_BSV[0]
            assert torch.equal(whole, _stateful(model, ids, [3, 17, 18], 30))
