"""``python -m underpaint.kernels.check_on_gpu``: are the attention kernels right on this machine's GPU, and how fast?

First correctness on shapes of real models: the error against fp32 must be under twice that of the plain computation in
the same dtype, or in e4m3 under ``hybrid_attention_fp8.EXPECTED_ERROR``. Then times: medians of CUDA graphs, planning
not included (it is done once a pass), beside cuDNN where one dense call does the same. TFLOP/s count the pairs of a row
and a key that it sees. Ends with status 1 if anything was wrong or failed. ``underpaint bench attention`` measures
more, beside more peers.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime.errors import OutOfResources

from underpaint.kernels import hybrid_attention_fp8, hybrid_attention_gluon, hybrid_attention_triton
from underpaint.kernels.head_form import HeadForm
from underpaint.kernels.hybrid_attention_problems import (
    Kernel,
    Part,
    Problem,
    in_tiles,
    lightllm,
    make_problem,
    owned_slots,
    quantise,
    qwen,
    raise_peaks,
    text_decode,
)
from underpaint.kernels.hybrid_attention_timing import Calls, graph_times, host_times
from underpaint.kernels.kv_pack import kv_pack
from underpaint.kernels.kv_pack_tiles import kv_pack_tiles
from underpaint.kernels.pack_e4m3 import pack_launch, pack_pages, tiles_of
from underpaint.kernels.packed_tiles import PackedTiles
from underpaint.kernels.tiles import RowShape, StoredKV, TileShape
from underpaint.layout import Layout

KERNELS: dict[str, Kernel] = {
    "triton": hybrid_attention_triton, "gluon": hybrid_attention_gluon, "fp8": hybrid_attention_fp8
}  # fmt: skip
TILES = {
    "triton": (
        TileShape(128, 64, num_warps=8, num_stages=3, packs=True),
        TileShape(128, 128, num_warps=8, num_stages=2, packs=True),
    ),
    "gluon": tuple(
        TileShape(128, 128, num_warps=4, num_stages=stages, kernel="gluon", packs=True) for stages in (2, 3)
    ),
    "fp8": tuple(TileShape(128, 128, num_warps=4, num_stages=stages, kernel="fp8", packs=True) for stages in (4, 3, 6)),
}


class Report:
    """Prints a line a measurement; goes on after one that fails, and stops starting new ones after the budget."""

    def __init__(self, budget_seconds: float) -> None:
        self.deadline = time.monotonic() + budget_seconds
        self.num_bad = 0
        self.lines: dict[str, str] = {}

    def line(self, name: str, measure: Callable[[], str]) -> None:
        if time.monotonic() > self.deadline:
            print(f"{name:<38s} not run: out of time")
            return
        started = time.monotonic()
        try:
            text = measure()
        except (RuntimeError, AssertionError, OutOfResources) as error:
            text = f"FAILED {type(error).__name__}: {str(error)[:300]}"
        self.num_bad += "FAILED" in text or "WRONG" in text
        self.lines[name] = text
        print(f"{name:<38s} {text}   [{time.monotonic() - started:.1f} s]", flush=True)


@torch.inference_mode()
def check(make: Callable[[], Problem], kernel: Kernel) -> str:
    """The rule, see above, twice with what the first call left in the plan's queue; keys no row may see are NaN."""
    problem = make()
    call = problem.runner(kernel)
    ours = call()
    again = "" if torch.equal(call(), ours) else "  WRONG: the second call differs"
    if kernel is hybrid_attention_fp8:
        error, allowed = problem.relative_error(ours), hybrid_attention_fp8.EXPECTED_ERROR
        return f"{'ok' if error < allowed else 'WRONG'}  relative error {error:.4f}, allowed {allowed}{again}"
    error, allowed = problem.error(ours)
    verdict = "ok" if error < 2 * allowed + 1e-5 else "WRONG"  # 1e-5: in fp32 the plain computation is the exact one
    return f"{verdict}  error {error:.2e}, plain {allowed:.2e}{again}"


def poison(problem: Problem) -> Problem:
    """NaN in all slots behind the valid ones of the last page of each prefix."""
    assert problem.stored is not None
    for slot, count in [group.extents[-1] for group in problem.groups if group.extents]:
        for x in (problem.stored.k, problem.stored.v):
            x[slot + count : slot + 128] = 127 if x.dtype == torch.uint8 else float("nan")
    return problem


