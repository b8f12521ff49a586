"""The load tool against real servers: what it counts is what happened there."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from timing import wait_until

from server.tools import Calls, Running, held, slow_down
from underpaint import cli
from underpaint.bench.serve import Client, Kind, Load, Outcome, draw, draw_references, percentile, report, serve
from underpaint.errors import BadParameter, EngineFailure
from underpaint.report import Report

Start = Callable[..., Running]
ALL = {Kind.TEXT: 1.0, Kind.PAINT: 1.0, Kind.EDIT: 1.0}
PAINT = {Kind.PAINT: 1.0}
SMALL: dict[str, Any] = {"size": "64x64", "num_steps": 4, "reference_side": 64, "max_tokens": 6}


def table(made: Report, title: str) -> list[dict[str, Any]]:
    return next(table["rows"] for table in made.as_json()["tables"] if table["title"] == title)


def fates(made: Report) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in table(made, "Requests"):
        counts.update({name: value for name, value in row.items() if name != "kind"})
    return counts


def test_a_seed_draws_the_same_requests(seed: int) -> None:
    load = Load("", ALL, num_requests=3000, rate=10.0, cancel_share=0.2, cancel_within=0.5, seed=seed)
    plans = draw(load)
    assert plans == draw(load)
    assert plans != draw(
        Load("", ALL, num_requests=3000, rate=10.0, cancel_share=0.2, cancel_within=0.5, seed=seed + 1)
    )
    assert plans[-1].at == pytest.approx(300, rel=0.15)  # 8 standard deviations
    kinds = Counter(plan.kind for plan in plans)
    assert all(count == pytest.approx(1000, rel=0.25) for count in kinds.values())
    leaving = [plan.leave_after for plan in plans if plan.leave_after is not None]
    assert len(leaving) == pytest.approx(600, rel=0.3)
    assert max(leaving) <= 0.5
    assert {len(plan.references) for plan in plans if plan.kind is Kind.EDIT} == {1}
    assert len({plan.prompt for plan in plans}) == len({plan.seed for plan in plans}) == 3000
    assert draw_references(load) == draw_references(load)
    assert len(set(draw_references(load))) == 4


def test_percentiles() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert percentile([3.0], 0.99) == 3.0


def pictures(server: Running) -> float:
    """Painted up to now, the warm-up's among them."""
    lines = server.client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("underpaint_pictures_total "))


def test_clients_that_paint(start: Start) -> None:
    server = start()
    warm = pictures(server)
    made = serve(Load(server.url, PAINT, 12, concurrency=3, num_images=2, seed=1, **SMALL))
    assert table(made, "Requests") == [
        {"kind": "paint", "sent": 12, "answered": 12, "rejected": 0, "cancelled": 0, "failed": 0}
    ]
    whole, preview = table(made, "Seconds")
    assert (whole["what"], preview["what"]) == ("whole", "first preview")
    assert 0 < preview["p50"] < whole["p50"] <= whole["p95"] <= whole["p99"]
    rates = table(made, "Throughput")[0]
    assert rates["images/s"] == pytest.approx(24 / rates["seconds"])
    assert pictures(server) - warm == 24
    assert "3 clients" in made.notes[0]
    assert "seed 1" in made.notes[0]


def test_an_open_loop_of_everything(start: Start, talker_root: Path) -> None:
    server = start(talker_root)
    load = Load(server.url, ALL, 18, rate=20.0, seed=3, references_per_edit=2, **{**SMALL, "num_steps": 24})
    made = serve(load)
    assert fates(made)["answered"] == 18
    assert {row["kind"] for row in table(made, "Requests")} == {"text", "paint", "edit"}
    timed = {(row["kind"], row["what"]): row["p50"] for row in table(made, "Seconds")}
    assert 0 < timed["text", "first token"] < timed["text", "whole"]
    assert timed["text", "between tokens"] < timed["text", "whole"]
    assert timed["edit", "first preview"] < timed["edit", "whole"]
    rates = table(made, "Throughput")[0]
    assert rates["tokens/s"] > 0
    assert rates["seconds"] >= draw(load)[-1].at - draw(load)[0].at


def test_only_openais_fields_and_no_streams(start: Start, talker_root: Path) -> None:
    server = start(talker_root)
    made = serve(Load(server.url, ALL, 9, concurrency=2, seed=4, plain=True, model="tiny", **SMALL))
    assert fates(made)["answered"] == 9
    assert {row["what"] for row in table(made, "Seconds")} == {"whole"}
    assert table(made, "Throughput")[0]["tokens/s"] > 0


