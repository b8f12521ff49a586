"""An order of another process, and what that process is told of it."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from msgspec import Struct
from torch import Tensor

from underpaint.errors import DeadlinePassed, UnderpaintError
from underpaint.generation.job import Order
from underpaint.handover.arena import Arena, Slab
from underpaint.handover.faults import ArenaFull, as_ours
from underpaint.handover.messages import ErrorData, Failed, Kept, Painted, PaintOrder, Progress, TensorAt
from underpaint.handover.orders import Terms, write_tensors
from underpaint.server.arenas import NO_DEADLINE_SECONDS
from underpaint.server.holding import Holding

UNDERSTANDING = "understanding"


@dataclass(eq=False)
class Commission:
    """An order of the other process. ``holding``: its prefix in pages of this one, where it is not read in place, and
    ``filling`` brings what is missing there, through ``slab``. ``steps`` and ``num_kept``: what was reported."""

    message: PaintOrder
    order: Order
    holding: Holding | None = None
    filling: "Future[None] | None" = None
    slab: Slab | None = None
    submitted: bool = False
    steps: tuple[int, ...] = ()
    num_kept: dict[int, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def has_come(self) -> bool:
        """Whether nothing of its prefix is on its way any more; ``filling`` may have failed."""
        assert self.holding is not None
        return not self.holding.missing or (self.filling is not None and self.filling.done())

    @property
    def failure(self) -> UnderpaintError | None:
        """Why its prefix did not come."""
        broken = self.filling.exception() if self.filling else None
        return None if broken is None else as_ours(broken, "moving pages")

    @property
    def overdue(self) -> UnderpaintError | None:
        """Why it need not be begun any more."""
        order = self.order
        if order.error is None and order.deadline is not None and time.monotonic() > order.deadline:
            order.error = DeadlinePassed(f"not done in {order.deadline - order.submitted:.1f} s; not begun yet")
        return order.error


class Reports:
    """Tells how commissions get on. States go by way of this process's arena; where it has no room now, later."""

    def __init__(self, arena: Arena, say: Callable[[Struct], None]) -> None:
        self._arena = arena
        self._say = say

    def tell(self, commission: Commission) -> bool:
        """What is new of an order; True if that was its end."""
        order = commission.order
        try:
            self._tell_kept(commission)
            if order.ended and order.error is None:
                states = self._write(order, [job.state for job in order.jobs])
                assert order.lease is not None
                assert order.prefilled is not None
                self._say(Painted(commission.id, states, order.lease.rows_prefilled, order.prefilled))
                return True
        except ArenaFull as error:
            fits_never = not self._arena.num_leases
            if not order.ended or not (fits_never or commission.overdue):
                return False
            order.error = order.error or error
        if order.ended:
            assert order.error is not None
            self._say(Failed(commission.id, ErrorData.of(order.error)))
            return True
        steps = tuple(job.step for job in order.jobs)
        if steps != commission.steps:
            commission.steps = steps
            self._say(Progress(commission.id, steps))
        return False

    def _tell_kept(self, commission: Commission) -> None:
        for index, job in enumerate(commission.order.jobs):
            for step in list(job.kept)[commission.num_kept.get(index, 0) :]:
                (state,) = self._write(commission.order, [job.kept[step]])
                self._say(Kept(commission.id, index, step, state))
                commission.num_kept[index] = commission.num_kept.get(index, 0) + 1

    def _write(self, order: Order, tensors: list[Tensor]) -> tuple[TensorAt, ...]:
        deadline = order.deadline or time.monotonic() + NO_DEADLINE_SECONDS
        return write_tensors(self._arena, tensors, Terms(UNDERSTANDING, deadline))
