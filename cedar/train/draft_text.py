"""Text that a draft learns from: answers and stories that the target itself writes, with where it wrote them.

N sequences, L tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from cedar.chat.tokenizer import BOS, EOS, PAD, Tokenizer
from cedar.errors import ConfigError, FormatError
from cedar.model.transformer import Transformer
from cedar.train.corpus import Corpus
from cedar.train.lockstep import Lockstep, sample
from cedar.train.sample import Sample
from cedar.train.tasks import ADJECTIVES, NOUNS, PEOPLE, PLACES, Tasks

# what is written, with its weight: `texts` is any corpus of texts but stories, `chats` any of chats; `templates` are
# lines that come back unchanged, `code` small classes whose lines follow from the first
KINDS = {"stories": 0.4, "texts": 0.08, "chats": 0.2, "lookup": 0.1, "restate": 0.07, "templates": 0.1, "code": 0.05}
# one in this many sequences is held out: its prompts come from the validation corpora where there are any
_HELD_OUT = 16
TEMPERATURES = (1.0, 1.0, 0.6, 0.6, 0.0)
_LINES = (
    "{person} has a {adjective} {noun}.\n",
    "- the {adjective} {noun}\n",
    "The {noun} is in the {place}.\n",
    "{person} went to the {place} and {other} stayed at home.\n",
    "{noun}, {adjective}, {place};\n",
    '{{"name": "{person}", "place": "{place}"}},\n',
    "One {noun}, two {noun}s, three {noun}s.\n",
    "{person} said to {other}: come to the {place} with me.\n",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Sequences of one length.

    Attributes:
        ids_NL: int64, padded behind the end of a text.
        made_NL: bool, tokens that the target chose itself.
        floor_NL: int64, first row that the decoder's windows may see from each row (bounded replay).
        kind_N: Index into `KINDS`.
        temperature_N: float32, 0 for the likeliest token.
        held_out_N: bool, never trained on.
    """

    ids_NL: Tensor
    made_NL: Tensor
    floor_NL: Tensor
    kind_N: Tensor
    temperature_N: Tensor
    held_out_N: Tensor

    def save(self, file: Path, about: dict[str, str]) -> None:
        """One safetensors file; whole or not at all."""
        tensors = {name: getattr(self, name).contiguous() for name in self.__dataclass_fields__}
        partial = file.with_suffix(".partial")
        partial.write_bytes(safetensors.torch.save(tensors, metadata=about))
        partial.replace(file)


def load_text(file: Path, about: dict[str, str]) -> Text:
    """What `save` wrote.

    Raises:
        FormatError: The file is damaged, or of another model, tokenizer or seed.
    """
    try:
        data = file.read_bytes()
        tensors = safetensors.torch.load(data)
        with safetensors.safe_open(file, "pt") as opened:
            found = opened.metadata()
    except (OSError, safetensors.SafetensorError) as error:
        raise FormatError(f"{file} cannot be read ({error}); delete it to have it written again") from error
    if found != about:
        raise FormatError(f"{file} was written by another model or with other options; delete it or use another folder")
    return Text(**tensors)


