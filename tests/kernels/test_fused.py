"""The kernels of the fused path without a GPU: right under Triton's interpreter, compiled within their resources."""

import importlib.util
import json
from pathlib import Path

import pytest
from test_hybrid_attention import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

HERE = Path(__file__).parent


@pytest.mark.parametrize("cases", ["pointwise_cases", "decode_cases", "expert_cases", "fused_cases"])
def test_under_the_interpreter(cases: str, seed: int) -> None:
    """All of a file; which case failed, and its seed, stand in the output."""
    print(
        run(
            ["-m", "pytest", str(HERE / f"{cases}.py"), "--seed", str(seed), "-p", "no:cacheprovider"],
            TRITON_INTERPRET="1",
        )
    )


def test_compiled_kernels_fit(tmp_path: Path) -> None:
    """On Hopper: no spills, shared memory to spare, wide reads, and each waits for the kernel before it."""
    lines = run([str(HERE / "fused_report.py")], TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0").splitlines()
    for report in map(json.loads, lines):
        assert report["local"] == 0, report
        assert report["stack"] == 0, report
        assert report["shared_memory"] <= report["shared_memory_limit"], report
        assert report["wide_loads"] + report["tma"] > 0 or report["kernel"] == "route_kernel", report
        assert report["waits"] > 0, report
