"""From the product of a row with the q, k and v weights to what attention reads, in one pass.

Queries and keys are normalised, head by head, and turned by their rotary embedding, in place: a product (rows, heads +
2 x kv_heads, head_dim) holds the finished q, k and v afterwards, v untouched. Rows with a slot are also written to the
pages of the layer, as the codec says. Both models' forms, see ``HeadForm``. Values are rounded to the dtype of the
product exactly where the modules round them: after normalising, after the weight, after turning.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous
from underpaint.kernels.e4m3 import E4M3_MAX, TINY, to_e4m3
from underpaint.kernels.kept import Kept
from underpaint.kernels.tiles import StoredKV

LANES = 32
"""A lane is one head of one row; a program has so many."""


@dataclass(frozen=True, eq=False)
class HeadForm:
    """How a model treats the heads of q and k.

    ``weight``: (2, head_dim), norm weights of q and of k. ``adjacent``: Qwen-Image's form: one norm a head, and
    channels 2 i and 2 i + 1 turn together. Else SenseNova-U1's: the two halves of a head are normalised apart; in the
    first half, and in each quarter of the second, the first channels turn with the last.
    """

    weight: Tensor
    eps: float
    adjacent: bool


@triton.jit
def _channels(ADJACENT: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(groups, pairs) first channel of each pair, and how far behind the second is. A group is normalised as one."""
    group = tl.arange(0, GROUPS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    if ADJACENT:
        return 2 * (group * PAIRS + pair), 1 + 0 * (group + pair)
    second_half = 2 * PAIRS + pair // (PAIRS // 2) * PAIRS + pair % (PAIRS // 2)
    first = tl.where(group == 0, pair, second_half)
    return first, tl.where(group == 0, PAIRS, PAIRS // 2) + 0 * pair


@triton.jit
def _load_pairs(  # type: ignore[no-untyped-def]
    pointer, first, gap, inside, ADJACENT: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """(lanes, groups, pairs) first and second channels, from ``pointer`` (lanes,). Adjacent channels are read as they
    lie and divided then, so that every read is wide."""
    if ADJACENT:
        column = tl.arange(0, GROUPS * PAIRS * 2)
        both = tl.load(pointer[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        return tl.split(tl.reshape(both, [pointer.shape[0], GROUPS, PAIRS, 2]))
    pointer, inside = pointer[:, None, None], inside[:, None, None]
    one = tl.load(pointer + first[None], mask=inside, other=0.0)
    return one, tl.load(pointer + (first + gap)[None], mask=inside, other=0.0)


@triton.jit
def _store_pairs(  # type: ignore[no-untyped-def]
    pointer, first, gap, one, two, inside, ADJACENT: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    if ADJACENT:
        column = tl.arange(0, GROUPS * PAIRS * 2)
        both = tl.reshape(tl.join(one, two), [pointer.shape[0], GROUPS * PAIRS * 2])
        tl.store(pointer[:, None] + column[None, :], both, mask=inside[:, None])
    else:
        pointer, inside = pointer[:, None, None], inside[:, None, None]
        tl.store(pointer + first[None], one, mask=inside)
        tl.store(pointer + (first + gap)[None], two, mask=inside)


@triton.jit
def _keep(  # type: ignore[no-untyped-def]
    page_ptr, scale_ptr, line, one, two, first, gap, kept,
    ADJACENT: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Write lanes to ``line`` (lanes,) = slot x heads + head of the pages. With scales as e4m3, see ``kv.codec``."""
    pointer = page_ptr + line * (GROUPS * PAIRS * 2)
    if scale_ptr is None:
        dtype: tl.constexpr = page_ptr.dtype.element_ty
        _store_pairs(pointer, first, gap, one.to(dtype), two.to(dtype), kept, ADJACENT, GROUPS, PAIRS)
    else:
        largest = tl.max(tl.max(tl.maximum(tl.abs(one), tl.abs(two)).to(tl.float32), 2), 1)
        scale = tl.div_rn(tl.maximum(largest, TINY), E4M3_MAX)
        one = to_e4m3(tl.div_rn(one.to(tl.float32), tl.broadcast_to(scale[:, None, None], one.shape)))
        two = to_e4m3(tl.div_rn(two.to(tl.float32), tl.broadcast_to(scale[:, None, None], two.shape)))
        _store_pairs(pointer, first, gap, one, two, kept, ADJACENT, GROUPS, PAIRS)
        tl.store(scale_ptr + line, scale, mask=kept)


@triton.jit
def kv_pack_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, weight_ptr, rotary_ptr, slots_ptr, page_k_ptr, page_v_ptr, k_scale_ptr, v_scale_ptr,
    num_rows, num_slots, row_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ADJACENT: tl.constexpr, KEEP: tl.constexpr,
    LANES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program i: lanes [i x LANES, (i + 1) x LANES) of rows x heads; the heads of v only where rows are kept."""
    GROUPS: tl.constexpr = 1 if ADJACENT else 2
    PAIRS: tl.constexpr = HEAD_DIM // 2 // GROUPS
    HEADS_READ: tl.constexpr = HEADS + KV_HEADS * (2 if KEEP else 1)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    row, head = (lane // HEADS_READ).to(tl.int64), lane % HEADS_READ
    used = row < num_rows
    is_v = head >= HEADS + KV_HEADS
    first, gap = _channels(ADJACENT, GROUPS, PAIRS)
    weight = weight_ptr + tl.where(head < HEADS, 0, HEAD_DIM)
    weight_one, weight_two = _load_pairs(weight, first, gap, used, ADJACENT, GROUPS, PAIRS)
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)

    slot = tl.full([LANES], -1, tl.int64)
    if KEEP:
        slot = tl.load(slots_ptr + row, mask=used & (row < num_slots), other=-1).to(tl.int64)
    pointer = qkv_ptr + row * row_stride + head * HEAD_DIM
    one, two = _load_pairs(pointer, first, gap, used & (~is_v | (slot >= 0)), ADJACENT, GROUPS, PAIRS)
    cos, sin = _load_pairs(rotary_ptr + row * HEAD_DIM, first, gap, used, True, GROUPS, PAIRS)

    dtype: tl.constexpr = one.dtype
    x, y = one.to(tl.float32), two.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x + y * y, 2) / (2 * PAIRS) + eps)[:, :, None]
    x = ((x * scale).to(dtype).to(tl.float32) * weight_one.to(tl.float32)).to(dtype).to(tl.float32)
    y = ((y * scale).to(dtype).to(tl.float32) * weight_two.to(tl.float32)).to(dtype).to(tl.float32)
    keep_as_is = is_v[:, None, None]
    one, two = (
        tl.where(keep_as_is, one, (x * cos - y * sin).to(dtype)),
        tl.where(keep_as_is, two, (y * cos + x * sin).to(dtype)),
    )
    _store_pairs(pointer, first, gap, one, two, used & ~is_v, ADJACENT, GROUPS, PAIRS)
    if KEEP:
        kept = used & (slot >= 0)
        k_line, v_line = slot * KV_HEADS + head - HEADS, slot * KV_HEADS + head - HEADS - KV_HEADS
        k_kept = kept & (head >= HEADS) & ~is_v
        _keep(page_k_ptr, k_scale_ptr, k_line, one, two, first, gap, k_kept, ADJACENT, GROUPS, PAIRS)
        _keep(page_v_ptr, v_scale_ptr, v_line, one, two, first, gap, kept & is_v, ADJACENT, GROUPS, PAIRS)


def kv_pack(qkv: Tensor, kv_heads: int, form: HeadForm, rotary: Tensor, kept: Kept | None) -> None:
    """Finish ``qkv`` (rows, heads + 2 x kv_heads, head_dim), whose rows may be apart, in place, and fill pages.

    ``rotary``: (rows, head_dim / 2) complex64. Rows of ``kept`` that are finished are in its pages afterwards.
    """
    num_rows, all_heads, head_dim = qkv.shape
    assert head_dim >= 16, head_dim
    assert head_dim & (head_dim - 1) == 0, f"head_dim {head_dim} is not a power of two"
    assert qkv.stride()[1:] == (head_dim, 1)
    assert rotary.shape == (num_rows, head_dim // 2)
    assert rotary.is_contiguous()
    stored = kept.stored if kept else None
    num_slots = min(len(kept.slots), num_rows) if kept else 0
    heads_read = all_heads if num_slots else all_heads - kv_heads
    if not num_rows:
        return
    with torch.cuda.device_of(qkv):
        kv_pack_kernel[(triton.cdiv(num_rows * heads_read, LANES),)](
            qkv, form.weight, torch.view_as_real(rotary), kept.slots if kept else None,
            *_pages(stored),
            num_rows, num_slots, qkv.stride(0), form.eps,
            HEADS=all_heads - 2 * kv_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, ADJACENT=form.adjacent,
            KEEP=num_slots > 0, LANES=LANES, num_warps=4, **chained(qkv),
        )  # fmt: skip


def _pages(stored: StoredKV | None) -> tuple[Any, ...]:
    """Planes and scales; e4m3 as bytes."""
    if stored is None:
        return None, None, None, None
    planes = [x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (stored.k, stored.v)]
    return *planes, stored.k_scale, stored.v_scale


def kv_pack_reference(qkv: Tensor, kv_heads: int, form: HeadForm, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The finished q, k and v in plain PyTorch, in the dtype of ``qkv``; nothing is written."""
    heads = qkv.shape[1] - 2 * kv_heads
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    q, k = (_finish(x, weight, form, rotary) for x, weight in zip((q, k), form.weight, strict=True))
    return q, k, v


def _finish(x: Tensor, weight: Tensor, form: HeadForm, rotary: Tensor) -> Tensor:
    groups = x.unflatten(-1, (1 if form.adjacent else 2, -1))
    normed = groups * torch.rsqrt(groups.float().pow(2).mean(-1, keepdim=True) + form.eps)
    x = normed.flatten(-2).to(weight.dtype) * weight
    first, second = _channel_pairs(x.shape[-1], form.adjacent)
    a, b, turn = x[..., first].float(), x[..., second].float(), rotary[:, None]
    out = torch.empty_like(x)
    out[..., first] = (a * turn.real - b * turn.imag).type_as(x)
    out[..., second] = (b * turn.real + a * turn.imag).type_as(x)
    return out


def _channel_pairs(head_dim: int, adjacent: bool) -> tuple[Tensor, Tensor]:
    """The first and the second channel of every pair that turns together."""
    channel = torch.arange(head_dim)
    if adjacent:
        return channel[::2], channel[1::2]
    parts = [part.chunk(2) for part in channel.split([head_dim // 2, head_dim // 4, head_dim // 4])]
    return torch.cat([first for first, _ in parts]), torch.cat([second for _, second in parts])
