"""The crew in processes of its own: one that understands and one that generates, with a line between them.

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
    """``epoch`` counts the lines between the workers that there were: there is a new one whenever one of them was
    started."""

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
        self.compiles = plan.generation.compiles
        self._generation_loaded = threading.Event()
        at_once = threading.Event()
        at_once.set()
        # On one device, what pages may take is known when the other process has its weights.
        waits = plan.handover == "in_place" and plan.generation.device != "cpu"
        gates: dict[RoleName, threading.Event] = {
            "understanding": self._generation_loaded if waits else at_once,
            "generation": at_once,
        }
        self.workers: dict[RoleName, Supervised] = {
            role: Supervised(
                plan.setup(role, root, num_threads),
                watch or Watch(),
                hooks,
                log,
                command,
                plan.environment(role, environ),
                gates[role],
            )
            for role in gates
        }
        self._log = log
        self._lock = threading.RLock()
        self._parted = True
        self._tells: dict[str, Tell] = {}
        self._closed = False
        self._posting = ThreadPoolExecutor(1, thread_name_prefix="post")

    def start(self) -> None:
        for worker in self.workers.values():
            worker.start()

    @property
    def trouble(self) -> str | None:
        troubles = (worker.trouble for worker in self.workers.values())
        between = "the workers are being connected" if self._parted else None
        return next((trouble for trouble in troubles if trouble is not None), between)

    def begin(self, task: str, work: Work, deadline: float, tell: Tell) -> None:
        """See ``crew.Crew``."""
        with self._lock:
            self._tells[task] = tell
        self._post(task, Begin(task, work, deadline))  # type: ignore[arg-type]

    def cancel(self, task: str) -> None:
        self._post(task, Withdraw(task))

    def vitals(self) -> Vitals:
        first, second = (worker.vitals for worker in self.workers.values())
        return first + second

    def close(self) -> None:
        """Have all workers end, and wait for that."""
        with self._lock:
            self._closed = True
        self._posting.shutdown(cancel_futures=True)
        for worker in self.workers.values():
            worker.stop()
        for worker in self.workers.values():
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
            self._understanding.send(message)
        except (PeerGone, PeerStalled):
            self._fail([task])
        except ValueError as error:  # it cannot be written as a message, or is too large for one
            failure = EngineFailure(f"the request cannot be handed to a worker: {error}")
            self._tell(Failed(task, ErrorData.of(failure)))

    @property
    def _understanding(self) -> Supervised:
        return self.workers["understanding"]

    def _up(self, worker: Supervised) -> None:
        if worker.role == "generation":
            self._generation_loaded.set()
        if all(worker.is_up for worker in self.workers.values()):
            self._connect()

    def _connect(self) -> None:
        """Give both workers an end of a new line."""
        with self._lock:
            number = self.epoch + 1
            ends = pair()
            try:
                for worker, end in zip(self.workers.values(), ends, strict=True):
                    worker.send(Meet(number), (end.fileno(),))
            except (PeerGone, PeerStalled):
                return  # one has just ended: it will be up again
            finally:
                for end in ends:
                    end.close()
            self.epoch, self._parted = number, False

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
            if number != self.epoch or self._parted:
                return
            self._parted = True
        if all(worker.is_up for worker in self.workers.values()):
            self._connect()

    def _lost(self, worker: Supervised) -> None:
        with self._lock:
            self._parted = True
            tasks = list(self._tells) if worker is self._understanding else []
        self._fail(tasks)

    def _fail(self, tasks: list[str]) -> None:
        for task in tasks:
            self._tell(Failed(task, ErrorData.of(WorkerLost(LOST))))

    def _given_up(self, _: Supervised) -> None:
        self.given_up = True
