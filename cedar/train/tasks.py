"""Samples for training: stories, chats, and tasks whose answer lies far back in the sample itself.

Every maker is a pure function of a random generator and a length in tokens. The lookup tasks are written in
plain English through the chat format, so that what is trained is what a user types; random key-value pairs
and repeated spans are there because they teach retrieval soonest. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cedar.chat.tokenizer import ASSISTANT, BOS, END_THINK, EOS, FIRST_TOKENS, LAST_TOKENS, USER, Tokenizer
from cedar.train.corpus import Corpus, paragraph_starts
from cedar.train.exercises import Exercises, modular_sum, template_class
from cedar.train.language import NgramLanguage
from cedar.train.sample import Sample, Writer

ADJECTIVES = (
    "red blue green white black brown golden silver old new little big small tall round long short dark bright "
    "quiet happy sad wild brave clever lazy hungry lucky gentle broken empty heavy warm cold dry wet sweet sharp"
).split()
NOUNS = (
    "fox dog cat bird horse cow sheep bear wolf duck fish house door window garden river road bridge hill tree "
    "boat ship ring key box book lamp clock chair table hat coat shoe bell drum cup plate basket ladder wagon "
    "mill barn school church shop farm castle tower island"
).split()
PEOPLE = (
    "Anna Ben Clara David Ella Frank Grace Henry Ida Jack Kate Leo Mary Ned Olga Paul Rose Sam Tom Will Alice "
    "Martha Peter Lucy George Jane Fred Nora"
).split()
PLACES = (
    "garden kitchen barn school market river forest church mill tower harbor meadow cellar attic stable orchard"
).split()
_ACTIONS = (
    "walked to the, looked at the, came back from the, waited near the, ran past the, sat down by the, "
    "thought about the, told a story about the, went home from the, found a coin near the"
).split(", ")
# how a record is said and asked for; WHAT is the kind of value, the name comes between the two parts
_LINES = (
    ("The WHAT for the", " is "),
    ("Remember that the WHAT of the", " is "),
    ("The", " has the WHAT "),
    ("WHAT for the", ": "),
)
_LIST_LINE = ("-", ": ")
_QUESTIONS = (
    ("What is the WHAT for the", "?"),
    ("Tell me the WHAT of the", "."),
    ("Which WHAT has the", "?"),
    ("What is the WHAT of the", "?"),
    ("What WHAT does the", " have?"),
    ("What's the WHAT for the", "?"),
    ("Please give me the WHAT for the", "."),
    ("I need the WHAT of the", "."),
    ("Do you remember the WHAT for the", "?"),
    ("WHAT for the", "?"),
    ("And the", "?"),
)
# the evaluation keeps to the wordings that every model of ours was trained on
_CORE = 3
_VALUES = ("code", "number", "password", "key")
_NOTED = ("OK.", "Noted.", "I will remember it.")

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One lookup of a document: the tokens that ask, the tokens that answer, and how far back the record lies."""

    name: str
    ask: tuple[int, ...]
    answer: tuple[int, ...]
    record: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """A text with records in it, and questions about them. The first question ends the text's own turn.

    Attributes:
        text: Tokens of the text, BOS and the user token first.
        text_learn: Marks of `text`.
    """

    text: tuple[int, ...]
    text_learn: tuple[bool, ...]
    questions: tuple[Question, ...]


