"""Where requests become orders: what each family checks, encodes and returns."""

from underpaint.models.neo_unify import NeoUnify
from underpaint.service import Service
from underpaint.studio.base import Studio
from underpaint.studio.neo_unify import NeoStudio
from underpaint.studio.qwen_image21 import QwenStudio

__all__ = ["NeoStudio", "QwenStudio", "Studio", "make_studio"]


def make_studio(service: Service) -> Studio:
    """The studio of the service's family."""
    return NeoStudio(service) if isinstance(service.model, NeoUnify) else QwenStudio(service)
