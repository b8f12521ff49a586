"""Classifier-free guidance of NEO-Unify: which branches a step needs, and what becomes of their velocities.

A painting is guided by one pair of branches: towards the prompt, away from nothing. An edit has up to three: the
prompt with the pictures, the pictures alone, and nothing. Formulas, intervals and norms follow the published reference
implementation, including that a painting's interval contains its ends and an edit's does not.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from underpaint.errors import BadParameter
from underpaint.request import check_interval, check_number
from underpaint.sampling.guidance import Branch, Velocities, take

Norm = Literal["none", "global", "channel", "cfg_zero_star"]
NORMS: tuple[Norm, ...] = get_args(Norm)
EPS = 1e-8


@dataclass(frozen=True)
class PaintGuidance:
    """Guidance of a painting by ``scale``, at times within ``interval``, ends included. At most 1 is no guidance."""

    scale: float = 4.0
    norm: Norm = "none"
    interval: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        check_number("guidance_scale", self.scale)
        _check_shared(self.norm, self.interval)

    def branches(self, time: float) -> tuple[Branch, ...]:
        low, high = self.interval
        if self.scale > 1 and low <= time <= high:
            return Branch.CONDITIONAL, Branch.UNCONDITIONAL
        return (Branch.CONDITIONAL,)

    def combine(self, velocities: Velocities, time: float, step: int) -> Tensor:
        conditional, *others = [take(velocities, branch) for branch in self.branches(time)]
        if not others:
            return conditional
        return _away_from(others[0], conditional, self.scale, self.norm, step)


@dataclass(frozen=True)
class EditGuidance:
    """Guidance of an edit by ``scale`` (the prompt) and ``picture_scale`` (the pictures), at times strictly within
    ``interval``, or always if that begins at 0."""

    scale: float = 4.0
    picture_scale: float = 1.0
    norm: Norm = "none"
    interval: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        check_number("guidance_scale", self.scale)
        check_number("image_guidance_scale", self.picture_scale)
        _check_shared(self.norm, self.interval)
        if self.norm == "cfg_zero_star" and self.picture_scale not in (1, self.scale):
            message = "cfg_zero_star compares two branches; use it with image_guidance_scale 1 or equal to the other"
            raise BadParameter(message, param="cfg_norm")

    def branches(self, time: float) -> tuple[Branch, ...]:
        low, high = self.interval
        guided = (low < time < high) or low == 0
        if not guided or self.scale == self.picture_scale == 1:
            return (Branch.CONDITIONAL,)
        if self.picture_scale == 1:
            return Branch.CONDITIONAL, Branch.PICTURES
        if self.picture_scale == self.scale:
            return Branch.CONDITIONAL, Branch.UNCONDITIONAL
        return tuple(Branch)

    def combine(self, velocities: Velocities, time: float, step: int) -> Tensor:
        conditional, *others = [take(velocities, branch) for branch in self.branches(time)]
        # The reference limits the norm only when a scale goes beyond the conditional velocity.
        norm = self.norm if self.scale > 1 or self.picture_scale > 1 else "none"
        if not others:
            return conditional
        if len(others) == 1:
            return _away_from(others[0], conditional, self.scale, norm, step)
        pictures, nothing = others
        guided = nothing + self.scale * (conditional - pictures) + self.picture_scale * (pictures - nothing)
        return limit_norm(guided, conditional, norm)


def _check_shared(norm: str, interval: tuple[float, float]) -> None:
    if norm not in NORMS:
        raise BadParameter(f"cfg_norm is {norm!r}; it must be one of {', '.join(NORMS)}", param="cfg_norm")
    check_interval(interval)


def limit_norm(guided: Tensor, conditional: Tensor, norm: Norm) -> Tensor:
    """``guided`` scaled down to the length of ``conditional``: of the whole picture, or of every cell by itself."""
    if norm == "none":
        return guided
    dim = None if norm == "global" else -1
    lengths = [torch.linalg.vector_norm(x, dim=dim, keepdim=True) for x in (conditional, guided)]
    return guided * (lengths[0] / (lengths[1] + EPS)).clamp(max=1.0)


def _away_from(negative: Tensor, positive: Tensor, scale: float, norm: Norm, step: int) -> Tensor:
    if norm == "cfg_zero_star":
        return _zero_star(positive, negative, scale, step)
    return limit_norm(negative + scale * (positive - negative), positive, norm)


def _zero_star(positive: Tensor, negative: Tensor, scale: float, step: int) -> Tensor:
    """CFG-Zero* (arXiv 2503.18886): the negative is first fitted to the positive, and the first step stands still."""
    if step == 0:
        return torch.zeros_like(positive)
    fitted = negative * _fit(positive.float(), negative.float()).to(negative.dtype)
    return fitted + scale * (positive - fitted)


def _fit(positive: Tensor, negative: Tensor) -> Tensor:
    """The factor by which ``negative`` comes nearest to ``positive``, 0-dim."""
    return (positive * negative).sum() / (negative.square().sum() + EPS)
