"""Where two prompts part (under 1 s)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cedar.chat.explain import explain, read_prompt
from cedar.chat.tokenizer import train_tokenizer
from cedar.errors import RequestError

TOKENIZER = train_tokenizer(["the date is today, you are a helpful fox"] * 3, 285)


def test_it_names_the_first_token_that_differs_and_shows_both_sides(tmp_path: Path) -> None:
    """The commonest cause: a date near the top of the system text."""
    files = []
    for name, day in (("one", "2"), ("other", "3")):
        body = {"messages": [{"role": "system", "content": f"day {day} you are"}, {"role": "user", "content": "hi"}]}
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(body))
    one, other = (read_prompt(file, TOKENIZER, thinking=False) for file in files)
    shared = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    told = explain(one, other, TOKENIZER, names=("one", "other"))
    assert f"{shared} tokens are shared; token {shared} is the first" in told
    assert f"one: id {one[shared]} '2'" in told and f"other: id {other[shared]} '3'" in told and "day " in told


def test_equal_and_shorter_prompts() -> None:
    ids = TOKENIZER.encode("the fox")
    assert "equal" in explain(ids, ids, TOKENIZER, names=("a", "b"))
    assert "b ends here" in explain(ids, ids[:-1], TOKENIZER, names=("a", "b"))


def test_plain_text_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the fox")
    assert read_prompt(tmp_path / "text", TOKENIZER, thinking=False) == TOKENIZER.encode("the fox")
    with pytest.raises(RequestError, match="cannot read"):
        read_prompt(tmp_path / "none", TOKENIZER, thinking=False)