class Prompts:
    """Beginnings that the target goes on from, one kind at a time.

    Args:
        held_out: One in this many name pairs of the lookups is left out, as in the target's own training.
    """

    def __init__(self, tokenizer: Tokenizer, corpora: dict[str, Corpus], *, held_out: int = 8) -> None:
        self.tokenizer = tokenizer
        self.tasks = Tasks(tokenizer, corpora, held_out=held_out)
        self._bos = tokenizer.special[BOS]
        self._chats = [name for name, corpus in corpora.items() if corpus.learn is not None]
        self._texts = [name for name, corpus in corpora.items() if corpus.learn is None and name != "stories"]

    @property
    def kinds(self) -> dict[str, float]:
        """Those that can be made of these corpora, with their weights."""
        there = {"stories": "stories" in self.tasks.corpora, "texts": bool(self._texts), "chats": bool(self._chats)}
        return {kind: weight for kind, weight in KINDS.items() if there.get(kind, True)}

    def first(self, kind: str, rng: np.random.Generator, length: int) -> list[int]:
        """The tokens a sequence of `length` begins with, BOS first; at least a third is left to the target."""
        most = length * 2 // 3
        made: Sample | None = None
        if kind in ("stories", "texts"):
            name = kind if kind == "stories" else self._texts[int(rng.integers(len(self._texts)))]
            made = self.tasks.maker(name)(rng, int(rng.integers(8, min(64, most))))
        elif kind == "restate":
            made = self.tasks.restate(rng, int(rng.integers(most // 2, most)))
        elif kind == "code":
            made = self.tasks.maker("code")(rng, int(rng.integers(24, most)))
        if made is not None:
            return [int(token) for token in made.ids]
        return self._template(rng, most) if kind == "templates" else self._turn(kind, rng, most)

    def next(self, kind: str, rng: np.random.Generator, room: int) -> list[int]:
        """What follows the end of an answer: another user's turn, nothing where the text is over or room is short."""
        if kind not in ("chats", "lookup") or room < 48:
            return []
        # a conversation begins with BOS, which stands at a sequence's start alone
        return self._turn("chats", rng, room * 2 // 3)[1:]

    def _turn(self, kind: str, rng: np.random.Generator, most: int) -> list[int]:
        """The tokens before a first answer; a chat, or a template, where the kind has nothing so short."""
        names = [self._chats[int(rng.integers(len(self._chats)))]] if self._chats else []
        for name in ("lookup", *names) if kind == "lookup" else names:
            made = self.tasks.maker(name)(rng, most)
            if made is not None and made.answers:
                return [int(token) for token in made.ids[: made.answers[0][0]]]
        return self._template(rng, most)

    def _template(self, rng: np.random.Generator, most: int) -> list[int]:
        """A line, or two or three in turn, over and over."""
        lines: list[int] = []
        for _ in range(int(rng.integers(1, 4))):
            words = {
                name: choices[int(rng.integers(len(choices)))]
                for name, choices in (
                    ("person", PEOPLE),
                    ("other", PEOPLE),
                    ("adjective", ADJECTIVES),
                    ("noun", NOUNS),
                    ("place", PLACES),
                )
            }
            lines += self.tasks.encode(_LINES[int(rng.integers(len(_LINES)))].format(**words))
        times = int(rng.integers(2, 5))
        return [self._bos, *(lines * times)[: most - 1]]


def write_text(
    model: Transformer,
    prompts: Prompts,
    held_out: Prompts,
    *,
    length: int,
    count: int,
    seed: int,
    report: Callable[[str], None] = print,
) -> Text:
    """Let the target write `count` sequences of `length` tokens side by side.

    Args:
        held_out: Prompts of the sequences that are never trained on.

    Raises:
        ConfigError: `count` or `length` is too small.
    """
    if length < 48 or count < 1:
        raise ConfigError(f"{count} sequences of {length} tokens, expected at least 1 of at least 48")
    special = prompts.tokenizer.special
    eos, window = special[EOS], model.config.attention.sliding_window
    rng = np.random.default_rng((seed, length, count))
    kinds = list(KINDS)
    usable = prompts.kinds
    weights = np.array([usable.get(kind, 0.0) for kind in kinds])
    kind_N = rng.choice(len(kinds), size=count, p=weights / weights.sum())
    temperature_N = np.array(TEMPERATURES, np.float32)[rng.integers(len(TEMPERATURES), size=count)]
    held_N = np.arange(count) % _HELD_OUT == 0
    ids = np.full((count, length), special[PAD], np.int64)
    made = np.zeros((count, length), np.bool_)
    floor = np.zeros((count, length), np.int64)
    # the token that must stand at a place, -1 where the target chooses
    plan = np.full((count, length), -1, np.int64)
    over = np.zeros(count, np.bool_)

    def put(row: int, at: int, tokens: list[int]) -> None:
        tokens = tokens[: length - at]
        stop = at + len(tokens)
        plan[row, at:stop] = tokens
        # a prompt longer than the window restarts the decoder at its last window
        if stop - window >= at:
            floor[row, at:] = max(stop - window, 0)

    for row in range(count):
        put(row, 0, (held_out if held_N[row] else prompts).first(kinds[kind_N[row]], rng, length))
    state = Lockstep(model, count, length)
    temperature_B = torch.from_numpy(temperature_N).to(model.device)
    generator = torch.Generator(model.device).manual_seed(int(rng.integers(1 << 62)))
    started = time.monotonic()
    ids[:, 0] = plan[:, 0]
    for at in range(length - 1):
        if at == 0 or (floor[:, at] != floor[:, at - 1]).any():
            state.floor_B.copy_(torch.from_numpy(floor[:, at]))
        logits_BV = state.step(torch.from_numpy(ids[:, at]).to(model.device))
        drawn = sample(logits_BV, temperature_B, generator).cpu().numpy()
        chooses = (plan[:, at + 1] < 0) & ~over
        ids[:, at + 1] = np.where(chooses, drawn, np.maximum(plan[:, at + 1], 0))
        ids[over, at + 1] = special[PAD]
        made[:, at + 1] = chooses
        for row in np.flatnonzero(chooses & (drawn == eos)):
            source = held_out if held_N[row] else prompts
            turn = source.next(kinds[kind_N[row]], rng, length - at - 2)
            over[row] = not turn
            if turn:
                put(int(row), at + 2, turn)
    seconds = time.monotonic() - started
    report(
        f"{count} sequences of {length}: {int(made.sum()):,} tokens written in {seconds:.1f} s "
        f"({length / seconds:.1f} steps/s)"
    )
    return Text(
        ids_NL=torch.from_numpy(ids),
        made_NL=torch.from_numpy(made),
        floor_NL=torch.from_numpy(floor),
        kind_N=torch.from_numpy(kind_N.astype(np.int64)),
        temperature_N=torch.from_numpy(temperature_N),
        held_out_N=torch.from_numpy(held_N),
    )


def anchors_of(text: Text) -> Tensor:
    """bool [N, L]: places whose own token and the next the target wrote, so that a block may start there."""
    made_NL = text.made_NL
    following_NL = torch.cat([made_NL[:, 1:], made_NL.new_zeros(made_NL.shape[0], 1)], dim=1)
    return made_NL & following_NL


def summary(texts: Sequence[Text]) -> dict[str, int]:
    """Tokens that the target wrote, by kind."""
    names = list(KINDS)
    return {
        name: sum(int(text.made_NL[text.kind_N == number].sum()) for text in texts) for number, name in enumerate(names)
    }
