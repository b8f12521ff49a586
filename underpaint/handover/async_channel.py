"""An end of a connection for an event loop; see ``channel``."""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec

from underpaint.handover.channel import CLOSE_SECONDS, GONE, QUEUE_BYTES, SEND_SECONDS, shut_down, stalled
from underpaint.handover.faults import GarbledFrame, PeerGone, PeerStalled
from underpaint.handover.frames import FRAME_LIMIT, Delivery, Frame, Incoming

MAX_UNREAD = 256
"""Deliveries that are taken from the socket ahead of ``receive``."""


class AsyncChannel:
    """An end for the event loop that it is made in."""

    def __init__(
        self, sock: socket.socket, receives: Any, *, frame_limit: int = FRAME_LIMIT, queue_bytes: int = QUEUE_BYTES
    ) -> None:
        """See ``Channel``."""
        sock.setblocking(False)
        self._socket = sock
        self._frame_limit = frame_limit
        self._queue_bytes = queue_bytes
        self._queue: deque[Frame] = deque()
        self._queued = 0
        self._gone = False
        self._fault: GarbledFrame | None = None
        self._incoming = Incoming(receives, frame_limit)
        self._loop = asyncio.get_running_loop()
        self._waiters: set[asyncio.Future[None]] = set()
        self._reading = self._writing = False
        self._read_more()

    async def send(
        self, message: msgspec.Struct, descriptors: Iterable[int] = (), timeout: float = SEND_SECONDS
    ) -> None:
        """See ``Channel.send``."""
        frame = Frame(message, tuple(descriptors), self._frame_limit)
        sent = False
        try:
            in_time = await self._until(lambda: self._gone or self._has_room(frame), timeout)
            if self._gone or not in_time:
                raise PeerGone(GONE) if self._gone else PeerStalled(stalled(self._queued, timeout))
            self._queue.append(frame)
            self._queued += frame.num_bytes
            sent = True
        finally:
            if not sent:
                frame.close()
        self._write()

    async def receive(self, timeout: float | None = None) -> Delivery | None:
        """See ``Channel.receive``; without ``timeout`` it waits until the peer sends something or ends."""
        if not await self._until(lambda: self._incoming.deliveries or self._incoming.ended, timeout):
            return None
        if not self._incoming.deliveries:
            raise self._fault or PeerGone(GONE)
        delivery = self._incoming.deliveries.popleft()
        self._read_more()
        return delivery

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        """Every message until the peer is gone. Raises GarbledFrame."""
        while True:
            try:
                delivery = await self.receive()
            except PeerGone:
                return
            assert delivery is not None
            yield delivery

    async def flush(self, timeout: float) -> bool:
        """See ``Channel.flush``."""
        return await self._until(lambda: self._gone or not self._queued, timeout) and not self._gone

    async def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """See ``Channel.close``."""
        if self._socket.fileno() < 0:
            return
        await self.flush(timeout)
        self._end()
        self._stop_reading()
        self._incoming.close()
        self._incoming.ended = True
        self._socket.close()

    def _has_room(self, frame: Frame) -> bool:
        return not self._queued or self._queued + frame.num_bytes <= self._queue_bytes

    async def _until(self, condition: Callable[[], object], timeout: float | None) -> bool:
        """Wait until ``condition``; False if it does not come in ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    waiter = self._loop.create_future()
                    self._waiters.add(waiter)
                    try:
                        await waiter
                    finally:
                        self._waiters.discard(waiter)
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _read_more(self) -> None:
        """Look at the socket again, unless enough is there already."""
        if not self._reading and not self._incoming.ended and len(self._incoming.deliveries) < MAX_UNREAD:
            self._loop.add_reader(self._socket, self._read)
            self._reading = True

    def _read(self) -> None:
        try:
            self._incoming.read(self._socket)
        except GarbledFrame as fault:
            self._fault = fault
            self._incoming.ended = True
            self._end()
        if self._incoming.ended or len(self._incoming.deliveries) >= MAX_UNREAD:
            self._stop_reading()
        self._wake()

    def _stop_reading(self) -> None:
        if self._reading:
            self._loop.remove_reader(self._socket)
            self._reading = False

    def _write(self) -> None:
        """Send what goes without waiting; the loop calls this again when more goes."""
        try:
            while self._queue:
                self._queue[0].send(self._socket)
                self._queued -= self._queue.popleft().num_bytes
        except BlockingIOError:
            if not self._writing:
                self._loop.add_writer(self._socket, self._write)
                self._writing = True
            self._wake()
            return
        except OSError:
            self._end()
        self._stop_writing()
        self._wake()

    def _stop_writing(self) -> None:
        if self._writing:
            self._loop.remove_writer(self._socket)
            self._writing = False

    def _end(self) -> None:
        """See ``Channel``."""
        self._gone = True
        while self._queue:
            frame = self._queue.popleft()
            frame.close()
            self._queued -= frame.num_bytes
        self._stop_writing()
        shut_down(self._socket)
        self._wake()
