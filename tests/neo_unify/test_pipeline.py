"""SenseNova-U1 through the public API: the golden pixels, chunked, shared, batched, and every refusal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from neo_unify.cases import ROOT, TOLERANCE, VARIANTS, cases_of, difference, golden
from underpaint import Pipeline, Progress
from underpaint.errors import BadParameter, BadSize, BudgetTooSmall
from underpaint.models.neo_unify import Passage
from underpaint.understanding.reply import Reply

DrawImage = Callable[..., Image.Image]


def make(variant: str, **options: Any) -> Pipeline:
    return Pipeline.from_pretrained(ROOT / variant, **{"kv_cache_bytes": 64 << 20, **options})


def rows_read(pipeline: Pipeline) -> int:
    assert pipeline.service.understanding is not None
    return pipeline.service.understanding.rows_read


def paint(pipeline: Pipeline, variant: str, case: dict[str, Any], **options: Any) -> Tensor:
    """The raw pixels (3, height, width) of a golden case."""
    width, height = case["image_size"]
    images = [golden(variant).image(name) for name in case.get("images", [])]
    call: dict[str, Any] = {
        "width": width, "height": height, "seed": case["seed"], "num_inference_steps": case["num_steps"],
        "guidance_scale": case["cfg_scale"], "cfg_norm": case["cfg_norm"], "timestep_shift": case["timestep_shift"],
        "output_type": "latent",
    }  # fmt: skip
    if images:
        call["image_guidance_scale"] = case["img_cfg_scale"]
    if "cfg_interval" in case:
        call["cfg_interval"] = tuple(case["cfg_interval"])
    if case.get("think_mode"):
        call |= {"think": True, "max_think_tokens": case["max_think_tokens"]}
    painting = pipeline(case["prompt"], images, **{**call, **options})
    return painting.images[0]


@pytest.mark.parametrize(("variant", "name"), cases_of(("t2i", "it2i")))
def test_golden_pixels(variant: str, name: str) -> None:
    g, pipeline = golden(variant), make(variant)
    got = paint(pipeline, variant, g.cases[name])
    assert difference(got, g.tensors[f"{name}/image"][0]) < TOLERANCE
    pool, tree = pipeline.service.pool, pipeline.service.tree
    assert pool.used_bytes == tree.used_bytes
    assert tree.promised_pages == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_u11_only_the_branches_that_are_needed_are_read(variant: str) -> None:
    """One branch without guidance, two with, three with pictures' own scale; an interval that no step meets: one."""
    g = golden(variant)
    rows = {}
    for name in ("t2i_none_1", "t2i_none_4", "it2i_two", "it2i_two_imgcfg"):
        if name in g.cases:
            pipeline = make(variant)
            paint(pipeline, variant, g.cases[name])
            rows[name] = rows_read(pipeline)
    conditional = rows["t2i_none_1"]
    assert conditional < rows["t2i_none_4"] < conditional + 15
    pipeline = make(variant)
    paint(pipeline, variant, g.cases["t2i_none_4"], cfg_interval=(0.999, 1.0))
    assert rows_read(pipeline) == conditional


def test_a_second_painting_reads_only_its_prompt() -> None:
    """The system message is found in pages; so are the pictures of a second edit."""
    g, pipeline = golden("dense"), make("dense")
    case = g.cases["it2i_two"]
    paint(pipeline, "dense", case)
    before = rows_read(pipeline)
    got = paint(pipeline, "dense", {**case, "prompt": "remove the circle"})
    assert rows_read(pipeline) - before < 2 * 128
    assert difference(got, paint(make("dense"), "dense", {**case, "prompt": "remove the circle"})) < TOLERANCE


