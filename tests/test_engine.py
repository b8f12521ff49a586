"""The generation engine: fair turns, pages that are promised, requests that wait, end, abort, or come from threads."""

import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from test_cases import finish, make_conditions
from test_parity import TOLERANCE, difference, paint, references

from underpaint import Pipeline
from underpaint.errors import BudgetTooSmall, Cancelled, DeadlinePassed, OutOfMemory
from underpaint.generation.job import Job, Order, draw_noise
from underpaint.generation.scheduler import Item, next_batch
from underpaint.models.qwen_image21 import Condition
from underpaint.sampling.guidance import Branch, PlainGuidance
from underpaint.sampling.schedule import EulerSampler

DrawImage = Callable[..., Image.Image]


def make(ours: Pipeline, *conditions: Condition, seed: int = 0, steps: int = 4, **options: Any) -> Order:
    """An order of one small picture, guided if there are two conditions."""
    grid = (4, 4)
    sampler = EulerSampler(
        ours.service.qwen.schedule_rule.schedule(16, steps), PlainGuidance(3.0 * (len(conditions) - 1))
    )
    of_branch = dict(zip((Branch.CONDITIONAL, Branch.UNCONDITIONAL), range(len(conditions)), strict=False))
    return Order(
        conditions,
        (Job(draw_noise(seed, tiny.LATENT_CHANNELS, grid, torch.float32), grid, sampler, of_branch),),
        **options,
    )


def assert_nothing_taken(ours: Pipeline) -> None:
    assert ours.service.generation.idle
    assert ours.service.tree.promised_pages == 0
    assert not any(node.users or not node.ready for node in ours.service.tree)
    assert ours.service.pool.used_bytes == ours.service.tree.used_bytes


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 12))
def test_every_item_is_served_within_as_many_turns_as_there_are(sizes: list[int], max_rows: int) -> None:
    """Small and large alike, and none more than once more often than another."""
    served, last = [-1] * len(sizes), [-1] * len(sizes)
    counts = [0] * len(sizes)
    tickets = iter(range(10_000))
    for turn in range(4 * len(sizes)):
        items = [Item(i, size, served[i]) for i, size in enumerate(sizes)]
        batch = next_batch(items, max_rows)
        assert batch
        assert len(batch) == 1 or sum(item.num_rows for item in batch) <= max_rows
        for item in batch:
            served[item.owner], last[item.owner] = next(tickets), turn
            counts[item.owner] += 1
        assert all(turn - before <= len(sizes) for before in last)
        assert max(counts) - min(counts) <= 1


def test_a_short_job_is_not_held_up_by_a_long_one(ours: Pipeline, seed: int) -> None:
    """Passes too small for both: they take turns, and the one with few steps ends long before the other."""
    conditions = make_conditions(ours, [], ["A red teapot", "cat"])
    ours.service.generation._max_batch_rows = 16
    long, short = make(ours, conditions[0], steps=30), make(ours, conditions[1], steps=3)
    for order in (long, short):
        ours.service.generation.submit(order)
    finish(ours, short)
    assert long.step <= 5
    finish(ours, long)
    assert_nothing_taken(ours)


def test_prefill_goes_beside_steps(ours: Pipeline, draw_image: DrawImage, seed: int) -> None:
    """A running job takes a step in every turn while another request's references are prefilled."""
    running = make(ours, *make_conditions(ours, [], ["A red teapot"]), steps=20)
    ours.service.generation.submit(running)
    for _ in range(3):
        ours.service.generation.turn()
    before = running.step
    edit = make(ours, *make_conditions(ours, references(draw_image, 4), ["cat"]))
    ours.service.generation.submit(edit)
    turns = 0
    while edit.prefilled is None:
        ours.service.generation.turn()
        turns += 1
    assert turns == 5, "four units and the prompt"
    assert running.step == before + turns
    finish(ours, running, edit)


def test_two_requests_that_miss_the_same_trunk_fill_it_once(ours: Pipeline, draw_image: DrawImage, seed: int) -> None:
    images = references(draw_image, 3)
    conditions = make_conditions(ours, images, ["cat", "A red teapot", "blurred"])
    first, second = make(ours, *conditions[:2]), make(ours, *conditions[1:])
    for order in (first, second):
        ours.service.generation.submit(order)
    finish(ours, first, second)
    assert (ours.service.tree.hits, ours.service.tree.misses) == (3, 3)
    alone = make(ours, *conditions[1:])
    ours.service.tree.clear()
    ours.service.generation.submit(alone)
    finish(ours, alone)
    assert difference(second.jobs[0].state, alone.jobs[0].state) < TOLERANCE
    assert_nothing_taken(ours)


