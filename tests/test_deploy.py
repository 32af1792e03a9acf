"""What is in deploy/ fits the program: options that exist, files that exist, a unit that systemd understands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cedar.cli.main import app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def serve_options() -> set[str]:
    command = typer.main.get_command(app)
    serve = command.commands["serve"]  # type: ignore[attr-defined]
    return {name for parameter in serve.params for name in parameter.opts}


def joined(text: str) -> list[str]:
    """Lines without comments, continued ones in one piece."""
    whole = re.sub(r"\\\n\s*", " ", text)
    return [line for line in whole.splitlines() if line.strip() and not line.startswith("#")]


def test_the_unit_starts_what_exists() -> None:
    (line,) = [line for line in joined((DEPLOY / "cedar.service").read_text()) if line.startswith("ExecStart=")]
    program, command, *arguments = shlex.split(line.removeprefix("ExecStart="))
    assert Path(program).name == "cedar" and command == "serve"
    options = {argument for argument in arguments if argument.startswith("--")}
    assert options and options <= serve_options()
    drain = float(arguments[arguments.index("--drain") + 1])
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", (DEPLOY / "cedar.service").read_text(), re.M)
    assert drain < float(stop)


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on the path")
    # the program of the unit is not installed here
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", (DEPLOY / "cedar.service").read_text(), flags=re.M)
    unit = tmp_path / "cedar.service"
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_image_copies_and_runs_what_exists() -> None:
    lines = joined((DEPLOY / "Dockerfile").read_text())
    kept = set((DEPLOY / "Dockerfile.dockerignore").read_text().splitlines())
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "COPY" and not rest.startswith("--from"):
            for source in shlex.split(rest)[:-1]:
                assert (ROOT / source).exists() and f"!{source}" in kept, source
    instructions = {line.partition(" ")[0]: line.partition(" ")[2] for line in lines}
    assert json.loads(instructions["ENTRYPOINT"]) == ["cedar"]
    command, *arguments = json.loads(instructions["CMD"])
    assert command == "serve" and {name for name in arguments if name.startswith("--")} <= serve_options()
    python, flag, code = json.loads(instructions["HEALTHCHECK"].partition("CMD ")[2])
    assert (python, flag) == ("python", "-c")
    compile(code, "healthcheck", "exec")
    # no user may write to what runs, and it listens where it is asked for its health
    assert instructions["USER"] != "root" and f":{instructions['EXPOSE']}/ready" in code


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete(shell: str) -> None:
    """What `cedar --install-completion` puts in place: the script, and the program's answer to it."""
    program = [sys.executable, "-c", "import sys; sys.argv[0] = 'cedar'; from cedar.cli.main import main; main()"]
    asked = {
        "bash": {"_CEDAR_COMPLETE": "complete_bash", "COMP_WORDS": "cedar ser", "COMP_CWORD": "1"},
        "zsh": {"_CEDAR_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "cedar ser"},
        "fish": {
            "_CEDAR_COMPLETE": "complete_fish",
            "_TYPER_COMPLETE_ARGS": "cedar ser",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
    }[shell]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, env={**environment, **asked}, capture_output=True, text=True, timeout=60)
    assert "serve" in done.stdout and "doctor" not in done.stdout, done.stderr
    shown = {"_CEDAR_COMPLETE": f"source_{shell}"}
    script = subprocess.run(program, env={**environment, **shown}, capture_output=True, text=True, timeout=60).stdout
    assert "_CEDAR_COMPLETE" in script and "cedar" in script
