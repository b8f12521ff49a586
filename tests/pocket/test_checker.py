"""The checker passes every rendered truth and says what is wrong with anything else."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pocket.checker import check
from pocket.scenes import (
    BACKGROUNDS,
    COLOURS,
    NUM_CELLS,
    SHAPES,
    SIZES,
    TRANSPARENT,
    Scene,
    Split,
    Thing,
    draw_scene,
    render,
    scene_row,
)

Pixels = npt.NDArray[np.uint8]


def paint(scene: Scene) -> Pixels:
    picture = render(torch.tensor([scene_row(scene)]))[0].permute(1, 2, 0)
    return (picture * 255).round().to(torch.uint8).numpy()


def scenes(count: int, split: Split = "held_out", fewest: int = 1, most: int = 3) -> list[Scene]:
    rng = random.Random(7)
    return [draw_scene(rng, split, rng.randint(fewest, most)) for _ in range(count)]


def test_truth_passes() -> None:
    for scene in [*scenes(60), *scenes(60, "train", fewest=0)]:
        verdict = check(paint(scene), scene)
        assert verdict.ok, (scene, verdict)
        assert verdict.wrong_sizes == 0


def test_every_shape_colour_and_size_passes_on_every_background() -> None:
    for background in range(len(BACKGROUNDS)):
        for colour in range(len(COLOURS)):
            if COLOURS[colour] == BACKGROUNDS[background]:
                continue
            shape, size = (background + colour) % len(SHAPES), colour % len(SIZES)
            scene = Scene(background, (Thing(shape, colour, size, cell=colour, dx=-2, dy=2),))
            assert check(paint(scene), scene).ok, scene


def with_thing(scene: Scene, **changes: int) -> Scene:
    return replace(scene, things=(replace(scene.things[0], **changes), *scene.things[1:]))


def other_shape(scene: Scene) -> Scene:
    return with_thing(scene, shape=(scene.things[0].shape + 1) % len(SHAPES))


def other_colour(scene: Scene) -> Scene:
    taken = (scene.things[0].colour, next((c for c, n in enumerate(COLOURS) if n == BACKGROUNDS[scene.background]), -1))
    return with_thing(scene, colour=next(c for c in range(len(COLOURS)) if c not in taken))


def other_cell(scene: Scene) -> Scene:
    return with_thing(scene, cell=next(c for c in range(NUM_CELLS) if c not in scene.cells()))


def missing(scene: Scene) -> Scene:
    return replace(scene, things=scene.things[1:])


def extra(scene: Scene) -> Scene:
    cell = next(c for c in range(NUM_CELLS) if c not in scene.cells())
    return replace(scene, things=(*scene.things, replace(scene.things[0], cell=cell, size=0)))


def other_background(scene: Scene) -> Scene:
    colours = {COLOURS[thing.colour] for thing in scene.things}
    fitting = (b for b, name in enumerate(BACKGROUNDS) if b != scene.background and name not in colours)
    return replace(scene, background=next(fitting))


@pytest.mark.parametrize(
    ("corrupt", "problem"),
    [
        (other_shape, "expected a"),
        (other_colour, "expected"),
        (other_cell, "nothing, expected"),
        (missing, "nothing, expected"),
        (extra, "something extra"),
        (other_background, "background"),
    ],
)
def test_corrupted_scene_fails(corrupt: Callable[[Scene], Scene], problem: str) -> None:
    for scene in scenes(25, most=2):
        verdict = check(paint(corrupt(scene)), scene)
        assert any(problem in found for found in verdict.problems), (scene, verdict)


def test_every_wrong_shape_fails() -> None:
    for scene in scenes(12):
        for shape in range(len(SHAPES)):
            verdict = check(paint(with_thing(scene, shape=shape)), scene)
            assert verdict.ok == (shape == scene.things[0].shape), (scene, shape, verdict)


def test_wrong_size_is_counted_but_no_fault() -> None:
    for scene in scenes(12):
        verdict = check(paint(with_thing(scene, size=1 - scene.things[0].size)), scene)
        assert verdict.ok
        assert verdict.wrong_sizes == 1


def test_half_transparent_background_fails() -> None:
    scene = Scene(TRANSPARENT, (Thing(shape=0, colour=0, size=1, cell=4, dx=0, dy=0),))
    picture = paint(scene)
    picture[..., 3] = np.maximum(picture[..., 3], 30)
    assert not check(picture, scene).ok


def test_colour_under_zero_alpha_is_ignored() -> None:
    scene = Scene(TRANSPARENT, (Thing(shape=2, colour=5, size=0, cell=3, dx=1, dy=0),))
    picture = paint(scene)
    picture[picture[..., 3] == 0, :3] = 200
    assert check(picture, scene).ok


def test_blot_on_the_background_fails() -> None:
    scene = scenes(1)[0]
    row, column = divmod(next(c for c in range(NUM_CELLS) if c not in scene.cells()), 3)
    picture = paint(scene)
    y, x = int((row + 0.5) * 128 / 3), int((column + 0.5) * 128 / 3)
    picture[y : y + 7, x : x + 7] = (0, 255, 255, 255)
    assert check(picture, scene).problems


def test_light_noise_passes() -> None:
    rng = np.random.default_rng(0)
    for scene in scenes(12):
        noisy = paint(scene) + rng.normal(0, 4, (128, 128, 4))
        assert check(noisy.round().clip(0, 255).astype(np.uint8), scene).ok