@torch.inference_mode()
def check_apart(kernel: Kernel) -> str:
    """NaN in the keys and values of one sequence of a pass changes no other."""
    problem = make_problem([(Layout.of([n, (5, 7), 9]), 0) for n in (20, 30, 3, 50)], 32, 8)
    broken = problem.groups[2]
    whole = torch.ones(len(problem.q), dtype=torch.bool)
    whole[broken.first : broken.first + broken.num_rows] = False
    want = problem.runner(kernel)()[whole]
    for x in (problem.k, problem.v):
        x[broken.first : broken.first + broken.num_rows] = float("nan")
    return "ok" if torch.equal(problem.runner(kernel)()[whole], want) else "WRONG: it does"


def fill_pages(problem: Problem, pages: PackedTiles) -> Callable[[], None]:
    """What keeps the prefixes of a problem in pages of tiles, as a pass over all their rows does."""
    assert problem.stored is not None
    slots = owned_slots(problem)
    k, v = problem.stored.k[slots], problem.stored.v[slots]
    return partial(pack_pages, k, v, pages, slots.int())


@torch.inference_mode()
def check_in_place(sequences: Sequence[Part]) -> str:
    """Prefixes in pages of tiles: filled as the plain statement fills them, and read as if packed anew, to the bit."""
    problem = make_problem(sequences, 32, 32)
    plain, pages = in_tiles(problem), in_tiles(problem)
    for x in (pages.k, pages.v):
        x.view(torch.uint8).fill_(0x7F)  # NaN
    fill_pages(problem, pages)()
    pairs = ((pages.k, plain.k), (pages.v, plain.v), (pages.facts[:, :3], plain.facts[:, :3]))
    filled = all(
        torch.equal(ours.contiguous().view(torch.uint8), x.contiguous().view(torch.uint8)) for ours, x in pairs
    )
    row_shape = RowShape.of(problem.q, problem.k)
    plan = hybrid_attention_fp8.plan_pass(problem.groups, problem.row_stop, row_shape, apart=False)
    ours, anew = (
        hybrid_attention_fp8.hybrid_attention(problem.q, problem.k, problem.v, stored, plan)
        for stored in (pages, problem.stored)
    )
    error, allowed = problem.relative_error(ours), hybrid_attention_fp8.EXPECTED_ERROR
    right = filled and torch.equal(ours, anew) and error < allowed
    return (
        f"{'ok' if right else 'WRONG'}  relative error {error:.4f}, allowed {allowed}, pages "
        f"{'as they should be' if filled else 'otherwise'}, off from packed anew by {(ours - anew).abs().max():.1e}"
    )


