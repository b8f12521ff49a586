"""The attention kernels without a GPU: Triton's right under its interpreter, both compiled within their resources."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(command: list[str], **environment: str) -> str:
    """Standard output of a process of its own, which must succeed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=variables, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_under_the_interpreter(seed: int) -> None:
    """All of ``hybrid_attention_cases``; which one failed, and its seed, stand in the output."""
    cases = str(HERE / "hybrid_attention_cases.py")
    print(run(["-m", "pytest", cases, "--seed", str(seed), "-p", "no:cacheprovider"], TRITON_INTERPRET="1"))


def test_the_gluon_kernel_emulated(seed: int) -> None:
    """All of ``gluon_cases``."""
    cases = str(HERE / "gluon_cases.py")
    print(run(["-m", "pytest", cases, "--seed", str(seed), "-p", "no:cacheprovider"], TRITON_INTERPRET="1"))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each case of ``compile_report`` needs, compiled afresh."""
    cache = str(tmp_path_factory.mktemp("triton"))
    lines = run([str(HERE / "compile_report.py")], TRITON_CACHE_DIR=cache, TRITON_INTERPRET="0").splitlines()
    return [json.loads(line) for line in lines]


def test_compiled_kernels_fit(reports: list[dict[str, Any]]) -> None:
    """Next to no spills: on Hopper some words that are read once, before it a few more, where head_dim is 128 and tiles
    are addressed by plain pointers."""
    for report in reports:
        assert report["local"] == 0, report
        assert report["stack"] <= (32 if report["arch"] < 90 else 16), report
        assert report["shared_memory"] <= report["shared_memory_limit"], report


def test_hopper_gets_its_own_instructions(reports: list[dict[str, Any]]) -> None:
    """Warpgroup matrix products where tiles are large, and tiles fetched by TMA."""
    hopper = [report for report in reports if report["arch"] == 90]
    assert all(report["tma"] for report in hopper)
    large = [report for report in hopper if report["dtype"] != "fp32" and report.get("work") != "few rows"]
    assert len(large) > 8
    assert all(report["wgmma"] for report in large)


def test_the_gluon_kernel_keeps_the_tensor_cores_busy(reports: list[dict[str, Any]]) -> None:
    """What makes it fast, and what the compiler undoes without a word when registers are short or a wait can move:
    products run in groups, and the softmax of a tile beside the products of the last one, in both consumers."""
    gluon = [report for report in reports if report["kernel"] == "gluon"]
    assert len(gluon) >= 5
    for report in gluon:
        assert report["product_groups"] <= report["products"] / 6, report
        assert report["overlapped_exponentials"] >= 2 * 64, report
