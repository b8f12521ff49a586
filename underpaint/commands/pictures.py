"""Sizes as text, and pictures as files."""

import os
import tempfile
from pathlib import Path

from PIL import Image

from underpaint.errors import BadParameter, BadSize

OUTPUT_SUFFIXES = (".png", ".webp")  # formats that keep alpha


def parse_size(text: str) -> tuple[int, int]:
    """``WIDTHxHEIGHT`` in pixels. Raises BadSize."""
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise BadSize(f"size {text!r} must be WIDTHxHEIGHT, for example 1024x768", param="size")
    return int(width), int(height)


def output_paths(out: Path, n: int) -> list[Path]:
    """Where ``n`` pictures go. Raises BadParameter before any work if they cannot be written there."""
    if out.suffix.lower() not in OUTPUT_SUFFIXES:
        raise BadParameter(f"{out}: pictures have alpha; use a name that ends in .png or .webp", param="out")
    if not out.parent.is_dir():
        raise BadParameter(f"{out}: there is no directory {out.parent}", param="out")
    if not os.access(out.parent, os.W_OK):
        raise BadParameter(f"{out}: the directory {out.parent} cannot be written to", param="out")
    if n <= 1:
        return [out]
    return [out.with_stem(f"{out.stem}-{i}") for i in range(1, n + 1)]


def save(picture: Image.Image, path: Path) -> None:
    """Write a picture whole or not at all: into a file beside it, which then takes its name."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=path.suffix, delete=False) as file:
        try:
            picture.save(file, lossless=True)  # for WebP; PNG is always lossless
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except OSError as error:
            os.unlink(file.name)
            raise BadParameter(f"{path} cannot be written: {error}", param="out") from error
        except BaseException:
            os.unlink(file.name)
            raise
