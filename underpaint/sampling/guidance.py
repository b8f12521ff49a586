"""Classifier-free guidance."""

from torch import Tensor


def guide(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """negative + scale * (positive - negative), in the velocities' dtype; no renormalisation."""
    return negative + scale * (positive - negative)
