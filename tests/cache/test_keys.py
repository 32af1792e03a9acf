"""Keys of prompts with images: equal ids of different images share nothing (about 1 s)."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.cache.keys import ImageSpan, cache_tokens, child_key, packed, root_key, squeezed, unsqueezed
from cedar.cache.layout import PageLayout
from cedar.cache.pages import PagePool
from cedar.cache.prefix import PrefixTree
from cedar.cache.snapshots import snapshot_keys
from cedar.cache.store import PageStore, Record
from cedar.config.presets import nano
from cedar.errors import FormatError

IMAGE = 511
ROOT = root_key(b"model", b"")


def image(name: bytes, start: int, stop: int, grid: tuple[int, int] = (4, 5)) -> ImageSpan:
    return ImageSpan(start=start, stop=stop, digest=hashlib.sha256(name).digest(), grid=grid)


def prompt(length: int = 300) -> list[int]:
    draw = random.Random(1)
    return [draw.randrange(500) for _ in range(100)] + [IMAGE] * 50 + [draw.randrange(500) for _ in range(length - 150)]


def test_only_the_images_positions_change() -> None:
    ids = prompt()
    tokens = cache_tokens(ids, [image(b"fox", 100, 150)])
    assert [token % 2**32 for token in tokens] == ids
    assert [place for place, token in enumerate(tokens) if token >= 2**32] == list(range(100, 150))
    assert cache_tokens(ids) == tuple(ids)


@pytest.mark.parametrize(
    "other",
    [
        [image(b"key", 100, 150)],
        [image(b"fox", 100, 150, (5, 4))],
        [image(b"fox", 100, 120), image(b"key", 120, 150)],
        [],
    ],
    ids=["another image", "another grid", "two images", "none"],
)
def test_different_images_share_pages_up_to_the_first_only(other: list[ImageSpan]) -> None:
    ids = prompt()
    one, two = cache_tokens(ids, [image(b"fox", 100, 150)]), cache_tokens(ids, other)
    pool = PagePool(PageLayout(nano()), 8)
    tree = PrefixTree(pool, b"model")
    node = tree.root(b"")
    for start in (0, 128):
        node, _ = tree.insert(node, one[start : start + 128], pool.take(), 0)
    assert sum(length for _, length in tree.match(one, b"")) == 256
    assert sum(length for _, length in tree.match(two, b"")) == 100
    assert child_key(ROOT, one[:128]) != child_key(ROOT, two[:128])
    lengths = [100, 128, 256]
    keys, others = snapshot_keys(ROOT, one, lengths), snapshot_keys(ROOT, two, lengths)
    assert [keys[length] == others[length] for length in lengths] == [True, False, False]


def test_images_survive_the_disk(tmp_path: Path) -> None:
    """A page that begins like another but for its image is told apart from the index alone."""
    ids = prompt()
    store = PageStore(tmp_path, fingerprint=b"f", payload_bytes=5000, budget_bytes=2**26)
    for name in (b"fox", b"key"):
        tokens = cache_tokens(ids, [image(name, 100, 150)])
        key = child_key(ROOT, tokens[:128])
        store.put(Record(key, ROOT, tokens[:128], 0, name * 1666 + b"xx"))
        store.put(Record(child_key(key, tokens[128:160]), key, tokens[128:160], 0, bytes(5000)))
    assert store.flush()
    for name in (b"fox", b"key"):
        tokens = cache_tokens(ids, [image(name, 100, 150)])
        record = store.get(child_key(ROOT, tokens[:128]))
        assert record is not None and record.payload[:3] == name and record.tokens == tokens[:128]
        child = store.get_child(record.key, tokens[128:])
        assert child is not None and child.tokens == tokens[128:160]
        assert store.pin_prompt(ROOT, tokens) == 160
    assert store.pin_prompt(ROOT, cache_tokens(ids, [image(b"owl", 100, 150)])) == 100
    assert store.verify() == (4, 0)
    # a page of nothing but images does not swell the index
    assert len(squeezed(cache_tokens([IMAGE] * 128, [image(b"fox", 0, 128)]))) < 128
    store.close()


wide = st.builds(lambda image, low: image << 32 | low, st.integers(1, 2**128 - 1), st.integers(0, 2**31))
plain = st.integers(0, 2**31)


@given(tokens=st.lists(plain | wide, max_size=128).map(tuple))
def test_an_index_row_gives_back_its_tokens(tokens: tuple[int, ...]) -> None:
    assert unsqueezed(squeezed(tokens)) == tokens


@given(one=st.lists(plain | wide, max_size=6), other=st.lists(plain | wide, max_size=6))
def test_no_two_prompts_have_the_same_bytes(one: list[int], other: list[int]) -> None:
    assert (packed(one) == packed(other)) == (one == other)


@pytest.mark.parametrize("row", [b"\xfe\xff\xff\xffnonsense", b"abc"])
def test_what_is_no_row_of_tokens_is_refused(row: bytes) -> None:
    with pytest.raises(FormatError):
        unsqueezed(row)
