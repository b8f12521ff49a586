"""The noise levels of a painting, and the step from one to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from underpaint.errors import BadParameter, CheckpointError
from underpaint.sampling.guidance import Branch, Guidance, Velocities


@dataclass(frozen=True, eq=False)
class Schedule:
    """``sigmas``: (num_steps + 1,) fp32, falling from pure noise to the image's 0."""

    sigmas: Tensor

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1


class ScheduleRule:
    """Makes schedules as a checkpoint's ``scheduler_config.json`` says; the arithmetic is diffusers'."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises CheckpointError for another kind of scheduler."""
        name = config.get("_class_name")
        if name != "FlowMatchEulerDiscreteScheduler":
            raise CheckpointError(f"the scheduler is {name!r}; only FlowMatchEulerDiscreteScheduler is supported")
        unknown = {key for key in config if not key.startswith("_")} - FlowMatchEulerDiscreteScheduler().config.keys()
        if unknown:
            raise CheckpointError(f"unknown keys in scheduler_config.json: {', '.join(sorted(unknown))}")
        self._config = dict(config)

    def shift(self, num_target_tokens: int) -> float:
        """mu of the dynamic time shift, linear in the number of target tokens."""
        c = FlowMatchEulerDiscreteScheduler.from_config(self._config).config
        slope = (c["max_shift"] - c["base_shift"]) / (c["max_image_seq_len"] - c["base_image_seq_len"])
        return c["base_shift"] + slope * (num_target_tokens - c["base_image_seq_len"])

    def schedule(self, num_target_tokens: int, num_steps: int, sigmas: Sequence[float] | None = None) -> Schedule:
        """``num_steps`` levels evenly spaced, or the levels of ``sigmas``; either goes through the time shift.

        A single level of 1 stays 1: it cannot also be stretched to end at ``shift_terminal`` (diffusers divides zero
        by zero there and paints NaN).
        """
        levels = np.linspace(1.0, 1 / num_steps, num_steps) if sigmas is None else np.asarray(sigmas, dtype=np.float64)
        changes = {"shift_terminal": None} if levels.tolist() == [1.0] else {}
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._config, **changes)
        scheduler.set_timesteps(sigmas=levels, mu=self.shift(num_target_tokens))
        return Schedule(scheduler.sigmas.float().cpu())


@dataclass(frozen=True, eq=False)
class EulerSampler:
    """The course of one picture from noise to latents: a schedule, guidance, and Euler's step."""

    schedule: Schedule
    guidance: Guidance

    @property
    def num_steps(self) -> int:
        return self.schedule.num_steps

    def branches(self, step: int) -> tuple[Branch, ...]:
        return self.guidance.branches(float(self.schedule.sigmas[step]))

    def level(self, step: int) -> Tensor:
        """What the model reads: sigma, 0-dim fp32."""
        return self.schedule.sigmas[step]

    def advance(self, state: Tensor, velocities: Velocities, step: int) -> Tensor:
        """(tokens, channels) after ``step``. Raises MissingBranch."""
        sigma, next_sigma = self.schedule.sigmas[step], self.schedule.sigmas[step + 1]
        return euler_step(state, self.guidance.combine(velocities, float(sigma), step), sigma, next_sigma)


def check_sigmas(sigmas: Sequence[float]) -> tuple[float, ...]:
    """``sigmas`` as a tuple. Raises BadParameter unless they fall strictly within (0, 1], also in fp32, in which steps
    are taken."""
    try:
        values = () if isinstance(sigmas, str) else tuple(float(s) for s in sigmas)
    except (TypeError, ValueError, OverflowError):
        values = ()
    within = bool(values) and all(0 < value <= 1 for value in values)
    if not within or not all(a > b for a, b in pairwise([*np.array(values, np.float32), 0])):
        raise BadParameter("sigmas must be a strictly falling list of numbers above 0 and at most 1", param="sigmas")
    return values


def euler_step(latents: Tensor, velocity: Tensor, sigma: Tensor, next_sigma: Tensor) -> Tensor:
    """One step along the flow. Sums in fp32 and rounds to the velocity's dtype, as diffusers' scheduler does.

    The 0-dim ``sigma`` s are fp32; multiplied by a bf16 velocity they give bf16, also as in diffusers.
    """
    return (latents.to(torch.float32) + (next_sigma - sigma) * velocity).to(velocity.dtype)
