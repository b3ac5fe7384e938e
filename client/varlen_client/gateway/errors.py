"""Errors in the shape of OpenAI's, and their statuses.

Messages about a request come from the checks of the gateway, the client or the backend, and name neither paths nor
addresses. Other failures get a fixed message; the log has theirs.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from varlen_client.errors import (
    DeadlineMissed,
    InvalidRequest,
    ModelNotFound,
    ModelProcessEnded,
    ModelUnloaded,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
    VarlenClientError,
)
from varlen_client.gateway.bodies import REFUSED_FIELD

_LOG = logging.getLogger("varlen.gateway")

_BUSY = "the server cannot accept the request now; send it later"
_ENDED = (
    "the model's process has ended or does not respond; its operator has to load the model again"
)
_UNLOADED = "the server has unloaded the model, or is being stopped"
_LATE = "the answer was not complete in time"
_FAILED = "the server failed; the gateway's log has the reason"

# Paths whose clients read TEI's errors of overload.
_TEI_PATHS = frozenset(
    ("/", "/embed", "/embed_sparse", "/embed_all", "/similarity", "/predict", "/rerank", "/decode")
)

# Characters.
_MAX_MESSAGE = 2000
_MAX_PARAM = 200

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 60


@dataclass(frozen=True, slots=True)
class _Kind:
    """Status, type and code of an error; without `message`, the error's own is sent."""

    status: int
    type: str
    code: str | None = None
    message: str | None = None


_KINDS: Mapping[type[VarlenClientError], _Kind] = {
    InvalidRequest: _Kind(400, "invalid_request_error"),
    ModelNotFound: _Kind(404, "invalid_request_error", "model_not_found"),
    # a server that is being stopped says it too
    ModelUnloaded: _Kind(503, "server_error", "unavailable", _UNLOADED),
    ServerUnavailable: _Kind(503, "server_error", "unavailable", _BUSY),
    ModelProcessEnded: _Kind(503, "server_error", "model_process_ended", _ENDED),
    RequestCancelled: _Kind(503, "server_error", "unavailable", _BUSY),
    DeadlineMissed: _Kind(504, "server_error", "timeout", _LATE),
    RequestTimeout: _Kind(504, "server_error", "timeout", _LATE),
    ServerError: _Kind(502, "server_error", "server_failed", _FAILED),
}


def error_body(
    message: str, error_type: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error; the middle of a long message is left out."""
    message = _cut(message, _MAX_MESSAGE)
    param = None if param is None else _cut(param, _MAX_PARAM)
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def _cut(text: str, most: int) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]}"


def error_response(
    status: int,
    message: str,
    error_type: str = "invalid_request_error",
    *,
    param: str | None = None,
    code: str | None = None,
) -> Response:
    """Return an error; a status of 503 asks clients to wait a second."""
    headers = {"Retry-After": "1"} if status == 503 else None
    body = error_body(message, error_type, param=param, code=code)
    return JSONResponse(body, status, headers)


def overload_response(path: str, message: str) -> Response:
    """Return the refusal of a request without a place, in the form of its path."""
    if path in _TEI_PATHS:
        body = {"error": message, "error_type": "Overloaded"}
        return JSONResponse(body, 429, {"Retry-After": "1"})
    return error_response(503, message, "server_error", code="unavailable")


def client_error_body(error: VarlenClientError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error; failures of the server are logged."""
    kind = _KINDS.get(type(error), _KINDS[ServerError])
    if kind.message is not None:
        _LOG.warning("%s: %s", type(error).__name__, error)
    return kind.status, error_body(kind.message or str(error), kind.type, code=kind.code)


def add_error_handlers(app: FastAPI, is_healthy: Callable[[], Awaitable[bool]]) -> None:
    """Answer every error in OpenAI's shape, except TEI's of overload.

    Args:
        is_healthy: function that returns whether the server is ready, and so a refusal is for its load.
    """

    @app.exception_handler(VarlenClientError)
    async def of_client(request: Request, error: VarlenClientError) -> Response:
        status, body = client_error_body(error)
        path = request.url.path
        if type(error) is ServerUnavailable and path in _TEI_PATHS and await is_healthy():
            return overload_response(path, _BUSY)
        return JSONResponse(body, status, {"Retry-After": "1"} if status == 503 else None)

    @app.exception_handler(RequestValidationError)
    async def of_body(_: Request, error: RequestValidationError) -> Response:
        param, message = describe(error)
        return error_response(400, message, param=param)

    @app.exception_handler(HTTPException)
    async def of_route(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400:
            # of FastAPI: a body that is not even text
            return error_response(400, "the body cannot be read; send JSON in UTF-8")
        what = f"{request.method} {request.url.path}"
        response = error_response(error.status_code, f"{what}: {str(error.detail).lower()}")
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            # a path may have several routes
            response.headers["Allow"] = ", ".join(_methods_of(request.app, request.url.path))
        return response

    @app.exception_handler(Exception)
    async def of_bug(_: Request, __: Exception) -> Response:
        # uvicorn logs it with its traceback
        return bug_response()


def bug_response() -> Response:
    """Return the answer to a request at which the gateway has failed."""
    return error_response(500, "the gateway failed; its log has the reason", "server_error")


def _methods_of(app: FastAPI, path: str) -> list[str]:
    """Return the methods of the routes of a path."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    found = {
        each for route in routes if route.path_regex.match(path) for each in route.methods or ()
    }
    return sorted(found)


def describe(error: RequestValidationError) -> tuple[str | None, str]:
    """Return the first wrong field, and what is wrong with it."""
    errors = error.errors()
    first = errors[0]
    location = first["loc"][1:]
    if first["type"] == REFUSED_FIELD:
        name = ".".join(map(str, [*_wrong_value(error.body, location)[0], first["ctx"]["name"]]))
        return name, f"{_shortened.repr(name)[1:-1]} {first['ctx']['why']}"
    if not location:
        if isinstance(error.body, bytes):
            # FastAPI reads JSON only with this header; plain `curl -d` sends another
            return None, "the body is not read; send the header Content-Type: application/json"
        if isinstance(error.body, dict):
            return None, first["msg"]
        given = "empty" if error.body is None else _shortened.repr(error.body)
        return None, f"the body is {given}; send a JSON object"
    path, value = _wrong_value(error.body, location)
    # a null counts as missing
    if first["type"] == "missing" and len(path) < len(location):
        path.append(location[-1])
    name = ".".join(map(str, path))
    is_always_empty = first["type"] == "too_long" and first["ctx"]["max_length"] == 0
    if is_always_empty:
        return name, f"{name} is not supported"
    given, same = "", [first]
    if first["type"] != "missing":
        given = f" is {_shortened.repr(value)}"
        # a field of several types has an error for each
        same = [each for each in errors if list(each["loc"][1 : 1 + len(path)]) == path]
    reasons = "; ".join(dict.fromkeys(each["msg"] for each in same))
    return name, f"{name}{given}: {reasons}"


def _wrong_value(body: Any, location: Sequence[str | int]) -> tuple[list[str | int], Any]:
    """Return the path of a wrong value in the body, and the value.

    In the location of a field of several types, the names of types come after names of the body.
    """
    path: list[str | int] = []
    for part in location:
        try:
            body = body[part]
        except (LookupError, TypeError):
            break
        path.append(part)
    return path, body
