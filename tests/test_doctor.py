"""``underpaint doctor``: verdicts with their reasons, problems as sentences, and the exit status."""

import json
import sys
from pathlib import Path

import pytest
import torch

from underpaint import cli, doctor
from underpaint.report import Report


def rows(report: Report, title: str) -> dict[str, str]:
    """A table as a dict of its first two columns."""
    table = next(table for table in report.tables if table.title.startswith(title))
    return {str(row[0]): str(row[1]) for row in table.rows}


def test_a_cpu_and_a_sound_checkpoint(checkpoint: Path) -> None:
    report, problems = doctor.examine("cpu", checkpoint)
    assert problems == []
    assert report.notes == ("no problem found",)
    backends = rows(report, "Attention")
    assert backends["piecewise"].startswith("chosen by auto")
    assert backends["gluon"] == "needs a CUDA device, not cpu"
    assert rows(report, "Packages")["torch"] == torch.__version__
    found = rows(report, "Checkpoint")
    assert found["family"] == "Qwen-Image 2.1"
    assert int(found["weights"]) > 0
    assert "ulimit -l" in rows(report, "Machine")["memory a process may lock"]


def test_a_gpu_that_is_not_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another chooser than the CPU's, each backend with its own reason."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 << 30, 24 << 30))
    properties = type("Properties", (), {"name": "NVIDIA A10", "major": 8, "minor": 6})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("underpaint.attention.choice._installed", lambda package: package == "triton")
    report, problems = doctor.examine("auto")
    assert problems == []
    assert rows(report, "Machine")["cuda:0"] == "NVIDIA A10, compute capability 8.6, 20 GiB of 24 GiB free"
    backends = rows(report, "Attention on cuda")
    assert backends["triton"] == "chosen by auto for bfloat16 and head_dim 128"
    assert backends["gluon"] == backends["fa3"] == "needs compute capability 9.0, and cuda has 8.6"
    assert backends["piecewise"] == "can be named"
    assert rows(report, "Other choices")["quantize fp8"] == "no: needs compute capability 8.9"


def test_problems_are_sentences_and_the_status_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    arguments = ["underpaint", "doctor", str(tmp_path), "--device", "cpu", "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert notes[0] == "problem: the package no-such-package is not installed"
    assert len(notes) == 2
    assert "model_index.json" in notes[1]


def test_a_device_that_is_not_there() -> None:
    report, problems = doctor.examine("cuda:99")
    assert problems == ["device 'cuda:99' is not on this machine, which has 0 CUDA devices"]
    assert [table.title for table in report.tables] == ["Machine", "Packages"]
