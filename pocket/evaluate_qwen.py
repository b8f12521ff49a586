"""What the pocket Qwen-Image 2.1 is judged by: pictures and edits, opaque and transparent."""

import random

from pocket.scoreboard import Goal, Tally, judge, paint
from pocket.tasks import Example, draw_kind
from underpaint import Pipeline


def draw(kinds: list[str], rng: random.Random) -> list[Example]:
    """A held-out example of each of ``kinds``."""
    return [draw_kind(rng, "held_out", kind) for kind in kinds]


def goals(pipeline: Pipeline, seed: int) -> tuple[Goal, ...]:
    """``seed``: of the first picture of every task."""

    def run(kinds: list[str], rng: random.Random, tally: Tally) -> None:
        examples = draw(kinds, rng)
        for example, image in zip(examples, paint(pipeline, examples, seed), strict=True):
            tally.add_picture(example.kind, example.prompt, judge(image, example.target))

    return (
        Goal("text to image", ("t2i",), 0.3, 0.95, run),
        Goal("text to image, transparent", ("transparent",), 0.1, 0.95, run),
        Goal("edit, one reference", ("recolour", "move", "add", "remove", "background"), 0.36, 0.90, run),
        Goal("edit, two references", ("on_background_of", "add_from", "combine"), 0.24, 0.80, run),
    )
