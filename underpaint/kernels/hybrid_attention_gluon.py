"""Attention of a whole pass on Hopper: what ``hybrid_attention_triton`` computes, from the same plan, in Gluon.

Each multiprocessor runs one program of three roles. A *producer* fetches tiles of Q, K and V by TMA: a page of 128 keys
is one box, wherever it lies. Two *consumers* of 64 lanes each multiply them and keep the online softmax, which runs
while the weights of the tile before meet their values. Programs are persistent: they take (work item, head) pairs from
a queue, one head after the other and in it one group after the other, so that programs which run at the same time read
the same keys from the L2 cache. While consumers finish one pair, the producer already fetches the next.

Long walks run at the card's power limit, where an instruction or a read from shared memory that is left out is time.
So a consumer holds its rows in registers, leaves what it has summed as it is while peaks rise little, adds up between
threads only in the end, and has a loop without a mask for the tiles that need none.

bf16, head_dim 64 or 128, and a power of two of query heads a K/V head, up to 64. Groups of few rows are left to the
Triton kernel's small tiles: they wait for memory, not for tensor cores.

Triton's interpreter does not know Gluon; ``tests/kernels/gluon_emulator.py`` runs this file on a CPU.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from underpaint.kernels import hybrid_attention_triton
from underpaint.kernels.gluon_walk import announce, hear, hide, limits, next_stage, read_item, wind_back
from underpaint.kernels.hybrid_attention_triton import LOG2_E, Pieces, check_rows, device_limits, pack
from underpaint.kernels.packed_tiles import Stored, rows_of
from underpaint.kernels.softmax_bf16 import as_operand, shrunk, soften
from underpaint.kernels.tiles import Group, Ints, Launch, Plan, Room, RowShape, StoredKV, TileShape

# Of the program's threads. Triton 3.7 has another name for it.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

HEAD_DIMS = (64, 128)
SHARED_HEADS = (1, 2, 4, 8, 16, 32, 64)
"""Query heads a K/V head."""
CONSUMER_ROWS = gl.constexpr(64)
CLEAR_ROWS = gl.constexpr(32)
# Barriers of the rings of K and V tiles, STAGES of each kind. Each kind is allocated on its own: Triton synchronises
# threads between two waits in one allocation.
K_FULL, K_EMPTY, V_FULL, V_EMPTY = (gl.constexpr(i) for i in range(4))
# Barriers of the Q tile, and of the announced next pair, for which there are two places.
Q_FULL, Q_EMPTY, NEXT_FULL, NEXT_EMPTY = (gl.constexpr(i) for i in (0, 1, 2, 4))


@gluon.jit
def _fetch(  # type: ignore[no-untyped-def]
    k_desc, v_desc, k_row, v_row, column, kv_smem, ring, stage, phase,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One key tile of K and of V into the ring, as soon as both consumers have left its buffers."""
    mbarrier.wait(ring[K_EMPTY].index(stage), phase ^ 1)
    mbarrier.expect(ring[K_FULL].index(stage), k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [k_row, column], ring[K_FULL].index(stage), kv_smem.index(stage))
    mbarrier.wait(ring[V_EMPTY].index(stage), phase ^ 1)
    mbarrier.expect(ring[V_FULL].index(stage), v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, [v_row, column], ring[V_FULL].index(stage), kv_smem.index(STAGES + stage))
    return next_stage(stage, phase, STAGES)


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    q_desc, k_desc, v_desc, stored_k_desc, stored_v_desc, work_ptr, prefix_tiles_ptr, queue_ptr,
    q_smem, kv_smem, next_smem, ring, pair_barriers,
    HEADS: gl.constexpr, SHARED: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    K_PACKED: gl.constexpr, V_PACKED: gl.constexpr,
):  # fmt: skip
    """Takes pairs from the queue, tells the consumers, and fetches what they read."""
    num_items = gl.load(queue_ptr)
    pair = gl.program_id(0)
    turn = 0
    stage = 0
    phase = 0
    while pair < num_items * HEADS:
        next_pair = announce(queue_ptr, next_smem, pair_barriers, turn, NEXT_FULL, NEXT_EMPTY)

        head = pair // num_items
        work = work_ptr + (pair - head * num_items) * 12  # fields as in tiles.WorkFields
        column = head * HEAD_DIM
        mbarrier.wait(pair_barriers.index(Q_EMPTY), (turn & 1) ^ 1)
        mbarrier.expect(pair_barriers.index(Q_FULL), 2 * q_desc.block_type.nbytes)
        first_row = gl.load(work)
        for part in gl.static_range(2):
            row = first_row + part * (CONSUMER_ROWS // SHARED)
            tma.async_copy_global_to_shared(
                q_desc, [row, head * SHARED, 0], pair_barriers.index(Q_FULL), q_smem.index(part)
            )

        # The masked ranges first, as the consumers expect. Bounds are read late: a producer has few registers.
        for row in range(gl.load(work + 8), gl.load(work + 9), KEYS):
            stage, phase = _fetch(k_desc, v_desc, row, row, column, kv_smem, ring, stage, phase, STAGES)
        for field in gl.static_range(4, 0, -2):  # partly valid tiles of the prefix, then full ones
            for tile in range(gl.load(work + field), gl.load(work + field + 1)):
                slot = gl.load(prefix_tiles_ptr + 2 * tile)
                k_row = tile * KEYS if K_PACKED else slot
                v_row = tile * KEYS if V_PACKED else slot
                stage, phase = _fetch(
                    stored_k_desc, stored_v_desc, k_row, v_row, column, kv_smem, ring, stage, phase, STAGES
                )
        for row in range(gl.load(work + 6), gl.load(work + 7), KEYS):
            stage, phase = _fetch(k_desc, v_desc, row, row, column, kv_smem, ring, stage, phase, STAGES)
        pair = next_pair
        turn += 1
    wind_back(queue_ptr)


@gluon.jit
def _clear(v, num_valid, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros in the rows of a V tile from ``num_valid`` on: they may be another sequence's or never written, and
    0 * NaN would reach the result. Both consumers may do it at once: they write the same."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    for first in gl.static_range(0, KEYS, CLEAR_ROWS):
        if num_valid < first + CLEAR_ROWS:
            rows = v.slice(first, CLEAR_ROWS)
            x = rows.load(layout)
            row = first + gl.arange(0, CLEAR_ROWS, layout=gl.SliceLayout(1, layout))
            rows.store(gl.where(row[:, None] < num_valid, x, gl.zeros_like(x)))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _mask(  # type: ignore[no-untyped-def]
    scores, v, v_full, phase, tile, masked_start, num_own, own_end, part_ptr, row_stop, LAYOUT: gl.constexpr
):
    """Scores of masked tile ``tile``, and its values, without what is not to be seen."""
    KEYS: gl.constexpr = v.shape[0]
    HEAD_DIM: gl.constexpr = v.shape[1]
    limit, num_valid = limits(tile, masked_start, num_own, own_end, part_ptr, row_stop, KEYS)
    scores = hide(scores, limit, LAYOUT)
    if num_valid < KEYS:
        mbarrier.wait(v_full, phase)
        _clear(v, num_valid, KEYS, HEAD_DIM)
    return scores


@gluon.jit
def _advance(  # type: ignore[no-untyped-def]
    q, weights, acc, peak, total, scale, kv_smem, ring, stage, phase, more,
    tile, masked_start, num_own, own_end, part_ptr, row_stop,
    MASKED: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, T_LAYOUT: gl.constexpr, W_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The scores of the next key tile and their softmax, while the weights of the last one meet their values."""
    KEYS: gl.constexpr = weights.shape[1]
    last, last_phase = stage, phase
    stage, phase = next_stage(stage, phase, STAGES)
    zeros = gl.zeros([CONSUMER_ROWS, KEYS], gl.float32, layout=S_LAYOUT)
    scores_token = warpgroup_mma(q, kv_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(ring[V_FULL].index(last), last_phase)
    acc_token = warpgroup_mma(weights, kv_smem.index(STAGES + last), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores_token])
    mbarrier.arrive(ring[K_EMPTY].index(stage), count=1)
    if MASKED:
        scores = _mask(
            scores, kv_smem.index(STAGES + stage), ring[V_FULL].index(stage), phase,
            tile, masked_start, num_own, own_end, part_ptr, row_stop, S_LAYOUT,
        )  # fmt: skip
    softened, peak, total, shrink = soften(scores, peak, total, scale, MASKED, S_LAYOUT, T_LAYOUT)
    # The next keys are waited for here, and not where they are used, for the branch that is in it: without one
    # ptxas moves the wait for the product up, before the softmax, and nothing overlaps.
    following, following_phase = next_stage(stage, phase, STAGES)
    mbarrier.wait(ring[K_FULL].index(following), following_phase, pred=more)
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    mbarrier.arrive(ring[V_EMPTY].index(last), count=1)
    acc = shrunk(acc, gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT)))
    weights = as_operand(softened, W_LAYOUT)
    return weights, acc, peak, total, stage, phase


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    PART: gl.constexpr, out_ptr, row_stop_ptr, work_ptr, prefix_tiles_ptr, piece_out_ptr, piece_lse_ptr, queue_ptr,
    q_smem, kv_smem, next_smem, ring, pair_barriers, scale,
    HEADS: gl.constexpr, SHARED: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Lanes [64 * PART, 64 * (PART + 1)) of every pair that this program takes."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    T_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2)
    W_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    num_items = gl.load(queue_ptr)
    pair = gl.program_id(0)
    turn = 0
    stage = 0
    phase = 0
    lane = PART * CONSUMER_ROWS + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    first_row, num_rows, masked_start, num_own, own_end, part_start, num_part, num_unmasked, piece = read_item(
        work_ptr, pair, num_items, KEYS
    )
    row_stop = gl.load(row_stop_ptr + first_row + lane // SHARED, mask=lane // SHARED < num_rows, other=0)
    while pair < num_items * HEADS:
        head = pair // num_items
        num_masked = num_own + num_part
        num_tiles = num_masked + num_unmasked
        part_ptr = prefix_tiles_ptr + 2 * part_start
        mbarrier.wait(pair_barriers.index(Q_FULL), turn & 1)
        q = q_smem.index(PART).reshape([CONSUMER_ROWS, HEAD_DIM]).load(Q_LAYOUT)
        mbarrier.arrive(pair_barriers.index(Q_EMPTY), count=1)
        mbarrier.wait(ring[K_FULL].index(stage), phase)
        zeros = gl.zeros([CONSUMER_ROWS, KEYS], gl.float32, layout=S_LAYOUT)
        scores = warpgroup_mma(q, kv_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(ring[K_EMPTY].index(stage), count=1)
        if num_masked > 0:
            scores = _mask(
                scores, kv_smem.index(STAGES + stage), ring[V_FULL].index(stage), phase,
                0, masked_start, num_own, own_end, part_ptr, row_stop, S_LAYOUT,
            )  # fmt: skip
        peak = gl.full([CONSUMER_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        total = gl.zeros([CONSUMER_ROWS, 8], gl.float32, layout=T_LAYOUT)
        softened, peak, total, _ = soften(scores, peak, total, scale, True, S_LAYOUT, T_LAYOUT)
        weights = as_operand(softened, W_LAYOUT)
        acc = gl.zeros([CONSUMER_ROWS, HEAD_DIM], gl.float32, layout=O_LAYOUT)
        following, following_phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(ring[K_FULL].index(following), following_phase, pred=num_tiles > 1)

        for tile in range(1, num_masked):
            weights, acc, peak, total, stage, phase = _advance(
                q, weights, acc, peak, total, scale, kv_smem, ring, stage, phase, tile + 1 < num_tiles,
                tile, masked_start, num_own, own_end, part_ptr, row_stop,
                True, STAGES, S_LAYOUT, T_LAYOUT, W_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        for tile in range(gl.maximum(num_masked, 1), num_tiles):
            weights, acc, peak, total, stage, phase = _advance(
                q, weights, acc, peak, total, scale, kv_smem, ring, stage, phase, tile + 1 < num_tiles,
                tile, masked_start, num_own, own_end, part_ptr, row_stop,
                False, STAGES, S_LAYOUT, T_LAYOUT, W_LAYOUT, O_LAYOUT,
            )  # fmt: skip

        next_pair = hear(next_smem, pair_barriers, turn, NEXT_FULL, NEXT_EMPTY)
        # What the next pair is comes from far memory: ask for it before the last product and the stores of this one.
        next_first, next_rows, masked_start, num_own, own_end, part_start, num_part, num_unmasked, next_piece = (
            read_item(work_ptr, next_pair, num_items, KEYS)
        )
        mbarrier.wait(ring[V_FULL].index(stage), phase)
        acc = warpgroup_mma(weights, kv_smem.index(STAGES + stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ring[V_EMPTY].index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)

        row_stop = gl.load(row_stop_ptr + next_first + lane // SHARED, mask=lane // SHARED < next_rows, other=0)
        total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S_LAYOUT))
        inverse = 1.0 / gl.where(total == 0.0, 1.0, total)  # a piece that a row sees none of
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
        out_lane = PART * CONSUMER_ROWS + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
        column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, O_LAYOUT))
        used = out_lane // SHARED < num_rows
        if piece < 0:
            row = (first_row + out_lane // SHARED).to(gl.int64)
            start = (row * HEADS * SHARED + head * SHARED + out_lane % SHARED) * HEAD_DIM
            gl.store(out_ptr + start[:, None] + column[None, :], acc.to(gl.bfloat16), mask=used[:, None])
        else:
            place = (piece * HEADS + head).to(gl.int64) * (2 * CONSUMER_ROWS)
            gl.store(piece_out_ptr + (place + out_lane)[:, None] * HEAD_DIM + column[None, :], acc)
            lse = gl.where(total == 0.0, float("-inf"), peak + gl.log2(total))
            gl.store(piece_lse_ptr + place + lane, lse)
        pair, first_row, num_rows, piece = next_pair, next_first, next_rows, next_piece
        turn += 1


@gluon.jit
def hybrid_attention_gluon_kernel(  # type: ignore[no-untyped-def]
    q_desc, k_desc, v_desc, stored_k_desc, stored_v_desc, out_ptr, row_stop_ptr, work_ptr, prefix_tiles_ptr,
    piece_out_ptr, piece_lse_ptr, queue_ptr, scale,
    HEADS: gl.constexpr, SHARED: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    K_PACKED: gl.constexpr, V_PACKED: gl.constexpr,
):  # fmt: skip
    """One program a multiprocessor. HEADS: K/V heads. SHARED: query heads of each.

    ``queue_ptr``: the number of work items, the next pair after the first of each program, programs that are done.
    K_PACKED, V_PACKED: stored K or V lies as key tile after key tile instead of in slots.
    """
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, CONSUMER_ROWS // SHARED, SHARED, HEAD_DIM], q_desc.layout)
    kv_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, KEYS, HEAD_DIM], k_desc.layout)
    next_smem = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring = (k_full, k_empty, v_full, v_empty)
    pair_barriers = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ring[K_FULL].index(i), count=1)
        mbarrier.init(ring[V_FULL].index(i), count=1)
        mbarrier.init(ring[K_EMPTY].index(i), count=2)
        mbarrier.init(ring[V_EMPTY].index(i), count=2)
    mbarrier.init(pair_barriers.index(Q_FULL), count=1)
    mbarrier.init(pair_barriers.index(Q_EMPTY), count=2)
    for i in gl.static_range(2):
        mbarrier.init(pair_barriers.index(NEXT_FULL + i), count=1)
        mbarrier.init(pair_barriers.index(NEXT_EMPTY + i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                0, out_ptr, row_stop_ptr, work_ptr, prefix_tiles_ptr, piece_out_ptr, piece_lse_ptr, queue_ptr,
                q_smem, kv_smem, next_smem, ring, pair_barriers, scale,
                HEADS, SHARED, HEAD_DIM, KEYS, STAGES,
            )),
            (_consume, (
                1, out_ptr, row_stop_ptr, work_ptr, prefix_tiles_ptr, piece_out_ptr, piece_lse_ptr, queue_ptr,
                q_smem, kv_smem, next_smem, ring, pair_barriers, scale,
                HEADS, SHARED, HEAD_DIM, KEYS, STAGES,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, stored_k_desc, stored_v_desc, work_ptr, prefix_tiles_ptr, queue_ptr,
                q_smem, kv_smem, next_smem, ring, pair_barriers,
                HEADS, SHARED, HEAD_DIM, KEYS, STAGES, K_PACKED, V_PACKED,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def choose_tile(head_dim: int) -> TileShape:
    """Two consumers of 64 lanes, and key tiles of a page. Shared memory holds two of K and of V beside Q at head_dim
    128, four at 64."""
    return TileShape(
        2 * CONSUMER_ROWS.value, keys=128, num_warps=4, num_stages=256 // head_dim, kernel="gluon", packs=True
    )


def plan_pass(
    groups: Sequence[Group],
    row_stop: Ints,
    row_shape: RowShape,
    tile: TileShape | None = None,
    room: Room | None = None,
    apart: bool = True,
) -> Plan:
    """As in ``hybrid_attention_triton``, with tiles of this kernel for groups of more than few rows."""
    assert row_shape.head_dim in HEAD_DIMS, f"head_dim {row_shape.head_dim} is none of {HEAD_DIMS}"
    assert row_shape.dtype == torch.bfloat16, f"{row_shape.dtype} is not bfloat16"
    assert row_shape.shared in SHARED_HEADS, f"{row_shape.shared} query heads a K/V head are none of {SHARED_HEADS}"
    tile = tile or choose_tile(row_shape.head_dim)
    return hybrid_attention_triton.plan_pass(groups, row_stop, row_shape, tile, room, apart)


def hybrid_attention(q: Tensor, k: Tensor, v: Tensor, stored: Stored | None, plan: Plan) -> Tensor:
    """As in ``hybrid_attention_triton``, in bf16. Launches with the same plan must follow one another."""
    check_rows(q, k, v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        for launch in plan.launches:
            run = run_launch if launch.shape.kernel == "gluon" else hybrid_attention_triton.run_launch
            run(q, k, v, rows_of(stored, k, v), out, plan.row_stop, launch)
    return out


def run_launch(
    q: Tensor, k: Tensor, v: Tensor, stored: StoredKV, out: Tensor, row_stop: Tensor, launch: Launch
) -> None:
    """The rows of one launch into ``out``."""
    num_heads, head_dim = q.shape[1:]
    kv_heads, keys = k.shape[1], launch.shape.keys
    stored_k, k_packed = pack(stored.k, stored.k_scale, launch, q.dtype)
    stored_v, v_packed = pack(stored.v, stored.v_scale, launch, q.dtype)
    pieces = Pieces.of(launch, kv_heads, head_dim, q.device)
    num_programs = min(device_limits(q.device)[0], len(launch.work) * kv_heads)
    shared, num_stages = num_heads // kv_heads, launch.shape.num_stages
    constants = (kv_heads, shared, head_dim, keys, num_stages, k_packed, v_packed)
    _compiled(q.device, launch.shape.num_warps, constants)[(num_programs, 1, 1)](
        _describe_rows(q, shared),
        *(_describe_keys(x, keys) for x in (k, v, stored_k, stored_v)),
        out,
        row_stop,
        launch.work,
        launch.prefix_tiles,
        pieces.out,
        pieces.lse,
        launch.queue,
        head_dim**-0.5 * LOG2_E,
        *constants,
    )
    pieces.merge(launch, out, kv_heads)


@cache
def _compiled(device: torch.device, num_warps: int, constants: tuple[int, ...]) -> CompiledKernel:
    """The kernel for these constexprs. Launched by way of this it takes a fraction of the host's time that Triton needs
    to find it, which it does by printing the layout of every descriptor. All pointers are aligned to 16 bytes."""
    kv_heads, shared, head_dim, keys, *_ = constants
    q = torch.empty(1, kv_heads * shared, head_dim, dtype=torch.bfloat16, device=device)
    k = _describe_keys(q[:, :kv_heads], keys)
    ints, floats = torch.empty(4, dtype=torch.int32, device=device), torch.empty(4, device=device)
    return hybrid_attention_gluon_kernel.warmup(
        _describe_rows(q, shared), k, k, k, k, q, ints, ints, ints, floats, floats, ints, 1.0, *constants,
        num_warps=num_warps, grid=(1,),
    )  # fmt: skip


@cache
def _layout(box: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16)


def _describe_rows(q: Tensor, shared: int) -> TensorDescriptor:
    """Boxes of the lanes of one consumer: some rows, and the query heads of one K/V head."""
    box = [CONSUMER_ROWS.value // shared, shared, q.shape[2]]
    return TensorDescriptor.from_tensor(q, box, _layout(tuple(box)))


def _describe_keys(x: Tensor, keys: int) -> TensorDescriptor:
    """Boxes of ``keys`` rows of one head."""
    box = [keys, x.shape[2]]
    return TensorDescriptor.from_tensor(x.flatten(1), box, _layout(tuple(box)))
