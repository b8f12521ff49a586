"""What the pocket model learns to do: a prompt, zero to two reference scenes, and the scene to paint."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from pocket import captions
from pocket.captions import LANGUAGES, Language
from pocket.scenes import (
    BACKGROUNDS,
    COLOURS,
    MAX_THINGS,
    NUM_CELLS,
    TRANSPARENT,
    Scene,
    Split,
    belongs,
    draw_scene,
    draw_thing,
)

TASKS = ("t2i", "edit1", "edit2")  # by the number of references: 0, 1, 2
KINDS = (
    ("t2i",),
    ("recolour", "move", "add", "remove", "background"),
    ("on_background_of", "add_from", "combine"),
)


@dataclass(frozen=True)
class Example:
    """One picture to paint. `kind`: "t2i", "transparent" (the same without a background), or the name of an edit."""

    kind: str
    prompt: str
    references: tuple[Scene, ...]
    target: Scene


Draw = Callable[[random.Random, Split, Language], Example | None]


def _replaced(scene: Scene, index: int, **changes: int) -> Scene:
    things = list(scene.things)
    things[index] = replace(things[index], **changes)
    return replace(scene, things=tuple(things))


def _t2i(rng: random.Random, split: Split, language: Language) -> Example:
    scene = draw_scene(rng, split, rng.randint(1, MAX_THINGS))
    return Example("t2i", captions.caption(scene, language, rng), (), scene)


def _recolour(rng: random.Random, split: Split, language: Language) -> Example:
    source = draw_scene(rng, split, rng.randint(1, MAX_THINGS))
    index = rng.randrange(len(source.things))
    thing = source.things[index]
    colour = rng.choice([c for c in range(len(COLOURS)) if c != thing.colour])
    prompt = captions.recolour(thing, colour, language, rng)
    return Example("recolour", prompt, (source,), _replaced(source, index, colour=colour))


def _move(rng: random.Random, split: Split, language: Language) -> Example:
    source = draw_scene(rng, split, rng.randint(1, MAX_THINGS))
    index = rng.randrange(len(source.things))
    cell = rng.choice([c for c in range(NUM_CELLS) if c not in source.cells()])
    prompt = captions.move(source.things[index], cell, language, rng)
    return Example("move", prompt, (source,), _replaced(source, index, cell=cell))


def _add(rng: random.Random, split: Split, language: Language) -> Example | None:
    source = draw_scene(rng, split, rng.randint(1, MAX_THINGS - 1))
    thing = draw_thing(rng, split, source.background)
    if thing.cell in source.cells() or any((t.shape, t.colour) == (thing.shape, thing.colour) for t in source.things):
        return None
    target = replace(source, things=(*source.things, thing))
    return Example("add", captions.add(thing, language, rng), (source,), target)


def _remove(rng: random.Random, split: Split, language: Language) -> Example:
    source = draw_scene(rng, split, rng.randint(2, MAX_THINGS))
    gone = rng.choice(source.things)
    target = replace(source, things=tuple(thing for thing in source.things if thing is not gone))
    return Example("remove", captions.remove(gone, language, rng), (source,), target)


def _background(rng: random.Random, split: Split, language: Language) -> Example:
    source = draw_scene(rng, split, rng.randint(1, MAX_THINGS))
    background = rng.choice([b for b in range(len(BACKGROUNDS)) if b != source.background])
    prompt = captions.change_background(background, language, rng)
    return Example("background", prompt, (source,), replace(source, background=background))


def _on_background_of(rng: random.Random, split: Split, language: Language) -> Example | None:
    first = draw_scene(rng, split, rng.randint(1, MAX_THINGS))
    second = draw_scene(rng, split, rng.randint(1, MAX_THINGS))
    if first.background == second.background:
        return None
    prompt = captions.on_background_of(len(first.things), language, rng)
    return Example("on_background_of", prompt, (first, second), replace(first, background=second.background))


def _add_from(rng: random.Random, split: Split, language: Language) -> Example | None:
    first = draw_scene(rng, split, rng.randint(1, MAX_THINGS - 1))
    second = draw_scene(rng, split, rng.randint(1, MAX_THINGS))
    thing = rng.choice(second.things)
    if thing.cell in first.cells() or any((t.shape, t.colour) == (thing.shape, thing.colour) for t in first.things):
        return None
    target = replace(first, things=(*first.things, thing))
    return Example("add_from", captions.add_from(thing, language, rng), (first, second), target)


def _combine(rng: random.Random, split: Split, language: Language) -> Example | None:
    first = draw_scene(rng, split, rng.randint(1, MAX_THINGS - 1))
    second = draw_scene(rng, split, rng.randint(1, MAX_THINGS - len(first.things)))
    if first.cells() & second.cells():
        return None
    target = replace(first, things=first.things + second.things)
    return Example("combine", captions.combine(language, rng), (first, second), target)


def _transparent(rng: random.Random, split: Split, language: Language) -> Example:
    scene = draw_scene(rng, split, rng.randint(1, MAX_THINGS), TRANSPARENT)
    return Example("transparent", captions.caption(scene, language, rng), (), scene)


_DRAWS: dict[str, Draw] = {
    "t2i": _t2i,
    "transparent": _transparent,
    "recolour": _recolour,
    "move": _move,
    "add": _add,
    "remove": _remove,
    "background": _background,
    "on_background_of": _on_background_of,
    "add_from": _add_from,
    "combine": _combine,
}


def draw_kind(rng: random.Random, split: Split, kind: str) -> Example:
    """One example of a kind, in either language. Every picture of it, references too, is of this side of the split."""
    language = rng.choice(LANGUAGES)
    while True:
        example = _DRAWS[kind](rng, split, language)
        if example is not None and belongs(example.target, split):
            return example


def draw_example(rng: random.Random, split: Split, num_references: int) -> Example:
    """One example with `num_references` references, each kind of `KINDS` equally often."""
    return draw_kind(rng, split, rng.choice(KINDS[num_references]))
