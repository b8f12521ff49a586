"""A plan, walked in plain PyTorch: reads the tables of a plan and nothing else, as the kernels do, and quickly enough
for hundreds of passes on a CPU. In the place of a kernel's module in ``PlannedPass``."""

import torch
from torch import Tensor

from underpaint.kernels.hybrid_attention_triton import plan_pass
from underpaint.kernels.packed_tiles import PackedTiles, Stored
from underpaint.kernels.tiles import Launch, Plan, StoredKV, WorkFields

__all__ = ["hybrid_attention", "plan_pass"]


def hybrid_attention(q: Tensor, k: Tensor, v: Tensor, stored: Stored | None, plan: Plan) -> Tensor:
    """See ``hybrid_attention_triton``. Rows that no work item has are NaN."""
    assert not isinstance(stored, PackedTiles)
    assert stored is None or stored.k_scale is None is stored.v_scale, "codecs are the kernels' business"
    out = torch.full_like(q, torch.nan)
    assert len(plan.row_stop) == len(q), "the plan is for another number of rows"
    for launch in plan.launches:
        pieces: dict[int, tuple[Tensor, Tensor]] = {}
        num_items = int(launch.queue[0])
        assert (launch.work[num_items:] == -1).all()
        for item in launch.work[:num_items].tolist():
            work = WorkFields(*item)
            result = _attend(q, k, v, stored, plan.row_stop, launch, work)
            if work.piece < 0:
                out[work.first_row : work.first_row + work.num_rows] = result[0]
            else:
                pieces[int(work.piece)] = result
        for first, num_rows, start, stop in launch.merges.tolist():
            if num_rows > 0:
                parts, lse = (torch.stack(x) for x in zip(*(pieces[i] for i in range(start, stop)), strict=True))
                out[first : first + num_rows] = (parts * lse.softmax(dim=0)[..., None]).sum(dim=0)
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, stored: StoredKV | None, row_stop: Tensor, launch: Launch, work: WorkFields
) -> tuple[Tensor, Tensor]:
    """Rows of one work item, (rows, heads, head_dim), and the log-sum-exp of each, (rows, heads)."""
    tiles = launch.prefix_tiles[[*range(work.full_start, work.full_stop), *range(work.part_start, work.part_stop)]]
    slots = torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s, s + n) for s, n in tiles.tolist())])
    masked = torch.arange(int(work.masked_start), min(int(work.masked_stop), int(work.own_end)))
    own = torch.cat([torch.arange(int(work.own_start), int(work.own_stop)), masked])
    planes = (
        (k[own], v[own])
        if stored is None
        else (torch.cat([stored.k[slots], k[own]]), torch.cat([stored.v[slots], v[own]]))
    )
    keys, values = (x.to(q.dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in planes)
    rows = slice(int(work.first_row), int(work.first_row + work.num_rows))
    scores = torch.einsum("qhd,khd->qhk", q[rows], keys) * q.shape[-1] ** -0.5
    hidden = masked >= row_stop[rows, None]
    scores[..., len(keys) - len(masked) :].masked_fill_(hidden[:, None], -torch.inf)
    lse = scores.logsumexp(dim=-1)
    return torch.einsum("qhk,khd->qhd", (scores - lse[..., None]).exp().nan_to_num(0), values), lse
