"""Times of things that run on a GPU (or, for a look at a benchmark, on a CPU), and what the machine itself can do."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

COPY_BYTES = 4 << 30
CPU_COPY_BYTES = 1 << 26


@dataclass(frozen=True)
class Spread:
    """Milliseconds: the median, and between which values nine of ten lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> "Spread":
        values = sorted(milliseconds)
        last = len(values) - 1
        return cls(statistics.median(values), values[round(0.05 * last)], values[round(0.95 * last)])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def wall_ms(call: Callable[[], object], num_calls: int, device: str) -> Spread:
    """Of calls one by one, each from its start until the device is done."""
    times = []
    for _ in range(num_calls):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        times.append((time.perf_counter() - start) * 1e3)
    return Spread.of(times)


def device_ms(calls: Sequence[Callable[[], object]], device: str, num_rounds: int = 20) -> Spread:
    """Of one call, when the calls follow each other without gaps: on a GPU in a CUDA graph. Several calls on data of
    their own keep the second-level cache from serving what memory should."""
    if not device.startswith("cuda"):
        return Spread.of([wall_ms(call, 1, device).median for _ in range(3) for call in calls])
    for call in calls:
        call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return Spread.of([milliseconds / len(calls) for milliseconds in event_ms(graph.replay, num_rounds)])


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a large copy within the device's memory, at its best of several."""
    on_gpu = device.startswith("cuda")
    num_bytes = COPY_BYTES if on_gpu else CPU_COPY_BYTES
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    # Not in a graph: there a copy may become the copy engine's, which is slower.
    times = (
        event_ms(lambda: target.copy_(source), 20) if on_gpu else [wall_ms(lambda: target.copy_(source), 3, device).low]
    )
    return 2 * num_bytes / min(times) * 1e3


def event_ms(call: Callable[[], object], num_calls: int) -> list[float]:
    """Of each of a GPU's calls, one behind the other."""
    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def gemm_rate(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: str) -> float:
    """Operations a second of products (rows, inputs) x (outputs, inputs), one after the other: ``shapes`` are (rows,
    outputs, inputs)."""
    operands = [
        (torch.randn(m, k, dtype=dtype, device=device), torch.randn(n, k, dtype=dtype, device=device))
        for m, n, k in shapes
    ]

    def multiply(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
        return lambda: x @ weight.mT

    calls = [multiply(x, weight) for x, weight in operands]
    seconds = device_ms(calls, device).median * len(calls) / 1e3
    return sum(2 * m * n * k for m, n, k in shapes) / seconds


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def collect(device: str) -> None:
    """Give back what nobody needs, and what PyTorch keeps of it."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
