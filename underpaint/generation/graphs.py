"""Steps that are captured once and replayed: on a GPU as CUDA graphs, so that no time passes between kernels.

A graph is for a number of rows and of targets, both rounded up. Whatever else a step depends on is in buffers that do
not move: the states, noise levels and positions of the targets, and how attention walks through their prefixes. So one
graph serves requests of any prompt, references and lengths, and any mix of them. Rows and targets that round up are
nobody's, and what is computed for them is not read.

All graphs read the same buffers, and a buffer is filled before each replay or known to hold what is needed. Nothing
that a request keeps lies in them: velocities are copied out. On a CPU the same steps run on the same buffers, without a
graph.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from underpaint.attention import RowGroup
from underpaint.capture.attention import GraphAttention, PassKey, Refillable
from underpaint.capture.choice import choose_means
from underpaint.capture.recorder import GraphCounts, Recorder, round_up
from underpaint.config import EngineConfig
from underpaint.generation.arrangement import Place, PlacedTarget, groups_of
from underpaint.kernels.tiles import OutOfRoom
from underpaint.kv.keeping import KeepingAttention
from underpaint.kv.pool import PagePool
from underpaint.models.painter import Painter, Targets, pack_levels, target_numbers

MAX_GRAPHS = 48
MAX_TARGETS = 64
STEPS_AN_OCTAVE = 8
"""Row counts are rounded up to one of so many between a power of two and the next: at most 1/8 is computed for nobody,
and sizes whose rows are powers of two, such as 512, 1024 and 2048 squared, are exact."""
SMALLEST_STEP = 16


@dataclass(frozen=True, eq=False)
class StepBuffers:
    """What graphs read, for the largest of them; see ``Targets``. ``rotary``: (rows, head_dim / 2) complex64."""

    state: Tensor
    target: Tensor
    cells: Tensor
    levels: Tensor
    rotary: Tensor

    @classmethod
    def of(cls, example: PlacedTarget, max_rows: int) -> "StepBuffers":
        """Buffers for targets like ``example``."""
        state, place = example.target.state, example.place
        return cls(
            state.new_zeros(max_rows, state.shape[1]),
            place.cells.new_zeros(max_rows),
            place.cells.new_zeros(max_rows, 2),
            torch.zeros(MAX_TARGETS, 2, device=state.device),
            place.rotary.new_ones(max_rows, place.rotary.shape[1]),
        )

    def targets(self, num_rows: int, num_targets: int) -> Targets:
        return Targets(
            self.state[:num_rows], self.target[:num_rows], self.cells[:num_rows], self.levels[:num_targets], ()
        )

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.state, self.target, self.cells, self.levels, self.rotary))


class Held:
    """Which places a buffer was last filled for. Does not keep them alive."""

    def __init__(self) -> None:
        self._places: tuple[weakref.ref[Place], ...] = ()

    def holds(self, places: Sequence[Place]) -> bool:
        return len(places) == len(self._places) and all(
            place is held() for place, held in zip(places, self._places, strict=True)
        )

    def clear(self) -> None:
        self._places = ()

    def set(self, places: Sequence[Place]) -> None:
        self._places = tuple(map(weakref.ref, places))


@dataclass(frozen=True, eq=False)
class StepGraph:
    """``held``: the places that its attention was turned to last."""

    attention: Refillable
    held: Held
    replay: Callable[[], None]


def make_graphs(painter: Painter[Any], pool: PagePool, prepare: Any, config: EngineConfig) -> "StepGraphs | None":
    """As ``config.step_graphs`` says, see ``capture.choice``. Raises BadConfig."""
    means = choose_means("step_graphs", config.step_graphs, painter.capturable, prepare, config)
    if means is None:
        return None
    return StepGraphs(painter, pool, means.attention, means.record, config.max_batch_rows)


class StepGraphs:
    """Owns graphs and buffers. The least recently used graph goes when there are too many.

    Not for several threads at once, and the result of a pass is the caller's own.
    """

    def __init__(
        self,
        painter: Painter[Any],
        pool: PagePool,
        attention: GraphAttention,
        record: Recorder,
        max_rows: int,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        """``max_rows``: rows of the largest pass that has a graph."""
        self.counts = GraphCounts()
        self._painter = painter
        self._pool = pool
        self._attention = attention
        self._record = record
        self._max_rows = round_up(max_rows, STEPS_AN_OCTAVE, SMALLEST_STEP)
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[PassKey, StepGraph] = OrderedDict()
        self._buffers: StepBuffers | None = None
        self._hidden: Tensor | None = None  # (max_rows, any), where all graphs put what ``Painter.paint`` returns
        self._held = Held()

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def keys(self) -> tuple[PassKey, ...]:
        """Of all graphs, the least recently used first."""
        return tuple(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Of the buffers; what lives within a step is in the pool of the recorder."""
        return (self._buffers.num_bytes if self._buffers else 0) + (0 if self._hidden is None else self._hidden.nbytes)

    @torch.inference_mode()
    def run(self, targets: Sequence[PlacedTarget]) -> list[Tensor] | None:
        """The velocity of each target, or None if no graph can serve them: then nothing was done."""
        places = [placed.place for placed in targets]
        groups = groups_of(places)
        try:
            key = self._key(places, groups)
            graph = self._graphs.get(key)
            if graph is not None:
                self._turn(graph, places, groups)
        except OutOfRoom:
            self.counts.eager += 1
            return None
        self._fill(targets, places)
        if graph is None:
            self.counts.misses += 1
            graph = self._capture(key, places, groups)
        else:
            self.counts.hits += 1
        self._graphs.move_to_end(key)
        graph.replay()
        return self._velocities(places)

    def _key(self, places: Sequence[Place], groups: tuple[RowGroup, ...]) -> PassKey:
        """Raises OutOfRoom."""
        num_rows, num_targets = sum(place.num_rows for place in places), len(places)
        if num_rows > self._max_rows or num_targets > MAX_TARGETS:
            raise OutOfRoom(f"{num_rows} rows of {num_targets} targets are more than a graph serves")
        units = self._attention.prefix_units(groups)
        return PassKey(round_up(num_rows, STEPS_AN_OCTAVE, SMALLEST_STEP), 1 << (num_targets - 1).bit_length(), units)

    def _turn(self, graph: StepGraph, places: Sequence[Place], groups: tuple[RowGroup, ...]) -> None:
        """Turn a graph's attention to the prefixes of these places."""
        if not graph.held.holds(places):
            graph.held.clear()
            graph.attention.refill(groups)
            graph.held.set(places)

    def _fill(self, targets: Sequence[PlacedTarget], places: Sequence[Place]) -> None:
        """Of what changes from step to step always, of the rest only if other places are in the buffers."""
        if self._buffers is None:
            self._buffers = StepBuffers.of(targets[0], self._max_rows)
        buffers, num_rows = self._buffers, sum(place.num_rows for place in places)
        torch.cat([placed.target.state for placed in targets], out=buffers.state[:num_rows])
        levels = pack_levels([placed.target for placed in targets], [place.grid_level for place in places])
        buffers.levels[: len(targets)].copy_(levels, non_blocking=True)
        if self._held.holds(places):
            return
        self._held.clear()
        torch.cat([place.rotary for place in places], out=buffers.rotary[:num_rows])
        torch.cat([place.cells for place in places], out=buffers.cells[:num_rows])
        # Rows behind belong to some target too, for they are computed like any other.
        buffers.target[num_rows:].zero_()
        buffers.target[:num_rows].copy_(target_numbers([place.grid for place in places]), non_blocking=True)
        self._held.set(places)

    def _capture(self, key: PassKey, places: Sequence[Place], groups: tuple[RowGroup, ...]) -> StepGraph:
        assert self._buffers is not None
        targets = self._buffers.targets(key.num_rows, key.num_groups)
        rotary, nobody = self._buffers.rotary[: key.num_rows], self._buffers.state[:0]
        attention = self._attention.prepare(groups, key)
        attend = KeepingAttention(self._pool, self._buffers.target[:0], attention)

        def body() -> None:
            out = self._painter.paint(nobody, targets, rotary, attend)
            if self._hidden is None:  # never within a capture: recording begins with a plain pass
                self._hidden = out.new_empty(self._max_rows, out.shape[1])
            self._hidden[: len(out)].copy_(out)

        graph = StepGraph(attention, Held(), self._record(body))
        graph.held.set(places)
        self._graphs[key] = graph
        if len(self._graphs) > self._max_graphs:
            self._graphs.popitem(last=False)
            self.counts.evictions += 1
        return graph

    def _velocities(self, places: Sequence[Place]) -> list[Tensor]:
        assert self._buffers is not None
        assert self._hidden is not None
        sizes = [place.num_rows for place in places]
        grids = tuple(place.grid for place in places)
        used, buffers = slice(0, sum(sizes)), self._buffers
        targets = Targets(
            buffers.state[used], buffers.target[used], buffers.cells[used], buffers.levels[: len(places)], grids
        )
        return list(self._painter.predict(self._hidden[used].clone(), targets).split(sizes))
