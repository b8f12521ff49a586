"""The plan of a pass: from groups of rows to work items, see ``tiles``. NumPy on the host, and one upload."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from underpaint.kernels.tiles import (
    UNIT_KEYS,
    Group,
    Ints,
    Launch,
    OutOfRoom,
    Plan,
    Room,
    RowShape,
    SplitRule,
    TileShape,
    WorkFields,
)


def make_plan(
    row_stop: Ints,
    launches: Sequence[tuple[TileShape, Sequence[Group], SplitRule]],
    row_shape: RowShape,
) -> Plan:
    """The plan of a pass. One upload, whatever the number of groups."""
    drafts = []
    for shape, groups, rule in launches:
        tiles, own_tiles, walks = _walk(groups, row_stop, shape, row_shape.shared)
        splits = rule.splits(len(walks.first_row), row_shape.kv_heads)
        work, own_tile, merges, num_pieces = _split(walks, shape, rule if splits else None, row_shape.kv_heads)
        drafts.append(_Draft(shape, tiles, own_tiles, work, own_tile, merges, len(work), num_pieces))
    return _upload_plan(row_stop, drafts, row_shape.device)


def make_roomy_plan(
    row_stop: Ints, groups: Sequence[Group], shape: TileShape, rule: SplitRule, row_shape: RowShape, room: Room
) -> Plan:
    """The plan of a pass with ``room``: one launch, whose sizes nothing but ``room`` decides. Raises OutOfRoom.

    Rows of the room behind the last group are nobody's: each sees the first of them, so that what is computed for them
    is finite. Whether walks are split is decided for the fewest query tiles that so many rows can have.
    """
    num_used, kv_heads = len(row_stop), row_shape.kv_heads
    if num_used > room.num_rows or len(groups) > room.num_groups:
        raise OutOfRoom(f"the plan has {num_used} rows in {len(groups)} groups, and room for {room}")
    if num_used < room.num_rows:
        groups = [*groups, Group(num_used, room.num_rows - num_used, ())]
        row_stop = np.pad(row_stop, (0, room.num_rows - num_used), constant_values=num_used + 1)
    tiles, own_tiles, walks = _walk(groups, row_stop, shape, row_shape.shared)
    rows_per_tile = shape.rows // row_shape.shared
    splits = rule.splits(-(-room.num_rows // rows_per_tile), kv_heads)
    work, own_tile, merges, _ = _split(walks, shape, rule if splits else None, kv_heads)
    max_walks = room.num_rows // rows_per_tile + room.num_groups + 1
    max_pieces = rule.max_pieces(max_walks, kv_heads) if splits else 0
    max_items = max(max_walks, max_pieces)
    draft = _Draft(
        shape,
        _with_room(tiles, room.num_units * (UNIT_KEYS // shape.keys)),
        _with_room(own_tiles, room.num_rows // shape.keys + room.num_groups + 1),
        _with_room(work, max_items),
        _with_room(own_tile, max_items),
        _with_room(merges, max_walks if splits else 0),
        len(work),
        max_pieces,
    )
    return _upload_plan(row_stop, [draft], row_shape.device)


@dataclass(frozen=True)
class _Draft:
    """A launch on the host; see ``Launch``. ``num_items``: of ``work``, without room."""

    shape: TileShape
    tiles: Ints
    own_tiles: Ints
    work: Ints
    own_tile: Ints
    merges: Ints
    num_items: int
    num_pieces: int

    @property
    def arrays(self) -> tuple[Ints, ...]:
        queue = np.array([self.num_items, 0, 0, 0], np.int32)
        return self.work, self.tiles, self.own_tiles, self.own_tile, self.merges, queue


def _upload_plan(row_stop: Ints, drafts: Sequence[_Draft], device: torch.device) -> Plan:
    buffer, (row_stop_there, *there) = _upload([row_stop, *(x for draft in drafts for x in draft.arrays)], device)
    made = []
    for i, draft in enumerate(drafts):
        work, tiles, own_tiles, own_tile, merges, queue = there[6 * i : 6 * i + 6]
        made.append(Launch(draft.shape, work, tiles, own_tiles, own_tile, merges, queue, draft.num_pieces))
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
    own_tile_start: Ints
    own_first: Ints
    own_end: Ints


def _own_tiles(first: Ints, num_rows: Ints, keys: int) -> tuple[Ints, Ints]:
    """Key tiles of the own rows of every group, (tiles, 2): first row and valid keys; and the first tile of each."""
    num_tiles = -(-num_rows // keys)
    offset = _ranges(np.zeros_like(num_tiles), num_tiles) * keys
    count = np.minimum(np.repeat(num_rows, num_tiles) - offset, keys)
    tiles = np.stack([np.repeat(first, num_tiles) + offset, count], axis=1)
    return tiles.astype(np.int32), (np.cumsum(num_tiles) - num_tiles).astype(np.int32)


def _walk(groups: Sequence[Group], row_stop: Ints, shape: TileShape, shared: int) -> tuple[Ints, Ints, _Walks]:
    """The key tiles of all prefixes, those of the groups' own rows, and the walks of all query tiles."""
    tiles, num_full, num_tiles, tile_start = _prefix_tiles(groups, shape.keys)
    rows_per_tile = shape.rows // shared
    group_first = np.array([group.first for group in groups], np.int32)
    group_rows = np.array([group.num_rows for group in groups], np.int32)
    own_tiles, own_tile_start = _own_tiles(group_first, group_rows, shape.keys)
    walks = -(-group_rows // rows_per_tile)
    group = np.repeat(np.arange(len(groups), dtype=np.int32), walks)
    own_first, own_end = group_first[group], (group_first + group_rows)[group]
    first_row = own_first + _ranges(np.zeros_like(walks), walks) * rows_per_tile
    num_rows = np.minimum(rows_per_tile, own_end - first_row)
    # Not monotonic over the pass, since groups may stand in any order: reduce over each tile's own rows.
    stops, borders = row_stop[_ranges(first_row, first_row + num_rows)], np.cumsum(num_rows) - num_rows
    seen_by_all = (np.minimum.reduceat(stops, borders) - own_first) // shape.keys
    seen_by_any = -(-(np.maximum.reduceat(stops, borders) - own_first) // shape.keys)
    full, total = num_full[group], num_tiles[group]
    counts = np.stack([full, total - full, seen_by_all, seen_by_any - seen_by_all])
    starts = tile_start[group], own_tile_start[group]
    return tiles, own_tiles, _Walks(group, first_row, num_rows, counts, *starts, own_first, own_end)


def _split(walks: _Walks, shape: TileShape, rule: SplitRule | None, kv_heads: int) -> tuple[Ints, Ints, Ints, int]:
    """Work items (items, 12) in the order in which they should start, the own tile that begins at ``own_start`` of
    each, merges (split query tiles, 4), and the number of pieces. Without a ``rule`` nothing is split."""
    length = walks.counts.sum(axis=0)
    piece_length = int(length.max())
    if rule is not None:
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
    own_tile = (walks.own_tile_start[tile] + part[0, 2])[:, None]
    tables = (table[longest_first], own_tile[longest_first], merges)
    return *(x.astype(np.int32) for x in tables), int(piece_stop[-1])  # type: ignore[return-value]


def _upload(arrays: Sequence[Ints], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The arrays on the device, in one copy, and the buffer that they share. Each begins at 16 bytes: Triton compiles
    anew for other alignments."""
    padded = [np.pad(array.ravel(), (0, -array.size % 4)) for array in arrays]
    buffer = torch.from_numpy(np.concatenate(padded)).to(device, non_blocking=True)
    parts = buffer.split([array.size for array in padded])
    return buffer, [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]
