"""What the tests of the server share."""

import base64
import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from underpaint.config import EngineConfig
from underpaint.generation.runner import Runner
from underpaint.models import registry
from underpaint.server import ServerConfig, create_app, create_site
from underpaint.server.crew import Crew
from underpaint.server.logs import make_log
from underpaint.server.serve import Server
from underpaint.server.site import Site
from underpaint.service import Model, Service

ENGINE = EngineConfig(device="cpu", dtype="float32", kv_codec="fp32", kv_cache_bytes=64 << 20)
PROMPT = "a red teapot"
PAINT = {"prompt": PROMPT, "size": "64x64", "num_inference_steps": 2, "seed": 1}


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


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.005)


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
            wait_until(lambda: self.site.desk.ready)

    @property
    def service(self) -> Service:
        return service_of(self.site)

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
    """Let every pass of the generation engine take at least ``seconds``."""
    runner = service_of(site).runner
    fast = Runner.run

    def run(*arguments: Any) -> Any:
        time.sleep(seconds)
        return fast(runner, *arguments)

    monkeypatch.setattr(runner, "run", run)


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the calls return, made all at once."""
    results: list[Any] = [None] * len(calls)

    def call(i: int) -> None:
        results[i] = calls[i]()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a request got no answer"
    return results


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
