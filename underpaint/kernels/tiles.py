"""Which keys each tile of query rows reads: the plan of a pass, made once on the host and shared by all layers.

A pass packs the rows of many groups. A group's keys are its prefix, which lies in the token slots of a page pool, and
then its own rows, which are in the pass. All rows of a group stand behind its prefix, so each sees the whole prefix;
only among the pass's rows is there a mask, one integer a row: key row ``k`` is visible iff ``k < row_stop[row]``.

Keys are read in *key tiles* of ``TileShape.keys``. Per *query tile* (consecutive rows of one group) a kernel walks four
ranges, of which the first and the third need no mask:

    1. prefix tiles that are full          3. own tiles that every row of the query tile sees
    2. prefix tiles that are partly valid  4. own tiles that some rows see in part, up to the last that any row sees

One *work item* is a query tile, or a *piece* of its walk where the keys are split over programs.

A plan with room (``max_prefix_tiles``) has the same sizes whatever the prefixes are, so a CUDA graph that was captured
with it serves any: ``Plan.copy_into`` puts another plan in its place.
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
    """A plan is larger than the one that it was to replace."""


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
    ``takes_turns``: see ``TURNS`` of the Gluon kernel.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    kernel: Literal["triton", "gluon"] = "triton"
    packs: bool = False
    takes_turns: bool = False


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

    ``work``: (items, 12), see ``WorkFields``, in the order in which they should start; in a plan with room, items of no
    rows follow.
    ``prefix_tiles``: (tiles, 2), first slot and valid keys. ``merges``: (query tiles that are split, 4): first row,
    rows, and the range of their pieces. ``queue``: (4,), how many items there are, and counters of a persistent kernel,
    which it leaves at 0. ``num_pieces``: how many there are, or may be.
    """

    shape: TileShape
    work: Tensor
    prefix_tiles: Tensor
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
        have been made with room, for the same rows."""
        assert [_sizes(launch) for launch in self.launches] == [_sizes(launch) for launch in other.launches]
        assert self.row_stop.shape == other.row_stop.shape
        other.buffer.copy_(self.buffer, non_blocking=True)


def _sizes(launch: Launch) -> tuple[object, ...]:
    return launch.shape, launch.work.shape, launch.prefix_tiles.shape, launch.merges.shape, launch.num_pieces


@dataclass(frozen=True)
class SplitRule:
    """Walks are split if a launch has fewer than ``min_programs`` programs, until it has about as many, but into pieces
    of at least ``min_keys`` keys."""

    min_programs: int
    min_keys: int = 512

    def splits(self, num_tiles: int, kv_heads: int) -> bool:
        return num_tiles * kv_heads < self.min_programs

    def max_pieces(self, num_tiles: int, kv_heads: int) -> int:
        """Pieces that ``num_tiles`` query tiles can become, however long their walks are."""
        return num_tiles + self.min_programs // kv_heads if self.splits(num_tiles, kv_heads) else 0


def make_plan(
    row_stop: Ints,
    launches: Sequence[tuple[TileShape, Sequence[Group], SplitRule]],
    row_shape: RowShape,
    max_prefix_tiles: int | None = None,
) -> Plan:
    """The plan of a pass. One upload, whatever the number of groups.

    ``max_prefix_tiles``: make room for as many key tiles of prefixes in each launch. Raises OutOfRoom for more.
    """
    arrays: list[Ints] = [row_stop]
    counts = []
    kv_heads = row_shape.kv_heads
    for shape, groups, rule in launches:
        tiles, num_full, num_tiles, tile_start = _prefix_tiles(groups, shape.keys)
        walks = _query_tiles(groups, row_stop, shape, row_shape.shared, num_full, num_tiles, tile_start)
        work, merges, num_pieces = _split(walks, shape, rule, kv_heads)
        queue = np.array([len(work), 0, 0, 0], np.int32)
        if max_prefix_tiles is not None:
            num_walks = len(walks.first_row)
            num_pieces = rule.max_pieces(num_walks, kv_heads)
            tiles = _with_room(tiles, max_prefix_tiles)
            work = _with_room(work, max(num_walks, num_pieces))
            merges = _with_room(merges, num_walks if num_pieces else 0)
        arrays += [work, tiles, merges, queue]
        counts.append(num_pieces)
    buffer, (row_stop_there, *there) = _upload(arrays, row_shape.device)
    made = [
        Launch(shape, work, tiles, merges, queue, num_pieces)
        for (shape, _, _), num_pieces, work, tiles, merges, queue in zip(
            launches, counts, there[::4], there[1::4], there[2::4], there[3::4], strict=True
        )
    ]
    return Plan(row_stop_there, tuple(made), buffer)


def _with_room(table: Ints, num_entries: int) -> Ints:
    """The table, followed by entries of -1, which as work items and as merges have no rows."""
    if len(table) > num_entries:
        raise OutOfRoom(f"the plan needs room for {len(table)} entries and has {num_entries}")
    return np.concatenate([table, np.full((num_entries - len(table), table.shape[1]), -1, np.int32)])


def _ranges(starts: Ints, stops: Ints) -> Ints:
    """The integers of each [start, stop), one range after the other."""
    lengths = stops - starts
    skipped = np.cumsum(lengths) - lengths
    return (np.arange(lengths.sum()) + np.repeat(starts - skipped, lengths)).astype(np.int32)


def _prefix_tiles(groups: Sequence[Group], keys: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Key tiles of every prefix, each prefix once: its full tiles and then its partly valid ones.

    Returns (tiles, 2): first slot and valid keys; and a group: how many full tiles, how many tiles, the first of them.
    """
    index = {extents: i for i, extents in enumerate(dict.fromkeys(group.extents for group in groups))}
    table = np.array([(i, *extent) for extents, i in index.items() for extent in extents], np.int32).reshape(-1, 3)
    owner, slot, length = table.T
    num_tiles = -(-length // keys)
    offset = _ranges(np.zeros_like(num_tiles), num_tiles) * keys
    owner, slot, length = (np.repeat(column, num_tiles) for column in (owner, slot, length))
    count = np.minimum(length - offset, keys)
    order = np.lexsort((count < keys, owner))
    tiles = np.stack([slot + offset, count], axis=1)[order].astype(np.int32)
    full = np.bincount(owner[count == keys], minlength=len(index))
    total = np.bincount(owner, minlength=len(index))
    of_group = [index[group.extents] for group in groups]
    per_group = (column[of_group].astype(np.int32) for column in (full, total, np.cumsum(total) - total))
    return tiles, *per_group  # type: ignore[return-value]


@dataclass(frozen=True)
class _Walks:
    """Per query tile: its group, where it stands, its tiles in each of the four ranges, and where they begin."""

    group: Ints
    first_row: Ints
    num_rows: Ints
    counts: Ints  # (4, query tiles)
    tile_start: Ints
    own_first: Ints
    own_end: Ints


def _query_tiles(
    groups: Sequence[Group],
    row_stop: Ints,
    shape: TileShape,
    shared: int,
    num_full: Ints,
    num_tiles: Ints,
    tile_start: Ints,
) -> _Walks:
    rows_per_tile = shape.rows // shared
    group_first = np.array([group.first for group in groups], np.int32)
    group_rows = np.array([group.num_rows for group in groups], np.int32)
    tiles = -(-group_rows // rows_per_tile)
    group = np.repeat(np.arange(len(groups), dtype=np.int32), tiles)
    own_first, own_end = group_first[group], (group_first + group_rows)[group]
    first_row = own_first + _ranges(np.zeros_like(tiles), tiles) * rows_per_tile
    num_rows = np.minimum(rows_per_tile, own_end - first_row)
    # Not monotonic over the pass, since groups may stand in any order: reduce over each tile's own rows.
    stops, borders = row_stop[_ranges(first_row, first_row + num_rows)], np.cumsum(num_rows) - num_rows
    seen_by_all = (np.minimum.reduceat(stops, borders) - own_first) // shape.keys
    seen_by_any = -(-(np.maximum.reduceat(stops, borders) - own_first) // shape.keys)
    full, total = num_full[group], num_tiles[group]
    counts = np.stack([full, total - full, seen_by_all, seen_by_any - seen_by_all])
    return _Walks(group, first_row, num_rows, counts, tile_start[group], own_first, own_end)


def _split(walks: _Walks, shape: TileShape, rule: SplitRule, kv_heads: int) -> tuple[Ints, Ints, int]:
    """Work items (items, 12) in the order in which they should start, merges (split query tiles, 4), and the number
    of pieces."""
    length = walks.counts.sum(axis=0)
    piece_length = int(length.max())
    if rule.splits(len(length), kv_heads):
        even = -(-int(length.sum()) * kv_heads // rule.min_programs)
        piece_length = max(even, -(-rule.min_keys // shape.keys))
    step = -(-length // -(-length // piece_length))  # pieces of one walk are equally long
    pieces = -(-length // step)
    tile = np.repeat(np.arange(len(length)), pieces)
    step = step[tile]
    start = _ranges(np.zeros_like(pieces), pieces) * step
    stop = np.minimum(start + step, length[tile])
    begin = np.cumsum(walks.counts, axis=0) - walks.counts
    part = np.stack([np.clip(cut - begin[:, tile], 0, walks.counts[:, tile]) for cut in (start, stop)])
    is_split = pieces > 1
    piece_stop = np.cumsum(np.where(is_split, pieces, 0))
    piece_number = _ranges(piece_stop - pieces, piece_stop)
    own, full, unmasked = walks.own_first[tile], walks.tile_start[tile], walks.counts[2, tile]
    after_full = full + walks.counts[0, tile]
    work = WorkFields(
        first_row=walks.first_row[tile],
        num_rows=walks.num_rows[tile],
        full_start=full + part[0, 0],
        full_stop=full + part[1, 0],
        part_start=after_full + part[0, 1],
        part_stop=after_full + part[1, 1],
        own_start=own + part[0, 2] * shape.keys,
        own_stop=own + part[1, 2] * shape.keys,
        masked_start=own + (unmasked + part[0, 3]) * shape.keys,
        masked_stop=own + (unmasked + part[1, 3]) * shape.keys,
        own_end=walks.own_end[tile],
        piece=np.where(is_split[tile], piece_number, -1),
    )
    table = np.stack(work, axis=1)
    # Group by group, since tiles of one group read the same keys, and in it and between them longest first.
    group, longest = walks.group[tile], np.zeros(walks.group.max() + 1, np.int64)
    np.maximum.at(longest, group, stop - start)
    longest_first = np.lexsort((start - stop, group, -longest[group]))
    merges = np.stack([walks.first_row, walks.num_rows, piece_stop - pieces, piece_stop], axis=1)[is_split]
    return table[longest_first].astype(np.int32), merges.astype(np.int32), int(piece_stop[-1])


def _upload(arrays: Sequence[Ints], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The arrays on the device, in one copy, and the buffer that they share. Each begins at 16 bytes: Triton compiles
    anew for other alignments."""
    padded = [np.pad(array.ravel(), (0, -array.size % 4)) for array in arrays]
    buffer = torch.from_numpy(np.concatenate(padded)).to(device, non_blocking=True)
    parts = buffer.split([array.size for array in padded])
    return buffer, [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]
