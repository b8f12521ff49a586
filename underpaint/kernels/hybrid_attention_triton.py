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

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from underpaint.kernels.tiles import Group, Ints, Launch, Plan, SplitRule, StoredKV, TileShape, make_plan

LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 128
HOPPER_SHARED_MEMORY = 227 << 10
"""Bytes a program may have from compute capability 9.0 on, consumer cards aside, which have far less."""
NATIVE_E4M3 = (8, 9)
"""The first compute capability that converts e4m3 in hardware."""


@triton.jit
def _load_keys(  # type: ignore[no-untyped-def]
    desc, scale_ptr, row, stop, head, dtype: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + KEYS) of one head of K or V, dequantised to ``dtype``. With CLEAR, rows from ``stop`` on are 0:
    they may be another sequence's or never written, and 0 * NaN would reach the result."""
    x = desc.load([row, head * HEAD_DIM])
    keys = row + tl.arange(0, KEYS)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + keys.to(tl.int64) * HEADS + head, mask=keys < stop, other=0.0)
        if x.dtype == tl.uint8:
            # An e4m3 pattern moved up by 7 bits is an fp16 pattern of 2**-8 times the value, subnormals included.
            bits = x.to(tl.uint16)
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
            x = half.to(tl.float32) * (scale * 256.0)[:, None]
        else:
            x = x.to(tl.float32) * scale[:, None]
    if CLEAR:
        x = tl.where((keys < stop)[:, None], x, tl.zeros_like(x))
    return x.to(dtype)


