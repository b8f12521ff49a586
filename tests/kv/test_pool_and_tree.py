"""Pages are counted and given back; the tree shares what is the same and evicts what is not used."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from underpaint.errors import OutOfPages
from underpaint.kv.codec import CODECS
from underpaint.kv.content import ContentCache
from underpaint.kv.pool import CacheShape, PagePool, Run, View
from underpaint.kv.tree import PrefixTree, chain
from underpaint.layout import Span

SHAPE = CacheShape(num_layers=1, num_heads=1, head_dim=4, dtype=torch.float32)
PAGE_ROWS = 4


def make_pool(num_pages: int) -> PagePool:
    codec = CODECS["fp32"]
    return PagePool(SHAPE, codec, num_pages * PAGE_ROWS * SHAPE.row_bytes(codec), "cpu", PAGE_ROWS)


def test_a_run_takes_whole_pages_and_knows_its_rows() -> None:
    pool = make_pool(4)
    run = pool.allocate(6)
    assert (len(run.pages), run.num_rows, pool.num_free) == (2, 6, 2)
    assert len(pool.slots([run])) == 6
    assert pool.used_bytes == 2 * pool.page_bytes


def test_out_of_pages_takes_nothing() -> None:
    pool = make_pool(2)
    with pytest.raises(OutOfPages, match="3 K/V pages are needed and 2 are free"):
        pool.allocate(12)
    assert pool.num_free == 2


@given(st.lists(st.integers(1, 20), max_size=30), st.randoms(use_true_random=False))
def test_live_runs_never_share_a_slot(sizes: list[int], random: "st.random.Random") -> None:  # type: ignore[name-defined]
    pool = make_pool(12)
    live: list[Run] = []
    for size in sizes:
        try:
            live.append(pool.allocate(size))
        except OutOfPages:
            pool.release(live.pop(random.randrange(len(live))))
        slots = pool.slots(live).tolist()
        assert len(set(slots)) == len(slots)
        assert sum(len(run.pages) for run in live) + pool.num_free == 12
    for run in live:
        pool.release(run)
    assert pool.num_free == 12


def test_a_view_reads_its_runs_in_order(seed: int) -> None:
    pool = make_pool(8)
    runs = (pool.allocate(5), pool.allocate(3))
    k = torch.randn(8, 1, 4, generator=torch.Generator().manual_seed(seed))
    pool.write(0, pool.slots(runs), k, -k)
    view = View(pool, runs)
    assert view.num_rows == 8
    assert torch.equal(view.read(0)[0], k)
    assert torch.equal(view.read(0)[1], -k)
    assert torch.equal(View(pool, runs[1:]).read(0)[0], k[5:])


def test_keys_stand_for_all_that_precedes() -> None:
    def key(*contents: bytes, root: bytes = b"root") -> bytes:
        return chain(root, [Span(i, i + 1) for i in range(len(contents))], contents)[-1].key

    a, b, c = b"a", b"b", b"c"
    spans = [Span(0, 1), Span(1, 2)]
    assert chain(b"root", spans, [a, b])[:1] == chain(b"root", spans, [a, c])[:1]
    assert len({key(a), key(b), key(a, b), key(b, a), key(a, a), key(b"ab")}) == 6
    assert key(a) != key(a, root=b"other")


def test_eviction_takes_unused_leaves_oldest_first() -> None:
    pool = make_pool(4)
    tree = PrefixTree(pool)
    trunk = tree.insert(None, b"trunk", tree.allocate(4))
    old = tree.insert(trunk, b"old", tree.allocate(4))
    new = tree.insert(trunk, b"new", tree.allocate(4))
    for node in (trunk, old, new):
        tree.acquire(node)
        tree.release(node)
    tree.allocate(4)
    assert tree.evictions == 0
    tree.allocate(4)
    assert {node.key for node in tree} == {b"trunk", b"new"}
    tree.allocate(4)
    assert {node.key for node in tree} == {b"trunk"}, "a node goes after its children"
    tree.acquire(trunk)
    with pytest.raises(OutOfPages):
        tree.allocate(4)
    tree.release(trunk)
    tree.allocate(4)
    assert not list(tree)


def test_what_can_be_evicted_is_counted_before() -> None:
    tree = PrefixTree(make_pool(4))
    node = tree.insert(None, b"a", tree.allocate(5))
    assert tree.child(None, b"a") is node
    assert tree.child(node, b"a") is None
    leaf = tree.insert(node, b"b", tree.allocate(1))
    assert tree.evictable_pages() == 3
    tree.acquire(leaf)
    assert tree.evictable_pages() == 0, "what a used node stands on is in use"
    tree.release(leaf)
    tree.acquire(node)
    assert tree.evictable_pages() == 1
    tree.release(node)
    tree.clear()
    assert tree.pool.num_free == 4


def test_a_dialogue_may_be_deeper_than_the_stack() -> None:
    """Each page of its text is a unit. Beyond 490 of them, which the pocket checkpoint has in a legal prompt, no other
    request was admitted as long as they stood in the tree."""
    depth = sys.getrecursionlimit() + 1
    tree = PrefixTree(make_pool(depth))
    node = None
    for _ in range(depth):
        node = tree.insert(node, b"page", tree.allocate(PAGE_ROWS))
    assert tree.available_pages == depth
    assert node is not None
    tree.acquire(node)
    assert tree.available_pages == 0
    tree.release(node)
    tree.clear()
    assert tree.pool.num_free == depth


def test_content_cache_is_bounded_and_pins_no_more_than_it_counts() -> None:
    cache = ContentCache(budget_bytes=3000)
    first = cache.get(b"1", lambda: torch.zeros(100_000)[:250])
    assert first.untyped_storage().nbytes() == 1000, "a view would pin 400 kB"
    for key in (b"2", b"3"):
        cache.get(key, lambda: torch.zeros(250))
    cache.get(b"1", lambda: pytest.fail("it is in the cache"))
    cache.get(b"4", lambda: torch.zeros(250))
    assert cache.used_bytes == 3000
    cache.get(b"1", lambda: pytest.fail("used more recently than 2"))
    missed: list[int] = []
    cache.get(b"2", lambda: missed.append(1) or torch.zeros(250))  # type: ignore[func-returns-value]
    assert missed
    assert len(cache.get(b"large", lambda: torch.zeros(10_000))) == 10_000
    assert cache.used_bytes <= 3000
