"""A server in processes of its own, as an operator has it: the API process, and its workers.

python serving.py '{"root": ..., "port": ..., ...}'
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from leftovers import Leftovers
from timing import WAIT_SECONDS, wait_until

from server.tools import PAINT

HERE = Path(__file__).parent
FAULTY = (sys.executable, str(HERE / "faulty_worker.py"))
PATIENT = {
    "silent_seconds": 60.0, "hang_seconds": 120.0, "first_pause": 0.05, "steady_seconds": 0.5, "max_restarts": 3,
}  # fmt: skip
"""A worker that a busy machine holds up for seconds is not taken for one that hangs."""
WATCHFUL = {**PATIENT, "silent_seconds": 1.2, "hang_seconds": 5.0}
ENGINE = {"device": "cpu", "dtype": "float32", "kv_codec": "fp32", "kv_cache_bytes": 64 << 20}
SLOW: dict[str, Any] = {"size": "32x96", "num_inference_steps": 40}
"""See ``faulty_worker``: four seconds."""
LASTING: dict[str, Any] = {**SLOW, "num_inference_steps": 10_000}
"""What nobody waits for: a quarter of an hour."""
LOST = {"code": "worker_lost", "type": "server_error", "param": None}
START_SECONDS = 240.0
"""Three processes import all that they need: ten seconds usually, minutes on a busy machine."""
TOLD_SECONDS = 2.0
"""Within which an error must reach its client, and readiness tell the truth. See ``tools.in_time``."""


def main() -> int:
    """The API process."""
    import torch

    from underpaint.server import ServerConfig, serve
    from underpaint.server.plan import Spread
    from underpaint.server.supervisor import Watch

    torch.set_num_threads(1)
    how = json.loads(sys.argv[1])
    return serve(
        how["root"],
        port=how["port"],
        config=ServerConfig("tiny", **how["config"]),
        spread=Spread(**how["spread"]),
        watch=Watch(**how["watch"]),
        worker_command=tuple(how["command"]),
        **how["engine"],
    )


class Serving:
    """Started when it is made; ready when ``wait_ready`` returns. ``records``: what was logged, and ``other_lines``:
    what else was written to stderr."""

    def __init__(self, root: Path, command: tuple[str, ...] = FAULTY, **options: Any) -> None:
        """``options``: of ``Spread``, of ``Watch`` (as ``watch``), of ``ServerConfig`` (as ``config``) and of
        ``EngineConfig`` (as ``engine``)."""
        self._port = reserve_port()
        self.port: int = self._port.getsockname()[1]
        how = {
            "root": str(root), "port": self.port, "command": command,
            "config": {"drain_seconds": 60.0, "max_steps": LASTING["num_inference_steps"], **options.pop("config", {})},
            "watch": {**PATIENT, **options.pop("watch", {})},
            "engine": {**ENGINE, **options.pop("engine", {})},
            "spread": {"handover_memory": None if options.get("mode") == "single" else 16 << 20, **options},
        }  # fmt: skip
        paths = [str(HERE.parents[1]), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(how)],
            stderr=subprocess.PIPE, text=True, cwd=HERE.parents[1],
            env={**os.environ, "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.records: list[dict[str, Any]] = []
        self.other_lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                self.records.append(json.loads(line))
            else:
                self.other_lines.append(line)

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["event"] == event]

    def pid(self, role: str) -> int:
        """Of the worker that came up last."""
        return [record["pid"] for record in self.logged("worker_up") if record["role"] == role][-1]

    def pids(self) -> list[int]:
        """Of all processes that there ever were."""
        return [self.process.pid, *(record["pid"] for record in self.logged("worker_up"))]

    def readiness(self) -> tuple[bool, str]:
        """Whether it says that it is ready, and if not, why."""
        try:
            response = self.client.get("/health/ready")
        except httpx.TransportError:
            return False, "nobody answers"
        return response.status_code == 200, response.json().get("error", {}).get("message", "")

    def wait_ready(self) -> "Serving":
        until = time.monotonic() + START_SECONDS
        while not self.readiness()[0]:
            assert self.process.poll() is None, f"it ended: {self.records[-5:]} {''.join(self.other_lines)}"
            assert time.monotonic() < until, f"it is not ready: {self.records[-5:]} {''.join(self.other_lines)}"
            time.sleep(0.02)
        return self

    def wait_unready(self, why: str) -> None:
        """Readiness tells the truth, and gives the reason."""
        until = time.monotonic() + WAIT_SECONDS
        while why not in (said := self.readiness()[1]):
            assert time.monotonic() < until, f"not ready because of {why!r}, but it says {said!r}"
            time.sleep(0.02)

    def paint(self, **values: Any) -> httpx.Response:
        return self.client.post("/v1/images/generations", json={**PAINT, **values})

    def picture(self, **values: Any) -> str:
        response = self.paint(**values)
        assert response.status_code == 200, response.text
        return response.json()["data"][0]["b64_json"]

    @contextmanager
    def in_flight(self, path: str = "/v1/images/generations", **values: Any) -> Iterator["InFlight"]:
        """A request under way in a thread of its own."""
        request = InFlight(self, path, {**(PAINT if "images" in path else {}), **values})
        try:
            yield request
        finally:
            request.join()

    def metric(self, name: str) -> float:
        """The sum of all lines of a metric, of which there are none before the first of its labels is used."""
        text = self.client.get("/metrics").text
        assert f"# TYPE underpaint_{name} " in text, f"there is no metric {name}"
        ours = [line for line in text.splitlines() if line.startswith((f"underpaint_{name}{{", f"underpaint_{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in ours)

    def assert_nothing_held(self) -> None:
        """Soon after the last answer nothing is at work, and no request holds a page or a slab."""
        for name in ("running", "queue_depth", "kv_held_bytes", "handover_held_bytes"):
            wait_until(lambda name=name: self.metric(name) == 0)  # type: ignore[misc]

    def num_fds(self) -> int:
        """Of the API process and of its present workers, when nothing is at work."""
        pids = [self.process.pid, self.pid("understanding"), self.pid("generation")]
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)

    def wait_num_fds(self, at_most: int) -> None:
        """Connections that clients have closed are closed here soon."""
        wait_until(lambda: self.num_fds() <= at_most)

    def kill(self, role: str) -> None:
        os.kill(self.pid(role), signal.SIGKILL)

    def stop(self, seconds: float = 100.0) -> int:
        """SIGTERM; the exit status when nothing is left of it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(seconds)
        self.close()
        return status

    def close(self) -> None:
        """When it has ended, or was killed: nothing is left of it."""
        self.process.wait(WAIT_SECONDS)
        wait_until(lambda: not any(is_alive(pid) for pid in self.pids()))
        self._reader.join(10)
        self.client.close()
        self._port.close()


