"""Servers over tiny checkpoints: in the process of the test, and behind a real socket on the loopback."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from timing import wait_until

from server.tools import Running, make_site
from underpaint.server import create_app
from underpaint.server.site import Site

TALKING = Path(__file__).parents[1] / "neo_unify" / "golden" / "dense"


@pytest.fixture(scope="session")
def painter_root(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen-Image, whose defaults are as small as it."""
    root = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(checkpoint, root)
    defaults = {"reference_resolution": 64, "num_inference_steps": 4, "page_rows": 16}
    (root / "underpaint.json").write_text(json.dumps(defaults))
    return root


@pytest.fixture(scope="session")
def talker_root() -> Path:
    """A tiny SenseNova-U1."""
    return TALKING


@pytest.fixture
def start(painter_root: Path) -> Iterator[Callable[..., Running]]:
    """Starts servers on the loopback, by default of the tiny painter; options are those of ``ServerConfig``."""
    running: list[Running] = []

    def begin(root: Path = painter_root, wait: bool = True, site: Site | None = None, **options: Any) -> Running:
        running.append(Running(site or make_site(root, **options), wait=False))
        if wait:
            running[-1].wait_ready()
        return running[-1]

    yield begin
    for server in running:
        server.stop()
    for server in running:
        server.assert_nothing_taken()


@contextmanager
def client_of(site: Site) -> Iterator[TestClient]:
    with TestClient(create_app(site), raise_server_exceptions=False) as client:
        wait_until(lambda: client.get("/health/ready").status_code == 200)
        yield client


@pytest.fixture(scope="module")
def painter(painter_root: Path) -> Iterator[TestClient]:
    """A client in the process."""
    with client_of(make_site(painter_root, max_steps=60)) as client:
        yield client


@pytest.fixture(scope="module")
def talker(talker_root: Path) -> Iterator[TestClient]:
    """A client of a server that talks."""
    with client_of(make_site(talker_root, max_steps=60)) as client:
        yield client
