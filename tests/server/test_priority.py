"""Who waits in line, and who goes first."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from timing import wait_until

from server.tools import ENDLESS, PAINT, PROMPT, Running, held

TOOL = {"type": "image_generation", "size": "64x32", "num_inference_steps": 1}
Start = Callable[..., Running]


def queue(server: Running, priorities: list[str | None]) -> list[str]:
    """Jobs behind one that is at work and held, one after another; their ids."""
    names = []
    for priority in (None, *priorities):
        body = {**PAINT, "detach": True} | ({"priority": priority} if priority else {})
        response = server.post("/v1/jobs", **body)
        assert response.status_code == 202, response.text
        names.append(response.json()["id"])
    assert len(server.site.desk._waiting) == len(priorities)
    return names[1:]


def order_of(server: Running, priorities: list[str | None]) -> list[int]:
    """In which order those are begun that have waited in line."""
    with held(server.service.runner):
        names = queue(server, priorities)
        tasks = {name: server.site.desk._tasks[name] for name in names}
    server.idle()
    started = [tasks[name].started for name in names]
    assert all(one is not None and tasks[name].error is None for one, name in zip(started, names, strict=True))
    return sorted(range(len(names)), key=lambda i: started[i] or 0.0)


@pytest.fixture
def one_hand(start: Start) -> Running:
    """A server that works on one request at a time."""
    return start(max_running=1)


def test_the_higher_priority_goes_first_and_equals_in_turn(one_hand: Running) -> None:
    assert order_of(one_hand, ["low", None, "high", "normal", "high", "low"]) == [2, 4, 1, 3, 0, 5]


def test_nobody_is_overtaken_for_ever(one_hand: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who came long enough before goes first all the same: here a microsecond, which no request is as fast as."""
    monkeypatch.setattr("underpaint.server.task.SHIFT_SECONDS", {"high": -5e-7, "normal": 0.0, "low": 5e-7})
    assert order_of(one_hand, ["low", "normal", "high"]) == [0, 1, 2]


def test_what_waits_can_be_cancelled_whatever_its_place(one_hand: Running) -> None:
    with held(one_hand.service.runner):
        for name in queue(one_hand, ["low", "high", "normal"]):
            one_hand.client.delete(f"/v1/jobs/{name}")
            assert one_hand.client.get(f"/v1/jobs/{name}").json()["status"] == "cancelled"
        assert not one_hand.site.desk._waiting
    one_hand.idle()


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
    """All hands paint, and more paintings wait: an answer begins at once, and between two passes of the painter it has
    its token."""
    server = start(talker_root, max_running=4, max_steps=ENDLESS)
    body = {**PAINT, "detach": True, "num_inference_steps": ENDLESS}
    names = [server.post("/v1/jobs", **body).json()["id"] for _ in range(6)]
    tasks = [server.site.desk._tasks[name] for name in names]
    wait_until(lambda: all(task.step for task in tasks[:4]))
    assert server.site.desk._waiting == tasks[4:]
    talking, whole = server.service.understanding, server.service.runner.run
    assert talking is not None
    written: list[int | None] = []

    def run(*arguments: Any) -> Any:
        written.append(None if talking.idle else talking.passes)
        return whole(*arguments)

    monkeypatch.setattr(server.service.runner, "run", run)
    question = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "seed": 3}
    for _ in range(3):
        answer = server.post("/v1/chat/completions", **question)
        assert answer.status_code == 200, answer.text
    beside = [(before, now) for before, now in pairwise(written) if before is not None and now is not None]
    assert len(beside) >= 3 * 10
    assert all(now == before + 1 for before, now in beside)
    assert not any(task.done for task in tasks)
    for name in names:
        server.client.delete(f"/v1/jobs/{name}")
