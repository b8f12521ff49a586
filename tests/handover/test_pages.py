"""Stored rows go through a slab bit by bit, whatever the codec, and a shared pool is read in place."""

import importlib.util
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from leftovers import Leftovers
from timing import wait_until
from torch import Tensor

from underpaint.errors import OutOfPages
from underpaint.handover.arena import Arena, Slab
from underpaint.handover.faults import BadHandover, DamagedSlab, PeerStalled, StaleSlab
from underpaint.handover.messages import OpenPool
from underpaint.handover.pages import Mover, chunks, slab_bytes
from underpaint.handover.pools import RemotePool, map_pool, planes, share_pool
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import CacheShape, PagePool, Run, View

SHAPE = CacheShape(num_layers=3, num_heads=3, head_dim=8, dtype=torch.float32)
PAGE_ROWS = 4
FAR = time.monotonic() + 1e6
HERE = Path(__file__).parent


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(4 << 20, checked=True)
    yield made
    made.close()


def make_pool(codec: str = "fp32", num_pages: int = 40, memory: Tensor | None = None) -> PagePool:
    budget = num_pages * PAGE_ROWS * SHAPE.row_bytes(CODECS[codec])
    return PagePool(SHAPE, CODECS[codec], budget, "cpu", PAGE_ROWS, memory)


def scattered(pool: PagePool, rows: list[int], generator: random.Random) -> tuple[Run, ...]:
    """Runs in pages that do not follow each other."""
    taken = [pool.allocate(PAGE_ROWS) for _ in range(pool.num_free)]
    generator.shuffle(taken)
    for run in taken:
        pool.release(run)
    return tuple(pool.allocate(num_rows) for num_rows in rows)


def write(pool: PagePool, runs: tuple[Run, ...]) -> None:
    slots = pool.slots(runs)
    for layer in range(SHAPE.num_layers):
        pool.write(layer, slots, *(torch.randn(len(slots), SHAPE.num_heads, SHAPE.head_dim) for _ in range(2)))


def same(pool: PagePool, runs: tuple[Run, ...], other: PagePool, others: tuple[Run, ...]) -> bool:
    """Bit by bit, scales included."""
    ours, theirs = pool.slots(runs), other.slots(others)
    return all(
        torch.equal(a[ours].view(torch.uint8), b[theirs].view(torch.uint8))
        for layer in range(SHAPE.num_layers)
        for a, b in zip(planes(pool, layer), planes(other, layer), strict=True)
    )


@pytest.mark.parametrize("chunk_bytes", [1, 2000, 1 << 30])
@pytest.mark.parametrize("codec", CODECS)
def test_rows_arrive_bit_by_bit(codec: str, chunk_bytes: int, arena: Arena, seed: int) -> None:
    torch.manual_seed(seed)
    generator = random.Random(seed)
    rows = [generator.randrange(0, 14) for _ in range(generator.randrange(1, 6))]
    source, target = make_pool(codec), make_pool(codec)
    ours, theirs = scattered(source, rows, generator), scattered(target, rows, generator)
    write(source, ours)
    untouched = {layer: [plane.clone() for plane in planes(target, layer)] for layer in range(SHAPE.num_layers)}
    slab = arena.lease(slab_bytes(source, sum(rows)), "reader", FAR)
    gathering = threading.Thread(target=Mover(source, chunk_bytes).gather, args=(ours, arena, slab))
    gathering.start()
    Mover(target, chunk_bytes).scatter(arena.reader, slab, theirs, stall_seconds=60)
    gathering.join()
    assert same(source, ours, target, theirs)
    others = sorted(set(range(target.num_pages * PAGE_ROWS)) - set(target.slots(theirs).tolist()))
    for layer, before in untouched.items():
        for plane, copy in zip(planes(target, layer), before, strict=True):
            assert torch.equal(plane[others].view(torch.uint8), copy[others].view(torch.uint8)), "exactly those rows"
    view = View(target, theirs)
    for layer in range(SHAPE.num_layers):
        for a, b in zip(view.read(layer), View(source, ours).read(layer), strict=True):
            assert torch.equal(a, b)


