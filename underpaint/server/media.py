"""Pictures on the wire: in as files or by URL, checked before they are decoded; out as PNG, WebP or JPEG."""

import asyncio
import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image, UnidentifiedImageError

from underpaint.errors import BadImage, BadParameter
from underpaint.images import on_white
from underpaint.server.config import ServerConfig
from underpaint.server.fetch import Fetcher, Room

MAX_IMAGES = 16
"""As many as OpenAI's edits take; a model may take fewer."""
INPUT_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow reads many more, some of them by starting other programs."""
OutputFormat = Literal["png", "webp", "jpeg"]
Background = Literal["transparent", "opaque", "auto"]
JPEG_QUALITY = 95
DATA = "data:"
SEE_THROUGH = 224
"""Alpha below which a pixel is meant to be seen through. A VAE decodes what is opaque to nearly 255 only: in 36 opaque
pictures of the pocket checkpoint, 1 % of the pixels were below 255, and none below 237."""


async def load_images(urls: Sequence[str], fetcher: Fetcher, config: ServerConfig, param: str) -> tuple[bytes, ...]:
    """The bytes of pictures that are given by URL, in order: the one way in for every endpoint. Raises BadRequest."""
    check_number_of_images(len(urls), param)
    room = Room(config.max_body_bytes)

    async def load(url: str, name: str) -> bytes:
        if url[: len(DATA)].lower() == DATA:
            return await asyncio.to_thread(data_of_url, url, name, param)
        return await fetcher.fetch(url, name, param, room)

    loads = [asyncio.ensure_future(load(url, f"image {i + 1}")) for i, url in enumerate(urls)]
    try:
        return tuple(await asyncio.gather(*loads))
    finally:
        for one in loads:
            one.cancel()


def data_of_url(url: str, name: str, param: str) -> bytes:
    """The bytes of a data URL. Raises BadImage."""
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise BadImage(f"{name} must be a data URL in base64: data:image/png;base64,...", param=param)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImage(f"{name} is not valid base64: {error}", param=param) from error


def check_number_of_images(num: int, param: str) -> None:
    """Before any of them is looked at."""
    if num > MAX_IMAGES:
        raise BadParameter(f"{num} images are given, the limit is {MAX_IMAGES}", param=param)


def open_images(files: Sequence[bytes], config: ServerConfig, param: str) -> tuple[Image.Image, ...]:
    """The pictures, with their headers read and nothing decoded. Raises BadImage."""
    return tuple(_open(data, f"image {i + 1}", config, param) for i, data in enumerate(files))


def reopen_images(files: Sequence[bytes]) -> tuple[Image.Image, ...]:
    """The pictures of files that ``open_images`` has found to be legal."""
    return tuple(Image.open(io.BytesIO(data), formats=INPUT_FORMATS) for data in files)


def _open(data: bytes, name: str, config: ServerConfig, param: str) -> Image.Image:
    if not data:
        raise BadImage(f"{name} is empty", param=param)
    if len(data) > config.max_image_bytes:
        raise BadImage(f"{name} has {len(data)} bytes, the limit is {config.max_image_bytes}", param=param)
    try:
        image = Image.open(io.BytesIO(data), formats=INPUT_FORMATS)
    except UnidentifiedImageError as error:
        raise BadImage(f"{name} is not a picture in {', '.join(INPUT_FORMATS)}", param=param) from error
    except (Image.DecompressionBombError, OSError, ValueError, SyntaxError, OverflowError) as error:
        raise BadImage(f"{name} cannot be read: {error}", param=param) from error
    if image.width * image.height > config.max_image_pixels:
        raise BadImage(
            f"{name} has {image.width}x{image.height} pixels, the limit is {config.max_image_pixels} pixels",
            param=param,
        )
    return image


@dataclass(frozen=True)
class Output:
    """How pictures are sent. ``compression``: 0 to 100, the quality of WebP and JPEG; None is WebP without loss, and
    JPEG at 95."""

    format: OutputFormat = "png"
    compression: int | None = None
    background: Background = "auto"

    def check(self, has_alpha: bool) -> None:
        """Raises BadParameter for what cannot be honoured. ``has_alpha``: the model paints transparency."""
        if self.background == "transparent" and self.format == "jpeg":
            raise BadParameter("jpeg has no transparency; use png or webp, or another background", param="background")
        if self.background == "transparent" and not has_alpha:
            raise BadParameter(
                "this model paints no transparency; background can be opaque or auto", param="background"
            )
        if self.compression is not None and self.format == "png":
            raise BadParameter("output_compression is for webp and jpeg; png loses nothing", param="output_compression")


@dataclass(frozen=True)
class Sent:
    """A picture as it is sent, and what is true of it. ``background``: transparent or opaque."""

    b64: str
    width: int
    height: int
    background: str
    format: OutputFormat

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def url(self) -> str:
        return f"data:image/{self.format};base64,{self.b64}"


def send(image: Image.Image, output: Output) -> Sent:
    """Encode a picture. Its transparency is kept unless the format or ``background`` is opaque; then it lies on white.

    ``auto`` is transparent where the format allows it and one can see through the picture anywhere.
    """
    seen = image.mode == "RGBA" and any(image.getchannel("A").histogram()[:SEE_THROUGH])
    keeps = output.background == "transparent" or (output.background == "auto" and seen and output.format != "jpeg")
    shown = image if keeps or image.mode != "RGBA" else on_white(image)
    file = io.BytesIO()
    if output.format == "png":
        shown.save(file, "PNG", compress_level=4)
    elif output.format == "webp":
        shown.save(file, "WEBP", lossless=output.compression is None, quality=output.compression or 0)
    else:
        quality = JPEG_QUALITY if output.compression is None else output.compression
        shown.save(file, "JPEG", quality=quality)
    text = base64.b64encode(file.getvalue()).decode("ascii")
    return Sent(text, image.width, image.height, "transparent" if keeps else "opaque", output.format)
