"""A worker process: ``python -m underpaint.server.worker FD``, started by the API process (``staff.py``).

FD is its end of the channel to that process, and its life line: when the channel ends the worker does, at once and
whatever it is doing. So nothing is left when the API process is killed.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from traceback import print_exc, print_exception
from typing import NoReturn, Protocol

from transformers.utils import logging as transformers_logging

from underpaint.errors import BadConfig, CheckpointError, UnderpaintError
from underpaint.handover.channel import Channel
from underpaint.handover.faults import GarbledFrame, PeerGone, PeerStalled
from underpaint.handover.messages import ToGeneration, ToUnderstanding
from underpaint.handover.pools import share_pool
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import PagePool
from underpaint.models import registry
from underpaint.models.neo_unify import NeoUnify
from underpaint.server.arenas import make_arena
from underpaint.server.crew import Crew
from underpaint.server.generator import Generator
from underpaint.server.logs import make_log
from underpaint.server.news import News
from underpaint.server.remote import RemoteGeneration
from underpaint.server.vitals import Vitals, vitals_of
from underpaint.server.wire import (
    FRAME_LIMIT,
    QUEUE_BYTES,
    ROLES,
    Begin,
    Meet,
    Parted,
    Pulse,
    Refused,
    Setup,
    Stop,
    ToWorker,
    Up,
    Withdraw,
)
from underpaint.service import Model, Service, make_pool, pool_bytes

BEAT_SECONDS = 0.25
TEND_SECONDS = 0.02
SETUP_SECONDS = 60.0
"""How long the first message may take. It is sent when the process is started."""
REFUSAL_SECONDS = 5.0
NEWS_SECONDS = 60.0
"""How long the API process may read nothing."""


class Part(Protocol):
    """What a worker does, beside the life that all workers have."""

    @property
    def vitals(self) -> Vitals: ...

    @property
    def turn_seconds(self) -> float: ...

    def meet(self, line: int, worker: int, sock: socket.socket) -> None: ...

    def tend(self) -> None:
        """Called again and again."""
        ...

    def close(self) -> None: ...


class Understanding:
    """Does the work of requests, all but the passes of the painter."""

    turn_seconds = 0.0

    def __init__(self, setup: Setup, model: Model, control: Channel) -> None:
        pool: PagePool | None = None
        shared = copied = None
        if isinstance(model, NeoUnify) and setup.handover == "copy":
            pool = copied = make_pool(model, setup.config)
        elif isinstance(model, NeoUnify):
            codec, page_rows = CODECS[setup.config.kv_codec], model.checkpoint.defaults.page_rows
            budget, device = pool_bytes(model, setup.config, setup.handover != "in_place"), setup.config.device
            shared = share_pool(model.cache_shape, codec, budget, device, page_rows)
            pool = shared.pool
        self._control = control
        self._arena = make_arena(setup.arena_bytes, setup.config.device)
        self._remote = RemoteGeneration(self._arena, setup.config.device, shared, copied, self._parted)
        self._service = Service(model, setup.config, self._remote, pool)
        self._crew = Crew(self._service, setup.num_threads, make_log(sys.stderr))

    @property
    def vitals(self) -> Vitals:
        held = Vitals(handover_held_bytes=self._arena.used_bytes)
        return vitals_of(self._service) + self._remote.vitals + held

    def meet(self, line: int, worker: int, sock: socket.socket) -> None:
        self._remote.meet(line, worker, Channel(sock, ToUnderstanding))

    def begin(self, message: Begin) -> None:
        self._crew.begin(message.task, message.work, message.deadline, self._tell)

    def withdraw(self, task: str) -> None:
        self._crew.cancel(task)

    def tend(self) -> None:
        if self._crew.given_up:
            print(f"underpaint: {self._crew.trouble}", file=sys.stderr)
            _leave(1)
        self._service.tend()

    def close(self) -> None:
        self._arena.close()

    def _tell(self, news: News) -> None:
        try:
            self._control.send(news, timeout=NEWS_SECONDS)
        except (PeerGone, PeerStalled):
            _leave(1)  # rather than that an outcome is lost

    def _parted(self, number: int) -> None:
        self._control.send(Parted(number))


class Generation:
    """Paints, in a thread of its own."""

    def __init__(self, setup: Setup, model: Model, control: Channel) -> None:
        self._arena = make_arena(setup.arena_bytes, setup.config.device)
        self._generator = Generator(model, setup.config, setup.handover, self._arena)
        self._arrivals: deque[socket.socket] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paint")
        self._thread.submit(self._paint).add_done_callback(_end_if_broken)

    @property
    def vitals(self) -> Vitals:
        return self._generator.vitals + Vitals(handover_held_bytes=self._arena.used_bytes)

    @property
    def turn_seconds(self) -> float:
        began = self._generator.turn_began
        return 0.0 if began is None else time.monotonic() - began

    def meet(self, line: int, worker: int, sock: socket.socket) -> None:
        self._arrivals.append(sock)

    def tend(self) -> None:
        pass

    def close(self) -> None:
        self._arena.close()

    def _paint(self) -> None:
        while True:
            if self._arrivals:
                self._generator.meet(Channel(self._arrivals.popleft(), ToGeneration))
            self._generator.turn()
            self._generator.wait(TEND_SECONDS)


class Worker:
    """The life that all workers have: begins by a ``Setup``, tells that it lives, ends with its channel."""

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._part: Part | None = None

    def run(self) -> NoReturn:
        """Until the other end says so, or is gone."""
        try:
            first = self._control.receive(SETUP_SECONDS)
            if first is None or not isinstance(first.message, Setup):
                _leave(1)
            threading.Thread(target=self._beat, daemon=True).start()
            loading = ThreadPoolExecutor(1, thread_name_prefix="load").submit(self._load, first.message)
            loading.add_done_callback(_end_if_broken)
            while True:
                delivery = self._control.receive(TEND_SECONDS)
                if delivery is not None:
                    self._take(delivery.message, delivery.descriptors)
                if self._part is not None:
                    self._part.tend()
        except (PeerGone, PeerStalled, GarbledFrame):
            _leave(1)

    def _load(self, setup: Setup) -> None:
        kind = Understanding if setup.role == "understanding" else Generation
        try:
            model = registry.load(setup.path, setup.config, frozenset({ROLES[setup.role]}))
            self._part = kind(setup, model, self._control)
        except (BadConfig, CheckpointError) as error:
            self._control.send(Refused(str(error)))
            self._control.flush(REFUSAL_SECONDS)
            _leave(1)
        self._control.send(Up())

    def _take(self, message: object, descriptors: tuple[int, ...]) -> None:
        part = self._part
        match message:
            case Meet(line=line, worker=worker):
                assert part is not None
                part.meet(line, worker, socket.socket(fileno=descriptors[0]))
            case Begin() as begin:
                assert isinstance(part, Understanding)
                part.begin(begin)
            case Withdraw(task=task):
                assert isinstance(part, Understanding)
                part.withdraw(task)
            case Stop():
                if part is not None:
                    part.close()
                _leave(0)

    def _beat(self) -> None:
        while True:
            part = self._part
            pulse = Pulse(part.vitals, part.turn_seconds) if part is not None else Pulse(Vitals(), 0.0)
            try:
                self._control.send(pulse)
            except (PeerGone, PeerStalled):
                return  # the thread that receives knows, too
            time.sleep(BEAT_SECONDS)


def _end_if_broken(done: "Future[None]") -> None:
    """A thread that a worker cannot live without has ended."""
    error = done.exception()
    if error is None:
        return
    if isinstance(error, UnderpaintError):
        print(f"underpaint: {error}", file=sys.stderr)
    else:
        print_exception(error)
    _leave(1)


def _leave(status: int) -> NoReturn:
    """At once: threads may be in a pass, and Python would wait for them."""
    sys.stderr.flush()
    os._exit(status)


def main() -> NoReturn:
    """The other process decides when this one ends; signals to a whole group of processes do not."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    transformers_logging.disable_progress_bar()
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        Worker(Channel(sock, ToWorker, frame_limit=FRAME_LIMIT, queue_bytes=QUEUE_BYTES)).run()
    finally:  # it leaves by itself; something broke
        print_exc()
        _leave(1)


if __name__ == "__main__":
    main()
