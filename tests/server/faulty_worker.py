"""A worker that breaks as requests ask for it by the shape of their picture: what ``underpaint.server.worker`` is for
``serve``, with faults put in from outside. Everything else is as it is.

    python faulty_worker.py FD
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from msgspec import structs

from underpaint.generation.runner import Chunk, PlacedTarget, Runner
from underpaint.handover import orders
from underpaint.handover.messages import PaintOrder
from underpaint.sampling.guidance import Branch
from underpaint.server import remote, worker

SLOW_SECONDS = 0.1
# Width and height of pictures, in units of 32 pixels.
OUT_OF_MEMORY, SLOW, BRANCH_LOST = (3, 1), (1, 3), (4, 1)


def asks_for(fault: tuple[int, int], grid: tuple[int, int]) -> bool:
    height, width = grid
    return width * fault[1] == height * fault[0]


def break_runner() -> None:
    whole = Runner.run

    def run(self: Runner, chunks: Sequence[Chunk], targets: Sequence[PlacedTarget]) -> list[torch.Tensor]:
        grids = [placed.target.grid for placed in targets]
        if any(asks_for(OUT_OF_MEMORY, grid) for grid in grids):
            raise torch.OutOfMemoryError("injected")
        if any(asks_for(SLOW, grid) for grid in grids):
            time.sleep(SLOW_SECONDS)
        return whole(self, chunks, targets)

    Runner.run = run  # type: ignore[method-assign]


def break_handover() -> None:
    whole = orders.write_order

    def write_order(*arguments: Any) -> PaintOrder:
        message = whole(*arguments)
        if not any(asks_for(BRANCH_LOST, job.grid) for job in message.jobs):
            return message
        jobs = tuple(
            structs.replace(job, conditions={b: i for b, i in job.conditions.items() if b is Branch.CONDITIONAL})
            for job in message.jobs
        )
        return structs.replace(message, jobs=jobs)

    remote.write_order = write_order  # type: ignore[assignment]


if __name__ == "__main__":
    break_runner()
    break_handover()
    worker.main()
