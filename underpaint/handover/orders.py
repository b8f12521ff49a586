"""Painting orders between the engine's own objects and messages; tensors go through slabs.

Both ends check what they write and read: every branch that a step needs is there, and every branch has exactly the rows
of its layout. Nothing is left out, made up or cut to size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from underpaint.errors import MissingBranch, UnderpaintError
from underpaint.generation.job import Job, Order
from underpaint.generation.prefix import Borrowed
from underpaint.handover.arena import Arena, ArenaReader, Slab
from underpaint.handover.faults import BadHandover
from underpaint.handover.messages import (
    Edit,
    Euler,
    Flow,
    Fresh,
    InPages,
    JobAt,
    Paint,
    PaintOrder,
    Plain,
    Seed,
    Stored,
    TensorAt,
)
from underpaint.handover.pools import DTYPES, NAMES
from underpaint.kv.codec import ALIGNMENT
from underpaint.kv.pool import PagePool, Run, View
from underpaint.kv.tree import Key, Unit
from underpaint.layout import Grid, Layout
from underpaint.models import qwen_image21
from underpaint.models.neo_unify import EditGuidance, FlowSampler, PaintGuidance
from underpaint.models.painter import Condition
from underpaint.sampling.guidance import PlainGuidance
from underpaint.sampling.schedule import EulerSampler, Schedule

Draw = Callable[[int, Grid], Tensor]
"""Noise of a seed for a grid, (tokens, channels), on the receiver's device."""


@dataclass(frozen=True)
class Terms:
    """On what terms slabs are leased: see ``Arena.lease``."""

    holder: str
    deadline: float
    wait_until: float = 0.0


@dataclass(frozen=True, eq=False)
class StoredCondition:
    """A branch whose prefix is in pages already. It shares nothing through the receiver's tree."""

    layout: Layout
    units: tuple[Unit, ...] = ()


@dataclass(frozen=True)
class Prefix:
    """The different runs that some views consist of, where they lie, and which of them each view reads, in order."""

    pages: InPages
    of_views: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, views: Sequence[View], conditions: Sequence[Condition], codec: str) -> "Prefix":
        """Runs that several views have in common are handed over once. ``conditions``: one a view, for their units."""
        keys: dict[Run, Key | None] = {}
        for view, condition in zip(views, conditions, strict=True):
            keys |= zip(view.runs, _keys(view, condition.units), strict=True)
        index = {run: i for i, run in enumerate(keys)}
        pages = InPages(tuple(keys), tuple(keys.values()), codec)
        return cls(pages, tuple(tuple(index[run] for run in view.runs) for view in views))


def _keys(view: View, units: Sequence[Unit]) -> Iterator[Key | None]:
    """Of the runs that are units; from the first that is none they are nobody else's."""
    start, left = 0, list(units)
    for run in view.runs:
        start += run.num_rows
        if not left or left[0].stop != start:
            left = []
        yield left.pop(0).key if left else None


def write_tensors(arena: Arena, tensors: Sequence[Tensor], terms: Terms) -> tuple[TensorAt, ...]:
    """Copy tensors into one slab. Raises ArenaFull."""
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    slab = arena.lease(size, terms.holder, terms.deadline, terms.wait_until)
    places = tuple(
        TensorAt(slab, start, NAMES[tensor.dtype], tuple(tensor.shape))
        for tensor, start in zip(tensors, starts, strict=True)
    )
    with arena.writing(slab) as data:
        for place, tensor in zip(places, tensors, strict=True):
            _within(data, place).copy_(tensor)
    return places


def read_tensors(reader: ArenaReader, places: Sequence[TensorAt], device: str) -> list[Tensor]:
    """Copies on ``device``. Raises StaleSlab, DamagedSlab, PeerStalled, BadHandover."""
    tensors = []
    for place in places:
        with reader.reading(place.slab) as data:
            tensors.append(torch.empty(place.shape, dtype=DTYPES[place.dtype], device=device))
            tensors[-1].copy_(_within(data, place))
    return tensors


def slabs_of(message: PaintOrder) -> tuple[Slab, ...]:
    """Every slab that an order lies in: what to release when it is read."""
    return tuple(dict.fromkeys(place.slab for place in _places(message)))


def views_of(message: PaintOrder) -> tuple[tuple[int, ...], ...]:
    """Which runs of its prefix each branch of an order reads."""
    return tuple(condition.runs for condition in message.conditions if isinstance(condition, Stored))


