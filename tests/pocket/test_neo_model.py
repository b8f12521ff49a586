"""The training pass equals the engine's passes on the same weights."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from neo_cases import context_of, export_loud, line_ids, make_stage, passage_of, pictures_read
from neo_unify.cases import make_driver
from PIL import Image
from torch import Tensor

from pocket.build_neo import GRID, NUM_CELLS, painting_noise_scale
from pocket.neo_model import NeoBatch
from pocket.neo_pool import REFERENCE_GRID, TASKS, NeoExample, NeoPool, draw_neo_example
from pocket.neo_stage import NeoStage, as_picture, make_batch, no_targets
from pocket.scoreboard import picture
from underpaint.config import EngineConfig
from underpaint.models.neo_unify import NeoUnify, load
from underpaint.models.neo_unify.config import CELL_VALUES
from underpaint.models.neo_unify.driver import Driver
from underpaint.models.neo_unify.flow import velocity
from underpaint.models.neo_unify.vision import PixelBounds, read_picture, to_cells
from underpaint.sampling.guidance import Branch

TOLERANCE = 1e-4
NAMES = tuple(task.name for task in TASKS)


@pytest.fixture(scope="module")
def stage() -> NeoStage:
    return make_stage(NAMES)


@pytest.fixture(scope="module")
def engine(stage: NeoStage, tmp_path_factory: pytest.TempPathFactory) -> NeoUnify:
    root: Path = tmp_path_factory.mktemp("neo")
    export_loud(stage, root)
    return load(root, EngineConfig(device="cpu", dtype="float32", kv_codec="fp32"))


@pytest.fixture
def driver(engine: NeoUnify) -> Driver:
    return make_driver(engine)[0]


def drawn(stage: NeoStage) -> list[tuple[list[NeoExample], NeoPool, NeoBatch]]:
    """Two examples of each task, the second without its text if it paints."""
    torch.manual_seed(4)
    out = []
    for task in stage.options.tasks:
        rng = random.Random(task.name)
        examples = [draw_neo_example(rng, "train", task, dropped=bool(i and task.paints)) for i in range(2)]
        lines = NeoPool.of(stage.tokenizer, task, examples, stage.device)
        noisy, times = no_targets(lines)
        if task.paints:
            noisy = torch.randn(2, task.num_targets, NUM_CELLS, CELL_VALUES)
            times = torch.rand(2, task.num_targets)
        out.append((examples, lines, make_batch(task, lines, noisy, times)))
    return out


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@torch.no_grad()
def test_training_pass_equals_the_engine(stage: NeoStage, engine: NeoUnify, driver: Driver) -> None:
    """Velocities of every target and logits of every word, for prefixes with and without system message."""
    cases = drawn(stage)
    context, checked = context_of(stage), 0
    for (examples, lines, batch), (logits, pixels) in zip(cases, stage.model([b for *_, b in cases]), strict=True):
        task = batch.task
        ours = velocity(pixels, batch.noisy, batch.times[..., None, None])
        for index, example in enumerate(examples):
            pictures = pictures_read(task, example)
            for target, stop in enumerate(batch.stops[index].tolist()):
                ids = line_ids(stage, batch.ids[index], bool(batch.system[index]), stop)
                with driver.open(passage_of(ids, context, pictures)) as reading:
                    driver.read(reading)
                    state, time = batch.noisy[index, target], batch.times[index, target]
                    theirs = driver.velocities({Branch.CONDITIONAL: reading}, state, GRID, time)[Branch.CONDITIONAL]
                assert difference(ours[index, target], theirs) < TOLERANCE, (task.name, index, target)
                checked += 1
            if logits is None:
                continue
            words = (lines.spoken[index].nonzero()[:, 0] - 1).tolist()  # the rows before them predict them
            with driver.open(passage_of(batch.ids[index].tolist(), context, pictures)) as reading:
                for row in words:
                    driver.read(reading, row + 1)
                    assert difference(logits[index, row], driver.next_logits(reading)) < TOLERANCE, (task.name, row)
                    checked += 1
    assert checked > 30
    assert painting_noise_scale(engine.config) == 2.0


@torch.no_grad()
def test_targets_and_padding_do_not_see_each_other(stage: NeoStage) -> None:
    """What stands behind a target's prefix, and the other targets, change nothing for it."""
    task = next(t for t in stage.options.tasks if t.name == "dialogue")
    _, lines, batch = next(case for case in drawn(stage) if case[2].task is task)
    before = stage.model([batch])[0][1][:, 0]
    batch.ids[0, lines.stops[0, 0] + NUM_CELLS + 2 :] = 17
    batch.noisy[:, 1:] += 1.0
    after = stage.model([batch])[0][1][:, 0]
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_pictures_are_read_as_the_engine_reads_them(stage: NeoStage) -> None:
    """Same pixels for questions; within one level of 255 for what is enlarged."""
    example = draw_neo_example(random.Random(1), "train", stage.options.tasks[0])
    image = picture(example.scenes[0])
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None, None] / 255
    for grid, bounds in ((GRID, PixelBounds(128 * 128, 1 << 22)), (REFERENCE_GRID, PixelBounds(512 * 512, 1 << 22))):
        expected = read_picture(image, bounds)
        assert expected.grid == grid
        ours = stage.model.read_cells(pixels, grid)[0, 0]
        assert (ours - expected.cells).abs().max() < (1e-5 if grid == GRID else 1.01 / 255 / 0.224)


def test_painted_cells_are_shown_as_they_are(stage: NeoStage) -> None:
    example = draw_neo_example(random.Random(2), "train", stage.options.tasks[0])
    image = picture(example.scenes[0]).convert("RGB")
    cells = to_cells(torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1)
    assert Image.fromarray(as_picture(cells), "RGBA").convert("RGB").tobytes() == image.tobytes()
