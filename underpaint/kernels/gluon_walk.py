"""What the Gluon kernels share: a ring of buffers, the queue of pairs, a pair's work item, and what a masked key tile
shows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """The buffer after ``stage`` in a ring, and the phase in which its barriers are then."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def announce(  # type: ignore[no-untyped-def]
    queue_ptr, next_smem, barriers, turn, FULL: gl.constexpr, EMPTY: gl.constexpr
):
    """Takes the next pair from the queue and tells the consumers, in one of two places, whose barriers begin at FULL
    and at EMPTY. By the one warp of a producer."""
    next_pair = gl.num_programs(0) + gl.atomic_add(queue_ptr + 1, 1, sem="relaxed")
    mbarrier.wait(barriers.index(EMPTY + (turn & 1)), (turn >> 1 & 1) ^ 1)
    next_smem.index(turn & 1).store(gl.full([1], next_pair, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(barriers.index(FULL + (turn & 1)), count=1)
    return next_pair


@gluon.jit
def hear(next_smem, barriers, turn, FULL: gl.constexpr, EMPTY: gl.constexpr):  # type: ignore[no-untyped-def]
    """The next pair, by the four warps of a consumer."""
    mbarrier.wait(barriers.index(FULL + (turn & 1)), turn >> 1 & 1)
    next_pair = gl.max(next_smem.index(turn & 1).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(barriers.index(EMPTY + (turn & 1)), count=1)
    return next_pair


@gluon.jit
def wind_back(queue_ptr):  # type: ignore[no-untyped-def]
    """The last program out winds the queue back for the next launch."""
    if gl.atomic_add(queue_ptr + 2, 1) == gl.num_programs(0) - 1:
        gl.store(queue_ptr + 1, 0)
        gl.store(queue_ptr + 2, 0)


@gluon.jit
def read_item(work_ptr, pair, num_items, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]
    """What a consumer needs to know of a pair's work item; of none behind the last pair, whatever is there."""
    work = work_ptr + pair % gl.maximum(num_items, 1) * 12  # fields as in tiles.WorkFields
    part_start = gl.load(work + 4)
    masked_start = gl.load(work + 8)
    num_unmasked = gl.load(work + 3) - gl.load(work + 2) + (gl.load(work + 7) - gl.load(work + 6)) // KEYS
    return (
        gl.load(work), gl.load(work + 1), masked_start, (gl.load(work + 9) - masked_start) // KEYS, gl.load(work + 10),
        part_start, gl.load(work + 5) - part_start, num_unmasked, gl.load(work + 11),
    )  # fmt: skip


@gluon.jit
def limits(tile, masked_start, num_own, own_end, part_ptr, row_stop, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of a masked tile: how many of its first keys each lane sees, and how many are valid."""
    if tile < num_own:
        first = masked_start + tile * KEYS
        limit = row_stop - first
        num_valid = own_end - first
    else:
        num_valid = gl.load(part_ptr + 2 * (tile - num_own) + 1)
        limit = gl.zeros_like(row_stop) + num_valid
    return limit, num_valid


@gluon.jit
def hide(scores, limit, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    key = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    return gl.where(key[None, :] < limit[:, None], scores, float("-inf"))
