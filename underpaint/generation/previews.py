"""What a picture will look like, while it is painted: not the noisy state, but where it is heading.

The flow is nearly straight, so the states before and after a step, extended to the last noise level, give an estimate
of the picture. Previews stand evenly between the first and the last step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from underpaint.generation.job import Job, Order


@dataclass(frozen=True, eq=False)
class Estimate:
    """Preview ``number``, from 0, of job ``index`` of an order. ``state``: as a finished job's, (tokens, channels)."""

    index: int
    number: int
    state: Tensor


class Previews:
    """The previews of an order, up to so many a picture: fewer where there are too few steps."""

    def __init__(self, order: Order, num_previews: int) -> None:
        """Before the order is submitted."""
        self._order = order
        self._steps = [preview_steps(num_previews, job.sampler.num_steps) for job in order.jobs]
        self._starts = [job.state for job in order.jobs]
        self._num_taken = [0] * len(order.jobs)
        for job, steps in zip(order.jobs, self._steps, strict=True):
            job.kept_steps = frozenset(step - before for step in steps for before in (0, 1))

    def take(self) -> Iterator[Estimate]:
        """Between turns: what is due. When the pictures themselves are there, it is too late."""
        for index, job in enumerate(self._order.jobs):
            number = self._num_taken[index]
            due = self._steps[index][number : number + 1]
            if due and due[0] in job.kept and not self._order.ended:
                self._num_taken[index] += 1
                before = job.kept[due[0] - 1] if due[0] > 1 else self._starts[index]
                yield Estimate(index, number, estimate(job, due[0], before, job.kept[due[0]]))


def preview_steps(num_previews: int, num_steps: int) -> list[int]:
    """After which steps there is a preview: fewer than asked for where there are too few steps."""
    num_previews = min(num_previews, num_steps)  # as many as there are: one after each step
    return sorted({-(-i * num_steps // (num_previews + 1)) for i in range(1, num_previews + 1)} - {num_steps})


def estimate(job: Job, step: int, before: Tensor, now: Tensor) -> Tensor:
    """The state at the last noise level, on the line through those before and after ``step``; (tokens, channels)."""
    start, here, end = (float(job.sampler.level(i)) for i in (step - 1, step, job.sampler.num_steps))
    return now + (end - here) / (here - start) * (now - before)
