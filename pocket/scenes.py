"""Scenes of coloured shapes in a 3 x 3 grid, and their antialiased rendering.

A scene has a background and one to three things; every thing has its own cell. Each combination of
(shape, colour, cell, background) belongs to one side of a fixed split: a training picture contains none of the
held-out combinations, a picture to be painted in an evaluation contains nothing else.
"""

import hashlib
import random
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

CANVAS = 128  # pixels a side
GRID = 3  # cells a side
CELL_SIZE = CANVAS / GRID
NUM_CELLS = GRID * GRID
MAX_THINGS = 3
JITTER = 2.0  # pixels: a large thing (radius 16) then stays 3 pixels inside its cell

SHAPES = ("circle", "square", "triangle", "cross")
SIZES = ("small", "large")
RADII = (10.0, 16.0)  # pixels, one for each size
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "black", "white")
COLOUR_RGB = (
    (220, 35, 40),
    (35, 160, 65),
    (35, 75, 220),
    (250, 220, 45),
    (240, 130, 25),
    (140, 45, 180),
    (15, 15, 15),
    (250, 250, 250),
)
BACKGROUNDS = ("white", "black", "grey", "pink", "brown", "sky blue", "transparent")
TRANSPARENT = BACKGROUNDS.index("transparent")
BACKGROUND_RGBA = (
    (250, 250, 250, 255),
    (15, 15, 15, 255),
    (128, 128, 128, 255),
    (250, 170, 200, 255),
    (115, 70, 45, 255),
    (150, 205, 245, 255),
    (0, 0, 0, 0),
)
HELD_OUT_PERCENT = 15

Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Thing:
    """`shape`, `colour`, `size` and `cell` index the tables above; `dx`, `dy` are pixels off the cell's centre."""

    shape: int
    colour: int
    size: int
    cell: int
    dx: float
    dy: float

    def centre(self) -> tuple[float, float]:
        """(x, y) of the centre in pixels from the top left corner."""
        row, column = divmod(self.cell, GRID)
        return (column + 0.5) * CELL_SIZE + self.dx, (row + 0.5) * CELL_SIZE + self.dy


@dataclass(frozen=True)
class Scene:
    """A background (an index into `BACKGROUNDS`) and things in distinct cells."""

    background: int
    things: tuple[Thing, ...]

    def cells(self) -> frozenset[int]:
        """The cells that are taken."""
        return frozenset(thing.cell for thing in self.things)


def is_held_out(shape: int, colour: int, cell: int, background: int) -> bool:
    """The side of the split, by a hash of names, so that it does not depend on the order of the tables."""
    row, column = divmod(cell, GRID)
    name = f"{SHAPES[shape]}/{COLOURS[colour]}/{row},{column}/{BACKGROUNDS[background]}"
    return hashlib.sha256(name.encode()).digest()[0] * 100 < HELD_OUT_PERCENT * 256


def _combinations(split: Split) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """For each background, the (shape, colour, cell) of this side of the split that can be seen on it."""
    return tuple(
        tuple(
            (shape, colour, cell)
            for shape in range(len(SHAPES))
            for colour in range(len(COLOURS))
            for cell in range(NUM_CELLS)
            if COLOURS[colour] != BACKGROUNDS[background]
            and is_held_out(shape, colour, cell, background) == (split == "held_out")
        )
        for background in range(len(BACKGROUNDS))
    )


COMBINATIONS: dict[Split, tuple[tuple[tuple[int, int, int], ...], ...]] = {
    "train": _combinations("train"),
    "held_out": _combinations("held_out"),
}
_MEMBERS = {split: tuple(frozenset(group) for group in groups) for split, groups in COMBINATIONS.items()}


def belongs(scene: Scene, split: Split) -> bool:
    """Whether every thing of the scene is a legal combination of this side of the split."""
    members = _MEMBERS[split][scene.background]
    return all((thing.shape, thing.colour, thing.cell) in members for thing in scene.things)


def draw_thing(rng: random.Random, split: Split, background: int) -> Thing:
    """One thing of the split for a background."""
    shape, colour, cell = rng.choice(COMBINATIONS[split][background])
    dx, dy = rng.uniform(-JITTER, JITTER), rng.uniform(-JITTER, JITTER)
    return Thing(shape, colour, rng.randrange(len(SIZES)), cell, dx, dy)


