"""The planner's table of tensors and the checkpoint's table of names hold the same weights."""

from __future__ import annotations

from collections import Counter

import pytest

from cedar.checkpoint.names import Part, stored_tensors, stored_weights
from cedar.config import presets
from cedar.config.load import load_config, override
from cedar.config.model import ModelConfig
from cedar.planner import memory
from tests.golden import VECTORS

CONFIGS = {
    **{name: make() for name, make in presets.PRESETS.items()},
    "ckpt_a": load_config(VECTORS / "ckpt_a"),
    "ckpt_b": load_config(VECTORS / "ckpt_b"),
    "plain": override(presets.nano(), ["engram.layer_ids=[]"]),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_same_weights_and_bytes(config: ModelConfig) -> None:
    ours: Counter[tuple[Part, tuple[int, ...], str]] = Counter()
    for tensor in memory.tensors(config):
        part = {"draft": Part.DRAFT, "vision": Part.VISION}.get(tensor.part, Part.TEXT)
        ours[part, tensor.shape, tensor.storage] += tensor.copies
    names = Counter((weight.part, weight.shape, weight.storage.value) for weight in stored_weights(config))
    assert ours == names
    assert memory.checkpoint_bytes(config) == sum(tensor.num_bytes for tensor in stored_tensors(config).values())
