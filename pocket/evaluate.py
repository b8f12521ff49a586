"""Paints unseen combinations through the public API and judges them by their pixels.

python -m pocket.evaluate DIR [--n 200] [--seed 0] [--check] [--device auto] [--dtype auto]
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from pocket.checker import Verdict, check
from pocket.scenes import Scene, render, scene_row
from pocket.tasks import Example, draw_kind
from underpaint import Pipeline

BATCH = 16  # prompts without references that are painted in one call


@dataclass(frozen=True)
class Task:
    """A part of the evaluation: its kinds, its share of all pictures, and the score that `--check` asks for."""

    name: str
    kinds: tuple[str, ...]
    share: float
    goal: float


TASKS = (
    Task("text to image", ("t2i",), 0.3, 0.95),
    Task("text to image, transparent", ("transparent",), 0.1, 0.95),
    Task("edit, one reference", ("recolour", "move", "add", "remove", "background"), 0.36, 0.90),
    Task("edit, two references", ("on_background_of", "add_from", "combine"), 0.24, 0.80),
)


@dataclass
class Score:
    """Pictures judged, right ones, and things of the wrong size in them (which count as right)."""

    total: int = 0
    right: int = 0
    wrong_sizes: int = 0

    def add(self, verdict: Verdict) -> None:
        """Count one picture."""
        self.total += 1
        self.right += verdict.ok
        self.wrong_sizes += verdict.wrong_sizes

    @property
    def share(self) -> float:
        """Of the pictures that are right."""
        return self.right / self.total


def picture(scene: Scene) -> Image.Image:
    """A scene as a PIL RGBA picture."""
    pixels = render(torch.tensor([scene_row(scene)]))[0].permute(1, 2, 0)
    return Image.fromarray((pixels * 255).round().to(torch.uint8).numpy(), "RGBA")


def draw(task: Task, count: int, seed: int) -> list[Example]:
    """`count` held-out examples of a task, its kinds in turn."""
    rng = random.Random(f"evaluate/{seed}/{task.name}")
    return [draw_kind(rng, "held_out", task.kinds[index % len(task.kinds)]) for index in range(count)]


def paint(pipeline: Pipeline, examples: list[Example], seed: int) -> list[Image.Image]:
    """One picture for each example of a task."""
    if examples[0].references:
        return [
            pipeline(e.prompt, images=[picture(scene) for scene in e.references], seed=seed + index).images[0]
            for index, e in enumerate(examples)
        ]
    painted: list[Image.Image] = []
    for start in range(0, len(examples), BATCH):
        prompts = [e.prompt for e in examples[start : start + BATCH]]
        painted += pipeline(prompts, seed=seed + start).images
    return painted


def evaluate(pipeline: Pipeline, total: int, seed: int) -> bool:
    """Print a table and the first failures of each task. Returns whether every task reaches its goal."""
    reached = True
    print(f"{'task':32} {'pictures':>8} {'right':>7} {'goal':>6} {'wrong size':>10} {'s a picture':>11}")
    for task in TASKS:
        examples = draw(task, max(round(total * task.share), len(task.kinds)), seed)
        started = time.perf_counter()
        painted = paint(pipeline, examples, seed)
        seconds = (time.perf_counter() - started) / len(examples)
        scores = {kind: Score() for kind in (task.name, *task.kinds)}
        failures = []
        for example, image in zip(examples, painted, strict=True):
            verdict = check(np.asarray(image), example.target)
            scores[task.name].add(verdict)
            scores[example.kind].add(verdict)
            if not verdict.ok:
                failures.append(f"    {example.kind}: {example.prompt!r}: {'; '.join(verdict.problems)}")
        score = scores.pop(task.name)
        reached &= score.share >= task.goal
        goal = f"{task.goal:.0%}"
        print(f"{task.name:32} {score.total:8} {score.share:7.1%} {goal:>6} {score.wrong_sizes:10} {seconds:11.2f}")
        if len(scores) > 1:
            for kind, part in scores.items():
                print(f"  {kind:30} {part.total:8} {part.share:7.1%} {'':6} {part.wrong_sizes:10}")
        print("\n".join(failures[:5]), end="\n" if failures else "")
    return reached


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="directory of the checkpoint")
    parser.add_argument("--n", type=int, default=200, help="pictures in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="exit with 1 below the goals")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    print(f"{args.checkpoint}, seed {args.seed}, device {args.device}, dtype {args.dtype}")
    pipeline = Pipeline.from_pretrained(args.checkpoint, device=args.device, dtype=args.dtype)
    reached = evaluate(pipeline, args.n, args.seed)
    if args.check and not reached:
        sys.exit(1)


if __name__ == "__main__":
    main()
