"""What one request has in the engines: all of it can be cancelled at once, and has one deadline."""

import threading
import time

from underpaint.errors import Cancelled, DeadlinePassed, UnderpaintError
from underpaint.generation.job import Order
from underpaint.understanding.reply import Reply


class RequestClaim:
    """See ``Service.view``. A ``Chat`` or a studio makes orders and replies of its own, deep inside; they pass through
    here, so whoever holds this can cancel all of them at any time, from any thread, within one pass."""

    def __init__(self, deadline: float) -> None:
        """``deadline``: on the clock of ``time.monotonic``."""
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

    def check(self) -> None:
        """Raises Cancelled or DeadlinePassed if this request must not go on."""
        if self._cancelled:
            raise Cancelled("the request was cancelled")
        if time.monotonic() > self.deadline:
            raise late(self.deadline - self._started)

    def take(self, work: Order | Reply) -> None:
        """Answer for ``work`` from now on. Raises Cancelled or DeadlinePassed."""
        self.check()
        work.deadline = self.deadline
        if isinstance(work, Reply):
            self.num_prompt_rows = self.num_prompt_rows or work.passage.num_rows
        with self._owning:
            self._owned.append(work)
            if self._cancelled:
                work.cancel()


def late(seconds: float) -> UnderpaintError:
    """What a request is told that was not done in the ``seconds`` it had."""
    return DeadlinePassed(f"not done in {seconds:.1f} s")
