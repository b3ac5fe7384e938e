"""ASGI middleware: what every request passes before it reaches its route.

It checks the API key, the number of requests and the size of the body, counts the request, passes its trace context on,
and cancels its work when the client leaves. Cancelling the work cancels the request at the server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from varlen_client.gateway.errors import error_response
from varlen_client.gateway.metrics import CLIENT_LEFT, GatewayMetrics
from varlen_client.gateway.settings import GatewaySettings
from varlen_client.transport.trace_context import trace_context
from varlen_client.waits import cancel_all

# Probes have no key, and the OpenAPI page is no secret.
_OPEN_PATHS = frozenset({"/health", "/docs", "/openapi.json"})

# Longest time in which a body comes; until then it holds the place of a request.
_BODY_SECONDS = 60.0


class _ClientLeft(Exception):  # noqa: N818 - it is no failure
    pass


class _BodyTooLarge(Exception):  # noqa: N818 - the client's error
    pass


class Edge:
    """The middleware of one gateway.

    Args:
        app: app that it passes requests to.
        settings: limits and keys of the gateway.
        metrics: counters of requests.
        paths: paths that metrics name; the others are counted together.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        paths: Collection[str],
    ) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in settings.api_keys)
        self._max_body_bytes = settings.max_body_bytes
        self._max_requests = settings.max_requests
        self._metrics = metrics
        self._paths = frozenset(paths)
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        with self._metrics.request(path if path in self._paths else "other") as observed:

            async def send_and_observe(message: Message) -> None:
                if message["type"] == "http.response.start":
                    observed.status = message["status"]
                await send(message)

            try:
                await self._pass(scope, receive, send_and_observe)
            except _ClientLeft:
                observed.status = CLIENT_LEFT

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            self._in_flight += 1
            try:
                body = await self._body_or_error(receive)
                if isinstance(body, Response):
                    # the rest of the body is not read
                    body.headers["Connection"] = "close"
                    await body(scope, receive, send)
                else:
                    await self._run(scope, body, receive, send)
            finally:
                self._in_flight -= 1

    def _refusal(self, scope: Scope) -> Response | None:
        """Return why a request is refused before its body is read, if it is."""
        if self._keys and scope["path"] not in _OPEN_PATHS and not self._has_key(scope):
            return error_response(
                401,
                "the request has no valid API key; send the header Authorization: Bearer KEY",
                "authentication_error",
                code="invalid_api_key",
            )
        if scope["method"] == "POST" and self._in_flight >= self._max_requests:
            message = f"the gateway has {self._max_requests} requests, and takes no more now"
            return error_response(503, message, "server_error", code="unavailable")
        return None

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode()
        # all keys are compared, so that the time does not tell which one is close
        matches = [secrets.compare_digest(given, each) for each in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    async def _body_or_error(self, receive: Receive) -> bytes | Response:
        """Return the body of a request, or why it is not read to its end."""
        try:
            return await asyncio.wait_for(self._read_body(receive), _BODY_SECONDS)
        except _BodyTooLarge:
            limit = f"the body is larger than {self._max_body_bytes} bytes"
            return error_response(413, limit, code="body_too_large")
        except asyncio.TimeoutError:
            limit = f"the body did not come within {_BODY_SECONDS:g} s"
            return error_response(408, limit, code="body_too_slow")

    async def _read_body(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeft
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                raise _BodyTooLarge
            if not message.get("more_body", False):
                return bytes(body)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the route, and cancel it when the client leaves."""
        messages: list[Message] = [{"type": "http.request", "body": body}]

        async def replay() -> Message:
            if messages:
                return messages.pop()
            # the disconnect is seen here, not in the route
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        async def wait_until_left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        headers = Headers(scope=scope)
        with trace_context(headers.getlist("traceparent"), headers.getlist("tracestate")):
            # the task keeps the context of its start
            route = asyncio.ensure_future(self._app(scope, replay, send))
        left = asyncio.ensure_future(wait_until_left())
        try:
            await asyncio.wait({route, left}, return_when=asyncio.FIRST_COMPLETED)
            if not route.done():
                raise _ClientLeft
            route.result()
        finally:
            await cancel_all([route, left])
