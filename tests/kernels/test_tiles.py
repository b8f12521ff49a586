"""The plan of a pass, walked by hand: every row meets each key that it sees exactly once, wherever walks are split."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch

from underpaint.kernels.planning import make_plan, make_roomy_plan
from underpaint.kernels.tiles import Group, OutOfRoom, Plan, Room, RowShape, SplitRule, TileShape, WorkFields
from underpaint.layout import AttentionCall


def row_shape(shared: int) -> RowShape:
    return RowShape(2 * shared, 2, 64, torch.bfloat16, torch.device("cpu"))


def draw_pass(rng: random.Random) -> tuple[list[Group], list[tuple[int, int, bool]]]:
    """Groups in shuffled order and their segments: some behind a shared prefix, some behind none."""
    shared = tuple((slot, rng.randint(1, 70)) for slot in (0, 100, 300))
    groups, segments, first = [], [], 0
    for _ in range(rng.randint(1, 5)):
        start = first
        for _ in range(rng.randint(1, 3)):
            stop = first + rng.choice([1, 3, 17, 40])
            segments.append((first, stop, rng.random() < 0.5))
            first = stop
        extents = rng.choice([(), shared, shared[:2], ((700, rng.randint(1, 40)),)])
        groups.append(Group(start, first - start, extents))
    rng.shuffle(groups)
    return groups, segments


def meetings(plan: Plan, keys: int, shared: int) -> Counter[tuple[int, str, int]]:
    """How often each (row, pool or pass, key) is met, as the kernel would walk the work items."""
    met: Counter[tuple[int, str, int]] = Counter()
    row_stop = plan.row_stop.tolist()
    for launch in plan.launches:
        tiles = launch.prefix_tiles.tolist()
        for item in launch.work.tolist():
            work = WorkFields(*item)
            if work.num_rows < 0:
                continue  # room
            assert work.num_rows * shared <= launch.shape.rows
            for row in range(work.first_row, work.first_row + work.num_rows):
                for slot, count in tiles[work.full_start : work.full_stop]:
                    assert count == keys
                    met.update((row, "pool", slot + i) for i in range(keys))
                for slot, count in tiles[work.part_start : work.part_stop]:
                    met.update((row, "pool", slot + i) for i in range(count))
                met.update((row, "pass", key) for key in range(work.own_start, work.own_stop))
                masked = range(work.masked_start, work.masked_stop)
                met.update((row, "pass", key) for key in masked if key < row_stop[row])
                assert max(work.own_stop, row_stop[row]) <= work.own_end
    return met


@pytest.mark.parametrize("min_programs", [0, 50])
@pytest.mark.parametrize("shared", [1, 4])
def test_every_visible_key_is_met_once(shared: int, min_programs: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        groups, segments = draw_pass(rng)
        row_stop = np.concatenate([AttentionCall(*segment).visible_stop() for segment in segments])
        shape = TileShape(rows=32, keys=16, num_warps=4, num_stages=2)
        rule = SplitRule(min_programs, min_keys=32)
        plan = make_plan(row_stop, [(shape, groups, rule)], row_shape(shared))
        want = Counter(
            (row, place, key)
            for group in groups
            for row in range(group.first, group.first + group.num_rows)
            for place, start, stop in (
                *(("pool", slot, slot + count) for slot, count in group.extents),
                ("pass", group.first, int(row_stop[row])),
            )
            for key in range(start, stop)
        )
        assert meetings(plan, shape.keys, shared) == want


def test_group_by_group_longest_first_and_pieces_are_numbered_through(seed: int) -> None:
    rng = random.Random(seed)
    groups = [Group(i, 1, ((0, rng.randint(100, 3000)),)) for i in range(6)]
    row_stop = np.arange(1, 7, dtype=np.int32)
    shape = TileShape(rows=16, keys=16, num_warps=4, num_stages=2)
    rule = SplitRule(min_programs=40, min_keys=64)
    launch = make_plan(row_stop, [(shape, groups, rule)], row_shape(4)).launches[0]
    work = WorkFields(*launch.work.numpy().T)
    steps = work.full_stop - work.full_start + work.part_stop - work.part_start
    steps += (work.own_stop - work.own_start + work.masked_stop - work.masked_start) // shape.keys
    groups_met = [
        list(items) for _, items in itertools.groupby(zip(work.first_row, steps, strict=True), lambda x: x[0])
    ]
    assert len(groups_met) == len(groups)
    for group_steps in ([s for _, s in items] for items in [*groups_met, [items[0] for items in groups_met]]):
        assert group_steps == sorted(group_steps, reverse=True)
    pieces = work.piece[work.piece >= 0]
    assert launch.num_pieces > 0
    assert sorted(pieces) == list(range(launch.num_pieces))
    assert [stop - start for _, _, start, stop in launch.merges.tolist()] == [
        int((work.first_row == row).sum()) for row in launch.merges[:, 0].tolist()
    ]


def of_rows(rng: random.Random, rows: list[int], longest: int) -> tuple[list[Group], np.ndarray]:
    """Text groups of so many rows, behind prefixes of any length in scattered runs."""
    groups, first = [], 0
    for num_rows in rows:
        slots = sorted(rng.sample(range(0, 100_000, 200), 3))
        extents = tuple((slot, rng.randint(1, longest)) for slot in slots[: rng.randint(0, 3)])
        groups.append(Group(first, num_rows, extents))
        first += num_rows
    row_stop = [AttentionCall(g.first, g.first + g.num_rows, True).visible_stop() for g in groups]
    return groups, np.concatenate(row_stop)


@pytest.mark.parametrize("min_programs", [0, 20, 60])
@pytest.mark.parametrize("shared", [1, 2])
def test_one_plan_in_the_place_of_another(min_programs: int, shared: int, seed: int) -> None:
    """Plans with room have the same sizes however many rows, groups and prefixes there are; copied they walk as those
    made anew, and rows that are nobody's see one key."""
    rng = random.Random(seed)
    shape = TileShape(rows=32, keys=16, num_warps=4, num_stages=2)
    rule, room = SplitRule(min_programs, min_keys=32), Room(128, 8, 40)
    standing: Plan | None = None
    for _ in range(20):
        rows = [rng.choice([1, 5, 16]) for _ in range(rng.randint(1, 8))]
        groups, row_stop = of_rows(rng, rows, rng.choice([3, 190]))
        plan = make_roomy_plan(row_stop, groups, shape, rule, row_shape(shared), room)
        if standing is None:
            standing = plan
            work = plan.launches[0].work
        plan.copy_into(standing)
        launch = standing.launches[0]
        assert launch.work is work
        nobody = {(row, "pass", sum(rows)): 1 for row in range(sum(rows), 128)}
        tight = make_plan(row_stop, [(shape, groups, SplitRule(0))], row_shape(shared))
        assert meetings(standing, shape.keys, shared) == meetings(tight, shape.keys, shared) + Counter(nobody)
        num_items = int(launch.queue[0])
        assert launch.queue.tolist() == [num_items, 0, 0, 0]
        assert (launch.work[:num_items, 1] > 0).all()
        assert (launch.work[num_items:] == -1).all()
        pieces = [number for *_, start, stop in launch.merges.tolist() for number in range(start, stop)]
        assert pieces == sorted(launch.work[:num_items, -1][launch.work[:num_items, -1] >= 0].tolist())
        assert len(pieces) <= launch.num_pieces or not pieces
        assert (launch.num_pieces > 0) == rule.splits(4 * shared, 2)


def test_a_plan_that_does_not_fit_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    shape, rule = TileShape(rows=32, keys=16, num_warps=4, num_stages=2), SplitRule(0)
    groups = [Group(0, 3, ((rng.randint(0, 99), 128 + 16 * 8),)), Group(3, 1, ())]
    row_stop = np.array([1, 2, 3, 4], np.int32)
    make_roomy_plan(row_stop, groups, shape, rule, row_shape(2), Room(4, 2, 2))
    for room, message in (
        (Room(4, 2, 1), "room for 16 entries and has 8"), (Room(3, 2, 2), "4 rows in 2"), (Room(4, 1, 2), "in 2 groups")
    ):  # fmt: skip
        with pytest.raises(OutOfRoom, match=message):
            make_roomy_plan(row_stop, groups, shape, rule, row_shape(2), room)