def draw_scene(rng: random.Random, split: Split, num_things: int, background: int | None = None) -> Scene:
    """A scene of `num_things` things in distinct cells, no two alike in both shape and colour.

    Two things alike would make "the red circle" of an edit ambiguous.
    """
    if background is None:
        background = rng.randrange(len(BACKGROUNDS))
    things: list[Thing] = []
    while len(things) < num_things:
        thing = draw_thing(rng, split, background)
        if all(t.cell != thing.cell and (t.shape, t.colour) != (thing.shape, thing.colour) for t in things):
            things.append(thing)
    return Scene(background, tuple(things))


# --- rendering -------------------------------------------------------------------------------------------------

ROW_WIDTH = 1 + 5 * MAX_THINGS


def scene_row(scene: Scene) -> list[float]:
    """A scene as `ROW_WIDTH` numbers: background, then (shape, colour, x, y, radius) of each; radius 0: absent."""
    row = [float(scene.background)]
    for thing in scene.things:
        row += [float(thing.shape), float(thing.colour), *thing.centre(), RADII[thing.size]]
    return row + [0.0] * (ROW_WIDTH - len(row))


def _signed_distances(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """Pixels outside (positive) or inside (negative) the outline of each shape; x, y from the centre. (..., shapes)."""
    circle = (x.square() + y.square()).sqrt() - radius
    square = torch.maximum(x.abs(), y.abs()) - 0.88 * radius
    # An isosceles triangle: apex (0, -r), base from (-0.95 r, 0.75 r) to (0.95 r, 0.75 r).
    slope = 1.75 / 0.95
    sides = (slope * x.abs() - y - radius) / (1.0 + slope * slope) ** 0.5
    triangle = torch.maximum(sides, y - 0.75 * radius)
    tall = torch.maximum(x.abs() - 0.34 * radius, y.abs() - radius)
    wide = torch.maximum(x.abs() - radius, y.abs() - 0.34 * radius)
    return torch.stack([circle, square, triangle, torch.minimum(tall, wide)], dim=-1)


def coverage(shape: Tensor, centre_x: Tensor, centre_y: Tensor, radius: Tensor) -> Tensor:
    """The share of each pixel that a thing covers, for things of any batch shape: (...) -> (..., CANVAS, CANVAS)."""
    at = torch.arange(CANVAS, device=radius.device, dtype=radius.dtype) + 0.5
    x = at[None, :] - centre_x[..., None, None]
    y = at[:, None] - centre_y[..., None, None]
    x, y = torch.broadcast_tensors(x, y)
    distances = _signed_distances(x, y, radius[..., None, None])
    index = shape.long()[..., None, None, None].expand(*distances.shape[:-1], 1)
    covered = (0.5 - distances.gather(-1, index).squeeze(-1)).clamp(0.0, 1.0)
    return covered * (radius > 0)[..., None, None]


def render(rows: Tensor) -> Tensor:
    """Scene rows (B, ROW_WIDTH) -> straight-alpha RGBA pictures (B, 4, CANVAS, CANVAS) in [0, 1].

    Colour under alpha 0 is 0, as a resize through premultiplied alpha leaves it.
    """
    palette = torch.tensor(COLOUR_RGB, device=rows.device, dtype=rows.dtype) / 255
    backgrounds = torch.tensor(BACKGROUND_RGBA, device=rows.device, dtype=rows.dtype) / 255
    things = rows[:, 1:].reshape(-1, MAX_THINGS, 5)
    covers = coverage(things[..., 0], things[..., 2], things[..., 3], things[..., 4])
    background = backgrounds[rows[:, 0].long()]
    colour = (background[:, :3] * background[:, 3:])[:, :, None, None].expand(-1, -1, CANVAS, CANVAS)
    alpha = background[:, 3][:, None, None, None].expand(-1, 1, CANVAS, CANVAS)
    for index in range(MAX_THINGS):
        cover = covers[:, index, None]
        paint = palette[things[:, index, 1].long()][:, :, None, None]
        colour = paint * cover + colour * (1 - cover)
        alpha = cover + alpha * (1 - cover)
    return torch.cat([colour / alpha.clamp_min(1e-6), alpha], dim=1)
