"""The only face of the cache that an engine sees: look up, plan, lease, publish, give back.

A lease is one sequence's pages. The engine asks for a plan (what of a prompt is there, and which rows must run
again), takes the lease, makes the model's state over it, and publishes what the state has written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import torch

from cedar.cache.keys import child_key, common_length
from cedar.cache.layout import PageLayout
from cedar.cache.loading import Found, Loading, TierName
from cedar.cache.pages import PagePool, PageTable
from cedar.cache.prefix import Node, PrefixTree
from cedar.cache.shared import SharedStore
from cedar.cache.snapshots import Kept, SnapshotLike, SnapshotPool, snapshot_keys
from cedar.cache.store import PageStore, Record
from cedar.cache.tiers import HostTier
from cedar.cache.turns import ReplayMap
from cedar.cache.view import PagedRows
from cedar.config.model import PAGE_TOKENS, ModelConfig
from cedar.errors import CapacityError, FormatError

# what a hit may be: see serving.md 2.1
Replay = Literal["bounded", "exact", "off"]
Grade = Literal["cold", "g0", "g1", "g2", "g3"]
_MAX_BLOBS = 64
# from near to far
_TIERS: tuple[TierName, ...] = ("none", "memory", "host", "disk", "shared")
# pages asked of the index, or of the shared store, at once
_LOOKED_UP = 256
_FETCHED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a prompt starts.

    Attributes:
        grade: `cold` starts at the first token; `g0` and `g1` restore `kept`; `g2` and `g3` replay.
        cached_tokens: Tokens whose entries are adopted.
        first_row: First position that runs.
        lineage: Bounded replays upstream of what the sequence will write.
        tier: Where the farthest of the adopted bytes came from.
        held_tokens: Those of them whose pages are in memory; the others' are on their way in.
        found: The pages that are not.
    """

    grade: Grade = "cold"
    cached_tokens: int = 0
    first_row: int = 0
    lineage: int = 0
    tier: TierName = "none"
    kept: Kept | None = None
    held_tokens: int = 0
    found: tuple[Found, ...] = ()


@dataclass(slots=True, eq=False)
class Lease:
    """What one sequence holds of the cache.

    Attributes:
        published: Tokens whose whole pages were offered to the tree.
        node: The tree's page that ends there.
        keep: False for a request that must leave nothing behind.
        loading: What is on its way into its pages.
    """

    table: PageTable
    salt: bytes
    plan: Plan
    node: Node
    published: int = 0
    keep: bool = True
    loading: Loading | None = None

    @property
    def broken(self) -> bool:
        """A page could not be read after all: release the lease and plan anew."""
        return self.loading is not None and self.loading.error is not None


@dataclass(slots=True)
class CacheMetrics:
    """Counters since the start, changed by the engine's thread alone.

    Attributes:
        cached_tokens: Prompt tokens whose entries were adopted, by tier.
        resumes: Requests by grade.
        replayed_tokens: Cached tokens that ran again to rebuild windows.
        loaded_pages: Pages that came into memory from below.
        failed_loads: Sequences that had to start again because one of them did not.
    """

    cached_tokens: dict[str, int] = field(default_factory=dict)
    resumes: dict[str, int] = field(default_factory=dict)
    replayed_tokens: int = 0
    evicted_pages: int = 0
    loaded_pages: int = 0
    failed_loads: int = 0

    def count(self, plan: Plan) -> None:
        self.resumes[plan.grade] = self.resumes.get(plan.grade, 0) + 1
        if plan.cached_tokens:
            self.cached_tokens[plan.tier] = self.cached_tokens.get(plan.tier, 0) + plan.cached_tokens
        self.replayed_tokens += max(plan.cached_tokens - plan.first_row, 0)


