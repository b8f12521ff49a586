"""Pictures in: anything a user calls an image becomes upright RGBA, or one sentence says why not."""

import io
import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from underpaint.errors import BadImage, EngineFailure

MAX_ASPECT_RATIO = 200
MAX_IMAGE_PIXELS = 128 << 20

ImageInput = Image.Image | np.ndarray | bytes | str | Path


def read_image(source: ImageInput, name: str) -> Image.Image:
    """``source`` as an upright 8-bit RGBA picture, fully decoded.

    Takes a PIL image, a uint8 array (height, width[, channels]), the bytes of an image file, or a path. The EXIF
    orientation is applied. Raises BadImage, naming ``name``, for a missing, truncated, non-image, huge or extremely
    long one.
    """
    image = _open(source, name)
    width, height = image.size
    if not width * height:
        raise BadImage(f"{name} is {width}x{height}, which has no pixels", param="images")
    if width * height > MAX_IMAGE_PIXELS:
        raise BadImage(f"{name} has {width}x{height} pixels; the limit is {MAX_IMAGE_PIXELS} pixels", param="images")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise BadImage(
            f"{name} is {width}x{height}; its sides may differ by a factor of {MAX_ASPECT_RATIO} at most",
            param="images",
        )
    try:
        image.load()
        return _to_rgba(ImageOps.exif_transpose(image))
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise BadImage(f"{name} is truncated or damaged: {error}", param="images") from error


def _open(source: ImageInput, name: str) -> Image.Image:
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.size == 0:
            raise BadImage(f"{name} must be a non-empty uint8 array, it is {source.dtype}", param="images")
        try:
            return Image.fromarray(source)
        except (TypeError, ValueError) as error:
            raise BadImage(f"{name} has shape {source.shape}, which is no picture", param="images") from error
    if not isinstance(source, bytes | str | Path):
        raise BadImage(f"{name} must be a PIL image, a uint8 array, bytes or a path", param="images")
    try:
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except FileNotFoundError as error:
        raise BadImage(f"{name}: there is no file {source!r}", param="images") from error
    except UnidentifiedImageError as error:
        raise BadImage(f"{name} is not an image file that can be read", param="images") from error
    except Image.DecompressionBombError as error:
        raise BadImage(f"{name} has too many pixels: {error}", param="images") from error
    except OSError as error:
        raise BadImage(f"{name} cannot be read: {error}", param="images") from error


def _to_rgba(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        # Pillow clips 16-bit grey to 255 instead of scaling it.
        values = np.asarray(image, dtype=np.float64)
        full = 65535.0 if image.mode.startswith("I") else 1.0
        image = Image.fromarray((values / full * 255.0).clip(0, 255).round().astype(np.uint8))
    return image.convert("RGBA")


def fit_to_area(width: int, height: int, side: int, multiple: int) -> tuple[int, int]:
    """Width and height of about ``side`` ** 2 pixels in the ratio given, each the nearest ``multiple``, at least one.

    Rounds half to even, as diffusers' ``calculate_dimensions`` does; that function may return 0 for a long picture.
    """
    ratio = width / height
    exact_width = math.sqrt(side * side * ratio)
    exact_height = exact_width / ratio
    return (
        max(multiple, round(exact_width / multiple) * multiple),
        max(multiple, round(exact_height / multiple) * multiple),
    )


def on_white(image: Image.Image) -> Image.Image:
    """An RGBA picture composited over white, as RGB."""
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


def to_array(image: Image.Image) -> np.ndarray:
    """(4, height, width) float32 in [-1, 1] from an RGBA picture."""
    return np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255.0 * 2.0 - 1.0


def check_finite(painted: Tensor) -> Tensor:
    """``painted``: a picture or its latents. Raises EngineFailure if it holds what no picture can: NaN or infinity."""
    if not painted.isfinite().all():
        raise EngineFailure(
            "the picture's values are not finite, as of a damaged checkpoint, or of one whose numbers overflow in this "
            "dtype"
        )
    return painted


def to_picture(pixels: Tensor) -> Image.Image:
    """An RGBA picture from (4, height, width) in [0, 1]."""
    return Image.fromarray((pixels * 255).round().to("cpu", torch.uint8).permute(1, 2, 0).numpy())
