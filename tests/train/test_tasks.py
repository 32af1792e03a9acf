"""Training samples: what they say, what is learnt, and that names for the evaluation stay out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cedar.chat.encode import Conversation, Message, Special, render
from cedar.chat.tokenizer import ASSISTANT, BOS, END_THINK, EOS, USER, Tokenizer
from cedar.train.corpus import open_corpus, write_texts
from cedar.train.exercises import modular_sum
from cedar.train.sample import Sample
from cedar.train.tasks import ADJECTIVES, NOUNS, Tasks

_VALUE = "(?:code|number|password|key)"
NAMES = re.compile(rf"\b({'|'.join(ADJECTIVES)}) ({'|'.join(NOUNS)})\b")


@pytest.fixture(scope="module")
def tasks(tokenizer: Tokenizer) -> Tasks:
    return Tasks(tokenizer, {})


def samples(tasks: Tasks, source: str, count: int = 40, length: int = 256) -> Iterator[Sample]:
    for seed in range(count):
        sample = tasks.maker(source)(np.random.default_rng(seed), length)
        if sample is not None:
            yield sample


TASKS = ["copy", "pairs", "lookup", "restate", "needles", "passkey", "ngram", "mqar", "mqar_bare", "arithmetic", "code"]


@pytest.mark.parametrize("source", TASKS)
def test_samples_fit_begin_with_bos_and_repeat_for_a_seed(tasks: Tasks, tokenizer: Tokenizer, source: str) -> None:
    for length in (16, 64, 130, 512):
        for seed in range(30):
            sample = tasks.maker(source)(np.random.default_rng(seed), length)
            again = tasks.maker(source)(np.random.default_rng(seed), length)
            if sample is None:
                assert source == "lookup" or (source in ("needles", "passkey", "arithmetic") and length < 160)
                continue
            assert again is not None
            assert (sample.ids == again.ids).all()
            assert len(sample.learn) == len(sample.ids) <= length
            assert sample.ids[0] == tokenizer.special[BOS]
            assert not sample.learn[0]


@pytest.mark.parametrize("source", ["pairs", "copy"])
def test_what_is_learnt_was_seen_before(tasks: Tasks, source: str) -> None:
    for sample in samples(tasks, source):
        ids = sample.ids.tolist()
        earlier = [any(ids[j - 1 : j + 1] == ids[i - 1 : i + 1] for j in range(2, i)) for i in range(len(ids))]
        assert sample.learn.any()
        assert all(earlier[i] for i in np.flatnonzero(sample.learn)), source


def test_lookup_answers_are_in_the_text_and_rendered_as_the_server_renders(tasks: Tasks, tokenizer: Tokenizer) -> None:
    found = 0
    for sample in samples(tasks, "lookup"):
        text = tokenizer.decode(sample.ids.tolist())
        turns = text.removeprefix(BOS).split(USER)[1:]
        messages = []
        for turn in turns:
            asked, _, answer = turn.partition(ASSISTANT + END_THINK)
            answer = answer.removesuffix(EOS)
            messages += [Message(role="user", content=asked), Message(role="assistant", content=answer)]
            if answer.isdecimal():
                name = re.search(r"(?s).*\b[Tt]he ([a-z ]+?)(?: have)?[?.]$", asked)
                assert name is not None, asked
                record = re.search(
                    rf"(?:(?:for|of) the {name[1]}(?: is|:)|[Tt]he {name[1]} has the {_VALUE}|- {name[1]}:) (\d+)", text
                )
                assert record is not None, asked
                assert record[1] == answer
                found += 1
            else:
                assert answer in ("OK.", "Noted.", "I will remember it.")
        pieces = render(Conversation(messages=tuple(messages), thinking=False), generation_header=False)
        ids = [
            i
            for piece in pieces
            for i in ([tokenizer.special[piece.name]] if isinstance(piece, Special) else tokenizer.encode(piece))
        ]
        assert ids == sample.ids.tolist()
        for start, stop in sample.answers:
            assert sample.learn[start:stop].all()
            assert sample.ids[stop - 1] == tokenizer.special[EOS]
    assert found > 60


def test_first_mentions_are_not_learnt(tasks: Tasks, tokenizer: Tokenizer) -> None:
    for sample in samples(tasks, "restate"):
        seen: set[str] = set()
        text = tokenizer.decode(sample.ids[1:].tolist())
        sizes = [len(tokenizer.token_bytes(int(i))) for i in sample.ids[1:]]
        learnt = np.repeat(sample.learn[1:], sizes)
        for match in re.finditer(
            r"(?:for the|of the|\bThe(?! code)|-) ([a-z ]+?)(?: is |: | has the code )(\d+)(?=[.\n])", text
        ):
            value = learnt[match.start(2) : match.end(2)]
            assert value.all() == value.any() == (match[1] in seen)
            seen.add(match[1])
        assert seen


def test_names_of_the_evaluation_never_occur_in_training(tasks: Tasks, tokenizer: Tokenizer) -> None:
    trained: set[str] = set()
    for source in ("lookup", "restate", "needles"):
        for sample in samples(tasks, source, count=200):
            trained |= {match[0] for match in NAMES.finditer(tokenizer.decode(sample.ids.tolist()))}
    asked: set[str] = set()
    for seed in range(60):
        document = tasks.lookup_document(np.random.default_rng(seed), 512, held_out=True, own_filler=True)
        asked |= {match[0] for match in NAMES.finditer(tokenizer.decode(document.text))}
    assert len(trained) > 300
    assert len(asked) > 100
    assert not trained & asked


def test_skipped_tail_is_not_asked_for(tasks: Tasks) -> None:
    document = tasks.lookup_document(
        np.random.default_rng(1), 600, questions=8, held_out=True, share=1.0, skip_last=200
    )
    assert all(question.record < len(document.text) - 200 for question in document.questions)
    assert len(document.questions) == 8


def test_chunks_of_a_corpus_stay_inside_a_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_texts(["The red fox ran.\n\nIt sat.\n" * 9, "A blue bird.\n" * 5], tmp_path, tokenizer, source="test")
    tasks = Tasks(tokenizer, {"stories": open_corpus(tmp_path, tokenizer)})
    for sample in samples(tasks, "stories", length=32):
        text = tokenizer.decode(sample.ids[1:].tolist())
        assert not ("fox" in text and "bird" in text)
        assert sample.learn[1:].all()


def test_language_pays_its_entropy_and_no_predictor_pays_less(tasks: Tasks) -> None:
    paid, expected, blind = [], [], []
    for seed in range(40):
        sample = tasks.maker("ngram")(np.random.default_rng(seed), 256)
        assert sample is not None
        entropy, surprisal = tasks.language.entropy(sample.ids)
        assert len(entropy) == len(sample.ids) - 2 == sample.learn.sum()
        paid.append(surprisal.mean())
        expected.append(entropy.mean())
        # the same words backwards: every context is a wrong one
        words = np.concatenate([sample.ids[:2], sample.ids[:1:-1]])
        blind.append(tasks.language.entropy(words)[1][2:].mean())
    # 10,000 draws: the mean of -log p is the entropy within a few hundredths
    assert abs(np.mean(paid) - np.mean(expected)) < 0.05
    assert np.mean(blind) > np.mean(expected) + 1
    assert 1.2 < np.mean(expected) < np.log(32)


def test_queries_reach_beyond_the_window_and_ask_for_their_own_pair(tokenizer: Tokenizer) -> None:
    tasks = Tasks(tokenizer, {}, window=16)
    distances = []
    for sample in samples(tasks, "mqar", length=256):
        ids = sample.ids.tolist()
        for start, _ in sample.answers:
            key = ids[start - 1]
            first = ids.index(key)
            assert ids[first + 1] == ids[start]
            assert sample.learn[start]
            distances.append(start - first)
        assert sample.learn.sum() == len(sample.answers)
    assert np.mean(np.array(distances) > 17) >= 0.8


def test_needles_are_answered_in_the_order_asked(tasks: Tasks, tokenizer: Tokenizer) -> None:
    asked_at_once: list[int] = []
    for sample in samples(tasks, "needles"):
        text = tokenizer.decode(sample.ids.tolist())
        told, _, asked = text.rpartition("What are the codes for ")
        question, _, answer = asked.removesuffix(EOS).partition(f"?{ASSISTANT}{END_THINK}")
        names = [part.removeprefix("the ") for part in question.split(", ")]
        values = answer.split(", ")
        assert len(names) == len(values)
        asked_at_once.append(len(names))
        for name, value in zip(names, values, strict=True):
            assert re.search(rf"(?:the|The|-) {name}(?: is |: | has the {_VALUE} ){value}\b", told)
    assert max(asked_at_once) == 4
    assert np.mean(asked_at_once) > 2


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_passkey_lies_at_its_depth(tasks: Tasks, tokenizer: Tokenizer, depth: float) -> None:
    document = tasks.passkey_document(np.random.default_rng(4), 600, depth=depth)
    question = document.questions[0]
    assert abs(question.record - depth * 560) < 60
    text = tokenizer.decode(document.text[question.record :])
    assert text.startswith(f"The pass key is {tokenizer.decode(question.answer)}.")
    assert len(document.text) + len(question.ask) + len(question.answer) + 3 <= 600


def test_sums_are_right() -> None:
    for seed in range(200):
        asked, worked = modular_sum(np.random.default_rng(seed))
        modulus = int(re.findall(r"\d+", asked)[0])
        value = int(re.findall(r"\d+", asked)[1])
        for word, number in re.findall(r"(add|subtract|multiply by) (\d+)", asked):
            value = {"add": value + int(number), "subtract": value - int(number), "multiply by": value * int(number)}[
                word
            ] % modulus
        assert worked.endswith(f"The answer is {value}.")


def test_code_is_learnt_where_it_is_determined(tasks: Tasks, tokenizer: Tokenizer) -> None:
    for sample in samples(tasks, "code", count=8):
        learnt = tokenizer.decode(sample.ids[sample.learn].tolist())
        free = tokenizer.decode(sample.ids[~sample.learn].tolist())
        assert "return self." in learnt
        assert "class" not in learnt
        assert "return" not in free
