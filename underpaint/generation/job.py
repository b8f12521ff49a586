"""Images in flight, and the requests they belong to."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from underpaint.errors import Cancelled, UnderpaintError
from underpaint.generation.prefix import Borrowed, Lease
from underpaint.generation.runner import Place, PlacedTarget
from underpaint.layout import Grid
from underpaint.models.painter import Condition, Target
from underpaint.sampling.guidance import Branch, Velocities, take


class Sampler(Protocol):
    """The course of one picture: how many steps, which branches each needs, what they do to the state."""

    @property
    def num_steps(self) -> int: ...

    def branches(self, step: int) -> tuple[Branch, ...]: ...

    def level(self, step: int) -> Tensor:
        """What the model reads of the noise level, 0-dim fp32."""
        ...

    def advance(self, state: Tensor, velocities: Velocities, step: int) -> Tensor:
        """The state after ``step``, the shape of ``state``."""
        ...


@dataclass(eq=False)
class Job:
    """One image. ``conditions``: which condition of its order each branch reads. ``places`` once these are filled.

    ``state``: (tokens, channels). ``served``: see ``scheduler.Item``. ``kept_steps``: the steps after which the state
    is also put into ``kept``, for whoever shows the picture while it is painted.
    """

    state: Tensor
    grid: Grid
    sampler: Sampler
    conditions: Mapping[Branch, int]
    places: dict[Branch, Place] = field(default_factory=dict)
    step: int = 0
    served: int = -1
    kept_steps: frozenset[int] = frozenset()
    kept: dict[int, Tensor] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.step == self.sampler.num_steps

    @property
    def branches(self) -> tuple[Branch, ...]:
        return self.sampler.branches(self.step)

    @property
    def num_rows(self) -> int:
        """Rows of its next step."""
        return len(self.state) * len(self.branches)

    def targets(self) -> list[PlacedTarget]:
        """What its next step passes, one a branch. Raises MissingBranch."""
        target = Target(self.state, self.grid, self.sampler.level(self.step))
        return [PlacedTarget(take(self.places, branch), target) for branch in self.branches]

    def after(self, velocities: list[Tensor]) -> Tensor:
        """The state after the step whose ``targets`` had these velocities; the job itself does not move."""
        of_branch = dict(zip(self.branches, velocities, strict=True))
        return self.sampler.advance(self.state, of_branch, self.step)

    def move(self, state: Tensor) -> None:
        """Take a step."""
        self.state, self.step = state, self.step + 1
        if self.step in self.kept_steps:
            self.kept[self.step] = state


@dataclass(eq=False)
class Order:
    """A request in the engine: prefixes, and the images painted behind them. It ends exactly once, with every job done
    or with ``error``.

    An order that comes with a ``lease`` borrows its prefixes. ``deadline``: on the clock of ``time.monotonic``, None
    for never. ``served``: see ``scheduler.Item``, of its prefill.
    """

    conditions: tuple[Condition, ...]
    jobs: tuple[Job, ...]
    deadline: float | None = None
    lease: Lease | Borrowed | None = None
    error: UnderpaintError | None = None
    ended: bool = False
    served: int = -1
    submitted: float = field(default_factory=time.monotonic)
    prefilled: float | None = None

    @property
    def step(self) -> int:
        """Steps that every job has taken."""
        return min(job.step for job in self.jobs)

    @property
    def num_steps(self) -> int:
        return max(job.sampler.num_steps for job in self.jobs)

    def cancel(self) -> None:
        """Ask for an end before the next pass. May be called from any thread, at any time."""
        if not self.ended and self.error is None:
            self.error = Cancelled(f"cancelled after step {self.step} of {self.num_steps}")


def draw_noise(seed: int, num_channels: int, grid: Grid, dtype: torch.dtype) -> Tensor:
    """(tokens, channels) of Gaussian noise from a CPU generator, so that device and batch do not change it.

    Drawn channel by channel in the model's dtype, as diffusers draws it.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.randn((1, 1, num_channels, *grid), generator=generator, dtype=dtype)
    return noise.reshape(num_channels, -1).T.contiguous()
