"""Prefixes stored in another dtype as plain key tiles: one pass over what a launch will read, into scratch that all
layers share.

The attention kernel then reads tiles of its own dtype by TMA. Were each of its programs to dequantise for itself, the
work would be done once a query tile instead of once, between the matrix products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NATIVE_E4M3 = (8, 9)
"""The first compute capability that converts e4m3 in hardware."""
BLOCK_ROWS, BLOCK_COLUMNS = 8, 1024


@triton.jit
def from_e4m3(x, scale):  # type: ignore[no-untyped-def]
    """fp32 values of e4m3 ``x``, float8 or raw bytes, times ``scale``."""
    if x.dtype == tl.uint8:
        # An e4m3 pattern moved up by 7 bits is an fp16 pattern of 2**-8 times the value, subnormals included.
        bits = x.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return half.to(tl.float32) * (scale * 256.0)
    return x.to(tl.float32) * scale


@triton.jit
def dequantise_tiles_kernel(  # type: ignore[no-untyped-def]
    x_ptr, scale_ptr, tiles_ptr, out_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): the j-th BLOCK_HEADS heads of the i-th BLOCK_ROWS rows of the key tiles. DIM: HEAD_DIM padded."""
    block = tl.program_id(0)
    tile = block // (KEYS // BLOCK_ROWS)
    slot = tl.load(tiles_ptr + 2 * tile)
    count = tl.load(tiles_ptr + 2 * tile + 1)
    row = (block % (KEYS // BLOCK_ROWS)) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, DIM)
    if count > 0:
        valid = (row < count)[:, None] & (head < HEADS)[None, :]
        there = (slot + row).to(tl.int64)[:, None] * HEADS + head[None, :]
        inside = (head < HEADS)[None, :, None] & (column < HEAD_DIM)[None, None, :]
        elements = there[:, :, None] * HEAD_DIM + column[None, None, :]
        x = tl.load(x_ptr + elements, mask=valid[:, :, None] & inside, other=0.0)
        if scale_ptr is not None:
            x = from_e4m3(x, tl.load(scale_ptr + there, mask=valid, other=0.0)[:, :, None])
        here = ((tile * KEYS + row).to(tl.int64)[:, None] * HEADS + head[None, :])[:, :, None] * HEAD_DIM
        tl.store(out_ptr + here + column[None, None, :], x.to(out_ptr.dtype.element_ty), mask=inside)


def dequantise_tiles(x: Tensor, scale: Tensor | None, tiles: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """The key tiles of a launch one after the other, (tiles * keys, kv_heads, head_dim) in ``dtype``; 0 where not
    valid. ``x``: (slots, kv_heads, head_dim), ``scale``: fp32 (slots, kv_heads) if that is e4m3, ``tiles``: see
    ``Launch``; for none of them there is still one, since TMA knows no empty tensor."""
    heads, head_dim = x.shape[1:]
    out = torch.empty(max(1, len(tiles)) * keys, heads, head_dim, dtype=dtype, device=x.device)
    dim = triton.next_power_of_2(head_dim)
    block_heads = min(triton.next_power_of_2(heads), max(1, BLOCK_COLUMNS // dim))
    grid = (len(tiles) * keys // BLOCK_ROWS, triton.cdiv(heads, block_heads))
    if len(tiles):
        dequantise_tiles_kernel[grid](
            as_float8(x), scale, tiles, out, heads, head_dim, dim, keys, BLOCK_ROWS, block_heads, num_warps=8
        )
    return out


def dequantise_tiles_reference(x: Tensor, scale: Tensor | None, tiles: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """The same in plain PyTorch."""
    out = torch.zeros(len(tiles) * keys, *x.shape[1:], dtype=dtype, device=x.device)
    for i, (slot, count) in enumerate(tiles.tolist()):
        if count > 0:
            stored = slice(slot, slot + count)
            values = x[stored]
            if scale is not None:
                values = values.view(torch.float8_e4m3fn).float() * scale[stored][..., None]
            out[i * keys : i * keys + count] = values.to(dtype)
    return out


def as_float8(x: Tensor) -> Tensor:
    """Raw e4m3 bytes as float8 where the device converts them, else as they are."""
    if x.dtype == torch.uint8 and x.is_cuda and torch.cuda.get_device_capability(x.device) >= NATIVE_E4M3:
        return x.view(torch.float8_e4m3fn)
    return x
