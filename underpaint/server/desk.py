"""The desk: accepts requests while there is room, has a crew work on them, and knows the one outcome of each."""

import asyncio
import math
import threading
import time
from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from opentelemetry.trace import Tracer

from underpaint.errors import Cancelled, DeadlinePassed, UnderpaintError
from underpaint.server.claim import late
from underpaint.server.config import Kind, Priority, ServerConfig
from underpaint.server.errand import Tell, Work
from underpaint.server.faults import NotReady, QueueFull
from underpaint.server.metrics import Metrics
from underpaint.server.news import Closing, Ended, Entered, Failed, Moved, News, Painted, Shown, Told, Took
from underpaint.server.task import Task
from underpaint.server.tracing import Stages

STUCK_SECONDS = 10.0
"""How long after its deadline a request may still be at work before the server says that it is not well. A pass of the
largest picture on a slow device must fit."""
MAX_RETRY_SECONDS = 60
FIRST_GUESS_SECONDS = 1.0


class Crew(Protocol):
    """Who works, see ``crew.Crew``: in this process, or in others."""

    @property
    def epoch(self) -> int:
        """Grows when workers begin anew."""
        ...

    @property
    def compiles(self) -> bool:
        """Whether the first painting of a size is slower than the next: kernels are compiled, graphs captured."""
        ...

    @property
    def num_painters(self) -> int:
        """How many there are to whom paintings go: each is warmed up."""
        ...

    @property
    def trouble(self) -> str | None:
        """What keeps it from work now, as a sentence."""
        ...

    @property
    def given_up(self) -> bool:
        """Whether it will never work again."""
        ...

    def start(self) -> None: ...

    def begin(self, task: str, work: Work, deadline: float, tell: Tell) -> None: ...

    def cancel(self, task: str) -> None: ...

    def close(self) -> None: ...


class State(Enum):
    """Of the whole server. Only ``READY`` accepts requests."""

    STARTING = "the server is warming up"
    READY = "ready"
    DRAINING = "the server is shutting down"
    BROKEN = "the server is broken; its log says why"


@dataclass(eq=False)
class Hands:
    """How many requests of one kind are worked at once, and how long one usually takes."""

    number: int
    usual_seconds: float = FIRST_GUESS_SECONDS

    def took(self, seconds: float) -> None:
        self.usual_seconds += 0.2 * (seconds - self.usual_seconds)

    def free_in(self, num_waiting: int) -> int:
        """Seconds until there is room for one more behind so many, as a client is told."""
        turns = math.ceil((num_waiting + 1) / self.number)
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(turns * self.usual_seconds)))


