"""Understanding and generation in processes of their own: the same results, and faults that stay where they are."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from timing import in_time, wait_until

from server.conftest import TALKING, client_of
from server.serving import (
    LASTING,
    SLOW,
    TOLD_SECONDS,
    WATCHFUL,
    Serving,
    hang_a_worker,
    kill_a_worker,
    kill_the_server,
    outcome,
    stop_the_server,
)
from server.tools import PAINT, assert_same_picture, data_url, in_threads, make_site, png

pytestmark = pytest.mark.timeout(900)  # processes start, and start again, as slowly as the machine lets them
POCKET = Path(__file__).parents[2] / "pocket" / "qwen-image-2.1"
LONG = {"messages": [{"role": "user", "content": "tell me a long story"}], "max_tokens": 400, "seed": 3}


def references(*colours: str) -> list[dict[str, str]]:
    return [{"image_url": data_url(png(Image.new("RGB", (64, 96), colour)))} for colour in colours]


def question(text: str, **values: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "seed": 3, **values}


PAINTING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/images/generations", {**PAINT, "n": 2}),
    ("/v1/images/generations", {**PAINT, "true_cfg_scale": 3.0, "negative_prompt": "blurred", "size": "96x64"}),
    ("/v1/images/edits", {**PAINT, "images": references("red", "blue"), "n": 2}),
]
TALK: list[tuple[str, dict[str, Any]]] = [
    ("/v1/images/generations", {**PAINT, "n": 2}),
    ("/v1/images/generations", {**PAINT, "think": True, "max_think_tokens": 6, "guidance_scale": 3.0}),
    ("/v1/images/edits", {**PAINT, "images": references("red", "blue"), "image_guidance_scale": 2.0}),
    ("/v1/chat/completions", question("what is it?")),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [
                {"type": "text", "text": "and this?"},
                {"type": "image_url", "image_url": {"url": references("red")[0]["image_url"]}},
            ]}],
            "modalities": ["text", "image"], "max_tokens": 40, "seed": 7, "temperature": 1.0,
            "image_config": {"width": 64, "height": 96, "steps": 2, "num_images": 2, "image_guidance_scale": 2.0},
        },
    ),
]  # fmt: skip
SERVERS: dict[str, tuple[Path, dict[str, Any]]] = {
    "separate painter": (POCKET, {"mode": "separate"}),
    "separate talker": (TALKING, {"mode": "separate"}),
    "colocated talker": (TALKING, {"mode": "colocate"}),
}


@pytest.fixture(scope="module", params=list(SERVERS))
def server(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """One after another, each with all tests that want one; at the end nothing is left of it."""
    root, how = SERVERS[request.param]
    yield from serve(root, **how)


@pytest.fixture
def watchful_server() -> Iterator[Serving]:
    """One that takes a worker for hung as soon as an operator may want it to."""
    yield from serve(POCKET, mode="separate", watch=WATCHFUL)


def serve(root: Path, **how: Any) -> Iterator[Serving]:
    running = Serving(root, **how)
    try:
        yield running.wait_ready()
    finally:
        running.process.kill()
        running.close()


@pytest.fixture(scope="module")
def alone(server: Serving) -> Iterator[TestClient]:
    """The same model in one process, this one."""
    with client_of(make_site(root_of(server))) as client:
        yield client


def root_of(server: Serving) -> Path:
    return TALKING if talks(server) else POCKET


def talks(server: Serving) -> bool:
    return server.client.get("/v1/models").json()["data"][0]["underpaint"]["talks"]


def test_u1_split_results_equal_those_of_one_process(server: Serving, alone: TestClient) -> None:
    """Bit by bit: text to image, edits, thoughts, and dialogues with pictures in and out."""
    for path, body in TALK if talks(server) else PAINTING:
        assert outcome(server.client.post(path, json=body)) == outcome(alone.post(path, json=body))
    server.assert_nothing_held()


def test_many_at_once_get_what_they_get_alone(server: Serving, alone: TestClient) -> None:
    bodies = [{**PAINT, "seed": seed, "size": size} for seed in range(6) for size in ("64x64", "64x32")]
    answers = in_threads([partial(server.paint, **body) for body in bodies])
    for body, answer in zip(bodies, answers, strict=True):
        (together,), (by_itself,) = outcome(answer), outcome(alone.post("/v1/images/generations", json=body))
        assert together["seed"] == by_itself["seed"]
        assert_same_picture(together["b64_json"], by_itself["b64_json"])
    server.assert_nothing_held()


def test_s13_s14_out_of_memory_at_a_step_costs_one_request_and_no_restart(server: Serving) -> None:
    """Twenty times; others beside it, and those that come later, are as if nothing had happened."""
    expected = server.picture()
    for _ in range(10):
        with server.in_flight() as other:
            for response in in_threads([partial(server.paint, size="96x32", n=n) for n in (1, 2)]):
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "out_of_memory"
        assert other.response is not None
        assert_same_picture(outcome(other.response)[0]["b64_json"], expected)
    assert server.picture() == expected
    assert server.metric("worker_restarts_total") == restarts_logged(server)
    assert server.readiness()[0]
    server.assert_nothing_held()


def restarts_logged(server: Serving) -> int:
    return len(server.logged("worker_lost"))


def test_s45_a_branch_that_is_lost_on_the_way_is_an_error(server: Serving) -> None:
    guided = {"guidance_scale": 3.0} if talks(server) else {"true_cfg_scale": 3.0, "negative_prompt": ""}
    for _ in range(20):
        response = server.paint(size="128x32", **guided)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "missing_branch"
    assert server.picture(**guided)
    server.assert_nothing_held()


def test_s1_s2_clients_that_leave_at_any_stage_leave_nothing(server: Serving) -> None:
    """A moment later each: in line, while it is encoded, handed over, painted, decoded. Until fifteen of them had been
    taken on: who leaves at once may not have been."""
    before = server.metric("cancelled_total")
    expected, fds = server.picture(), server.num_fds()
    with httpx.Client(base_url=server.client.base_url, trust_env=False) as client:
        for i in range(100):
            body = {**PAINT, **LASTING, "stream": True, "partial_images": 2}
            with pytest.raises(httpx.TimeoutException):
                client.post("/v1/images/generations", json=body, timeout=0.02 * (i % 20 + 1))
            if i >= 19 and server.metric("cancelled_total") - before >= 15:
                break
    server.assert_nothing_held()
    assert server.metric("cancelled_total") - before >= 15
    assert server.picture() == expected
    server.wait_num_fds(fds + 4)  # connections of the test's own


def test_progress_previews_and_cancelling_of_jobs(server: Serving) -> None:
    def seconds_to_cancel() -> float:
        created = server.client.post("/v1/jobs", json={**PAINT, **LASTING, "partial_images": 2}).json()
        path = f"/v1/jobs/{created['id']}"
        wait_until(lambda: server.client.get(path).json()["step"] >= 3)
        began = time.monotonic()
        server.client.delete(path)
        wait_until(lambda: server.client.get(path).json()["status"] == "cancelled")
        return time.monotonic() - began

    in_time(seconds_to_cancel, 1.0)
    body = {**PAINT, **SLOW, "num_inference_steps": 10, "stream": True, "partial_images": 2}
    for _ in range(4):  # a preview that would come after its picture does not come
        with server.client.stream("POST", "/v1/images/generations", json=body) as events:
            kinds = [line.removeprefix("event: ") for line in events.iter_lines() if line.startswith("event: ")]
        assert kinds[-1] == "image_generation.completed"
        if len(kinds) == 3:
            break
    assert kinds == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    server.assert_nothing_held()


def test_text_does_not_wait_for_paintings(server: Serving) -> None:
    """All hands paint, and more paintings wait: answers come before any of them is done."""
    if not talks(server):
        pytest.skip("this server does not talk")
    body = {**PAINT, **LASTING, "detach": True}
    names = [server.client.post("/v1/jobs", json=body).json()["id"] for _ in range(12)]
    jobs = [f"/v1/jobs/{name}" for name in names]
    wait_until(lambda: server.metric("running") == 8)
    for _ in range(3):
        assert outcome(server.client.post("/v1/chat/completions", json=question("what is it?")))
    states = [server.client.get(job).json()["status"] for job in jobs]
    assert states == ["running"] * 8 + ["queued"] * 4
    wait_until(lambda: server.metric("decode_plain_steps_total") > 0)  # as the workers tell
    assert server.metric("step_graph_misses_total") == 0  # on a CPU there are none
    for job in jobs:
        server.client.delete(job)
    server.assert_nothing_held()


@pytest.mark.parametrize("role", ["generation", "understanding"])
def test_s39_s40_a_worker_that_is_killed(server: Serving, role: str) -> None:
    """Readiness and clients hear of it in time, other requests end right, and it comes back as it was.

    Once for each server; ``soak_faults.py`` does this, and the rest, twenty times.
    """
    if not talks(server):
        pytest.skip("the servers that talk show it, and this one what hangs")
    expected, fds = server.picture(), server.num_fds()
    beside = LONG if talks(server) and role == "generation" else None
    in_time(lambda: kill_a_worker(server, role, beside), TOLD_SECONDS)
    assert server.picture() == expected
    server.wait_num_fds(fds + 2)


def test_a_worker_that_hangs_is_killed_and_replaced(watchful_server: Serving) -> None:
    server = watchful_server

    def picture() -> str:
        """Who is watchful may refuse, where the machine holds up a worker."""
        answers = [server.paint()]
        while answers[-1].status_code == 503 and len(answers) < 4:
            answers.append(server.wait_ready().paint())
        ((painted,),) = map(outcome, answers[-1:])
        return painted["b64_json"]

    expected, fds = picture(), server.num_fds()
    in_time(lambda: hang_a_worker(server, "generation"), TOLD_SECONDS)
    assert picture() == expected
    server.wait_num_fds(fds + 2)


def test_the_end(server: Serving) -> None:
    """Told to end, a server ends its work first; killed, it leaves nothing. The last test of each."""
    end = kill_the_server if talks(server) else stop_the_server
    end(server)
