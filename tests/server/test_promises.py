"""What a server owes its clients whatever others do: one outcome a request, an end to work that nobody wants, the truth
about its own health, and nothing left taken."""

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from timing import in_time, wait_until

from server.tools import (
    ENDLESS,
    PAINT,
    Calls,
    Clock,
    Running,
    assert_leaving_costs_one_pass,
    assert_same_picture,
    data_url,
    held,
    in_threads,
    log_of,
    make_site,
    png,
    record,
    service_of,
    slow_down,
)
from underpaint.errors import OutOfPages
from underpaint.server import create_app
from underpaint.server.desk import STUCK_SECONDS
from underpaint.server.faults import NotReady
from underpaint.service import Service

Start = Callable[..., Running]


def picture_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["data"][0]["b64_json"]


def cancelled(server: Running) -> float:
    """Cancelled requests, as the metrics tell it."""
    lines = server.client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("underpaint_cancelled_total{"))


def send_and_leave(server: Running, path: str, until: Callable[[], None], **how: Any) -> None:
    """Post, wait ``until``, and close the connection without an answer."""
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        left = threading.Event()

        def post() -> None:
            with pytest.raises(httpx.HTTPError):
                client.post(path, timeout=120, **how)
            left.set()

        thread = threading.Thread(target=post)
        thread.start()
        until()
        for connection in client._transport._pool.connections:  # type: ignore[attr-defined]
            stream = connection._connection._network_stream
            stream.get_extra_info("socket").shutdown(2)
        assert left.wait(30)
        thread.join()


