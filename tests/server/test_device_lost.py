"""An error in a kernel, after which CUDA does nothing more in a process: the server says so and ends."""

import threading
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from timing import wait_until

from server.test_remote import Pair
from server.tools import PAINT, make_site, service_of
from underpaint.devices import is_lost
from underpaint.errors import EngineFailure
from underpaint.server.app import create_app


def test_a_server_of_one_process_is_broken(painter_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer every request with the same error, and be ready for more."""
    site, broken = make_site(painter_root), threading.Event()

    def run(*_: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with TestClient(create_app(site, on_broken=broken.set)) as client:
        wait_until(lambda: client.get("/health/ready").status_code == 200)
        monkeypatch.setattr(service_of(site).runner, "run", run)
        assert client.post("/v1/images/generations", json=PAINT).status_code == 500
        assert broken.wait(20)
        assert client.get("/health/ready").status_code == 503


def test_a_painter_that_lost_its_device_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a kernel is told to whom it hit, and then the process ends, to be started again: CUDA would answer
    every pass with the same error. Understanding has a device of its own and goes on."""
    both = Pair()
    both.paint()
    generator, ended = both.painter.generator, list[EngineFailure]()
    turn = generator.turn

    def turn_noting_the_end() -> None:
        try:
            turn()
        except EngineFailure as error:
            ended.append(error)

    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(generator, "turn", turn_noting_the_end)
    assert generator._easel is not None
    monkeypatch.setattr(generator._easel.runner, "run", broken)
    with pytest.raises(EngineFailure, match="illegal memory access") as told:
        both.paint()
    wait_until(lambda: bool(ended))
    assert not is_lost(told.value)
    both.close()
