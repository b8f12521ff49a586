"""The radix tree of prefix units: which prefixes are already in pages, and who may read them.

A node is one unit: the text before an image, and the image; or, where text is shared too, a page of text. Its key is a
hash chain, so it stands for everything before it as well. An image alone is never a key: its keys and values depend on
all that precedes it, and ``<image1>`` reads differently from ``<image2>``.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from underpaint.errors import OutOfPages
from underpaint.kv.pool import PagePool, Run, pages_for
from underpaint.layout import Span

Key = bytes


@dataclass(frozen=True)
class Unit:
    """Rows [start, stop) of a prefix that can be shared, and what they and all rows before them depend on."""

    start: int
    stop: int
    key: Key

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def chain(root: Key, spans: Iterable[Span], contents: Iterable[bytes]) -> tuple[Unit, ...]:
    """The units of a prefix: the key of each is the hash of the key before it and of the unit's own content.

    ``root`` names all that changes K/V without standing in the sequence: model, weights, dtype, codec, LoRA.
    """
    units = []
    key = root
    for span, content in zip(spans, contents, strict=True):
        key = hashlib.sha256(key + hashlib.sha256(content).digest()).digest()
        units.append(Unit(span.start, span.stop, key))
    return tuple(units)


@dataclass(eq=False)
class Node:
    """One unit in pages. ``ready`` once its pages are written. ``users`` counts the leases that read it now,
    ``last_use`` orders eviction."""

    key: Key
    run: Run
    parent: "Node | None"
    ready: bool = False
    children: dict[Key, "Node"] = field(default_factory=dict)
    users: int = 0
    last_use: int = 0


class PrefixTree:
    """Nodes own one reference to their pages. Eviction takes leaves that nobody uses or has borrowed, least recently
    used first.

    ``hits`` and ``misses`` count, for each lease, the units that it found and that it had to fill. ``promised_pages``
    are set aside for leases that have not taken them yet. ``num_pages``: of all nodes together.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.promised_pages = 0
        self.num_pages = 0
        self._roots: dict[Key, Node] = {}
        self._clock = 0

    def __iter__(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    @property
    def used_bytes(self) -> int:
        return self.num_pages * self.pool.page_bytes

    def child(self, parent: Node | None, key: Key) -> Node | None:
        """The child of ``parent`` (None: a first unit) with this key, ready or being filled."""
        return self._children(parent).get(key)

    def insert(self, parent: Node | None, key: Key, run: Run) -> Node:
        """A new node that takes over the caller's reference to ``run``; it is not ready yet."""
        siblings = self._children(parent)
        assert key not in siblings, "the unit is in the tree already"
        node = Node(key, run, parent)
        siblings[key] = node
        self.num_pages += len(run.pages)
        return node

    def discard(self, node: Node) -> None:
        """Take out a node that never became ready, and free its pages."""
        assert not node.ready, "others may be reading it"
        self._remove(node)

    def evictable_pages(self) -> int:
        """Pages that ``allocate`` could free: those of nodes with nobody at or below them who uses or borrows them."""
        # Not by recursion: a dialogue is a node for each of its pages, which is deeper than Python's stack.
        num_pages = 0
        in_use: set[Node | None] = set()
        for node in reversed([*self]):  # whatever is below a node before it
            if node in in_use or self._is_used(node):
                in_use.add(node.parent)
            else:
                num_pages += len(node.run.pages)
        return num_pages

    def acquire(self, node: Node) -> None:
        """Keep ``node`` from eviction until ``release``."""
        node.users += 1
        self._touch(node)

    def release(self, node: Node) -> None:
        assert node.users > 0, "the node is released more often than it was acquired"
        node.users -= 1
        self._touch(node)

    @property
    def available_pages(self) -> int:
        """Pages that are free or can be freed, and are promised to nobody."""
        return self.pool.num_free + self.evictable_pages() - self.promised_pages

    def allocate(self, num_rows: int, promised: bool = False) -> Run:
        """Pages from the pool, evicting if need be. Raises OutOfPages when what is left is in use or, unless these
        pages were themselves ``promised``, set aside for others."""
        num_pages = pages_for(num_rows, self.pool.page_rows)
        if promised:
            self.promised_pages -= num_pages
        elif self.promised_pages and num_pages > self.available_pages:
            raise OutOfPages(f"{num_pages} K/V pages are needed, and those that are free are promised to others")
        while True:
            try:
                return self.pool.allocate(num_rows)
            except OutOfPages:
                if not self._evict_one():
                    raise

    def clear(self) -> None:
        """Evict everything that is not in use."""
        while self._evict_one():
            pass

    def _evict_one(self) -> bool:
        leaves = [node for node in self if not node.children and not self._is_used(node)]
        if not leaves:
            return False
        self._remove(min(leaves, key=lambda n: n.last_use))
        self.evictions += 1
        return True

    def _is_used(self, node: Node) -> bool:
        """A painting may have borrowed pages from the pool: taking the node out would free none of them."""
        return node.users > 0 or not self.pool.held_once(node.run)

    def _remove(self, node: Node) -> None:
        del self._children(node.parent)[node.key]
        self.num_pages -= len(node.run.pages)
        self.pool.release(node.run)

    def _children(self, parent: Node | None) -> dict[Key, Node]:
        return self._roots if parent is None else parent.children

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_use = self._clock
