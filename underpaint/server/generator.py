"""The generation worker's part: orders of another process, painted by an engine of this one.

All of it runs in one thread, turn after turn, as the engine does; only pages on their way are moved by another, beside
the passes.
"""

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from msgspec import Struct
from torch import Tensor

from underpaint.config import EngineConfig
from underpaint.devices import is_lost
from underpaint.errors import BadConfig, BudgetTooSmall, OutOfPages, UnderpaintError
from underpaint.handover.arena import Arena, ArenaReader, Slab
from underpaint.handover.channel import Channel, ready
from underpaint.handover.faults import BadHandover, GarbledFrame, PeerGone, PeerStalled, as_ours
from underpaint.handover.frames import Delivery
from underpaint.handover.messages import (
    Bring,
    Cancel,
    Coming,
    ErrorData,
    Failed,
    InPages,
    OpenArena,
    OpenPool,
    PaintOrder,
    Release,
)
from underpaint.handover.orders import borrow, read_order, slabs_of, views_of
from underpaint.handover.pages import Mover
from underpaint.handover.pools import MappedPool, RemotePool, map_pool
from underpaint.kv.pool import pages_for
from underpaint.kv.tree import PrefixTree
from underpaint.layout import Grid
from underpaint.models.neo_unify import NeoUnify
from underpaint.server.arenas import open_arena
from underpaint.server.commission import UNDERSTANDING, Commission, Reports
from underpaint.server.holding import Holding, is_coming
from underpaint.server.vitals import Vitals, of_pages, of_runner
from underpaint.server.wire import Handover
from underpaint.service import Easel, Model, make_pool

STALL_SECONDS = 5.0
"""How long pages may be on their way without a byte coming. What computes them may be a pass that has just begun."""


UNDERSTANDING_DEVICE = "cuda:1"
"""Where pages are fetched from, as this process sees it: see ``plan.Plan.environment``."""


