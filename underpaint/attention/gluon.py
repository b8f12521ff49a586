"""The Hopper kernel behind ``attend``: compute capability 9.0, bfloat16, head_dim 64 or 128."""

from torch import Tensor

from underpaint.attention.batch import RowGroup
from underpaint.attention.planned import PlannedPass
from underpaint.kernels import hybrid_attention_gluon
from underpaint.kernels.tiles import Room


def prepare(groups: tuple[RowGroup, ...], room: Room | None = None) -> PlannedPass:
    """See ``Prepare`` and ``PlannedPass``."""
    return PlannedPass(hybrid_attention_gluon, groups, room)


def gluon(q: Tensor, k: Tensor, v: Tensor, groups: tuple[RowGroup, ...], layer: int) -> Tensor:
    """See ``Backend``. Plans for this one call; for all layers of a pass use ``prepare``."""
    return prepare(groups)(q, k, v, layer)
