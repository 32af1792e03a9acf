"""The manager over its tiers: pages that are on their way, broken, gone, pinned, from other machines (about 8 s).

No model runs here: pages hold bytes that follow from their key, and are compared byte by byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cedar.cache.keys import ImageSpan, cache_tokens
from cedar.cache.loading import LoadFailed
from cedar.cache.manager import CacheManager, Lease, Plan
from cedar.cache.shared import SharedStore
from cedar.cache.store import PageStore
from cedar.config.presets import nano
from cedar.errors import CapacityError, ConfigError
from cedar.planner.kv import page_bytes

CONFIG = nano()
PAGE = page_bytes(CONFIG)
Build = Callable[..., CacheManager]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    made: list[CacheManager] = []

    def make(
        *, disk: bool = True, shared: str = "", num_pages: int = 32, host: int = 0, folder: str = "disk", **more: Any
    ) -> CacheManager:
        about: dict[str, Any] = {"fingerprint": b"f", "payload_bytes": PAGE}
        store = PageStore(tmp_path / folder, budget_bytes=2**26, **about) if disk else None
        far = SharedStore(f"file://{tmp_path}/{shared}", **about) if shared else None
        host = host or (2**24 if shared else 0)
        manager = CacheManager(
            CONFIG, num_pages=num_pages, fingerprint=b"f", store=store, shared=far, host_bytes=host, **more
        )
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.close(keep_snapshots=False)
        manager.pool.check()


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(500) for _ in range(length))


def payload(tokens: Sequence[int], number: int) -> bytes:
    """What page `number` of a conversation holds here."""
    seed = hashlib.sha256(repr(tokens[: (number + 1) * 128]).encode()).digest()
    return (seed * (PAGE // 32 + 1))[:PAGE]


def plan(manager: CacheManager, tokens: Sequence[int], salt: bytes = b"", replay: Any = "bounded") -> Plan:
    return manager.plan(tokens, salt, replay=replay, decoder_replay="bounded", exact_span=lambda cached, _: (1, cached))


def begin(manager: CacheManager, tokens: Sequence[int], salt: bytes = b"") -> Lease:
    return manager.lease(tokens, salt, plan(manager, tokens, salt))


def converse(manager: CacheManager, tokens: Sequence[int], salt: bytes = b"") -> None:
    """A sequence that runs all tokens and leaves."""
    lease = begin(manager, tokens, salt)
    assert manager.reserve(lease, len(tokens), lease.plan.cached_tokens)
    if lease.loading is not None:
        lease.loading.wait()
    for number in range(lease.plan.cached_tokens // 128, -(-len(tokens) // 128)):
        page = lease.table.pages[number]
        manager.pool.write(page, payload(tokens, number))
    manager.publish_end(lease, tokens, None)
    manager.release(lease)


def flush(manager: CacheManager) -> None:
    for tier in (manager._store, manager._shared):
        assert tier is None or tier.flush()


def check(manager: CacheManager, lease: Lease, tokens: Sequence[int]) -> None:
    if lease.loading is not None:
        lease.loading.wait()
    assert len(lease.table.pages) == -(-lease.plan.cached_tokens // 128)
    for number, page in enumerate(lease.table.pages):
        assert manager.pool.read(page) == payload(tokens, number), number


def hold_sections(monkeypatch: pytest.MonkeyPatch, manager: CacheManager) -> Callable[[int], None]:
    """Every read of a part waits until the function is called for its number."""
    gates = {part: threading.Event() for part in range(16)}
    store = manager._store
    assert store is not None
    read = store.read_part

    def slowly(header: Any, listed: Any, part: int) -> bytes:
        assert gates[part].wait(10)
        return read(header, listed, part)

    monkeypatch.setattr(store, "read_part", slowly)
    return lambda part: gates[part].set()


@pytest.mark.parametrize("breaks", ["loading", "after it"])
def test_a_lease_that_fails_midway_gives_its_pages_back(
    build: Build, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    tokens = prompt(400)
    first = build()
    converse(first, tokens)
    flush(first)
    manager = build()
    before = manager.pool.num_free

    def fail(*_: object) -> None:
        raise RuntimeError("no more threads")

    assert manager._store is not None
    holder, name = (manager._loaders, "submit") if breaks == "loading" else (manager._store, "used")
    with monkeypatch.context() as patch:
        patch.setattr(holder, name, fail)
        with pytest.raises(RuntimeError, match="no more threads"):
            begin(manager, (*tokens, 1, 2))
    for loading, _ in manager._leaving:
        loading.settle()
    manager._reap()
    # what had come in whole by then is in the tree, which gives it back when asked
    manager.evict(before)
    assert manager.pool.num_free == before
    # and nothing is in the way of the next one
    assert begin(manager, (*tokens, 1, 2)).plan.tier == "disk"


def test_a_layer_waits_for_its_own_source_alone(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(400)
    first = build()
    converse(first, tokens)
    flush(first)
    manager = build()
    let = hold_sections(monkeypatch, manager)
    began = time.monotonic()
    lease = begin(manager, (*tokens, 1, 2))
    # the engine's thread read nothing
    assert time.monotonic() - began < 5 and (lease.plan.grade, lease.plan.tier) == ("g2", "disk")
    assert lease.plan.cached_tokens == 400 and lease.plan.held_tokens == 0 and lease.loading is not None
    make = manager.make_store(lease, 400)
    sources = list(manager.pool.layout.sections)
    rows = {source: make("entries", source) for source in sources}
    got: dict[int, torch.Tensor] = {}
    threads = []
    for source in sources:
        thread = threading.Thread(target=lambda source=source: got.update({source: rows[source].all()}))
        thread.start()
        threads.append(thread)
    for part, source in enumerate(sources):
        time.sleep(0.05)
        assert source not in got and not lease.loading.finished
        let(part)
        threads[part].join(10)
        assert set(got) == set(sources[: part + 1])
    check(manager, lease, tokens)
    assert manager.metrics.loaded_pages == 0
    # once all is there it is cache, for others too; the partial page stays the sequence's own
    manager.publish(lease, tokens)
    assert lease.loading is None and manager.metrics.loaded_pages == 4
    assert manager.cached_tokens(tokens, b"") == 384 and lease.published == 384
    assert manager.pool.references(lease.table.pages[-1]) == 1
    manager.release(lease)


def test_what_is_in_memory_is_not_read_again(build: Build) -> None:
    tokens, manager = prompt(1000), build(num_pages=9)
    converse(manager, tokens)
    flush(manager)
    # three pages of another conversation push out the last ones of the first
    converse(manager, prompt(300, 2))
    held = manager.cached_tokens(tokens, b"")
    assert 0 < held < 1000
    lease = begin(manager, (*tokens, 1, 2))
    assert lease.plan.held_tokens == held and lease.plan.cached_tokens == 1000
    assert len(lease.plan.found) == 8 - held // 128
    check(manager, lease, tokens)
    manager.release(lease)


@pytest.mark.parametrize("damage", ["flip", "vanish", "unreadable"])
def test_a_page_that_breaks_on_the_way_starts_the_sequence_again(
    build: Build, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report B20: the plan promised it. The next plan ends before it, and no wrong byte was served."""
    tokens = prompt(900)
    first = build()
    converse(first, tokens)
    flush(first)
    manager = build()
    store = manager._store
    assert store is not None
    lease = None
    planned = plan(manager, (*tokens, 1, 2))
    assert planned.cached_tokens == 900
    if damage == "unreadable":
        read = store.read_part

        def broken(header: Any, listed: Any, part: int) -> bytes:
            if listed.tokens[0] == tokens[3 * 128] and part == 1:
                raise OSError(5, "Input/output error")
            return read(header, listed, part)

        monkeypatch.setattr(store, "read_part", broken)
    else:
        (file,) = (f for f in tmp_path.glob("disk/*/w-*/*.seg") if f.stat().st_size)
        if damage == "vanish":
            file.unlink()
        else:
            content = bytearray(file.read_bytes())
            content[3 * store.record_bytes + 768 + PAGE - 5] ^= 8
            file.write_bytes(content)
    lease = manager.lease((*tokens, 1, 2), b"", planned)
    assert lease.loading is not None
    with pytest.raises(LoadFailed, match="could not be read"):
        lease.loading.wait(list(manager.pool.layout.sections)[-1])
    manager.publish(lease, tokens)
    assert lease.broken and manager.tree.num_nodes == 0
    manager.release(lease)
    assert manager.metrics.failed_loads == 1
    for _ in range(20):
        again = begin(manager, (*tokens, 1, 2))
        if again.loading is not None:
            again.loading.settle()
        if not again.broken:
            break
        manager.release(again)
    assert again.plan.cached_tokens == (0 if damage == "vanish" else 384)
    check(manager, again, tokens)
    manager.release(again)
    assert set(store.stats.failed) == {"checksum"} if damage == "flip" else {"io"}


