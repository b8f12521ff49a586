"""Public failures of unified models, and defects read in other engines, made impossible: what the engines add to the
model's own tests."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from PIL import Image

from neo_unify.cases import ROOT, TOLERANCE, VARIANTS, difference, golden
from neo_unify.test_chat import SMALL, assert_nothing_taken, draws, make, pictures_of, text_of
from neo_unify.test_pipeline import paint
from underpaint import Cancelled, Chat, Pipeline, Progress
from underpaint.chat import Part
from underpaint.errors import BudgetTooSmall
from underpaint.generation.prefix import Borrowed
from underpaint.kv.pool import View

DrawImage = Callable[..., Image.Image]


def test_u7_half_precision_on_plain_sdpa(seed: int) -> None:
    """fp16 with the portable backend paints what fp32 paints, within its precision."""
    exact, half = (Pipeline.from_pretrained(ROOT / "dense", dtype=dtype) for dtype in ("float32", "float16"))
    options: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 2, "output_type": "latent"}
    noise = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(seed))
    want = exact("a circle", latents=noise, **options).images[0]
    got = half("a circle", latents=noise, **options).images[0].float()
    assert bool(got.isfinite().all())
    assert difference(got, want) < 0.05


def test_u19_u22_a_prefix_is_handed_over_whole_and_no_more() -> None:
    """Rows missing or in excess are noticed before a picture is painted from them."""
    g = golden("dense")
    service = Pipeline.from_pretrained(ROOT / "dense", kv_cache_bytes=64 << 20).service
    passage = g.model.tokenizer.passage("a red circle<img>")
    condition = service.neo.condition(passage)
    with service.prefixes.lease([condition]) as (view,):
        service.runner.place(condition, view, (2, 2))
        for wrong in (view.before(view.num_rows - 1), View(service.pool, (*view.runs, *view.runs))):
            with pytest.raises(AssertionError, match="rows missing or in excess"):
                service.runner.place(condition, wrong, (2, 2))


def test_borrowed_pages_outlive_their_owner() -> None:
    """What is painted from stays, even if the one who read it is gone; then it is given back."""
    service = Pipeline.from_pretrained(ROOT / "dense", kv_cache_bytes=64 << 20).service
    condition = service.neo.condition(golden("dense").model.tokenizer.passage("a red circle<img>"))
    with service.prefixes.lease([condition]) as (view,):
        before = [x.clone() for x in view.read(0)]
        borrowed = Borrowed(service.pool, [view])
    assert all(torch.equal(x, y) for x, y in zip(borrowed.views[0].read(0), before, strict=True))
    assert service.pool.used_bytes > service.tree.used_bytes
    borrowed.close()
    assert service.pool.used_bytes == service.tree.used_bytes


def test_u27_aborts_are_one_requests_own_affair(seed: int) -> None:
    """Every third of thirty dialogues is abandoned; the others say and paint what they would alone."""
    service = make().service
    script = draws(Chat(service))
    want = list(make().send("draw", painting=SMALL, seed=seed, forced_ids=script))
    for i in range(30):
        answer = Chat(service).send("draw", painting=SMALL, seed=seed, forced_ids=script)
        if i % 3 == 2:
            next(answer)
            answer.close()  # type: ignore[attr-defined]
            continue
        got = list(answer)
        assert text_of(got) == text_of(want)
        for ours, theirs in zip(pictures_of(got), pictures_of(want), strict=True):
            assert difference(ours.pixels, theirs.pixels) < TOLERANCE
    assert_nothing_taken(Chat(service))


def test_u32_an_explicit_edit_size_wins(draw_image: DrawImage) -> None:
    pipeline = Pipeline.from_pretrained(ROOT / "dense")
    for size in ((64, 96), (96, 64), (32, 32)):
        picture = pipeline("a", [draw_image(200, 100)], width=size[0], height=size[1], num_inference_steps=1, seed=1)
        assert picture.images[0].size == size


def test_defect_c_guidance_by_pictures_is_not_dropped() -> None:
    g, pipeline = golden("dense"), Pipeline.from_pretrained(ROOT / "dense", kv_cache_bytes=64 << 20)
    case = g.cases["it2i_two_imgcfg"]
    with_pictures = paint(pipeline, "dense", case)
    without = paint(pipeline, "dense", case, image_guidance_scale=1.0)
    assert difference(with_pictures, without) > 100 * TOLERANCE


def test_defect_d_scarce_pages_make_dialogues_wait_and_none_deadlocks(draw_image: DrawImage, seed: int) -> None:
    """Dialogues that each need pages for three branches at once, in a pool for little more than one of them."""
    image = draw_image(64, 64)
    painting = type(SMALL)(num_inference_steps=2, sizes=((64, 32),), image_guidance_scale=2.0)
    roomy = make()
    want = list(roomy.send("draw it", [image], painting=painting, seed=seed, forced_ids=draws(roomy)))
    page = roomy.service.pool.page_bytes
    service = make(kv_cache_bytes=10 * page).service
    results: dict[int, list[Part]] = {}

    def talk(i: int) -> None:
        chat = Chat(service)
        results[i] = list(chat.send("draw it", [image], painting=painting, seed=seed, forced_ids=draws(chat)))

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert sorted(results) == [0, 1, 2, 3]
    for got in results.values():
        assert text_of(got) == text_of(want)
        for ours, theirs in zip(pictures_of(got), pictures_of(want), strict=True):
            assert difference(ours.pixels, theirs.pixels) < TOLERANCE
    assert_nothing_taken(Chat(service))


def test_defect_d_what_can_never_fit_is_told_so(draw_image: DrawImage) -> None:
    page = make().service.pool.page_bytes
    chat = make(kv_cache_bytes=2 * page)
    with pytest.raises(BudgetTooSmall, match="this request needs"):
        list(chat.send("draw it", [draw_image(64, 64)] * 2, painting=SMALL, forced_ids=draws(chat)))
    assert_nothing_taken(chat)


def cancel_at(step: int) -> Callable[[Progress], None]:
    def callback(progress: Progress) -> None:
        if progress.step == step:
            progress.cancel()

    return callback


def test_defects_e_f_g_random_ends_leak_nothing(draw_image: DrawImage, seed: int) -> None:
    """Dialogues and paintings in threads over one small pool, abandoned or cancelled at random moments."""
    service = make(kv_cache_bytes=40 * make().service.pool.page_bytes).service
    image = draw_image(64, 64)
    failures: list[BaseException] = []

    def talk(i: int) -> None:
        rng = random.Random(seed + i)
        chat, pipeline = Chat(service), Pipeline(service)
        try:
            for _ in range(6):
                if rng.random() < 0.3:
                    with suppress(Cancelled):
                        pipeline(
                            "a circle", [image][: i % 2], width=64, height=32, num_inference_steps=3, seed=i,
                            callback=cancel_at(rng.randint(1, 3)),
                        )  # fmt: skip
                    continue
                parts = chat.send([{"role": "user", "content": "draw"}], painting=SMALL, forced_ids=draws(chat))
                for _ in range(rng.randint(0, 8)):
                    next(parts, None)
                parts.close()  # type: ignore[attr-defined]
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert not failures
    assert_nothing_taken(Chat(service))
    service.tree.clear()
    assert service.pool.used_bytes == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_u2_the_network_is_code_of_our_own(variant: str) -> None:
    """What a release of transformers changes in its classes and decorators changes nothing here."""
    modules = {type(module).__module__ for module in golden(variant).model.network.modules()}
    assert {name.split(".")[0] for name in modules} <= {"underpaint", "torch"}


def test_u24_defect_j_parameters_are_honoured() -> None:
    """Steps, shift and interval each change the picture, and n gives n pictures."""
    g, pipeline = golden("dense"), Pipeline.from_pretrained(ROOT / "dense", kv_cache_bytes=64 << 20)
    case = g.cases["t2i_none_4"]
    plain = paint(pipeline, "dense", case)
    for change in ({"num_inference_steps": 3}, {"timestep_shift": 1.0}, {"cfg_interval": (0.0, 0.2)}, {"seed": 1}):
        assert difference(paint(pipeline, "dense", case, **change), plain) > 100 * TOLERANCE, change
    assert len(pipeline("a", width=32, height=32, num_inference_steps=1, num_images=3).images) == 3


def test_defect_o_every_picture_has_its_own_generator(seed: int) -> None:
    """Other requests, and torch's global state, do not change what a seed paints."""
    pipeline = Pipeline.from_pretrained(ROOT / "dense")
    options: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 1, "output_type": "latent"}
    first = pipeline("a", seed=seed, **options).images[0]
    torch.manual_seed(int(time.time()))
    pipeline("b", seed=seed + 7, **options)
    assert torch.equal(pipeline("a", seed=seed, **options).images[0], first)
