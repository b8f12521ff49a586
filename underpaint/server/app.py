"""The application: routes over one ``Service``, with a life from warm-up to shutdown."""

import asyncio
import math
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from opentelemetry.trace import NoOpTracer, Tracer
from PIL import Image
from starlette.staticfiles import StaticFiles
from starlette.types import Scope
from structlog.typing import FilteringBoundLogger

from underpaint.errors import BadRequest, DeadlinePassed, EngineFailure, UnderpaintError
from underpaint.models.registry import Checkpoint
from underpaint.server.chat import chat_routes
from underpaint.server.config import ServerConfig
from underpaint.server.crew import Crew
from underpaint.server.desk import Desk, State
from underpaint.server.errand import Work
from underpaint.server.faults import DOCUMENTED, NotReady, add_handlers, error_response
from underpaint.server.fetch import Fetcher
from underpaint.server.gate import Gate
from underpaint.server.images import image_routes
from underpaint.server.jobs import Jobs, job_routes
from underpaint.server.media import Output, send
from underpaint.server.metrics import Metrics
from underpaint.server.paint import Atelier, check_model, read_body
from underpaint.server.responses import response_routes
from underpaint.server.schema import ChatBody, PaintBody
from underpaint.server.site import Site
from underpaint.server.staff import Staff
from underpaint.server.talk import read_dialogue, read_talk
from underpaint.service import Service

PAGE = Path(__file__).parent / "page"
TEND_SECONDS = 0.05
CLOSE_SECONDS = 10.0
"""How long the threads may take at the end to notice that their work is cancelled."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_site(
    service: Service, config: ServerConfig, log: FilteringBoundLogger, tracer: Tracer | None = None
) -> Site:
    """Everything that the routes of a server share, when the process that answers also works."""
    crew = Crew(service, config.num_hands, log)
    return _site(crew, Metrics(crew.vitals), service.model.checkpoint, config, log, tracer)


def create_staffed_site(
    staff: Staff, checkpoint: Checkpoint, config: ServerConfig, log: FilteringBoundLogger, tracer: Tracer | None = None
) -> Site:
    """The same, when other processes work."""
    return _site(staff, Metrics(staff.vitals, staff.workers), checkpoint, config, log, tracer)


def _site(
    crew: Crew | Staff,
    metrics: Metrics,
    checkpoint: Checkpoint,
    config: ServerConfig,
    log: FilteringBoundLogger,
    tracer: Tracer | None,
) -> Site:
    fetcher = Fetcher(config.allowed_media_domains, config.max_image_bytes, config.fetch_seconds)
    tracer = tracer or NoOpTracer()
    desk = Desk(crew, config, metrics, tracer)
    return Site(config, Atelier(checkpoint), desk, metrics, fetcher, log, tracer)


def create_app(site: Site, on_broken: Callable[[], None] | None = None) -> FastAPI:
    """The application. ``on_broken`` is called when the warm-up fails or takes too long: nothing will get well."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        site.desk.crew.start()
        chores = [asyncio.create_task(_keep_warm(site, on_broken)), asyncio.create_task(_tend(site, jobs))]
        yield
        for chore in chores:
            chore.cancel()
        for chore in chores:
            with suppress(asyncio.CancelledError):
                await chore
        if not await asyncio.to_thread(site.desk.close, CLOSE_SECONDS):
            site.log.error("threads_hang", requests=site.desk.num_at_work)
        site.log.info("stopped", requests=site.desk.num_done)

    jobs = Jobs(site.config)
    app = FastAPI(title="Underpaint", lifespan=life, docs_url=None, redoc_url=None, responses=DOCUMENTED)
    add_handlers(app)
    app.add_middleware(Gate, site=site)
    app.include_router(image_routes(site))
    app.include_router(chat_routes(site))
    app.include_router(response_routes(site))
    app.include_router(job_routes(site, jobs))
    _add_facts(app, site)
    app.mount("/page", Page(directory=PAGE), name="page")
    app.add_route("/", _index, include_in_schema=False)
    return app


async def _index(_: Request) -> Response:
    return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)


