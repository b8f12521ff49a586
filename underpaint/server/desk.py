"""The desk: accepts requests while there is room, has them worked in threads, and knows the one outcome of each.

Work runs in threads, never on the event loop. Calls of several threads advance together, step by step, because whoever
waits for something turns the engines (see ``service.py``).
"""

import asyncio
import math
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from structlog.typing import FilteringBoundLogger

from underpaint.errors import Cancelled, DeadlinePassed, EngineFailure, OutOfMemory, UnderpaintError
from underpaint.server.config import ServerConfig
from underpaint.server.engines import RequestEngines
from underpaint.server.faults import NotReady, QueueFull
from underpaint.server.metrics import Metrics
from underpaint.service import Service

STUCK_SECONDS = 10.0
"""How long after its deadline a request may still be at work before the server says that it is not well. A pass of the
largest picture on a slow device must fit."""
MAX_RETRY_SECONDS = 60
FIRST_GUESS_SECONDS = 1.0

Work = Callable[["Task"], Any]


class State(Enum):
    """Of the whole server. Only ``READY`` accepts requests."""

    STARTING = "the server is warming up"
    READY = "ready"
    DRAINING = "the server is shutting down"
    BROKEN = "the server is broken; its log says why"


@dataclass(eq=False)
class Task:
    """An accepted request. ``events``: what its work told so far, oldest first. Once ``done`` it has its one outcome:
    ``result``, or ``error``.

    ``stage`` names what is being done now, for metrics. ``step`` of ``num_steps`` is the progress of its pictures.
    """

    engines: RequestEngines
    num_bytes: int
    loop: asyncio.AbstractEventLoop
    metrics: Metrics
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: float = field(default_factory=time.time)
    accepted: float = field(default_factory=time.monotonic)
    started: float | None = None
    stage: str = "queued"
    step: int = 0
    num_steps: int = 0
    events: list[Any] = field(default_factory=list)
    done: bool = False
    result: Any = None
    error: UnderpaintError | None = None
    future: "Future[Any] | None" = None
    _listeners: set[asyncio.Event] = field(default_factory=set)

    def cancel(self) -> None:
        """Ask for an end: at once if it waits, else before the next pass. May be called at any time."""
        self.engines.cancel()
        if self.future is not None:
            self.future.cancel()

    def emit(self, event: Any) -> None:
        """Tell whoever listens."""
        self.events.append(event)
        self.notify()

    def progress(self, step: int, num_steps: int) -> None:
        if (step, num_steps) != (self.step, self.num_steps):
            self.step, self.num_steps = step, num_steps
            self.notify()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """A stage of the work. Raises Cancelled or DeadlinePassed if it must not begin."""
        self.engines.check()
        self.stage = stage
        start = time.monotonic()
        yield
        self.metrics.stage_seconds.labels(stage).observe(time.monotonic() - start)

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


