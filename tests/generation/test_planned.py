"""Steps with planned attention, under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.importorskip("triton")


def test_cases_under_the_interpreter(seed: int) -> None:
    cases = str(HERE / "planned_cases.py")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", cases, "--seed", str(seed % 2**31)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "[100%]" in done.stdout