class Page(StaticFiles):
    """The web page; it may load nothing that is not ours."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


def _add_facts(app: FastAPI, site: Site) -> None:
    """What can be asked of the server itself."""

    @app.get("/health/live")
    async def live() -> Response:
        """200 while the process answers at all."""
        return JSONResponse({"status": "live"})

    @app.get("/health/ready")
    async def ready() -> Response:
        """200 while requests are accepted and answered, else 503."""
        if site.desk.ready:
            return JSONResponse({"status": "ready"})
        return error_response(NotReady(site.desk.obstacle or "a request hangs"))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(site.metrics.text(), media_type=METRICS_TYPE)

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model, and what it can do."""
        return JSONResponse({"object": "list", "data": [model_json(site)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The same by its name."""
        check_model(name, site.config)
        return JSONResponse(model_json(site))


def model_json(site: Site) -> dict[str, Any]:
    """OpenAI's fields, and beside them ``underpaint`` for clients that want to know what can be asked for."""
    limits, defaults = site.atelier.limits, site.atelier.defaults
    facts = {
        "talks": site.atelier.talks,
        "has_alpha": site.atelier.has_alpha,
        "parameters": list(site.atelier.own_parameters),
        "max_references": limits.max_references,
        "side_multiple": limits.side_multiple,
        "max_side": limits.max_side,
        "default_side": defaults.reference_resolution,
        "default_steps": defaults.num_inference_steps,
    }
    return {
        "id": site.config.model_id, "object": "model", "created": 0, "owned_by": "underpaint", "underpaint": facts
    }  # fmt: skip


async def _keep_warm(site: Site, on_broken: Callable[[], None] | None) -> None:
    """Have the crew warmed up whenever it begins anew; if that fails, nothing will get well."""
    desk = site.desk
    while desk.state is not State.BROKEN:
        await asyncio.sleep(TEND_SECONDS)
        epoch = desk.crew.epoch
        failure: UnderpaintError | None = None
        if desk.crew.given_up:
            failure = EngineFailure("a worker cannot be started or ended too often, or the device is lost")
        elif desk.crew.trouble is None and desk.warmed != epoch:
            failure = await _warm_up(site)
            if failure is None:
                desk.warmed = epoch
                desk.state = State.READY if desk.state is State.STARTING else desk.state
                site.log.info("ready", model=site.config.model_id)
                desk.fill()
        if failure is not None and not isinstance(failure, NotReady):  # a worker that ends is started again
            desk.state = State.BROKEN
            site.log.error("warm_up_failed", reason=str(failure))
            if on_broken is not None:
                on_broken()


async def _warm_up(site: Site) -> UnderpaintError | None:
    """Go once through everything that the first request would have to wait for. Returns why that failed."""
    deadline = asyncio.get_running_loop().time() + site.config.warmup_seconds
    try:
        works = list(_first_works(site))
    except BadRequest as error:  # limits that leave nothing to be painted
        return error
    for work in works:
        # Those that come together go to different painters.
        tasks = [site.desk.warm_up(work) for _ in range(site.desk.crew.num_painters if work.kind == "painting" else 1)]
        for task in tasks:
            while not task.done and asyncio.get_running_loop().time() < deadline:
                await task.changed(TEND_SECONDS)
        failed = next((task for task in tasks if not task.done or task.error is not None), None)
        if failed is not None:
            for task in tasks:
                task.cancel()
            return failed.error or DeadlinePassed(f"not done in {site.config.warmup_seconds} s")
    return None


def _first_works(site: Site) -> Iterator[Work]:
    """A step of the usual sizes, with guidance and without: kernels are compiled for them, and graphs captured. Those
    are keyed by the number of rows, so a square stands for all sizes of its area. Then one behind a reference, which
    has to be encoded and read."""
    sides, guidances = _usual_sides(site), site.atelier.guidances
    reference = b64decode(send(Image.new("RGBA", (sides[-1], sides[-1])), Output()).b64)
    paintings = [(side, guidance, ()) for side in sides for guidance in guidances]
    for side, guidance, references in [*paintings, (sides[-1], guidances[0], (reference,))]:
        values = {"prompt": "warm-up", "size": f"{side}x{side}", "num_inference_steps": 1, **guidance}
        yield read_body(PaintBody.model_validate(values), references, site.atelier, site.config, streams=False)
    if site.atelier.talks:
        question = ChatBody.model_validate({"messages": [{"role": "user", "content": "warm-up"}], "max_tokens": 1})
        yield read_talk(question, read_dialogue(question), (), site.atelier, site.config)


def _usual_sides(site: Site) -> list[int]:
    """The side that is painted by default, and half of it, as far as they can be painted here; or a small one where
    the first of a size is as fast as the next."""
    multiple, whole = site.atelier.limits.side_multiple, site.atelier.defaults.reference_resolution
    largest = min(whole, math.isqrt(site.config.max_output_pixels))
    if not site.desk.crew.compiles:
        return [multiple if largest < 2 * multiple else 2 * multiple]
    return sorted({max(side // multiple, 1) * multiple for side in (largest, largest // 2)})


async def _tend(site: Site, jobs: Jobs) -> None:
    while True:
        await asyncio.sleep(TEND_SECONDS)
        site.desk.expire()
        site.desk.fill()  # what kept the crew from work may have passed without a word
        jobs.tend()
