"""The arena: shared memory that one process writes and others read, divided into slabs on lease.

Only its owner writes into an arena, and only its owner keeps books. So a slab can be taken back at any time, when its
reader has died or its deadline has passed, and nobody's data is overwritten by a process that has not heard of it. A
reader that has not heard of it finds out: beside the slabs, in the shared memory, stands the *generation* of the slab
that begins at each block, a number that is never used twice, and 0 once the lease has ended. It is compared before and
after every read.

The memory, in words of 64 bits: magic, block size, number of blocks, whether slabs have checksums; from byte 4096 on,
four words a block: generation, bytes written so far, checksum, unused; then the blocks.
"""

import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from underpaint.handover.blocks import FreeBlocks
from underpaint.handover.faults import ArenaFull, BadHandover, DamagedSlab, PeerStalled, StaleSlab
from underpaint.handover.memory import Memory

MAGIC = 0x616E657261707501
HEADER_BYTES = 4096
BLOCK_BYTES = 64 << 10
GENERATION, WRITTEN, CHECKSUM, WORDS = 0, 1, 2, 4
POLL_SECONDS = 50e-6
STALL_SECONDS = 1.0
"""How long a reader waits for a writer that makes no progress."""


class Slab(msgspec.Struct, frozen=True):
    """``num_bytes`` from ``offset`` in the blocks of an arena, as long as ``generation`` stands beside them."""

    offset: int
    num_bytes: int
    generation: int


