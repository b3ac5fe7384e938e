"""Limits on connections that send no whole request, or read no answer: uvicorn has none.

A connection without a request in progress waits a limited time for the head of one, from its start or from the first
byte of the next head; between requests, the keep-alive time of uvicorn holds.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Mapping
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

# Longest time from a connection, or the first byte of a next head, to the end of the head.
HEAD_SECONDS = 10.0
# Longest time in which a client takes no byte of an answer that waits for it.
READ_SECONDS = 60.0
# Time of requests in progress to end when the gateway stops.
GRACE_SECONDS = 30
# Longer than clients and balancers keep an idle connection, which they would otherwise use as it is closed.
KEEP_ALIVE_SECONDS = 75
# Open files for all but connections of clients: the server's, logs, the listening socket.
_RESERVED_FILES = 64


def default_max_connections() -> int:
    """Return the number of connections for which the process may have open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(files - _RESERVED_FILES, 1) if files != resource.RLIM_INFINITY else 1 << 16


class LimitedConnection(H11Protocol):
    """A connection that is closed when its client makes it wait.

    Attributes:
        max_connections: most connections of the process; above it, the connection that is idle for the longest time
            is closed, or the new one if all have a request in progress.
        idle: connections without a request in progress, those that are idle longest first.
    """

    max_connections = default_max_connections()
    idle: ClassVar[dict[LimitedConnection, None]] = {}
    _waiting_for_head: asyncio.TimerHandle | None = None
    _waiting_for_reader: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a head."""
        super().connection_made(transport)
        self.idle[self] = None
        if len(self.connections) > self.max_connections:
            # the last one is this one
            next(iter(self.idle)).close_now()
        if not transport.is_closing():
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request, and wait for the end of its head."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop("_waiting_for_head")
            self.idle.pop(self, None)
        elif self._waiting_for_head is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all waits."""
        self.idle.pop(self, None)
        self._stop("_waiting_for_head")
        self._stop("_waiting_for_reader")
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Count the connection as idle, unless a next request has come."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.idle[self] = None

    def close_now(self) -> None:
        """Close the connection, whatever it waits for."""
        self.idle.pop(self, None)
        self.transport.abort()

    def pause_writing(self) -> None:
        """Start to wait for the reader of the answer."""
        super().pause_writing()
        # a closed connection keeps its buffer until then
        self._waiting_for_reader = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the wait for the reader."""
        self._stop("_waiting_for_reader")
        super().resume_writing()

    def _wait_for_head(self) -> None:
        self._waiting_for_head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop(self, name: str) -> None:
        timer: Any = getattr(self, name)
        if timer is not None:
            timer.cancel()
        setattr(self, name, None)


UVICORN_OPTIONS: Mapping[str, Any] = {
    "http": LimitedConnection,
    "ws": "none",
    "access_log": False,
    "server_header": False,
    "timeout_graceful_shutdown": GRACE_SECONDS,
    "timeout_keep_alive": KEEP_ALIVE_SECONDS,
}
