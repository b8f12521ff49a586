"""How fast full-size models paint, beside what the card's matrix products allow and beside their peers in the same run.

Random weights of the released sizes, no checkpoint; sequences as a request makes them, through the real pages, prefix
cache, runner and graphs. Steps of all forms of ours and of the peers take turns, so that clocks and heat are the same
for all. The limit is the operations at the rate of the model's own products, measured in the same run with as many
rows. On a CPU a small model stands in, to show that the benchmark runs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from underpaint.bench.contenders import PLAIN, Contender, Form, Ours
from underpaint.bench.measuring import Spread, collect, wait, wall_ms
from underpaint.bench.results import Bars
from underpaint.bench.results import write as write_results
from underpaint.bench.scenes import (
    SIDE_STEP,
    QwenStage,
    Scene,
    Stage,
    linear_operations,
    make_stage,
    prefix_attention,
    prefix_rows,
    step_attention,
)
from underpaint.config import EngineConfig, resolve
from underpaint.errors import BadConfig
from underpaint.kv.tile_codec import FP8_TILES
from underpaint.layout import Grid
from underpaint.models.fp8 import quantise_rows
from underpaint.models.painter import Condition
from underpaint.report import Bytes, Cell, Report, Table, machine

STEPS_A_TURN = 5
"""Of one contender before the next has its turn."""
REST_SECONDS = 0.2
"""Before each turn: a card at its power limit is faster for a while behind a contender that needs less of it."""
FIRST_STEPS = 3
"""How often the first step, with its prefill, is measured."""
SIGMA = 0.7
PEERS = ("eager", "compiled")
"""Of diffusers; the last one is what ratios are to."""
CPU_SIDE, CPU_REFERENCE_SIDE = 256, 64


@dataclass(frozen=True)
class Memory:
    """Bytes beyond the weights at the peak of a first and a further step: of tensors, and held from the device."""

    allocated: int
    reserved: int


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a contender in a scene. ``second``: of ours, the first step with the same references and another
    prompt. ``difference``: of its velocity from the last contender's. ``limits``: of a step, and of a first step."""

    name: str
    step: Spread
    first: Spread
    second: Spread | None
    memory: Memory | None
    difference: float
    limits: tuple[float, float]


@dataclass(frozen=True)
class Result:
    """Of a scene. ``limits``: milliseconds of a step, and of a first step, in each form."""

    scene: Scene
    measured: list[Measured]
    limits: dict[Form, tuple[float, float]]

    @property
    def peer(self) -> Measured | None:
        """The last contender, if there are several."""
        return self.measured[-1] if len(self.measured) > 1 else None

    def as_json(self) -> dict[str, Any]:
        return {"scene": self.scene.name, "contenders": [asdict(m) for m in self.measured]}


@dataclass(frozen=True)
class Plan:
    """What to measure. ``quantize``, ``attention``, ``kv_codecs``: ours in each with each of these. ``peers``: of
    ``PEERS``."""

    family: str
    sides: tuple[int, ...]
    references: tuple[int, ...]
    guided: bool
    quantize: tuple[str, ...]
    kv_codecs: tuple[str, ...]
    attention: tuple[str, ...]
    read_graphs: str
    peers: tuple[str, ...]
    num_steps: int
    budget_seconds: float


