"""What an answer consists of, in the order in which it comes."""

from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from underpaint.images import to_picture


@dataclass(frozen=True)
class TextPart:
    """A piece of text, to be joined to the one before; ``thought`` if it is not for the reader."""

    text: str
    thought: bool = False


@dataclass(frozen=True, eq=False)
class PicturePart:
    """A painted picture. ``pixels``: raw, (3, height, width), in about [-1, 1]."""

    image: Image.Image
    pixels: Tensor


@dataclass(frozen=True, eq=False)
class PreviewPart:
    """What the next picture will look like, while it is painted; ``number`` counts its previews from 0."""

    image: Image.Image
    number: int


Part = TextPart | PicturePart | PreviewPart


def shown(pixels: Tensor) -> Image.Image:
    """An RGB picture from (3, height, width) raw pixels."""
    return to_picture((pixels.float() * 0.5 + 0.5).clamp(0, 1))