def test_who_leaves_while_pages_come_frees_them_when_they_have(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(700)
    first = build()
    converse(first, tokens)
    flush(first)
    manager = build(num_pages=8)
    let = hold_sections(monkeypatch, manager)
    lease = begin(manager, (*tokens, 1, 2))
    manager.release(lease)
    assert manager.pool.num_free == 2 and manager.room() == 2
    for part in range(16):
        let(part)
    assert lease.loading is not None
    lease.loading.settle()
    assert manager.room() == 8


def test_a_full_memory_refuses_what_must_come(build: Build) -> None:
    tokens = prompt(900)
    first = build()
    converse(first, tokens)
    flush(first)
    manager = build(num_pages=4)
    with pytest.raises(CapacityError, match="must come into memory"):
        begin(manager, (*tokens, 1, 2))
    assert manager.pool.num_free == 4


def test_a_device_has_the_hosts_memory_below_it(build: Build) -> None:
    """On a CPU both are one, so the test says that they are not."""
    manager = build(disk=False, num_pages=6, host=20 * PAGE)
    manager._demotes = True
    chats = [prompt(500, seed) for seed in range(4)]
    for tokens in chats:
        converse(manager, tokens)
    assert manager.metrics.evicted_pages >= 8
    for tokens in chats:
        lease = begin(manager, (*tokens, 1, 2))
        assert lease.plan.cached_tokens == 500
        check(manager, lease, tokens)
        manager.publish(lease, tokens)
        manager.release(lease)
    assert manager.metrics.cached_tokens["host"] >= 1500 and manager.describe()["host_pages"]
    assert manager.purge() and plan(manager, chats[0]).cached_tokens == 0


def test_another_machine_finds_what_one_has_shared(build: Build) -> None:
    tokens = prompt(1700)
    one = build(shared="bucket", folder="one")
    converse(one, tokens)
    flush(one)
    two = build(shared="bucket", folder="two")
    asked = (*tokens, 1, 2)
    assert plan(two, asked).cached_tokens == 0
    coming = two.prefetch(asked, b"")
    assert coming is not None
    coming.result(30)
    lease = begin(two, asked)
    assert (lease.plan.cached_tokens, lease.plan.tier) == (1700, "shared")
    check(two, lease, tokens)
    two.release(lease)
    # it is on this machine's own disk from now on, and nobody asks the store again
    flush(two)
    three = build(folder="two")
    assert plan(three, asked).tier == "disk"
    assert two.prefetch(asked[:-1], b"") is None
    other = two.prefetch(asked, b"another tenant")
    assert other is not None
    other.result(30)
    assert plan(two, asked, b"another tenant").cached_tokens == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "store gone"])
