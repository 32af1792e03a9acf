"""Corpora: written, mapped, and every kind of damage named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zstandard

from cedar.chat.tokenizer import EOS, Tokenizer, train_tokenizer
from cedar.errors import ConfigError, FormatError
from cedar.train.corpus import open_corpus, paragraph_starts, read_documents, take_texts, write_texts
from cedar.train.tasks import sample_text

STORY = "## One\n\nThe red fox sat.\n\nIt ran.\n## Two\nThe end."


def lines(*documents: dict[str, str]) -> bytes:
    return b"".join(json.dumps(document).encode() + b"\n" for document in documents)


@pytest.mark.parametrize("packed", [False, True])
def test_documents_come_back_in_order(tmp_path: Path, packed: bool) -> None:
    data = lines({"id": "a", "text": "one"}, {"id": "b", "text": "two"}) + b"\n"
    name, data = ("x.jsonl.zst", zstandard.compress(data)) if packed else ("x.jsonl", data)
    (tmp_path / name).write_bytes(data)
    assert [document["id"] for document in read_documents(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"text": "a"}\n{"text": "\xff\xfe"}\n', "x.jsonl:2: byte 10 is not UTF-8"),
        (b'{"text": "a"}\n{"text": \n', "x.jsonl:2: not JSON"),
        (b"[1, 2]\n", "x.jsonl:1: a JSON list"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(FormatError, match=message):
        list(read_documents(tmp_path))


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_a_packed_file_cut_short_is_named(tmp_path: Path, keep: float) -> None:
    text = np.random.default_rng(0).bytes(300_000).hex()
    data = zstandard.compress(lines(*({"text": text[start : start + 1000]} for start in range(0, 600_000, 1000))))
    (tmp_path / "x.jsonl.zst").write_bytes(data[: int(keep * len(data))])
    with pytest.raises(FormatError, match="ends early"):
        list(read_documents(tmp_path))


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no JSON lines"):
        list(read_documents(tmp_path))


def test_order_and_limit(tmp_path: Path) -> None:
    documents = [{"id": name, "text": name * 10} for name in "abc"]
    order = tmp_path / "index.tsv"
    order.write_text("id\tgrade\nc\t1\nx\t2\na\t3\n")
    assert list(take_texts(documents, order=order, max_characters=15)) == ["c" * 10, "a" * 5]
    order.write_text("nothing\n")
    with pytest.raises(ConfigError, match="no document has an id"):
        list(take_texts(documents, order=order))
    with pytest.raises(FormatError, match="text is a int"):
        list(take_texts([{"id": "a", "text": 3}]))


def test_chapters_become_documents_and_empty_texts_vanish(tmp_path: Path, tokenizer: Tokenizer) -> None:
    info = write_texts(["", STORY, "  \n "], tmp_path, tokenizer, source="test")
    corpus = open_corpus(tmp_path, tokenizer)
    assert info["documents"] == corpus.num_documents == 2
    parts = [corpus.tokens[a:b].tolist() for a, b in zip(corpus.starts, corpus.starts[1:], strict=False)]
    assert [part[-1] for part in parts] == [tokenizer.special[EOS]] * 2
    assert tokenizer.decode(parts[0][:-1]) == "## One\n\nThe red fox sat.\n\nIt ran."
    starts = paragraph_starts(corpus, tokenizer)
    assert {tokenizer.decode(corpus.tokens[s : s + 1].tolist())[:1] for s in starts} == {"#", "T", "I"}


def test_nothing_but_empty_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(FormatError, match="no document with text"):
        write_texts(["", " \n"], tmp_path, tokenizer, source="test")


def test_damage_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_texts([STORY * 20], tmp_path, tokenizer, source="test")
    file = tmp_path / "tokens.npy"
    good = file.read_bytes()
    for bad, message in (
        (good[:-10], "cannot read"),
        (good[:-1] + bytes([good[-1] ^ 1]), "is damaged"),
        (b"", "cannot read"),
    ):
        file.write_bytes(bad)
        with pytest.raises(FormatError, match=message):
            open_corpus(tmp_path, tokenizer)
    np.save(file, np.zeros(3, np.uint16))
    with pytest.raises(FormatError, match=r"holds uint16 \[3\]"):
        open_corpus(tmp_path, tokenizer)
    (tmp_path / "corpus.json").unlink()
    with pytest.raises(FormatError, match="cedar train prepare"):
        open_corpus(tmp_path, tokenizer)


def test_another_tokenizer_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_texts([STORY], tmp_path, tokenizer, source="test")
    other = train_tokenizer([sample_text(2, 500)], 400)
    with pytest.raises(FormatError, match="another tokenizer"):
        open_corpus(tmp_path, other)
