"""Qwen-Image 2.1: text-to-image, editing with references, RGBA."""

from underpaint.models.qwen_image21.condition import Condition, Reference
from underpaint.models.qwen_image21.model import Checkpoint, QwenImage21, inspect, load, skeleton

__all__ = ["Checkpoint", "Condition", "QwenImage21", "Reference", "inspect", "load", "skeleton"]
