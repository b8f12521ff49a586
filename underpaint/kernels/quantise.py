"""Rows to e4m3 with one fp32 scale a row: what an fp8 product reads. Each row is read and written once.

``kv.codec.quantise`` is the reference, value for value: x is about e4m3 * scale, and the largest of a row becomes 448.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous
from underpaint.kernels.kv_pack import _to_e4m3 as to_e4m3_bytes

E4M3_MAX = tl.constexpr(448.0)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
"""No scale is 0: the largest of a row counts as at least this, as in ``kv.codec``."""
MAX_WIDTH = 32768
"""A program holds a whole row."""


@triton.jit
def quantise_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, scale_ptr, x_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program i: row i. NATIVE: convert as the card does, to nearest even; Triton's interpreter rounds otherwise."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), TINY), E4M3_MAX)
    x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else to_e4m3_bytes(x)
    tl.store(out_ptr + row * WIDTH + column, code, mask=inside)
    tl.store(scale_ptr + row, scale)


def num_warps(block: int) -> int:
    """For a program that holds a row of ``block`` values: 32 values a thread."""
    return min(max(block // 1024, 1), 16)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, width), each row contiguous -> e4m3 of the same shape, and fp32 scales (rows,)."""
    num_rows, width = x.shape
    assert x.stride(1) == 1
    assert width <= MAX_WIDTH, f"a row of {width} values does not fit one program"
    out = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    if num_rows:
        with torch.cuda.device_of(x):
            quantise_rows_kernel[(num_rows,)](
                x, out.view(torch.uint8), scale, x.stride(0), WIDTH=width, BLOCK=block, NATIVE=x.is_cuda,
                num_warps=num_warps(block), **chained(x),
            )  # fmt: skip
    return out, scale
