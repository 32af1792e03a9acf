"""Coding agents from npm, litellm and the `llm` command complete a turn; the model is a stand-in (a minute).

Each case runs where its command is on the path: `npm install -g @anthropic-ai/claude-code @openai/codex opencode-ai
@qwen-code/qwen-code`, `pip install litellm llm`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cedar.config.serve import ServeConfig
from cedar.engine.load import ModelFiles, open_model

pytestmark = pytest.mark.slow


@pytest.fixture
def agent_server(standing_in: Callable[..., Any]) -> Iterator[Any]:
    """A server of the bundled model's files whose model calls a shell tool once, then reports its result."""
    yield standing_in(open_model(), ServeConfig(aliases=("*",)), answer)


def answer(files: ModelFiles, prompt: str) -> str:
    """What the stand-in says to a prompt."""
    if "### Available Tool Schemas" not in prompt:
        return "A title"
    thought = "Now I know.</think>" if prompt.endswith("<think>") else ""
    result = prompt.rpartition("<｜User｜>")[2]
    if "<tool_result>" in result:
        return f"{thought}The file says {'MAGIC-4711' if 'MAGIC-4711' in result else 'nothing'}."
    thought = "I should look.</think>" if thought else ""
    schemas = prompt.partition("### Available Tool Schemas\n\n")[2].partition("\n\nYou MUST strictly")[0]
    tools = {tool["name"]: tool for tool in map(json.loads, schemas.splitlines())}
    name = next(
        name
        for name in ("Bash", "bash", "run_shell_command", "shell", "exec_command", "shell_command")
        if name in tools
    )
    properties = tools[name]["parameters"]["properties"]
    command: Any = "cat note.txt"
    key = "cmd" if "cmd" in properties else "command"
    if properties[key].get("type") == "array":
        command = ["bash", "-lc", command]
    values: dict[str, Any] = {key: command}
    for extra in tools[name]["parameters"].get("required", ()):
        values.setdefault(
            extra, {"boolean": False, "number": 1, "integer": 1}.get(properties[extra].get("type"), "look")
        )
    parameters = "\n".join(
        f'<｜DSML｜ parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜ parameter>"
        for key, value in values.items()
    )
    return (
        f'{thought}I look.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="{name}">\n{parameters}\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )


ASK = "Read note.txt with a shell command and tell me what it says."


def claude(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    command = ["claude", "-p", ASK, "--model", "cedar", "--allowedTools", "Bash", "--output-format", "text"]
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1", "IS_SANDBOX": "1"}
    return command, {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_API_KEY": "", **quiet}


def codex(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "cedar"\nmodel_provider = "cedar"\n[model_providers.cedar]\nname = "cedar"\nbase_url = "{url}/v1"\n'
        'wire_api = "responses"\nenv_key = "CEDAR_KEY"\n'
    )
    command = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASK]
    return command, {"CEDAR_KEY": "none", "CODEX_HOME": str(home / ".codex")}


def opencode(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "cedar",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"cedar": {"name": "cedar"}},
    }
    config = {
        "provider": {"cedar": provider},
        "permission": {"bash": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    (home / "work" / "opencode.json").write_text(json.dumps(config))
    return ["opencode", "run", "--model", "cedar/cedar", ASK], {}


def qwen(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    command = ["qwen", "-p", ASK, "--yolo", "--auth-type", "openai", "--model", "cedar"]
    return command, {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "cedar"}


@pytest.mark.parametrize("agent", [claude, codex, opencode, qwen], ids=lambda agent: agent.__name__)
def test_an_agent_completes_a_turn(agent_server: Any, agent: Callable[..., Any], tmp_path: Path) -> None:
    if shutil.which(agent.__name__) is None:
        pytest.skip(f"{agent.__name__} is not on the path")
    work = tmp_path / "work"
    work.mkdir()
    (work / "note.txt").write_text("MAGIC-4711\n")
    command, settings = agent(agent_server.url, tmp_path)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "dumb", "NO_COLOR": "1", **settings}
    done = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    said = done.stdout + done.stderr
    print(said[-3000:], [(request[:60], status) for request, status in agent_server.engine.log])
    assert "The file says MAGIC-4711." in said
    assert done.returncode == 0


def test_the_llm_command(agent_server: Any, tmp_path: Path) -> None:
    if shutil.which("llm") is None:
        pytest.skip("llm is not on the path")
    entry = f"- model_id: cedar\n  model_name: cedar\n  api_base: {agent_server.url}/v1\n  api_key_name: none\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry + "  supports_tools: true\n  supports_schema: true\n")
    tool = "def shell(command: str) -> str:\n    'Run a command'\n    return 'MAGIC-4711 from ' + command\n"
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LLM_USER_PATH": str(tmp_path)}
    for extra, wanted in (
        ([], "A title"),
        (["--no-stream"], "A title"),
        (["--functions", tool], "The file says MAGIC-4711."),
    ):
        done = subprocess.run(
            ["llm", "prompt", "-m", "cedar", "--key", "none", ASK, *extra],
            env=environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert wanted in done.stdout, done.stdout + done.stderr


LITELLM = """
import json, sys, litellm
url = sys.argv[1]
parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tools = [{"type": "function", "function": {"name": "shell", "parameters": parameters}}]
for model, base in (("openai/cedar", url + "/v1"), ("deepseek/cedar", url + "/v1"), ("anthropic/cedar", url)):
    messages = [{"role": "user", "content": "Read it."}]
    options = dict(model=model, api_base=base, api_key="none", tools=tools, max_tokens=500)
    first = litellm.completion(messages=messages, **options).choices[0].message
    (call,) = first.tool_calls
    assert json.loads(call.function.arguments) == {"command": "cat note.txt"}, call
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "MAGIC-4711"}]
    chunks = list(litellm.completion(messages=messages, stream=True, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The file says MAGIC-4711.", (model, text)
    print(model, "ok")
"""


def test_litellm(agent_server: Any, tmp_path: Path) -> None:
    command = shutil.which("litellm")
    if command is None:
        pytest.skip("litellm is not on the path")
    python = Path(command).resolve().parent / "python"
    done = subprocess.run(
        [str(python), "-c", LITELLM, agent_server.url], capture_output=True, text=True, timeout=120,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )  # fmt: skip
    assert done.stdout.count("ok") == 3, done.stdout + done.stderr[-2000:]
