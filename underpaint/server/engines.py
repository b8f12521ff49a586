"""The engines as one request sees them: what it submits can be cancelled, and has its deadline."""

import threading
import time
from collections.abc import Generator
from typing import Any

from underpaint.config import EngineConfig
from underpaint.errors import Cancelled, DeadlinePassed, UnderpaintError
from underpaint.generation.job import Order
from underpaint.kv.pool import PagePool
from underpaint.models.neo_unify import NeoUnify
from underpaint.models.qwen_image21 import QwenImage21
from underpaint.service import Model, Service
from underpaint.understanding.reply import Reply


class RequestEngines:
    """Stands in for the ``Service`` in the work of one request.

    A ``Chat`` or a studio makes orders and replies of its own, deep inside; here they pass through a place that knows
    whose they are. So whoever holds this can cancel all of them at any time, from any thread, within one pass.
    """

    def __init__(self, service: Service, deadline: float) -> None:
        """``deadline``: on the clock of ``time.monotonic``."""
        self.deadline = deadline
        self.num_prompt_rows = 0
        self._service = service
        self._started = time.monotonic()
        self._owned: list[Order | Reply] = []
        self._replies: list[Reply] = []
        self._cancelled = False
        self._lock = threading.Lock()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def num_answer_tokens(self) -> int:
        """Tokens written for this request."""
        return sum(len(reply.ids) for reply in self._replies)

    @property
    def model(self) -> Model:
        return self._service.model

    @property
    def config(self) -> EngineConfig:
        return self._service.config

    @property
    def pool(self) -> PagePool:
        return self._service.pool

    @property
    def qwen(self) -> QwenImage21:
        return self._service.qwen

    @property
    def neo(self) -> NeoUnify:
        return self._service.neo

    def cancel(self) -> None:
        """End everything of this request before the next pass, and refuse what it would still submit."""
        with self._lock:
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
        self._own(order)
        self._service.submit_order(order)

    def finish_order(self, order: Order) -> Generator[None, None, None]:
        return self._service.finish_order(order)

    def submit_reply(self, reply: Reply) -> None:
        self._own(reply)
        if not self._replies:
            self.num_prompt_rows = reply.passage.num_rows
        self._replies.append(reply)
        self._service.submit_reply(reply)

    def resume_reply(self, reply: Reply, *more: Any) -> None:
        self.check()
        self._service.resume_reply(reply, *more)

    def rest_reply(self, reply: Reply) -> Generator[None, None, None]:
        return self._service.rest_reply(reply)

    def drop_reply(self, reply: Reply) -> None:
        self._service.drop_reply(reply)

    def _own(self, work: Order | Reply) -> None:
        self.check()
        work.deadline = self.deadline
        with self._lock:
            self._owned.append(work)
            if self._cancelled:
                work.cancel()
