"""doctor, keys, and the load test against a server that answers by script (about 20 s)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cedar.cli.load_test import Plan, Timing, percentile
from cedar.server.auth import find_key, load_keys


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cedar.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_doctor_names_what_is_there(model_dir: Path) -> None:
    done = run("doctor", "--model", str(model_dir))
    assert done.returncode == 0, done.stdout
    for what in ("Python", "torch", "machine", "CPU kernels", "GPU", "context"):
        assert what in done.stdout
    assert "52.5 bytes" in done.stdout


def test_doctor_says_what_to_do_about_a_missing_model(tmp_path: Path) -> None:
    done = run("doctor", "--model", str(tmp_path))
    assert done.returncode == 1
    assert "missing model" in " ".join(done.stdout.split()) and "-> pass --model DIR" in done.stdout


def test_a_key_is_shown_once_and_its_table_works(tmp_path: Path) -> None:
    done = run("key", "laptop")
    assert done.returncode == 0
    secret = done.stderr.strip().rpartition(" ")[2]
    assert secret.startswith("ck-") and secret not in done.stdout
    file = tmp_path / "keys.toml"
    file.write_text(done.stdout)
    assert find_key(load_keys(file), {b"authorization": f"Bearer {secret}".encode()}).name == "laptop"
    assert run("key", 'a"b').returncode == 2


class Handler(BaseHTTPRequestHandler):
    """Four tokens, 20 ms apart, after 50 ms; every fifth request fails."""

    protocol_version = "HTTP/1.1"
    count = 0

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        self.answer(200, "application/json", [json.dumps({"data": [{"id": "other"}]})])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["model"] == "other" and body["stream"] and self.headers["authorization"] == "Bearer k"
        Handler.count += 1
        if Handler.count % 5 == 0:
            self.answer(503, "application/json", ['{"error": "busy"}'])
            return
        chunk = {"choices": [{"delta": {"content": "x"}}]}
        usage = {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 9}}
        role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        lines = [json.dumps(part) for part in (role, chunk, chunk, chunk, chunk, usage)]
        self.answer(200, "text/event-stream; charset=utf-8", [f"data: {line}\n\n" for line in [*lines, "[DONE]"]])

    def answer(self, status: int, kind: str, pieces: list[str]) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for i, piece in enumerate(pieces):
            time.sleep(0.05 if i == 1 else 0.02 if i else 0)
            self.wfile.write(f"{len(piece):x}\r\n{piece}\r\n".encode())
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def peer() -> Iterator[str]:
    Handler.count = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("loop", [("--concurrency", "3"), ("--rate", "50")])
def test_the_load_test_measures_any_server(peer: str, loop: tuple[str, str], tmp_path: Path) -> None:
    plot = tmp_path / "load.png"
    done = run(
        "bench", "serve", "--url", peer, "--requests", "10", "--api-key", "k", "--json", "--plot", str(plot), *loop
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["model"], report["failed"]) == ("other", 2) and "status 503" in report["errors"][0]
    assert report["completion_tokens"] == 8 * 4 and report["prompt_tokens"] == 8 * 9
    # the role is no token; 50 ms to the first, 20 ms between
    assert 45 < report["ttft_ms"]["p50"] < 1000 and 15 < report["tpot_ms"]["p50"] < 300
    assert report["ttft_ms"]["p50"] <= report["ttft_ms"]["p99"]
    assert plot.stat().st_size > 5000
    assert "k" not in report["plan"]


def test_the_load_test_needs_a_server() -> None:
    done = run("bench", "serve", "--url", "http://127.0.0.1:9")
    assert done.returncode == 2 and "is a server there?" in done.stderr


def test_percentiles() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], p) for p in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert percentile([7.0], 99) == 7.0
    assert Plan(url="x").concurrency == 4 and not Timing(0.0).token_s
