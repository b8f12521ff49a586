"""What the other process does in ``test_processes``: the ends of a handover, without models."""

import itertools
import os
import socket
import time
from contextlib import suppress

import torch
from torch import Tensor

from underpaint.handover.arena import Arena, ArenaReader, Slab
from underpaint.handover.channel import Channel
from underpaint.handover.faults import ArenaFull, PeerGone
from underpaint.handover.memory import Memory
from underpaint.handover.messages import (
    Cancel,
    Coming,
    InPages,
    OpenArena,
    OpenPool,
    Painted,
    PaintOrder,
    Release,
    ToGeneration,
    ToUnderstanding,
)
from underpaint.handover.orders import Terms, write_tensors
from underpaint.handover.pages import Mover, slab_bytes
from underpaint.handover.pools import MappedPool, SharedPool, map_pool, planes, share_pool
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import CacheShape, PagePool, Run

SHAPE = CacheShape(num_layers=6, num_heads=4, head_dim=32, dtype=torch.float32)
CODEC = CODECS["fp32"]
PAGE_ROWS = 16
NUM_ROWS = 300
ARENA_BYTES = 16 << 20
BUDGET = 64 * PAGE_ROWS * SHAPE.row_bytes(CODEC)
PATIENCE = 60.0
torch.set_num_threads(1)


class Writer:
    """Understanding's end: a shared pool with one prefix, and an arena that copies of it go through."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.num_painted = 0
        self.theirs: ArenaReader | None = None
        self.arena = Arena(ARENA_BYTES)
        self.shared: SharedPool = share_pool(SHAPE, CODEC, BUDGET, "cpu", PAGE_ROWS)
        self.run = self.shared.pool.allocate(NUM_ROWS)
        self.mover = Mover(self.shared.pool, chunk_bytes=1)
        for layer in range(SHAPE.num_layers):
            for plane in planes(self.shared.pool, layer):
                plane.copy_(torch.randn(plane.shape))
        channel.send(OpenArena(), [self.arena.memory.fd])
        channel.send(*self.shared.offer())

    def has_painted(self, count: int) -> bool:
        return self.num_painted >= count

    def wait(self) -> None:
        """Until the reader is there."""
        delivery = self.channel.receive(PATIENCE)
        assert delivery is not None
        self.theirs = ArenaReader(Memory(delivery.descriptors[0]))

    def send(self, number: int) -> None:
        """One prefix: every other one stays in its pages, and of the rest the reader follows while it is written."""
        if number % 2:
            self.channel.send(PaintOrder(str(number), (), (), InPages((self.run,), (None,), CODEC.name)))
            return
        slab = self._lease()
        self.channel.send(Coming(str(number), slab))
        self.mover.gather([self.run], self.arena, slab)

    def send_for_ever(self) -> None:
        """As fast as it goes. Raises PeerGone."""
        for number in itertools.count():
            self.send(number)
            self.num_painted += self.take(0)

    def _lease(self) -> Slab:
        """Room is made by the messages that the same thread receives, so it waits for those and not for room."""
        size = slab_bytes(self.shared.pool, NUM_ROWS)
        while True:
            try:
                return self.arena.lease(size, "reader", deadline=time.monotonic() + 600)
            except ArenaFull:
                self.num_painted += self.take(PATIENCE)

    def take(self, timeout: float) -> bool:
        """Whether something was painted, of which nothing is needed any longer. Raises PeerGone."""
        painted = self.answer(timeout)
        if painted is not None:
            self.channel.send(Release(tuple(place.slab for place in painted.states)))
        return painted is not None

    def answer(self, timeout: float) -> Painted | None:
        """Releases what is released. Raises PeerGone."""
        while delivery := self.channel.receive(timeout):
            if isinstance(delivery.message, Painted):
                return delivery.message
            if isinstance(delivery.message, Release):
                for slab in delivery.message.slabs:
                    self.arena.release(slab)
            for fd in delivery.descriptors:
                os.close(fd)
        return None

    def close(self) -> None:
        self.channel.close()
        self.arena.close()
        self.shared.close()
        if self.theirs is not None:
            self.theirs.close()


class Reader:
    """Generation's end: takes prefixes into its own pages or reads them in place, and answers with a sum."""

    def __init__(self, channel: Channel, stall_seconds: float = PATIENCE) -> None:
        """``stall_seconds``: how long a writer may stand still in the middle of a prefix."""
        self.channel = channel
        self.stall_seconds = stall_seconds
        self.num_answered = 0
        self.pool = PagePool(SHAPE, CODEC, BUDGET, "cpu", PAGE_ROWS)
        self.arena = Arena(1 << 20)
        self.mover = Mover(self.pool, chunk_bytes=1)
        self.theirs: ArenaReader | None = None
        self.mapped: MappedPool | None = None
        channel.send(OpenArena(), [self.arena.memory.fd])

    def has_answered(self, count: int) -> bool:
        return self.num_answered >= count

    def turn(self, timeout: float) -> None:
        """Take one message. Raises PeerGone and what a broken handover does."""
        delivery = self.channel.receive(timeout)
        if delivery is None:
            return
        message = delivery.message
        if isinstance(message, OpenArena):
            self.theirs = ArenaReader(Memory(delivery.descriptors[0]))
        elif isinstance(message, OpenPool):
            self.mapped = map_pool(message, delivery.descriptors, "cpu")
        elif isinstance(message, Release):
            for slab in message.slabs:
                self.arena.release(slab)
        elif isinstance(message, PaintOrder | Coming):
            self._answer(message)
            self.num_answered += 1

    def close(self) -> None:
        self.channel.close()
        self.arena.close()
        for other in (self.theirs, self.mapped):
            if other is not None:
                other.close()

    def _answer(self, message: PaintOrder | Coming) -> None:
        assert self.theirs is not None
        assert self.mapped is not None
        if isinstance(message, PaintOrder):
            assert message.prefix is not None
            total = sums(self.mapped.pool, message.prefix.runs[0])
        else:
            run = self.pool.allocate(NUM_ROWS)
            try:
                self.mover.scatter(self.theirs, message.slab, [run], self.stall_seconds)
                total = sums(self.pool, run)
            finally:
                self.pool.release(run)
            self.channel.send(Release((message.slab,)))
        terms = Terms("writer", time.monotonic() + 600, time.monotonic() + PATIENCE)
        self.channel.send(Painted(message.id, write_tensors(self.arena, [total], terms), 0, time.monotonic()))


