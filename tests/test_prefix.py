"""The prefix cache changes nothing but the work: cached equals uncached, shared equals fresh, 1e-5."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_attention import Tensors
from test_parity import TOLERANCE, difference, paint, references
from torch import Tensor

from underpaint import Pipeline
from underpaint.attention import RowGroup, reference
from underpaint.bench.contenders import Ours
from underpaint.bench.scenes import make_stage
from underpaint.config import EngineConfig, resolve
from underpaint.errors import OutOfMemory, OutOfPages
from underpaint.generation import prefix
from underpaint.generation.job import draw_noise
from underpaint.kv.pool import pages_for
from underpaint.models.qwen_image21.transformer import round_timestep
from underpaint.sampling.guidance import Branch, PlainGuidance
from underpaint.sampling.schedule import euler_step

DrawImage = Callable[..., Image.Image]
OPTIONS: dict[str, Any] = {"reference_resolution": 96, "width": 64, "height": 96}
GUIDED: dict[str, Any] = {"negative_prompt": "blurred", "true_cfg_scale": 3.0}
STEPS = 4


def uncached(ours: Pipeline, prompt: str, images: list[Image.Image], seed: int, cfg_scale: float = 1.0) -> Tensor:
    """Plain sampling without any cache: the whole sequence through dense attention at every step and branch."""
    model = ours.service.qwen
    prompts = [prompt, "blurred"] if cfg_scale > 1 else [prompt]
    refs = [model.reference(image.convert("RGBA"), OPTIONS["reference_resolution"]) for image in images]
    grid = model.image_codec.grid(OPTIONS["width"], OPTIONS["height"])
    sigmas = model.schedule_rule.schedule(grid[0] * grid[1], STEPS).sigmas
    conditions = [model.condition(p, refs) for p in prompts]
    branches = (Branch.CONDITIONAL, Branch.UNCONDITIONAL)
    latents = draw_noise(seed, model.image_codec.num_channels, grid, torch.float32)
    for sigma, next_sigma in pairwise(sigmas):
        velocities = [joint_velocity(ours, condition, latents, grid, sigma) for condition in conditions]
        velocity = PlainGuidance(cfg_scale).combine(dict(zip(branches, velocities, strict=False)), float(sigma), 0)
        latents = euler_step(latents, velocity, sigma, next_sigma)
    return latents[None]


@torch.inference_mode()
def joint_velocity(ours: Pipeline, condition: Any, latents: Tensor, grid: tuple[int, int], sigma: Tensor) -> Tensor:
    model = ours.service.qwen
    layout = condition.layout.with_image(grid)
    n = layout.num_rows
    rows = torch.cat([model.embed_prefix(condition, 0, n - len(latents)), model.transformer.img_in(latents)])
    config = model.checkpoint.transformer
    nothing = torch.empty(0, config.num_attention_heads, config.attention_head_dim)
    group = RowGroup.of(layout, n, 0, Tensors(nothing, nothing), "cpu")
    timestep_of = (torch.arange(n) < n - len(latents)).long()  # 0: the step's, 1: t = 0
    velocity = model.transformer(
        rows,
        model.rotary(layout, 0, n),
        round_timestep(sigma[None], torch.float32),
        timestep_of,
        lambda layer, q, k, v: reference(q, k, v, (group,), layer),
    )
    return velocity[n - len(latents) :]


@pytest.mark.parametrize("num", [0, 1, 3])
@pytest.mark.parametrize("cfg_scale", [1.0, 3.0])
def test_cached_equals_uncached(ours: Pipeline, draw_image: DrawImage, num: int, cfg_scale: float, seed: int) -> None:
    images = references(draw_image, num)
    guided: dict[str, Any] = GUIDED if cfg_scale > 1 else {}
    got = paint(ours, "Put the cat", images, seed, num_inference_steps=STEPS, **OPTIONS, **guided)
    assert difference(got, uncached(ours, "Put the cat", images, seed, cfg_scale)) < TOLERANCE


@pytest.mark.parametrize("backend", ["reference", "piecewise"])
def test_shared_trunk_equals_fresh_trunk(checkpoint: Path, draw_image: DrawImage, backend: str, seed: int) -> None:
    """Another prompt, target size and guidance over a trunk in the cache: as in a pipeline that never saw it."""

    def make() -> Pipeline:
        return Pipeline.from_pretrained(checkpoint, kv_cache_bytes=64 << 20, attention_backend=backend)

    images = references(draw_image, 3)
    reused = make()
    paint(reused, "A red teapot", images, seed, **OPTIONS)
    calls: list[dict[str, Any]] = [
        {"prompt": "Put the cat from image 1 into image 2.", **OPTIONS},
        {"prompt": "A red teapot", **OPTIONS, "width": 128, "height": 32},
        {"prompt": "A red teapot", **OPTIONS, **GUIDED},
        {"prompt": "A red teapot", **OPTIONS, "num_images": 2},
    ]
    for call in calls:
        got = paint(reused, images=images, seed=seed, **call)
        assert difference(got, paint(make(), images=images, seed=seed, **call)) < TOLERANCE


def test_branches_images_and_requests_share_the_trunk(ours: Pipeline, draw_image: DrawImage, seed: int) -> None:
    images = references(draw_image, 2)
    run: dict[str, Any] = {"num_inference_steps": 1, **OPTIONS}
    first = ours("Put the cat", images, seed=seed, num_images=3, **GUIDED, **run)
    condition = ours.service.qwen.condition(
        "Put the cat", [ours.service.qwen.reference(i.convert("RGBA"), 96) for i in images]
    )
    trunk = condition.layout.trunk_stop
    prompt = condition.layout.num_rows - trunk
    negative = first.stats.rows_prefilled - trunk - prompt
    assert 0 < negative < 20, "two branches and three images prefill the trunk once and each prompt once"
    assert first.stats.rows_reused == trunk
    second = ours("A teapot", images, seed=seed, **run)
    assert second.stats.rows_prefilled < 30
    assert second.stats.rows_reused == trunk
    third = ours("A teapot", images[:1], seed=seed, **run)
    assert third.stats.rows_reused == condition.layout.trunk_units()[0].stop, "A+B and A share A"
    assert (ours.service.tree.hits, ours.service.tree.misses) == (2 + 1, 2)


def test_only_trunks_stay_in_pages(ours: Pipeline, draw_image: DrawImage, seed: int) -> None:
    images = references(draw_image, 2)
    ours("Put the cat", images, seed=seed, num_inference_steps=1, num_images=2, **GUIDED, **OPTIONS)
    assert ours.service.pool.used_bytes == ours.service.tree.used_bytes
    ours.service.tree.clear()
    assert ours.service.pool.used_bytes == 0


def test_a_small_budget_evicts_and_paints_the_same(checkpoint: Path, draw_image: DrawImage, seed: int) -> None:
    """Room for one request at a time: every other picture evicts, none changes."""
    one_page = Pipeline.from_pretrained(checkpoint).service.pool.page_bytes
    large = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=64 << 20)
    small = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=2 * one_page)
    images = references(draw_image, 4)
    for image in [*images, *images[::-1]]:
        got = paint(small, "Put the cat", [image], seed, num_inference_steps=2, **OPTIONS)
        want = paint(large, "Put the cat", [image], seed, num_inference_steps=2, **OPTIONS)
        assert difference(got, want) < TOLERANCE
    assert small.service.tree.evictions >= 5
    assert large.service.tree.evictions == 0


@pytest.mark.parametrize("codec", ["bf16", "fp8_v", "fp8", "fp8_tiles"])
def test_a_rounding_codec_paints_the_same_with_and_without_reuse(
    checkpoint: Path, draw_image: DrawImage, codec: str, seed: int
) -> None:
    """Rows read earlier units as they are stored, so a cache hit changes nothing even where storing rounds."""

    def make() -> Pipeline:
        return Pipeline.from_pretrained(checkpoint, kv_cache_bytes=64 << 20, kv_codec=codec)

    images = references(draw_image, 3)
    reused = make()
    paint(reused, "A red teapot", images[:2], seed, **OPTIONS)
    got = paint(reused, "Put the cat", images, seed, **OPTIONS)
    assert reused.service.tree.hits == 2
    want = paint(make(), "Put the cat", images, seed, **OPTIONS)
    exact = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=64 << 20)
    assert difference(got, want) < TOLERANCE
    assert difference(got, paint(exact, "Put the cat", images, seed, **OPTIONS)) > TOLERANCE, "the codec was not used"


def test_pages_needed_are_pages_taken(ours: Pipeline, draw_image: DrawImage) -> None:
    refs = [ours.service.qwen.reference(image.convert("RGBA"), 96) for image in references(draw_image, 3)]
    conditions = [ours.service.qwen.condition(prompt, refs) for prompt in ("Put the cat", "blurred")]
    units = conditions[0].layout.trunk_units()
    pages = sum(pages_for(unit.stop - unit.start, ours.service.pool.page_rows) for unit in units) + 2
    assert ours.service.prefixes.bytes_needed(conditions) == pages * ours.service.pool.page_bytes
    with ours.service.prefixes.lease(conditions):
        assert ours.service.pool.used_bytes == ours.service.prefixes.bytes_needed(conditions)


def test_a_lease_that_fails_gives_everything_back(
    ours: Pipeline, draw_image: DrawImage, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whichever prefill pass breaks, no page stays taken outside the tree, and the next call is right."""
    images = references(draw_image, 2)
    want = paint(ours, "Put the cat", images, seed, **OPTIONS)
    for broken_pass in range(3):
        ours.service.tree.clear()
        run, passes = ours.service.runner.run, iter(range(10))

        def breaks(chunks: Any, targets: Any, broken: int = broken_pass, go_on: Any = run, count: Any = passes) -> Any:
            if next(count) == broken:
                raise torch.OutOfMemoryError("no memory left")
            return go_on(chunks, targets)

        with monkeypatch.context() as patch:
            patch.setattr(ours.service.runner, "run", breaks)
            with pytest.raises(OutOfMemory):
                paint(ours, "Put the cat", images, seed, **OPTIONS)
        assert ours.service.pool.used_bytes == ours.service.tree.used_bytes
        assert not any(node.users for node in ours.service.tree)
        assert difference(paint(ours, "Put the cat", images, seed, **OPTIONS), want) < TOLERANCE