class Generator:
    """Paints what comes over the line to understanding, of which there is one at a time."""

    def __init__(self, model: Model, config: EngineConfig, handover: Handover, arena: Arena) -> None:
        """Raises BadConfig for a way of handing over that these devices do not have."""
        self.turn_began: float | None = None
        self._model = model
        self._config = config
        self._handover = handover
        self._arena = arena
        self._line: Channel | None = None
        self._reader: ArenaReader | None = None
        self._theirs: MappedPool | RemotePool | None = None
        self._tree: PrefixTree | None = None
        self._easel: Easel | None = None
        self._reports = Reports(arena, self._say)
        self._moving = ThreadPoolExecutor(1, thread_name_prefix="move")
        self._commissions: dict[str, Commission] = {}
        self._queue: deque[Commission] = deque()  # without pages for their prefixes yet
        if handover == "fetch":
            _check_peers(config.device, UNDERSTANDING_DEVICE)
        if handover != "in_place" or not isinstance(model, NeoUnify):
            self._tree = PrefixTree(make_pool(model, config, handover != "in_place"))
            self._mover = Mover(self._tree.pool)
            self._easel = Easel(model, config, self._tree)

    @property
    def vitals(self) -> Vitals:
        pages, easel = of_pages(self._tree) if self._tree else Vitals(), self._easel  # which the other thread may drop
        return pages + (of_runner(easel.runner) if easel else Vitals())

    def meet(self, line: Channel) -> None:
        """Paint for the process at the other end from now on, and for no other."""
        self.part()
        self._line = line
        with suppress(PeerGone):  # the next turn finds it, too
            line.send(OpenArena(), (self._arena.memory.fd,))

    def part(self) -> None:
        """Drop all that came over the line, and the line."""
        line, self._line = self._line, None
        for commission in list(self._commissions.values()):
            if self._easel is not None:
                self._easel.engine.drop(commission.order)
            self._forget(commission)
        self._arena.end_holder(UNDERSTANDING)
        if isinstance(self._model, NeoUnify) and self._handover == "in_place":
            self._easel = None
        for held in (line, self._reader, self._theirs):
            if held is not None:
                held.close()
        self._reader = self._theirs = None

    def turn(self) -> None:
        """Hear what came, admit what fits, run one pass, and report."""
        if self._line is None:
            return
        try:
            while (delivery := self._line.receive(0)) is not None:
                self._take(delivery)
            self._admit()
            self._begin_filled()
            if self._easel is not None:
                self.turn_began = time.monotonic()
                self._easel.engine.turn()
                self.turn_began = None
            for commission in list(self._commissions.values()):
                if commission.submitted and self._reports.tell(commission):
                    self._forget(commission)
                    _leave_if_lost(commission.order.error)
        except (PeerGone, PeerStalled, GarbledFrame):
            self.part()

    def wait(self, seconds: float) -> None:
        """Until a turn may find something to do."""
        if self._easel is not None and not self._easel.engine.idle:
            return
        if self._commissions:
            seconds = min(seconds, 0.001)
        if self._line is not None:
            ready([self._line], seconds)
        else:
            time.sleep(seconds)

    def _take(self, delivery: Delivery) -> None:
        match delivery.message:
            case OpenArena():
                self._reader = open_arena(delivery.descriptors[0], self._config.device)
            case OpenPool() as pool:
                self._open_pool(pool, delivery.descriptors)
            case PaintOrder() as message:
                self._accept(message)
            case Coming(id=order_id, slab=slab):
                self._take_in(order_id, slab)
            case Cancel(id=order_id):
                if order_id in self._commissions:
                    self._commissions[order_id].order.cancel()
            case Release(slabs=slabs):
                for slab in slabs:
                    self._arena.release(slab)

    def _open_pool(self, pool: OpenPool, descriptors: tuple[int, ...]) -> None:
        if self._handover == "fetch":
            self._theirs = RemotePool(pool, self._config.device)
            return
        self._theirs = map_pool(pool, descriptors, self._config.device)
        self._easel = Easel(self._model, self._config, PrefixTree(self._theirs.pool))

    def _accept(self, message: PaintOrder) -> None:
        assert self._reader is not None, "an order came before the arena that it lies in"
        try:
            order = read_order(message, self._reader, self._config.device, _refuse_seeds)
        except (UnderpaintError, RuntimeError) as error:  # the latter is torch's, out of memory too
            self._say(Failed(message.id, ErrorData.of(as_ours(error, "taking an order"))))
            return
        finally:
            self._say(Release(slabs_of(message)))
        commission = self._commissions[message.id] = Commission(message, order)
        try:
            if message.prefix is None:
                self._submit(commission)
            else:
                self._check_budget(message.prefix)
                self._queue.append(commission)
        except BudgetTooSmall as error:
            self._fail(commission, error)

    def _check_budget(self, prefix: InPages) -> None:
        """Raises BudgetTooSmall if an empty pool could not hold a prefix."""
        if self._tree is None:
            return
        pool = self._tree.pool
        needed = sum(pages_for(rows, pool.page_rows) for rows in prefix.rows)
        if needed > pool.num_pages:
            raise BudgetTooSmall(needed * pool.page_bytes, pool.num_pages * pool.page_bytes)

    def _admit(self) -> None:
        """In order of arrival, while there are pages. Who is not wanted any more goes, wherever it stands."""
        for commission in list(self._queue):
            if (error := commission.overdue) is not None:
                self._fail(commission, error)
        while self._queue:
            commission = self._queue[0]
            prefix = commission.message.prefix
            assert prefix is not None
            if isinstance(self._theirs, MappedPool):
                commission.order.lease = borrow(commission.message, self._theirs.pool, prefix.runs)
                self._submit(commission)
            elif not self._hold(commission, prefix):
                return
            if commission in self._queue:
                self._queue.popleft()

    def _hold(self, commission: Commission, prefix: InPages) -> bool:
        """Take pages for a prefix, and have brought what is missing. False if that must wait: for pages, or for a unit
        that is on its way for another order."""
        assert self._tree is not None
        views = views_of(commission.message)
        if is_coming(self._tree, prefix, views):
            return False
        try:
            holding = commission.holding = Holding(self._tree, prefix, views)
        except OutOfPages:
            return False
        if not isinstance(self._theirs, RemotePool):
            self._say(Bring(commission.id, holding.missing))
        elif holding.missing:
            theirs, ours = ([runs[i] for i in holding.missing] for runs in (prefix.runs, holding.runs))
            commission.filling = self._moving.submit(self._mover.fetch, self._theirs, theirs, ours)
        return True

    def _take_in(self, order_id: str, slab: Slab) -> None:
        """A slab with what was missing is being written."""
        assert self._reader is not None
        commission = self._commissions.get(order_id)
        if commission is None or commission.holding is None:
            self._say(Release((slab,)))  # it has ended meanwhile
            return
        runs = [commission.holding.runs[i] for i in commission.holding.missing]
        commission.slab = slab
        commission.filling = self._moving.submit(self._mover.scatter, self._reader, slab, runs, STALL_SECONDS)

    def _begin_filled(self) -> None:
        """Paint from prefixes that have come."""
        for commission in list(self._commissions.values()):
            holding = commission.holding
            if commission.submitted or holding is None:
                continue
            assert self._tree is not None
            if not commission.has_come:
                if commission.filling is None and commission.overdue is not None:
                    self._fail(commission, commission.overdue)
                continue
            failure = commission.failure
            if failure is None:
                holding.filled()
            if (error := failure or commission.overdue) is not None:
                self._fail(commission, error)
                continue
            commission.order.lease = borrow(commission.message, self._tree.pool, holding.runs)
            self._submit(commission)

    def _submit(self, commission: Commission) -> None:
        """From here on the engine ends it. Raises BudgetTooSmall."""
        assert self._easel is not None, "an order came before the pages that it lies in"
        self._easel.engine.submit(commission.order)
        commission.submitted = True
        self._release(commission)

    def _fail(self, commission: Commission, error: UnderpaintError) -> None:
        self._say(Failed(commission.id, ErrorData.of(error)))
        self._forget(commission)
        _leave_if_lost(error)

    def _forget(self, commission: Commission) -> None:
        if commission.filling is not None:
            commission.filling.exception()  # nothing may write to pages that are given back
        self._release(commission)
        if commission.holding is not None:
            commission.holding.close()
        self._commissions.pop(commission.id, None)
        if commission in self._queue:
            self._queue.remove(commission)

    def _release(self, commission: Commission) -> None:
        """The slab that its prefix came in."""
        if commission.slab is not None and self._line is not None:
            self._line.send(Release((commission.slab,)))
        commission.slab = None

    def _say(self, *messages: Struct) -> None:
        assert self._line is not None
        for message in messages:
            self._line.send(message)


def _leave_if_lost(error: UnderpaintError | None) -> None:
    """What was said of it is said; the worker ends by this error, and is started again."""
    if error is not None and is_lost(error):
        raise error


def _check_peers(reader: str, owner: str) -> None:
    if not torch.cuda.can_device_access_peer(torch.device(reader), torch.device(owner)):
        raise BadConfig("generation's device cannot read the memory of understanding's; use handover shm")


def _refuse_seeds(seed: int, grid: Grid) -> Tensor:
    raise BadHandover("noise comes drawn")
