"""Pages: counts, copies, what a sequence reads back through them (about 2 s)."""

from __future__ import annotations

import random

import pytest
import torch

from cedar.cache.layout import PageLayout
from cedar.cache.pages import PagePool, PageTable
from cedar.cache.view import PagedRows
from cedar.config.presets import PRESETS, flash, nano
from cedar.errors import CapacityError
from cedar.formats.spec import FP4_MAIN
from cedar.model.sequence import RowStore
from cedar.planner import kv


@pytest.mark.parametrize("name", PRESETS)
def test_a_page_has_the_planners_size_and_no_gap(name: str) -> None:
    config = PRESETS[name]()
    layout = PageLayout(config)
    assert layout.page_bytes == kv.page_bytes(config)
    fields = sorted((f for rows in layout.rows.values() for f in (rows.codes, rows.scales)), key=lambda f: f.offset)
    stop = 0
    for field in fields:
        assert field.offset == stop
        stop += field.num_rows * field.row_bytes
    assert stop == layout.page_bytes
    assert sum(layout.sections.values()) == stop
    if name == "flash":
        assert list(layout.sections.values()) == [22_784] * 3 + [45_568]
        assert stop == 113_920 and stop / 128 == kv.global_bytes_per_token(flash())


def test_paged_rows_are_those_of_a_buffer() -> None:
    """Every row of every source, at both ends of pages, in any order of appends; other sources stay untouched."""
    config, draw = nano(), random.Random(1)
    pool = PagePool(PageLayout(config), 8)
    table, other = PageTable(pool), PageTable(pool)
    other.reserve(1, 0)
    table.reserve(700, 0)
    for source in config.attention.kv_source_layer_ids:
        paged = PagedRows(table, "entries", source, count=0, dtype=torch.float32)
        plain = RowStore(config.attention.head_dim, FP4_MAIN, torch.float32, torch.device("cpu"))
        limit = 700 // config.attention.compress_ratios[source]
        while plain.count < limit:
            rows = torch.randn(min(draw.choice([1, 2, 63, 130]), limit - plain.count), config.attention.head_dim)
            paged.append(rows)
            plain.append(rows)
            assert torch.equal(paged.all(), plain.all())
        index = torch.tensor([[0, limit - 1, -1], [63 % limit, 64 % limit, 127 % limit]])
        assert torch.equal(paged.gather(index), plain.gather(index))
        assert paged.vector_bytes() == plain.vector_bytes()
    assert not any(pool.read(other.pages[0]))


def test_appending_needs_room() -> None:
    config = nano()
    table = PageTable(PagePool(PageLayout(config), 2))
    source = config.attention.kv_source_layer_ids[-1]
    rows = PagedRows(table, "keys", source, count=0, dtype=torch.float32)
    with pytest.raises(CapacityError, match="do not fit"):
        rows.append(torch.randn(1, config.indexer.head_dim))


def test_a_shared_page_is_copied_before_a_write() -> None:
    pool = PagePool(PageLayout(nano()), 4)
    one = PageTable(pool)
    one.reserve(200, 0)
    pool.write(one.pages[1], bytes([7]) * pool.layout.page_bytes)
    two = one.fork()
    assert two.missing(210, 200) == 1
    two.reserve(210, 200)
    assert two.pages[0] == one.pages[0] and two.pages[1] != one.pages[1]
    assert pool.read(two.pages[1]) == pool.read(one.pages[1]) == bytes([7]) * pool.layout.page_bytes
    assert (pool.references(one.pages[0]), pool.references(one.pages[1])) == (2, 1)
    with pytest.raises(CapacityError, match="pages are needed"):
        two.reserve(128 * 4, 210)
    one.close()
    two.close()
    assert pool.num_free == 4
    pool.check()


def test_random_holders_never_lose_a_page() -> None:
    pool, draw, tables = PagePool(PageLayout(nano()), 10), random.Random(3), []
    for _ in range(2000):
        action = draw.randrange(3)
        if action == 0:
            tables.append(PageTable(pool))
        elif tables and action == 1:
            table = draw.choice(tables)
            try:
                table.reserve(draw.randrange(1, 500), draw.randrange(0, 500))
            except CapacityError:
                tables.remove(table)
                table.close()
        elif tables:
            tables.append(draw.choice(tables).fork())
        if len(tables) > 6:
            tables.pop(draw.randrange(len(tables))).close()
        pool.check()
    for table in tables:
        table.close()
    assert pool.num_free == 10


def test_a_page_comes_clean() -> None:
    """What another conversation left must not reach a disk record."""
    pool = PagePool(PageLayout(nano()), 1)
    page = pool.take()
    pool.write(page, bytes([255]) * pool.layout.page_bytes)
    pool.release(page)
    assert not any(pool.read(pool.take()))
