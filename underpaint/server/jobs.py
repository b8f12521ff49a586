"""``/v1/jobs``: paintings that are asked for again later, with progress, previews, and a way to cancel them.

A job is cancelled when nobody asks for it any more, unless it is detached. When it has ended, it is kept for a while.
"""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from underpaint.errors import Cancelled, UnderpaintError
from underpaint.server.config import ServerConfig
from underpaint.server.deliver import SSE_HEADERS, ClientGone, begun, follow, gone, sse
from underpaint.server.faults import STREAMED, UnknownJob, error_body, rename_param
from underpaint.server.images import images_json, painted_json, preview_json, read_upload, upload_of
from underpaint.server.paint import PARAM_NAMES, Begun, Painted, Preview
from underpaint.server.schema import JobBody
from underpaint.server.site import Site
from underpaint.server.task import Task


@dataclass(eq=False)
class Job:
    """A task under a name. ``asked``: when somebody last asked for it; ``ended``: when it was seen to have ended."""

    task: Task
    detached: bool
    asked: float = field(default_factory=time.monotonic)
    num_listeners: int = 0
    ended: float | None = None

    @property
    def status(self) -> str:
        """queued, running, completed, failed or cancelled."""
        task = self.task
        if not task.done:
            return "queued" if task.started is None else "running"
        if task.error is None:
            return "completed"
        return "cancelled" if isinstance(task.error, Cancelled) else "failed"

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """Somebody is there for as long as this lasts."""
        self.num_listeners += 1
        try:
            yield
        finally:
            self.num_listeners -= 1
            self.asked = time.monotonic()

    @property
    def num_bytes(self) -> int:
        return sum(len(event.picture.b64) for event in self.task.events if isinstance(event, Preview | Painted))

    def as_json(self, whole: bool = True) -> dict[str, Any]:
        """Its state; with the pictures if it is ``whole``."""
        task, status = self.task, self.status
        state = {
            "id": task.id, "object": "job", "created": int(task.created), "status": status, "detached": self.detached,
            "step": task.step, "num_steps": task.num_steps, "result": None, "error": None,
        }  # fmt: skip
        if status == "completed" and whole:
            state["result"] = images_json(task.result, int(task.created))
        if task.done and task.error is not None:
            state["error"] = error_body(rename_param(task.error, PARAM_NAMES))["error"]
        return state


class Jobs:
    """Every job that can still be asked for. Used on the event loop only."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._jobs: dict[str, Job] = {}

    def add(self, job: Job) -> None:
        self._jobs[job.task.id] = job

    def forget(self, job: Job) -> None:
        del self._jobs[job.task.id]

    def find(self, name: str) -> Job:
        """The job, which somebody asks for hereby. Raises UnknownJob."""
        job = self._jobs.get(name)
        if job is None:
            raise UnknownJob("there is no such job, or it ended too long ago")
        job.asked = time.monotonic()
        return job

    def tend(self) -> None:
        """Cancel what nobody wants any more, and forget what ended too long ago or is too much to keep."""
        now = time.monotonic()
        for job in self._jobs.values():
            if job.task.done:
                job.ended = job.ended or now
            elif not job.detached and not job.num_listeners and now - job.asked > self._config.job_idle_seconds:
                job.task.cancel()
        kept = 0
        # Newest first; of those that were seen to end together, the one created later.
        ended = [job for job in reversed(self._jobs.values()) if job.ended is not None and not job.num_listeners]
        for newest, job in enumerate(sorted(ended, key=lambda job: -(job.ended or 0))):
            kept += job.num_bytes
            old = now - (job.ended or now) > self._config.kept_job_seconds
            if old or (newest and kept > self._config.kept_job_bytes):
                del self._jobs[job.task.id]


def job_routes(site: Site, jobs: Jobs) -> APIRouter:
    """Create, look, listen, cancel."""
    router = APIRouter(prefix="/v1/jobs")

    @router.post("", status_code=202)
    async def create(body: JobBody, request: Request) -> Response:
        """Begin a painting or, with ``images``, an edit. If its work begins at once, an illegal one is refused here;
        if it waits in line, its state tells later."""
        upload = await upload_of(body, body.images, site)
        painting = await read_upload(site, upload, streams=True)
        task = site.desk.accept(painting, upload.num_bytes, body.priority or "normal")
        job = Job(task, body.detach)
        jobs.add(job)
        try:
            if task.started is not None:
                with job.wanted():
                    await begun(follow(task, request, PARAM_NAMES, owns=False), Begun)
        except UnderpaintError:
            jobs.forget(job)
            raise
        except ClientGone:
            if not body.detach:
                task.cancel()
            return gone()
        return JSONResponse(job.as_json(whole=False), 202)

    @router.get("/{name}")
    async def look(name: str) -> Response:
        """The state of a job, and its pictures once it is completed."""
        return JSONResponse(jobs.find(name).as_json())

    @router.get("/{name}/events", responses=STREAMED)
    async def listen(name: str, request: Request) -> Response:
        """Server-sent events from the beginning of the job: progress, previews, pictures, and one that ends it."""
        job = jobs.find(name)
        return StreamingResponse(_stream(job, request), media_type="text/event-stream", headers=SSE_HEADERS)

    @router.delete("/{name}")
    async def cancel(name: str) -> Response:
        """Cancel a job; one that has ended stays as it is."""
        job = jobs.find(name)
        job.task.cancel()
        return JSONResponse(job.as_json(whole=False))

    return router


async def _stream(job: Job, request: Request) -> AsyncIterator[str]:
    with job.wanted():
        async for line in _tell(job, request):
            yield line


async def _tell(job: Job, request: Request) -> AsyncIterator[str]:
    task, created = job.task, int(job.task.created)
    told = (0, 0)
    try:
        async for event in follow(task, request, PARAM_NAMES, owns=False):
            if (task.step, task.num_steps) != told:
                told = (task.step, task.num_steps)
                yield sse({"type": "job.progress", "step": told[0], "num_steps": told[1]}, "job.progress")
            if isinstance(event, Preview):
                yield sse({"type": "job.partial_image", **preview_json(event, created)}, "job.partial_image")
            elif isinstance(event, Painted):
                yield sse({"type": "job.image", **painted_json(event, created)}, "job.image")
        yield sse({"type": "job.completed", "job": job.as_json()}, "job.completed")
    except UnderpaintError:
        name = f"job.{job.status}"
        yield sse({"type": name, "job": job.as_json()}, name)
    except ClientGone:
        return
