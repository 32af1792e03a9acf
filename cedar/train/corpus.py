"""JSON lines of text or chats -> tokens on disk, read back without copying.

A prepared folder holds `tokenizer.json` and one folder a corpus: `tokens.npy` (uint16), `starts.npy` (where
each document begins, and the end), for chats `learn.npy` (a bit a token: is the model to produce it), and
`corpus.json`, which says what the rest must be. Nothing here needs torch.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cedar.chat.tokenizer import BOS, EOS, Tokenizer, train_tokenizer
from cedar.errors import ConfigError, FormatError

FORMAT_VERSION = 2
# zstd windows above this need the reader's consent: 2**27 is what `zstd --long=27` writes
_ZSTD_WINDOW = 1 << 27


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Tokens of one prepared folder; tokens and starts are memory-mapped.

    Attributes:
        tokens: uint16 [N].
        starts: int64 [D + 1]; document d is `tokens[starts[d]:starts[d + 1]]`.
        learn: bool [N], or None where every token is learnt.
        info: What `corpus.json` says.
    """

    folder: Path
    tokens: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int64]
    learn: npt.NDArray[np.bool_] | None
    info: dict[str, Any]

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1


def read_documents(path: str | Path) -> Iterator[dict[str, Any]]:
    """Objects of every `*.jsonl` and `*.jsonl.zst` of a folder (or of one file), in name order.

    Raises:
        FormatError: No such files, a line that is not UTF-8 or not a JSON object, or a packed file that is
            cut short; the message names file and line.
    """
    path = Path(path)
    files = sorted(file for file in path.glob("*.jsonl*")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise FormatError(f"no JSON lines at {path}: expected a *.jsonl or *.jsonl.zst file, or a folder of them")
    for file in files:
        number = 0
        try:
            for number, line in enumerate(_lines(file), start=1):
                if line.strip():
                    yield _document(line, f"{file}:{number}")
        except EOFError as error:
            raise FormatError(f"{file} ends early after line {number}: {error}; fetch the file again") from error


def _lines(file: Path) -> Iterator[bytes]:
    if file.suffix != ".zst":
        with file.open("rb") as plain:
            yield from plain
        return
    try:
        import zstandard
    except ImportError as error:
        raise FormatError(f"{file} needs the package zstandard; install it or unpack the file first") from error
    with file.open("rb") as packed:
        # the frame's header knows how much must come out; a cut file just ends
        expected = zstandard.frame_content_size(packed.read(18))
        packed.seek(0)
        decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        size, held = 0, b""
        try:
            for line in io.BufferedReader(decompressor.stream_reader(packed, read_across_frames=True)):
                size += len(line)
                if held:
                    yield held
                held = line
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        if size < expected:
            raise EOFError(f"{size:,} of {expected:,} bytes")
        yield held


def _document(line: bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: byte {error.start} is not UTF-8; convert the file") from error
    except json.JSONDecodeError as error:
        raise FormatError(f"{where}: not JSON ({error.msg}); expected one object a line") from error
    if not isinstance(document, dict):
        raise FormatError(f"{where}: a JSON {type(document).__name__}, expected an object with 'text' or 'messages'")
    return document


def chapters(text: str) -> Iterator[str]:
    r"""Parts of a text, cut before each line that begins with `## `; empty parts are left out.

    >>> list(chapters("one\n## two\nb"))
    ['one', '## two\nb']
    """
    part: list[str] = []
    for line in text.split("\n"):
        if line.startswith("## ") and part:
            if joined := "\n".join(part).strip():
                yield joined
            part = []
        part.append(line)
    if joined := "\n".join(part).strip():
        yield joined


def take_texts(
    documents: Iterable[dict[str, Any]], *, order: Path | None = None, max_characters: int | None = None
) -> Iterator[str]:
    """`text` of the documents, at most `max_characters` in all.

    Args:
        order: A file whose lines begin with a document's id (a table with tabs will do): documents are
            taken in that order, others not at all.
    """
    texts: Iterator[tuple[str, Any]] = (
        (str(document.get("id", "")), document.get("text", "")) for document in documents
    )
    if order is not None:
        by_id = dict(texts)
        ids = [line.split("\t")[0].strip() for line in order.read_text(encoding="utf-8").splitlines()]
        chosen = [(name, by_id[name]) for name in ids if name in by_id]
        if not chosen:
            raise ConfigError(f"no document has an id that {order} lists; expected ids in its first column")
        texts = iter(chosen)
    left = max_characters if max_characters is not None else 1 << 62
    for name, text in texts:
        if not isinstance(text, str):
            raise FormatError(f"document {name!r}: text is a {type(text).__name__}, expected a string")
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)


def make_tokenizer(texts: Iterable[str], vocab_size: int, *, sample_characters: int = 8_000_000) -> Tokenizer:
    """A byte-level BPE trained on the first `sample_characters` of the texts."""

    def sample() -> Iterator[str]:
        left = sample_characters
        for text in texts:
            if left <= 0:
                return
            yield text[:left]
            left -= len(text)

    return train_tokenizer(sample(), vocab_size)


def write_texts(texts: Iterable[str], folder: Path, tokenizer: Tokenizer, *, source: str) -> dict[str, Any]:
    """Tokenise texts: one document a chapter, EOS after each. Returns what `corpus.json` says."""
    end = tokenizer.special[EOS]
    pieces = (
        (np.array([*ids, end], dtype=np.uint16), None)
        for text in texts
        for batch in [list(chapters(text))]
        for ids in tokenizer.encode_batch(batch)
        if ids
    )
    return _write(pieces, folder, tokenizer, source=source)


def write_chats(
    documents: Iterable[dict[str, Any]],
    folder: Path,
    tokenizer: Tokenizer,
    *,
    render: Callable[[dict[str, Any]], tuple[list[int], list[bool]]],
    max_tokens: int,
    source: str,
) -> dict[str, Any]:
    """Tokenise chats; those above `max_tokens` are left out, for a chat cut in two teaches nothing.

    Args:
        render: A document -> its ids and which of them the model is to produce.
    """
    pieces = (
        (np.array(ids, dtype=np.uint16), np.array(learn, dtype=np.bool_))
        for ids, learn in map(render, documents)
        if 0 < len(ids) <= max_tokens
    )
    return _write(pieces, folder, tokenizer, source=source)


def _write(
    pieces: Iterable[tuple[npt.NDArray[np.uint16], npt.NDArray[np.bool_] | None]],
    folder: Path,
    tokenizer: Tokenizer,
    *,
    source: str,
) -> dict[str, Any]:
    tokens: list[npt.NDArray[np.uint16]] = []
    learn: list[npt.NDArray[np.bool_]] = []
    for ids, mask in pieces:
        tokens.append(ids)
        if mask is not None:
            learn.append(mask)
    if not tokens:
        raise FormatError(f"{source} holds no document with text in it")
    folder.mkdir(parents=True, exist_ok=True)
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in tokens])]).astype(np.int64)
    joined = np.concatenate(tokens)
    np.save(folder / "tokens.npy", joined)
    np.save(folder / "starts.npy", starts)
    if learn:
        np.save(folder / "learn.npy", np.packbits(np.concatenate(learn)))
    info = {
        "format": FORMAT_VERSION,
        "source": source,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": len(tokenizer),
        "documents": len(tokens),
        "tokens": len(joined),
        "learn": bool(learn),
        "crc32": zlib.crc32(joined.tobytes()),
    }
    # written last: a folder without it is unfinished
    partial = folder / "corpus.json.partial"
    partial.write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / "corpus.json")
    return info