def step(plan: Plan, device: str, seed: int = 0) -> tuple[Report, list[Result]]:
    """Measure every scene of the plan; those left when the budget is spent are named and not measured. Raises
    BadConfig."""
    if uneven := [side for side in plan.sides if side < SIDE_STEP or side % SIDE_STEP]:
        raise BadConfig(f"size is {uneven[0]}; it must be a multiple of {SIDE_STEP}, or a smaller picture is measured")
    if plan.num_steps < 1:
        raise BadConfig(f"steps is {plan.num_steps}; it must be at least 1")
    if FP8_TILES.name in plan.kv_codecs and ("fp8" not in plan.attention or plan.family != "qwen"):
        raise BadConfig(f"kv_codec {FP8_TILES.name} is for Qwen-Image with attention fp8: name that too")
    config = resolve(EngineConfig(device=device, read_graphs=plan.read_graphs))
    on_gpu = config.device.startswith("cuda")
    if not on_gpu:
        config = replace(config, step_graphs="on")
    deadline = time.monotonic() + plan.budget_seconds
    with torch.inference_mode():
        ours: list[Ours] = []
        for quantize in plan.quantize:
            config = replace(config, quantize=quantize)
            stage = make_stage(plan.family, config, not on_gpu, seed)
            ours += [
                Ours(stage, resolve(replace(config, attention_backend=attention, kv_codec=codec)), codec)
                for attention in plan.attention
                for codec in _codecs(plan, attention)
            ]
        peers, absent = _peers(plan, stage, on_gpu)
        results: list[Result] = []
        notes = [machine(config.device), *_what(plan, config, stage, on_gpu), *absent]
        for scene in _scenes(plan, on_gpu):
            if time.monotonic() > deadline:
                notes.append(f"not measured for lack of time: {scene.name}")
                continue
            results.append(_measure(stage, ours, peers, scene, plan.num_steps, config))
    steps, firsts = ([row for r in results for row in rows(r)] for rows in (_step_rows, _first_rows))
    again: list[tuple[Cell, ...]] = [
        (r.scene.name, m.name, str(m.second), m.second.median / m.step.median)
        for r in results
        for m in r.measured
        if m.second
    ]
    tables = (
        Table(f"{stage.name}: a step, ms", STEP_COLUMNS, steps),
        Table("The first step with its prefill, ms, and bytes beyond the weights", FIRST_COLUMNS, firsts),
        Table("A second request with the same references: its first step, prompt included", AGAIN, again),
    )
    return Report(tuple(notes), tables), results


def write(directory: Path, report: Report, results: Sequence[Result]) -> None:
    """``step.md``, ``step.json`` and ``step.svg`` in ``directory``; bars are milliseconds of a step."""
    found = {"notes": list(report.notes), "scenes": [result.as_json() for result in results]}
    bars = [
        Bars(
            r.scene.name,
            {_limit_name(form): limits[0] for form, limits in r.limits.items()}
            | {m.name: m.step.median for m in r.measured},
        )
        for r in results
    ]
    write_results(directory, "step", report, found, bars, "a denoising step, ms")


def _codecs(plan: Plan, attention: str) -> Sequence[str]:
    """Pages of tiles only with attention that reads them in place."""
    return [codec for codec in plan.kv_codecs if codec != FP8_TILES.name or attention == "fp8"]


STEP_COLUMNS = ("scene", "who", "ms", "of limit", "of peer", "velocity off peer")
FIRST_COLUMNS = ("scene", "who", "ms", "of limit", "of peer", "allocated", "reserved")
AGAIN = ("scene", "who", "first step, ms", "of a step")


def _what(plan: Plan, config: EngineConfig, stage: Stage, on_gpu: bool) -> list[str]:
    weights = "random weights" if on_gpu else "a small stand-in model: these times say nothing"
    return [
        f"{stage.name}, {weights}; {config.dtype}, K/V {' and '.join(plan.kv_codecs)}, attention "
        f"{' and '.join(plan.attention)}, "
        f"step_graphs {config.step_graphs}, read_graphs {config.read_graphs}",
        f"{_num_turns(plan.num_steps) * STEPS_A_TURN} steps a point in turns of {STEPS_A_TURN}, each after a rest; "
        "a step is a pass",
        "limit: operations at the rate of the model's own products in this run; peer: the last one of the scene",
    ]


def _scenes(plan: Plan, on_gpu: bool) -> list[Scene]:
    branches, reference_side = (2 if plan.guided else 1), (1024 if on_gpu else CPU_REFERENCE_SIDE)
    sides = plan.sides if on_gpu else (CPU_SIDE,)
    scenes = [Scene(side, n, branches, reference_side) for side in sides for n in plan.references]
    return sorted(scenes, key=lambda scene: scene.side * (1 + scene.num_references))


