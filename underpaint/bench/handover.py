"""How fast a prefix gets from understanding to generation: two real processes, every way there is, beside the copy
bandwidth of pinned memory that is measured in the same run."""

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import torch

from underpaint.errors import BadConfig, EngineFailure
from underpaint.handover.arena import Arena, ArenaReader
from underpaint.handover.channel import Channel, pair
from underpaint.handover.faults import PeerGone
from underpaint.handover.memory import Memory
from underpaint.handover.messages import Coming, InPages, OpenArena, OpenPool, PaintOrder, ToGeneration
from underpaint.handover.pages import Mover, slab_bytes
from underpaint.handover.pools import RemotePool, map_pool, planes, share_pool
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import CacheShape, PagePool, Run, pages_for
from underpaint.report import Bytes, Cell, Report, Table, machine

Way = Literal["shm", "ipc", "colocate"]
WAYS: tuple[Way, ...] = ("shm", "ipc", "colocate")
TURNS = 20
PATIENCE_SECONDS = 120.0
PAGE_ROWS = 128


@dataclass(frozen=True)
class Size:
    """A prefix: ``num_rows`` of what ``shape`` says, stored by ``codec``."""

    shape: CacheShape
    num_rows: int
    codec: str


# SenseNova-U1: an edit of one 2048 x 2048 reference, 4,096 rows of the picture and 286 of text; 719 MiB a branch.
RELEASED = Size(CacheShape(42, 8, 128, torch.bfloat16), 4382, "bf16")
SMALL = Size(CacheShape(8, 8, 128, torch.bfloat16), 512, "bf16")


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """The rows of an order can be read by generation since ``at``; ``digest``: of what they are there, if asked for."""

    at: float
    digest: int


def handover(devices: str = "auto", ways: Sequence[str] = (), num_rows: int | None = None) -> Report:
    """``devices``: understanding's and generation's, such as ``0,1``; one for both; ``cpu``; or ``auto``. ``ways``:
    some of ``WAYS``, by default all that these devices have. ``num_rows``: of the prefix; by default a released
    model's on a GPU, and a small one's on a CPU. Raises BadConfig.
    """
    here, there = parse_devices(devices)
    chosen = choose_ways(ways, here, there)
    size = SMALL if here == "cpu" else RELEASED
    if num_rows is not None:
        size = replace(size, num_rows=num_rows)
    if size.num_rows < 1:
        raise BadConfig(f"rows is {size.num_rows}; a prefix has at least one")
    understanding = Understanding(size, here)
    try:
        down, up = copy_bandwidth(understanding.arena, here, there)
        rows = [_row(way, understanding, here if way == "colocate" else there, min(down, up)) for way in chosen]
    finally:
        understanding.close()
    between = "private and shared memory" if here == "cpu" else "a GPU and pinned memory"
    facts: list[tuple[Cell, ...]] = [
        (f"one large copy between {between}, down: GB/s", down / 1e9),
        ("the same, up: GB/s", up / 1e9),
        ("pinning the arena: ms", "no GPU" if here == "cpu" else understanding.pin_seconds * 1e3),
        ("the prefix in a slab", Bytes(understanding.num_bytes)),
    ]
    shape = size.shape
    columns = ("way", "bytes moved", "median ms", "worst ms", "GB/s", "of one copy", "arrived as it was")
    title = (
        f"A prefix of {size.num_rows} rows, {shape.num_layers} layers, {shape.num_heads} heads x {shape.head_dim}, "
        f"{size.codec}, in scattered pages of {PAGE_ROWS}; {TURNS} times"
    )
    names = machine(here) + ("" if here == there else f"; from {here} to {there}")
    return Report((names,), (Table("Copies", ("what", "measured"), facts), Table(title, columns, rows)))


def parse_devices(text: str) -> tuple[str, str]:
    """Understanding's device and generation's. Raises BadConfig."""
    count = torch.cuda.device_count()
    if text == "auto":
        text = "cpu" if not count else ",".join(map(str, range(min(count, 2))))
    if text == "cpu":
        return "cpu", "cpu"
    numbers = text.split(",")
    if len(numbers) > 2 or not all(number.isdecimal() and int(number) < count for number in numbers):
        raise BadConfig(f"devices is {text!r}; it must be auto, cpu, or one or two numbers of GPUs below {count}")
    return f"cuda:{numbers[0]}", f"cuda:{numbers[-1]}"


