"""ASGI middleware: what every request passes before it reaches its route.

It checks the API key, the number of requests and the size of the body, counts the request, passes its trace context on,
and cancels its work when the client leaves. Cancelling the work cancels the request at the server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.connections import BODY_RATE, LEFT
from varlen_client.gateway.errors import error_response, overload_response
from varlen_client.gateway.forms import FILES_PATH, MAX_FORM_BYTES
from varlen_client.gateway.front import shows_page
from varlen_client.gateway.metrics import CLIENT_LEFT, GatewayMetrics
from varlen_client.gateway.models import IN_PROCESS, TENANT, tenant_of
from varlen_client.transport.transport import trace_context

# Probes have no key, and the reference of routes is no secret. Neither is the page of `/`.
_OPEN_PATHS = frozenset({"/health", "/docs", "/openapi.json"})

# Longest time in which a body comes; until then it holds the place of a request. In each part of it a body that is not
# complete has to come at its least rate.
_BODY_SECONDS = 60.0
_BODY_STEP_SECONDS = 10.0
# Time to read the end of an answer, behind the time of its request.
_LAST_SECONDS = 60.0


class _ClientLeft(Exception):  # noqa: N818 - it is no failure
    pass


class _TooLate(Exception):  # noqa: N818 - the client's error
    pass


class Edge:
    """The middleware of one gateway."""

    def __init__(
        self,
        app: ASGIApp,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        name_path: Callable[[str], str],
    ) -> None:
        self._app = app
        self._tenants = {
            encoded: tenant_of(key) for key in settings.api_keys for encoded in _encoded(key)
        }
        self._seconds = settings.timeout_seconds + _LAST_SECONDS
        self._max_body_bytes = settings.max_body_bytes
        self._max_requests = settings.max_requests
        self._metrics = metrics
        self._name_path = name_path
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False
        with self._metrics.request(self._name_path(scope["path"])) as observed:

            async def send_and_observe(message: Message) -> None:
                nonlocal has_begun
                if message["type"] == "http.response.start":
                    observed.status, has_begun = message["status"], True
                await send(message)

            try:
                await self._pass(scope, receive, send_and_observe)
            except _ClientLeft:
                observed.status = CLIENT_LEFT
            except _TooLate:
                # an answer that has begun ends without its end
                if not has_begun:
                    message = "the answer was not complete in time"
                    late = error_response(504, message, "server_error", code="timeout")
                    await late(scope, receive, send_and_observe)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, _closing(send) if _has_body(scope) else send)
        elif scope["method"] != "POST":
            await self._app(scope, receive, _closing(send) if _has_body(scope) else send)
        elif scope["path"] == FILES_PATH:
            self._in_flight += 1
            try:
                # the route reads the file as it comes
                await self._app(scope, receive, _closing(send))
            except ClientDisconnect:
                raise _ClientLeft from None
            finally:
                self._in_flight -= 1
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body of a request, and run its route."""
        self._in_flight += 1
        try:
            body = await self._body_or_error(receive)
            if isinstance(body, bytes):
                await self._run(scope, body, send)
                return
        finally:
            self._in_flight -= 1
        await body(scope, receive, _closing(send))

    def _refusal(self, scope: Scope) -> Response | None:
        """Return why a request is refused before its body is read, if it is."""
        TENANT.set(self._tenant(scope))
        is_open = scope["path"] in _OPEN_PATHS or shows_page(scope)
        if self._tenants and not is_open and TENANT.get() is None:
            return error_response(
                401,
                "the request has no valid API key; send the header Authorization: Bearer KEY",
                "authentication_error",
                code="invalid_api_key",
            )
        # the connection has checked that it is a number
        most = MAX_FORM_BYTES if scope["path"] == FILES_PATH else self._max_body_bytes
        if int(Headers(scope=scope).get("content-length", "0")) > most:
            return self._too_large(most)
        if scope["method"] == "POST" and self._in_flight >= self._max_requests:
            message = f"the gateway has {self._max_requests} requests, and takes no more now"
            return overload_response(scope["path"], message)
        return None

    def _too_large(self, most: int) -> Response:
        # of a file, the limit is none of the gateway's options
        remedy = " (--max-body-bytes)" if most == self._max_body_bytes else ""
        message = f"the body is larger than {most} bytes{remedy}"
        return error_response(413, message, code="body_too_large")

    def _tenant(self, scope: Scope) -> str | None:
        """Return the tenant of the request's API key; None without a valid key."""
        if IN_PROCESS in scope:
            return str(scope[IN_PROCESS])
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # all keys are compared, so that the time does not tell which one is close
        matches = [
            tenant
            for each, tenant in self._tenants.items()
            if secrets.compare_digest(key.strip(), each)
        ]
        return matches[0] if matches and scheme.lower() == b"bearer" else None

    async def _body_or_error(self, receive: Receive) -> bytes | Response:
        """Return the body of a request, or why it is not read to its end."""
        body, before, steps, is_slow = bytearray(), 0, 0, False
        stop, loop = _canceller(), asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        # not by its own name: the cycle would keep the body until garbage is collected
        def check(again: Callable[..., None]) -> None:
            nonlocal before, steps, is_slow, timer
            steps += 1
            is_last = steps == round(_BODY_SECONDS / _BODY_STEP_SECONDS)
            is_slow = is_last or len(body) - before < BODY_RATE * _BODY_STEP_SECONDS
            before = len(body)
            if is_slow:
                stop()
            else:
                timer = loop.call_later(_BODY_STEP_SECONDS, again, again)

        timer = loop.call_later(_BODY_STEP_SECONDS, check, check)
        try:
            is_large = await self._read_body(receive, body)
            return self._too_large(self._max_body_bytes) if is_large else bytes(body)
        except asyncio.CancelledError:
            if not is_slow:
                raise
        finally:
            timer.cancel()
        limit = (
            f"the body came too slowly; allowed: {BODY_RATE} bytes each second or more,"
            f" and up to {_BODY_SECONDS:g} s"
        )
        return error_response(408, limit, code="body_too_slow")

    async def _read_body(self, receive: Receive, body: bytearray) -> bool:
        """Append what comes to the body until its end; return whether it is too large."""
        while len(body) <= self._max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeft
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        return len(body) > self._max_body_bytes

    async def _run(self, scope: Scope, body: bytes, send: Send) -> None:
        """Run the route; cancel it when the client leaves or reads too slowly.

        It runs in this task: each task of its own costs as much as reading a small body.
        """
        messages: list[Message] = [{"type": "http.request", "body": body}]

        async def replay() -> Message:
            if messages:
                return messages.pop()
            # the disconnect is seen here, not in the route
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        headers = Headers(scope=scope)
        stop, why = _canceller(), list[type[Exception]]()

        def end(reason: type[Exception]) -> None:
            if not why:
                why.append(reason)
                stop()

        scope[LEFT] = partial(end, _ClientLeft)
        late = asyncio.get_running_loop().call_later(self._seconds, end, _TooLate)
        try:
            with trace_context(headers.getlist("traceparent"), headers.getlist("tracestate")):
                await self._app(scope, replay, send)
        except asyncio.CancelledError:
            if not why:
                raise
            raise why[0] from None
        finally:
            # nothing ends this task from here on
            why.append(_ClientLeft)
            late.cancel()


def _canceller() -> Callable[[], object]:
    """Return a function that cancels the task that runs now."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


def _encoded(key: str) -> list[bytes]:
    """Return the bytes of an API key in UTF-8 and, if possible, in Latin-1."""
    found = [key.encode()]
    try:
        latin = key.encode("latin-1")
    except UnicodeEncodeError:
        return found
    return found if latin in found else [*found, latin]


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _closing(send: Send) -> Send:
    """Return a `send` that closes the connection: the rest of the body is not read."""

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["Connection"] = "close"
        await send(message)

    return send_and_close
