"""What a test could leave behind in this process or on the machine."""

import gc
import os
import threading
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

from timing import wait_until

WAIT_SECONDS = 30.0


class Leftovers:
    """Descriptors, threads and children of this process, its mappings of shared memory of ours, names in /dev/shm."""

    def __init__(self) -> None:
        """Before whatever must leave nothing."""
        gc.collect()  # what earlier tests left to it, which would go at any time
        self._before = _everything()

    def assert_none(self, *kinds: str) -> None:
        """There is nothing that was not there before, of these kinds or of any. Waits a while for what goes by itself:
        a thread may just be ending, and other processes of these tests make a name for a moment."""
        wait_until(lambda: not self._more(kinds), WAIT_SECONDS, lambda: f"left behind: {self._more(kinds)}")

    def _more(self, kinds: tuple[str, ...]) -> dict[str, set[Hashable]]:
        now = _everything()
        return {kind: left for kind in kinds or now if (left := now[kind] - self._before[kind])}


def _everything() -> dict[str, set[Hashable]]:
    return {
        "descriptors": set(os.listdir("/proc/self/fd")),
        "threads": set(threading.enumerate()),
        "children": set(children()),
        "mappings": set(mappings()),
        "names": set(os.listdir("/dev/shm")),
    }


def children() -> set[int]:
    """Processes that this one has, zombies too."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile has no children left
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def mappings() -> list[str]:
    """Where shared memory of ours is mapped, as ranges of addresses."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[0] for line in lines if "memfd:underpaint" in line]
