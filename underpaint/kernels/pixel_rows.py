"""The pointwise work between convolutions, channels last: a pixel is a row of channels, read and written once.

    ``norm_silu``      SiLU of the RMS norm of x + bias
    ``add_residual``   x + bias + residual, also from and to every other pixel or channel

``bias`` is that of the convolution that made ``x``: by itself a convolution adds it in a pass of its own. Everything is
computed in fp32 and rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
SMALLEST = tl.constexpr(1e-24)
"""Sum of squares: ``F.normalize`` divides by its root, and at least by 1e-12."""
MAX_PIECE = 256
TILE = 1024
"""Values of a piece of all pixels of a program: 16 bytes in bf16 for each of 128 threads."""
NUM_WARPS = 4


@triton.jit
def norm_silu_kernel(  # type: ignore[no-untyped-def]
    x_ptr, bias_ptr, gamma_ptr, out_ptr, num_pixels,
    WIDTH: tl.constexpr, PIECE: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Program i: block i of pixels. Rows are not powers of two: they are held in pieces, and nothing is masked but
    pixels. All is read before anything is computed, so that all reads of a row are under way together."""
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    inside = (pixel < num_pixels)[:, None]
    channel = tl.broadcast_to(tl.arange(0, PIECE)[None, :], [PIXELS, PIECE])
    place = pixel[:, None] * WIDTH + channel
    inputs = ()
    for start in tl.static_range(0, WIDTH, PIECE):
        inputs += (tl.load(x_ptr + place + start, mask=inside, other=0.0),)  # type: ignore[assignment]
    pieces = ()
    squares = tl.zeros([PIXELS, PIECE], tl.float32)
    for i in tl.static_range(len(inputs)):
        x = inputs[i].to(tl.float32)  # type: ignore[var-annotated]
        if bias_ptr is not None:
            x += tl.load(bias_ptr + i * PIECE + channel).to(tl.float32)
        squares += x * x
        pieces += (x,)
    factor = tl.rsqrt(tl.maximum(tl.sum(squares, 1), SMALLEST) / WIDTH)[:, None]
    for i in tl.static_range(len(pieces)):
        y = pieces[i] * factor * tl.load(gamma_ptr + i * PIECE + channel).to(tl.float32)
        y = y / (1.0 + tl.exp2(y * MINUS_LOG2_E))
        tl.store(out_ptr + place + i * PIECE, y.to(inputs[i].dtype), mask=inside)


@triton.jit
def add_residual_kernel(  # type: ignore[no-untyped-def]
    x_ptr, bias_ptr, residual_ptr, out_ptr, num_columns,
    x_row, x_pixel, residual_row, residual_pixel, residual_channel, out_row, out_pixel,
    WIDTH: tl.constexpr, PIECE: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Program (j, i): block j of the pixels of the picture's row i; those that run together lie together. Strides by
    name, in values."""
    row = tl.program_id(1).to(tl.int64)
    pixel = (tl.program_id(0) * PIXELS + tl.arange(0, PIXELS))[:, None]
    inside = pixel < num_columns
    channel = tl.broadcast_to(tl.arange(0, PIECE)[None, :], [PIXELS, PIECE])
    x_place = x_ptr + row * x_row + pixel * x_pixel + channel
    residual_place = residual_ptr + row * residual_row + pixel * residual_pixel + channel * residual_channel
    out_place = out_ptr + row * out_row + pixel * out_pixel + channel
    inputs = ()
    for start in tl.static_range(0, WIDTH, PIECE):
        x = tl.load(x_place + start, mask=inside, other=0.0)
        residual = tl.load(residual_place + start * residual_channel, mask=inside, other=0.0)
        inputs += ((x, residual),)  # type: ignore[assignment]
    for i in tl.static_range(len(inputs)):
        bias = tl.load(bias_ptr + i * PIECE + channel).to(tl.float32)
        total = inputs[i][0].to(tl.float32) + bias + inputs[i][1].to(tl.float32)
        tl.store(out_place + i * PIECE, total.to(inputs[i][0].dtype), mask=inside)


def norm_silu(x: Tensor, bias: Tensor | None, gamma: Tensor) -> Tensor:
    """(1, channels, height, width), channels last -> the same: SiLU of (x + bias), normalised over its channels to a
    root mean square of 1, times ``gamma`` (channels,)."""
    assert x.is_contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(x)
    sizes = tile(x.shape[1])
    num_pixels = x.numel() // x.shape[1]
    with torch.cuda.device_of(x):
        norm_silu_kernel[(triton.cdiv(num_pixels, sizes["PIXELS"]),)](
            x, bias, gamma, out, num_pixels, **sizes, num_warps=NUM_WARPS
        )
    return out


def add_residual(x: Tensor, bias: Tensor, residual: Tensor, out: Tensor) -> None:
    """(1, channels, height, width) each, the channels of ``x`` and ``out`` side by side: x + bias + residual, written
    to ``out``, which may be ``x``."""
    assert x.shape == residual.shape == out.shape
    assert len(x) == x.stride(1) == out.stride(1) == 1
    _, channels, height, width = x.shape
    sizes = tile(channels)
    with torch.cuda.device_of(x):
        add_residual_kernel[(triton.cdiv(width, sizes["PIXELS"]), height)](
            x, bias, residual, out, width, *x.stride()[2:], *residual.stride()[2:], residual.stride(1),
            *out.stride()[2:], **sizes, num_warps=NUM_WARPS,
        )  # fmt: skip


def tile(channels: int) -> dict[str, int]:
    """The largest power of two that divides a row into pieces, and how many pixels a program takes."""
    piece = min(channels & -channels, MAX_PIECE)
    return {"WIDTH": channels, "PIECE": piece, "PIXELS": TILE // piece}
