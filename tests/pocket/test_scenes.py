"""Scenes, their split, and their rendering."""

import random

import pytest
import torch

from pocket.scenes import (
    BACKGROUND_RGBA,
    BACKGROUNDS,
    CANVAS,
    CELL_SIZE,
    COLOUR_RGB,
    COLOURS,
    COMBINATIONS,
    GRID,
    SHAPES,
    TRANSPARENT,
    Scene,
    Split,
    Thing,
    belongs,
    draw_scene,
    render,
    scene_row,
)
from pocket.tasks import KINDS, TASKS, draw_example, draw_kind

SPLITS: tuple[Split, ...] = ("train", "held_out")


def test_split_is_disjoint_and_complete() -> None:
    for background in range(len(BACKGROUNDS)):
        train, held_out = (set(COMBINATIONS[split][background]) for split in SPLITS)
        legal_colours = len(COLOURS) - (BACKGROUNDS[background] in COLOURS)
        assert not train & held_out
        assert len(train) + len(held_out) == len(SHAPES) * legal_colours * GRID * GRID
        assert 0.05 < len(held_out) / (len(train) + len(held_out)) < 0.3


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("num_references", range(len(TASKS)))
def test_examples_stay_on_their_side(split: Split, num_references: int) -> None:
    rng = random.Random(3)
    other = SPLITS[1 - SPLITS.index(split)]
    for _ in range(200):
        example = draw_example(rng, split, num_references)
        assert len(example.references) == num_references
        for scene in (*example.references, example.target):
            assert belongs(scene, split)
            assert not scene.things or not belongs(scene, other)
            assert len(scene.cells()) == len(scene.things) <= 3
            assert all(COLOURS[thing.colour] != BACKGROUNDS[scene.background] for thing in scene.things)


def test_draws_are_deterministic() -> None:
    for kind in (kind for kinds in KINDS for kind in kinds):
        first, second = ([draw_kind(random.Random(seed), "train", kind) for seed in range(20)] for _ in range(2))
        assert first == second


def test_render_paints_colours_where_they_belong() -> None:
    things = (
        Thing(shape=0, colour=0, size=1, cell=0, dx=0, dy=0),
        Thing(shape=1, colour=2, size=0, cell=8, dx=1, dy=-2),
    )
    scene = Scene(BACKGROUNDS.index("grey"), things)
    picture = render(torch.tensor([scene_row(scene)]))[0]
    assert picture.shape == (4, CANVAS, CANVAS)
    for thing in things:
        x, y = (round(value - 0.5) for value in thing.centre())
        expected = torch.tensor([*COLOUR_RGB[thing.colour], 255]) / 255
        torch.testing.assert_close(picture[:, y, x], expected)
    background = torch.tensor(BACKGROUND_RGBA[scene.background]) / 255
    torch.testing.assert_close(picture[:, CANVAS // 2, CANVAS // 2], background)


def test_transparent_scene_has_no_colour_outside_things() -> None:
    scene = Scene(TRANSPARENT, (Thing(shape=0, colour=3, size=0, cell=4, dx=0, dy=0),))
    picture = render(torch.tensor([scene_row(scene)]))[0]
    assert (picture[:, picture[3] == 0] == 0).all()
    # Antialiased edges keep the straight colour of the thing and only lose alpha.
    edge = (picture[3] > 0) & (picture[3] < 1)
    expected = torch.tensor(COLOUR_RGB[3])[:, None] / 255
    torch.testing.assert_close(picture[:3, edge], expected.expand(-1, int(edge.sum())))


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_things_stay_inside_their_cell(shape: int) -> None:
    for dx, dy in ((-2, -2), (2, 2)):
        scene = Scene(TRANSPARENT, (Thing(shape=shape, colour=0, size=1, cell=4, dx=dx, dy=dy),))
        alpha = render(torch.tensor([scene_row(scene)]))[0, 3]
        rows, columns = alpha.nonzero().T
        assert min(rows.min(), columns.min()) > CELL_SIZE
        assert max(rows.max(), columns.max()) < 2 * CELL_SIZE - 1


def test_render_batch_equals_single() -> None:
    rng = random.Random(5)
    rows = torch.tensor([scene_row(draw_scene(rng, "train", count)) for count in (0, 1, 2, 3)])
    torch.testing.assert_close(render(rows), torch.cat([render(row[None]) for row in rows]))
