"""`cedar generate` and `cedar chat` (about 15 s)."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import cedar
from cedar.cli.chat import converse
from cedar.cli.commands import app
from cedar.errors import RequestError
from cedar.llm import LLM

COMMAND = [sys.executable, "-m", "cedar.cli.main"]


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with cedar.LLM(model_dir) as made:
        yield made


def test_generate_continues_a_text(model_dir: Path) -> None:
    command = ["generate", "Once upon", "--model", str(model_dir), "--max-tokens", "12", "--seed", "1"]
    first, second = CliRunner().invoke(app, command), CliRunner().invoke(app, command)
    assert first.exit_code == 0 and first.stdout.startswith("Once upon") and len(first.stdout) > 12
    assert second.stdout == first.stdout


def test_generate_reads_standard_input(model_dir: Path) -> None:
    command = [*COMMAND, "generate", "--model", str(model_dir), "--max-tokens", "4"]
    done = subprocess.run(command, input=b"A fox", capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(b"A fox")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "--model", "/nowhere"], "there is no model"),
        (["chat", "--effort", "off"], "reasoning_effort is 'off'"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: list[str], match: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("cedar: ") and match in done.stderr and done.stderr.count("\n") == 1


def test_an_empty_standard_input_is_an_empty_prompt(model_dir: Path) -> None:
    done = subprocess.run([*COMMAND, "generate"], input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "the prompt is empty" in done.stderr


class Lines:
    """Stands for the person at the terminal; an exception type is raised instead of a line."""

    def __init__(self, *lines: Any) -> None:
        self.lines = list(lines)

    def __call__(self, prompt: str) -> str:
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line


def test_a_conversation(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    ask = Lines("Hello", "", "And?", "/reset", "Again", "/help", "/exit", "never")
    converse(llm, system="Be brief.", ask=ask, max_tokens=5, seed=1)
    out, err = capsys.readouterr()
    assert ask.lines == ["never"]
    # the lengths of the prompts show what was remembered and what was forgotten
    lengths = [int(line.split()[0][1:]) for line in err.splitlines() if line.startswith("[")]
    assert len(lengths) == 3 and lengths[0] < lengths[1] > lengths[2]
    assert out.count("\n") >= 3 and "forgotten" in err and err.count("/reset forgets") == 2


def test_leaving(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    converse(llm, system=None, ask=Lines(EOFError))
    converse(llm, system=None, ask=Lines(KeyboardInterrupt, KeyboardInterrupt))
    again = Lines(KeyboardInterrupt, "/reset", KeyboardInterrupt, EOFError)
    converse(llm, system=None, ask=again)
    assert again.lines == []
    assert "Ctrl-C again leaves" in capsys.readouterr().err


def test_a_message_that_does_not_fit_is_said_and_dropped(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    converse(llm, system=None, ask=Lines("0" * 5000, "Hi", "/exit"), max_tokens=3)
    err = capsys.readouterr().err
    assert "the context holds 4096 tokens" in err and err.count("[") == 1


def test_ctrl_c_stops_an_answer_and_the_next_one_leaves() -> None:
    # the bundled model goes on for seconds; the random one would end before the signal arrives
    command = [*COMMAND, "chat", "--max-tokens", "3000", "--seed", "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # a shell's background job ignores the signal, and so would what it starts
    process = subprocess.Popen(command, **pipes, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"Write a short story about a fox and a king.\n")
    process.stdin.flush()
    # "> ", then the first character of the answer
    assert process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    seen = b""
    while not seen.endswith(b"> "):
        seen += process.stdout.read(1)
    assert b"(stopped)" in seen
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0 and b"Traceback" not in err
    assert time.monotonic() - began < 5


def test_llm_for_scripts(llm: LLM) -> None:
    text = llm.generate("Once", max_tokens=6, temperature=0)
    assert text == "".join(llm.stream_generate("Once", max_tokens=6, temperature=0))
    assert llm.last is not None and llm.last.completion_tokens == 6
    answer = llm.chat("Hello", max_tokens=6, temperature=0)
    assert answer.content and not answer.reasoning and not answer.calls
    assert answer == llm.chat([{"role": "user", "content": "Hello"}], max_tokens=6, temperature=0)
    assert llm.chat("Hello", max_tokens=6, temperature=0, thinking=True).reasoning
    assert not llm.chat("Hello", max_tokens=6, thinking=True, effort="none").reasoning
    stop = answer.content[2]
    assert llm.chat("Hello", max_tokens=6, temperature=0, stop=[stop]).content == answer.content.partition(stop)[0]
    stop = text[2]
    assert llm.generate("Once", max_tokens=6, temperature=0, stop=[stop]) == text.partition(stop)[0]


def test_llm_refuses_what_cannot_be(llm: LLM) -> None:
    for call in (
        lambda: llm.generate(""),
        lambda: llm.chat([]),
        lambda: llm.chat("x", temperature=5),
        lambda: llm.chat("x", effort="off"),
    ):
        with pytest.raises(RequestError):
            call()


def test_an_abandoned_stream_lets_the_engine_go(llm: LLM) -> None:
    stream = llm.stream_generate("Once", max_tokens=4000)
    next(stream)
    stream.close()
    began = time.monotonic()
    llm.generate("x", max_tokens=1)
    assert time.monotonic() - began < 5


def test_public_names() -> None:
    assert cedar.LLM is LLM
    assert cedar.SamplingParams.__name__ == "SamplingParams"
    assert callable(cedar.load_config)
    with pytest.raises(AttributeError, match="public names: LLM"):
        _ = cedar.nothing
