"""The disk tier: kills, torn and flipped bytes, full disks, two processes, budgets (about 40 s)."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cedar.cache.store import Listed, PageStore, Record, pack_record, unpack_record
from cedar.config.presets import flash
from cedar.errors import CapacityError, FormatError
from cedar.planner import kv
from tests.cache import store_writer as writer


def put_all(store: PageStore, records: list[Record]) -> None:
    for record in records:
        assert store.put(record)
    assert store.flush()


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/w-*/*.seg"))


def test_what_is_put_comes_back_after_a_restart(tmp_path: Path) -> None:
    records = writer.chain(1, 30)
    store = writer.open_store(tmp_path)
    put_all(store, records)
    assert [store.get(record.key) for record in records] == records
    store.close()
    for _ in range(2):
        # field report B16: a second resume works like the first
        store = writer.open_store(tmp_path)
        assert [store.get(record.key) for record in records] == records
        assert store.get_child(records[3].key, records[4].tokens[:50]).tokens == records[4].tokens
        assert store.stats.failed == {}
        store.close()


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    store = writer.open_store(tmp_path / "tier")
    put_all(store, writer.chain(1, 3))
    for path in (tmp_path / "tier").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 or path.parent == tmp_path / "tier", path
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    store.close()


def test_any_flipped_bit_is_a_miss() -> None:
    record = writer.chain(2, 1)[0]
    packed = pack_record(record, 6144, (3000, 2000))
    assert unpack_record(packed, writer.PAYLOAD_BYTES) == record
    draw = random.Random(3)
    used = [*range(620), *range(768, 768 + writer.PAYLOAD_BYTES)]
    for place in draw.sample(used, 300):
        flipped = bytearray(packed)
        flipped[place] ^= 1 << draw.randrange(8)
        with pytest.raises(FormatError):
            unpack_record(bytes(flipped), writer.PAYLOAD_BYTES)
    for length in (0, 100, 700, 3000):
        with pytest.raises(FormatError):
            unpack_record(packed[:length], writer.PAYLOAD_BYTES)


@pytest.mark.parametrize("damage", ["flip", "truncate", "vanish", "swap"])
def test_damage_is_a_miss_with_its_cause(tmp_path: Path, damage: str) -> None:
    records = writer.chain(3, 8)
    store = writer.open_store(tmp_path)
    put_all(store, records)
    (file,) = segments(tmp_path)
    size = store.record_bytes
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[2 * size + 900] ^= 4
    elif damage == "truncate":
        del content[2 * size + 1000 :]
    elif damage == "swap":
        # whole, valid records, in each other's place
        content[2 * size : 3 * size], content[5 * size : 6 * size] = (
            content[5 * size : 6 * size],
            content[2 * size : 3 * size],
        )
    file.write_bytes(content)
    if damage == "vanish":
        file.unlink()
    got = [store.get(record.key) for record in records]
    assert all(one is None or one == record for one, record in zip(got, records, strict=True))
    lost = {"flip": {2}, "truncate": set(range(2, 8)), "vanish": set(range(8)), "swap": {2, 5}}[damage]
    assert {place for place, one in enumerate(got) if one is None} == lost
    assert sum(store.stats.failed.values()) == len(lost)
    # a contradiction is dropped, and the page can be written again (field report B15)
    put_all(store, records)
    if damage != "vanish":
        assert [store.get(record.key) for record in records] == records
    store.close()


def test_a_broken_index_starts_anew(tmp_path: Path) -> None:
    store = writer.open_store(tmp_path)
    put_all(store, writer.chain(4, 4))
    store.close()
    (index,) = tmp_path.glob("*/index.sqlite")
    index.write_bytes(b"not a database, certainly not one" * 100)
    store = writer.open_store(tmp_path)
    assert store.get(writer.chain(4, 1)[0].key) is None
    put_all(store, writer.chain(4, 4))
    assert store.get(writer.chain(4, 1)[0].key) is not None
    store.close()


def test_another_format_is_refused(tmp_path: Path) -> None:
    writer.open_store(tmp_path).close()
    (file,) = tmp_path.glob("*/FORMAT")
    file.write_text("{}")
    with pytest.raises(FormatError, match="remove the directory"):
        writer.open_store(tmp_path)
    with pytest.raises(CapacityError, match="holds no page"):
        writer.open_store(tmp_path, 100)


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "open"])
def test_a_full_disk_drops_pages_and_serving_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = writer.open_store(tmp_path)

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        for record in writer.chain(5, 4):
            store.put(record)
        assert store.flush()
        assert store.stats.failed["write"] >= 1
        assert all(store.get(record.key) is None for record in writer.chain(5, 4))
    put_all(store, writer.chain(6, 4))
    assert store.get(writer.chain(6, 1)[0].key) is not None
    store.close()


def test_read_errors_are_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = writer.open_store(tmp_path)
    put_all(store, writer.chain(7, 2))

    def broken(*arguments: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", broken)
        assert store.get(writer.chain(7, 1)[0].key) is None
    assert store.stats.failed == {"io": 1}
    store.close()


def test_a_clock_that_jumps_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = writer.open_store(tmp_path)
    now = time.time()
    for number, jump in enumerate((0, 1e9, -1e9, 5)):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        put_all(store, writer.chain(number, 3))
        store.used([writer.chain(number, 1)[0].key])
    assert all(store.get(record.key) == record for number in range(4) for record in writer.chain(number, 3))
    store.close()


def test_the_budget_holds_and_what_is_used_stays(tmp_path: Path) -> None:
    budget = 64 * 6144
    store = writer.open_store(tmp_path, budget)
    loved = writer.chain(0, 4)
    put_all(store, loved)
    for number in range(1, 60):
        put_all(store, writer.chain(number, 4))
        store.used([record.key for record in loved])
        assert sum(file.stat().st_size for file in segments(tmp_path)) <= budget
    assert [store.get(record.key) for record in loved] == loved
    assert store.get(writer.chain(3, 1)[0].key) is None
    assert store.describe()["pages"] <= 64
    store.close()


def test_two_processes_share_one_tier(tmp_path: Path) -> None:
    one, two = writer.open_store(tmp_path), writer.open_store(tmp_path)
    put_all(one, writer.chain(1, 10))
    assert [two.get(record.key) for record in writer.chain(1, 10)] == writer.chain(1, 10)
    put_all(two, writer.chain(1, 12))
    put_all(two, writer.chain(2, 5))
    assert one.describe()["pages"] == 17
    assert one.purge() == 17
    assert two.get(writer.chain(2, 1)[0].key) is None and two.stats.failed.keys() <= {"io", "checksum"}
    put_all(two, writer.chain(3, 2))
    assert one.verify()[1] == 0
    one.close()
    two.close()


def test_verify_finds_what_is_broken(tmp_path: Path) -> None:
    store = writer.open_store(tmp_path)
    put_all(store, writer.chain(1, 5))
    file = segments(tmp_path)[0]
    content = bytearray(file.read_bytes())
    content[store.record_bytes + 1000] ^= 1
    file.write_bytes(content)
    assert store.verify() == (4, 1) and store.verify() == (4, 0)
    store.close()


def test_blobs_are_checked(tmp_path: Path) -> None:
    store = writer.open_store(tmp_path)
    for number in range(5):
        store.put_blob(bytes([number]), bytes([number]) * 1000)
    store.trim_blobs(3)
    assert [key for key, _ in store.blobs(10)] == [b"\4", b"\3", b"\2"]
    store.close()
    (index,) = tmp_path.glob("*/index.sqlite")
    with sqlite3.connect(index) as connection:
        connection.execute("UPDATE blobs SET bytes = x'00' WHERE key = x'03'")
    store = writer.open_store(tmp_path)
    assert [key for key, _ in store.blobs(10)] == [b"\4", b"\2"] and store.stats.failed == {"checksum": 1}
    store.close()


def kill_at_random_moments(directory: Path, times: int) -> None:
    """Each time: what was committed is read, byte for byte, and nothing else is served."""
    draw = random.Random(times)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    committed: list[int] = []
    for turn in range(times):
        process = subprocess.Popen(
            [sys.executable, str(root / "tests/cache/store_writer.py"), str(directory), str(turn + 1)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(draw.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        committed += [int(line) for line in process.stdout.read().split()]
        process.wait()
        process.stdout.close()
    store = writer.open_store(directory, 2**30)
    for number in committed:
        for record in writer.chain(number, 6):
            assert store.get(record.key) == record
    for listed in store.walk():
        assert len(listed.tokens) == 128
    assert store.verify()[1] == 0 and store.stats.failed == {}
    assert len(committed) > times
    store.close()


def test_kill_9(tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path, 20)


@pytest.mark.slow
def test_kill_9_two_hundred_times(tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path, 200)


def fill(directory: Path, num_tokens: int) -> float:
    """Bytes a token of segments and index, at the release's shapes."""
    payload_bytes = kv.page_bytes(flash())
    store = PageStore(directory, fingerprint=b"f", payload_bytes=payload_bytes, budget_bytes=2**40)
    draw = random.Random(1)
    parent = bytes(32)
    for _ in range(num_tokens // 128):
        key = draw.randbytes(32)
        store.put(Record(key, parent, tuple(draw.randrange(129280) for _ in range(128)), 0, bytes(payload_bytes)))
        parent = key
        if store._queue.qsize() > 500:
            store.flush()
    store.flush()
    store.close()
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) / num_tokens