def _peers(plan: Plan, stage: Stage, on_gpu: bool) -> tuple[list[Contender], list[str]]:
    """Those that can be imported, and what is to be said of the others. Raises BadConfig."""
    if unknown := set(plan.peers) - set(PEERS):
        raise BadConfig(f"{', '.join(sorted(unknown))} is no peer; use {', '.join(PEERS)}")
    if not plan.peers or not isinstance(stage, QwenStage):
        return [], ["no peers: " + ("not asked for" if not plan.peers else "none can be imported for this family")]
    if find_spec("diffusers") is None:
        return [], ["no peers: diffusers is not installed"]
    from underpaint.bench.peers import Diffusers

    chosen = [name for name in PEERS if name in plan.peers and (on_gpu or name == "eager")]
    absent = [] if on_gpu or "compiled" not in plan.peers else ["no compiled peer on a CPU"]
    return [Diffusers(stage.plain, name == "compiled") for name in chosen], absent


def _measure(
    stage: Stage, ours: Sequence[Ours], peers: Sequence[Contender], scene: Scene, num_steps: int, config: EngineConfig
) -> Result:
    device, contenders = config.device, [*ours, *peers]
    conditions, grid = stage.conditions(scene), stage.grid(scene.side)
    state = stage.state(grid)
    spare = sum(condition.layout.num_rows for condition in conditions)
    memory = [_peak(device, contender, conditions, (state, grid, SIGMA)) for contender in contenders]
    for of_ours in ours:
        of_ours.open(conditions, spare)
    first = [_first(device, partial(c.begin, conditions, state, grid, SIGMA)) for c in contenders]
    errors = _differences([contender.step() for contender in contenders])
    second = [_second(device, c, stage, conditions, state, grid) if isinstance(c, Ours) else None for c in contenders]
    steps: list[list[float]] = [[] for _ in contenders]
    for _ in range(_num_turns(num_steps)):
        for times, contender in zip(steps, contenders, strict=True):
            times += _turn(device, contender)
    limits = _limits(stage, scene, conditions, config, [of_ours.form for of_ours in ours])
    for contender in contenders:
        contender.end()
    collect(device)
    measured = []
    for i, contender in enumerate(contenders):
        form = contender.form if isinstance(contender, Ours) else PLAIN
        spread = Spread.of(steps[i])
        measured.append(Measured(contender.name, spread, first[i], second[i], memory[i], errors[i], limits[form]))
    return Result(scene, measured, limits)