class CacheManager:
    """Pages in memory, snapshots, and the tiers behind them.

    Args:
        config: The model's.
        num_pages: Pages in memory.
        dtype: Of the rows that layers read.
        strict: A hit never changes an answer: only bytes that equal a cold prefill's are published, read and
            resumed from.
        host_bytes: Host memory for pages that leave a device; 0 on a CPU, where both are one.
        store: The disk tier, None for none.
        shared: The shared tier, None for none; its pages arrive in host memory and go on to the disk.
        read_snapshot: Bytes from the disk tier back to the model's snapshot.
        turns: The ids of assistant turns that clients send back; None remembers none.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        strict: bool = False,
        snapshot_bytes: int = 0,
        snapshot_ttl_s: float = 600.0,
        fingerprint: bytes = b"",
        host_bytes: int = 0,
        store: PageStore | None = None,
        shared: SharedStore | None = None,
        read_snapshot: Callable[[bytes], SnapshotLike] | None = None,
        turns: ReplayMap | None = None,
    ) -> None:
        self.config, self.strict, self.turns = config, strict, turns
        self.pool = PagePool(PageLayout(config), num_pages, device)
        self.fingerprint = fingerprint
        self.tree = PrefixTree(self.pool, fingerprint)
        self.snapshots = SnapshotPool(snapshot_bytes, snapshot_ttl_s)
        self.metrics = CacheMetrics()
        self._dtype, self._store, self._shared = dtype, store, shared
        if store is not None:
            store.divide(tuple(self.pool.layout.sections.values()))
        assert shared is None or host_bytes, "what comes from a shared tier needs host memory to arrive in"
        self._host = HostTier(host_bytes) if host_bytes else None
        # pages that leave memory go there, unless memory is the host's own
        self._demotes = self._host is not None and self.pool.device.type != "cpu"
        self._loaders = ThreadPoolExecutor(2, thread_name_prefix="cedar-load")
        self._fetchers = ThreadPoolExecutor(2, thread_name_prefix="cedar-fetch")
        # pages of sequences that left while a thread was filling them
        self._leaving: list[tuple[Loading, PageTable]] = []
        if store is not None and read_snapshot is not None:
            for key, stored in reversed(store.blobs(_MAX_BLOBS)):
                self.snapshots.put(key, read_snapshot(stored[2:]), int.from_bytes(stored[:2], "little"))

    # -- starting

    def plan(
        self,
        prompt: Sequence[int],
        salt: bytes,
        *,
        replay: Replay,
        decoder_replay: str,
        exact_span: Callable[[int, int], tuple[int, int]],
    ) -> Plan:
        """The way to start a prompt that runs fewest rows, among those that the rules allow.

        Pages below memory are found, not read: `lease` begins to load them.

        Args:
            prompt: `keys.cache_tokens` of it, here and everywhere.
            exact_span: (cached tokens, prompt tokens) -> (first row, ...) of an exact rebuild of the model's state.
        """
        if replay == "off":
            return Plan()
        num_prompt, window = len(prompt), self.config.attention.sliding_window
        path, found = self._find(prompt, salt)
        steps: list[tuple[Node | Found, int]] = [*path, *found]
        held = sum(length for _, length in steps)
        in_memory = sum(length for _, length in path)

        def make(grade: Grade, cached: int, first: int, lineage: int, kept: Kept | None = None) -> Plan:
            num_found = max(-(-cached // PAGE_TOKENS) - len(path), 0)
            needed = tuple(page for page, _ in found[:num_found])
            return Plan(
                grade=grade,
                cached_tokens=cached,
                first_row=first,
                lineage=lineage,
                tier=max((page.tier for page in needed), key=_TIERS.index, default="memory"),
                kept=kept,
                held_tokens=min(in_memory, cached),
                found=needed,
            )

        plans = [Plan()]
        for kept in self.snapshots.find(self.tree.root(salt).key, prompt):
            position = kept.snapshot.num_tokens
            # the last token must run to give logits
            usable = position < num_prompt and position <= held and kept.snapshot.decoder_replay == decoder_replay
            whole_window = num_prompt - position >= window
            if not usable or (self.strict and (kept.lineage or not whole_window)):
                continue
            lineage = max(kept.lineage, _lineage(steps, position))
            if not (self.strict and lineage):
                plans.append(make("g1" if whole_window else "g0", position, position, lineage, kept))
        cached = held // 2 * 2
        if cached > window:
            lineage = _lineage(steps, cached)
            first, _ = exact_span(cached, num_prompt)
            if decoder_replay != "off" and first > 0 and (self.strict or replay == "exact"):
                plans.append(make("g3", cached, first, lineage))
            elif not self.strict and replay == "bounded":
                plans.append(make("g2", cached, cached - window, lineage + 1))

        def worth(plan: Plan) -> tuple[int, int]:
            # an exact resume may run a window more than an approximate one
            return plan.first_row + (window if plan.grade in ("g0", "g1", "g3") else 0), -plan.lineage

        return max(plans, key=worth)

    def lease(self, prompt: Sequence[int], salt: bytes, plan: Plan, *, keep: bool = True) -> Lease:
        """The pages of a plan, shared, and those that are not in memory on their way; the plan must be of this moment.

        Raises:
            CapacityError: Pages have left since the plan was made, or there is no room for those that must come.
        """
        table, node, published = PageTable(self.pool), self.tree.root(salt), 0
        path = self._match(prompt[: plan.held_tokens], salt, touch=True)
        for step, length in path:
            table.adopt(step.page)
            if length == PAGE_TOKENS:
                node, published = step, published + PAGE_TOKENS
        try:
            if sum(length for _, length in path) < plan.held_tokens:
                raise CapacityError("the pages of a plan have left the cache since")
            loading = self._load(table, plan.found)
        except BaseException:
            table.close()
            raise
        lease = Lease(table, salt, plan, node, published, keep, loading)
        try:
            if plan.kept is not None:
                self.snapshots.touch(plan.kept)
            self.metrics.count(plan)
            if self._store is not None and plan.tier == "disk":
                self._store.used([page.key for page in plan.found])
        except BaseException:
            self.release(lease)
            raise
        return lease

    def make_store(self, lease: Lease, num_tokens: int) -> Callable[[Literal["entries", "keys"], int], PagedRows]:
        """What the model's state asks for its stores: the lease's pages, `num_tokens` of which are filled."""
        ratios = self.pool.layout.ratios

        def make(what: Literal["entries", "keys"], source: int) -> PagedRows:
            wait = None if lease.loading is None else functools.partial(lease.loading.wait, source)
            count = num_tokens // ratios[source]
            return PagedRows(lease.table, what, source, count=count, dtype=self._dtype, wait=wait)

        return make

    # -- running

    def reserve(self, lease: Lease, num_tokens: int, write_from: int, protected: Collection[Node] = ()) -> bool:
        """Make room for the tokens [write_from, num_tokens), evicting if needed; False if there is none."""
        missing = lease.table.missing(num_tokens, write_from)
        if not self._make_room(missing, protected):
            return False
        lease.table.reserve(num_tokens, write_from)
        return True

    def evict(self, num_pages: int, protected: Collection[Node] = ()) -> None:
        """Free up to `num_pages` pages, those worth least first; the tiers below get what they lack."""
        leaving = self._demote if self._demotes else self._persist
        self.metrics.evicted_pages += self.tree.evict(num_pages, protected, leaving)

    def keeps(self, lease: Lease) -> bool:
        """Whether what this sequence writes may serve others."""
        return lease.keep and not (self.strict and lease.plan.lineage)

    def publish(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Offer the whole pages of the tokens written so far."""
        if not self._settle(lease) or not self.keeps(lease):
            return
        if lease.node.gone:
            # what was below it has been forgotten meanwhile; the lease still has the pages
            lease.node, lease.published = self.tree.root(lease.salt), 0
        while lease.published + PAGE_TOKENS <= len(tokens):
            start = lease.published
            page = lease.table.pages[start // PAGE_TOKENS]
            # what a replay did not write again has the lineage it came with
            node, new = self.tree.insert(lease.node, tokens[start : start + PAGE_TOKENS], page, lease.plan.lineage)
            if new:
                self._persist(node)
            lease.node, lease.published = node, start + PAGE_TOKENS

    def publish_end(self, lease: Lease, tokens: Sequence[int], snapshot: SnapshotLike | None) -> None:
        """Offer what stands at a boundary: the last, partial page, and a snapshot that goes on from there.

        After this the lease must not write the partial page without `reserve`.
        """
        if not self._settle(lease) or not self.keeps(lease):
            return
        self.publish(lease, tokens)
        rest = tokens[lease.published :]
        if rest:
            page = lease.table.pages[lease.published // PAGE_TOKENS]
            node, new = self.tree.insert(lease.node, rest, page, lease.plan.lineage)
            if new:
                self._persist(node)
        if snapshot is not None:
            key = snapshot_keys(self.tree.root(lease.salt).key, tokens, [len(tokens)])[len(tokens)]
            self.snapshots.put(key, snapshot, lease.plan.lineage)

    def release(self, lease: Lease) -> None:
        """The sequence is gone; what it published stays as long as there is room."""
        loading = lease.loading
        self.metrics.failed_loads += lease.broken
        if self._settle(lease) or loading is None or loading.finished:
            lease.table.close()
            return
        # a thread may still write into its pages
        loading.cancel()
        self._leaving.append((loading, lease.table))

    def distrust(self, lease: Lease, tokens: Sequence[int]) -> None:
        """A sequence over these pages failed, perhaps by what they hold: the next one shall not find them.

        Call it before `release`. Pages that other sequences use, and those that others branch off, stay in memory.
        """
        keys = [] if lease.loading is None else [found.key for found, _ in lease.loading.pages]
        for node, _ in reversed(self._match(tokens, lease.salt, touch=False)):
            keys.append(node.key)
            mine = node.page in lease.table.pages
            if not node.children and self.pool.references(node.page) == 1 + mine:
                self.tree.remove(node)
        for key in keys:
            if self._host is not None:
                self._host.forget(key)
            if self._store is not None:
                self._store.reject(key, FormatError("a sequence over this page failed"), cause="quarantine")

    def fork(self, lease: Lease) -> Lease:
        """The same pages for another sequence; whoever writes first copies.

        Raises:
            LoadFailed: The pages are not whole.
        """
        self._whole(lease)
        return Lease(lease.table.fork(), lease.salt, lease.plan, lease.node, lease.published, lease.keep)

    def rewind(self, lease: Lease, num_tokens: int) -> None:
        """The sequence goes on from its first `num_tokens` tokens; what it published beyond stays as it is."""
        lease.table.truncate(num_tokens)
        while lease.published > num_tokens:
            assert lease.node.parent is not None
            lease.node, lease.published = lease.node.parent, lease.published - PAGE_TOKENS

    def swap_out(self, lease: Lease) -> list[bytes]:
        """The lease's pages as bytes; the lease holds none any more.

        Raises:
            LoadFailed: The pages are not whole.
        """
        self._whole(lease)
        payloads = [self.pool.read(page) for page in lease.table.pages]
        lease.table.close()
        return payloads

    def swap_in(self, lease: Lease, payloads: list[bytes]) -> bool:
        """What `swap_out` gave, back into pages; False if there is no room."""
        if not self.reserve(lease, len(payloads) * PAGE_TOKENS, 0):
            return False
        for page, payload in zip(lease.table.pages, payloads, strict=True):
            self.pool.write(page, payload)
        return True

    # -- looking

    def protect(self, prompt: Sequence[int], salt: bytes) -> set[Node]:
        """The pages that a waiting prompt will use."""
        return {node for node, _ in self._match(prompt, salt, touch=False)}

    def cached_tokens(self, prompt: Sequence[int], salt: bytes) -> int:
        """Tokens whose entries are in memory now."""
        return sum(length for _, length in self._match(prompt, salt, touch=False))

    def room(self, protected: Collection[Node] = ()) -> int:
        """Pages that are free or could be."""
        self._reap()
        return self.pool.num_free + self.tree.evictable(protected)

    def pin(self, prompt: Sequence[int], salt: bytes, pinned: bool = True) -> int:
        """Keep the pages that a prompt begins with, in memory and on disk, or let them go again; its tokens in them.

        Neither eviction nor `purge` takes a pinned page.

        Raises:
            CapacityError: More than half of the memory or of the disk tier would be pinned.
        """
        path = self._match(prompt, salt, touch=False)
        fresh = sum(not node.pinned for node, _ in path)
        if pinned and 2 * (self.tree.num_pinned() + fresh) > self.pool.num_pages:
            raise CapacityError(
                f"{self.tree.num_pinned()} pages are pinned, {fresh} more would be more than half of "
                f"{self.pool.num_pages}: unpin others or give the cache more memory"
            )
        on_disk = 0
        if self._store is not None:
            on_disk = self._store.pin_prompt(self.tree.root(salt).key, prompt, pinned)
        for node, _ in path:
            node.pinned = pinned
        return max(sum(length for _, length in path), on_disk)

    def unpin_memory(self) -> bool:
        """Let pinned pages leave memory: one sequence alone has no room beside them. False if there were none.

        On disk they stay pinned.
        """
        pinned = [node for node in self.tree.nodes() if node.pinned]
        for node in pinned:
            node.pinned = False
        return bool(pinned)

    def prefetch(self, prompt: Sequence[int], salt: bytes) -> Future[None] | None:
        """Bring what the shared tier has of a prompt to this machine; None if there is nothing to wait for.

        Call it when a request comes, and plan it once this is done.
        """
        if self._shared is None:
            return None
        path, found = self._find(prompt, salt)
        whole = sum(length == PAGE_TOKENS for _, length in (*path, *found))
        steps: list[tuple[Node | Found, int]] = [*path, *found]
        parent = steps[whole - 1][0].key if whole else self.tree.root(salt).key
        held = sum(length for _, length in (*path, *found))
        if len(prompt) - held < 2:
            return None
        return self._fetchers.submit(self._fetch, self._shared, parent, prompt[whole * PAGE_TOKENS :])

    def explain(self, prompt: Sequence[int], salt: bytes) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """(tokens found, the prompt's tokens around the first that differs, the nearest cached page's there)."""
        path, found = self._find(prompt, salt)
        held = sum(length for _, length in (*path, *found))
        parent = self.tree.root(salt)
        for node, length in path:
            if length == PAGE_TOKENS:
                parent = node
        start = held // PAGE_TOKENS * PAGE_TOKENS
        whole = [page for page, length in found if length == PAGE_TOKENS]
        others = [] if whole else [child.tokens for children in parent.children.values() for child in children]
        if self._store is not None:
            others += [child.tokens for child in self._store.children(whole[-1].key if whole else parent.key)]
        nearest = max(others, key=lambda tokens: common_length(tokens, prompt[start:]), default=None)
        around = slice(max(held - 16, 0), held + 16)
        theirs = () if nearest is None else (*prompt[:start], *nearest)[around]
        return held, tuple(prompt[around]), tuple(theirs)

    def describe(self) -> dict[str, object]:
        """Sizes of each tier now."""
        self._reap()
        return {
            "pages": self.pool.num_pages,
            "free_pages": self.pool.num_free,
            "tree_pages": self.tree.num_nodes,
            "snapshots": len(self.snapshots),
            "snapshot_bytes": self.snapshots.num_bytes,
            "cached_tokens": dict(self.metrics.cached_tokens),
            "resumes": dict(self.metrics.resumes),
            "replayed_tokens": self.metrics.replayed_tokens,
            "evicted_pages": self.metrics.evicted_pages,
            "loaded_pages": self.metrics.loaded_pages,
            "failed_loads": self.metrics.failed_loads,
            "pinned_pages": self.tree.num_pinned(),
            "host_pages": 0 if self._host is None else len(self._host),
            "host_bytes": 0 if self._host is None else self._host.num_bytes,
            **({} if self.turns is None else self.turns.describe()),
            "disk": {} if self._store is None else self._store.describe(),
            "shared": {} if self._shared is None else self._shared.describe(),
        }

    def purge(self, salt: bytes | None = None) -> int:
        """Forget prefixes and snapshots in memory, and turns; pages that sequences hold or that are pinned stay."""
        self.snapshots.clear()
        if self.turns is not None:
            self.turns.forget(salt)
        if self._host is not None:
            self._host.clear()
        return self.tree.clear(salt)

    def close(self, *, keep_snapshots: bool) -> None:
        """Write what waits for the tiers; with `keep_snapshots` a restart goes on bit for bit."""
        for loading, _ in self._leaving:
            loading.settle()
        self._reap()
        self._loaders.shutdown()
        # a store that hangs must not hold up the end
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        if self._shared is not None:
            self._shared.close()
        if self._store is None:
            return
        if keep_snapshots:
            for kept in self.snapshots.all()[-_MAX_BLOBS:]:
                self._store.put_blob(kept.key, kept.lineage.to_bytes(2, "little") + kept.snapshot.to_bytes())
            self._store.trim_blobs(_MAX_BLOBS)
        self._store.close()

    # -- inside

    def _match(self, prompt: Sequence[int], salt: bytes, *, touch: bool) -> list[tuple[Node, int]]:
        return self.tree.match(prompt, salt, lineage_limit=0 if self.strict else None, touch=touch)

    def _find(self, prompt: Sequence[int], salt: bytes) -> tuple[list[tuple[Node, int]], list[tuple[Found, int]]]:
        """The pages of a prompt in memory, and those below it that follow them; nothing is read."""
        path = self._match(prompt, salt, touch=False)
        held = sum(length for _, length in path)
        if (self._store is None and self._host is None) or held >= len(prompt):
            return path, []
        whole = [step for step in path if step[1] == PAGE_TOKENS]
        parent = whole[-1][0].key if whole else self.tree.root(salt).key
        found = self._below(parent, prompt[len(whole) * PAGE_TOKENS :])
        if len(whole) * PAGE_TOKENS + sum(length for _, length in found) <= held:
            return path, []
        return whole, found

    def _below(self, parent: bytes, tokens: Sequence[int]) -> list[tuple[Found, int]]:
        """The pages that follow `parent` below memory, as far as they agree with `tokens`."""
        found: list[tuple[Found, int]] = []
        while True:
            start = len(found) * PAGE_TOKENS
            keys: list[bytes] = []
            key = parent
            while len(keys) < _LOOKED_UP and start + PAGE_TOKENS <= len(tokens):
                key = child_key(key, tokens[start : start + PAGE_TOKENS])
                keys.append(key)
                start += PAGE_TOKENS
            there = self._locate(keys)
            for key in keys:
                if key not in there:
                    break
                found.append((there[key], PAGE_TOKENS))
                parent = key
            else:
                if keys:
                    continue
            break
        last = self._child(parent, tokens[len(found) * PAGE_TOKENS :][:PAGE_TOKENS])
        if last is not None:
            found.append(last)
        return found

    def _locate(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        there: dict[bytes, Found] = {}
        if self._host is not None:
            for key in keys:
                page = self._host.get(key)
                if page is not None:
                    there[key] = self._found(*page)
        if self._store is not None:
            for key, listed in self._store.locate([key for key in keys if key not in there]).items():
                there[key] = Found(key, listed.tokens, listed.lineage, listed.pinned, "disk", listed)
        return {key: page for key, page in there.items() if not (self.strict and page.lineage)}

    def _child(self, parent: bytes, tokens: Sequence[int]) -> tuple[Found, int] | None:
        """The page below `parent` that agrees with most of `tokens`, and with how many."""
        if not tokens:
            return None
        candidates = []
        if self._host is not None:
            page = self._host.get_child(parent, tokens)
            if page is not None:
                candidates.append(self._found(*page))
        if self._store is not None:
            for listed in self._store.children(parent):
                key = child_key(parent, listed.tokens)
                candidates.append(Found(key, listed.tokens, listed.lineage, listed.pinned, "disk", listed))
        lengths = [
            (common_length(page.tokens, tokens), -page.lineage, -number)
            for number, page in enumerate(candidates)
            if not (self.strict and page.lineage)
        ]
        common, _, number = max(lengths, default=(0, 0, 0))
        return (candidates[-number], common) if common else None

    def _found(self, record: Record, origin: str) -> Found:
        tier: TierName = "shared" if origin == "shared" else "host"
        return Found(record.key, record.tokens, record.lineage, record.pinned, tier, record)

    def _load(self, table: PageTable, found: Sequence[Found]) -> Loading | None:
        """Begin to fill pages at the end of a table with what was found."""
        if not found:
            return None
        if not self._make_room(len(found)):
            raise CapacityError(f"{len(found)} pages must come into memory, {self.pool.num_free} are free")
        pages = self.pool.take_many(len(found))
        for page in pages:
            table.adopt(page)
            self.pool.release(page)
        loading = Loading(list(zip(found, pages, strict=True)), self.pool, self._store, self._host)
        self._loaders.submit(loading.run)
        return loading

    def _settle(self, lease: Lease) -> bool:
        """Take into the tree what has come in whole; False while it has not, and if it never will."""
        loading = lease.loading
        if loading is None:
            return True
        if not loading.finished or loading.error is not None:
            return False
        self.metrics.loaded_pages += len(loading.pages)
        lease.loading = None
        if lease.node.gone:
            return True
        for number, (found, page) in enumerate(loading.pages):
            # the last one may be shared in part: the sequence writes the rest of it
            if lease.plan.held_tokens + (number + 1) * PAGE_TOKENS > lease.plan.cached_tokens:
                break
            node, _ = self.tree.insert(lease.node, found.tokens, page, found.lineage)
            node.on_disk, node.pinned = True, node.pinned or found.pinned
            lease.node, lease.published = node, lease.published + PAGE_TOKENS
        return True

    def _whole(self, lease: Lease) -> None:
        if lease.loading is not None:
            lease.loading.wait()
            self._settle(lease)

    def _reap(self) -> None:
        """Free the pages of those who left, once no thread writes into them."""
        for loading, table in self._leaving:
            if loading.finished:
                table.close()
        self._leaving = [(loading, table) for loading, table in self._leaving if not loading.finished]

    def _make_room(self, num_pages: int, protected: Collection[Node] = ()) -> bool:
        if num_pages > self.pool.num_free:
            self._reap()
        if num_pages > self.pool.num_free:
            self.evict(num_pages - self.pool.num_free, protected)
        return num_pages <= self.pool.num_free

    def _fetch(self, shared: SharedStore, parent: bytes, tokens: Sequence[int]) -> None:
        """Pages from the shared tier into host memory and on to the disk; in a thread."""
        position = 0
        with ThreadPoolExecutor(_FETCHED) as threads:
            while True:
                asked: list[tuple[bytes, Sequence[int]]] = []
                key, start = parent, position
                while len(asked) < _FETCHED and start + PAGE_TOKENS <= len(tokens):
                    page = tokens[start : start + PAGE_TOKENS]
                    asked.append((key, page))
                    key, start = child_key(key, page), start + PAGE_TOKENS
                records = list(threads.map(lambda pair: shared.get(*pair), asked))
                for record in records:
                    if record is None:
                        break
                    self._arrive(record)
                    parent, position = record.key, position + PAGE_TOKENS
                else:
                    if records:
                        continue
                break
        last = shared.get_child(parent, tokens[position : position + PAGE_TOKENS]) if position < len(tokens) else None
        if last is not None:
            self._arrive(last)

    def _arrive(self, record: Record) -> None:
        assert self._host is not None
        self._host.put(record, "shared")
        if self._store is not None:
            self._store.put(record)

    def _demote(self, node: Node) -> None:
        self._persist(node)
        assert self._host is not None
        self._host.put(self._record(node))

    def _persist(self, node: Node) -> None:
        """Hand a page to the tiers that outlive the process, once."""
        if node.on_disk or (self._store is None and self._shared is None):
            return
        record = self._record(node)
        kept = self._store.put(record) if self._store is not None else True
        if self._shared is not None:
            self._shared.put(record)
        node.on_disk = kept

    def _record(self, node: Node) -> Record:
        assert node.parent is not None
        payload = self.pool.read(node.page)
        return Record(node.key, node.parent.key, node.tokens, node.lineage, payload, node.pinned)


def _lineage(steps: Sequence[tuple[Node | Found, int]], num_tokens: int) -> int:
    """Bounded replays upstream of the first `num_tokens` tokens."""
    return max((step.lineage for step, _ in steps[: -(-num_tokens // PAGE_TOKENS)]), default=0)
