"""Whether this machine has what serving needs: packages new enough, and memory. Known before anything is loaded."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from cedar.config.model import ModelConfig
from cedar.config.serve import ServeConfig
from cedar.errors import ConfigError
from cedar.planner.memory import step_bytes, weight_bytes


def unmet() -> list[str]:
    """Requirements of the installed cedar that the environment does not meet, `name>=1.2 (1.1 is installed)`."""
    found = []
    for requirement in importlib.metadata.requires("cedar-lm") or ():
        # extras are somebody else's choice
        if "extra ==" in requirement:
            continue
        match = re.match(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?", requirement)
        assert match is not None, requirement
        name, least = match.groups()
        try:
            has = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{requirement} (not installed)")
            continue
        if least is not None and _numbers(has) < _numbers(least):
            found.append(f"{requirement} ({has} is installed)")
    return found


def check_packages() -> None:
    """Refuse to start with a package that is too old: it would fail later, and say something else.

    Raises:
        ConfigError: Which, and what to do.
    """
    missing = unmet()
    if missing:
        raise ConfigError(
            f"cedar needs {', '.join(missing)}: pip install -c constraints.txt -e . (`cedar doctor` shows all)"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The release as numbers.

    >>> _numbers("2.13.0+cpu") >= _numbers("2.11")
    True
    """
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else [0]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def memory_needed(model: ModelConfig, config: ServeConfig) -> dict[str, int]:
    """Bytes by purpose when the model runs on the CPU, where weights are decoded to f32 and Engram tables mapped."""
    (weights,) = [form.dense for form in weight_bytes(model) if form.form == "f32"]
    return {
        "weights": weights,
        "cache": config.cache_bytes + config.snapshot_budget,
        "steps": step_bytes(model, rows=config.max_step_tokens or 272),
    }


def memory_free() -> int:
    """Bytes that this process may still take: the machine's, or what its control group leaves."""
    import psutil

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(free, max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        # no control groups, or no limit in this one
        return free


def check_memory(model: ModelConfig, config: ServeConfig) -> dict[str, int]:
    """`memory_needed`, if there is as much.

    Raises:
        ConfigError: There is not; the message has the numbers.
    """
    needed, free = memory_needed(model, config), memory_free()
    # with a GPU the weights go there, and its memory is not known before torch is
    if sum(needed.values()) > free and not Path("/dev/nvidiactl").exists():
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in needed.items())
        raise ConfigError(
            f"this needs about {sum(needed.values()) / 2**30:.2f} GiB of memory ({parts}), and "
            f"{free / 2**30:.2f} GiB are free: lower --cache-memory, take a smaller model, or see `cedar plan --memory`"
        )
    return needed
