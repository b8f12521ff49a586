"""The same result however it is computed: chunked, reused, packed with others, or with another backend."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
import torch
from PIL import Image
from torch import Tensor

from neo_unify.cases import (
    CONFIG,
    TOLERANCE,
    VARIANTS,
    Golden,
    difference,
    generator,
    golden,
    make_driver,
    options_of,
    small_pictures,
)
from underpaint.attention import RowGroup, piecewise, reference
from underpaint.kv.pool import Run, View
from underpaint.layout import Grid, Layout
from underpaint.models.neo_unify import Passage, load
from underpaint.models.neo_unify.driver import Driver, Reading
from underpaint.models.neo_unify.flow import draw_noise, flow_times
from underpaint.models.neo_unify.prompt import paint_text, painting_branches
from underpaint.models.painter import Target
from underpaint.sampling.guidance import Branch

DrawImage = Callable[..., Image.Image]
CANVASES: tuple[tuple[Grid, float], ...] = (((2, 3), 0.0), ((1, 1), 0.1), ((4, 2), 0.7), ((3, 3), 0.1), ((1, 5), 0.99))


def borders(layout: Layout) -> list[int]:
    """Where a chunk may end."""
    inside = {row for image in layout.images for row in range(image.start + 1, image.stop)}
    return [row for row in range(1, layout.num_rows) if row not in inside]


def prefix(g: Golden, draw_image: DrawImage) -> Passage:
    """Text, two pictures, text, ending in ``<img>``; short enough to be read many times."""
    text = "<image> and\n<image><|im_end|>\n<|im_start|>assistant\nA red circle.<img>"
    return g.model.tokenizer.passage(text, small_pictures(draw_image))


def read_in_chunks(driver: Driver, passage: Passage, stops: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Keys and values of all layers, and the last hidden row."""
    with driver.open(passage) as reading:
        for stop in (*stops, passage.num_rows):
            driver.read(reading, stop)
        return contents(reading, driver)


def contents(reading: Reading, driver: Driver) -> tuple[list[Tensor], Tensor]:
    assert reading.last is not None
    layers = range(driver.model.cache_shape.num_layers)
    return [x for layer in layers for x in reading.view().read(layer)], reading.last


def assert_same(ours: tuple[list[Tensor], Tensor], theirs: tuple[list[Tensor], Tensor]) -> None:
    for a, b in zip([*ours[0], ours[1]], [*theirs[0], theirs[1]], strict=True):
        assert difference(a, b) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_defect_b_prefill_chunked_at_every_border(variant: str, draw_image: DrawImage) -> None:
    g = golden(variant)
    driver, _ = make_driver(g.model)
    passage = prefix(g, draw_image)
    whole = read_in_chunks(driver, passage, ())
    stops = borders(passage.layout)
    for stop in stops:
        assert_same(read_in_chunks(driver, passage, (stop,)), whole)
    assert_same(read_in_chunks(driver, passage, stops), whole)


def test_defect_b_a_chunk_never_cuts_a_picture(draw_image: DrawImage) -> None:
    g = golden("dense")
    driver, pool = make_driver(g.model)
    passage = prefix(g, draw_image)
    with driver.open(passage) as reading, pytest.raises(AssertionError, match="cut an image"):
        driver.read(reading, passage.layout.images[0].start + 1)
    assert pool.num_free == pool.num_pages


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_reused_prefix_equals_a_fresh_one(variant: str, draw_image: DrawImage) -> None:
    """Two passages with the same pictures have the same keys, and the second reads the pages of the first."""
    g = golden(variant)
    driver, pool = make_driver(g.model)
    pictures = small_pictures(draw_image)
    first, second = (g.model.tokenizer.passage(f"<image>, <image>{text}", pictures) for text in (" one", " two<img>"))
    assert g.model.condition(first).units == g.model.condition(second).units
    with ExitStack() as stack:
        trunk = read_trunk(driver, first, stack)
        reading = stack.enter_context(driver.open(second, trunk))
        driver.read(reading)
        assert_same(contents(reading, driver), read_in_chunks(driver, second, ()))
    assert pool.num_free == pool.num_pages


def read_trunk(driver: Driver, passage: Passage, stack: ExitStack) -> tuple[Run, ...]:
    """A run of pages for each trunk unit."""
    runs: tuple[Run, ...] = ()
    for unit in passage.layout.trunk_units():
        reading = stack.enter_context(driver.open(passage, runs))
        driver.read(reading, unit.stop)
        runs = reading.view().runs
    return runs


