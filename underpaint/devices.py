"""A CUDA device among several, and used by several threads: which it is, and waiting for it."""

import torch


def numbered(device: str) -> str:
    """``cuda`` by the number that it has in this thread now: every thread has a current device of its own, at first
    device 0, and later ``cuda`` may be another than the one that the weights are on."""
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device


def wait_for(device: str | torch.device) -> None:
    """Until ``device`` has done what was queued there, by any thread: all use the same stream.

    Not for the whole device: that is forbidden while another thread captures a graph, and breaks the capture, too.
    """
    torch.cuda.current_stream(torch.device(device)).synchronize()
