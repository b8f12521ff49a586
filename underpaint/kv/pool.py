"""The page pool: token slots for K and V of all layers, handed out in pages, counted by references.

A page is ``page_rows`` consecutive token slots (128 on a full-size model) in every layer at once. Runs of rows own
whole pages; the last page of a run may be partly filled, so each run knows how many of its slots are valid.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from underpaint.errors import OutOfPages
from underpaint.kernels.packed_tiles import Stored
from underpaint.kernels.tiles import Extent, StoredKV
from underpaint.kv.codec import ALIGNMENT, Carver
from underpaint.kv.tile_codec import AnyCodec

PAGE_ROWS = 128


@dataclass(frozen=True)
class CacheShape:
    """What one token needs: K and V of (num_heads, head_dim) in each of num_layers, in the model's ``dtype``."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype

    def page_bytes(self, codec: AnyCodec, page_rows: int) -> int:
        return self.num_layers * codec.page_bytes(self.num_heads, self.head_dim, page_rows)

    def row_bytes(self, codec: AnyCodec) -> int:
        """Of a row of a full page of ``PAGE_ROWS``."""
        return self.page_bytes(codec, PAGE_ROWS) // PAGE_ROWS


@dataclass(frozen=True)
class Run:
    """``num_rows`` consecutive rows of a sequence, in pages of their own."""

    pages: tuple[int, ...]
    num_rows: int


def memory_bytes(shape: CacheShape, budget_bytes: int) -> int:
    """What a pool takes whose memory is given to it: its pages, and what is lost by aligning up to four tensors a
    layer."""
    return budget_bytes + 4 * shape.num_layers * ALIGNMENT


def pages_for(num_rows: int, page_rows: int) -> int:
    return -(-num_rows // page_rows)


class PagePool:
    """Allocates, counts and stores. Every page is either free or has at least one reference."""

    def __init__(
        self,
        shape: CacheShape,
        codec: AnyCodec,
        budget_bytes: int,
        device: str,
        page_rows: int = PAGE_ROWS,
        memory: Tensor | None = None,
    ) -> None:
        """In ``memory``, ``memory_bytes`` of uint8 on ``device``, or in memory of its own."""
        self.shape = shape
        self.codec = codec
        self.page_rows = page_rows
        self.page_bytes = shape.page_bytes(codec, page_rows)
        self.num_pages = budget_bytes // self.page_bytes
        self.device = device
        self._free = list(range(self.num_pages))[::-1]
        self._references: Counter[int] = Counter()
        size = (self.num_pages, page_rows, shape.num_heads, shape.head_dim)
        within = None if memory is None else Carver(memory)
        self._layers = [codec.layer(*size, device, within) for _ in range(shape.num_layers)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def used_bytes(self) -> int:
        return (self.num_pages - self.num_free) * self.page_bytes

    def allocate(self, num_rows: int) -> Run:
        """Pages for ``num_rows`` rows, with one reference. Raises OutOfPages and takes nothing if too few are free."""
        num_pages = pages_for(num_rows, self.page_rows)
        if num_pages > self.num_free:
            raise OutOfPages(f"{num_pages} K/V pages are needed and {self.num_free} are free")
        pages = tuple(self._free.pop() for _ in range(num_pages))
        self._references.update(pages)
        return Run(pages, num_rows)

    def retain(self, run: Run) -> None:
        """Add a reference to pages that are in use."""
        assert all(self._references[page] for page in run.pages), "a free page cannot be retained"
        self._references.update(run.pages)

    def held_once(self, run: Run) -> bool:
        """Whether ``release`` would make its pages free."""
        return all(self._references[page] == 1 for page in run.pages)

    def release(self, run: Run) -> None:
        """Drop one reference; pages without any are free at once."""
        for page in run.pages:
            assert self._references[page] > 0, f"page {page} is released more often than it was taken"
            self._references[page] -= 1
            if not self._references[page]:
                del self._references[page]
                self._free.append(page)

    def slots(self, runs: Iterable[Run]) -> Tensor:
        """(rows,) int64 slot of every row of the runs, in order, on the pool's device."""
        parts = []
        for run in runs:
            pages = torch.tensor(run.pages, dtype=torch.int64)
            slots = (pages[:, None] * self.page_rows + torch.arange(self.page_rows)).flatten()
            parts.append(slots[: run.num_rows])
        return (torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)).to(self.device)

    def extents(self, runs: Iterable[Run]) -> tuple[Extent, ...]:
        """The same as first slot and length of each stretch of consecutive slots."""
        extents: list[Extent] = []
        for run in runs:
            for i, page in enumerate(run.pages[: pages_for(run.num_rows, self.page_rows)]):
                slot, count = page * self.page_rows, min(self.page_rows, run.num_rows - i * self.page_rows)
                if extents and sum(extents[-1]) == slot:
                    slot, count = extents[-1][0], extents.pop()[1] + count
                extents.append((slot, count))
        return tuple(extents)

    def stored(self, layer: int) -> Stored:
        """All slots of one layer as they are stored, without a copy."""
        return self._layers[layer].stored

    def rows(self, layer: int) -> StoredKV:
        """The same of pages of rows, for who reads no others."""
        stored = self.stored(layer)
        assert isinstance(stored, StoredKV), f"pages in {self.codec.name} are not rows"
        return stored

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store (rows, heads, head_dim) keys and values at ``slots`` of one layer; in pages of tiles whole pages, each
        from its first row on."""
        self._layers[layer].write(slots, k, v)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at ``slots`` of one layer, (rows, heads, head_dim) each, in the model's dtype."""
        return self._layers[layer].read(slots, self.shape.dtype)


class View:
    """The prefix that one branch reads: runs of pages, in order."""

    def __init__(self, pool: PagePool, runs: tuple[Run, ...]) -> None:
        self.runs = runs
        self.num_rows = sum(run.num_rows for run in runs)
        self.extents = pool.extents(runs)
        self._pool = pool
        self._slots = pool.slots(runs)

    def before(self, num_rows: int) -> "View":
        """The first ``num_rows`` rows of this view."""
        runs = []
        for run in self.runs:
            if num_rows > 0:
                runs.append(Run(run.pages, min(run.num_rows, num_rows)))
            num_rows -= run.num_rows
        return View(self._pool, tuple(runs))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole prefix in one layer, (num_rows, heads, head_dim) each."""
        return self._pool.read(layer, self._slots)

    def stored(self, layer: int) -> Stored:
        """All slots of one layer; this prefix is those in ``extents``."""
        return self._pool.stored(layer)
