"""Rows of K and V between the pages of a pool and a slab, bit by bit as they are stored, scales included.

In a slab the runs of a prefix lie one after the other, exactly the rows that they have: layer by layer, and in a layer
K, V, and the scales of each where the codec has them, each (rows, ...) on a border of ``ALIGNMENT``. The slab fills
from its beginning, a few layers at a time, and a reader follows while it is being written: on two devices, copies down
and up go on at once.

On a GPU, rows are gathered into a buffer by one kernel, and the buffer is copied in one piece, on a stream of its own
beside compute. On a CPU they are copied once, between pages and shared memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from underpaint.handover.arena import STALL_SECONDS, Arena, ArenaReader, Slab
from underpaint.handover.faults import BadHandover
from underpaint.handover.pools import RemotePool, planes
from underpaint.kv.codec import ALIGNMENT
from underpaint.kv.pool import PagePool, Run

CHUNK_BYTES = 32 << 20
"""What is copied at a time. Smaller chunks lose time between copies, larger ones let the reader start later."""


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of one plane: ``plane`` (slots, ...), and where they lie in a slab."""

    plane: Tensor
    start: int

    @property
    def row_bytes(self) -> int:
        return self.plane[0].nbytes

    def of(self, data: Tensor, num_rows: int) -> Tensor:
        """These rows as (rows, ...) in ``data``, the bytes of the slab."""
        flat = data[self.start : self.start + num_rows * self.row_bytes].view(self.plane.dtype)
        return flat.view(num_rows, *self.plane.shape[1:])


@dataclass(frozen=True, eq=False)
class Chunk:
    """Bytes [start, stop) of a slab: whole layers."""

    start: int
    stop: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def slab_bytes(pool: PagePool, num_rows: int) -> int:
    """Bytes of a slab for so many rows of all layers."""
    return pool.shape.num_layers * sum(_section(plane, num_rows) for plane in planes(pool, 0))


def chunks(pool: PagePool, num_rows: int, chunk_bytes: int) -> Iterator[Chunk]:
    """A slab for ``num_rows`` rows, in pieces of about ``chunk_bytes`` but at least a layer. The first and the last are
    one layer: a reader has nothing to do while the first is written, nor a writer while the last is read."""
    start = stop = 0
    parts: list[Part] = []
    num_layers = pool.shape.num_layers
    for layer in range(num_layers):
        for plane in planes(pool, layer):
            parts.append(Part(plane, stop))
            stop += _section(plane, num_rows)
        if stop - start >= chunk_bytes or layer in (0, num_layers - 2, num_layers - 1):
            yield Chunk(start, stop, tuple(parts))
            start, parts = stop, []


def _section(plane: Tensor, num_rows: int) -> int:
    num_bytes = num_rows * plane[0].nbytes
    return num_bytes + -num_bytes % ALIGNMENT