def write_order(
    order: Order,
    order_id: str,
    arena: Arena,
    terms: Terms,
    stored: Prefix | None = None,
    seeds: Sequence[int] | None = None,
) -> PaintOrder:
    """An order as a message; its tensors are in a slab when this returns.

    ``stored``: the prefix of its conditions, in order; None for conditions that generation prefills. ``seeds``: of the
    jobs' noise, which is then drawn again by the receiver instead of sent. Raises ArenaFull, MissingBranch,
    BadHandover.
    """
    fresh = [] if stored is not None else [_own(condition) for condition in order.conditions]
    tensors = [job.state for job in order.jobs] if seeds is None else []
    tensors += [tensor for condition in fresh for tensor in (condition.text, *condition.latents)]
    written = write_tensors(arena, tensors, terms) if tensors else ()
    places = iter(written)
    noise: list[TensorAt | Seed] = [next(places) for _ in order.jobs] if seeds is None else list(map(Seed, seeds))
    conditions: list[Fresh | Stored] = []
    for own in fresh:
        text, *latents = (next(places) for _ in (own.text, *own.latents))
        conditions.append(Fresh(own.layout, own.units, text, tuple(latents)))
    if stored is not None:
        conditions += [Stored(c.layout, runs) for c, runs in zip(order.conditions, stored.of_views, strict=False)]
    jobs = tuple(
        JobAt(job.grid, start, _sampler_data(job.sampler), dict(job.conditions), tuple(sorted(job.kept_steps)))
        for job, start in zip(order.jobs, noise, strict=True)
    )
    message = PaintOrder(order_id, tuple(conditions), jobs, stored.pages if stored else None, order.deadline)
    try:
        check_order(message)
    except UnderpaintError:
        for place in written[:1]:
            arena.release(place.slab)
        raise
    return message


def read_order(message: PaintOrder, reader: ArenaReader, device: str, draw: Draw) -> Order:
    """The order that a message describes, with copies of its tensors. It has no lease yet: one with ``Stored``
    conditions gets it from ``borrow``. Raises what ``read_tensors`` and ``check_order`` do."""
    check_order(message)
    tensors = iter(read_tensors(reader, _places(message), device))
    states = [draw(j.noise.seed, j.grid) if isinstance(j.noise, Seed) else next(tensors) for j in message.jobs]
    conditions: list[Condition] = []
    for condition in message.conditions:
        if isinstance(condition, Stored):
            conditions.append(StoredCondition(condition.layout))
            continue
        text, *latents = (next(tensors) for _ in (condition.text, *condition.latents))
        conditions.append(qwen_image21.Condition(condition.layout, text, tuple(latents), condition.units))
    jobs = [
        Job(state, data.grid, _sampler(data.sampler), data.conditions, kept_steps=frozenset(data.kept_steps))
        for state, data in zip(states, message.jobs, strict=True)
    ]
    return Order(tuple(conditions), tuple(jobs), message.deadline)


def borrow(message: PaintOrder, pool: PagePool, runs: Sequence[Run]) -> Borrowed:
    """The lease of an order whose prefix lies in ``runs`` of ``pool``: a mapped pool's, or those that it was copied
    into. Raises BadHandover unless they have the rows that were handed over, stored as they were."""
    prefix = message.prefix
    if prefix is None or tuple(run.num_rows for run in runs) != prefix.rows:
        raise BadHandover("the pages do not have the rows that were handed over")
    if prefix.codec != pool.codec.name:
        raise BadHandover(f"the rows are stored as {prefix.codec}, and the pool as {pool.codec.name}")
    if not all(0 <= page < pool.num_pages for run in runs for page in run.pages):
        raise BadHandover("the pool does not have the pages that were handed over")
    return Borrowed(pool, [View(pool, tuple(runs[i] for i in view)) for view in views_of(message)])


