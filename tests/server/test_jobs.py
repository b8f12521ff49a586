"""Jobs: a painting under a name, with progress, previews and an end of its own."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image
from timing import wait_until

from server.tools import PAINT, Calls, Clock, Running, data_url, decode, held, png, record
from underpaint.studio import QwenStudio

Start = Callable[..., Running]


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_a_job_tells_its_progress_and_ends(painter: TestClient) -> None:
    body = {**PAINT, "num_inference_steps": 6, "n": 2, "partial_images": 1, "detach": True}
    created = painter.post("/v1/jobs", json=body)
    assert created.status_code == 202
    name = created.json()["id"]
    events = events_of(painter.get(f"/v1/jobs/{name}/events").text)
    kinds = [event["type"] for event in events]
    assert kinds.count("job.image") == kinds.count("job.partial_image") == 2
    assert kinds[-1] == "job.completed"
    steps = [event["step"] for event in events if event["type"] == "job.progress"]
    assert steps == sorted(steps)
    assert steps[-1] == 6
    state = painter.get(f"/v1/jobs/{name}").json()
    assert state == events[-1]["job"]
    assert [one["seed"] for one in state["result"]["data"]] == [1, 2]
    assert events_of(painter.get(f"/v1/jobs/{name}/events").text)[-1] == events[-1]


def test_a_job_with_pictures_is_an_edit(painter: TestClient) -> None:
    picture = data_url(png(Image.new("RGB", (64, 64), "red")))
    body = {**PAINT, "images": [{"image_url": picture}]}
    name = painter.post("/v1/jobs", json=body).json()["id"]
    wait_until(lambda: painter.get(f"/v1/jobs/{name}").json()["status"] == "completed")
    result = painter.get(f"/v1/jobs/{name}").json()["result"]
    assert result["usage"]["input_tokens_details"]["image_tokens"] == 16
    direct = painter.post("/v1/images/edits", json=body).json()
    assert decode(result["data"][0]["b64_json"]).tobytes() == decode(direct["data"][0]["b64_json"]).tobytes()


@pytest.mark.parametrize("param", ["think", "stream"])
def test_an_illegal_job_is_refused_and_forgotten(painter: TestClient, param: str) -> None:
    response = painter.post("/v1/jobs", json={**PAINT, param: True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_job_that_ended_stays_as_it_is(painter: TestClient) -> None:
    name = painter.post("/v1/jobs", json={**PAINT, "detach": True}).json()["id"]
    wait_until(lambda: painter.get(f"/v1/jobs/{name}").json()["status"] == "completed")
    assert painter.delete(f"/v1/jobs/{name}").json()["status"] == "completed"


def test_a_failed_job_says_why(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, clock = start(), Clock(monkeypatch)
    with held(server.service.runner) as gate:
        name = server.post("/v1/jobs", **PAINT, detach=True).json()["id"]
        gate.wait()
        clock.put_forward(server.site.config.timeout_seconds + 1)
    events = events_of(server.client.get(f"/v1/jobs/{name}/events").text)
    assert events[-1]["type"] == "job.failed"
    assert events[-1]["job"]["error"]["code"] == "deadline_passed"
    assert events[-1]["job"]["result"] is None


def test_the_oldest_ended_jobs_are_forgotten_when_there_are_too_many_bytes_of_them(start: Start) -> None:
    server = start(kept_job_bytes=1, kept_job_seconds=1000.0)
    names = []
    for _ in range(2):
        names.append(server.post("/v1/jobs", **PAINT, detach=True).json()["id"])
        server.idle()
    wait_until(lambda: server.client.get(f"/v1/jobs/{names[0]}").status_code == 404)
    assert server.client.get(f"/v1/jobs/{names[1]}").json()["status"] == "completed"


class Chores:
    """What a server does again and again: it looks after what waits, and after its jobs."""

    def __init__(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun = record(monkeypatch, server.site.desk, "expire")

    def wait_done(self) -> None:
        """All of them, once from beginning to end."""
        before = len(self._begun)
        wait_until(lambda: len(self._begun) >= before + 2)


def test_ended_jobs_are_forgotten_after_their_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, clock = start(), Clock(monkeypatch)
    chores = Chores(server, monkeypatch)
    name = server.post("/v1/jobs", **PAINT, detach=True).json()["id"]
    server.idle()
    chores.wait_done()
    assert server.client.get(f"/v1/jobs/{name}").json()["status"] == "completed"
    clock.put_forward(server.site.config.kept_job_seconds + 1)
    wait_until(lambda: server.client.get(f"/v1/jobs/{name}").status_code == 404)


def test_whoever_creates_a_job_is_there(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is answered, and then for the time that every job has."""
    server, clock = start(), Clock(monkeypatch)
    chores = Chores(server, monkeypatch)
    with held(server.service.runner) as painting:
        with held(QwenStudio, "plan") as planning:
            asking = Calls([partial(server.post, "/v1/jobs", **PAINT)])
            planning.wait()
            clock.put_forward(server.site.config.job_idle_seconds + 1)
            chores.wait_done()
        (created,) = asking.join()
        assert created.status_code == 202
        painting.wait()
        chores.wait_done()
    events = events_of(server.client.get(f"/v1/jobs/{created.json()['id']}/events").text)
    assert events[-1]["type"] == "job.completed"


def test_a_job_that_waited_names_parameters_as_the_client_does(start: Start) -> None:
    """What can be seen only when it is its turn: a picture so wide that one of its ratio cannot be painted."""
    server = start(max_running=1)
    wide = {"image_url": data_url(png(Image.new("RGB", (1000, 10))))}
    asked = {"prompt": "a", "images": [wide], "reference_resolution": 2048}
    with held(server.service.runner):
        assert server.post("/v1/jobs", **PAINT, detach=True).status_code == 202
        name = server.post("/v1/jobs", **asked, detach=True).json()["id"]
    server.idle()
    error = server.client.get(f"/v1/jobs/{name}").json()["error"]
    direct = server.post("/v1/images/edits", **asked).json()["error"]
    assert (error["code"], error["param"]) == (direct["code"], direct["param"]) == ("bad_size", "size")