class Tasks:
    """Makers of samples over one tokenizer and its corpora.

    Args:
        corpora: Prepared corpora by name; `stories` also lends its paragraphs to the lookup tasks.
        held_out: One in this many adjective-noun pairs never names a record in training.
        window: A model's window; key-value queries reach further back than that.
    """

    def __init__(
        self, tokenizer: Tokenizer, corpora: dict[str, Corpus], *, held_out: int = 8, window: int = 32
    ) -> None:
        self.tokenizer = tokenizer
        self.corpora = corpora
        self.held_out = held_out
        self.encode = lru_cache(maxsize=65536)(lambda text: tuple(tokenizer.encode(text)))
        self._bos = tokenizer.special[BOS]
        self._user = tokenizer.special[USER]
        # thinking off: the assistant's turn opens with the end of an empty thought
        self._reply = (tokenizer.special[ASSISTANT], tokenizer.special[END_THINK])
        self._eos = tokenizer.special[EOS]
        self._ordinary = np.arange(len(FIRST_TOKENS), len(tokenizer) - len(LAST_TOKENS))
        exercises = Exercises(tokenizer, self.encode, self._ordinary, window=window)
        self._paragraphs = {name: paragraph_starts(corpus, tokenizer) for name, corpus in corpora.items()}
        self._makers: dict[str, Callable[[np.random.Generator, int], Sample | None]] = {
            "copy": self.copy,
            "pairs": self.pairs,
            "lookup": self.lookup,
            "restate": self.restate,
            "needles": self.needles,
            "passkey": self.passkey,
            "ngram": lambda rng, length: self.language.sample(rng, length),
            "mqar": exercises.mqar,
            "mqar_bare": exercises.mqar_bare,
            "arithmetic": exercises.arithmetic,
            "code": exercises.code,
        }

    def maker(self, source: str) -> Callable[[np.random.Generator, int], Sample | None]:
        """The maker of a mixture's source: a task's name, or a corpus. It may answer None: nothing that short.

        Raises:
            KeyError: No such task or corpus.
        """
        if source in self._makers:
            return self._makers[source]
        take: Callable[[np.random.Generator, int, str], Sample | None]
        take = self._chunk if self.corpora[source].learn is None else self._whole
        return lambda rng, length: take(rng, length, source)

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self._makers, *self.corpora)

    @cached_property
    def language(self) -> NgramLanguage:
        """The n-gram language; its entropy is known."""
        return NgramLanguage(self.tokenizer)

    # corpora

    def _chunk(self, rng: np.random.Generator, length: int, source: str) -> Sample:
        """A run of text, from the next paragraph on, that does not leave its document."""
        corpus, paragraphs = self.corpora[source], self._paragraphs[source]
        at = int(rng.integers(len(corpus.tokens)))
        start = int(paragraphs[min(int(np.searchsorted(paragraphs, at)), len(paragraphs) - 1)])
        stop = int(corpus.starts[np.searchsorted(corpus.starts, start, side="right")])
        text = corpus.tokens[start : min(stop, start + length - 1)]
        ids = np.concatenate([[self._bos], text]).astype(np.uint16)
        learn = np.ones(len(ids), np.bool_)
        learn[0] = False
        return Sample(ids, learn)

    def _whole(self, rng: np.random.Generator, length: int, source: str) -> Sample | None:
        """A whole chat that fits; long ones as often as short ones, by tokens."""
        corpus = self.corpora[source]
        order, sizes, total = self._by_length[source]
        fitting = int(np.searchsorted(sizes, length, side="right"))
        if fitting == 0:
            return None
        at = rng.integers(total[fitting - 1])
        document = int(order[np.searchsorted(total, at, side="right")])
        start, stop = corpus.starts[document], corpus.starts[document + 1]
        assert corpus.learn is not None
        learn = np.array(corpus.learn[start:stop])
        edges = np.flatnonzero(np.diff(np.concatenate([[False], learn, [False]]).astype(np.int8)))
        return Sample(
            np.array(corpus.tokens[start:stop]),
            learn,
            tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)),
        )

    @cached_property
    def _by_length(self) -> dict[str, tuple[npt.NDArray[np.int64], ...]]:
        """Documents from the shortest on, their lengths, and the running sum of these."""
        table: dict[str, tuple[npt.NDArray[np.int64], ...]] = {}
        for name, corpus in self.corpora.items():
            sizes = np.diff(corpus.starts)
            order = np.argsort(sizes, kind="stable")
            table[name] = (order, sizes[order], np.cumsum(sizes[order]))
        return table

    # retrieval in random tokens

    def copy(self, rng: np.random.Generator, length: int) -> Sample:
        """Random tokens and a gap, over and over until the sample is full; learnt from the first repeat on."""
        span = int(rng.integers(4, max(5, length // 3)))
        gap = int(rng.integers(0, max(1, length - 2 * span - 1)))
        words = rng.choice(self._ordinary, size=int(rng.integers(8, len(self._ordinary))), replace=False)
        body = np.resize(rng.choice(words, size=span + gap), length - 1)
        learn = np.zeros(length, np.bool_)
        # two tokens tell where in the repeat we are
        learn[1 + span + gap + 2 : 1 + 2 * span + gap] = True
        return Sample(np.concatenate([[self._bos], body]).astype(np.uint16), learn)

    def pairs(self, rng: np.random.Generator, length: int) -> Sample:
        """`key value key value ...` where pairs come back; a value is learnt when its key was seen before.

        Keys have one or two tokens, values one to three, with or without a mark between them; the number of
        pairs sets how far back the last mention lies.
        """
        key_tokens, value_tokens = int(rng.integers(1, 3)), int(rng.integers(1, 4))
        between = self.encode((":", " is", " =", "")[int(rng.integers(4))])
        after = self.encode(("\n", ";", ".", "")[int(rng.integers(4))])
        unit = key_tokens + len(between) + value_tokens + len(after)
        mentions = max(2, (length - 1) // unit)
        most = min(0.7 * mentions, len(self._ordinary) / 2)
        distinct = int(np.exp(rng.uniform(np.log(2), np.log(max(3, most)))))
        keys = rng.choice(self._ordinary, size=(distinct, key_tokens), replace=key_tokens > 1)
        words = rng.choice(self._ordinary, size=int(rng.integers(10, len(self._ordinary))), replace=False)
        values = rng.choice(words, size=(distinct, value_tokens))
        which = rng.integers(distinct, size=mentions)
        rows = np.empty((mentions, unit), np.uint16)
        at = key_tokens + len(between)
        rows[:, :key_tokens] = keys[which]
        rows[:, key_tokens:at] = between
        rows[:, at : at + value_tokens] = values[which]
        rows[:, at + value_tokens :] = after
        seen = np.ones(mentions, np.bool_)
        seen[np.unique(which, return_index=True)[1]] = False
        learn = np.zeros((mentions, unit), np.bool_)
        learn[:, at : at + value_tokens] = seen[:, None]
        ids = np.concatenate([[self._bos], rows.reshape(-1)[: length - 1]]).astype(np.uint16)
        return Sample(ids, np.concatenate([[False], learn.reshape(-1)[: length - 1]]))

    # retrieval in English

    @cached_property
    def _sentence_end(self) -> npt.NDArray[np.bool_]:
        return np.array([b"." in self.tokenizer.token_bytes(i) for i in range(len(self.tokenizer))])

    def _between(self, rng: np.random.Generator, length: int, *, own: bool) -> tuple[int, ...]:
        """About `length` tokens that hold no record, up to a line's end: a story's, or our own sentences."""
        if own or "stories" not in self.corpora:
            text = ""
            ids: tuple[int, ...] = ()
            while len(ids) < length:
                words = (choices[int(rng.integers(len(choices)))] for choices in (PEOPLE, _ACTIONS, PLACES))
                text = " ".join((text, *words))
                last = len(ids) + 12 > length or rng.random() < 0.3
                ids += self.encode((text if ids else text[1:]) + (".\n" if last else "."))
                text = ""
                if last:
                    break
            return ids
        corpus, paragraphs = self.corpora["stories"], self._paragraphs["stories"]
        start = int(paragraphs[int(rng.integers(len(paragraphs)))])
        text_ids = corpus.tokens[start : start + length]
        ends = np.flatnonzero(self._sentence_end[text_ids])
        return (*(int(i) for i in (text_ids[: ends[-1] + 1] if len(ends) else text_ids)), *self.encode("\n"))

    def _name(self, rng: np.random.Generator, *, held_out: bool) -> str:
        """What a record is about. The names kept for the evaluation are two words that training never joins."""
        if not held_out and rng.random() < 0.3:
            return NOUNS[int(rng.integers(len(NOUNS)))]
        while True:
            adjective, noun = int(rng.integers(len(ADJECTIVES))), int(rng.integers(len(NOUNS)))
            if ((adjective * 31 + noun * 17) % self.held_out == 0) == held_out:
                return f"{ADJECTIVES[adjective]} {NOUNS[noun]}"

    def lookup_document(
        self,
        rng: np.random.Generator,
        length: int,
        *,
        questions: int | None = None,
        held_out: bool = False,
        own_filler: bool | None = None,
        share: float | None = None,
        skip_last: int = 0,
    ) -> Lookup:
        """A text of records and filler, about `length` tokens with its questions.

        Args:
            questions: How many are asked; None draws a number that suits the length.
            held_out: Names that training never sees.
            own_filler: Filler of our own sentences instead of stories; None draws it.
            share: Part of the text that is records; None draws it.
            skip_last: Records within this many tokens of the text's end are not asked for.
        """
        if questions is None:
            questions = int(rng.integers(1, 2 + length // 48))
        own = bool(rng.random() < 0.5) if own_filler is None else own_filler
        share = float(rng.choice([0.02, 0.15, 0.4, 0.7, 1.0])) if share is None else share
        digits = int(rng.integers(3, 6)) if not held_out else 4
        wordings, lines = (_QUESTIONS[:_CORE], _LINES[:_CORE]) if held_out else (_QUESTIONS, _LINES)
        lines = (_LIST_LINE,) if rng.random() < 0.3 else lines
        what = _VALUES[0] if held_out or rng.random() < 0.6 else _VALUES[int(rng.integers(len(_VALUES)))]
        # told over several turns, as people do, or all at once
        noted = 0.3 if not held_out and rng.random() < 0.25 else 0.0
        room = length - questions * 26
        text = Writer(self._bos, self._user)
        records: dict[str, tuple[tuple[int, ...], int]] = {}
        while len(text.ids) < room or not records:
            if records and rng.random() > share:
                text.add(self._between(rng, min(40, max(8, room - len(text.ids))), own=own), learn=True)
                continue
            name = self._name(rng, held_out=held_out)
            if name in records:
                continue
            value = self._value(rng, digits)
            records[name] = value, len(text.ids)
            self._record(text, rng, name, value, lines, what=what)
            if rng.random() < noted and len(text.ids) + 12 < room:
                text.add(self._reply, learn=False)
                text.add((*self.encode(_NOTED[int(rng.integers(len(_NOTED)))]), self._eos), learn=True)
                text.add((self._user,), learn=False)
        far = [name for name, (_, at) in records.items() if at < len(text.ids) - skip_last] or list(records)
        asked = [far[int(i)] for i in rng.permutation(len(far))[:questions]]
        # half of the chats ask in one way throughout, the others change it from turn to turn
        first = wordings[int(rng.integers(len(_QUESTIONS[:-1]) if len(wordings) > _CORE else _CORE))]
        varied = not held_out and bool(rng.random() < 0.5)
        asks = [wordings[int(rng.integers(len(wordings)))] if varied and i else first for i in range(len(asked))]
        return Lookup(
            text=tuple(text.ids),
            text_learn=tuple(text.learn),
            questions=tuple(
                Question(
                    name=name, ask=self._asked(wording, what, name), answer=records[name][0], record=records[name][1]
                )
                for wording, name in zip(asks, asked, strict=True)
            ),
        )

    def _asked(self, wording: tuple[str, str], what: str, name: str) -> tuple[int, ...]:
        before, after = (_about(part, what) for part in wording)
        return (*self.encode(before), *self.encode(f" {name}"), *self.encode(after))

    def passkey_document(
        self, rng: np.random.Generator, length: int, *, depth: float | None = None, own_filler: bool | None = None
    ) -> Lookup:
        """A text of about `length` tokens in which one five-digit key is told, `depth` (0..1) of the way in."""
        depth = float(rng.random()) if depth is None else depth
        own = bool(rng.random() < 0.5) if own_filler is None else own_filler
        key = self._value(rng, 5)
        before, after = self.encode("The pass key is "), self.encode(". Remember it.\n")
        question = self.encode("\nWhat is the pass key?")
        room = length - len(key) - len(before) - len(after) - len(question) - len(key) - 10
        text = Writer(self._bos, self._user)
        record = 0
        while room > 0 or not record:
            if not record and (room <= 0 or len(text.ids) >= depth * (length - 48)):
                record = len(text.ids)
                text.add(before, learn=True)
                text.add(key, learn=False)
                text.add(after, learn=True)
                continue
            filler = self._between(rng, min(40, max(1, room)), own=own)[: max(1, room)]
            # our own sentences are soon known, and would drown the five tokens that matter
            text.add(filler, learn=not own)
            room -= len(filler)
        return Lookup(
            text=tuple(text.ids),
            text_learn=tuple(text.learn),
            questions=(Question(name="pass key", ask=question, answer=key, record=record),),
        )

    def passkey(self, rng: np.random.Generator, length: int) -> Sample | None:
        """A chat: filler with one five-digit key in it, and the question for it."""
        if length < 96:
            return None
        document = self.passkey_document(rng, length)
        return self._asking(document, length)

    def needles(self, rng: np.random.Generator, length: int) -> Sample | None:
        """A chat: a text with records, then one question for two to four of them, answered in the order asked."""
        if length < 160:
            return None
        document = self.needles_document(rng, length, count=int(rng.integers(2, 5)))
        return self._asking(document, length)

    def needles_document(
        self, rng: np.random.Generator, length: int, *, count: int, held_out: bool = False, skip_last: int = 0
    ) -> Lookup:
        """A lookup text with one question for `count` records at once; its record is the one furthest back."""
        own = True if held_out else None
        share = 0.6 if held_out else None
        document = self.lookup_document(
            rng, length, questions=count, held_out=held_out, own_filler=own, share=share, skip_last=skip_last
        )
        names = [f" {question.name}" for question in document.questions]
        ask = [*self.encode("What are the codes for the"), *self.encode(names[0])]
        for name in names[1:]:
            ask += (*self.encode(", the"), *self.encode(name))
        separator = self.encode(", ")
        answer = document.questions[0].answer
        for question in document.questions[1:]:
            answer = (*answer, *separator, *question.answer)
        record = min(question.record for question in document.questions)
        question = Question(name="", ask=(*ask, *self.encode("?")), answer=answer, record=record)
        return Lookup(text=document.text, text_learn=document.text_learn, questions=(question,))

    def _value(self, rng: np.random.Generator, digits: int) -> tuple[int, ...]:
        return tuple(token_id for digit in rng.integers(10, size=digits) for token_id in self.encode(str(digit)))

    def _record(
        self,
        text: Writer,
        rng: np.random.Generator,
        name: str,
        value: tuple[int, ...],
        lines: Sequence[tuple[str, str]],
        *,
        what: str = _VALUES[0],
        learn: bool = False,
    ) -> None:
        """One line, said in one of the ways of `lines`; `learn` marks the value."""
        line = lines[int(rng.integers(len(lines)))]
        text.add(self.encode(_about(line[0], what)), learn=True)
        text.add(self.encode(f" {name}"), learn=False)
        text.add(self.encode(_about(line[1], what)), learn=True)
        text.add(value, learn=learn)
        text.add(self.encode("\n" if line is _LIST_LINE else ".\n"), learn=True)

    def lookup(self, rng: np.random.Generator, length: int) -> Sample | None:
        """A chat: a text with records, then one question a turn."""
        if length < 96:
            return None
        return self._asking(self.lookup_document(rng, length), length)

    def _asking(self, document: Lookup, length: int) -> Sample | None:
        """The document's questions, one a turn, as far as they fit."""
        chat = Writer(*document.text)
        chat.learn = list(document.text_learn)
        for number, question in enumerate(document.questions):
            turn = ((self._user,) if number else ()) + question.ask + self._reply
            if len(chat.ids) + len(turn) + len(question.answer) + 1 > length:
                break
            chat.add(turn, learn=False)
            chat.answer((*question.answer, self._eos))
        # a text that left no room for a question teaches no lookup
        return chat.sample() if chat.answers else None

    def restate(self, rng: np.random.Generator, length: int) -> Sample:
        """Plain text: records, and later the same records again; their values are learnt the second time."""
        text = Writer(self._bos)
        own = bool(rng.random() < 0.5)
        lines = (_LIST_LINE,) if rng.random() < 0.5 else _LINES
        share = float(rng.choice([0.5, 0.8, 1.0]))
        digits = int(rng.integers(2, 6))
        records: dict[str, tuple[int, ...]] = {}
        while len(text.ids) < length:
            if rng.random() > share:
                text.add(self._between(rng, 32, own=own), learn=True)
            elif records and rng.random() < 0.6:
                name = list(records)[int(rng.integers(len(records)))]
                self._record(text, rng, name, records[name], lines, learn=True)
            else:
                name = self._name(rng, held_out=False)
                if name not in records:
                    records[name] = self._value(rng, digits)
                    self._record(text, rng, name, records[name], lines)
        return text.sample(length)


def _about(part: str, what: str) -> str:
    """A part of a wording with the kind of value in it; one that opens a line gets a capital.

    >>> _about("WHAT for the", "code"), _about("The WHAT of the", "code")
    ('Code for the', 'The code of the')
    """
    return part.replace("WHAT", what.capitalize() if part.startswith("WHAT") else what)


def sample_text(seed: int, lines: int) -> str:
    """Records, filler and questions as plain text: what a tokenizer should have seen of these tasks."""
    rng = np.random.default_rng(seed)

    def pick(choices: Sequence[_T]) -> _T:
        return choices[int(rng.integers(len(choices)))]

    text = []
    for _ in range(lines):
        name = f"{pick(ADJECTIVES)} {pick(NOUNS)}"
        what = pick(_VALUES)
        before, between = (_about(part, what) for part in pick(_LINES))
        ask, mark = (_about(part, what) for part in pick(_QUESTIONS))
        text.append(f"{before} {name}{between}{rng.integers(10000)}.\n- {name}: {rng.integers(10000)}\n")
        text.append(f"{pick(PEOPLE)} {pick(_ACTIONS)} {pick(PLACES)}.\n{ask} {name}{mark}\n")
        if rng.random() < 0.2:
            text.append("".join(template_class(rng)))
            text.append("\n".join(modular_sum(rng)) + "\n")
            text.append(f"The pass key is {rng.integers(100000)}. Remember it.\nWhat is the pass key?\n")
            text.append(f"What are the codes for the {name}, the {pick(NOUNS)}?\n{pick(_NOTED)}\n")
    return "".join(text)