class Mover:
    """Copies rows of one pool. One copy at a time; a thread that only moves pages does not hold up compute."""

    def __init__(self, pool: PagePool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._device = torch.device(pool.device)
        self._on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._on_gpu else None
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)

    def gather(self, runs: Sequence[Run], arena: Arena, slab: Slab) -> None:
        """Copy ``runs`` into a slab of ``slab_bytes``, and let readers follow.

        The pages must be in use by the caller until this returns. Raises StaleSlab if the lease ends meanwhile.
        """
        pieces = self._pieces(runs, slab)
        with arena.writing(slab) as data:
            if self._stream is not None:
                self._gather_on_gpu(self._stream, self._pool.slots(runs), pieces, arena, slab, data)
                return
            for chunk in pieces:
                for there, here in self._stretches(runs, chunk, data):
                    there.copy_(here)
                arena.advance(slab, chunk.stop)

    def scatter(
        self, reader: ArenaReader, slab: Slab, runs: Sequence[Run], stall_seconds: float = STALL_SECONDS
    ) -> None:
        """Copy a slab into the pages of ``runs``, as it is being written; all of it is there when this returns.

        Raises StaleSlab, PeerStalled, DamagedSlab, and BadHandover if the slab is not of these rows; the pages then
        hold nothing of use.
        """
        pieces = self._pieces(runs, slab)
        data = reader.bytes_of(slab)
        if self._stream is not None:
            self._scatter_on_gpu(self._stream, self._pool.slots(runs), pieces, reader, slab, stall_seconds)
        else:
            for chunk in pieces:
                reader.wait_written(slab, chunk.stop, stall_seconds)
                for there, here in self._stretches(runs, chunk, data):
                    here.copy_(there)
        reader.wait_written(slab, slab.num_bytes, stall_seconds)  # finds out, too, whether the lease lasted so long
        if reader.checked:
            reader.check_sum(slab)

    def fetch(self, remote: RemotePool, remote_runs: Sequence[Run], runs: Sequence[Run]) -> None:
        """Copy rows from a pool on another device, page to page; they are there when this returns. The other process
        must have finished writing them. GPUs only."""
        assert self._stream is not None, "page to page is for GPUs"
        theirs, ours = (pool.slots(r) for pool, r in ((remote.form, remote_runs), (self._pool, runs)))
        if len(theirs) != len(ours):
            raise BadHandover(f"{len(theirs)} rows are to be copied into pages for {len(ours)}")
        from underpaint.kernels.page_copy import copy_rows, upload  # where there is a GPU, there is Triton

        theirs = theirs.to(self._device)
        of_size: dict[int, list[tuple[int, int]]] = {}
        for layer in range(self._pool.shape.num_layers):
            for address, plane in zip(remote.addresses(layer), planes(self._pool, layer), strict=True):
                of_size.setdefault(plane[0].nbytes, []).append((address, plane.data_ptr()))
        tables = {row_bytes: upload(pairs, self._device) for row_bytes, pairs in of_size.items()}
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for row_bytes, addresses in tables.items():
                copy_rows(addresses, row_bytes, len(ours), theirs, ours)
        self._stream.synchronize()

    def _pieces(self, runs: Sequence[Run], slab: Slab) -> list[Chunk]:
        num_rows = sum(run.num_rows for run in runs)
        needed = slab_bytes(self._pool, num_rows)
        if slab.num_bytes != max(needed, 1):
            raise BadHandover(f"{num_rows} rows take {needed} bytes, and the slab has {slab.num_bytes}")
        pieces = list(chunks(self._pool, num_rows, self._chunk_bytes))
        size = max(chunk.num_bytes for chunk in pieces)
        if self._on_gpu and self._buffer.nbytes < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        return pieces

    def _stretches(self, runs: Sequence[Run], chunk: Chunk, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows in the slab and in consecutive slots of the pool, pair by pair."""
        extents = self._pool.extents(runs)
        num_rows = sum(count for _, count in extents)
        for part in chunk.parts:
            rows, first = part.of(data, num_rows), 0
            for slot, count in extents:
                yield rows[first : first + count], part.plane[slot : slot + count]
                first += count

    def _gather_on_gpu(
        self, stream: torch.cuda.Stream, slots: Tensor, pieces: list[Chunk], arena: Arena, slab: Slab, data: Tensor
    ) -> None:
        launches, done = self._launches(pieces, slots, gather=True), []
        stream.wait_stream(torch.cuda.current_stream(self._device))  # what computes the rows
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                for chunk, launch in zip(pieces, launches, strict=True):
                    launch()
                    data[chunk.start : chunk.stop].copy_(self._buffer[: chunk.num_bytes], non_blocking=True)
                    done.append(stream.record_event())
            for chunk, event in zip(pieces, done, strict=True):
                event.synchronize()
                arena.advance(slab, chunk.stop)
        finally:
            stream.synchronize()  # whatever happened, nothing writes to the slab any more

    def _scatter_on_gpu(
        self,
        stream: torch.cuda.Stream,
        slots: Tensor,
        pieces: list[Chunk],
        reader: ArenaReader,
        slab: Slab,
        stall_seconds: float,
    ) -> None:
        data = reader.bytes_of(slab)
        launches = self._launches(pieces, slots, gather=False)
        stream.wait_stream(torch.cuda.current_stream(self._device))  # what still reads from these pages
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                for chunk, launch in zip(pieces, launches, strict=True):
                    reader.wait_written(slab, chunk.stop, stall_seconds)
                    self._buffer[: chunk.num_bytes].copy_(data[chunk.start : chunk.stop], non_blocking=True)
                    launch()
        finally:
            stream.synchronize()

    def _launches(self, pieces: list[Chunk], slots: Tensor, gather: bool) -> list[Callable[[], None]]:
        """For each chunk, what copies its rows between pages and the buffer. All addresses are uploaded here."""
        from underpaint.kernels.page_copy import copy_rows, upload

        pairs: list[tuple[int, int]] = []
        spans: list[list[tuple[int, int, int]]] = []
        for chunk in pieces:
            spans.append([])
            for row_bytes in sorted({part.row_bytes for part in chunk.parts}):
                first = len(pairs)
                for part in chunk.parts:
                    if part.row_bytes == row_bytes:
                        page, buffer = part.plane.data_ptr(), self._buffer.data_ptr() + part.start - chunk.start
                        pairs.append((page, buffer) if gather else (buffer, page))
                spans[-1].append((row_bytes, first, len(pairs)))
        table = upload(pairs, self._device)
        src_rows, dst_rows = (slots, None) if gather else (None, slots)

        def launch(of_chunk: list[tuple[int, int, int]]) -> None:
            for row_bytes, first, stop in of_chunk:
                copy_rows(table[first:stop], row_bytes, len(slots), src_rows, dst_rows)

        return [partial(launch, of_chunk) for of_chunk in spans]
