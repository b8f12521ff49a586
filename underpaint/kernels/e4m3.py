"""e4m3 with one fp32 scale a row, or a head: the largest value becomes 448, as in ``kv.codec``."""

import torch
import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
"""No scale is 0: the largest value counts as at least this."""


@triton.jit
def to_e4m3(x):  # type: ignore[no-untyped-def]
    """fp32 -> e4m3 as bytes, to the nearest, ties to even; values beyond the largest become the largest. By integer
    arithmetic, because cards before compute capability 8.9 have no such conversion."""
    size = tl.minimum(tl.abs(x), E4M3_MAX)
    bits = size.to(tl.int32, bitcast=True)
    # Of fp32's exponent and 23 bits keep the upper 3, and count exponents from -7 instead of -127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 there are only multiples of 2**-9; adding 2**23 leaves the rounding to the addition.
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True)
    code = tl.where(size < 0.015625, small, normal) & 0x7F
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_row(  # type: ignore[no-untyped-def]
    out_ptr, scale_ptr, row, column, x, inside, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Row ``row`` of an output: ``x``, or with ``scale_ptr`` its e4m3 as bytes, and its scale. What is not ``inside``
    is 0. NATIVE: convert as the card does, to nearest even; Triton's interpreter rounds otherwise."""
    if scale_ptr is not None:
        x = x.to(tl.float32)
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), TINY), E4M3_MAX)
        x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else to_e4m3(x)
        tl.store(out_ptr + row * WIDTH + column, code, mask=inside)
        tl.store(scale_ptr + row, scale)
    else:
        tl.store(out_ptr + row * WIDTH + column, x, mask=inside)
