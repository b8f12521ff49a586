"""Requests as a server has them, through the real engine: unlike ones together, fp8 beside plain, hundreds in a row.

Random weights of the released sizes; prefixes, pages, scheduler, graphs and samplers are those of a server, encoders
and the VAE are left out. On a CPU a small model stands in, to show that the benchmark runs.
"""

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from underpaint.bench.fidelity import state_psnr
from underpaint.bench.measuring import Spread, collect, wait, wall_ms
from underpaint.bench.scenes import SIDE_STEP, Stage, make_stage
from underpaint.capture.recorder import GraphCounts
from underpaint.config import EngineConfig, resolve
from underpaint.errors import BadConfig
from underpaint.generation.job import Job, Order
from underpaint.layout import Grid
from underpaint.models.painter import Condition
from underpaint.report import WRONG, Bytes, Cell, Report, Table, cell, machine
from underpaint.sampling.guidance import Branch
from underpaint.service import Service, finish

TABLES = ("together", "fidelity", "memory")
KV_BYTES, CPU_KV_BYTES = 16 << 30, 16 << 20
UNLIKE_SIDE, RANDOM_SIDE, CPU_SIDE = 512, 1024, 128
NUM_UNLIKE = 8
ROUNDS = 5
"""How often the unlike requests are painted together, and one after another."""
CFG_SCALE = 4.0
MIN_PSNR = 33.0
"""dB that fp8 must keep of plain pictures, and that a picture must keep which others are painted with."""
CPU_MIN_PSNR = 20.0
"""Of the stand-in, whose few channels average little away: what is broken is far below."""
MIN_HITS = 0.95
"""The share of passes over targets that must be replayed."""
SPARE_KEPT = 64 << 20
"""What the device's allocator may keep more without a tensor that needs it: three of its 20 MiB segments."""


@dataclass(frozen=True)
class Plan:
    """What to measure. ``side``: of the unlike requests, and the longest of random ones; None for the usual, and a CPU
    has its own. ``num_steps``: of the unlike requests; random ones have up to twice as many. ``num_requests``: random
    ones. ``quantize``: of all but the table of fidelity, which has both."""

    family: str
    tables: tuple[str, ...]
    quantize: str
    kv_codec: str
    side: int | None
    num_steps: int
    num_requests: int


@dataclass(frozen=True)
class Wish:
    """A request. ``grid``: of the picture. ``prompt_rows``: of the text behind the references."""

    grid: Grid
    num_references: int
    reference_side: int
    prompt_rows: int
    guided: bool
    num_steps: int
    seed: int

    def conditions(self, stage: Stage) -> list[Condition]:
        """Prefixes that nobody has in a cache."""
        return stage.prefixes(1 + self.guided, self.num_references, self.reference_side, self.prompt_rows)

    def order(self, stage: Stage, conditions: Sequence[Condition]) -> Order:
        sampler = stage.sampler(self.grid, self.num_steps, CFG_SCALE if self.guided else 1.0)
        of_branch = dict(zip((Branch.CONDITIONAL, Branch.UNCONDITIONAL), range(len(conditions)), strict=False))
        return Order(tuple(conditions), (Job(stage.noise(self.grid, self.seed), self.grid, sampler, of_branch),))


def requests(plan: Plan, device: str, seed: int = 0) -> Report:
    """The tables that the plan names. Raises BadConfig."""
    if plan.num_requests < 4:
        raise BadConfig(f"requests is {plan.num_requests}; it must be at least 4, one a quarter")
    if plan.num_steps < 1:
        raise BadConfig(f"steps is {plan.num_steps}; it must be at least 1")
    if plan.side is not None and (plan.side < 4 * SIDE_STEP or plan.side % SIDE_STEP):
        raise BadConfig(f"size is {plan.side}; it must be a multiple of {SIDE_STEP}, and at least {4 * SIDE_STEP}")
    config = resolve(EngineConfig(device=device, quantize=plan.quantize, kv_codec=plan.kv_codec))
    on_gpu = config.device.startswith("cuda")
    config = replace(config, kv_cache_bytes=KV_BYTES if on_gpu else CPU_KV_BYTES)
    if not on_gpu:
        config = replace(config, step_graphs="on")
    measures = dict(zip(TABLES, (_together, _fidelity, _memory), strict=True))
    sides = dict(zip(TABLES, (UNLIKE_SIDE, UNLIKE_SIDE, RANDOM_SIDE), strict=True))
    tables: list[Table] = []
    for name in plan.tables:
        if name not in measures:
            raise BadConfig(f"table is {name!r}; it must be one of {', '.join(TABLES)}")
    with torch.inference_mode():
        for name in plan.tables:
            side = (plan.side or sides[name]) if on_gpu else CPU_SIDE
            tables.append(measures[name](plan, side, config, seed))
            collect(config.device)
    weights = "random weights" if on_gpu else "a small stand-in model: these times and distances say nothing"
    notes = (
        machine(config.device),
        f"{weights}; {config.dtype}, quantize {config.quantize}, K/V {config.kv_codec}",
        "PSNR: of the last states, the peak being four standard deviations of the plain state",
    )
    return Report(notes, tuple(tables))


