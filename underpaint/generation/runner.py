"""The pass through the transformer: prefix rows and target rows of any number of requests, packed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from underpaint.attention import Prepare, RowGroup
from underpaint.kv.pool import PagePool, Run, View
from underpaint.layout import AttentionCall, Grid
from underpaint.models.painter import Condition, Painter, Target


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows of a prefix to prefill: from the end of ``prefix`` up to ``stop``; K and V go to ``run``."""

    condition: Condition
    prefix: View
    stop: int
    run: Run


@dataclass(frozen=True, eq=False)
class Place:
    """Where a target stands behind the prefix of one branch; the same at every step, so made once.

    ``rotary``: (tokens, head_dim / 2) complex64. ``calls`` and ``visible_stop``: see ``RowGroup``.
    """

    view: View
    rotary: Tensor
    calls: tuple[AttentionCall, ...]
    visible_stop: Tensor


@dataclass(frozen=True, eq=False)
class PlacedTarget:
    """One branch of one job in a pass."""

    place: Place
    target: Target


class Runner:
    """Owns nothing but counters; weights, pages and the choice of attention are given."""

    def __init__(self, painter: Painter[Any], pool: PagePool, prepare: Prepare, device: str) -> None:
        self.rows_prefilled = 0
        self.passes = 0
        self._painter = painter
        self._pool = pool
        self._prepare = prepare
        self._device = device

    def place(self, condition: Condition, view: View, grid: Grid) -> Place:
        """Where a target on ``grid`` stands behind a prefix, of which ``view`` must hold every row and no more."""
        assert view.num_rows == condition.layout.num_rows, "a prefix was handed over with rows missing or in excess"
        layout = condition.layout.with_image(grid)
        start, stop = view.num_rows, layout.num_rows
        visible_stop = layout.visible_stop()[start:].to(self._device)
        return Place(view, self._painter.rotary(layout, start, stop), layout.plan(start, stop), visible_stop)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], targets: Sequence[PlacedTarget]) -> list[Tensor]:
        """One pass. Afterwards the chunks' runs hold their keys and values; returns the velocity of each target."""
        rows, rotary, groups = [], [], []
        first = 0
        for chunk in chunks:
            start, layout = chunk.prefix.num_rows, chunk.condition.layout
            rows.append(self._painter.embed_prefix(chunk.condition, start, chunk.stop))
            rotary.append(self._painter.rotary(layout, start, chunk.stop))
            groups.append(RowGroup.of(layout, chunk.stop, first, chunk.prefix, self._device))
            first += chunk.stop - start
        num_prefix_rows = first
        for placed in targets:
            place, num_rows = placed.place, len(placed.target.state)
            rotary.append(place.rotary)
            groups.append(RowGroup(first, num_rows, place.view, place.calls, place.visible_stop))
            first += num_rows
        slots = self._pool.slots(chunk.run for chunk in chunks)
        attend_prepared = self._prepare(tuple(groups))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if num_prefix_rows:
                self._pool.write(layer, slots, k[:num_prefix_rows], v[:num_prefix_rows])
            return attend_prepared(q, k, v, layer)

        prefix_rows = torch.cat(rows) if rows else torch.empty(0, device=self._device)
        velocities = self._painter.run(prefix_rows, [p.target for p in targets], torch.cat(rotary), attend)
        self.rows_prefilled += num_prefix_rows
        self.passes += 1
        return velocities
