"""Which keys each tile of query rows reads: the plan of a pass, made once on the host by ``planning`` and shared by all
layers.

A pass packs the rows of many groups. A group's keys are its prefix, which lies in the token slots of a page pool, and
then its own rows, which are in the pass. All rows of a group stand behind its prefix, so each sees the whole prefix;
only among the pass's rows is there a mask, one integer a row: key row ``k`` is visible iff ``k < row_stop[row]``.

Keys are read in *key tiles* of ``TileShape.keys``. Per *query tile* (consecutive rows of one group) a kernel walks four
ranges, of which the first and the third need no mask:

    1. prefix tiles that are full          3. own tiles that every row of the query tile sees
    2. prefix tiles that are partly valid  4. own tiles that some rows see in part, up to the last that any row sees

One *work item* is a query tile, or a *piece* of its walk where the keys are split over programs.

A plan with *room* has sizes that depend on the room alone, not on how rows are divided into groups nor on what is
before them, so a CUDA graph that was captured with it serves any: ``Plan.copy_into`` puts another plan in its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]

Extent = tuple[int, int]
"""First token slot and number of rows: a stretch of a prefix that lies in consecutive slots."""


class OutOfRoom(ValueError):
    """A plan is larger than its room."""


@dataclass(frozen=True, eq=False)
class StoredKV:
    """Keys and values of one layer in the slots of a pool: (slots, kv_heads, head_dim) each.

    e4m3 is uint8 (raw bytes) or float8_e4m3fn, and comes with fp32 scales (slots, kv_heads).
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True)
class Group:
    """Rows [first, first + num_rows) of the pass, behind a prefix that lies in ``extents``, in order."""

    first: int
    num_rows: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Room:
    """What a plan must be able to hold: ``num_rows`` rows, in up to ``num_groups`` groups, behind prefixes of
    ``num_units``, see ``prefix_units``."""

    num_rows: int
    num_groups: int
    num_units: int


UNIT_KEYS = 128
"""Every key tile divides this, so what prefixes need can be counted before the tile is known."""


def prefix_units(extents: Sequence[Extent]) -> int:
    """Stretches of up to ``UNIT_KEYS`` keys that ``extents`` are."""
    return sum(-(-count // UNIT_KEYS) for _, count in extents)


@dataclass(frozen=True)
class RowShape:
    """What all rows of a pass have in common, in every layer."""

    num_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> "RowShape":
        """``q``: (rows, heads, head_dim), ``k``: (rows, kv_heads, head_dim)."""
        return cls(q.shape[1], k.shape[1], q.shape[2], q.dtype, q.device)

    def __post_init__(self) -> None:
        assert self.num_heads % self.kv_heads == 0, f"{self.num_heads} heads cannot share {self.kv_heads}"

    @property
    def shared(self) -> int:
        """Query heads a K/V head."""
        return self.num_heads // self.kv_heads


@dataclass(frozen=True)
class TileShape:
    """A query tile has ``rows`` lanes, each a row and one of the heads that share a K/V head; a key tile ``keys``.

    ``kernel``: the one that takes such tiles. ``packs``: prefixes of another dtype are first made plain key tiles.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    kernel: Literal["triton", "gluon", "fp8"] = "triton"
    packs: bool = False


class WorkFields(NamedTuple):
    """One work item as the kernel reads it, in this order, int32 each.

    Ranges are half-open. ``full`` and ``part`` count key tiles of the launch's list, ``own`` and ``masked`` rows of the
    pass, in steps of a key tile. Rows from ``own_end`` on are another sequence's. ``piece`` is -1 for a whole walk.
    """

    first_row: Ints
    num_rows: Ints
    full_start: Ints
    full_stop: Ints
    part_start: Ints
    part_stop: Ints
    own_start: Ints
    own_stop: Ints
    masked_start: Ints
    masked_stop: Ints
    own_end: Ints
    piece: Ints


@dataclass(frozen=True, eq=False)
class Launch:
    """Work items that run with one tile shape; all int32, on the device.

    ``work``: (items, 12), see ``WorkFields``, in the order in which they should start. In a plan with room, items of no
    rows follow, and the other tables end in entries of nothing too.
    ``prefix_tiles``: (tiles, 2), first slot and valid keys. ``own_tiles``: the same of the key tiles of all groups' own
    rows, and ``own_tile``: (items, 1), which of them begins at ``own_start``. ``merges``: (query tiles that are split,
    4): first row, rows, and the range of their pieces. ``queue``: (4,), how many items there are, and counters of a
    persistent kernel, which it leaves at 0. ``num_pieces``: how many there are, or may be.
    """

    shape: TileShape
    work: Tensor
    prefix_tiles: Tensor
    own_tiles: Tensor
    own_tile: Tensor
    merges: Tensor
    queue: Tensor
    num_pieces: int


@dataclass(frozen=True, eq=False)
class Plan:
    """``row_stop``: (rows,) int32, one past the last row of the pass that each row sees. ``buffer`` holds that and all
    of the launches."""

    row_stop: Tensor
    launches: tuple[Launch, ...]
    buffer: Tensor

    def copy_into(self, other: "Plan") -> None:
        """Put this plan in the place of ``other``, in one copy: what was captured with that now runs this. Both must
        have been made with the same room."""
        assert [_sizes(launch) for launch in self.launches] == [_sizes(launch) for launch in other.launches]
        assert self.row_stop.shape == other.row_stop.shape
        other.buffer.copy_(self.buffer, non_blocking=True)


def _sizes(launch: Launch) -> tuple[object, ...]:
    tables = (launch.work, launch.prefix_tiles, launch.own_tiles, launch.merges)
    return launch.shape, *(table.shape for table in tables), launch.num_pieces


@dataclass(frozen=True)
class SplitRule:
    """Walks are split if a launch has fewer than ``min_programs`` programs, until it has about as many, but into pieces
    of at least ``min_keys`` keys."""

    min_programs: int
    min_keys: int = 512

    def splits(self, num_tiles: int, kv_heads: int) -> bool:
        return num_tiles * kv_heads < self.min_programs

    def max_pieces(self, num_tiles: int, kv_heads: int) -> int:
        """Pieces that ``num_tiles`` query tiles can become if they are split, however long their walks are."""
        return num_tiles + self.min_programs // kv_heads
