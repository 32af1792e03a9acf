"""`cedar cache`, on a tier that an engine has filled (about 10 s)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cedar.cli.commands import app
from cedar.config.serve import ServeConfig
from cedar.llm import LLM

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def tier(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    for _ in range(2):
        with LLM(model_dir, serve=ServeConfig(cache_dir=directory)) as llm:
            llm.generate("Once upon a time there was a small red fox. " * 12, max_tokens=4)
            assert llm.last is not None
    # the second engine found what the first one had left
    assert llm.last.cached_tokens > 128 and llm.last.cache_tier == "disk"
    return directory


def run(*arguments: str, status: int = 0) -> str:
    result = RUNNER.invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result.output


def test_ls_stats_verify_purge(tier: Path, model_dir: Path) -> None:
    options = [str(tier), "--model", str(model_dir)]
    lines = run("cache", "ls", *options, "--text").splitlines()
    assert len(lines) >= 2 and "128 tokens  lineage 0" in "".join(lines) and "Once" in "".join(lines)
    assert f"pages           {len(lines)}" in run("cache", "stats", *options)
    assert run("cache", "verify", *options) == f"{len(lines)} whole, 0 broken and forgotten\n"
    request = tier.parent / "request.txt"
    request.write_text("Once upon a time there was a small red fox. " * 12)
    assert run("cache", "pin", str(tier), str(request), *options[1:], status=1).startswith("0 of ")
    segment = max(tier.glob("*/w-*/*.seg"), key=lambda file: file.stat().st_size)
    content = bytearray(segment.read_bytes())
    content[900] ^= 1
    segment.write_bytes(content)
    assert "1 broken" in run("cache", "verify", *options, status=1)
    assert f"{len(lines) - 1} pages forgotten" in run("cache", "purge", *options)
    assert run("cache", "ls", *options) == "" and not list(tier.glob("*/w-*/*.seg"))


def test_pin(tier: Path, model_dir: Path, tmp_path: Path) -> None:
    """A request's pages survive a purge, and are let go again."""
    options = ["--model", str(model_dir)]
    messages = [{"role": "user", "content": "There was a small red fox. " * 20}]
    (tmp_path / "request").write_text(json.dumps({"messages": messages}))
    with LLM(model_dir, serve=ServeConfig(cache_dir=tier)) as llm:
        llm.chat(messages, max_tokens=2)
    pinned = run("cache", "pin", str(tier), str(tmp_path / "request"), *options)
    held, total = (int(word) for word in pinned.split() if word.isdigit())
    assert "pinned" in pinned and held >= total - 2
    run("cache", "purge", str(tier), *options)
    lines = run("cache", "ls", str(tier), *options).splitlines()
    assert len(lines) == -(-held // 128) and all("pinned" in line for line in lines)
    assert "unpinned" in run("cache", "pin", str(tier), str(tmp_path / "request"), *options, "--off")
    assert run("cache", "purge", str(tier), *options) == f"{len(lines)} pages forgotten\n"


def test_explain(tmp_path: Path, model_dir: Path) -> None:
    for name, word in (("one", "fox"), ("two", "key")):
        messages = [{"role": "user", "content": f"There was a small red {word}"}]
        (tmp_path / name).write_text(json.dumps({"messages": messages}))
    told = run("cache", "explain", str(tmp_path / "one"), str(tmp_path / "two"), "--model", str(model_dir))
    assert "is the first that differs" in told and "fox" in told and "small red" in told


def test_every_tier_behind_one_configuration(model_dir: Path, tmp_path: Path) -> None:
    """What `cedar serve` builds from its flags: another machine's pages, tables on disk, turns that come back."""
    asked = [{"role": "user", "content": "There was a small red fox near the river. " * 12}]

    def machine(name: str) -> LLM:
        shared = f"file://{tmp_path}/bucket"
        limits = {"engram_cache_bytes": 200_000, "cache_day_bytes": 2**24, "cache_host_bytes": 2**24}
        return LLM(
            model_dir, serve=ServeConfig(cache_dir=tmp_path / name, cache_shared=shared, engram="disk", **limits)
        )

    with machine("one") as llm:
        said = llm.chat(asked, max_tokens=6, temperature=0)
        assert llm.last is not None and llm.last.cached_tokens == 0
        again = [*asked, {"role": "assistant", "content": f"{said.content}  \n"}, {"role": "user", "content": "And?"}]
        llm.chat(again, max_tokens=2, temperature=0)
        assert llm.last.cached_tokens >= llm.last.prompt_tokens - 30
        counts = llm.engine.cache.turns.counts
        assert counts.hits + counts.misses == 1
        assert llm.engine.model.memory_stats()["read_rows"] > 0
    with machine("two") as llm:
        # a bounded replay of random weights: another answer may come of it
        llm.chat(asked, max_tokens=6, temperature=0)
        assert llm.last is not None and llm.last.cache_tier == "shared" and llm.last.cached_tokens > 128
