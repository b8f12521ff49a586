"""Arithmetic of ``hybrid_attention_gluon`` between two products: softmax of a key tile, its weights as the operand of
the next product, and what was summed before. A consumer has 64 lanes and four warps; a thread holds parts of two rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SLACK = gl.constexpr(8.0)
"""How far a score may pass the peak before the peak follows it, a power of two: a weight is then up to 256. It keeps
as many digits as a small one, and the sum is divided out in the end."""


@gluon.jit
def soften(  # type: ignore[no-untyped-def]
    scores, peak, total, scale, MASKED: gl.constexpr, S_LAYOUT: gl.constexpr, T_LAYOUT: gl.constexpr
):
    """One key tile of online softmax: weights, and how much what came before shrinks. A lane's sum is kept in eight
    parts, so that threads add up only what they hold. MASKED: a lane may have seen no key yet; its sum stays 0."""
    PARTS: gl.constexpr = (scores.shape[0], scores.shape[1] // 8, 8)
    tile_peak = gl.convert_layout(gl.max(gl.max(scores.reshape(PARTS), 1), 1) * scale, gl.SliceLayout(1, S_LAYOUT))
    new_peak = gl.where(tile_peak > peak + SLACK, tile_peak, peak)
    base = gl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = gl.exp2(scores * scale - base[:, None])
    shrink = gl.exp2(peak - base)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, T_LAYOUT))[:, None]
    return weights, new_peak, total + gl.convert_layout(gl.sum(weights.reshape(PARTS), 1), T_LAYOUT), shrink


@gluon.jit
def as_operand(weights, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """To bf16, as an operand. In words of two: LLVM would carry single values from one loop into the next, and pack
    them anew in every turn."""
    words = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [weights], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    return gl.convert_layout(words, LAYOUT)


@gluon.constexpr_function
def _shrink_code(num_values):  # type: ignore[no-untyped-def]
    """Assembly of ``shrunk`` for threads of ``num_values`` values, which lie in pairs, by turns of two rows. They are
    multiplied in their registers: where they are copied, ptxas runs all products one by one."""
    first, second = 2 * num_values, 2 * num_values + 2
    multiply = " ".join(f"mul.f32 ${i}, ${i}, ${i + 2 * num_values};" for i in range(num_values))
    return (
        f"{{ .reg .pred moved; setp.neu.f32 moved, ${first}, 0f3F800000;"
        f" setp.neu.or.f32 moved, ${second}, 0f3F800000, moved;"
        f" vote.sync.any.pred moved, moved, 0xffffffff; @!moved bra.uni done; {multiply} done: }}"
    )


@gluon.constexpr_function
def _shrink_operands(num_values):  # type: ignore[no-untyped-def]
    return ",".join(["=f"] * num_values + [str(i) for i in range(num_values)] + ["f"] * num_values)


@gluon.jit
def shrunk(acc, shrink):  # type: ignore[no-untyped-def]
    """acc * shrink, which a warp leaves out where it is 1 for all of its rows."""
    return gl.inline_asm_elementwise(
        _shrink_code(acc.shape[1] // 2), _shrink_operands(acc.shape[1] // 2), [acc, shrink[:, None]],
        dtype=gl.float32, is_pure=False, pack=acc.shape[1] // 2,
    )  # fmt: skip