class Desk:
    """All requests that are accepted and not yet done. ``num_accepted`` and ``num_done`` count them since the start;
    when nothing is at work they are equal.

    There are hands for paintings, and hands for text; so a text never waits for a painting. Those who wait stand in one
    line, from which the first is taken for whom there is a hand.

    ``warmed``: the epoch of the crew that was warmed up last. ``arriving``: bytes of bodies that are not complete.
    """

    def __init__(self, crew: Crew, config: ServerConfig, metrics: Metrics, tracer: Tracer) -> None:
        self.crew = crew
        self.config = config
        self.state = State.STARTING
        self.warmed: int | None = None
        self.num_accepted = 0
        self.num_done = 0
        self.arriving = 0
        self._metrics = metrics
        self._tracer = tracer
        self._tasks: dict[str, Task] = {}
        self._waiting: list[Task] = []
        self._lock = threading.Lock()
        self._hands: dict[Kind, Hands] = {"text": Hands(config.max_talking), "painting": Hands(config.max_running)}

    @property
    def num_at_work(self) -> int:
        return len(self._tasks)

    @property
    def obstacle(self) -> str | None:
        """Why no request is accepted now, as a sentence."""
        return self.state.value if self.state is State.DRAINING else self._hindrance

    @property
    def _hindrance(self) -> str | None:
        """Why no work can begin now, as a sentence."""
        if self.state is State.BROKEN:
            return self.state.value
        return self.crew.trouble or (None if self.warmed == self.crew.epoch else State.STARTING.value)

    @property
    def ready(self) -> bool:
        """Whether requests are accepted and answered: false also when a thread hangs in a pass."""
        return self.obstacle is None and not self.hangs

    @property
    def hangs(self) -> bool:
        """Whether a request is at work long after its deadline."""
        limit = time.monotonic() - STUCK_SECONDS
        with self._lock:
            return any(task.deadline < limit for task in self._tasks.values())

    def check_room(self, kinds: Sequence[Kind], num_bytes: int = 0) -> None:
        """Whether a request of one of ``kinds`` that holds ``num_bytes`` may come. Raises NotReady, or QueueFull."""
        if (obstacle := self.obstacle) is not None:
            raise NotReady(obstacle)
        with self._lock:
            held = self.arriving + sum(task.num_bytes for task in self._tasks.values())
            num_waiting = {kind: self._count(kind) - self._hands[kind].number for kind in kinds}
        full = min(num_waiting.values()) >= self.config.max_waiting
        if full or (held and held + num_bytes > self.config.max_held_bytes):
            raise QueueFull(min(self._hands[kind].free_in(max(0, waiting)) for kind, waiting in num_waiting.items()))

    def accept(self, work: Work, num_bytes: int = 0, priority: Priority = "normal") -> Task:
        """Take on a request; ``num_bytes`` is what it holds. Raises NotReady, or QueueFull. Call it on the loop."""
        self.check_room((work.kind,), num_bytes)
        task = self._take(work, num_bytes, priority, self.config.timeout_seconds)
        with self._lock:
            insort(self._waiting, task, key=lambda task: task.due)
        self.fill()
        return task

    def warm_up(self, work: Work) -> Task:
        """Have ``work`` done before the server is ready."""
        task = self._take(work, 0, "high", self.config.warmup_seconds)
        self._begin(task)
        return task

    def fill(self) -> None:
        """Begin what waits, as far as there are hands."""
        while (task := self._next()) is not None:
            self._begin(task)
        self._metrics.queue_depth.set(len(self._waiting))
        self._metrics.running.set(len(self._tasks) - len(self._waiting))

    def expire(self) -> None:
        """End what waits beyond its deadline. What is at work is ended by the engines."""
        now = time.monotonic()
        with self._lock:
            overdue = [task for task in self._waiting if now > task.deadline]
        for task in overdue:
            self._take_back(task, late(task.deadline - task.accepted))

    def cancel_all(self) -> None:
        with self._lock:
            tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()

    def close(self, timeout: float) -> bool:
        """Cancel everything and let the crew go. False if something is at work beyond ``timeout`` seconds."""
        self.state = State.BROKEN if self.state is State.BROKEN else State.DRAINING
        self.cancel_all()
        self.crew.close()
        until = time.monotonic() + timeout
        while self._tasks and time.monotonic() < until:
            time.sleep(0.01)
        return not self._tasks

    def hear(self, news: News) -> None:
        """What the crew tells, from any thread."""
        with self._lock:
            task = self._tasks.get(news.task)
        if task is None:
            return  # it has had its outcome
        match news:
            case Entered(stage=stage):
                task.stage = stage
                task.stages.enter(stage)
            case Took(stage=stage, seconds=seconds):
                self._metrics.stage_seconds.labels(stage).observe(seconds)
                task.stages.took(stage, seconds)
            case Moved(step=step, num_steps=num_steps):
                task.step, task.num_steps = step, num_steps
                task.notify()
            case Told(event=event):
                if isinstance(event, Painted | Shown):
                    self._metrics.pictures.inc()
                task.events.append(event)
                task.notify()
            case Ended(closing=closing):
                self._settle(task, None, closing)
            case Failed(error=error):
                self._settle(task, error.error())

    def _next(self) -> Task | None:
        """Take the first out of the line for whom there is a hand, if work may begin."""
        if self._hindrance is not None:
            return None
        with self._lock:
            waiting = Counter(task.kind for task in self._waiting)
            for task in self._waiting:
                if self._count(task.kind) - waiting[task.kind] < self._hands[task.kind].number:
                    self._waiting.remove(task)
                    return task
        return None

    def _count(self, kind: Kind) -> int:
        """At work or waiting. Under the lock."""
        return sum(task.kind == kind for task in self._tasks.values())

    def _take(self, work: Work, num_bytes: int, priority: Priority, seconds: float) -> Task:
        deadline = time.monotonic() + seconds
        loop, stages = asyncio.get_running_loop(), Stages(self._tracer)
        task = Task(work, work.kind, num_bytes, deadline, loop, self._withdraw, stages, priority)
        with self._lock:
            self._tasks[task.id] = task
            self.num_accepted += 1
        return task

    def _begin(self, task: Task) -> None:
        assert task.work is not None
        task.started = time.monotonic()
        self._metrics.queue_seconds.observe(task.started - task.accepted)
        task.stages.took("queued", task.started - task.accepted)
        self.crew.begin(task.id, task.work, task.deadline, self.hear)
        if task.cancelled:  # maybe just before there was anything to cancel
            self.crew.cancel(task.id)

    def _withdraw(self, task: Task) -> None:
        if not self._take_back(task, Cancelled("the request was cancelled")):
            self.crew.cancel(task.id)

    def _take_back(self, task: Task, error: UnderpaintError) -> bool:
        """End a task that waits; False if it does not."""
        with self._lock:
            if task not in self._waiting:
                return False
            self._waiting.remove(task)
        self._settle(task, error)
        return True

    def _settle(self, task: Task, error: UnderpaintError | None, closing: Closing | None = None) -> None:
        with self._lock:
            if self._tasks.pop(task.id, None) is None:
                return
            assert task.work is not None
            task.error, task.result = error, None if error else task.work.result(task.events, closing)
            task.work = None
            self.num_done += 1
            if task.started is not None:
                self._hands[task.kind].took(time.monotonic() - task.started)
        if isinstance(error, Cancelled | DeadlinePassed):
            self._metrics.cancelled.labels(task.stage).inc()
        task.done = True
        task.notify()
        self.fill()
