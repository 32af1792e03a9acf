"""cedar: the DeepSeek-V4.1-Flash system. Public names are imported when first used, so this costs nothing."""

from __future__ import annotations

import importlib
import os
from typing import Any

# OpenMP reads these once, when torch is first imported. Threads that spin for long while they wait for each other cost
# a small model up to a hundred times its own time as soon as anything else wants the cores; threads that sleep at
# once cost it two thirds of its prefill speed. So they spin for some microseconds, then sleep (docs/serving.md)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

_HOMES = {
    "LLM": "cedar.llm",
    "SamplingParams": "cedar.engine.request",
    "load_config": "cedar.config.load",
}

__all__ = ["LLM", "SamplingParams", "load_config"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cedar' has no attribute {name!r}; public names: {', '.join(_HOMES)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
