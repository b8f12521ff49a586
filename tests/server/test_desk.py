"""The desk over a crew that the test plays: who begins when, and one outcome for each, whatever the crew says."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from opentelemetry.trace import NoOpTracer

from underpaint.errors import Cancelled
from underpaint.handover.messages import ErrorData
from underpaint.server import ServerConfig
from underpaint.server.config import Kind
from underpaint.server.desk import Desk, State
from underpaint.server.errand import Errand, Tell, Work
from underpaint.server.faults import NotReady, QueueFull
from underpaint.server.metrics import Metrics
from underpaint.server.news import Begun, Closing, Ended, Event, Failed, Told
from underpaint.server.task import Task
from underpaint.server.vitals import Vitals
from underpaint.server.wire import WorkerLost

LOST = ErrorData.of(WorkerLost("it ended"))


class Nothing:
    """Work whose result is what was told of it."""

    def __init__(self, kind: Kind = "painting") -> None:
        self.kind: Kind = kind

    def __call__(self, errand: Errand) -> Closing | None:
        raise AssertionError("the test plays the crew")

    def result(self, events: Sequence[Event], closing: Closing | None) -> Any:
        return list(events)


class Played:
    """A crew; ``begun`` has the tasks that it was given and that have no outcome yet."""

    def __init__(self) -> None:
        self.epoch = 1
        self.num_painters = 1
        self.trouble: str | None = None
        self.given_up = False
        self.compiles = False
        self.begun: dict[str, Tell] = {}
        self.deadlines: dict[str, float] = {}
        self.cancelled: list[str] = []

    def start(self) -> None:
        pass

    def begin(self, task: str, work: Work, deadline: float, tell: Tell) -> None:
        self.begun[task] = tell
        self.deadlines[task] = deadline

    def cancel(self, task: str) -> None:
        self.cancelled.append(task)

    def close(self) -> None:
        for task in list(self.begun):
            self.end(task)

    def end(self, task: str) -> None:
        self.begun.pop(task)(Ended(task, None))


Test = Callable[[Desk, Played], Awaitable[None]]


def play(test: Test, **limits: Any) -> None:
    """Run a test with a desk that is ready."""

    async def run() -> None:
        crew = Played()
        config = ServerConfig("tiny", **{"max_running": 2, **limits})
        desk = Desk(crew, config, Metrics(Vitals), NoOpTracer())
        desk.state, desk.warmed = State.READY, 1
        await test(desk, crew)
        desk.close(1.0)
        assert desk.num_done == desk.num_accepted

    asyncio.run(run())


def accept(desk: Desk, num: int, kind: Kind = "painting") -> list[Task]:
    return [desk.accept(Nothing(kind)) for _ in range(num)]


def test_what_waits_outlives_the_workers() -> None:
    async def test(desk: Desk, crew: Played) -> None:
        first, second, third = accept(desk, 3)
        assert list(crew.begun) == [first.id, second.id]
        crew.trouble = "a worker is starting again"
        for task in (first, second):
            crew.begun.pop(task.id)(Failed(task.id, LOST))
        assert isinstance(first.error, WorkerLost)
        assert not crew.begun
        assert desk.obstacle == crew.trouble
        with pytest.raises(NotReady, match="starting again"):
            desk.accept(Nothing())
        crew.trouble, crew.epoch = None, 2
        desk.fill()
        assert not crew.begun  # not before it is warm
        assert not desk.ready
        desk.warmed = 2
        desk.fill()
        assert list(crew.begun) == [third.id]
        crew.end(third.id)
        assert third.done
        assert third.error is None

    play(test)


def test_a_task_has_one_outcome_whatever_is_told_later() -> None:
    async def test(desk: Desk, crew: Played) -> None:
        (task,) = accept(desk, 1)
        tell = crew.begun[task.id]
        tell(Told(task.id, Begun()))
        tell(Failed(task.id, LOST))
        for news in (Told(task.id, Begun()), Ended(task.id, None), Failed(task.id, LOST)):
            tell(news)
        assert isinstance(task.error, WorkerLost)
        assert task.events == [Begun()]
        assert desk.num_done == 1
        crew.begun.clear()

    play(test)


def test_who_is_cancelled_in_line_ends_at_once_and_never_begins() -> None:
    async def test(desk: Desk, crew: Played) -> None:
        first, second = accept(desk, 2)
        second.cancel()
        assert isinstance(second.error, Cancelled)
        first.cancel()
        assert crew.cancelled == [first.id]
        assert not first.done  # the crew says when
        crew.end(first.id)
        assert list(crew.begun) == []

    play(test, max_running=1)


def test_a_server_that_drains_begins_what_it_has_accepted() -> None:
    async def test(desk: Desk, crew: Played) -> None:
        first, second = accept(desk, 2)
        desk.state = State.DRAINING
        crew.end(first.id)
        assert list(crew.begun) == [second.id]

    play(test, max_running=1)


def test_a_server_that_drains_waits_for_workers_that_start_again() -> None:
    async def test(desk: Desk, crew: Played) -> None:
        first, second = accept(desk, 2)
        desk.state, crew.trouble = State.DRAINING, "a worker is starting again"
        crew.begun.pop(first.id)(Failed(first.id, LOST))
        assert not crew.begun
        assert not second.done
        crew.trouble, crew.epoch = None, 2
        desk.fill()
        assert not crew.begun  # not before it is warm
        desk.warmed = 2
        desk.fill()
        assert list(crew.begun) == [second.id]
        assert desk.obstacle == State.DRAINING.value

    play(test, max_running=1)


def test_what_waits_too_long_ends_by_itself() -> None:
    async def test(desk: Desk, crew: Played) -> None:
        first, second = accept(desk, 2)
        await asyncio.sleep(0.1)
        desk.expire()
        assert second.error is not None
        assert second.error.code == "deadline_passed"
        assert not first.done  # its engine ends it
        assert desk.ready

    play(test, max_running=1, timeout_seconds=0.05)


def test_the_warm_up_has_a_time_of_its_own() -> None:
    """Kernels may be compiled for longer than a request may take."""

    async def test(desk: Desk, crew: Played) -> None:
        task = desk.warm_up(Nothing())
        assert 50 < crew.deadlines[task.id] - time.monotonic() <= 60
        crew.end(task.id)

    play(test, timeout_seconds=0.05, warmup_seconds=60.0)


def test_text_has_hands_of_its_own() -> None:
    """It never waits for paintings, nor they for it; and each kind goes on as its own end."""

    async def test(desk: Desk, crew: Played) -> None:
        paintings = accept(desk, 3)
        texts = accept(desk, 2, "text")
        assert list(crew.begun) == [paintings[0].id, texts[0].id]
        crew.end(texts[0].id)
        assert list(crew.begun) == [paintings[0].id, texts[1].id]
        crew.end(paintings[0].id)
        assert list(crew.begun) == [texts[1].id, paintings[1].id]
        for task in (*texts[1:], *paintings[1:]):
            crew.end(task.id)

    play(test, max_running=1, max_talking=1)


def test_a_line_that_is_full_of_paintings_takes_text() -> None:
    """And the other way round: so many may wait of each kind, and who comes then is told when to come again."""

    async def test(desk: Desk, crew: Played) -> None:
        kinds: list[Kind] = ["painting", "text"]
        for full, other in (kinds, reversed(kinds)):
            tasks = accept(desk, 3, full)
            with pytest.raises(QueueFull) as refused:
                desk.accept(Nothing(full))
            assert refused.value.retry_after >= 1
            with pytest.raises(QueueFull):
                desk.check_room((full,))
            desk.check_room(kinds)
            tasks += accept(desk, 3, other)
            with pytest.raises(QueueFull):
                desk.check_room(kinds)
            for task in tasks:
                task.cancel()
            for name in list(crew.begun):
                crew.end(name)
            assert not desk.num_at_work

    play(test, max_running=1, max_talking=1, max_waiting=2)
