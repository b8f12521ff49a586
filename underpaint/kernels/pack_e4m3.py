"""Keys and values as ``hybrid_attention_fp8`` reads them: packed tiles of e4m3, made once a layer from what a launch
reads of prefixes and of the pass.

A *packed tile* is a key tile of one K/V head: codes of K (keys, head_dim), codes of V turned over (head_dim, keys), the
first half of the keys before the second, and its facts. Both have one power of two, the smallest with which their
largest value is at most 448 codes: e4m3 is a floating format, so that a finer scale would gain nothing. Keys that are
not valid are 0.

Along V's keys each 16 are ordered as the threads of Hopper's warpgroups hold the scores of 16 keys: bits 3 2 1 0 of a
key stand in its place in the order 2 1 3 0, see ``key_at``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous
from underpaint.kernels.dequantise import as_float8, from_e4m3
from underpaint.kernels.e4m3 import to_e4m3
from underpaint.kernels.tiles import Launch, StoredKV

FACT_PLACES = 32
"""Of a packed tile, fp32: K's power of two, V's exponent e, 2**-e; the rest is not written. TMA needs places of 128
bytes."""
E4M3_MAX = tl.constexpr(448.0)
LEAST_EXPONENT, MOST_EXPONENT = tl.constexpr(-40), tl.constexpr(120)
PLACES = tl.constexpr(FACT_PLACES)
PROGRAMS_A_HEAD, NUM_WARPS = 32, 8
"""Each takes so many-th tiles: one program a tile of a plan with much room would be thousands that do nothing."""


@dataclass(frozen=True, eq=False)
class PackedTiles:
    """All that a launch reads: first the tiles of its own rows, see ``Launch.own_tiles``, then those of its prefixes.

    ``k``: e4m3 (tiles * kv_heads * keys, head_dim); ``v``: e4m3 (tiles * kv_heads * 2 * head_dim, keys / 2);
    ``facts``: fp32 (tiles * kv_heads, FACT_PLACES).
    """

    k: Tensor
    v: Tensor
    facts: Tensor
    kv_heads: int

    @classmethod
    def empty(cls, num_tiles: int, kv_heads: int, head_dim: int, keys: int, device: torch.device) -> "PackedTiles":
        count = num_tiles * kv_heads
        k = torch.empty(count * keys, head_dim, dtype=torch.float8_e4m3fn, device=device)
        v = torch.empty(count * 2 * head_dim, keys // 2, dtype=torch.float8_e4m3fn, device=device)
        return cls(k, v, torch.empty(count, FACT_PLACES, device=device), kv_heads)

    @property
    def head_dim(self) -> int:
        return self.k.shape[1]

    @property
    def keys(self) -> int:
        return 2 * self.v.shape[1]


@triton.jit
def key_at(place):  # type: ignore[no-untyped-def]
    """Which key of a tile stands at ``place`` of V's. Of the scores of 16 keys a thread holds 2 neighbours and those 8
    further; of a factor of a product of bytes, 4 neighbours."""
    return (place & ~15) | (place & 1) | ((place >> 1) & 6) | ((place & 2) << 2)


@triton.jit
def _exponent(x):  # type: ignore[no-untyped-def]
    """The smallest with which no value of ``x`` is over 448 times its power of two."""
    bits = (tl.max(tl.abs(x)) / E4M3_MAX).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(((bits + 0x7FFFFF) >> 23) - 127, LEAST_EXPONENT), MOST_EXPONENT)


@triton.jit
def _power(exponent):  # type: ignore[no-untyped-def]
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load(  # type: ignore[no-untyped-def]
    x_ptr, scale_ptr, x_stride, first, key, count, head, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """(keys, HEAD_DIM) fp32 of one head: rows ``first`` + key, 0 from key ``count`` on. What differs between keys is
    32 bits wide, to have registers left for values."""
    x_ptr += first * x_stride + head * HEAD_DIM
    column = tl.arange(0, HEAD_DIM)
    x = tl.load(x_ptr + (key[:, None] * x_stride + column[None, :]), mask=(key < count)[:, None], other=0.0)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + first * HEADS + head + key * HEADS, mask=key < count, other=0.0)
        return from_e4m3(x, scale[:, None])
    else:
        return x.to(tl.float32)


@triton.jit
def _encode(x, factor, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """e4m3 of ``x * factor`` as bytes. What is not finite becomes NaN: e4m3 has no infinity. NATIVE: see
    ``e4m3.encode``."""
    x *= factor
    finite = tl.abs(x) < float("inf")
    code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else to_e4m3(x)
    return tl.where(finite, code, 0x7F).to(tl.uint8)


@triton.jit
def _pack_k(  # type: ignore[no-untyped-def]
    x_ptr, scale_ptr, x_stride, tiles_ptr, num_tiles, first_tile, out_ptr, facts_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """K of one head of every so many-th of the tiles, up to the first of nothing."""
    tile, head = tl.program_id(0), tl.program_id(1)
    key, column = tl.arange(0, KEYS), tl.arange(0, HEAD_DIM)
    count = tl.load(tiles_ptr + 2 * tile + 1, mask=tile < num_tiles, other=0)
    while count > 0:
        row = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
        x = _load(x_ptr, scale_ptr, x_stride, row, key, count, head, HEADS, HEAD_DIM)
        exponent = _exponent(x)
        place = ((first_tile + tile) * HEADS + head).to(tl.int64)
        code = _encode(x, _power(-exponent), NATIVE)
        tl.store(out_ptr + place * (KEYS * HEAD_DIM) + (key[:, None] * HEAD_DIM + column[None, :]), code)
        tl.store(facts_ptr + place * PLACES, _power(exponent))
        tile += tl.num_programs(0)
        count = tl.load(tiles_ptr + 2 * tile + 1, mask=tile < num_tiles, other=0)


@triton.jit
def _pack_v(  # type: ignore[no-untyped-def]
    x_ptr, scale_ptr, x_stride, tiles_ptr, num_tiles, first_tile, out_ptr, facts_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The same of V. Rows are read in the order in which they shall lie, so that it only remains to turn them over."""
    tile, head = tl.program_id(0), tl.program_id(1)
    position, column = tl.arange(0, KEYS), tl.arange(0, HEAD_DIM)
    key = key_at(position)
    HALF: tl.constexpr = KEYS // 2
    there = column[:, None] * HALF + (position // HALF * (HALF * HEAD_DIM) + position % HALF)[None, :]
    count = tl.load(tiles_ptr + 2 * tile + 1, mask=tile < num_tiles, other=0)
    while count > 0:
        row = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
        x = _load(x_ptr, scale_ptr, x_stride, row, key, count, head, HEADS, HEAD_DIM)
        exponent = _exponent(x)
        place = ((first_tile + tile) * HEADS + head).to(tl.int64)
        code = tl.trans(_encode(x, _power(-exponent), NATIVE))
        tl.store(out_ptr + place * (KEYS * HEAD_DIM) + there, code)
        tl.store(facts_ptr + place * PLACES + 1, exponent.to(tl.float32))
        tl.store(facts_ptr + place * PLACES + 2, _power(-exponent))
        tile += tl.num_programs(0)
        count = tl.load(tiles_ptr + 2 * tile + 1, mask=tile < num_tiles, other=0)


@triton.jit
def pack_tiles_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, stored_k_ptr, stored_v_ptr, k_scale_ptr, v_scale_ptr,
    k_stride, v_stride, stored_k_stride, stored_v_stride,
    own_tiles_ptr, num_own, prefix_tiles_ptr, num_prefix, k_out_ptr, v_out_ptr, facts_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, NATIVE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, h, what): head h of each so many-th tile from the i-th on; what: own K, own V, stored K, stored V."""
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    what = tl.program_id(2)
    if what == 0:
        _pack_k(k_ptr, None, k_stride, own_tiles_ptr, num_own, 0, k_out_ptr, facts_ptr, HEADS, HEAD_DIM, KEYS, NATIVE)
    elif what == 1:
        _pack_v(v_ptr, None, v_stride, own_tiles_ptr, num_own, 0, v_out_ptr, facts_ptr, HEADS, HEAD_DIM, KEYS, NATIVE)
    elif what == 2:
        _pack_k(
            stored_k_ptr, k_scale_ptr, stored_k_stride, prefix_tiles_ptr, num_prefix, num_own, k_out_ptr, facts_ptr,
            HEADS, HEAD_DIM, KEYS, NATIVE,
        )  # fmt: skip
    else:
        _pack_v(
            stored_v_ptr, v_scale_ptr, stored_v_stride, prefix_tiles_ptr, num_prefix, num_own, v_out_ptr, facts_ptr,
            HEADS, HEAD_DIM, KEYS, NATIVE,
        )  # fmt: skip


def pack_launch(k: Tensor, v: Tensor, stored: StoredKV, launch: Launch) -> PackedTiles:
    """All that a launch reads, in one kernel. ``k``, ``v``: (rows, kv_heads, head_dim), the pass's own; ``stored``:
    where the prefixes lie."""
    kv_heads, head_dim = k.shape[1:]
    assert all(x.stride()[1:] == (head_dim, 1) for x in (k, v, stored.k, stored.v))
    num_own, num_prefix = len(launch.own_tiles), len(launch.prefix_tiles)
    packed = PackedTiles.empty(num_own + num_prefix, kv_heads, head_dim, launch.shape.keys, k.device)
    # Those of stored rows beside those of own ones, where there are any.
    grid = (min(PROGRAMS_A_HEAD, max(num_own, num_prefix)), kv_heads, 4 if num_prefix else 2)
    pack_tiles_kernel[grid](
        k, v, as_float8(stored.k), as_float8(stored.v), stored.k_scale, stored.v_scale,
        k.stride(0), v.stride(0), stored.k.stride(0), stored.v.stride(0),
        launch.own_tiles, num_own, launch.prefix_tiles, num_prefix,
        packed.k.view(torch.uint8), packed.v.view(torch.uint8), packed.facts,
        HEADS=kv_heads, HEAD_DIM=head_dim, KEYS=packed.keys, NATIVE=k.is_cuda, num_warps=NUM_WARPS,
        **chained(k),
    )  # fmt: skip
    return packed


def pack_rows_reference(x: Tensor, scale: Tensor | None, tiles: Tensor) -> Tensor:
    """What K or V (rows, kv_heads, head_dim) is after packing and back, fp32, in plain PyTorch. ``tiles``: see
    ``Launch``. Rows that are in none of them are 0."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for row, count in tiles.tolist():
        if count > 0:
            rows = slice(row, row + count)
            values = x[rows]
            if scale is not None:
                values = values.view(torch.float8_e4m3fn).float() * scale[rows, :, None]
            largest = values.float().abs().amax(dim=(0, 2), keepdim=True)
            exponent = (largest / E4M3_MAX.value).log2().ceil().clamp(LEAST_EXPONENT.value, MOST_EXPONENT.value)
            out[rows] = (values.float() * 2**-exponent).to(torch.float8_e4m3fn).float() * 2**exponent
    return out
