"""Packing keys and values into tiles of e4m3, see ``packed_tiles``: once a layer what a launch reads of the pass and of
prefixes that are stored as rows, and once and for all what is kept in pages of tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous
from underpaint.kernels.dequantise import as_float8, from_e4m3
from underpaint.kernels.e4m3 import to_e4m3
from underpaint.kernels.packed_tiles import (
    FACT_PLACES,
    LEAST_EXPONENT,
    MOST_EXPONENT,
    PackedTiles,
    Stored,
    encode_tiles,
)
from underpaint.kernels.tiles import Launch, StoredKV

LEAST, MOST = tl.constexpr(LEAST_EXPONENT), tl.constexpr(MOST_EXPONENT)
PLACES = tl.constexpr(FACT_PLACES)
INFINITY = tl.constexpr(0x7F800000)
"""As bits. NaN is beyond, and counts as much."""
PROGRAMS_A_HEAD, NUM_WARPS = 16, 4
"""Each takes so many-th tiles: one program a tile of a plan with much room would be thousands that do nothing. Four
programs of 128 registers a thread fit a Hopper's processor."""


@triton.jit
def key_at(place):  # type: ignore[no-untyped-def]
    """``packed_tiles.key_order``: of the scores of 16 keys a thread holds 2 neighbours and those 8 further; of a factor
    of a product of bytes, 4 neighbours."""
    return (place & ~15) | (place & 1) | ((place >> 1) & 6) | ((place & 2) << 2)


@triton.jit
def _exponent(x):  # type: ignore[no-untyped-def]
    """The smallest with which no value of ``x`` is over 448 times its power of two: a mantissa over that of 448, 1.75 *
    2**8, is carried into the exponent. bf16 is compared as it is: as fp32 it would take a thread twice the registers
    until it is encoded."""
    if x.dtype == tl.bfloat16:
        bits = tl.minimum(tl.max((x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32)) << 16, INFINITY)
    else:
        bits = tl.max(tl.abs(x.to(tl.float32))).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(((bits + 0x1FFFFF) >> 23) - 127 - 8, LEAST), MOST)


@triton.jit
def _power(exponent):  # type: ignore[no-untyped-def]
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load(  # type: ignore[no-untyped-def]
    x_ptr, scale_ptr, x_stride, first, key, count, head, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """(keys, HEAD_DIM) of one head, fp32 if they have scales: rows ``first`` + key, 0 from key ``count`` on. What
    differs between keys is 32 bits wide, to have registers left for values."""
    x_ptr += first * x_stride + head * HEAD_DIM
    column = tl.arange(0, HEAD_DIM)
    x = tl.load(x_ptr + (key[:, None] * x_stride + column[None, :]), mask=(key < count)[:, None], other=0.0)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + first * HEADS + head + key * HEADS, mask=key < count, other=0.0)
        return from_e4m3(x, scale[:, None])
    else:
        return x


