"""What a model can do: recall of records far back in its context, and bits per byte of held-out text."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cedar.chat.tokenizer import ASSISTANT, BOS, END_THINK, EOS, USER, Tokenizer
from cedar.errors import ConfigError
from cedar.model.sequence import SequenceState
from cedar.model.state import SelectionRule
from cedar.model.transformer import Transformer
from cedar.train.corpus import Corpus
from cedar.train.tasks import Lookup, Tasks

# evaluation documents never come from a training seed
_SEED = 0x5EED
# tokens of a prompt at once; what a GPU takes is bound by its host
_CHUNK, _CHUNK_GPU = 2048, 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One question asked.

    Attributes:
        distance: Tokens from the record's first token to the answer's.
        exact: Every token of the answer was the likeliest one.
        right_tokens: How many were.
        num_tokens: Tokens of the answer, without the end of the turn.
    """

    distance: int
    exact: bool
    right_tokens: int
    num_tokens: int


def reach(model: Transformer) -> int:
    """Tokens that windows alone can carry something over: nothing beyond it is found without the entries."""
    config = model.config
    return config.num_layers * (config.attention.sliding_window - 1)


def documents(tasks: Tasks, *, length: int, count: int, questions: int, skip_last: int, seed: int = 0) -> list[Lookup]:
    """Lookup documents of about `length` tokens with names that training never joined, our own filler between.

    Raises:
        ConfigError: `length` leaves no room for records before the last `skip_last` tokens.
    """
    if length < _shortest(questions, skip_last):
        raise ConfigError(
            f"a length of {length} has no room for {questions} questions and records more than {skip_last} tokens "
            "back; use a larger length or fewer questions"
        )
    return [
        tasks.lookup_document(
            np.random.default_rng((_SEED, seed, number)),
            length,
            questions=questions,
            held_out=True,
            own_filler=True,
            share=0.6,
            skip_last=skip_last,
        )
        for number in range(count)
    ]


def _shortest(questions: int, skip_last: int) -> int:
    """Tokens of the shortest document that has room for the questions and for records before the skipped tail."""
    return questions * 26 + skip_last + 40


