"""The only face of the cache that an engine sees: look up, plan, lease, publish, give back.

A lease is one sequence's pages. The engine asks for a plan (what of a prompt is there, and which rows must run
again), takes the lease, makes the model's state over it, and publishes what the state has written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from cedar.cache.keys import child_key, common_length
from cedar.cache.layout import PageLayout
from cedar.cache.pages import PagePool, PageTable
from cedar.cache.prefix import Node, PrefixTree
from cedar.cache.snapshots import Kept, SnapshotLike, SnapshotPool, snapshot_keys
from cedar.cache.store import PageStore, Record
from cedar.cache.turns import ReplayMap
from cedar.cache.view import PagedRows
from cedar.config.model import PAGE_TOKENS, ModelConfig
from cedar.errors import CapacityError

log = logging.getLogger(__name__)

# what a hit may be: see serving.md 2.1
Replay = Literal["bounded", "exact", "off"]
Grade = Literal["cold", "g0", "g1", "g2", "g3"]
_MAX_BLOBS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a prompt starts.

    Attributes:
        grade: `cold` starts at the first token; `g0` and `g1` restore `kept`; `g2` and `g3` replay.
        cached_tokens: Tokens whose entries are adopted.
        first_row: First position that runs.
        lineage: Bounded replays upstream of what the sequence will write.
        tier: Where the farthest of the adopted bytes came from.
    """

    grade: Grade = "cold"
    cached_tokens: int = 0
    first_row: int = 0
    lineage: int = 0
    tier: Literal["none", "memory", "disk"] = "none"
    kept: Kept | None = None


@dataclass(slots=True, eq=False)
class Lease:
    """What one sequence holds of the cache.

    Attributes:
        published: Tokens whose whole pages were offered to the tree.
        node: The tree's page that ends there.
        keep: False for a request that must leave nothing behind.
    """

    table: PageTable
    salt: bytes
    plan: Plan
    node: Node
    published: int = 0
    keep: bool = True


@dataclass(slots=True)
class CacheMetrics:
    """Counters since the start, changed by the engine's thread alone.

    Attributes:
        cached_tokens: Prompt tokens whose entries were adopted, by tier.
        resumes: Requests by grade.
        replayed_tokens: Cached tokens that ran again to rebuild windows.
    """

    cached_tokens: dict[str, int] = field(default_factory=dict)
    resumes: dict[str, int] = field(default_factory=dict)
    replayed_tokens: int = 0
    evicted_pages: int = 0
    loaded_pages: int = 0

    def count(self, plan: Plan) -> None:
        self.resumes[plan.grade] = self.resumes.get(plan.grade, 0) + 1
        if plan.cached_tokens:
            self.cached_tokens[plan.tier] = self.cached_tokens.get(plan.tier, 0) + plan.cached_tokens
        self.replayed_tokens += max(plan.cached_tokens - plan.first_row, 0)


