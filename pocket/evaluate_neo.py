"""Asks, paints, edits and talks with unseen combinations through the public API, and judges answers and pixels.

python -m pocket.evaluate_neo DIR [--n 300] [--seed 0] [--check] [--guidance 4] [--device auto] [--dtype auto]
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from pocket.checker import Verdict, check
from pocket.dialogues import DIALOGUE_KINDS, Dialogue, draw_dialogue, draw_opaque
from pocket.evaluate import picture
from pocket.questions import QUESTION_KINDS, Question, draw_question, is_right
from pocket.scenes import Scene
from pocket.tasks import KINDS, Example
from underpaint import Chat, PaintingOptions, PicturePart, Pipeline, TextPart
from underpaint.chat import Part
from underpaint.pipeline import load_service

BATCH = 16  # prompts without references that are painted in one call
ANSWER_TOKENS = 16  # of a question; the longest right answer has fewer
TURN_TOKENS = 64  # of a turn with pictures


@dataclass(frozen=True)
class Goal:
    """A part of the evaluation: its kinds, its share of all examples, and the score that `--check` asks for."""

    name: str
    kinds: tuple[str, ...]
    share: float
    goal: float


GOALS = (
    Goal("answer", QUESTION_KINDS, 0.34, 0.95),
    Goal("text to image", KINDS[0], 0.2, 0.95),
    Goal("edit, one reference", KINDS[1], 0.2, 0.90),
    Goal("edit, two references", KINDS[2], 0.13, 0.80),
    Goal("dialogue, both pictures", DIALOGUE_KINDS, 0.13, 0.85),
)


@dataclass
class Tally:
    """What was judged, by kind, and what was wrong with it in words."""

    total: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, kind: str, words: str, problems: list[str]) -> None:
        """Count one example; it is right without problems."""
        self.total[kind] += 1
        self.right[kind] += not problems
        if problems:
            self.failures.append(f"    {kind}: {words!r}: {'; '.join(problems)}")

    @property
    def share(self) -> float:
        """Of all that is right."""
        return self.right.total() / self.total.total()


@dataclass(frozen=True)
class Models:
    """Both faces of one loaded checkpoint, and the scale of guidance (None: the engine's own)."""

    chat: Chat
    pipeline: Pipeline
    guidance: float | None
    seed: int

    @classmethod
    def load(cls, checkpoint: str, seed: int, guidance: float | None, **options: str | int) -> "Models":
        """Raises CheckpointError or BadConfig."""
        service = load_service(checkpoint, options)
        return cls(Chat(service), Pipeline(service), guidance, seed)


def judge(image: Image.Image, scene: Scene) -> Verdict:
    """Compare a picture with a scene, whether it has an alpha channel or not."""
    return check(np.asarray(image.convert("RGBA")), scene)


def ask(models: Models, kinds: list[str], rng: random.Random, tally: Tally) -> None:
    """Questions, each in a dialogue of its own."""
    for kind in kinds:
        question: Question = draw_question(rng, "held_out", kind)
        message = [{"role": "user", "content": question.text}]
        parts = models.chat.send(message, [picture(question.scene)], max_pictures=0, max_tokens=ANSWER_TOKENS)
        answer = text_of(list(parts))
        problems = [] if is_right(answer, question) else [f"{answer!r}, not {question.answer!r}"]
        tally.add(kind, question.text, problems)


def paint(models: Models, kinds: list[str], rng: random.Random, tally: Tally) -> None:
    """Paintings without references, many at a time, and edits one by one."""
    examples: list[Example] = [draw_opaque(rng, "held_out", kind) for kind in kinds]
    size = 1 if examples[0].references else BATCH
    for start in range(0, len(examples), size):
        batch = examples[start : start + size]
        references = [picture(scene) for scene in batch[0].references]
        painted = models.pipeline(
            [e.prompt for e in batch], references, seed=models.seed + start, guidance_scale=models.guidance
        )
        for example, image in zip(batch, painted.images, strict=True):
            tally.add(example.kind, example.prompt, list(judge(image, example.target).problems))


def talk(models: Models, kinds: list[str], rng: random.Random, tally: Tally) -> None:
    """Dialogues in one, two or three turns; right if each picture comes when asked for and shows it."""
    scale = PaintingOptions().guidance_scale if models.guidance is None else models.guidance
    for number, kind in enumerate(kinds):
        dialogue: Dialogue = draw_dialogue(rng, "held_out", kind)
        pictures: list[PicturePart] = []
        problems: list[str] = []
        for turn, (prompt, answer) in enumerate(zip(dialogue.prompts, dialogue.answers, strict=True)):
            message = [{"role": "user", "content": prompt}] if turn == 0 else prompt
            seed = models.seed + 10 * number + turn
            options = PaintingOptions(guidance_scale=scale)
            parts = list(models.chat.send(message, painting=options, seed=seed, max_tokens=TURN_TOKENS, max_pictures=2))
            pictures += [part for part in parts if isinstance(part, PicturePart)]
            if turn == len(dialogue.scenes) and text_of(parts) != answer:
                # The question that follows the pictures is beside the point of this score.
                tally.failures.append(f"    {kind}: {prompt!r}: {text_of(parts)!r}, not {answer!r} (does not count)")
        if len(pictures) != len(dialogue.scenes):
            problems.append(f"{len(pictures)} pictures, expected {len(dialogue.scenes)}")
        for index, (part, scene) in enumerate(zip(pictures, dialogue.scenes, strict=False)):
            problems += [f"picture {index + 1}: {problem}" for problem in judge(part.image, scene).problems]
        tally.add(kind, " / ".join(dialogue.prompts), problems)


def text_of(parts: list[Part]) -> str:
    """The words of an answer."""
    return "".join(part.text for part in parts if isinstance(part, TextPart) and not part.thought)


def evaluate(models: Models, total: int) -> bool:
    """Print a table and the first failures of each part. Returns whether every part reaches its goal."""
    runs: dict[str, Callable[[Models, list[str], random.Random, Tally], None]]
    runs = {"answer": ask, "dialogue, both pictures": talk}
    reached = True
    print(f"{'task':32} {'examples':>8} {'right':>7} {'goal':>6} {'s each':>7}")
    for goal in GOALS:
        count = max(round(total * goal.share), len(goal.kinds))
        kinds = [goal.kinds[index % len(goal.kinds)] for index in range(count)]
        tally = Tally()
        started = time.perf_counter()
        runs.get(goal.name, paint)(models, kinds, random.Random(f"evaluate/{models.seed}/{goal.name}"), tally)
        seconds = (time.perf_counter() - started) / count
        reached &= tally.share >= goal.goal
        print(f"{goal.name:32} {count:8} {tally.share:7.1%} {goal.goal:6.0%} {seconds:7.2f}")
        if len(goal.kinds) > 1:
            for kind in goal.kinds:
                print(f"  {kind:30} {tally.total[kind]:8} {tally.right[kind] / tally.total[kind]:7.1%}")
        for failure in tally.failures[:5]:
            print(failure)
    return reached


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="directory of the checkpoint")
    parser.add_argument("--n", type=int, default=300, help="examples in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="exit with 1 below the goals")
    parser.add_argument("--guidance", type=float, help="guidance scale; the engine's own by default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    print(f"{args.checkpoint}, seed {args.seed}, guidance {args.guidance}, device {args.device}, dtype {args.dtype}")
    models = Models.load(args.checkpoint, args.seed, args.guidance, device=args.device, dtype=args.dtype)
    reached = evaluate(models, args.n)
    if args.check and not reached:
        sys.exit(1)


if __name__ == "__main__":
    main()
