"""Attention of one row a sequence over keys in pages: text decode, planned by ``decode_plan``.

``softmax(q k' / sqrt(head_dim)) v`` over all rows that a sequence has in pages. Each program takes one piece for one
K/V head and the query heads that share it; a second kernel merges the pieces by log-sum-exp.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from underpaint.kernels.chain import LINE_BITS, bring_near, chained, let_next_begin, wait_for_previous
from underpaint.kernels.decode_plan import DecodePlan, tile_keys
from underpaint.kernels.dequantise import as_float8, from_e4m3
from underpaint.kernels.tiles import StoredKV

LOG2_E = 1.4426950408889634
NUM_WARPS = 4
NUM_STAGES = {1: 3, 2: 2, 4: 1}
"""Of the attention itself, by bytes of a stored value. Two programs fit a processor of an H200; of bf16 a tile of K and
V, 64 KB, is on its way to each. One of 32 x 8192 takes 0.249 ms there, as long as a copy of so many bytes; with 64 keys
and 4 stages 0.254, with 32 keys, 4 stages and twice the programs 0.292. e4m3 spills with 2 stages, and not with 3."""
MERGED = 32
"""Pieces that are merged at a time."""


@triton.jit
def _load_tile(  # type: ignore[no-untyped-def]
    desc, scale_ptr, row, num_valid, head, dtype: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + KEYS) of one head of K or V, dequantised to ``dtype``. With CLEAR those from ``num_valid`` on
    are 0: they may never have been written, and 0 * NaN would reach the result."""
    x = desc.load([row, head * HEAD_DIM])
    key = tl.arange(0, KEYS)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + (row + key).to(tl.int64) * HEADS + head, mask=key < num_valid, other=0.0)
        x = from_e4m3(x, scale[:, None])
    if CLEAR:
        x = tl.where((key < num_valid)[:, None], x, tl.zeros_like(x))
    return x.to(dtype)


