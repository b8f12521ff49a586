"""What the tests of the server share."""

import base64
import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
from PIL import Image
from timing import WAIT_SECONDS, in_time, wait_until

from underpaint.config import EngineConfig
from underpaint.generation import engine as generation_engine
from underpaint.generation.runner import Runner
from underpaint.models import registry
from underpaint.server import ServerConfig, claim, create_app, create_site, deliver, desk, jobs
from underpaint.server.crew import Crew
from underpaint.server.logs import make_log
from underpaint.server.serve import Server
from underpaint.server.site import Site
from underpaint.service import Model, Service
from underpaint.understanding import engine as understanding_engine

T = TypeVar("T")
ENGINE = EngineConfig(device="cpu", dtype="float32", kv_codec="fp32", kv_cache_bytes=64 << 20)
PROMPT = "a red teapot"
PAINT = {"prompt": PROMPT, "size": "64x64", "num_inference_steps": 2, "seed": 1}
ENDLESS = 100_000
"""Steps that nobody waits for: minutes, even of the tiniest pictures. For servers with this as ``max_steps``."""
NOTICE_SECONDS = 0.3
"""From a connection's end to that of its work. The server looks every 0.05 s, for jobs twice."""


def make_site(root: Path, engine: EngineConfig = ENGINE, **options: Any) -> Site:
    """A site over a fresh service with a small page pool, whose log is kept in ``log_of``."""
    config = ServerConfig(**{"model_id": "tiny", **options})
    return create_site(Service(_model(root), engine), config, make_log(io.StringIO()))


@cache
def _model(root: Path) -> Model:
    """Weights are only read, so one copy serves all tests."""
    return registry.load(root, ENGINE)


def service_of(site: Site) -> Service:
    """The engines of a server that works in this process."""
    crew = site.desk.crew
    assert isinstance(crew, Crew)
    return crew.service


def log_of(site: Site) -> str:
    """All that the server logged."""
    stream = site.log._logger._file  # type: ignore[attr-defined]
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


