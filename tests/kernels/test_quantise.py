"""Row-wise quantisation: under the interpreter, and what it compiles to for Hopper."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.importorskip("triton")


def test_cases_under_the_interpreter(seed: int) -> None:
    cases = str(HERE / "quantise_cases.py")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", cases]
    done = subprocess.run(
        [*command, "--seed", str(seed)], capture_output=True, text=True, timeout=250,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_compiles_for_hopper_without_spilling() -> None:
    """16 bytes a load, the card's own conversion, and nothing in local memory, at the widths of the released models."""
    done = subprocess.run([sys.executable, HERE / "quantise_report.py"], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["width"] for report in reports] == [4096, 12288]
    for report in reports:
        assert report["stack"] == report["local"] == 0
        assert report["conversions"] > 0
        assert report["wide_loads"] == report["loads"] > 0
