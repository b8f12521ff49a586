"""One duplex connection between two processes: typed messages and file descriptors over a Unix socket pair.

The two ends come from ``pair``; one goes to the other process by inheritance or as a descriptor in a message. When a
process ends, however it ends, its peer finds the stream at its end, and ``PeerGone`` is raised once everything that it
had sent is received. Nothing has a name, and nothing is left behind.

Sending never waits for the peer to read, up to ``QUEUE_BYTES``; beyond that it waits until a deadline, then raises
``PeerStalled``. So two peers that both only send cannot block each other for good, and nothing is queued without end.
"""

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec

from underpaint.handover.faults import GarbledFrame, PeerGone, PeerStalled
from underpaint.handover.frames import FRAME_LIMIT, Delivery, Frame, Incoming

QUEUE_BYTES = 32 << 20
SEND_SECONDS = 10.0
CLOSE_SECONDS = 1.0
GONE = "the process at the other end has ended, or closed the channel"
STALLED = "the process at the other end read nothing for {:.1f} s, and {} bytes wait for it"


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


class Channel:
    """An end: any thread may send, and one at a time receives."""

    def __init__(
        self, sock: socket.socket, receives: Any, *, frame_limit: int = FRAME_LIMIT, queue_bytes: int = QUEUE_BYTES
    ) -> None:
        """``sock`` belongs to the channel from now on. ``receives``: the union of tagged structs that may arrive."""
        sock.setblocking(True)
        self._socket = sock
        self._frame_limit = frame_limit
        self._queue_bytes = queue_bytes
        self._queue: deque[Frame] = deque()
        self._queued = 0
        self._gone = False
        self._changed = threading.Condition()
        self._incoming = Incoming(receives, frame_limit)
        self._receiving = threading.Lock()
        self._writer = threading.Thread(target=self._write, name="underpaint-channel", daemon=True)
        self._writer.start()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """``receive`` would not have to wait, without looking at the socket."""
        return bool(self._incoming.deliveries) or self._incoming.ended

    def send(self, message: msgspec.Struct, descriptors: Iterable[int] = (), timeout: float = SEND_SECONDS) -> None:
        """Queue a message, with duplicates of open descriptors. Raises PeerGone; PeerStalled if the queue is full
        until ``timeout`` seconds have passed, and the message is then not sent; ValueError if it is too large."""
        frame = Frame(message, tuple(descriptors), self._frame_limit)
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._gone or self._has_room(frame), timeout)
            if self._gone or not in_time:
                frame.close()
                raise PeerGone(GONE) if self._gone else PeerStalled(STALLED.format(timeout, self._queued))
            self._queue.append(frame)
            self._queued += frame.num_bytes
            self._changed.notify_all()

    def receive(self, timeout: float) -> Delivery | None:
        """The next message, or None if none comes within ``timeout`` seconds; 0 only looks.

        Raises PeerGone once nothing is left to receive, and GarbledFrame, after which the channel is of no use.
        """
        deadline = time.monotonic() + timeout
        if not self._receiving.acquire(timeout=max(timeout, 0)):
            return None
        try:
            while not self._incoming.deliveries:
                if self._incoming.ended:
                    raise PeerGone(GONE)
                if not _poll([self._socket], deadline - time.monotonic()):
                    return None
                self._read()
            return self._incoming.deliveries.popleft()
        finally:
            self._receiving.release()

    def flush(self, timeout: float) -> bool:
        """Wait until all that was sent is in the kernel's hands, from where it reaches the peer even if this process
        ends. False if that takes longer, or the peer is gone."""
        with self._changed:
            return self._changed.wait_for(lambda: self._gone or not self._queued, timeout) and not self._gone

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Flush, then end the connection. May be called again, and wakes threads that wait in it."""
        if self._socket.fileno() < 0:
            return
        self.flush(timeout)
        self._end()
        self._writer.join()
        with self._receiving:
            self._incoming.close()
            self._incoming.ended = True
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _has_room(self, frame: Frame) -> bool:
        return not self._queued or self._queued + frame.num_bytes <= self._queue_bytes

    def _read(self) -> None:
        try:
            self._incoming.read(self._socket)
        except GarbledFrame:
            self._incoming.ended = True
            self._end()
            raise

    def _write(self) -> None:
        """The writer thread: frames one after the other, until the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._gone or self._queue)
                if self._gone:
                    return
                frame = self._queue.popleft()
            try:
                frame.send(self._socket)
            except OSError:
                self._end()
            finally:
                frame.close()
            with self._changed:
                self._queued -= frame.num_bytes
                self._changed.notify_all()

    def _end(self) -> None:
        """Nothing more can be sent; what has arrived can still be received."""
        with self._changed:
            self._gone = True
            while self._queue:
                frame = self._queue.popleft()
                frame.close()
                self._queued -= frame.num_bytes
            self._changed.notify_all()
        with suppress(OSError):  # the peer may have ended it first
            self._socket.shutdown(socket.SHUT_RDWR)


def ready(channels: Iterable[Channel], timeout: float) -> list[Channel]:
    """Those of ``channels`` whose ``receive`` has something to say, waiting up to ``timeout`` seconds for one."""
    channels = list(channels)
    if now := [channel for channel in channels if channel.pending]:
        return now
    readable = set(_poll(channels, timeout))
    return [channel for channel in channels if channel.fileno() in readable]


def _poll(ends: Iterable[Channel | socket.socket], timeout: float) -> list[int]:
    """The descriptors that are readable or at their end, waiting up to ``timeout`` seconds for one."""
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(timeout, 0) * 1000)]
