"""``silu(gate) * up`` of a fused product whose rows are the gate's channels and then the others'."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous
from underpaint.kernels.e4m3 import encode, row_scale
from underpaint.kernels.quantised_rows import QuantisedRows

BLOCK = 2048
MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
MAX_WIDTH = 16384
"""Of rows that are quantised."""


@triton.jit
def _gate_and_up(x_ptr, row, column, inside, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    pointer = x_ptr + row * (2 * WIDTH) + column
    return tl.load(pointer, mask=inside, other=0.0), tl.load(pointer + WIDTH, mask=inside, other=0.0)


@triton.jit
def _product(gate, up):  # type: ignore[no-untyped-def]
    """A product of two values of their dtype is rounded to it at once."""
    x = gate.to(tl.float32)
    return (x / (1.0 + tl.exp2(x * MINUS_LOG2_E))).to(gate.dtype) * up


@triton.jit
def swiglu_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, j): block j of row i."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    gate, up = _gate_and_up(x_ptr, row, column, inside, WIDTH)
    tl.store(out_ptr + row * WIDTH + column, _product(gate, up), mask=inside)


@triton.jit
def swiglu_quantised_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, scale_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program i: row i, in blocks that stay in registers until the largest value of all is known. All is read before
    anything is computed, so that all reads of a row are under way together."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    inputs = ()
    for start in tl.static_range(0, WIDTH, BLOCK):
        place = start + column
        inputs += (_gate_and_up(x_ptr, row, place, place < WIDTH, WIDTH),)  # type: ignore[assignment]
    blocks = ()
    largest = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(len(inputs)):
        y = _product(inputs[i][0], inputs[i][1]).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(y))
        blocks += (y,)  # type: ignore[assignment]
    scale = row_scale(tl.max(largest, 0))
    for i in tl.static_range(len(blocks)):
        place = i * BLOCK + column
        tl.store(out_ptr + row * WIDTH + place, encode(blocks[i], scale, NATIVE), mask=place < WIDTH)
    tl.store(scale_ptr + row, scale)


def swiglu(x: Tensor) -> Tensor:
    """(rows, 2 x width), contiguous -> (rows, width). Rounds where ``F.silu(gate) * up`` rounds."""
    assert x.is_contiguous()
    num_rows, width = len(x), x.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    if num_rows:
        with torch.cuda.device_of(x):
            swiglu_kernel[(num_rows, triton.cdiv(width, block))](
                x, out, WIDTH=width, BLOCK=block, num_warps=max(block // 512, 1), **chained(x)
            )
    return out


def swiglu_quantised(x: Tensor) -> QuantisedRows:
    """``swiglu``, and ``quantise_rows`` of that. A program holds a whole row: to find its largest value first and then
    compute it once more would move 9 bytes a value, as many as two kernels, instead of 5."""
    assert x.is_contiguous()
    num_rows, width = len(x), x.shape[1] // 2
    assert width <= MAX_WIDTH, f"a row of {width} values does not fit one program"
    out, block = QuantisedRows.empty(num_rows, width, x), quantising_block(width)
    if num_rows:
        with torch.cuda.device_of(x):
            swiglu_quantised_kernel[(num_rows,)](
                x, out.code, out.scale, WIDTH=width, BLOCK=block, NATIVE=x.is_cuda,
                num_warps=quantising_warps(block), **chained(x),
            )  # fmt: skip
    return out


def quantising_block(width: int) -> int:
    """A quarter of the power of two that a row fits: 12288 channels are three blocks, none of it empty."""
    return max(triton.next_power_of_2(width) // 4, 1)


def quantising_warps(block: int) -> int:
    """A thread holds 16 values of every block, 48 of 12288: so three programs fit a Hopper's processor at once."""
    return min(max(block // 512, 1), 8)


def swiglu_reference(x: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
