"""Samples that need no corpus and no names: key-value queries, modular sums with steps, template code.

Each maker is a pure function of a random generator and a length. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cedar.chat.tokenizer import ASSISTANT, BOS, END_THINK, EOS, USER, Tokenizer
from cedar.train.sample import Sample, Writer

_FIELDS = (
    "name size color code age price weight width height depth count total owner city street number title author "
    "date time speed power level score rank state kind shape mark note"
).split()
_CLASSES = "Box Car Ship House Book Clock Lamp Table Tower Garden River Bridge School Farm Mill Ring Coat Bell".split()
_MODULI = (5, 7, 10, 11, 13)
_OPERATIONS = (("add", "+"), ("subtract", "-"), ("multiply by", "*"))
_T = TypeVar("_T")


def _pick(rng: np.random.Generator, choices: tuple[_T, ...] | list[_T]) -> _T:
    return choices[int(rng.integers(len(choices)))]


class Exercises:
    """Makers over one tokenizer.

    Args:
        encode: Token ids of plain text.
        ordinary: Ids that are neither special nor reserved.
        window: A model's window: queries reach further back than that.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        encode: Callable[[str], tuple[int, ...]],
        ordinary: npt.NDArray[np.int64],
        *,
        window: int,
    ) -> None:
        self._encode, self._ordinary, self._window = encode, ordinary, window
        self._bos, self._user, self._eos = (tokenizer.special[name] for name in (BOS, USER, EOS))
        self._reply = (tokenizer.special[ASSISTANT], tokenizer.special[END_THINK])

    def mqar(self, rng: np.random.Generator, length: int, *, queries: int | None = None) -> Sample | None:
        """Pairs of a random key and value, then keys again, each behind a mark; the value after a key is learnt.

        How far back a queried pair lies is drawn log-uniformly from just beyond the window to the whole sample.

        Source: training.md 5.2; the task is that of Arora et al. 2023, multi-query associative recall.
        """
        return self._queries(rng, length, queries, pairs=(0.4, 0.8), marked=True)

    def mqar_bare(self, rng: np.random.Generator, length: int, *, queries: int | None = None) -> Sample | None:
        """The same with one mark before all keys: twice as many queries, so twice as much to learn from."""
        return self._queries(rng, length, queries, pairs=(0.25, 0.6), marked=False)

    def _queries(
        self,
        rng: np.random.Generator,
        length: int,
        queries: int | None,
        *,
        pairs: tuple[float, float],
        marked: bool,
    ) -> Sample | None:
        mark = self._encode("\n?")
        before_all, before_each = ((), mark) if marked else (mark, ())
        room = length - 1 - len(before_all)
        # more pairs than the vocabulary has keys for leave a gap in the middle that nobody asks about
        num_pairs = min(max(2, int(rng.uniform(*pairs) * room / 2)), len(self._ordinary) // 2)
        query_tokens = len(before_each) + 2
        num_queries = min(num_pairs, (room - 2 * num_pairs) // query_tokens, queries or room)
        if num_queries < 1:
            return None
        shuffled = rng.permutation(self._ordinary)
        keys, rest = shuffled[:num_pairs], shuffled[num_pairs:]
        values = rng.choice(rest[: max(8, int(rng.integers(8, len(rest))))], size=num_pairs)
        sample = Writer(self._bos)
        sample.add(np.stack([keys, values], 1).flatten().tolist(), learn=False)
        gap = room - 2 * num_pairs - query_tokens * num_queries
        if gap > 0:
            sample.add(rng.choice(rest, size=gap).tolist(), learn=False)
        sample.add(before_all, learn=False)
        place = 1 + 2 * np.arange(num_pairs)
        free = np.ones(num_pairs, np.bool_)
        for _ in range(num_queries):
            at = len(sample.ids) + len(before_each)
            distance = math.exp(rng.uniform(math.log(min(self._window + 1, at - 1)), math.log(at)))
            pair = int(np.where(free, np.abs(place - (at - distance)), np.inf).argmin())
            free[pair] = False
            sample.add((*before_each, int(keys[pair])), learn=False)
            sample.answer((int(values[pair]),))
        return sample.sample(length)

    def arithmetic(self, rng: np.random.Generator, length: int) -> Sample | None:
        """A chat: sums modulo a small number, worked step by step; the answer can be checked."""
        chat = Writer(self._bos)
        while True:
            question, answer = modular_sum(rng)
            turn = (self._user, *self._encode(question), *self._reply)
            reply = (*self._encode(answer), self._eos)
            if len(chat.ids) + len(turn) + len(reply) > length:
                break
            chat.add(turn, learn=False)
            chat.answer(reply)
        return chat.sample() if chat.answers else None

    def code(self, rng: np.random.Generator, length: int) -> Sample:
        """Small classes: after the line that names the fields everything is determined, and only that is learnt."""
        text = Writer(self._bos)
        while len(text.ids) < length:
            free, fixed = template_class(rng)
            text.add(self._encode(free), learn=False)
            text.add(self._encode(fixed), learn=True)
        return text.sample(length)


def modular_sum(rng: np.random.Generator) -> tuple[str, str]:
    """(question, worked answer) of one to five steps."""
    modulus = _pick(rng, _MODULI)
    value = int(rng.integers(modulus))
    asked, steps = [f"start with {value}"], []
    for _ in range(int(rng.integers(1, 6))):
        word, sign = _pick(rng, _OPERATIONS)
        number = int(rng.integers(1, modulus))
        whole = {"+": value + number, "-": value - number, "*": value * number}[sign]
        asked.append(f"{word} {number}")
        line = f"{value} {sign} {number} = {whole}"
        value = whole % modulus
        steps.append(line if whole == value else f"{line} = {value}")
    return f"Modulo {modulus}: {', '.join(asked)}.", "\n".join([*steps, f"The answer is {value}."])


def template_class(rng: np.random.Generator) -> tuple[str, str]:
    """(the lines that choose, the lines that follow from them) of one class."""
    name = _pick(rng, _CLASSES)
    fields = [_FIELDS[int(i)] for i in rng.choice(len(_FIELDS), size=int(rng.integers(1, 5)), replace=False)]
    free = f"class {name}:\n    def __init__(self, {', '.join(fields)}):\n"
    fixed = "".join(f"        self.{field} = {field}\n" for field in fields)
    for field in fields:
        fixed += f"    def get_{field}(self):\n        return self.{field}\n"
        fixed += f"    def set_{field}(self, {field}):\n        self.{field} = {field}\n"
    return free, fixed + "\n"
