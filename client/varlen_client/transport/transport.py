"""The interface of the gRPC and HTTP transports, which are based on tritonclient's asyncio clients.

A transport sends each request once: retries and timeouts are above it. It raises only the errors of
errors.py. Cancelling its task cancels the request in flight.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from varlen_client.errors import (
    DeadlineMissed,
    InvalidRequest,
    ModelNotFound,
    ModelProcessEnded,
    ModelUnloaded,
    RequestCancelled,
    ServerError,
    ServerUnavailable,
    VarlenClientError,
)
from varlen_client.generation import GenerateRequest, Response
from varlen_client.wire import Arrays, InferRequest, ModelState


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """Name and version of the server, as it reports them."""

    name: str
    version: str


class Transport(Protocol):
    """One connection (or pool of connections) to one server, owned by one event loop."""

    async def server_ready(self) -> bool:
        """Return whether the server is ready for requests."""

    async def model_ready(self, model: str) -> bool:
        """Return whether the model is ready for requests."""

    async def server_identity(self) -> ServerIdentity:
        """Return the server's name and version."""

    async def models(self) -> list[ModelState]:
        """Return the state of each model in the server's repository index."""

    async def model_config(self, model: str) -> Mapping[str, object]:
        """Return the model's config in its JSON form."""

    async def infer(self, model: str, request: InferRequest) -> Arrays:
        """Return the requested outputs."""

    def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[Response, None]:
        """Send the request, and return its responses as they come; closing it cancels the request."""

    async def close(self) -> None:
        """Close the connections."""


# The errors of a stream have no status, so the backend writes it before the message.
_STREAM_ERRORS: dict[str, type[VarlenClientError]] = {
    "INVALID_ARG": InvalidRequest,
    "UNAVAILABLE": ServerUnavailable,
    "CANCELLED": RequestCancelled,
    "INTERNAL": ServerError,
}
# What the server says of a model that it does not have, or not any more.
_UNKNOWN_MODEL = "Request for unknown model"
# What it says of a model that it has unloaded, also after SIGTERM (server 2.51).
_UNLOADED_MODEL = "has no available versions"
# What its python backend says when the process of a model does not take a request.
_ENDED_PROCESS = re.compile(r"Stub process '(.*)' is not healthy|Failed to obtain the health mutex")


def server_error(
    text: str | None, status: str | None, errors: Mapping[str, type[VarlenClientError]]
) -> VarlenClientError:
    """Return the error of a response; `errors` has one per status of the transport."""
    if not text:
        return ServerError(f"the server failed without a message ({status})")
    message = re.sub(r"^\[request id: [^\]]*\] ", "", text)
    if ended := _ENDED_PROCESS.match(message):
        return _process_ended(ended[1])
    error_type = errors.get(status or "", ServerError)
    code, colon, rest = message.partition(": ")
    if colon and code in _STREAM_ERRORS:
        error_type, message = _STREAM_ERRORS[code], rest
    # a missed deadline has the same status as a full queue
    if error_type is ServerUnavailable and message.startswith("deadline missed: "):
        error_type = DeadlineMissed
    # the server has no code for it in a stream, and some versions have status 400
    if message.startswith(_UNKNOWN_MODEL):
        error_type = ModelNotFound
    if error_type is ModelNotFound and _UNLOADED_MODEL in message:
        error_type = ModelUnloaded
    return error_type(message)


def _process_ended(instance: str | None) -> ModelProcessEnded:
    """Return the error of a request to a model whose process has ended."""
    named = "the model's process" if instance is None else f"the process of {instance}"
    return ModelProcessEnded(
        f"{named} has ended or does not respond: unload and load the model, or restart the server"
    )


# Version, trace id, parent id and flags; ids of zeros are invalid.
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
# At least so much has to be passed on, and the server limits all headers together.
_STATE = re.compile(r"[ -~]{1,512}")

_headers: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("trace_headers", default=())


@contextmanager
def trace_context(parents: Sequence[str], states: Sequence[str]) -> Iterator[None]:
    """Give the requests made inside the context in these headers of a caller.

    Args:
        parents: values of the header traceparent. Unless it is one valid value, nothing is passed on.
        states: values of the header tracestate, whose list may be split over several.
    """
    headers: dict[str, str] = {}
    if len(parents) == 1 and _PARENT.fullmatch(parents[0]):
        headers["traceparent"] = parents[0]
        state = ",".join(states)
        if _STATE.fullmatch(state):
            headers["tracestate"] = state
    token = _headers.set(tuple(headers.items()))
    try:
        yield
    finally:
        _headers.reset(token)


def trace_headers() -> dict[str, str]:
    """Return the headers of a request that is sent now."""
    return dict(_headers.get())