def test_bytes_per_token_on_disk(tmp_path: Path) -> None:
    """A part of the million tokens, where the index's fixed part weighs more."""
    assert fill(tmp_path, 2**17) <= 1.02 * 890


@pytest.mark.slow
def test_bytes_per_token_of_a_million(tmp_path: Path) -> None:
    assert fill(tmp_path, 2**20) <= 1.02 * 890


def test_the_writer_imports_no_torch() -> None:
    code = "import sys, cedar.cache.store; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})


def fast_disk(directory: Path, day_bytes: int) -> PageStore:
    return PageStore(
        directory,
        fingerprint=writer.FINGERPRINT,
        payload_bytes=writer.PAYLOAD_BYTES,
        budget_bytes=2**30,
        day_bytes=day_bytes,
    )


class Clocks:
    """The wall clock and the steady one, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.steady = 1e9, 5000.0
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr(time, "clock_gettime", lambda clock: self.steady)

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


def written(store: PageStore, seed: int, count: int) -> int:
    """How many of so many new pages the day's budget let through."""
    before = store.stats.written
    put_all(store, writer.chain(seed, count))
    return store.stats.written - before


def test_a_day_has_its_budget_of_writes_across_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    store = fast_disk(tmp_path, 10 * 6144 + 5)
    assert [written(store, seed, 4) for seed in range(4)] == [4, 4, 2, 0]
    assert store.stats.failed == {"day budget": 2} and store.describe()["day_bytes_written"] == 10 * 6144
    other = fast_disk(tmp_path, 10 * 6144)
    assert written(other, 5, 1) == 0
    other.close()
    store.close()
    clocks.pass_(80_000)
    store = fast_disk(tmp_path, 10 * 6144)
    assert written(store, 6, 1) == 0
    clocks.pass_(7_000)
    assert written(store, 7, 12) == 10
    # pages that are there already cost nothing
    assert written(store, 7, 10) == 0 and store.stats.failed == {"day budget": 2}
    # snapshots and turns count too
    assert not store.put_blob(b"key", bytes(2 * 6144)) and store.put_turn(b"key", b"root", bytes(6144))
    assert store.flush() and store.get_turn(b"key") is None and store.stats.failed == {"day budget": 4}
    store.close()


