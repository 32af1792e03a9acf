"""What `cedar doctor` looks at. Each finding says what was found and, if something lacks, how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cedar.cli.requirements import memory_free, memory_needed, unmet
from cedar.config.serve import ServeConfig
from cedar.errors import CedarError

State = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`missing` means that cedar cannot serve without it, `note` that it does, but slower or with less."""

    state: State
    what: str
    found: str
    remedy: str = ""


def examine(model: str) -> list[Finding]:
    """Everything worth to know before a model is served."""
    return [_python(), *_packages(), _machine(), _compiler(), _accelerator(), *_model(model)]


def _python() -> Finding:
    return Finding("ok", "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")


def _packages() -> list[Finding]:
    remedy = "pip install -c constraints.txt -e ."
    bad = {re.split(r"[^A-Za-z0-9._-]", text)[0]: text for text in unmet()}
    findings = []
    for name in ("torch", "tokenizers", "safetensors", "starlette", "uvicorn", "llguidance", "prometheus-client"):
        if name not in bad:
            findings.append(Finding("ok", name, importlib.metadata.version(name)))
    findings += [Finding("missing", name, f"cedar needs {text}", remedy) for name, text in bad.items()]
    try:
        importlib.metadata.version("matplotlib")
    except importlib.metadata.PackageNotFoundError:
        findings.append(Finding("note", "matplotlib", "not installed: no plots", "pip install 'cedar-lm[plot]'"))
    return findings


def _machine() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{cores} cores, {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    if memory.available < 2**30:
        return Finding("note", "machine", found, "end something: torch alone needs about half a GiB")
    return Finding("ok", "machine", found)


def _compiler() -> Finding:
    remedy = "python -m cedar.kernels.cpu.native"
    built = list((Path(__file__).parents[1] / "kernels" / "cpu" / "_build").glob("native-*.so"))
    if built:
        return Finding("ok", "CPU kernels", f"compiled ({built[0].name})")
    if shutil.which("gcc") or shutil.which("cc"):
        return Finding("note", "CPU kernels", "not compiled yet: plain torch, slower at small batches", remedy)
    return Finding("note", "CPU kernels", "no C compiler: plain torch", f"install gcc, then {remedy}")


def _accelerator() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("note", "GPU", "unknown without torch")
    if not torch.cuda.is_available():
        return Finding("note", "GPU", "none that torch can use: models run on the CPU in float32")
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return Finding("ok", "GPU", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, {memory:.0f} GiB")


def _model(model: str) -> list[Finding]:
    from cedar.engine.load import open_model
    from cedar.planner.kv import global_bytes_per_token

    try:
        files = open_model(model)
    except CedarError as error:
        return [Finding("missing", "model", str(error), "pass --model DIR with a checkpoint in the release's format")]
    needed, free = memory_needed(files.config, ServeConfig()), memory_free()
    size = sum(file.stat().st_size for file in files.path.glob("*.safetensors"))
    per_token = global_bytes_per_token(files.config)
    return [
        Finding("ok", "model", f"{files.name}: {size / 2**20:.1f} MiB of weights in {files.path}"),
        Finding(
            "ok" if sum(needed.values()) < free else "note",
            "memory",
            f"serving it takes about {sum(needed.values()) / 2**30:.2f} GiB, {free / 2**30:.2f} are free",
            ""
            if sum(needed.values()) < free
            else "cedar serve --cache-memory with less than 512MiB, or a smaller model",
        ),
        Finding("ok", "context", f"{files.config.max_position_embeddings:,} tokens at {per_token:g} bytes each"),
    ]
