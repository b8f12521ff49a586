"""Messages arrive whole, in order and typed, with their descriptors; a peer that is gone or stands still is noticed."""

import os
import random
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import Leftovers
from timing import WAIT_SECONDS, in_time

from underpaint.handover.channel import Channel, pair, ready
from underpaint.handover.faults import GarbledFrame, PeerGone, PeerStalled
from underpaint.handover.frames import HEADER, MAGIC, MAX_DESCRIPTORS


class Note(msgspec.Struct, frozen=True, tag=True):
    number: int
    text: bytes = b""


class Bell(msgspec.Struct, frozen=True, tag=True):
    pass


class Stranger(msgspec.Struct, frozen=True, tag=True):
    pass


Known = Note | Bell


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Both ends; afterwards no descriptor and no thread of them is left."""
    leftovers = Leftovers()
    left, right = (Channel(sock, Known) for sock in pair())
    yield left, right
    left.close()
    right.close()
    leftovers.assert_none()


def take(channel: Channel) -> msgspec.Struct:
    delivery = channel.receive(WAIT_SECONDS)
    assert delivery is not None
    assert not delivery.descriptors
    message = delivery.message
    assert isinstance(message, msgspec.Struct)
    return message


@settings(max_examples=30)
@given(st.lists(st.integers(-1, 300_000), min_size=1, max_size=12))
def test_messages_of_any_size_arrive_in_order(sizes: list[int]) -> None:
    left, right = (Channel(sock, Known) for sock in pair())
    sent = [Bell() if size < 0 else Note(size, os.urandom(size)) for size in sizes]
    for message in sent:
        left.send(message)
    assert [take(right) for _ in sent] == sent
    assert right.receive(0) is None
    left.close()
    right.close()


def test_looking_does_not_wait(ends: tuple[Channel, Channel]) -> None:
    def seconds_to_look() -> float:
        started = time.monotonic()
        assert ends[0].receive(0) is None
        assert ends[0].receive(-1) is None
        return time.monotonic() - started

    in_time(seconds_to_look, 0.5)
    started = time.monotonic()
    assert ends[0].receive(0.2) is None
    assert time.monotonic() - started >= 0.2


def test_descriptors_arrive_with_their_message(ends: tuple[Channel, Channel]) -> None:
    """Each message has its own, also if several messages are read at once, and the sender may close them at once."""
    left, right = ends
    for number in range(5):
        reading, writing = os.pipe()
        os.write(writing, bytes([number]))
        left.send(Note(number, b"x" * 1000), [reading] * (number % 3))
        os.close(reading)
        os.close(writing)
    for number in range(5):
        delivery = right.receive(WAIT_SECONDS)
        assert delivery is not None
        assert delivery.message.number == number
        assert len(delivery.descriptors) == number % 3
        for i, fd in enumerate(delivery.descriptors):
            assert os.read(fd, 9) == (bytes([number]) if i == 0 else b"")
            assert not os.get_inheritable(fd)
            os.close(fd)


def test_descriptors_that_nobody_received_are_closed() -> None:
    leftovers = Leftovers()
    left, right = (Channel(sock, Known) for sock in pair())
    for _ in range(3):
        left.send(Bell(), [0, 1])
    assert left.flush(WAIT_SECONDS)
    first = right.receive(WAIT_SECONDS)
    assert first is not None
    for fd in first.descriptors:
        os.close(fd)
    right.close()
    left.close()
    leftovers.assert_none()


def test_what_cannot_be_sent_is_said_to_the_sender() -> None:
    left, right = (Channel(sock, Known, frame_limit=1000) for sock in pair())
    with pytest.raises(ValueError, match="at most 1000"):
        left.send(Note(1, b"x" * 1001))
    with pytest.raises(ValueError, match="too many"):
        left.send(Bell(), [0] * (MAX_DESCRIPTORS + 1))
    left.send(Note(1, b"x" * 900))
    assert take(right) == Note(1, b"x" * 900)
    left.close()
    right.close()


def test_all_that_was_sent_arrives_before_the_end(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    right.send(Bell())  # the peer dies with this unread
    for number in range(100):
        left.send(Note(number, b"x" * 5000))
    closing = threading.Thread(target=left.close, args=(WAIT_SECONDS,))
    closing.start()
    assert [take(right) for _ in range(100)] == [Note(number, b"x" * 5000) for number in range(100)]
    closing.join()
    with pytest.raises(PeerGone):
        right.receive(WAIT_SECONDS)
    right.send(Bell())  # queued, and in vain
    assert not right.flush(WAIT_SECONDS)
    with pytest.raises(PeerGone):
        right.send(Bell())


def frame(body: bytes, length: int | None = None, num_descriptors: int = 0) -> bytes:
    return HEADER.pack(MAGIC, len(body) if length is None else length, num_descriptors) + body


HELLO = msgspec.msgpack.encode(Note(1, b"hello"))
GARBLED = {
    "no magic": b"GET / HTTP/1.1\r\n\r\n",
    "too long": frame(b"", length=1 << 30),
    "descriptors that did not come": frame(HELLO, num_descriptors=1),
    "no MessagePack": frame(b"\xc1" * 5),
    "cut": frame(HELLO[:-2]),
    "a type that is not spoken here": frame(msgspec.msgpack.encode(Stranger())),
    "a field of another type": frame(msgspec.msgpack.encode({"type": "Note", "number": "1"})),
}


@pytest.mark.parametrize("kind", GARBLED)
def test_a_garbled_frame_ends_the_channel_with_a_clear_error(kind: str) -> None:
    sock, other = pair()
    channel = Channel(other, Known)
    sock.sendall(GARBLED[kind])
    with pytest.raises(GarbledFrame):
        channel.receive(WAIT_SECONDS)
    with pytest.raises(PeerGone):
        channel.receive(WAIT_SECONDS)
    with pytest.raises(PeerGone):
        channel.send(Bell())
    channel.close()
    sock.close()


def test_more_descriptors_than_a_frame_may_have_are_refused() -> None:
    leftovers = Leftovers()
    sock, other = pair()
    channel = Channel(other, Known)
    socket.send_fds(sock, [b"x"], [0] * 100)
    with pytest.raises(GarbledFrame, match="descriptors were lost"):
        channel.receive(WAIT_SECONDS)
    channel.close()
    sock.close()
    leftovers.assert_none()


def test_a_peer_that_does_not_read_is_noticed_in_time_and_nothing_is_half_sent() -> None:
    left, right = (Channel(sock, Known, queue_bytes=1 << 20) for sock in pair())
    for sent in range(1000):
        try:
            left.send(Note(sent, b"x" * 100_000), timeout=0.2)
        except PeerStalled:
            break
    assert 10 <= sent < 100, "the queue is bounded"
    for number in range(sent):
        assert take(right) == Note(number, b"x" * 100_000)
    left.send(Note(sent))
    assert take(right) == Note(sent), "the channel is of use again"
    left.close()
    right.close()


def test_two_peers_that_both_send_first_do_not_block_each_other(ends: tuple[Channel, Channel]) -> None:
    for number in range(20):
        for channel in ends:
            channel.send(Note(number, b"x" * 500_000), timeout=1)
    for number in range(20):
        for channel in ends:
            assert take(channel) == Note(number, b"x" * 500_000)


def test_threads_send_whole_messages(ends: tuple[Channel, Channel], seed: int) -> None:
    left, right = ends
    generator = random.Random(seed)
    sizes = [[generator.randrange(100_000) for _ in range(20)] for _ in range(4)]

    def send(thread: int) -> None:
        for size in sizes[thread]:
            left.send(Note(thread, bytes([thread]) * size))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    got: list[list[int]] = [[] for _ in range(4)]
    for _ in range(80):
        note = take(right)
        assert isinstance(note, Note)
        assert set(note.text) <= {note.number}
        got[note.number].append(len(note.text))
    assert got == sizes


def test_closing_wakes_a_thread_that_receives(ends: tuple[Channel, Channel]) -> None:
    outcome = []

    def receive() -> None:
        try:
            ends[0].receive(2 * WAIT_SECONDS)
        except PeerGone as error:
            outcome.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.1)
    ends[0].close()
    thread.join(WAIT_SECONDS)
    assert len(outcome) == 1


def test_ready_names_the_channels_that_have_something(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    assert ready([left, right], 0.05) == []
    left.send(Bell())
    left.send(Bell())
    assert ready([left, right], WAIT_SECONDS) == [right]
    take(right)
    assert ready([left, right], WAIT_SECONDS) == [right], "both came in one read"
    take(right)
    assert ready([left, right], 0) == []
    left.close()
    assert ready([right], WAIT_SECONDS) == [right]
