"""The gate before every route: request ids, the API key, limits of bodies, room at the desk, one log line a request."""

import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from underpaint.errors import UnderpaintError
from underpaint.server.body import Body, too_large
from underpaint.server.config import Kind
from underpaint.server.faults import BODY_TOO_LARGE, CLIENT_GONE, CODES, BadKey, error_object, error_response
from underpaint.server.site import Site
from underpaint.server.tracing import request_span, tell

API = "/v1/"
BROKEN = 500
WORK_PATHS: dict[str, tuple[Kind, ...]] = {
    "/v1/images/": ("painting",),
    "/v1/jobs": ("painting",),
    "/v1/chat/": ("text", "painting"),
    "/v1/responses": ("text", "painting"),
}
"""What may be asked for there."""


@dataclass(eq=False)
class Seen:
    """What goes into the log of one request. ``status`` stays 499 if no answer was begun."""

    id: str = field(default_factory=lambda: f"req_{secrets.token_hex(12)}")
    start: float = field(default_factory=time.monotonic)
    status: int = CLIENT_GONE


class Gate:
    """Plain ASGI, so that nothing stands between a handler and the news that its client is gone."""

    def __init__(self, app: ASGIApp, site: Site) -> None:
        self._app = app
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = Seen()
        if not scope["path"].startswith(API):
            await self._handle(scope, receive, send, seen)
            return
        with request_span(self._site.tracer, scope["method"], Headers(scope=scope)) as span:
            try:
                await self._handle(scope, receive, send, seen)
            finally:
                tell(span, scope["method"], endpoint_of(scope), seen.status, seen.id)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, seen: Seen) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = seen.id
            await send(message)

        kinds = kinds_of(scope)
        body = Body(receive, self._site.desk, kinds)
        try:
            refusal = self._refuse(scope, kinds)
            if refusal is None:
                await self._app(scope, body, answer)
            else:
                await refusal(scope, receive, answer)
        finally:
            body.close()
            if seen.status == CLIENT_GONE and isinstance(sys.exception(), Exception):
                seen.status = BROKEN  # what breaks here is answered outside of this gate
            self._tell(scope, seen, body.num_bytes)

    def _refuse(self, scope: Scope, kinds: Sequence[Kind]) -> JSONResponse | None:
        """An answer given before the body is read, or None."""
        headers, path = Headers(scope=scope), scope["path"]
        try:
            if path.startswith(API):
                self._check_key(headers)
            if kinds:
                self._site.desk.check_room(kinds)
        except UnderpaintError as error:
            return error_response(error)
        length, limit = headers.get("content-length", ""), self._site.config.max_body_bytes
        if length.isdecimal() and int(length) > limit:
            sentence = too_large(limit)
            return JSONResponse(error_object(sentence, BODY_TOO_LARGE, CODES[BODY_TOO_LARGE]), BODY_TOO_LARGE)
        return None

    def _check_key(self, headers: Headers) -> None:
        key = self._site.config.api_key
        if key is None:
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), key.encode()):
            raise BadKey("this server needs its API key: Authorization: Bearer KEY")

    def _tell(self, scope: Scope, seen: Seen, body_bytes: int) -> None:
        endpoint = endpoint_of(scope)
        self._site.metrics.requests.labels(endpoint, str(seen.status)).inc()
        self._site.log.info(
            "request",
            request=seen.id,
            method=scope["method"],
            endpoint=endpoint,
            status=seen.status,
            body_bytes=body_bytes,
            seconds=round(time.monotonic() - seen.start, 4),
        )


def kinds_of(scope: Scope) -> tuple[Kind, ...]:
    """Of the work that a request may ask for; none if it asks for none."""
    if scope["method"] == "POST":
        for beginning, kinds in WORK_PATHS.items():
            if scope["path"].startswith(beginning):
                return kinds
    return ()


def endpoint_of(scope: Scope) -> str:
    """The path of a request as its route has it, without the names in it."""
    route = scope.get("route")
    return "other" if route is None else str(route.path)
