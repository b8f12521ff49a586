"""A server with two processes that paint, on a CPU: the same results, and what is lost with one of them."""

import time
from collections.abc import Iterator
from functools import partial

import pytest
from fastapi.testclient import TestClient

from server.conftest import TALKING, client_of
from server.serving import SLOW, TOLD_SECONDS, Serving, assert_lost, outcome
from server.test_processes import TALK
from server.tools import PAINT, assert_same_picture, in_threads, make_site, wait_until

NAMES = ("generation", "generation 2")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    running = Serving(TALKING, mode="separate", generate_devices="cpu,cpu")
    try:
        yield running.wait_ready()
    finally:
        running.process.kill()


@pytest.fixture(scope="module")
def alone() -> Iterator[TestClient]:
    """The same model in one process, this one."""
    with client_of(make_site(TALKING)) as client:
        yield client


def passes(server: Serving) -> list[float]:
    """Of each process that paints."""
    lines = server.client.get("/metrics").text.splitlines()
    return [
        float(line.rpartition(" ")[2])
        for name in NAMES
        for line in lines
        if line.startswith(f'underpaint_worker_passes_total{{role="{name}"}}')
    ]


def test_both_paint_what_one_process_paints(server: Serving, alone: TestClient) -> None:
    assert len(passes(server)) == 2
    wait_until(lambda: all(passes(server)))  # both were warmed up
    before = passes(server)
    bodies = [{**PAINT, "seed": seed, "size": size} for seed in range(6) for size in ("64x64", "64x32")]
    answers = in_threads([partial(server.paint, **body) for body in bodies])
    for body, answer in zip(bodies, answers, strict=True):
        (together,), (by_itself,) = outcome(answer), outcome(alone.post("/v1/images/generations", json=body))
        assert_same_picture(together["b64_json"], by_itself["b64_json"])
    for path, body in TALK:
        assert outcome(server.client.post(path, json=body)) == outcome(alone.post(path, json=body))
    wait_until(lambda: all(now > then for now, then in zip(passes(server), before, strict=True)))
    server.assert_nothing_held()


def test_s35_one_that_is_killed_takes_its_request_and_no_other(server: Serving) -> None:
    """Without a moment in which the server is not ready."""
    expected = server.picture(**SLOW)
    deaths = len(server.logged("worker_lost"))
    with server.in_flight(**SLOW) as first, server.in_flight(**SLOW) as second:
        wait_until(lambda: server.metric("running") == 2)
        time.sleep(0.5)
        server.kill("generation 2")
        killed = time.monotonic()
        wait_until(lambda: len(server.logged("worker_lost")) > deaths, TOLD_SECONDS)
        assert server.readiness() == (True, "")
        assert server.paint().status_code == 200
    lost, kept = sorted((first, second), key=lambda one: one.answered)
    assert_lost(lost)
    assert lost.answered - killed < TOLD_SECONDS
    assert_same_picture(outcome(kept.response)[0]["b64_json"], expected)
    wait_until(lambda: server.metric("worker_up") == 3, 60)
    assert server.readiness() == (True, "")
    before = passes(server)
    with server.in_flight(**SLOW), server.in_flight(**SLOW):
        wait_until(lambda: all(now > then for now, then in zip(passes(server), before, strict=True)))
    server.assert_nothing_held()


def test_without_the_one_that_understands_there_is_no_server_until_it_is_back(server: Serving) -> None:
    expected = server.picture()
    server.kill("understanding")
    server.wait_unready("the understanding worker")
    server.wait_ready()
    assert server.picture() == expected
    wait_until(lambda: server.metric("worker_up") == 3)


def test_it_ends_with_all_of_its_processes(server: Serving) -> None:
    assert server.stop() in (0, -15)
