"""The generation engine: prefills and steps of all requests, one pass a turn.

A request joins at the next turn and ends between turns: done, cancelled, late or broken, and always with an answer.
Its prefill goes in pieces beside the steps of others. One that breaks fails alone.
"""

import itertools
import time
from collections import deque
from collections.abc import Sequence

import torch

from underpaint.errors import (
    PASS_FAILURES,
    DeadlinePassed,
    EngineFailure,
    OutOfMemory,
    OutOfPages,
    UnderpaintError,
)
from underpaint.generation.arrangement import Place
from underpaint.generation.job import Job, Order
from underpaint.generation.prefix import PrefixCache
from underpaint.generation.runner import Runner
from underpaint.generation.scheduler import Item, next_batch
from underpaint.layout import Grid

Work = Order | Job
"""An order stands for its next prefill chunks, a job for its next step."""


class GenerationEngine:
    """Not for several threads at once: whoever calls ``turn`` holds a lock. ``Order.cancel`` needs none."""

    def __init__(self, prefixes: PrefixCache, runner: Runner, max_batch_rows: int) -> None:
        self.turns = 0
        self._prefixes = prefixes
        self._runner = runner
        self._max_batch_rows = max_batch_rows
        self._waiting: deque[Order] = deque()
        self._active: list[Order] = []
        self._served = itertools.count()

    @property
    def passes(self) -> int:
        return self._runner.passes

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._active

    def warm_up(self, grids: Sequence[Grid], num_branches: Sequence[int] = (1, 2)) -> None:
        """See ``Runner.warm_up``. Between turns."""
        self._runner.warm_up(grids, num_branches)

    def submit(self, order: Order) -> None:
        """Queue an order. Raises BudgetTooSmall if it could never be served."""
        if order.lease is not None:
            self._active.append(order)
            return
        self._prefixes.check_budget(order.conditions)
        self._waiting.append(order)

    def turn(self) -> None:
        """End what is over, admit what fits, and run one pass."""
        self._end_overdue()
        self._admit()
        batch = next_batch(self._items(), self._max_batch_rows)
        if batch:
            self._run([item.owner for item in batch])
        self.turns += 1
        for order in [o for o in self._active if o.lease and o.lease.ready and all(job.done for job in o.jobs)]:
            self._end(order)

    def drop(self, order: Order) -> None:
        """End an order now, whatever its state; nothing stays taken. An order that has ended is left as it is."""
        if order.ended:
            return
        order.cancel()
        if order in self._waiting:
            self._waiting.remove(order)
        self._end(order)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for order in [*self._waiting, *self._active]:
            if order.error is None and order.deadline is not None and now > order.deadline:
                order.error = DeadlinePassed(
                    f"not done in {order.deadline - order.submitted:.1f} s; step {order.step} of {order.num_steps}"
                )
            if order.error is not None:
                self.drop(order)

    def _admit(self) -> None:
        """In order of arrival, while pages can be promised. Whoever waits is first when others end."""
        while self._waiting:
            try:
                self._waiting[0].lease = self._prefixes.open(self._waiting[0].conditions)
            except OutOfPages:
                return
            self._active.append(self._waiting.popleft())

    def _items(self) -> list[Item[Work]]:
        items: list[Item[Work]] = []
        for order in [*self._active]:
            assert order.lease is not None
            try:
                chunks = order.lease.next_chunks()
            except PASS_FAILURES as error:  # no memory for its views, perhaps
                self._fail(order, error)
                continue
            if chunks:
                rows = sum(chunk.stop - chunk.prefix.num_rows for chunk in chunks)
                items.append(Item(order, rows, order.served))
            elif self._place(order):
                items += [Item(job, job.num_rows, job.served) for job in order.jobs if not job.done]
        return items

    def _run(self, batch: list[Work]) -> None:
        """One pass; if it breaks, one pass for each, so that only those that break fail."""
        try:
            self._pass(batch)
        except PASS_FAILURES as error:
            owners = [self._owner(work) for work in batch]  # now: one of several pictures may end the order of all
            if len(batch) == 1:
                self._fail(owners[0], error)
                return
            for work, owner in zip(batch, owners, strict=True):
                if not owner.ended:
                    self._run([work])

    def _pass(self, batch: list[Work]) -> None:
        orders = [work for work in batch if isinstance(work, Order)]
        jobs = [work for work in batch if isinstance(work, Job)]
        chunks = [chunk for order in orders if order.lease for chunk in order.lease.next_chunks()]
        targets = [job.targets() for job in jobs]
        velocities = iter(self._runner.run(chunks, [placed for of_job in targets for placed in of_job]))
        states = [job.after([next(velocities) for _ in of_job]) for job, of_job in zip(jobs, targets, strict=True)]
        # Only now, when nothing can break any more, does anything move.
        for job, state in zip(jobs, states, strict=True):
            job.move(state)
        for order in orders:
            assert order.lease is not None
            order.lease.commit()
            self._place(order)
        for work in batch:
            work.served = next(self._served)

    def _place(self, order: Order) -> bool:
        """Once the prefixes are in pages, the jobs have places to paint at; whether they have. If placing breaks, that
        ends this order, and is no failure of the pass before it, whose jobs have moved, nor of whoever turns."""
        if order.lease is None or not order.lease.ready:
            return False
        if order.prefilled is not None:
            return True
        try:
            views, places = order.lease.views, dict[tuple[int, Grid], Place]()
            for job in order.jobs:
                for branch, index in job.conditions.items():
                    where = index, job.grid
                    if where not in places:  # the rotations of a target of 2048 x 2048 are 8 MiB
                        places[where] = self._runner.place(order.conditions[index], views[index], job.grid)
                    job.places[branch] = places[where]
        except PASS_FAILURES as error:
            self._fail(order, error)
            return False
        order.prefilled = time.monotonic()
        return True

    def _owner(self, work: Work) -> Order:
        if isinstance(work, Order):
            return work
        return next(order for order in self._active if work in order.jobs)

    def _fail(self, order: Order, error: Exception) -> None:
        if isinstance(error, UnderpaintError):
            order.error = error
        elif isinstance(error, torch.OutOfMemoryError):
            order.error = OutOfMemory(
                "the device ran out of memory: paint fewer or smaller pictures at once, or load the model with a "
                f"smaller max_batch_rows (now {self._max_batch_rows}) or kv_cache_bytes"
            )
        else:
            order.error = EngineFailure(f"the pass broke: {error}")
        order.error.__cause__ = error if order.error is not error else None
        self._end(order)

    def _end(self, order: Order) -> None:
        if order in self._active:
            self._active.remove(order)
        if order.lease is not None:
            order.lease.close()
        order.ended = True
