"""The benchmark of requests: it paints what it says, and says so when something is wrong."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from underpaint.bench import requests as bench
from underpaint.bench.requests import Moment, Plan, memory_table, random_wishes, requests, unlike
from underpaint.bench.scenes import make_stage
from underpaint.capture.recorder import GraphCounts
from underpaint.cli import app
from underpaint.config import EngineConfig, resolve
from underpaint.errors import BadConfig
from underpaint.report import Table

CONFIG = resolve(EngineConfig(device="cpu"))


def plan(*tables: str, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "family": "qwen", "tables": tables, "quantize": "none", "kv_codec": "auto", "side": None, "num_steps": 8,
        "num_requests": 28, **changes,
    }  # fmt: skip
    return Plan(**values)


@pytest.mark.parametrize("family", ["qwen", "neo"])
def test_a_report(family: str, seed: int) -> None:
    report = requests(plan("together", "fidelity", "memory", family=family), "cpu", seed)
    assert not report.wrong, report
    assert any("say nothing" in note for note in report.notes)
    together, fidelity, memory = (table["rows"] for table in report.as_json()["tables"])
    assert [row["way"] for row in together] == ["one after another", "together"]
    assert together[1]["throughput"] == pytest.approx(together[1]["pictures/s"] / together[0]["pictures/s"])
    assert [row["references"] for row in fidelity] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert all(1e-4 < row["relative error"] < 0.5 for row in fidelity), "fp8 was compared with itself"
    assert [row["requests"] for row in memory] == ["1 to 7", "8 to 14", "15 to 21", "22 to 28", "all"]
    steps = sum(wish.num_steps for wish in random_wishes(make_stage(family, CONFIG, True, 0), plan(), 128, seed))
    assert memory[-1]["replayed"] + memory[-1]["captured"] + memory[-1]["eager"] == steps


def test_unlike_requests() -> None:
    wishes = unlike(make_stage("qwen", CONFIG, True, 0), 128, 8)
    assert len({wish.prompt_rows for wish in wishes}) == len({wish.seed for wish in wishes}) == 8
    assert {wish.num_references for wish in wishes} == {0, 1, 2}
    assert {wish.guided for wish in wishes} == {True, False}
    assert {wish.grid for wish in wishes} == {(8, 8)}


@pytest.mark.parametrize("family", ["qwen", "neo"])
def test_random_requests(family: str, seed: int) -> None:
    """None is larger than the first, in anything."""
    first, *others = random_wishes(make_stage(family, CONFIG, True, 0), plan(num_requests=200), 1024, seed)
    assert len(others) == 199
    assert first.guided
    for wish in others:
        assert wish.grid[0] <= first.grid[0]
        assert wish.grid[1] <= first.grid[1]
        assert wish.num_references <= first.num_references
        assert wish.reference_side <= first.reference_side
        assert wish.prompt_rows <= first.prompt_rows
    assert len({wish.grid for wish in others}) > 50


def test_a_request_beside_others_that_changes_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    paint = bench._Engine.paint

    def disturbed(self: Any, orders: Any) -> list[torch.Tensor]:
        states = paint(self, orders)
        return states if len(orders) == 1 else [*states[1:], states[0]]

    monkeypatch.setattr(bench._Engine, "paint", disturbed)
    report = requests(plan("together", num_steps=1), "cpu")
    assert report.wrong
    assert bench._distance(math.nan, 33.0).startswith("WRONG")


def test_one_of_several_that_is_not_finite_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    paint = bench._Engine.paint

    def disturbed(self: Any, orders: Any) -> list[torch.Tensor]:
        states = paint(self, orders)
        return states if len(orders) == 1 else [*states[:-1], states[-1] * math.nan]

    monkeypatch.setattr(bench._Engine, "paint", disturbed)
    assert requests(plan("together", num_steps=1), "cpu").wrong


def test_what_each_request_leaves_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their states, kept by somebody."""
    kept: list[torch.Tensor] = []
    advance = bench.Wish.order

    def order(self: Any, stage: Any, conditions: Any) -> Any:
        made = advance(self, stage, conditions)
        kept.append(stage.noise(self.grid, self.seed))
        return made

    monkeypatch.setattr(bench.Wish, "order", order)
    report = requests(plan("memory", num_steps=1), "cpu")
    verdicts = [row["verdict"] for row in report.as_json()["tables"][0]["rows"]]
    assert verdicts[0] == "reference"
    assert verdicts[3].startswith("WRONG")
    assert "more allocated" in verdicts[3]


def moments(**last: Any) -> Table:
    """Of eight requests of ten steps; ``last``: what is otherwise after the last one."""
    made = [Moment(1000, 2000, GraphCounts(hits=10 * i + 9, misses=1), 3, 1500) for i in range(8)]
    made[-1] = replace(made[-1], **last)
    return memory_table(GraphCounts(), made, state_bytes=40)


@pytest.mark.parametrize(
    ("last", "place", "said"),
    [
        ({"allocated": 1060}, -2, "ok"),
        ({"allocated": 1061}, -2, "WRONG: 61 B more allocated"),
        ({"kept": 1561 + bench.SPARE_KEPT}, -2, "WRONG: 64 MiB more kept"),
        ({"reserved": 9 << 30}, -2, "ok"),
        ({"compiled": 4}, -2, "WRONG: 1 kernels compiled"),
        ({"counts": GraphCounts(hits=77, misses=3)}, -1, "ok 96.2 % replayed"),
        ({"counts": GraphCounts(hits=76, misses=1, eager=3)}, -1, "WRONG 95.0 % replayed"),
    ],
)
def test_verdicts(last: dict[str, Any], place: int, said: str) -> None:
    assert moments(**last).rows[place][-1] == said


def test_the_command(tmp_path: Path) -> None:
    arguments = ["bench", "requests", "--random", "--table", "together", "--steps", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == json.loads((tmp_path / "requests.json").read_text())
    assert "| way | ms |" in (tmp_path / "requests.md").read_text()
    assert not (tmp_path / "requests.svg").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_requests": 3}, "at least 4"),
        ({"num_steps": 0}, "at least 1"),
        ({"side": 64}, "at least 128"),
        ({"side": 500}, "a multiple of 32"),
        ({"tables": ("speed",)}, "together"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        requests(plan(**{"tables": ("memory",), **changes}), "cpu")