def test_u35_prompts_and_pictures_in_one_batch_equal_each_alone(seed: int) -> None:
    pipeline = make("dense")
    options: dict[str, Any] = {
        "width": 96, "height": 64, "num_inference_steps": 3, "output_type": "latent", "guidance_scale": 3.0,
    }  # fmt: skip
    prompts = ["a red circle", "two blue squares left of a cross"]
    together = pipeline(prompts, seed=seed, num_images=2, **options)
    for i, pixels in enumerate(together.images):
        alone = pipeline(prompts[i // 2], seed=together.seeds[i], **options).images[0]
        assert difference(pixels, alone) < TOLERANCE


def test_what_a_painting_reads_is_not_taken_out_of_the_tree(seed: int) -> None:
    """Its pages would not become free by that, and the next painting would read and store them again. Whoever needs
    more than is free waits until it is done."""
    page_bytes = make("dense").service.pool.page_bytes
    ours = make("dense", kv_cache_bytes=8 * page_bytes)
    service = ours.service
    tokens = service.neo.tokenizer.tokenize("how many shapes are there? ") * 200
    large = Reply(Passage((tokens[: 6 * service.pool.page_rows],)))
    seen: list[tuple[int, int]] = []

    def submit(progress: Progress) -> None:
        if progress.step == 1:
            service.submit_reply(large)
        seen.append((service.tree.available_pages - service.pool.num_free, service.tree.evictions))

    options: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 4, "guidance_scale": 3.0}
    first = ours("a red circle", seed=seed, callback=submit, **options)
    assert seen[:3] == [(0, 0)] * 3
    service.drop_reply(large)
    second = ours("a red circle", seed=seed, **options)
    assert second.stats.rows_prefilled < first.stats.rows_prefilled
    assert second.stats.rows_reused > 0


def test_outputs_and_sizes(draw_image: DrawImage, seed: int) -> None:
    pipeline = make("pixelhead")
    options: dict[str, Any] = {"num_inference_steps": 1, "seed": seed}
    picture = pipeline("a", width=64, height=96, **options).images[0]
    assert (picture.mode, picture.size) == ("RGB", (64, 96))
    tensor = pipeline("a", width=64, height=96, output_type="pt", **options).images[0]
    raw = pipeline("a", width=64, height=96, output_type="latent", **options).images[0]
    assert torch.equal(tensor, (raw * 0.5 + 0.5).clamp(0, 1))
    assert tensor.shape == (3, 96, 64)


def test_latents_go_in_as_they_come_out(seed: int) -> None:
    pipeline = make("dense")
    options: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 2, "output_type": "latent"}
    noise = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(seed))
    first = pipeline("a", latents=noise, seed=1, **options).images[0]
    assert torch.equal(first, pipeline("a", latents=noise[None], seed=2, **options).images[0])


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"negative_prompt": ""}, BadParameter, "negative_prompt is not a parameter of SenseNova-U1"),
        ({"true_cfg_scale": 1.0}, BadParameter, "true_cfg_scale is not a parameter"),
        ({"sigmas": [1.0]}, BadParameter, "sigmas is not a parameter"),
        ({"reference_resolution": 64}, BadParameter, "reference_resolution is not a parameter"),
        ({"image_guidance_scale": 2.0}, BadParameter, "a painting without references"),
        ({"guidance_scale": float("nan")}, BadParameter, "guidance_scale must be a number"),
        ({"cfg_norm": "max"}, BadParameter, "cfg_norm is 'max'"),
        ({"cfg_interval": (0.5, 0.1)}, BadParameter, "the lower first"),
        ({"cfg_interval": 0.5}, BadParameter, "must be two times"),
        ({"timestep_shift": 0}, BadParameter, "above 0"),
        ({"max_think_tokens": 5}, BadParameter, "no effect without think"),
        ({"think": 1}, BadParameter, "True or False"),
        ({"think": True, "max_think_tokens": 0}, BadParameter, "at least 1"),
        ({"width": 100}, BadSize, "the nearest is 96 or 128"),
        ({"latents": torch.zeros(3, 32, 32)}, BadParameter, "latents has shape"),
        ({"images": [Image.new("RGB", (32, 32))] * 11}, BadParameter, "the limit is 10"),
    ],
)
def test_refused(options: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    pipeline = make("dense")
    with pytest.raises(kind, match=sentence):
        pipeline(**{"prompt": "a", "width": 64, "height": 64, **options})
    assert pipeline.service.pool.used_bytes == 0


def test_qwen_parameters_are_refused_by_name(ours: Pipeline) -> None:
    with pytest.raises(BadParameter, match=r"guidance_scale is not a parameter of Qwen-Image 2\.1"):
        ours("a", guidance_scale=4.0)


def test_budget_too_small_says_how_many_bytes() -> None:
    pipeline = make("dense", kv_cache_bytes=1)
    with pytest.raises(BudgetTooSmall, match="this request needs"):
        pipeline("a", width=64, height=64)


def test_branches_that_never_fit_together_are_refused() -> None:
    """Each would fit alone; they must not wait for each other's pages for ever."""
    pool = make("dense").service.pool
    for num_pages in range(4, 40):
        pipeline = make("dense", kv_cache_bytes=num_pages * pool.page_bytes)
        try:
            pipeline("a", width=64, height=64, num_inference_steps=1)
        except BudgetTooSmall:
            assert pipeline.service.pool.used_bytes == pipeline.service.tree.used_bytes
            continue
        assert num_pages > 4
        return
    raise AssertionError("it never fitted")


def test_a_bar_that_cannot_be_shown_leaves_nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branches are in pages by then, and nobody would ever turn the order again."""
    pipeline = make("dense")

    def broken(**_: Any) -> Any:
        raise OSError("the terminal is gone")

    monkeypatch.setattr("underpaint.pipeline.tqdm", broken)
    with pytest.raises(OSError, match="the terminal is gone"):
        pipeline("a", width=64, height=64, num_inference_steps=1)
    assert pipeline.service.generation.idle
    assert pipeline.service.pool.used_bytes == pipeline.service.tree.used_bytes
