"""The prefix tree against a list of all that was ever inserted (about 3 s)."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.cache.keys import common_length
from cedar.cache.layout import PageLayout
from cedar.cache.pages import PagePool
from cedar.cache.prefix import HALF_LIFE_S, PrefixTree
from cedar.config.presets import nano

LAYOUT = PageLayout(nano())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def insert(tree: PrefixTree, tokens: list[int], salt: bytes = b"", lineage: int = 0) -> None:
    node = tree.root(salt)
    for start in range(0, len(tokens), 128):
        if tree.pool.num_free == 0:
            tree.evict(1, {node})
        page = tree.pool.take()
        node, _ = tree.insert(node, tokens[start : start + 128], page, lineage)
        tree.pool.release(page)


def found(tree: PrefixTree, tokens: list[int], salt: bytes = b"", **options: int) -> int:
    return sum(length for _, length in tree.match(tokens, salt, **options))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**20))
def test_a_lookup_finds_the_longest_beginning(seed: int) -> None:
    draw = random.Random(seed)
    tree = PrefixTree(PagePool(LAYOUT, 200), b"")
    known: list[list[int]] = []
    for _ in range(12):
        # branches of earlier ones, cut anywhere
        base = draw.choice(known)[: draw.randrange(400)] if known and draw.random() < 0.7 else []
        tokens = base + [draw.randrange(3) for _ in range(draw.randrange(1, 300))]
        asked = tokens[: draw.randrange(1, len(tokens) + 1)]
        best = max((common_length(old, asked) for old in known), default=0)
        # a page that another extends may have made way, but never for less
        assert found(tree, asked) == best
        insert(tree, tokens)
        known.append(tokens)
        assert found(tree, tokens) == len(tokens)
    tree.pool.check()
    assert tree.num_nodes == 200 - tree.pool.num_free
    assert tree.clear() > 0
    assert tree.pool.num_free == 200


def test_tenants_do_not_meet() -> None:
    tree = PrefixTree(PagePool(LAYOUT, 20), b"")
    insert(tree, list(range(300)), b"one")
    assert found(tree, list(range(300)), b"two") == 0 and found(tree, list(range(300)), b"one") == 300


def test_the_page_that_saves_least_leaves_first() -> None:
    clock = Clock()
    tree = PrefixTree(PagePool(LAYOUT, 4), b"", clock)
    insert(tree, [1] * 128)
    insert(tree, [2] * 128)
    insert(tree, [3] * 10)
    for _ in range(3):
        found(tree, [1] * 128)
    assert tree.evict(1, ()) == 1 and found(tree, [3] * 10, touch=False) == 0
    # hits of long ago count less than one of now
    clock.now = 10 * HALF_LIFE_S
    found(tree, [2] * 128)
    assert tree.evict(1, ()) == 1 and found(tree, [1] * 128, touch=False) == 0


def test_parents_stay_longer_than_children_and_held_pages_stay() -> None:
    tree = PrefixTree(PagePool(LAYOUT, 6), b"")
    insert(tree, list(range(128 * 3)))
    path = tree.match(list(range(128 * 3)), b"")
    held = tree.pool.share(path[1][0].page)
    assert tree.evict(6, ()) == 1
    assert found(tree, list(range(128 * 3))) == 256
    tree.pool.release(held)
    path[0][0].pinned = True
    assert tree.evict(6, ()) == 1
    assert tree.evict(6, {path[0][0]}) == 0


def test_lineage_is_asked_for_and_improves() -> None:
    tree = PrefixTree(PagePool(LAYOUT, 6), b"")
    insert(tree, [5] * 140, lineage=2)
    assert found(tree, [5] * 140) == 140 and found(tree, [5] * 140, lineage_limit=0) == 0
    insert(tree, [5] * 140, lineage=0)
    assert found(tree, [5] * 140, lineage_limit=0) == 140
    # the first writer of equal bytes stays
    nodes = tree.num_nodes
    insert(tree, [5] * 140, lineage=1)
    assert tree.num_nodes == nodes


def test_a_longer_part_replaces_a_shorter_one() -> None:
    tree = PrefixTree(PagePool(LAYOUT, 6), b"")
    for length in (10, 20, 60, 128):
        insert(tree, list(range(length)))
    assert tree.num_nodes == 1
    insert(tree, list(range(40)))
    assert tree.num_nodes == 1