def test_a_clock_that_is_set_opens_no_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    store = fast_disk(tmp_path, 2 * 6144)
    assert written(store, 0, 2) == 2
    for seed, jump in enumerate((1e6, -1e7, 3 * 86400, -5.0), start=1):
        clocks.wall += jump
        assert written(store, seed, 1) == 0
        clocks.pass_(10_000)
        assert written(store, 100 + seed, 1) == 0
    clocks.pass_(50_000)
    assert written(store, 200, 3) == 2
    store.close()
    # set back while nobody ran: the day begins now at the latest, and ends
    clocks.wall -= 1e7
    store = fast_disk(tmp_path, 2 * 6144)
    assert written(store, 300, 1) == 0
    clocks.pass_(86_401)
    assert written(store, 301, 1) == 1
    store.close()


def test_a_pinned_segment_outlives_the_budget(tmp_path: Path) -> None:
    budget = 64 * 6144
    store = writer.open_store(tmp_path, budget)
    loved = writer.chain(0, 4)
    put_all(store, loved)
    root, tokens = loved[0].parent, [token for record in loved for token in record.tokens]
    assert store.pin_prompt(root, [*tokens, 1]) == 512 and store.pin_prompt(root, [9999]) == 0
    for number in range(1, 60):
        put_all(store, writer.chain(number, 4))
        assert sum(file.stat().st_size for file in segments(tmp_path)) <= budget
    assert [store.get(record.key) for record in loved] == [record._replace(pinned=True) for record in loved]
    # no more than half of the tier
    with pytest.raises(CapacityError, match="at most half"):
        for number in range(59, 30, -1):
            store.pin([record.key for record in writer.chain(number, 4)])
    store.pin([record.key for record in loved], False)
    assert not store.get(loved[0].key).pinned
    store.close()


