"""The pass through the transformer: prefix rows and target rows of any number of requests, packed."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from underpaint.attention import Prepare, RowGroup
from underpaint.capture.reads import ReadGraphs
from underpaint.capture.recorder import GraphCounts
from underpaint.generation.arrangement import Place, PlacedTarget, groups_of, pack
from underpaint.generation.graphs import StepGraphs
from underpaint.kv.keeping import KeepingAttention
from underpaint.kv.pool import PagePool, Run, View
from underpaint.layout import Grid, Layout
from underpaint.models.painter import Condition, Painter, Target

PASSES_AHEAD = 1
"""How many passes may be unfinished when the host turns to the next: one, so that the GPU has work while the host
prepares more, and a request that is cancelled costs little."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows of a prefix to prefill: from the end of ``prefix`` up to ``stop``; K and V go to ``run``."""

    condition: Condition
    prefix: View
    stop: int
    run: Run


class Runner:
    """Owns nothing but counters; weights, pages, the choice of attention and graphs are given."""

    def __init__(
        self,
        painter: Painter[Any],
        pool: PagePool,
        prepare: Prepare,
        device: str,
        graphs: StepGraphs | None = None,
        reads: ReadGraphs | None = None,
    ) -> None:
        """``graphs``: for passes over targets alone, ``reads`` over prefixes alone; None: they run as they are."""
        self.rows_prefilled = 0
        self.passes = 0
        self._painter = painter
        self._pool = pool
        self._prepare = prepare
        self._device = device
        self._graphs = graphs
        self._reads = reads
        self._pace = Pace(device)

    @property
    def graphs(self) -> GraphCounts:
        """How passes over targets ran; all zero without graphs."""
        return self._graphs.counts if self._graphs else GraphCounts()

    @property
    def reads(self) -> GraphCounts:
        """How passes over prefixes alone ran; all zero without graphs for them."""
        return self._reads.counts if self._reads else GraphCounts()

    def place(self, condition: Condition, view: View, grid: Grid) -> Place:
        """Where a target on ``grid`` stands behind a prefix, of which ``view`` must hold every row and no more."""
        return Place.of(self._painter, condition.layout, view, grid, self._device)

    def warm_up(self, grids: Sequence[Grid], num_branches: Sequence[int]) -> None:
        """Run a step of a target on each grid, with each number of branches, behind nothing: kernels are compiled, and
        graphs captured, before somebody waits for them. Raises what a step may raise."""
        nothing = View(self._pool, ())
        for grid in grids:
            state = torch.zeros(grid[0] * grid[1], self._painter.num_channels, dtype=self._pool.shape.dtype)
            target = Target(state.to(self._device), grid, torch.tensor(0.5))
            for count in num_branches:
                places = [Place.of(self._painter, Layout(()), nothing, grid, self._device) for _ in range(count)]
                self.run((), [PlacedTarget(place, target) for place in places])
        if self._reads:
            self._reads.warm_up(self._painter.num_hidden, self._pool.shape.dtype, num_branches)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], targets: Sequence[PlacedTarget]) -> list[Tensor]:
        """One pass. Afterwards the chunks' runs hold their keys and values; returns the velocity of each target."""
        velocities = None
        if self._graphs and targets:
            if chunks:
                self._graphs.counts.eager += 1
            else:
                velocities = self._graphs.run(targets)
        if velocities is None:
            velocities = self._run(chunks, targets)
        self.passes += 1
        self._pace.wait()
        return velocities

    def _run(self, chunks: Sequence[Chunk], targets: Sequence[PlacedTarget]) -> list[Tensor]:
        rows, rotary, groups = [], [], []
        first = 0
        for chunk in chunks:
            start, layout = chunk.prefix.num_rows, chunk.condition.layout
            rows.append(self._painter.embed_prefix(chunk.condition, start, chunk.stop))
            rotary.append(self._painter.rotary(layout, start, chunk.stop))
            groups.append(RowGroup.of(layout, chunk.stop, first, chunk.prefix, self._device))
            first += chunk.stop - start
        places = [placed.place for placed in targets]
        groups += groups_of(places, first)
        slots = self._pool.slots(chunk.run for chunk in chunks)
        prefix_rows = torch.cat(rows) if rows else torch.empty(0, device=self._device)
        packed_rotary = torch.cat([*rotary, *(place.rotary for place in places)])
        self.rows_prefilled += sum(map(len, rows))
        if not targets and self._reads and self._reads.run(prefix_rows, packed_rotary, slots, groups) is not None:
            return []
        attend = KeepingAttention(self._pool, slots, self._prepare(tuple(groups)))
        if not targets:
            self._painter.prefill(prefix_rows, packed_rotary, attend)
            return []
        packed = pack(targets, self._device)
        hidden = self._painter.paint(prefix_rows, packed, packed_rotary, attend)
        return list(self._painter.predict(hidden, packed).split(packed.sizes))


class Pace:
    """Lets the host run ahead of a GPU, but not far."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._queued: deque[torch.cuda.Event] = deque()

    def wait(self) -> None:
        """After a pass was queued: until at most ``PASSES_AHEAD`` are unfinished."""
        if self._device.type != "cuda":
            return
        self._queued.append(torch.cuda.current_stream(self._device).record_event())
        if len(self._queued) > PASSES_AHEAD:
            self._queued.popleft().synchronize()
