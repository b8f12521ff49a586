"""The portable kernel behind ``attend``: NVIDIA GPUs from compute capability 8.0 on."""

from torch import Tensor

from underpaint.attention.batch import RowGroup
from underpaint.attention.planned import PlannedPass
from underpaint.kernels import hybrid_attention_triton
from underpaint.kernels.tiles import Room


def prepare(groups: tuple[RowGroup, ...], room: Room | None = None) -> PlannedPass:
    """See ``Prepare`` and ``PlannedPass``."""
    return PlannedPass(hybrid_attention_triton, groups, room)


def triton(q: Tensor, k: Tensor, v: Tensor, groups: tuple[RowGroup, ...], layer: int) -> Tensor:
    """See ``Backend``. Plans for this one call; for all layers of a pass use ``prepare``."""
    return prepare(groups)(q, k, v, layer)