def open_corpus(folder: str | Path, tokenizer: Tokenizer) -> Corpus:
    """Map a prepared corpus and check it against its own description and the tokenizer.

    Raises:
        FormatError: Missing or unfinished folder, another tokenizer, another length, or a checksum that differs.
    """
    folder = Path(folder)
    try:
        info = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(
            f"no corpus at {folder} (corpus.json: {error.strerror}); make it with cedar train prepare"
        ) from error
    except json.JSONDecodeError as error:
        raise FormatError(f"{folder}/corpus.json is not JSON ({error.msg}); prepare the corpus again") from error
    if info.get("format") != FORMAT_VERSION:
        raise FormatError(
            f"{folder} has format {info.get('format')}, expected {FORMAT_VERSION}; prepare the corpus again"
        )
    if info["tokenizer"] != tokenizer.fingerprint:
        raise FormatError(
            f"{folder} was tokenised with another tokenizer ({info['tokenizer'][:12]}, vocabulary "
            f"{info['vocab_size']}; this one is {tokenizer.fingerprint[:12]}, {len(tokenizer)}): prepare it again"
        )
    tokens = _map(folder / "tokens.npy", np.dtype(np.uint16), info["tokens"])
    starts = _map(folder / "starts.npy", np.dtype(np.int64), info["documents"] + 1)
    learn = None
    if info["learn"]:
        bits = _map(folder / "learn.npy", np.dtype(np.uint8), (info["tokens"] + 7) // 8)
        learn = np.unpackbits(bits, count=info["tokens"]).astype(np.bool_)
    if zlib.crc32(tokens.tobytes()) != info["crc32"] or (np.diff(starts) <= 0).any() or starts[-1] != len(tokens):
        raise FormatError(f"{folder} is damaged: its bytes differ from what was written; prepare the corpus again")
    return Corpus(folder=folder, tokens=tokens, starts=starts, learn=learn, info=info)


def _map(file: Path, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    try:
        values: npt.NDArray[Any] = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise FormatError(f"cannot read {file}: {error}; prepare the corpus again") from error
    if values.dtype != dtype or values.shape != (length,):
        raise FormatError(
            f"{file} holds {values.dtype} {list(values.shape)}, expected {dtype} [{length}]; prepare the corpus again"
        )
    return values


def paragraph_starts(corpus: Corpus, tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Positions where a line begins, blank ones left out, and documents' starts; in order."""
    pieces = [tokenizer.token_bytes(i) for i in range(len(tokenizer))]
    ends_line = np.array([piece.endswith(b"\n") for piece in pieces])
    blank = np.array([not piece.strip() for piece in pieces])
    after = np.flatnonzero(ends_line[corpus.tokens[:-1]]) + 1
    return np.union1d(after[~blank[corpus.tokens[after]]], corpus.starts[:-1]).astype(np.int64)


def begin(tokenizer: Tokenizer) -> int:
    """The id that opens every sample."""
    return tokenizer.special[BOS]