class _Engine:
    """A model with random weights, and what paints with it."""

    def __init__(self, family: str, config: EngineConfig, seed: int) -> None:
        self.stage = make_stage(family, config, not config.device.startswith("cuda"), seed)
        self.service = Service(self.stage.model, config)
        self.device = config.device

    @property
    def counts(self) -> GraphCounts:
        return replace(self.service.runner.graphs)

    def paint(self, orders: Sequence[Order]) -> list[Tensor]:
        """All at once, with nothing in the cache; the last state of each."""
        self.service.tree.clear()
        for order in orders:
            self.service.submit_order(order)
        for order in orders:
            finish(self.service.finish_order(order))
        return [order.jobs[0].state for order in orders]


def unlike(stage: Stage, side: int, num_steps: int) -> list[Wish]:
    """Requests for pictures of one size that have nothing else in common: prompts of eight lengths, none to two
    references, every other one guided."""
    grid = stage.grid(side)
    return [
        Wish(grid, i % 3, side, 40 + 57 * i, guided=i % 2 == 1, num_steps=num_steps, seed=i) for i in range(NUM_UNLIKE)
    ]


def _together(plan: Plan, side: int, config: EngineConfig, seed: int) -> Table:
    """Times of the unlike requests, in turns: all at once, and each after the one before."""
    engine = _Engine(plan.family, config, seed)
    stage = engine.stage
    wishes = unlike(stage, side, plan.num_steps)
    prefixes = [wish.conditions(stage) for wish in wishes]

    def orders() -> list[Order]:
        return [wish.order(stage, conditions) for wish, conditions in zip(wishes, prefixes, strict=True)]

    def alone() -> list[Tensor]:
        return [state for order in orders() for state in engine.paint([order])]

    def together() -> list[Tensor]:
        return engine.paint(orders())

    distances = [state_psnr(ours, plain) for ours, plain in zip(together(), alone(), strict=True)]
    worst = torch.tensor(distances).min().item()  # NaN if one is, where Python's own may pass it over
    turns = [(wall_ms(alone, 1, engine.device), wall_ms(together, 1, engine.device)) for _ in range(ROUNDS)]
    spreads = [Spread.of([spread.median for spread in of_way]) for of_way in zip(*turns, strict=True)]
    rows: list[tuple[Cell, ...]] = []
    for name, spread in zip(("one after another", "together"), spreads, strict=True):
        a_second = 1e3 * len(wishes) / spread.median
        verdict = _distance(worst, MIN_PSNR) if name == "together" else "reference"
        rows.append((name, str(spread), a_second, spreads[0].median / spread.median, verdict))
    columns = ("way", "ms", "pictures/s", "throughput", "PSNR, worst")
    title = f"{stage.name}: {NUM_UNLIKE} unlike requests, {side} x {side}, {plan.num_steps} steps, prefill included"
    return Table(title, columns, rows)


def _distance(psnr: float, least: float) -> str:
    """NaN is wrong too."""
    return f"{'' if psnr >= least else f'{WRONG} '}{psnr:.1f} dB"


def _fidelity(plan: Plan, side: int, config: EngineConfig, seed: int) -> Table:
    """The unlike requests, each alone: fp8 linears from the very weights, prefixes and noise of the plain model."""

    def states(quantize: str) -> list[Tensor]:
        engine = _Engine(plan.family, replace(config, quantize=quantize), seed)
        wishes = unlike(engine.stage, side, plan.num_steps)
        return [engine.paint([wish.order(engine.stage, wish.conditions(engine.stage))])[0].cpu() for wish in wishes]

    quantised = states("fp8")
    collect(config.device)
    least = MIN_PSNR if config.device.startswith("cuda") else CPU_MIN_PSNR
    rows: list[tuple[Cell, ...]] = []
    for i, (ours, plain) in enumerate(zip(quantised, states("none"), strict=True)):
        error = ((ours.float() - plain.float()).norm() / plain.float().norm()).item()
        rows.append((i + 1, i % 3, "yes" if i % 2 else "no", error, _distance(state_psnr(ours, plain), least)))
    title = f"{plan.family}: fp8 linears against {config.dtype}, {side} x {side}, {plan.num_steps} steps"
    return Table(title, ("request", "references", "guided", "relative error", "PSNR"), rows)


@dataclass(frozen=True)
class Moment:
    """After a request. ``allocated``: bytes of tensors. ``reserved``: held from the device, 0 on a CPU. ``compiled``:
    kernels, so far. ``kept``: what is held once the allocator has given back what it can, after the last request of a
    quarter; 0 after others, which it would slow down, and which could not break memory into pieces any more."""

    allocated: int
    reserved: int
    counts: GraphCounts
    compiled: int
    kept: int = 0


