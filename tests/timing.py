"""How tests wait, and measure, on a machine that may hold up any thread for seconds."""

import time
from collections.abc import Callable

WAIT_SECONDS = 60.0
"""For what is sure to come where nothing is broken."""


def wait_until(
    condition: Callable[[], bool],
    seconds: float = WAIT_SECONDS,
    complaint: Callable[[], str] = lambda: "it did not come",
) -> None:
    """Look again and again; fails with ``complaint`` after ``seconds``."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, complaint()
        time.sleep(0.002)


def in_time(attempt: Callable[[], float], seconds: float, attempts: int = 4) -> None:
    """Something that takes less than ``seconds``, as ``attempt`` returns. The machine may hold up any attempt, and can
    hasten none: so what is too slow is so every time, and one in time shows that it is not."""
    took: list[float] = []
    while not took or took[-1] >= seconds:
        assert len(took) < attempts, f"it took {took} s, and should take less than {seconds} s"
        took.append(attempt())
