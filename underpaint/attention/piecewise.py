"""PyTorch's fused attention, one call a segment: runs everywhere, and never builds a rows x keys mask.

An image segment sees one contiguous range of keys, so it needs no mask at all. Text is causal and aligned to the
right end of its keys, which the fused kernels express only as a mask, so text goes in short blocks: a mask has
``TEXT_BLOCK`` rows however long the sequence is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from underpaint.attention.batch import Prefix, RowGroup

TEXT_BLOCK = 128


def piecewise(q: Tensor, k: Tensor, v: Tensor, groups: tuple[RowGroup, ...], layer: int) -> Tensor:
    """See ``Backend``. A prefix that several groups share is read from its pages once."""
    out = torch.empty_like(q)
    prefixes: dict[Prefix, tuple[Tensor, Tensor]] = {}
    for group in groups:
        if group.prefix not in prefixes:
            prefixes[group.prefix] = group.prefix.read(layer)
        prefix_k, prefix_v = prefixes[group.prefix]
        keys = torch.cat([prefix_k, k[group.rows]])
        values = torch.cat([prefix_v, v[group.rows]])
        _attend_group(q[group.rows], keys, values, group, out[group.rows])
    return out


def _attend_group(q: Tensor, keys: Tensor, values: Tensor, group: RowGroup, out: Tensor) -> None:
    base = group.prefix.num_rows
    for call in group.calls:
        if not call.causal:
            rows = slice(call.start - base, call.stop - base)
            out[rows] = _sdpa(q[rows], keys[: call.stop], values[: call.stop], None)
            continue
        for start in range(call.start, call.stop, TEXT_BLOCK):
            stop = min(start + TEXT_BLOCK, call.stop)
            rows = slice(start - base, stop - base)
            mask = torch.arange(stop, device=q.device) < group.visible_stop[rows, None]
            out[rows] = _sdpa(q[rows], keys[:stop], values[:stop], mask)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)[0].transpose(0, 1)
