"""Classifier-free guidance: which branches a step needs, and what becomes of their velocities."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from torch import Tensor

from underpaint.errors import MissingBranch

T = TypeVar("T")


class Branch(Enum):
    """The variants of a request, in the order in which they are computed. Qwen-Image's negative prompt stands where
    others have nothing."""

    CONDITIONAL = "conditional"
    PICTURES = "pictures"
    UNCONDITIONAL = "unconditional"


Velocities = Mapping[Branch, Tensor]


class Guidance(Protocol):
    def branches(self, time: float) -> tuple[Branch, ...]:
        """The branches that a step at ``time`` needs, in the order of ``Branch``."""
        ...

    def combine(self, velocities: Velocities, time: float, step: int) -> Tensor:
        """The velocity to follow, (tokens, channels), from those of ``branches``. Raises MissingBranch."""
        ...


@dataclass(frozen=True)
class PlainGuidance:
    """unconditional + ``scale`` * (conditional - unconditional), without renormalisation; at most 1 is no guidance."""

    scale: float

    def branches(self, time: float) -> tuple[Branch, ...]:
        return (Branch.CONDITIONAL, Branch.UNCONDITIONAL) if self.scale > 1 else (Branch.CONDITIONAL,)

    def combine(self, velocities: Velocities, time: float, step: int) -> Tensor:
        positive = take(velocities, Branch.CONDITIONAL)
        if self.scale <= 1:
            return positive
        negative = take(velocities, Branch.UNCONDITIONAL)
        return negative + self.scale * (positive - negative)


def take(of_branches: Mapping[Branch, T], branch: Branch) -> T:
    """What belongs to ``branch``. Raises MissingBranch."""
    if branch not in of_branches:
        raise MissingBranch(branch.value)
    return of_branches[branch]
