"""``python -m underpaint.kernels.check_on_gpu``: is the attention kernel right on this machine's GPU, and how fast?

First correctness on shapes of real models: the error against fp32 must be under twice that of the plain computation in
the same dtype. Then times: medians of CUDA events, planning not included (it is done once a pass), beside torch's
fused attention where one dense call does the same. TFLOP/s count the pairs of a row and a key that it sees. Ends with
status 1 if anything was wrong or failed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime.errors import OutOfResources

from underpaint.kernels.hybrid_attention_triton import hybrid_attention, hybrid_attention_reference, plan_pass
from underpaint.kernels.tiles import Extent, Group, Ints, StoredKV, TileShape, row_stops
from underpaint.layout import Grid, Layout

PAGE_ROWS = 128
E4M3_MAX = 448.0
Part = tuple[Layout, int]
"""A sequence, and how many of its rows are the prefix."""

QWEN_TOKENS = (64, 64)  # 1024 x 1024
QWEN_TEXT = 200
TILES = (
    TileShape(128, 64, num_warps=8, num_stages=3),
    TileShape(128, 128, num_warps=8, num_stages=2),
    TileShape(64, 64, num_warps=4, num_stages=3),
)


@dataclass(frozen=True, eq=False)
class Problem:
    """A pass: inputs of ``hybrid_attention``, and the pairs of a row and a visible key, summed over rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    stored: StoredKV | None
    groups: list[Group]
    row_stop: Ints
    area: int

    @property
    def flops(self) -> float:
        return 4.0 * self.area * self.q.shape[1] * self.q.shape[2]

    def runner(self, tile: TileShape | None = None) -> Callable[[], Tensor]:
        plan = plan_pass(self.groups, self.row_stop, self.q, self.k.shape[1], tile)
        return lambda: hybrid_attention(self.q, self.k, self.v, self.stored, plan)


