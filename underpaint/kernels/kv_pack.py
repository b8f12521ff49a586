"""From the product of a row with the q, k and v weights to what attention reads, in one pass.

Queries and keys are normalised, head by head, and turned by their rotary embedding, in place: a product (rows, heads +
2 x kv_heads, head_dim) holds the finished q, k and v afterwards, v untouched. Rows with a slot are also written to the
pages of the layer, as the codec says. Both models' forms, see ``HeadForm``. Values are rounded to the dtype of the
product exactly where the modules round them: after normalising, after the weight, after turning.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous
from underpaint.kernels.e4m3 import divide, row_scale, to_e4m3
from underpaint.kernels.head_form import HeadForm
from underpaint.kernels.kept import Kept
from underpaint.kernels.tiles import StoredKV

FEW_ROWS = 32
"""Up to here a row is divided by K/V heads: one program would keep one processor of many busy, and the others idle."""
MAX_WARPS = 8
"""Of Qwen-Image's 64 heads of q and k a thread holds 32 values then, and five programs fit a Hopper's processor."""


RUN = tl.constexpr(8)
"""Channels that a thread reads and writes side by side, as in ``norm_modulate``."""


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
def load_pairs(  # type: ignore[no-untyped-def]
    pointer, wanted, HEADS: tl.constexpr, ADJACENT: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """(heads, groups, pairs) first and second channels of the heads from ``pointer`` on, as many as a power of two.
    Adjacent channels are read as they lie and divided then, so that every read is wide."""
    head = tl.arange(0, triton.next_power_of_2(HEADS))
    pointer, inside = pointer + head * (GROUPS * PAIRS * 2), (head < HEADS) & wanted
    if ADJACENT:
        column = tl.max_contiguous(tl.arange(0, GROUPS * PAIRS * 2), RUN)
        both = tl.load(pointer[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        return tl.split(tl.reshape(both, [head.shape[0], GROUPS, PAIRS, 2]))
    first, gap = _channels(ADJACENT, GROUPS, PAIRS)
    pointer, inside = pointer[:, None, None] + first[None], inside[:, None, None]
    return tl.load(pointer, mask=inside, other=0.0), tl.load(pointer + gap[None], mask=inside, other=0.0)


@triton.jit
def store_pairs(  # type: ignore[no-untyped-def]
    pointer, one, two, wanted,
    HEADS: tl.constexpr, STRIDE: tl.constexpr, ADJACENT: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """What ``load_pairs`` gives, of heads that begin STRIDE values apart."""
    head = tl.arange(0, triton.next_power_of_2(HEADS))
    pointer, inside = pointer + head * STRIDE, (head < HEADS) & wanted
    if ADJACENT:
        column = tl.max_contiguous(tl.arange(0, GROUPS * PAIRS * 2), RUN)
        both = tl.reshape(tl.join(one, two), [head.shape[0], GROUPS * PAIRS * 2])
        tl.store(pointer[:, None] + column[None, :], both, mask=inside[:, None])
    else:
        first, gap = _channels(ADJACENT, GROUPS, PAIRS)
        pointer, inside = pointer[:, None, None] + first[None], inside[:, None, None]
        tl.store(pointer, one, mask=inside)
        tl.store(pointer + gap[None], two, mask=inside)


@triton.jit
def turn(one, two, weight_one, weight_two, cos, sin, eps):  # type: ignore[no-untyped-def]
    """``turned``, rounded too."""
    dtype: tl.constexpr = one.dtype
    one, two = turned(one, two, weight_one, weight_two, cos, sin, eps)
    return one.to(dtype), two.to(dtype)


@triton.jit
def turned(one, two, weight_one, weight_two, cos, sin, eps):  # type: ignore[no-untyped-def]
    """Heads (heads, groups, pairs) of one row, normalised by groups and turned, fp32. A product of two values of
    ``dtype`` is rounded to it at once."""
    dtype: tl.constexpr = one.dtype
    x, y = one.to(tl.float32), two.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x + y * y, 2) / (2 * one.shape[2]) + eps)[:, :, None]
    x = ((x * scale).to(dtype) * weight_one).to(dtype).to(tl.float32)
    y = ((y * scale).to(dtype) * weight_two).to(dtype).to(tl.float32)
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def _keep(  # type: ignore[no-untyped-def]
    page_ptr, scale_ptr, slot, one, two,
    HEADS: tl.constexpr, ADJACENT: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write the heads of a row to ``slot`` of the pages, if there is one. With scales as e4m3, see ``kv.codec``."""
    HEAD_DIM: tl.constexpr = GROUPS * PAIRS * 2
    pointer, kept = page_ptr + slot * (HEADS * HEAD_DIM), slot >= 0
    if scale_ptr is None:
        dtype: tl.constexpr = page_ptr.dtype.element_ty
        store_pairs(pointer, one.to(dtype), two.to(dtype), kept, HEADS, HEAD_DIM, ADJACENT, GROUPS, PAIRS)
    else:
        largest = tl.max(tl.max(tl.maximum(tl.abs(one), tl.abs(two)).to(tl.float32), 2), 1)
        scale = row_scale(largest)
        one = to_e4m3(divide(one.to(tl.float32), scale[:, None, None], NATIVE))
        two = to_e4m3(divide(two.to(tl.float32), scale[:, None, None], NATIVE))
        store_pairs(pointer, one, two, kept, HEADS, HEAD_DIM, ADJACENT, GROUPS, PAIRS)
        head = tl.arange(0, triton.next_power_of_2(HEADS))
        tl.store(scale_ptr + slot * HEADS + head, scale, mask=(head < HEADS) & kept)


