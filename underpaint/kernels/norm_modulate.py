"""The residual stream of a block: add what the last layer said, normalise, modulate; each row read and written once.

Two forms, which are two papers:

    ``add_rms_norm``       SenseNova-U1: sum = x + delta, and its root-mean-square norm times a weight
    ``gate_norm_modulate`` Qwen-Image 2.1: sum = x + gate * delta, and its layer norm times 1 + scale, where gate and
                           scale are a line of a table that groups of rows (those of one timestep) share

Statistics are fp32, and values are rounded to the dtype of ``x`` exactly where the modules round them.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous
from underpaint.kernels.e4m3 import store_row
from underpaint.kernels.quantised_rows import QuantisedRows

MAX_WIDTH = 16384
"""A program holds a whole row."""
RUN = tl.constexpr(8)
"""Channels that a thread holds side by side: 16 bytes of what is read. By 16 bytes of e4m3 they would be twice as many,
every read would skip half of what it touches, and the sum would go through shared memory to be written."""


@triton.jit
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, row_scale_ptr, stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program i: row i. ``delta_ptr`` is None where nothing is added; then no sum is written. ``row_scale_ptr``: see
    ``store_row``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.max_contiguous(tl.arange(0, BLOCK), RUN)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * WIDTH + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * WIDTH + column, x, mask=inside)
    y = x.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps)
    y = y.to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    store_row(out_ptr, row_scale_ptr, row, column, y.to(x.dtype), inside, WIDTH, NATIVE)


@triton.jit
def gate_norm_modulate_kernel(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, gate_ptr, scale_ptr, group_ptr, sum_ptr, out_ptr, row_scale_ptr, gate_stride, scale_stride, eps,
    limit,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, NATIVE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program i: row i. ``group_ptr``: the line of the tables of each row, None: the first for all. ``delta_ptr`` is
    None where nothing is added. Without NORM only the sum is written. Sums stay within ``limit``. ``row_scale_ptr``:
    see ``store_row``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.max_contiguous(tl.arange(0, BLOCK), RUN)
    inside = column < WIDTH
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    group = tl.load(group_ptr + row).to(tl.int64) if group_ptr is not None else 0
    x = tl.load(x_ptr + row * WIDTH + column, mask=inside, other=0.0)
    dtype: tl.constexpr = x.dtype
    if NORM:
        # Before the sum is written: no read is moved over a write.
        scale = tl.load(scale_ptr + group * scale_stride + column, mask=inside, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * WIDTH + column, mask=inside, other=0.0)
        gate = tl.load(gate_ptr + group * gate_stride + column, mask=inside, other=0.0)
        moved = (gate.to(tl.float32) * delta.to(tl.float32)).to(dtype)
        x = (x.to(tl.float32) + moved.to(tl.float32)).to(dtype).to(tl.float32)
        x = tl.minimum(tl.maximum(x, -limit), limit).to(dtype)
        tl.store(sum_ptr + row * WIDTH + column, x, mask=inside)
    if NORM:
        y = x.to(tl.float32)
        y = tl.where(inside, y - tl.sum(y, 0) / WIDTH, 0.0)
        y = (y * tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps)).to(dtype)
        factor = (1.0 + scale.to(tl.float32)).to(dtype)
        y = (y.to(tl.float32) * factor.to(tl.float32)).to(dtype)
        store_row(out_ptr, row_scale_ptr, row, column, y, inside, WIDTH, NATIVE)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rows, width) each -> x + delta (``x`` itself without a delta) and its norm times ``weight`` (width,)."""
    out = torch.empty_like(x)
    return _add_rms_norm(x, delta, weight, eps, out, None), out


def add_rms_norm_quantised(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, QuantisedRows]:
    """``add_rms_norm``, and what ``quantise_rows`` makes of its norm."""
    out = QuantisedRows.empty(len(x), x.shape[1], x)
    return _add_rms_norm(x, delta, weight, eps, out.code, out.scale), out


def _add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor, row_scale: Tensor | None
) -> Tensor:
    """The norm goes to ``out``; returns the sum."""
    _check(x, delta)
    total = x if delta is None else torch.empty_like(x)
    if len(x):
        with torch.cuda.device_of(x):
            add_rms_norm_kernel[(len(x),)](
                x, delta, weight, total, out, row_scale, x.stride(0), eps, NATIVE=x.is_cuda, **_sizes(x.shape[1]),
                **chained(x),
            )  # fmt: skip
    return total


def add_rms_norm_reference(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch."""
    total = x if delta is None else x + delta
    normed = total * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + eps)
    return total, normed.to(weight.dtype) * weight


def gate_norm_modulate(
    x: Tensor,
    delta: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    group: Tensor | None,
    eps: float,
    limit: float = torch.inf,
) -> tuple[Tensor, Tensor]:
    """(rows, width) each -> x + gate * delta (``x`` itself without a delta), kept within ``limit``, and its layer norm
    times 1 + ``scale`` (without ``scale``: the sum again). ``gate``, ``scale``: (groups, width), ``group``: (rows,)
    int64 line of each row, None: the first."""
    if scale is None:
        total = _gate_norm_modulate(x, delta, gate, None, group, eps, limit, x, None)
        return total, total
    out = torch.empty_like(x)
    return _gate_norm_modulate(x, delta, gate, scale, group, eps, limit, out, None), out


def gate_norm_modulate_quantised(
    x: Tensor,
    delta: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    group: Tensor | None,
    eps: float,
    limit: float = torch.inf,
) -> tuple[Tensor, QuantisedRows]:
    """``gate_norm_modulate``, and what ``quantise_rows`` makes of its second result."""
    out = QuantisedRows.empty(len(x), x.shape[1], x)
    return _gate_norm_modulate(x, delta, gate, scale, group, eps, limit, out.code, out.scale), out


def _gate_norm_modulate(
    x: Tensor,
    delta: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    group: Tensor | None,
    eps: float,
    limit: float,
    out: Tensor,
    row_scale: Tensor | None,
) -> Tensor:
    """With a ``scale``, the modulated norm goes to ``out``; returns the sum."""
    _check(x, delta)
    assert (delta is None) == (gate is None)
    assert all(table is None or table.stride(1) == 1 for table in (gate, scale))
    total = x if delta is None else torch.empty_like(x)
    if len(x):
        strides = (0 if table is None else table.stride(0) for table in (gate, scale))
        with torch.cuda.device_of(x):
            gate_norm_modulate_kernel[(len(x),)](
                x, delta, gate, scale, group, total, out, row_scale, *strides, eps, limit, NORM=scale is not None,
                NATIVE=x.is_cuda, **_sizes(x.shape[1]), **chained(x),
            )  # fmt: skip
    return total


def gate_norm_modulate_reference(
    x: Tensor,
    delta: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    group: Tensor | None,
    eps: float,
    limit: float = torch.inf,
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch."""

    def lines(table: Tensor) -> Tensor:
        return table[:1] if group is None else table[group]

    total = x
    if delta is not None and gate is not None:
        total = (x + lines(gate) * delta).clip(-limit, limit)
    if scale is None:
        return total, total
    return total, F.layer_norm(total, total.shape[-1:], eps=eps) * (1 + lines(scale))


def _check(x: Tensor, delta: Tensor | None) -> None:
    assert x.shape[1] <= MAX_WIDTH, f"a row of {x.shape[1]} channels does not fit a program"
    assert x.is_contiguous()
    assert delta is None or (delta.shape == x.shape and delta.dtype == x.dtype and delta.is_contiguous())


def _sizes(width: int) -> dict[str, int]:
    """A thread reads 16 bytes at a time and holds about 16 channels."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