@pytest.mark.parametrize("way", ["json", "form", "stream", "job"])
def test_s1_a_client_that_is_gone_costs_no_more_than_a_step(
    start: Start, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """After the prefill and three steps, in the middle of a pass."""
    idle_seconds = 3.0 if way == "job" else 0.0  # whoever creates a job has this time to come and listen
    server = start(job_idle_seconds=idle_seconds or 15.0)
    body: dict[str, Any] = {**PAINT, "num_inference_steps": 50}

    def ask(until: Callable[[], None]) -> None:
        if way == "json":
            send_and_leave(server, "/v1/images/generations", until, json=body)
        elif way == "form":
            files = [("image", png(Image.new("RGB", (32, 32))))]
            send_and_leave(server, "/v1/images/edits", until, data=body, files=files)
        elif way == "stream":
            with server.painting(**body):
                until()
        else:
            name = server.post("/v1/jobs", **body).json()["id"]
            with server.client.stream("GET", f"/v1/jobs/{name}/events"):
                until()

    times = assert_leaving_costs_one_pass(server, monkeypatch, ask, idle_seconds=idle_seconds)
    assert cancelled(server) == times


def test_s2_after_aborts_all_others_are_answered(start: Start) -> None:
    server = start(max_steps=ENDLESS)
    expected = picture_of(server.paint())
    for i in range(30):
        if i % 3:
            assert_same_picture(picture_of(server.paint()), expected)  # who was left may be in the pass still
        else:
            with server.painting(num_inference_steps=ENDLESS):
                pass
    server.idle()
    assert cancelled(server) == 10


def test_s4_health_is_fast_while_pictures_are_painted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 50 ms for 99 of 100, beside passes that follow each other as fast as they can, and beside long ones; on a
    machine that takes nearly as long when nothing is painted, within twice that."""
    server = start(max_steps=ENDLESS)
    body = {**PAINT, "size": "256x256", "num_inference_steps": ENDLESS, "n": 2}

    def p99() -> float:
        seconds = []
        for _ in range(100):
            begin = time.perf_counter()
            assert server.client.get("/health/live").status_code == 200
            seconds.append(time.perf_counter() - begin)
        return sorted(seconds)[98]

    idle = min(p99() for _ in range(2))
    with server.painting(**body), server.painting(**body):
        in_time(p99, max(0.05, 2 * idle))
        slow_down(monkeypatch, server.site, 0.2)
        in_time(p99, max(0.05, 2 * idle))
        assert server.site.desk.num_at_work == 2


def test_s5_a_detached_job_goes_on_without_its_client(start: Start) -> None:
    server = start(job_idle_seconds=0.1)
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        created = client.post("/v1/jobs", json={**PAINT, "num_inference_steps": 40, "detach": True})
        assert created.status_code == 202
        name = created.json()["id"]
    server.idle()
    state = server.client.get(f"/v1/jobs/{name}").json()
    assert state["status"] == "completed"
    assert state["step"] == state["num_steps"] == 40
    assert state["result"]["data"][0]["b64_json"] == picture_of(server.paint(num_inference_steps=40))


def test_s5_a_job_that_nobody_asks_for_is_cancelled(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, clock = start(), Clock(monkeypatch)
    cancels = record(monkeypatch, server.site.desk.crew, "cancel")
    with held(server.service.runner) as gate:
        name = server.post("/v1/jobs", **PAINT).json()["id"]
        gate.wait()
        assert not cancels
        clock.put_forward(server.site.config.job_idle_seconds + 1)
        wait_until(lambda: bool(cancels))
    server.idle()
    assert server.client.get(f"/v1/jobs/{name}").json()["status"] == "cancelled"


def test_s7_a_timeout_cancels_the_work(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever tries again finds nothing at work for those who tried before."""
    server, clock = start(), Clock(monkeypatch)
    for _ in range(5):
        with held(server.service.runner, after=2) as gate:
            asking = Calls([partial(server.paint, num_inference_steps=1000)])
            gate.wait()
            clock.put_forward(server.site.config.timeout_seconds + 1)
            gate.open()
            (answer,) = asking.join()
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_passed"
        assert server.site.desk.num_at_work == 0
        assert gate.num_calls == 3
    assert picture_of(server.paint())


def test_s7_what_waits_too_long_is_told_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its deadline, and not when its turn would come."""
    server, clock = start(max_running=1), Clock(monkeypatch)
    with held(server.service.runner) as gate:
        first = Calls([server.paint])
        gate.wait()
        others = Calls([server.paint] * 4)
        wait_until(lambda: len(server.site.desk._waiting) == 4)
        clock.put_forward(server.site.config.timeout_seconds + 1)
        answers = others.join()
    assert [answer.status_code for answer in [*answers, *first.join()]] == [504] * 5
    for answer in answers:  # else it would be the server that hangs
        assert answer.json()["error"]["message"].startswith("not done in ")


def test_s8_two_hundred_requests_at_once_have_two_hundred_answers(start: Start) -> None:
    server = start(max_waiting=200)
    answers = in_threads([partial(server.paint, seed=seed, size="32x32", num_inference_steps=1) for seed in range(200)])
    assert [answer.status_code for answer in answers] == [200] * 200
    assert [answer.json()["data"][0]["seed"] for answer in answers] == list(range(200))
    assert len({answer.headers["x-request-id"] for answer in answers}) == 200
    assert len({picture_of(answer) for answer in answers}) == 200


def test_s9_s11_a_full_queue_says_so(start: Start) -> None:
    server = start(max_running=2, max_waiting=4)
    with held(server.service.runner):
        asking = Calls([lambda: server.paint(prompt="a secret teapot")] * 50)
        wait_until(lambda: sum(answer is not None for answer in asking.results) == 44)
    responses = asking.join()
    full = [response for response in responses if response.status_code == 429]
    assert len(full) == 44
    assert sum(response.status_code == 200 for response in responses) == 6
    for response in full:
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert response.json()["error"]["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        assert "secret" not in response.text
    assert "secret" not in log_of(server.site)
    assert picture_of(server.paint())


def test_s9_a_queue_is_full_by_bytes_too(start: Start) -> None:
    server = start(max_held_bytes=100_000)
    images = [{"image_url": data_url(png(Image.effect_noise((256, 256), 90)))}]
    with held(server.service.runner):
        asking = Calls([lambda: server.post("/v1/images/edits", **PAINT, images=images)] * 4)
        wait_until(lambda: sum(answer is not None for answer in asking.results) == 3)
    assert sorted(response.status_code for response in asking.join()) == [200, 429, 429, 429]


@pytest.mark.parametrize(("stage", "error"), [
    ("step", torch.OutOfMemoryError("injected")), ("step", RuntimeError("injected")),
    ("encode", torch.OutOfMemoryError("injected")), ("encode", KeyError("injected")),
    ("decode", torch.OutOfMemoryError("injected")), ("decode", RuntimeError("injected")),
])  # fmt: skip
def test_s13_s14_s41_what_breaks_breaks_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, stage: str, error: Exception
) -> None:
    """Twenty times over; and then the others, and those that come later, are as if nothing had happened."""
    server = start()
    model = server.service.qwen
    expected = picture_of(server.paint())

    def broken(*_: Any, **__: Any) -> Any:
        raise error

    for _ in range(20):
        with monkeypatch.context() as patch:
            if stage == "step":
                patch.setattr(server.service.runner, "run", broken)
            elif stage == "encode":
                patch.setattr(model, "condition", broken)
            else:
                patch.setattr(model.image_codec, "decode", broken)
            response = server.paint()
        memory = isinstance(error, torch.OutOfMemoryError)
        assert response.status_code == (503 if memory else 500)
        assert response.json()["error"]["code"] == ("out_of_memory" if memory else "engine_failure")
        assert response.json()["error"]["type"] == "server_error"
        server.assert_nothing_taken()
    assert picture_of(server.paint()) == expected
    assert server.client.get("/health/ready").status_code == 200


def test_s13_a_stream_that_breaks_ends_with_an_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()

    def broken(*_: Any) -> Any:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(server.service.qwen.image_codec, "decode", broken)
    with server.painting() as response:
        text = "".join(response.iter_text())
    assert text.startswith("event: error\n")
    assert '"code":"out_of_memory"' in text


def test_s41_a_poisoned_request_hurts_nobody_beside_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs out of pages in the middle, while seven others are painted in the same passes."""
    server = start()
    expected = [picture_of(server.paint(seed=seed, num_inference_steps=6)) for seed in range(7)]
    runner = server.service.runner
    whole = runner.run

    def run(chunks: Any, targets: Any) -> Any:
        if any(len(placed.target.state) == (96 // 16) ** 2 for placed in targets):
            raise OutOfPages("injected")
        return whole(chunks, targets)

    monkeypatch.setattr(runner, "run", run)
    calls = [partial(server.paint, seed=seed, num_inference_steps=6) for seed in range(7)]
    with held(runner):
        asking = Calls([*calls, partial(server.paint, size="96x96")])
        wait_until(lambda: server.site.desk.num_at_work == 8)
    answers = asking.join()
    assert answers[-1].status_code == 503
    for answer, alone in zip(answers, expected, strict=False):
        assert_same_picture(picture_of(answer), alone)


def test_s17_memory_is_flat_over_many_sizes(start: Start) -> None:
    """Pages and cached latents stay within their budgets, whatever the sizes."""
    server = start()
    service = server.service
    for i in range(20):
        size = f"{32 * (1 + i % 7)}x{32 * (1 + i % 5)}"
        images = [{"image_url": data_url(png(Image.effect_noise((32 + i, 64), 90)))}]
        body = {**PAINT, "size": size, "num_inference_steps": 1, "images": images}
        assert server.post("/v1/images/edits", **body).status_code == 200
        assert service.pool.used_bytes <= 64 << 20
    server.idle()
    assert len(server.site.desk._tasks) == 0


def test_s43_a_server_that_warms_up_is_live_and_not_ready(start: Start, painter_root: Path) -> None:
    """However long that takes: the time that a request may take is not that of the warm-up."""
    site = make_site(painter_root, timeout_seconds=0.05)
    with held(service_of(site).runner) as gate:
        server = start(site=site, wait=False)
        gate.wait()
        assert server.client.get("/health/live").status_code == 200
        ready = server.client.get("/health/ready")
        assert ready.status_code == 503
        assert ready.json()["error"]["message"] == "the server is warming up"
        refused = server.paint()
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        time.sleep(0.1)
    wait_until(lambda: server.client.get("/health/ready").status_code == 200)


def test_s43_a_warm_up_that_hangs_is_told_and_ends(start: Start, painter_root: Path) -> None:
    site = make_site(painter_root, warmup_seconds=0.5)
    with held(service_of(site).runner):
        server = start(site=site, wait=False)
        assert server.broken.wait(60)
        assert server.client.get("/health/live").status_code == 200
        assert server.client.get("/health/ready").status_code == 503
    assert "warm_up_failed" in log_of(site)


def test_a_request_that_hangs_makes_the_server_unready(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its client is told, although it cannot be told to stop."""
    server, clock = start(), Clock(monkeypatch)
    with held(server.service.runner) as gate:
        asking = Calls([server.paint])
        gate.wait()
        assert server.client.get("/health/ready").status_code == 200
        clock.put_forward(server.site.config.timeout_seconds + STUCK_SECONDS + 1)
        (answer,) = asking.join()
        assert answer.status_code == 504
        assert server.client.get("/health/ready").status_code == 503
        assert server.client.get("/health/live").status_code == 200
    wait_until(lambda: server.client.get("/health/ready").status_code == 200)


def test_s44_no_request_needs_a_network(painter: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a request opened a connection")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    files = [("image", png(Image.new("RGB", (32, 32))))]
    assert painter.post("/v1/images/edits", data=PAINT, files=files).status_code == 200


@pytest.mark.parametrize("stage", ["queued", "encode", "prefill", "denoise", "decode"])
def test_a_cancelled_job_ends_at_every_stage(start: Start, stage: str) -> None:
    server = start(max_running=1)
    service: Service = server.service
    place = {
        "encode": partial(held, service.qwen, "condition"),
        "denoise": partial(held, service.runner, due=lambda chunks, targets: bool(targets)),
        "decode": partial(held, service.qwen.image_codec, "decode"),
    }.get(stage, partial(held, service.runner))
    with place() as gate:
        names = [server.post("/v1/jobs", **PAINT, n=2).json()["id"] for _ in range(1 + (stage == "queued"))]
        gate.wait()
        server.client.delete(f"/v1/jobs/{names[-1]}")
        if stage == "queued":
            assert server.client.get(f"/v1/jobs/{names[-1]}").json()["status"] == "cancelled"
    server.idle()
    assert server.client.get(f"/v1/jobs/{names[-1]}").json()["status"] == "cancelled"
    for name in names[:-1]:
        assert server.client.get(f"/v1/jobs/{name}").json()["status"] == "completed"


def test_a_request_that_is_cancelled_as_it_is_submitted_leaves_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    whole = Service.submit_order

    def submit(self: Service, order: Any) -> None:
        whole(self, order)
        self._claim.cancel()  # type: ignore[attr-defined]

    with monkeypatch.context() as patch:
        patch.setattr(Service, "submit_order", submit)
        assert server.paint().status_code == 499
    server.assert_nothing_taken()
    assert picture_of(server.paint())


def test_a_server_that_drains_refuses_and_finishes(start: Start) -> None:
    server = start(drain_seconds=60.0)
    with held(server.service.runner) as gate:
        asking = Calls([server.paint])
        gate.wait()
        server.server.should_exit = True
        wait_until(lambda: not server.site.desk.ready)
        with pytest.raises(NotReady, match="shutting down"):
            server.site.desk.check_room(("painting",))
    assert [answer.status_code for answer in asking.join()] == [200]


def test_a_drain_ends_what_takes_too_long(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package has a function of the module's name.
    monkeypatch.setattr(sys.modules["underpaint.server.serve"], "LAST_ANSWER_SECONDS", 60)
    server = start(drain_seconds=0.2, max_steps=ENDLESS)
    with server.painting(num_inference_steps=ENDLESS) as response:
        server.server.should_exit = True
        text = "".join(response.iter_text())
    assert '"code":"cancelled"' in text


def test_servers_share_nothing(painter_root: Path) -> None:
    """Two in one process: what one counts, the other does not."""
    sites = [make_site(painter_root, model_id=name) for name in ("one", "two")]
    with TestClient(create_app(sites[0])) as one, TestClient(create_app(sites[1])) as two:
        wait_until(lambda: sites[0].desk.ready and sites[1].desk.ready)
        assert one.post("/v1/images/generations", json=PAINT).status_code == 200
        line = 'underpaint_requests_total{endpoint="/v1/images/generations",status="200"} 1.0'
        assert line in one.get("/metrics").text
        assert line not in two.get("/metrics").text
        assert two.get("/v1/models").json()["data"][0]["id"] == "two"
