"""``serve``: load a model and answer until the process is told to stop."""

import asyncio
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from opentelemetry.trace import Tracer
from transformers.utils import logging as transformers_logging

from underpaint.models import registry
from underpaint.models.loading import locate
from underpaint.pipeline import load_service
from underpaint.server.app import create_app, create_site, create_staffed_site
from underpaint.server.config import ServerConfig
from underpaint.server.desk import Desk, State
from underpaint.server.logs import make_log
from underpaint.server.plan import Spread, make_plan
from underpaint.server.staff import Staff
from underpaint.server.supervisor import COMMAND, Watch

LAST_ANSWER_SECONDS = 5
"""After the drain everything is cancelled; how long the answers to that may take."""


class Server(uvicorn.Server):
    """Tells the desk at once that it shuts down, and cancels what is not done when the drain is over."""

    def __init__(self, app: FastAPI, desk: Desk, host: str, port: int) -> None:
        drain = desk.config.drain_seconds
        super().__init__(
            uvicorn.Config(
                app, host, port, log_config=None, access_log=False, lifespan="on", server_header=False,
                timeout_graceful_shutdown=int(drain) + LAST_ANSWER_SECONDS,
            )
        )  # fmt: skip
        self._desk = desk

    async def shutdown(self, sockets: Any = None) -> None:
        """Refuse new requests, let those at work end, then cancel them."""
        if self._desk.state is not State.BROKEN:
            self._desk.state = State.DRAINING
        timer = asyncio.get_running_loop().call_later(self._desk.config.drain_seconds, self._desk.cancel_all)
        await super().shutdown(sockets)
        timer.cancel()


def serve(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    config: ServerConfig | None = None,
    tracer: Tracer | None = None,
    spread: Spread | None = None,
    watch: Watch | None = None,
    worker_command: tuple[str, ...] = COMMAND,
    **engine_options: Any,
) -> int:
    """Serve a checkpoint directory or a Hugging Face id until SIGTERM or SIGINT. Returns the exit status: 1 if the
    warm-up failed.

    ``config``: limits and the API key; by default those of ``ServerConfig``, with the directory's name as the model's.
    ``tracer``: see ``tracing.make_tracer``; by default nothing is traced. ``spread``: over which processes and devices,
    by default as the machine suggests; ``watch``: when a worker process counts as hung; ``worker_command`` starts one.
    ``engine_options``: the fields of ``EngineConfig``. Raises CheckpointError or BadConfig.
    """
    logging.basicConfig(level=logging.WARNING)
    transformers_logging.disable_progress_bar()
    log = make_log(sys.stderr)
    config = config or ServerConfig(default_id(model))
    plan = make_plan(spread or Spread(), engine_options)
    if plan is None:
        site = create_site(load_service(model, engine_options), config, log, tracer)
    else:
        root = locate(model)
        checkpoint = registry.inspect(root)
        registry.open_loras(checkpoint, plan.understanding.lora)  # a mistake is told before any worker is started
        staff = Staff(root, plan, config.num_hands, log, os.environ, watch, worker_command)
        site = create_staffed_site(staff, checkpoint, config, log, tracer)
    server: Server | None = None

    def stop() -> None:
        assert server is not None
        server.should_exit = True

    server = Server(create_app(site, on_broken=stop), site.desk, host, port)
    log.info("listening", url=f"http://{host}:{port}", model=site.config.model_id)
    with suppress(KeyboardInterrupt):  # raised again when the server has ended by it, as all signals are
        server.run()
    status = int(site.desk.state is State.BROKEN or not server.started)
    if site.desk.num_at_work:
        # A thread hangs in a pass, and Python would wait for it for ever.
        sys.stderr.flush()
        os._exit(1)
    return status


def default_id(model: str | Path) -> str:
    """The name that clients use if none is given: the last part of the path or id."""
    return Path(model).resolve().name if Path(model).exists() else str(model).rpartition("/")[2]
