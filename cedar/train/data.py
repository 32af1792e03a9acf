"""Packed batches: a pure function of (seed, step), so that resuming needs only the step.

A row is cut into samples of drawn lengths; each starts at an even row, where positions, windows, compression
and n-grams restart. B rows of a batch, S tokens of a row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cedar.chat.tokenizer import PAD, Tokenizer
from cedar.config.train import StageConfig, TrainConfig
from cedar.errors import ConfigError
from cedar.train.corpus import Corpus, open_corpus
from cedar.train.sample import Sample
from cedar.train.tasks import Tasks

# what is left of a row below this is padding
_SHORTEST = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One step's rows.

    Attributes:
        ids_BS: int32 token ids.
        targets_BS: int32; the token to predict at this row, -1 where nothing is learnt.
        segment_start_BS: int32; row at which this row's sample begins.
        window_floor_BS: int32; first row that the decoder's windows may see from here.
        replay_start_BS: int32; first of the rows by which this row's sample repeats a window of itself, the
            row's length where it repeats none.
        sample_BS: int32; number of the row's sample within the batch, -1 for padding.
        num_samples: How many there are.
        dense: Attention sees every visible entry.
    """

    step: int
    stage: int
    ids_BS: Tensor
    targets_BS: Tensor
    segment_start_BS: Tensor
    window_floor_BS: Tensor
    replay_start_BS: Tensor
    sample_BS: Tensor
    num_samples: int
    dense: bool

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; copies overlap where the source is pinned."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Called by the loader on a machine with a GPU."""
        return self.each(Tensor.pin_memory)

    def rows(self, start: int, stop: int) -> Batch:
        """A micro-batch; sample numbers stay those of the whole batch."""
        return self.each(lambda tensor: tensor[start:stop])

    def copy_(self, other: Batch) -> None:
        """Take another batch's tensors into this one's memory."""
        for f in fields(self):
            if f.name.endswith("_BS"):
                getattr(self, f.name).copy_(getattr(other, f.name))

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with every tensor changed."""
        changed: dict[str, Any] = {
            f.name: change(getattr(self, f.name)) for f in fields(self) if f.name.endswith("_BS")
        }
        return replace(self, **changed)


def load_corpora(folder: str | Path, tokenizer: Tokenizer, split: str) -> dict[str, Corpus]:
    """Every corpus of a prepared folder that has this split, by name. Raises FormatError."""
    found = sorted(Path(folder).glob(f"*/{split}/corpus.json"))
    return {file.parent.parent.name: open_corpus(file.parent, tokenizer) for file in found}


class Batches:
    """Makes the batch of any step.

    Args:
        window: The model's window, for the rows that replay leaves.

    Raises:
        ConfigError: A stage's mixture names no known task or corpus.
    """

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer, corpora: dict[str, Corpus], *, window: int) -> None:
        self.config = config
        self.window = window
        self.tasks = Tasks(tokenizer, corpora, held_out=config.data.held_out_names, window=window)
        self._pad = tokenizer.special[PAD]
        for stage in config.stages:
            if stage.encoder_replay_share and window % 2:
                raise ConfigError(f"stage {stage.name!r} replays windows of {window} rows; that must be even")
            unknown = sorted(set(stage.mixture) - set(self.tasks.sources))
            if unknown:
                raise ConfigError(
                    f"stage {stage.name!r} mixes in {unknown[0]!r}, which is neither a task nor a corpus of "
                    f"{config.data.folder}; there are {', '.join(self.tasks.sources)}"
                )

    def batch(self, step: int, stage: int) -> Batch:
        """The batch of a step within a stage; depends on the seed, the step and the stage alone."""
        config = self.config.stages[stage]
        shape = (self.config.rows, self.config.row_tokens)
        ids = np.full(shape, self._pad, np.int32)
        targets = np.full(shape, -1, np.int32)
        start = np.zeros(shape, np.int32)
        floor = np.zeros(shape, np.int32)
        replay = np.full(shape, self.config.row_tokens, np.int32)
        number = np.full(shape, -1, np.int32)
        samples = 0
        for row in range(self.config.rows):
            rng = np.random.default_rng((self.config.seed, step, row))
            at = 0
            for sample, cached in self._row(rng, config):
                length = len(sample.ids)
                target = np.full(length, -1, np.int32)
                target[:-1] = np.where(sample.learn[1:], sample.ids[1:].astype(np.int32), -1)
                lowest = np.zeros(length, np.int32)
                if rng.random() < config.replay_share:
                    lowest, learnt = _replayed(rng, sample, self.window)
                    target[~learnt] = -1
                rows, target, lowest = _repeated(sample.ids, target, lowest, cached, self.window)
                stop = at + len(rows)
                ids[row, at:stop], targets[row, at:stop] = rows, target
                number[row, at:stop] = samples
                # padding up to the next even row belongs to the sample before it, which cannot see it
                start[row, at:] = floor[row, at:] = at
                floor[row, at:stop] = at + lowest
                if cached is not None:
                    replay[row, at : stop + stop % 2] = at + cached
                samples += 1
                at = stop + stop % 2
        dense = bool(np.random.default_rng((self.config.seed, step)).random() < config.dense_share)
        return Batch(
            step=step,
            stage=stage,
            ids_BS=torch.from_numpy(ids),
            targets_BS=torch.from_numpy(targets),
            segment_start_BS=torch.from_numpy(start),
            window_floor_BS=torch.from_numpy(floor),
            replay_start_BS=torch.from_numpy(replay),
            sample_BS=torch.from_numpy(number),
            num_samples=samples,
            dense=dense,
        )

    def _row(self, rng: np.random.Generator, stage: StageConfig) -> Iterator[tuple[Sample, int | None]]:
        """Samples that fill one row: spans of a drawn length, each filled from one source.

        With each comes the number of its tokens after which a window of them is run again, or None.
        """
        names = list(stage.mixture)
        weights = np.array([stage.mixture[name] for name in names])
        weights = weights / weights.sum()
        left = self.config.row_tokens
        while left >= _SHORTEST:
            fitting = [length for length in stage.lengths if length <= left]
            span = fitting[int(rng.integers(len(fitting)))] if fitting else left
            source = names[int(rng.choice(len(names), p=weights))]
            used = 0
            # a span holds one source, so that the weights are shares of the tokens
            while (room := span - used) >= _SHORTEST:
                replays = stage.encoder_replay_share > 0 and rng.random() < stage.encoder_replay_share
                # the window to repeat, a window before the cut, and something after it
                replays = replays and room >= 3 * self.window
                room -= self.window if replays else 0
                made = (self.tasks.maker(name)(rng, room) for name in (source, *names))
                # a source may have nothing this short: the next one stands in
                sample = next((sample for sample in made if sample is not None), None)
                if sample is None:
                    break
                length = len(sample.ids)
                assert 0 < length <= room
                cached = None
                if replays and length > self.window + 4:
                    cached = 2 * int(rng.integers(self.window // 2 + 1, length // 2))
                    length += self.window
                yield sample, cached
                used += length + length % 2
            left -= used or span


def _replayed(
    rng: np.random.Generator, sample: Sample, window: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Bounded decoder replay of one sample: the lowest row each window may see, and which rows are learnt.

    When a prompt of p tokens is prefilled, the decoder computes rows from s = p - window on, and no window
    sees a row before s. In a chat every answer has its own p; plain text gets one at random.

    Source: training.md 1.10.
    """
    length = len(sample.ids)
    # early boundaries are likelier: what lies before one is not learnt
    answers = sample.answers or ((2 + int((length - 2) * rng.random() ** 2), length),)
    floor = np.zeros(length, np.int32)
    learnt = np.zeros(length, np.bool_)
    previous = 0
    for prompt, stop in answers:
        # a turn shorter than a window goes on from windows that are whole; a longer one restarts them, and rows
        # of the answer before were decoded: they keep the floor of their own prompt
        first = prompt - window
        if first >= previous:
            floor[first:] = first
        # row prompt - 1 predicts the answer's first token
        learnt[prompt - 1 : stop - 1] = True
        previous = stop
    return floor, learnt