def _memory(plan: Plan, side: int, config: EngineConfig, seed: int) -> Table:
    """Random requests one after another: what they leave, and how their steps ran."""
    engine = _Engine(plan.family, config, seed)
    wishes = random_wishes(engine.stage, plan, side, seed)
    start, moments = engine.counts, list[Moment]()
    with _compilations() as compiled:
        for done, wish in enumerate(wishes, 1):
            engine.service.submit_order(order := wish.order(engine.stage, wish.conditions(engine.stage)))
            finish(engine.service.finish_order(order))
            del order
            moment = Moment(*_held(engine.device), engine.counts, len(compiled))
            if done in _quarters(len(wishes)):
                collect(engine.device)
                moment = replace(moment, kept=_held(engine.device)[1])
            moments.append(moment)
    state_bytes = engine.stage.noise(wishes[0].grid, 0).nbytes
    return memory_table(start, moments, state_bytes)


def random_wishes(stage: Stage, plan: Plan, side: int, seed: int) -> list[Wish]:
    """Of random sizes, references, prompts, guidance and steps. The first is the largest in all: what later ones need
    was there before."""
    rng, longest = random.Random(seed), side // SIDE_STEP

    def cells() -> int:
        return SIDE_STEP * rng.randint(longest // 2, longest) // stage.cell

    first = Wish(stage.grid(side), 2, side, 400, guided=True, num_steps=plan.num_steps, seed=0)
    others = [
        Wish(
            (cells(), cells()), rng.randint(0, 2), SIDE_STEP * rng.randint(longest // 2, longest),
            rng.randint(8, 400), rng.random() < 0.5, rng.randint(plan.num_steps, 2 * plan.num_steps), i,
        )
        for i in range(1, plan.num_requests)
    ]  # fmt: skip
    return [first, *others]


def memory_table(start: GraphCounts, moments: Sequence[Moment], state_bytes: int) -> Table:
    """By quarters; the first says how much there may be. A request that left a quarter of ``state_bytes``, the largest
    state, each time would be seen."""
    quarter, stops = len(moments) // 4, _quarters(len(moments))
    allowed = state_bytes * (len(moments) - quarter) // 4
    before, rows = Moment(0, 0, start, 0), list[tuple[Cell, ...]]()
    of_first: Moment | None = None
    for begin, stop in zip([0, *stops[:-1]], stops, strict=True):
        block, last = moments[begin:stop], moments[stop - 1]
        most = replace(last, allocated=max(m.allocated for m in block), reserved=max(m.reserved for m in block))
        counts = vars(last.counts).items()
        ran = GraphCounts(**{name: value - getattr(before.counts, name) for name, value in counts})
        verdict = "reference" if of_first is None else _flat(most, of_first, allowed, last.compiled - before.compiled)
        of_first = of_first or most
        sizes = Bytes(most.allocated), Bytes(most.reserved), Bytes(most.kept)
        rows.append((f"{begin + 1} to {stop}", *sizes, *_shares(ran), last.compiled - before.compiled, verdict))
        before = last
    ran = GraphCounts(**{name: value - getattr(start, name) for name, value in vars(before.counts).items()})
    share = ran.hits / max(1, ran.hits + ran.misses + ran.eager)
    verdict = f"{'ok' if share > MIN_HITS else WRONG} {100 * share:.1f} % replayed"
    rows.append(("all", "", "", "", *_shares(ran), before.compiled, verdict))
    columns = (
        "requests", "allocated", "reserved", "kept", "replayed", "captured", "eager", "evicted", "compiled", "verdict"
    )  # fmt: skip
    return Table(f"{len(moments)} random requests one after another, after each", columns, rows)


def _quarters(count: int) -> list[int]:
    """Where each ends."""
    return [count // 4, count // 4 * 2, count // 4 * 3, count]


def _shares(ran: GraphCounts) -> tuple[int, int, int, int]:
    return ran.hits, ran.misses, ran.eager, ran.evictions


def _flat(most: Moment, of_first: Moment, allowed: int, compiled: int) -> str:
    """How much is reserved while requests run says how long ago a graph was captured: then all is given back."""
    allocated, kept = most.allocated - of_first.allocated, most.kept - of_first.kept
    wrong = [f"{cell(Bytes(allocated))} more allocated"] if allocated > allowed else []
    wrong += [f"{cell(Bytes(kept))} more kept"] if kept > allowed + SPARE_KEPT else []
    wrong += [f"{compiled} kernels compiled"] if compiled else []
    return f"{WRONG}: {', '.join(wrong)}" if wrong else "ok"


def _held(device: str) -> tuple[int, int]:
    """Bytes of tensors, and held from the device; on a CPU those of all tensors there are. Garbage is not collected
    first: a server does not either."""
    if device.startswith("cuda"):
        wait(device)
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu"]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values()), 0


@contextmanager
def _compilations() -> Iterator[list[str]]:
    """The names of the Triton kernels that are compiled, or found compiled on disk, meanwhile."""
    from triton import knobs

    names: list[str] = []

    def listen(*, metadata: dict[str, Any], **_: Any) -> None:
        names.append(metadata["name"])

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        yield names
    finally:
        knobs.compilation.listener = before
