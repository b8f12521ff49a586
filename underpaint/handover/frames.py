"""Messages as frames of a byte stream, with file descriptors beside them; no waiting here, see ``channel``.

A frame is a header (magic, length of the body, number of descriptors) and the body: one tagged ``msgspec.Struct`` in
MessagePack. Descriptors travel with the first byte of their frame.
"""

import array
import os
import socket
import struct
from collections import deque
from typing import Any, NamedTuple

import msgspec

from underpaint.handover.faults import GarbledFrame

HEADER = struct.Struct("<4sIB")
MAGIC = b"upf1"
FRAME_LIMIT = 8 << 20
"""Bytes of a body. Tensors go through the arena; what is left is small."""
MAX_DESCRIPTORS = 16
READ_BYTES = 256 << 10
NO_WAITING = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC

_encoder = msgspec.msgpack.Encoder()


class Delivery(NamedTuple):
    """A message as it arrived. ``descriptors`` are open, and belong to whoever receives them."""

    message: Any
    descriptors: tuple[int, ...] = ()


class Frame:
    """A frame on its way out. It has descriptors of its own, so the sender may close the originals at once."""

    def __init__(self, message: msgspec.Struct, descriptors: tuple[int, ...], limit: int) -> None:
        """Raises ValueError for a message that the other end would refuse."""
        body = _encoder.encode(message)
        if len(body) > limit:
            raise ValueError(f"{type(message).__name__} takes {len(body)} bytes, and a frame has at most {limit}")
        if len(descriptors) > MAX_DESCRIPTORS:
            raise ValueError(f"{len(descriptors)} descriptors are too many for one message")
        self._rest = memoryview(HEADER.pack(MAGIC, len(body), len(descriptors)) + body)
        self.num_bytes = len(self._rest)
        self._descriptors = [os.dup(fd) for fd in descriptors]

    def send(self, sock: socket.socket) -> None:
        """Send all of it. Raises OSError."""
        while self._rest:
            if self._descriptors:
                sent = socket.send_fds(sock, [self._rest], self._descriptors)
                self.close()
            else:
                sent = sock.send(self._rest)
            self._rest = self._rest[sent:]

    def close(self) -> None:
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors = []


class Incoming:
    """Frames on their way in. ``deliveries``: those that are whole. ``ended``: nothing will follow them."""

    def __init__(self, receives: Any, limit: int) -> None:
        """``receives``: a union of tagged structs, which are all that may arrive."""
        self.deliveries: deque[Delivery] = deque()
        self.ended = False
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._limit = limit
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()

    def read(self, sock: socket.socket) -> None:
        """Take what is there, at most ``READ_BYTES``, without waiting. Raises GarbledFrame."""
        try:
            data, ancillary, flags, _ = sock.recvmsg(READ_BYTES, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS), NO_WAITING)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the peer died with something of ours unread
            self.ended = True
            return
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors = array.array("i")
                descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
                self._descriptors.extend(descriptors)
        if flags & socket.MSG_CTRUNC:
            raise GarbledFrame("descriptors were lost: more came than a message may have, or too many files are open")
        if not data:
            self.ended = True
            return
        self._bytes += data
        while self._take():
            pass

    def close(self) -> None:
        """Close descriptors that nobody has received."""
        for fd in [*self._descriptors, *(fd for delivery in self.deliveries for fd in delivery.descriptors)]:
            os.close(fd)
        self._descriptors.clear()
        self.deliveries.clear()

    def _take(self) -> bool:
        """Make the next delivery; False if its frame is not whole yet."""
        if len(self._bytes) < HEADER.size:
            return False
        magic, length, num_descriptors = HEADER.unpack_from(self._bytes)
        if magic != MAGIC or length > self._limit or num_descriptors > len(self._descriptors):
            raise GarbledFrame(f"what came is not the beginning of a message: {bytes(self._bytes[: HEADER.size])!r}")
        stop = HEADER.size + length
        if len(self._bytes) < stop:
            return False
        body = bytes(memoryview(self._bytes)[HEADER.size : stop])
        try:
            message = self._decoder.decode(body)
        except (msgspec.DecodeError, AssertionError) as error:  # dataclasses of ours assert their invariants
            raise GarbledFrame(f"a message cannot be read: {error}") from error
        del self._bytes[:stop]
        self.deliveries.append(Delivery(message, tuple(self._descriptors.popleft() for _ in range(num_descriptors))))
        return True