class InFlight:
    """``response`` and when it came, ``answered``, once it is there."""

    def __init__(self, server: Serving, path: str, body: dict[str, Any]) -> None:
        self.response: httpx.Response | None = None
        self.failure: httpx.TransportError | None = None
        self.answered = 0.0
        self._url = f"http://127.0.0.1:{server.port}{path}"
        self._body = body
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self.response = httpx.post(self._url, json=self._body, timeout=600, trust_env=False)
        except httpx.TransportError as failure:
            self.failure = failure
        self.answered = time.monotonic()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> httpx.Response | None:
        self._thread.join(90)
        assert self.ended, "a request got no answer"
        return self.response


def outcome(response: Any) -> Any:
    """What of an answer does not tell when it was given."""
    assert response is not None
    assert response.status_code == 200, response.text
    body = response.json()
    return body.get("data") or (body["choices"], body["usage"])


@contextmanager
def painting_under_way(server: Serving) -> Iterator[InFlight]:
    """A request in the middle of its painting. A server that is ``WATCHFUL`` may refuse it at first, where the machine
    holds up a worker."""
    for _ in range(4):
        passes = server.metric("generation_passes_total")
        with server.in_flight(**LASTING) as painting:
            wait_until(lambda: painting.ended or server.metric("generation_passes_total") > passes)  # noqa: B023
            if not painting.ended:
                yield painting
                return
        server.wait_ready()
    raise AssertionError(f"it was not taken on: {painting.response}")


def kill_a_worker(server: Serving, role: str, beside: dict[str, Any] | None) -> float:
    """While it is needed; ``beside``: a dialogue that goes on without it. Returns after how many seconds everybody had
    been told."""
    told = beside and outcome(server.client.post("/v1/chat/completions", json=beside))
    restarts = server.metric("worker_restarts_total")
    with ExitStack() as stack:
        painting = stack.enter_context(painting_under_way(server))
        chat = stack.enter_context(server.in_flight("/v1/chat/completions", **beside)) if beside else None
        wait_until(lambda: server.metric("running") == (2 if chat else 1) or (chat is not None and chat.ended))
        server.kill(role)
        killed = time.monotonic()
        server.wait_unready(f"the {role} worker")
        unready = time.monotonic()
    assert_lost(painting)
    if chat is not None:
        assert outcome(chat.response) == told
    server.wait_ready()
    assert server.metric("worker_restarts_total") == restarts + 1
    server.assert_nothing_held()
    return max(unready, painting.answered) - killed


def hang_a_worker(server: Serving, role: str) -> float:
    """It stops for good, and takes its request with it, and no other. Returns the seconds until readiness told, or
    those until the client was told that it was lost, whichever took longer."""
    deaths = len(server.logged("worker_lost"))
    with painting_under_way(server) as painting:
        os.kill(server.pid(role), signal.SIGSTOP)
        stopped = time.monotonic()
        server.wait_unready(f"the {role} worker does not answer")
        unready = time.monotonic()
        wait_until(lambda: len(server.logged("worker_lost")) > deaths)
        killed = time.monotonic()
    assert_lost(painting)
    assert "no sign of life" in server.logged("worker_lost")[-1]["reason"]
    server.wait_ready()
    server.assert_nothing_held()
    return max(unready - stopped, painting.answered - killed)


def stop_the_server(server: Serving) -> None:
    """SIGTERM while it paints: it takes on nothing more, ends what it has, and then itself and its workers."""
    with server.in_flight(**SLOW) as painting:
        wait_until(lambda: server.metric("running") == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not server.readiness()[0])
        assert not painting.ended, "it was ready until there was nothing left to do"
        assert server.process.wait(60) in (0, -signal.SIGTERM)
        server.close()
    assert outcome(painting.response)
    assert server.logged("stopped")


def kill_the_server(server: Serving) -> None:
    """Without any chance to clean up: its workers end with it, in the middle of their work."""
    leftovers = Leftovers()
    with painting_under_way(server) as painting:
        server.process.kill()
        server.close()
    assert painting.failure is not None
    leftovers.assert_none("names")


def reserve_port() -> socket.socket:
    """A port that nobody else is given as long as this socket is open, which does not listen."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that who does listen may have it, too
    holder.bind(("127.0.0.1", 0))
    return holder


def assert_lost(request: InFlight) -> None:
    response = request.response
    assert response is not None
    assert response.status_code == 503
    assert response.json()["error"].items() >= LOST.items()
    assert response.headers["retry-after"]


def is_alive(pid: int) -> bool:
    """False for a zombie, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
