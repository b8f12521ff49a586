"""Public failures of engines like ours, made impossible: one test a case, named after it."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from diffusers import QwenImage21Pipeline
from PIL import Image
from test_parity import GUIDED, TOLERANCE, difference, paint, references
from torch import Tensor

from underpaint import Cancelled, Pipeline, Progress
from underpaint.errors import BadParameter, EngineFailure, MissingBranch, OutOfMemory, PromptTooLong
from underpaint.generation.job import Job, Order, draw_noise
from underpaint.generation.runner import Chunk, PlacedTarget
from underpaint.images import on_white
from underpaint.layout import Layout, qwen_positions
from underpaint.models.qwen_image21 import Condition
from underpaint.models.qwen_image21.encoder import IMAGE_PAD, SYSTEM_TURN, prompt_text
from underpaint.models.qwen_image21.transformer import rotary_table
from underpaint.sampling.guidance import Branch, PlainGuidance
from underpaint.sampling.schedule import EulerSampler

DrawImage = Callable[..., Image.Image]
OPTIONS: dict[str, Any] = {"reference_resolution": 64, "width": 64, "height": 64}


def make_conditions(ours: Pipeline, images: list[Image.Image], prompts: list[str]) -> list[Condition]:
    refs = [ours.service.qwen.reference(image.convert("RGBA"), 64) for image in images]
    return [ours.service.qwen.condition(prompt, refs) for prompt in prompts]


def test_q1_equal_shape_requests_share_no_storage(ours: Pipeline, draw_image: DrawImage) -> None:
    """Two live requests of equal shape: the second writes nothing that the first reads."""
    first, second = (make_conditions(ours, [draw_image(64, 64)], ["Put the cat"]) for _ in range(2))
    with ours.service.prefixes.lease(first) as (view,):
        before = [view.read(layer) for layer in range(3)]
        with ours.service.prefixes.lease(second) as (other,):
            assert not {p for r in view.runs for p in r.pages} & {p for r in other.runs for p in r.pages}
        for layer in range(3):
            assert all(torch.equal(a, b) for a, b in zip(view.read(layer), before[layer], strict=True))


def make_order(ours: Pipeline, condition: Condition, negative: Condition, index: int, seed: int) -> Order:
    """The index decides the size, the schedule, and whether it is guided: every order is unlike the others. Guided a
    little: a scale of 3 multiplies what rounding differs between passes of other rows by five a step."""
    grid = (2 + 2 * index, 4)
    sampler = EulerSampler(
        ours.service.qwen.schedule_rule.schedule(grid[0] * grid[1], 3 + index), PlainGuidance(index % 2 * 1.5)
    )
    conditions = {Branch.CONDITIONAL: 0, Branch.UNCONDITIONAL: 1} if index % 2 else {Branch.CONDITIONAL: 0}
    job = Job(draw_noise(seed + index, tiny.LATENT_CHANNELS, grid, torch.float32), grid, sampler, conditions)
    return Order((condition, negative)[: len(conditions)], (job,))


def finish(ours: Pipeline, *orders: Order) -> None:
    while not all(order.ended for order in orders):
        ours.service.generation.turn()


def test_q3_q25_unlike_layouts_go_in_one_pass(
    ours: Pipeline, draw_image: DrawImage, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Text-to-image and edits of different sizes and numbers of references together equal each alone."""
    negative = make_conditions(ours, [], ["blurred"])[0]
    conditions = [
        *make_conditions(ours, [], ["A red teapot"]),
        *make_conditions(ours, references(draw_image, 1), ["Put the cat"]),
        *make_conditions(ours, references(draw_image, 3), ["Put the cat from image 1 into image 2."]),
        *make_conditions(ours, references(draw_image, 2), ["cat"]),
    ]
    together, alone = ([make_order(ours, c, negative, i, seed) for i, c in enumerate(conditions)] for _ in range(2))
    for order in alone:
        ours.service.generation.submit(order)
        finish(ours, order)
    ours.service.tree.clear()
    passes: list[tuple[int, int]] = []
    run = ours.service.runner.run

    def count(chunks: Any, targets: Any) -> Any:
        passes.append((len(chunks), len(targets)))
        return run(chunks, targets)

    monkeypatch.setattr(ours.service.runner, "run", count)
    for order in together:
        ours.service.generation.submit(order)
    finish(ours, *together)
    assert any(chunks and targets for chunks, targets in passes), "prefill beside steps"
    assert max(targets for _, targets in passes) >= 4
    for a, b in zip(together, alone, strict=True):
        assert difference(a.jobs[0].state, b.jobs[0].state) < TOLERANCE


