"""``underpaint bench handover``: real processes, figures that are there, and rows that arrive as they were."""

import os
import threading
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from underpaint.bench.handover import choose_ways, handover, parse_devices
from underpaint.bench.handover_check import check, check_nothing_left
from underpaint.errors import BadConfig, EngineFailure


def test_it_measures_every_way_that_a_cpu_has() -> None:
    report = handover("cpu", num_rows=200).as_json()
    copies, ways = (table["rows"] for table in report["tables"])
    assert all(row["measured"] > 0 for row in copies[:2])
    assert [row["way"] for row in ways] == ["shm", "colocate"]
    assert ways[0]["bytes moved"] == 200 * 8 * 2 * 8 * 128 * 2
    assert ways[1]["bytes moved"] == 0, "pages are read where they are"
    for row in ways:
        assert 0 < row["median ms"] <= row["worst ms"]
        assert row["arrived as it was"].startswith("yes")


def test_it_checks_that_nothing_is_lost_or_left_behind(seed: int) -> None:
    (table,) = check("cpu", seed, num_kills=2).as_json()["tables"]
    assert [row["check"] for row in table["rows"]][-2:] == ["generation killed, shm", "generation killed, colocate"]


def test_what_others_make_for_a_moment_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("underpaint.bench.handover_check.NAME_SECONDS", 60.0)
    names, many = set(os.listdir("/dev/shm")), 10_000
    with NamedTemporaryFile(dir="/dev/shm") as file:
        threading.Timer(0.2, file.close).start()
        check_nothing_left(many, names)
    with pytest.raises(EngineFailure, match="0 descriptors before"):
        check_nothing_left(0, names)
    monkeypatch.setattr("underpaint.bench.handover_check.NAME_SECONDS", 0.1)
    with NamedTemporaryFile(dir="/dev/shm") as file, pytest.raises(EngineFailure, match=Path(file.name).name):
        check_nothing_left(many, names)


@pytest.mark.parametrize("devices", ["7", "0,1,2", "cuda", "", "cpu,cpu"])
def test_devices_that_are_not_there_are_refused(devices: str) -> None:
    with pytest.raises(BadConfig, match="must be auto, cpu, or"):
        parse_devices(devices)


def test_ways_are_those_that_the_devices_have() -> None:
    assert choose_ways((), "cuda:0", "cuda:1") == ("shm", "ipc", "colocate")
    assert choose_ways((), "cuda:0", "cuda:0") == ("shm", "colocate")
    assert choose_ways(("shm",), "cpu", "cpu") == ("shm",)
    with pytest.raises(BadConfig, match="between two GPUs"):
        choose_ways(("ipc",), "cuda:0", "cuda:0")
    with pytest.raises(BadConfig, match="no way to hand over"):
        choose_ways(("fax",), "cuda:0", "cuda:1")
    with pytest.raises(BadConfig, match="at least one"):
        handover("cpu", num_rows=0)
