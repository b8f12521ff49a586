"""Errors as OpenAI clients expect them: one shape on every path, {"error": {message, type, param, code}}."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from underpaint.errors import BadParameter, BadRequest, UnderpaintError

BODY_TOO_SLOW = 408
BODY_TOO_LARGE = 413
CLIENT_GONE = 499
"""What a request ends with when nobody is there to read the answer; seen only in logs and metrics."""

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class QueueFull(UnderpaintError):
    """As many requests wait as may wait."""

    code = "queue_full"
    status = 429

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class NotReady(UnderpaintError):
    """The server is warming up, draining, or broken."""

    code = "not_ready"
    status = 503
    retry_after = 5


CODES = {
    404: "not_found",
    405: "method_not_allowed",
    BODY_TOO_SLOW: "body_too_slow",
    BODY_TOO_LARGE: "body_too_large",
    CLIENT_GONE: "cancelled",
    QueueFull.status: QueueFull.code,
    NotReady.status: NotReady.code,
}
"""Of what the framework raises, and of what a body is refused for while it comes."""


class BadKey(UnderpaintError):
    code = "invalid_api_key"
    status = 401


class UnknownModel(BadRequest):
    code = "model_not_found"
    status = 404


class UnknownJob(UnderpaintError):
    code = "job_not_found"
    status = 404


class UnknownField(BadParameter):
    code = "unknown_parameter"


class MissingField(BadParameter):
    code = "missing_parameter"


def error_object(message: str, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: UnderpaintError) -> dict[str, Any]:
    """The body that answers ``error``."""
    param = error.param if isinstance(error, BadRequest) else None
    return error_object(str(error), error.status, error.code, param)


def error_headers(error: UnderpaintError) -> dict[str, str]:
    if isinstance(error, QueueFull | NotReady):
        return {"Retry-After": str(error.retry_after)}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, BadKey) else {}


def error_response(error: UnderpaintError) -> JSONResponse:
    return JSONResponse(error_body(error), error.status, error_headers(error))


def rename_param(error: UnderpaintError, names: Mapping[str, str]) -> UnderpaintError:
    """``error`` with its parameter called as the client called it."""
    if isinstance(error, BadRequest) and error.param is not None:
        error.param = names.get(error.param, error.param)
    return error


def field_error(errors: Sequence[Any]) -> BadParameter:
    """The first of pydantic's complaints as one sentence that names the field."""
    first = errors[0]
    # Parts in <> tell which form of a field was tried; they are no names.
    path = [str(part) for part in first["loc"] if part != "body" and not str(part).startswith("<")]
    name = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        return UnknownField(f"unknown parameter: {name}", param=name)
    if first["type"] == "missing":
        return MissingField(f"{name or 'the body'} is missing", param=name)
    if first["type"] == "json_invalid":
        return BadParameter(f"the body is not JSON: {first.get('ctx', {}).get('error', 'it cannot be read')}")
    message = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return BadParameter(f"{name or 'the body'}: {message}", param=name)


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    error: ErrorFields


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    "default": {
        "model": ErrorBody,
        "description": "400 a wrong request, 401 no key, 404 no such model, job or path, 408 a body too slow, 413 one "
        "too large, 429 a full queue (Retry-After), 500 a fault of the server, 503 not ready or out of memory, 504 out "
        "of time",
    }
}
"""Every answer that is not a success, for the OpenAPI document."""
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
"""The success of a route that may stream."""


def add_handlers(app: FastAPI) -> None:
    """Answer every error in the one shape, those of the framework too."""
    app.add_exception_handler(UnderpaintError, _of_ours)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _of_surprise)


async def _of_ours(_: Request, error: Exception) -> Response:
    assert isinstance(error, UnderpaintError)
    return error_response(error)


async def _of_validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(field_error(error.errors()))


async def _of_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = CODES.get(error.status_code, "bad_request")
    return JSONResponse(
        error_object(str(error.detail), error.status_code, code), error.status_code, dict(error.headers or {})
    )


async def _of_surprise(_: Request, error: Exception) -> Response:
    """A fault of the server itself; the log has the details, the client need not."""
    return JSONResponse(error_object("the server broke; its log says why", 500, UnderpaintError.code), 500)
