"""Targets on their places: what stays the same of a picture from step to step, and how places are packed for a pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from underpaint.attention import RowGroup
from underpaint.kv.pool import View
from underpaint.layout import AttentionCall, Grid, Layout
from underpaint.models.painter import Painter, Target, Targets, cell_places


@dataclass(frozen=True, eq=False)
class Place:
    """Where a target stands behind the prefix of one branch; the same at every step, so made once.

    ``rotary``: (tokens, head_dim / 2) complex64. ``cells`` and ``grid_level``: see ``Targets``. ``calls`` and
    ``visible_stop``: see ``RowGroup``.
    """

    view: View
    grid: Grid
    rotary: Tensor
    cells: Tensor
    grid_level: float
    calls: tuple[AttentionCall, ...]
    visible_stop: Tensor

    @classmethod
    def of(cls, painter: Painter[Any], prefix: Layout, view: View, grid: Grid, device: str) -> "Place":
        """Behind a prefix, of which ``view`` must hold every row and no more."""
        assert view.num_rows == prefix.num_rows, "a prefix was handed over with rows missing or in excess"
        layout = prefix.with_image(grid)
        start, stop = view.num_rows, layout.num_rows
        return cls(
            view,
            grid,
            painter.rotary(layout, start, stop),
            cell_places(grid).to(device),
            painter.grid_level(grid),
            layout.plan(start, stop),
            layout.visible_stop()[start:].to(device),
        )

    @property
    def num_rows(self) -> int:
        return len(self.cells)


@dataclass(frozen=True, eq=False)
class PlacedTarget:
    """One branch of one job in a pass."""

    place: Place
    target: Target


def groups_of(places: Sequence[Place], first: int = 0) -> tuple[RowGroup, ...]:
    """The rows of the places, one after another, from row ``first`` of a pass on."""
    groups = []
    for place in places:
        groups.append(RowGroup(first, place.num_rows, place.view, place.calls, place.visible_stop))
        first += place.num_rows
    return tuple(groups)


def pack(targets: Sequence[PlacedTarget], device: str) -> Targets:
    """The targets of a pass. Nothing here waits for the device."""
    places = [placed.place for placed in targets]
    return Targets.of(
        [placed.target for placed in targets],
        [place.cells for place in places],
        [place.grid_level for place in places],
        device,
    )
