"""An accepted request: what is told of it, and its one outcome."""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from underpaint.errors import UnderpaintError
from underpaint.server.config import Kind, Priority
from underpaint.server.errand import Work
from underpaint.server.news import Event
from underpaint.server.tracing import Stages

SHIFT_SECONDS: dict[Priority, float] = {"high": -60.0, "normal": 0.0, "low": 60.0}
"""A request waits as if it had come that much later. So a high one overtakes, but nobody is overtaken for ever."""


@dataclass(eq=False)
class Task:
    """An accepted request. ``events``: what its work told so far, oldest first. Once ``done`` it has its one outcome:
    ``result``, or ``error``.

    ``stage`` names what is being done now, for metrics. ``step`` of ``num_steps`` is the progress of its pictures.
    ``work`` is there until it is done.
    """

    work: Work | None
    kind: Kind
    num_bytes: int
    deadline: float
    loop: asyncio.AbstractEventLoop
    withdraw: Callable[["Task"], None]
    stages: Stages
    priority: Priority
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: float = field(default_factory=time.time)
    accepted: float = field(default_factory=time.monotonic)
    started: float | None = None
    stage: str = "queued"
    step: int = 0
    num_steps: int = 0
    events: list[Event] = field(default_factory=list)
    cancelled: bool = False
    done: bool = False
    result: Any = None
    error: UnderpaintError | None = None
    _listeners: set[asyncio.Event] = field(default_factory=set)

    @property
    def due(self) -> float:
        """Who is due first is begun first."""
        return self.accepted + SHIFT_SECONDS[self.priority]

    def cancel(self) -> None:
        """Ask for an end: at once if it waits, else before the next pass. May be called at any time."""
        self.cancelled = True
        self.withdraw(self)

    def notify(self) -> None:
        for listener in tuple(self._listeners):
            self.loop.call_soon_threadsafe(listener.set)

    async def changed(self, timeout: float) -> None:
        """Wait until something happens to the task, for up to ``timeout`` seconds. What happened before the call may
        be missed by the wait, so that ``timeout`` is also how often to look."""
        if self.done:
            return
        listener = asyncio.Event()
        self._listeners.add(listener)
        try:
            await asyncio.wait_for(listener.wait(), timeout)
        except TimeoutError:
            return
        finally:
            self._listeners.discard(listener)