def test_u22_exactly_the_rows_of_the_prefix_are_moved() -> None:
    """Not the rest of its last page."""
    pool = make_pool("fp8_v")
    row_bytes = sum(plane[0].nbytes for plane in planes(pool, 0))
    assert row_bytes * SHAPE.num_layers == SHAPE.row_bytes(CODECS["fp8_v"])
    for num_rows in (1, 5, 13):
        pieces = list(chunks(pool, num_rows, 1))
        moved = sum(part.row_bytes * num_rows for piece in pieces for part in piece.parts)
        assert moved == num_rows * SHAPE.row_bytes(CODECS["fp8_v"])
        assert pieces[-1].stop == slab_bytes(pool, num_rows)
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]


def test_a_slab_of_another_number_of_rows_is_refused(arena: Arena) -> None:
    pool = make_pool()
    runs = (pool.allocate(9),)
    slab = arena.lease(slab_bytes(pool, 8), "reader", FAR)
    with pytest.raises(BadHandover, match="9 rows take"):
        Mover(pool).gather(runs, arena, slab)
    with pytest.raises(BadHandover, match="9 rows take"):
        Mover(pool).scatter(arena.reader, slab, runs)


def test_a_reader_follows_layer_by_layer(arena: Arena) -> None:
    """It has the first layer in pages before the second is written."""
    pool, target = make_pool(), make_pool()
    runs, there = (pool.allocate(10),), (target.allocate(10),)
    write(pool, runs)
    mover, slots = Mover(target, chunk_bytes=1), target.slots(there)
    slab = arena.lease(slab_bytes(pool, 10), "reader", FAR)
    reading = threading.Thread(target=mover.scatter, args=(arena.reader, slab, there, 60.0))
    for layer in range(SHAPE.num_layers):
        for plane in planes(target, layer):
            plane.zero_()
    reading.start()
    first = next(chunks(pool, 10, 1))
    wanted = first.parts[-1].plane[pool.slots(runs)]
    with arena.writing(slab) as data:
        for piece in chunks(pool, 10, 1):
            for part in piece.parts:
                part.of(data, 10).copy_(part.plane[pool.slots(runs)])
            if piece.start == first.start:
                arena.advance(slab, first.stop)
                wait_until(lambda: torch.equal(planes(target, 0)[-1][slots], wanted))
                assert not planes(target, 1)[0].any()
    reading.join(60)
    assert same(pool, runs, target, there)


def test_a_writer_that_stops_and_a_slab_that_ends_are_noticed(arena: Arena) -> None:
    pool = make_pool()
    runs = (pool.allocate(10),)
    slab = arena.lease(slab_bytes(pool, 10), "reader", FAR)
    with pytest.raises(PeerStalled):
        Mover(pool).scatter(arena.reader, slab, runs, stall_seconds=0.05)
    arena.end_holder("reader")
    with pytest.raises(StaleSlab):
        Mover(pool).scatter(arena.reader, slab, runs)
    with pytest.raises(StaleSlab):
        Mover(pool).gather(runs, arena, slab)


