"""One worker process: started, watched, and started again when it ends or hangs.

Everything that is known of it comes over one channel, whose end is the end of the process: the kernel closes it however
the process dies.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from msgspec import Struct
from structlog.typing import FilteringBoundLogger

from underpaint.handover.channel import Channel, pair
from underpaint.handover.faults import GarbledFrame, PeerGone, PeerStalled
from underpaint.server.vitals import Vitals
from underpaint.server.wire import FRAME_LIMIT, QUEUE_BYTES, FromWorker, Pulse, Refused, RoleName, Setup, Stop, Up

COMMAND = (sys.executable, "-m", "underpaint.server.worker")
LOOK_SECONDS = 0.1
STOP_SECONDS = 3.0
"""How long a worker may take to end when it is told to; then it is killed."""


@dataclass(frozen=True)
class Watch:
    """When a worker counts as hung, and how often it is started again.

    A worker that gave no sign of life for ``silent_seconds`` is not ready, and after ``hang_seconds`` it is killed, as
    is one that took longer than ``start_seconds`` to load, or more than ``turn_seconds`` for one pass. After a death it
    is started again ``first_pause`` seconds later, twice as late after each further one up to ``longest_pause``, and
    after ``max_restarts`` in a row no more, nor one that says itself that it never will load; a worker that was up for
    ``steady_seconds`` begins a new row.
    """

    silent_seconds: float = 1.5
    hang_seconds: float = 10.0
    start_seconds: float = 600.0
    turn_seconds: float = 600.0
    first_pause: float = 0.2
    longest_pause: float = 30.0
    max_restarts: int = 8
    steady_seconds: float = 60.0

    def pause(self, num_failures: int) -> float:
        return min(self.first_pause * 2 ** (num_failures - 1), self.longest_pause)


@dataclass(frozen=True)
class Hooks:
    """What is called from a worker's thread: when it is up, with what else it sends, when it has ended, and when it
    will not be started again."""

    up: Callable[["Supervised"], None]
    heard: Callable[["Supervised", Struct], None]
    lost: Callable[["Supervised"], None]
    given_up: Callable[["Supervised"], None]


class Supervised:
    """``is_up``: it runs, and its weights are loaded. ``vitals``: as it told last."""

    def __init__(
        self,
        setup: Setup,
        watch: Watch,
        hooks: Hooks,
        log: FilteringBoundLogger,
        command: tuple[str, ...],
        environ: Mapping[str, str],
        may_start: threading.Event,
    ) -> None:
        """``command`` starts a worker, in ``environ``; the number of a descriptor is added to it. It is not started
        before ``may_start`` is set."""
        self.is_up = False
        self.num_restarts = 0
        self.vitals = Vitals()
        self.pid: int | None = None
        self._setup = setup
        self._watch = watch
        self._hooks = hooks
        self._log = log
        self._command = command
        self._environ = dict(environ)
        self._channel: Channel | None = None
        self._last_sign: float | None = None
        self._up_at: float | None = None
        self._turn_seconds = 0.0
        self._refusal: str | None = None
        self._may_start = may_start
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{self.name}")

    @property
    def role(self) -> RoleName:
        return self._setup.role

    @property
    def number(self) -> int:
        """Which of those with its role."""
        return self._setup.number

    @property
    def name(self) -> str:
        return self.role if self.number == 0 else f"{self.role} {self.number + 1}"

    @property
    def silence(self) -> float:
        """Seconds since its last sign of life; 0 before the first."""
        return 0.0 if self._last_sign is None else time.monotonic() - self._last_sign

    @property
    def trouble(self) -> str | None:
        """What is wrong with it, as a sentence."""
        if not self.is_up:
            return f"the {self.name} worker is starting" + (" again" if self.num_restarts else "")
        return f"the {self.name} worker does not answer" if self.silence > self._watch.silent_seconds else None

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Struct, descriptors: Iterable[int] = ()) -> None:
        """Raises PeerGone if it is not there."""
        channel = self._channel
        if channel is None:
            raise PeerGone(f"the {self.name} worker is not running")
        channel.send(message, descriptors)

    def stop(self) -> None:
        """Tell it to end; ``join`` waits for that."""
        self._stopping.set()
        self._may_start.set()
        try:
            self.send(Stop())
        except (PeerGone, PeerStalled):
            return  # it has ended, or is killed soon

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        num_failures = 0
        self._may_start.wait()
        while not self._stopping.is_set():
            reason = self._live()
            self._hooks.lost(self)
            if self._stopping.is_set():
                return
            steady = self._up_at is not None and time.monotonic() - self._up_at > self._watch.steady_seconds
            num_failures = 1 if steady else num_failures + 1
            if self._refusal is not None or num_failures > self._watch.max_restarts:
                self._hooks.given_up(self)
                self._log.error("worker_given_up", role=self.name, reason=self._refusal or reason)
                return
            self.num_restarts += 1
            self._log.error("worker_lost", role=self.name, pid=self.pid, reason=reason, restarts=self.num_restarts)
            self._stopping.wait(self._watch.pause(num_failures))

    def _live(self) -> str:
        """From start to end of one process; returns why it ended."""
        try:
            ours, theirs = pair()
        except OSError as error:
            return f"it could not be started: {error}"
        try:
            # A session of its own: what a terminal sends to all of its processes is for the API process to handle.
            process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True, env=self._environ,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            return f"it could not be started: {error}"
        finally:
            theirs.close()
        channel = Channel(ours, FromWorker, frame_limit=FRAME_LIMIT, queue_bytes=QUEUE_BYTES)
        self.vitals, self._turn_seconds = Vitals(), 0.0
        self.pid, self._last_sign, self._up_at, self._channel = process.pid, None, None, channel
        try:
            channel.send(self._setup)
            return self._attend(process, channel)
        except PeerGone:
            return f"its channel ended; its status was {_status_of(process)}"
        except GarbledFrame as error:
            return str(error)
        finally:
            self.is_up, self._channel = False, None
            process.kill()
            process.wait()
            channel.close()

    def _attend(self, process: "subprocess.Popen[bytes]", channel: Channel) -> str:
        began, stop_at = time.monotonic(), float("inf")
        while time.monotonic() < stop_at:
            delivery = channel.receive(LOOK_SECONDS)
            if delivery is not None:
                self._last_sign = time.monotonic()
                self._hear(delivery.message)
            if (reason := self._hangs(time.monotonic() - began)) is not None:
                return reason
            if self._stopping.is_set() and stop_at == float("inf"):
                stop_at = time.monotonic() + STOP_SECONDS
        return "it did not end when it was told to"

    def _hear(self, message: Struct) -> None:
        match message:
            case Up():
                self.is_up, self._up_at = True, time.monotonic()
                self._log.info("worker_up", role=self.name, pid=self.pid)
                self._hooks.up(self)
            case Refused(reason=reason):
                self._refusal = reason
            case Pulse(vitals=vitals, turn_seconds=turn_seconds):
                self.vitals = vitals
                self._turn_seconds = turn_seconds
            case _:
                self._hooks.heard(self, message)

    def _hangs(self, age: float) -> str | None:
        watch = self._watch
        if self.silence > watch.hang_seconds:
            return f"it gave no sign of life for {watch.hang_seconds} s"
        if not self.is_up and age > watch.start_seconds:
            return f"it did not load in {watch.start_seconds} s"
        if self.is_up and self._turn_seconds > watch.turn_seconds:
            return f"a pass took longer than {watch.turn_seconds} s"
        return None


def _status_of(process: "subprocess.Popen[bytes]") -> str:
    """The process has let go of its end of the channel, so it has ended, or will very soon."""
    try:
        return str(process.wait(1.0))
    except subprocess.TimeoutExpired:
        return "not known yet"
