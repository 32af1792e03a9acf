"""Parameter counts and bytes: the release's exactly, the presets' against the table they were chosen from."""

from __future__ import annotations

from collections import Counter

import pytest

from cedar.config import presets
from cedar.planner import memory


def test_flash_parameters() -> None:
    flash = presets.flash()
    parts = memory.parameters_by_part(flash)
    assert parts["routed experts"] == 543_581_798_400
    assert parts["embedding"] == parts["head"] == 661_913_600
    assert parts["engram projection"] == 314_654_720
    assert memory.backbone_parameters(flash) == 551_566_180_464
    assert memory.engram_parameters(flash) == 196_613_849_600
    # the layers without routed experts, and so without the final norm
    layers = memory.backbone_parameters(flash) - parts["routed experts"] - 2 * parts["head"] - 5120
    assert layers == 6_660_549_744
    assert parts["draft"] / 1e9 == pytest.approx(14.225, abs=1e-3)
    assert parts["vision"] / 1e9 == pytest.approx(0.485, abs=1e-3)
    assert sum(parts.values()) / 1e9 == pytest.approx(763.205, abs=1e-3)


def test_flash_active_parameters() -> None:
    flash = presets.flash()
    decode = memory.active_decode_parameters(flash)
    assert memory.active_prefill_parameters(flash) / 1e9 == pytest.approx(7.893, abs=5e-4)
    assert decode / 1e9 == pytest.approx(15.469, abs=5e-4)
    assert (decode + memory.parameters_by_part(flash)["head"]) / 1e9 == pytest.approx(16.131, abs=5e-4)


def test_flash_bytes_on_disk_equal_the_release_to_the_byte() -> None:
    flash = presets.flash()
    assert memory.checkpoint_bytes(flash) == 510_286_023_000
    by_storage: Counter[str] = Counter()
    for tensor in memory.tensors(flash):
        by_storage[tensor.storage] += tensor.values
    assert 2 * by_storage["bf16"] == 3_952_883_712
    assert 4 * by_storage["f32"] == 169_229_128
    assert by_storage["fp8"] + by_storage["fp8_rows"] == 204_015_223_296
    assert by_storage["fp4"] // 2 == 278_585_671_680


# totals, Engram tables, active in decode (head included) and prefill in millions; megabytes on disk
@pytest.mark.parametrize(
    ("name", "total", "tables", "decode", "prefill", "disk"),
    [
        ("nano", 3.279760, 0.538432, 1.496016, 0.877800, 3.311954),
        ("micro", 9.988088, 1.055168, 4.345240, 2.306748, 8.779398),
        ("mini", 27.486272, 3.218752, 11.946496, 6.195504, 23.781098),
        ("small", 129.690144, 25.241728, 45.727648, 22.769712, 104.535620),
    ],
)
def test_preset_parameters(name: str, total: float, tables: float, decode: float, prefill: float, disk: float) -> None:
    config = presets.preset(name)
    head = config.vocab_size * config.hidden_size
    assert memory.text_parameters(config) == round(total * 1e6)
    assert memory.engram_parameters(config) == round(tables * 1e6)
    assert memory.active_decode_parameters(config) + head == round(decode * 1e6)
    assert memory.active_prefill_parameters(config) == round(prefill * 1e6)
    assert memory.checkpoint_bytes(config) == round(disk * 1e6)


def test_weights_grow_with_their_form_and_tables_do_not() -> None:
    release, bf16, f32 = memory.weight_bytes(presets.micro())
    assert release.dense < bf16.dense < f32.dense == 2 * bf16.dense
    assert release.engram_tables == bf16.engram_tables == f32.engram_tables == 1_055_168 * 33 // 32
    dense = memory.text_parameters(presets.micro()) - memory.engram_parameters(presets.micro())
    assert f32.dense == 4 * dense


def test_training_memory_is_shared_by_the_ranks() -> None:
    micro = presets.micro()
    alone = memory.training_bytes(micro, tokens=4096)
    pair = memory.training_bytes(micro, tokens=4096, ranks=2)
    assert alone.weights == alone.gradients == 4 * memory.text_parameters(micro)
    # one momentum for what Muon and Sinkhorn train, two moments for the little that AdamW does
    assert alone.weights < alone.optimizer < 1.02 * alone.weights
    assert pair.weights * 2 == alone.weights
    assert pair.activations == alone.activations
    assert alone.total == alone.weights + alone.gradients + alone.optimizer + alone.activations
