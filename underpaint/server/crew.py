"""The crew: does the work of requests, in threads over a service of its own process.

Work runs in threads, never on an event loop. Calls of several threads advance together, step by step, because whoever
waits for something turns the engines (see ``service.py``).
"""

import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from structlog.typing import FilteringBoundLogger

from underpaint.devices import is_lost
from underpaint.errors import Cancelled, EngineFailure, OutOfMemory, UnderpaintError
from underpaint.handover.messages import ErrorData
from underpaint.models.neo_unify import NeoUnify
from underpaint.server.claim import RequestClaim
from underpaint.server.errand import Errand, Tell, Work
from underpaint.server.news import Closing, Ended, Failed
from underpaint.server.vitals import Vitals, vitals_of
from underpaint.service import Service
from underpaint.studio import NeoStudio, QwenStudio

DEVICE_LOST = "an error in a kernel has made the device useless to this process; it must be started again"


class Crew:
    """``epoch`` counts how often it began anew: a crew in one's own process never does. ``trouble`` says what keeps it
    from work, and with ``given_up`` for ever: only that its process has lost its device."""

    epoch = 0
    num_painters = 1

    def __init__(self, service: Service, num_threads: int, log: FilteringBoundLogger) -> None:
        self.service = service
        self.compiles = service.config.compiles
        self._log = log
        self._errands: dict[str, Errand] = {}
        self._closed = False
        self.given_up = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="work")
        # One for all: it holds the lock under which encoder and VAE are used.
        self._shared = None if isinstance(service.model, NeoUnify) else QwenStudio(service)

    @property
    def trouble(self) -> str | None:
        return DEVICE_LOST if self.given_up else None

    def start(self) -> None:
        """It is ready as soon as it is made."""

    def begin(self, task: str, work: Work, deadline: float, tell: Tell) -> None:
        """Work from now on, telling news; the last is the one outcome, Ended or Failed. ``deadline``: on the clock of
        ``time.monotonic``, which all processes of a machine share."""
        claim = RequestClaim(deadline)
        view = self.service.view(claim)
        errand = Errand(task, claim, view, self._shared or NeoStudio(view), tell)
        future: Future[Closing | None] | None = None
        with self._lock:
            if not self._closed:
                self._errands[task] = errand
                future = self._threads.submit(work, errand)
        if future is None:
            tell(Failed(task, ErrorData.of(Cancelled("the server is shutting down"))))
            return
        # A future is done exactly once, whatever its work raised: this is why every task has exactly one outcome.
        future.add_done_callback(lambda future: self._end(errand, future))

    def cancel(self, task: str) -> None:
        """End a work before the next pass, if it is still going on."""
        with self._lock:
            errand = self._errands.get(task)
        if errand is not None:
            errand.claim.cancel()

    def vitals(self) -> Vitals:
        return vitals_of(self.service)

    def close(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False)

    def _end(self, errand: Errand, future: "Future[Closing | None]") -> None:
        with self._lock:
            del self._errands[errand.task]
        error = future.exception()
        if error is None:
            errand.tell(Ended(errand.task, future.result()))
        else:
            errand.tell(Failed(errand.task, ErrorData.of(self._as_ours(errand, error))))
            self.given_up |= is_lost(error)

    def _as_ours(self, errand: Errand, error: BaseException) -> UnderpaintError:
        if isinstance(error, UnderpaintError):
            return error
        stage = errand.stage
        trace = "".join(traceback.format_exception(error))
        self._log.error("work_broke", task=errand.task, stage=stage, trace=trace)
        if isinstance(error, torch.OutOfMemoryError):
            return OutOfMemory(f"the device ran out of memory ({stage}): ask for fewer or smaller pictures")
        return EngineFailure(f"the server broke while at work on this request ({stage}); its log says why")
