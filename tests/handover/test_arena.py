"""Slabs are counted and given back whatever happens, and nobody reads one that has ended without finding out."""

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from leftovers import Leftovers, mappings
from timing import in_time

from underpaint.errors import BadConfig
from underpaint.handover import memory as memory_module
from underpaint.handover.arena import BLOCK_BYTES, Arena, ArenaReader, Slab
from underpaint.handover.blocks import FreeBlocks
from underpaint.handover.faults import ArenaFull, BadHandover, DamagedSlab, PeerStalled, StaleSlab
from underpaint.handover.memory import Memory

FAR = time.monotonic() + 1e6
NUM_BLOCKS = 16


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(NUM_BLOCKS * BLOCK_BYTES)
    yield made
    made.close()


def fill(arena: Arena, slab: Slab, value: int) -> None:
    with arena.writing(slab) as data:
        data.fill_(value)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 30)), max_size=60))
def test_free_blocks_are_what_was_not_taken(moves: list[tuple[bool, int, int]]) -> None:
    """Against a set: no block is given out twice, ranges never touch, first fit, and all come back as one range."""
    blocks, free, held = FreeBlocks(24), set(range(24)), []
    for takes, count, index in moves:
        if takes:
            start = blocks.take(count)
            fits = [i for i in range(25 - count) if free.issuperset(range(i, i + count))]
            assert start == (fits[0] if fits else None)
            if start is not None:
                free -= set(range(start, start + count))
                held.append((start, count))
        elif held:
            start, count = held.pop(index % len(held))
            blocks.give(start, count)
            free |= set(range(start, start + count))
        assert blocks.num_free == len(free)
        assert {block for start, stop in blocks.ranges for block in range(start, stop)} == free
        assert all(a[1] < b[0] for a, b in zip(blocks.ranges, blocks.ranges[1:], strict=False))
    for start, count in held:
        blocks.give(start, count)
    assert blocks.ranges == [(0, 24)]


def test_a_block_cannot_be_given_back_twice() -> None:
    blocks = FreeBlocks(4)
    blocks.take(2)
    blocks.give(0, 2)
    with pytest.raises(AssertionError, match="twice"):
        blocks.give(0, 2)


def test_what_is_written_is_read_in_place(arena: Arena) -> None:
    slab = arena.lease(100_000, "reader", FAR)
    assert arena.used_bytes == 2 * BLOCK_BYTES
    fill(arena, slab, 7)
    reader = ArenaReader(Memory(os.dup(arena.memory.fd)))
    with reader.reading(slab) as data:
        assert data.shape == (100_000,)
        assert bool((data == 7).all())
        arena.reader.bytes_of(slab)[5] = 9
        assert data[5] == 9, "another mapping of the same memory, not a copy"
    reader.close()
    arena.release(slab)
    assert (arena.num_leases, arena.used_bytes) == (0, 0)


def test_a_slab_is_stale_before_and_after_a_read(arena: Arena) -> None:
    slab = arena.lease(10, "reader", FAR)
    fill(arena, slab, 1)
    reading = arena.reader.reading(slab)
    assert bool((reading.__enter__() == 1).all())
    arena.release(slab)
    with pytest.raises(StaleSlab):
        reading.__exit__(None, None, None)
    with pytest.raises(StaleSlab), arena.reader.reading(slab):
        pytest.fail("it was stale before")
    again = arena.lease(10, "reader", FAR)
    assert again.offset == slab.offset
    assert again.generation > slab.generation
    fill(arena, again, 2)
    with pytest.raises(StaleSlab), arena.reader.reading(slab):
        pytest.fail("another slab lies there now")
    arena.release(slab)
    assert arena.num_leases == 1, "a late release of the old one does not end the new one"


def test_a_slab_that_lies_within_a_later_larger_one_is_stale(arena: Arena) -> None:
    """Its generation is not overwritten by data: generations stand apart from the blocks."""
    first, second = (arena.lease(BLOCK_BYTES, "reader", FAR) for _ in range(2))
    fill(arena, second, 1)
    arena.release(first)
    arena.release(second)
    fill(arena, arena.lease(4 * BLOCK_BYTES, "reader", FAR), second.generation)
    with pytest.raises(StaleSlab), arena.reader.reading(second):
        pytest.fail("unreachable")