@triton.jit
def _row_of(pages_ptr, tile, KEYS: tl.constexpr, PAGE_TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The slot at which a key tile begins."""
    return tl.load(pages_ptr + 2 * (tile // PAGE_TILES)) + tile % PAGE_TILES * KEYS


@triton.jit
def _bring_tile_near(  # type: ignore[no-untyped-def]
    pointer, row, head, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr
):
    LINE: tl.constexpr = LINE_BITS // pointer.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, triton.next_power_of_2(triton.cdiv(HEAD_DIM, LINE))) * LINE
    key = row + tl.arange(0, KEYS)
    pointer += (key.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM
    bring_near(pointer + tl.minimum(line, HEAD_DIM - 1)[None, :])


@triton.jit
def _absorb(  # type: ignore[no-untyped-def]
    acc, total, peak, q, k_desc, v_desc, k_scale_ptr, v_scale_ptr, row, num_valid, head, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile of online softmax. Without MASKED all of its keys exist: V then goes from shared memory into the
    product as it is, and not by way of registers."""
    k = _load_tile(k_desc, k_scale_ptr, row, num_valid, head, q.dtype, HEADS, HEAD_DIM, KEYS, False)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        scores = tl.where((tl.arange(0, KEYS) < num_valid)[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = tl.math.exp2(scores - base[:, None])
    shrink = tl.math.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    v = _load_tile(v_desc, v_scale_ptr, row, num_valid, head, q.dtype, HEADS, HEAD_DIM, KEYS, MASKED)
    acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, new_peak


@triton.jit
def decode_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, k_scale_ptr, v_scale_ptr, pages_ptr, pieces_ptr, out_ptr, piece_out_ptr,
    piece_lse_ptr, q_stride, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PAGE_TILES: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (h, i): piece i for K/V head h, whose SHARED query heads are the first lanes of the tile. The heads of a
    row lie side by side, so they are read together; unused pieces come last. They leave at once, so that kernels behind
    this one find room and begin; only those of piece 0 stay, for one program at least must wait."""
    head = tl.program_id(0)
    piece = tl.program_id(1)
    lane = tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    let_next_begin(CHAINED)
    # No kernel of a step writes its plan.
    sequence = tl.load(pieces_ptr + 5 * piece).to(tl.int64)
    start = tl.load(pieces_ptr + 5 * piece + 1)
    stop = tl.load(pieces_ptr + 5 * piece + 2)
    whole = tl.load(pieces_ptr + 5 * piece + 3)
    full_stop = tl.load(pieces_ptr + 5 * piece + 4)
    used = start < stop
    row = 0
    if used:
        # The last page may have nothing yet in its last tiles.
        last = (stop - 1) // PAGE_TILES
        stop = tl.minimum(stop, last * PAGE_TILES + tl.cdiv(tl.load(pages_ptr + 2 * last + 1), KEYS))
        row = _row_of(pages_ptr, start, KEYS, PAGE_TILES)
        if CHAINED:
            # Before the kernels behind this one ask for weights.
            _bring_tile_near(k_ptr, row, head, HEADS, HEAD_DIM, KEYS)
            _bring_tile_near(v_ptr, row, head, HEADS, HEAD_DIM, KEYS)
    if used | (piece == 0):
        wait_for_previous(CHAINED)
    if used:
        columns = (head * SHARED + lane)[:, None] * HEAD_DIM + column[None, :]
        inside = (lane < SHARED)[:, None] & (column < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + sequence * q_stride + columns, mask=inside, other=0.0)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        # A tile's slot is read one tile ahead: were it read for its own, keys could not be asked for further ahead.
        for tile in tl.range(start, full_stop):
            next_row = _row_of(pages_ptr, tl.minimum(tile + 1, stop - 1), KEYS, PAGE_TILES)
            acc, total, peak = _absorb(
                acc, total, peak, q, k_desc, v_desc, k_scale_ptr, v_scale_ptr, row, KEYS, head, scale,
                HEADS, HEAD_DIM, KEYS, False, PRECISION,
            )  # fmt: skip
            row = next_row
        for tile in tl.range(full_stop, stop, num_stages=2):
            next_row = _row_of(pages_ptr, tl.minimum(tile + 1, stop - 1), KEYS, PAGE_TILES)
            num_valid = tl.load(pages_ptr + 2 * (tile // PAGE_TILES) + 1) - tile % PAGE_TILES * KEYS
            acc, total, peak = _absorb(
                acc, total, peak, q, k_desc, v_desc, k_scale_ptr, v_scale_ptr, row, num_valid, head, scale,
                HEADS, HEAD_DIM, KEYS, True, PRECISION,
            )  # fmt: skip
            row = next_row
        total = tl.where(total == 0.0, 1.0, total)  # a piece may have no key
        acc = acc / total[:, None]
        if whole != 0:
            outs = out_ptr + sequence * (HEADS * SHARED * HEAD_DIM) + columns
            tl.store(outs, acc.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            lanes = (piece * HEADS + head) * SHARED + lane
            tl.store(piece_out_ptr + lanes[:, None] * DIM + column[None, :], acc, mask=(lane < SHARED)[:, None])
            tl.store(piece_lse_ptr + lanes, peak + tl.math.log2(total), mask=lane < SHARED)


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
    start = tl.load(merges_ptr + 2 * sequence)
    stop = tl.load(merges_ptr + 2 * sequence + 1)
    wait_for_previous(CHAINED)
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
    apart; ``plan``: not written by the kernel launched last. Returns (sequences, heads, head_dim); 0 for a sequence
    without pages."""
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
        planes = [as_float8(x) for x in (stored.k, stored.v)]
        decode_attention_kernel[(kv_heads, len(plan.pieces))](
            q, *planes, *(_describe(x, keys, dim) for x in planes), stored.k_scale, stored.v_scale,
            plan.pages, plan.pieces, out, piece_out, piece_lse, q.stride(0), head_dim**-0.5 * LOG2_E,
            ROWS=max(16, triton.next_power_of_2(shared)), KEYS=keys, PAGE_TILES=page_rows // keys, PRECISION="ieee",
            num_warps=NUM_WARPS, num_stages=choose_stages(*(x.dtype for x in planes)), **heads,
        )  # fmt: skip
        merge_decode_kernel[(num_sequences, num_heads)](
            piece_out, piece_lse, plan.merges, out, PIECES=MERGED, num_warps=4, **heads
        )
    return out


def choose_stages(*stored: torch.dtype) -> int:
    return NUM_STAGES[max(dtype.itemsize for dtype in stored)]


def _describe(x: Tensor, keys: int, dim: int) -> TensorDescriptor:
    """Boxes of ``keys`` rows of one head, padded to ``dim`` columns: q is 0 in those beyond head_dim."""
    return TensorDescriptor.from_tensor(x.flatten(1), [keys, dim])
