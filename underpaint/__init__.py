"""Underpaint: inference for image models that paint from a prefix K/V cache."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from underpaint.chat import Chat, PaintingOptions, PicturePart, PreviewPart, TextPart
    from underpaint.errors import BadRequest, Cancelled, CheckpointError, UnderpaintError
    from underpaint.pipeline import Painting, Pipeline, Progress, Stats

_MODULES = {
    "BadRequest": "errors",
    "Cancelled": "errors",
    "Chat": "chat",
    "CheckpointError": "errors",
    "Painting": "pipeline",
    "PaintingOptions": "chat",
    "PicturePart": "chat",
    "Pipeline": "pipeline",
    "PreviewPart": "chat",
    "Progress": "pipeline",
    "Stats": "pipeline",
    "TextPart": "chat",
    "UnderpaintError": "errors",
}
__all__ = [
    "BadRequest",
    "Cancelled",
    "Chat",
    "CheckpointError",
    "Painting",
    "PaintingOptions",
    "PicturePart",
    "Pipeline",
    "PreviewPart",
    "Progress",
    "Stats",
    "TextPart",
    "UnderpaintError",
]


def __getattr__(name: str) -> Any:
    """PyTorch and transformers take seconds to import; the command line answers many questions without them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