def _repeated(
    ids: npt.NDArray[np.uint16],
    target: npt.NDArray[np.int32],
    lowest: npt.NDArray[np.int32],
    cached: int | None,
    window: int,
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """A sample's rows, targets and decoder floors with the window before row `cached` run again after it.

    Nothing is learnt from the repeated rows; floors that lie in them or behind them move with them.

    Source: training.md 1.10.3.
    """
    if cached is None:
        return ids, target, lowest
    again = slice(cached - window, cached)
    moved = lowest + window * (lowest >= cached - window)
    return (
        np.concatenate([ids[:cached], ids[again], ids[cached:]]),
        np.concatenate([target[:cached], np.full(window, -1, np.int32), target[cached:]]),
        np.concatenate([lowest[:cached], moved[again], moved[cached:]]).astype(np.int32),
    )


class _Steps(Dataset[Batch]):
    """Batches by (step, stage), for the loader's workers."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        return self._batches.batch(*key)


def stream(batches: Batches, keys: Iterator[tuple[int, int]], *, workers: int, pin: bool) -> Iterator[Batch]:
    """Batches in the order of `keys`, made ahead by worker processes if there are any."""
    if workers == 0:
        for step, stage in keys:
            yield batches.batch(step, stage)
        return
    # the workers are forked: the tokenizer's own threads would not survive it
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loader: DataLoader[Batch] = DataLoader(
        _Steps(batches), batch_size=None, sampler=keys, num_workers=workers, prefetch_factor=4, pin_memory=pin
    )
    yield from loader
