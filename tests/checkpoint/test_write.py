"""Writing the release's format: exact round trips, nothing lost, all or nothing."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cedar.checkpoint import write
from cedar.checkpoint.files import open_checkpoint
from cedar.checkpoint.names import Part, Storage, stored_weights
from cedar.checkpoint.read import owner, read_checkpoint, target
from cedar.checkpoint.write import convert_checkpoint, write_checkpoint
from cedar.config import presets
from cedar.config.load import load_config, override
from cedar.errors import CapacityError, FormatError
from cedar.formats import fp4, fp8
from cedar.model.engram import EngramTable
from cedar.model.init import initialise
from cedar.model.transformer import Transformer
from tests.checkpoint.raw import VECTORS, RawCheckpoint, RawTensor


def digests(directory: Path) -> dict[str, str]:
    """Every file of a directory, staging folders included."""
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


TINY = override(
    presets.nano(), ["hidden_size=64", "moe.num_routed_experts=2", "moe.inner_size=32", "engram.vocab_size=101"]
)


def trained(seed: int = 0) -> Transformer:
    """A small model whose weights are those of no storage format."""
    model = Transformer(TINY)
    initialise(model, seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("gate.bias", "gate.bias_vl")):
                buffer.normal_()
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", ["ckpt_a", "ckpt_b"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_golden_checkpoint_comes_back_byte_for_byte(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = open_checkpoint(VECTORS / name)
    written = write_checkpoint(read_checkpoint(VECTORS / name, dtype=dtype), tmp_path / "again", source=source)
    before, after = RawCheckpoint.load(VECTORS / name), RawCheckpoint.load(tmp_path / "again")
    assert before.tensors.keys() == after.tensors.keys()
    for tensor, value in before.tensors.items():
        assert after.tensors[tensor] == value, tensor
    assert load_config(tmp_path / "again") == load_config(VECTORS / name)
    assert written.tensors == source.expected
    assert written.tensors[Part.DRAFT] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_that_are_not_canonical_come_back(raw: RawCheckpoint, tmp_path: Path, dtype: torch.dtype) -> None:
    changed = 0
    for name, tensor in raw.tensors.items():
        if name.startswith("layers.") and tensor.dtype in ("I8", "F8_E4M3"):
            # small and negative-zero codes, no group reaches the top of its range
            codes = torch.randint(0, 256, (len(tensor.data),), dtype=torch.uint8)
            codes &= 0xBB if tensor.dtype == "I8" else 0xBF
            raw.tensors[name] = RawTensor(tensor.dtype, tensor.shape, bytes(codes.tolist()))
            changed += 1
        if name.startswith("layers.") and tensor.dtype == "F8_E8M0":
            scales = torch.randint(100, 150, (len(tensor.data),), dtype=torch.uint8)
            raw.tensors[name] = RawTensor(tensor.dtype, tensor.shape, bytes(scales.tolist()))
    assert changed > 200
    source = raw.save(tmp_path / "source")
    write_checkpoint(read_checkpoint(source, dtype=dtype), tmp_path / "again", source=open_checkpoint(source))
    assert RawCheckpoint.load(tmp_path / "again").tensors == raw.tensors


@pytest.mark.parametrize("preset", ["micro"])
def test_write_read_write_gives_identical_files(preset: str, tmp_path: Path) -> None:
    model = Transformer(presets.preset(preset))
    initialise(model, 5)
    write_checkpoint(model, tmp_path / "first", shard_bytes=1 << 20)
    write_checkpoint(read_checkpoint(tmp_path / "first"), tmp_path / "second", shard_bytes=1 << 20)
    first, second = digests(tmp_path / "first"), digests(tmp_path / "second")
    assert first == second
    assert len(first) > 4


@pytest.mark.parametrize("preset", ["micro"])
def test_packed_weights_are_written_as_they_are(preset: str, tmp_path: Path) -> None:
    model = Transformer(presets.preset(preset))
    initialise(model, 5)
    write_checkpoint(model, tmp_path / "first")
    packed = read_checkpoint(tmp_path / "first", packed=True)
    assert packed.packed
    write_checkpoint(packed, tmp_path / "second")
    assert digests(tmp_path / "first") == digests(tmp_path / "second")


def test_trained_weights_are_rounded_to_their_formats(tmp_path: Path) -> None:
    model = trained()
    write_checkpoint(model, tmp_path / "out")
    again = read_checkpoint(tmp_path / "out")
    for weight in stored_weights(model.config):
        module = owner(again, weight)
        values = target(model, weight)
        match weight.storage:
            case Storage.F32:
                expected = values
            case Storage.BF16:
                expected = values.bfloat16().float()
            case Storage.FP8:
                expected = fp8.dequantize_tiles(*fp8.quantize_tiles(values))
            case Storage.FP8_ROWS:
                expected = fp8.dequantize_fp8(*fp8.quantize_fp8(values))
            case Storage.FP4:
                expected = fp4.dequantize_fp4_index(*fp4.quantize_fp4_index(values))
        if isinstance(module, EngramTable):
            got = fp8.dequantize_fp8(module.codes, module.scales)
        else:
            got = target(again, weight)
        assert torch.equal(got, expected), weight.name


def test_chunks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained()
    write_checkpoint(model, tmp_path / "whole")
    monkeypatch.setattr("cedar.checkpoint.read.CHUNK_VALUES", 1000)
    write_checkpoint(model, tmp_path / "pieces")
    assert digests(tmp_path / "whole") == digests(tmp_path / "pieces")
    again = read_checkpoint(tmp_path / "pieces")
    monkeypatch.undo()
    for (name, left), (_, right) in zip(
        again.named_parameters(), read_checkpoint(tmp_path / "whole").named_parameters(), strict=True
    ):
        assert torch.equal(left, right), name


def test_a_weight_trained_after_loading_gets_new_scales(tmp_path: Path) -> None:
    model = read_checkpoint(VECTORS / "ckpt_b")
    linear = model.layers[3].attn.wkv
    with torch.no_grad():
        linear.weight.mul_(1000.3)
        model.layers[2].ffn.experts.w1[5].mul_(1000.3)
    expected = fp8.quantize_tiles(linear.weight.detach())[1]
    write_checkpoint(model, tmp_path / "out", source=open_checkpoint(VECTORS / "ckpt_b"))
    again = read_checkpoint(tmp_path / "out")
    assert torch.equal(again.layers[3].attn.wkv.scale_bytes, expected)
    ratio = again.layers[3].attn.wkv.weight / linear.weight
    assert ratio[linear.weight.abs() > 100].sub(1).abs().max() <= 2**-4
    scales = again.layers[2].ffn.experts.scale_bytes["w1"]
    assert torch.equal(scales[4], model.layers[2].ffn.experts.scale_bytes["w1"][4])
    assert not torch.equal(scales[5], model.layers[2].ffn.experts.scale_bytes["w1"][5])


def test_files_are_read_by_the_safetensors_library_and_aligned(tmp_path: Path) -> None:
    written = write_checkpoint(trained(), tmp_path / "out", shard_bytes=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.num_bytes
    assert set(index["weight_map"].values()) == set(written.shards)
    for name in written.shards:
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for tensor in file.keys():  # noqa: SIM118
                assert index["weight_map"][tensor] == name
                file.get_tensor(tensor)
    for location in open_checkpoint(tmp_path / "out").locations.values():
        assert location.start % {"F32": 4, "BF16": 2}.get(location.dtype, 1) == 0


@pytest.mark.parametrize("shard_bytes", [1, 50_000, 1 << 40])
def test_shards_keep_to_their_size(tmp_path: Path, shard_bytes: int) -> None:
    written = write_checkpoint(trained(), tmp_path / "out", shard_bytes=shard_bytes)
    weights = stored_weights(TINY)
    largest = max(sum(tensor.num_bytes for tensor in weight.tensors) for weight in weights)
    assert len(written.shards) == (
        1 if shard_bytes == 1 << 40 else len(weights) if shard_bytes == 1 else len(written.shards)
    )
    for name in written.shards:
        file = tmp_path / "out" / name
        header = int.from_bytes(file.read_bytes()[:8], "little")
        assert file.stat().st_size - 8 - header <= max(shard_bytes, largest)


def test_companion_files_are_copied(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    written = write_checkpoint(trained(), tmp_path / "out", files=[tmp_path / "tokenizer.json"])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert "tokenizer.json" in written.files


@pytest.mark.parametrize(
    ("parameter", "dtype", "poison"),
    [
        ("layers.3.attn.wkv.weight", "F8_E4M3", float("nan")),
        ("layers.2.ffn.experts.w2", "I8", float("inf")),
        ("layers.1.engram.embed.weight", "F8_E4M3", float("nan")),
        ("layers.0.hc_attn.fn", "F32", float("inf")),
        ("norm.weight", "BF16", float("nan")),
        ("layers.4.ffn.gate.bias", "F32", -float("inf")),
    ],
)
def test_a_weight_that_is_not_finite_is_named_and_nothing_changes(
    tmp_path: Path, parameter: str, dtype: str, poison: float
) -> None:
    write_checkpoint(trained(), tmp_path / "out")
    before = digests(tmp_path / "out")
    model = trained(seed=1)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        tensors[parameter].view(-1)[-1] = poison
    with pytest.raises(FormatError, match=f"^{parameter} holds NaN or infinity and cannot be stored as {dtype}"):
        write_checkpoint(model, tmp_path / "out")
    assert digests(tmp_path / "out") == before


def test_a_bfloat16_overflow_is_named(tmp_path: Path) -> None:
    model = trained()
    with torch.no_grad():
        model.head.weight[0, 0] = torch.finfo(torch.float32).max
    with pytest.raises(FormatError, match="head.weight holds NaN or infinity"):
        write_checkpoint(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("error", "after"), [(errno.ENOSPC, 0), (errno.EDQUOT, 5), (errno.ENOSPC, 100)])
def test_a_full_disk_is_told_and_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, after: int
) -> None:
    write_checkpoint(trained(), tmp_path / "out", shard_bytes=100_000)
    before = digests(tmp_path / "out")
    synced = write._write_synced
    calls = 0

    def failing(file: Path, pieces):  # type: ignore[no-untyped-def]
        def counted():  # type: ignore[no-untyped-def]
            nonlocal calls
            for piece in pieces:
                calls += 1
                if calls > after:
                    raise OSError(error, "no room")
                yield piece

        synced(file, counted())

    monkeypatch.setattr(write, "_write_synced", failing)
    with pytest.raises(CapacityError, match=r"the disk is full: .* What was there is untouched"):
        write_checkpoint(trained(seed=1), tmp_path / "out")
    assert digests(tmp_path / "out") == before
    with pytest.raises(CapacityError):
        write_checkpoint(trained(seed=1), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    read_checkpoint(tmp_path / "out")


def test_a_disk_too_small_is_told_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(CapacityError, match="has 1,000 bytes free, the checkpoint needs"):
        write_checkpoint(trained(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_smaller_checkpoint_removes_the_shards_of_the_larger(tmp_path: Path) -> None:
    write_checkpoint(trained(), tmp_path / "out", shard_bytes=50_000)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    write_checkpoint(trained(seed=1), tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "notes.txt",
    ]  # fmt: skip


def test_a_crash_while_files_are_moved_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(trained(), tmp_path / "out", shard_bytes=100_000)
    replace = write.os.replace
    moved = []

    def crash(source: Path, destination: Path) -> None:
        if moved:
            raise KeyboardInterrupt
        moved.append(destination)
        replace(source, destination)

    monkeypatch.setattr(write.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(trained(seed=1), tmp_path / "out", shard_bytes=100_000)
    # old and new shards together would load without a word
    with pytest.raises(FormatError, match="but no index"):
        read_checkpoint(tmp_path / "out")


def test_draft_tensors_are_never_dropped_silently(tmp_path: Path) -> None:
    model = read_checkpoint(VECTORS / "ckpt_b")
    with pytest.raises(FormatError, match="the config asks for draft tensors, first mtp.0.*give `source`"):
        write_checkpoint(model, tmp_path / "out")
    with pytest.raises(FormatError, match="ckpt_a cannot give mtp.0.*belongs to another model"):
        write_checkpoint(model, tmp_path / "out", source=open_checkpoint(VECTORS / "ckpt_a"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shard_bytes", [300_000, 1 << 40])
def test_convert_keeps_every_byte(tmp_path: Path, shard_bytes: int) -> None:
    (tmp_path / "source").mkdir()
    RawCheckpoint.load(VECTORS / "ckpt_b").save(tmp_path / "source", shards=3)
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    written = 0

    def progress(num_bytes: int) -> None:
        nonlocal written
        written += num_bytes

    files = open_checkpoint(tmp_path / "source")
    result = convert_checkpoint(files, tmp_path / "out", shard_bytes=shard_bytes, progress=progress)
    before, after = RawCheckpoint.load(tmp_path / "source"), RawCheckpoint.load(tmp_path / "out")
    assert before.tensors == after.tensors
    assert written == result.num_bytes
    assert result.tensors == files.expected
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_convert_in_place(tmp_path: Path) -> None:
    directory = RawCheckpoint.load(VECTORS / "ckpt_b").save(tmp_path / "here", shards=3)
    convert_checkpoint(open_checkpoint(directory), directory)
    assert RawCheckpoint.load(directory).tensors == RawCheckpoint.load(VECTORS / "ckpt_b").tensors
    assert len(list(directory.glob("*.safetensors"))) == 1


def test_a_mapped_model_can_overwrite_its_own_files(tmp_path: Path) -> None:
    write_checkpoint(trained(), tmp_path / "out")
    before = digests(tmp_path / "out")
    model = read_checkpoint(tmp_path / "out", engram="mapped")
    write_checkpoint(model, tmp_path / "out")
    assert digests(tmp_path / "out") == before
    assert model.layers[1].engram.embed.codes[-1].sum() > 0


def test_a_written_model_computes_what_it_did(tmp_path: Path) -> None:
    model = read_checkpoint(VECTORS / "ckpt_b")
    write_checkpoint(model, tmp_path / "out", source=open_checkpoint(VECTORS / "ckpt_b"))
    again = read_checkpoint(tmp_path / "out", engram="mapped")
    ids = torch.randint(0, 150, (1, 40))
    logits = []
    for each in (model, again):
        each.token_map.set(torch.arange(192) % 150)
        with torch.inference_mode():
            logits.append(each(ids).logits_BSV)
    assert torch.equal(*logits)
