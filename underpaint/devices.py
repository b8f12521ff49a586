"""What is asked of a CUDA device that other threads use, too."""

import torch


def wait_for(device: str | torch.device) -> None:
    """Until ``device`` has done what was queued there, by any thread: all use the same stream.

    Not for the whole device: that is forbidden while another thread captures a graph, and breaks the capture, too.
    """
    torch.cuda.current_stream(torch.device(device)).synchronize()
