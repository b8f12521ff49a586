"""A server with two processes that paint, on a CPU: the same results, and what is lost with one of them."""

import time
from collections.abc import Iterator
from functools import partial

import pytest
from fastapi.testclient import TestClient
from timing import in_time, wait_until

from server.conftest import TALKING, client_of
from server.serving import LASTING, SLOW, TOLD_SECONDS, Serving, assert_lost, outcome
from server.test_processes import TALK, serve
from server.tools import PAINT, assert_same_picture, in_threads, make_site

pytestmark = pytest.mark.timeout(900)  # see test_processes
NAMES = ("generation", "generation 2")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    yield from serve(TALKING, mode="separate", generate_devices="cpu,cpu")


@pytest.fixture(scope="module")
def alone() -> Iterator[TestClient]:
    """The same model in one process, this one."""
    with client_of(make_site(TALKING)) as client:
        yield client


def passes(server: Serving) -> list[float]:
    """Of each process that paints."""
    lines = server.client.get("/metrics").text.splitlines()
    beginnings = [f'underpaint_worker_passes_total{{role="{name}"}} ' for name in NAMES]
    return [float(line.removeprefix(b)) for b in beginnings for line in lines if line.startswith(b)]


def wait_for_both(server: Serving, before: list[float]) -> None:
    """Until both have painted since then."""
    wait_until(lambda: all(now > then for now, then in zip(passes(server), before, strict=True)))


def test_both_paint_what_one_process_paints(server: Serving, alone: TestClient) -> None:
    wait_for_both(server, [0, 0])  # they were warmed up
    before = passes(server)
    bodies = [{**PAINT, "seed": seed, "size": size} for seed in range(6) for size in ("64x64", "64x32")]
    with server.in_flight(**SLOW), server.in_flight(**SLOW):
        wait_for_both(server, before)
        answers = in_threads([partial(server.paint, **body) for body in bodies])
    for body, answer in zip(bodies, answers, strict=True):
        (together,), (by_itself,) = outcome(answer), outcome(alone.post("/v1/images/generations", json=body))
        assert_same_picture(together["b64_json"], by_itself["b64_json"])
    for path, body in TALK:
        assert outcome(server.client.post(path, json=body)) == outcome(alone.post(path, json=body))
    server.assert_nothing_held()


def kill_one(server: Serving) -> float:
    """While both paint. Returns after how many seconds its client had been told."""
    before = passes(server)
    with server.in_flight(**LASTING) as lost, server.in_flight(**LASTING) as kept:
        wait_for_both(server, before)
        server.kill(NAMES[1])
        killed = time.monotonic()
        wait_until(lambda: lost.ended or kept.ended)
        assert server.readiness() == (True, "")
        assert server.paint().status_code == 200
        assert not (lost.ended and kept.ended)
        if kept.ended:
            lost, kept = kept, lost
        assert_lost(lost)
        wait_until(lambda: server.metric("worker_up") == 3)
        assert not kept.ended
        server.kill(NAMES[0])  # or it would paint for minutes
    assert_lost(kept)
    wait_until(lambda: server.metric("worker_up") == 3)
    server.wait_ready()
    server.assert_nothing_held()
    return lost.answered - killed


def test_s35_one_that_is_killed_takes_its_request_and_no_other(server: Serving) -> None:
    """Without a moment in which the server is not ready; and the one that is started in its place paints, too."""
    expected = server.picture()
    in_time(partial(kill_one, server), TOLD_SECONDS)
    before = passes(server)
    with server.in_flight(**SLOW), server.in_flight(**SLOW):
        wait_for_both(server, before)
    assert server.picture() == expected


def test_without_the_one_that_understands_there_is_no_server_until_it_is_back(server: Serving) -> None:
    expected = server.picture()
    server.kill("understanding")
    server.wait_unready("the understanding worker")
    server.wait_ready()
    assert server.picture() == expected


def test_it_ends_with_all_of_its_processes(server: Serving) -> None:
    assert server.stop() in (0, -15)