def sums(pool: PagePool, run: Run) -> Tensor:
    """(layers, 2) fp32: what the rows of each plane add up to."""
    slots = pool.slots([run])
    return torch.stack(
        [torch.stack([plane[slots].sum() for plane in planes(pool, layer)]) for layer in range(SHAPE.num_layers)]
    )


def be_writer(sock: socket.socket) -> None:
    """Send for ever, as fast as the reader takes."""
    writer = Writer(Channel(sock, ToUnderstanding))
    writer.wait()
    for number in itertools.count():
        writer.send(number)
        assert writer.take(PATIENCE)


def be_reader(sock: socket.socket) -> None:
    """Answer until the writer is gone."""
    reader = Reader(Channel(sock, ToGeneration))
    try:
        while True:
            reader.turn(PATIENCE)
    except PeerGone:
        reader.close()


def be_friend(sock: socket.socket) -> None:
    """Get the end of another channel through this one, and ring the bell of who is there."""
    with Channel(sock, OpenArena) as channel:
        delivery = channel.receive(PATIENCE)
        assert delivery is not None
        with Channel(socket.socket(fileno=delivery.descriptors[0]), Cancel) as other:
            other.send(Cancel(str(os.getpid())))
            heard = other.receive(PATIENCE)
            assert heard is not None
            assert heard.message.id != str(os.getpid())
        with suppress(PeerGone):
            channel.receive(PATIENCE)
