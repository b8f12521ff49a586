"""Prefixes on lease: trunks shared through the tree, tails private, everything given back at the end.

A prefix is prefilled unit by unit, and rows read earlier units as they are stored. So a picture does not depend on
which units were in the cache already, not even with a codec that rounds.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from underpaint.errors import BudgetTooSmall
from underpaint.generation.runner import Chunk, Runner
from underpaint.kv.pool import Run, View, pages_for
from underpaint.kv.tree import Node, PrefixTree
from underpaint.models.qwen_image21 import Condition


class PrefixCache:
    """Finds, fills and lends prefixes."""

    def __init__(self, tree: PrefixTree, runner: Runner) -> None:
        self.tree = tree
        self._pool = tree.pool
        self._runner = runner

    @contextmanager
    def lease(self, conditions: Sequence[Condition]) -> Iterator[tuple[View, ...]]:
        """A view of each condition's whole prefix, valid until the block ends however it ends.

        Conditions share the pages of the trunk units they have in common, with each other and with earlier requests.
        Raises BudgetTooSmall if the pool could not hold them even when empty, OutOfPages if others hold too much.
        """
        self._check_budget(conditions)
        with ExitStack() as stack:
            trunks = [self._trunk(condition, stack) for condition in conditions]
            chunks = []
            for condition, trunk in zip(conditions, trunks, strict=True):
                tail = self._tail(condition, stack)
                chunks.append(Chunk(condition, View(self._pool, trunk), condition.layout.num_rows, tail))
            self._runner.prefill(chunks)
            yield tuple(View(self._pool, (*trunk, c.run)) for trunk, c in zip(trunks, chunks, strict=True))

    def bytes_needed(self, conditions: Sequence[Condition]) -> int:
        """Bytes of pages that these prefixes hold together, the trunk units in common counted once."""
        units = {
            key: unit.stop - unit.start
            for condition in conditions
            for key, unit in zip(condition.keys, condition.layout.trunk_units(), strict=True)
        }
        tails = [condition.layout.num_rows - condition.layout.trunk_stop for condition in conditions]
        pages = sum(pages_for(rows, self._pool.page_rows) for rows in [*units.values(), *tails])
        return pages * self._pool.page_bytes

    def _check_budget(self, conditions: Sequence[Condition]) -> None:
        needed, budget = self.bytes_needed(conditions), self._pool.num_pages * self._pool.page_bytes
        if needed > budget:
            raise BudgetTooSmall(needed, budget)

    def _trunk(self, condition: Condition, stack: ExitStack) -> tuple[Run, ...]:
        node: Node | None = None
        runs: tuple[Run, ...] = ()
        for key, unit in zip(condition.keys, condition.layout.trunk_units(), strict=True):
            child = self.tree.find(node, key)
            if child is None:
                run = self.tree.allocate(unit.stop - unit.start)
                with ExitStack() as undo:
                    undo.callback(self._pool.release, run)
                    self._runner.prefill([Chunk(condition, View(self._pool, runs), unit.stop, run)])
                    undo.pop_all()
                child = self.tree.insert(node, key, run)
            self.tree.acquire(child)
            stack.callback(self.tree.release, child)
            node, runs = child, (*runs, child.run)
        return runs

    def _tail(self, condition: Condition, stack: ExitStack) -> Run:
        run = self.tree.allocate(condition.layout.num_rows - condition.layout.trunk_stop)
        stack.callback(self._pool.release, run)
        return run
