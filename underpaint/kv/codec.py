"""How keys and values are stored in pages of rows; in pages of tiles, see ``tile_codec``.

``fp32``, ``fp16``, ``bf16`` store both as they are named. ``fp8_v`` stores V in e4m3 and K in bf16, ``fp8`` both in
e4m3; each token and head has one fp32 scale. V is the safer half to quantise: rotary embedding is already applied to
K, so an error in K moves attention weights, while an error in V only moves content.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from underpaint.kernels.tiles import StoredKV

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SCALE_BYTES = 4
ALIGNMENT = 256


@dataclass(frozen=True)
class Codec:
    """The stored dtype of K and of V; e4m3 comes with scales."""

    name: str
    k_dtype: torch.dtype
    v_dtype: torch.dtype

    def row_bytes(self, num_heads: int, head_dim: int) -> int:
        """Bytes that one token takes in one layer, scales included."""
        return sum(
            num_heads * (head_dim * dtype.itemsize + (SCALE_BYTES if dtype == E4M3 else 0))
            for dtype in (self.k_dtype, self.v_dtype)
        )

    def page_bytes(self, num_heads: int, head_dim: int, page_rows: int) -> int:
        """Bytes that a page takes in one layer."""
        return page_rows * self.row_bytes(num_heads, head_dim)

    def layer(
        self, num_pages: int, page_rows: int, num_heads: int, head_dim: int, device: str, memory: "Carver | None"
    ) -> "RowLayer":
        """Pages of one layer, see ``Plane``."""
        size = (num_pages * page_rows, num_heads, head_dim)
        return RowLayer(*(Plane(*size, dtype, device, memory) for dtype in (self.k_dtype, self.v_dtype)))


CODECS = {
    codec.name: codec
    for codec in (
        Codec("fp32", torch.float32, torch.float32),
        Codec("fp16", torch.float16, torch.float16),
        Codec("bf16", torch.bfloat16, torch.bfloat16),
        Codec("fp8_v", torch.bfloat16, E4M3),
        Codec("fp8", E4M3, E4M3),
    )
}


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, heads, head_dim) -> e4m3 of the same shape, and fp32 scales (rows, heads): x is about e4m3 * scale."""
    scale = x.float().abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny) / E4M3_MAX
    return (x.float() / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def dequantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``quantise`` within rounding, in ``dtype``."""
    return (x.float() * scale[..., None]).to(dtype)


class Carver:
    """Bytes that planes are placed in, one after the other, each on a border of ``ALIGNMENT``."""

    def __init__(self, data: Tensor) -> None:
        """``data``: (bytes,) uint8."""
        self._data = data
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor, whatever it holds."""
        start, stop = self._used, self._used + math.prod(shape) * dtype.itemsize
        assert stop <= self._data.nbytes, "the memory of the pool is too small"
        self._used = stop + -stop % ALIGNMENT
        return self._data[start:stop].view(dtype).view(shape)


class Plane:
    """K or V of every token slot of one layer, (slots, heads, head_dim), stored as a codec says.

    e4m3 is kept as raw bytes, because indexed copies of float8 tensors are not implemented on every device.
    """

    def __init__(
        self,
        num_slots: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        memory: "Carver | None" = None,
    ) -> None:
        """In ``memory``, or in memory of its own on ``device``."""
        self.dtype = dtype
        empty = memory.take if memory else partial(torch.empty, device=device)
        self.data = empty((num_slots, num_heads, head_dim), dtype=torch.uint8 if dtype == E4M3 else dtype)
        self.scale = empty((num_slots, num_heads), dtype=torch.float32) if dtype == E4M3 else None

    def write(self, slots: Tensor, x: Tensor) -> None:
        """Store (rows, heads, head_dim) at ``slots`` (rows,)."""
        if self.scale is None:
            self.data[slots] = x.to(self.dtype)
            return
        quantised, scale = quantise(x)
        self.data[slots] = quantised.view(torch.uint8)
        self.scale[slots] = scale

    def read(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """(rows, heads, head_dim) in ``dtype``."""
        if self.scale is None:
            return self.data[slots].to(dtype)
        return dequantise(self.data[slots].view(E4M3), self.scale[slots], dtype)


@dataclass(frozen=True, eq=False)
class RowLayer:
    """K and V of every token slot of one layer. Rows may be written in any order, one by one."""

    k: Plane
    v: Plane

    @property
    def stored(self) -> StoredKV:
        """As they are stored, without a copy."""
        return StoredKV(self.k.data, self.v.data, self.k.scale, self.v.scale)

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store (rows, heads, head_dim) keys and values at ``slots`` (rows,)."""
        self.k.write(slots, k)
        self.v.write(slots, v)

    def read(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values at ``slots``, (rows, heads, head_dim) each, in ``dtype``."""
        return self.k.read(slots, dtype), self.v.read(slots, dtype)
