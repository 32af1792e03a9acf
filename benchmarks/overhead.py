"""What engine and cache add to the model's own time while eight sequences decode. Run `python -m benchmarks.overhead`.

The model's own time is that of `Transformer.step` over states that hold their rows in plain buffers. Against it stand
the same steps, token for token, as an engine runs them: over pages, with sampling, publishing, events and everything
else of its loop. Times are CPU seconds of the thread that computes, so that other jobs on the machine count less.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cedar.cache.manager import CacheManager
from cedar.engine.engine import Engine
from cedar.engine.load import load_model, open_model
from cedar.engine.request import Event, Finished, Request, SamplingParams
from cedar.model.batch import Part
from cedar.model.sequence import Snapshot
from cedar.model.transformer import Transformer


class Clocked:
    """A model that notes, for each step of `batch` rows, when it began and ended in its thread's CPU time."""

    def __init__(self, model: Transformer, batch: int, profile: cProfile.Profile | None) -> None:
        self._model, self._batch, self._profile = model, batch, profile
        self.spans: list[tuple[float, float]] = []
        self.ids: list[list[Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(self, parts: Sequence[Part]) -> list[Tensor]:
        whole = len(parts) == self._batch and all(part.prompt_tokens is None for part in parts)
        if self._profile is not None:
            self._profile.disable()
        began = time.thread_time()
        logits = self._model.step(parts)
        if whole:
            self.spans.append((began, time.thread_time()))
            self.ids.append([part.ids_T for part in parts])
            if self._profile is not None:
                self._profile.enable()
        return logits


def prompts(batch: int, length: int, vocab: int) -> list[tuple[int, ...]]:
    draw = random.Random(1)
    return [tuple(draw.randrange(vocab - 16) for _ in range(length)) for _ in range(batch)]


def bare(model: Transformer, given: list[tuple[int, ...]], steps: list[list[Tensor]]) -> list[float]:
    """Seconds of each step of the model alone, over the tokens that an engine chose."""
    states = [model.new_state() for _ in given]
    for state, ids in zip(states, given, strict=True):
        model.prefill(state, torch.tensor(ids), last_only=True)
    took = []
    for ids in steps:
        began = time.thread_time()
        model.step([Part(state=state, ids_T=part_T) for state, part_T in zip(states, ids, strict=True)])
        took.append(time.thread_time() - began)
    return took


def in_engine(
    model: Transformer, given: list[tuple[int, ...]], steps: int, profile: cProfile.Profile | None = None
) -> tuple[list[float], list[float], list[list[Tensor]]]:
    """(seconds of each step inside the model, seconds between one step's end and the next one's begin, the tokens)."""
    clocked = Clocked(model, len(given), profile)
    cache = CacheManager(
        model.config,
        num_pages=512,
        dtype=model.dtype,
        device=model.device,
        snapshot_bytes=2**26,
        fingerprint=b"benchmark",
        read_snapshot=Snapshot.from_bytes,
    )
    engine = Engine(clocked, cache=cache)
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=steps + 4 * len(given))
    done = threading.Semaphore(0)

    def note(event: Event) -> None:
        if isinstance(event, Finished):
            done.release()

    for ids in given:
        engine.submit(Request(prompt_ids=ids, sampling=sampling), note)
    for _ in given:
        done.acquire()
    engine.close()
    spans = clocked.spans
    between = [later[0] - earlier[1] for earlier, later in zip(spans, spans[1:], strict=False)]
    return [end - began for began, end in spans], between, clocked.ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled", help="A model directory.")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=200, metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="Where the time between two steps goes.")
    options = parser.parse_args()
    model = load_model(open_model(options.model))
    given = prompts(options.batch, options.prompt, model.config.vocab_size)
    own, inside, between = [], [], []
    for _ in range(options.rounds):
        one, other, ids = in_engine(model, given, options.steps)
        inside += one
        between += other
        own += bare(model, given, ids)
    alone, paged, rest = (statistics.median(times) * 1000 for times in (own, inside, between))
    print(f"batch {options.batch}, prompts of {options.prompt}, {len(inside)} steps: medians of CPU time a step")
    print(f"model alone             {alone:7.2f} ms")
    print(f"model over pages        {paged:7.2f} ms  {paged / alone - 1:+6.1%}")
    print(f"engine between two      {rest:7.2f} ms  {rest / alone:+6.1%}")
    print(f"together                {paged + rest:7.2f} ms  {(paged + rest) / alone - 1:+6.1%}")
    if options.profile:
        profile = cProfile.Profile()
        in_engine(model, given, options.steps, profile)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(25)


if __name__ == "__main__":
    main()
