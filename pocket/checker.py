"""Judges a picture by its pixels against the scene that was asked for.

The background is read between the cells, each cell is then divided into background and foreground, and the foreground
of a cell must have one palette colour and fit the outline of one shape. Everything happens on colour premultiplied by
alpha, in which transparency is one more colour and colour under alpha 0 does not exist.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pocket.scenes import (
    BACKGROUND_RGBA,
    BACKGROUNDS,
    CANVAS,
    CELL_SIZE,
    COLOUR_RGB,
    COLOURS,
    GRID,
    NUM_CELLS,
    RADII,
    SHAPES,
    SIZES,
    TRANSPARENT,
    Scene,
    coverage,
)

Array = npt.NDArray[np.float64]

MARGIN = 2  # pixels around the borders of the cells that no thing reaches
MIN_BACKGROUND_SHARE = 0.95  # of the pixels between the cells must have the background's colour
MAX_COLOUR_ERROR = 0.14  # distance in premultiplied RGBA; the nearest two colours of the palette are 0.36 apart
MAX_TRANSPARENT_ALPHA = 0.03  # mean alpha between the cells of a transparent picture
SPECK_PIXELS = 30  # foreground in a cell up to this is dirt, beyond it something is there; the smallest thing has 160
MIN_COLOUR_SHARE = 0.7  # of the inside of a thing must be nearest to its colour
# Intersection over union with the outline of a shape: rendered, the right one has over 0.92, a wrong one under 0.85.
MIN_OVERLAP = 0.87
# Area of each shape over the square of its radius, from the outlines in `scenes._signed_distances`.
_AREAS = (np.pi, 4 * 0.88**2, 0.95 * 1.75, 8 * 0.34 - 4 * 0.34**2)


@dataclass(frozen=True)
class Found:
    """What stands in a cell; `shape` and `colour` are None when nothing fits."""

    shape: int | None
    colour: int | None
    size: int


@dataclass(frozen=True)
class Verdict:
    """`problems`: what is wrong, in words. `wrong_sizes`: things of the wrong size, which is no fault."""

    problems: tuple[str, ...]
    wrong_sizes: int

    @property
    def ok(self) -> bool:
        """Whether the picture shows what was asked for."""
        return not self.problems


def check(picture: npt.NDArray[np.uint8], scene: Scene) -> Verdict:
    """Compare an RGBA picture (CANVAS, CANVAS, 4) with a scene."""
    if picture.shape != (CANVAS, CANVAS, 4):
        raise ValueError(f"the picture is {picture.shape}, not {(CANVAS, CANVAS, 4)}")
    pixels = _premultiply(picture.astype(np.float64) / 255)
    between = _between_cells()
    ground = np.median(pixels[between], axis=0)
    problems = _check_background(pixels[between], scene.background)
    expected = {thing.cell: thing for thing in scene.things}
    wrong_sizes = 0
    for cell in range(NUM_CELLS):
        found = _look(pixels, ground, cell)
        thing = expected.get(cell)
        if thing is None:
            if found is not None:
                problems.append(f"cell {cell}: something extra")
        elif found is None:
            problems.append(f"cell {cell}: nothing, expected a {COLOURS[thing.colour]} {SHAPES[thing.shape]}")
        else:
            if found.shape != thing.shape:
                seen = "no shape" if found.shape is None else f"a {SHAPES[found.shape]}"
                problems.append(f"cell {cell}: {seen}, expected a {SHAPES[thing.shape]}")
            if found.colour != thing.colour:
                seen = "no clear colour" if found.colour is None else COLOURS[found.colour]
                problems.append(f"cell {cell}: {seen}, expected {COLOURS[thing.colour]}")
            wrong_sizes += found.size != thing.size
    return Verdict(tuple(problems), wrong_sizes)


def _premultiply(rgba: Array) -> Array:
    return np.concatenate([rgba[..., :3] * rgba[..., 3:], rgba[..., 3:]], axis=-1)


def _between_cells() -> npt.NDArray[np.bool_]:
    """(CANVAS, CANVAS): pixels within `MARGIN` of a border of a cell."""
    at = np.arange(CANVAS) + 0.5
    near = np.abs(at[:, None] - np.arange(GRID + 1) * CELL_SIZE).min(axis=1) < MARGIN
    return near[:, None] | near[None, :]


def _check_background(pixels: Array, background: int) -> list[str]:
    palette = _premultiply(np.array(BACKGROUND_RGBA, dtype=np.float64) / 255)
    distances = np.linalg.norm(pixels[:, None] - palette, axis=-1)
    seen = int(np.bincount(distances.argmin(axis=1), minlength=len(palette)).argmax())
    if seen != background:
        return [f"background: {BACKGROUNDS[seen]}, expected {BACKGROUNDS[background]}"]
    if (distances[:, background] < MAX_COLOUR_ERROR).mean() < MIN_BACKGROUND_SHARE:
        return ["background: not even"]
    if background == TRANSPARENT and pixels[:, 3].mean() > MAX_TRANSPARENT_ALPHA:
        return [f"background: mean alpha {pixels[:, 3].mean():.3f}, expected 0"]
    return []


def _look(pixels: Array, ground: Array, cell: int) -> Found | None:
    """What is in a cell, or None for (almost) bare background."""
    row, column = divmod(cell, GRID)
    window = (
        slice(round(row * CELL_SIZE), round((row + 1) * CELL_SIZE)),
        slice(round(column * CELL_SIZE), round((column + 1) * CELL_SIZE)),
    )
    patch = pixels[window]
    palette = np.concatenate([np.array(COLOUR_RGB, dtype=np.float64) / 255, np.ones((len(COLOUR_RGB), 1))], axis=1)
    to_ground = np.linalg.norm(patch - ground, axis=-1)
    to_colours = np.linalg.norm(patch[..., None, :] - palette, axis=-1)
    # A colour equal to the background is not in the picture: pixels that fit both are background.
    to_colours[..., np.linalg.norm(palette - ground, axis=-1) < MAX_COLOUR_ERROR] = np.inf
    foreground = to_ground > MAX_COLOUR_ERROR
    if foreground.sum() <= SPECK_PIXELS:
        return None
    inside = _erode(foreground)
    labels = to_colours.argmin(axis=-1)[inside]
    if labels.size == 0:
        return Found(None, None, 0)
    colour = int(np.bincount(labels, minlength=len(COLOURS)).argmax())
    # The share of the colour in each pixel between background and colour; over a half is the thing.
    line = palette[colour] - ground
    mask = (patch - ground) @ line / (line @ line) > 0.5
    clear = (labels == colour).mean() >= MIN_COLOUR_SHARE
    typical = np.linalg.norm(np.median(patch[inside], axis=0) - palette[colour]) < MAX_COLOUR_ERROR
    shape, size = _fit(mask | (foreground & ~_near_line(patch, ground, line)), window)
    return Found(shape, colour if clear and typical else None, size)


def _near_line(patch: Array, ground: Array, line: Array) -> npt.NDArray[np.bool_]:
    """Pixels that are a mixture of background and colour; others are foreign and count as foreground."""
    offset = patch - ground
    along = np.clip(offset @ line / (line @ line), 0, 1)
    return np.linalg.norm(offset - along[..., None] * line, axis=-1) < 2 * MAX_COLOUR_ERROR


def _erode(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    padded = np.pad(mask, 1)
    return mask & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]


def _fit(mask: npt.NDArray[np.bool_], window: tuple[slice, slice]) -> tuple[int | None, int]:
    """The shape whose outline, scaled to the mask's area and laid on its centre, overlaps best; and the size."""
    area = mask.sum()
    if area == 0:
        return None, 0
    rows, columns = np.nonzero(mask)
    radii = torch.tensor([float(np.sqrt(area / factor)) for factor in _AREAS], dtype=torch.float64)
    # The triangle's centre of mass lies below the centre of its circle by a share of its radius.
    drop = torch.tensor([0.0, 0.0, 0.75 - 1.75 / 3, 0.0], dtype=torch.float64) * radii
    y = rows.mean() + 0.5 + window[0].start - drop
    x = torch.full_like(y, columns.mean() + 0.5 + window[1].start)
    outlines = coverage(torch.arange(len(SHAPES)), x, y, radii)[:, window[0], window[1]].numpy() > 0.5
    overlaps = (outlines & mask).sum(axis=(1, 2)) / (outlines | mask).sum(axis=(1, 2))
    shape = int(overlaps.argmax())
    size = int(np.argmin([abs(float(radii[shape]) - radius) for radius in RADII]))
    assert size < len(SIZES)
    return (shape if overlaps[shape] >= MIN_OVERLAP else None), size
