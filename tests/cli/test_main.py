"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

IMPORTS = (
    "import sys; from cedar.cli.main import main\n"
    "try:\n    main()\n"
    "except SystemExit as end:\n    assert not end.code, end.code\n"
    "print([name for name in sys.modules if name.split('.')[0] == 'torch'][:1], file=sys.stderr)"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cedar.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "--json"], ["plan", "--preset", "nano"]])
def test_light_commands_import_no_torch(arguments: list[str]) -> None:
    command = [sys.executable, "-c", IMPORTS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


def test_version_names_the_number() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("cedar 0.")


def test_plan_json_is_json_and_nothing_else() -> None:
    done = run("plan", "--preset", "flash", "--json", "--context", "4K", "--context", "1M", "--memory", "640GB")
    assert done.returncode == 0
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["global_kv_bytes_per_token"] == 890
    assert list(answer["decode_flops"]) == ["4096", "1048576"]
    assert answer["memory_bytes"] == 640 * 10**9


def test_plan_reads_a_config_and_changes_it(tmp_path: Path) -> None:
    from cedar.config.load import dump_config
    from cedar.config.presets import micro

    (tmp_path / "config.json").write_text(dump_config(micro()), encoding="utf-8")
    plain = json.loads(run("plan", "--config", str(tmp_path), "--json").stdout)
    assert plain["global_kv_bytes_per_token"] == 106
    changed = json.loads(run("plan", "--config", str(tmp_path), "--set", "attention.head_dim=128", "--json").stdout)
    assert changed["global_kv_bytes_per_token"] == 178
    assert changed["model"].endswith("(changed)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "flush"], "no preset is called 'flush'; there are nano, micro, mini, small, flash"),
        (["--config", "/nowhere"], "no config at"),
        (["--preset", "nano", "--config", "x"], "both name a model"),
        (["--set", "indexer.topk"], "expected path=value"),
        (["--set", "indexer.tokp=8"], "did you mean 'topk'?"),
        (["--set", "indexer.topk=eight"], "expected a whole number"),
        (["--set", "attention.head_dim=33"], "expected a positive multiple of 32"),
        (["--context", "0"], "expected a positive number of tokens"),
        (["--memory", "lots"], "24GiB"),
        (["--memory", "0"], "0 bytes of memory hold nothing"),
        (["--plot", "figures.jpeg"], "ends in .png"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_line(arguments: list[str], message: str) -> None:
    done = run("plan", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("cedar: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_an_unknown_command_is_refused() -> None:
    done = run("plane")
    assert done.returncode == 2
    assert "plane" in done.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m cedar.cli.main plan --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "{\n"
    assert done.stderr == ""
