"""The evaluation asks what it says it asks, by either path, and random selection finds nothing far back."""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path

import numpy as np
import pytest
import torch

from cedar.chat.tokenizer import BOS, Tokenizer
from cedar.config.rounding import Rounding
from cedar.errors import ConfigError
from cedar.model.transformer import Transformer
from cedar.train import evaluate
from cedar.train.corpus import open_corpus, write_chats, write_texts
from cedar.train.measure import Meter
from cedar.train.page import gates, page, summary
from cedar.train.run import new_model
from cedar.train.suite import Effort, Suite, effort_for
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


def test_the_whole_evaluation_gives_numbers_and_a_page(
    model: Transformer, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_texts([sample_text(2, 60)], tmp_path / "stories", tokenizer, source="test")
    chat = [tokenizer.special[BOS], *tokenizer.encode("Say one."), *tokenizer.encode("one")]
    write_chats(
        [{}],
        tmp_path / "chats",
        tokenizer,
        render=lambda document: (chat, [False] * (len(chat) - 2) + [True] * 2),
        max_tokens=64,
        source="test",
    )
    corpora = {name: open_corpus(tmp_path / name, tokenizer) for name in ("stories", "chats")}
    effort = Effort(lengths=(256,), tokens=256, documents=1, most_tokens=256, offset_step=8)
    lines: list[str] = []
    facts = {"trained_length": 128, "recipe": {"preset": "nano"}}
    saved: list[list[str]] = []
    suite = Suite(model, tokenizer, facts, corpora, effort, report=lines.append)
    results = suite.run(lambda found: saved.append(list(found)))
    # each measurement is there as soon as it is made
    assert [len(names) for names in saved] == list(range(3, 15)) and saved[-1] == list(results)
    # plain values alone: it goes to a file
    read = json.loads(json.dumps(results))
    language = read["language"]
    # nothing was learnt: about the whole vocabulary, and never less than the best predictor
    assert abs(language["nats"] - math.log(512)) < 0.7
    assert language["excess"] == pytest.approx(language["nats"] - language["ideal"])
    assert read["passkey"][0]["exact"] == 0
    assert set(read["passkey"][0]["by_depth"]) == {"0", "0.5", "0.9"}
    assert read["text"]["stories"]["tokens"] > 100
    assert read["chats"]["chats"]["answers"] == 1
    assert read["switches"]["as it serves"]["costs"] == 0
    assert list(read["replay"]["decoder"]["by_offset"]) == ["0", "8", "15"]
    assert list(read["replay"]["encoder"]["by_offset"]) == ["0", "8"]
    assert any("12/12" in line for line in lines)
    html = page(results, title="a <model>")
    assert "a &lt;model&gt;" in html
    assert "http" not in html.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", "")
    for gate in gates(read):
        assert gate.told()[0] in html
        assert escape(gate.name) in html
    assert {gate.met for gate in gates(read)} >= {False, None}
    told = summary(read)
    assert told["by_length"]["pass key"] == {"256": "0.0% of 3"}
    assert told["gates"][0][0].startswith("n-gram")


def test_a_pool_of_every_block_is_none(model: Transformer, tokenizer: Tokenizer) -> None:
    meter = Meter(model)
    tasks = Tasks(tokenizer, {})
    samples = [tasks.language.sample(np.random.default_rng(seed), 200) for seed in range(2)]
    pooled = meter.score(samples)
    with meter.without_pool():
        without = meter.score(samples)
    assert pooled.nats != without.nats
    # a pool that holds everything chooses as Full layers do: the sum of scores decides, not the blocks
    assert model.config.indexer.candidate_topk_blocks == 8
    assert len(pooled.nats) == len(without.nats) == 2 * 198


def test_replay_costs_nothing_where_the_window_is_whole(model: Transformer, tokenizer: Tokenizer) -> None:
    """A prompt no longer than the window restarts nothing."""
    meter = Meter(model)
    samples = [Tasks(tokenizer, {}).language.sample(np.random.default_rng(3), 64)]
    window = model.config.attention.sliding_window
    assert meter.decoder_replay(samples, window - 4, offsets=[0, 4]).by_offset == {0: 0.0, 4: 0.0}
    assert meter.decoder_replay(samples, window + 8, offsets=[0]).cost != 0


def test_lengths_without_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 128"):
        effort_for("cpu", quick=True, lengths=[64])
    assert effort_for("cpu", quick=True, lengths=[512, 128]).lengths == (128, 512)
