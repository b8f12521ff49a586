"""Examples for NEO-Unify on the training device: sequences of tokens with places for pictures, and the pictures.

The texts are those of ``underpaint.models.neo_unify.prompt``. The system message of paintings and edits is the same in
all of them and comes first, so it is left out of the lines here and computed once a step, see ``neo_model``.
"""

import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pocket.build_neo import GRID, build_neo_tokenizer
from pocket.dialogues import DIALOGUE_KINDS, Script, draw_dialogue, draw_opaque, unprompted_script
from pocket.pool import on_white
from pocket.questions import TRAINING_KINDS, draw_question
from pocket.scenes import BACKGROUNDS, CANVAS, COLOURS, SHAPES, Scene, Split, scene_row
from pocket.scenes import NUM_CELLS as SCENE_CELLS
from pocket.tasks import KINDS
from pocket.vae_stage import render_bytes
from underpaint.layout import Grid
from underpaint.models.neo_unify.prompt import (
    IMAGE_CONTEXT,
    IMAGE_START,
    IMAGE_STOP,
    IMAGE_TAG,
    NO_THOUGHT,
    PAINTING_SYSTEM_MESSAGE,
    TURN_STOP,
    ask_text,
    chat_text,
    interleave_text,
    paint_text,
    pictures_text,
)

DROPPED_SHARE = 0.08  # of what is painted is painted without its text: what guidance steers away from
CHUNK = 4096  # pictures rendered at a time
DRAW = 5000  # examples drawn at a time
SYSTEM_TURN = chat_text([], PAINTING_SYSTEM_MESSAGE).removesuffix("<|im_start|>assistant\n")
REFERENCE_GRID: Grid = (16, 16)  # of a reference of an edit: 512 x 512 pixels by the released rule


@dataclass(frozen=True)
class NeoTask:
    """The fixed shape of a task's sequences. ``num_rows``: of a line, padded, the system message apart. ``grid``: of
    the pictures that are read. ``reads`` and ``paints``: which of an example's pictures are read and painted, in
    order. ``copies``: noisy states of each painted one in a step. ``talks``: the model writes text. ``has_system``:
    the painting system message comes first, unless the text is dropped."""

    name: str
    num_rows: int
    grid: Grid = GRID
    reads: tuple[int, ...] = ()
    paints: tuple[int, ...] = ()
    copies: int = 0
    talks: bool = False
    has_system: bool = False

    @property
    def num_pictures(self) -> int:
        """Of an example."""
        return max((*self.reads, *self.paints)) + 1

    @property
    def num_targets(self) -> int:
        """Noisy states of an example."""
        return len(self.paints) * self.copies


# Rows are multiples of 8, which fused attention with a mask wants.
TASKS = (
    NeoTask("answer", 64, reads=(0,), talks=True),
    NeoTask("look", 312, REFERENCE_GRID, reads=(0,), talks=True),
    NeoTask("t2i", 56, paints=(0,), copies=4, has_system=True),
    NeoTask("edit1", 296, REFERENCE_GRID, reads=(0,), paints=(1,), copies=4, has_system=True),
    NeoTask("edit2", 568, REFERENCE_GRID, reads=(0, 1), paints=(2,), copies=4, has_system=True),
    NeoTask("dialogue", 160, reads=(0, 1), paints=(0, 1), copies=2, talks=True),
)


@dataclass(frozen=True)
class NeoExample:
    """``script``: the sequence in pieces, see ``dialogues``. ``scenes``: the pictures that its task reads and paints.
    ``dropped``: the sequence is without its text, so it does not say what to paint."""

    kind: str
    script: Script
    scenes: tuple[Scene, ...]
    dropped: bool = False


def draw_neo_example(rng: random.Random, split: Split, task: NeoTask, dropped: bool = False) -> NeoExample:
    """One example of a task; ``dropped``: without its text, for tasks that paint."""
    match task.name:
        case "answer" | "look":
            question = draw_question(rng, split, rng.choice(TRAINING_KINDS))
            # A dialogue that may paint reads pictures as references and begins answers with an empty thought.
            asked = ask_text(question.text, 1) if task.name == "answer" else interleave_text(question.text, 1)
            return NeoExample(question.kind, ((asked, False), (question.answer + TURN_STOP, True)), (question.scene,))
        case "dialogue":
            dialogue = draw_dialogue(rng, split, rng.choice(DIALOGUE_KINDS))
            script = unprompted_script(dialogue.kind) if dropped else dialogue.script
            return NeoExample(dialogue.kind, script, dialogue.scenes, dropped)
        case _:
            num = len(task.reads)
            example = draw_opaque(rng, split, rng.choice(KINDS[num]))
            text = pictures_text(num) + IMAGE_START if dropped else paint_text(example.prompt, num, think=False)
            scenes = (*example.references, example.target)
            return NeoExample(example.kind, ((text, False),), scenes, dropped)


