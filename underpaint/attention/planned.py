"""The kernels behind ``attend`` that plan: one launch a layer for any mix of rows, prefixes read in place."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from underpaint.attention.batch import RowGroup
from underpaint.kernels.packed_tiles import Stored
from underpaint.kernels.tiles import Group, Ints, OutOfRoom, Plan, Room, RowShape


class Kernel(Protocol):
    """A module that plans a pass and runs it: ``hybrid_attention_triton``, ``_gluon`` or ``_fp8``."""

    def plan_pass(
        self, groups: Sequence[Group], row_stop: Ints, row_shape: RowShape, *, room: Room | None = None
    ) -> Plan: ...

    def hybrid_attention(self, q: Tensor, k: Tensor, v: Tensor, stored: Stored | None, plan: Plan) -> Tensor: ...


class PlannedPass:
    """Attention of one pass, layer by layer; an ``AttendPass``. All prefixes lie in one pool.

    What the groups say is worked out here. The tiles also depend on heads and dtype, which the first layer brings;
    its plan then serves all layers.

    With ``room`` the pass has as many rows as that, whatever rows the groups have, and a CUDA graph that was captured
    with it serves any groups that fit: see ``refill``.
    """

    def __init__(self, kernel: Kernel, groups: tuple[RowGroup, ...], room: Room | None = None) -> None:
        self._kernel = kernel
        self._groups = groups
        self._room = room
        self._prefix = next((g.prefix for g in groups if g.prefix.num_rows or room), None)
        self._planned: tuple[RowShape, Plan] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """See ``Backend``."""
        return self._kernel.hybrid_attention(q, k, v, *self.of_layer(RowShape.of(q, k), layer))

    def of_layer(self, row_shape: RowShape, layer: int) -> tuple[Stored | None, Plan]:
        """Where the prefixes lie in this layer, and the plan of the pass."""
        if self._planned is None:
            self._planned = row_shape, self._plan(row_shape)
        planned_for, plan = self._planned
        assert planned_for == row_shape, "all layers of a pass have the same heads, dtype and device"
        return self._prefix.stored(layer) if self._prefix else None, plan

    def refill(self, groups: tuple[RowGroup, ...]) -> None:
        """From the next layer or replay on, attend to these groups, with prefixes in the same pool. Raises OutOfRoom,
        and then still attends to those before."""
        assert self._room is not None, "this pass was made without room"
        before, self._groups = self._groups, groups
        if self._planned is None:
            return
        row_shape, plan = self._planned
        try:
            self._plan(row_shape).copy_into(plan)
        except OutOfRoom:
            self._groups = before
            raise

    def _plan(self, row_shape: RowShape) -> Plan:
        groups = [Group(g.first, g.num_rows, g.prefix.extents) for g in self._groups]
        return self._kernel.plan_pass(groups, _row_stop(self._groups), row_shape, room=self._room)


def _row_stop(groups: tuple[RowGroup, ...]) -> Ints:
    """(rows,) on the host: what ``visible_stop`` says, in rows of the pass.

    Taken from the calls, which say the same, because ``visible_stop`` is on the device and reading it would wait.
    """
    out = np.zeros(max(group.first + group.num_rows for group in groups), np.int32)
    for group in groups:
        moved = group.first - group.prefix.num_rows
        for call in group.calls:
            out[call.start + moved : call.stop + moved] = call.visible_stop() + moved
    return out
