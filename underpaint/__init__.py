"""Underpaint: inference for image models that paint from a prefix K/V cache."""

from underpaint.errors import BadRequest, Cancelled, CheckpointError, UnderpaintError
from underpaint.pipeline import Painting, Pipeline, Progress, Stats

__all__ = ["BadRequest", "Cancelled", "CheckpointError", "Painting", "Pipeline", "Progress", "Stats", "UnderpaintError"]
