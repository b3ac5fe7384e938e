"""uvicorn's server and its protocol for the parser llhttp, with limits (decision 0089).

llhttp, the parser of Node.js, is in C and has no limits. It gets a piece of the bytes at a time, in turn with other
connections, and no body before the application reads it. A request that is refused before its body gets its answer at
once. The rest of its body is dropped without a parser while it comes fast, since most clients read no answer before
they have sent their body.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias

import httptools
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from varlen_client.gateway import GatewaySettings
from varlen_client.gateway.connections import (
    ACCEPTED_TOGETHER,
    LEFT,
    Connection,
    Connections,
    State,
)
from varlen_client.gateway.errors import error_response

# Time of requests in progress to end when the gateway stops.
GRACE_SECONDS = 30
# Longer than clients and balancers keep an idle connection, which they would otherwise use as it is closed.
_KEEP_ALIVE_SECONDS = 75
# Connections that wait to be accepted.
_QUEUED_CONNECTIONS = 2048

# Longest time from a connection, or the first byte of a next head, to the end of the head.
HEAD_SECONDS = 10.0
# Longest time in which a client takes no byte of an answer that waits for it, or not all of the end of its last one.
READ_SECONDS = 60.0
# Most bytes and fields of a head.
MAX_HEAD_BYTES = 64 << 10
MAX_FIELDS = 100
# Most bytes of a chunked body that are no content: sizes of chunks, extensions and trailers. A part of the content may
# be added.
MAX_FRAMING_BYTES = 256 << 10
_FRAMING_PART = 16
# Longest time in which the rest of a refused body is dropped, and its least bytes in each part of it.
DROP_SECONDS = 5.0
DROP_STEP_SECONDS = 0.5
_DROP_STEP_BYTES = 4 << 10

# New objects after which garbage is collected: few of them are in a cycle. A few requests have as many as Python's own
# number (decision 0150).
_NEW_OBJECTS = 10_000
# Bytes that are parsed in one step.
_PIECE_BYTES = 4 << 10
# Unparsed bytes of a connection above which nothing more is read from its socket.
_MAX_UNPARSED = 64 << 10
_HEALTH = b"GET /health "
_STATUS = b"HTTP/1.1 "


class GatewayServer(uvicorn.Server):
    """An HTTP server of one gateway; `options` are more options of uvicorn."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, **options: Any) -> None:
        connections = Connections(max_per_address=settings.max_connections_per_address)
        config = uvicorn.Config(
            app,
            http=partial(LimitedConnection, connections),  # type: ignore[arg-type]
            ws="none",
            access_log=False,
            server_header=False,
            backlog=ACCEPTED_TOGETHER,
            timeout_graceful_shutdown=GRACE_SECONDS,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            **options,
        )
        super().__init__(config)
        self._is_alone = False

    def run_alone(self, sockets: list[socket.socket] | None = None) -> None:
        """Run alone in a process: collections are few, and visit no imported module."""
        self._is_alone = True
        self.run(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; a connection that has not ended within the grace period is closed."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.close_now()  # type: ignore[union-attr]
        await asyncio.sleep(0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; more connections may wait than asyncio accepts in one turn of its loop."""
        await super().startup(sockets)
        if self._is_alone:
            # Not before uvicorn handles signals: what their handlers raise is lost in a collection.
            gc.collect()
            gc.freeze()
            gc.set_threshold(_NEW_OBJECTS)
        for listener in (each for server in self.servers for each in server.sockets):
            with socket.socket(fileno=os.dup(listener.fileno())) as same:
                same.listen(_QUEUED_CONNECTIONS)


# What a connection waits for: the end of a head, a reader of an answer, more of a refused body, or its own end.
_Wait: TypeAlias = Literal["head", "reader", "drop", "close"]


class _Refused(Exception):  # noqa: N818 - the client's error
    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        error_type = "server_error" if status == 503 else "invalid_request_error"
        self.response = error_response(status, message, error_type, code=code)


class _Gate:
    """The transport that uvicorn gets; the connection decides about closing and reading.

    The head of an answer leaves with what is written behind it in the same turn of the loop: a send to the socket takes
    as long as a small route.
    """

    def __init__(self, connection: LimitedConnection, transport: asyncio.Transport) -> None:
        self._connection, self._transport, self._head = connection, transport, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(_STATUS):
            self._head = data
            self._connection.loop.call_soon(self.flush)
        else:
            self.flush(data)

    def flush(self, data: bytes = b"") -> None:
        """Send what is held, and these bytes."""
        if data := self._head + data:
            self._head = b""
            self._transport.write(data)

    def close(self) -> None:
        self._connection.end()

    def is_closing(self) -> bool:
        return self._connection.is_over or self._transport.is_closing()

    def pause_reading(self) -> None:
        """Parse nothing more; a client that leaves is seen nevertheless."""

    def resume_reading(self) -> None:
        self._connection.parse_later()


class LimitedConnection(HttpToolsProtocol, Connection):
    """A connection whose client cannot make it wait, or work, for long."""

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        # whether the rest of what the client sends is dropped
        self.is_over = False
        self._all = connections
        self._socket: asyncio.Transport = None  # type: ignore[assignment]
        self._unparsed = bytearray()
        self._running: RequestResponseCycle | None = None
        self._has_head = self._is_refused = False
        self._fields = self._message_bytes = self._dropped = 0
        self._timers: dict[_Wait, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a head."""
        self._socket = transport
        self._gate = _Gate(self, transport)
        super().connection_made(self._gate)  # type: ignore[arg-type]
        self.address = _network(self.client[0] if self.client else "")
        self._all.add(self)
        self._start("head", HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Take bytes, which are parsed in turn with other connections."""
        if self.is_over:
            self._dropped += len(data)
            self._socket.pause_reading()
            self._all.drop_later(self, self.loop)
            return
        self._unset_keepalive_if_required()
        self._unparsed += data
        if self._in_progress() is None:
            if "head" not in self._timers:
                self._start("head", HEAD_SECONDS)
            if data.startswith(_HEALTH) and len(self._unparsed) == len(data):
                # in front of all others
                self.parse_piece()
        if self._may_parse():
            self._all.parse(self, self.loop, at_once=True)
        if len(self._unparsed) > _MAX_UNPARSED:
            self._socket.pause_reading()

    def parse_later(self) -> None:
        """Parse the bytes that have come."""
        if self._may_parse():
            self._all.parse(self, self.loop)

    def parse_piece(self) -> bool:
        """Parse some bytes; return whether there are more to parse now."""
        if not self._may_parse():
            return False
        piece = bytes(self._unparsed[:_PIECE_BYTES])
        del self._unparsed[:_PIECE_BYTES]
        try:
            self._parse(piece)
        except BaseException:
            # a defect here must not be reached again
            self.close_now()
            raise
        if len(self._unparsed) <= _MAX_UNPARSED:
            self._socket.resume_reading()
        if self._in_progress() is not None:
            self._stop("head")
        self._update_state()
        return self._may_parse()

    def read_more(self) -> None:
        """Read more bytes, which are dropped."""
        self._socket.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all waits, and tell the request in progress."""
        self._all.remove(self)
        for name in list(self._timers):
            self._stop(name)
        self._unset_keepalive_if_required()
        self.is_over = True
        self._unparsed.clear()
        if (running := self._in_progress()) is not None:
            # which need not be the last one that has come
            _disconnect(running)
        super().connection_lost(exc)

    def close_now(self) -> None:
        """Close the connection, whatever it waits for."""
        self._socket.abort()

    def end(self) -> None:
        """Close the connection after what is written; the rest of an unread request is dropped."""
        if self.is_over:
            return
        self._gate.flush()
        self.is_over = True
        has_more = self._running is not None and self._running.more_body
        has_rest = self._is_refused or has_more or bool(self._unparsed)
        if not has_rest or not self._socket.can_write_eof():
            self._all.put(self, "stuck")
            self._close()
            return
        self._unparsed.clear()
        self._all.put(self, "closing")
        self._stop("head")
        self._socket.resume_reading()
        try:
            self._socket.write_eof()
        except OSError:
            # the client has left
            self._socket.abort()
        self._drop_until(self.loop.time() + DROP_SECONDS)

    def pause_writing(self) -> None:
        """Start to wait for the reader of the answer."""
        super().pause_writing()
        # a closed connection keeps its buffer until then
        self._start("reader", READ_SECONDS)
        self._update_state()

    def resume_writing(self) -> None:
        """Stop the wait for the reader."""
        self._stop("reader")
        super().resume_writing()
        self._update_state()

    def on_message_begin(self) -> None:
        """Begin to count what a request has."""
        super().on_message_begin()
        self._has_head = False
        self._fields = self._message_bytes = self.body_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a field of the head; those behind the body are dropped."""
        self._fields += 1
        if self._fields > MAX_FIELDS:
            message = f"the request has more than {MAX_FIELDS} header fields; send fewer"
            raise _Refused(431, message, "head_too_large")
        if not self._has_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start a request, whose body is parsed once the application reads it."""
        self._has_head = True
        if self.parser.should_upgrade():
            # the parser stops here
            return
        # it may have come while the request before it was answered
        self._unset_keepalive_if_required()
        version = self.parser.get_http_version()
        self._check_head(version)
        if version == "1.0":
            self.expect_100_continue = False
        is_next = self._in_progress() is None
        super().on_headers_complete()
        if is_next:
            self._running = self.cycle
        if version == "1.0":
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[assignment,method-assign]
        if self.is_extra:
            self.cycle.keep_alive = False
        self.flow.pause_reading()
        self.body_began = time.monotonic()

    def on_body(self, body: bytes) -> None:
        """Count bytes of the body and keep them."""
        self.body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        following = self.pipeline[-1][0] if self.pipeline else None
        if self._running is not None and self._running.more_body:
            # the application has not read the body
            self.end()
        super().on_response_complete()
        if self.is_over:
            return
        self._running = following or self._running
        self._update_state()
        self.parse_later()

    def _check_head(self, version: str) -> None:
        """Raise _Refused if the head is not HTTP/1.1, or may be read in two ways."""
        if version not in ("1.0", "1.1"):
            raise _Refused(505, f"the request has HTTP/{version}; send HTTP/1.1")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (version == "1.1" and not hosts):
            raise _Refused(400, f"the request has {hosts} Host headers; send one")
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and codings != [b"chunked"]:
            raise _Refused(501, "the request has another Transfer-Encoding than chunked")
        if self.is_extra and self.url.partition(b"?")[0] != b"/health":
            message = "the gateway has its most connections; send the request later"
            raise _Refused(503, message, "unavailable")

    def _parse(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
            self._message_bytes += len(piece)
            self._check_size()
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            refused = error.__context__
            if not isinstance(refused, _Refused):
                refused = _Refused(400, "the target of the request cannot be read")
            self._refuse(refused.response)
        except httptools.HttpParserError as error:
            message = f"the request cannot be read as HTTP/1.1: {error}"
            self._refuse(_Refused(400, message, "invalid_http").response)
        except _Refused as refused:
            self._refuse(refused.response)

    def _check_size(self) -> None:
        """Raise _Refused if a head, or the framing of a body, has too many bytes."""
        others = self._message_bytes - self.body_bytes
        if not self._has_head and others > MAX_HEAD_BYTES:
            message = f"the head of the request has more than {MAX_HEAD_BYTES} bytes; send fewer"
            raise _Refused(431, message, "head_too_large")
        if others > MAX_HEAD_BYTES + MAX_FRAMING_BYTES + self.body_bytes // _FRAMING_PART:
            raise _Refused(400, "the body has too many small chunks; send larger ones", "chunks")

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Read the request as if it did not ask for another protocol."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(error_response(405, "CONNECT: method not allowed"))
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        self._unparsed[:0] = b"\r\n".join(lines) + b"\r\n\r\n" + rest
        self.parser = httptools.HttpRequestParser(self)

    def _refuse(self, response: Response) -> None:
        """Answer a request that cannot be read, after the requests before it, and close."""
        self._is_refused, running = True, self._in_progress()
        if running is not None and (running is not self.cycle or not running.more_body):
            running.keep_alive = False
            self.pipeline.clear()
            self._unparsed.clear()
            self.parser = None  # type: ignore[assignment]
            return
        if running is None or not running.response_started:
            lines = [STATUS_LINE[response.status_code].rstrip()]
            fields = [*self.server_state.default_headers, *response.raw_headers]
            lines += [b"%s: %s" % field for field in (*fields, (b"connection", b"close"))]
            self._socket.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body))
        if running is not None:
            _disconnect(running)
        self.end()

    def _may_parse(self) -> bool:
        is_wanted = not self.flow.read_paused and not self.pipeline
        return bool(self._unparsed) and is_wanted and not self.is_over and self.parser is not None

    def _in_progress(self) -> RequestResponseCycle | None:
        """Return the request that is being answered, if there is one."""
        running = self._running
        return None if running is None or running.response_complete else running

    def _update_state(self) -> None:
        if self.is_over:
            return
        state: State = "idle"
        if (running := self._in_progress()) is not None:
            state = "body" if running.more_body else "running"
            state = "stuck" if self.flow.write_paused else state
        self._all.put(self, state)

    def _drop_until(self, end: float) -> None:
        """Drop what comes for as long as it comes fast."""

        def check() -> None:
            is_fast, self._dropped = self._dropped >= _DROP_STEP_BYTES, 0
            if is_fast and self.loop.time() < end:
                self._start("drop", DROP_STEP_SECONDS, check)
            else:
                self._close()

        self._start("drop", DROP_STEP_SECONDS, check)

    def _close(self) -> None:
        """Close the connection once its client has taken the answer, which has a longest time."""
        self._socket.close()
        self._start("close", READ_SECONDS)

    def _start(self, name: _Wait, seconds: float, then: Callable[[], None] | None = None) -> None:
        """Wait for the client; without `then`, the connection is aborted after this time."""
        self._timers[name] = self.loop.call_later(seconds, then or self._socket.abort)

    def _stop(self, name: _Wait) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


def _without_chunks(cycle: RequestResponseCycle) -> Send:
    """Return a `send` for HTTP/1.0: an answer without length ends with its connection."""
    send, has_length = cycle.send, False

    async def send_without_chunks(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            # uvicorn adds no header of its own to an answer that is known to have chunks
            cycle.chunked_encoding = None if has_length else True
        elif not has_length:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]

    return send_without_chunks


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell the application that its client has left."""
    cycle.disconnected = True
    cycle.message_event.set()
    leave = cycle.scope.get(LEFT)
    if callable(leave):
        leave()


@lru_cache(1024)
def _network(address: str) -> str:
    """Return the address of a client; of IPv6, its network of 64 bits."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return address
    return str(ip.ipv4_mapped or ipaddress.ip_network((int(ip), 64), strict=False))
