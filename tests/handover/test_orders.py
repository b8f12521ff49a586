"""An order that crosses a border paints the same picture, bit by bit; one with anything missing is refused."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import tiny
import torch
from neo_unify.cases import PAGE_ROWS, golden
from PIL import Image

from underpaint import Pipeline
from underpaint.attention import each_layer, piecewise
from underpaint.errors import MissingBranch, UnderpaintError
from underpaint.generation.engine import GenerationEngine
from underpaint.generation.job import Job, Order, draw_noise
from underpaint.generation.prefix import Borrowed, PrefixCache
from underpaint.generation.runner import Runner
from underpaint.handover.arena import BLOCK_BYTES, Arena
from underpaint.handover.faults import ArenaFull, BadHandover, StaleSlab
from underpaint.handover.messages import Fresh, InPages, PaintOrder, Seed, Stored, ToGeneration
from underpaint.handover.orders import Prefix, Terms, borrow, check_order, read_order, slabs_of, write_order
from underpaint.handover.pages import Mover, slab_bytes
from underpaint.handover.pools import SharedPool, map_pool, share_pool
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import PagePool, View
from underpaint.kv.tree import PrefixTree
from underpaint.layout import Grid
from underpaint.models.neo_unify import EditGuidance, FlowSampler, NeoUnify, Passage
from underpaint.models.neo_unify.driver import Driver
from underpaint.models.neo_unify.flow import draw_noise as draw_neo
from underpaint.models.neo_unify.flow import flow_times
from underpaint.models.neo_unify.prompt import painting_branches
from underpaint.sampling.guidance import Branch, PlainGuidance
from underpaint.sampling.schedule import EulerSampler

DrawImage = Callable[..., Image.Image]
TERMS = Terms("generation", time.monotonic() + 1e6)
NEO_GRID: Grid = (2, 3)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(64 << 20, checked=True)
    yield made
    assert (made.num_leases, made.used_bytes) == (0, 0), "every slab was released"
    made.close()


def cross(message: PaintOrder) -> PaintOrder:
    """As it arrives in another process."""
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToGeneration)
    assert got == message
    assert isinstance(got, PaintOrder)
    return got


def no_noise(seed: int, grid: Grid) -> torch.Tensor:
    pytest.fail("the noise was sent")


def run(engine: GenerationEngine, order: Order) -> list[torch.Tensor]:
    engine.submit(order)
    while not order.ended:
        engine.turn()
    if order.error:
        raise order.error
    return [job.state for job in order.jobs]


# Qwen-Image 2.1: conditions that generation prefills


def qwen_order(ours: Pipeline, draw_image: DrawImage, seed: int) -> Order:
    model = ours.service.qwen
    references = [model.reference(draw_image(64, 48), 64), model.reference(draw_image(32, 64), 64)]
    conditions = tuple(model.condition(prompt, references) for prompt in ("Put <image1> on it", ""))
    jobs = []
    for i, grid in enumerate([(4, 4), (2, 6)]):
        sampler = EulerSampler(model.schedule_rule.schedule(grid[0] * grid[1], 3 + i), PlainGuidance(2.5))
        noise = draw_noise(seed + i, tiny.LATENT_CHANNELS, grid, torch.float32)
        jobs.append(Job(noise, grid, sampler, {Branch.CONDITIONAL: 0, Branch.UNCONDITIONAL: 1}))
    return Order(conditions, tuple(jobs), deadline=time.monotonic() + 1000)


@pytest.mark.parametrize("by_seed", [False, True])
def test_a_qwen_order_paints_the_same_on_the_other_side(
    ours: Pipeline, draw_image: DrawImage, seed: int, arena: Arena, by_seed: bool
) -> None:
    order = qwen_order(ours, draw_image, seed)
    seeds = [seed, seed + 1] if by_seed else None
    message = cross(write_order(order, "a", arena, TERMS, seeds=seeds))
    assert all(isinstance(job.noise, Seed) == by_seed for job in message.jobs)

    def draw(seed: int, grid: Grid) -> torch.Tensor:
        return draw_noise(seed, tiny.LATENT_CHANNELS, grid, torch.float32)

    other = read_order(message, arena.reader, "cpu", draw if by_seed else no_noise)
    for slab in slabs_of(message):
        arena.release(slab)
    assert other.deadline == order.deadline
    assert [c.units for c in other.conditions] == [c.units for c in order.conditions], "trunks are shared there too"
    want = run(ours.service.generation, order)
    ours.service.tree.clear()
    got = run(ours.service.generation, other)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def spoil(message: PaintOrder, **changes: Any) -> PaintOrder:
    return msgspec.structs.replace(message, **changes)


def without_branch(message: PaintOrder, branch: Branch) -> PaintOrder:
    """The last job has lost a branch."""
    *jobs, last = message.jobs
    conditions = {name: index for name, index in last.conditions.items() if name is not branch}
    return spoil(message, jobs=(*jobs, msgspec.structs.replace(last, conditions=conditions)))


def test_a_fresh_order_with_anything_missing_is_refused(
    ours: Pipeline, draw_image: DrawImage, seed: int, arena: Arena
) -> None:
    message = write_order(qwen_order(ours, draw_image, seed), "a", arena, TERMS)
    check_order(message)
    for branch in (Branch.CONDITIONAL, Branch.UNCONDITIONAL):
        with pytest.raises(MissingBranch, match=branch.value):
            check_order(without_branch(message, branch))
    fresh = message.conditions[0]
    assert isinstance(fresh, Fresh)
    replaced = msgspec.structs.replace
    shorter = replaced(fresh.text, shape=(fresh.text.shape[0] - 1, fresh.text.shape[1]))
    wider = replaced(fresh.latents[1], shape=(fresh.latents[1].shape[0] + 1, fresh.latents[1].shape[1]))
    spoiled = [
        ("was not handed over", spoil(message, conditions=message.conditions[:1])),
        ("text of shape", spoil(message, conditions=(replaced(fresh, text=shorter), message.conditions[1]))),
        (
            "1 references",
            spoil(message, conditions=(replaced(fresh, latents=fresh.latents[:1]), message.conditions[1])),
        ),
        ("latents of shape", spoil(message, conditions=(replaced(fresh, latents=(fresh.latents[0], wider)), fresh))),
        ("noise of shape", spoil(message, jobs=(replaced(message.jobs[0], grid=(4, 5)),))),
        ("all stored", spoil(message, prefix=InPages((), (), "fp32"))),
    ]
    for sentence, bad in spoiled:
        with pytest.raises(BadHandover, match=sentence):
            read_order(bad, arena.reader, "cpu", no_noise)
    for slab in slabs_of(message):
        arena.release(slab)
    with pytest.raises(StaleSlab):
        read_order(message, arena.reader, "cpu", no_noise)


def test_an_order_that_is_refused_holds_no_slab(ours: Pipeline, draw_image: DrawImage, seed: int, arena: Arena) -> None:
    order = qwen_order(ours, draw_image, seed)
    del order.jobs[0].conditions[Branch.UNCONDITIONAL]  # type: ignore[attr-defined]
    with pytest.raises(MissingBranch):
        write_order(order, "a", arena, TERMS)
    small = Arena(BLOCK_BYTES)
    order.jobs[0].state = torch.zeros(16, 3000)
    with pytest.raises(ArenaFull):
        write_order(order, "a", small, TERMS)
    assert small.num_leases == 0
    small.close()


# SenseNova-U1: prefixes that understanding has in pages


class Understanding:
    """The branches of an edit, read by the plain driver into a pool that can be shared."""

    def __init__(self, draw_image: DrawImage, seed: int) -> None:
        g = golden("dense")
        self.model = g.model
        self.shared: SharedPool = share_pool(self.model.cache_shape, CODECS["fp32"], 64 << 20, "cpu", PAGE_ROWS)
        self.pool = self.shared.pool
        self.driver = Driver(self.model, self.pool, each_layer(piecewise))
        pictures = [self.model.question_picture(draw_image(64, 64))]
        passages = painting_branches(self.model.tokenizer, "a red circle", pictures)
        sampler = FlowSampler(flow_times(3, 3.0), EditGuidance(4.0, 1.5, "global"))
        self.branches = sampler.every_branch
        assert len(self.branches) == 3
        self.views = [self._read(passages[branch]) for branch in self.branches]
        noise = draw_neo(torch.Generator("cpu").manual_seed(seed), NEO_GRID, 1.0, torch.float32)
        job = Job(noise, NEO_GRID, sampler, {branch: i for i, branch in enumerate(self.branches)})
        self.order = Order(tuple(self.model.condition(passages[b]) for b in self.branches), (job,))
        self.order.lease = Borrowed(self.pool, self.views)

    def prefix(self) -> Prefix:
        return Prefix.of(self.views, self.order.conditions, self.pool.codec.name)

    def _read(self, passage: Passage) -> Any:
        reading = self.driver.open(passage).__enter__()
        self.driver.read(reading, passage.num_rows)
        return reading.view()


@pytest.fixture
def understanding(draw_image: DrawImage, seed: int) -> Understanding:
    return Understanding(draw_image, seed)


def neo_engine(model: NeoUnify, pool: PagePool) -> GenerationEngine:
    runner = Runner(model, pool, each_layer(piecewise), "cpu")
    return GenerationEngine(PrefixCache(PrefixTree(pool), runner), runner, 4096)


def test_a_neo_order_paints_the_same_from_pages_that_were_copied(understanding: Understanding, arena: Arena) -> None:
    u = understanding
    prefix = u.prefix()
    message = cross(write_order(u.order, "a", arena, TERMS, prefix))
    slab = arena.lease(slab_bytes(u.pool, sum(prefix.pages.rows)), "generation", TERMS.deadline)
    Mover(u.pool).gather(prefix.pages.runs, arena, slab)
    pool = PagePool(u.model.cache_shape, u.pool.codec, 64 << 20, "cpu", PAGE_ROWS)
    pool.allocate(37)  # so that pages differ
    assert message.prefix is not None
    runs = [pool.allocate(num_rows) for num_rows in message.prefix.rows]
    Mover(pool).scatter(arena.reader, slab, runs)
    other = read_order(message, arena.reader, "cpu", no_noise)
    other.lease = borrow(message, pool, runs)
    for run_ in runs:
        pool.release(run_)
    for used in (slab, *slabs_of(message)):
        arena.release(used)
    want = run(neo_engine(u.model, u.pool), u.order)
    before = pool.num_free
    got = run(neo_engine(u.model, pool), other)
    assert torch.equal(got[0], want[0])
    assert pool.num_free == before + sum(len(run_.pages) for run_ in runs)


def test_a_neo_order_paints_the_same_from_pages_in_place(understanding: Understanding, arena: Arena) -> None:
    u = understanding
    prefix = u.prefix()
    offer, descriptors = u.shared.offer()
    mapped = map_pool(offer, [os.dup(fd) for fd in descriptors], "cpu")
    message = cross(write_order(u.order, "a", arena, TERMS, prefix))
    assert message.prefix is not None
    other = read_order(message, arena.reader, "cpu", no_noise)
    other.lease = borrow(message, mapped.pool, message.prefix.runs)
    for used in slabs_of(message):
        arena.release(used)
    got = run(neo_engine(u.model, mapped.pool), other)
    want = run(neo_engine(u.model, u.pool), u.order)
    assert torch.equal(got[0], want[0])
    assert mapped.pool.num_free == 0


def test_runs_in_common_are_handed_over_once(understanding: Understanding) -> None:
    views = [understanding.views[0], understanding.views[1], understanding.views[0]]
    conditions = [understanding.order.conditions[i] for i in (0, 1, 0)]
    prefix = Prefix.of(views, conditions, "fp32")
    assert prefix.of_views[0] == prefix.of_views[2]
    assert len(prefix.pages.runs) == len({run for view in views for run in view.runs})
    for view, runs in zip(views, prefix.of_views, strict=True):
        assert tuple(prefix.pages.runs[i] for i in runs) == view.runs


def test_runs_that_are_units_have_their_keys(understanding: Understanding) -> None:
    """Up to the first run that is not the next unit, from which on rows belong to this prefix alone."""
    u, pool = understanding, understanding.pool
    condition = u.order.conditions[0]
    first, *others = condition.units
    rest = condition.layout.num_rows - condition.units[-1].stop
    assert others
    assert rest
    keys = [unit.key for unit in condition.units]
    for rows, expected in (
        ([unit.num_rows for unit in condition.units] + [rest], [*keys, None]),
        ([first.num_rows, condition.layout.num_rows - first.stop], [first.key, None]),
        ([condition.layout.num_rows], [None]),
        ([first.num_rows - 1, 1, others[0].num_rows], [None, None, None]),
    ):
        view = View(pool, tuple(pool.allocate(num_rows) for num_rows in rows))
        assert list(Prefix.of([view], [condition], "fp32").pages.units) == expected


def test_s45_u18_a_branch_that_is_dropped_on_the_way_fails_the_request(
    understanding: Understanding, arena: Arena
) -> None:
    """Guidance is never silently off: not when a job loses a branch, nor a branch its pages, nor a page its rows."""
    u = understanding
    prefix = u.prefix()
    message = write_order(u.order, "a", arena, TERMS, prefix)
    for branch in u.branches:
        with pytest.raises(MissingBranch, match=branch.value):
            read_order(without_branch(message, branch), arena.reader, "cpu", no_noise)
    for i, condition in enumerate(message.conditions):
        assert isinstance(condition, Stored)
        fewer = msgspec.structs.replace(condition, runs=condition.runs[:-1])
        conditions = (*message.conditions[:i], fewer, *message.conditions[i + 1 :])
        with pytest.raises(BadHandover, match="rows of a prefix were handed over"):
            read_order(spoil(message, conditions=conditions), arena.reader, "cpu", no_noise)
    with pytest.raises(BadHandover, match="a run that was not handed over"):
        read_order(
            spoil(message, prefix=msgspec.structs.replace(prefix.pages, runs=prefix.pages.runs[:-1])),
            arena.reader,
            "cpu",
            no_noise,
        )
    for units, sentence in ((prefix.pages.units[:-1], "keys were handed over"), ((), "0 keys")):
        with pytest.raises(BadHandover, match=sentence):
            check_order(spoil(message, prefix=msgspec.structs.replace(prefix.pages, units=units)))
    more = msgspec.structs.replace(
        prefix.pages, runs=(*prefix.pages.runs, prefix.pages.runs[0]), units=(*prefix.pages.units, None)
    )
    with pytest.raises(BadHandover, match="that no branch reads"):
        check_order(spoil(message, prefix=more))
    with pytest.raises(BadHandover, match="all to be prefilled"):
        read_order(spoil(message, prefix=None), arena.reader, "cpu", no_noise)
    with pytest.raises(BadHandover, match="was not handed over"):
        read_order(spoil(message, conditions=message.conditions[:-1]), arena.reader, "cpu", no_noise)
    with pytest.raises(UnderpaintError):
        write_order(u.order, "a", arena, TERMS, Prefix.of(u.views[:2], u.order.conditions[:2], "fp32"))
    for slab in slabs_of(message):
        arena.release(slab)


@pytest.mark.parametrize("excess", [1, -1])
def test_u22_a_prefix_with_a_row_too_many_or_too_few_is_refused(
    understanding: Understanding, arena: Arena, excess: int
) -> None:
    u = understanding
    prefix = u.prefix()
    message = write_order(u.order, "a", arena, TERMS, prefix)
    runs = list(prefix.pages.runs)
    runs[-1] = replace(runs[-1], num_rows=runs[-1].num_rows + excess)
    with pytest.raises(BadHandover, match="rows of a prefix were handed over"):
        check_order(spoil(message, prefix=msgspec.structs.replace(prefix.pages, runs=tuple(runs))))
    with pytest.raises(BadHandover, match="do not have the rows"):
        borrow(message, u.pool, runs)
    with pytest.raises(BadHandover, match="does not have the pages"):
        borrow(message, u.pool, [replace(run, pages=(10**6,)) for run in prefix.pages.runs])
    with pytest.raises(BadHandover, match="stored as bf16, and the pool as fp32"):
        borrow(spoil(message, prefix=msgspec.structs.replace(prefix.pages, codec="bf16")), u.pool, prefix.pages.runs)
    wrong = arena.lease(slab_bytes(u.pool, sum(prefix.pages.rows) + excess), "generation", TERMS.deadline)
    with pytest.raises(BadHandover, match="rows take"):
        Mover(u.pool).gather(prefix.pages.runs, arena, wrong)
    for slab in (wrong, *slabs_of(message)):
        arena.release(slab)
