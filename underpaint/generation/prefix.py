"""Prefixes on lease: trunks shared through the tree, tails private, everything given back at the end.

A prefix is prefilled unit by unit, and rows read earlier units as they are stored. So a picture does not depend on
which units were in the cache already, not even with a codec that rounds.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from underpaint.capture.reads import MAX_READ_ROWS
from underpaint.errors import BudgetTooSmall, OutOfPages
from underpaint.generation.runner import Chunk, Runner
from underpaint.kv.pool import PagePool, Run, View, pages_for
from underpaint.kv.tree import Key, Node, PrefixTree
from underpaint.models.painter import Condition

SHORT_ROWS = MAX_READ_ROWS
"""Units of several branches are prefilled in one pass up to here, where a graph serves it; beyond, nothing is gained,
and memory for one unit is enough."""


class PrefixCache:
    """Finds, fills and lends prefixes. Pages are promised before a lease begins, so a lease never runs out midway."""

    def __init__(self, tree: PrefixTree, runner: Runner) -> None:
        self.tree = tree
        self._pool = tree.pool
        self._runner = runner

    def open(self, conditions: Sequence[Condition]) -> "Lease":
        """Begin a lease; nothing is prefilled yet.

        Raises BudgetTooSmall if the pool could not hold these prefixes even when empty, OutOfPages if others hold too
        much now.
        """
        self.check_budget(conditions)
        lease = Lease(self, conditions)
        available = self.tree.available_pages
        if lease.num_promised > available:
            message = f"{lease.num_promised} K/V pages are needed and {max(available, 0)} can be had; others are in use"
            lease.close()
            raise OutOfPages(message)
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
        """Bytes of pages that these prefixes hold together, the units in common counted once."""
        pages = sum(self.unit_pages(conditions).values()) + sum(map(self.tail_pages, conditions))
        return pages * self._pool.page_bytes

    def unit_pages(self, conditions: Sequence[Condition]) -> dict[Key, int]:
        """Pages of every different unit."""
        return {
            unit.key: pages_for(unit.num_rows, self._pool.page_rows)
            for condition in conditions
            for unit in condition.units
        }

    def tail_pages(self, condition: Condition) -> int:
        return pages_for(tail_rows(condition), self._pool.page_rows)


def tail_rows(condition: Condition) -> int:
    """Rows behind the last unit: what is never shared."""
    return condition.layout.num_rows - (condition.units[-1].stop if condition.units else 0)


class Lease:
    """The prefixes of one request on their way into pages, and then in use.

    Conditions share the pages of the units they have in common, with each other and with other requests. A unit
    that another lease is filling is waited for.
    """

    def __init__(self, cache: PrefixCache, conditions: Sequence[Condition]) -> None:
        """Takes hold of what is in the tree already; see ``PrefixCache.open``."""
        self.rows_prefilled = 0
        self.ready = False
        self._tree = cache.tree
        self._pool = cache.tree.pool
        self._conditions = tuple(conditions)
        self._nodes: list[list[Node]] = [[] for _ in conditions]
        self._tails: list[Run] = []
        self._filling: list[Node] = []
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
        """What to prefill now: of each condition the next unit that is missing, or all tails. Empty while another lease
        fills a unit that this one needs. The same until ``commit``."""
        if not self._chunks and not self.ready:
            self._chunks = self._units() or self._all_tails()
        return self._chunks

    def commit(self) -> None:
        """The chunks were prefilled."""
        self.rows_prefilled += sum(chunk.stop - chunk.prefix.num_rows for chunk in self._chunks)
        self._chunks = []
        if not self._filling:
            self.ready = True
            return
        for node in self._filling:
            node.ready = True
            self._tree.release(node)
        self._filling = []
        for index in range(len(self._conditions)):
            self._follow(index)

    def close(self) -> None:
        """Give everything back: to the tree what others may use, to the pool the rest. May be called at any time."""
        for node in self._filling:
            self._tree.release(node)
            self._tree.discard(node)
        self._filling = []
        for nodes in self._nodes:
            for node in nodes:
                self._tree.release(node)
        for tail in self._tails:
            self._pool.release(tail)
        if self._admitted:
            self._tree.promised_pages -= self.num_promised
        self._nodes, self._tails, self._promised, self._promised_tails = [], [], {}, 0
        self.ready = False

    def admit(self) -> None:
        """Set aside the pages that this lease may still take."""
        self._tree.promised_pages += self.num_promised
        self._admitted = True

    def _follow(self, index: int) -> None:
        """Hold the units of a condition that have become ready."""
        units, nodes = self._conditions[index].units, self._nodes[index]
        while len(nodes) < len(units):
            node = self._tree.child(nodes[-1] if nodes else None, units[len(nodes)].key)
            if node is None or not node.ready:
                return
            self._tree.acquire(node)
            pages = self._promised.pop(node.key, None)
            if pages is not None:  # found, and not filled by this lease itself
                self._tree.hits += 1
                self._tree.promised_pages -= pages if self._admitted else 0
            nodes.append(node)

    def _units(self) -> list[Chunk]:
        """A chunk for the next unit of a condition that nobody has or is filling, and those of others if together they
        are short; nothing if there is none."""
        chunks: list[Chunk] = []
        for index, condition in enumerate(self._conditions):
            self._follow(index)
            nodes = self._nodes[index]
            if len(nodes) == len(condition.units):
                continue
            parent, unit = nodes[-1] if nodes else None, condition.units[len(nodes)]
            if self._tree.child(parent, unit.key) is not None:
                continue
            if chunks and sum(chunk.run.num_rows for chunk in chunks) + unit.num_rows > SHORT_ROWS:
                continue
            run = self._tree.allocate(unit.num_rows, promised=True)
            del self._promised[unit.key]
            node = self._tree.insert(parent, unit.key, run)
            self._tree.acquire(node)
            self._filling.append(node)
            self._tree.misses += 1
            chunks.append(Chunk(condition, View(self._pool, tuple(node.run for node in nodes)), unit.stop, run))
        return chunks

    def _all_tails(self) -> list[Chunk]:
        pairs = list(zip(self._conditions, self._nodes, strict=True))
        if any(len(nodes) < len(condition.units) for condition, nodes in pairs):
            return []
        chunks = []
        for condition, nodes in pairs:
            run = self._tree.allocate(tail_rows(condition), promised=True)
            self._tails.append(run)
            self._promised_tails -= len(run.pages)
            if run.num_rows:
                prefix = View(self._pool, tuple(node.run for node in nodes))
                chunks.append(Chunk(condition, prefix, condition.layout.num_rows, run))
        self.ready = not chunks
        return chunks


class Borrowed:
    """Prefixes that understanding has in pages, read in place: their pages stay while this holds them."""

    ready = True

    def __init__(self, pool: PagePool, views: Sequence[View], rows_prefilled: int = 0) -> None:
        """``rows_prefilled``: how many of their rows understanding computed for this."""
        self.views = tuple(views)
        self.num_rows = sum(view.num_rows for view in views)
        self.rows_prefilled = rows_prefilled
        self._pool = pool
        for view in self.views:
            for run in view.runs:
                pool.retain(run)

    def next_chunks(self) -> list[Chunk]:
        return []

    def commit(self) -> None:
        raise AssertionError("there is nothing to prefill")

    def close(self) -> None:
        for view in self.views:
            for run in view.runs:
                self._pool.release(run)
        self.views = ()
