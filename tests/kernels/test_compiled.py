"""What the kernels compile to for NVIDIA cards, without one: within their resources, and with the instructions that
make them fast. Every report compiles in a process of its own, afresh."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

HERE = Path(__file__).parent
Report = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What each case of a script needs: one JSON object a line of its output."""

    @cache
    def run(script: str, *arguments: str) -> list[dict[str, Any]]:
        cache_dir = str(tmp_path_factory.mktemp("triton"))
        path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": cache_dir, "TRITON_INTERPRET": "0"}
        command = [sys.executable, str(HERE / script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def assert_fits(reports: list[dict[str, Any]]) -> None:
    """Next to no spills: on Hopper some words that are read once, before it a few more, where head_dim is 128 and tiles
    are addressed by plain pointers."""
    for case in reports:
        assert case["local"] == 0, case
        assert case["stack"] <= (32 if case["arch"] < 90 else 16), case
        assert case["shared_memory"] <= case["shared_memory_limit"], case


def test_attention_in_triton(report: Report) -> None:
    """On Hopper warpgroup matrix products where tiles are large, and tiles fetched by TMA."""
    reports = report("compile_report.py", "triton")
    assert_fits(reports)
    hopper = [case for case in reports if case["arch"] == 90]
    assert all(case["tma"] for case in hopper)
    large = [case for case in hopper if case["dtype"] != "fp32" and case["work"] != "few rows"]
    assert len(large) >= 5
    assert all(case["wgmma"] for case in large)


def test_attention_in_gluon(report: Report) -> None:
    """What makes it fast, and what the compiler undoes without a word when registers are short or a wait can move:
    products run in groups, the softmax of a tile beside the products of the last one, and the loops over tiles without
    a mask, one for each consumer, have no moves of operands (about 460 instructions then, 480 and more with them).
    Triton 3.7 makes one of them 16 instructions longer."""
    reports = report("compile_report.py", "gluon")
    assert_fits(reports)
    assert len(reports) >= 5
    for case in reports:
        assert case["tma"], case
        assert case["wgmma"], case
        assert case["product_groups"] <= case["products"] / 6, case
        assert case["overlapped_exponentials"] >= 4 * 64, case
        assert case["loops"][0] <= 470, case
        assert case["loops"][1] <= (470 if triton.__version__.startswith("3.6.") else 480), case


def test_fused_kernels(report: Report) -> None:
    """No spills, shared memory to spare, wide reads, and each waits for the kernel before it; those of text decode ask
    for weights, keys and values before they do. What quantises divides for the scale of a row and its reciprocal, not
    for every value. What norms use of shared memory is for sums: rows stay in registers."""
    reports = report("fused_report.py")
    assert len(reports) > 20
    for case in reports:
        assert case["local"] == 0, case
        assert case["stack"] == 0, case
        assert case["shared_memory"] <= case["shared_memory_limit"], case
        assert case["wide_loads"] + case["tma"] > 0 or case["kernel"] == "route_kernel", case
        assert case["waits"] > 0, case
        assert (case["prefetches"] > 0) == (case["kernel"] == "decode_attention_kernel"), case
        assert (case["conversions"] > 0) == case["quantises"], case
        assert not case["quantises"] or case["divisions"] == 2, case
        assert "norm" not in case["kernel"] or case["shared_memory"] <= 128, case
    assert sum(case["quantises"] for case in reports) == 3
    assert sum(case["prefetches"] > 0 for case in reports) == 3


def test_quantisation(report: Report) -> None:
    """16 bytes a load, the card's own conversion, and nothing in local memory, at the widths of the released models."""
    reports = report("quantise_report.py")
    assert [case["width"] for case in reports] == [4096, 12288]
    for case in reports:
        assert case["stack"] == case["local"] == 0
        assert case["conversions"] > 0
        assert case["wide_loads"] == case["loads"] > 0
