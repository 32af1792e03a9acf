"""How far the approximate ways to start a prompt are from the exact one. Run `python -m benchmarks.approximate`.

A1: the decoder on the last window only, against all rows. A2: a bounded replay of a cached prefix, against a cold
prefill; also after many of them in a row, as in a long conversation. A3: a snapshot that goes on with less than a
window, against a cold prefill. Each compares the logits of the prompt's last row and of 64 tokens that follow, the same
ones on both sides: largest difference, Kullback-Leibler divergence, and how often the likeliest token agrees
(serving.md 2.7).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cedar.engine.load import load_model, open_model
from cedar.model.sequence import EntryStore, RowStore, SequenceState
from cedar.model.transformer import Transformer

TEXT = (
    "Once upon a time there was a little fox who lived near a big river. Every day she went to the water to look for "
    "fish. One day she met a bird who was sad because it could not find its nest. The fox said, do not cry, I will "
    "help you. They walked through the forest and asked the owl, the rabbit and the old bear. At last they saw the "
    "nest high in a tree. The bird was happy and sang a song. The fox was happy too and they became good friends. "
)
FOLLOWING = 64


@dataclass(frozen=True, slots=True)
class Distance:
    """Of logits from those of the exact way.

    Attributes:
        largest: Largest difference of a logit.
        divergence: Mean KL divergence in nats, exact from approximate.
        agreement: Share of rows whose likeliest token is the same.
    """

    largest: float
    divergence: float
    agreement: float

    @classmethod
    def of(cls, got_TV: Tensor, want_TV: Tensor) -> Distance:
        got, want = got_TV.double().log_softmax(-1), want_TV.double().log_softmax(-1)
        divergence = (want.exp() * (want - got)).sum(-1).mean()
        same = (got_TV.argmax(-1) == want_TV.argmax(-1)).double().mean()
        return cls(float((got_TV - want_TV).abs().max()), float(divergence), float(same))


def text_ids(num_tokens: int, path: str = "bundled") -> Tensor:
    """Token ids of simple stories, with a number in each so that no two passages are the same."""
    tokenizer = open_model(path).tokenizer
    ids: list[int] = []
    number = 0
    while len(ids) < num_tokens:
        number += 1
        ids += tokenizer.encode(f"{TEXT} That was day {number}. ")
    return torch.tensor(ids[:num_tokens])


def finish(model: Transformer, state: SequenceState, ids: Tensor, prompt: int) -> Tensor:
    """Logits of the prompt's last row and of the tokens after it."""
    last = model.prefill(state, ids[state.num_tokens : prompt], prompt_tokens=prompt, last_only=True)
    return torch.cat([last, model.decode(state, ids[prompt : prompt + FOLLOWING])])


def over(model: Transformer, donor: SequenceState, cached: int) -> SequenceState:
    """A fresh state that holds another's entries of the first `cached` tokens."""
    ratios = model.config.attention.compress_ratios
    held = {"entries": donor.entries, "keys": donor.keys}

    def copied(what: Literal["entries", "keys"], source: int) -> EntryStore:
        store = held[what][source]
        assert isinstance(store, RowStore)
        return store.prefix(cached // ratios[source])

    return model.new_state(make_store=copied)


def bounded_decoder(model: Transformer, ids: Tensor, prompt: int) -> Distance:
    """A1."""
    got = finish(model, model.new_state(), ids, prompt)
    return Distance.of(got, finish(model, model.new_state(decoder_replay="off"), ids, prompt))


def bounded_replays(model: Transformer, ids: Tensor, prompt: int, counts: Sequence[int]) -> dict[int, Distance]:
    """A2: the prompt grows in turns; each adopts what the turn before left, after a replay of one window."""
    most = max(counts)
    want = finish(model, model.new_state(), ids, prompt)
    step = (prompt // (most + 1)) // 2 * 2
    # after the r-th resume the last turn reaches the prompt's end, so that all are compared at the same place
    distances = {}
    for count in counts:
        state = model.new_state()
        first = prompt - count * step
        model.prefill(state, ids[:first])
        for turn in range(1, count + 1):
            cached = (first + (turn - 1) * step) // 2 * 2
            state = over(model, state, cached)
            start = state.resume_bounded(ids, cached)
            stop = first + turn * step
            if turn < count:
                model.prefill(state, ids[start:stop], prompt_tokens=stop)
        distances[count] = Distance.of(finish(model, state, ids, prompt), want)
    return distances


def close_snapshot(model: Transformer, ids: Tensor, prompt: int, added: int) -> Distance:
    """A3: the next turn adds fewer tokens than a window, so its decoder goes on from the snapshot's windows."""
    before = model.new_state()
    model.prefill(before, ids[: prompt - added])
    resumed = over(model, before, prompt - added)
    resumed.restore(before.snapshot())
    return Distance.of(finish(model, resumed, ids, prompt), finish(model, model.new_state(), ids, prompt))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=2000, metavar="TOKENS")
    options = parser.parse_args()
    model, ids = load_model(open_model()), text_ids(options.prompt + FOLLOWING)
    ids = ids.to(model.device)
    window = model.config.attention.sliding_window
    print(f"bundled model, stories of {options.prompt} tokens and {FOLLOWING} that follow")
    print("| | largest difference of a logit | KL, nats | same likeliest token |\n|---|--:|--:|--:|")

    def show(name: str, distance: Distance) -> None:
        print(f"| {name} | {distance.largest:.3f} | {distance.divergence:.2g} | {distance.agreement:.1%} |", flush=True)

    show("A1, decoder on the last window", bounded_decoder(model, ids, options.prompt))
    counts = [count for count in (1, 2, 5, 10, 20, 50) if options.prompt // (count + 1) > window + 2]
    for count, distance in bounded_replays(model, ids, options.prompt, counts).items():
        show(f"A2, {count} bounded replays", distance)
    for added in (1, window // 2, window - 1):
        show(f"A3, a snapshot and {added} tokens", close_snapshot(model, ids, options.prompt, added))


if __name__ == "__main__":
    main()
