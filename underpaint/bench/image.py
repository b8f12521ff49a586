"""Whole pictures through the public API: where their time goes, and whether the first is slower than those after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from PIL import Image

from underpaint.bench.scenes import NeoStage
from underpaint.config import EngineConfig, resolve
from underpaint.layout import Grid
from underpaint.models.neo_unify import CELL, NeoUnify
from underpaint.pipeline import Painting, Pipeline
from underpaint.report import Cell, Report, Table, machine
from underpaint.service import Service

STAGES = ("encode", "prefill", "denoise", "decode")


@dataclass(frozen=True, eq=False)
class Wish:
    """What is painted, again and again with other seeds. ``size``: width and height. ``num_steps``: None for the
    checkpoint's own."""

    prompt: str
    images: tuple[Image.Image, ...]
    size: tuple[int, int]
    num_steps: int | None


def image(pipeline: Pipeline, wish: Wish, num_pictures: int, warm_up: bool) -> Report:
    """Paint ``num_pictures`` one after another; ``warm_up``: first let the engine capture what a server would."""
    if warm_up:
        pipeline.service.generation.warm_up([_grid(pipeline.service, wish)])
    before = vars(pipeline.service.runner.graphs).copy()
    width, height = wish.size
    paintings = [
        pipeline(
            wish.prompt, wish.images, width=width, height=height, num_inference_steps=wish.num_steps, seed=seed,
            progress=False,
        )
        for seed in range(num_pictures)
    ]  # fmt: skip
    counts = {name: value - before[name] for name, value in vars(pipeline.service.runner.graphs).items()}
    rows = [_row(str(i + 1), painting) for i, painting in enumerate(paintings)]
    config = pipeline.service.config
    notes = (
        machine(config.device),
        f"{config.dtype}, quantize {config.quantize}, {paintings[0].stats.num_steps} steps, "
        f"{paintings[0].stats.num_branches} branches; passes in graphs {counts['hits']}, captured {counts['misses']}, "
        f"without {counts['eager']}",
        f"the first picture takes {_total(paintings[0]) / _typical(paintings):.3f} of a later one",
    )
    return Report(notes, (Table("Seconds a picture", ("picture", "total", *STAGES, "outside steps"), rows),))


def random_pipeline(device: str, quantize: str) -> Pipeline:
    """A SenseNova-U1 8B (on a CPU a small one) with random weights, which needs nothing beside itself to paint."""
    config = resolve(EngineConfig(device=device, quantize=quantize))
    return Pipeline(Service(NeoStage(config, not config.device.startswith("cuda"), seed=0).model, config))


def _grid(service: Service, wish: Wish) -> Grid:
    width, height = wish.size
    if isinstance(service.model, NeoUnify):
        return height // CELL, width // CELL
    return service.qwen.image_codec.grid(width, height)


def _total(painting: Painting) -> float:
    return sum(painting.stats.seconds.values())


def _typical(paintings: Sequence[Painting]) -> float:
    """Of the second half."""
    return median(_total(painting) for painting in paintings[len(paintings) // 2 :])


def _row(name: str, painting: Painting) -> tuple[Cell, ...]:
    seconds, total = painting.stats.seconds, _total(painting)
    return (name, total, *(seconds[stage] for stage in STAGES), 1 - seconds["denoise"] / total)
