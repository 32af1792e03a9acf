"""What every test gets: a seed of its id, `torch.empty` full of NaN, its device, and a reason when it is skipped."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

# as cedar/__init__.py does, for test files that import torch before cedar
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
if not Path("/dev/nvidiactl").exists():
    # read when a kernel is defined: without a GPU Triton interprets them
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # the suite already runs a process a core
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# where tests marked `device` compute: cpu, cuda, or `pretend`, which finds tensors on the wrong device without a GPU
DEVICE = os.environ.get("CEDAR_TEST_DEVICE", "cpu")
if DEVICE == "pretend":
    # before anything of cedar is imported
    os.environ["CEDAR_KERNELS"] = "reference"
    from tests import pretend_gpu

    pretend_gpu.install()

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("default")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if DEVICE == "cpu" or not item.get_closest_marker("device"):
        return (yield)
    from tests.device import TestTensors

    with TestTensors():
        return (yield)


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


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano with random weights and a toy tokenizer, in the release's format: it answers nonsense, thinking off."""
    import torch

    from cedar.chat.tokenizer import train_tokenizer
    from cedar.checkpoint.write import write_checkpoint
    from cedar.config.presets import nano
    from cedar.model.init import initialise
    from cedar.model.transformer import Transformer

    directory = tmp_path_factory.mktemp("models") / "nonsense"
    text = "Once upon a time there was a small red fox that lived near a river, café, naïve. Room 12 has 34 keys."
    tokenizer = train_tokenizer([text] * 3, 320)
    config = dataclasses.replace(
        nano(),
        vocab_size=320,
        image_token_id=319,
        max_position_embeddings=4096,
        engram=dataclasses.replace(nano().engram, compressed_vocab_size=tokenizer.compressed_map()[1]),
        draft=dataclasses.replace(nano().draft, noise_token_id=312),
    )
    model = Transformer(config)
    with torch.no_grad():
        initialise(model, seed=3)
    write_checkpoint(model, directory)
    tokenizer.save(directory)
    (directory / "generation_config.json").write_text(json.dumps({"thinking": False, "max_new_tokens": 64}))
    return directory
