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
from multiprocessing import forkserver

import pytest
import torch

from handover.peers import NUM_ROWS, Reader, Writer, be_friend, be_reader, be_writer, sums
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


def traces() -> tuple[int, int, list[str], int]:
    """What a process could leave behind in this one or on the machine: descriptors, mappings, names, threads."""
    with open("/proc/self/maps") as maps:
        mappings = sum("memfd:underpaint" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), mappings, sorted(os.listdir("/dev/shm")), threading.active_count()


def end(process: "multiprocessing.process.BaseProcess") -> None:
    process.join(NOTICE_SECONDS)
    assert not process.is_alive()
    process.close()


@pytest.fixture(scope="module")
def calm() -> tuple[int, int, list[str], int]:
    """Traces once the fork server itself is there. It imports what the processes need once for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    sock, process = start(be_reader)
    sock.close()
    process.join(60)
    process.close()
    return traces()


def kill_after(process: "multiprocessing.process.BaseProcess", seconds: float) -> threading.Timer:
    assert process.pid is not None
    timer = threading.Timer(seconds, os.kill, (process.pid, signal.SIGKILL))
    timer.start()
    return timer


def test_s36_generation_is_killed_at_any_moment(calm: tuple[int, int, list[str], int], seed: int) -> None:
    """Understanding gets its slabs back, also the one that it is writing."""
    generator = random.Random(seed)
    painted: list[int] = []
    for _ in range(NUM_KILLS):
        sock, process = start(be_reader)
        writer = Writer(Channel(sock, ToUnderstanding))
        if generator.random() < 0.9:
            writer.wait()  # else it may be killed before it says anything
        timer = kill_after(process, generator.random() * 0.1)
        with pytest.raises(PeerGone):
            writer.send_for_ever()
        painted.append(writer.num_painted)
        timer.join()
        killed = time.monotonic()
        end(process)
        writer.arena.end_holder("reader")
        assert time.monotonic() - killed < NOTICE_SECONDS
        assert (writer.arena.num_leases, writer.arena.used_bytes) == (0, 0)
        writer.close()
        del writer
        assert traces() == calm
    assert len(set(painted)) > 2, f"killed always at the same moment: {painted}"


def test_s36_understanding_is_killed_at_any_moment(calm: tuple[int, int, list[str], int], seed: int) -> None:
    """Generation notices in time, also in the middle of a prefix, and lets go of its arena and its pool."""
    generator = random.Random(seed)
    ends: Counter[str] = Counter()
    for _ in range(NUM_KILLS):
        sock, process = start(be_writer)
        reader = Reader(Channel(sock, ToGeneration))
        answered = 0
        while not answered:
            answered += reader.turn(20) is not None
        timer = kill_after(process, generator.random() * 0.05)
        try:
            while True:
                answered += reader.turn(20) is not None
        except (PeerGone, PeerStalled, StaleSlab) as error:
            ends[type(error).__name__] += 1
        timer.join()
        noticed = time.monotonic()
        end(process)
        assert time.monotonic() - noticed < NOTICE_SECONDS
        reader.arena.end_holder("writer")
        assert (reader.arena.num_leases, reader.pool.used_bytes) == (0, 0)
        reader.close()
        del reader
        assert traces() == calm
    print(ends)


def test_a_prefix_is_the_same_in_the_other_process(calm: tuple[int, int, list[str], int]) -> None:
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
        painted = writer.answer(20)
        assert painted is not None
        assert painted.id == str(number)
        (got,) = read_tensors(writer.theirs, painted.states, "cpu")
        assert torch.equal(got, sums(writer.shared.pool, writer.run))
    writer.close()
    end(process)
    del writer
    assert traces() == calm


def test_two_processes_are_connected_through_a_third(calm: tuple[int, int, list[str], int]) -> None:
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
        process.join(20)
        assert process.exitcode == 0
        process.close()
    assert traces() == calm
