"""States of sequences in tests: made from another's entries, run to the end, compared byte by byte."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from cedar.config.model import ModelConfig
from cedar.errors import CapacityError
from cedar.model.sequence import SequenceState, exact_span
from cedar.model.state import DecoderReplay
from cedar.model.transformer import Transformer


def with_entries(
    model: Transformer, donor: SequenceState, cached: int, replay: DecoderReplay = "bounded"
) -> SequenceState:
    """A fresh state that holds the donor's entries of the first `cached` tokens, and nothing else."""
    ratios = model.config.attention.compress_ratios
    held = {"entries": donor.entries, "keys": donor.keys}
    return model.new_state(
        decoder_replay=replay, make_store=lambda what, source: held[what][source].prefix(cached // ratios[source])
    )


def run(model: Transformer, state: SequenceState, ids: Tensor, prompt: int, chunk: int = 1000) -> Tensor:
    """The rest of the prompt in chunks, then the rest of `ids` token by token: the logits of the prompt's end on."""
    logits = torch.empty(0)
    while state.num_tokens < prompt:
        part = ids[state.num_tokens : min(state.num_tokens + chunk, prompt)]
        logits = model.prefill(state, part, prompt_tokens=prompt)[-1:]
    rows = [logits, *(model.decode(state, ids[i : i + 1]) for i in range(prompt, len(ids)))]
    return torch.cat(rows)


def visible(state: SequenceState) -> list[Tensor]:
    """Every byte that a later row can read: entries, keys, the last window, the waiting half, recent ids."""
    ratios = state.config.attention.compress_ratios
    rows = [
        part
        for what in (state.entries, state.keys)
        for source, store in what.items()
        for part in store.read(torch.arange(state.num_tokens // ratios[source]))
    ]
    reach = state.config.attention.sliding_window - 1
    for layer, store in enumerate(state.windows):
        floor = min(max(state.num_tokens - reach, state.window_floor(layer), 0), state.num_tokens)
        rows += store.read(torch.arange(floor, state.num_tokens) % state.num_slots)
    if state.num_tokens % 2:
        rows += [half[-1:] for source in sorted(state.tails) for half in state.tails[source]]
    return [*rows, state.recent_L]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def random_ids(config: ModelConfig, length: int, seed: int) -> Tensor:
    return torch.randint(0, config.vocab_size - 8, (length,), generator=torch.Generator().manual_seed(seed))


def check_exact_rebuilds(
    model: Transformer, ids: Tensor, prompt: int, hits: Iterable[int], replay: DecoderReplay = "bounded"
) -> int:
    """Every hit's exact rebuild equals the cold prompt, or is refused where it would save nothing; how many ran.

    Args:
        ids: The prompt's and what is generated behind it.
    """
    cold, rebuilt = model.new_state(decoder_replay=replay), 0
    want = run(model, cold, ids, prompt)
    for cached in hits:
        state = with_entries(model, cold, cached, replay)
        start, _ = exact_span(model.config, replay, cached, prompt)
        if start <= 0:
            with pytest.raises(CapacityError, match="start cold"):
                state.resume_exact(ids, cached, prompt)
            continue
        assert state.resume_exact(ids, cached, prompt) == start
        assert torch.equal(run(model, state, ids, prompt, chunk=97), want), cached
        assert same(visible(state), visible(cold)), cached
        rebuilt += 1
    return rebuilt
