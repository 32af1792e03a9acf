"""`cedar serve` as a process: what it prints, how it ends, what it refuses (about 30 s)."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def build(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "cedar.cli.main", "serve", *arguments]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield build
    for process in processes:
        process.kill()
        process.wait(10)


def read_until(process: subprocess.Popen[str], beginning: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(beginning):
            return lines
    raise AssertionError(f"no {beginning!r} in {lines}; {process.communicate()[1]}")


def url_of(lines: list[str]) -> str:
    return next(line.split()[1] for line in lines if line.startswith("page")).rstrip("/")


def assert_clean_end(process: subprocess.Popen[str], within_s: float = 2.0) -> None:
    began = time.monotonic()
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert "Traceback" not in err and "stopped" in out
    assert time.monotonic() - began < within_s


def test_it_says_what_it_serves_and_serves_it(start: Start, model_dir: Path) -> None:
    process = start("--model", str(model_dir), "--port", "0", "--context", "512")
    began = time.monotonic()
    lines = read_until(process, "ready in")
    text = "".join(lines)
    for expected in (
        "nonsense", "52.5 bytes a token", "context 512", "/v1", "curl http://127.0.0.1:",
        "tiers    memory 512MiB (", "disk none", "memory   about",
    ):  # fmt: skip
        assert expected in text
    assert time.monotonic() - began < 45
    url = url_of(lines)
    # the curl line that was printed works as it stands
    curl = next(line for line in lines if line.startswith("try"))[3:].strip()
    if shutil.which("curl"):
        answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=60, check=True)
        assert answer.stdout.rstrip().endswith("data: [DONE]")
    assert httpx.get(f"{url}/health").json()["status"] == "ok"
    process.send_signal(signal.SIGINT)
    assert_clean_end(process)


def test_logs_as_json(start: Start, model_dir: Path) -> None:
    process = start("--model", str(model_dir), "--port", "0", "--log-json")
    url = url_of(read_until(process, "ready in"))
    told = httpx.get(f"{url}/health").headers["x-request-id"]
    process.send_signal(signal.SIGTERM)
    lines = [json.loads(line) for line in process.communicate(timeout=20)[1].splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == told]
    assert (line["path"], line["status"], line["method"]) == ("/health", 200, "GET")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading(start: Start, model_dir: Path, number: signal.Signals) -> None:
    process = start("--model", str(model_dir), "--port", "0")
    lines = read_until(process, "loading")
    assert httpx.get(f"{url_of(lines)}/health", timeout=10).status_code == 200
    process.send_signal(number)
    assert_clean_end(process)


def test_a_signal_while_answering(start: Start, model_dir: Path) -> None:
    process = start("--model", str(model_dir), "--port", "0")
    url = url_of(read_until(process, "ready in"))
    body = {"model": "nonsense", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as response:
        pieces = response.iter_text()
        next(pieces)
        process.send_signal(signal.SIGTERM)
        rest = "".join(pieces)
    assert "shutting down" in rest and "[DONE]" not in rest
    assert_clean_end(process)


def test_a_broken_checkpoint_ends_it_with_the_reason(start: Start, model_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    shard = next(broken.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    process = start("--model", str(broken), "--port", "0")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.strip().startswith("cedar: ") and "Traceback" not in err and shard.name in err


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("none", "there is no model in"),
        ("tokenizer", "cannot read the tokenizer"),
        ("config", "hidden_sise"),
        ("defaults", "temprature"),
    ],
)
def test_a_directory_that_is_no_model(start: Start, model_dir: Path, tmp_path: Path, change: str, match: str) -> None:
    copy = tmp_path / "copy"
    if change != "none":
        shutil.copytree(model_dir, copy)
    if change == "tokenizer":
        (copy / "tokenizer.json").unlink()
    if change == "config":
        text = (copy / "config.json").read_text()
        (copy / "config.json").write_text(text.replace('"hidden_size"', '"hidden_sise"'))
    if change == "defaults":
        (copy / "generation_config.json").write_text('{"temprature": 1}')
    process = start("--model", str(copy), "--port", "0")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert match in err and "Traceback" not in err


def test_a_port_that_is_taken(start: Start, model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start("--model", str(model_dir), "--port", str(taken.getsockname()[1]))
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "try another --port" in err and "Traceback" not in err


def test_it_says_when_its_pages_hold_less_than_the_model_takes(start: Start, model_dir: Path) -> None:
    process = start("--model", str(model_dir), "--port", "0", "--cache-memory", "100000")
    lines = read_until(process, "ready in")
    assert any("context 1,664 tokens (100000 of pages hold no more; --cache-memory)" in line for line in lines)
    models = httpx.get(f"{url_of(lines)}/v1/models").json()
    assert models["data"][0]["max_model_len"] == 1664
    process.send_signal(signal.SIGINT)
    assert_clean_end(process)


def test_a_context_that_its_pages_do_not_hold(start: Start, model_dir: Path) -> None:
    process = start("--model", str(model_dir), "--port", "0", "--cache-memory", "100000", "--context", "4000")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2 and "raise --cache-memory or lower --context" in err and "Traceback" not in err