def test_u41_keys_name_the_pixels_of_a_picture(draw_image: DrawImage) -> None:
    g = golden("dense")
    first, second = small_pictures(draw_image)
    other = replace(first, content=b"other pixels")
    passages = [g.model.tokenizer.passage("<image>, <image>?", pair) for pair in ((first, second), (other, second))]
    ours, theirs = (g.model.condition(passage).units for passage in passages)
    assert ours[0] != theirs[0]
    assert ours[1] != theirs[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_u30_backends_agree(variant: str) -> None:
    g = golden(variant)
    case = g.cases["it2i_one"]
    options = options_of(case)
    painted = []
    for backend in (piecewise, reference):
        driver, _ = make_driver(g.model, backend)
        with driver.prefill(g.passages(case), options.sampler.every_branch) as readings:
            painted.append(driver.paint(readings, options, generator(case["seed"])))
    assert difference(*painted) < TOLERANCE


@dataclass(frozen=True, eq=False)
class Canvas:
    """A picture being painted behind a prefix."""

    reading: Reading
    state: Tensor
    grid: Grid
    time: float


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_u12_u31_u34_u44_defect_q_eight_unlike_requests_in_one_pass(variant: str, draw_image: DrawImage) -> None:
    """Prompts being read beside pictures of other sizes, times and prefixes being painted: as if each were alone."""
    g = golden(variant)
    driver, _ = make_driver(g.model)
    tokenizer = g.model.tokenizer
    texts = [tokenizer.passage(text) for text in ("a blue square", "no", paint_text("a red circle", 0, think=False))]
    prefixes = [prefix(g, draw_image), *painting_branches(tokenizer, "a green star", []).values()]
    with ExitStack() as stack:
        canvases = []
        for i, (grid, time) in enumerate(CANVASES):
            reading = stack.enter_context(driver.open(prefixes[i % len(prefixes)]))
            driver.read(reading)
            canvases.append(Canvas(reading, draw_noise(generator(i), grid, 1.0, torch.float32), grid, time))
        together = run_pass(g, texts, canvases)
        alone = [run_pass(g, [text], [])[0] for text in texts] + [run_pass(g, [], [canvas])[0] for canvas in canvases]
    assert len(together) == 8
    for ours, theirs in zip(together, alone, strict=True):
        assert difference(ours, theirs) < TOLERANCE


def run_pass(g: Golden, texts: Sequence[Passage], canvases: Sequence[Canvas]) -> list[Tensor]:
    """One pass over everything: keys and values in all layers of each text, the velocity of each picture."""
    nothing = View(make_driver(g.model)[1], ())
    sequences = [(text.layout, nothing) for text in texts]
    sequences += [(c.reading.passage.layout.with_image(c.grid), c.reading.view()) for c in canvases]
    groups: list[RowGroup] = []
    for layout, prefix_view in sequences:
        first = sum(group.num_rows for group in groups)
        groups.append(RowGroup.of(layout, layout.num_rows, first, prefix_view, "cpu"))
    kept: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append(torch.stack([k, v], dim=1))
        return piecewise(q, k, v, tuple(groups), layer)

    rows = [g.model.embed(text, 0, text.num_rows) for text in texts]
    rotary = torch.cat([g.model.rotary(layout, view.num_rows, layout.num_rows) for layout, view in sequences])
    targets = [Target(c.state, c.grid, torch.tensor(c.time)) for c in canvases]
    velocities = g.model.run(torch.cat(rows) if rows else torch.empty(0), targets, rotary, attend)
    of_texts = [torch.stack(kept)[:, group.rows] for group in groups[: len(texts)]]
    return [*of_texts, *velocities]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_prefix_decides_the_picture(variant: str) -> None:
    """The weights are loud: a comparison that passed with a zeroed prefix would prove nothing."""
    g = golden(variant)
    case = g.cases["it2i_one"]
    options = options_of(case)
    driver, pool = make_driver(g.model)
    noise = draw_noise(generator(0), options.grid, 1.0, torch.float32)
    time = flow_times(4, 3.0)[1]
    with driver.prefill(g.passages(case), (Branch.CONDITIONAL,)) as readings:
        before = driver.velocities(readings, noise, options.grid, time)[Branch.CONDITIONAL]
        slots = pool.slots(readings[Branch.CONDITIONAL].view().runs)
        for layer in range(g.model.cache_shape.num_layers):
            k, v = pool.read(layer, slots)
            pool.write(layer, slots, k * 0, v * 0)
        after = driver.velocities(readings, noise, options.grid, time)[Branch.CONDITIONAL]
    assert difference(after, before) > 0.05


@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision(variant: str) -> None:
    """bf16 weights and activations, with a state in bf16 or in fp32: near fp32, and in the state's own dtype."""
    g = golden(variant)
    case = g.cases["it2i_one"]
    options = options_of(case)
    half = load(g.root, replace(CONFIG, dtype="bfloat16", kv_codec="bf16"))
    noise = draw_noise(generator(0), options.grid, 1.0, torch.float32)
    velocities = []
    for model, dtype in ((g.model, torch.float32), (half, torch.bfloat16), (half, torch.float32)):
        driver, _ = make_driver(model)
        with driver.prefill(g.passages(case), (Branch.CONDITIONAL,)) as readings:
            of_branch = driver.velocities(readings, noise.to(dtype), options.grid, torch.tensor(0.1))
        assert of_branch[Branch.CONDITIONAL].dtype == dtype
        velocities.append(of_branch[Branch.CONDITIONAL].float())
    # Over all values, for rounding sends a row or two to other experts.
    for velocity in velocities[1:]:
        assert 0 < (velocity - velocities[0]).norm() / velocities[0].norm() < 0.05