def most_questions(length: int, skip_last: int) -> int:
    """Questions that leave half of what can be asked about to the records, at most 8.

    >>> most_questions(1024, 180), most_questions(256, 120)
    (8, 1)
    """
    return max(1, min(8, (length - skip_last - 40) // 52))


def ask(model: Transformer, tokenizer: Tokenizer, document: Lookup, *, selection: SelectionRule) -> list[Answer]:
    """Put a document's questions one turn after another, as a chat is served: prefill, then decode.

    The right answer goes in after each question, so the answers do not depend on each other; a greedy decoder
    gives the whole answer exactly where every one of its tokens is the likeliest here.
    """
    user, end = tokenizer.special[USER], tokenizer.special[EOS]
    reply = (tokenizer.special[ASSISTANT], tokenizer.special[END_THINK])
    state = model.new_state(selection=selection)
    answers = []
    for number, question in enumerate(document.questions):
        opening = document.text if number == 0 else (end, user)
        prompt = torch.tensor((*opening, *question.ask, *reply), device=model.device)
        first_V = _prefill(model, state, prompt)
        start = state.num_tokens
        given = torch.tensor(question.answer, device=model.device)
        rest_TV = model.decode(state, given)
        likeliest = torch.cat([first_V.argmax().reshape(1), rest_TV[:-1].argmax(-1)])
        right = likeliest == given
        answers.append(
            Answer(
                distance=start - question.record,
                exact=bool(right.all()),
                right_tokens=int(right.sum()),
                num_tokens=len(given),
            )
        )
    return answers


def _prefill(model: Transformer, state: SequenceState, prompt_T: Tensor) -> Tensor:
    """Logits after a prompt that goes on from `state`."""
    stop = state.num_tokens + len(prompt_T)
    logits_TV = torch.empty(0)
    for chunk in prompt_T.split(_CHUNK_GPU if prompt_T.is_cuda else _CHUNK):
        logits_TV = model.prefill(state, chunk, prompt_tokens=stop, last_only=True)
    return logits_TV[-1]


def ask_whole(
    model: Transformer,
    tokenizer: Tokenizer,
    lookups: Sequence[Lookup],
    *,
    selection: SelectionRule = "learned",
    compute_dtype: torch.dtype | None = None,
) -> list[Answer]:
    """The same questions through the whole-sequence forward, all documents at once: a probe during training."""
    user, end = tokenizer.special[USER], tokenizer.special[EOS]
    reply = (tokenizer.special[ASSISTANT], tokenizer.special[END_THINK])
    rows, spans = [], []
    for index, document in enumerate(lookups):
        ids = list(document.text)
        for number, question in enumerate(document.questions):
            ids += [*(() if number == 0 else (user,)), *question.ask, *reply]
            spans.append((index, len(ids), question))
            ids += [*question.answer, end]
        rows.append(ids)
    width = max(map(len, rows))
    width += width % 2
    ids_BS = torch.full((len(rows), width), tokenizer.special[BOS], dtype=torch.int64)
    for index, ids in enumerate(rows):
        ids_BS[index, : len(ids)] = torch.tensor(ids)
    with torch.no_grad():
        output = model(ids_BS.to(model.device), selection=selection, compute_dtype=compute_dtype)
    likeliest_BS = output.logits_BSV.argmax(-1).cpu()
    answers = []
    for index, start, question in spans:
        right = likeliest_BS[index, start - 1 : start - 1 + len(question.answer)] == torch.tensor(question.answer)
        answers.append(
            Answer(
                distance=start - question.record,
                exact=bool(right.all()),
                right_tokens=int(right.sum()),
                num_tokens=len(question.answer),
            )
        )
    return answers


def recall(
    model: Transformer,
    tokenizer: Tokenizer,
    *,
    length: int,
    count: int = 32,
    questions: int | None = None,
    seed: int = 0,
    held_out: int = 8,
    control: bool = True,
) -> dict[str, Any]:
    """Share of exact answers about records beyond the reach of all windows together, and the random control.

    The control is the same model on the same questions, but every index source takes random visible entries.

    Args:
        length: Tokens of a document with its questions.
        held_out: As in the training run's `data.held_out_names`.

    Returns:
        `accuracy`, `accuracy_random_selection` (None without control), their token-wise forms, accuracy by
        distance, and what was asked.
    """
    tasks = Tasks(tokenizer, {}, held_out=held_out)
    far = reach(model)
    questions = most_questions(length, far) if questions is None else questions
    lookups = documents(tasks, length=length, count=count, questions=questions, skip_last=far, seed=seed)
    started = time.monotonic()
    learned = [answer for lookup in lookups for answer in ask(model, tokenizer, lookup, selection="learned")]
    random: list[Answer] = []
    if control:
        # seeded, so that the number can be had again
        torch.manual_seed(seed)
        random = [answer for lookup in lookups for answer in ask(model, tokenizer, lookup, selection="random")]
    return {
        "accuracy": _share(learned),
        "accuracy_random_selection": _share(random) if control else None,
        "token_accuracy": _token_share(learned),
        "token_accuracy_random_selection": _token_share(random) if control else None,
        "by_distance": _by_distance(learned),
        "length": length,
        "documents": count,
        "questions": len(learned),
        "window": model.config.attention.sliding_window,
        "least_distance": min(answer.distance for answer in learned),
        "reach_of_windows": far,
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }


def _share(answers: Sequence[Answer]) -> float:
    return round(sum(answer.exact for answer in answers) / max(1, len(answers)), 4)


def _token_share(answers: Sequence[Answer]) -> float:
    total = sum(answer.num_tokens for answer in answers)
    return round(sum(answer.right_tokens for answer in answers) / max(1, total), 4)


def _by_distance(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Accuracy in steps of doubled distance."""
    groups: dict[int, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(int(math.log2(max(1, answer.distance))), []).append(answer)
    return [
        {"from": 2**power, "to": 2 ** (power + 1), "questions": len(group), "accuracy": _share(group)}
        for power, group in sorted(groups.items())
    ]


def text(
    model: Transformer,
    tokenizer: Tokenizer,
    corpus: Corpus,
    *,
    length: int = 512,
    max_tokens: int = 32768,
    rows: int = 8,
    compute_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Bits per byte and nats per token of held-out text, in runs of `length` tokens from the corpus's start.

    Every run begins with BOS and knows nothing of the one before it, so short runs score worse.
    """
    tokens = np.asarray(corpus.tokens[:max_tokens]).astype(np.int64)
    run = length - 1
    count = len(tokens) // run
    if count == 0:
        raise ConfigError(f"{corpus.folder} has {len(tokens)} tokens, expected at least {run} for one run")
    body_RS = torch.from_numpy(tokens[: count * run].reshape(count, run))
    ids_RS = torch.cat([torch.full((count, 1), tokenizer.special[BOS]), body_RS], dim=1)
    nats = 0.0
    for start in range(0, count, rows):
        part = ids_RS[start : start + rows].to(model.device)
        with torch.no_grad():
            logits = model(part, compute_dtype=compute_dtype).logits_BSV
        nats += float(_negative_log_likelihood(logits[:, :-1], part[:, 1:]))
    num_bytes = sum(len(tokenizer.token_bytes(int(i))) for i in body_RS.flatten() if int(i) != tokenizer.special[EOS])
    return {
        "bits_per_byte": round(nats / math.log(2) / num_bytes, 4),
        "nats_per_token": round(nats / body_RS.numel(), 4),
        "tokens": body_RS.numel(),
        "bytes": num_bytes,
        "length": length,
        "corpus": corpus.info["source"],
    }


def _negative_log_likelihood(logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten(), reduction="sum")
