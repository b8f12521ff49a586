"""How fast attention is, beside its peers and the mask's true area: ``underpaint bench attention``.

Tables: the seeds' (LightLLM's public benchmark, all 15 rows), the same lengths with large images, Qwen-Image prefill
and steps with references, text decode. Everything of one row is timed in one go, in CUDA graphs, in turns, because
the clock of a busy card drifts: medians, planning not included. Each cell of ours is checked against fp32 first.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from underpaint.bench import attention_peers as peers
from underpaint.bench.attention_peers import Pass
from underpaint.bench.results import Bars
from underpaint.bench.results import write as write_results
from underpaint.kernels.hybrid_attention_problems import Part, lightllm, make_problem, qwen, text_decode
from underpaint.kernels.hybrid_attention_timing import graph_times, host_times
from underpaint.layout import Layout
from underpaint.report import WRONG, Cell, Report, Table, machine

TABLES = ("seed", "large images", "qwen prefill", "qwen step", "text decode")
CHECKED = ("underpaint", "underpaint_in_order", "underpaint_triton", "fa3_hybrid", "plain")
"""What computes our mask on our inputs; peers get inputs of their own."""
OURS = ("underpaint", "plain")
"""The column whose rate is told: on a CPU there is but the second."""
ALLOWED = 2
"""Error against fp32, of that of the plain path."""
CHECK_ROWS = 512
"""About how many rows of a pass are compared with fp32."""


@dataclass(frozen=True)
class Row:
    """One line of a table. ``key``: what names it in the JSON."""

    table: str
    key: dict[str, int]
    sequences: list[Part]
    kv_heads: int
    num_heads: int = 32

    @property
    def name(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.key.items())


def rows() -> Iterator[Row]:
    """All rows at full size. The seeds' 65536 is up to 4096 new rows behind up to 61440 cached ones."""
    for batch in (8, 16, 32, 64, 128):
        for longest, new, cached in ((4096, 4096, 0), (8192, 8192, 0), (65536, 4096, 61440)):
            key = {"batch": batch, "max_seq_len": longest}
            yield Row("seed", key, lightllm(batch, new, cached).sequences(), kv_heads=8)
    for batch in (8, 16):
        key = {"batch": batch, "max_seq_len": 8192}
        yield Row("large images", key, lightllm(batch, 8192).with_large_images().sequences(), kv_heads=8)
    for batch in (1, 2):
        for table, decode in (("qwen prefill", False), ("qwen step", True)):
            for num in (0, 1, 2, 4, 10):
                key = {"batch": batch, "references": num}
                yield Row(table, key, [qwen(num, decode)] * batch, kv_heads=32)
    for batch in (1, 2, 4, 8, 16, 32, 64):
        yield Row("text decode", {"sequences": batch, "cached": 8192}, text_decode(batch, 8192), kv_heads=8)


def tiny_rows() -> Iterator[Row]:
    """For a CPU: a line a table, to see that everything runs."""
    yield Row("seed", {"batch": 2, "max_seq_len": 64}, lightllm(2, 64).sequences(), kv_heads=2, num_heads=4)
    yield Row("qwen step", {"batch": 1, "references": 1}, [qwen(1, True, (4, 6), 10)], kv_heads=4, num_heads=4)
    yield Row("text decode", {"sequences": 2, "cached": 200}, [(Layout.of([201]), 200)] * 2, kv_heads=2, num_heads=4)


@dataclass(frozen=True)
class Result:
    """``times``: medians in ms by column. ``notes``: why a column is not there."""

    row: Row
    tflops: float
    times: dict[str, float]
    errors: dict[str, tuple[float, float]]
    notes: dict[str, str]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {value:.3f}" for name, value in self.times.items())
        notes = "".join(f"; {name}: {note}" for name, note in self.notes.items())
        return f"{self.row.table}, {self.row.name}: {times}{notes}"

    def as_json(self) -> dict[str, Any]:
        times = {f"{name}_ms": round(value, 4) for name, value in self.times.items()}
        errors = {f"{name}_error": [float(f"{x:.2e}") for x in value] for name, value in self.errors.items()}
        row = {"table": self.row.table, **self.row.key, "tflop": self.tflops, **times, **errors}
        return {**row, "notes": self.notes} if self.notes else row


