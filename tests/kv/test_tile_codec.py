"""Pages of tiles in a pool: written once and whole, read row by row, counted in bytes, refused where rows are added."""

from dataclasses import replace

import pytest
import torch
from neo_unify.cases import CONFIG, golden
from torch import Tensor

from underpaint.errors import BadConfig
from underpaint.kernels.packed_tiles import PackedTiles
from underpaint.kv.pool import PAGE_ROWS, CacheShape, PagePool, Run, View
from underpaint.kv.tile_codec import FP8_TILES
from underpaint.models.neo_unify import load

SHAPE = CacheShape(num_layers=2, num_heads=3, head_dim=32, dtype=torch.float32)


def make_pool(num_pages: int, page_rows: int = 16) -> PagePool:
    return PagePool(SHAPE, FP8_TILES, num_pages * SHAPE.page_bytes(FP8_TILES, page_rows), "cpu", page_rows)


def draw(num_rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_rows, 3, 32), torch.randn(num_rows, 3, 32)


@pytest.mark.parametrize("page_rows", [16, 48, 128])
def test_a_page_takes_the_bytes_that_are_counted(page_rows: int) -> None:
    pool = make_pool(5, page_rows)
    assert pool.num_pages == 5
    taken = 0
    for layer in range(SHAPE.num_layers):
        stored = pool.stored(layer)
        assert isinstance(stored, PackedTiles)
        taken += sum(x.nbytes for x in (stored.k, stored.v, stored.facts))
    assert taken == 5 * pool.page_bytes


def test_half_of_bf16_and_a_byte_a_head() -> None:
    """At Qwen-Image 2.1's sizes: less than ``fp8``, whose scales are one a row."""
    shape = CacheShape(32, 32, 128, torch.bfloat16)
    assert shape.row_bytes(FP8_TILES) == 32 * 32 * (2 * 128 + 1) == 263_168
    assert shape.page_bytes(FP8_TILES, PAGE_ROWS) == 128 * 263_168


def test_runs_in_any_pages_are_read_in_order(seed: int) -> None:
    """To e4m3's precision in each layer, wherever their pages lie, by a view of all rows and of the first."""
    torch.manual_seed(seed)
    pool = make_pool(9)
    holes = [pool.allocate(16) for _ in range(9)]
    for page in torch.randperm(9)[:6].tolist():
        pool.release(holes[page])
    runs = pool.allocate(40), pool.allocate(5), pool.allocate(32)
    content = [draw(77) for _ in range(SHAPE.num_layers)]
    for layer, pair in enumerate(content):
        pool.write(layer, pool.slots(runs), *pair)
    for view in (View(pool, runs), View(pool, runs).before(42), View(pool, runs).before(7)):
        for layer, pair in enumerate(content):
            for ours, exact in zip(view.read(layer), pair, strict=True):
                error = (ours - exact[: view.num_rows]).abs()
                assert (error <= torch.maximum(exact[: view.num_rows].abs() / 16, torch.tensor(2**-9))).all()


def test_nothing_is_left_of_a_pages_last_user(seed: int) -> None:
    """A page that was full of loud rows, freed, and taken by a unit of three quiet ones, is as one that was new."""
    torch.manual_seed(seed)
    used, fresh = make_pool(1), make_pool(1)
    loud, quiet = used.allocate(16), (torch.randn(3, 3, 32) / 100, torch.randn(3, 3, 32) / 100)
    used.write(0, used.slots([loud]), *(1000 * x for x in draw(16)))
    used.release(loud)
    for pool in (used, fresh):
        pool.write(0, pool.slots([pool.allocate(3)]), *quiet)
    whole = Run((0,), 16)
    reads = (pool.read(0, pool.slots([whole])) for pool in (used, fresh))
    for ours, theirs, exact in zip(*reads, quiet, strict=True):
        assert torch.equal(ours, theirs)
        assert ours[:3].abs().max() == pytest.approx(exact.abs().max(), rel=1 / 16)
        assert not ours[3:].any()


@pytest.mark.parametrize("rows", [[20], [3], [20, 21, 22], [16, 17, 3], [0, 2], [0, 1, 3]])
def test_a_page_does_not_grow(rows: list[int], seed: int) -> None:
    """Rows that begin inside a page, or leave one out, would need a power of two that is settled."""
    torch.manual_seed(seed)
    pool = make_pool(3)
    run = pool.allocate(18)
    pool.write(0, pool.slots([run]), *draw(18))
    before = pool.read(0, pool.slots([run]))
    with pytest.raises(AssertionError, match="a page of tiles is written once"):
        pool.write(0, torch.tensor(rows) + pool.slots([run])[0], *draw(len(rows)))
    assert all(map(torch.equal, pool.read(0, pool.slots([run])), before))


def test_no_rows() -> None:
    pool = make_pool(1)
    pool.write(0, pool.slots([]), *draw(0))
    assert pool.read(0, pool.slots([]))[0].shape == (0, 3, 32)


def test_who_reads_rows_is_not_given_tiles() -> None:
    with pytest.raises(AssertionError, match="pages in fp8_tiles are not rows"):
        make_pool(1).rows(0)


def test_pages_of_tiles_have_a_multiple_of_16_rows() -> None:
    with pytest.raises(BadConfig, match=r"fp8_tiles needs pages of a multiple of 16 rows, and .* pages of 20"):
        make_pool(1, 20)


def test_refused_where_rows_are_appended() -> None:
    with pytest.raises(BadConfig, match="fp8_tiles is for prefixes that are written once, and SenseNova-U1"):
        load(golden("dense").root, replace(CONFIG, kv_codec="fp8_tiles"))
