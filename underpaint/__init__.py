"""Underpaint: inference for image models that paint from a prefix K/V cache."""

from underpaint.chat import Chat, PaintingOptions, PicturePart, TextPart
from underpaint.errors import BadRequest, Cancelled, CheckpointError, UnderpaintError
from underpaint.pipeline import Painting, Pipeline, Progress, Stats

__all__ = [
    "BadRequest",
    "Cancelled",
    "Chat",
    "CheckpointError",
    "Painting",
    "PaintingOptions",
    "PicturePart",
    "Pipeline",
    "Progress",
    "Stats",
    "TextPart",
    "UnderpaintError",
]