class ArenaReader:
    """An arena as any process sees it that has its memory."""

    def __init__(self, memory: Memory) -> None:
        """Raises BadHandover if this memory is not an arena."""
        header = memory.data[:HEADER_BYTES].view(torch.int64).tolist()
        if header[0] != MAGIC or header[1] != BLOCK_BYTES:
            raise BadHandover("the shared memory that was handed over is not an arena of this version")
        self.memory = memory
        self.num_blocks = header[2]
        self.checked = bool(header[3])
        blocks_start = _blocks_start(self.num_blocks)
        if memory.data.nbytes < blocks_start + self.num_blocks * BLOCK_BYTES:
            raise BadHandover("the arena that was handed over is shorter than it says")
        table = memory.data[HEADER_BYTES : HEADER_BYTES + self.num_blocks * WORDS * 8].view(torch.int64)
        self.table = table.view(self.num_blocks, WORDS).numpy()
        self.blocks = memory.data[blocks_start:]

    @contextmanager
    def reading(self, slab: Slab, stall_seconds: float = STALL_SECONDS) -> Iterator[Tensor]:
        """The bytes of a slab, (num_bytes,) uint8, without a copy, once all of them are written.

        What is done with them inside the block must have read them when it ends. Raises StaleSlab if the lease ends
        before that, PeerStalled, and DamagedSlab if the arena keeps checksums and this one differs.
        """
        self.wait_written(slab, slab.num_bytes, stall_seconds)
        data = self.bytes_of(slab)
        if self.checked:
            self.check_sum(slab)
        yield data
        self.check(slab)

    def bytes_of(self, slab: Slab) -> Tensor:
        """(num_bytes,) uint8, whatever they hold now. See ``reading``."""
        return self.blocks[slab.offset : slab.offset + slab.num_bytes]

    def check(self, slab: Slab) -> None:
        """Raises StaleSlab unless the lease of ``slab`` lasts."""
        self.written(slab)

    def written(self, slab: Slab) -> int:
        """How many of a slab's bytes, from its beginning, may be read already. Raises StaleSlab."""
        block, rest = divmod(slab.offset, BLOCK_BYTES)
        if rest or not 0 <= block < self.num_blocks or not 0 < slab.num_bytes <= self.blocks.nbytes - slab.offset:
            raise BadHandover(f"{slab} does not lie in this arena")
        written = int(self.table[block, WRITTEN])
        # Read after the count: a count that belongs to a later slab comes with a later generation.
        if int(self.table[block, GENERATION]) != slab.generation:
            raise StaleSlab("the lease of the slab has ended: its deadline has passed, or its writer gave up")
        return written

    def wait_written(self, slab: Slab, num_bytes: int, stall_seconds: float = STALL_SECONDS) -> None:
        """Until the first ``num_bytes`` are written. Raises StaleSlab, and PeerStalled when nothing moves."""
        before, since = -1, time.monotonic()
        while (written := self.written(slab)) < num_bytes:
            now = time.monotonic()
            if written != before:
                before, since = written, now
            elif now - since > stall_seconds:
                raise PeerStalled(f"{written} of {slab.num_bytes} bytes came, and none for {stall_seconds} s")
            time.sleep(POLL_SECONDS)

    def check_sum(self, slab: Slab) -> None:
        """Raises DamagedSlab unless the bytes are those that were written; only where ``checked``."""
        if checksum(self.bytes_of(slab)) != int(self.table[slab.offset // BLOCK_BYTES, CHECKSUM]):
            self.check(slab)
            raise DamagedSlab(f"the checksum of {slab.num_bytes} bytes handed over is not that of what was written")

    def close(self) -> None:
        self.memory.close()


@dataclass(eq=False)
class _Lease:
    slab: Slab
    num_blocks: int
    holder: str
    deadline: float
    being_written: bool = False
    ended: bool = False


class Arena:
    """The owner's side: it leases slabs, writes them, and takes them back. For any number of threads."""

    def __init__(self, num_bytes: int, *, checked: bool = False) -> None:
        """``num_bytes`` for slabs, rounded up to whole blocks. ``checked``: slabs get checksums, for debugging."""
        num_blocks = -(-num_bytes // BLOCK_BYTES)
        self.memory = Memory.create(_blocks_start(num_blocks) + num_blocks * BLOCK_BYTES)
        self.memory.data[:32].view(torch.int64).copy_(torch.tensor([MAGIC, BLOCK_BYTES, num_blocks, int(checked)]))
        self.reader = ArenaReader(self.memory)
        self._free = FreeBlocks(num_blocks)
        self._leases: dict[int, _Lease] = {}
        self._generation = 0
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def num_leases(self) -> int:
        with self._changed:
            return len(self._leases)

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks that are not free."""
        return (self.reader.num_blocks - self._free.num_free) * BLOCK_BYTES

    def lease(self, num_bytes: int, holder: str, deadline: float, wait_until: float = 0.0) -> Slab:
        """A slab for ``holder`` to read until ``deadline``; both times are on the clock of ``time.monotonic``.

        If there is no room, waits in line until ``wait_until``. Raises ArenaFull. Ends by ``release``, ``end_holder``,
        or at the deadline.
        """
        num_blocks = max(-(-num_bytes // BLOCK_BYTES), 1)
        if num_blocks > self.reader.num_blocks:
            size = self.reader.num_blocks * BLOCK_BYTES
            raise ArenaFull(
                f"{num_bytes} bytes are to be handed over at once and the arena has {size}; make it larger, see"
                " handover_memory"
            )
        with self._changed:
            block = self._wait_for(num_blocks, wait_until)
            self._generation += 1
            slab = Slab(block * BLOCK_BYTES, max(num_bytes, 1), self._generation)
            self._leases[slab.generation] = _Lease(slab, num_blocks, holder, deadline)
            self.reader.table[block] = (slab.generation, 0, 0, 0)
            return slab

    @contextmanager
    def writing(self, slab: Slab) -> Iterator[Tensor]:
        """The bytes of a slab to be filled, (num_bytes,) uint8; readers may have all of them when the block ends.

        A lease that ends meanwhile is taken back only when the block ends, which then raises StaleSlab. If the block
        raises, the lease has ended.
        """
        with self._changed:
            lease = self._leases.get(slab.generation)
            if lease is None:
                raise StaleSlab("the lease ended before anything was written")
            assert not lease.being_written
            lease.being_written = True
        data = self.reader.bytes_of(slab)
        try:
            yield data
            if self.reader.checked:
                self._word(slab, CHECKSUM, checksum(data))
            self._word(slab, WRITTEN, slab.num_bytes)
        except BaseException:
            self._stop_writing(lease, end=True)
            raise
        self._stop_writing(lease, end=False)
        if lease.ended:
            raise StaleSlab("the lease ended while its slab was written")

    def advance(self, slab: Slab, num_bytes: int) -> None:
        """Inside ``writing``: the first ``num_bytes`` may be read. The last byte comes with the checksum, if any."""
        self._word(slab, WRITTEN, min(num_bytes, slab.num_bytes - self.reader.checked))

    def release(self, slab: Slab) -> None:
        """The reader is done with a slab. One whose lease has ended already is left as it is."""
        with self._changed:
            if lease := self._leases.get(slab.generation):
                self._end(lease)

    def end_holder(self, holder: str) -> None:
        """End all leases of a reader that is no more."""
        with self._changed:
            for lease in [lease for lease in self._leases.values() if lease.holder == holder]:
                self._end(lease)

    def expire(self) -> None:
        """End the leases whose deadlines have passed. ``lease`` does so too when it needs room."""
        with self._changed:
            now = time.monotonic()
            for lease in [lease for lease in self._leases.values() if lease.deadline < now]:
                self._end(lease)

    def close(self) -> None:
        """End everything. Readers find their slabs stale."""
        with self._changed:
            for lease in list(self._leases.values()):
                self._end(lease)
        self.memory.close()

    def _wait_for(self, num_blocks: int, wait_until: float) -> int:
        """The first of so many blocks. Whoever waits is served before those who come later."""
        ticket = object()
        self._line.append(ticket)
        try:
            while True:
                self.expire()
                block = self._free.take(num_blocks) if self._line[0] is ticket else None
                if block is not None:
                    return block
                now = time.monotonic()
                if now >= wait_until:
                    needed, free = num_blocks * BLOCK_BYTES, self._free.num_free * BLOCK_BYTES
                    raise ArenaFull(f"{needed} bytes in a row are needed, {free} are free; readers hold the others")
                deadlines = [lease.deadline for lease in self._leases.values() if not lease.ended]
                self._changed.wait(min([wait_until, *deadlines]) - now)
        finally:
            self._line.remove(ticket)
            self._changed.notify_all()

    def _end(self, lease: _Lease) -> None:
        if lease.ended:
            return
        lease.ended = True
        self._word(lease.slab, GENERATION, 0)
        if not lease.being_written:
            self._give_back(lease)

    def _stop_writing(self, lease: _Lease, end: bool) -> None:
        with self._changed:
            lease.being_written = False
            if lease.ended:
                self._give_back(lease)
            elif end:
                self._end(lease)

    def _give_back(self, lease: _Lease) -> None:
        del self._leases[lease.slab.generation]
        self._free.give(lease.slab.offset // BLOCK_BYTES, lease.num_blocks)
        self._changed.notify_all()

    def _word(self, slab: Slab, word: int, value: int) -> None:
        self.reader.table[slab.offset // BLOCK_BYTES, word] = value


def checksum(data: Tensor) -> int:
    """CRC-32 of a CPU tensor's bytes."""
    return zlib.crc32(data.numpy().data)


def _blocks_start(num_blocks: int) -> int:
    return -(-(HEADER_BYTES + num_blocks * WORDS * 8) // BLOCK_BYTES) * BLOCK_BYTES