def check_order(message: PaintOrder) -> None:
    """Raises MissingBranch if a step of a job needs a branch that it does not have, and BadHandover if anything else
    is missing, too much, or of another size than it should be."""
    for condition in message.conditions:
        if isinstance(condition, Fresh) == (message.prefix is not None):
            raise BadHandover("the conditions of an order are either all to be prefilled, or all stored")
        if isinstance(condition, Stored):
            _check_stored(condition, message.prefix)
        else:
            _check_fresh(condition)
    for job in message.jobs:
        sampler = _sampler(job.sampler)
        for branch in dict.fromkeys(branch for step in range(sampler.num_steps) for branch in sampler.branches(step)):
            if branch not in job.conditions:
                raise MissingBranch(branch.value)
        if not all(0 <= index < len(message.conditions) for index in job.conditions.values()):
            raise BadHandover("a branch reads a condition that was not handed over")
        if isinstance(job.noise, TensorAt):
            _check_rows("noise", job.noise, job.grid[0] * job.grid[1])
    if message.prefix is not None:
        _check_prefix(message.prefix, views_of(message))


def _check_prefix(prefix: InPages, views: Sequence[Sequence[int]]) -> None:
    if len(prefix.units) != len(prefix.runs):
        raise BadHandover(f"{len(prefix.units)} keys were handed over for {len(prefix.runs)} runs")
    if {index for view in views for index in view} != set(range(len(prefix.runs))):
        raise BadHandover("a run was handed over that no branch reads")


def _check_stored(condition: Stored, prefix: InPages | None) -> None:
    rows = prefix.rows if prefix is not None else ()
    if not all(0 <= index < len(rows) for index in condition.runs):
        raise BadHandover("a branch reads a run that was not handed over")
    handed, needed = sum(rows[index] for index in condition.runs), condition.layout.num_rows
    if handed != needed:
        raise BadHandover(f"{handed} rows of a prefix were handed over, and it has {needed}")


def _check_fresh(condition: Fresh) -> None:
    layout = condition.layout
    _check_rows("text", condition.text, sum(s.stop - s.start for s in layout.segments if s.kind == "text"))
    if len(condition.latents) != len(layout.images):
        raise BadHandover(f"{len(condition.latents)} references were handed over, and there are {len(layout.images)}")
    for place, segment in zip(condition.latents, layout.images, strict=True):
        _check_rows("latents", place, segment.stop - segment.start)


def _check_rows(name: str, place: TensorAt, num_rows: int) -> None:
    if len(place.shape) != 2 or place.shape[0] != num_rows:
        raise BadHandover(f"{name} of shape {place.shape} were handed over, and {num_rows} rows are needed")


def _places(message: PaintOrder) -> list[TensorAt]:
    """In the order in which ``write_order`` lays them down."""
    places = [job.noise for job in message.jobs if isinstance(job.noise, TensorAt)]
    for condition in message.conditions:
        if isinstance(condition, Fresh):
            places += [condition.text, *condition.latents]
    return places


def _own(condition: Condition) -> qwen_image21.Condition:
    assert isinstance(condition, qwen_image21.Condition), "other families paint from stored prefixes"
    return condition


def _within(data: Tensor, place: TensorAt) -> Tensor:
    dtype = DTYPES[place.dtype]
    stop = place.start + prod(place.shape) * dtype.itemsize
    if place.start % ALIGNMENT or not 0 <= place.start <= stop <= data.nbytes:
        raise BadHandover("a tensor does not lie in its slab")
    return data[place.start : stop].view(dtype).view(place.shape)


def _sampler_data(sampler: object) -> Euler | Flow:
    if isinstance(sampler, EulerSampler):
        assert isinstance(sampler.guidance, PlainGuidance)
        return Euler(tuple(sampler.schedule.sigmas.tolist()), Plain(sampler.guidance.scale))
    assert isinstance(sampler, FlowSampler)
    guidance = sampler.guidance
    if isinstance(guidance, PaintGuidance):
        data: Paint | Edit = Paint(guidance.scale, guidance.norm, guidance.interval)
    else:
        assert isinstance(guidance, EditGuidance)
        data = Edit(guidance.scale, guidance.picture_scale, guidance.norm, guidance.interval)
    return Flow(tuple(sampler.times.tolist()), data)


def _sampler(data: Euler | Flow) -> EulerSampler | FlowSampler:
    if isinstance(data, Euler):
        return EulerSampler(Schedule(torch.tensor(data.sigmas)), PlainGuidance(data.guidance.scale))
    guidance = data.guidance
    if isinstance(guidance, Paint):
        made: PaintGuidance | EditGuidance = PaintGuidance(guidance.scale, guidance.norm, guidance.interval)
    else:
        made = EditGuidance(guidance.scale, guidance.picture_scale, guidance.norm, guidance.interval)
    return FlowSampler(torch.tensor(data.times), made)
