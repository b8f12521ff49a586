"""Which keys each tile of query rows reads: the plan of a pass, made once on the host and shared by all layers.

A pass packs the rows of many groups. A group's keys are its prefix, which lies in the token slots of a page pool, and
then its own rows, which are in the pass. All rows of a group stand behind its prefix, so each sees the whole prefix;
only among the pass's rows is there a mask, one integer a row: key row ``k`` is visible iff ``k < row_stop[row]``.

Keys are read in *key tiles* of ``TileShape.keys``. Per *query tile* (consecutive rows of one group) a kernel walks four
ranges, of which the first and the third need no mask:

    1. prefix tiles that are full          3. own tiles that every row of the query tile sees
    2. prefix tiles that are partly valid  4. own tiles that some rows see in part, up to the last that any row sees

One *work item* is a query tile, or a *piece* of its walk where the keys are split over programs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]

Extent = tuple[int, int]
"""First token slot and number of rows: a stretch of a prefix that lies in consecutive slots."""


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
class TileShape:
    """A query tile has ``rows`` lanes, each a row and one of the heads that share a K/V head; a key tile ``keys``."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


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

    ``work``: (items, 12), see ``WorkFields``, longest first. ``prefix_tiles``: (tiles, 2), first slot and valid keys.
    ``merges``: (query tiles that are split, 4): first row, rows, and the range of their pieces.
    """

    shape: TileShape
    work: Tensor
    prefix_tiles: Tensor
    merges: Tensor
    num_pieces: int


@dataclass(frozen=True, eq=False)
class Plan:
    """``row_stop``: (rows,) int32, one past the last row of the pass that each row sees."""

    row_stop: Tensor
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class SplitRule:
    """Walks are split if a launch has fewer than ``min_programs`` programs, until it has about as many, but into pieces
    of at least ``min_keys`` keys."""

    min_programs: int
    min_keys: int = 512


def row_stops(starts: Sequence[int], stops: Sequence[int], causal: Sequence[bool], num_rows: int) -> Ints:
    """(num_rows,) of segments [start, stop) in rows of the pass: a causal row sees up to itself, others to ``stop``."""
    begin, end = np.asarray(starts, np.int32), np.asarray(stops, np.int32)
    row = _ranges(begin, end)
    out = np.zeros(num_rows, np.int32)
    out[row] = np.where(np.repeat(np.asarray(causal, bool), end - begin), row + 1, np.repeat(end, end - begin))
    assert out.all(), "every row of the pass belongs to a segment"
    return out


def make_plan(
    row_stop: Ints,
    launches: Sequence[tuple[TileShape, Sequence[Group], SplitRule]],
    shared: int,
    kv_heads: int,
    device: torch.device,
) -> Plan:
    """The plan of a pass. ``shared``: query heads a K/V head. One upload, whatever the number of groups."""
    arrays: list[Ints] = [row_stop]
    counts = []
    for shape, groups, rule in launches:
        tiles, num_full, num_tiles, tile_start = _prefix_tiles(groups, shape.keys)
        walks = _query_tiles(groups, row_stop, shape, shared, num_full, num_tiles, tile_start)
        work, merges, num_pieces = _split(walks, shape, rule, kv_heads)
        arrays += [work, tiles, merges]
        counts.append(num_pieces)
    row_stop_there, *there = _upload(arrays, device)
    made = [
        Launch(shape, work, tiles, merges, num_pieces)
        for (shape, _, _), num_pieces, work, tiles, merges in zip(
            launches, counts, there[::3], there[1::3], there[2::3], strict=True
        )
    ]
    return Plan(row_stop_there, tuple(made))


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
    """Per query tile: where it stands, its tiles in each of the four ranges, and where they begin."""

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
    group = np.repeat(np.arange(len(groups)), tiles)
    own_first, own_end = group_first[group], (group_first + group_rows)[group]
    first_row = own_first + _ranges(np.zeros_like(tiles), tiles) * rows_per_tile
    num_rows = np.minimum(rows_per_tile, own_end - first_row)
    # Not monotonic over the pass, since groups may stand in any order: reduce over each tile's own rows.
    stops, borders = row_stop[_ranges(first_row, first_row + num_rows)], np.cumsum(num_rows) - num_rows
    seen_by_all = (np.minimum.reduceat(stops, borders) - own_first) // shape.keys
    seen_by_any = -(-(np.maximum.reduceat(stops, borders) - own_first) // shape.keys)
    full, total = num_full[group], num_tiles[group]
    counts = np.stack([full, total - full, seen_by_all, seen_by_any - seen_by_all])
    return _Walks(first_row, num_rows, counts, tile_start[group], own_first, own_end)


def _split(walks: _Walks, shape: TileShape, rule: SplitRule, kv_heads: int) -> tuple[Ints, Ints, int]:
    """Work items (items, 12) longest first, merges (split query tiles, 4), and the number of pieces."""
    length = walks.counts.sum(axis=0)
    piece_length = int(length.max())
    if len(length) * kv_heads < rule.min_programs:
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
    longest_first = np.argsort(start - stop, kind="stable")
    merges = np.stack([walks.first_row, walks.num_rows, piece_stop - pieces, piece_stop], axis=1)[is_split]
    return table[longest_first].astype(np.int32), merges.astype(np.int32), int(piece_stop[-1])


def _upload(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """The arrays on the device, in one copy. Each begins at 16 bytes: Triton compiles anew for other alignments."""
    padded = [np.pad(array.ravel(), (0, -array.size % 4)) for array in arrays]
    buffer = torch.from_numpy(np.concatenate(padded)).to(device, non_blocking=True)
    parts = buffer.split([array.size for array in padded])
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]
