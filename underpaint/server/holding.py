"""Prefixes that were computed by another process, in pages of this one."""

from collections.abc import Iterator, Sequence

from underpaint.errors import OutOfPages
from underpaint.handover.messages import InPages
from underpaint.kv.pool import Run
from underpaint.kv.tree import Node, PrefixTree

Views = Sequence[Sequence[int]]
"""Which runs of a prefix each branch reads, by index."""


def is_coming(tree: PrefixTree, prefix: InPages, views: Views) -> bool:
    """Whether a unit of a prefix is on its way here for another order: it need not be brought again."""
    return any(not node.ready for node in _found(tree, prefix, views))


class Holding:
    """The runs of a prefix: units that the tree has are read there, the others are taken pages for, given to the tree
    as soon as they are filled, and found there by orders to come. What is no unit belongs to one order alone.

    ``runs``: all of them. ``missing``: by index, those to be brought.
    """

    def __init__(self, tree: PrefixTree, prefix: InPages, views: Views) -> None:
        """While none of its units ``is_coming``. Raises OutOfPages, and then holds nothing."""
        self._tree = tree
        self._nodes = _found(tree, prefix, views)
        self._tails: list[Run] = []
        num_found = len(self._nodes)
        for held in self._nodes:
            tree.acquire(held)
        runs: dict[int, Run] = {}
        missing: list[int] = []
        try:
            for index, parent, node in _walk(tree, prefix, views):
                if node is None and index not in runs:
                    runs[index] = self._make(prefix.runs[index].num_rows, parent, prefix.units[index])
                    missing.append(index)
                elif node is not None:
                    runs[index] = node.run
        except OutOfPages:
            self.close()
            raise
        tree.hits += num_found
        tree.misses += len(self._nodes) - num_found
        self.runs = tuple(runs[index] for index in range(len(prefix.runs)))
        self.missing = tuple(missing)

    def filled(self) -> None:
        """All that was missing is in its pages."""
        for node in self._nodes:
            node.ready = True

    def close(self) -> None:
        """Give everything back. Units that are filled stay in the tree until their pages are needed."""
        for node in reversed(self._nodes):
            self._tree.release(node)
            if not node.ready:
                self._tree.discard(node)
        for run in self._tails:
            self._tree.pool.release(run)
        self._nodes, self._tails = [], []

    def _make(self, num_rows: int, parent: Node | None, key: bytes | None) -> Run:
        run = self._tree.allocate(num_rows)
        if key is None:
            self._tails.append(run)
            return run
        node = self._tree.insert(parent, key, run)
        self._tree.acquire(node)
        self._nodes.append(node)
        return run


def _found(tree: PrefixTree, prefix: InPages, views: Views) -> list[Node]:
    return list(dict.fromkeys(node for _, _, node in _walk(tree, prefix, views) if node is not None))


def _walk(tree: PrefixTree, prefix: InPages, views: Views) -> Iterator[tuple[int, Node | None, Node | None]]:
    """Every run of every view: its index, the node of the unit before it, and its own; None where there is none yet.
    The caller may insert what is missing, and it is found when the walk goes on."""
    for view in views:
        parent: Node | None = None
        for index in view:
            key = prefix.units[index]
            node = None if key is None else tree.child(parent, key)
            yield index, parent, node
            parent = None if key is None else tree.child(parent, key)