@triton.jit
def encode(x, factor, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """e4m3 of ``x * factor`` as bytes. What is not finite becomes NaN: e4m3 has no infinity. NATIVE: see
    ``e4m3.encode``."""
    x = x.to(tl.float32) * factor
    finite = tl.abs(x) < float("inf")
    code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else to_e4m3(x)
    return tl.where(finite, code, 0x7F).to(tl.uint8)


@triton.jit
def _pack(  # type: ignore[no-untyped-def]
    x_ptr, scale_ptr, x_stride, row, count, tile, head, out_ptr, facts_ptr, k_power, IS_V: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """K or V of one head of ``count`` rows from ``row`` on, as tile number ``tile``. Rows of V are read in the order in
    which they shall lie, so that it only remains to turn them over. ``k_power``: that of K where it is there already,
    which whoever packs V notes."""
    position, column = tl.arange(0, KEYS), tl.arange(0, HEAD_DIM)
    key = key_at(position) if IS_V else position
    x = _load(x_ptr, scale_ptr, x_stride, row.to(tl.int64), key, count, head, HEADS, HEAD_DIM)
    exponent = _exponent(x)
    place = (tile * HEADS + head).to(tl.int64)
    out_ptr, facts_ptr = out_ptr + place * (KEYS * HEAD_DIM), facts_ptr + place * PLACES
    code = encode(x, _power(-exponent), NATIVE)
    if IS_V:
        HALF: tl.constexpr = KEYS // 2
        there = column[:, None] * HALF + (position // HALF * (HALF * HEAD_DIM) + position % HALF)[None, :]
        tl.store(out_ptr + there, tl.trans(code))
        tl.store(facts_ptr + 1, exponent.to(tl.float32))
        tl.store(facts_ptr + 2, _power(-exponent))
        if k_power is not None:
            tl.store(facts_ptr, k_power)
    else:
        tl.store(out_ptr + (position[:, None] * HEAD_DIM + column[None, :]), code)
        tl.store(facts_ptr, _power(exponent))


@triton.jit
def _pack_listed(  # type: ignore[no-untyped-def]
    x_ptr, scale_ptr, x_stride, tiles_ptr, num_tiles, first_tile, out_ptr, facts_ptr, k_power, IS_V: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """K or V of one head of every so many-th tile of a list, up to the first of nothing."""
    tile, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(tiles_ptr + 2 * tile + 1, mask=tile < num_tiles, other=0)
    while count > 0:
        row = tl.load(tiles_ptr + 2 * tile)
        _pack(
            x_ptr, scale_ptr, x_stride, row, count, first_tile + tile, head, out_ptr, facts_ptr, k_power, IS_V,
            HEADS, HEAD_DIM, KEYS, NATIVE,
        )  # fmt: skip
        tile += tl.num_programs(0)
        count = tl.load(tiles_ptr + 2 * tile + 1, mask=tile < num_tiles, other=0)


@triton.jit
def pack_tiles_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, stored_k_ptr, stored_v_ptr, k_scale_ptr, v_scale_ptr,
    k_stride, v_stride, stored_k_stride, stored_v_stride,
    own_tiles_ptr, num_own, prefix_tiles_ptr, num_prefix, k_out_ptr, v_out_ptr, facts_ptr, k_power,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, NATIVE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, h, what): head h of each so many-th tile from the i-th on; what: own K, own V, stored K, stored V.
    Own K is left out where it has a ``k_power`` already."""
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    what = tl.program_id(2) + (1 if k_power is not None else 0)
    if what == 0:
        _pack_listed(
            k_ptr, None, k_stride, own_tiles_ptr, num_own, 0, k_out_ptr, facts_ptr, None, False,
            HEADS, HEAD_DIM, KEYS, NATIVE,
        )  # fmt: skip
    elif what == 1:
        _pack_listed(
            v_ptr, None, v_stride, own_tiles_ptr, num_own, 0, v_out_ptr, facts_ptr, k_power, True,
            HEADS, HEAD_DIM, KEYS, NATIVE,
        )  # fmt: skip
    elif what == 2:
        _pack_listed(
            stored_k_ptr, k_scale_ptr, stored_k_stride, prefix_tiles_ptr, num_prefix, num_own, k_out_ptr, facts_ptr,
            None, False, HEADS, HEAD_DIM, KEYS, NATIVE,
        )  # fmt: skip
    else:
        _pack_listed(
            stored_v_ptr, v_scale_ptr, stored_v_stride, prefix_tiles_ptr, num_prefix, num_own, v_out_ptr, facts_ptr,
            None, True, HEADS, HEAD_DIM, KEYS, NATIVE,
        )  # fmt: skip


@triton.jit
def _pack_begun(  # type: ignore[no-untyped-def]
    x_ptr, x_stride, slots_ptr, num_slots, out_ptr, facts_ptr, IS_V: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """K or V of one head of each page whose first slot is that of one of so many-th KEYS rows."""
    head, key = tl.program_id(1), tl.arange(0, KEYS)
    own = tl.program_id(0) * KEYS + key
    slot = tl.load(slots_ptr + own, mask=own < num_slots, other=-1)
    begins = (slot >= 0) & (slot % KEYS == 0)
    row = tl.min(tl.where(begins, own, num_slots))
    while row < num_slots:
        first = tl.load(slots_ptr + row)
        behind = tl.load(slots_ptr + row + key, mask=row + key < num_slots, other=-1)
        count = tl.sum((behind == first + key).to(tl.int32))
        _pack(
            x_ptr, None, x_stride, row, count, first // KEYS, head, out_ptr, facts_ptr, None, IS_V,
            HEADS, HEAD_DIM, KEYS, NATIVE,
        )  # fmt: skip
        row = tl.min(tl.where(begins & (own > row), own, num_slots))


@triton.jit
def pack_pages_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, slots_ptr, k_stride, v_stride, num_slots, k_out_ptr, v_out_ptr, facts_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, NATIVE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, h, what): head h of the pages that begin in the i-th KEYS rows; what: K, V."""
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    if tl.program_id(2) == 0:
        _pack_begun(k_ptr, k_stride, slots_ptr, num_slots, k_out_ptr, facts_ptr, False, HEADS, HEAD_DIM, KEYS, NATIVE)
    else:
        _pack_begun(v_ptr, v_stride, slots_ptr, num_slots, v_out_ptr, facts_ptr, True, HEADS, HEAD_DIM, KEYS, NATIVE)


def tiles_of(k: Tensor, stored: Stored | None, launch: Launch) -> PackedTiles:
    """Room for what a launch reads: first the tiles of its own rows, see ``Launch.own_tiles``, then, unless they lie
    packed in their pages, those of its prefixes. ``k``: (rows, kv_heads, head_dim), the pass's own; ``stored``: where
    the prefixes lie, None without any."""
    num_tiles = len(launch.own_tiles) + (len(launch.prefix_tiles) if isinstance(stored, StoredKV) else 0)
    kv_heads, head_dim = k.shape[1:]
    return PackedTiles.empty(num_tiles, kv_heads, head_dim, launch.shape.keys, k.device)


def pack_launch(
    k: Tensor,
    v: Tensor,
    stored: Stored | None,
    launch: Launch,
    into: PackedTiles | None = None,
    k_power: float | None = None,
) -> PackedTiles:
    """Fill ``into``, or what ``tiles_of`` makes, and return it. ``v`` is like ``k``. ``k_power``: of own keys that are
    ``into`` already, see ``kv_pack_tiles``; ``k`` is not read then."""
    into = into or tiles_of(k, stored, launch)
    kv_heads, head_dim = k.shape[1:]
    num_own, num_prefix = len(launch.own_tiles), len(launch.prefix_tiles) if isinstance(stored, StoredKV) else 0
    stored = stored if isinstance(stored, StoredKV) else StoredKV(k, v)
    assert all(x.stride()[1:] == (head_dim, 1) for x in (k, v, stored.k, stored.v))
    # Those of stored rows beside those of own ones, where there are any.
    kinds = (4 if num_prefix else 2) - (k_power is not None)
    grid = (min(PROGRAMS_A_HEAD, max(num_own, num_prefix)), kv_heads, kinds)
    with torch.cuda.device_of(k):
        pack_tiles_kernel[grid](
            k, v, as_float8(stored.k), as_float8(stored.v), stored.k_scale, stored.v_scale,
            k.stride(0), v.stride(0), stored.k.stride(0), stored.v.stride(0),
            launch.own_tiles, num_own, launch.prefix_tiles, num_prefix,
            into.k.view(torch.uint8), into.v.view(torch.uint8), into.facts, k_power,
            HEADS=kv_heads, HEAD_DIM=head_dim, KEYS=into.keys, NATIVE=k.is_cuda,
            num_warps=NUM_WARPS,
            **chained(k),
        )  # fmt: skip
    return into


def pack_pages(k: Tensor, v: Tensor, pages: PackedTiles, slots: Tensor) -> None:
    """Keep the first rows of a pass in pages of tiles: ``k``, ``v`` (rows, kv_heads, head_dim) at ``slots`` (rows,)
    int32, below 0 for a row that is not kept; rows behind are not either. A page is written as a whole: where its first
    slot is among the slots, with the rows of those that follow on it, and with 0 behind."""
    kv_heads, head_dim = k.shape[1:]
    assert all(x.stride()[1:] == (head_dim, 1) for x in (k, v))
    assert len(slots) <= len(k)
    with torch.cuda.device_of(k):
        pack_pages_kernel[(triton.cdiv(len(slots), pages.keys), kv_heads, 2)](
            k, v, slots, k.stride(0), v.stride(0), len(slots),
            pages.k.view(torch.uint8), pages.v.view(torch.uint8), pages.facts,
            HEADS=kv_heads, HEAD_DIM=head_dim, KEYS=pages.keys, NATIVE=k.is_cuda, num_warps=NUM_WARPS,
            **chained(k),
        )  # fmt: skip


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
            codes, exponent = encode_tiles(values[None])
            out[rows] = codes[0].float() * torch.exp2(exponent.float())[..., None]
    return out