@triton.jit
def kv_pack_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, weight_ptr, rotary_ptr, slots_ptr, page_k_ptr, page_v_ptr, k_scale_ptr, v_scale_ptr,
    num_slots, row_stride, eps,
    PARTS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ADJACENT: tl.constexpr,
    KEEP: tl.constexpr, NATIVE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, j): of row i, whose heads share what turns them, part j of PARTS: HEADS heads of q and KV_HEADS of k
    and v; v only where rows are kept. All is read before anything is written, so that all reads are under way
    together."""
    GROUPS: tl.constexpr = 1 if ADJACENT else 2
    PAIRS: tl.constexpr = HEAD_DIM // 2 // GROUPS
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) if PARTS > 1 else 0
    q_weight = load_pairs(weight_ptr, True, 1, ADJACENT, GROUPS, PAIRS)
    k_weight = load_pairs(weight_ptr + HEAD_DIM, True, 1, ADJACENT, GROUPS, PAIRS)
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)

    q_ptr = qkv_ptr + row * row_stride + part * (HEADS * HEAD_DIM)
    k_ptr = qkv_ptr + row * row_stride + (PARTS * HEADS + part * KV_HEADS) * HEAD_DIM
    v_ptr = k_ptr + PARTS * KV_HEADS * HEAD_DIM
    q_one, q_two = load_pairs(q_ptr, True, HEADS, ADJACENT, GROUPS, PAIRS)
    k_one, k_two = load_pairs(k_ptr, True, KV_HEADS, ADJACENT, GROUPS, PAIRS)
    cos, sin = load_pairs(rotary_ptr + row * HEAD_DIM, True, 1, True, GROUPS, PAIRS)
    if KEEP:
        v_one, v_two = load_pairs(v_ptr, row < num_slots, KV_HEADS, True, 1, HEAD_DIM // 2)
        slot = tl.load(slots_ptr + row, mask=row < num_slots, other=-1).to(tl.int64)
        slot = slot * PARTS + part  # a slot is a place for each part; that of nobody stays negative

    q_one, q_two = turn(q_one, q_two, q_weight[0], q_weight[1], cos, sin, eps)
    store_pairs(q_ptr, q_one, q_two, True, HEADS, HEAD_DIM, ADJACENT, GROUPS, PAIRS)
    k_one, k_two = turn(k_one, k_two, k_weight[0], k_weight[1], cos, sin, eps)
    store_pairs(k_ptr, k_one, k_two, True, KV_HEADS, HEAD_DIM, ADJACENT, GROUPS, PAIRS)
    if KEEP:
        _keep(page_k_ptr, k_scale_ptr, slot, k_one, k_two, KV_HEADS, ADJACENT, GROUPS, PAIRS, NATIVE)
        _keep(page_v_ptr, v_scale_ptr, slot, v_one, v_two, KV_HEADS, True, 1, HEAD_DIM // 2, NATIVE)


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
    if not num_rows:
        return
    parts = kv_heads if num_rows <= FEW_ROWS else 1
    heads, kv_heads = (all_heads - 2 * kv_heads) // parts, kv_heads // parts
    with torch.cuda.device_of(qkv):
        kv_pack_kernel[(num_rows, parts)](
            qkv, form.weight, torch.view_as_real(rotary), kept.slots if kept else None,
            *_pages(stored),
            num_slots, qkv.stride(0), form.eps,
            PARTS=parts, HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, ADJACENT=form.adjacent, KEEP=num_slots > 0,
            NATIVE=qkv.is_cuda, num_warps=choose_warps(kv_heads, head_dim), **chained(qkv),
        )  # fmt: skip


def choose_warps(kv_heads: int, head_dim: int) -> int:
    """A thread holds 8 values of the keys, and of the queries as many times that as they have heads; of many keys
    more."""
    return min(max(triton.next_power_of_2(kv_heads) * head_dim // 256, 1), MAX_WARPS)


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