class CacheManager:
    """Pages in memory, snapshots, and the disk tier behind them.

    Args:
        config: The model's.
        num_pages: Pages in memory.
        dtype: Of the rows that layers read.
        strict: A hit never changes an answer: only bytes that equal a cold prefill's are published, read and
            resumed from.
        store: The disk tier, None for none.
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
        store: PageStore | None = None,
        read_snapshot: Callable[[bytes], SnapshotLike] | None = None,
        turns: ReplayMap | None = None,
    ) -> None:
        self.config, self.strict, self.turns = config, strict, turns
        self.pool = PagePool(PageLayout(config), num_pages, device)
        self.tree = PrefixTree(self.pool, fingerprint)
        self.snapshots = SnapshotPool(snapshot_bytes, snapshot_ttl_s)
        self.metrics = CacheMetrics()
        self._dtype, self._store = dtype, store
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

        Pages on disk come into memory for it, as far as there is room.

        Args:
            exact_span: (cached tokens, prompt tokens) -> (first row, ...) of an exact rebuild of the model's state.
        """
        if replay == "off":
            return Plan()
        num_prompt, window = len(prompt), self.config.attention.sliding_window
        path, loaded = self._find(prompt, salt)
        held = sum(length for _, length in path)
        tier: Literal["memory", "disk"] = "disk" if loaded else "memory"
        plans = [Plan()]
        for kept in self.snapshots.find(self.tree.root(salt).key, prompt):
            position = kept.snapshot.num_tokens
            # the last token must run to give logits
            usable = position < num_prompt and position <= held and kept.snapshot.decoder_replay == decoder_replay
            whole_window = num_prompt - position >= window
            if not usable or (self.strict and (kept.lineage or not whole_window)):
                continue
            lineage = max(kept.lineage, self._lineage(path, position))
            if self.strict and lineage:
                continue
            grade: Grade = "g1" if whole_window else "g0"
            plans.append(
                Plan(grade=grade, cached_tokens=position, first_row=position, lineage=lineage, tier=tier, kept=kept)
            )
        cached = held // 2 * 2
        if cached > window:
            lineage = self._lineage(path, cached)
            first, _ = exact_span(cached, num_prompt)
            if decoder_replay != "off" and first > 0 and (self.strict or replay == "exact"):
                plans.append(Plan(grade="g3", cached_tokens=cached, first_row=first, lineage=lineage, tier=tier))
            elif not self.strict and replay == "bounded":
                plans.append(
                    Plan(grade="g2", cached_tokens=cached, first_row=cached - window, lineage=lineage + 1, tier=tier)
                )

        def worth(plan: Plan) -> tuple[int, int]:
            # an exact resume may run a window more than an approximate one
            return plan.first_row + (window if plan.grade in ("g0", "g1", "g3") else 0), -plan.lineage

        return max(plans, key=worth)

    def lease(self, prompt: Sequence[int], salt: bytes, plan: Plan, *, keep: bool = True) -> Lease:
        """The pages of a plan, shared; the plan must be of this moment."""
        table, node, published = PageTable(self.pool), self.tree.root(salt), 0
        path = self._match(prompt[: plan.cached_tokens], salt, touch=True)
        for step, length in path:
            table.adopt(step.page)
            if length == PAGE_TOKENS:
                node, published = step, published + PAGE_TOKENS
        if sum(length for _, length in path) < plan.cached_tokens:
            table.close()
            raise CapacityError("the pages of a plan have left the cache since")
        if plan.kept is not None:
            self.snapshots.touch(plan.kept)
        self.metrics.count(plan)
        if self._store is not None and plan.tier == "disk":
            self._store.used([step.key for step, _ in path])
        return Lease(table, salt, plan, node, published, keep)

    def make_store(self, lease: Lease, num_tokens: int) -> Callable[[Literal["entries", "keys"], int], PagedRows]:
        """What the model's state asks for its stores: the lease's pages, `num_tokens` of which are filled."""
        ratios = self.pool.layout.ratios

        def make(what: Literal["entries", "keys"], source: int) -> PagedRows:
            return PagedRows(lease.table, what, source, count=num_tokens // ratios[source], dtype=self._dtype)

        return make

    # -- running

    def reserve(self, lease: Lease, num_tokens: int, write_from: int, protected: Collection[Node] = ()) -> bool:
        """Make room for the tokens [write_from, num_tokens), evicting if needed; False if there is none."""
        missing = lease.table.missing(num_tokens, write_from)
        if missing > self.pool.num_free:
            self._evict(missing - self.pool.num_free, protected)
        if missing > self.pool.num_free:
            return False
        lease.table.reserve(num_tokens, write_from)
        return True

    def publish(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Offer the whole pages of the tokens written so far."""
        if not lease.keep or (self.strict and lease.plan.lineage):
            return
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
        if not lease.keep or (self.strict and lease.plan.lineage):
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
        lease.table.close()

    def fork(self, lease: Lease) -> Lease:
        """The same pages for another sequence; whoever writes first copies."""
        return Lease(lease.table.fork(), lease.salt, lease.plan, lease.node, lease.published, lease.keep)

    def swap_out(self, lease: Lease) -> list[bytes]:
        """The lease's pages as bytes; the lease holds none any more."""
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
        return self.pool.num_free + self.tree.evictable(protected)

    def explain(self, prompt: Sequence[int], salt: bytes) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """(tokens found, the prompt's tokens around the first that differs, the nearest cached page's there)."""
        path, _ = self._find(prompt, salt)
        held = sum(length for _, length in path)
        parent = self.tree.root(salt)
        for node, length in path:
            if length == PAGE_TOKENS:
                parent = node
        start = held // PAGE_TOKENS * PAGE_TOKENS
        others = [child for children in parent.children.values() for child in children]
        nearest = max(others, key=lambda node: common_length(node.tokens, prompt[start:]), default=None)
        around = slice(max(held - 16, 0), held + 16)
        theirs = () if nearest is None else (*prompt[:start], *nearest.tokens)[around]
        return held, tuple(prompt[around]), tuple(theirs)

    def describe(self) -> dict[str, object]:
        """Sizes of each tier now."""
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
            **({} if self.turns is None else self.turns.describe()),
            "disk": {} if self._store is None else self._store.describe(),
        }

    def purge(self, salt: bytes | None = None) -> int:
        """Forget prefixes and snapshots in memory, and turns; pages that sequences hold live on with them."""
        self.snapshots.clear()
        if self.turns is not None:
            self.turns.forget(salt)
        return self.tree.clear(salt)

    def close(self, *, keep_snapshots: bool) -> None:
        """Write what waits for the disk; with `keep_snapshots` a restart goes on bit for bit."""
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

    def _find(self, prompt: Sequence[int], salt: bytes) -> tuple[list[tuple[Node, int]], bool]:
        """The pages in memory, and those that the disk tier can add to them: (path, whether it added any)."""
        path = self._match(prompt, salt, touch=False)
        if self._store is None:
            return path, False
        loaded = False
        while True:
            held = sum(length for _, length in path)
            whole = [node for node, length in path if length == PAGE_TOKENS]
            start = len(whole) * PAGE_TOKENS
            parent = whole[-1] if whole else self.tree.root(salt)
            record = self._next_on_disk(parent, prompt[start : start + PAGE_TOKENS], held - start)
            if record is None or not self._load(parent, record, {node for node, _ in path}):
                return path, loaded
            loaded = True
            path = self._match(prompt, salt, touch=False)
            if sum(length for _, length in path) <= held:
                return path, loaded

    def _next_on_disk(self, parent: Node, tokens: Sequence[int], at_least: int) -> Record | None:
        """The page below `parent` that agrees with more than `at_least` of `tokens`, from the disk tier."""
        assert self._store is not None
        if not tokens:
            return None
        record = None
        if len(tokens) == PAGE_TOKENS:
            record = self._store.get(child_key(parent.key, tokens))
        if record is None:
            listed = self._store.get_child(parent.key, tokens)
            if listed is None or common_length(listed.tokens, tokens) <= at_least:
                return None
            record = self._store.get(child_key(parent.key, listed.tokens))
        if record is None or common_length(record.tokens, tokens) <= at_least or (self.strict and record.lineage):
            return None
        return record

    def _load(self, parent: Node, record: Record, protected: set[Node]) -> bool:
        if self.pool.num_free == 0:
            self._evict(1, protected)
        if self.pool.num_free == 0:
            return False
        page = self.pool.take()
        self.pool.write(page, record.payload)
        node, new = self.tree.insert(parent, record.tokens, page, record.lineage)
        node.on_disk = True
        self.pool.release(page)
        self.metrics.loaded_pages += new
        return new

    def _lineage(self, path: list[tuple[Node, int]], num_tokens: int) -> int:
        needed = -(-num_tokens // PAGE_TOKENS)
        return max((node.lineage for node, _ in path[:needed]), default=0)

    def _evict(self, num_pages: int, protected: Collection[Node]) -> None:
        self.metrics.evicted_pages += self.tree.evict(num_pages, protected, self._persist)

    def _persist(self, node: Node) -> None:
        """Hand a page to the disk tier, once."""
        if self._store is None or node.on_disk:
            return
        assert node.parent is not None
        record = Record(node.key, node.parent.key, node.tokens, node.lineage, self.pool.read(node.page))
        node.on_disk = self._store.put(record)