def attention(
    device: str,
    lightllm_path: Path | None = None,
    flex: bool = False,
    tables: Sequence[str] = (),
    progress: Callable[[Result], object] = lambda result: None,
) -> tuple[Report, list[Result]]:
    """Measure the rows of ``tables`` (all if empty); on a CPU tiny ones, with the plain computation alone."""
    small = not device.startswith("cuda")
    by_name = columns(device, lightllm_path, flex)
    chosen = [row for row in (tiny_rows() if small else rows()) if not tables or row.table in tables]
    made = [measure(row, device, by_name, progress) for row in chosen]
    notes: tuple[str, ...] = (
        machine(device),
        f"command: underpaint {' '.join(sys.argv[1:])}",
        "Medians in ms of CUDA graphs in turns, each after a rest; TFLOP/s of ours, over the mask's area.",
        *(["This is a CPU: tiny shapes, one column, nothing to compare."] if small else []),
    )
    notes += tuple(f"{r.row.table}, {r.row.name}, {name}: {note}" for r in made for name, note in r.notes.items())
    return Report(notes, tuple(_table(name, made) for name in dict.fromkeys(r.row.table for r in made))), made


Column = Callable[[Pass], Callable[[], Tensor] | None]


def columns(device: str, lightllm_path: Path | None, flex: bool) -> dict[str, Column]:
    """Ours and the peers that are here, by the name of their column."""
    from underpaint.kernels import hybrid_attention_gluon, hybrid_attention_triton

    if not device.startswith("cuda"):
        return {"plain": lambda given: given.problem.plain}
    found: dict[str, Column] = {"underpaint": lambda given: given.problem.runner(hybrid_attention_triton)}
    if torch.cuda.get_device_capability(device) == (9, 0):
        found = {
            "underpaint": lambda given: given.problem.runner(hybrid_attention_gluon),
            "underpaint_in_order": lambda given: given.in_order.runner(hybrid_attention_gluon),
            "underpaint_triton": lambda given: given.problem.runner(hybrid_attention_triton),
        }
        if find_spec("fa3_fwd") is not None:
            found |= {"fa3_causal": peers.fa3_causal, "fa3_dense": peers.fa3_dense, "fa3_hybrid": peers.fa3_hybrid}
    found |= {"cudnn": peers.cudnn, "fa2": peers.flash}
    if flex:
        found["flex"] = peers.flex
    if lightllm_path is not None:
        found["lightllm_triton"] = peers.lightllm(lightllm_path)
    return found


@torch.inference_mode()
def measure(row: Row, device: str, by_name: dict[str, Column], progress: Callable[[Result], object]) -> Result:
    make = lambda shuffled: make_problem(  # noqa: E731
        row.sequences, row.num_heads, row.kv_heads, device=device, shuffled=shuffled
    )
    torch.manual_seed(0)
    given = Pass(make(True), row.sequences, lambda: make(False))
    every = -(-len(given.problem.q) // CHECK_ROWS)
    calls, errors, notes = {}, {}, {}
    for name, column in by_name.items():
        try:
            call = column(given)
            if call is None:
                continue
            out = call()
            calls[name] = call
            if name in CHECKED:
                problem = given.in_order if name == "underpaint_in_order" else given.problem
                errors[name] = mine, plain = problem.error(out, every)
                if not mine <= ALLOWED * plain:  # NaN is wrong too
                    notes[name] = f"{WRONG}: error {mine:.1e} against fp32, plain {plain:.1e}"
        except (RuntimeError, TritonError) as error:  # it refuses the shape, or has no memory for it
            notes[name] = str(error).splitlines()[0][:120]
    timer = graph_times if device.startswith("cuda") else host_times
    result = Result(row, given.problem.flops / 1e12, timer(calls), errors, notes)
    progress(result)
    return result


def _verdict(errors: Collection[tuple[float, float]]) -> str:
    """Of the worst column that is checked, which is NaN if there is one."""
    if not errors:
        return "-"
    worst = torch.tensor([error / plain for error, plain in errors]).max().item()
    return f"{'' if worst <= ALLOWED else f'{WRONG} '}{worst:.2f}"


def _table(name: str, results: Sequence[Result]) -> Table:
    chosen = [result for result in results if result.row.table == name]
    names = list(dict.fromkeys(column for result in chosen for column in result.times))
    lines: list[tuple[Cell, ...]] = []
    for result in chosen:
        ours = next((result.times[column] for column in OURS if column in result.times), None)
        rate = "-" if ours is None else f"{result.tflops / ours * 1000:.0f}"
        cells = [result.times.get(column, "-") for column in names]
        lines.append((*result.row.key.values(), *cells, rate, _verdict(result.errors.values())))
    return Table(name, (*chosen[0].row.key, *names, "TFLOP/s", "error of plain"), lines)


def write(directory: Path, report: Report, results: Sequence[Result]) -> None:
    """``attention.md``, ``attention.json`` and ``attention.svg`` in ``directory``; bars are TFLOP/s over the mask's
    true area."""
    found = {"notes": list(report.notes), "rows": [result.as_json() for result in results]}
    bars = [
        Bars(f"{r.row.table}: {r.row.name}", {name: r.tflops / ms * 1000 for name, ms in r.times.items()})
        for r in results
    ]
    write_results(directory, "attention", report, found, bars, "TFLOP/s over the mask's area")
