"""Which tokens have pages: a tree of pages by token ids, one root per tenant.

A node is one page. Full pages have children; a page that ends where a request ended has none. A lookup goes
down full pages and then takes as much of one more page as agrees, so a hit ends at a token, not at a page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from cedar.cache.keys import child_key, common_length, root_key
from cedar.cache.pages import PagePool
from cedar.config.model import PAGE_TOKENS

# a hit counts half after this long
HALF_LIFE_S = 600.0


@dataclass(slots=True, eq=False)
class Node:
    """One page of the tree.

    Attributes:
        lineage: Bounded replays upstream of its bytes; 0 means the same bytes as a cold prefill.
        hits: Lookups that took it, halved every `HALF_LIFE_S`, as of `used_s`.
        on_disk: A copy is in the disk tier, or on its way there.
        gone: It has left the tree; nothing may be put below it.
    """

    key: bytes
    parent: Node | None
    tokens: tuple[int, ...] = ()
    page: int = -1
    lineage: int = 0
    hits: float = 1.0
    used_s: float = 0.0
    on_disk: bool = False
    pinned: bool = False
    gone: bool = False
    children: dict[int, list[Node]] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        return len(self.tokens) == PAGE_TOKENS

    def find(self, tokens: Sequence[int], accept: Callable[[Node], bool]) -> tuple[Node | None, int]:
        """(child that agrees with most of `tokens`, how many tokens agree)."""
        best, length = None, 0
        for child in self.children.get(tokens[0], ()) if tokens else ():
            common = common_length(child.tokens, tokens)
            if common > length and accept(child):
                best, length = child, common
        return best, length


class PrefixTree:
    """Pages by token ids. The tree is one holder of each of its pages."""

    def __init__(self, pool: PagePool, fingerprint: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool, self.fingerprint = pool, fingerprint
        self._clock = clock
        self._roots: dict[bytes, Node] = {}
        self.num_nodes = 0

    def root(self, salt: bytes) -> Node:
        if salt not in self._roots:
            self._roots[salt] = Node(root_key(self.fingerprint, salt), None)
        return self._roots[salt]

    def match(
        self, tokens: Sequence[int], salt: bytes, *, lineage_limit: int | None = None, touch: bool = True
    ) -> list[tuple[Node, int]]:
        """The pages that begin like `tokens`: (node, tokens of it that agree); all but the last are whole.

        Args:
            lineage_limit: Only pages with at most so many bounded replays upstream.
            touch: Count it as a use.
        """
        path: list[tuple[Node, int]] = []
        node, position = self.root(salt), 0
        while position < len(tokens):
            child, length = node.find(
                tokens[position : position + PAGE_TOKENS],
                lambda child: lineage_limit is None or child.lineage <= lineage_limit,
            )
            if child is None:
                break
            path.append((child, length))
            if touch:
                self.touch(child)
            if length < PAGE_TOKENS:
                break
            node, position = child, position + PAGE_TOKENS
        return path

    def touch(self, node: Node) -> None:
        now = self._clock()
        node.hits = self._decayed(node, now) + 1
        node.used_s = now

    def insert(self, parent: Node, tokens: Sequence[int], page: int, lineage: int) -> tuple[Node, bool]:
        """(the node of `tokens` below `parent`, whether it is new); the first writer of a page wins.

        A new node shares `page`. A part of a page that the new one extends makes way for it, unless it has a
        better lineage.
        """
        tokens = tuple(tokens)
        siblings = parent.children.setdefault(tokens[0], [])
        for sibling in siblings:
            covers = len(sibling.tokens) >= len(tokens) and sibling.tokens[: len(tokens)] == tokens
            if covers and sibling.lineage <= lineage:
                return sibling, False
        for sibling in list(siblings):
            extended = len(sibling.tokens) < len(tokens) and tokens[: len(sibling.tokens)] == sibling.tokens
            replaced = sibling.tokens == tokens and not sibling.children
            if (extended or replaced) and sibling.lineage >= lineage and not sibling.pinned:
                self.remove(sibling)
        siblings = parent.children.setdefault(tokens[0], [])
        node = Node(child_key(parent.key, tokens), parent, tokens, self.pool.share(page), lineage, used_s=self._clock())
        siblings.append(node)
        self.num_nodes += 1
        return node, True

    def remove(self, node: Node) -> None:
        """Take a leaf out; its page is free once no sequence holds it."""
        assert node.parent is not None and not node.children
        siblings = node.parent.children[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del node.parent.children[node.tokens[0]]
        self.pool.release(node.page)
        node.gone = True
        self.num_nodes -= 1

    def evict(
        self, num_pages: int, protected: Collection[Node], leaving: Callable[[Node], None] = lambda node: None
    ) -> int:
        """Free up to `num_pages` pages, those worth least first and leaves before parents; how many were freed.

        Worth is tokens to compute again times the decayed hit rate; all pages have the same size. Pages that a
        sequence holds, pinned ones and `protected` ones stay.

        Args:
            leaving: Told of each node just before it goes.
        """
        freed = 0
        now = self._clock()
        while freed < num_pages:
            leaves = [node for node in self.nodes() if self._may_go(node, protected)]
            if not leaves:
                break
            leaves.sort(key=lambda node: (len(node.tokens) * self._decayed(node, now), node.used_s))
            for node in leaves[: num_pages - freed]:
                leaving(node)
                self.remove(node)
                freed += 1
        return freed

    def evictable(self, protected: Collection[Node] = ()) -> int:
        """Pages that `evict` could free at most."""
        return sum(
            self.pool.references(node.page) == 1 and not node.pinned and node not in protected for node in self.nodes()
        )

    def num_pinned(self) -> int:
        """Pages that neither `evict` nor `clear` takes."""
        return sum(node.pinned for node in self.nodes())

    def clear(self, salt: bytes | None = None) -> int:
        """Forget every page of a tenant, or of all, but those that are pinned; how many."""
        forgotten = 0
        for root in [self.root(salt)] if salt is not None else list(self._roots.values()):
            for node in reversed(list(self._below(root))):
                if not node.pinned and not node.children:
                    self.remove(node)
                    forgotten += 1
        return forgotten

    def nodes(self) -> Iterator[Node]:
        """Every page, parents before their children."""
        for root in self._roots.values():
            yield from self._below(root)

    def _below(self, root: Node) -> Iterator[Node]:
        waiting = [child for children in root.children.values() for child in children]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(child for children in node.children.values() for child in children)

    def _may_go(self, node: Node, protected: Collection[Node]) -> bool:
        return (
            not node.children
            and not node.pinned
            and node not in protected
            # whoever else holds it would keep the memory anyway
            and self.pool.references(node.page) == 1
        )

    def _decayed(self, node: Node, now: float) -> float:
        return node.hits * 0.5 ** (max(now - node.used_s, 0) / HALF_LIFE_S)