class TritonError(Exception):
    """As Triton's own, which cannot be imported everywhere."""


@pytest.mark.parametrize("failure", [RuntimeError, KeyError, AssertionError, OSError, MemoryError, TritonError])
def test_q3_a_bad_request_fails_alone(
    ours: Pipeline, monkeypatch: pytest.MonkeyPatch, failure: type[Exception], seed: int
) -> None:
    """A job whose step breaks, and one that lacks a branch, end with their error; the others paint on, unchanged."""
    conditions = make_conditions(ours, [], ["A red teapot", "Put the cat", "cat", "blurred"])
    good, breaks, lacks, alone = (
        make_order(ours, conditions[i], conditions[3], n, seed) for i, n in ((0, 1), (1, 2), (2, 3), (0, 1))
    )
    lacks.jobs[0].conditions = {Branch.CONDITIONAL: 0}
    ours.service.generation.submit(alone)
    finish(ours, alone)
    run = ours.service.runner.run

    def fail(chunks: Any, targets: Any) -> Any:
        if any(placed.target.grid == breaks.jobs[0].grid for placed in targets):
            raise failure("the device is on fire")
        return run(chunks, targets)

    monkeypatch.setattr(ours.service.runner, "run", fail)
    for order in (good, breaks, lacks):
        ours.service.generation.submit(order)
    finish(ours, good, breaks, lacks)
    assert good.error is None
    assert difference(good.jobs[0].state, alone.jobs[0].state) < TOLERANCE
    assert isinstance(breaks.error, EngineFailure)
    assert "the device is on fire" in str(breaks.error)
    assert isinstance(lacks.error, MissingBranch)
    assert ours.service.generation.idle
    assert ours.service.pool.used_bytes == ours.service.tree.promised_pages == 0


@pytest.mark.parametrize("num_images", [2, 3])
def test_s13_a_request_of_several_pictures_that_breaks_is_told_why(
    ours: Pipeline, monkeypatch: pytest.MonkeyPatch, num_images: int, seed: int
) -> None:
    """Each is tried alone, and the first that breaks then ends the order of all; whoever turns hears nothing of it."""
    options: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 2, "seed": seed}
    run = ours.service.runner.run

    def fail(chunks: Any, targets: Any) -> Any:
        if targets:
            raise torch.OutOfMemoryError("no memory left")
        return run(chunks, targets)

    with monkeypatch.context() as patch:
        patch.setattr(ours.service.runner, "run", fail)
        with pytest.raises(OutOfMemory):
            ours("A red teapot", num_images=num_images, **options)
    assert ours.service.generation.idle
    assert ours.service.tree.promised_pages == 0
    assert len(ours("A red teapot", num_images=num_images, **options).images) == num_images


def test_q4_a_late_request_joins_at_the_next_step(ours: Pipeline, seed: int) -> None:
    """It enters a batch that is under way, at another noise level, and equals itself alone."""
    conditions = make_conditions(ours, [], ["A red teapot", "Put the cat"])
    early, late, *alone = (make_order(ours, conditions[i % 2], conditions[0], 5 + i % 2, seed) for i in range(4))
    ours.service.generation.submit(early)
    for _ in range(3):
        ours.service.generation.turn()
    assert early.step == 2
    ours.service.generation.submit(late)
    ours.service.generation.turn()
    assert (early.step, late.prefilled is not None) == (3, True), "its prefill went beside the step"
    ours.service.generation.turn()
    assert (early.step, late.step) == (4, 1)
    finish(ours, early, late)
    for order, single in zip((early, late), alone, strict=True):
        ours.service.generation.submit(single)
        finish(ours, single)
        assert difference(order.jobs[0].state, single.jobs[0].state) < TOLERANCE


def test_q5_zero_guidance_stays_zero_and_arrays_are_images(
    ours: Pipeline, theirs: QwenImage21Pipeline, draw_image: DrawImage, seed: int
) -> None:
    picture = draw_image(64, 64)
    zero = paint(ours, "Put the cat", [picture], seed, true_cfg_scale=0, negative_prompt="blurred", **OPTIONS)
    arrays: Any = [np.asarray(picture)]
    plain = paint(ours, "Put the cat", arrays, seed, **OPTIONS)
    assert torch.equal(zero, plain)
    result = theirs(
        prompt="Put the cat", image=arrays, negative_prompt="blurred", true_cfg_scale=0, output_resolution=64,
        width=64, height=64, num_inference_steps=4, generator=torch.Generator().manual_seed(seed), output_type="latent",
    )  # fmt: skip
    assert difference(zero, result.images) < TOLERANCE


