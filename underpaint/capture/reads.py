"""Short reads: rows of prefixes whose kernels would end sooner than the host can launch them.

As with steps, a graph is for a number of rows and of sequences, both rounded up, and all else is in buffers that do not
move: the embedded rows, their rotations, where their keys and values are kept, and how attention walks through what
they stand behind. Rows that round up are nobody's: they are kept nowhere, and what is computed for them is not read.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from underpaint.attention import RowGroup
from underpaint.capture.attention import GraphAttention, PassKey, Refillable
from underpaint.capture.choice import choose_means
from underpaint.capture.recorder import GraphCounts, Recorder, round_up
from underpaint.config import EngineConfig
from underpaint.kernels.tiles import OutOfRoom
from underpaint.kv.keeping import KeepingAttention
from underpaint.kv.pool import PagePool, View
from underpaint.layout import Layout

MAX_READ_ROWS, MAX_SEQUENCES = 1024, 16
"""Of a read that has a graph: the kernels of more rows take longer than their launches."""
READS_AN_OCTAVE, SMALLEST_READ = 2, 64
"""Short reads wait for the weights, whatever their rows: few sizes do."""
MAX_GRAPHS = 32

Read = Callable[[Tensor, Tensor, KeepingAttention], Tensor | None]
"""Rows (rows, channels), their rotations (rows, head_dim / 2) complex64, ``attend`` -> (rows, channels), or None where
nobody wants more than that keys and values are kept."""


def make_reads(read: Read, pool: PagePool, capturable: bool, prepare: Any, config: EngineConfig) -> "ReadGraphs | None":
    """As ``config.read_graphs`` says, see ``choose_means``. Raises BadConfig."""
    means = choose_means("read_graphs", config.read_graphs, capturable, prepare, config)
    return ReadGraphs(read, pool, means.attention, means.record) if means else None


@dataclass(frozen=True, eq=False)
class ReadBuffers:
    """``slots``: (rows,) int32, -1 for nobody's."""

    rows: Tensor
    rotary: Tensor
    slots: Tensor


@dataclass(frozen=True, eq=False)
class ReadGraph:
    attention: Refillable
    replay: Callable[[], None]


class ReadGraphs:
    """Owns graphs and buffers. The least recently used graph goes when there are too many.

    Not for several threads at once, and the result of a read is the caller's own.
    """

    def __init__(self, read: Read, pool: PagePool, attention: GraphAttention, record: Recorder) -> None:
        self.counts = GraphCounts()
        self._read = read
        self._pool = pool
        self._attention = attention
        self._record = record
        self._graphs: OrderedDict[PassKey, ReadGraph] = OrderedDict()
        self._buffers: ReadBuffers | None = None
        self._out: Tensor | None = None  # (MAX_READ_ROWS or 0, channels), where all graphs put what ``read`` returns

    @property
    def keys(self) -> tuple[PassKey, ...]:
        """Of all graphs, the least recently used first."""
        return tuple(self._graphs)

    @torch.inference_mode()
    def run(self, rows: Tensor, rotary: Tensor, slots: Tensor, groups: Sequence[RowGroup]) -> Tensor | None:
        """Read ``rows`` (rows, channels), which ``groups`` cover, and keep them in ``slots`` (rows,): what ``read``
        returns for them, or no rows. None if no graph can serve them: then nothing was done."""
        num_rows, of_pass = len(rows), tuple(groups)
        try:
            key = self._key(num_rows, of_pass)
            graph = self._graphs.get(key)
            if graph is not None:
                graph.attention.refill(of_pass)
        except OutOfRoom:
            self.counts.eager += 1
            return None
        self._fill(rows, rotary, slots, key.num_rows)
        if graph is None:
            self.counts.misses += 1
            graph = self._capture(key, of_pass)
        else:
            self.counts.hits += 1
        self._graphs.move_to_end(key)
        graph.replay()
        assert self._out is not None
        return self._out[:num_rows].clone()

    def warm_up(self, num_channels: int, dtype: torch.dtype, num_sequences: Sequence[int]) -> None:
        """Capture the graphs of every size, for reads behind little, before somebody waits for them. ``num_channels``
        and ``dtype``: of rows."""
        sizes = dict.fromkeys(round_up(n, READS_AN_OCTAVE, SMALLEST_READ) for n in range(1, MAX_READ_ROWS + 1))
        device, nothing = str(self._pool.device), View(self._pool, ())
        rotary = torch.ones(MAX_READ_ROWS, self._pool.shape.head_dim // 2, dtype=torch.complex64, device=device)
        rows = torch.zeros(MAX_READ_ROWS, num_channels, dtype=dtype, device=device)
        nowhere = torch.full((MAX_READ_ROWS,), -1, device=device)
        for size in sizes:
            for count in num_sequences:
                share = size // count
                texts = [Layout.of([share if i else size - share * (count - 1)]) for i in range(count)]
                groups, first = list[RowGroup](), 0
                for text in texts:
                    groups.append(RowGroup.of(text, text.num_rows, first, nothing, device))
                    first += text.num_rows
                self.run(rows[:size], rotary[:size], nowhere[:size], groups)

    def _key(self, num_rows: int, groups: tuple[RowGroup, ...]) -> PassKey:
        """Raises OutOfRoom."""
        if num_rows > MAX_READ_ROWS or len(groups) > MAX_SEQUENCES:
            raise OutOfRoom(f"{num_rows} rows of {len(groups)} sequences are more than a graph of a read serves")
        units = self._attention.prefix_units(groups)
        rows = round_up(num_rows, READS_AN_OCTAVE, SMALLEST_READ)
        return PassKey(rows, 1 << (len(groups) - 1).bit_length(), units)

    def _fill(self, rows: Tensor, rotary: Tensor, slots: Tensor, stop: int) -> None:
        if self._buffers is None:
            self._buffers = ReadBuffers(
                rows.new_zeros(MAX_READ_ROWS, rows.shape[1]),
                rotary.new_ones(MAX_READ_ROWS, rotary.shape[1]),
                torch.full((MAX_READ_ROWS,), -1, dtype=torch.int32, device=rows.device),
            )
        buffers, num_rows = self._buffers, len(rows)
        buffers.rows[:num_rows].copy_(rows)
        buffers.rotary[:num_rows].copy_(rotary)
        buffers.slots[:num_rows].copy_(slots)
        buffers.slots[num_rows:stop].fill_(-1)

    def _capture(self, key: PassKey, groups: tuple[RowGroup, ...]) -> ReadGraph:
        assert self._buffers is not None
        buffers, stop = self._buffers, key.num_rows
        rows, rotary, slots = buffers.rows[:stop], buffers.rotary[:stop], buffers.slots[:stop]
        attention = self._attention.prepare(groups, key)
        attend = KeepingAttention(self._pool, slots, attention, some=True)
        graph = ReadGraph(attention, self._record(partial(self._body, rows, rotary, attend)))
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
            self.counts.evictions += 1
        return graph

    def _body(self, rows: Tensor, rotary: Tensor, attend: KeepingAttention) -> None:
        out = self._read(rows, rotary, attend)
        if self._out is None:  # never within a capture: recording begins with a plain pass
            self._out = rows.new_empty(0 if out is None else MAX_READ_ROWS, rows.shape[1])
        if out is not None:
            self._out[: len(out)].copy_(out)
