"""``kv_pack`` of rows that nobody keeps, for attention in e4m3: queries are finished in place, and keys as what that
attention reads.

A packed tile has one power of two for its keys. Here it is known before any key is: norm weights bound them
(``HeadForm.key_exponent``), and e4m3 is a floating format, so that a larger factor costs nothing but the smallest
values: what is under 2**-15 of the bound. So a row need not wait for the others of its tile, and finished keys are not
written in 16 bits and read again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous
from underpaint.kernels.head_form import HeadForm
from underpaint.kernels.kv_pack import choose_warps, load_pairs, store_pairs, turn
from underpaint.kernels.pack_e4m3 import encode
from underpaint.kernels.packed_tiles import PackedTiles
from underpaint.kernels.tiles import Launch


@triton.jit
def kv_pack_tiles_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, weight_ptr, rotary_ptr, own_tiles_ptr, k_out_ptr, row_stride, eps, power,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ADJACENT: tl.constexpr,
    KEYS: tl.constexpr, NATIVE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program i: key i % KEYS of own tile i // KEYS, all heads of that row. ``power``: what keys are multiplied with,
    of two."""
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
        q_one, q_two = turn(q_one, q_two, q_weight[0], q_weight[1], cos, sin, eps)
        store_pairs(q_ptr, q_one, q_two, True, HEADS, HEAD_DIM, ADJACENT, GROUPS, PAIRS)
        k_one, k_two = turn(k_one, k_two, k_weight[0], k_weight[1], cos, sin, eps)
        k_one, k_two = encode(k_one.to(tl.float32), power, NATIVE), encode(k_two.to(tl.float32), power, NATIVE)
        k_out_ptr += (tile.to(tl.int64) * (KV_HEADS * KEYS) + key) * HEAD_DIM
        store_pairs(k_out_ptr, k_one, k_two, True, KV_HEADS, KEYS * HEAD_DIM, ADJACENT, GROUPS, PAIRS)


def kv_pack_tiles(
    qkv: Tensor, kv_heads: int, form: HeadForm, rotary: Tensor, launch: Launch, into: PackedTiles
) -> float:
    """Finish the queries of a product, see ``kv_pack``, and put its keys ``into`` the tiles of a launch that takes all
    of its rows. Returns the keys' power of two. Keys of ``qkv`` stay as they were, and so does what follows the last
    key of a tile."""
    num_rows, all_heads, head_dim = qkv.shape
    assert qkv.stride()[1:] == (head_dim, 1)
    assert rotary.shape == (num_rows, head_dim // 2)
    assert rotary.is_contiguous()
    keys = launch.shape.keys
    with torch.cuda.device_of(qkv):
        kv_pack_tiles_kernel[(len(launch.own_tiles) * keys,)](
            qkv, form.weight, torch.view_as_real(rotary), launch.own_tiles, into.k.view(torch.uint8),
            qkv.stride(0), form.eps, 2.0**-form.key_exponent,
            HEADS=all_heads - 2 * kv_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, ADJACENT=form.adjacent, KEYS=keys,
            NATIVE=qkv.is_cuda, num_warps=choose_warps(kv_heads, head_dim), **chained(qkv),
        )  # fmt: skip
    return 2.0**form.key_exponent
