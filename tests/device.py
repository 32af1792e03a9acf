"""Where tests marked `device` compute: on a CPU, or what the environment's CEDAR_TEST_DEVICE names.

What a test makes lies there (`TestTensors`); what cedar makes must find its own way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NAMED = os.environ.get("CEDAR_TEST_DEVICE", "cpu")
PRETENDED = _NAMED == "pretend"
DEVICE = torch.device("cuda" if PRETENDED else _NAMED)
ON_CPU = DEVICE.type == "cpu"

_TESTS = str(Path(__file__).parent) + os.sep
_CONFTEST = str(Path(__file__).parent / "conftest.py")
_MAKERS = frozenset(
    (
        torch.arange,
        torch.as_tensor,
        torch.empty,
        torch.eye,
        torch.full,
        torch.linspace,
        torch.ones,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
        torch.tensor,
        torch.zeros,
    )
)


class TestTensors(TorchFunctionMode):
    """A tensor that a file of the tests makes without naming a device lies on `DEVICE`.

    Random numbers are drawn on the CPU, where seeds give the same ones on every machine.
    """

    __test__ = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _MAKERS and "device" not in (kwargs or {}) and isinstance(made, Tensor) and _by_a_test():
            return made.to(DEVICE)
        return made


def _by_a_test() -> bool:
    # two frames up: whoever called torch, or called `empty`, which is conftest's for everybody
    frame = sys._getframe(2)
    if frame.f_code.co_filename == _CONFTEST and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_TESTS)