@pytest.mark.parametrize("slab", [Slab(1, 5, 1), Slab(0, 0, 1), Slab(-BLOCK_BYTES, 5, 1), Slab(0, 1 << 40, 1)])
def test_a_slab_outside_the_arena_is_refused(arena: Arena, slab: Slab) -> None:
    with pytest.raises(BadHandover):
        arena.reader.check(slab)


def test_u19_a_damaged_slab_is_found_where_checksums_are_kept() -> None:
    arena = Arena(BLOCK_BYTES, checked=True)
    slab = arena.lease(1000, "reader", FAR)
    fill(arena, slab, 1)
    with arena.reader.reading(slab) as data:
        assert int(data.sum()) == 1000
    arena.reader.bytes_of(slab)[999] ^= 4
    with pytest.raises(DamagedSlab), arena.reader.reading(slab):
        pytest.fail("unreachable")
    arena.close()


def test_a_full_arena_waits_in_line_and_gives_up_in_time(arena: Arena) -> None:
    most = arena.lease((NUM_BLOCKS - 1) * BLOCK_BYTES, "reader", FAR)
    rest = arena.lease(BLOCK_BYTES, "reader", FAR)
    with pytest.raises(ArenaFull, match="readers hold the others"):
        arena.lease(1, "reader", FAR)

    def seconds_to_give_up() -> float:
        started = time.monotonic()
        with pytest.raises(ArenaFull):
            arena.lease(1, "reader", FAR, wait_until=started + 0.2)
        assert time.monotonic() - started >= 0.2
        return time.monotonic() - started

    in_time(seconds_to_give_up, 2)
    served = []

    def wait(name: str, num_blocks: int) -> None:
        arena.lease(num_blocks * BLOCK_BYTES, name, FAR, wait_until=time.monotonic() + 60)
        served.append(name)

    threads = []
    for name, num_blocks in (("large", NUM_BLOCKS), ("small", 1)):
        threads.append(threading.Thread(target=wait, args=(name, num_blocks)))
        threads[-1].start()
        while len(arena._line) < len(threads):
            time.sleep(0.001)
    arena.release(rest)
    time.sleep(0.2)
    assert served == []
    arena.release(most)
    threads[0].join(60)
    assert served == ["large"], "the small one came later, and must not starve it"
    arena.end_holder("large")
    threads[1].join(60)
    assert served == ["large", "small"]


def test_what_can_never_fit_is_said_at_once(arena: Arena) -> None:
    with pytest.raises(ArenaFull, match="make it larger"):
        arena.lease(NUM_BLOCKS * BLOCK_BYTES + 1, "reader", FAR, wait_until=FAR)


def test_deadlines_and_deaths_end_leases(arena: Arena) -> None:
    now = time.monotonic()
    late = arena.lease(NUM_BLOCKS * BLOCK_BYTES, "late", now + 0.1)
    fill(arena, late, 1)
    dead = arena.lease(BLOCK_BYTES, "dead", FAR, wait_until=now + 60)
    assert time.monotonic() >= now + 0.1, "the room is only there when the deadline has passed"
    with pytest.raises(StaleSlab):
        arena.reader.check(late)
    arena.end_holder("dead")
    with pytest.raises(StaleSlab):
        arena.reader.check(dead)
    assert arena.used_bytes == 0


def test_a_slab_is_not_given_to_another_while_it_is_written(arena: Arena) -> None:
    slab = arena.lease(NUM_BLOCKS * BLOCK_BYTES, "reader", FAR)
    writing = arena.writing(slab)
    writing.__enter__()
    arena.end_holder("reader")
    with pytest.raises(StaleSlab):
        arena.reader.check(slab)
    with pytest.raises(ArenaFull):
        arena.lease(1, "other", FAR)
    with pytest.raises(StaleSlab, match="while its slab was written"):
        writing.__exit__(None, None, None)
    assert arena.used_bytes == 0
    with pytest.raises(StaleSlab), arena.writing(slab):
        pytest.fail("it has ended")


def test_writing_that_breaks_ends_the_lease(arena: Arena) -> None:
    slab = arena.lease(10, "reader", FAR)
    with pytest.raises(ZeroDivisionError), arena.writing(slab):
        _ = 1 / 0
    assert arena.num_leases == 0
    with pytest.raises(StaleSlab):
        arena.reader.check(slab)


def test_a_reader_follows_the_writer_and_notices_when_it_stands_still(arena: Arena) -> None:
    slab = arena.lease(1000, "reader", FAR)
    with arena.writing(slab):
        arena.advance(slab, 400)
        arena.reader.wait_written(slab, 400)
        with pytest.raises(PeerStalled, match="400 of 1000"):
            arena.reader.wait_written(slab, 401, stall_seconds=0.05)
    arena.reader.wait_written(slab, 1000, stall_seconds=0)


