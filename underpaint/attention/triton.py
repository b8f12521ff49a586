"""The portable kernel behind ``attend``: one launch a layer for any mix of rows, prefixes read from pages in place."""

from torch import Tensor

from underpaint.attention.batch import RowGroup
from underpaint.kernels.hybrid_attention_triton import hybrid_attention, plan_pass
from underpaint.kernels.tiles import Group, Ints, Plan, row_stops


def triton(q: Tensor, k: Tensor, v: Tensor, groups: tuple[RowGroup, ...], layer: int) -> Tensor:
    """See ``Backend``. Plans for this one call; for all layers of a pass use ``prepare``."""
    return prepare(groups)(q, k, v, layer)


def prepare(groups: tuple[RowGroup, ...]) -> "PreparedPass":
    """See ``Prepare``."""
    return PreparedPass(groups)


class PreparedPass:
    """Attention of one pass, layer by layer. All prefixes lie in one pool.

    What the groups say is worked out here. The tiles also depend on heads and dtype, which the first layer brings;
    its plan then serves all layers.
    """

    def __init__(self, groups: tuple[RowGroup, ...]) -> None:
        self._groups = tuple(Group(g.first, g.num_rows, g.prefix.extents) for g in groups)
        self._prefix = next((g.prefix for g in groups if g.prefix.num_rows), None)
        self._row_stop = _row_stop(groups)
        self._plan: Plan | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """See ``Backend``."""
        stored = self._prefix.stored(layer) if self._prefix else None
        if self._plan is None:
            self._plan = plan_pass(self._groups, self._row_stop, q, k.shape[1])
        return hybrid_attention(q, k, v, stored, self._plan)


def _row_stop(groups: tuple[RowGroup, ...]) -> Ints:
    """(rows,) on the host: what ``visible_stop`` says, in rows of the pass.

    Taken from the calls, which say the same, because ``visible_stop`` is on the device and reading it would wait.
    """
    moved = [(call, group.first - group.prefix.num_rows) for group in groups for call in group.calls]
    return row_stops(
        [call.start + by for call, by in moved],
        [call.stop + by for call, by in moved],
        [call.causal for call, _ in moved],
        num_rows=max(group.first + group.num_rows for group in groups),
    )
