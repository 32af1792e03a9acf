"""What every test gets: a seed made of its id, `torch.empty` full of NaN, and a reason when it is skipped."""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest

# as cedar/__init__.py does, for test files that import torch before cedar
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="no CUDA device: the case runs a GPU kernel"))


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Random state depends on the test's id alone, not on what ran before it."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    # tests of packages without torch must not pay for importing it
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
    def empty(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point() and tensor.device.type != "meta" and tensor.element_size() > 1:
            import torch

            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return empty


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote reads as NaN, so a forgotten write cannot pass by luck."""
    if "torch" not in sys.modules:
        return
    torch = sys.modules["torch"]
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