def test_the_last_byte_comes_with_the_checksum() -> None:
    """A reader that follows must not compare before there is something to compare with."""
    arena = Arena(BLOCK_BYTES, checked=True)
    slab = arena.lease(1000, "reader", FAR)
    with arena.writing(slab) as data:
        data.fill_(3)
        arena.advance(slab, 1000)
        assert arena.reader.written(slab) == 999
    with arena.reader.reading(slab, stall_seconds=0):
        pass
    arena.close()


def test_random_interleavings_leave_nothing(seed: int) -> None:
    """300 courses of leases that are written, break, are released, run late or lose their reader, from 2 threads."""
    generator = random.Random(seed)
    arena = Arena(NUM_BLOCKS * BLOCK_BYTES, checked=True)

    def course(generator: random.Random) -> None:
        slabs = []
        for _ in range(generator.randrange(1, 12)):
            holder = f"reader {generator.randrange(3)}"
            deadline = time.monotonic() + generator.choice([0.0, 0.0005, 1000.0])
            try:
                slab = arena.lease(generator.randrange(1, 6 * BLOCK_BYTES), holder, deadline, time.monotonic() + 0.001)
                slabs.append(slab)
                if generator.random() < 0.8:
                    with arena.writing(slab) as data:
                        data[: generator.randrange(1, 2000)] = generator.randrange(256)
                        if generator.random() < 0.1:
                            raise InterruptedError
                with arena.reader.reading(slab, stall_seconds=0.0):
                    pass
            except (ArenaFull, StaleSlab, PeerStalled, InterruptedError):
                pass
            if generator.random() < 0.3:
                arena.end_holder(f"reader {generator.randrange(3)}")
            if slabs and generator.random() < 0.5:
                arena.release(generator.choice(slabs))
        for slab in slabs:
            arena.release(slab)

    def courses(seed: float) -> None:
        own = random.Random(seed)
        for _ in range(150):
            course(own)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(courses, [generator.random(), generator.random()]))
    assert (arena.num_leases, arena.used_bytes) == (0, 0)
    assert arena._free.ranges == [(0, NUM_BLOCKS)]
    assert not arena.reader.table[:, 0].any(), "no generation is left beside a block"
    arena.close()


def test_s36_memory_has_no_name_and_goes_with_its_last_user() -> None:
    leftovers, maps = Leftovers(), set(mappings())
    made = Memory.create(1 << 20)
    other = Memory(os.dup(made.fd))
    made.data[3] = 5
    assert other.data[3] == 5
    assert len(set(mappings()) - maps) == 2
    leftovers.assert_none("names")
    view = made.data[:10]
    made.close()
    made.close()
    assert view[3] == 5, "a view outlives the memory's own end"
    del view
    other.close()
    leftovers.assert_none()


def test_memory_that_could_shrink_is_refused() -> None:
    leftovers = Leftovers()
    with pytest.raises(BadHandover, match="sealed"):
        Memory(os.memfd_create("plain", os.MFD_CLOEXEC))
    with pytest.raises(BadHandover, match="sealed"):
        Memory(os.open("/dev/null", os.O_RDWR))
    leftovers.assert_none()
    made = Memory.create(4096)
    for size in (0, 8192):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(made.fd, size)
    made.close()


def test_memory_that_is_no_arena_is_refused() -> None:
    made = Memory.create(1 << 16)
    with pytest.raises(BadHandover, match="not an arena"):
        ArenaReader(made)
    made.close()


def test_s49_more_than_the_machine_has_is_refused_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 1 << 20)
    with pytest.raises(BadConfig, match=r"2097152 bytes .* and 1048576 are available"):
        Memory.create(2 << 20)


def test_s37_what_is_pinned_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 times; the driver is replaced by one that only counts."""
    pinned: dict[int, int] = {}

    def register(address: int, num_bytes: int, flags: int) -> int:
        assert address not in pinned
        pinned[address] = num_bytes
        return 0

    def unregister(address: int) -> int:
        del pinned[address]
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for _ in range(20):
        arena = Arena(BLOCK_BYTES)
        arena.memory.register()
        assert list(pinned.values()) == [arena.memory.data.nbytes]
        arena.close()
        assert not pinned
