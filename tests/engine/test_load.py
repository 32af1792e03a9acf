"""What a server takes of a model, before its weights are read (under a second)."""

from __future__ import annotations

from pathlib import Path

import pytest

from cedar.config.model import PAGE_TOKENS
from cedar.config.serve import ServeConfig
from cedar.engine.load import context_tokens, open_model
from cedar.errors import ConfigError
from cedar.planner.kv import page_bytes


def test_the_context_is_what_model_pages_and_setting_allow(model_dir: Path) -> None:
    files = open_model(model_dir)
    limit, size = files.config.max_position_embeddings, page_bytes(files.config)
    assert context_tokens(files, ServeConfig()) == limit == 4096
    assert context_tokens(files, ServeConfig(max_context=512)) == 512
    assert context_tokens(files, ServeConfig(max_context=10 * limit)) == limit
    # one page is kept for the copy of a shared last page
    assert context_tokens(files, ServeConfig(cache_bytes=10 * size)) == 9 * PAGE_TOKENS
    assert context_tokens(files, ServeConfig(cache_bytes=10 * size, max_context=9 * PAGE_TOKENS)) == 9 * PAGE_TOKENS


def test_a_context_that_the_pages_do_not_hold_is_refused(model_dir: Path) -> None:
    files = open_model(model_dir)
    size = page_bytes(files.config)
    with pytest.raises(ConfigError, match="a context of 1,153 tokens needs .* enough for 1,152 tokens") as caught:
        context_tokens(files, ServeConfig(cache_bytes=10 * size, max_context=9 * PAGE_TOKENS + 1))
    # what it says is needed is enough
    need = int(str(caught.value).split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert context_tokens(files, ServeConfig(cache_bytes=need, max_context=9 * PAGE_TOKENS + 1)) == 9 * PAGE_TOKENS + 1
    with pytest.raises(ConfigError, match="two pages are"):
        context_tokens(files, ServeConfig(cache_bytes=2 * size - 1))