def test_a_slab_that_ends_right_behind_the_copy_is_noticed(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was copied may be another's by then."""
    pool = make_pool()
    runs = (pool.allocate(10),)
    slab = arena.lease(slab_bytes(pool, 10), "reader", FAR)
    mover = Mover(pool)
    mover.gather(runs, arena, slab)
    wait = arena.reader.wait_written

    def wait_and_end(slab: Slab, num_bytes: int, stall_seconds: float) -> None:
        wait(slab, num_bytes, stall_seconds)
        arena.release(slab)

    monkeypatch.setattr(arena.reader, "wait_written", wait_and_end)
    with pytest.raises(StaleSlab):
        mover.scatter(arena.reader, slab, runs)


def test_u19_damage_on_the_way_is_found(arena: Arena) -> None:
    pool = make_pool("fp8")
    runs = (pool.allocate(10),)
    write(pool, runs)
    slab = arena.lease(slab_bytes(pool, 10), "reader", FAR)
    Mover(pool).gather(runs, arena, slab)
    arena.reader.bytes_of(slab)[17] ^= 1
    with pytest.raises(DamagedSlab):
        Mover(pool).scatter(arena.reader, slab, runs)


@pytest.mark.parametrize("codec", CODECS)
def test_a_shared_pool_is_read_in_place(codec: str) -> None:
    """Another mapping of the same memory: what is written later is seen, and no byte has moved."""
    leftovers = Leftovers()
    budget = 12 * PAGE_ROWS * SHAPE.row_bytes(CODECS[codec])
    shared = share_pool(SHAPE, CODECS[codec], budget, "cpu", PAGE_ROWS)
    message, descriptors = shared.offer()
    mapped = map_pool(message, [os.dup(fd) for fd in descriptors], "cpu")
    assert mapped.pool.num_pages == shared.pool.num_pages == 12
    runs = (shared.pool.allocate(5), shared.pool.allocate(7))
    write(shared.pool, runs)
    assert same(shared.pool, runs, mapped.pool, runs)
    for ours, theirs in zip(planes(shared.pool, 1), planes(mapped.pool, 1), strict=True):
        assert ours.data_ptr() != theirs.data_ptr()
    with pytest.raises(OutOfPages):
        mapped.pool.allocate(1)
    for run in runs:
        mapped.pool.retain(run)
        mapped.pool.release(run)
    mapped.close()
    shared.close()
    del mapped, shared, ours, theirs  # the mappings last as long as tensors view them
    leftovers.assert_none()


@pytest.mark.parametrize("codec", CODECS)
def test_planes_in_given_memory_do_not_overlap(codec: str, seed: int) -> None:
    torch.manual_seed(seed)
    budget = 6 * PAGE_ROWS * SHAPE.row_bytes(CODECS[codec])
    shared = share_pool(SHAPE, CODECS[codec], budget, "cpu", PAGE_ROWS)
    everything = [plane.view(torch.uint8).flatten() for layer in range(3) for plane in planes(shared.pool, layer)]
    for i, plane in enumerate(everything):
        plane.fill_(i)
    assert all(bool((plane == i).all()) for i, plane in enumerate(everything))
    assert sum(plane.nbytes for plane in everything) == budget
    shared.close()


def test_a_pool_that_is_not_what_it_says_is_refused() -> None:
    shared = share_pool(SHAPE, CODECS["fp32"], 4 * PAGE_ROWS * SHAPE.row_bytes(CODECS["fp32"]), "cpu", PAGE_ROWS)
    message, (fd,) = shared.offer()
    larger = OpenPool(**{name: getattr(message, name) for name in message.__struct_fields__} | {"num_pages": 99})
    other = OpenPool(**{name: getattr(message, name) for name in message.__struct_fields__} | {"codec": "int2"})
    with pytest.raises(BadHandover, match="smaller than it says"):
        map_pool(larger, [os.dup(fd)], "cpu")
    with pytest.raises(BadHandover, match="not a codec"):
        map_pool(other, [fd], "cpu")
    with pytest.raises(BadHandover, match="one descriptor"):
        map_pool(message, [], "cpu")
    with pytest.raises(BadHandover, match="use the shared arena"):
        RemotePool(message, "cpu")
    shared.close()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("script", "interpret"), [("page_copy_cases.py", "1"), ("page_copy_report.py", "0")])
def test_the_copy_kernel_without_a_gpu(script: str, interpret: str, seed: int, tmp_path: Path) -> None:
    """Right under Triton's interpreter, and compiled for Hopper with 16-byte accesses and without spills."""
    root = str(HERE.parents[1])
    variables = {
        **os.environ,
        "TRITON_INTERPRET": interpret,
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": root,
    }
    done = subprocess.run([sys.executable, HERE / script, str(seed)], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr


def test_memory_of_a_mapped_pool_stays_as_long_as_it_is_viewed() -> None:
    shared = share_pool(SHAPE, CODECS["fp32"], 4 * PAGE_ROWS * SHAPE.row_bytes(CODECS["fp32"]), "cpu", PAGE_ROWS)
    message, (fd,) = shared.offer()
    mapped = map_pool(message, [os.dup(fd)], "cpu")
    planes(shared.pool, 0)[0].fill_(3)
    shared.close()
    assert bool((planes(mapped.pool, 0)[0] == 3).all()), "the owner has gone, the memory has not"
    mapped.close()
