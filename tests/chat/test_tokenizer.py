"""Tokenizer: round trips, special tokens out of reach of text, streaming, Engram's map (about 10 s)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.chat.tokenizer import (
    BOS,
    EOS,
    FIRST_TOKENS,
    LAST_TOKENS,
    PAD,
    USER,
    StreamDecoder,
    Tokenizer,
    normalise,
    train_tokenizer,
)
from cedar.config.presets import flash, nano
from cedar.errors import ConfigError, FormatError


def test_trained_layout(toy: Tokenizer) -> None:
    assert len(toy) == 340
    assert [toy.special[name] for name in FIRST_TOKENS] == [0, 1, 2]
    assert [toy.special[name] for name in LAST_TOKENS] == list(range(332, 340))
    assert sorted(toy.token_bytes(i) for i in range(3, 259)) == [bytes([b]) for b in range(256)]


def test_training_twice_gives_the_same_file(toy: Tokenizer, corpus: list[str]) -> None:
    assert train_tokenizer(iter(corpus), 340).fingerprint == toy.fingerprint


def test_digits_stay_single_or_come_in_threes(toy: Tokenizer) -> None:
    assert [toy.decode([i]) for i in toy.encode("1234")] == list("1234")
    threes = train_tokenizer(["123 456 123 456 123123"] * 20, 271, digits=3)
    assert [threes.decode([i]) for i in threes.encode("123456")] == ["123", "456"]


@pytest.mark.parametrize("vocab_size", [266, 5000])
def test_a_vocabulary_that_cannot_be_filled_is_refused(vocab_size: int, corpus: list[str]) -> None:
    with pytest.raises(ConfigError, match=str(vocab_size)):
        train_tokenizer(corpus, vocab_size)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_round_trip(toy: Tokenizer, text: str) -> None:
    ids = toy.encode(text)
    assert toy.decode(ids) == text
    assert not set(ids) & set(toy.special.values())


@pytest.mark.parametrize("name", [*FIRST_TOKENS, *LAST_TOKENS])
def test_text_cannot_spell_a_special_token(toy: Tokenizer, release: Tokenizer, name: str) -> None:
    for tokenizer in (toy, release):
        for text in (name, f"a{name}b", name * 3, f" {name}\n"):
            ids = tokenizer.encode(text)
            assert not set(ids) & set(tokenizer.special.values())
            assert tokenizer.decode(ids) == text


def test_release_spelling_of_a_user_mark_is_plain_pieces(release: Tokenizer) -> None:
    assert release.encode(USER) == [30, 28217, 6756, 28217, 32]


def test_lone_surrogates_become_replacement_characters(toy: Tokenizer) -> None:
    assert toy.decode(toy.encode("a\ud800b \ud83d\ude00")) == "a\ufffdb \U0001f600"


def test_batch_equals_single(toy: Tokenizer, corpus: list[str]) -> None:
    assert toy.encode_batch(corpus) == [toy.encode(text) for text in corpus]


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 339), max_size=40))
def test_streaming_equals_decoding_at_once(toy: Tokenizer, ids: list[int]) -> None:
    stream = StreamDecoder(toy)
    pieces = [stream.push(i) for i in ids] + [stream.finish()]
    assert "".join(pieces) == toy.decode(ids)
    backend = tokenizers.Tokenizer.from_str(toy.json_text)
    # the library decodes runs between added tokens apart; without those the two must agree
    plain = [i for i in ids if i not in toy.special.values()]
    assert toy.decode(plain) == backend.decode(plain, skip_special_tokens=False)


def _byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_bytes = {tokenizer.token_bytes(i): i for i in range(3, 259)}
    return [by_bytes[bytes([byte])] for byte in data]


@pytest.mark.parametrize("text", ["\U0001f600", "東", "é", "a\U0001f1eb\U0001f1f7", "x" + "\U0001f469\u200d\U0001f680"])
def test_characters_split_over_tokens_arrive_whole(toy: Tokenizer, text: str) -> None:
    stream = StreamDecoder(toy)
    pieces = [stream.push(i) for i in _byte_ids(toy, text.encode())]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert stream.finish() == ""


def test_half_a_character_before_a_space_is_held_then_replaced(toy: Tokenizer) -> None:
    stream = StreamDecoder(toy)
    ids = _byte_ids(toy, "\U0001f600".encode()[:2] + b" a")
    assert [stream.push(i) for i in ids] == ["", "", "\ufffd ", "a"]


def test_a_text_cut_inside_a_character_ends_with_one_mark(toy: Tokenizer) -> None:
    stream = StreamDecoder(toy)
    assert [stream.push(i) for i in _byte_ids(toy, "é".encode()[:1])] == [""]
    assert stream.finish() == "\ufffd"


def test_compressed_map_of_the_release(release: Tokenizer) -> None:
    compressed, count = release.compressed_map()
    assert count == 99092
    digest = hashlib.sha256(struct.pack(f"<{len(compressed)}i", *compressed)).hexdigest()
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
    spots = {
        0: 0, 1: 1, 2: 2, 3: 3, 201: 174, 223: 174, 262: 174, 271: 174, 671: 237, 455: 237, 1805: 237, 270: 237,
        20852: 237, 19923: 15844, 128799: 98611, 128803: 98615, 128804: 98616, 128821: 98633, 128822: 98634,
        128825: 98637, 129264: 99076, 129279: 99091,
    }  # fmt: skip
    assert {i: compressed[i] for i in spots} == spots


def test_normalise_equals_the_golden_cases() -> None:
    cases = json.loads((Path(__file__).parents[1] / "vectors" / "engram_normalise.json").read_text(encoding="utf-8"))
    assert [normalise(case["text"]) for case in cases] == [case["key"] for case in cases]


def test_another_added_token_is_another_map(toy: Tokenizer) -> None:
    # field report A23: same vocabulary, an added token that reads differently
    data = json.loads(toy.json_text)
    before, count = toy.compressed_map()
    image = next(token for token in data["added_tokens"] if token["id"] == 339)
    image["content"] = " THE "
    other = Tokenizer(json.dumps(data))
    after, other_count = other.compressed_map()
    assert other.fingerprint != toy.fingerprint
    assert after[339] != before[339] and after[:339] == before[:339]
    assert other_count == count - 1 if after[339] < 339 else other_count == count


def test_the_config_must_fit(release: Tokenizer) -> None:
    release.check(flash())


def test_each_mismatch_names_both_numbers(toy: Tokenizer) -> None:
    config = dataclasses.replace(
        nano(),
        vocab_size=340,
        image_token_id=339,
        engram=dataclasses.replace(nano().engram, compressed_vocab_size=toy.compressed_map()[1]),
    )
    toy.check(config)
    with pytest.raises(FormatError, match="340.*512"):
        toy.check(dataclasses.replace(config, vocab_size=512))
    with pytest.raises(FormatError, match="339.*338"):
        toy.check(dataclasses.replace(config, image_token_id=338))
    with pytest.raises(FormatError, match="engram_compressed_vocab_size is 400"):
        toy.check(dataclasses.replace(config, engram=dataclasses.replace(config.engram, compressed_vocab_size=400)))
    data = json.loads(toy.json_text)
    data["added_tokens"][3]["content"] = "<｜Sistem｜>"
    with pytest.raises(FormatError, match="<｜System｜>"):
        Tokenizer(json.dumps(data)).check(config)


def test_save_and_load(toy: Tokenizer, tmp_path: Path) -> None:
    toy.save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == toy.fingerprint
    assert Tokenizer.load(tmp_path / "tokenizer.json").special[BOS] == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 1}', json.dumps({"version": "1.0"})])
def test_not_a_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(FormatError, match="tokenizer"):
        Tokenizer.load(tmp_path)


def test_no_file_and_no_such_id(tmp_path: Path, toy: Tokenizer) -> None:
    with pytest.raises(FormatError, match="cannot read"):
        Tokenizer.load(tmp_path)
    for token_id in (-1, 340):
        with pytest.raises(FormatError, match="340"):
            toy.decode([token_id])


def test_a_special_token_that_merges_can_spell_is_refused(toy: Tokenizer) -> None:
    data = json.loads(toy.json_text)
    spelled = next(token for token in data["model"]["vocab"] if token.isascii() and len(token) == 2)
    data["added_tokens"].append({**data["added_tokens"][0], "id": data["model"]["vocab"][spelled], "content": spelled})
    data["added_tokens"].sort(key=lambda token: token["id"])
    with pytest.raises(FormatError, match=re.escape(spelled)):
        Tokenizer(json.dumps(data))


def test_names_are_the_releases(release: Tokenizer) -> None:
    assert [release.special[name] for name in (BOS, EOS, PAD)] == [0, 1, 2]
    assert [release.special[name] for name in LAST_TOKENS] == [
        128799, 128803, 128804, 128821, 128822, 128825, 128828, 129264,
    ]  # fmt: skip
