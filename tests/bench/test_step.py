"""The benchmark of steps: operations counted as the released sizes have them, and every contender paints the same."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from underpaint.bench.contenders import Ours
from underpaint.bench.scenes import (
    NEO,
    NeoStage,
    QwenStage,
    Scene,
    linear_operations,
    make_stage,
    prefix_rows,
    step_attention,
)
from underpaint.bench.step import Plan, step, write
from underpaint.config import EngineConfig, resolve
from underpaint.errors import BadConfig
from underpaint.models.qwen_image21.transformer import TransformerConfig

CONFIG = resolve(EngineConfig(device="cpu"))


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "family": "qwen", "sides": (1024,), "references": (0, 1), "guided": True, "quantize": ("none",),
        "kv_codecs": ("auto",), "attention": ("auto",), "read_graphs": "on", "peers": ("eager",), "num_steps": 5,
        "budget_seconds": 100.0, **changes,
    }  # fmt: skip
    return Plan(**values)


@pytest.mark.parametrize(
    ("family", "side", "branches", "teraflop"),
    [("qwen", 1024, 1, 66.3), ("neo", 2048, 1, 78.7), ("neo", 2048, 2, 157.4)],
)
def test_operations_of_a_step_at_the_released_sizes(family: str, side: int, branches: int, teraflop: float) -> None:
    """66.3 TFLOP for 1024 x 1024 of Qwen-Image, 78.7 for a branch of U1 at 2048 x 2048."""
    make: Any = {"qwen": QwenStage, "neo": NeoStage}[family]
    stage = make(CONFIG, True, 0)
    conditions = stage.conditions(Scene(side, 0, branches))
    stage._sizes = {"qwen": TransformerConfig(), "neo": NEO}[family]
    height, width = stage.grid(side)
    operations = linear_operations(stage, branches * height * width)
    operations += step_attention(stage, Scene(side, 0, branches), conditions)
    assert operations / 1e12 == pytest.approx(teraflop, rel=0.01)


def test_branches_share_their_trunk() -> None:
    stage = QwenStage(CONFIG, True, 0)
    conditions = stage.conditions(Scene(256, 2, 2, reference_side=64))
    assert [unit.key for unit in conditions[0].units] == [unit.key for unit in conditions[1].units]
    assert prefix_rows(conditions) == 2 * (16 + 5) + 2 * 200
    again = stage.other_prompt(conditions)
    assert again[0].units == conditions[0].units
    assert not torch.equal(again[0].text, conditions[0].text)  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["qwen", "neo"])
def test_a_report(family: str) -> None:
    """On a CPU a small model says that it is one; ours and diffusers compute the same velocities, in e4m3 nearly."""
    report, _ = step(plan(family=family, quantize=("none", "fp8")), "cpu")
    assert any("these times say nothing" in note for note in report.notes)
    rows = report.as_json()["tables"][0]["rows"]
    assert {row["scene"] for row in rows} == {"256, guided", "256, 1 ref, guided"}
    ours = [row for row in rows if row["who"].startswith("ours")]
    assert [row["who"] for row in ours] == ["ours", "ours, fp8"] * 2
    if family == "qwen":
        assert [row["who"] for row in rows[:5]] == ["limit", "limit, fp8", "ours", "ours, fp8", "diffusers, eager"]
        for plain, quantised in zip(ours[::2], ours[1::2], strict=True):
            assert plain["velocity off peer"] < 1e-5 < quantised["velocity off peer"] < 0.05
    assert [len(table["rows"]) for table in report.as_json()["tables"]] == [len(rows), len(rows), 4]


def test_what_does_not_fit_the_budget_is_named() -> None:
    report, results = step(plan(budget_seconds=0.0), "cpu")
    assert results == []
    assert sum(note.startswith("not measured for lack of time") for note in report.notes) == 2
    with pytest.raises(BadConfig, match="qwen, neo"):
        step(plan(family="flux"), "cpu")
    with pytest.raises(BadConfig, match="fast is no peer; use eager, compiled"):
        step(plan(peers=("eager", "fast"), budget_seconds=0.0), "cpu")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"sides": (1024, 1000)}, "size is 1000; it must be a multiple of 32"), ({"num_steps": 0}, "must be at least 1")],
)
def test_what_would_not_be_measured_as_it_says_is_refused(changes: dict[str, Any], sentence: str) -> None:
    """1000 is no whole number of cells: 992 x 992 would be painted and called 1000."""
    with pytest.raises(BadConfig, match=sentence):
        step(plan(**changes), "cpu")


def test_steps_that_are_told_are_those_measured() -> None:
    report, _ = step(plan(num_steps=7, budget_seconds=0.0), "cpu")
    assert any(note.startswith("10 steps a point in turns of 5") for note in report.notes)


def test_files(tmp_path: Path) -> None:
    """Figures are numbers in the JSON, and every contender has its bar beside the limit."""
    report, results = step(plan(references=(1,)), "cpu")
    write(tmp_path / "results", report, results)
    (scene,) = json.loads((tmp_path / "results" / "step.json").read_text())["scenes"]
    assert scene["scene"] == "256, 1 ref, guided"
    assert [who["name"] for who in scene["contenders"]] == ["ours", "diffusers, eager"]
    assert [who["step"]["median"] for who in scene["contenders"]] == [m.step.median for m in results[0].measured]
    ours, peer = scene["contenders"]
    assert ours["second"]["low"] <= ours["second"]["median"]
    assert peer["second"] is None
    assert ours["limits"] == peer["limits"]
    assert "| scene | who | ms |" in (tmp_path / "results" / "step.md").read_text()
    drawing = ElementTree.parse(tmp_path / "results" / "step.svg").getroot()
    assert len([e for e in drawing if e.tag.endswith("rect") and e.get("fill") != "white"]) == 3


def test_several_codecs_in_one_run() -> None:
    _, results = step(plan(references=(1,), guided=False, kv_codecs=("fp32", "fp8"), peers=()), "cpu")
    assert [measured.name for measured in results[0].measured] == ["ours, K/V fp32", "ours, K/V fp8"]


@pytest.mark.parametrize("changes", [{}, {"attention": ("fp8",), "family": "neo"}])
def test_pages_that_nobody_reads_in_place_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="fp8_tiles is for Qwen-Image with attention fp8"):
        step(plan(kv_codecs=("fp32", "fp8_tiles"), **changes), "cpu")


def test_what_branches_share_has_pages_once() -> None:
    config = replace(CONFIG, step_graphs="on")
    stage = make_stage("qwen", config, True, 0)
    budgets = []
    for branches in (1, 2):
        ours = Ours(stage, config)
        ours.open(stage.conditions(Scene(256, 4, branches, 64)), 0)
        assert ours.easel
        budgets.append(ours.easel.prefixes.tree.pool.num_pages)
    assert budgets[0] < budgets[1] < 1.7 * budgets[0]
