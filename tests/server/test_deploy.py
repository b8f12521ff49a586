"""What stands in ``deploy/`` is about this server as it is: its metrics, its options, its times."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from server.test_options import Serve
from server.test_options import serve as serve
from server.tools import PAINT
from underpaint.server import ServerConfig
from underpaint.server.metrics import Metrics
from underpaint.server.vitals import Vitals

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DRAIN_SECONDS = ServerConfig("tiny").drain_seconds


class Loader(yaml.SafeLoader):
    """Knows compose's tag for what replaces instead of being merged."""


Loader.add_constructor("!override", lambda loader, node: loader.construct_mapping(node))


def load(name: str) -> Any:
    return yaml.load((DEPLOY / name).read_text(), Loader)


def expressions() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def exported(painter: TestClient) -> dict[str, set[str]]:
    """Every sample that /metrics has, with its labels, after a bit of everything; with and without workers."""
    assert painter.post("/v1/images/generations", json=PAINT).status_code == 200
    assert painter.post("/v1/images/generations", json={**PAINT, "n": 0}).status_code == 400
    site = painter.app.user_middleware[0].kwargs["site"]  # type: ignore[attr-defined]
    site.metrics.cancelled.labels("denoise")
    worker: Any = SimpleNamespace(name="generation", num_restarts=0, silence=0.0, is_up=True, vitals=Vitals())
    texts = (painter.get("/metrics").text, Metrics(Vitals, [worker]).text().decode())
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.mark.parametrize("expression", expressions())
def test_the_dashboard_asks_for_what_there_is(exported: dict[str, set[str]], expression: str) -> None:
    names = re.findall(r"underpaint_\w+", expression)
    assert names
    labels = set(re.findall(r"[{,]\s*(\w+)\s*(?==)", expression)) - {"instance"}  # Prometheus adds that one itself
    for group in re.findall(r"by \(([^)]*)\)", expression):
        labels |= {label.strip() for label in group.split(",")}
    for name in names:
        assert name in exported
        assert labels <= exported[name], f"{name} has no {labels - exported[name]}"


def test_the_dashboard_shows_every_metric(exported: dict[str, set[str]]) -> None:
    shown = set(re.findall(r"underpaint_\w+", " ".join(expressions())))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported if not name.endswith("_created")}
    assert families - {re.sub(r"_bucket$", "", name) for name in shown} == set()


def test_prometheus_asks_the_server_that_compose_starts() -> None:
    (job,) = load("prometheus.yaml")["scrape_configs"]
    host, _, port = job["static_configs"][0]["targets"][0].partition(":")
    assert host in load("compose.yaml")["services"]
    assert f"EXPOSE {port}" in (DEPLOY / "Dockerfile").read_text()


def instructions(kind: str) -> list[str]:
    """The arguments of a kind of instruction, their lines joined."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in text.splitlines() if line.startswith(f"{kind} ")]


def test_the_image_is_made_from_what_there_is() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text()
    for line in instructions("COPY"):
        *sources, _ = shlex.split(line)
        for source in sources:
            assert (ROOT / source).exists()
            assert f"!{source}\n" in ignored
    extras = re.findall(r"\.\[(\w+)\]", " ".join(instructions("RUN")))
    assert extras
    assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)


def test_the_image_starts_what_the_command_line_knows(serve: Serve) -> None:
    command, *arguments = json.loads(instructions("CMD")[0])
    assert [*json.loads(instructions("ENTRYPOINT")[0]), command] == ["tini", "--", "underpaint", "serve"]
    code, told = serve(*arguments)
    assert (code, told["host"], told["port"]) == (0, "0.0.0.0", 8000)
    assert (ROOT / Path(arguments[0]).relative_to("/opt/underpaint/source")).is_dir()
    command, *arguments = load("compose.gpu.yaml")["services"]["underpaint"]["command"]
    assert command == "serve"
    arguments[arguments.index("--config") + 1] = str(DEPLOY / "serve.toml")
    assert serve(*arguments)[0] == 0


@pytest.mark.parametrize("status", [200, 503])
def test_the_health_check_asks_the_server_itself(status: int) -> None:
    """Whatever proxy the environment names: here one that nobody answers for."""

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/ready" else 404)
            self.end_headers()

    (check,) = instructions("HEALTHCHECK")
    with HTTPServer(("127.0.0.1", 0), Ready) as server, ThreadPoolExecutor(1) as thread:
        server.timeout = 30
        thread.submit(server.handle_request)
        command = json.loads(check.partition("CMD ")[2].replace(":8000/", f":{server.server_port}/"))
        environ = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        healthy = subprocess.run(command, env=environ, capture_output=True, timeout=60).returncode == 0
    assert healthy == (status == 200)


def test_nobody_runs_as_root() -> None:
    assert instructions("USER") == ["10001"]
    assert load("compose.yaml")["services"]["underpaint"]["cap_drop"] == ["ALL"]


def test_the_example_file_is_legal_with_all_that_it_shows(serve: Serve) -> None:
    text = (DEPLOY / "serve.toml").read_text()
    assert serve("model", file=text)[0] == 0
    shown = re.sub(r"^# (?=[a-z-]+ = )", "", text, flags=re.MULTILINE)
    assert shown != text
    code, told = serve("model", file=shown)
    assert code == 0
    assert told["config"].allowed_media_domains
    assert told["tracer"] is not None


def test_the_log_is_lines_of_json_and_nothing_else(checkpoint: Path) -> None:
    """Also without accelerate, which only development has: diffusers tells of it."""
    program = "import sys; sys.modules['accelerate'] = None; from underpaint.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", str(checkpoint), "--device", "cpu", "--port", "0"]
    events = []
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                events.append(json.loads(line)["event"])
                if events[-1] == "ready":
                    process.terminate()
        finally:
            process.kill()
    assert events == ["listening", "ready", "stopped"]
    assert process.returncode == -signal.SIGTERM


def test_whoever_is_at_work_may_finish() -> None:
    unit = (DEPLOY / "underpaint.service").read_text()
    waits = [
        re.search(r"TimeoutStopSec=(\d+)", unit),
        re.search(r"(\d+)s", load("compose.yaml")["services"]["underpaint"]["stop_grace_period"]),
    ]
    for wait in waits:
        assert wait
        assert int(wait[1]) >= DRAIN_SECONDS + 10


def test_wrong_options_are_not_tried_again(serve: Serve) -> None:
    """The unit knows the status that they end with."""
    (status,) = re.findall(
        r"^RestartPreventExitStatus=(\d+)$", (DEPLOY / "underpaint.service").read_text(), re.MULTILINE
    )
    for arguments in ([], ["model", "--no-such-option"], ["model", "--max-running", "0"]):
        assert serve(*arguments)[0] == int(status)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "underpaint.service").read_text()
    (command,) = re.findall(r"^ExecStart=(\S+)", unit, re.MULTILINE)
    (tmp_path / "underpaint.service").write_text(unit.replace(command, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "underpaint.service")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
