"""``silu(gate) * up`` of a fused product whose rows are the gate's channels and then the others'."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous
from underpaint.kernels.e4m3 import store_row
from underpaint.kernels.quantised_rows import QuantisedRows

BLOCK = 2048
MAX_WIDTH = 16384
"""Of rows that are quantised."""


@triton.jit
def swiglu_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, row_scale_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, j): block j of row i. With ``row_scale_ptr``, see ``store_row``, there is one block a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    gate = tl.load(x_ptr + row * (2 * WIDTH) + column, mask=inside, other=0.0)
    dtype: tl.constexpr = gate.dtype
    gate = gate.to(tl.float32)
    up = tl.load(x_ptr + row * (2 * WIDTH) + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype)
    y = (silu.to(tl.float32) * up).to(dtype)
    store_row(out_ptr, row_scale_ptr, row, column, y, inside, WIDTH, NATIVE)


def swiglu(x: Tensor) -> Tensor:
    """(rows, 2 x width), contiguous -> (rows, width). Rounds where ``F.silu(gate) * up`` rounds."""
    assert x.is_contiguous()
    num_rows, width = len(x), x.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    if num_rows:
        with torch.cuda.device_of(x):
            swiglu_kernel[(num_rows, triton.cdiv(width, block))](
                x, out, None, WIDTH=width, BLOCK=block, NATIVE=x.is_cuda, num_warps=max(block // 512, 1), **chained(x)
            )
    return out


def swiglu_quantised(x: Tensor) -> QuantisedRows:
    """``swiglu``, and ``quantise_rows`` of that. A program holds a whole row: to find its largest value first and then
    compute it once more would move 9 bytes a value, as many as two kernels, instead of 5."""
    assert x.is_contiguous()
    num_rows, width = len(x), x.shape[1] // 2
    assert width <= MAX_WIDTH, f"a row of {width} values does not fit one program"
    out, block = QuantisedRows.empty(num_rows, width, x), triton.next_power_of_2(width)
    if num_rows:
        with torch.cuda.device_of(x):
            swiglu_kernel[(num_rows, 1)](
                x, out.code, out.scale, WIDTH=width, BLOCK=block, NATIVE=x.is_cuda,
                num_warps=quantising_warps(block), **chained(x),
            )  # fmt: skip
    return out


def quantising_warps(block: int) -> int:
    """For a program that holds ``block`` values of a row and as many gates: 32 of each a thread."""
    return min(max(block // 1024, 1), 16)


def swiglu_reference(x: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