def test_q5_the_cache_holds_the_prefix_only(ours: Pipeline, draw_image: DrawImage) -> None:
    """The bytes of a lease are the pages of its rows, whatever went through the prefill pass beside them."""
    conditions = make_conditions(ours, references(draw_image, 2), ["Put the cat"])
    with ours.service.prefixes.lease(conditions) as (view,):
        pages = {page for run in view.runs for page in run.pages}
        assert ours.service.pool.used_bytes == len(pages) * ours.service.pool.page_bytes
        assert view.num_rows == conditions[0].layout.num_rows


def test_q10_n_outputs_hold_one_prefix(ours: Pipeline, draw_image: DrawImage, seed: int) -> None:
    images = references(draw_image, 1)
    one = ours("Put the cat", images, seed=seed, num_inference_steps=2, **OPTIONS).stats
    ours.service.tree.clear()
    five = ours("Put the cat", images, seed=seed, num_inference_steps=2, num_images=5, **OPTIONS).stats
    assert (five.rows_prefilled, five.kv_bytes) == (one.rows_prefilled, one.kv_bytes)


def test_q13_mu_follows_the_number_of_target_tokens(ours: Pipeline) -> None:
    """0.5 at 256 tokens, 1.31 at 2048 x 2048, and the schedule moves with it."""
    rule = ours.service.qwen.schedule_rule
    assert rule.shift(256) == pytest.approx(0.5)
    assert rule.shift(128 * 128) == pytest.approx(0.5 + 0.4 * (16384 - 256) / 7936)
    small, large = (rule.schedule(tokens, 10).sigmas for tokens in (256, 16384))
    assert float((large - small)[1:-2].min()) > 0.01


def test_q16_references_are_not_recomputed_each_step(
    ours: Pipeline, draw_image: DrawImage, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Every step passes the target's rows and nothing else."""
    passes: list[int] = []
    run = ours.service.runner.run

    def count(chunks: list[Chunk], targets: list[PlacedTarget]) -> list[Tensor]:
        if targets:
            passes.append(sum(len(placed.target.state) for placed in targets))
            assert not chunks
        return run(chunks, targets)

    monkeypatch.setattr(ours.service.runner, "run", count)
    stats = ours("Put the cat", references(draw_image, 4), seed=seed, num_inference_steps=6, **OPTIONS).stats
    assert passes == [16] * 6
    assert stats.rows_prefilled > 100


def test_q17_random_sizes_do_not_grow_the_caches(checkpoint: Path, draw_image: DrawImage, seed: int) -> None:
    """Pages and latents stay within their budgets over many sizes, and Python's own memory levels off."""
    page = Pipeline.from_pretrained(checkpoint).service.pool.page_bytes
    ours = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=3 * page, latent_cache_bytes=4096)
    generator = np.random.default_rng(seed)

    def one() -> None:
        width, height = (int(32 * n) for n in generator.integers(1, 5, 2))
        images = [draw_image(width, height)]
        ours("a", images, seed=seed, num_inference_steps=1, width=height, height=width, reference_resolution=64)
        assert ours.service.pool.used_bytes <= 3 * page
        assert ours.service.qwen.latents.used_bytes <= 4096

    for _ in range(10):
        one()
    tracemalloc.start()
    for _ in range(30):
        one()
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < 1 << 20


def test_q18_a_huge_prompt_is_refused_before_encoding(ours: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours.service.qwen.encoder, "encode", lambda *_: pytest.fail("it was encoded"))
    with pytest.raises(PromptTooLong, match="the limit is 8192") as caught:
        ours("red " * 100_000)
    assert caught.value.status == 400
    with pytest.raises(PromptTooLong):
        ours("a", negative_prompt="red " * 100_000, true_cfg_scale=2.0)


def test_q19_many_references_are_bounded_and_positions_computed(
    ours: Pipeline, draw_image: DrawImage, seed: int
) -> None:
    ours("a", [draw_image(32, 32)] * 10, seed=seed, num_inference_steps=1, **OPTIONS)
    with pytest.raises(BadParameter, match="11 references are given, the limit is 10"):
        ours("a", [draw_image(32, 32)] * 11, seed=seed)