def test_who_fills_a_trunk_may_vanish(ours: Pipeline, draw_image: DrawImage, seed: int) -> None:
    """The one who waited for it fills it then."""
    conditions = make_conditions(ours, references(draw_image, 3), ["cat", "A red teapot"])
    first, second = make(ours, conditions[0]), make(ours, conditions[1])
    for order in (first, second):
        ours.service.generation.submit(order)
    ours.service.generation.turn()
    assert first.lease
    assert first.lease.next_chunks(), "it is filling the second unit"
    ours.service.generation.drop(first)
    finish(ours, second)
    assert second.error is None
    assert isinstance(first.error, Cancelled)
    assert_nothing_taken(ours)


def test_requests_wait_for_pages_while_others_go_on(checkpoint: Path, draw_image: DrawImage, seed: int) -> None:
    """A pool for one request at a time: five wait in line, all are painted, none is disturbed."""
    page = Pipeline.from_pretrained(checkpoint).service.pool.page_bytes
    ours = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=2 * page)
    roomy = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=64 << 20)
    images = [draw_image(64, 64) for _ in range(5)]
    orders = []
    for i, image in enumerate(images):
        orders.append(make(ours, *make_conditions(ours, [image], ["cat"]), seed=seed + i))
        ours.service.generation.submit(orders[-1])
    while not all(order.ended for order in orders):
        ours.service.generation.turn()
        assert sum(order.lease is not None and not order.ended for order in orders) <= 1
    for i, (order, image) in enumerate(zip(orders, images, strict=True)):
        alone = make(roomy, *make_conditions(roomy, [image], ["cat"]), seed=seed + i)
        roomy.service.generation.submit(alone)
        finish(roomy, alone)
        assert difference(order.jobs[0].state, alone.jobs[0].state) < TOLERANCE
    too_large = make(ours, *make_conditions(ours, images[:2], ["cat"]))
    with pytest.raises(BudgetTooSmall):
        ours.service.generation.submit(too_large)
    assert_nothing_taken(ours)


