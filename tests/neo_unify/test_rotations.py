"""Looked-up rotations are those that are computed."""

import random

import torch

from neo_unify.cases import golden
from underpaint.models.neo_unify.rotations import TextRotations
from underpaint.models.neo_unify.transformer import rotary_table
from underpaint.models.rotations import FIRST_SIZE


def test_tables_grow_and_stay_the_same(seed: int) -> None:
    config = golden("dense").model.config.language
    rotations = TextRotations(config, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for most in (FIRST_SIZE, 3 * FIRST_SIZE, 10):
        positions = torch.randint(0, most, (50, 3), generator=generator)
        positions[7] = most
        assert torch.equal(rotations.rows(positions), rotary_table(positions, config))
    assert rotations.rows(positions[:0]).shape == (0, config.head_dim // 2)


def test_text_stands_at_0_on_the_other_axes(seed: int) -> None:
    config = golden("dense").model.config.language
    rng = random.Random(seed)
    places = [rng.randrange(5 * FIRST_SIZE) for _ in range(20)]
    positions = torch.zeros(20, 3, dtype=torch.int64)
    positions[:, 0] = torch.tensor(places)
    looked_up = torch.from_numpy(TextRotations(config, "cpu").text_rows(places))
    assert torch.equal(looked_up, rotary_table(positions, config))
