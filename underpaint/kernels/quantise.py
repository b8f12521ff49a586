"""Rows to e4m3 with one fp32 scale a row: what an fp8 product reads. Each row is read and written once.

``kv.codec.quantise`` is the reference, value for value: x is about e4m3 * scale, and the largest of a row becomes 448.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous
from underpaint.kernels.e4m3 import store_row
from underpaint.kernels.quantised_rows import QuantisedRows

MAX_WIDTH = 32768
"""A program holds a whole row."""


@triton.jit
def quantise_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, scale_ptr, x_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program i: row i."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    store_row(out_ptr, scale_ptr, row, column, x, inside, WIDTH, NATIVE)


def num_warps(block: int) -> int:
    """For a program that holds a row of ``block`` values: 32 values a thread."""
    return min(max(block // 1024, 1), 16)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, width), each row contiguous -> e4m3 of the same shape, and fp32 scales (rows,)."""
    num_rows, width = x.shape
    assert x.stride(1) == 1
    assert width <= MAX_WIDTH, f"a row of {width} values does not fit one program"
    out = QuantisedRows.empty(num_rows, width, x)
    block = triton.next_power_of_2(width)
    if num_rows:
        with torch.cuda.device_of(x):
            quantise_rows_kernel[(num_rows,)](
                x, out.code, out.scale, x.stride(0), WIDTH=width, BLOCK=block, NATIVE=x.is_cuda,
                num_warps=num_warps(block), **chained(x),
            )  # fmt: skip
    return out.values, out.scale