def test_parts_are_the_page(tmp_path: Path) -> None:
    store = writer.open_store(tmp_path)
    store.divide((2000, 2500, 500))
    records = writer.chain(1, 3)
    put_all(store, records)
    for record in records:
        listed = store.locate([record.key])[record.key]
        header = store.read_header(record.key, listed)
        assert b"".join(store.read_part(header, listed, part) for part in range(3)) == record.payload
    (file,) = segments(tmp_path)
    content = bytearray(file.read_bytes())
    content[768 + 2100] ^= 1
    file.write_bytes(content)
    listed = store.locate([records[0].key])[records[0].key]
    header = store.read_header(records[0].key, listed)
    assert store.read_part(header, listed, 0) and store.read_part(header, listed, 2)
    with pytest.raises(FormatError, match="part 1"):
        store.read_part(header, listed, 1)
    with pytest.raises(FormatError, match="another page"):
        store.read_header(records[1].key, listed)
    store.close()


def test_two_live_processes_and_one_is_killed(tmp_path: Path) -> None:
    """Both write and both read what the other has written, under a budget that drops segments all the while."""
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, str(root / "tests/cache/store_writer.py"), str(tmp_path), str(seed), str(400 * 6144)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        for seed in (1, 2)
    ]
    outputs = [process.stdout for process in processes]
    assert all(output is not None and output.readline() == "ready\n" for output in outputs)
    reader = writer.open_store(tmp_path, 400 * 6144)

    def whole(number: int) -> bool:
        """A conversation is served as it was written, or not at all."""
        got = [reader.get(record.key) for record in writer.chain(number, 6)]
        assert all(one is None or one == record for one, record in zip(got, writer.chain(number, 6), strict=True))
        return None not in got

    def killed(number: int) -> int:
        """The newest conversation that a process had committed when it was killed."""
        process, output = processes[number], outputs[number]
        process.send_signal(signal.SIGKILL)
        assert output is not None
        lines = output.read().split()
        process.wait()
        output.close()
        return int(lines[-1])

    for turn in range(20):
        output = outputs[turn % 2]
        assert output is not None
        whole(int(output.readline()))
    time.sleep(0.3)
    assert whole(killed(0))
    # the other goes on, and drops what the first has left when it needs the room
    output = outputs[1]
    assert output is not None
    for _ in range(10):
        whole(int(output.readline()))
    time.sleep(0.3)
    assert whole(killed(1))
    assert sum(file.stat().st_size for file in segments(tmp_path)) <= 400 * 6144 + 3 * 50 * 6144
    assert reader.verify()[1] == 0 and set(reader.stats.failed) <= {"io", "checksum"}
    reader.close()