@dataclass(frozen=True)
class Lines:
    """Sequences of one task: ``ids`` (N, rows) int16, padded at the end, a picture as one context token a cell;
    ``spoken`` (N, rows) bool, the tokens that the model writes; ``system`` (N,) bool, whether the system message comes
    before; ``stops`` (N, painted pictures) int16, the rows that each painted one sees."""

    ids: Tensor
    spoken: Tensor
    system: Tensor
    stops: Tensor


def make_lines(tokenizer: PreTrainedTokenizerFast, task: NeoTask, scripts: Sequence[Script]) -> Lines:
    """Tokenise. Raises ValueError for a sequence that is longer than its task's."""
    image = f"{IMAGE_START}{IMAGE_CONTEXT}{IMAGE_STOP}"
    pieces = [(text.replace(IMAGE_TAG, image), spoken) for script in scripts for text, spoken in script]
    system = torch.tensor([script[0][0].startswith(SYSTEM_TURN) for script in scripts])
    texts = [text.removeprefix(SYSTEM_TURN) for text, _ in pieces]
    encodings = iter(tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    context, start = tokenizer.convert_tokens_to_ids([IMAGE_CONTEXT, IMAGE_START])
    cells = task.grid[0] * task.grid[1]
    shape = (len(scripts), task.num_rows)
    ids = torch.full(shape, tokenizer.pad_token_id, dtype=torch.int16)
    spoken = torch.zeros(shape, dtype=torch.bool)
    stops = torch.zeros(len(scripts), len(task.paints), dtype=torch.int16)
    for index, script in enumerate(scripts):
        line: list[int] = []
        flags: list[bool] = []
        for _, writes in script:
            piece = next(encodings).ids
            for token in piece:
                line += [token] * (cells if token == context else 1)
            flags += [writes] * (len(line) - len(flags))
        if len(line) > task.num_rows:
            raise ValueError(f"a sequence of {task.name} has {len(line)} rows, the task is padded to {task.num_rows}")
        ids[index, : len(line)] = torch.tensor(line, dtype=torch.int16)
        spoken[index, : len(line)] = torch.tensor(flags)
        if task.paints:
            starts = [row + 1 for row, token in enumerate(line) if token == start]
            stops[index] = torch.tensor(starts[-len(task.paints) :], dtype=torch.int16)
    return Lines(ids, spoken, system, stops)


def scene_rows(task: NeoTask, examples: Sequence[NeoExample]) -> Tensor:
    """(N, pictures, `scenes.ROW_WIDTH`): the pictures of a task as numbers."""
    return torch.tensor([[scene_row(e.scenes[i]) for i in range(task.num_pictures)] for e in examples])


def mistaken_rows(rng: random.Random, task: NeoTask, examples: Sequence[NeoExample]) -> Tensor:
    """(N, painted pictures, `scenes.ROW_WIDTH`): what is painted, every thing with another shape, and every other one
    with another colour, than the sequence tells; without text, as it is."""
    pictures = [[e.scenes[i] if e.dropped else mistake(rng, e.scenes[i]) for i in task.paints] for e in examples]
    return torch.tensor([[scene_row(scene) for scene in scenes] for scenes in pictures])


def mistake(rng: random.Random, scene: Scene) -> Scene:
    """The scene with other shapes in the same places, and at times in other colours that can be seen there."""
    things = []
    for thing in scene.things:
        shape = (thing.shape + rng.randrange(1, len(SHAPES))) % len(SHAPES)
        colours = [c for c in range(len(COLOURS)) if COLOURS[c] != BACKGROUNDS[scene.background] and c != thing.colour]
        colour = rng.choice(colours) if rng.random() < 0.5 else thing.colour
        things.append(replace(thing, shape=shape, colour=colour))
    return replace(scene, things=tuple(things))


def told_cells(task: NeoTask, examples: Sequence[NeoExample]) -> Tensor:
    """(N, painted pictures, scene cells) bool: where the sequence says that there is a thing; nowhere without text."""
    told = torch.zeros(len(examples), len(task.paints), SCENE_CELLS, dtype=torch.bool)
    for index, example in enumerate(examples):
        for place, picture in enumerate(task.paints):
            if not example.dropped:
                told[index, place, sorted(example.scenes[picture].cells())] = True
    return told


def render_rows(rows: Tensor, device: torch.device) -> Tensor:
    """Scene rows (N, pictures, ROW_WIDTH) -> (N, pictures, 3, CANVAS, CANVAS) uint8."""
    if not rows.numel():
        return torch.empty(*rows.shape[:2], 3, CANVAS, CANVAS, dtype=torch.uint8, device=device)
    flat = rows.flatten(0, 1).to(device)
    pictures = torch.empty(len(flat), 3, CANVAS, CANVAS, dtype=torch.uint8, device=device)
    for first in range(0, len(flat), CHUNK):
        pictures[first : first + CHUNK] = on_white(render_bytes(flat[first : first + CHUNK]))
    return pictures.unflatten(0, rows.shape[:2])


@dataclass(frozen=True)
class Draw:
    """Some examples to draw: the chunk ``number`` of a pool. The same whoever draws it, and when."""

    seed: int
    task: NeoTask
    number: int
    count: int

    def __call__(self, tokenizer: PreTrainedTokenizerFast) -> list[Tensor]:
        """What ``NeoPool.rendered`` takes."""
        rng = random.Random(f"neo/{self.seed}/{self.task.name}/{self.number}")
        share = DROPPED_SHARE if self.task.paints else 0.0
        dropped = [rng.random() < share for _ in range(self.count)]
        examples = [draw_neo_example(rng, "train", self.task, without) for without in dropped]
        return as_numbers(tokenizer, self.task, examples, rng)


def as_numbers(
    tokenizer: PreTrainedTokenizerFast, task: NeoTask, examples: Sequence[NeoExample], rng: random.Random
) -> list[Tensor]:
    """The fields of ``NeoPool``, pictures as scene rows; ``rng`` draws the mistakes."""
    lines = make_lines(tokenizer, task, [example.script for example in examples])
    rows = (scene_rows(task, examples), mistaken_rows(rng, task, examples))
    return [lines.ids, lines.spoken, lines.system, lines.stops, told_cells(task, examples), *rows]


def _draw_apart(draw: Draw) -> list[npt.NDArray[np.generic]]:
    """A draw in a process of its own; arrays travel as plain bytes."""
    return [x.numpy() for x in draw(build_neo_tokenizer())]


@dataclass(frozen=True)
class NeoPool:
    """Examples of one task: the fields of ``Lines``, ``told`` as ``told_cells`` gives it, ``pictures``
    (N, pictures, 3, CANVAS, CANVAS) uint8, and of those that are painted the ``mistaken`` ones, likewise."""

    ids: Tensor
    spoken: Tensor
    system: Tensor
    stops: Tensor
    told: Tensor
    pictures: Tensor
    mistaken: Tensor

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerFast, task: NeoTask, examples: Sequence[NeoExample], device: torch.device
    ) -> "NeoPool":
        """A pool of given examples."""
        return cls.rendered(as_numbers(tokenizer, task, examples, random.Random(0)), device)

    @classmethod
    def rendered(cls, numbers: Sequence[Tensor], device: torch.device) -> "NeoPool":
        """What ``as_numbers`` gives, with pictures, on the device."""
        ids, spoken, system, stops, told, rows, mistaken = (x.to(device) for x in numbers)
        return cls(ids, spoken, system, stops, told, render_rows(rows, device), render_rows(mistaken, device))

    def pick(self, count: int, generator: torch.Generator) -> "NeoPool":
        """`count` random examples."""
        index = torch.randint(len(self.ids), (count,), generator=generator, device=self.ids.device)
        return NeoPool(*(x[index] for x in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The fields, in order."""
        return self.ids, self.spoken, self.system, self.stops, self.told, self.pictures, self.mistaken


def draw_pools(
    seed: int,
    tasks: Sequence[NeoTask],
    counts: Sequence[int],
    tokenizer: PreTrainedTokenizerFast,
    device: torch.device,
    workers: int = 0,
) -> list[NeoPool]:
    """The training pool of each task: some of what is painted has no text. ``workers``: processes that draw; drawing
    is most of what a run does before its first step. 0: this one."""
    draws = [
        [Draw(seed, task, first // DRAW, min(DRAW, count - first)) for first in range(0, count, DRAW)]
        for task, count in zip(tasks, counts, strict=True)
    ]
    everything = [draw for of_task in draws for draw in of_task]
    if workers:
        # Spawned, as a device that is in use must not be inherited.
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
            drawn = [[torch.from_numpy(x) for x in arrays] for arrays in executor.map(_draw_apart, everything)]
    else:
        drawn = [draw(tokenizer) for draw in everything]
    results = iter(drawn)
    pools = []
    for of_task in draws:
        parts = [next(results) for _ in of_task]
        pools.append(NeoPool.rendered([torch.cat(field) for field in zip(*parts, strict=True)], device))
    return pools


# Kept with the sequences: a dialogue ends its thought before anything else.
assert NO_THOUGHT in interleave_text("", 0)
