"""Text <-> token ids: byte-level BPE, special tokens by name, and Engram's map of ids that read alike.

One rule above all: `encode` cannot produce a special token, whatever the text says. A chat's control
tokens are put in by `chat/encode.py`, by name, never by number.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from cedar.config.model import ModelConfig
from cedar.errors import ConfigError, FormatError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
REMINDER = "<｜latest_reminder｜>"
IMAGE = "<｜deepseek_image｜>"

# a trained vocabulary begins with the first three and ends with the other eight, in this order
FIRST_TOKENS = (BOS, EOS, PAD)
LAST_TOKENS = (SYSTEM, USER, ASSISTANT, THINK, END_THINK, DSML, REMINDER, IMAGE)

# the release's pattern after digits and CJK: a punctuation-led word, a word, punctuation, line ends, spaces
_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
# Unicode White_Space; Python's str.strip() would also take U+001C..U+001F
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in for each byte, inverted: character -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """One `tokenizer.json`.

    Attributes:
        special: Name -> id of every added token.
        json_text: The file, byte for byte.
        fingerprint: SHA-256 of it; the key of everything that depends on the tokenizer.

    Raises:
        FormatError: Not a byte-level BPE tokenizer, or plain text could spell one of its special tokens.
    """

    def __init__(self, json_text: str, *, source: str = "tokenizer.json") -> None:
        self.json_text = json_text
        self.fingerprint = hashlib.sha256(json_text.encode()).hexdigest()
        self.source = source
        try:
            data = json.loads(json_text)
            self._full = tokenizers.Tokenizer.from_str(json_text)
        # the library raises bare Exception for whatever it cannot read
        except Exception as error:
            raise FormatError(
                f"{source}: not a tokenizer.json ({error}); expected the file of a fast tokenizer"
            ) from None
        kind = data["model"].get("type", "?"), (data.get("decoder") or {}).get("type", "?")
        if kind != ("BPE", "ByteLevel"):
            raise FormatError(f"{source}: model and decoder are {kind[0]} and {kind[1]}, expected BPE and ByteLevel")
        self.special: dict[str, int] = {token["content"]: token["id"] for token in data["added_tokens"]}
        self._text = _without_added_tokens(data)
        self._bytes = _bytes_by_id(data)
        reachable = [name for name, token_id in self.special.items() if token_id in self.encode(name)]
        if reachable:
            raise FormatError(f"{source}: plain text can spell the special token {reachable[0]!r}; remove its merges")

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json`, or the one in a checkpoint directory.

        Raises:
            FormatError: No such file, or one that is no byte-level BPE tokenizer.
        """
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FormatError(f"cannot read the tokenizer {file}: {error}") from None
        return cls(text, source=str(file))

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json` into a directory, or to a file of that name."""
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        file.write_text(self.json_text, encoding="utf-8")

    def __len__(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; no BOS, and never a special id. Lone surrogates become U+FFFD."""
        return list(self._text.encode(_well_formed(text), add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts at once, over all cores."""
        batch = self._text.encode_batch_fast([_well_formed(text) for text in texts], add_special_tokens=False)
        return [list(encoding.ids) for encoding in batch]

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; for a special token, its name.

        Raises:
            FormatError: The id is outside the vocabulary.
        """
        if not 0 <= token_id < len(self._bytes):
            raise FormatError(f"token id {token_id} is outside the vocabulary of {len(self._bytes)} ({self.source})")
        return self._bytes[token_id]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens by name; bytes that are not UTF-8 become U+FFFD.

        Equals what a `StreamDecoder` gives for the same ids, piece by piece.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def compressed_map(self) -> tuple[list[int], int]:
        """Engram's compressed id of every token id, and how many there are.

        Tokens that read alike once case, marks and white space are levelled share one compressed id,
        numbered in order of first appearance.

        Source: engram-dspark-vision-chat.md 1.1.
        """
        compressed, count = _compressed_map(self.json_text)
        return list(compressed), count

    def check(self, config: ModelConfig) -> None:
        """Refuse a tokenizer that another model was trained with.

        Raises:
            FormatError: A special token is missing, or the sizes, the special ids or the Engram
                vocabulary differ from the config's; the message gives both numbers.
        """
        missing = [name for name in (*FIRST_TOKENS, *LAST_TOKENS) if name not in self.special]
        if missing:
            raise FormatError(
                f"{self.source} lacks the special token {missing[0]!r}; use this model's own tokenizer.json"
            )
        if len(self) != config.vocab_size:
            raise FormatError(
                f"{self.source} has {len(self)} tokens, the config's vocab_size is {config.vocab_size}; "
                "use this model's own tokenizer.json"
            )
        for name, key, expected in (
            (BOS, "bos_token_id", config.bos_token_id),
            (EOS, "eos_token_id", config.eos_token_id),
            (PAD, "pad_token_id", config.pad_token_id),
            (IMAGE, "image_token_id", config.image_token_id),
        ):
            if self.special[name] != expected:
                raise FormatError(
                    f"{self.source} gives {name!r} the id {self.special[name]}, the config's {key} is {expected}"
                )
        if config.engram.layer_ids:
            count = _compressed_map(self.json_text)[1]
            if count != config.engram.compressed_vocab_size:
                raise FormatError(
                    f"{self.source} gives {count} compressed ids, the config's engram_compressed_vocab_size is "
                    f"{config.engram.compressed_vocab_size}: every hash would point to another row"
                )


class StreamDecoder:
    """Text of ids that arrive one by one; holds back the bytes of an unfinished character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes, perhaps none."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """U+FFFD if the ids ended inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, digits: int = 1) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens in the layout of the small models.

    Ids 0, 1, 2 are BOS, EOS and pad, then 256 bytes, then merges; the last eight are the chat's tokens.

    Args:
        digits: Longest run of digits that may become one token. The release has 3; single digits let a
            small model copy a number it never saw.

    Raises:
        ConfigError: `vocab_size` leaves no room for the bytes, or the text is too short to fill it.

    Source: training.md 5.1.
    """
    smallest = len(FIRST_TOKENS) + 256 + len(LAST_TOKENS)
    if vocab_size < smallest:
        raise ConfigError(f"vocab_size is {vocab_size}, expected at least {smallest}: 256 bytes and the special tokens")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(rf"\p{{N}}{{1,{digits}}}"), "isolated"),
            pre_tokenizers.Split(tokenizers.Regex(_CJK), "isolated"),
            pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(LAST_TOKENS),
        special_tokens=list(FIRST_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() != vocab_size - len(LAST_TOKENS):
        raise ConfigError(
            f"the text gives {backend.get_vocab_size() + len(LAST_TOKENS)} tokens, expected vocab_size {vocab_size}; "
            "train on more text or ask for fewer tokens"
        )
    backend.add_special_tokens(list(LAST_TOKENS))
    return Tokenizer(backend.to_str(), source="trained tokenizer")


def normalise(text: str) -> str:
    r"""The key under which Engram files a decoded token; two tokens with one key share their memory.

    Source: engram-dspark-vision-chat.md 1.1, steps 2 and 3 of the rule.

    >>> normalise("  É\n")
    'e'
    """
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # lower-case one code point at a time: str.lower() of the whole would turn a final sigma into another letter
    kept = "".join(char.lower() for char in decomposed if unicodedata.category(char) not in ("Mn", "Mc", "Me"))
    spaced: list[str] = []
    for char in kept:
        char = " " if char in " \t\r\n" else char
        if char != " " or spaced[-1:] != [" "]:
            spaced.append(char)
    levelled = "".join(spaced)
    return (levelled if levelled == " " else levelled.strip(_WHITE_SPACE)) or text


@lru_cache(maxsize=8)
def _compressed_map(json_text: str) -> tuple[tuple[int, ...], int]:
    # keyed by the whole file: two tokenizers with one vocabulary may still decode differently
    backend = tokenizers.Tokenizer.from_str(json_text)
    size = backend.get_vocab_size()
    texts = backend.decode_batch([[token_id] for token_id in range(size)], skip_special_tokens=False)
    order: dict[str, int] = {}
    compressed = []
    for token_id, text in enumerate(texts):
        key = str(backend.id_to_token(token_id)) if "\ufffd" in text else normalise(text)
        compressed.append(order.setdefault(key, len(order)))
    return tuple(compressed), len(order)


def _well_formed(text: str) -> str:
    # utf-16 joins a surrogate pair that JSON brought as two escapes, and leaves one U+FFFD for a lone half
    return text if text.isascii() else text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def _without_added_tokens(data: dict[str, Any]) -> tokenizers.Tokenizer:
    plain = {**data, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return tokenizers.Tokenizer.from_str(json.dumps(plain))


def _bytes_by_id(data: dict[str, Any]) -> list[bytes]:
    table: dict[int, bytes] = {}
    added = {token["id"]: token["content"].encode() for token in data["added_tokens"]}
    for spelling, token_id in data["model"]["vocab"].items():
        if token_id not in added:
            table[token_id] = bytes(_BYTE_OF[char] for char in spelling)
    table |= added
    if sorted(table) != list(range(len(table))):
        raise FormatError(f"the vocabulary's ids have gaps: {len(table)} tokens, highest id {max(table)}")
    return [table[token_id] for token_id in range(len(table))]
