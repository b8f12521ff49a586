"""What records a pass and runs it again: on a GPU as a CUDA graph, on a CPU as it is."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes what a step does to the buffers, and returns what does it again."""


def run_again(body: Callable[[], None]) -> Callable[[], None]:
    """The recorder of a CPU."""
    return body


_capturing = threading.Lock()
"""A capture begins by waiting for the device, which is forbidden while another is under way."""


@cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    """One for all captures on a device. Not torch's own, of which a process has one: it is on the device that captured
    first, and kernels on any other would not go into the graph but run, once."""
    return torch.cuda.Stream(index)


class CudaRecorder:
    """Captures CUDA graphs. They share one pool of memory for what lives within a step, since none runs beside
    another."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            # Compiles kernels, and allocates and uploads what stays. On the stream that everything else uses: what the
            # allocator keeps for another would be lost to it, and so grow with every capture.
            body()
            graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            stream = _capture_stream(torch.cuda.current_device())
            # Other threads decode pictures and make previews meanwhile, and may allocate. The stream is set back by
            # ourselves, too: a capture that breaks leaves its own, and this thread would work beside all others.
            capture = torch.cuda.graph(graph, self._memory, stream, capture_error_mode="thread_local")
            with _capturing, torch.cuda.stream(here), capture:
                body()
        return graph.replay


@dataclass
class GraphCounts:
    """Passes that were replayed, captured first, and run without a graph. ``evictions``: of graphs."""

    hits: int = 0
    misses: int = 0
    eager: int = 0
    evictions: int = 0


def round_up(num_rows: int, steps_an_octave: int, smallest: int) -> int:
    """To the next of ``steps_an_octave`` row counts between powers of two, and to a multiple of ``smallest``."""
    step = max((1 << (max(num_rows, 1) - 1).bit_length()) // 2 // steps_an_octave, smallest)
    return -(-num_rows // step) * step
