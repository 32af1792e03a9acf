"""The evaluation asks what it says it asks, by either path, and random selection finds nothing far back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from cedar.chat.tokenizer import Tokenizer
from cedar.config.rounding import Rounding
from cedar.errors import ConfigError
from cedar.model.transformer import Transformer
from cedar.train import evaluate
from cedar.train.corpus import open_corpus, write_texts
from cedar.train.run import new_model
from cedar.train.tasks import Tasks, sample_text
from tests.train.conftest import tiny_recipe


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    return new_model(tiny_recipe(), tokenizer, torch.device("cpu"))


def test_distances_lie_beyond_what_windows_reach(model: Transformer, tokenizer: Tokenizer) -> None:
    far = evaluate.reach(model)
    assert far == 8 * 15
    lookups = evaluate.documents(Tasks(tokenizer, {}), length=512, count=3, questions=4, skip_last=far)
    again = evaluate.documents(Tasks(tokenizer, {}), length=512, count=3, questions=4, skip_last=far)
    assert lookups == again
    for lookup in lookups:
        answers = evaluate.ask(model, tokenizer, lookup, selection="learned")
        assert len(answers) == 4
        assert all(answer.distance > far for answer in answers)
        assert all(answer.num_tokens == 4 for answer in answers)


def test_both_paths_ask_the_same(model: Transformer, tokenizer: Tokenizer) -> None:
    lookups = evaluate.documents(Tasks(tokenizer, {}), length=400, count=2, questions=3, skip_last=120, seed=3)
    served = [answer for lookup in lookups for answer in evaluate.ask(model, tokenizer, lookup, selection="learned")]
    whole = evaluate.ask_whole(model, tokenizer, lookups)
    assert [answer.distance for answer in served] == [answer.distance for answer in whole]


def test_both_paths_see_the_same_logits_where_nothing_is_approximated(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = evaluate.documents(Tasks(tokenizer, {}), length=300, count=4, questions=3, skip_last=60, seed=5)
    new_state = model.new_state
    monkeypatch.setattr(
        model, "new_state", lambda **given: new_state(**given, decoder_replay="exact", rounding=Rounding.none())
    )
    monkeypatch.setattr(model, "rounding", Rounding.none())
    served = [answer for lookup in lookups for answer in evaluate.ask(model, tokenizer, lookup, selection="learned")]
    assert served == evaluate.ask_whole(model, tokenizer, lookups)


def test_recall_of_an_untrained_model_is_nothing(model: Transformer, tokenizer: Tokenizer) -> None:
    result = evaluate.recall(model, tokenizer, length=400, count=2, questions=2)
    assert result["accuracy"] == 0
    assert result["accuracy_random_selection"] == 0
    assert result["questions"] == 4
    assert result["least_distance"] > result["reach_of_windows"] > result["window"]
    with pytest.raises(ConfigError, match="has no room for 8 questions"):
        evaluate.recall(model, tokenizer, length=200, questions=8)


def test_text_of_an_untrained_model_costs_about_the_whole_vocabulary(
    model: Transformer, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_texts([sample_text(3, 60)], tmp_path, tokenizer, source="own")
    result = evaluate.text(model, tokenizer, open_corpus(tmp_path, tokenizer), length=64, max_tokens=640)
    assert abs(result["nats_per_token"] - math.log(512)) < 0.5
    assert math.isclose(
        result["bits_per_byte"] * result["bytes"] * math.log(2),
        result["nats_per_token"] * result["tokens"],
        rel_tol=1e-3,
    )