def test_a_segment_dropped_before_its_pages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process makes room between a page's write and its row: the page is written again, no row lies."""
    mine, other = writer.open_store(tmp_path), writer.open_store(tmp_path)
    sync, left = os.fdatasync, [1]

    def drop_meanwhile(file: int) -> None:
        sync(file)
        if left and threading.current_thread() is mine._thread:
            left.pop()
            other.purge()

    monkeypatch.setattr(os, "fdatasync", drop_meanwhile)
    records = writer.chain(1, 3)
    put_all(mine, records)
    assert not left
    assert [other.get(record.key) for record in records] == records
    # dropped both times: the pages are not kept, and that is said
    left.extend([1, 1, 1])
    put_all(mine, writer.chain(2, 1))
    assert mine.stats.failed == {"dropped": 1} and not other.has(writer.chain(2, 1)[0].key)
    assert other.verify()[1] == 0
    mine.close()
    other.close()


def test_a_pin_of_pages_dropped_meanwhile_pins_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found and dropped before it is pinned is not said to be pinned."""
    mine, other = writer.open_store(tmp_path), writer.open_store(tmp_path)
    records = writer.chain(1, 3)
    put_all(mine, records)
    locate = mine.locate

    def then_dropped(keys: Sequence[bytes]) -> dict[bytes, Listed]:
        found = locate(keys)
        other.purge()
        return found

    monkeypatch.setattr(mine, "locate", then_dropped)
    assert mine.pin([record.key for record in records]) == 0
    mine.close()
    other.close()


def test_a_segment_whose_dropper_died_is_removed_by_its_writer(tmp_path: Path) -> None:
    """Dropped from the index, killed before the file went: it must not count against the budget for ever."""
    store = writer.open_store(tmp_path)
    put_all(store, writer.chain(1, 2))
    (left,) = segments(tmp_path)
    index = sqlite3.connect(store.directory / "index.sqlite")
    for table in ("pages", "segments"):
        index.execute(f"DELETE FROM {table}")
    index.commit()
    index.close()
    # the first finds its segment dropped and goes to the next one
    records = writer.chain(2, 2)
    put_all(store, records)
    assert not left.exists() and len(segments(tmp_path)) == 1
    assert [store.get(record.key) for record in records] == records
    store.close()


def test_a_page_that_moved_is_not_forgotten(tmp_path: Path) -> None:
    """Who found it at its old place reads nothing there, and leaves the new place in the index."""
    store = writer.open_store(tmp_path)
    (record,) = writer.chain(1, 1)
    put_all(store, [record])
    old = store.locate([record.key])[record.key]
    store.purge()
    put_all(store, [record])
    assert store.read(record.key, old) is None
    assert store.get(record.key) == record
    store.close()


def test_an_index_that_does_not_answer_loses_no_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start whose question fails must not take every segment for a forgotten one."""
    store = writer.open_store(tmp_path)
    put_all(store, writer.chain(1, 2))
    store.close()
    monkeypatch.setattr("cedar.cache.store._STARTING_S", -1.0)

    def fails(store: PageStore) -> set[tuple[str, int]]:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(PageStore, "_named", fails)
        again = writer.open_store(tmp_path)
    assert again.stats.failed == {"index": 1} and again.verify() == (2, 0)
    again.close()


def test_a_locked_index_holds_up_no_reader(tmp_path: Path) -> None:
    """Another process keeps the index's write lock: pages are found and read at once, and written later."""
    store = writer.open_store(tmp_path)
    records = writer.chain(1, 6)
    put_all(store, records)
    (index,) = tmp_path.glob("*/index.sqlite")
    other = sqlite3.connect(index, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for record in writer.chain(2, 3):
        store.put(record)
    store.used([records[0].key])
    time.sleep(0.2)
    began = time.monotonic()
    assert [store.get(record.key) for record in records] == records
    assert store.get_child(records[0].key, records[1].tokens) is not None
    assert time.monotonic() - began < 3
    assert store.get(writer.chain(2, 1)[0].key) is None
    other.execute("ROLLBACK")
    other.close()
    assert store.flush() and store.get(writer.chain(2, 1)[0].key) is not None and store.stats.failed == {}
    store.close()
