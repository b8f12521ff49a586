"""How much host memory this process may have: of the machine, and of the container or unit that it runs in.

A control group's limit is not in /proc/meminfo, and whoever goes over it is killed. So whatever takes much asks here.
Both versions of control groups are read, in every group from this process's own up to the root that it can see.
"""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
# Where groups are, below the root; their limit, what they use, and how much of that is files not read lately.
VERSION_1 = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
VERSION_2 = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"


def total_bytes(root: Path = ROOT) -> int:
    """What there is, whoever uses it now. ``root``: of the file system that is asked."""
    return min([_meminfo(root, "MemTotal"), *(limit for limit, _ in _limits(root))])


def available_bytes(root: Path = ROOT) -> int:
    """What can be had now without swapping: of the machine as Linux thinks, and to every limit."""
    return min([_meminfo(root, "MemAvailable"), *(max(limit - used, 0) for limit, used in _limits(root))])


def _meminfo(root: Path, name: str) -> int:
    return _number(root / "proc/meminfo", name + ":") << 10


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of every group that has one, and what is used of it, in bytes. Files that the kernel would drop first
    do not count: a checkpoint just read would else leave nothing."""
    groups = root / "proc/self/cgroup"
    if not groups.is_file():  # a kernel without control groups
        return
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount, limit_name, used_name, dropped_name = VERSION_2 if controllers == "" else VERSION_1
        names = Path(path).parts[1:]  # in a container it may be the host's, and only the mount itself is there
        for depth in range(len(names) + 1):
            group = root.joinpath(mount, *names[:depth])
            if (group / limit_name).is_file() and (limit := (group / limit_name).read_text().strip()) != "max":
                used = int((group / used_name).read_text()) - _number(group / "memory.stat", dropped_name)
                yield int(limit), used


def _number(path: Path, name: str) -> int:
    """Of the line that begins with ``name``."""
    found = re.search(rf"^{name}\s+(\d+)", path.read_text(), re.MULTILINE)
    assert found, f"{path} has no {name}"
    return int(found[1])