def test_a_shared_page_that_is_not_what_was_written_is_a_miss(build: Build, tmp_path: Path, damage: str) -> None:
    tokens = prompt(600)
    one = build(disk=False, shared="bucket")
    converse(one, tokens)
    flush(one)
    objects = sorted((tmp_path / "bucket").rglob("*"), key=lambda file: (file.is_dir(), file.name))
    objects = [file for file in objects if file.is_file()]
    assert len(objects) == 5
    contents = [file.read_bytes() for file in objects]
    for number, file in enumerate(objects):
        if damage == "flip":
            file.write_bytes(contents[number][:1000] + bytes([contents[number][1000] ^ 1]) + contents[number][1001:])
        elif damage == "cut":
            file.write_bytes(contents[number][:900])
        elif damage == "swap":
            file.write_bytes(contents[number - 1])
    two = build(disk=False, shared="bucket")
    far = two._shared
    assert far is not None
    if damage == "store gone":

        class Gone:
            def __getattr__(self, name: str) -> Any:
                raise OSError(111, "Connection refused")

        far._api = Gone()
    coming = two.prefetch((*tokens, 1, 2), b"")
    assert coming is not None
    coming.result(30)
    assert plan(two, (*tokens, 1, 2)).cached_tokens == 0
    assert set(far.stats.failed) == {"io" if damage == "store gone" else "checksum"}


def test_a_store_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no object store"):
        SharedStore("nonsense://bucket", fingerprint=b"f", payload_bytes=PAGE)


