"""Reading golden checkpoints exactly, and refusing damaged ones by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cedar.checkpoint.files import CheckpointError, inspect_checkpoint, open_checkpoint
from cedar.checkpoint.names import Part, Storage, stored_weights
from cedar.checkpoint.read import kept_scales, owner, read_checkpoint, target
from cedar.config import presets
from cedar.config.load import load_config
from cedar.errors import ConfigError, FormatError
from cedar.formats.spec import FP4_INDEX
from cedar.kernels.quantize import dequantize_rows
from cedar.model.engram import EngramTable
from cedar.model.layers import Linear, Tiles
from cedar.model.moe import Experts
from cedar.model.transformer import Transformer
from tests.checkpoint.raw import VECTORS, RawCheckpoint, RawTensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def reference(tensors: dict[str, torch.Tensor], name: str, storage: Storage) -> torch.Tensor:
    """A stored weight decoded with torch's own casts, by another route than the package's."""
    if storage in (Storage.F32, Storage.BF16):
        return tensors[name].float()
    stored = tensors[f"{name}.weight"]
    scale = torch.exp2(tensors[f"{name}.scale"].view(torch.uint8).float() - 127)
    if storage is Storage.FP4:
        packed = stored.view(torch.uint8).long()
        values = torch.stack((E2M1[packed & 15], E2M1[packed >> 4]), -1).flatten(1)
        return values * scale.repeat_interleave(32, 1)
    if storage is Storage.FP8:
        scale = scale.repeat_interleave(32, 0)[: stored.shape[0]]
    return stored.float() * scale.repeat_interleave(32, 1)[:, : stored.shape[1]]


@pytest.mark.parametrize("name", ["ckpt_a", "ckpt_b"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engram", ["memory", "mapped"])
def test_every_text_weight_of_the_golden_checkpoints_is_exact(name: str, dtype: torch.dtype, engram: str) -> None:
    directory = VECTORS / name
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    model = read_checkpoint(directory, dtype=dtype, engram=engram)
    for weight in stored_weights(load_config(directory)):
        if weight.part is not Part.TEXT:
            continue
        module = owner(model, weight)
        expected = reference(tensors, weight.name, weight.storage)
        assert tuple(expected.shape) == weight.shape
        if isinstance(module, EngramTable):
            row_TK = torch.arange(weight.shape[0])[:, None]
            values = module(row_TK, torch.float32, model.rounding)
        else:
            values = target(model, weight)
            if weight.scale is not None:
                assert torch.equal(kept_scales(module, weight), tensors[weight.scale.name].view(torch.uint8))
        assert torch.equal(values.float(), expected), weight.name


@pytest.mark.parametrize("name", ["ckpt_a", "ckpt_b"])
def test_a_packed_model_has_the_weights_of_a_decoded_one(name: str) -> None:
    decoded, packed = (read_checkpoint(VECTORS / name, packed=packed) for packed in (False, True))
    read = dict(decoded.named_modules())
    for place, module in packed.named_modules():
        if isinstance(module, Linear):
            assert isinstance(module.held, Tiles) == (module.storage == "fp8"), place
            assert torch.equal(module.effective_weight(packed.rounding), read[place].weight), place
        if isinstance(module, Experts):
            for part, stack in module.packed.items():
                want = getattr(read[place], part)
                assert torch.equal(dequantize_rows(*stack, FP4_INDEX, torch.float32), want), (place, part)


def test_the_text_names_of_flash_cover_a_meta_device_build() -> None:
    config = presets.flash()
    model = Transformer(config, device="meta")
    held = {name for name, _ in model.named_parameters()}
    held |= {name for name, _ in model.named_buffers() if name.endswith(("gate.bias", "gate.bias_vl"))}
    weights = [weight for weight in stored_weights(config) if weight.part is Part.TEXT]
    assert {weight.parameter for weight in weights} == held
    for weight in weights:
        # asserts the shape, of each expert's cut too
        assert target(model, weight).is_meta


def test_all_problems_are_in_one_error_with_counts(raw: RawCheckpoint, tmp_path: Path) -> None:
    tensors = raw.tensors
    del tensors["layers.3.attn.wkv.scale"]
    del tensors["layers.0.ffn.gate.bias"]
    tensors["layers.1.attn.wq_a.input_scale"] = RawTensor("F32", [1], bytes(4))
    wq_a = tensors["layers.0.attn.wq_a.weight"]
    tensors["layers.0.attn.wq_a.weight"] = RawTensor("BF16", wq_a.shape, bytes(2 * len(wq_a.data)))
    wkv = tensors["layers.2.attn.compressor.norm.weight"]
    tensors["layers.2.attn.compressor.norm.weight"] = RawTensor(wkv.dtype, [64], wkv.data[:128])
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(raw.save(tmp_path / "broken"))
    message = str(caught.value)
    total = len(raw.tensors) - 1 + 2
    text = sum(not name.startswith("mtp.") for name in raw.tensors) - 1 + 2
    assert f"{text - 4} of {text} text tensors match" in message
    assert f"{total - text} of {total - text} draft tensors match" in message
    assert "5 problems" in message
    assert "layers.3.attn.wkv.scale is missing: expected F8_E8M0 [4, 4]" in message
    assert "layers.0.ffn.gate.bias is missing: expected F32 [8]" in message
    assert "layers.1.attn.wq_a.input_scale is unexpected (F32 [1]): activations are scaled as they come" in message
    assert "layers.0.attn.wq_a.weight is BF16, expected F8_E4M3 (FP8 elements)" in message
    assert "layers.2.attn.compressor.norm.weight has shape [64], expected [128]" in message
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.0.attn.wq_a.weight", [128, 64], "expected [64, 128]: rows and columns are swapped"),
        ("layers.0.ffn.experts.0.w2.weight", [128, 33], "expected [128, 32] for [128, 64] values, two columns a byte"),
        ("layers.0.ffn.experts.0.w2.weight", [128, 64], "expected [128, 32]: not packed, two columns share a byte"),
        ("layers.0.attn.wkv.scale", [128, 4], "expected [4, 4]: one scale per 32 x 32 tile"),
        ("layers.0.ffn.experts.1.w1.scale", [2, 4], "expected [64, 4]: one scale per 32 x 32 tile, of experts"),
        ("layers.1.engram.embed.weight", [251, 32], "expected [252, 32]"),
    ],
)
def test_wrong_shapes_are_named(raw: RawCheckpoint, tmp_path: Path, name: str, shape: list[int], expected: str) -> None:
    dtype = raw.tensors[name].dtype
    raw.tensors[name] = RawTensor(dtype, shape, bytes(shape[0] * shape[1]))
    with pytest.raises(CheckpointError, match=re.escape(f"{name} has shape {shape}, {expected}")):
        open_checkpoint(raw.save(tmp_path / "broken"))


@pytest.mark.parametrize("dtype", ["U8", "F8_E4M3", "F4"])
def test_experts_of_another_dtype_are_named(raw: RawCheckpoint, tmp_path: Path, dtype: str) -> None:
    name = "layers.4.ffn.experts.7.w3.weight"
    tensor = raw.tensors[name]
    data = tensor.data[: len(tensor.data) // 2] if dtype == "F4" else tensor.data
    raw.tensors[name] = RawTensor(dtype, tensor.shape, data)
    with pytest.raises(CheckpointError, match=f"{name} is {dtype}, expected I8"):
        open_checkpoint(raw.save(tmp_path / "broken"))


def test_a_prefixed_checkpoint_matches_nothing_and_says_why(raw: RawCheckpoint, tmp_path: Path) -> None:
    raw.tensors = {f"model.{name}": tensor for name, tensor in raw.tensors.items()}
    directory = raw.save(tmp_path / "broken")
    with pytest.raises(
        CheckpointError, match=r"0 of .* text tensors match(?s:.*)and .* more; `cedar inspect"
    ) as caught:
        open_checkpoint(directory)
    assert sum("the released names have no 'model.' in front" in line for line in caught.value.problems) == len(
        raw.tensors
    )


def test_one_renamed_tensor_is_named_twice_with_the_nearest_spelling(raw: RawCheckpoint, tmp_path: Path) -> None:
    raw.tensors["layers.2.attn.attn_sinks"] = raw.tensors.pop("layers.2.attn.attn_sink")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(raw.save(tmp_path / "broken"))
    assert caught.value.problems == (
        "layers.2.attn.attn_sink is missing: expected F32 [4] (kept in float32)",
        "layers.2.attn.attn_sinks is unexpected (F32 [4]): did you mean layers.2.attn.attn_sink?",
    )


def test_a_truncated_shard_is_named(copied: Path) -> None:
    shard = copied / "model-00001-of-00002.safetensors"
    size = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.truncate(size - 1000)
    with pytest.raises(CheckpointError, match=rf"{shard.name} is truncated: {size - 1000} bytes, expected {size};"):
        open_checkpoint(copied)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 64, b"\x02" + bytes(7) + b"[]", bytes(64)])
def test_a_shard_without_a_header_is_named(copied: Path, content: bytes) -> None:
    (copied / "model-00002-of-00002.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors .* has no safetensors header"):
        open_checkpoint(copied)


def test_appended_bytes_are_named(copied: Path) -> None:
    with (copied / "model-00002-of-00002.safetensors").open("ab") as stream:
        stream.write(b"tail")
    with pytest.raises(CheckpointError, match="something was appended"):
        open_checkpoint(copied)


def test_a_missing_shard_is_named(copied: Path) -> None:
    (copied / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match="model-00002-of-00002.safetensors is missing although the index"
    ) as caught:
        open_checkpoint(copied)
    # its tensors are counted, not listed one by one
    assert len(caught.value.problems) == 1


def test_an_index_that_disagrees_with_its_shards_is_named(copied: Path) -> None:
    index = copied / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    moved = "embed.weight"
    content["weight_map"][moved] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(copied)
    assert set(caught.value.problems) == {
        f"model-00001-of-00002.safetensors holds {moved}, which the index does not place there",
        f"the index places {moved} in model-00002-of-00002.safetensors, which does not hold it",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected a JSON object with weight_map"),
        ("[]", "expected a JSON object with weight_map"),
        ('{"weight_map": {"embed.weight": "../other.safetensors"}}', "expected plain file names"),
    ],
)
def test_a_broken_index_is_refused(copied: Path, content: str, message: str) -> None:
    (copied / "model.safetensors.index.json").write_text(content)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(copied)


def test_a_directory_without_index_is_refused(copied: Path, tmp_path: Path) -> None:
    (copied / "model.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match="but no index, as after an interrupted copy"):
        open_checkpoint(copied)
    with pytest.raises(ConfigError, match="no config at"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_single_file_needs_no_index(raw: RawCheckpoint, tmp_path: Path) -> None:
    directory = raw.save(tmp_path / "one", shards=1)
    (directory / "model.safetensors.index.json").unlink()
    (directory / "model-00001-of-00001.safetensors").rename(directory / "model.safetensors")
    assert open_checkpoint(directory).matched[Part.TEXT] > 0


def test_a_config_key_that_changes_a_shape_is_noticed(raw: RawCheckpoint, tmp_path: Path) -> None:
    raw.config = raw.config.replace('"vocab_size": 192', '"vocab_size": 224')
    with pytest.raises(CheckpointError, match=r"embed.weight has shape \[192, 128\], expected \[224, 128\]"):
        open_checkpoint(raw.save(tmp_path / "other"))


def test_the_files_config_wins(raw: RawCheckpoint, tmp_path: Path) -> None:
    topk = load_config(VECTORS / "ckpt_b").indexer.topk
    raw.config = raw.config.replace(f'"index_topk": {topk}', f'"index_topk": {topk - 1}')
    assert read_checkpoint(raw.save(tmp_path / "changed")).config.indexer.topk == topk - 1


def with_vision(raw: RawCheckpoint) -> dict[str, RawTensor]:
    """Adds a vision part to the config; returns the tensors it asks for."""
    config = json.loads(raw.config)
    config["vision_config"] = {
        "model_type": "deepseek_v41_vision", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 96, "patch_size": 4, "rope_theta": 10000, "downsample_ratio": 3, "max_image_tokens": 40,
        "min_pixels": 576, "max_wh_ratio": None,
    }  # fmt: skip
    raw.config = json.dumps(config)
    from cedar.config.load import config_from_dict

    weights = [weight for weight in stored_weights(config_from_dict(config)) if weight.part is Part.VISION]
    assert len(weights) == 10 + 8 * 2
    return {
        weight.weight.name: RawTensor("BF16", list(weight.shape), bytes(weight.weight.num_bytes)) for weight in weights
    }


def test_vision_is_decided_by_the_config(raw: RawCheckpoint, tmp_path: Path) -> None:
    plain = dict(raw.tensors)
    text_only = raw.config
    vision = with_vision(raw)
    # config and tensors, neither, one of them
    raw.tensors = plain | vision
    model = read_checkpoint(raw.save(tmp_path / "both"))
    assert model.config.vision is not None
    read_checkpoint(RawCheckpoint(text_only, plain).save(tmp_path / "none"))
    with pytest.raises(CheckpointError, match=r"image_end is unexpected .*the config has no vision_config"):
        read_checkpoint(RawCheckpoint(text_only, plain | vision).save(tmp_path / "tensors"))
    with pytest.raises(CheckpointError, match="0 of 26 vision tensors match.*"):
        read_checkpoint(RawCheckpoint(raw.config, plain).save(tmp_path / "config"))


def test_text_of_a_composite_checkpoint_equals_text_alone(raw: RawCheckpoint, tmp_path: Path) -> None:
    alone = read_checkpoint(VECTORS / "ckpt_b")
    raw.tensors |= with_vision(raw)
    composite = read_checkpoint(raw.save(tmp_path / "composite"))
    for (name, left), (_, right) in zip(alone.named_parameters(), composite.named_parameters(), strict=True):
        assert torch.equal(left, right), name


def test_draft_tensors_without_draft_blocks_are_named(raw: RawCheckpoint, tmp_path: Path) -> None:
    config = json.loads(raw.config)
    config["text_config"]["num_nextn_predict_layers"] = 0
    del config["text_config"]["compress_ratios"][-1]
    raw.config = json.dumps(config)
    with pytest.raises(CheckpointError, match="mtp.0.* is unexpected .*num_nextn_predict_layers 0"):
        open_checkpoint(raw.save(tmp_path / "broken"))


def test_e8m0_bytes_0_and_255(raw: RawCheckpoint, tmp_path: Path) -> None:
    name = "layers.0.attn.wkv"
    scale = raw.tensors[f"{name}.scale"]
    raw.tensors[f"{name}.scale"] = RawTensor(scale.dtype, scale.shape, bytes([0, 255]) + scale.data[2:])
    weight = read_checkpoint(raw.save(tmp_path / "edge")).layers[0].attn.wkv.weight
    codes = torch.frombuffer(bytearray(raw.tensors[f"{name}.weight"].data), dtype=torch.float8_e4m3fn).view(128, 128)
    assert torch.equal(weight[:32, :32], codes[:32, :32].float() * 2.0**-127)
    assert weight[:32, 32:64].isnan().all()


def test_a_foreign_tokenizer_is_refused(copied: Path) -> None:
    from cedar.chat.tokenizer import train_tokenizer

    train_tokenizer(["a small text about small texts"] * 3, 280).save(copied)
    with pytest.raises(FormatError, match="280 tokens, the config's vocab_size is 192"):
        read_checkpoint(copied)


def test_inspection_collects_what_opening_raises(copied: Path) -> None:
    (copied / "model-00002-of-00002.safetensors").unlink()
    files = inspect_checkpoint(copied)
    assert len(files.problems) == 1
    assert 0 < files.matched[Part.TEXT] < files.expected[Part.TEXT]


# the high-water mark of getrusage is inherited from the test process, so a thread samples instead
_MEASURE = """
import json, os, sys, threading, time
import psutil, torch
torch.set_num_threads(1)
from cedar.checkpoint.read import read_checkpoint

