"""The Hopper kernel in e4m3 behind ``attend``, for who names it: compute capability 9.0, bfloat16, head_dim 64 or 128.

Rows of every pass, also those that are kept as a prefix, attend to keys and values in e4m3. Only groups of few rows,
which wait for memory, attend in 16 bits, in passes that are planned without room.
"""

from torch import Tensor

from underpaint.attention.batch import RowGroup
from underpaint.attention.planned import PlannedPass
from underpaint.kernels import hybrid_attention_fp8
from underpaint.kernels.tiles import Room


def prepare(groups: tuple[RowGroup, ...], room: Room | None = None) -> PlannedPass:
    """See ``Prepare`` and ``PlannedPass``."""
    return PlannedPass(hybrid_attention_fp8, groups, room)


def fp8(q: Tensor, k: Tensor, v: Tensor, groups: tuple[RowGroup, ...], layer: int) -> Tensor:
    """See ``Backend``. Plans for this one call; for all layers of a pass use ``prepare``."""
    return prepare(groups)(q, k, v, layer)
