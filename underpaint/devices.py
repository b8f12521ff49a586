"""A CUDA device among several, and used by several threads: which it is, and waiting for it."""

import torch

LOST = (
    "illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address",
    "illegal instruction", "hardware stack error", "global/shared address space", "invalid program counter",
    "launch timed out", "uncorrectable",
)  # fmt: skip
"""Of the texts of CUDA's errors, torch's and Triton's, those of errors that stay: see ``is_lost``."""


def is_lost(error: BaseException | None) -> bool:
    """Whether ``error``, or what caused it, says that CUDA will do nothing more in this process. From the first error
    in a kernel on every call fails with the same one, so that whatever is asked next breaks too."""
    while error is not None:
        if isinstance(error, RuntimeError) and any(text in str(error) for text in LOST):
            return True
        error = error.__cause__
    return False


def numbered(device: str) -> str:
    """``cuda`` by the number that it has in this thread now: every thread has a current device of its own, at first
    device 0, and later ``cuda`` may be another than the one that the weights are on."""
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device


def wait_for(device: str | torch.device) -> None:
    """Until ``device`` has done what was queued there, by any thread: all use the same stream.

    Not for the whole device: that is forbidden while another thread captures a graph, and breaks the capture, too.
    """
    torch.cuda.current_stream(torch.device(device)).synchronize()