def choose_ways(ways: Sequence[str], here: str, there: str) -> tuple[Way, ...]:
    """Those of ``WAYS`` that are named, or that these devices have. Raises BadConfig."""
    peers = here != there
    if unknown := set(ways) - set(WAYS):
        raise BadConfig(f"{', '.join(sorted(unknown))} is no way to hand over; use {', '.join(WAYS)}")
    if "ipc" in ways and not peers:
        raise BadConfig("pages are copied by ipc between two GPUs; name two devices, or leave that way out")
    return tuple(way for way in WAYS if (way in ways if ways else peers or way != "ipc"))


class Understanding:
    """This process's end: a shared pool with the prefix in it, and an arena."""

    def __init__(self, size: Size, device: str) -> None:
        codec = CODECS[size.codec]
        num_pages = 2 * pages_for(size.num_rows, PAGE_ROWS)
        self.device = device
        self.shared = share_pool(
            size.shape, codec, num_pages * PAGE_ROWS * size.shape.row_bytes(codec), device, PAGE_ROWS
        )
        self.pool = self.shared.pool
        self.run = scattered_run(self.pool, size.num_rows)
        for layer in range(size.shape.num_layers):
            for plane in planes(self.pool, layer):
                plane.view(torch.uint8).random_(256)
        self.num_bytes = slab_bytes(self.pool, size.num_rows)
        self.arena = Arena(self.num_bytes)
        started = time.monotonic()
        if device != "cpu":
            self.arena.memory.register()
        self.pin_seconds = time.monotonic() - started
        self.mover = Mover(self.pool)
        self.digest = digest(self.pool, self.run)

    def hand_over(self, channel: Channel, way: Way) -> Arrived:
        """Once, and wait until it has arrived."""
        channel.send(PaintOrder("", (), (), InPages((self.run,), (None,), self.pool.codec.name)))
        if way != "shm":
            return arrived(channel)
        slab = self.arena.lease(self.num_bytes, "generation", time.monotonic() + PATIENCE_SECONDS)
        channel.send(Coming("", slab))
        self.mover.gather([self.run], self.arena, slab)
        answer = arrived(channel)
        self.arena.release(slab)
        return answer

    def close(self) -> None:
        self.arena.close()
        self.shared.close()


