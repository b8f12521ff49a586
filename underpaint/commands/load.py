"""A checkpoint as the commands use it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from underpaint.service import Service


def load(model: str, **options: Any) -> "Service":
    """With these engine options. The terminal is for what the user asked for, so without progress bars."""
    from transformers.utils import logging

    from underpaint.pipeline import load_service

    logging.disable_progress_bar()
    return load_service(model, options)
