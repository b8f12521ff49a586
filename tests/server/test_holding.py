"""Units of another process's prefixes in pages of this one: brought once, given back whatever happens."""

import pytest
import torch

from underpaint.errors import OutOfPages
from underpaint.handover.messages import InPages
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import CacheShape, PagePool, Run
from underpaint.kv.tree import PrefixTree
from underpaint.server.holding import Holding, is_coming

NUM_PAGES = 8
ROWS = (4, 3, 2, 5)
# Two branches: the first unit in common, another unit and a tail for one, a tail for the other.
PREFIX = InPages(tuple(Run((i,), rows) for i, rows in enumerate(ROWS)), (b"a", b"ab", None, None), "fp32")
VIEWS = ((0, 1, 2), (0, 3))


@pytest.fixture
def tree() -> PrefixTree:
    shape, codec = CacheShape(1, 1, 8, torch.float32), CODECS["fp32"]
    return PrefixTree(PagePool(shape, codec, NUM_PAGES * 4 * shape.row_bytes(codec), "cpu", page_rows=4))


def hold(tree: PrefixTree) -> Holding:
    return Holding(tree, PREFIX, VIEWS)


def test_units_stay_and_tails_go(tree: PrefixTree) -> None:
    first = hold(tree)
    assert first.missing == (0, 1, 2, 3)
    assert tuple(run.num_rows for run in first.runs) == ROWS
    assert is_coming(tree, PREFIX, VIEWS)
    first.filled()
    assert not is_coming(tree, PREFIX, VIEWS)
    second = hold(tree)
    assert second.missing == (2, 3)
    assert second.runs[:2] == first.runs[:2]
    assert not set(second.runs[2:]) & set(first.runs)
    for held in (first, second, first):
        held.close()
    assert tree.pool.used_bytes == tree.used_bytes == 2 * tree.pool.page_bytes
    assert not any(node.users for node in tree)
    assert (tree.hits, tree.misses) == (2, 2)


def test_what_never_came_is_brought_again(tree: PrefixTree) -> None:
    hold(tree).close()
    assert tree.pool.num_free == NUM_PAGES
    assert not is_coming(tree, PREFIX, VIEWS)
    assert hold(tree).missing == (0, 1, 2, 3)


def test_without_room_nothing_is_held(tree: PrefixTree) -> None:
    others = tree.pool.allocate(4 * (NUM_PAGES - 3))
    with pytest.raises(OutOfPages):
        hold(tree)
    assert tree.pool.num_free == 3
    tree.pool.release(others)
    held = hold(tree)
    held.filled()
    held.close()
    others = tree.pool.allocate(4 * (NUM_PAGES - 2))
    with pytest.raises(OutOfPages):  # units that it found are not evicted for its tails
        hold(tree)
    assert tree.num_pages == 2
    assert (tree.hits, tree.misses) == (0, 2)  # who waits and asks again is not counted again
    tree.pool.release(others)


def test_a_unit_that_two_branches_read_from_pages_of_their_own_comes_once(tree: PrefixTree) -> None:
    prefix = InPages((Run((0,), 4), Run((1,), 4)), (b"a", b"a"), "fp32")
    held = Holding(tree, prefix, ((0,), (1,)))
    assert held.missing == (0,)
    assert held.runs[0] == held.runs[1]
    held.close()
    assert tree.pool.num_free == NUM_PAGES