def test_q20_positions_past_8192_are_right() -> None:
    """The 8,192nd and later positions rotate by their own angle, not by a negative one, within fp32 of the product."""
    layout = Layout.of([8190, (4, 4), 40, (3000, 1)])
    positions = qwen_positions(layout)
    assert int(positions[:, 0].max()) > 8200
    table = rotary_table(positions, (4, 6, 6))
    exponents = torch.cat([torch.arange(0, dim, 2, dtype=torch.float64) / dim for dim in (4, 6, 6)])
    axis = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])
    angle = positions[:, axis].double() * 10000.0**-exponents
    assert (table - torch.polar(torch.ones_like(angle), angle)).abs().max() < 2e-3
    wrapped = torch.polar(torch.ones(1, dtype=torch.float64), torch.tensor([8195.0 - 9216.0], dtype=torch.float64))
    row = int((positions[:, 0] == 8195).nonzero()[0])
    assert abs(table[row, 0] - wrapped[0]) > 0.1


def test_q21_a_branch_reads_its_own_prompt_and_the_shared_trunk(
    ours: Pipeline, draw_image: DrawImage, seed: int
) -> None:
    """Sharing is legal: prefilled alone, the trunk's K/V are the same for both prompts, and the tails differ."""
    conditions = make_conditions(ours, references(draw_image, 2), ["Put the cat", "blurred, low quality"])
    trunk = conditions[0].layout.trunk_stop
    values = []
    for condition in conditions:
        ours.service.tree.clear()
        with ours.service.prefixes.lease([condition]) as (view,):
            values.append([view.read(layer) for layer in range(3)])
    with ours.service.prefixes.lease(conditions) as (positive, negative):
        assert positive.runs[:2] == negative.runs[:2]
        assert positive.runs[2].pages != negative.runs[2].pages
        for layer in range(3):
            for kind in range(2):
                a, b = values[0][layer][kind], values[1][layer][kind]
                assert torch.equal(a[:trunk], b[:trunk])
                assert not torch.equal(a[trunk : trunk + 3], b[trunk : trunk + 3])
                # The tails went through one pass together, so their sums may round differently from alone.
                torch.testing.assert_close(positive.read(layer)[kind], a, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(negative.read(layer)[kind], b, rtol=1e-5, atol=1e-5)


def test_q22_a_batch_does_not_change_its_pictures(checkpoint: Path, draw_image: DrawImage, seed: int) -> None:
    """Three prompts x two images, guided, in one pass, in passes of one job, or one call each. Guided a little: a scale
    of 3 would multiply what rounding differs by up to five in each step."""
    guided = {**GUIDED, "true_cfg_scale": 1.5}
    prompts = ["A red teapot", "Put the cat from image 1 into image 2.", "cat"]
    images = references(draw_image, 1)
    whole, split = (
        Pipeline.from_pretrained(checkpoint, kv_cache_bytes=64 << 20, max_batch_rows=rows) for rows in (100_000, 1)
    )
    together = paint(whole, prompts, images, seed, num_images=2, **guided, **OPTIONS)
    assert difference(paint(split, prompts, images, seed, num_images=2, **guided, **OPTIONS), together) < TOLERANCE
    for i, latents in enumerate(together):
        alone = paint(whole, prompts[i // 2], images, seed + i, **guided, **OPTIONS)
        assert difference(alone[0], latents) < TOLERANCE


def test_q30_the_same_text_with_another_picture_is_another_prefix(
    ours: Pipeline, draw_image: DrawImage, seed: int
) -> None:
    first, second = draw_image(64, 64), draw_image(64, 64)
    one = paint(ours, "Put the cat", [first], seed, **OPTIONS)
    other = paint(ours, "Put the cat", [second], seed, **OPTIONS)
    assert difference(other, one) > 100 * TOLERANCE
    assert (ours.service.tree.hits, ours.service.tree.misses) == (0, 2)
    one_pixel = first.copy()
    one_pixel.putpixel((0, 0), tuple(255 - x for x in first.getpixel((0, 0))))  # type: ignore[union-attr]
    paint(ours, "Put the cat", [one_pixel], seed, **OPTIONS)
    assert ours.service.tree.hits == 0
    paint(ours, "Put the cat", [second, first], seed, **OPTIONS)
    assert (ours.service.tree.hits, ours.service.tree.misses) == (1, 4), (
        "an image in second place is not itself in first place"
    )


def test_q33_alpha_goes_in_and_comes_out(ours: Pipeline, draw_image: DrawImage, seed: int) -> None:
    """The VAE reads four channels; only the vision encoder sees white behind them."""
    opaque = draw_image(64, 64)
    opaque.putalpha(255)
    clear = opaque.copy()
    clear.putalpha(128)
    edits = [paint(ours, "Put the cat", [image], seed, **OPTIONS) for image in (opaque, clear)]
    assert difference(edits[1], edits[0]) > 100 * TOLERANCE
    picture = ours("a", [clear], seed=seed, num_inference_steps=1, **OPTIONS).images[0]
    assert (picture.mode, picture.size) == ("RGBA", (64, 64))
    assert on_white(Image.new("RGBA", (1, 1), (0, 0, 0, 0))).getpixel((0, 0)) == (255, 255, 255)


def test_q34_latents_pass_between_edits_without_pixels(ours: Pipeline, draw_image: DrawImage, seed: int) -> None:
    """The final latents are to be had, and latents are taken, unchanged by the VAE."""
    final = ours("a", seed=seed, num_inference_steps=2, output_type="latent", width=64, height=64).images[0]
    assert final.shape == (16, tiny.LATENT_CHANNELS)
    noise = draw_noise(seed, tiny.LATENT_CHANNELS, (4, 4), torch.float32)
    again = ours("a", latents=noise, num_inference_steps=2, output_type="latent", width=64, height=64).images[0]
    assert torch.equal(again, final)


def test_q35_templates_are_the_documented_ones(ours: Pipeline, theirs: QwenImage21Pipeline) -> None:
    """Against diffusers' strings, token by token, with the system turn dropped."""
    template = theirs.prompt_template_t2i.format("A red teapot")
    assert template == SYSTEM_TURN + prompt_text("A red teapot", 0)
    assert prompt_text("x", 2).startswith(
        "<|im_start|>user\n<image1><|vision_start|><|image_pad|><|vision_end|> "
        "<image2><|vision_start|><|image_pad|><|vision_end|>x<|im_end|>"
    )
    assert prompt_text("", 0) == "<|im_start|>user\n <|im_end|>\n<|im_start|>assistant\n"
    tokenizer = ours.service.qwen.encoder.tokenizer
    assert tokenizer.num_system_tokens == theirs._drop_idx
    ids = theirs.processor.tokenizer(template)["input_ids"]
    assert list(tokenizer.texts("A red teapot", 0)[0]) == ids[theirs._drop_idx :]
    with pytest.raises(BadParameter, match="must not contain"):
        ours(f"a {IMAGE_PAD}")


def test_q37_states_come_from_before_the_final_norm(ours: Pipeline, theirs: QwenImage21Pipeline) -> None:
    """Whatever transformers calls the last hidden state: it equals the input of the norm, not its output."""
    texts = ours.service.qwen.encoder.tokenizer.texts("A red teapot", 0)
    got = ours.service.qwen.encoder.encode(texts, []).states
    seen: list[Tensor] = []
    norm = theirs.text_encoder.model.language_model.norm
    handle = norm.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0], output]))
    ids = torch.tensor([theirs.processor.tokenizer(theirs.prompt_template_t2i.format("A red teapot"))["input_ids"]])
    theirs.text_encoder(input_ids=ids)
    handle.remove()
    before, after = (x[0, theirs._drop_idx :].detach() for x in seen)
    assert difference(got, before) < TOLERANCE
    assert difference(got, after) > 0.01


