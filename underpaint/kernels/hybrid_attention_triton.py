"""Attention of a whole pass in one layer: packed rows, keys from pages and from the pass, one integer a row as mask.

``softmax(q k' / sqrt(head_dim)) v`` where row ``r`` of a group sees the group's whole prefix, read in place from the
pool's slots, and those of its own rows ``k`` with ``k < row_stop[r]``. Nothing is concatenated or gathered. The query
heads that share a K/V head stand in one tile, so each key is read once for all of them. Which tile reads what is
planned by ``tiles``; softmax is in fp32 with base 2.

Triton on NVIDIA GPUs from compute capability 8.0 on. Key tiles are read through tensor descriptors: TMA from 9.0 on,
plain loads before. Where a launch has few query tiles the keys are split over programs, and a second kernel merges
their results by log-sum-exp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from underpaint.kernels.dequantise import as_float8, dequantise_tiles, from_e4m3
from underpaint.kernels.packed_tiles import Stored, rows_of
from underpaint.kernels.planning import make_plan, make_roomy_plan
from underpaint.kernels.tiles import (
    Group,
    Ints,
    Launch,
    Plan,
    Room,
    RowShape,
    SplitRule,
    StoredKV,
    TileShape,
)

LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 128
HOPPER_SHARED_MEMORY = 227 << 10
"""Bytes a program may have from compute capability 9.0 on, consumer cards aside, which have far less."""


@triton.jit
def _load_keys(  # type: ignore[no-untyped-def]
    desc, scale_ptr, row, num_valid, head, dtype: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + KEYS) of one head of K or V, dequantised to ``dtype``. With CLEAR, those from ``num_valid`` on
    are 0: they may be another sequence's or never written, and 0 * NaN would reach the result."""
    x = desc.load([row, head * HEAD_DIM])
    key = tl.arange(0, KEYS)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + (row + key).to(tl.int64) * HEADS + head, mask=key < num_valid, other=0.0)
        x = from_e4m3(x, scale[:, None])
    if CLEAR:
        x = tl.where((key < num_valid)[:, None], x, tl.zeros_like(x))
    return x.to(dtype)