class Desk:
    """All requests that are accepted and not yet done. ``num_accepted`` and ``num_done`` count them since the start;
    when nothing is at work they are equal."""

    def __init__(self, service: Service, config: ServerConfig, metrics: Metrics, log: FilteringBoundLogger) -> None:
        self.service = service
        self.config = config
        self.state = State.STARTING
        self.num_accepted = 0
        self.num_done = 0
        self._metrics = metrics
        self._log = log
        self._tasks: dict[str, Task] = {}
        self._lock = threading.Lock()
        self._usual_seconds = FIRST_GUESS_SECONDS
        self._threads = ThreadPoolExecutor(config.max_running, thread_name_prefix="work")

    @property
    def num_at_work(self) -> int:
        return len(self._tasks)

    @property
    def num_waiting(self) -> int:
        return max(0, len(self._tasks) - self.config.max_running)

    @property
    def ready(self) -> bool:
        """Whether requests are accepted and answered: false also when a thread hangs in a pass."""
        late = time.monotonic() - STUCK_SECONDS
        with self._lock:
            return self.state is State.READY and all(task.engines.deadline > late for task in self._tasks.values())

    def check_room(self, num_bytes: int = 0) -> None:
        """Raises NotReady, or QueueFull."""
        if self.state is not State.READY:
            raise NotReady(self.state.value)
        with self._lock:
            self._check_room(num_bytes)

    def accept(self, work: Work, num_bytes: int = 0) -> Task:
        """Take on a request; ``num_bytes`` is what it holds. Raises NotReady, or QueueFull. Call it on the loop."""
        if self.state is not State.READY:
            raise NotReady(self.state.value)
        return self._take(work, num_bytes)

    def warm_up(self, work: Work) -> Task:
        """Have ``work`` done before the server is ready."""
        return self._take(work, 0)

    def expire(self) -> None:
        """End what waits beyond its deadline. What is at work is ended by the engines."""
        now = time.monotonic()
        with self._lock:
            late = [task for task in self._tasks.values() if task.started is None and now > task.engines.deadline]
        for task in late:
            if task.future is not None:
                task.future.cancel()

    def cancel_all(self) -> None:
        with self._lock:
            tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()

    def close(self, timeout: float) -> bool:
        """Cancel everything and let the threads go. False if one hangs beyond ``timeout`` seconds."""
        self.state = State.BROKEN if self.state is State.BROKEN else State.DRAINING
        self.cancel_all()
        self._threads.shutdown(wait=False)
        until = time.monotonic() + timeout
        while self._tasks and time.monotonic() < until:
            time.sleep(0.01)
        return not self._tasks

    def _check_room(self, num_bytes: int) -> None:
        held = sum(task.num_bytes for task in self._tasks.values())
        full = len(self._tasks) >= self.config.max_running + self.config.max_waiting
        if full or (held and held + num_bytes > self.config.max_held_bytes):
            turns = math.ceil((self.num_waiting + 1) / self.config.max_running)
            raise QueueFull(min(MAX_RETRY_SECONDS, max(1, math.ceil(turns * self._usual_seconds))))

    def _take(self, work: Work, num_bytes: int) -> Task:
        engines = RequestEngines(self.service, time.monotonic() + self.config.timeout_seconds)
        task = Task(engines, num_bytes, asyncio.get_running_loop(), self._metrics)
        with self._lock:
            self._check_room(num_bytes)
            self._tasks[task.id] = task
            self.num_accepted += 1
        task.future = self._threads.submit(self._work, work, task)
        # A future is done exactly once, whatever its work raised: this is why every task has exactly one outcome.
        task.future.add_done_callback(lambda future: self._settle(task, future))
        self._count()
        return task

    def _work(self, work: Work, task: Task) -> Any:
        task.started = time.monotonic()
        self._metrics.queue_seconds.observe(task.started - task.accepted)
        return work(task)

    def _settle(self, task: Task, future: "Future[Any]") -> None:
        if future.cancelled():
            task.error = task.engines.reason()
        elif (error := future.exception()) is not None:
            task.error = self._as_ours(task, error)
        else:
            task.result = future.result()
        if isinstance(task.error, Cancelled | DeadlinePassed):
            self._metrics.cancelled.labels(task.stage).inc()
        with self._lock:
            del self._tasks[task.id]
            self.num_done += 1
            if task.started is not None:
                self._usual_seconds += 0.2 * (time.monotonic() - task.started - self._usual_seconds)
        self._count()
        task.done = True
        task.notify()

    def _as_ours(self, task: Task, error: BaseException) -> UnderpaintError:
        if isinstance(error, UnderpaintError):
            return error
        trace = "".join(traceback.format_exception(error))
        self._log.error("work_broke", task=task.id, stage=task.stage, trace=trace)
        if isinstance(error, torch.OutOfMemoryError):
            return OutOfMemory(f"the device ran out of memory ({task.stage}): ask for fewer or smaller pictures")
        return EngineFailure(f"the server broke while at work on this request ({task.stage}); its log says why")

    def _count(self) -> None:
        self._metrics.queue_depth.set(self.num_waiting)
        self._metrics.running.set(min(len(self._tasks), self.config.max_running))
