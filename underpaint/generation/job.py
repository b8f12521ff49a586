"""Images in flight, and the step that advances them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from underpaint.generation.runner import Branch, Runner, TargetRows
from underpaint.layout import Grid
from underpaint.sampling.guidance import guide
from underpaint.sampling.schedule import Schedule, euler_step


@dataclass(eq=False)
class Job:
    """One image. ``branches``: the conditional one, then the negative one if the job is guided by ``cfg_scale``."""

    latents: Tensor  # (tokens, channels)
    grid: Grid
    schedule: Schedule
    branches: tuple[Branch, ...]
    cfg_scale: float
    step: int = 0

    @property
    def sigma(self) -> Tensor:
        return self.schedule.sigmas[self.step]

    def targets(self) -> list[TargetRows]:
        return [TargetRows(branch, self.latents, self.sigma) for branch in self.branches]

    def advance(self, velocities: Sequence[Tensor]) -> None:
        """Take one step along the guided velocity."""
        velocity = velocities[0] if len(self.branches) == 1 else guide(velocities[0], velocities[1], self.cfg_scale)
        self.latents = euler_step(self.latents, velocity, self.sigma, self.schedule.sigmas[self.step + 1])
        self.step += 1


@torch.inference_mode()
def advance(jobs: Sequence[Job], runner: Runner, max_batch_rows: int) -> None:
    """One step of every job, in as few passes as ``max_batch_rows`` allows; the branches of a job stay together."""
    for batch in _batches(jobs, max_batch_rows):
        velocities = runner.step([target for job in batch for target in job.targets()])
        first = 0
        for job in batch:
            job.advance(velocities[first : first + len(job.branches)])
            first += len(job.branches)


def _batches(jobs: Sequence[Job], max_rows: int) -> Iterator[list[Job]]:
    batch: list[Job] = []
    rows = 0
    for job in jobs:
        job_rows = len(job.latents) * len(job.branches)
        if batch and rows + job_rows > max_rows:
            yield batch
            batch, rows = [], 0
        batch.append(job)
        rows += job_rows
    if batch:
        yield batch


def draw_noise(seed: int, num_channels: int, grid: Grid, dtype: torch.dtype) -> Tensor:
    """(tokens, channels) of Gaussian noise from a CPU generator, so that device and batch do not change it.

    Drawn channel by channel in the model's dtype, as diffusers draws it.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.randn((1, 1, num_channels, *grid), generator=generator, dtype=dtype)
    return noise.reshape(num_channels, -1).T.contiguous()
