"""The plan of a pass, walked by hand: every row meets each key that it sees exactly once, wherever walks are split."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from underpaint.kernels.tiles import Group, Plan, SplitRule, TileShape, WorkFields, make_plan, row_stops


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
        starts, stops, causal = zip(*segments, strict=True)
        row_stop = row_stops(starts, stops, causal, num_rows=segments[-1][1])
        shape = TileShape(rows=32, keys=16, num_warps=4, num_stages=2)
        rule = SplitRule(min_programs, min_keys=32)
        plan = make_plan(row_stop, [(shape, groups, rule)], shared, kv_heads=2, device=torch.device("cpu"))
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


def test_longest_first_and_pieces_are_numbered_through(seed: int) -> None:
    rng = random.Random(seed)
    groups = [Group(i, 1, ((0, rng.randint(100, 3000)),)) for i in range(6)]
    row_stop = np.arange(1, 7, dtype=np.int32)
    shape = TileShape(rows=16, keys=16, num_warps=4, num_stages=2)
    rule = SplitRule(min_programs=40, min_keys=64)
    launch = make_plan(row_stop, [(shape, groups, rule)], 4, kv_heads=2, device=torch.device("cpu")).launches[0]
    work = WorkFields(*launch.work.numpy().T)
    steps = work.full_stop - work.full_start + work.part_stop - work.part_start
    steps += (work.own_stop - work.own_start + work.masked_stop - work.masked_start) // shape.keys
    assert (np.diff(steps) <= 0).all()
    pieces = work.piece[work.piece >= 0]
    assert launch.num_pieces > 0
    assert sorted(pieces) == list(range(launch.num_pieces))
    assert [stop - start for _, _, start, stop in launch.merges.tolist()] == [
        int((work.first_row == row).sum()) for row in launch.merges[:, 0].tolist()
    ]


def test_row_stops_is_the_rule_in_words() -> None:
    assert row_stops([3, 0], [6, 3], [False, True], 6).tolist() == [1, 2, 3, 6, 6, 6]
