"""Arithmetic of ``hybrid_attention_fp8`` between two products: softmax of a key tile, and weights as the operand of the
next product. Nothing here moves from thread to thread but the largest score of a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from underpaint.kernels.rows_e4m3 import TILE_ROWS

WEIGHT_EXPONENT = gl.constexpr(8)
"""Weights are at most 2**8 of the 448 that e4m3 holds."""
# [64, 4] sums of weights: of a row a thread has one, of the columns that it has of the scores.
SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)


@gluon.jit
def read_facts(facts):  # type: ignore[no-untyped-def]
    """Of a tile and head: the scale of K, the exponent of V, and 2**-exponent."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    x = facts.slice(0, 4, dim=1).load(layout)
    which = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    k_scale = gl.max(gl.sum(gl.where(which == 0, x, 0.0), 1), 0)
    exponent = gl.max(gl.sum(gl.where(which == 1, x, 0.0), 1), 0)
    unit = gl.max(gl.sum(gl.where(which == 2, x, 0.0), 1), 0)
    return k_scale, exponent, unit


@gluon.jit
def encode_weights(weights, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Weights (64, KEYS) as e4m3, four to a word, (64, KEYS / 4) int32. The four stand in one thread: neighbours, and
    those 8 keys further, which is the order of packed V. As bytes, a loop would take them apart at its end to put them
    together again at its beginning."""
    x = weights.reshape([TILE_ROWS, KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    even, odd = gl.split(x)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    words = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return words.reshape([TILE_ROWS, KEYS // 4])


@gluon.jit
def soften(  # type: ignore[no-untyped-def]
    scores, peak, sums, row_scale, facts, KEYS: gl.constexpr, SLACK: gl.constexpr,
):  # fmt: skip
    """KEYS keys of online softmax: weights as ``encode_weights`` makes them, their sums of each thread with those
    before, how much what came before shrinks, and the new peak. The sum of a lane that has seen no key yet stays 0."""
    k_scale, exponent, unit = facts
    factor = row_scale * k_scale
    tile_peak = gl.max(scores, 1) * factor + exponent
    new_peak = gl.where(tile_peak > peak + SLACK, tile_peak, peak)
    base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = gl.exp2(scores * factor[:, None] + (exponent + (WEIGHT_EXPONENT - SLACK) - base)[:, None])
    shrink = gl.exp2(peak - base)
    of_tile = gl.convert_layout(gl.sum(gl.sum(weights.reshape([TILE_ROWS, KEYS // 8, 4, 2]), 3), 1), SUMS)
    sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None] + of_tile * unit
    return encode_weights(weights, KEYS), sums, shrink, new_peak


@gluon.jit
def as_operand(words, KEYS: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """(64, KEYS) e4m3 of what ``encode_weights`` made: no instruction, and nothing moves."""
    each = gl.join(words, words)
    each = gl.convert_layout(gl.join(each, each).reshape([TILE_ROWS, KEYS]), LAYOUT)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [each], dtype=gl.float8e4nv, is_pure=True, pack=4)