process = psutil.Process()
read_checkpoint(sys.argv[2])
before = peak = process.memory_info().rss
done = threading.Event()

def sample():
    global peak
    while not done.is_set():
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.001)

sampler = threading.Thread(target=sample)
sampler.start()
model = read_checkpoint(sys.argv[1], engram=sys.argv[3])
done.set()
sampler.join()
module = sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
tables = [t for m in model.modules() for t in (getattr(m, "codes", None), getattr(m, "scales", None)) if t is not None]
touched = [int(t[0, 0]) + int(t[-1, -1]) for t in tables]
print(json.dumps({"before": before, "peak": peak, "module": module,
                  "tables": sum(t.numel() for t in tables)}))
"""


def measure(directory: Path, engram: str) -> dict[str, int]:
    """Memory of a process that loads a small checkpoint first, then this one."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_MEASURE), str(directory), str(VECTORS / "ckpt_b"), engram],
        capture_output=True,
        text=True,
        check=True,
        cwd=VECTORS.parent.parent,
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 200 MB: weights that fill 400 MB as float32, and 140 MB of Engram tables, which stay as they are."""
    from cedar.checkpoint.write import write_checkpoint
    from cedar.config.load import override

    config = override(
        presets.nano(),
        [
            "hidden_size=512",
            "moe.inner_size=512",
            "moe.num_routed_experts=12",
            "engram.vocab_size=16381",
            "engram.head_dim=512",
        ],
    )
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    directory = tmp_path_factory.mktemp("big")
    write_checkpoint(model, directory, shard_bytes=32 << 20)
    return directory


def test_peak_memory_is_the_module_and_one_shard(big: Path) -> None:
    shard = max(file.stat().st_size for file in big.glob("*.safetensors"))
    memory = measure(big, "memory")
    held = memory["module"] + memory["tables"]
    assert held > 300 << 20
    # the sampler saw the load
    assert memory["peak"] - memory["before"] > 0.9 * held
    assert memory["peak"] - memory["before"] <= 1.2 * held + shard


def test_mapped_tables_take_no_memory(big: Path) -> None:
    memory = measure(big, "mapped")
    assert memory["tables"] > 100 << 20
    # the allocator keeps what decoding needed, some tens of megabytes, so the peak's bound serves afterwards too
    assert memory["peak"] - memory["before"] <= 1.2 * memory["module"] + memory["tables"] // 4