class Running:
    """A server on a loopback port of its own, in a thread, with its insides in reach."""

    def __init__(self, site: Site, wait: bool = True) -> None:
        self.site = site
        self.broken = threading.Event()
        app = create_app(site, on_broken=self.broken.set)
        self.server = Server(app, site.desk, "127.0.0.1", 0)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        if wait:
            self.wait_ready()

    @property
    def service(self) -> Service:
        return service_of(self.site)

    def wait_ready(self) -> None:
        wait_until(lambda: self.site.desk.ready)

    def post(self, path: str, **values: Any) -> httpx.Response:
        return self.client.post(path, json=values)

    def paint(self, **values: Any) -> httpx.Response:
        return self.post("/v1/images/generations", **{**PAINT, **values})

    @contextmanager
    def painting(self, **values: Any) -> Iterator[httpx.Response]:
        """A stream of events; leaving it closes the connection."""
        body = {**PAINT, "stream": True, **values}
        with (
            httpx.Client(base_url=self.url, timeout=60, trust_env=False) as client,
            client.stream("POST", "/v1/images/generations", json=body) as response,
        ):
            yield response

    def idle(self) -> None:
        """Wait until nothing is at work."""
        wait_until(lambda: not self.site.desk.num_at_work)

    def stop(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()

    def assert_nothing_taken(self) -> None:
        assert_nothing_taken(self.site)


def assert_nothing_taken(site: Site) -> None:
    """Every accepted request has had its outcome, and no page has a user."""
    service, desk = service_of(site), site.desk
    assert desk.num_at_work == 0
    assert desk.num_done == desk.num_accepted
    assert service.generation.idle
    assert service.understanding is None or service.understanding.idle
    assert service.tree.promised_pages == 0
    assert not any(node.users for node in service.tree)
    assert service.pool.used_bytes == service.tree.used_bytes


def slow_down(monkeypatch: pytest.MonkeyPatch, site: Site, seconds: float) -> None:
    """Let every pass of the generation engine take at least ``seconds``. See ``held`` for what must not depend on how
    many passes there are meanwhile."""
    runner = service_of(site).runner
    fast = Runner.run

    def run(*arguments: Any) -> Any:
        time.sleep(seconds)
        return fast(runner, *arguments)

    monkeypatch.setattr(runner, "run", run)


class Gate:
    """Where calls wait. ``num_calls``: that have come, those included that went through before it was shut."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._reached = threading.Event()
        self._open = threading.Event()

    def wait(self) -> None:
        """Until a call waits here."""
        assert self._reached.wait(WAIT_SECONDS), "no call came to the gate"

    def open(self) -> None:
        """For good."""
        self._open.set()

    def stop(self) -> None:
        """The call's side."""
        self._reached.set()
        assert self._open.wait(2 * WAIT_SECONDS), "the gate was not opened"


@contextmanager
def held(owner: Any, name: str = "run", after: int = 0, due: Callable[..., bool] = lambda *_: True) -> Iterator[Gate]:
    """Calls of a method, by default the passes of a runner, wait at a gate: after the first ``after``, those for which
    ``due`` is true. What happens meanwhile is decided by the order of events, however slow a thread is. The gate is
    open at the end."""
    gate, whole = Gate(), getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        gate.num_calls += 1
        if gate.num_calls > after and due(*arguments, **options):
            gate.stop()
        return whole(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        try:
            yield gate
        finally:
            gate.open()


def record(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """What a method has returned so far, call by call."""
    returned, whole = [], getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        returned.append(whole(*arguments, **options))
        return returned[-1]

    monkeypatch.setattr(owner, name, call)
    return returned


class Clock:
    """The clock by which servers in this process keep deadlines: the machine's, and what a test puts it forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead = 0.0
        for module in (claim, deliver, desk, jobs, generation_engine, understanding_engine):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def put_forward(self, seconds: float) -> None:
        self._ahead += seconds


class Calls:
    """Calls made all at once, each by a thread. ``results``: what they have returned so far, each in its place."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.results: list[Any] = [None] * len(calls)
        self._threads = [threading.Thread(target=self._call, args=(i, call)) for i, call in enumerate(calls)]
        for thread in self._threads:
            thread.start()

    def _call(self, i: int, call: Callable[[], Any]) -> None:
        self.results[i] = call()

    def join(self) -> list[Any]:
        """All results."""
        for thread in self._threads:
            thread.join(timeout=120)
            assert not thread.is_alive(), "a request got no answer"
        return self.results


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the calls return, made all at once."""
    return Calls(calls).join()


def told(server: Running, kind: type[T]) -> list[T]:
    """What requests that are at work have told so far, of one kind of event."""
    tasks = list(server.site.desk._tasks.values())
    return [event for task in tasks for event in task.events if isinstance(event, kind)]


def assert_leaving_costs_one_pass(
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[Callable[[], None]], None],
    runner: Any = None,
    idle_seconds: float = 0.0,
) -> int:
    """The pass that is under way when a client leaves is the last of its request, and the server knows of it in time.

    ``ask`` asks, calls what it is given, and is gone when it returns. ``runner``: whose fifth pass is held meanwhile,
    by default generation's. ``idle_seconds``: how long nobody may ask for what was left. Returns how often it was left.
    """
    cancels = record(monkeypatch, server.site.desk.crew, "cancel")
    attempts = 0

    def seconds_to_notice() -> float:
        nonlocal attempts
        attempts += 1
        num_cancels = len(cancels)
        with held(runner or server.service.runner, after=4) as gate:
            ask(gate.wait)
            left = time.monotonic()
            wait_until(lambda: len(cancels) > num_cancels)
            noticed = time.monotonic()
        server.idle()
        assert gate.num_calls == 5
        return noticed - left

    in_time(seconds_to_notice, idle_seconds + NOTICE_SECONDS)
    return attempts


def decode(b64: str) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(b64, validate=True)))
    image.load()
    return image


def assert_same_picture(one: str, other: str) -> None:
    """Equal but for rounding: a batch sums in another order, so an 8-bit value may fall on the other side."""
    pixels = [np.asarray(decode(b64).convert("RGBA"), dtype=int) for b64 in (one, other)]
    assert pixels[0].shape == pixels[1].shape
    assert np.abs(pixels[0] - pixels[1]).max() <= 1


def png(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
