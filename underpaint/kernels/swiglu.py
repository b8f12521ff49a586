"""``silu(gate) * up`` of a fused product whose rows are the gate's channels and then the others'."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous

BLOCK = 2048


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
    gate = tl.load(x_ptr + row * (2 * WIDTH) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * WIDTH) + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype)
    tl.store(out_ptr + row * WIDTH + column, (silu.to(tl.float32) * up).to(dtype), mask=inside)


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


def swiglu_reference(x: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
