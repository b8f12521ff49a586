"""What the evaluations of both pocket checkpoints share: goals, tallies, and the table."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from pocket.checker import Verdict, check
from pocket.scenes import Scene, render, scene_row
from pocket.tasks import Example
from underpaint import Pipeline

BATCH = 16  # prompts without references that are painted in one call
FAILURES_SHOWN = 5


@dataclass
class Tally:
    """What was judged, by kind, what was wrong with it in words, and things of the wrong size (which is no fault)."""

    total: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    wrong_sizes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, kind: str, words: str, problems: Sequence[str]) -> None:
        """Count one example; it is right without problems."""
        self.total[kind] += 1
        self.right[kind] += not problems
        if problems:
            self.failures.append(f"    {kind}: {words!r}: {'; '.join(problems)}")

    def add_picture(self, kind: str, words: str, verdict: Verdict) -> None:
        """Count one picture."""
        self.add(kind, words, verdict.problems)
        self.wrong_sizes[kind] += verdict.wrong_sizes

    @property
    def share(self) -> float:
        """Of all that is right."""
        return self.right.total() / self.total.total()


Run = Callable[[list[str], random.Random, Tally], None]
"""Draws, runs and judges one example of each of the kinds it is given."""


@dataclass(frozen=True)
class Goal:
    """A part of an evaluation: its kinds, its share of all examples, the score that ``--check`` asks for, its run."""

    name: str
    kinds: tuple[str, ...]
    share: float
    goal: float
    run: Run


def evaluate(goals: Sequence[Goal], total: int, seed: int) -> bool:
    """Print a table and the first failures of each part. Returns whether every part reaches its goal."""
    reached = True
    print(f"{'task':32} {'examples':>8} {'right':>7} {'goal':>6} {'wrong size':>10} {'s each':>7}")
    for goal in goals:
        count = max(round(total * goal.share), len(goal.kinds))
        kinds = [goal.kinds[index % len(goal.kinds)] for index in range(count)]
        tally = Tally()
        started = time.perf_counter()
        goal.run(kinds, random.Random(f"evaluate/{seed}/{goal.name}"), tally)
        seconds = (time.perf_counter() - started) / count
        reached &= tally.share >= goal.goal
        sizes = tally.wrong_sizes.total()
        print(f"{goal.name:32} {count:8} {tally.share:7.1%} {goal.goal:6.0%} {sizes:10} {seconds:7.2f}")
        if len(goal.kinds) > 1:
            for kind in goal.kinds:
                share = tally.right[kind] / tally.total[kind]
                print(f"  {kind:30} {tally.total[kind]:8} {share:7.1%} {'':6} {tally.wrong_sizes[kind]:10}")
        for failure in tally.failures[:FAILURES_SHOWN]:
            print(failure)
    return reached


def picture(scene: Scene) -> Image.Image:
    """A scene as a PIL RGBA picture."""
    pixels = render(torch.tensor([scene_row(scene)]))[0].permute(1, 2, 0)
    return Image.fromarray((pixels * 255).round().to(torch.uint8).numpy(), "RGBA")


def judge(image: Image.Image, scene: Scene) -> Verdict:
    """Compare a picture with a scene, whether it has an alpha channel or not."""
    return check(np.asarray(image.convert("RGBA")), scene)


def paint(pipeline: Pipeline, examples: Sequence[Example], seed: int, **options: Any) -> list[Image.Image]:
    """One picture for each example of a task: many prompts at a time, edits one by one."""
    size = 1 if examples[0].references else BATCH
    painted: list[Image.Image] = []
    for start in range(0, len(examples), size):
        batch = examples[start : start + size]
        references = [picture(scene) for scene in batch[0].references]
        painted += pipeline([e.prompt for e in batch], references, seed=seed + start, **options).images
    return painted