def test_times_of_an_open_loop_count_from_when_a_request_was_due(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that falls behind cannot hide it: the last of ten waits for the passes of all."""
    server = start(max_running=1)
    slow_down(monkeypatch, server.site, 0.05)
    load = Load(server.url, PAINT, 10, rate=200.0, seed=5, **SMALL)
    due = [plan.at for plan in draw(load)]
    seconds_each = 0.05 * (1 + SMALL["num_steps"])
    whole = table(serve(load), "Seconds")[0]
    assert whole["p50"] > 5 * seconds_each - (due[-1] - due[0])
    assert whole["p99"] > 10 * seconds_each - (due[-1] - due[0]) > 2


def test_clients_that_leave_are_counted_and_cost_nothing_more(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    slow_down(monkeypatch, server.site, 0.1)
    load = Load(
        server.url, PAINT, 8, concurrency=4, cancel_share=1.0, cancel_within=0.2, seed=6, **SMALL | {"num_steps": 1000}
    )
    assert fates(serve(load)) == {"sent": 8, "cancelled": 8, "answered": 0, "rejected": 0, "failed": 0}
    server.idle()


def test_a_full_queue_is_told_apart_from_a_failure(start: Start) -> None:
    server = start(max_running=1, max_waiting=1)

    def num_refused() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[1]) for line in lines if "requests_total{" in line and 'status="429"' in line)

    with held(server.service.runner):
        running = Calls([lambda: serve(Load(server.url, PAINT, 10, rate=1000.0, seed=7, **SMALL))])
        wait_until(lambda: num_refused() == 8)
    (made,) = running.join()
    assert fates(made) == {"sent": 10, "answered": 2, "rejected": 8, "cancelled": 0, "failed": 0}
    assert any("HTTP 429: the queue is full" in note for note in made.notes)


@pytest.mark.parametrize("plain", [False, True])
def test_failures_say_why(start: Start, monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    server = start()

    def broken(*_: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(server.service.qwen.image_codec, "decode", broken)
    made = serve(Load(server.url, PAINT, 3, concurrency=1, seed=8, plain=plain, **SMALL | {"num_steps": None}))
    assert fates(made)["failed"] == 3
    assert any(note.startswith("3 x ") and "the server broke while at work" in note for note in made.notes)


def test_an_answer_without_its_pictures_is_a_failure() -> None:
    """A stream that ends early must not count as one that was answered."""

    async def listen() -> Outcome:
        client, outcome = Client(Load("", PAINT, concurrency=1)), Outcome(Kind.PAINT, 0.0)
        await client._listen(
            httpx.Response(200, text='data: {"type": "image_generation.partial_image"}\n\n'), Kind.PAINT, outcome
        )
        return outcome

    assert asyncio.run(listen()).reason == "the stream ended with 0 pictures"


def test_a_report_of_nothing_answered() -> None:
    made = report(Load("", PAINT, concurrency=1), [Outcome(Kind.PAINT, 0.0, 1.0, "failed", "HTTP 500: x")])
    assert table(made, "Seconds") == []
    assert table(made, "Throughput")[0]["images/s"] == 0


@pytest.mark.parametrize("values", [
    {}, {"rate": 1.0, "concurrency": 1}, {"rate": 0.0}, {"concurrency": 0}, {"rate": 1.0, "num_requests": 0},
    {"rate": 1.0, "cancel_share": 1.5}, {"rate": 1.0, "references_per_edit": 5},
    {"rate": 1.0, "weights": {Kind.TEXT: 0.0}}, {"rate": 1.0, "weights": {Kind.TEXT: -1.0, Kind.PAINT: 2.0}},
])  # fmt: skip
def test_loads_that_are_none(values: dict[str, Any]) -> None:
    with pytest.raises(BadParameter):
        Load("", **{"weights": PAINT, **values})


def test_the_command(start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server = start(api_key="secret")

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["underpaint", "bench", "serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    few = (
        "--requests",
        "3",
        "--size",
        "64x64",
        "--steps",
        "1",
        "--paint",
        "1",
        "--edit",
        "1",
        "--reference-side",
        "64",
    )
    assert run(server.url, *few, "--api-key", "secret", "--seed", "9", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert "seed 9" in printed["notes"][0]
    assert sum(row["answered"] for row in printed["tables"][0]["rows"]) == 3
    assert run(server.url, *few) == 1
    assert "/v1/models answers 401" in capsys.readouterr().err
    assert run("http://127.0.0.1:9", *few) == 1
    assert "nothing answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert run(server.url, "--rate", "1", "--concurrency", "1") == 2
    assert "one of them" in capsys.readouterr().err


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(EngineFailure, match="nothing answers"):
        serve(Load("http://127.0.0.1:9", PAINT, concurrency=1))
