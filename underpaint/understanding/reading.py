"""The rows of one passage that are in pages: units shared through the tree, and what is still growing."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from underpaint.errors import OutOfPages
from underpaint.kernels.tiles import Ints
from underpaint.kv.pool import Run, View, pages_for
from underpaint.kv.tree import Key, Node, PrefixTree, Unit


class Reading:
    """Rows 0 to ``num_rows`` of a passage, a run of pages for each of its units and one for what follows them.

    A unit is given to the tree as soon as it is whole, so that other requests find it, also after this one is gone.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self.rows_found = 0
        self.num_rows = 0
        self._tree = tree
        self._pool = tree.pool
        self._runs: list[Run] = []
        self._nodes: list[Node] = []  # of the first runs: those that the tree owns
        self._sharing = True
        self._table: Ints = np.empty((0, 2), np.int32)
        self._table_of = (0, 0)  # how many runs, and how many pages of the last one

    def view(self) -> View:
        """What was read so far."""
        return View(self._pool, tuple(self._runs))

    def slots(self, start: int) -> Tensor:
        """(rows,) slots of the rows from ``start`` on."""
        return self._pool.slots(self._runs)[start:]

    def pages(self) -> Ints:
        """(pages, 2): first slot, and number of rows, of each page; full ones first, that with the last row at the end.
        Valid until the reading changes: decode asks for them at every token, so only the last count is brought up to
        date as long as no page is added."""
        last, size = self._runs[-1], self._pool.page_rows
        shape = len(self._runs), len(last.pages)
        if shape != self._table_of:
            entries = [
                (page * size, min(size, run.num_rows - i * size))
                for run in self._runs
                for i, page in enumerate(run.pages)
            ]
            before = sorted(entries[:-1], key=lambda entry: entry[1] < size)
            self._table, self._table_of = np.array([*before, entries[-1]], np.int32), shape
        self._table[-1, 1] = last.num_rows - (len(last.pages) - 1) * size
        return self._table

    def find(self, units: tuple[Unit, ...], num_rows: int) -> None:
        """Take up units that are in the tree. Of ``num_rows`` at least the last row is left to read: what comes next
        is predicted from it."""
        assert not self._runs, "a reading begins with what it finds"
        for node in _found(self._tree, units, num_rows):
            self._take(node)
            self._runs.append(node.run)
        self.rows_found = self.num_rows = sum(run.num_rows for run in self._runs)

    @property
    def num_shared(self) -> int:
        """Units that it reads in the tree."""
        return len(self._nodes)

    def pages_to_read(self, units: tuple[Unit, ...], stop: int) -> int:
        """Pages that the rows up to ``stop`` still need."""
        return sum(pages for _, pages in self._growth(units, stop))

    def grow(self, units: tuple[Unit, ...], stop: int) -> None:
        """Make room for the rows from here to ``stop``. Raises OutOfPages and changes nothing."""
        if len(self._runs) > len(units) and stop > self.num_rows:  # behind all units: decode, at every token
            last = self._runs[-1]
            grown = Run(last.pages, last.num_rows + stop - self.num_rows)
            if grown.num_rows <= len(grown.pages) * self._pool.page_rows:
                self._runs[-1], self.num_rows = grown, stop
                return
        growth = self._growth(units, stop)
        taken: list[Run] = []
        try:
            for _, pages in growth:
                taken.append(self._tree.allocate(pages * self._pool.page_rows))
        except OutOfPages:
            for run in taken:
                self._pool.release(run)
            raise
        for (run, _), more in zip(growth, taken, strict=True):
            grown = Run(run.pages + more.pages, run.num_rows)
            if run.pages:
                self._runs[-1] = grown
            else:
                self._runs.append(grown)
        self.num_rows = max(self.num_rows, stop)

    def settle(self, units: tuple[Unit, ...]) -> None:
        """The rows that ``grow`` made room for are in pages: give whole units to the tree. Where the tree got one from
        another request in the meantime, that one is read from now on."""
        while self._sharing and len(self._nodes) < len(units) and self.num_rows >= units[len(self._nodes)].stop:
            index = len(self._nodes)
            parent, key, run = self._nodes[-1] if self._nodes else None, units[index].key, self._runs[index]
            node = self._tree.child(parent, key)
            if node is None:
                node = self._tree.insert(parent, key, run)
                node.ready = True
                self._tree.misses += 1
            elif node.ready:
                self._pool.release(run)
                self._runs[index] = node.run
                self._table_of = (0, 0)
            else:
                self._sharing = False  # another is filling it now; from here on this reading keeps to itself
                return
            self._take(node)

    def close(self) -> None:
        """Give everything back. Units stay in the tree until their pages are needed."""
        for node in self._nodes:
            self._tree.release(node)
        for run in self._runs[len(self._nodes) :]:
            self._pool.release(run)
        self._runs, self._nodes, self.num_rows = [], [], 0
        self._table_of = (0, 0)

    def _take(self, node: Node) -> None:
        self._tree.acquire(node)
        self._nodes.append(node)

    def _growth(self, units: tuple[Unit, ...], stop: int) -> list[tuple[Run, int]]:
        """For each run that grows up to row ``stop``: the run as it will be, of the pages it has, and pages to add."""
        growth = []
        index = max(len(self._runs) - 1, 0)
        start = sum(run.num_rows for run in self._runs[:index])
        while start < stop:
            end = min(stop, units[index].stop) if index < len(units) else stop
            pages = self._runs[index].pages if index < len(self._runs) else ()
            more = pages_for(end - start, self._pool.page_rows) - len(pages)
            if index >= len(self._runs) or end - start > self._runs[index].num_rows:
                growth.append((Run(pages, end - start), more))
            start, index = end, index + 1
        return growth


def next_key(tree: PrefixTree, units: tuple[Unit, ...], num_rows: int) -> Key | None:
    """Of the first unit that a reading of ``num_rows`` rows would find if it were in the tree, and that is not."""
    num_found = sum(1 for _ in _found(tree, units, num_rows))
    missing = units[num_found : num_found + 1]
    return missing[0].key if missing and missing[0].stop < num_rows else None


def _found(tree: PrefixTree, units: tuple[Unit, ...], num_rows: int) -> Iterator[Node]:
    """See ``Reading.find``."""
    node: Node | None = None
    for unit in units:
        node = tree.child(node, unit.key)
        if node is None or not node.ready or unit.stop >= num_rows:
            return
        yield node