def test_q38_out_of_memory_fails_once_with_a_sentence(
    ours: Pipeline, draw_image: DrawImage, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    images = references(draw_image, 1)
    want = paint(ours, "Put the cat", images, seed, **OPTIONS)
    attempts: list[int] = []

    def fails(chunks: list[Chunk], targets: list[PlacedTarget]) -> list[Tensor]:
        attempts.append(len(targets))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(ours.service.runner, "run", fails)
        with pytest.raises(OutOfMemory, match="paint fewer or smaller pictures"):
            paint(ours, "Put the cat", images, seed, **OPTIONS)
    assert attempts == [0], "one pass, not a retry loop"
    assert ours.service.pool.used_bytes == ours.service.tree.used_bytes
    assert torch.equal(paint(ours, "Put the cat", images, seed, **OPTIONS), want)


def test_q40_a_pass_is_bounded_by_rows_not_by_requests(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    ours = Pipeline.from_pretrained(checkpoint, max_batch_rows=48)
    passes: list[int] = []
    run = ours.service.runner.run

    def count(chunks: list[Chunk], targets: list[PlacedTarget]) -> list[Tensor]:
        if targets:
            passes.append(sum(len(placed.target.state) for placed in targets))
        return run(chunks, targets)

    monkeypatch.setattr(ours.service.runner, "run", count)
    ours("a", seed=seed, num_images=5, num_inference_steps=1, width=64, height=64)
    assert passes == [48, 32]
    passes.clear()
    ours("a", seed=seed, num_images=2, num_inference_steps=1, width=64, height=64, **GUIDED)
    assert passes == [32, 32], "the branches of a job stay together"


def test_u13_u26_cancel_stops_within_one_step(
    ours: Pipeline, draw_image: DrawImage, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    steps: list[int] = []
    run = ours.service.runner.run

    def count(chunks: list[Chunk], targets: list[PlacedTarget]) -> list[Tensor]:
        steps.extend([1] * len(targets))
        return run(chunks, targets)

    def stop(progress: Progress) -> None:
        if progress.step == 3:
            progress.cancel()

    monkeypatch.setattr(ours.service.runner, "run", count)
    images = references(draw_image, 1)
    with pytest.raises(Cancelled, match="cancelled after step 3 of 20"):
        ours("a", images, seed=seed, num_inference_steps=20, callback=stop, **OPTIONS)
    assert len(steps) == 3
    assert ours.service.pool.used_bytes == ours.service.tree.used_bytes

    def breaks(progress: Progress) -> None:
        raise KeyError("the caller's own mistake")

    with pytest.raises(KeyError):
        ours("a", images, seed=seed, num_inference_steps=20, callback=breaks, **OPTIONS)
    assert ours.service.pool.used_bytes == ours.service.tree.used_bytes


def test_u39_s20_sizes_are_honoured_or_refused(ours: Pipeline, draw_image: DrawImage, seed: int) -> None:
    """An explicit size wins over the references' ratio; without one the last reference's ratio is used."""
    images = [draw_image(64, 64), draw_image(200, 100)]
    run: dict[str, Any] = {"seed": seed, "num_inference_steps": 1, "reference_resolution": 96}
    for width, height in ((32, 160), (160, 32), (96, 96)):
        assert ours("a", images, width=width, height=height, **run).images[0].size == (width, height)
    assert ours("a", images, **run).images[0].size == (128, 64)
    assert ours("a", images, width=32, **run).images[0].size == (32, 64)
    assert ours("a", **run).images[0].size == (96, 96)


def test_s23_every_picture_can_be_painted_again_from_its_seed(ours: Pipeline, seed: int) -> None:
    many = ours("a", seed=seed, num_images=4, num_inference_steps=2, width=64, height=64)
    assert many.seeds == tuple(seed + i for i in range(4))
    for picture, own in zip(many.images, many.seeds, strict=True):
        again = ours("a", seed=own, num_inference_steps=2, width=64, height=64).images[0]
        assert np.abs(np.asarray(again, dtype=int) - np.asarray(picture, dtype=int)).max() <= 1
    assert len({picture.tobytes() for picture in many.images}) == 4
    drawn = ours("a", num_inference_steps=1, width=64, height=64).seeds
    assert drawn != ours("a", num_inference_steps=1, width=64, height=64).seeds


def test_one_step_paints_finite_pixels(ours: Pipeline, seed: int) -> None:
    """diffusers' stretched schedule of one step divides zero by zero."""
    latents = ours("a", seed=seed, num_inference_steps=1, width=64, height=64, output_type="latent").images[0]
    assert bool(latents.isfinite().all())
    assert ours.service.qwen.schedule_rule.schedule(16, 1).sigmas.tolist() == [1.0, 0.0]


def test_turbo_checkpoint_brings_its_own_schedule(theirs: QwenImage21Pipeline, tmp_path: Path) -> None:
    sigmas = [1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568]
    tiny.save_checkpoint(theirs, tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(index.read_text().replace('"sample_sigmas": null', f'"sample_sigmas": {sigmas}'))
    ours = Pipeline.from_pretrained(tmp_path)
    assert ours("a", seed=1, width=64, height=64).stats.num_steps == 8
    assert ours("a", seed=1, width=64, height=64, num_inference_steps=3).stats.num_steps == 3
    assert ours("a", seed=1, width=64, height=64, sigmas=[1.0, 0.5]).stats.num_steps == 2
