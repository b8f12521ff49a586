"""Two real processes, one of which is killed at any moment: the other notices, goes on, and holds nothing of it."""

import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver

import pytest
import torch
from leftovers import Leftovers
from timing import wait_until

from handover.peers import NUM_ROWS, Reader, Writer, be_friend, be_reader, be_writer, sums
from underpaint.handover.arena import STALL_SECONDS
from underpaint.handover.channel import Channel, pair
from underpaint.handover.faults import PeerGone, PeerStalled, StaleSlab
from underpaint.handover.messages import OpenArena, ToGeneration, ToUnderstanding
from underpaint.handover.orders import read_tensors

NUM_KILLS = 20
NOTICE_SECONDS = 2.0
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["handover.peers"])


def start(target: Callable[[socket.socket], None]) -> tuple[socket.socket, "multiprocessing.process.BaseProcess"]:
    """Our end of a channel, and the process at the other end."""
    ours, theirs = pair()
    process = processes.Process(target=target, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def end(process: "multiprocessing.process.BaseProcess") -> None:
    process.join(60)
    assert not process.is_alive()
    process.close()


@pytest.fixture(scope="module")
def calm() -> Leftovers:
    """Once the fork server itself is there. It imports what the processes need once for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    sock, process = start(be_reader)
    sock.close()
    end(process)
    return Leftovers()


class Kill:
    """Kills a process from a thread of its own, ``seconds`` after ``due``: at any moment of its work, on whatever
    machine."""

    def __init__(self, process: "multiprocessing.process.BaseProcess", due: Callable[[], bool], seconds: float) -> None:
        assert process.pid is not None
        self._pid, self._due, self._seconds = process.pid, due, seconds
        self._at = 0.0
        self._thread = threading.Thread(target=self._kill)
        self._thread.start()

    def _kill(self) -> None:
        wait_until(self._due)
        time.sleep(self._seconds)
        os.kill(self._pid, signal.SIGKILL)
        self._at = time.monotonic()

    def seconds_ago(self) -> float:
        """When it is done. Below 0 if it had still to come."""
        now = time.monotonic()
        self._thread.join()
        return now - self._at


def assert_noticed(seconds: list[float]) -> None:
    """The machine may have held up some of twenty, but not half of them."""
    assert sorted(seconds)[len(seconds) // 2] < NOTICE_SECONDS


def test_s36_generation_is_killed_at_any_moment(calm: Leftovers, seed: int) -> None:
    """Understanding gets its slabs back, also the one that it is writing."""
    generator = random.Random(seed)
    noticed = []
    for i in range(NUM_KILLS):
        sock, process = start(be_reader)
        writer = Writer(Channel(sock, ToUnderstanding))
        if i % 5:
            writer.wait()  # else it may be killed before it says anything
        kill = Kill(process, partial(writer.has_painted, i // 2 if i % 5 else 0), generator.random() * 0.02)
        with pytest.raises(PeerGone):
            writer.send_for_ever()
        noticed.append(kill.seconds_ago())
        end(process)
        writer.arena.end_holder("reader")
        assert (writer.arena.num_leases, writer.arena.used_bytes) == (0, 0)
        writer.close()
        del writer, kill
        calm.assert_none()
    assert_noticed(noticed)


def test_s36_understanding_is_killed_at_any_moment(calm: Leftovers, seed: int) -> None:
    """Generation notices in time, also in the middle of a prefix, and lets go of its arena and its pool."""
    generator = random.Random(seed)
    noticed, ends = [], Counter[str]()
    for i in range(NUM_KILLS):
        sock, process = start(be_writer)
        reader = Reader(Channel(sock, ToGeneration), STALL_SECONDS)
        kill = Kill(process, partial(reader.has_answered, 1 + i // 4), generator.random() * 0.02)
        try:
            while True:
                reader.turn(60)
        except (PeerGone, PeerStalled, StaleSlab) as error:
            ends[type(error).__name__] += 1
        reader.num_answered = NUM_KILLS  # the machine may have held the writer up so long that it counts as dead
        noticed.append(kill.seconds_ago())
        end(process)
        reader.arena.end_holder("writer")
        assert (reader.arena.num_leases, reader.pool.used_bytes) == (0, 0)
        reader.close()
        del reader, kill
        calm.assert_none()
    assert_noticed(noticed)
    print(ends)


def test_a_prefix_is_the_same_in_the_other_process(calm: Leftovers) -> None:
    """Copied through the arena, and read in place: what the other process sees is what lies in our pages now."""
    sock, process = start(be_reader)
    writer = Writer(Channel(sock, ToUnderstanding))
    writer.wait()
    assert writer.theirs is not None
    for number in range(6):
        slots = writer.shared.pool.slots([writer.run])
        assert len(slots) == NUM_ROWS
        writer.shared.pool.write(0, slots, *(torch.randn(NUM_ROWS, 4, 32) for _ in range(2)))
        writer.send(number)
        painted = writer.answer(60)
        assert painted is not None
        assert painted.id == str(number)
        (got,) = read_tensors(writer.theirs, painted.states, "cpu")
        assert torch.equal(got, sums(writer.shared.pool, writer.run))
    writer.close()
    end(process)
    del writer
    calm.assert_none()


def test_two_processes_are_connected_through_a_third(calm: Leftovers) -> None:
    """A channel's end is itself passed as a descriptor."""
    friends = [start(be_friend) for _ in range(2)]
    channels = [Channel(sock, OpenArena) for sock, _ in friends]
    for channel, sock in zip(channels, pair(), strict=True):
        channel.send(OpenArena(), [sock.fileno()])
        sock.close()
    for channel in channels:
        assert channel.receive(0.5) is None
    for channel, (_, process) in zip(channels, friends, strict=True):
        channel.close()
        process.join(60)
        assert process.exitcode == 0
        process.close()
    calm.assert_none()