def test_a_pinned_prefix_stays_in_memory_and_on_disk(build: Build) -> None:
    loved, manager = prompt(400), build(num_pages=12)
    converse(manager, loved)
    flush(manager)
    assert manager.pin((*loved, 7), b"") == 400
    for seed in range(2, 12):
        converse(manager, prompt(700, seed))
    assert manager.cached_tokens(loved, b"") == 400
    manager.purge()
    assert manager.cached_tokens(loved, b"") == 400 and manager.describe()["pinned_pages"] == 4
    store = manager._store
    assert store is not None
    flush(manager)
    assert store.purge() > 0 and store.describe()["pages"] == store.describe()["pinned_pages"] == 4
    # a restart knows it again
    fresh = build()
    lease = begin(fresh, (*loved, 1, 2))
    check(fresh, lease, loved)
    fresh.publish(lease, loved)
    fresh.release(lease)
    fresh.purge()
    assert fresh.cached_tokens(loved, b"") == 384
    assert manager.pin(loved, b"", False) == 400
    manager.purge()
    assert manager.cached_tokens(loved, b"") == 0 and store.purge() == 4


def test_not_more_than_half_may_be_pinned(build: Build) -> None:
    manager = build(num_pages=12, disk=False)
    converse(manager, prompt(500))
    assert manager.pin(prompt(500), b"") == 500
    converse(manager, prompt(500, 2))
    with pytest.raises(CapacityError, match="more than half"):
        manager.pin(prompt(500, 2), b"")
    assert manager.pin(prompt(500), b"") == 500


def test_images_are_told_apart_on_every_tier(build: Build) -> None:
    ids = (*prompt(200), *([511] * 60), *prompt(140, 2))

    def seen(name: bytes) -> tuple[int, ...]:
        span = ImageSpan(start=200, stop=260, digest=hashlib.sha256(name).digest(), grid=(6, 9))
        return cache_tokens(ids, [span])

    one = build(shared="bucket", folder="one")
    converse(one, seen(b"fox"))
    flush(one)
    two, three = build(folder="one"), build(shared="bucket", folder="three")
    coming = [three.prefetch(seen(name), b"") for name in (b"fox", b"key")]
    for future in coming:
        assert future is not None
        future.result(30)
    for manager in (one, two, three):
        assert plan(manager, (*seen(b"fox"), 1, 2)).cached_tokens == 400
        assert plan(manager, (*seen(b"key"), 1, 2)).cached_tokens == 200
        lease = begin(manager, (*seen(b"fox"), 1, 2))
        check(manager, lease, seen(b"fox"))
        manager.release(lease)


def test_explain_looks_at_the_disk_too(build: Build) -> None:
    tokens = prompt(600)
    first = build()
    converse(first, tokens)
    flush(first)
    manager = build()
    other = (*tokens[:300], 501, *tokens[301:])
    held, own, theirs = manager.explain(other, b"")
    assert held == 300 and own == other[284:316] and theirs == tokens[284:316]


def test_forgetting_everything_while_a_sequence_runs_loses_no_page(build: Build) -> None:
    """What it publishes afterwards has its beginning with it, or nobody could ever find and free it."""
    manager, tokens = build(disk=False, num_pages=8), prompt(700)
    lease = begin(manager, tokens)
    assert manager.reserve(lease, 700, 0)
    for number, page in enumerate(lease.table.pages):
        manager.pool.write(page, payload(tokens, number))
    manager.publish(lease, tokens[:300])
    assert manager.purge() == 2 and manager.cached_tokens(tokens, b"") == 0
    manager.publish_end(lease, tokens, None)
    manager.release(lease)
    assert manager.cached_tokens(tokens, b"") == 700
    manager.evict(8)
    assert manager.pool.num_free == 8


def test_pages_of_a_sequence_that_failed_are_not_found_again(build: Build) -> None:
    manager, tokens = build(), prompt(700)
    other = (*tokens[:300], *prompt(300, 2))
    converse(manager, tokens)
    converse(manager, other)
    flush(manager)
    lease = begin(manager, (*tokens, 1, 2))
    manager.distrust(lease, tokens)
    manager.release(lease)
    # the pages before the branch serve the other conversation, which works
    assert manager.cached_tokens(tokens, b"") == 300 and manager.cached_tokens(other, b"") == 600
    fresh = build()
    assert plan(fresh, (*tokens, 1, 2)).cached_tokens == 0
    assert manager._store is not None and manager._store.stats.failed == {"quarantine": 6}
    manager.evict(32)
    assert manager.pool.num_free == 32


