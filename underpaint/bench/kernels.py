"""Are the kernels of the fused path right on this machine's GPU, and how close to its memory's limit?

Correctness in bf16 on shapes of the released models: the error against fp32 must be under twice that of the plain
computation in bf16; what is quantised on the way out must be so to the bit. Pointwise kernels: bytes read and written a
second, beside a copy measured in the same run. Linear layers of few rows and decode attention: bytes read. Times are of
CUDA graphs in which calls follow each other on data that the second-level cache does not hold.
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from underpaint.bench.measuring import copy_bandwidth, device_ms
from underpaint.kernels.decode_attention import decode_attention
from underpaint.kernels.decode_plan import DecodePlan, decode_attention_reference, plan_decode
from underpaint.kernels.head_form import HeadForm
from underpaint.kernels.kept import Kept
from underpaint.kernels.kv_pack import kv_pack, kv_pack_reference
from underpaint.kernels.norm_modulate import (
    add_rms_norm,
    add_rms_norm_quantised,
    add_rms_norm_reference,
    gate_norm_modulate,
    gate_norm_modulate_quantised,
    gate_norm_modulate_reference,
)
from underpaint.kernels.quantised_rows import QuantisedRows
from underpaint.kernels.skinny_linear import SkinnyShape, skinny_linear, skinny_linear_reference
from underpaint.kernels.swiglu import swiglu, swiglu_quantised, swiglu_reference
from underpaint.kernels.tiles import StoredKV
from underpaint.kv.codec import quantise
from underpaint.models.neo_unify.config import FeedForward
from underpaint.models.neo_unify.fused import FusedExperts
from underpaint.models.neo_unify.transformer import Experts
from underpaint.report import WRONG, Cell, Report, Table, machine

DEVICE = "cuda"
DTYPE = torch.bfloat16
WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM = 4096, 12288, 32, 8, 128
EPS = 1e-6
EXPERTS, EXPERTS_WIDTH = FeedForward(768, num_experts=128, num_chosen=8), 2048
POINTWISE_ROWS = (4096, 16384)
COLD_BYTES = 256 << 20
"""Calls on as much data in turn find nothing in the second-level cache (50 MB on an H200)."""
CHECK_ROWS = 512
"""About how many rows in e4m3 are compared with the reference."""
PAGE_ROWS = 128
LAYERS = {"qkv": (6144, 4096, False), "out": (4096, 4096, False), "gate/up": (24576, 4096, True),
          "down": (4096, 12288, False), "logits": (151936, 4096, False)}  # fmt: skip

ONE_ROW_TILES = [
    SkinnyShape(outputs, inputs, num_warps)
    for outputs, inputs, num_warps in (
        (1, 4096, 4), (2, 4096, 4), (4, 4096, 4), (2, 2048, 4), (4, 2048, 4), (8, 2048, 4), (4, 1024, 4), (8, 1024, 4),
        (4, 4096, 8), (8, 4096, 8), (1, 4096, 2),
    )
]  # fmt: skip
FEW_ROWS_TILES = [
    SkinnyShape(outputs, inputs, 4, num_stages)
    for outputs, inputs, num_stages in (
        (16, 256, 6), (32, 128, 8), (32, 256, 6), (64, 64, 8), (64, 128, 4), (64, 128, 5), (64, 128, 8), (64, 256, 4),
        (128, 64, 8), (128, 128, 5),
    )
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """A kernel on some inputs. ``moved``: bytes it must read and write. ``plain``: the reference, given a dtype."""

    name: str
    call: Callable[[], object]
    moved: int
    check: Callable[[], str]


def kernels(tiles: bool = False, seed: int = 0) -> Report:
    """All tables; with ``tiles`` only that of linear layers by tile."""
    torch.manual_seed(seed)
    with torch.inference_mode():
        bandwidth = copy_bandwidth(DEVICE)
        if tiles:
            return Report((machine(DEVICE),), (_tiles_table(bandwidth),))
        tables = (
            _pointwise_table(bandwidth),
            _linear_table(bandwidth),
            _decode_table(bandwidth),
            _experts_table(bandwidth),
        )
    notes = (machine(DEVICE), f"copy {bandwidth / 1e12:.2f} TB/s (read + written), bf16, seed {seed}")
    return Report(notes, tables)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def verdict(ours: Sequence[Tensor], native: Sequence[Tensor], exact: Sequence[Tensor]) -> str:
    """The three-way rule, by the norm of the error: of the worst, which is NaN if there is one."""
    error, allowed = (
        torch.stack([(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(x, exact, strict=True)]).max()
        for x in (ours, native)
    )
    return f"{'ok' if error < 2 * allowed + 1e-6 else WRONG} {error:.1e}, plain {allowed:.1e}"


def _pointwise_table(bandwidth: float) -> Table:
    rows: list[tuple[Cell, ...]] = []
    cases: list[Callable[[int], Case]] = [
        *(
            partial(make, quantised=flag)
            for make in (_rms_case, _modulate_case, _swiglu_case)
            for flag in (False, True)
        ),
        _neo_pack_case,
        _qwen_pack_case,
    ]
    for num_rows in POINTWISE_ROWS:
        for make in cases:
            first = make(num_rows)
            others = [make(num_rows) for _ in range(COLD_BYTES // first.moved)]
            spread = device_ms([case.call for case in (first, *others)], DEVICE)
            rate = first.moved / spread.median * 1e3
            rows.append((first.name, num_rows, str(spread), rate / 1e12, rate / bandwidth, first.check()))
    return Table("Pointwise kernels", ("kernel", "rows", "ms", "TB/s", "of copy", "error against fp32"), rows)


def _rms_case(num_rows: int, quantised: bool) -> Case:
    x, delta, weight = draw(num_rows, WIDTH), draw(num_rows, WIDTH), draw(WIDTH)

    def check() -> str:
        total, plain = add_rms_norm(x, delta, weight, EPS)
        if quantised:
            return same(*add_rms_norm_quantised(x, delta, weight, EPS), total, plain)
        exact = add_rms_norm_reference(x.float(), delta.float(), weight.float(), EPS)
        return verdict([total, plain], add_rms_norm_reference(x, delta, weight, EPS), exact)

    call = add_rms_norm_quantised if quantised else add_rms_norm
    return Case(
        _named("sum, RMS norm", quantised),
        lambda: call(x, delta, weight, EPS),
        3 * x.nbytes + _row_bytes(x, quantised),
        check,
    )


def _modulate_case(num_rows: int, quantised: bool) -> Case:
    x, delta, tables = draw(num_rows, WIDTH), draw(num_rows, WIDTH), draw(4, 4 * WIDTH)
    gate, scale = tables[:, :WIDTH], tables[:, WIDTH : 2 * WIDTH]
    group = torch.randint(0, 4, (num_rows,), device=DEVICE)

    def check() -> str:
        total, plain = gate_norm_modulate(x, delta, gate, scale, group, EPS)
        if quantised:
            return same(*gate_norm_modulate_quantised(x, delta, gate, scale, group, EPS), total, plain)
        native = gate_norm_modulate_reference(x, delta, gate, scale, group, EPS)
        floats = [t.float() for t in (x, delta, gate, scale)]
        exact = gate_norm_modulate_reference(floats[0], floats[1], floats[2], floats[3], group, EPS)
        return verdict([total, plain], native, exact)

    call = gate_norm_modulate_quantised if quantised else gate_norm_modulate
    return Case(
        _named("gate, norm, modulate", quantised),
        lambda: call(x, delta, gate, scale, group, EPS),
        3 * x.nbytes + _row_bytes(x, quantised),
        check,
    )


def _swiglu_case(num_rows: int, quantised: bool) -> Case:
    x = draw(num_rows, 2 * INNER)

    def check() -> str:
        if quantised:
            return same(None, swiglu_quantised(x), None, swiglu(x))
        return verdict([swiglu(x)], [swiglu_reference(x)], [swiglu_reference(x.float())])

    call = swiglu_quantised if quantised else swiglu
    moved = x.nbytes + _row_bytes(x[:, :INNER], quantised)
    return Case(_named("SwiGLU", quantised), lambda: call(x), moved, check)


def _named(name: str, quantised: bool) -> str:
    return f"{name}, e4m3" if quantised else name


def _row_bytes(rows: Tensor, quantised: bool) -> int:
    """Of rows like these as they are written: with ``quantised`` a byte a value, and four a row."""
    return rows.numel() + 4 * len(rows) if quantised else rows.nbytes


def same(total: Tensor | None, rows: QuantisedRows, plain_total: Tensor | None, plain: Tensor) -> str:
    """Whether a quantising kernel gives, to the bit, the sum of the one that does not, and what the reference makes of
    its rows; that one is compared with fp32 in its own line."""
    some = slice(None, None, -(-len(plain) // CHECK_ROWS))
    # On the host: a GPU's division by a number may be a product with its inverse, which rounds twice.
    values, scale = quantise(plain[some].cpu())
    num_wrong = int((rows.values[some].cpu().view(torch.uint8) != values.view(torch.uint8)).sum())
    num_wrong += int((rows.scale[some].cpu() != scale).sum())
    if total is not None and plain_total is not None:
        num_wrong += int((total != plain_total).sum())
    return f"{WRONG}: {num_wrong} values differ" if num_wrong else "ok, to the bit"


def _neo_pack_case(num_rows: int) -> Case:
    return _pack_case("heads and pages, SenseNova-U1", num_rows, KV_HEADS, adjacent=False, keep=True)


def _qwen_pack_case(num_rows: int) -> Case:
    return _pack_case("heads, Qwen-Image", num_rows, HEADS, adjacent=True, keep=False)


def _pack_case(name: str, num_rows: int, kv_heads: int, adjacent: bool, keep: bool) -> Case:
    qkv = draw(num_rows, HEADS + 2 * kv_heads, HEAD_DIM)
    rotary = torch.polar(torch.ones(num_rows, HEAD_DIM // 2), torch.rand(num_rows, HEAD_DIM // 2) * 7).to(DEVICE)
    form = HeadForm.of(draw(2, HEAD_DIM), EPS, adjacent)
    stored = StoredKV(*(torch.empty(num_rows, kv_heads, HEAD_DIM, dtype=DTYPE, device=DEVICE) for _ in range(2)))
    slots = torch.randperm(num_rows, dtype=torch.int32, device=DEVICE)
    kept = Kept(stored, slots) if keep else None
    one_k = stored.k.nbytes
    in_place = 2 * (qkv.nbytes - one_k)
    moved = in_place + (3 * one_k if keep else 0) + rotary.nbytes

    def check() -> str:
        packed = qkv.clone()
        kv_pack(packed, kv_heads, form, rotary, kept)
        ours = packed.split([HEADS, kv_heads, kv_heads], dim=1)
        exact = form.to(torch.float32)
        answer = verdict(
            ours,
            kv_pack_reference(qkv, kv_heads, form, rotary),
            kv_pack_reference(qkv.float(), kv_heads, exact, rotary),
        )
        there = slots.long()
        if keep and not (torch.equal(stored.k[there], ours[1]) and torch.equal(stored.v[there], ours[2])):
            return f"{WRONG} pages; {answer}"
        return answer

    # Called again and again on the same rows: norms make the values stay as they are in size.
    return Case(name, lambda: kv_pack(qkv, kv_heads, form, rotary, kept), moved, check)


def _weights(outputs: int, inputs: int) -> list[Tensor]:
    """Copies of a layer enough to be cold."""
    return [draw(outputs, inputs) * inputs**-0.5 for _ in range(max(2, COLD_BYTES // (2 * outputs * inputs)))]


def _linear_table(bandwidth: float) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, (outputs, inputs, gated) in LAYERS.items():
        weights = _weights(outputs, inputs)
        for num_rows in (1, 2, 4, 8, 16, 32):
            x = draw(num_rows, inputs)
            library = device_ms([_library(x, weight, gated) for weight in weights], DEVICE)
            cells: list[Cell] = [name, num_rows, str(library), weights[0].nbytes / library.median * 1e3 / bandwidth]
            if num_rows <= 16:
                ours = device_ms([_skinny(x, weight, gated) for weight in weights], DEVICE)
                weight = weights[0]
                answer = verdict(
                    [skinny_linear(x, weight, gated)],
                    [skinny_linear_reference(x, weight, gated)],
                    [skinny_linear_reference(x.float(), weight.float(), gated)],
                )
                cells += [str(ours), weight.nbytes / ours.median * 1e3 / bandwidth, answer]
            else:
                cells += ["-", "-", "-"]
            rows.append(tuple(cells))
    columns = ("layer", "rows", "library, ms", "of copy", "ours, ms", "of copy", "error against fp32")
    return Table("Linear layers of few rows (the library's gate/up with our SwiGLU behind it)", columns, rows)


def _library(x: Tensor, weight: Tensor, gated: bool) -> Callable[[], Tensor]:
    return lambda: swiglu(x @ weight.mT) if gated else x @ weight.mT


def _skinny(x: Tensor, weight: Tensor, gated: bool, shape: SkinnyShape | None = None) -> Callable[[], Tensor]:
    return lambda: skinny_linear(x, weight, gated, shape=shape)


def _tiles_table(bandwidth: float) -> Table:
    """Shares of the copy bandwidth, the best first."""
    rows: list[tuple[Cell, ...]] = []
    for name, (outputs, inputs, gated) in LAYERS.items():
        weights = _weights(outputs, inputs)
        for num_rows, shapes in ((1, ONE_ROW_TILES), (8, FEW_ROWS_TILES)):
            x = draw(num_rows, inputs)
            found = []
            for shape in shapes:
                try:
                    spread = device_ms([_skinny(x, weight, gated, shape) for weight in weights], DEVICE, num_rounds=5)
                except OutOfResources:
                    continue
                found.append((weights[0].nbytes / spread.median * 1e3 / bandwidth, shape))
            found.sort(key=lambda pair: -pair[0])
            best = [f"{s.outputs}x{s.inputs} w{s.num_warps} s{s.num_stages}: {share:.2f}" for share, s in found]
            rows.append((name, num_rows, " | ".join(best)))
    return Table("Tiles of linear layers, outputs x inputs, warps, stages", ("layer", "rows", "of copy"), rows)


def _decode_table(bandwidth: float) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for batch, context in ((1, 1024), (1, 8192), (8, 1024), (32, 1024), (32, 8192)):
        num_pages = -(-context // PAGE_ROWS)
        calls, stored, plan, q = _decode_calls(batch, num_pages)
        spread = device_ms(calls, DEVICE)
        read = 2 * batch * num_pages * PAGE_ROWS * KV_HEADS * HEAD_DIM * 2
        rate = read / spread.median * 1e3
        exact = decode_attention_reference(q.float(), StoredKV(stored.k.float(), stored.v.float()), plan, PAGE_ROWS)
        native = decode_attention_reference(q, stored, plan, PAGE_ROWS).to(DTYPE)
        answer = verdict([decode_attention(q, stored, plan, PAGE_ROWS)], [native], [exact])
        rows.append((f"{batch} x {context}", str(spread), rate / 1e12, rate / bandwidth, answer))
    return Table("Decode attention", ("sequences", "ms", "TB/s", "of copy", "error against fp32"), rows)


def _decode_calls(batch: int, num_pages: int) -> tuple[list[Callable[[], Tensor]], StoredKV, DecodePlan, Tensor]:
    """Layers enough to be cold, pages in no order."""
    total = batch * num_pages
    one = total * PAGE_ROWS * KV_HEADS * HEAD_DIM * 4
    layers = [
        StoredKV(*(draw(total * PAGE_ROWS, KV_HEADS, HEAD_DIM) for _ in range(2)))
        for _ in range(max(2, min(COLD_BYTES // one, 64)))
    ]
    pieces, merges = plan_decode(np.full(batch, num_pages, np.int32), PAGE_ROWS, KV_HEADS)
    pages = torch.stack([torch.randperm(total) * PAGE_ROWS, torch.full((total,), PAGE_ROWS)], dim=1)
    tables = (pages.int(), torch.from_numpy(pieces), torch.from_numpy(merges))
    plan = DecodePlan(*(table.to(DEVICE) for table in tables))
    q = draw(batch, HEADS, HEAD_DIM)

    def attend(stored: StoredKV) -> Callable[[], Tensor]:
        return lambda: decode_attention(q, stored, plan, PAGE_ROWS)

    return [attend(stored) for stored in layers], layers[0], plan, q


def _experts_table(bandwidth: float) -> Table:
    """One layer's experts of the A3B."""
    module = Experts(EXPERTS_WIDTH, EXPERTS).to(DEVICE, DTYPE)
    for parameter in module.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    exact, fused = copy.deepcopy(module).float(), FusedExperts(module)
    expert_bytes = 3 * EXPERTS_WIDTH * EXPERTS.width * 2
    rows: list[tuple[Cell, ...]] = []
    for num_rows in (1, 8, 32, 4096):
        x = draw(num_rows, EXPERTS_WIDTH)
        # Other experts for the next call: what one call read is not in the cache for another.
        inputs = [draw(num_rows, EXPERTS_WIDTH) for _ in range(8)]
        spread = device_ms([_apply(fused, other) for other in inputs], DEVICE)
        used = statistics.mean(len(module.route(other)[1].unique()) for other in inputs)
        flops = 6 * num_rows * EXPERTS.num_chosen * EXPERTS_WIDTH * EXPERTS.width
        answer = verdict([fused(x)], [module(x)], [exact(x.float())])
        share = used * expert_bytes / spread.median * 1e3 / bandwidth
        rows.append((num_rows, round(used), str(spread), share, flops / spread.median / 1e9, answer))
    columns = ("rows", "experts used", "ms", "their weights, of copy", "TFLOP/s", "error against fp32")
    return Table("Mixture of experts, one layer of the A3B", columns, rows)


def _apply(module: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    return lambda: module(x)