@torch.inference_mode()
def check_finishing(sequences: Sequence[Part], heads: int, kv_heads: int) -> str:
    """A product whose queries and keys become e4m3 at once, beside one that is finished as rows and packed then."""
    problem = make_problem(sequences, heads, kv_heads)
    num_rows, _, head_dim = problem.q.shape
    device, dtype = problem.q.device, problem.q.dtype
    qkv = 3 * torch.randn(num_rows, heads + 2 * kv_heads, head_dim, device=device)
    # Quiet: rows attend to many keys, and the errors of two ways can be compared in few rows.
    form = HeadForm.of((0.2 + 0.4 * torch.rand(2, head_dim, device=device)).to(dtype), 1e-6, adjacent=True)
    angle = 7 * torch.rand(num_rows, head_dim // 2, device=device)
    rotary = torch.polar(torch.ones_like(angle), angle)
    row_shape, sizes = RowShape.of(problem.q, problem.k), [heads, kv_heads, kv_heads]
    plan = hybrid_attention_fp8.plan_pass(problem.groups, problem.row_stop, row_shape)
    (launch,) = plan.launches

    rows = qkv.to(dtype)
    kv_pack(rows, kv_heads, form, rotary, None)
    q, k, v = rows.split(sizes, dim=1)
    apart = hybrid_attention_fp8.hybrid_attention(q, k, v, problem.stored, plan)
    finished = replace(problem, q=q, k=k, v=v)

    product = qkv.to(dtype)
    _, k, v = product.split(sizes, dim=1)
    tiles, ours = tiles_of(k, problem.stored, launch), torch.empty(q.shape, dtype=dtype, device=device)
    queries, q_power, k_power = kv_pack_tiles(product, kv_heads, form, rotary, launch, tiles)
    pack_launch(k, v, problem.stored, launch, tiles, k_power)
    hybrid_attention_fp8.run_packed(queries, tiles, None, ours, plan.row_stop, launch, q_power)
    error, allowed = (finished.relative_error(x) for x in (ours, apart))
    off = excess(queries.float() * q_power, finished.q, q_power)
    for number, (row, count) in enumerate(launch.own_tiles.tolist()):
        keys = torch.arange(count, device=device)
        packed, _ = tiles.read(torch.full_like(keys, number), keys)
        off = max(off, excess(packed, finished.k[row : row + len(keys)], k_power))
    return (
        f"{'ok' if error < 1.1 * allowed and off <= 0 else 'WRONG'}  relative error {error:.4f}, finished as rows"
        f" {allowed:.4f}, codes beyond a rounding by {max(off, 0):.1e}"
    )


def excess(ours: Tensor, rows: Tensor, power: float) -> float:
    """By how much values in e4m3 times ``power`` are off by more than half a step from what was rounded to the 16 bits
    of ``rows``, in units of ``power``; below 0 where they are not. Few are rounded otherwise than ``rows`` would be: of
    bf16 one in 32, those that come to stand between two codes."""
    exact = rows.float() / power
    half_a_step = torch.exp2(torch.frexp(exact)[1].clamp(min=-5) - 5.0)
    beyond = (ours / power - exact).abs() - half_a_step - exact.abs() * (0.51 * torch.finfo(rows.dtype).eps)
    twice = exact.to(torch.float8_e4m3fn).float() * power
    return beyond.max().item() if (ours == twice).float().mean() > 0.95 else float("inf")


def check_all(report: Report, kernel: Kernel) -> None:
    half, single = torch.float16, torch.float32
    small = (Layout.of([20, (5, 6), 3, (9, 9), 40]), 0)
    cases: list[tuple[str, Callable[[], Problem]]] = [
        ("small, heads shared by 4", lambda: make_problem([small, *text_decode(2, 300)], 32, 8)),
        ("small, behind 200 rows", lambda: poison(make_problem([(Layout.of([200, (8, 8), 30]), 200)], 32, 32))),
        ("Qwen prefill, 1 reference", lambda: make_problem([qwen(1, False)], 32, 32)),
        ("Qwen step, 1 reference", lambda: poison(make_problem([qwen(1, True)], 32, 32))),
        ("Qwen step, fp8_v", lambda: poison(make_problem([qwen(1, True)], 32, 32, codec="fp8_v"))),
        ("Qwen step, fp8", lambda: poison(make_problem([qwen(1, True)], 32, 32, codec="fp8"))),
        ("LightLLM batch 8, 4096", lambda: make_problem(lightllm(8, 4096).sequences(), 32, 8)),
        ("LightLLM, large images", lambda: make_problem(lightllm(8, 4096).with_large_images().sequences(), 32, 8)),
        ("LightLLM batch 8, cached", lambda: poison(make_problem(lightllm(8, 1024, 8192).sequences(), 32, 8))),
        ("text decode, 5 x 3000", lambda: poison(make_problem(text_decode(5, 3000), 32, 8))),
        ("text decode, fp8", lambda: poison(make_problem(text_decode(5, 3000), 32, 8, codec="fp8"))),
        ("mixed pass", lambda: make_problem([*text_decode(9, 700), qwen(2, True, (32, 33)), qwen(0, False)], 32, 8)),
        ("20 rows behind 9000", lambda: poison(make_problem([(Layout.of([9020]), 9000)], 32, 8))),
        ("head_dim 64", lambda: make_problem([qwen(1, True, (32, 32))], 16, 4, head_dim=64)),
        ("head_dim 64, text", lambda: make_problem([(Layout.of([3000]), 1000), small], 16, 2, head_dim=64)),
    ]
    if kernel is not hybrid_attention_fp8:  # scores this large are beyond e4m3
        cases.append(("peaks that rise", lambda: raise_peaks(make_problem([qwen(1, True, (32, 32)), small], 32, 8))))
    if kernel is hybrid_attention_triton:
        cases += [
            ("head_dim 32, fp16", lambda: make_problem([qwen(1, True, (16, 16))], 4, 2, head_dim=32, dtype=half)),
            ("head_dim 32, fp32", lambda: make_problem([qwen(1, True, (16, 16))], 4, 2, head_dim=32, dtype=single)),
        ]
    report.line("a broken sequence", partial(check_apart, kernel))
    for name, make in cases:
        report.line(name, partial(check, make, kernel))
    if kernel is hybrid_attention_fp8:
        report.line("Qwen step, pages of tiles", partial(check_in_place, [qwen(1, True)]))
        report.line("Qwen step, all in e4m3 at once", partial(check_finishing, [qwen(1, True)], 32, 32))
        report.line("small, all in e4m3 at once", partial(check_finishing, [small, small], 32, 8))
        report.line("small, pages of tiles", partial(check_in_place, [(Layout.of([200, (8, 8), 3]), 200), small]))


def _cells(problem: Problem, calls: Calls) -> str:
    return " | ".join(
        f"{name} {milliseconds:.3f} ms {problem.flops / milliseconds / 1e9:.0f} TFLOP/s"
        for name, milliseconds in graph_times(calls).items()
    )


@torch.inference_mode()
def time_one(kernel: Kernel, sequences: Sequence[Part], kv_heads: int) -> str:
    """And what a launch costs the host."""
    problem = make_problem(sequences, 32, kv_heads)
    call = problem.runner(kernel)
    cells = _cells(problem, {"": call})
    torch.cuda.synchronize()
    return f"{cells}, host {1000 * host_times({'': call}, 15)['']:.0f} us"


def _cudnn(batch: int, num_rows: int, num_keys: int, heads: int) -> Callable[[], Tensor]:
    """Dense attention of the same size on contiguous keys."""
    q, k, v = (
        torch.randn(batch, heads, n, 128, device="cuda", dtype=torch.bfloat16) for n in (num_rows, *[num_keys] * 2)
    )

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)

    return call


