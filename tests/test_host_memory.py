"""Limits of containers and units, as the two versions of control groups show them, on file systems made for a test."""

from pathlib import Path

import pytest

from underpaint.config import EngineConfig, cache_bytes
from underpaint.errors import BadConfig
from underpaint.host_memory import available_bytes, total_bytes

GIB = 1 << 30
UNLIMITED = "9223372036854771712"
"""What version 1 says for no limit."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 64 GiB with 40 left, and no groups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    kilobytes = {"MemTotal": 64 << 20, "MemFree": 1 << 20, "MemAvailable": 40 << 20}
    (tmp_path / "proc/meminfo").write_text("".join(f"{name}:   {size} kB\n" for name, size in kilobytes.items()))
    (tmp_path / "proc/self/cgroup").write_text("")
    return tmp_path


def group(folder: Path, version: int, limit: int | str, used: int, dropped: int) -> None:
    """A group that uses ``used`` bytes, of which ``dropped`` are files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {1: ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"), 2: ("max", "current", "inactive_file")}
    limit_name, used_name, dropped_name = names[version]
    (folder / f"memory.{limit_name}").write_text(f"{limit}\n")
    (folder / f"memory.{used_name}").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"active_file 99\n{dropped_name} {dropped}\nunevictable 99\n")


def test_a_machine_alone(root: Path) -> None:
    assert (total_bytes(root), available_bytes(root)) == (64 * GIB, 40 * GIB)
    (root / "proc/self/cgroup").unlink()  # as of a kernel without control groups
    assert (total_bytes(root), available_bytes(root)) == (64 * GIB, 40 * GIB)


def test_a_container_of_version_2(root: Path) -> None:
    """Its group is the root that it sees."""
    (root / "proc/self/cgroup").write_text("0::/\n")
    group(root / "sys/fs/cgroup", 2, 8 * GIB, 5 * GIB, 2 * GIB)
    assert (total_bytes(root), available_bytes(root)) == (8 * GIB, 5 * GIB)


@pytest.mark.parametrize("limit", [6 * GIB, "max"])
def test_a_unit_of_version_2(root: Path, limit: int | str) -> None:
    """The slice above it may leave less than its own group, or be the only one with a limit."""
    (root / "proc/self/cgroup").write_text("0::/system.slice/underpaint.service\n")
    group(root / "sys/fs/cgroup/system.slice/underpaint.service", 2, limit, 1 * GIB, 0)
    group(root / "sys/fs/cgroup/system.slice", 2, 10 * GIB, 7 * GIB, 0)
    assert total_bytes(root) == (10 * GIB if limit == "max" else limit)
    assert available_bytes(root) == 3 * GIB


@pytest.mark.parametrize("seen", ["", "docker/0123"], ids=["its own", "all"])
def test_a_container_of_version_1(root: Path, seen: str) -> None:
    """Whether it sees only its own group or all of them: its path is the host's. Groups without a limit do not count,
    nor do those of other controllers, nor what there is of version 2 beside them."""
    (root / "proc/self/cgroup").write_text("4:cpu,cpuacct:/docker/0123\n3:memory:/docker/0123\n0::/docker/0123\n")
    group(root / "sys/fs/cgroup/memory", 1, UNLIMITED, 30 * GIB, 0)
    group(root / "sys/fs/cgroup/memory" / seen, 1, 4 * GIB, 3 * GIB, 1 * GIB)
    assert (total_bytes(root), available_bytes(root)) == (4 * GIB, 2 * GIB)


def test_a_group_over_its_limit_has_nothing_left(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/\n")
    group(root / "sys/fs/cgroup", 2, 1 * GIB, 1 * GIB + 1, 0)
    assert available_bytes(root) == 0


def test_this_machine() -> None:
    assert 0 < available_bytes() < total_bytes()


def test_pages_are_a_share_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU; and a budget beyond it is refused."""
    monkeypatch.setattr("underpaint.config.available_bytes", lambda: 4000)
    monkeypatch.setattr("underpaint.config.total_bytes", lambda: 8000)
    assert cache_bytes(EngineConfig(device="cpu")) == 1000
    assert cache_bytes(EngineConfig(device="cpu", kv_cache_bytes=8000)) == 8000
    with pytest.raises(BadConfig, match="8001 and cpu has 8000 bytes"):
        cache_bytes(EngineConfig(device="cpu", kv_cache_bytes=8001))
