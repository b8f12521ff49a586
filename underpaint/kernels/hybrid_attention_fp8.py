"""Attention of a whole pass on Hopper in e4m3: what ``hybrid_attention_gluon`` computes. Products take half as long,
but exponentials, which then take as long as they do, are no faster: the whole is far from twice as fast (docs/log.md).

All keys that a launch reads are packed tiles, see ``packed_tiles``: K as it is, V turned over, because Hopper
multiplies bytes only along their own direction. Both have a power of two for every tile and head. Those of the pass are
made before each launch by ``pack_e4m3``, and so are those of prefixes in pages of rows; prefixes in pages of tiles are
read in place. Queries become e4m3 in the kernel, with a scale a row and head, unless they are already, and stay in
registers.

The scale of K is a factor of the scores. V is about ``codes * 2**e``; its exponent joins the scores, so that weights
are what the codes are multiplied with: ``w = 2**(score + e - peak)``, where ``peak`` is the largest ``score + e`` so
far or up to SLACK less, and their sum counts ``w * 2**-e``. What is multiplied is up to 2**8, rounded to e4m3, whose
smallest value is 2**-9: weights under 2**-16 of the largest count as 0 in the product, though not in the sum. Hopper
adds products of e4m3 with fewer bits than fp32 has, which is little beside the 4 bits of what is multiplied.

Key tiles are softened in halves, each while the scores of the half behind it are computed and the weights of the half
before it meet their values: a consumer never waits for a product that it has just begun.

Roles, queue and pieces are those of ``hybrid_attention_gluon``, and groups of few rows are left to the Triton kernel
in bf16. Sums of weights stay with the thread that made them until the walk ends.
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

from underpaint.kernels import hybrid_attention_gluon, hybrid_attention_triton
from underpaint.kernels.gluon_walk import announce, hear, hide, limits, next_stage, read_item, wind_back
from underpaint.kernels.hybrid_attention_triton import LOG2_E, Pieces, check_rows, device_limits
from underpaint.kernels.pack_e4m3 import pack_launch
from underpaint.kernels.packed_tiles import FACT_PLACES, PackedTiles, Stored, rows_of
from underpaint.kernels.rows_e4m3 import TILE_ROWS, load_rows, quantised
from underpaint.kernels.softmax_bf16 import shrunk
from underpaint.kernels.softmax_e4m3 import SUMS, WEIGHT_EXPONENT, as_operand, read_facts, soften
from underpaint.kernels.tiles import Group, Ints, Launch, Plan, Room, RowShape, TileShape

PLACES = gl.constexpr(FACT_PLACES)
SLACK = 2
"""How far a score may pass the peak before the peak follows it, a power of two: peaks seldom move then."""
EXPECTED_ERROR = 0.065
"""Root mean square of the error over that of the result, for inputs of a standard normal distribution. Rounding to
e4m3 is off by 0.0265 (2**-4 / sqrt(3) at the beginning of an octave, half of it at its end); V is rounded once, weights
once, and q k' / sqrt(head_dim), whose variance is 1, through two factors: 2 * 0.0265, and a fifth to spare."""
# What a packed tile has.
K, V, FACTS = (gl.constexpr(i) for i in range(3))
# Barriers of the rings of K and V tiles, STAGES of each kind; facts of a tile come and go with its keys. Each kind is
# allocated on its own: Triton synchronises threads between two waits in one allocation.
K_FULL, K_EMPTY, V_FULL, V_EMPTY = (gl.constexpr(i) for i in range(4))
# Barriers of the announced next pair, for which there are two places.
NEXT_FULL, NEXT_EMPTY = (gl.constexpr(i) for i in (0, 2))


