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
def divide(x, scale, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 x / scale, as ``tl.div_rn`` rounds it where e4m3 could tell. NATIVE: by the reciprocal, which the values of
    a scale share, and one correction: 3 instructions instead of about 20. To the bit for every x of 16 bits (all
    mantissas by all 2**23 of a scale were tried) and in 3e8 random pairs of fp32. It needs a fused multiplication and
    addition, which Triton's interpreter has not. Beside an infinity, where the scale is one too, all become NaN."""
    if not NATIVE:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    # Both times a power of two where the reciprocal could overflow, as in a row of zeros.
    lift = tl.where(scale < 2.0**-64, 2.0**100, 1.0)
    scale *= lift
    # Of these signs, so that -0 stays -0.
    minus_x = x * (-1.0 * lift)
    minus_inverse = tl.div_rn(tl.full(scale.shape, -1.0, tl.float32), scale)
    quotient = minus_x * minus_inverse
    excess = tl.fma(quotient, scale, minus_x)
    return tl.fma(excess, minus_inverse, quotient)


@triton.jit
def row_scale(largest):  # type: ignore[no-untyped-def]
    """Of values up to ``largest``, fp32."""
    return tl.div_rn(tl.maximum(largest, TINY), E4M3_MAX)


@triton.jit
def encode(x, scale, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """x / scale as e4m3 bytes. NATIVE: convert as the card does, to nearest even; Triton's interpreter rounds
    otherwise."""
    x = divide(x.to(tl.float32), scale, NATIVE)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else to_e4m3(x)


@triton.jit
def store_row(  # type: ignore[no-untyped-def]
    out_ptr, scale_ptr, row, column, x, inside, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Row ``row`` of an output: ``x``, or with ``scale_ptr`` its e4m3 as bytes, and its scale. What is not ``inside``
    is 0. NATIVE: see ``encode``."""
    if scale_ptr is not None:
        scale = row_scale(tl.max(tl.abs(x.to(tl.float32)), 0))
        tl.store(out_ptr + row * WIDTH + column, encode(x, scale, NATIVE), mask=inside)
        tl.store(scale_ptr + row, scale)
    else:
        tl.store(out_ptr + row * WIDTH + column, x, mask=inside)