def _peak(
    device: str, contender: Contender, conditions: Sequence[Condition], arguments: tuple[Tensor, Grid, float]
) -> Memory | None:
    """Of a first and a further step, with nothing of any contender but weights there before."""
    if not device.startswith("cuda"):
        if isinstance(contender, Ours):
            contender.open(conditions, 0)
        contender.begin(conditions, *arguments)
        contender.end()
        return None
    collect(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    if isinstance(contender, Ours):
        contender.open(conditions, 0)
    contender.begin(conditions, *arguments)
    contender.step()
    wait(device)
    peak = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    contender.end()
    return Memory(peak[0] - before[0], peak[1] - before[1])


def _first(device: str, begin: Callable[[], object]) -> Spread:
    """Once to compile, then timed; afterwards the contender goes on from there."""
    begin()
    return wall_ms(begin, FIRST_STEPS, device)


def _second(
    device: str, ours: Ours, stage: Stage, conditions: Sequence[Condition], state: Tensor, grid: Grid
) -> Spread:
    """The first step with the references of ``conditions``, which are known, and other prompts."""
    prompts = iter([stage.other_prompt(conditions) for _ in range(FIRST_STEPS + 1)])
    return _first(device, lambda: ours.go_on(next(prompts), state, grid, SIGMA))


def _num_turns(num_steps: int) -> int:
    """In which there are at least so many steps."""
    return -(-num_steps // STEPS_A_TURN)


def _differences(velocities: Sequence[Sequence[Tensor]]) -> list[float]:
    """Of each contender from the last one, of all branches: relative to the size of the last one's."""
    packed = [torch.cat(list(of_branches)).float() for of_branches in velocities]
    return [((x - packed[-1]).norm() / packed[-1].norm()).item() for x in packed]


def _turn(device: str, contender: Contender) -> list[float]:
    """Milliseconds of each step of a turn, from the end of one to the end of the next."""
    if not device.startswith("cuda"):
        return [wall_ms(contender.step, 1, device).median for _ in range(STEPS_A_TURN)]
    time.sleep(REST_SECONDS)
    contender.step()  # the clocks and caches of whoever was before
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS_A_TURN + 1)]
    events[0].record()
    for event in events[1:]:
        contender.step()
        event.record()
    wait(device)
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def _limits(
    stage: Stage, scene: Scene, conditions: Sequence[Condition], config: EngineConfig, forms: Sequence[Form]
) -> dict[Form, tuple[float, float]]:
    """Milliseconds of a step, and of a first step: as all is plain, and in each of ``forms``."""
    rows = len(conditions) * stage.grid(scene.side)[0] * stage.grid(scene.side)[1]
    shapes = [(rows, outputs, inputs) for outputs, inputs in stage.products]
    rates = [_rate(shapes, config, quantised=False)]
    if any(form != PLAIN for form in forms):
        rates.append(_rate(shapes, config, quantised=True))
    limits = {}
    for form in dict.fromkeys((PLAIN, *forms)):
        products, attention = rates[form.linears], rates[form.attention]
        of_step = linear_operations(stage, rows) / products + step_attention(stage, scene, conditions) / attention
        of_prefix = linear_operations(stage, prefix_rows(conditions)) / products
        of_prefix += prefix_attention(stage, conditions) / attention
        limits[form] = of_step * 1e3, (of_step + of_prefix) * 1e3
    return limits


def _limit_name(form: Form) -> str:
    return "limit" + form.suffix


def _rate(shapes: Sequence[tuple[int, int, int]], config: EngineConfig, quantised: bool) -> float:
    """Operations a second of products (rows, inputs) x (outputs, inputs), sustained: one after another for a while, as
    in a step."""
    calls: list[Callable[[], Tensor]] = []
    for m, n, k in shapes:
        x, weight = (torch.randn(size, k, dtype=config.torch_dtype, device=config.device) for size in (m, n))
        calls.append(_quantised_product(x, weight) if quantised else partial(torch.matmul, x, weight.mT))
    times = [wall_ms(lambda: [call() for call in calls * 8], 1, config.device).median for _ in range(6)]
    return 8 * sum(2 * m * n * k for m, n, k in shapes) / Spread.of(times[1:]).median * 1e3


def _quantised_product(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """The product alone, its factors in e4m3 before."""
    (x8, x_scale), (w8, w_scale) = quantise_rows(x), quantise_rows(weight)
    if not x.is_cuda:
        return lambda: x8.float() @ w8.float().T
    return lambda: torch._scaled_mm(x8, w8.T, x_scale[:, None], w_scale[None], out_dtype=x.dtype, use_fast_accum=True)


def _step_rows(result: Result) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = [
        (result.scene.name, _limit_name(form), f"{limits[0]:.1f}", "", "", "") for form, limits in result.limits.items()
    ]
    for m in result.measured:
        of_peer = (m.step.median / result.peer.step.median, m.difference) if result.peer else ("", "")
        rows.append((result.scene.name, m.name, str(m.step), m.step.median / m.limits[0], *of_peer))
    return rows


def _first_rows(result: Result) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = [
        (result.scene.name, _limit_name(form), f"{limits[1]:.1f}", "", "", "", "")
        for form, limits in result.limits.items()
    ]
    for m in result.measured:
        memory: tuple[Cell, ...] = (Bytes(m.memory.allocated), Bytes(m.memory.reserved)) if m.memory else ("", "")
        of_peer = m.first.median / result.peer.first.median if result.peer else ""
        rows.append((result.scene.name, m.name, str(m.first), m.first.median / m.limits[1], of_peer, *memory))
    return rows
