"""Attention of one row a sequence over keys in pages: text decode, planned by ``decode_plan``.

``softmax(q k' / sqrt(head_dim)) v`` over all rows that a sequence has in pages. Each program takes one piece for one
K/V head and the query heads that share it; a second kernel merges the pieces by log-sum-exp.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous
from underpaint.kernels.decode_plan import DecodePlan, tile_keys
from underpaint.kernels.dequantise import as_float8, from_e4m3
from underpaint.kernels.tiles import StoredKV

LOG2_E = 1.4426950408889634
MERGED = 8
"""Pieces that are merged at a time."""


@triton.jit
def _load_tile(  # type: ignore[no-untyped-def]
    desc, scale_ptr, row, num_valid, head, dtype: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + KEYS) of one head of K or V, dequantised to ``dtype``. Those from ``num_valid`` on are 0: they
    may never have been written, and 0 * NaN would reach the result."""
    x = desc.load([row, head * HEAD_DIM])
    key = tl.arange(0, KEYS)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + (row + key).to(tl.int64) * HEADS + head, mask=key < num_valid, other=0.0)
        x = from_e4m3(x, scale[:, None])
    return tl.where((key < num_valid)[:, None], x, tl.zeros_like(x)).to(dtype)


@triton.jit
def decode_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_desc, v_desc, k_scale_ptr, v_scale_ptr, pages_ptr, pieces_ptr, out_ptr, piece_out_ptr, piece_lse_ptr,
    q_stride, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PAGE_TILES: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, h): piece i for K/V head h, whose SHARED query heads are the first lanes of the tile."""
    head = tl.program_id(1)
    piece = tl.program_id(0)
    lane = tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    sequence = tl.load(pieces_ptr + 4 * piece).to(tl.int64)
    start = tl.load(pieces_ptr + 4 * piece + 1)
    stop = tl.load(pieces_ptr + 4 * piece + 2)
    if start < stop:
        columns = (head * SHARED + lane)[:, None] * HEAD_DIM + column[None, :]
        inside = (lane < SHARED)[:, None] & (column < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + sequence * q_stride + columns, mask=inside, other=0.0)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        for tile in tl.range(start, stop):
            page = tile // PAGE_TILES
            offset = tile % PAGE_TILES * KEYS
            row = tl.load(pages_ptr + 2 * page) + offset
            num_valid = tl.load(pages_ptr + 2 * page + 1) - offset
            k = _load_tile(k_desc, k_scale_ptr, row, num_valid, head, q.dtype, HEADS, HEAD_DIM, KEYS)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores = tl.where((tl.arange(0, KEYS) < num_valid)[None, :], scores * scale, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.math.exp2(scores - base[:, None])
            shrink = tl.math.exp2(peak - base)
            total = total * shrink + tl.sum(weights, 1)
            v = _load_tile(v_desc, v_scale_ptr, row, num_valid, head, q.dtype, HEADS, HEAD_DIM, KEYS)
            acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
            peak = new_peak
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if tl.load(pieces_ptr + 4 * piece + 3) != 0:
            outs = out_ptr + sequence * (HEADS * SHARED * HEAD_DIM) + columns
            tl.store(outs, acc.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            lanes = (piece * HEADS + head) * SHARED + lane
            tl.store(piece_out_ptr + lanes[:, None] * DIM + column[None, :], acc, mask=(lane < SHARED)[:, None])
            lse = tl.where(total == 0.0, float("-inf"), peak + tl.math.log2(total))
            tl.store(piece_lse_ptr + lanes, lse, mask=lane < SHARED)


@triton.jit
def merge_decode_kernel(  # type: ignore[no-untyped-def]
    piece_out_ptr, piece_lse_ptr, merges_ptr, out_ptr,
    HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PIECES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, h): query head h of sequence i, the mean of its pieces weighted by 2**lse; 0 without any. A single
    piece is written already. PIECES are read at a time."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, DIM)
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    start = tl.load(merges_ptr + 2 * sequence)
    stop = tl.load(merges_ptr + 2 * sequence + 1)
    if stop - start != 1:
        acc = tl.zeros([DIM], tl.float32)
        total = 0.0
        peak = float("-inf")
        for first in tl.range(start, stop, PIECES):
            piece = first + tl.arange(0, PIECES)
            lane = piece * (HEADS * SHARED) + head
            lse = tl.load(piece_lse_ptr + lane, mask=piece < stop, other=float("-inf"))
            parts = tl.load(
                piece_out_ptr + lane[:, None] * DIM + column[None, :], mask=(piece < stop)[:, None], other=0.0
            )
            new_peak = tl.maximum(peak, tl.max(lse, 0))
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            shrink, weight = tl.math.exp2(peak - base), tl.math.exp2(lse - base)
            acc = acc * shrink + tl.sum(parts * weight[:, None], 0)
            total = total * shrink + tl.sum(weight, 0)
            peak = new_peak
        acc = acc / tl.where(total == 0.0, 1.0, total)
        out = out_ptr + sequence * (HEADS * SHARED * HEAD_DIM) + head * HEAD_DIM + column
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


def decode_attention(q: Tensor, stored: StoredKV, plan: DecodePlan, page_rows: int) -> Tensor:
    """Attention of one layer, whose slots are ``stored``. ``q``: (sequences, heads, head_dim), rows of which may be
    apart. Returns (sequences, heads, head_dim); 0 for a sequence without pages."""
    num_sequences, num_heads, head_dim = q.shape
    kv_heads = stored.k.shape[1]
    shared, keys, dim = num_heads // kv_heads, tile_keys(page_rows), max(16, triton.next_power_of_2(head_dim))
    assert keys, f"pages of {page_rows} rows"
    assert q.stride()[1:] == (head_dim, 1)
    lanes = len(plan.pieces) * num_heads
    piece_out = torch.empty(lanes, dim, device=q.device)
    piece_lse = torch.empty(lanes, device=q.device)
    out = torch.empty(num_sequences, num_heads, head_dim, dtype=q.dtype, device=q.device)
    heads = {"HEADS": kv_heads, "SHARED": shared, "HEAD_DIM": head_dim, "DIM": dim, **chained(q)}
    with torch.cuda.device_of(q):
        decode_attention_kernel[(len(plan.pieces), kv_heads)](
            q, *(_describe(x, keys, dim) for x in (stored.k, stored.v)), stored.k_scale, stored.v_scale,
            plan.pages, plan.pieces, out, piece_out, piece_lse, q.stride(0), head_dim**-0.5 * LOG2_E,
            ROWS=max(16, triton.next_power_of_2(shared)), KEYS=keys, PAGE_TILES=page_rows // keys, PRECISION="ieee",
            num_warps=4, num_stages=3, **heads,
        )  # fmt: skip
        merge_decode_kernel[(num_sequences, num_heads)](
            piece_out, piece_lse, plan.merges, out, PIECES=MERGED, num_warps=1, **heads
        )
    return out


def _describe(x: Tensor, keys: int, dim: int) -> TensorDescriptor:
    """Boxes of ``keys`` rows of one head, padded to ``dim`` columns: q is 0 in those beyond head_dim."""
    return TensorDescriptor.from_tensor(as_float8(x).flatten(1), [keys, dim])
