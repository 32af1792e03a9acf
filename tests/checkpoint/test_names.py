"""The names table against the released inventory and the golden checkpoints."""

import json
from collections import Counter
from pathlib import Path

import pytest

from cedar.checkpoint.names import Part, Storage, count_by_part, stored_tensors, stored_weights
from cedar.config import presets
from cedar.config.load import load_config

VECTORS = Path(__file__).parent.parent / "vectors"


def headers(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape, from the files' own headers."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        found |= {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    return found


def test_flash_holds_the_released_96085_tensors() -> None:
    tensors = stored_tensors(presets.flash()).values()
    assert len(tensors) == 96_085
    assert count_by_part(presets.flash()) == {Part.TEXT: 93_418, Part.DRAFT: 2_401, Part.VISION: 266}
    counts = Counter(tensor.dtype for tensor in tensors)
    assert counts == {"BF16": 520, "F32": 387, "F8_E4M3": 357, "F8_E8M0": 47_589, "I8": 47_232}
    num_bytes: Counter[str] = Counter()
    for tensor in tensors:
        num_bytes[tensor.dtype] += tensor.num_bytes
    assert num_bytes == {
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "I8": 278_585_671_680,
    }
    assert sum(num_bytes.values()) == 510_286_023_000


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("embed.weight", (129280, 5120), "BF16"),
        ("layers.39.hc_ffn_fn", (24, 20480), "F32"),
        ("layers.0.attn.wq_b.scale", (1024, 40), "F8_E8M0"),
        ("layers.7.attn.wo_a.weight", (8192, 4096), "F8_E4M3"),
        ("layers.36.attn.indexer.wq_b.weight", (4096, 1280), "F8_E4M3"),
        ("layers.3.ffn.experts.383.w1.weight", (2304, 2560), "I8"),
        ("layers.3.ffn.experts.0.w2.scale", (5120, 72), "F8_E8M0"),
        ("layers.14.engram.embed.weight", (384016682, 256), "F8_E4M3"),
        ("layers.1.engram.embed.scale", (384006168, 8), "F8_E8M0"),
        ("layers.1.engram.wkv.scale", (800, 192), "F8_E8M0"),
        ("mtp.0.main_proj.weight", (5120, 15360), "F8_E4M3"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16"),
        ("mtp.1.ffn.gate.bias_vl", (128,), "F32"),
        ("vision.blocks.31.mlp.w1.weight", (5632, 1024), "BF16"),
        ("aligner.w1.weight", (5120, 9216), "BF16"),
    ],
)
def test_flash_shapes(name: str, shape: tuple[int, ...], dtype: str) -> None:
    tensor = stored_tensors(presets.flash())[name]
    assert (tensor.shape, tensor.dtype) == (shape, dtype)


def test_flash_has_no_gate_at_ratio_one_and_no_keys_in_reindex_layers() -> None:
    names = stored_tensors(presets.flash())
    assert "layers.14.attn.compressor.wgate.weight" in names
    assert "layers.20.attn.compressor.wgate.weight" not in names
    assert "layers.24.attn.indexer.wk.weight" not in names
    assert not any(name.startswith("mtp.2.main_") or name == "mtp.0.norm.weight" for name in names)


@pytest.mark.parametrize("name", ["ckpt_a", "ckpt_b"])
def test_golden_checkpoints_hold_exactly_the_table(name: str) -> None:
    directory = VECTORS / name
    table = stored_tensors(load_config(directory))
    assert headers(directory) == {tensor.name: (tensor.dtype, tensor.shape) for tensor in table.values()}


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_every_name_is_there_once_and_all_but_vision_have_parameters(preset: str) -> None:
    config = presets.preset(preset)
    weights = stored_weights(config)
    assert len({weight.name for weight in weights}) == len(weights)
    assert sum(len(weight.tensors) for weight in weights) == len(stored_tensors(config))
    slots = [(weight.parameter, weight.expert) for weight in weights if weight.part is not Part.VISION]
    assert len(set(slots)) == len(slots)
    assert all(slot for slot, _ in slots)
    assert not any(weight.parameter for weight in weights if weight.part is Part.VISION)


def test_published_and_own_names() -> None:
    weights = {weight.name: weight for weight in stored_weights(presets.nano())}
    assert weights["layers.0.hc_attn_fn"].parameter == "layers.0.hc_attn.fn"
    assert weights["layers.0.attn.wq_a"].parameter == "layers.0.attn.wq_a.weight"
    expert = weights["layers.1.ffn.experts.5.w3"]
    assert (expert.parameter, expert.expert, expert.storage) == ("layers.1.ffn.experts.w3", 5, Storage.FP4)
    assert weights["layers.1.engram.embed"].parameter == "layers.1.engram.embed.weight"


def test_draft_and_vision_follow_the_config() -> None:
    assert set(count_by_part(presets.nano())) == {Part.TEXT}
    assert set(count_by_part(load_config(VECTORS / "ckpt_a"))) == {Part.TEXT, Part.DRAFT}


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_bytes_agree_with_the_planner(preset: str) -> None:
    from cedar.planner.memory import checkpoint_bytes

    config = presets.preset(preset)
    assert sum(tensor.num_bytes for tensor in stored_tensors(config).values()) == checkpoint_bytes(config)
