"""A server as its operator has it: a process of its own, its logs and metrics, and its end."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import httpx
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from timing import wait_until

from server.serving import reserve_port
from server.tools import ENGINE, PAINT, Running, log_of, make_site
from underpaint.errors import BadConfig
from underpaint.models.qwen_image21.condition import Reference
from underpaint.models.qwen_image21.model import QwenImage21
from underpaint.server import ServerConfig

SCRIPT = """
import sys
import torch
from underpaint.server import ServerConfig, serve
torch.set_num_threads(1)
config = ServerConfig("tiny", drain_seconds=20, warmup_seconds=60)
sys.exit(serve(sys.argv[1], port=int(sys.argv[2]), config=config, device="cpu", kv_cache_bytes=64 << 20))
"""


@pytest.fixture
def process(painter_root: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    holder = reserve_port()
    port = holder.getsockname()[1]
    started = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(painter_root), str(port)],
        stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    yield started, f"http://127.0.0.1:{port}"
    started.kill()
    started.wait()
    holder.close()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_sigterm_lets_work_end_and_ends_the_process(process: tuple[subprocess.Popen[str], str]) -> None:
    server, url = process
    wait_until(lambda: is_ready(url), 90)
    assert len(os.listdir(f"/proc/{server.pid}/fd")) < 100
    body = {**PAINT, "prompt": "a secret teapot", "stream": True, "num_inference_steps": 300, "partial_images": 3}
    with httpx.stream("POST", f"{url}/v1/images/generations", json=body, trust_env=False, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: image_generation.partial_image"
        server.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert "event: image_generation.completed" in rest
    assert server.stderr is not None
    logged = read_all(server.stderr)
    assert server.wait(30) in (0, -signal.SIGTERM)
    records = [json.loads(line) for line in logged.splitlines() if line.startswith("{")]
    assert [record["event"] for record in records if record["event"] in ("ready", "stopped")] == ["ready", "stopped"]
    of_work = [record for record in records if record.get("endpoint") == "/v1/images/generations"]
    assert len(of_work) == 1
    assert of_work[0]["status"] == 200
    assert of_work[0]["request"].startswith("req_")
    assert "secret" not in logged


def read_all(stream: IO[str]) -> str:
    """Everything up to the end of the process, but not for ever."""
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(stream.read()))
    thread.start()
    thread.join(60)
    assert told, "the process did not end"
    return told[0]


def test_metrics_tell_what_happened(painter: TestClient) -> None:
    painter.post("/v1/images/generations", json=PAINT)
    text = painter.get("/metrics").text
    for name in (
        'underpaint_requests_total{endpoint="/v1/images/generations",status="200"}', "underpaint_queue_depth 0.0",
        "underpaint_queue_seconds_count", 'underpaint_stage_seconds_count{stage="denoise"}',
        'underpaint_stage_seconds_count{stage="prefill"}', 'underpaint_stage_seconds_count{stage="image_encode"}',
        "underpaint_prefix_cache_hits_total", "underpaint_prefix_cache_misses_total", "underpaint_kv_bytes",
    ):  # fmt: skip
        assert name in text
    assert "req_" not in text


def test_a_model_says_what_it_can(painter: TestClient, talker: TestClient) -> None:
    paints, talks = (client.get("/v1/models").json()["data"][0] for client in (painter, talker))
    facts = [(model["underpaint"]["talks"], model["underpaint"]["has_alpha"]) for model in (paints, talks)]
    assert facts == [(False, True), (True, False)]
    assert painter.get("/v1/models/tiny").json() == paints


def test_the_page_loads_nothing_from_elsewhere(painter: TestClient) -> None:
    index = painter.get("/")
    assert index.status_code == 200
    assert index.headers["content-security-policy"].startswith("default-src 'self'")
    for name in ("app.js", "paint.js", "chat.js", "api.js", "words.js", "references.js", "style.css", "icon.svg"):
        response = painter.get(f"/page/{name}")
        assert response.status_code == 200
        assert "https://" not in response.text
        assert "http://" not in response.text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("values", [
    {"model_id": ""}, {"api_key": ""}, {"max_running": 0}, {"max_waiting": -1}, {"timeout_seconds": 0},
])  # fmt: skip
def test_limits_that_are_none_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(BadConfig):
        ServerConfig(**{"model_id": "tiny", **values})  # type: ignore[arg-type]


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(ServerConfig("tiny", api_key="secret"))


def test_the_warm_up_captures_the_steps_of_usual_sizes(start: Callable[..., Running], painter_root: Path) -> None:
    """The first painting by default, with guidance or without, finds its graphs; another size is captured once."""
    server = start(site=make_site(painter_root, replace(ENGINE, step_graphs="on")))

    def captured() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("underpaint_step_graph_misses_total"))

    warm = captured()
    assert warm
    for values in ({}, {"true_cfg_scale": 3.0, "negative_prompt": "blue"}, {"size": "32x32"}):
        assert server.paint(**values).status_code == 200
    assert captured() == warm
    assert server.service.runner.graphs.hits >= 6
    for _ in range(2):
        assert server.paint(size="96x96").status_code == 200
    assert captured() == warm + 1


def test_the_warm_up_reads_a_reference(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """So the first edit finds every kernel compiled: the encoders', and those of a prefix with a picture."""
    read, sides = QwenImage21.reference, []

    def watched(self: QwenImage21, image: Image.Image, resolution: int) -> Reference:
        sides.append((max(image.size), resolution))
        return read(self, image, resolution)

    monkeypatch.setattr(QwenImage21, "reference", watched)
    side = start().site.atelier.defaults.reference_resolution
    assert sides == [(side, side)]


def test_a_server_that_may_paint_nothing_says_so_and_ends(start: Callable[..., Running]) -> None:
    """Its own warm-up is refused; it must neither wait for ever nor break when it ends."""
    server = start(wait=False, max_output_pixels=1)
    assert server.broken.wait(60)
    assert server.client.get("/health/ready").status_code == 503
    assert "too many, the limit of this server is 1" in log_of(server.site)


def test_the_warm_up_keeps_to_the_limits_of_the_server(start: Callable[..., Running], painter_root: Path) -> None:
    multiple = make_site(painter_root).atelier.limits.side_multiple
    server = start(max_output_pixels=multiple**2)
    assert server.paint(size=f"{multiple}x{multiple}").status_code == 200
