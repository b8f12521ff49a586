"""Workers that never come up: started again, later each time, and in the end no more. Nothing of them is left."""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from leftovers import Leftovers
from timing import wait_until

from server.conftest import TALKING
from underpaint.config import EngineConfig, resolve
from underpaint.models import registry
from underpaint.server import ServerConfig, create_app
from underpaint.server.app import create_staffed_site
from underpaint.server.logs import make_log
from underpaint.server.news import Failed, News
from underpaint.server.plan import Plan
from underpaint.server.staff import Staff
from underpaint.server.supervisor import COMMAND, Watch
from underpaint.server.wire import Begin, Stop

CPU = resolve(EngineConfig(device="cpu", kv_cache_bytes=1 << 20))
PLAN = Plan(CPU, (CPU,), "copy", 1 << 20)
FAST = Watch(first_pause=0.02, max_restarts=3)
Hire = Callable[..., tuple[Staff, io.StringIO]]
ENDS = (sys.executable, "-c", "raise SystemExit(3)")
SLEEPS = ("sleep", "600")


@pytest.fixture
def short_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not end when told to is killed soon."""
    monkeypatch.setattr("underpaint.server.supervisor.STOP_SECONDS", 0.1)


@pytest.fixture
def hire() -> Iterator[Hire]:
    """Makes staffs, and logs of theirs; none is at work any more at the end, whatever became of the test."""
    hired: list[Staff] = []

    def make(command: tuple[str, ...], watch: Watch = FAST, root: Path = TALKING) -> tuple[Staff, io.StringIO]:
        told = io.StringIO()
        hired.append(Staff(root, PLAN, 2, make_log(told), os.environ, watch, command))
        return hired[-1], told

    yield make
    for crew in hired:
        crew.close()


@pytest.mark.parametrize(("command", "watch", "reason"), [
    (ENDS, FAST, "its status was 3"),
    (SLEEPS, replace(FAST, start_seconds=0.2), "it did not load in 0.2 s"),
    ((sys.executable, "-c", "import os, sys; os.write(int(sys.argv[1]), b'nonsense' * 9)"), FAST, "not the beginning"),
])  # fmt: skip
def test_s38_a_worker_that_never_comes_up_is_given_up(
    hire: Hire, command: tuple[str, ...], watch: Watch, reason: str
) -> None:
    leftovers, began = Leftovers(), time.monotonic()
    crew, told = hire(command, watch)
    crew.start()
    assert crew.trouble is not None
    wait_until(lambda: told.getvalue().count("worker_given_up") == 2)
    assert crew.given_up
    assert reason in told.getvalue()
    assert all(worker.num_restarts == 3 for worker in crew.workers)
    assert time.monotonic() - began > 0.02 + 0.04 + 0.08  # each pause is twice the one before
    crew.close()
    leftovers.assert_none()


@pytest.mark.usefixtures("short_stops")
@pytest.mark.parametrize("kind", [ValueError, OverflowError])  # the latter for numbers of more than 64 bits
def test_work_that_cannot_be_written_as_a_message_fails_at_once(
    hire: Hire, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """And the next is sent as ever: what breaks in the thread that posts is the outcome of one task."""
    crew, _ = hire(SLEEPS, Watch())
    news: list[News] = []

    def send(message: Begin | Stop) -> None:
        if isinstance(message, Begin) and message.task == "large":
            raise kind("Begin takes 2 bytes, and a frame has at most 1")

    monkeypatch.setattr(crew.understanding, "send", send)
    for task in ("large", "small"):
        crew.begin(task, None, 0.0, news.append)  # type: ignore[arg-type]
    wait_until(lambda: bool(news))
    crew.start()
    crew.close()
    large, small = news
    assert isinstance(large, Failed)
    assert "cannot be handed to a worker: Begin takes 2 bytes" in large.error.message
    assert isinstance(small, Failed)
    assert small.error.error().code == "worker_lost", "its outcome is that the staff was closed"


@pytest.mark.usefixtures("short_stops")
def test_work_for_a_worker_that_is_not_there_fails_at_once(hire: Hire) -> None:
    """And the staff ends, although its workers, which sleep for ten minutes, do not listen."""
    crew, _ = hire(SLEEPS, Watch())
    news: list[News] = []
    crew.begin("task", None, 0.0, news.append)  # type: ignore[arg-type]
    wait_until(lambda: bool(news))
    (failed,) = news
    assert isinstance(failed, Failed)
    assert failed.error.error().code == "worker_lost"
    crew.start()
    began = time.monotonic()
    crew.close()
    assert time.monotonic() - began < 60


def test_a_server_whose_workers_are_given_up_says_so_and_ends(hire: Hire, tmp_path: Path) -> None:
    """Its workers end as soon as a file is there."""
    may_end = tmp_path / "end"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(may_end)!r}).exists(): time.sleep(0.01)"
    crew, _ = hire((sys.executable, "-c", wait))
    log = make_log(io.StringIO())
    site = create_staffed_site(crew, registry.inspect(TALKING), ServerConfig("tiny"), log)
    broken = threading.Event()
    with TestClient(create_app(site, on_broken=broken.set)) as client:
        assert "worker is starting" in client.get("/health/ready").json()["error"]["message"]
        assert client.get("/health/live").status_code == 200
        may_end.touch()
        assert broken.wait(60)
        assert client.get("/health/ready").status_code == 503


@pytest.mark.usefixtures("short_stops")
def test_s37_started_and_stopped_twenty_times_nothing_is_left(hire: Hire) -> None:
    """Before they are up, which is when most is half done; half of them do not listen, the others are killed."""
    leftovers = Leftovers()
    for i in range(20):
        crew, _ = hire((sys.executable, "-c", "import signal; signal.pause()"), Watch())
        crew.start()
        time.sleep(0.005 * i)
        if i % 2:
            for worker in crew.workers:
                wait_until(lambda worker=worker: worker.pid is not None)  # type: ignore[misc]
                os.kill(worker.pid or 0, signal.SIGKILL)
        crew.close()
    leftovers.assert_none()


def test_a_worker_that_says_that_it_never_loads_is_not_started_again(hire: Hire, tmp_path: Path) -> None:
    """The reason stands in the log as it was said."""
    crew, told = hire(COMMAND, Watch(hang_seconds=60.0), tmp_path)  # there is no checkpoint
    crew.start()
    wait_until(lambda: told.getvalue().count("worker_given_up") == 2, 200)
    assert crew.given_up
    assert "model_index.json" in told.getvalue()
    assert all(worker.num_restarts == 0 for worker in crew.workers)
    crew.close()


def test_a_moment_without_descriptors_is_a_failure_like_others(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pair() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("underpaint.server.supervisor.pair", no_pair)
    crew, told = hire(SLEEPS)
    crew.start()
    wait_until(lambda: told.getvalue().count("worker_given_up") == 2)
    assert "Too many open files" in told.getvalue()
    assert crew.given_up
    crew.close()
