"""Memory tables on disk: the same rows and logits as in memory, whatever the cache (about 6 s)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cedar.checkpoint.read import read_checkpoint
from cedar.checkpoint.write import write_checkpoint
from cedar.errors import CapacityError, FormatError
from cedar.model.rows import DiskTable, Plane

NUM_ROWS, CHANNELS, SCALES = 5000, 64, 2
WHOLE = 8 * (CHANNELS + SCALES + 16)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (NUM_ROWS, CHANNELS), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (NUM_ROWS, SCALES), dtype=torch.uint8, generator=generator)
    file = tmp_path_factory.mktemp("table") / "shard"
    file.write_bytes(b"head" + codes.numpy().tobytes() + b"gap" + scales.numpy().tobytes())
    return file, codes, scales


def open_table(file: Path, cache_bytes: int) -> DiskTable:
    second = 4 + NUM_ROWS * CHANNELS + 3
    return DiskTable(Plane(file, 4, CHANNELS), Plane(file, second, SCALES), NUM_ROWS, cache_bytes=cache_bytes)


@pytest.fixture(params=[WHOLE, 20 * WHOLE, 10**7], ids=["one set", "some sets", "all rows"])
def disk(request: Any, table: tuple[Path, Tensor, Tensor]) -> Iterator[DiskTable]:
    opened = open_table(table[0], request.param)
    assert opened.cache_bytes <= request.param
    yield opened
    opened.close()


def same(disk: DiskTable, table: tuple[Path, Tensor, Tensor], row_N: Tensor) -> None:
    codes, scales = disk.get(row_N)
    assert torch.equal(codes, table[1][row_N]) and torch.equal(scales, table[2][row_N])


def test_rows_are_those_of_the_table(disk: DiskTable, table: tuple[Path, Tensor, Tensor]) -> None:
    for number in range(40):
        # few rows often, and many at once
        row_N = torch.randint(0, [NUM_ROWS, 50][number % 2], ([3, 700, 1][number % 3],))
        if number % 4 == 0:
            disk.prefetch(row_N)
        same(disk, table, row_N)
    same(disk, table, torch.tensor([0, NUM_ROWS - 1, 0]))
    planes = list(disk.stored())
    whole = torch.cat([plane.flatten() for plane in planes])
    assert torch.equal(whole, torch.cat([table[1].flatten(), table[2].flatten()]))


def test_each_row_is_read_once_and_neighbours_together(table: tuple[Path, Tensor, Tensor]) -> None:
    """Field report F06."""
    disk = open_table(table[0], 10**7)
    row_N = torch.cat([torch.arange(100, 200), torch.arange(100, 200), torch.tensor([4000])])
    same(disk, table, row_N)
    assert (disk.stats.read, disk.stats.cached) == (101, 0)
    # two places of codes; the scales are near enough to each other for no more
    assert disk.stats.calls <= 4
    same(disk, table, row_N)
    assert (disk.stats.read, disk.stats.cached) == (101, 101)
    disk.close()


def test_rows_read_ahead_are_not_read_again(
    table: tuple[Path, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = open_table(table[0], 10**7)
    row_N, read = torch.arange(0, 4000, 7), disk._read
    began = threading.Event()

    def slowly(rows: Any) -> Any:
        began.set()
        time.sleep(0.2)
        return read(rows)

    monkeypatch.setattr(disk, "_read", slowly)
    disk.prefetch(row_N)
    assert began.wait(5)
    same(disk, table, row_N[:100])
    same(disk, table, row_N)
    assert disk.stats.read == len(row_N) and disk.stats.cached == len(row_N) + 100
    disk.close()


def test_many_threads_get_their_rows(table: tuple[Path, Tensor, Tensor]) -> None:
    disk = open_table(table[0], 30 * WHOLE)
    wrong: list[Exception | AssertionError] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(20):
                row_N = torch.randint(0, NUM_ROWS, (60,), generator=generator)
                disk.prefetch(row_N.flip(0))
                same(disk, table, row_N)
        except (Exception, AssertionError) as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    rows = disk._row_GW[disk._row_GW >= 0]
    assert len(rows) == len(set(rows.tolist())), "a row is cached twice"
    disk.close()


def test_a_cut_file_is_told(tmp_path: Path, table: tuple[Path, Tensor, Tensor]) -> None:
    file = tmp_path / "shard"
    file.write_bytes(table[0].read_bytes()[: 4 + 100 * CHANNELS])
    disk = open_table(file, 10**6)
    disk.prefetch(torch.tensor([400]))
    with pytest.raises(FormatError, match="ended inside"):
        disk.get(torch.tensor([400]))
    disk.close()
    with pytest.raises(CapacityError, match="holds no set"):
        open_table(file, 100)
    with pytest.raises(FormatError, match="cannot read"):
        open_table(tmp_path / "nothing", 10**6)


def test_three_placements_are_one_model(model_dir: Path, tmp_path: Path) -> None:
    """Bit for bit: prompts in chunks, decoding, read ahead or not, and what is written from it."""
    ids_T = torch.randint(0, 300, (90,))
    told = []
    for place in ("memory", "mapped", "disk"):
        # a cache of some hundred rows, far fewer than the prompt asks for
        model = read_checkpoint(model_dir, engram=place, engram_cache_bytes=100_000)  # type: ignore[arg-type]
        state = model.new_state()
        rows = []
        for start, stop in ((0, 40), (40, 71), (71, 80)):
            model.prefetch(ids_T[max(stop - 2, 0) : stop + 20].tolist())
            rows.append(model.prefill(state, ids_T[start:stop], prompt_tokens=80))
        rows += [model.decode(state, ids_T[place : place + 1]) for place in range(80, 90)]
        told.append(torch.cat(rows))
        written = tmp_path / place
        write_checkpoint(model, written)
        stats = model.memory_stats()
        assert (stats["read_rows"] > 0) == (place == "disk") and stats["cache_bytes"] <= 100_000
    assert torch.equal(told[0], told[1]) and torch.equal(told[0], told[2])
    files = sorted(file.name for file in (tmp_path / "memory").glob("*.safetensors"))
    assert files
    for name in files:
        one = (tmp_path / "memory" / name).read_bytes()
        assert one == (tmp_path / "mapped" / name).read_bytes() == (tmp_path / "disk" / name).read_bytes()
