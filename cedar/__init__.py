"""cedar: the DeepSeek-V4.1-Flash system. Public names are imported when first used, so this costs nothing."""

from __future__ import annotations

import importlib
import os
from typing import Any

# OpenMP reads this once, when torch is first imported. Threads that spin while they wait for each other cost a
# small model up to a hundred times its own time as soon as anything else wants the cores (docs/serving.md)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

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