@torch.inference_mode()
def time_step(kernel: Kernel, num_references: int, batch: int, codecs: bool) -> str:
    problem = make_problem([qwen(num_references, True)] * batch, 32, 32)
    layout, before = qwen(num_references, True)
    calls: dict[str, Callable[[], Tensor]] = {
        "ours": problem.runner(kernel), "cuDNN": _cudnn(batch, layout.num_rows - before, layout.num_rows, 32)
    }  # fmt: skip
    if kernel is hybrid_attention_fp8:
        calls["bf16"] = problem.runner(hybrid_attention_gluon)
    if codecs and problem.stored:
        for codec in ("fp8_v", "fp8"):
            stored = quantise(StoredKV(problem.stored.k, problem.stored.v), codec)
            calls[codec] = replace(problem, stored=stored).runner(kernel)
    return _cells(problem, calls)


@torch.inference_mode()
def time_packing(sequences: Sequence[Part], kv_heads: int) -> str:
    """What attention in e4m3 spends on packing, of prefixes in pages of rows and of tiles, and what remains."""
    problem = make_problem(sequences, 32, kv_heads)
    row_shape, out = RowShape.of(problem.q, problem.k), torch.empty_like(problem.q)
    plan = hybrid_attention_fp8.plan_pass(problem.groups, problem.row_stop, row_shape)
    (launch,) = plan.launches
    tiles = pack_launch(problem.k, problem.v, problem.stored, launch)
    calls: dict[str, Callable[[], object]] = {
        "packing": lambda: pack_launch(problem.k, problem.v, problem.stored, launch),
        "attention": lambda: hybrid_attention_fp8.run_packed(problem.q, tiles, None, out, plan.row_stop, launch),
    }
    if problem.stored is not None:
        pages = in_tiles(problem)
        own = pack_launch(problem.k, problem.v, None, launch)
        calls |= {
            "own rows": lambda: pack_launch(problem.k, problem.v, None, launch),
            "in place": lambda: hybrid_attention_fp8.run_packed(problem.q, own, pages, out, plan.row_stop, launch),
            "filling pages": fill_pages(problem, pages),
        }
    times = graph_times(calls)
    moved = 3 * (tiles.k.numel() + tiles.v.numel())  # two bytes read, one written
    cells = [f"{name} {milliseconds:.3f} ms" for name, milliseconds in times.items()]
    cells[0] += f" {moved / times['packing'] / 1e6:.0f} GB/s"
    cells[1] += f" {problem.flops / times['attention'] / 1e9:.0f} TFLOP/s"
    return " | ".join(cells)


