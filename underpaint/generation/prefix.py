"""Prefixes on lease: trunks shared through the tree, tails private, everything given back at the end.

A prefix is prefilled unit by unit, and rows read earlier units as they are stored. So a picture does not depend on
which units were in the cache already, not even with a codec that rounds.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from underpaint.errors import BudgetTooSmall, OutOfPages
from underpaint.generation.runner import Chunk, Runner
from underpaint.kv.pool import Run, View, pages_for
from underpaint.kv.tree import Key, Node, PrefixTree
from underpaint.models.painter import Condition


class PrefixCache:
    """Finds, fills and lends prefixes. Pages are promised before a lease begins, so a lease never runs out midway."""

    def __init__(self, tree: PrefixTree, runner: Runner) -> None:
        self.tree = tree
        self.promised_pages = 0
        self._pool = tree.pool
        self._runner = runner

    def open(self, conditions: Sequence[Condition]) -> "Lease":
        """Begin a lease; nothing is prefilled yet.

        Raises BudgetTooSmall if the pool could not hold these prefixes even when empty, OutOfPages if others hold too
        much now.
        """
        self.check_budget(conditions)
        lease = Lease(self, conditions)
        free = self._pool.num_free + self.tree.evictable_pages() - self.promised_pages
        if lease.num_promised > free:
            message = f"{lease.num_promised} K/V pages are needed and {max(free, 0)} can be had; others are in use"
            lease.close()
            raise OutOfPages(message)
        self.promised_pages += lease.num_promised
        lease.admit()
        return lease

    @contextmanager
    def lease(self, conditions: Sequence[Condition]) -> Iterator[tuple[View, ...]]:
        """Views of whole prefixes, filled here and now, valid until the block ends however it ends.

        For use while no other lease is being filled. Raises as ``open``.
        """
        lease = self.open(conditions)
        try:
            while not lease.ready:
                chunks = lease.next_chunks()
                assert chunks, "another lease is being filled"
                self._runner.run(chunks, ())
                lease.commit()
            yield lease.views
        finally:
            lease.close()

    def check_budget(self, conditions: Sequence[Condition]) -> None:
        """Raises BudgetTooSmall if the pool could not hold these prefixes even when empty."""
        needed, budget = self.bytes_needed(conditions), self._pool.num_pages * self._pool.page_bytes
        if needed > budget:
            raise BudgetTooSmall(needed, budget)

    def bytes_needed(self, conditions: Sequence[Condition]) -> int:
        """Bytes of pages that these prefixes hold together, the trunk units in common counted once."""
        pages = sum(self.unit_pages(conditions).values()) + sum(map(self.tail_pages, conditions))
        return pages * self._pool.page_bytes

    def unit_pages(self, conditions: Sequence[Condition]) -> dict[Key, int]:
        """Pages of every different trunk unit."""
        return {
            key: pages_for(unit.stop - unit.start, self._pool.page_rows)
            for condition in conditions
            for key, unit in zip(condition.keys, condition.layout.trunk_units(), strict=True)
        }

    def tail_pages(self, condition: Condition) -> int:
        return pages_for(condition.layout.num_rows - condition.layout.trunk_stop, self._pool.page_rows)


class Lease:
    """The prefixes of one request on their way into pages, and then in use.

    Conditions share the pages of the trunk units they have in common, with each other and with other requests. A unit
    that another lease is filling is waited for.
    """

    def __init__(self, cache: PrefixCache, conditions: Sequence[Condition]) -> None:
        """Takes hold of what is in the tree already; see ``PrefixCache.open``."""
        self.rows_prefilled = 0
        self.ready = False
        self._cache = cache
        self._tree = cache.tree
        self._pool = cache.tree.pool
        self._conditions = tuple(conditions)
        self._nodes: list[list[Node]] = [[] for _ in conditions]
        self._tails: list[Run] = []
        self._filling: Node | None = None
        self._chunks: list[Chunk] = []
        self._promised = cache.unit_pages(conditions)
        self._promised_tails = sum(map(cache.tail_pages, conditions))
        self._admitted = False
        for index in range(len(conditions)):
            self._follow(index)

    @property
    def num_promised(self) -> int:
        """Pages that this lease may still take."""
        return sum(self._promised.values()) + self._promised_tails

    @property
    def num_rows(self) -> int:
        """Rows of all prefixes together, shared ones counted for each."""
        return sum(condition.layout.num_rows for condition in self._conditions)

    @property
    def views(self) -> tuple[View, ...]:
        """One a condition, once the lease is ready."""
        assert self.ready
        return tuple(
            View(self._pool, (*(node.run for node in nodes), tail))
            for nodes, tail in zip(self._nodes, self._tails, strict=True)
        )

    def next_chunks(self) -> list[Chunk]:
        """What to prefill now: the next unit that is missing, or all tails. Empty while another lease fills a unit
        that this one needs. The same until ``commit``."""
        if not self._chunks and not self.ready:
            self._chunks = self._unit() or self._all_tails()
        return self._chunks

    def commit(self) -> None:
        """The chunks were prefilled."""
        self.rows_prefilled += sum(chunk.stop - chunk.prefix.num_rows for chunk in self._chunks)
        self._chunks = []
        if self._filling is None:
            self.ready = True
            return
        self._filling.ready = True
        self._tree.release(self._filling)
        self._filling = None
        for index in range(len(self._conditions)):
            self._follow(index)

    def close(self) -> None:
        """Give everything back: to the tree what others may use, to the pool the rest. May be called at any time."""
        if self._filling is not None:
            self._tree.release(self._filling)
            self._tree.discard(self._filling)
            self._filling = None
        for nodes in self._nodes:
            for node in nodes:
                self._tree.release(node)
        for tail in self._tails:
            self._pool.release(tail)
        if self._admitted:
            self._cache.promised_pages -= self.num_promised
        self._nodes, self._tails, self._promised, self._promised_tails = [], [], {}, 0
        self.ready = False

    def admit(self) -> None:
        """From now on what this lease takes comes out of the pages promised to it."""
        self._admitted = True

    def _follow(self, index: int) -> None:
        """Hold the units of a condition that have become ready."""
        keys, nodes = self._conditions[index].keys, self._nodes[index]
        while len(nodes) < len(keys):
            node = self._tree.child(nodes[-1] if nodes else None, keys[len(nodes)])
            if node is None or not node.ready:
                return
            self._tree.acquire(node)
            self._tree.hits += self._settle(node.key)
            nodes.append(node)

    def _settle(self, key: Key) -> bool:
        """The unit is found or allocated: its pages need no longer be promised. False if that was known."""
        pages = self._promised.pop(key, None)
        if pages is None:
            return False
        if self._admitted:
            self._cache.promised_pages -= pages
        return True

    def _unit(self) -> list[Chunk]:
        """A chunk for the first unit that nobody has or is filling; nothing if there is none."""
        for index, condition in enumerate(self._conditions):
            self._follow(index)
            nodes = self._nodes[index]
            if len(nodes) == len(condition.keys):
                continue
            parent, key = nodes[-1] if nodes else None, condition.keys[len(nodes)]
            if self._tree.child(parent, key) is not None:
                continue
            unit = condition.layout.trunk_units()[len(nodes)]
            run = self._tree.allocate(unit.stop - unit.start)
            self._settle(key)
            self._filling = self._tree.insert(parent, key, run)
            self._tree.acquire(self._filling)
            self._tree.misses += 1
            return [Chunk(condition, View(self._pool, tuple(node.run for node in nodes)), unit.stop, run)]
        return []

    def _all_tails(self) -> list[Chunk]:
        pairs = list(zip(self._conditions, self._nodes, strict=True))
        if any(len(nodes) < len(condition.keys) for condition, nodes in pairs):
            return []
        chunks = []
        for condition, nodes in pairs:
            run = self._tree.allocate(condition.layout.num_rows - condition.layout.trunk_stop)
            self._tails.append(run)
            prefix = View(self._pool, tuple(node.run for node in nodes))
            chunks.append(Chunk(condition, prefix, condition.layout.num_rows, run))
        if self._admitted:
            self._cache.promised_pages -= self._promised_tails
        self._promised_tails = 0
        return chunks
