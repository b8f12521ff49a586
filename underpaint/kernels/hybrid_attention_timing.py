"""Medians of calls that take turns: the clock of a busy card drifts, so only what ran side by side can be compared.

Before each turn the card rests. At its power limit it runs the first tens of milliseconds behind a frugal kernel up to
15 % faster than those behind a hungry one, so without a rest whoever follows a slow peer is favoured.
"""

import time
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch

ROUNDS = 5
ROUND_MS = 20.0
REST_SECONDS = 0.05
MAX_COUNT = 40

Calls = Mapping[str, Callable[[], object]]


def graph_times(calls: Calls) -> dict[str, float]:
    """Median ms of each, replayed from a CUDA graph: the host's time between kernels is not counted."""
    graphs, counts = {}, {}
    for name, call in calls.items():
        call()  # compiles
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            call()
        counts[name] = int(min(MAX_COUNT, max(1, ROUND_MS / _replay(graphs[name], 2)[-1])))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            time.sleep(REST_SECONDS)
            times[name] += _replay(graph, 1 + counts[name])[1:]  # the first meets the clocks and caches of another
    return {name: sorted(found)[len(found) // 2] for name, found in times.items()}


def _replay(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def host_times(calls: Calls, count: int = 3) -> dict[str, float]:
    """Median ms of each on the host's clock. On a GPU that is what a launch costs the host."""
    found = {}
    for name, call in calls.items():
        times = []
        for _ in range(count):
            started = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - started))
        found[name] = sorted(times)[count // 2]
    return found
