"""A tiny network with the pocket checkpoint's shape, and sequences as the engine would build them."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pocket.build_neo import Sizes
from pocket.neo_pool import TASKS, NeoExample, NeoTask
from pocket.neo_stage import NeoOptions, NeoStage
from pocket.scoreboard import picture
from underpaint.models.neo_unify import Passage, Picture
from underpaint.models.neo_unify.prompt import IMAGE_CONTEXT
from underpaint.models.neo_unify.vision import painted_picture, read_picture, reference_bounds, to_cells

TINY = Sizes(64, 96, 2, 4, 2, 16, 32)
CPU = torch.device("cpu")


def task_of(name: str) -> NeoTask:
    return next(task for task in TASKS if task.name == name)


def make_stage(names: tuple[str, ...], pool: int = 8, batch: int = 2, rate: float = 3e-3, seed: int = 0) -> NeoStage:
    tasks = tuple(task_of(name) for name in names)
    few = tuple(replace(task, copies=min(task.copies, 2)) for task in tasks)
    return NeoStage(CPU, NeoOptions(seed, (pool,) * len(few), (batch,) * len(few), rate, TINY, few))


def export_loud(stage: NeoStage, root: Path) -> None:
    """Weights large enough for text, pictures and positions all to matter, exported; the stage has them rounded."""
    generator = torch.Generator().manual_seed(stage.options.seed)
    with torch.no_grad():
        for name, weight in stage.trainer.parameters.items():
            scale = 0.1 if weight.ndim == 1 else 1.2 / weight.flatten(1).shape[1] ** 0.5
            loud = torch.randn(weight.shape, generator=generator) * scale
            loud += 1.0 if weight.ndim == 1 and "norm" in name else 0.0
            weight.copy_(loud.bfloat16())
            stage.trainer.average[name].copy_(weight)
    stage.export(root)


def pictures_read(task: NeoTask, example: NeoExample) -> list[Picture]:
    """What the engine makes of the pictures that a sequence reads."""
    images = [picture(example.scenes[index]) for index in task.reads]
    if task.name == "dialogue":
        pixels = [torch.tensor(list(image.convert("RGB").tobytes())).reshape(128, 128, 3) for image in images]
        return [painted_picture(to_cells(p.permute(2, 0, 1) / 127.5 - 1), task.grid) for p in pixels]
    bounds = reference_bounds(len(images))
    if task.name == "answer":
        bounds = replace(bounds, least=128 * 128)
    return [read_picture(image, bounds) for image in images]


def passage_of(ids: list[int], context: int, pictures: list[Picture]) -> Passage:
    """A line of a pool as the engine's passage; runs of the context token are pictures."""
    parts: list[tuple[int, ...] | Picture] = []
    waiting = iter(pictures)
    row = 0
    while row < len(ids):
        stop = row
        if ids[row] == context:
            parts.append(next(waiting))
            row += len(parts[-1].cells)  # type: ignore[union-attr]
            continue
        while stop < len(ids) and ids[stop] != context:
            stop += 1
        parts.append(tuple(ids[row:stop]))
        row = stop
    return Passage(tuple(parts))


def flat_ids(passage: Passage, context: int) -> list[int]:
    """The tokens of a passage, with the context token for every cell."""
    ids: list[int] = []
    for part in passage.parts:
        ids += [context] * len(part.cells) if isinstance(part, Picture) else part
    return ids


def line_ids(stage: NeoStage, ids: Tensor, system: bool, last: int) -> list[int]:
    """A line up to row ``last``, behind the system message if it has it."""
    head = stage.model.constant("system_ids")[: stage.model.num_system].tolist() if system else []
    return [*head, *ids[:last].tolist()]


def context_of(stage: NeoStage) -> int:
    return int(stage.tokenizer.convert_tokens_to_ids(IMAGE_CONTEXT))