@pytest.mark.gpu
def test_a_devices_pages_go_to_the_host_and_the_disk_and_come_back(build: Build) -> None:
    chats = [prompt(500, seed) for seed in range(4)]
    one = build(num_pages=6, host=20 * PAGE, device="cuda")
    for tokens in chats:
        converse(one, tokens)
    flush(one)
    two = build(num_pages=6, host=20 * PAGE, device="cuda")
    for manager, tier in ((one, "host"), (two, "disk")):
        for tokens in chats:
            lease = begin(manager, (*tokens, 1, 2))
            assert lease.plan.cached_tokens == 500
            check(manager, lease, tokens)
            manager.publish(lease, tokens)
            manager.release(lease)
        assert manager.metrics.cached_tokens[tier] >= 1500


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_with_faults_serve_no_wrong_byte_and_lose_no_page(
    build: Build, tmp_path: Path, seed: int
) -> None:
    """Turns, cancels, evictions, purges, pins, restarts and prefetches over three tiers whose files break meanwhile."""
    draw = random.Random(seed)
    options: dict[str, Any] = {"num_pages": 14, "shared": "bucket"}
    manager = build(**options)
    manager._demotes = True
    chats: list[tuple[int, ...]] = [prompt(draw.randrange(200, 900), number) for number in range(4)]
    held: list[tuple[Lease, tuple[int, ...]]] = []
    seen: set[str] = set()

    def turn() -> None:
        number = draw.randrange(len(chats))
        kept, added = chats[number][: draw.randrange(100, 1100)], prompt(draw.randrange(2, 200), draw.randrange(9))
        tokens = chats[number] = (*kept, *added)
        lease = begin_anyhow(tokens)
        if lease is None:
            return
        first = lease.plan.cached_tokens
        stop = draw.randrange(first, len(tokens)) // 2 * 2 if draw.random() < 0.3 else len(tokens)
        if not manager.reserve(lease, max(stop, first), first):
            manager.release(lease)
            return
        for place in range(first // 128, -(-max(stop, first) // 128)):
            # a page that is adopted in part is written again, as the rows after the hit are
            if stop > first:
                manager.pool.write(lease.table.pages[place], payload(tokens, place))
        manager.publish(lease, tokens[: max(stop, first)])
        if stop == len(tokens) and draw.random() < 0.7:
            manager.publish_end(lease, tokens, None)
        held.append((lease, tokens))

    def begin_anyhow(tokens: tuple[int, ...]) -> Lease | None:
        for _ in range(60):
            try:
                lease = begin(manager, tokens)
            except CapacityError:
                return None
            try:
                if draw.random() < 0.1:
                    manager.release(lease)
                    continue
                if lease.loading is not None:
                    lease.loading.wait()
            except LoadFailed:
                manager.release(lease)
                seen.add("failed load")
                continue
            seen.add(lease.plan.tier)
            for place in range(lease.plan.cached_tokens // 128):
                assert manager.pool.read(lease.table.pages[place]) == payload(tokens, place), (seed, place)
            return lease
        raise AssertionError("a sequence starts again for ever")

    def let_go() -> None:
        while len(held) > draw.randrange(3):
            lease, tokens = held.pop(draw.randrange(len(held)))
            if draw.random() < 0.05:
                manager.distrust(lease, tokens)
            manager.release(lease)

    def damage() -> None:
        flush(manager)
        found = (file for name in ("disk/*/w-*/*.seg", "bucket/**/*") for file in tmp_path.glob(name))
        files = sorted(file for file in found if file.is_file())
        for file in draw.sample(files, min(len(files), 2)):
            content = bytearray(file.read_bytes())
            if not content or draw.random() < 0.1:
                file.unlink()
                continue
            for _ in range(4):
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            with file.open("r+b") as opened:
                opened.write(content)

    def restart() -> None:
        nonlocal manager
        for lease, _ in held:
            manager.release(lease)
        held.clear()
        whole(manager)
        flush(manager)
        manager = build(**options)
        manager._demotes = True

    def whole(manager: CacheManager) -> None:
        for loading, _ in manager._leaving:
            loading.settle()
        manager.room()
        assert manager.pool.num_free + manager.tree.num_nodes == 14
        manager.pool.check()

    def fetch() -> None:
        coming = manager.prefetch((*draw.choice(chats), 1, 2), b"")
        if coming is not None:
            coming.result(30)

    def pin() -> None:
        with contextlib.suppress(CapacityError):
            manager.pin(draw.choice(chats), b"", draw.random() < 0.4)

    def evict() -> None:
        manager.evict(draw.randrange(8))

    actions = [*[turn] * 12, *[let_go] * 8, fetch, pin, damage, damage, evict]
    for step in range(220):
        if step % 45 == 44:
            restart()
        elif draw.random() < 0.03:
            manager.purge()
        else:
            draw.choice(actions)()
    restart()
    assert {"memory", "disk", "host"} <= seen
