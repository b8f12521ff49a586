"""Looked-up rotations are those that are computed, before and behind 0."""

from functools import partial

import torch

from underpaint.models.qwen_image21.transformer import rotary_table
from underpaint.models.rotations import FIRST_SIZE, Rotations

AXES = (4, 6, 6)


def test_tables_grow_and_stay_the_same(seed: int) -> None:
    rotations = Rotations(partial(rotary_table, axes=AXES), [dim // 2 for dim in AXES], "cpu")
    generator = torch.Generator().manual_seed(seed)
    for size in (FIRST_SIZE, 3 * FIRST_SIZE, 10):
        positions = torch.randint(-size, size, (50, 3), generator=generator)
        positions[3], positions[7] = -size - 1, size
        assert torch.equal(rotations.rows(positions), rotary_table(positions, AXES))


def test_the_last_places_of_a_table_need_no_larger_one() -> None:
    rotations = Rotations(partial(rotary_table, axes=AXES), [dim // 2 for dim in AXES], "cpu")
    positions = torch.tensor([[-FIRST_SIZE, 0, FIRST_SIZE - 1], [0, FIRST_SIZE, -FIRST_SIZE - 1]])
    for rows in (positions[:1], positions[1:]):
        assert torch.equal(rotations.rows(rows), rotary_table(rows, AXES))
