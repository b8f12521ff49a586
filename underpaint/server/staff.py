"""The crew in processes of its own: one that understands, and those that generate, each with a line to the first.

As the desk sees it, this is a crew like any other (``desk.Crew``).
"""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct
from structlog.typing import FilteringBoundLogger

from underpaint.errors import EngineFailure
from underpaint.handover.channel import pair
from underpaint.handover.faults import PeerGone, PeerStalled
from underpaint.handover.messages import ErrorData
from underpaint.server.errand import Tell, Work
from underpaint.server.news import Ended, Failed, News
from underpaint.server.plan import Plan
from underpaint.server.supervisor import COMMAND, Hooks, Supervised, Watch
from underpaint.server.vitals import Vitals
from underpaint.server.wire import Begin, Meet, Parted, RoleName, Withdraw, WorkerLost

LOST = "the process that was at work on this request has ended; it is being started again, try again soon"


class Staff:
    """It works while the worker that understands has a line to one that generates; at its start it waits for all of
    these. ``epoch`` counts how often there was a line again where there was none."""

    def __init__(
        self,
        root: Path,
        plan: Plan,
        num_threads: int,
        log: FilteringBoundLogger,
        environ: Mapping[str, str],
        watch: Watch | None = None,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        """``num_threads``: how many requests are worked at once. ``environ``: what workers inherit."""
        hooks = Hooks(self._up, self._heard, self._lost, self._given_up)
        self.epoch = 0
        self.given_up = False
        self.compiles = plan.generation[0].compiles
        self._generation_loaded = threading.Event()
        at_once = threading.Event()
        at_once.set()
        # On one device, what pages may take is known when the other process has its weights.
        waits = plan.handover == "in_place" and plan.generation[0].device != "cpu"

        def worker(role: RoleName, number: int = 0, may_start: threading.Event = at_once) -> Supervised:
            setup, own = plan.setup(role, root, num_threads, number), plan.environment(role, environ, number)
            return Supervised(setup, watch or Watch(), hooks, log, command, own, may_start)

        self.understanding = worker("understanding", may_start=self._generation_loaded if waits else at_once)
        self.painters = tuple(worker("generation", number) for number in range(len(plan.generation)))
        self._log = log
        self._lock = threading.RLock()
        self._num_lines = 0
        self._lines: dict[Supervised, int] = {}  # of each that generates, if there is one: its number
        self._awaited = set(self.painters)  # they never had a line, and may get one
        self._gone: set[Supervised] = set()  # given up
        self._tells: dict[str, Tell] = {}
        self._closed = False
        self._posting = ThreadPoolExecutor(1, thread_name_prefix="post")

    @property
    def workers(self) -> tuple[Supervised, ...]:
        return self.understanding, *self.painters

    @property
    def num_painters(self) -> int:
        """How many processes paint."""
        return len(self.painters)

    def start(self) -> None:
        for worker in self.workers:
            worker.start()

    @property
    def trouble(self) -> str | None:
        with self._lock:
            lines, awaited = set(self._lines), list(self._awaited)
        painting = [painter for painter in self.painters if painter in lines and painter.trouble is None]
        if painting and not awaited:
            return self.understanding.trouble
        troubles = (worker.trouble for worker in (self.understanding, *(awaited or self.painters)))
        return next((trouble for trouble in troubles if trouble is not None), "the workers are being connected")

    def begin(self, task: str, work: Work, deadline: float, tell: Tell) -> None:
        """See ``crew.Crew``."""
        with self._lock:
            self._tells[task] = tell
        self._post(task, Begin(task, work, deadline))  # type: ignore[arg-type]

    def cancel(self, task: str) -> None:
        self._post(task, Withdraw(task))

    def vitals(self) -> Vitals:
        return sum((worker.vitals for worker in self.workers), Vitals())

    def close(self) -> None:
        """Have all workers end, and wait for that."""
        with self._lock:
            self._closed = True
        self._posting.shutdown(cancel_futures=True)
        for worker in self.workers:
            worker.stop()
        for worker in self.workers:
            worker.join()
        self._fail(list(self._tells))

    def _post(self, task: str, message: Begin | Withdraw) -> None:
        """By a thread, one after the other: uploads take a while, and the event loop has others to look after."""
        with self._lock:
            if not self._closed:
                self._posting.submit(self._send, task, message)
                return
        self._fail([task])

    def _send(self, task: str, message: Begin | Withdraw) -> None:
        if task not in self._tells:
            return  # it has had its outcome
        try:
            self.understanding.send(message)
        except (PeerGone, PeerStalled):
            self._fail([task])
        except (ValueError, TypeError, OverflowError) as error:  # it is no message, or too large for one
            failure = EngineFailure(f"the request cannot be handed to a worker: {error}")
            self._tell(Failed(task, ErrorData.of(failure)))

    def _up(self, worker: Supervised) -> None:
        if worker.role == "generation":
            self._generation_loaded.set()
        for painter in self.painters if worker is self.understanding else (worker,):
            self._connect(painter)

    def _connect(self, painter: Supervised) -> None:
        """Give understanding and ``painter`` an end each of a new line, if both are up."""
        if not (self.understanding.is_up and painter.is_up):
            return
        with self._lock:
            number = self._num_lines + 1
            ends = pair()
            try:
                for worker, end in zip((self.understanding, painter), ends, strict=True):
                    worker.send(Meet(number, painter.number), (end.fileno(),))
            except (PeerGone, PeerStalled):
                return  # one has just ended: it will be up again
            finally:
                for end in ends:
                    end.close()
            self.epoch += not self._lines
            self._num_lines = self._lines[painter] = number
            self._awaited.discard(painter)

    def _heard(self, worker: Supervised, message: Struct) -> None:
        match message:
            case News() as news:
                self._tell(news)
            case Parted(line=number):
                self._reconnect(number)

    def _tell(self, news: News) -> None:
        with self._lock:
            ends = isinstance(news, Ended | Failed)
            tell = self._tells.pop(news.task, None) if ends else self._tells.get(news.task)
        if tell is not None:
            tell(news)

    def _reconnect(self, number: int) -> None:
        """A line ended although both workers may be well."""
        with self._lock:
            painter = next((painter for painter, line in self._lines.items() if line == number), None)
            if painter is None:
                return
            del self._lines[painter]
        self._connect(painter)

    def _lost(self, worker: Supervised) -> None:
        with self._lock:
            if worker is self.understanding:
                self._lines.clear()
            self._lines.pop(worker, None)
            tasks = list(self._tells) if worker is self.understanding else []
        self._fail(tasks)

    def _fail(self, tasks: list[str]) -> None:
        for task in tasks:
            self._tell(Failed(task, ErrorData.of(WorkerLost(LOST))))

    def _given_up(self, worker: Supervised) -> None:
        with self._lock:
            self._awaited.discard(worker)
            self._gone.add(worker)
            self.given_up = self.understanding in self._gone or self._gone.issuperset(self.painters)
