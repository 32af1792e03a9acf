"""What the report and serving.md say a conversation costs, pinned."""

from __future__ import annotations

import pytest

from cedar.config import presets
from cedar.errors import CapacityError
from cedar.planner import kv
from cedar.planner.peers import v1, v3_2, v4_flash


def test_flash_keeps_890_bytes_per_token() -> None:
    flash = presets.flash()
    assert kv.global_bytes_per_token(flash) == 890
    assert (kv.entry_bytes(flash), kv.index_key_bytes(flash), kv.window_row_bytes(flash)) == (288, 68, 528)
    # 1M tokens are 890 MiB
    assert kv.global_bytes_per_token(flash) * 2**20 == 890 * 2**20


def test_older_models_keep_more() -> None:
    assert v4_flash().bytes_per_token == 3514.25
    assert v3_2().bytes_per_token == 48_068
    assert v1().bytes_per_token == 389_120
    ours = kv.global_bytes_per_token(presets.flash())
    assert round(v1().bytes_per_token / ours) == 437


def test_flash_page_and_state_bytes() -> None:
    flash = presets.flash()
    assert kv.page_bytes(flash) == 113_920 == 128 * 890
    assert kv.disk_page_bytes(flash) == 114_688 == 28 * 4096
    assert kv.snapshot_bytes(flash) == 3_108_864
    assert kv.encoder_snapshot_bytes(flash) == 1_351_680
    assert kv.resident_bytes(flash) == 3_388_416
    assert kv.tail_row_bytes(flash) == 4096
    assert kv.draft_row_bytes(flash) == 1024


@pytest.mark.parametrize(
    ("name", "per_token", "window_row"),
    [("nano", 52.5, 33), ("micro", 106, 66), ("mini", 106, 66), ("small", 212, 132), ("flash", 890, 528)],
)
def test_preset_bytes(name: str, per_token: float, window_row: int) -> None:
    config = presets.preset(name)
    assert kv.global_bytes_per_token(config) == per_token
    assert kv.window_row_bytes(config) == window_row
    assert kv.page_bytes(config) == 128 * per_token


def test_a_model_without_draft_keeps_no_draft_rows() -> None:
    micro = presets.micro()
    rows = 16 * 12 * 66
    tails = 2 * 2 * 64 * 4
    assert kv.snapshot_bytes(micro) == rows + tails


def test_tiers_count_whole_pages() -> None:
    device, host, disk = kv.tiers(presets.flash())
    assert device.total_bytes(0) == 3_388_416
    assert host.total_bytes(1) == 113_920 + 3_108_864
    assert disk.total_bytes(128) == 114_688
    assert disk.total_bytes(129) == 2 * 114_688
    assert disk.bytes_per_token == 896


def test_a_negative_context_is_refused() -> None:
    with pytest.raises(CapacityError, match="-1 tokens"):
        kv.num_pages(-1)
