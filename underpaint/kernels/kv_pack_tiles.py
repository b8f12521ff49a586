"""``kv_pack`` of rows that nobody keeps, for attention in e4m3: queries and keys become what that attention reads.

A packed tile has one power of two for its keys. Here it is known before any key is: norm weights bound them
(``HeadForm.key_exponent``), and e4m3 is a floating format, so that a larger factor costs nothing but the smallest
values: what is under 2**-15 of the bound. So a row need not wait for the others of its tile, and finished keys are not
written in 16 bits and read again, nor rounded to them. Queries are bounded just so, and have one power of two for all
rows and heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous
from underpaint.kernels.head_form import HeadForm
from underpaint.kernels.kv_pack import RUN, choose_warps, load_pairs, store_pairs, turned
from underpaint.kernels.pack_e4m3 import encode
from underpaint.kernels.packed_tiles import E4M3, PackedTiles
from underpaint.kernels.tiles import Launch


@triton.jit
def _to_codes(one, two):  # type: ignore[no-untyped-def]
    """fp32 channels beside each other as a word of two codes, so that no byte is moved."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $3, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $2;"
        " mov.b32 $0, {low, high}; }",
        "=r,r,r,r,r", [one, two], dtype=tl.uint16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    out_ptr, one, two, weight, cos, sin, eps, power,
    HEADS: tl.constexpr, STRIDE: tl.constexpr, ADJACENT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """What ``turned`` makes of heads, times ``power``, which is one of two, as e4m3. It is bounded: only NaN is NaN."""
    GROUPS: tl.constexpr = one.shape[1]
    PAIRS: tl.constexpr = one.shape[2]
    one, two = turned(one, two, weight[0], weight[1], cos * power, sin * power, eps)
    if NATIVE and ADJACENT:
        head, pair = tl.arange(0, one.shape[0]), tl.max_contiguous(tl.arange(0, GROUPS * PAIRS), RUN // 2)
        words = tl.reshape(_to_codes(one, two), [one.shape[0], GROUPS * PAIRS])
        out_ptr = out_ptr.to(tl.pointer_type(tl.uint16)) + head[:, None] * (STRIDE // 2) + pair[None, :]
        tl.store(out_ptr, words, mask=(head < HEADS)[:, None])
    else:
        one, two = encode(one, 1.0, NATIVE), encode(two, 1.0, NATIVE)
        store_pairs(out_ptr, one, two, True, HEADS, STRIDE, ADJACENT, GROUPS, PAIRS)


@triton.jit
def kv_pack_tiles_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, weight_ptr, rotary_ptr, own_tiles_ptr, q_out_ptr, k_out_ptr, row_stride, eps, q_power, k_power,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ADJACENT: tl.constexpr,
    KEYS: tl.constexpr, NATIVE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program i: key i % KEYS of own tile i // KEYS, all heads of that row. ``q_power``, ``k_power``: what queries and
    keys are multiplied with, of two."""
    GROUPS: tl.constexpr = 1 if ADJACENT else 2
    PAIRS: tl.constexpr = HEAD_DIM // 2 // GROUPS
    tile, key = tl.program_id(0) // KEYS, tl.program_id(0) % KEYS
    q_weight = load_pairs(weight_ptr, True, 1, ADJACENT, GROUPS, PAIRS)
    k_weight = load_pairs(weight_ptr + HEAD_DIM, True, 1, ADJACENT, GROUPS, PAIRS)
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)

    if key < tl.load(own_tiles_ptr + 2 * tile + 1):
        row = tl.load(own_tiles_ptr + 2 * tile).to(tl.int64) + key
        q_ptr = qkv_ptr + row * row_stride
        q_one, q_two = load_pairs(q_ptr, True, HEADS, ADJACENT, GROUPS, PAIRS)
        k_one, k_two = load_pairs(q_ptr + HEADS * HEAD_DIM, True, KV_HEADS, ADJACENT, GROUPS, PAIRS)
        cos, sin = load_pairs(rotary_ptr + row * HEAD_DIM, True, 1, True, GROUPS, PAIRS)
        _finish(
            q_out_ptr + row * (HEADS * HEAD_DIM), q_one, q_two, q_weight, cos, sin, eps, q_power,
            HEADS, HEAD_DIM, ADJACENT, NATIVE,
        )  # fmt: skip
        _finish(
            k_out_ptr + (tile.to(tl.int64) * (KV_HEADS * KEYS) + key) * HEAD_DIM, k_one, k_two, k_weight, cos, sin, eps,
            k_power, KV_HEADS, KEYS * HEAD_DIM, ADJACENT, NATIVE,
        )  # fmt: skip


def kv_pack_tiles(
    qkv: Tensor, kv_heads: int, form: HeadForm, rotary: Tensor, launch: Launch, into: PackedTiles
) -> tuple[Tensor, float, float]:
    """Finish the queries and keys of a product, see ``kv_pack``, but round them to e4m3 at once. Keys go ``into`` the
    tiles of a launch that takes all of its rows; what follows the last key of a tile stays as it was, and so does
    ``qkv``. Returns queries (rows, heads, head_dim) in e4m3, and the powers of two of queries and of keys."""
    num_rows, all_heads, head_dim = qkv.shape
    heads = all_heads - 2 * kv_heads
    assert qkv.stride()[1:] == (head_dim, 1)
    assert rotary.shape == (num_rows, head_dim // 2)
    assert rotary.is_contiguous()
    keys = launch.shape.keys
    queries = torch.empty(num_rows, heads, head_dim, dtype=E4M3, device=qkv.device)
    with torch.cuda.device_of(qkv):
        kv_pack_tiles_kernel[(len(launch.own_tiles) * keys,)](
            qkv, form.weight, torch.view_as_real(rotary), launch.own_tiles, queries.view(torch.uint8),
            into.k.view(torch.uint8), qkv.stride(0), form.eps, 2.0**-form.query_exponent, 2.0**-form.key_exponent,
            HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, ADJACENT=form.adjacent, KEYS=keys,
            NATIVE=qkv.is_cuda, num_warps=choose_warps(kv_heads, head_dim), **chained(qkv),
        )  # fmt: skip
    return queries, 2.0**form.query_exponent, 2.0**form.key_exponent