def _row(way: Way, understanding: Understanding, device: str, bandwidth: float) -> tuple[Cell, ...]:
    with generation(way, understanding, device) as channel:
        seconds, digests = [], []
        for _ in range(TURNS + 1):
            started = time.monotonic()
            answer = understanding.hand_over(channel, way)
            seconds.append(answer.at - started)
            digests.append(answer.digest)
    seconds = sorted(seconds[1:])  # the first one also makes buffers and compiles
    if set(digests) != {understanding.digest}:
        raise EngineFailure(f"by {way}, the rows that arrived are not those that were handed over")
    median, worst = seconds[len(seconds) // 2], seconds[-1]
    if way == "colocate":
        return way, Bytes(0), median * 1e3, worst * 1e3, "", "", "yes, read in place"
    rate = understanding.num_bytes / median
    return way, Bytes(understanding.num_bytes), median * 1e3, worst * 1e3, rate / 1e9, rate / bandwidth, "yes"


@contextmanager
def generation(way: Way, understanding: Understanding, device: str) -> Iterator[Channel]:
    """A channel to the other process, which ends with the block."""
    ours, theirs = pair()
    process = multiprocessing.get_context("spawn").Process(target=generate, args=(theirs, way, device), daemon=True)
    process.start()
    theirs.close()
    with Channel(ours, Arrived) as channel:
        channel.send(OpenArena(), [understanding.arena.memory.fd])
        channel.send(*understanding.shared.offer())
        if arrived(channel).digest:
            raise EngineFailure("the other process did not begin")
        yield channel
    process.join(PATIENCE_SECONDS)


def arrived(channel: Channel) -> Arrived:
    delivery = channel.receive(PATIENCE_SECONDS)
    if delivery is None:
        raise EngineFailure(f"the other process did not answer in {PATIENCE_SECONDS:.0f} s")
    assert isinstance(delivery.message, Arrived)
    return delivery.message


def generate(sock: socket.socket, way: Way, device: str) -> None:
    """The other process, until its peer is gone: rows into pages of its own, or read where they are."""
    channel = Channel(sock, ToGeneration)
    first, second = channel.receive(PATIENCE_SECONDS), channel.receive(PATIENCE_SECONDS)
    assert first is not None
    assert second is not None
    assert isinstance(second.message, OpenPool)
    reader = ArenaReader(Memory(first.descriptors[0]))
    take = _taker(way, channel, reader, second.message, second.descriptors, device)
    channel.send(Arrived(0.0, 0))
    with suppress(PeerGone):
        while delivery := channel.receive(PATIENCE_SECONDS):
            assert isinstance(delivery.message, PaintOrder)
            pool, run = take(delivery.message)
            at = time.monotonic()
            channel.send(Arrived(at, digest(pool, run)))


def _taker(
    way: Way, channel: Channel, reader: ArenaReader, offer: OpenPool, descriptors: Sequence[int], device: str
) -> Callable[[PaintOrder], tuple[PagePool, Run]]:
    """What is to be done with an order; returns where its rows can be read."""
    if way == "colocate":
        mapped = map_pool(offer, descriptors, device)
        return lambda order: (mapped.pool, _in_pages(order))
    budget = offer.num_pages * offer.page_rows
    shape = CacheShape(offer.num_layers, offer.num_heads, offer.head_dim, getattr(torch, offer.dtype))
    codec = CODECS[offer.codec]
    pool = PagePool(shape, codec, budget * shape.row_bytes(codec), device, offer.page_rows)
    mover, runs = Mover(pool), {}
    if device != "cpu":
        torch.cuda.set_device(device)
        reader.memory.register()
    remote = RemotePool(offer, device) if way == "ipc" else None

    def take(order: PaintOrder) -> tuple[PagePool, Run]:
        assert order.prefix is not None
        (num_rows,) = order.prefix.rows
        if num_rows not in runs:
            runs[num_rows] = scattered_run(pool, num_rows)
        if remote is not None:
            mover.fetch(remote, [_in_pages(order)], [runs[num_rows]])
        else:
            coming = channel.receive(PATIENCE_SECONDS)
            assert coming is not None
            assert isinstance(coming.message, Coming)
            mover.scatter(reader, coming.message.slab, [runs[num_rows]], stall_seconds=PATIENCE_SECONDS)
        return pool, runs[num_rows]

    return take


def _in_pages(order: PaintOrder) -> Run:
    assert order.prefix is not None
    return order.prefix.runs[0]


def scattered_run(pool: PagePool, num_rows: int) -> Run:
    """Pages that do not follow each other, as after a long day."""
    pages = [pool.allocate(pool.page_rows) for _ in range(pool.num_free)]
    for index in torch.randperm(len(pages)).tolist():
        pool.release(pages[index])
    return pool.allocate(num_rows)


def digest(pool: PagePool, run: Run) -> int:
    """A number that changes with any byte of the rows, and with their order."""
    slots = pool.slots([run])
    place = torch.arange(1, len(slots) + 1, device=slots.device)
    total = 0
    for layer in range(pool.shape.num_layers):
        for plane in planes(pool, layer):
            rows = plane[slots].view(torch.uint8).flatten(1)
            weight = torch.arange(1, rows.shape[1] + 1, device=slots.device)
            total = (total * 31 + int(((rows * weight).sum(1) * place).sum())) % (1 << 61)
    return total


def copy_bandwidth(arena: Arena, here: str, there: str) -> tuple[float, float]:
    """Bytes a second of one large copy into the arena from ``here``, and out of it to ``there``; medians of 7."""
    shared = arena.reader.blocks
    rates = []
    for device, into in ((here, True), (there, False)):
        private = torch.zeros(shared.nbytes, dtype=torch.uint8, device=device)
        source, target = (private, shared) if into else (shared, private)
        seconds = []
        for _ in range(8):
            started = time.monotonic()
            target.copy_(source, non_blocking=True)
            if device != "cpu":
                torch.cuda.synchronize(device)
            seconds.append(time.monotonic() - started)
        rates.append(shared.nbytes / sorted(seconds[1:])[3])
    return rates[0], rates[1]