def make_problem(
    sequences: Sequence[Part],
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    codec: str = "plain",
) -> Problem:
    """Random inputs; the prefixes lie in shuffled pages of 128, the last one of each partly filled."""
    num_pages = sum(-(-before // PAGE_ROWS) for _, before in sequences)
    pages = iter(torch.randperm(num_pages).tolist())
    groups, segments, first = [], [], 0
    for layout, before in sequences:
        groups.append(Group(first, layout.num_rows - before, tuple(_extents(before, pages))))
        calls = layout.plan(before, layout.num_rows)
        segments += [(c.start + first - before, c.stop + first - before, c.causal) for c in calls]
        first += layout.num_rows - before
    starts, stops, causal = zip(*segments, strict=True)
    row_stop = row_stops(starts, stops, causal, first)
    area = sum(
        int(row_stop[g.first : g.first + g.num_rows].sum(dtype="int64")) + g.num_rows * (before - g.first)
        for g, (_, before) in zip(groups, sequences, strict=True)
    )
    q, k, v = (_draw(first, n, head_dim, dtype) for n in (heads, kv_heads, kv_heads))
    stored = _store(num_pages * PAGE_ROWS, kv_heads, head_dim, dtype, codec) if num_pages else None
    return Problem(q, k, v, stored, groups, row_stop, area)


def _extents(num_rows: int, pages: Iterator[int]) -> Iterator[Extent]:
    for row in range(0, num_rows, PAGE_ROWS):
        yield next(pages) * PAGE_ROWS, min(PAGE_ROWS, num_rows - row)


def _draw(num_rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, heads, head_dim, device="cuda", dtype=dtype)


def _store(num_slots: int, heads: int, head_dim: int, dtype: torch.dtype, codec: str) -> StoredKV:
    k, v = (_draw(num_slots, heads, head_dim, dtype) for _ in range(2))
    if codec == "plain":
        return StoredKV(k, v)
    v8, v_scale = _quantise(v)
    if codec == "fp8_v":
        return StoredKV(k, v8, None, v_scale)
    k8, k_scale = _quantise(k)
    return StoredKV(k8, v8, k_scale, v_scale)


def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(dim=-1) / E4M3_MAX
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8), scale


def qwen(num_references: int, decode: bool, grid: Grid = QWEN_TOKENS) -> Part:
    """Text and references in turn, then the target: all of it in one pass, or the target behind its prefix."""
    texts = [QWEN_TEXT // (num_references + 1)] * (num_references + 1)
    parts: list[int | Grid] = [part for text in texts for part in (text, grid)]
    layout = Layout.of(parts)
    return layout, layout.images[-1].start if decode else 0


def lightllm(batch: int, max_rows: int, max_before: int) -> list[Part]:
    """The lengths and image spans of LightLLM's public attention benchmark (its generator's draws with seed 0)."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    rows, before = draw(1, max_rows + 1, batch), draw(0, max_before + 1, batch)
    for count in (batch, sum(rows) + sum(before) + 4096):  # its slots are drawn here
        torch.randperm(count, generator=generator)
    sequences = []
    for new, old in zip(rows, before, strict=True):
        spans: list[tuple[int, int]] = []
        if new >= 2 and torch.rand((), generator=generator).item() <= 0.7:
            for _ in range(draw(1, 4)[0]):
                length = min(draw(1, 25)[0], new)
                start = old + draw(0, new - length + 1)[0]
                spans.append((start, start + length))
        sequences.append((_with_spans(old + new, spans), old))
    return sequences


def _with_spans(num_rows: int, spans: list[tuple[int, int]]) -> Layout:
    parts: list[int | Grid] = []
    done = 0
    for start, stop in sorted(spans):
        if parts and start <= done and stop > done:  # spans that meet are one block
            last = parts.pop()
            assert not isinstance(last, int)
            parts.append((1, last[1] + stop - done))
        elif stop > done:
            parts += [start - done, (1, stop - start)]
        done = max(done, stop)
    return Layout.of([*parts, num_rows - done])


def text_decode(batch: int, before: int) -> list[Part]:
    return [(Layout.of([before + 1]), before)] * batch


def median_ms(call: Callable[[], object], max_calls: int = 30, budget_ms: float = 80.0) -> float:
    """Median over as many calls as fit the budget, after two that warm up."""
    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(max_calls + 1)]
    events[0].record()
    call()
    events[1].record()
    torch.cuda.synchronize()
    num_calls = int(min(max_calls, max(5, budget_ms / max(events[0].elapsed_time(events[1]), 1e-3))))
    events[0].record()
    for event in events[1 : num_calls + 1]:
        call()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(events[: num_calls + 1]))
    return times[len(times) // 2]


class Report:
    """Prints a line a measurement; goes on after one that fails, and stops starting new ones after the budget."""

    def __init__(self, budget_seconds: float) -> None:
        self.deadline = time.monotonic() + budget_seconds
        self.num_bad = 0

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
        print(f"{name:<38s} {text}   [{time.monotonic() - started:.1f} s]", flush=True)


@torch.inference_mode()
def check(problem: Problem) -> str:
    """The three-way rule."""
    ours = problem.runner()()
    native = hybrid_attention_reference(
        problem.q, problem.k, problem.v, problem.stored, problem.groups, problem.row_stop
    )
    q, k, v = problem.q.float(), problem.k.float(), problem.v.float()
    exact = hybrid_attention_reference(q, k, v, problem.stored, problem.groups, problem.row_stop)
    error, allowed = ((x.float() - exact).abs().max().item() for x in (ours, native))
    verdict = "ok" if error < 2 * allowed + 1e-5 else "WRONG"  # 1e-5: in fp32 the plain computation is the exact one
    return f"{verdict}  error {error:.2e}, plain {allowed:.2e}"


def check_all(report: Report) -> None:
    print("\n## Correctness: largest error against fp32")
    half, single = torch.float16, torch.float32
    cases: list[tuple[str, Callable[[], Problem]]] = [
        ("Qwen prefill, 1 reference", lambda: make_problem([qwen(1, False)], 32, 32)),
        ("Qwen decode, 1 reference", lambda: make_problem([qwen(1, True)], 32, 32)),
        ("Qwen decode, fp8_v", lambda: make_problem([qwen(1, True)], 32, 32, codec="fp8_v")),
        ("Qwen decode, fp8", lambda: make_problem([qwen(1, True)], 32, 32, codec="fp8")),
        ("LightLLM batch 8, 4096", lambda: make_problem(lightllm(8, 4096, 0), 32, 8)),
        ("LightLLM batch 8, cached", lambda: make_problem(lightllm(8, 1024, 8192), 32, 8)),
        ("text decode, 5 x 3000", lambda: make_problem(text_decode(5, 3000), 32, 8)),
        ("text decode, fp8", lambda: make_problem(text_decode(5, 3000), 32, 8, codec="fp8")),
        ("mixed pass", lambda: make_problem([*text_decode(9, 700), qwen(2, True, (32, 33)), qwen(0, False)], 32, 8)),
        ("20 rows behind 9000", lambda: make_problem([(Layout.of([9020]), 9000)], 32, 8)),
        ("head_dim 64", lambda: make_problem([qwen(1, True, (32, 32))], 16, 4, head_dim=64)),
        ("head_dim 32, fp16", lambda: make_problem([qwen(1, True, (16, 16))], 4, 2, head_dim=32, dtype=half)),
        ("head_dim 32, fp32", lambda: make_problem([qwen(1, True, (16, 16))], 4, 2, head_dim=32, dtype=single)),
    ]
    for name, make in cases:
        report.line(name, lambda make=make: check(make()))  # type: ignore[misc]


def _ours(problem: Problem, tile: TileShape | None = None) -> str:
    milliseconds = median_ms(problem.runner(tile))
    return f"{milliseconds:8.3f} ms {problem.flops / milliseconds / 1e9:5.0f} TFLOP/s"


def _sdpa(batch: int, num_rows: int, num_keys: int, heads: int) -> Callable[[SDPBackend], Callable[[], Tensor]]:
    """torch's dense attention of the same size on contiguous keys."""
    q, k, v = (
        torch.randn(batch, heads, n, 128, device="cuda", dtype=torch.bfloat16) for n in (num_rows, *[num_keys] * 2)
    )

    def call(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return lambda backend: lambda: call(backend)


@torch.inference_mode()
def time_decode(num_references: int, batch: int) -> str:
    problem = make_problem([qwen(num_references, True)] * batch, 32, 32)
    layout, before = qwen(num_references, True)
    dense = _sdpa(batch, layout.num_rows - before, layout.num_rows, 32)
    cells = [_ours(problem)]
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        milliseconds = median_ms(dense(backend))
        cells.append(f"{name} {milliseconds:8.3f} ms {problem.flops / milliseconds / 1e9:4.0f} TFLOP/s")
    if batch == 1:
        for codec in ("fp8_v", "fp8"):
            stored = _store(len(problem.stored.k), 32, 128, torch.bfloat16, codec) if problem.stored else None
            cells.append(f"{codec} {_ours(replace(problem, stored=stored))}")
    return " | ".join(cells)


@torch.inference_mode()
def time_text_decode(batch: int, before: int) -> str:
    """In a CUDA graph, as text decode runs: the host would take longer than the kernels."""
    problem = make_problem(text_decode(batch, before), 32, 8)
    call = problem.runner()
    want = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    graph.replay()
    assert torch.equal(got, want), "the graph's result differs"
    milliseconds = median_ms(graph.replay)
    read = 2 * batch * before * 8 * 128 * 2  # bytes of K and V
    return f"{milliseconds:8.3f} ms {read / milliseconds / 1e6:5.0f} GB/s of K and V"


@torch.inference_mode()
def time_tiles(sequences: Sequence[Part], kv_heads: int) -> str:
    problem = make_problem(sequences, 32, kv_heads)
    return " | ".join(f"{t.rows}x{t.keys}, {t.num_warps} warps {_ours(problem, t)}" for t in TILES)


def time_all(report: Report) -> None:
    print("\n## Qwen-Image 2.1, 1024 x 1024, 32 heads x 128, bf16, one layer; keys in scattered pages of 128")
    for batch in (1, 2):
        for refs in (0, 1, 2, 4):
            name = f"{refs} references, batch {batch}"
            report.line(f"prefill, {name}", lambda r=refs, b=batch: _ours(make_problem([qwen(r, False)] * b, 32, 32)))  # type: ignore[misc]
            report.line(f"decode, {name}", lambda r=refs, b=batch: time_decode(r, b))  # type: ignore[misc]
    print("\n## LightLLM's table, 32 query heads, 8 K/V heads, bf16")
    for batch, rows, before in ((8, 4096, 0), (8, 8192, 0), (16, 8192, 0), (32, 8192, 0), (8, 4096, 61440)):
        sequences = lightllm(batch, rows, before)
        report.line(f"batch {batch}, {rows} + {before}", lambda s=sequences: _ours(make_problem(s, 32, 8)))  # type: ignore[misc]
    print("\n## Tile shapes")
    report.line("decode, 2 references", lambda: time_tiles([qwen(2, True)], 32))
    report.line("decode, 4 references, batch 2", lambda: time_tiles([qwen(4, True)] * 2, 32))
    report.line("LightLLM batch 8, 8192", lambda: time_tiles(lightllm(8, 8192, 0), 8))
    print("\n## Text decode, 32 query heads, 8 K/V heads, bf16")
    for batch, before in ((1, 8192), (8, 8192), (32, 8192), (64, 2048)):
        report.line(f"{batch} x {before}", lambda b=batch, n=before: time_text_decode(b, n))  # type: ignore[misc]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-seconds", type=float, default=70.0, help="start nothing new after this long")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = torch.seed() % 2**32 if options.seed is None else options.seed
    torch.manual_seed(seed)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, --seed {seed}")
    report = Report(options.budget_seconds)
    check_all(report)
    time_all(report)
    print(f"\n{report.num_bad} wrong or failed")
    return 1 if report.num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
