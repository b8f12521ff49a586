"""The oracle: dense attention in fp32 with the mask written out from ``visible_stop``. Slow, large, and obvious."""

import torch
from torch import Tensor

from underpaint.attention.batch import RowGroup


def reference(q: Tensor, k: Tensor, v: Tensor, groups: tuple[RowGroup, ...], layer: int) -> Tensor:
    """See ``Backend``. Builds a (rows, keys) mask a group: for tests and small inputs only."""
    out = torch.empty_like(q)
    for group in groups:
        prefix_k, prefix_v = group.prefix.read(layer)
        keys = torch.cat([prefix_k, k[group.rows]]).float()
        values = torch.cat([prefix_v, v[group.rows]]).float()
        shared = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(shared, dim=1), values.repeat_interleave(shared, dim=1)
        visible = torch.arange(len(keys), device=q.device) < group.visible_stop[:, None]
        scores = torch.einsum("qhd,khd->hqk", q[group.rows].float(), keys) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        out[group.rows] = torch.einsum("hqk,khd->qhd", weights, values).type_as(q)
    return out