@triton.jit
def _absorb(  # type: ignore[no-untyped-def]
    acc, total, peak, q, k_desc, v_desc, k_scale_ptr, v_scale_ptr, k_row, v_row, limit, num_valid, head, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile of online softmax. ``peak`` is the largest score so far and ``total`` the sum of 2**(score - peak),
    both (tile rows,). With MASKED, a lane sees the first ``limit`` keys of the tile, of which ``num_valid`` exist."""
    k = _load_keys(k_desc, k_scale_ptr, k_row, num_valid, head, q.dtype, HEADS, HEAD_DIM, KEYS, False)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(tl.arange(0, KEYS)[None, :] < limit[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    # A row that has seen no key yet has no peak; any finite number keeps its sum at 0.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = tl.math.exp2(scores * scale - base[:, None])
    shrink = tl.math.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    v = _load_keys(v_desc, v_scale_ptr, v_row, num_valid, head, q.dtype, HEADS, HEAD_DIM, KEYS, MASKED)
    acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)
    return acc, total, new_peak


@triton.jit
def hybrid_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_desc, v_desc, stored_k_desc, stored_v_desc, k_scale_ptr, v_scale_ptr, out_ptr,
    row_stop_ptr, work_ptr, prefix_tiles_ptr, piece_out_ptr, piece_lse_ptr, q_stride, out_stride, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, K_PACKED: tl.constexpr, V_PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (i, h): work item i for K/V head h. The items of one head are launched together, so that programs that
    run at the same time read the same keys, of few heads, from the L2 cache.

    HEADS: K/V heads. SHARED: query heads of each. DIM: HEAD_DIM padded to a power of two. K_PACKED, V_PACKED: stored
    K or V lies as key tile after key tile instead of in slots.
    """
    head = tl.program_id(1)
    work_ptr += tl.program_id(0) * 12  # fields as in tiles.WorkFields
    first_row = tl.load(work_ptr)
    num_rows = tl.load(work_ptr + 1)
    full_start = tl.load(work_ptr + 2)
    full_stop = tl.load(work_ptr + 3)
    part_start = tl.load(work_ptr + 4)
    part_stop = tl.load(work_ptr + 5)
    own_start = tl.load(work_ptr + 6)
    own_stop = tl.load(work_ptr + 7)
    masked_start = tl.load(work_ptr + 8)
    masked_stop = tl.load(work_ptr + 9)
    own_end = tl.load(work_ptr + 10)
    piece = tl.load(work_ptr + 11)

    lane = tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    used = lane // SHARED < num_rows
    rows = (first_row + lane // SHARED).to(tl.int64)
    columns = (head * SHARED + lane % SHARED)[:, None] * HEAD_DIM + column[None, :]
    inside = used[:, None] & (column < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + rows[:, None] * q_stride + columns, mask=inside, other=0.0)
    row_stop = tl.load(row_stop_ptr + rows, mask=used, other=0)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)

    for tile in tl.range(full_start, full_stop):
        slot = tl.load(prefix_tiles_ptr + 2 * tile)
        acc, total, peak = _absorb(
            acc, total, peak, q, stored_k_desc, stored_v_desc, k_scale_ptr, v_scale_ptr,
            tile * KEYS if K_PACKED else slot, tile * KEYS if V_PACKED else slot, row_stop, KEYS,
            head, scale, HEADS, HEAD_DIM, KEYS, False, PRECISION,
        )  # fmt: skip
    for tile in tl.range(part_start, part_stop, num_stages=1):
        slot = tl.load(prefix_tiles_ptr + 2 * tile)
        num_valid = tl.load(prefix_tiles_ptr + 2 * tile + 1)
        acc, total, peak = _absorb(
            acc, total, peak, q, stored_k_desc, stored_v_desc, k_scale_ptr, v_scale_ptr,
            tile * KEYS if K_PACKED else slot, tile * KEYS if V_PACKED else slot,
            tl.full([ROWS], 0, tl.int32) + num_valid, num_valid, head, scale, HEADS, HEAD_DIM, KEYS, True, PRECISION,
        )  # fmt: skip
    for row in tl.range(own_start, own_stop, KEYS):
        acc, total, peak = _absorb(
            acc, total, peak, q, k_desc, v_desc, None, None, row, row, row_stop, KEYS,
            head, scale, HEADS, HEAD_DIM, KEYS, False, PRECISION,
        )  # fmt: skip
    for row in tl.range(masked_start, masked_stop, KEYS, num_stages=1):
        acc, total, peak = _absorb(
            acc, total, peak, q, k_desc, v_desc, None, None, row, row, row_stop - row, own_end - row,
            head, scale, HEADS, HEAD_DIM, KEYS, True, PRECISION,
        )  # fmt: skip

    # A lane beyond the rows, or a piece that a row sees none of, has a sum of 0.
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if piece < 0:
        tl.store(out_ptr + rows[:, None] * out_stride + columns, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        lanes = (piece * HEADS + head).to(tl.int64) * ROWS + lane
        tl.store(piece_out_ptr + lanes[:, None] * DIM + column[None, :], acc)
        tl.store(piece_lse_ptr + lanes, tl.where(total == 0.0, float("-inf"), peak + tl.math.log2(total)))


@triton.jit
def merge_pieces_kernel(  # type: ignore[no-untyped-def]
    piece_out_ptr, piece_lse_ptr, merges_ptr, out_ptr, out_stride,
    HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (i, h): the rows of split query tile i for K/V head h, the mean of its pieces weighted by 2**lse."""
    head = tl.program_id(1)
    merges_ptr += tl.program_id(0) * 4
    first_row = tl.load(merges_ptr)
    num_rows = tl.load(merges_ptr + 1)
    piece_start = tl.load(merges_ptr + 2)
    piece_stop = tl.load(merges_ptr + 3)

    lane = tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for piece in tl.range(piece_start, piece_stop):
        lanes = (piece * HEADS + head).to(tl.int64) * ROWS + lane
        lse = tl.load(piece_lse_ptr + lanes)
        new_peak = tl.maximum(peak, lse)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink, weight = tl.math.exp2(peak - base), tl.math.exp2(lse - base)
        part = tl.load(piece_out_ptr + lanes[:, None] * DIM + column[None, :])
        acc = acc * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        peak = new_peak
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    rows = (first_row + lane // SHARED).to(tl.int64)
    columns = (head * SHARED + lane % SHARED)[:, None] * HEAD_DIM + column[None, :]
    inside = (lane // SHARED < num_rows)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(out_ptr + rows[:, None] * out_stride + columns, acc.to(out_ptr.dtype.element_ty), mask=inside)


def choose_tile(row_shape: RowShape, few_rows: bool, causal: bool, shared_memory: int) -> TileShape:
    """The tile shape of a launch. ``few_rows``: every group fits 16 lanes. ``causal``: most rows are text, of which
    each sees another range. ``shared_memory``: bytes that a program may have."""
    rows = max(16, triton.next_power_of_2(row_shape.shared))
    if row_shape.dtype == torch.float32:
        return TileShape(max(32, rows), keys=32, num_warps=4, num_stages=2)
    if few_rows:
        return TileShape(rows, keys=64, num_warps=4, num_stages=3)
    rows = max(128, rows)
    if shared_memory < HOPPER_SHARED_MEMORY:
        return TileShape(rows, keys=32, num_warps=8, num_stages=2, packs=True)
    # Measured on an H200: wide key tiles are 1.13 to 1.42 times as fast on steps, and 0.89 on causal rows.
    if causal:
        return TileShape(rows, keys=64, num_warps=8, num_stages=3, packs=True)
    return TileShape(rows, keys=128, num_warps=8, num_stages=2, packs=True)


def plan_pass(
    groups: Sequence[Group],
    row_stop: Ints,
    row_shape: RowShape,
    tile: TileShape | None = None,
    room: Room | None = None,
    apart: bool = True,
) -> Plan:
    """The plan of a pass, for all layers with rows of ``row_shape``.

    Groups of few rows (decode) get tiles of their own, since a tile costs the same whatever part of it is used; not
    ``apart``, they get those of the others. ``tile`` replaces the shape chosen for the others. With ``room``, see
    ``make_roomy_plan``, all rows get the tiles of a denoising step.
    """
    assert row_shape.head_dim <= MAX_HEAD_DIM, f"head_dim {row_shape.head_dim} is over {MAX_HEAD_DIM}"
    num_processors, shared_memory = device_limits(row_shape.device)
    if room is not None:
        shape = tile or choose_tile(row_shape, False, False, shared_memory)
        return make_roomy_plan(row_stop, groups, shape, SplitRule(num_processors), row_shape, room)
    causal = bool(np.mean(row_stop == np.arange(1, len(row_stop) + 1)) > 0.5)
    launches = []
    for few_rows in (False, True):
        chosen = [g for g in groups if g.num_rows and (apart and g.num_rows * row_shape.shared <= 16) == few_rows]
        shape = choose_tile(row_shape, few_rows, causal, shared_memory)
        # Small tiles wait for memory, so several programs a processor should be in flight; a large one fills it.
        rule = SplitRule(num_processors * (4 if few_rows else 1))
        if chosen:
            launches.append((shape if few_rows or tile is None else tile, chosen, rule))
    return make_plan(row_stop, launches, row_shape)


def hybrid_attention(q: Tensor, k: Tensor, v: Tensor, stored: Stored | None, plan: Plan) -> Tensor:
    """Attention of one layer. ``q``: (rows, heads, head_dim); ``k``, ``v``: (rows, kv_heads, head_dim), the rows' own;
    ``stored``: where the prefixes lie, None if no group has one. Returns the shape and dtype of ``q``."""
    check_rows(q, k, v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        for launch in plan.launches:
            run_launch(q, k, v, rows_of(stored, k, v), out, plan.row_stop, launch)
    return out


def check_rows(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16, torch.float32), q.dtype
    assert k.dtype == v.dtype == q.dtype
    assert (len(q), q.shape[2]) == (len(k), k.shape[2])
    assert k.shape == v.shape


def pack(x: Tensor, scale: Tensor | None, launch: Launch, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """What a launch of large tiles reads of stored K or V: where that is of another dtype, plain key tiles in scratch,
    which is said in the second value."""
    if x.dtype == dtype:
        return x, False
    return dequantise_tiles(x, scale, launch.prefix_tiles, launch.shape.keys, dtype), True


def run_launch(
    q: Tensor, k: Tensor, v: Tensor, stored: StoredKV, out: Tensor, row_stop: Tensor, launch: Launch
) -> None:
    """The rows of one launch into ``out``."""
    num_heads, head_dim = q.shape[1:]
    kv_heads, shape, dim = k.shape[1], launch.shape, max(16, triton.next_power_of_2(head_dim))
    k_packed = v_packed = False
    if shape.packs:
        stored_k, k_packed = pack(stored.k, stored.k_scale, launch, q.dtype)
        stored_v, v_packed = pack(stored.v, stored.v_scale, launch, q.dtype)
        stored = StoredKV(stored_k, stored_v)
    q, flat_out = q.flatten(1), out.flatten(1)
    pieces = Pieces.of(launch, kv_heads, dim, q.device)
    heads = {"HEADS": kv_heads, "SHARED": num_heads // kv_heads, "HEAD_DIM": head_dim, "DIM": dim, "ROWS": shape.rows}
    hybrid_attention_kernel[(len(launch.work), kv_heads)](
        q,
        *(_describe(x, shape.keys, dim) for x in (k, v, stored.k, stored.v)),
        stored.k_scale,
        stored.v_scale,
        flat_out,
        row_stop,
        launch.work,
        launch.prefix_tiles,
        pieces.out,
        pieces.lse,
        q.stride(0),
        flat_out.stride(0),
        head_dim**-0.5 * LOG2_E,
        **heads,
        KEYS=shape.keys,
        K_PACKED=k_packed,
        V_PACKED=v_packed,
        PRECISION="ieee",  # of fp32; 16-bit products are exact in any case
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    pieces.merge(launch, out, kv_heads)


@dataclass(frozen=True, eq=False)
class Pieces:
    """What the pieces of split walks leave for ``merge_pieces_kernel``: a lane each, normalised and its log-sum-exp."""

    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, launch: Launch, kv_heads: int, dim: int, device: torch.device) -> "Pieces":
        lanes = launch.num_pieces * kv_heads * launch.shape.rows
        return cls(torch.empty(lanes, dim, device=device), torch.empty(lanes, device=device))

    def merge(self, launch: Launch, out: Tensor, kv_heads: int) -> None:
        """Write the rows of split query tiles to ``out`` (rows, heads, head_dim)."""
        if not launch.num_pieces:
            return
        num_heads, head_dim = out.shape[1:]
        merge_pieces_kernel[(len(launch.merges), kv_heads)](
            self.out, self.lse, launch.merges, out, num_heads * head_dim,
            HEADS=kv_heads, SHARED=num_heads // kv_heads, HEAD_DIM=head_dim, DIM=self.out.shape[1],
            ROWS=launch.shape.rows, num_warps=4,
        )  # fmt: skip


def _describe(x: Tensor, keys: int, dim: int) -> TensorDescriptor:
    """Boxes of ``keys`` rows of one head, padded to ``dim`` columns: q is 0 in those beyond head_dim."""
    return TensorDescriptor.from_tensor(as_float8(x).flatten(1), [keys, dim])


@cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and the bytes of shared memory that one program may have. On a CPU (the interpreter): few, so
    that small inputs are split too. Kept, because the driver takes 1.4 ms to say it."""
    if device.type != "cuda":
        return 4, 228 << 10
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


def hybrid_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, stored: StoredKV | None, groups: Sequence[Group], row_stop: Ints, every: int = 1
) -> Tensor:
    """The same in the dtype of ``q``, dense, one group after the other, with the mask written out. Of the rows of a
    group only the first and each ``every``-th after it; the others are 0."""
    out = torch.zeros_like(q)
    shared = q.shape[1] // k.shape[1]
    for group in groups:
        own = slice(group.first, group.first + group.num_rows)
        rows = torch.arange(group.first, group.first + group.num_rows, every)
        stop = torch.as_tensor(row_stop[own][::every].copy(), device=q.device)
        slots = [torch.arange(slot, slot + count, device=q.device) for slot, count in group.extents]
        keys, values = k[own], v[own]
        num_before = 0
        if slots and stored is not None:
            before = torch.cat(slots)
            num_before = len(before)
            keys = torch.cat([_dequantise(stored.k, stored.k_scale, before, q.dtype), keys])
            values = torch.cat([_dequantise(stored.v, stored.v_scale, before, q.dtype), values])
        visible = torch.arange(len(keys), device=q.device) < (stop - group.first + num_before)[:, None]
        keys, values = (x.repeat_interleave(shared, dim=1).transpose(0, 1) for x in (keys, values))
        scores = q[rows].transpose(0, 1) @ keys.mT * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        out[rows] = (weights @ values).transpose(0, 1)
    return out


def _dequantise(x: Tensor, scale: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return x[slots].to(dtype)
    return (x.view(torch.uint8)[slots].view(torch.float8_e4m3fn).float() * scale[slots][..., None]).to(dtype)