@triton.jit
def _absorb(  # type: ignore[no-untyped-def]
    acc, total, peak, q, k_desc, v_desc, k_scale_ptr, v_scale_ptr, row, stop, row_stop, head, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile of online softmax. ``peak`` is the largest score so far and ``total`` the sum of 2**(score - peak),
    both (tile rows,). With MASKED, a row sees the keys before its ``row_stop``."""
    k = _load_keys(k_desc, k_scale_ptr, row, stop, head, q.dtype, HEADS, HEAD_DIM, KEYS, False)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        scores = tl.where((row + tl.arange(0, KEYS))[None, :] < row_stop[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    # A row that has seen no key yet has no peak; any finite number keeps its sum at 0.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = tl.math.exp2(scores * scale - base[:, None])
    shrink = tl.math.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    v = _load_keys(v_desc, v_scale_ptr, row, stop, head, q.dtype, HEADS, HEAD_DIM, KEYS, MASKED)
    acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)
    return acc, total, new_peak


@triton.jit
def hybrid_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_desc, v_desc, stored_k_desc, stored_v_desc, k_scale_ptr, v_scale_ptr, out_ptr,
    row_stop_ptr, work_ptr, prefix_tiles_ptr, piece_out_ptr, piece_lse_ptr, q_stride, out_stride, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (i, h): work item i for K/V head h. The items of one head are launched together, so that programs that
    run at the same time read the same keys, of few heads, from the L2 cache.

    HEADS: K/V heads. SHARED: query heads of each. DIM: HEAD_DIM padded to a power of two.
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
            acc, total, peak, q, stored_k_desc, stored_v_desc, k_scale_ptr, v_scale_ptr, slot, slot + KEYS, row_stop,
            head, scale, HEADS, HEAD_DIM, KEYS, False, PRECISION,
        )  # fmt: skip
    for tile in tl.range(part_start, part_stop, num_stages=1):
        slot = tl.load(prefix_tiles_ptr + 2 * tile)
        slot_stop = slot + tl.load(prefix_tiles_ptr + 2 * tile + 1)
        acc, total, peak = _absorb(
            acc, total, peak, q, stored_k_desc, stored_v_desc, k_scale_ptr, v_scale_ptr, slot, slot_stop,
            tl.full([ROWS], 0, tl.int32) + slot_stop, head, scale, HEADS, HEAD_DIM, KEYS, True, PRECISION,
        )  # fmt: skip
    for row in tl.range(own_start, own_stop, KEYS):
        acc, total, peak = _absorb(
            acc, total, peak, q, k_desc, v_desc, None, None, row, own_end, row_stop,
            head, scale, HEADS, HEAD_DIM, KEYS, False, PRECISION,
        )  # fmt: skip
    for row in tl.range(masked_start, masked_stop, KEYS, num_stages=1):
        acc, total, peak = _absorb(
            acc, total, peak, q, k_desc, v_desc, None, None, row, own_end, row_stop,
            head, scale, HEADS, HEAD_DIM, KEYS, True, PRECISION,
        )  # fmt: skip

    acc = (
        acc / tl.where(total == 0.0, 1.0, total)[:, None]
    )  # a lane beyond the rows, or a piece that a row sees none of
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


def choose_tile(dtype: torch.dtype, shared: int, few_rows: bool, shared_memory: int) -> TileShape:
    """The tile shape of a launch. ``shared``: query heads a K/V head. ``few_rows``: every group fits 16 lanes.
    ``shared_memory``: bytes that a program may have."""
    rows = max(16, triton.next_power_of_2(shared))
    if dtype == torch.float32:
        return TileShape(max(32, rows), keys=32, num_warps=4, num_stages=2)
    if few_rows:
        return TileShape(rows, keys=64, num_warps=4, num_stages=3)
    rows = max(128, rows)
    if shared_memory < HOPPER_SHARED_MEMORY:
        return TileShape(rows, keys=32, num_warps=8, num_stages=2)
    # The largest at head_dim 128 that ptxas fits into registers, also with e4m3 pages, which are dequantised in them.
    return TileShape(rows, keys=64, num_warps=8, num_stages=3)


def plan_pass(
    groups: Sequence[Group],
    row_stop: Ints,
    q: Tensor,
    kv_heads: int,
    tile: TileShape | None = None,
) -> Plan:
    """The plan of a pass, for all layers with rows like ``q`` (rows, heads, head_dim).

    Groups of few rows (decode) get tiles of their own, since a tile costs the same whatever part of it is used.
    ``tile`` replaces the shape chosen for the others, for measurements.
    """
    num_heads, head_dim = q.shape[1:]
    shared = num_heads // kv_heads
    assert num_heads == shared * kv_heads, f"{num_heads} heads cannot share {kv_heads}"
    assert head_dim <= MAX_HEAD_DIM, f"head_dim {head_dim} is over {MAX_HEAD_DIM}"
    num_processors, shared_memory = _device_limits(q.device)
    launches = []
    for few_rows in (False, True):
        chosen = [g for g in groups if g.num_rows and (g.num_rows * shared <= 16) == few_rows]
        shape = choose_tile(q.dtype, shared, few_rows, shared_memory)
        # Small tiles wait for memory, so several programs a processor should be in flight; a large one fills it.
        rule = SplitRule(num_processors * (4 if few_rows else 1))
        if chosen:
            launches.append((shape if few_rows or tile is None else tile, chosen, rule))
    return make_plan(row_stop, launches, shared, kv_heads, q.device)


def hybrid_attention(q: Tensor, k: Tensor, v: Tensor, stored: StoredKV | None, plan: Plan) -> Tensor:
    """Attention of one layer. ``q``: (rows, heads, head_dim); ``k``, ``v``: (rows, kv_heads, head_dim), the rows' own;
    ``stored``: where the prefixes lie, None if no group has one. Returns the shape and dtype of ``q``."""
    assert q.dtype in (torch.float16, torch.bfloat16, torch.float32), q.dtype
    assert k.dtype == v.dtype == q.dtype
    assert (len(q), q.shape[2]) == (len(k), k.shape[2])
    assert k.shape == v.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        for launch in plan.launches:
            _launch(q, k, v, stored or StoredKV(k, v), out, plan.row_stop, launch)
    return out


def _launch(q: Tensor, k: Tensor, v: Tensor, stored: StoredKV, out: Tensor, row_stop: Tensor, launch: Launch) -> None:
    num_heads, head_dim = q.shape[1:]
    kv_heads, shape, dim = k.shape[1], launch.shape, max(16, triton.next_power_of_2(head_dim))
    q, flat_out = q.flatten(1), out.flatten(1)
    lanes = launch.num_pieces * kv_heads * shape.rows
    piece_out = torch.empty(lanes, dim, device=q.device)
    piece_lse = torch.empty(lanes, device=q.device)
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
        piece_out,
        piece_lse,
        q.stride(0),
        flat_out.stride(0),
        head_dim**-0.5 * LOG2_E,
        **heads,
        KEYS=shape.keys,
        PRECISION="ieee",  # of fp32; 16-bit products are exact in any case
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if launch.num_pieces:
        merge_pieces_kernel[(len(launch.merges), kv_heads)](
            piece_out, piece_lse, launch.merges, flat_out, flat_out.stride(0), **heads, num_warps=shape.num_warps
        )


def _describe(x: Tensor, keys: int, dim: int) -> TensorDescriptor:
    """Boxes of ``keys`` rows of one head, padded to ``dim`` columns: q is 0 in those beyond head_dim."""
    if x.dtype == torch.uint8 and x.is_cuda and torch.cuda.get_device_capability(x.device) >= NATIVE_E4M3:
        x = x.view(torch.float8_e4m3fn)
    return TensorDescriptor.from_tensor(x.flatten(1), [keys, dim])


def _device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and the bytes of shared memory that one program may have. On a CPU (the interpreter): few, so
    that small inputs are split too."""
    if device.type != "cuda":
        return 4, 228 << 10
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


def hybrid_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, stored: StoredKV | None, groups: Sequence[Group], row_stop: Ints
) -> Tensor:
    """The same in the dtype of ``q``, dense, one group after the other, with the mask written out."""
    out = torch.empty_like(q)
    shared = q.shape[1] // k.shape[1]
    for group in groups:
        rows = slice(group.first, group.first + group.num_rows)
        stop = torch.as_tensor(row_stop[rows], device=q.device)
        slots = [torch.arange(slot, slot + count, device=q.device) for slot, count in group.extents]
        keys, values = k[rows], v[rows]
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