@torch.inference_mode()
def time_text_decode(kernel: Kernel, batch: int, before: int) -> str:
    call = make_problem(text_decode(batch, before), 32, 8).runner(kernel)
    milliseconds = graph_times({"": call})[""]
    read = 2 * batch * before * 8 * 128 * 2  # bytes of K and V
    return f"{milliseconds:8.3f} ms {read / milliseconds / 1e6:5.0f} GB/s of K and V"


@torch.inference_mode()
def time_tiles(name: str, sequences: Sequence[Part], kv_heads: int) -> str:
    """Tile shapes beside each other, and pages in order beside scattered ones."""
    problem, in_order = (make_problem(sequences, 32, kv_heads, shuffled=shuffled) for shuffled in (True, False))
    calls = {f"{t.rows}x{t.keys}, {t.num_stages} stages": problem.runner(KERNELS[name], t) for t in TILES[name]}
    return _cells(problem, {**calls, "keys in order": in_order.runner(KERNELS[name], TILES[name][0])})


def time_all(report: Report, name: str) -> None:
    kernel = KERNELS[name]
    print("\n## Tile shapes")
    report.line("step, 2 references", partial(time_tiles, name, [qwen(2, True)], 32))
    report.line("step, 1 reference, batch 2", partial(time_tiles, name, [qwen(1, True)] * 2, 32))
    for batch, longest in ((8, 8192), (32, 8192)):
        sequences = lightllm(batch, longest).sequences()
        report.line(f"LightLLM batch {batch}, {longest}", partial(time_tiles, name, sequences, 8))
    print("\n## LightLLM's table, 32 query heads, 8 K/V heads, bf16")
    for batch, rows, before in ((8, 4096, 0), (8, 8192, 0), (16, 8192, 0), (32, 8192, 0), (8, 4096, 61440)):
        sequences = lightllm(batch, rows, before).sequences()
        report.line(f"batch {batch}, {rows} + {before}", partial(time_one, kernel, sequences, 8))
    for batch in (8, 16):
        sequences = lightllm(batch, 8192).with_large_images().sequences()
        report.line(f"batch {batch}, 8192, large images", partial(time_one, kernel, sequences, 8))
    print("\n## Qwen-Image 2.1, 1024 x 1024, 32 heads x 128, bf16, one layer; keys in scattered pages of 128")
    for batch, refs in itertools.product((1, 2), (0, 1, 2, 4, 10)):
        codecs = batch == 1 and refs in (1, 4)
        report.line(f"step, {refs} references, batch {batch}", partial(time_step, kernel, refs, batch, codecs))
    for refs in (0, 1, 2, 4):
        report.line(f"prefill, {refs} references", partial(time_one, kernel, [qwen(refs, False)], 32))
    report.line("SenseNova-U1, step, 2 branches", partial(time_one, kernel, [qwen(0, True)] * 2, 8))
    if kernel is hybrid_attention_fp8:
        for refs in (0, 1, 2):
            report.line(f"step, {refs} references, in parts", partial(time_packing, [qwen(refs, True)], 32))
        report.line("SenseNova-U1, in parts", partial(time_packing, [qwen(0, True)] * 2, 8))
    print("\n## Text decode, 32 query heads, 8 K/V heads, bf16")
    for batch, length in ((1, 8192), (32, 8192)):
        report.line(f"{batch} x {length}", partial(time_text_decode, kernel, batch, length))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=tuple(KERNELS), action="append", help="default: those this GPU runs")
    parser.add_argument("--only", choices=("check", "time"))
    parser.add_argument("--budget-seconds", type=float, default=70.0, help="start nothing new after this long")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, help="write the lines to this file too")
    options = parser.parse_args()
    seed = torch.seed() % 2**32 if options.seed is None else options.seed
    torch.manual_seed(seed)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, --seed {seed}")
    report = Report(options.budget_seconds)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for name in options.kernel or (tuple(KERNELS) if hopper else ("triton",)):
        if options.only != "time":
            print(f"\n## {name}: largest error against fp32")
            check_all(report, KERNELS[name])
        if options.only != "check":
            time_all(report, name)
        if options.json:
            options.json.write_text(json.dumps(report.lines, indent=1))
    print(f"\n{report.num_bad} wrong or failed")
    return 1 if report.num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