def test_pages_in_use_are_never_taken_away(checkpoint: Path, draw_image: DrawImage) -> None:
    """While a lease holds the pool, another request that would fit alone is told to wait, not given its pages."""
    one_page = Pipeline.from_pretrained(checkpoint).service.pool.page_bytes
    ours = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=2 * one_page)
    first, second = references(draw_image, 2)
    model = ours.service.qwen
    held = model.condition("a", [model.reference(first.convert("RGBA"), 96)])
    other = model.condition("a", [model.reference(second.convert("RGBA"), 96)])
    with ours.service.prefixes.lease([held]) as (view,):
        before = [x.clone() for x in view.read(0)]
        with pytest.raises(OutOfPages), ours.service.prefixes.lease([other]):
            pass
        assert all(torch.equal(x, y) for x, y in zip(view.read(0), before, strict=True))
    with ours.service.prefixes.lease([other]):
        pass


@pytest.mark.parametrize(("short_rows", "together"), [(prefix.SHORT_ROWS, True), (255, False)])
def test_short_units_of_branches_are_read_in_one_pass(
    monkeypatch: pytest.MonkeyPatch, short_rows: int, together: bool
) -> None:
    """Two prompts of 300 rows, of which 2 x 128 are units, and no rows in common."""
    monkeypatch.setattr(prefix, "SHORT_ROWS", short_rows)
    config = resolve(EngineConfig(device="cpu"))
    stage = make_stage("neo", config, True, 0)
    conditions = stage.prefixes(2, 0, 0, 300)
    assert [len(condition.units) for condition in conditions] == [2, 2]
    ours = Ours(stage, config)
    ours.open(conditions, 0)
    assert ours.easel
    lease, passes = ours.easel.prefixes.open(conditions), 0
    while not lease.ready:
        ours.easel.runner.run(lease.next_chunks(), ())
        lease.commit()
        passes += 1
    assert passes == (3 if together else 5)
    assert lease.rows_prefilled == 600
    lease.close()
    assert ours.easel.prefixes.tree.available_pages == ours.easel.prefixes.tree.pool.num_pages
