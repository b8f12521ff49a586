"""Is the handover right on this machine, and does it leave anything behind? Made for GPUs, whose kernels, pinning and
IPC no test without one can reach; on a CPU it checks the same things there."""

import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

import torch

from underpaint.bench.handover import (
    PAGE_ROWS,
    PATIENCE_SECONDS,
    SMALL,
    Arrived,
    Size,
    Understanding,
    Way,
    arrived,
    choose_ways,
    generate,
    parse_devices,
    scattered_run,
)
from underpaint.errors import EngineFailure
from underpaint.handover.arena import Arena
from underpaint.handover.channel import Channel, pair
from underpaint.handover.faults import PeerGone
from underpaint.handover.messages import OpenArena
from underpaint.handover.pages import Mover, slab_bytes
from underpaint.handover.pools import planes
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import CacheShape, PagePool, pages_for
from underpaint.report import Cell, Report, Table, machine

NUM_KILLS = 20
NUM_PINS = 20
SHAPES = (
    CacheShape(5, 8, 128, torch.bfloat16),
    CacheShape(3, 3, 24, torch.float32),
    CacheShape(2, 32, 128, torch.float16),
)
MEMORY_SLACK_BYTES = 64 << 20
"""What the driver may keep of a device's memory after a first use."""
NAME_SECONDS = 10.0
"""How long a name in /dev/shm may be another program's."""


def check(devices: str = "auto", seed: int | None = None, num_kills: int = NUM_KILLS) -> Report:
    """``devices``: see ``handover``. ``num_kills``: processes killed, a way. Every line is a check that passed; the
    first that fails raises EngineFailure."""
    here, there = parse_devices(devices)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    torch.manual_seed(seed)
    rows: list[tuple[Cell, ...]] = []

    def line(what: str, times: int, measure: Callable[[], object]) -> None:
        started = time.monotonic()
        measure()
        rows.append((what, times, time.monotonic() - started))

    line("rows through the arena, every codec, bit by bit", 2 * len(CODECS) * len(SHAPES), lambda: copies(here, there))
    line("memory pinned and unpinned", NUM_PINS, lambda: pins(here))
    for way in choose_ways((), here, there):
        device = here if way == "colocate" else there
        line(f"generation killed, {way}", num_kills, partial(kills, way, here, device, num_kills, seed))
    return Report((machine(here), f"seed {seed}"), (Table("What held", ("check", "times", "seconds"), rows),))


def copies(here: str, there: str) -> None:
    """Gathered on one device and scattered on the other, at once, from scattered pages into scattered pages."""
    for shape in SHAPES:
        for codec in CODECS.values():
            for chunk_bytes in (1, 32 << 20):
                num_rows = int(torch.randint(1, 700, ()))
                budget = 2 * pages_for(num_rows, PAGE_ROWS) * PAGE_ROWS * shape.row_bytes(codec)
                pools = [PagePool(shape, codec, budget, device, PAGE_ROWS) for device in (here, there)]
                runs = [scattered_run(pool, num_rows) for pool in pools]
                for layer in range(shape.num_layers):
                    for plane in planes(pools[0], layer):
                        plane.view(torch.uint8).random_(256)
                arena = Arena(slab_bytes(pools[0], num_rows), checked=True)
                if here != "cpu":
                    arena.memory.register()
                slab = arena.lease(slab_bytes(pools[0], num_rows), "reader", time.monotonic() + PATIENCE_SECONDS)
                gathering = threading.Thread(target=Mover(pools[0], chunk_bytes).gather, args=([runs[0]], arena, slab))
                gathering.start()
                Mover(pools[1], chunk_bytes).scatter(arena.reader, slab, [runs[1]], stall_seconds=PATIENCE_SECONDS)
                gathering.join()
                ours, theirs = (pool.slots([run]) for pool, run in zip(pools, runs, strict=True))
                for layer in range(shape.num_layers):
                    for a, b in zip(planes(pools[0], layer), planes(pools[1], layer), strict=True):
                        same = torch.equal(a[ours].view(torch.uint8).cpu(), b[theirs].view(torch.uint8).cpu())
                        _must(same, f"{codec.name} rows of {shape} changed on the way, in layer {layer}")
                arena.close()


def pins(device: str) -> None:
    """Each time the same memory could be pinned again, so it had been unpinned."""
    for _ in range(NUM_PINS):
        arena = Arena(64 << 20)
        if device != "cpu":
            arena.memory.register()
            _must(arena.memory.data.is_pinned(), "CUDA does not say that the arena is pinned")
        arena.close()


def kills(way: Way, here: str, device: str, num_kills: int, seed: int) -> None:
    """The other process is killed at any moment of a handover; this one gets everything back."""
    generator = random.Random(seed)
    size = SMALL if here == "cpu" else Size(SMALL.shape, 8192, SMALL.codec)
    understanding = Understanding(size, here)
    resource_tracker.ensure_running()  # Python's own, whose descriptor stays
    free_before, descriptors, names = None, _num_descriptors(), _names()
    for ours, process in _others(way, device, num_kills):
        with Channel(ours, Arrived) as channel:
            channel.send(OpenArena(), [understanding.arena.memory.fd])
            channel.send(*understanding.shared.offer())
            arrived(channel)
            understanding.hand_over(channel, way)
            assert process.pid is not None
            timer = threading.Timer(generator.random() * 0.02, os.kill, (process.pid, signal.SIGKILL))
            timer.start()
            with suppress(PeerGone):
                while True:
                    understanding.hand_over(channel, way)
            understanding.arena.end_holder("generation")
            timer.join()
            process.join(PATIENCE_SECONDS)
            process.close()
        _must(understanding.arena.used_bytes == 0, "slabs of a dead process are still held")
        free = {name: torch.cuda.mem_get_info(name)[0] for name in {here, device} if name != "cpu"}
        free_before = free_before or free
        for name in free:
            lost = free_before[name] - free[name]
            _must(lost < MEMORY_SLACK_BYTES, f"{lost} bytes of {name} are held by a process that is dead")
    check_nothing_left(descriptors, names)
    understanding.close()


def check_nothing_left(num_descriptors: int, names: set[str]) -> None:
    """There are no more descriptors than that, and no other names in /dev/shm. Raises EngineFailure.

    Fewer descriptors are what Python has collected meanwhile; a name that goes soon is another program's, which makes
    one for a moment.
    """
    until = time.monotonic() + NAME_SECONDS
    while (more := _names() - names) and time.monotonic() < until:
        time.sleep(0.05)
    _must(not more, f"names in /dev/shm were left: {sorted(more)}")
    now = _num_descriptors()
    _must(now <= num_descriptors, f"{num_descriptors} descriptors before, {now} after")


def _others(way: Way, device: str, count: int) -> Iterator[tuple[socket.socket, BaseProcess]]:
    """``count`` processes and our ends of their channels. Several start at once: importing takes them longest."""
    at_once = os.cpu_count() or 1
    for first in range(0, count, at_once):
        batch = []
        for _ in range(min(at_once, count - first)):
            ours, theirs = pair()
            arguments = (theirs, way, device)
            process = multiprocessing.get_context("spawn").Process(target=generate, args=arguments, daemon=True)
            process.start()
            theirs.close()
            batch.append((ours, process))
        yield from batch


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _names() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _must(holds: bool, sentence: str) -> None:
    if not holds:
        raise EngineFailure(sentence)