def test_pictures_of_a_prompt_stand_at_the_same_places(
    ours: Pipeline, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """However many there are, what is the same for all is there once; and each is as it is alone."""
    made, place = [], ours.service.runner.place

    def count(*where: Any) -> Any:
        made.append(place(*where))
        return made[-1]

    monkeypatch.setattr(ours.service.runner, "place", count)
    options: dict[str, Any] = {
        "width": 64, "height": 64, "num_inference_steps": 2, "true_cfg_scale": 2.0, "negative_prompt": "",
        "output_type": "latent",
    }  # fmt: skip
    many = ours("A red teapot", num_images=5, seed=seed, **options)
    assert len(made) == 2
    for i in (0, 4):
        alone = ours("A red teapot", seed=seed + i, **options)
        assert difference(many.images[i], alone.images[0]) < TOLERANCE


def test_an_order_that_cannot_be_placed_fails_alone(ours: Pipeline, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The pass that prefilled it was the last step of another, which is done and not run again; and whoever turns the
    engines hears nothing of it."""
    conditions = make_conditions(ours, [], ["A red teapot", "cat"])
    ends, breaks = make(ours, conditions[0], seed=seed, steps=1), make(ours, conditions[1], seed=seed)
    place = ours.service.runner.place

    def fail(condition: Condition, *others: Any) -> Any:
        if condition is conditions[1]:
            raise torch.OutOfMemoryError("no memory left")
        return place(condition, *others)

    monkeypatch.setattr(ours.service.runner, "place", fail)
    ours.service.generation.submit(ends)
    while ends.prefilled is None:
        ours.service.generation.turn()
    ours.service.generation.submit(breaks)
    finish(ours, ends, breaks)
    assert (ends.error, ends.step) == (None, 1)
    assert isinstance(breaks.error, OutOfMemory)
    assert_nothing_taken(ours)


def test_views_that_cannot_be_made_end_their_order(ours: Pipeline, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    conditions = make_conditions(ours, [], ["A red teapot"])
    broken, other = (make(ours, conditions[0], seed=seed) for _ in range(2))

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    ours.service.generation.submit(broken)
    with monkeypatch.context() as patch:
        patch.setattr(ours.service.pool, "slots", fail)
        ours.service.generation.turn()
    assert isinstance(broken.error, OutOfMemory)
    ours.service.generation.submit(other)
    finish(ours, other)
    assert other.error is None
    assert_nothing_taken(ours)


def test_a_deadline_ends_a_request_running_or_waiting(ours: Pipeline, seed: int) -> None:
    conditions = make_conditions(ours, [], ["A red teapot", "cat"])
    late = make(ours, conditions[0], steps=1000, deadline=time.monotonic() + 1000)
    waiting = make(ours, conditions[1], deadline=time.monotonic() - 1)
    other = make(ours, conditions[1])
    for order in (late, waiting, other):
        ours.service.generation.submit(order)
    while late.step < 3:
        ours.service.generation.turn()
    late.deadline = time.monotonic() - 1
    finish(ours, late, waiting, other)
    assert isinstance(late.error, DeadlinePassed)
    assert late.step == 3, "no step after it"
    assert isinstance(waiting.error, DeadlinePassed)
    assert other.error is None
    assert_nothing_taken(ours)


def test_300_random_aborts_leak_no_page(checkpoint: Path, draw_image: DrawImage, seed: int) -> None:
    """Orders that share trunks, in a small pool, dropped at any moment of their life."""
    page = Pipeline.from_pretrained(checkpoint).service.pool.page_bytes
    ours = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=9 * page)
    rng = random.Random(seed)
    images = [draw_image(32, 32) for _ in range(3)]
    conditions = [
        make_conditions(ours, list(chosen), ["cat", "A red teapot"])
        for chosen in ([], images[:1], images[:2], images[::-1], images)
    ]
    live: list[Order] = []
    aborted = 0
    while aborted < 300:
        while len(live) < 6:
            chosen = rng.choice(conditions)
            live.append(make(ours, *chosen[: rng.randint(1, 2)], steps=rng.randint(1, 5)))
            ours.service.generation.submit(live[-1])
        for _ in range(rng.randint(0, 3)):
            ours.service.generation.turn()
        victim = rng.choice(live)
        aborted += not victim.ended
        ours.service.generation.drop(victim)
        live = [order for order in live if not order.ended]
        assert ours.service.tree.promised_pages >= 0
    finish(ours, *live)
    assert all(order.error is None for order in live), "an abort ends nobody else"
    assert_nothing_taken(ours)
    ours.service.tree.clear()
    assert ours.service.pool.used_bytes == 0


def test_calls_from_threads_are_painted_together(
    ours: Pipeline, draw_image: DrawImage, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Eight threads, unlike requests: every one gets its own answer, equal to alone, and steps are shared. The first
    pass waits until all of them have submitted, or wait to."""
    images = [draw_image(64, 64) for _ in range(2)]
    calls: list[dict[str, Any]] = [
        {"prompt": f"A red teapot {i}", "images": images[: i % 3], "width": 32 + 32 * (i % 2), "height": 64}
        for i in range(8)
    ]
    results: dict[int, torch.Tensor] = {}

    def call(i: int) -> None:
        options = {k: v for k, v in calls[i].items() if k not in ("prompt", "images")}
        latents = paint(ours, calls[i]["prompt"], calls[i]["images"], seed + i, reference_resolution=64, **options)
        results[i] = latents

    run, submit = ours.service.runner.run, ours.service.submit_order
    submitting, all_submit = itertools.count(1), threading.Event()

    def count_and_submit(order: Order) -> None:
        if next(submitting) == len(calls):
            all_submit.set()
        submit(order)

    def wait_and_run(chunks: Any, targets: Any) -> Any:
        assert all_submit.wait(60), "the other calls did not come"
        return run(chunks, targets)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    passes = ours.service.runner.passes
    with monkeypatch.context() as patch:
        patch.setattr(ours.service, "submit_order", count_and_submit)
        patch.setattr(ours.service.runner, "run", wait_and_run)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    together = ours.service.runner.passes - passes
    got = dict(results)
    assert sorted(got) == list(range(8))
    for i in range(8):
        call(i)
        assert difference(got[i], results[i]) < TOLERANCE
    assert together < ours.service.runner.passes - passes - together
    assert_nothing_taken(ours)
