"""Who waits in line, and who goes first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.tools import PAINT, PROMPT, Running, slow_down, wait_until

TOOL = {"type": "image_generation", "size": "64x32", "num_inference_steps": 1}
Start = Callable[..., Running]


def queue(server: Running, priorities: list[str | None]) -> list[str]:
    """Jobs behind one that is at work, one after another; their ids."""
    names = [server.post("/v1/jobs", **{**PAINT, "detach": True, "num_inference_steps": 40}).json()["id"]]
    wait_until(lambda: server.site.desk._tasks[names[0]].started is not None)
    for priority in priorities:
        body = {**PAINT, "detach": True} | ({"priority": priority} if priority else {})
        response = server.post("/v1/jobs", **body)
        assert response.status_code == 202, response.text
        names.append(response.json()["id"])
    return names[1:]


def order_of(server: Running, names: list[str]) -> list[int]:
    """In which order they were begun."""
    tasks = {name: server.site.desk._tasks[name] for name in names}
    server.idle()
    started = [tasks[name].started for name in names]
    assert all(one is not None and tasks[name].error is None for one, name in zip(started, names, strict=True))
    return sorted(range(len(names)), key=lambda i: started[i] or 0.0)


@pytest.fixture
def busy(start: Start, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A server that works on one request at a time."""
    server = start(max_running=1)
    slow_down(monkeypatch, server.site, 0.03)
    return server


def test_the_higher_priority_goes_first_and_equals_in_turn(busy: Running) -> None:
    names = queue(busy, ["low", None, "high", "normal", "high", "low"])
    assert order_of(busy, names) == [2, 4, 1, 3, 0, 5]


def test_nobody_is_overtaken_for_ever(busy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who came long enough before goes first all the same."""
    monkeypatch.setattr("underpaint.server.task.SHIFT_SECONDS", {"high": -0.001, "normal": 0.0, "low": 0.001})
    names = queue(busy, ["low", "normal", "high"])
    tasks = [busy.site.desk._tasks[name] for name in names]
    assert tasks[0].accepted + 0.002 < tasks[2].accepted
    assert order_of(busy, names) == [0, 1, 2]


def test_what_waits_can_be_cancelled_whatever_its_place(busy: Running) -> None:
    names = queue(busy, ["low", "high", "normal"])
    for name in names:
        busy.client.delete(f"/v1/jobs/{name}")
        assert busy.client.get(f"/v1/jobs/{name}").json()["status"] == "cancelled"
    assert not busy.site.desk._waiting
    busy.idle()


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/images/generations", PAINT),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
    ("/v1/responses", {"input": PROMPT, "tools": [TOOL], "tool_choice": "required"}),
])  # fmt: skip
def test_every_endpoint_takes_a_priority(
    start: Start, talker_root: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    server = start(talker_root)
    given: list[str] = []
    accept = server.site.desk.accept

    def spy(work: Any, num_bytes: int = 0, priority: Any = "normal") -> Any:
        given.append(priority)
        return accept(work, num_bytes, priority)

    monkeypatch.setattr(server.site.desk, "accept", spy)
    for priority in ("low", "high", None):
        assert server.post(path, **body, priority=priority).status_code == 200
    assert given == ["low", "high", "normal"]
    refused = server.post(path, **body, priority="urgent")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"


def test_text_does_not_wait_for_paintings(start: Start, talker_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hands paint, and more paintings wait: an answer begins at once, and has a token a pass."""
    server = start(talker_root, max_running=4)
    slow_down(monkeypatch, server.site, 0.05)
    body = {**PAINT, "detach": True, "num_inference_steps": 1000}
    names = [server.post("/v1/jobs", **body).json()["id"] for _ in range(6)]
    tasks = [server.site.desk._tasks[name] for name in names]
    wait_until(lambda: all(task.step for task in tasks[:4]))
    assert server.site.desk._waiting == tasks[4:]
    question = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "seed": 3}
    for _ in range(3):
        before = tasks[0].step
        answer = server.post("/v1/chat/completions", **question)
        assert answer.status_code == 200, answer.text
        assert tasks[0].step - before <= answer.json()["usage"]["completion_tokens"] + 5
    assert not any(task.done for task in tasks)
    for name in names:
        server.client.delete(f"/v1/jobs/{name}")
