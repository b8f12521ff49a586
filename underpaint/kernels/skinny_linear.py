"""A linear layer for few rows, where time is what reading the weights takes.

``x @ weight.T``, optionally with ``silu(gate) * up`` on the way out, where ``weight`` is a gate's rows and then as many
others. One row: every thread multiplies what it reads, with as many reads in flight as registers hold. Two to 16 rows:
weights are the tall operand of the tensor cores, fetched through a deep pipeline. Sums are fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous
from underpaint.kernels.swiglu import swiglu_reference

MAX_ROWS = 16


@dataclass(frozen=True)
class SkinnyShape:
    """Outputs and inputs of a tile of weights. ``num_stages``: tiles on their way at once, of two or more rows."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int = 1


@triton.jit
def _gate(gate, up, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """``silu(gate) * up`` in fp32, rounded to ``dtype`` where ``swiglu`` rounds."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def one_row_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, num_outputs,
    INPUTS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, GATED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program i: outputs [i x BLOCK_OUT, (i + 1) x BLOCK_OUT)."""
    let_next_begin(CHAINED)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    channel = tl.arange(0, BLOCK_IN)
    is_output = output < num_outputs
    weights = weight_ptr + output.to(tl.int64)[:, None] * INPUTS + channel[None, :]
    others = weights + num_outputs.to(tl.int64) * INPUTS
    # The first tile of weights is under way before the kernel before this one is done: it depends on nothing.
    inside = is_output[:, None] & (channel < INPUTS)[None, :]
    weight = tl.load(weights, mask=inside, other=0.0)
    if GATED:
        other = tl.load(others, mask=inside, other=0.0)
    wait_for_previous(CHAINED)
    x = tl.load(x_ptr + channel, mask=channel < INPUTS, other=0.0).to(tl.float32)[None, :]
    acc = weight.to(tl.float32) * x
    if GATED:
        up = other.to(tl.float32) * x
    for start in tl.static_range(BLOCK_IN, INPUTS, BLOCK_IN):
        is_channel = channel < INPUTS - start
        inside = is_output[:, None] & is_channel[None, :]
        x = tl.load(x_ptr + start + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        acc += tl.load(weights + start, mask=inside, other=0.0).to(tl.float32) * x
        if GATED:
            up += tl.load(others + start, mask=inside, other=0.0).to(tl.float32) * x
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.sum(acc, 1)
    if GATED:
        total = _gate(total, tl.sum(up, 1), dtype)
    tl.store(out_ptr + output, total.to(dtype), mask=is_output)


@triton.jit
def few_rows_kernel(  # type: ignore[no-untyped-def]
    x_desc, weight_desc, out_ptr, num_rows, num_outputs, out_stride,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program i: outputs [i x BLOCK_OUT, (i + 1) x BLOCK_OUT) of all rows. What lies beyond rows, inputs or outputs
    is read as 0."""
    first = tl.program_id(0) * BLOCK_OUT
    acc = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    up = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    for start in tl.range(0, INPUTS, BLOCK_IN, num_stages=STAGES):
        x = tl.trans(x_desc.load([0, start]))
        acc = tl.dot(weight_desc.load([first, start]), x, acc, input_precision=PRECISION)
        if GATED:
            up = tl.dot(weight_desc.load([num_outputs + first, start]), x, up, input_precision=PRECISION)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        acc = _gate(acc, up, dtype)
    output = first + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, ROWS)
    outs = out_ptr + row.to(tl.int64)[None, :] * out_stride + output[:, None]
    tl.store(outs, acc.to(dtype), mask=(output < num_outputs)[:, None] & (row < num_rows)[None, :])


def choose_shape(num_rows: int, num_outputs: int, num_inputs: int, gated: bool, dtype: torch.dtype) -> SkinnyShape:
    """The tile of a layer: enough programs for every processor, enough bytes on their way in each."""
    if num_rows == 1:
        # 32 KB of weights a program on their way before the first wait, twice that where it is gated.
        return SkinnyShape(4, min(4096, triton.next_power_of_2(num_inputs)), num_warps=8)
    if dtype == torch.float32:
        return SkinnyShape(16, 64, num_warps=4, num_stages=2)
    if gated or num_outputs > 16384:
        return SkinnyShape(64, 128, num_warps=4, num_stages=4)
    return SkinnyShape(32, 256, num_warps=4, num_stages=5)


def skinny_linear(
    x: Tensor, weight: Tensor, gated: bool = False, out: Tensor | None = None, shape: SkinnyShape | None = None
) -> Tensor:
    """(rows, inputs), at most 16 rows, times ``weight`` (outputs, inputs); both contiguous.

    ``gated``: (rows, outputs / 2), see ``swiglu``. ``out``: where the result goes, rows of it may be apart. ``shape``
    replaces the tile chosen, for measurements.
    """
    num_rows, num_inputs = x.shape
    assert 0 < num_rows <= MAX_ROWS, num_rows
    assert x.dtype == weight.dtype
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert weight.shape[1] == num_inputs
    num_outputs = len(weight) // 2 if gated else len(weight)
    shape = shape or choose_shape(num_rows, num_outputs, num_inputs, gated, x.dtype)
    if out is None:
        out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    assert out.shape == (num_rows, num_outputs)
    assert out.stride(1) == 1
    grid = (triton.cdiv(num_outputs, shape.outputs),)
    sizes: dict[str, Any] = {
        "INPUTS": num_inputs, "BLOCK_OUT": shape.outputs, "BLOCK_IN": shape.inputs, "GATED": gated,
        "num_warps": shape.num_warps, **chained(x),
    }  # fmt: skip
    with torch.cuda.device_of(x):
        if num_rows == 1:
            one_row_kernel[grid](x, weight, out, num_outputs, **sizes)
        else:
            rows = max(16, triton.next_power_of_2(num_rows))
            few_rows_kernel[grid](
                TensorDescriptor.from_tensor(x, [rows, shape.inputs]),
                TensorDescriptor.from_tensor(weight, [shape.outputs, shape.inputs]),
                out, num_rows, num_outputs, out.stride(0),
                ROWS=rows, STAGES=shape.num_stages, PRECISION="ieee", **sizes,
            )  # fmt: skip
    return out


def skinny_linear_reference(x: Tensor, weight: Tensor, gated: bool = False) -> Tensor:
    """The same in plain PyTorch."""
    product = x @ weight.mT
    return swiglu_reference(product) if gated else product