@gluon.jit
def _fetch(  # type: ignore[no-untyped-def]
    descs, place, tiles, ring, stage, phase,
    HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A packed tile of one head into the ring, as soon as both consumers have left its buffers."""
    full = ring[K_FULL].index(stage)
    mbarrier.wait(ring[K_EMPTY].index(stage), phase ^ 1)
    mbarrier.expect(full, descs[K].block_type.nbytes + descs[FACTS].block_type.nbytes)
    tma.async_copy_global_to_shared(descs[FACTS], [place, 0], full, tiles[FACTS].index(stage))
    tma.async_copy_global_to_shared(descs[K], [place * KEYS, 0], full, tiles[K].index(stage))
    full = ring[V_FULL].index(stage)
    mbarrier.wait(ring[V_EMPTY].index(stage), phase ^ 1)
    mbarrier.expect(full, descs[V].block_type.nbytes)
    tma.async_copy_global_to_shared(descs[V], [place * 2 * HEAD_DIM, 0], full, tiles[V].index(stage))
    return next_stage(stage, phase, STAGES)


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    descs, prefix_descs, work_ptr, own_tile_ptr, prefix_tiles_ptr, queue_ptr, num_own_tiles,
    tiles, ring, next_smem, pair_barriers,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, IN_PLACE: gl.constexpr,
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
        item = pair - head * num_items
        work = work_ptr + item * 12  # fields as in tiles.WorkFields
        own_start = gl.load(work + 6)
        own_tile = gl.load(own_tile_ptr + item)
        # The masked ranges first, as the consumers expect: own tiles, then partly valid ones of the prefix.
        first = own_tile + (gl.load(work + 8) - own_start) // KEYS
        for tile in range(first, own_tile + (gl.load(work + 9) - own_start) // KEYS):
            stage, phase = _fetch(descs, tile * HEADS + head, tiles, ring, stage, phase, HEAD_DIM, KEYS, STAGES)
        for field in gl.static_range(4, 0, -2):
            for tile in range(gl.load(work + field), gl.load(work + field + 1)):
                number = num_own_tiles + tile
                if IN_PLACE:
                    number = gl.load(prefix_tiles_ptr + 2 * tile) // KEYS
                place = number * HEADS + head
                stage, phase = _fetch(prefix_descs, place, tiles, ring, stage, phase, HEAD_DIM, KEYS, STAGES)
        for tile in range(own_tile, own_tile + (gl.load(work + 7) - own_start) // KEYS):
            stage, phase = _fetch(descs, tile * HEADS + head, tiles, ring, stage, phase, HEAD_DIM, KEYS, STAGES)
        pair = next_pair
        turn += 1
    wind_back(queue_ptr)


@gluon.jit
def _advance(  # type: ignore[no-untyped-def]
    q, row_scale, first, second_scores, facts, acc, sums, peak, tiles, ring, stage, phase,
    masked_tile, masked_start, num_own, own_end, part_ptr, row_stop, is_last,
    HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, SLACK: gl.constexpr, MASKED: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, W_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The second half of the last tile and the first half of the next one in the ring: each is softened while the
    scores of the half behind it are computed, and the weights of the half before it meet their values.

    ``first``: weights of the last tile's first half; ``second_scores`` of its second, and ``facts``, see
    ``read_facts``. MASKED: the next tile is the ``masked_tile``-th of those that are not seen as a whole.
    """
    HALF: gl.constexpr = KEYS // 2
    last = stage
    stage, phase = next_stage(stage, phase, STAGES)
    keys, values = tiles[K].index(stage), tiles[V].index(last)
    zeros = gl.zeros([TILE_ROWS, HALF], gl.float32, layout=S_LAYOUT)
    token = warpgroup_mma(q, keys.slice(0, HALF).permute((1, 0)), zeros, use_acc=False, is_async=True)
    values_half = values.slice(0, HEAD_DIM).permute((1, 0))
    acc_token = warpgroup_mma(as_operand(first, HALF, W_LAYOUT), values_half, acc, is_async=True)
    second, sums, shrink, peak = soften(second_scores, peak, sums, row_scale, facts, HALF, SLACK)
    # What is read next is waited for here, and not where it is used, for the branch that is in it: without one ptxas
    # moves the wait for the product up, before the softmax, and nothing overlaps.
    mbarrier.wait(ring[V_FULL].index(stage), phase)
    scores, acc = warpgroup_mma_wait(0, deps=[token, acc_token])
    acc = shrunk(acc, gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT)))
    facts = read_facts(tiles[FACTS].index(stage))
    if MASKED:
        limit, _ = limits(masked_tile, masked_start, num_own, own_end, part_ptr, row_stop, KEYS)
        scores = hide(scores, limit, S_LAYOUT)

    token = warpgroup_mma(q, keys.slice(HALF, HALF).permute((1, 0)), zeros, use_acc=False, is_async=True)
    values_half = values.slice(HEAD_DIM, HEAD_DIM).permute((1, 0))
    acc_token = warpgroup_mma(as_operand(second, HALF, W_LAYOUT), values_half, acc, is_async=True)
    first, sums, shrink, peak = soften(scores, peak, sums, row_scale, facts, HALF, SLACK)
    following, following_phase = next_stage(stage, phase, STAGES)
    mbarrier.wait(ring[K_FULL].index(following), following_phase, pred=not is_last)
    second_scores, acc = warpgroup_mma_wait(0, deps=[token, acc_token])
    mbarrier.arrive(ring[K_EMPTY].index(stage), count=1)
    mbarrier.arrive(ring[V_EMPTY].index(last), count=1)
    acc = shrunk(acc, gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT)))
    if MASKED:
        second_scores = hide(second_scores, limit - HALF, S_LAYOUT)
    return first, second_scores, facts, acc, sums, peak, stage, phase


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    PART: gl.constexpr, q_ptr, out_ptr, row_stop_ptr, work_ptr, prefix_tiles_ptr, piece_out_ptr, piece_lse_ptr,
    queue_ptr, tiles, ring, next_smem, pair_barriers, q_stride, scale,
    HEADS: gl.constexpr, SHARED: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    SLACK: gl.constexpr,
):  # fmt: skip
    """Lanes [64 * PART, 64 * (PART + 1)) of every pair that this program takes."""
    HALF: gl.constexpr = KEYS // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 32]
    )
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=4)
    W_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=4)
    num_items = gl.load(queue_ptr)
    pair = gl.program_id(0)
    turn = 0
    stage = 0
    phase = 0
    lane = PART * TILE_ROWS + gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    first_row, num_rows, masked_start, num_own, own_end, part_start, num_part, num_unmasked, piece = read_item(
        work_ptr, pair, num_items, KEYS
    )
    row_stop = gl.load(row_stop_ptr + first_row + lane // SHARED, mask=lane // SHARED < num_rows, other=0)
    rows = load_rows(
        q_ptr, q_stride, first_row, num_rows, pair // gl.maximum(num_items, 1), PART,
        HEADS, SHARED, HEAD_DIM, Q_LAYOUT,
    )  # fmt: skip
    while pair < num_items * HEADS:
        head = pair // num_items
        num_masked = num_own + num_part
        num_tiles = num_masked + num_unmasked
        part_ptr = prefix_tiles_ptr + 2 * part_start
        q, row_scale = quantised(rows, S_LAYOUT)
        row_scale = row_scale * scale
        mbarrier.wait(ring[K_FULL].index(stage), phase)
        keys = tiles[K].index(stage)
        zeros = gl.zeros([TILE_ROWS, HALF], gl.float32, layout=S_LAYOUT)
        token = warpgroup_mma(q, keys.slice(0, HALF).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[token])
        token = warpgroup_mma(q, keys.slice(HALF, HALF).permute((1, 0)), zeros, use_acc=False, is_async=True)
        facts = read_facts(tiles[FACTS].index(stage))
        limit = gl.full([TILE_ROWS], KEYS, gl.int32, layout=gl.SliceLayout(1, S_LAYOUT))
        if num_masked > 0:
            limit, _ = limits(0, masked_start, num_own, own_end, part_ptr, row_stop, KEYS)
        peak = gl.full([TILE_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        sums = gl.zeros([TILE_ROWS, 4], gl.float32, layout=SUMS)
        first, sums, _, peak = soften(hide(scores, limit, S_LAYOUT), peak, sums, row_scale, facts, HALF, SLACK)
        acc = gl.zeros([TILE_ROWS, HEAD_DIM], gl.float32, layout=O_LAYOUT)
        mbarrier.wait(ring[V_FULL].index(stage), phase)
        following, following_phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(ring[K_FULL].index(following), following_phase, pred=num_tiles > 1)
        second_scores = hide(warpgroup_mma_wait(0, deps=[token]), limit - HALF, S_LAYOUT)
        mbarrier.arrive(ring[K_EMPTY].index(stage), count=1)

        for tile in range(1, num_masked):
            first, second_scores, facts, acc, sums, peak, stage, phase = _advance(
                q, row_scale, first, second_scores, facts, acc, sums, peak, tiles, ring, stage, phase,
                tile, masked_start, num_own, own_end, part_ptr, row_stop, tile + 1 == num_tiles,
                HEAD_DIM, KEYS, STAGES, SLACK, True, S_LAYOUT, O_LAYOUT, W_LAYOUT,
            )  # fmt: skip
        for tile in range(gl.maximum(num_masked, 1), num_tiles):
            first, second_scores, facts, acc, sums, peak, stage, phase = _advance(
                q, row_scale, first, second_scores, facts, acc, sums, peak, tiles, ring, stage, phase,
                tile, masked_start, num_own, own_end, part_ptr, row_stop, tile + 1 == num_tiles,
                HEAD_DIM, KEYS, STAGES, SLACK, False, S_LAYOUT, O_LAYOUT, W_LAYOUT,
            )  # fmt: skip

        values = tiles[V].index(stage)
        values_half = values.slice(0, HEAD_DIM).permute((1, 0))
        acc_token = warpgroup_mma(as_operand(first, HALF, W_LAYOUT), values_half, acc, is_async=True)
        second, sums, shrink, peak = soften(second_scores, peak, sums, row_scale, facts, HALF, SLACK)
        next_pair = hear(next_smem, pair_barriers, turn, NEXT_FULL, NEXT_EMPTY)
        # What the next pair is comes from far memory: ask for it before the last product and the stores of this one.
        next_first, next_rows, masked_start, num_own, own_end, part_start, num_part, num_unmasked, next_piece = (
            read_item(work_ptr, next_pair, num_items, KEYS)
        )
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        acc = shrunk(acc, gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT)))
        values_half = values.slice(HEAD_DIM, HEAD_DIM).permute((1, 0))
        acc = warpgroup_mma(as_operand(second, HALF, W_LAYOUT), values_half, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ring[V_EMPTY].index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)

        row_stop = gl.load(row_stop_ptr + next_first + lane // SHARED, mask=lane // SHARED < next_rows, other=0)
        rows = load_rows(
            q_ptr, q_stride, next_first, next_rows, next_pair // num_items, PART, HEADS, SHARED, HEAD_DIM, Q_LAYOUT
        )
        total = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, S_LAYOUT))
        inverse = 1.0 / gl.where(total == 0.0, 1.0, total)  # a piece that a row sees none of
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
        out_lane = PART * TILE_ROWS + gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
        column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, O_LAYOUT))
        used = out_lane // SHARED < num_rows
        if piece < 0:
            row = (first_row + out_lane // SHARED).to(gl.int64)
            start = (row * HEADS * SHARED + head * SHARED + out_lane % SHARED) * HEAD_DIM
            gl.store(out_ptr + start[:, None] + column[None, :], acc.to(gl.bfloat16), mask=used[:, None])
        else:
            place = (piece * HEADS + head).to(gl.int64) * (2 * TILE_ROWS)
            gl.store(piece_out_ptr + (place + out_lane)[:, None] * HEAD_DIM + column[None, :], acc)
            lse = gl.where(total == 0.0, float("-inf"), peak + gl.log2(total) - (WEIGHT_EXPONENT - SLACK))
            gl.store(piece_lse_ptr + place + lane, lse)
        pair, first_row, num_rows, piece = next_pair, next_first, next_rows, next_piece
        turn += 1


@gluon.jit
def hybrid_attention_fp8_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_desc, v_desc, facts_desc, prefix_k_desc, prefix_v_desc, prefix_facts_desc,
    out_ptr, row_stop_ptr, work_ptr, own_tile_ptr, prefix_tiles_ptr,
    piece_out_ptr, piece_lse_ptr, queue_ptr, q_stride, num_own_tiles, scale,
    HEADS: gl.constexpr, SHARED: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    SLACK: gl.constexpr, IN_PLACE: gl.constexpr,
):  # fmt: skip
    """One program a multiprocessor. HEADS: K/V heads. SHARED: query heads of each.

    IN_PLACE: prefixes lie in pages of tiles. Else their tiles are in the order of the launch, the first of them number
    ``num_own_tiles``. ``queue_ptr``: the number of work items, the next pair after the first of each program, programs
    that are done.
    """
    descs = (k_desc, v_desc, facts_desc)
    prefix_descs = (prefix_k_desc, prefix_v_desc, prefix_facts_desc)
    tiles = (
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, KEYS, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 2 * HEAD_DIM, KEYS // 2], v_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, PLACES], facts_desc.layout),
    )
    next_smem = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring = (k_full, k_empty, v_full, v_empty)
    pair_barriers = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(pair_barriers.index(NEXT_FULL + i), count=1)
        mbarrier.init(pair_barriers.index(NEXT_EMPTY + i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                0, q_ptr, out_ptr, row_stop_ptr, work_ptr, prefix_tiles_ptr, piece_out_ptr, piece_lse_ptr, queue_ptr,
                tiles, ring, next_smem, pair_barriers, q_stride, scale,
                HEADS, SHARED, HEAD_DIM, KEYS, STAGES, SLACK,
            )),
            (_consume, (
                1, q_ptr, out_ptr, row_stop_ptr, work_ptr, prefix_tiles_ptr, piece_out_ptr, piece_lse_ptr, queue_ptr,
                tiles, ring, next_smem, pair_barriers, q_stride, scale,
                HEADS, SHARED, HEAD_DIM, KEYS, STAGES, SLACK,
            )),
            (_produce, (
                descs, prefix_descs, work_ptr, own_tile_ptr, prefix_tiles_ptr, queue_ptr, num_own_tiles,
                tiles, ring, next_smem, pair_barriers, HEADS, HEAD_DIM, KEYS, STAGES, IN_PLACE,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def choose_tile(head_dim: int) -> TileShape:
    """Two consumers of 64 lanes, and key tiles of a page, four of which are on their way."""
    return TileShape(2 * TILE_ROWS.value, keys=128, num_warps=4, num_stages=4, kernel="fp8", packs=True)


def plan_pass(
    groups: Sequence[Group],
    row_stop: Ints,
    row_shape: RowShape,
    tile: TileShape | None = None,
    room: Room | None = None,
    apart: bool = True,
) -> Plan:
    """As in ``hybrid_attention_gluon``, with tiles of this kernel. Not ``apart`` over pages of tiles, which Triton's
    kernel does not read."""
    tile = tile or choose_tile(row_shape.head_dim)
    return hybrid_attention_gluon.plan_pass(groups, row_stop, row_shape, tile, room, apart)


def hybrid_attention(q: Tensor, k: Tensor, v: Tensor, stored: Stored | None, plan: Plan) -> Tensor:
    """As in ``hybrid_attention_triton``, of bf16 rows. Launches with the same plan must follow one another."""
    check_rows(q, k, v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        for launch in plan.launches:
            if launch.shape.kernel != "fp8":
                hybrid_attention_triton.run_launch(q, k, v, rows_of(stored, k, v), out, plan.row_stop, launch)
            else:
                run_packed(q, pack_launch(k, v, stored, launch), stored, out, plan.row_stop, launch)
    return out


def run_packed(
    q: Tensor,
    tiles: PackedTiles,
    stored: Stored | None,
    out: Tensor,
    row_stop: Tensor,
    launch: Launch,
    q_power: float = 1.0,
) -> None:
    """The rows of one launch into ``out``. ``q``: in bf16, or in e4m3, to be multiplied by ``q_power``. ``tiles``: see
    ``tiles_of``; ``stored``: where prefixes lie, whose tiles are among ``tiles`` unless they are packed there."""
    num_heads, head_dim = q.shape[1:]
    assert q.stride()[1:] == (head_dim, 1)
    kv_heads, keys = tiles.kv_heads, launch.shape.keys
    in_place = isinstance(stored, PackedTiles)
    prefixes = stored if isinstance(stored, PackedTiles) else tiles
    assert prefixes.keys == keys, f"pages of {prefixes.keys} rows are read in tiles of {keys}"
    pieces = Pieces.of(launch, kv_heads, head_dim, q.device)
    num_programs = min(device_limits(q.device)[0], len(launch.work) * kv_heads)
    shared, num_stages = num_heads // kv_heads, launch.shape.num_stages
    constants = (kv_heads, shared, head_dim, keys, num_stages, SLACK, in_place)
    with torch.cuda.device_of(q):  # who finishes products comes here by itself
        _compiled(q.device, q.dtype, launch.shape.num_warps, constants)[(num_programs, 1, 1)](
            q,
            *_describe(tiles),
            *_describe(prefixes),
            out,
            row_stop,
            launch.work,
            launch.own_tile,
            launch.prefix_tiles,
            pieces.out,
            pieces.lse,
            launch.queue,
            q.stride(0),
            len(launch.own_tiles),
            head_dim**-0.5 * LOG2_E * q_power,
            *constants,
        )
        pieces.merge(launch, out, kv_heads)


@cache
def _compiled(device: torch.device, q_dtype: torch.dtype, num_warps: int, constants: tuple[int, ...]) -> CompiledKernel:
    """The kernel for these constexprs, see ``hybrid_attention_gluon``. All pointers are aligned to 16 bytes, and so is
    every row of Q."""
    kv_heads, shared, head_dim, keys, *_ = constants
    q = torch.empty(1, kv_heads * shared, head_dim, dtype=q_dtype, device=device)
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=device)
    ints, floats = torch.empty(4, dtype=torch.int32, device=device), torch.empty(4, device=device)
    described = _describe(PackedTiles.empty(1, kv_heads, head_dim, keys, device))
    return hybrid_attention_fp8_kernel.warmup(
        q, *described, *described, out, ints, ints, ints, ints, floats, floats, ints, 16, 2, 1.0, *constants,
        num_warps=num_warps, grid=(1,),
    )  # fmt: skip


def _describe(tiles: PackedTiles) -> tuple[TensorDescriptor, ...]:
    """A box is what one tile and head has in K, in V, and in facts."""
    keys, head_dim = tiles.keys, tiles.head_dim
    arrays = ((tiles.k, keys, head_dim), (tiles.v, 2 * head_dim, keys // 2), (tiles.facts, 1, FACT_PLACES))
    return tuple(TensorDescriptor.from_tensor(x, [*box], _layout(*box, x.dtype)) for x, *box in arrays)


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = gl.float32 if dtype == torch.float32 else gl.float8e4nv
    return gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
