"""One training sample, and the writer that builds one piece by piece. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample.

    Attributes:
        ids: uint16 [n], BOS first.
        learn: bool [n]; the loss is on predicting the marked tokens. Random keys and values are not marked
            where they first appear, for nobody can know them.
        answers: Spans [start, stop) that the model decodes itself, in order; the tokens before a span are
            its prompt. Empty for plain text.
    """

    ids: npt.NDArray[np.uint16]
    learn: npt.NDArray[np.bool_]
    answers: tuple[tuple[int, int], ...] = ()


class Writer:
    """Collects a sample's tokens, marks and answers."""

    def __init__(self, *first: int) -> None:
        self.ids: list[int] = list(first)
        self.learn: list[bool] = [False] * len(first)
        self.answers: list[tuple[int, int]] = []

    def add(self, ids: Sequence[int], *, learn: bool) -> None:
        self.ids += ids
        self.learn += [learn] * len(ids)

    def answer(self, ids: Sequence[int]) -> None:
        self.answers.append((len(self.ids), len(self.ids) + len(ids)))
        self.add(ids, learn=True)

    def sample(self, length: int | None = None) -> Sample:
        """What was written, or its first `length` tokens; an answer that is cut is none."""
        stop = len(self.ids) if length is None else length
        answers = tuple(span for span in self.answers if span[1] <= stop)
        return Sample(np.array(self.ids[:stop], np.uint16), np.array(self.learn[:stop], np.bool_), answers)
