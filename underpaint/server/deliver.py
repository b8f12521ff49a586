"""Waiting for a task on the event loop, for as long as its client is there."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import Request, Response

from underpaint.errors import DeadlinePassed
from underpaint.server.desk import STUCK_SECONDS
from underpaint.server.faults import CLIENT_GONE, rename_param
from underpaint.server.task import Task

POLL_SECONDS = 0.05
"""How often to look whether the client is gone. FastAPI lets a handler run to its end when it is."""
SSE_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """Nobody is there to read the answer."""


async def follow(task: Task, request: Request, names: Mapping[str, str], owns: bool = True) -> AsyncIterator[Any]:
    """The events of a task as they come, and None whenever it moved on. Ends when the task is done; raises its error.

    ``names``: see ``rename_param``. If this ``owns`` the task, the task is cancelled as soon as this ends in any other
    way: the client is gone (ClientGone), or the server stops.
    """
    told = 0
    try:
        while True:
            done = task.done  # before the events: what comes after them would be lost
            for event in task.events[told:]:
                told += 1
                yield event
            if done:
                break
            await task.changed(POLL_SECONDS)
            if await request.is_disconnected():
                raise ClientGone
            if time.monotonic() > task.deadline + STUCK_SECONDS:
                raise DeadlinePassed("the server hangs; it cannot even be told to stop")
            yield None
    finally:
        if owns and not task.done:
            task.cancel()
    if task.error is not None:
        raise rename_param(task.error, names)


async def finished(task: Task, request: Request, names: Mapping[str, str]) -> Any:
    """The result of a task. Raises its error, or ClientGone."""
    async for _ in follow(task, request, names):
        pass
    return task.result


async def begun(events: AsyncIterator[Any], kind: type) -> None:
    """Wait until an event of ``kind`` tells that the request is legal. Raises what refuses it."""
    async for event in events:
        if isinstance(event, kind):
            return


def gone() -> Response:
    return Response(status_code=CLIENT_GONE)


def sse(data: Mapping[str, Any] | str, event: str | None = None) -> str:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event}\ndata: {text}\n\n" if event else f"data: {text}\n\n"
