"""The engines as one request sees them: what it submits can be cancelled, and has its deadline."""

import threading
import time
from typing import Any

from underpaint.errors import Cancelled, DeadlinePassed, UnderpaintError
from underpaint.generation.job import Order
from underpaint.service import Service
from underpaint.understanding.reply import Reply


class RequestEngines(Service):
    """A ``Service`` for the work of one request; it shares everything with the service that it is made from.

    A ``Chat`` or a studio makes orders and replies of its own, deep inside; here they pass through a place that knows
    whose they are. So whoever holds this can cancel all of them at any time, from any thread, within one pass.
    """

    def __init__(self, service: Service, deadline: float) -> None:
        """``deadline``: on the clock of ``time.monotonic``."""
        vars(self).update(vars(service))  # instead of Service.__init__, which would make engines of its own
        self.deadline = deadline
        self.num_prompt_rows = 0
        self._started = time.monotonic()
        self._owned: list[Order | Reply] = []
        self._cancelled = False
        self._owning = threading.Lock()

    @property
    def num_answer_tokens(self) -> int:
        """Tokens written for this request."""
        return sum(len(work.ids) for work in self._owned if isinstance(work, Reply))

    def cancel(self) -> None:
        """End everything of this request before the next pass, and refuse what it would still submit."""
        with self._owning:
            self._cancelled = True
            for work in self._owned:
                work.cancel()

    def reason(self) -> UnderpaintError | None:
        """Why this request must not go on: it was cancelled, or its time is over."""
        if self._cancelled:
            return Cancelled("the request was cancelled")
        if time.monotonic() > self.deadline:
            return DeadlinePassed(f"not done in {self.deadline - self._started:.1f} s")
        return None

    def check(self) -> None:
        """Between stages that no engine runs. Raises Cancelled or DeadlinePassed."""
        reason = self.reason()
        if reason is not None:
            raise reason

    def submit_order(self, order: Order) -> None:
        """As the service does, for this request. Raises Cancelled or DeadlinePassed too."""
        self._own(order)
        super().submit_order(order)

    def submit_reply(self, reply: Reply) -> None:
        """As the service does, for this request. Raises Cancelled or DeadlinePassed too."""
        self.num_prompt_rows = self.num_prompt_rows or reply.passage.num_rows
        self._own(reply)
        super().submit_reply(reply)

    def resume_reply(self, reply: Reply, *more: Any) -> None:
        """As the service does. Raises Cancelled or DeadlinePassed too."""
        self.check()
        super().resume_reply(reply, *more)

    def _own(self, work: Order | Reply) -> None:
        self.check()
        work.deadline = self.deadline
        with self._owning:
            self._owned.append(work)
            if self._cancelled:
                work.cancel()
