"""The bundled model with its own draft: what is written of it, and the same answers (about 20 s)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

import pytest

from cedar.chat.grammar import Grammars
from cedar.chat.tokenizer import BOS, EOS
from cedar.cli.draft_test import CODE, STORIES, TEMPLATES, Plan, as_text, measure
from cedar.config.serve import ServeConfig
from cedar.engine.engine import Engine
from cedar.engine.load import ModelFiles, open_model, start_engine
from cedar.engine.request import Drafting, Finished, Request, SamplingParams, Token
from cedar.planner.kv import page_bytes

pytestmark = pytest.mark.device

FILES = open_model()


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return FILES


@pytest.fixture(scope="module")
def engine(files: ModelFiles) -> Iterator[Engine]:
    """Deterministic mode, and so few pages that sequences are set aside."""
    config = ServeConfig(strict_cache=True, cache_bytes=20 * page_bytes(files.config), max_running=8)
    engine = start_engine(files, config)
    yield engine
    engine.close()


def prompts(files: ModelFiles, count: int, seed: int) -> list[tuple[int, ...]]:
    """Some short, some of a page or more; every third begins as the one before it, so that prompts hit."""
    draw = random.Random(seed)
    pieces = [*STORIES, *CODE, *TEMPLATES]
    made: list[tuple[int, ...]] = []
    for number in range(count):
        text = " ".join(draw.choice(pieces) for _ in range(draw.choice([1, 2, 6, 14])))
        ids = (files.tokenizer.special[BOS], *files.tokenizer.encode(text))
        if number % 3 == 2:
            ids = (*made[-1], *files.tokenizer.encode(f" {draw.choice(pieces)}"))
        made.append(ids[: draw.choice([len(ids), max(1, len(ids) - 1)])])
    return made


def ask(engine: Engine, asked: Sequence[tuple[int, ...]], max_tokens: int, draft: Drafting) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    answers = []
    for start in range(0, len(asked), 24):
        handles = [
            engine.submit(Request(prompt_ids=ids, sampling=sampling, draft=draft)) for ids in asked[start : start + 24]
        ]
        for handle in handles:
            events = list(handle)
            assert isinstance(events[-1], Finished) and events[-1].reason == "length", events[-1]
            answers.append([event.id for event in events if isinstance(event, Token)])
    return answers


def check_identity(engine: Engine, files: ModelFiles, count: int, max_tokens: int) -> None:
    asked = prompts(files, count, seed=count)
    before = engine.metrics.accepted_tokens
    assert ask(engine, asked, max_tokens, "on") == ask(engine, asked, max_tokens, "off")
    # drafts did stand, or nothing was tested
    assert engine.metrics.accepted_tokens - before > count * max_tokens / 10


def test_greedy_answers_are_the_same(engine: Engine, files: ModelFiles) -> None:
    """6 prompts of 16 tokens with hits, few pages and mixed batches; the slow test has 500 of 128."""
    check_identity(engine, files, 6, 16)


@pytest.mark.slow
def test_greedy_answers_are_the_same_over_500_prompts(engine: Engine, files: ModelFiles) -> None:
    check_identity(engine, files, 500, 128)
    assert engine.metrics.preempted > 0


def test_a_structured_answer_is_the_same_and_whole(engine: Engine, files: ModelFiles) -> None:
    """A grammar, greedy and seeded, drafts on and off (field report C07)."""
    grammars = Grammars(files.tokenizer, files.config.vocab_size)
    schema = {
        "type": "object",
        "properties": {"n": {"type": "boolean"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    ids = (files.tokenizer.special[BOS], *files.tokenizer.encode("The answer is"))
    drafting: tuple[Drafting, ...] = ("off", "on")
    for temperature, seed in ((0.0, None), (0.9, 4)):
        answers = []
        for draft in drafting:
            sampling = SamplingParams(
                temperature=temperature,
                seed=seed,
                max_tokens=60,
                logprobs=1,
                stop_token_ids=(files.tokenizer.special[EOS],),
            )
            constraint = grammars.of_schema(schema, thinking=False, param="response_format")
            request = Request(prompt_ids=ids, sampling=sampling, constraint=constraint, draft=draft)
            answers.append([event for event in engine.submit(request) if isinstance(event, Token)])
        assert [token.id for token in answers[0]] == [token.id for token in answers[1]]
        assert answers[0] == answers[1]
        text = files.tokenizer.decode([token.id for token in answers[1]])
        assert set(json.loads(text)) == {"n"}


def test_what_the_card_says_was_measured(files: ModelFiles) -> None:
    """The issue's limits, as measured on held-out text when the draft was trained."""
    draft = json.loads((files.path / "training.json").read_text())["draft"]
    measured = draft["measured"]
    assert measured["acceptance"]["stories"]["greedy"] >= 2.5
    assert measured["acceptance"]["code"]["greedy"] >= 4.0
    assert max(measured[kind]["calibration_error"]["all"] for kind in ("sampled", "greedy")) <= 0.03
    size = sum(file.stat().st_size for file in files.path.glob("*.safetensors"))
    assert size < 40 * 2**20
    assert set(files.defaults.draft_confidence_temperatures) == {"sampled", "greedy"}


def test_the_bench_says_what_it_should(files: ModelFiles) -> None:
    values = measure(files, Plan(batches=(1, 2), rounds=1, max_tokens=8, identity_prompts=2))
    assert values["identical"] and values["identical_answers"] == 2
    assert values["acceptance"]["stories"] > 1 and values["speedup"] > 0
    assert [batch["batch"] for batch in values["batches"]] == [1, 2]
    assert values["batches"][0]["modes"]["off"]["width"] == 0
    assert all(run["whole_tokens_per_s"] > 0 for batch in values["batches"] for run in batch["modes"].values())
    assert "tokens a step" in as_text(values)
