"""Generation in other processes, as the service of this one sees it (``service.Generation``).

Whoever holds the service's lock may call ``submit``, ``turn`` and ``drop``. Orders are written into shared memory by a
thread of its own, so that a condition on its way holds up nobody.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from torch import Tensor

from underpaint.devices import wait_for
from underpaint.errors import UnderpaintError
from underpaint.generation.job import Order
from underpaint.handover.arena import Arena, ArenaReader
from underpaint.handover.channel import Channel
from underpaint.handover.faults import (
    BadHandover,
    DamagedSlab,
    GarbledFrame,
    PeerGone,
    PeerStalled,
    StaleSlab,
    as_ours,
)
from underpaint.handover.frames import Delivery
from underpaint.handover.messages import (
    Bring,
    Cancel,
    Coming,
    Failed,
    Kept,
    OpenArena,
    Painted,
    Progress,
    Release,
    TensorAt,
)
from underpaint.handover.orders import Prefix, Terms, read_tensors, slabs_of, write_order
from underpaint.handover.pages import Mover, slab_bytes
from underpaint.handover.pools import SharedPool
from underpaint.kv.pool import PagePool, Run
from underpaint.kv.tree import Key
from underpaint.server.arenas import NO_DEADLINE_SECONDS, open_arena
from underpaint.server.vitals import Vitals
from underpaint.server.wire import WorkerLost

GONE = "the process that paints has ended; it is being started again, try again soon"
MAX_UNITS = 4096
"""Units of which a line remembers that they went over it."""


@dataclass(eq=False)
class Dispatch:
    """An order on its way: first it waits, then it is ``started`` by the thread that sends, then ``sent``, and maybe
    ``called_off``. All that is known of it goes with it: it may have ended before the thread that sends says so.
    ``num_new``: rows of its prefixes that the other process did not have."""

    order: Order
    num_prefill: int
    started: bool = False
    sent: bool = False
    called_off: bool = False

    @property
    def rows_to_go(self) -> int:
        """Rows that the other process has yet to compute for it."""
        if self.order.error is not None:
            return 0
        jobs = self.order.jobs
        rows = sum((job.sampler.num_steps - job.step) * job.num_rows for job in jobs if not job.done)
        return rows + (0 if any(job.step for job in jobs) else self.num_prefill)


@dataclass(eq=False)
class Line:
    """A connection to a generation worker, and the orders that it has, or will have. ``number`` and ``worker``: see
    ``wire.Meet``. ``num_taken``: orders up to now; ``units``: of those, the latest last."""

    number: int
    worker: int
    channel: Channel
    reader: ArenaReader | None = None
    dispatches: dict[str, Dispatch] = field(default_factory=dict)
    num_taken: int = 0
    units: dict[Key, None] = field(default_factory=dict)

    @property
    def holder(self) -> str:
        """Of what is handed over on it."""
        return f"line {self.number}"

    def order(self, order_id: str) -> Order:
        return self.dispatches[order_id].order

    def claim(self, order: Order) -> tuple[int, int, int]:
        """The smaller, the rather an order should go over this line: rows that its worker has to compute before the
        steps of this one, rows that are new to it, and orders that it had."""
        rows = sum(dispatch.rows_to_go for dispatch in self.dispatches.values())
        return rows + self._num_prefill(order), self._num_new(order), self.num_taken

    def take(self, order_id: str, order: Order) -> Dispatch:
        """Expect an order to go over this line."""
        dispatch = self.dispatches[order_id] = Dispatch(order, self._num_prefill(order))
        self.num_taken += 1
        for key in [unit.key for condition in order.conditions for unit in condition.units]:
            self.units.pop(key, None)
            self.units[key] = None
        while len(self.units) > MAX_UNITS:
            del self.units[next(iter(self.units))]
        return dispatch

    def _num_new(self, order: Order) -> int:
        """Rows of units of an order that did not go over this line before."""
        units = {unit.key: unit.num_rows for condition in order.conditions for unit in condition.units}
        return sum(num_rows for key, num_rows in units.items() if key not in self.units)

    def _num_prefill(self, order: Order) -> int:
        """Of those, what the other process computes itself: nothing, where they are handed over in pages."""
        return 0 if order.lease is not None else self._num_new(order)


class RemoteGeneration:
    """Orders that other processes paint, each by one of them. They move, and end, when this turns."""

    def __init__(
        self,
        arena: Arena,
        device: str,
        shared: SharedPool | None,
        copied: PagePool | None,
        parted: Callable[[int], None],
    ) -> None:
        """``shared``: a pool whose pages the other processes read or fetch themselves, ``copied``: one whose pages are
        copied into the arena; neither for a family whose prefixes generation computes. ``parted`` is told when a line
        has ended."""
        self.vitals = Vitals()
        self._arena = arena
        self._device = device
        self._shared = shared
        self._copied = copied
        self._mover = Mover(copied) if copied is not None else None
        self._parted = parted
        self._num_heard = 0
        self._lines: dict[int, Line] = {}  # by worker
        self._arrivals: deque[Line] = deque()
        self._ids = (f"order-{i}" for i in count())
        self._starting = threading.Lock()
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="handover")
        self._handed: deque[Order] = deque()
        self._broken: deque[tuple[Line, str, UnderpaintError]] = deque()

    @property
    def passes(self) -> int:
        """Grows with all that the other processes tell, and with every second in which one has an order: whether that
        gets on is watched over elsewhere."""
        busy = any(line.dispatches for line in list(self._lines.values()))  # whoever turns may change them meanwhile
        return self._num_heard + (int(time.monotonic()) if busy else 0)

    def meet(self, number: int, worker: int, channel: Channel) -> None:
        """Have orders painted by the process at the other end, too. May be called from any thread."""
        with suppress(PeerGone):  # the next turn finds it, too
            channel.send(OpenArena(), (self._arena.memory.fd,))
            if self._shared is not None:
                channel.send(*self._shared.offer())
        self._arrivals.append(Line(number, worker, channel))

    def submit(self, order: Order) -> None:
        """To the process that would be the first to be done with it: what it has yet to compute is counted in rows. Of
        those that are equal, to the one that has most of its prefixes. Raises WorkerLost if there is nobody to paint it
        now."""
        self._adopt()
        if not self._lines:
            raise WorkerLost(GONE)
        line = min(self._lines.values(), key=lambda line: line.claim(order))
        order_id = next(self._ids)
        dispatch = line.take(order_id, order)
        sending = self._sending.submit(self._send, line, order_id, dispatch)
        sending.add_done_callback(partial(self._sent, line, order_id))

    def turn(self) -> None:
        """Take in what the other processes tell, and tell them what was cancelled."""
        self._adopt()
        for line in list(self._lines.values()):
            self._attend(line)
        self._settle()

    def _attend(self, line: Line) -> None:
        try:
            while (delivery := line.channel.receive(0)) is not None:
                self._num_heard += 1
                self._take(line, delivery)
            for order_id, dispatch in list(line.dispatches.items()):
                if dispatch.order.error is not None:
                    self._call_off(line, order_id, dispatch)
        except (PeerGone, PeerStalled, GarbledFrame):
            self._part(line)

    def drop(self, order: Order) -> None:
        """End an order now. What it holds is given back when the other process has let go of it too."""
        if order.ended:
            return
        order.cancel()
        order.ended = True
        if all(dispatch.order is not order for line in self._lines.values() for dispatch in line.dispatches.values()):
            _close(order)

    def _adopt(self) -> None:
        """Take up lines that have come, each in place of an earlier one to the same worker."""
        while self._arrivals:
            line = self._arrivals.popleft()
            if line.worker in self._lines:
                self._part(self._lines[line.worker])
            self._lines[line.worker] = line

    def _part(self, line: Line) -> None:
        for order_id, dispatch in list(line.dispatches.items()):
            dispatch.order.error = dispatch.order.error or WorkerLost(GONE)
            self._end(line, order_id)
        line.channel.close()  # first: who gets a slab for it from now on cannot send it, and gives it back
        self._arena.end_holder(line.holder)
        if line.reader is not None:
            line.reader.close()
        del self._lines[line.worker]
        self._parted(line.number)

    def _call_off(self, line: Line, order_id: str, dispatch: Dispatch) -> None:
        """An order is not wanted any more: it ends now if it is not on its way yet, else when it is called back."""
        if dispatch.sent and not dispatch.called_off:
            line.channel.send(Cancel(order_id))
            dispatch.called_off = True
        with self._starting:
            if not dispatch.started:
                self._end(line, order_id)

    def _settle(self) -> None:
        """What the thread that sends has done."""
        while self._handed:
            _close(self._handed.popleft())
        while self._broken:
            line, order_id, error = self._broken.popleft()
            dispatch = line.dispatches.get(order_id)
            if dispatch is not None:
                dispatch.order.error = dispatch.order.error or error
                if not dispatch.sent:  # else it is called back, and ends when the other process says so
                    self._end(line, order_id)

    def _take(self, line: Line, delivery: Delivery) -> None:
        match delivery.message:
            case OpenArena():
                line.reader = open_arena(delivery.descriptors[0], self._device)
            case Release(slabs=slabs):
                for slab in slabs:
                    self._arena.release(slab)
            case Bring(id=order_id, runs=indices):
                order = line.order(order_id)
                prefix = self._prefix(order)
                assert prefix is not None
                runs = [prefix.pages.runs[i] for i in indices]
                bringing = self._sending.submit(self._bring, line, order_id, order, runs)
                bringing.add_done_callback(partial(self._sent, line, order_id))
            case Progress(id=order_id, steps=steps):
                for job, step in zip(line.order(order_id).jobs, steps, strict=True):
                    job.step = step
            case Kept(id=order_id, job=index, step=step, state=state):
                order = line.order(order_id)
                for tensor in self._read(line, order, (state,)):
                    order.jobs[index].kept[step] = tensor
            case Painted(id=order_id) as painted:
                self._take_painted(line, line.order(order_id), painted)
                self._end(line, order_id)
            case Failed(id=order_id, error=error):
                order = line.order(order_id)
                order.error = order.error or error.error()
                self._end(line, order_id)

    def _take_painted(self, line: Line, order: Order, painted: Painted) -> None:
        for job, state in zip(order.jobs, self._read(line, order, painted.states), strict=False):
            job.state, job.step = state, job.sampler.num_steps
        order.prefilled = painted.prefilled

    def _read(self, line: Line, order: Order, places: tuple[TensorAt, ...]) -> list[Tensor]:
        """Copies of what was handed back; if they cannot be had, the order has failed, and nobody else."""
        assert line.reader is not None
        tensors: list[Tensor] = []
        try:
            tensors = read_tensors(line.reader, places, self._device)
        except (StaleSlab, DamagedSlab, BadHandover, RuntimeError) as error:  # the last is torch's, out of memory too
            order.error = order.error or as_ours(error, "taking a picture back")
        line.channel.send(Release(tuple({place.slab for place in places})))
        return tensors

    def _end(self, line: Line, order_id: str) -> None:
        order = line.dispatches.pop(order_id).order
        _close(order)
        order.ended = True

    def _send(self, line: Line, order_id: str, dispatch: Dispatch) -> None:
        """In the thread that sends."""
        order = dispatch.order
        with self._starting:
            if order.ended:
                return
            dispatch.started = True
        if order.error is not None:
            raise order.error
        prefix = self._prefix(order)
        if self._shared is not None and self._device.startswith("cuda"):
            wait_for(self._device)  # another process does not wait for what this one still computes
        message = write_order(order, order_id, self._arena, _terms(line, order), prefix)
        try:
            line.channel.send(message)
        except BaseException:  # the line may have ended before its slab was leased
            for slab in slabs_of(message):
                self._arena.release(slab)
            raise
        dispatch.sent = True

    def _prefix(self, order: Order) -> Prefix | None:
        if order.lease is None:
            return None
        pool = self._copied or (self._shared.pool if self._shared else None)
        assert pool is not None, "prefixes in pages need a pool"
        return Prefix.of(order.lease.views, order.conditions, pool.codec.name)

    def _bring(self, line: Line, order_id: str, order: Order, runs: Sequence[Run]) -> None:
        """In the thread that sends: hand over pages through the arena. The other process follows while they are being
        written."""
        assert self._copied is not None
        assert self._mover is not None
        if order.error is not None or not runs:
            self._handed.append(order)
            return
        num_bytes, terms = slab_bytes(self._copied, sum(run.num_rows for run in runs)), _terms(line, order)
        slab = self._arena.lease(num_bytes, terms.holder, terms.deadline, terms.wait_until)
        begin = time.monotonic()
        try:
            line.channel.send(Coming(order_id, slab))
            self._mover.gather(runs, self._arena, slab)
        except BaseException:
            self._arena.release(slab)
            raise
        self._handed.append(order)
        self.vitals += Vitals(handovers=1, handover_bytes=num_bytes, handover_seconds=time.monotonic() - begin)

    def _sent(self, line: Line, order_id: str, sending: "Future[None]") -> None:
        """An order that could not be sent ends at the next turn, whatever the reason was."""
        error = sending.exception()
        if error is not None:
            self._broken.append((line, order_id, as_ours(error, "handing over")))


def _terms(line: Line, order: Order) -> Terms:
    deadline = order.deadline or time.monotonic() + NO_DEADLINE_SECONDS
    return Terms(line.holder, deadline, deadline)


def _close(order: Order) -> None:
    if order.lease is not None:
        order.lease.close()
